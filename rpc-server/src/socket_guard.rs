//! Guard of socket files: a process that removes the files of this one's Unix sockets if it is
//! killed.
//!
//! ```text
//! this process ── pipe: files made and removed ──> guard
//! ```
//!
//! The guard is this program, executed again when the first socket file is made; one guards all
//! files of the process. It knows the end of this process, however that comes, by the end of the
//! pipe. It removes a file only if the file is still the one that was made.
//!
//! The guard is no child of this process, whose children others count and wait for: the process in
//! between, which starts it, exits at once. It has a session of the kernel of its own, so that
//! signals of a terminal do not reach it, and keeps no descriptor but the pipe.

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, BufRead as _, BufReader, PipeWriter, Read as _, Write as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{self, Child, ChildStdout, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use parking_lot::Mutex;
use rpc_transports::program::Program;
use rpc_transports::self_start;
use rpc_transports::unix::{FileGuard, set_file_guard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::process::{Pid, setsid};
use serde::{Deserialize, Serialize};

/// First argument of a guard, and of the process that starts it.
const GUARD_ARGUMENT: &str = "--guard-socket-files";

/// Second argument of the guard itself.
const DETACHED: &str = "detached";

/// Time in which a guard starts, unless the system is stuck.
const START_LIMIT: Duration = Duration::from_secs(5);

/// True once `main` has called the hook.
static HOOKED: AtomicBool = AtomicBool::new(false);

/// The guard of this process, and the files that it guards.
static GUARDED: Mutex<Guarded> = Mutex::new(Guarded { guard: None, files: BTreeMap::new(), next: 0 });

/// Becomes a guard if the first arguments of this process ask for that, and exits then; otherwise
/// makes sure that socket files are guarded from now on. A part of the hooks of this crate.
pub(crate) fn run_if_asked(first: Option<&OsStr>, second: Option<&OsStr>) {
    if first.is_some_and(|first| first == GUARD_ARGUMENT) {
        self_start::hook_took_over();
        let outcome = match second {
            Some(second) if second == DETACHED => guard_files(),
            _ => start_detached(),
        };
        process::exit(i32::from(outcome.is_err()));
    }
    if !HOOKED.swap(true, Ordering::Relaxed) {
        set_file_guard(GuardProcess);
    }
}

/// Returns true if `pid` is the id of the guard of this process. Blocks shortly.
pub(crate) fn is_guard(pid: Pid) -> bool {
    GUARDED.lock().guard.as_ref().is_some_and(|guard| guard.pid == pid)
}

/// The guard, as listeners see it.
struct GuardProcess;

impl FileGuard for GuardProcess {
    fn prepare(&self) {
        GUARDED.lock().ensure_guard();
    }

    fn protect(&self, file: &Path) -> Box<dyn Any + Send + Sync> {
        let mut guarded = GUARDED.lock();
        let number = guarded.next;
        guarded.next += 1;
        // A file that is gone already needs no guard.
        if let Ok(file) = SocketFile::of(file) {
            guarded.files.insert(number, file.clone());
            guarded.send(&Message::Made { number, file });
        }
        Box::new(Protection { number })
    }
}

/// Protection of one file. Dropping it ends that.
struct Protection {
    number: u64,
}

impl Drop for Protection {
    fn drop(&mut self) {
        let mut guarded = GUARDED.lock();
        if guarded.files.remove(&self.number).is_some() {
            guarded.send(&Message::Removed { number: self.number });
        }
    }
}

struct Guarded {
    guard: Option<RunningGuard>,
    files: BTreeMap<u64, SocketFile>,
    next: u64,
}

struct RunningGuard {
    pid: Pid,
    pipe: PipeWriter,
}

impl Guarded {
    /// Starts the guard if there is none.
    fn ensure_guard(&mut self) {
        if self.guard.is_none() {
            match RunningGuard::start() {
                Ok(guard) => self.guard = Some(guard),
                Err(error) => {
                    rpc_core::log_limited!(WARN, %error, "socket files stay if this process is killed: no guard");
                }
            }
        }
    }

    /// Tells the guard of a change that has been made to `files`. A guard that has been killed is
    /// replaced.
    fn send(&mut self, message: &Message) {
        let sent = self.guard.as_ref().map(|guard| guard.send(message));
        if let Some(Ok(())) = sent {
            return;
        }
        self.guard = None;
        if self.files.is_empty() {
            return;
        }
        self.ensure_guard();
        let Some(guard) = &self.guard else { return };
        for (&number, file) in &self.files {
            if let Err(error) = guard.send(&Message::Made { number, file: file.clone() }) {
                rpc_core::log_limited!(WARN, %error, "a socket file stays if this process is killed");
            }
        }
    }
}

impl RunningGuard {
    fn start() -> io::Result<Self> {
        let (reader, pipe) = io::pipe()?;
        // A guard that does not run must not hold up this process.
        fcntl_setfl(&pipe, fcntl_getfl(&pipe)? | OFlags::NONBLOCK)?;
        let mut command = self_start::command(&Program::this())?;
        command.arg(GUARD_ARGUMENT).current_dir("/").process_group(0);
        command.stdin(reader).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut starter = command.spawn()?;
        let pid = starter.stdout.take().ok_or(io::ErrorKind::BrokenPipe.into()).and_then(pid_of_guard);
        if pid.is_err() {
            let _ = starter.kill();
        }
        reap(starter);
        Ok(Self { pid: pid?, pipe })
    }

    fn send(&self, message: &Message) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        // Lines are shorter than what a pipe takes whole or not at all.
        (&self.pipe).write_all(&line)
    }
}

/// Reads the id of the guard from the output of the process that has started it.
fn pid_of_guard(mut stdout: ChildStdout) -> io::Result<Pid> {
    let mut text = String::new();
    if poll(&mut [PollFd::new(&stdout, PollFlags::IN)], Timespec::try_from(START_LIMIT).ok().as_ref())? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    // The process writes once and exits, and the guard has another output.
    stdout.read_to_string(&mut text)?;
    let pid = text.trim().parse().ok().and_then(Pid::from_raw);
    pid.ok_or_else(|| io::Error::other("the guard of socket files does not start"))
}

/// Waits for the end of the process that has started the guard.
fn reap(mut starter: Child) {
    if let Err(error) = starter.wait() {
        tracing::debug!(%error, "the process that starts a guard cannot be reaped");
    }
}

/// Starts the guard as a process that is no child of the one to be guarded, and prints its id.
fn start_detached() -> io::Result<()> {
    // What the parent has inherited, such as the terminal of a shell, stays with the parent.
    rpc_transports::exec::close_inherited_descriptors();
    let mut command = self_start::command(&Program::this())?;
    command.args([GUARD_ARGUMENT, DETACHED]).stdin(Stdio::inherit()).stdout(Stdio::null()).stderr(Stdio::null());
    let guard = command.spawn()?;
    writeln!(io::stdout(), "{}", guard.id())
}

/// Removes the files that are there when the pipe ends.
fn guard_files() -> io::Result<()> {
    setsid()?;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let _ = rustix::thread::set_name(c"rpc-sock-guard");
    let mut files = BTreeMap::new();
    for line in BufReader::new(io::stdin()).split(b'\n') {
        // An incomplete last line is of a file whose listener never began.
        match line.map(|line| serde_json::from_slice(&line)) {
            Ok(Ok(Message::Made { number, file })) => _ = files.insert(number, file),
            Ok(Ok(Message::Removed { number })) => _ = files.remove(&number),
            Ok(Err(_)) | Err(_) => break,
        }
    }
    files.values().for_each(SocketFile::remove);
    Ok(())
}

/// Message to the guard.
#[derive(Debug, Serialize, Deserialize)]
enum Message {
    Made { number: u64, file: SocketFile },
    Removed { number: u64 },
}

/// A socket file, and what tells it from a later one with its path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SocketFile {
    path: Vec<u8>,
    device: u64,
    inode: u64,
    /// Time of its birth in seconds and nanoseconds, where the file system keeps that, or else of
    /// its last change. Inodes are used again.
    made: (i64, i64),
}

impl SocketFile {
    /// Returns the file that is at an absolute path.
    fn of(path: &Path) -> io::Result<Self> {
        let metadata = fs::symlink_metadata(path)?;
        let born = metadata.created().ok().and_then(|born| born.duration_since(UNIX_EPOCH).ok());
        let made = match born {
            Some(born) => (born.as_secs() as i64, i64::from(born.subsec_nanos())),
            None => (metadata.ctime(), metadata.ctime_nsec()),
        };
        let path = path.as_os_str().as_bytes().to_vec();
        Ok(Self { path, device: metadata.dev(), inode: metadata.ino(), made })
    }

    /// Removes the file, if it is still this one.
    fn remove(&self) {
        let path = PathBuf::from(OsString::from_vec(self.path.clone()));
        if Self::of(&path).is_ok_and(|now| now == *self) {
            let _ = fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_file_is_removed_only_if_it_is_the_one_that_was_made() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let _listener = UnixListener::bind(&path).unwrap();
        let file = SocketFile::of(&path).unwrap();
        for other in [
            SocketFile { inode: file.inode + 1, ..file.clone() },
            SocketFile { device: file.device + 1, ..file.clone() },
            SocketFile { made: (file.made.0, file.made.1 + 1), ..file.clone() },
        ] {
            other.remove();
            assert!(path.exists(), "{other:?}");
        }
        let line = serde_json::to_vec(&Message::Made { number: 7, file: file.clone() }).unwrap();
        assert!(
            matches!(serde_json::from_slice(&line).unwrap(), Message::Made { number: 7, file: read } if read == file)
        );
        file.remove();
        assert!(!path.exists());
        file.remove();
    }
}
