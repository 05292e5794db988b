//! The reaper server: a process of each session process that starts reapers by copying itself.
//!
//! Executing a program as large as this one again costs some milliseconds; copying a small process
//! costs a fraction of one. The server is executed once, before the first program of a session, and
//! has one thread, which [copies](super::system_calls) need. The copies are children of the session
//! process, as if that had started them.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rpc_transports::program::Program;
use rpc_transports::self_start;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, set_parent_process_death_signal, waitpid};

use super::messages::{self, ReaperRequest, ReaperStart};
use super::namespace::ProcView;
use super::process_tree::ProcessEntry;
use super::reaper::{self, REAPER_ARGUMENT};
use super::system_calls::{Side, fork_into_namespace, fork_sibling};
use crate::server::exit_code;

/// First argument of a reaper server.
pub(crate) const REAPER_SERVER_ARGUMENT: &str = "--start-reapers";

/// Time in which a reaper has started, or its start fails.
const START_LIMIT: Duration = Duration::from_secs(20);

/// Interval at which a wait for a reaper looks at the server, which a program may have stopped.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Number of looks in sequence after which a server that is stopped at each of them is replaced.
const STOPPED_LOOKS: u32 = 5;

/// The server of this session process, once it has been started.
static SERVER: Mutex<Option<ReaperServer>> = Mutex::new(None);

/// True once the server has turned out to have threads, so that it cannot copy itself. That is so
/// in programs that start threads before the hook in their `main`. Each reaper is executed then.
static HAS_THREADS: AtomicBool = AtomicBool::new(false);

/// True once the system has refused a namespace to a program, as it does where the server has not
/// the rights to make one. The other programs of this session process get none either.
static HAS_NO_NAMESPACES: AtomicBool = AtomicBool::new(false);

/// Serves requests until the session process ends.
pub(crate) fn run() -> ! {
    let outcome = serve();
    if let Err(error) = &outcome {
        exit_code::report(error);
    }
    std::process::exit(if outcome.is_ok() { 0 } else { exit_code::FAILURE.into() })
}

fn serve() -> io::Result<()> {
    let _ = rustix::thread::set_name(c"rpc-reapers");
    // A server that a program has stopped must find out that the session process is gone. Harmless
    // at other times: the thread that has started it may end earlier.
    set_parent_process_death_signal(Some(Signal::CONT))?;
    let requests = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    // The copies must not keep the connection open.
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    let mut proc_view = None;
    while let Some(request) = messages::receive_request(&requests)? {
        let control = UnixStream::from(request.control);
        if request.in_namespace && !has_replaceable_proc(&mut proc_view).unwrap_or(false) {
            let _ = messages::send(&control, &ReaperStart::NoNamespace(None));
            continue;
        }
        let forked = if request.in_namespace { fork_into_namespace() } else { fork_sibling() };
        let failed = match forked {
            Ok(Side::Original) => continue,
            Ok(Side::Copy) => {
                drop(requests);
                reaper::run(control);
            }
            Err(error) if error.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => ReaperStart::HasThreads,
            // Whatever the reason is: without one, another reason fails the start.
            Err(_) if request.in_namespace => ReaperStart::NoNamespace(None),
            Err(error) => ReaperStart::Failed(error.raw_os_error().unwrap_or(Errno::INVAL.raw_os_error())),
        };
        // The caller may have given up.
        let _ = messages::send(&control, &failed);
    }
    Ok(())
}

/// Returns true if a namespace can have a `/proc` of its own. Opens the view of it the first time.
fn has_replaceable_proc(view: &mut Option<ProcView>) -> io::Result<bool> {
    let view = match view {
        Some(view) => view,
        None => view.insert(ProcView::open()?),
    };
    view.is_replaceable()
}

/// Starts a reaper. Returns its id and the connection to it. It is a child of this process, in the
/// same session of the kernel until it has received its program.
pub(super) fn start_reaper() -> io::Result<(Pid, UnixStream)> {
    let deadline = Instant::now() + START_LIMIT;
    let mut in_namespace = !HAS_NO_NAMESPACES.load(Ordering::Relaxed);
    while Instant::now() < deadline {
        let (control, far) = UnixStream::pair()?;
        request(far, in_namespace)?;
        wait_for_start(&control, deadline)?;
        match messages::receive(&control) {
            Ok(ReaperStart::Ready(pid)) => {
                let pid = Pid::from_raw(pid).filter(|pid| pid.as_raw_nonzero().get() > 1);
                return Ok((pid.ok_or(io::ErrorKind::InvalidData)?, control));
            }
            Ok(ReaperStart::NoNamespace(reaper)) => {
                HAS_NO_NAMESPACES.store(true, Ordering::Relaxed);
                in_namespace = false;
                if let Some(reaper) = reaper.and_then(Pid::from_raw) {
                    // It exits by itself, unless another program has stopped it.
                    let _ = kill_process(reaper, Signal::KILL);
                    let _ = waitpid(Some(reaper), WaitOptions::empty());
                }
            }
            Ok(ReaperStart::HasThreads) => HAS_THREADS.store(true, Ordering::Relaxed),
            Ok(ReaperStart::Failed(number)) => return Err(io::Error::from_raw_os_error(number)),
            // The server has ended, and the next request finds that out, or the system has killed
            // the reaper for the attempt.
            Err(_) => in_namespace = false,
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}

/// Has a reaper started that serves `control`.
fn request(control: UnixStream, in_namespace: bool) -> io::Result<()> {
    if HAS_THREADS.load(Ordering::Relaxed) {
        return execute(REAPER_ARGUMENT, control).map(drop);
    }
    let request = ReaperRequest { control: control.as_fd(), in_namespace };
    let mut server = SERVER.lock();
    if let Some(running) = &mut *server {
        if messages::send_request(&running.requests, &request).is_ok() {
            return Ok(());
        }
        running.end();
    }
    let started = server.insert(ReaperServer::start()?);
    messages::send_request(&started.requests, &request)
}

/// Waits for the answer to a request, or for its end.
fn wait_for_start(control: &UnixStream, deadline: Instant) -> io::Result<()> {
    let timeout = Timespec::try_from(LOOK_INTERVAL).ok();
    let mut stopped_looks = 0;
    while Instant::now() < deadline {
        let mut fds = [PollFd::new(control, PollFlags::IN)];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        if let Some(server) = &mut *SERVER.lock() {
            stopped_looks = if server.is_stopped() { stopped_looks + 1 } else { 0 };
            server.resume();
            if stopped_looks >= STOPPED_LOOKS {
                server.end();
            }
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}

/// Executes this program again with an argument, and `connection` as its standard input.
fn execute(argument: &str, connection: UnixStream) -> io::Result<Child> {
    let mut command = self_start::command(&Program::this())?;
    command.arg(argument).stdin(OwnedFd::from(connection)).stdout(Stdio::null());
    command.spawn()
}

struct ReaperServer {
    process: Child,
    requests: UnixStream,
}

impl ReaperServer {
    fn start() -> io::Result<Self> {
        let (requests, far) = UnixStream::pair()?;
        Ok(Self { process: execute(REAPER_SERVER_ARGUMENT, far)?, requests })
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.process)
    }

    fn is_stopped(&self) -> bool {
        ProcessEntry::read(self.pid()).is_some_and(|entry| entry.is_stopped)
    }

    /// Lets it run again if a program has stopped it.
    fn resume(&self) {
        let _ = kill_process(self.pid(), Signal::CONT);
    }

    /// Kills and reaps it. Requests that it has not served fail.
    fn end(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
