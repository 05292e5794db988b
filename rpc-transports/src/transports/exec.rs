//! `exec:` addresses: a child process at the far end of a socket pair, started, watched and ended.
//!
//! The child gets one end of the pair as both standard input and standard output. It shares this
//! process's standard error, or writes to a pipe that [`ChildStderr`] receives. One thread that
//! never exits starts all children: on Linux, the signal that kills a child together with this
//! process follows the *thread* that started the child. On a pool's thread it would strike when the
//! pool shrinks. The same thread ends and reaps the children.
//!
//! A child is ended by closing the channel. It gets [`GRACE`] to exit by itself, and is then
//! killed. When this process dies, for whatever reason, the kernel kills the children at once on
//! Linux. On other systems, and in children that raised their privileges, the child reads the end
//! of the stream. Processes that a child starts are not ended with it.
//!
//! The functions for the child's side are [`take_stdio`] and [`stdio_channel`].

use std::fmt;
use std::fs::OpenOptions;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use rustix::fs::{FileType, fstat};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::net::unix::pipe;
use tokio::sync::oneshot;

use crate::address::{Address, AddressError};
use crate::channel::{BlockingChannel, Channel, ExplainEnd, Machine, Peer};
use crate::error::TransportError;
use crate::handshake::identity::Security;
use crate::transport::{BoxFuture, Dial, Properties, Reach, Transport};
use crate::transports::unix_buffer::widen_unix_socket;

/// Receiver of the standard error of child processes: see [`Exec::stderr`].
#[derive(Clone)]
pub struct ChildStderr(Arc<dyn Fn(OwnedFd) + Send + Sync>);

impl ChildStderr {
    /// Creates a receiver from a function that gets the reading end of a pipe for each child that
    /// has started. The function must not block. It must see to it that the pipe is read until its
    /// end: a child that fills the pipe waits.
    pub fn new(take: impl Fn(OwnedFd) + Send + Sync + 'static) -> Self {
        Self(Arc::new(take))
    }
}

impl fmt::Debug for ChildStderr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ChildStderr")
    }
}

/// The transport of `exec:` addresses.
#[derive(Clone, Debug, Default)]
pub struct Exec {
    stderr: Option<ChildStderr>,
}

impl Exec {
    /// Creates the transport. Its children share this process's standard error.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the receiver of the children's standard error. Default: none, and children write to the
    /// standard error of this process.
    #[must_use]
    pub fn stderr(self, stderr: ChildStderr) -> Self {
        Self { stderr: Some(stderr) }
    }
}

impl Transport for Exec {
    fn schemes(&self) -> &[&str] {
        &["exec"]
    }

    fn check(&self, at: &Address) -> Result<Properties, AddressError> {
        argv_of(at).map(|_| Properties::program(Reach::Machine))
    }

    fn canonical(&self, at: &Address) -> Result<Address, AddressError> {
        Address::exec(argv_of(at)?)
    }

    fn dial<'a>(&'a self, to: &'a Address, _with: &'a Dial) -> BoxFuture<'a, Result<Channel, TransportError>> {
        Box::pin(dial(to, self.stderr.as_ref()))
    }

    fn dial_blocking(&self, to: &Address, _with: &Dial) -> Option<Result<BlockingChannel, TransportError>> {
        Some(dial_blocking(to, self.stderr.as_ref()))
    }
}

impl Address {
    /// Returns the address of a child process that is started when dialled.
    ///
    /// # Errors
    ///
    /// [`AddressError::Invalid`] if there is no program, or a word contains a zero byte.
    pub fn exec<I>(argv: I) -> Result<Self, AddressError>
    where
        I: IntoIterator,
        I::Item: Into<String>,
    {
        let argv: Vec<String> = argv.into_iter().map(Into::into).collect();
        let address = Self::opaque("exec", &quoted(&argv))?;
        argv_of(&address)?;
        Ok(address)
    }
}

/// Returns the program of an `exec:` address and its arguments.
///
/// # Errors
///
/// [`AddressError::Invalid`]: the command line cannot be split into words, names no program, or
/// contains a zero byte.
pub fn argv_of(address: &Address) -> Result<Vec<String>, AddressError> {
    let invalid = |problem| {
        let example = "write for example exec:ssh board 'rpc-server serve --stdio'";
        AddressError::invalid(address, format!("{problem}; {example}"))
    };
    let argv = split_words(address.rest().unwrap_or_default()).map_err(invalid)?;
    match () {
        () if argv.first().is_none_or(String::is_empty) => Err(invalid("it names no program")),
        () if argv.iter().any(|word| word.contains('\0')) => Err(invalid("it contains a zero byte")),
        () => Ok(argv),
    }
}

async fn dial(address: &Address, stderr: Option<&ChildStderr>) -> Result<Channel, TransportError> {
    let (reply, answer) = oneshot::channel();
    start(address, stderr, move |outcome| {
        // If the dialler has given up, dropping the started child ends it.
        let _ = reply.send(outcome);
    })?;
    let answer = answer.await.unwrap_or_else(|_| Err(keeper_gone()));
    let started = answer.map_err(|error| spawn_error(address, error))?;
    let (peer, guard) = (started.peer(address), Arc::new(started.guard));
    let stream = (started.stream.set_nonblocking(true))
        .and_then(|()| UnixStream::from_std(started.stream))
        .map_err(|error| TransportError::from_io(address.to_string(), error))?;
    let end = Arc::new(ChildEnd(Arc::downgrade(&guard)));
    Ok(Channel::new(stream, Peer::new(peer).on(Machine::This)).with_guard(Box::new(guard)).explained_by(end))
}

fn dial_blocking(address: &Address, stderr: Option<&ChildStderr>) -> Result<BlockingChannel, TransportError> {
    let (reply, answer) = mpsc::sync_channel(1);
    start(address, stderr, move |outcome| {
        let _ = reply.send(outcome);
    })?;
    let answer = answer.recv().unwrap_or_else(|_| Err(keeper_gone()));
    let started = answer.map_err(|error| spawn_error(address, error))?;
    let (peer, guard) = (started.peer(address), Arc::new(started.guard));
    let end = Arc::new(ChildEnd(Arc::downgrade(&guard)));
    Ok(BlockingChannel::new(started.stream, peer).with_guard(Box::new(guard)).explained_by(end))
}

/// Child process behind a channel. To get it, downcast the channel's guard to an `Arc` of this
/// type. Dropping it closes the channel and ends the child, without waiting for either.
///
/// A child that exits early is reaped only when its status is asked for or the guard is dropped.
/// Until then no other process gets its process id.
#[derive(Debug)]
pub struct ChildGuard {
    /// The child, or `None` once dropping has begun.
    process: Mutex<Option<Child>>,
    pid: u32,
    /// Second owner of this process's end of the socket pair. If another task or thread still holds
    /// the stream when the guard is dropped, the child sees the end of the stream all the same.
    socket: StdStream,
}

/// Time that a child may take to exit after it has closed its connection.
const EXIT: Duration = Duration::from_millis(500);

/// Explanation of a channel's end by the exit status of the child. Weak, so that it keeps no child
/// alive.
struct ChildEnd(Weak<ChildGuard>);

#[async_trait]
impl ExplainEnd for ChildEnd {
    async fn explain(&self) -> Option<String> {
        let guard = self.0.upgrade()?;
        let status = tokio::time::timeout(EXIT, guard.exited()).await;
        status.ok().and_then(io::Result::ok).map(explained)
    }

    fn explain_blocking(&self) -> Option<String> {
        self.0.upgrade()?.exited_within(EXIT).ok().flatten().map(explained)
    }
}

fn explained(status: ExitStatus) -> String {
    format!("the program ended ({status})")
}

impl ChildGuard {
    /// Returns the exit status of the child, or `None` while it runs.
    ///
    /// The stream may end a moment before the child exits. To explain the end of a stream, use
    /// [`exited`](Self::exited) or [`exited_within`](Self::exited_within).
    ///
    /// # Errors
    ///
    /// The child has ended and its status is lost, because this process ignores or collects the
    /// ends of all its children.
    pub fn exit_status(&self) -> io::Result<Option<ExitStatus>> {
        self.process().as_mut().map_or(Ok(None), Child::try_wait)
    }

    /// Waits until the child has ended. Cancel-safe.
    ///
    /// # Errors
    ///
    /// As [`exit_status`](Self::exit_status).
    pub async fn exited(&self) -> io::Result<ExitStatus> {
        let mut pause = POLL_MIN;
        loop {
            if let Some(status) = self.exit_status()? {
                return Ok(status);
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(POLL_MAX);
        }
    }

    /// Blocks until the child has ended or the time is up. Returns `None` if the time is up.
    ///
    /// # Errors
    ///
    /// As [`exit_status`](Self::exit_status).
    pub fn exited_within(&self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        let start = Instant::now();
        let mut pause = POLL_MIN;
        loop {
            let status = self.exit_status()?;
            if status.is_some() || start.elapsed() >= limit {
                return Ok(status);
            }
            thread::sleep(pause);
            pause = (pause * 2).min(POLL_MAX);
        }
    }

    /// Kills the child now, without grace. A child that has ended is left as it is.
    ///
    /// # Errors
    ///
    /// Any error that the system reports.
    pub fn kill(&self) -> io::Result<()> {
        self.process().as_mut().map_or(Ok(()), Child::kill)
    }

    /// Returns the child's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    fn process(&self) -> MutexGuard<'_, Option<Child>> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(Shutdown::Both);
        let Some(mut child) = self.process().take() else {
            return;
        };
        if matches!(child.try_wait(), Ok(Some(_))) {
            return;
        }
        if let Err(Job::Retire(mut child)) = submit(Job::Retire(child)) {
            // Unreachable: the thread that started this child runs as long as the process. The
            // child is ended here all the same, so that none is left behind.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Time that a child may take to exit after its channel was closed. It is enough to write a log
/// line and remove a folder, and no more than the second within which a dead worker is to be
/// noticed.
pub const GRACE: Duration = Duration::from_secs(1);

/// Shortest interval at which a child's status is polled, because not every system can wait for an
/// exit with a time limit. Most children exit at once. For the others the interval doubles up to
/// `POLL_MAX`.
const POLL_MIN: Duration = Duration::from_millis(1);
const POLL_MAX: Duration = Duration::from_millis(20);

fn spawn_error(address: &Address, error: io::Error) -> TransportError {
    let address = address.to_string();
    match error.get_ref().and_then(|error| error.downcast_ref()) {
        Some(cause) => TransportError::EndlessStart { address, source: *cause },
        None => TransportError::Spawn { address, source: error.into() },
    }
}

fn keeper_gone() -> io::Error {
    io::Error::other("the thread that starts children is gone")
}

/// Running child, and this process's end of the socket pair.
struct Started {
    stream: StdStream,
    guard: ChildGuard,
}

impl Started {
    fn peer(&self, address: &Address) -> String {
        format!("{address} (process {})", self.guard.pid)
    }
}

type Reply = Box<dyn FnOnce(io::Result<Started>) + Send>;

/// Job of the `rpc-children` thread. The queue is unbounded. It holds at most one job for each
/// caller that waits for a start, and one for each child that exists.
enum Job {
    Start { argv: Vec<String>, stderr: Option<ChildStderr>, reply: Reply },
    Retire(Child),
}

fn start(
    address: &Address,
    stderr: Option<&ChildStderr>,
    reply: impl FnOnce(io::Result<Started>) + Send + 'static,
) -> Result<(), TransportError> {
    let job = Job::Start { argv: argv_of(address)?, stderr: stderr.cloned(), reply: Box::new(reply) };
    submit(job).map_err(|_| spawn_error(address, keeper_gone()))
}

/// Hands a job to the `rpc-children` thread, which the first job starts. Returns the job if the
/// thread is not running.
fn submit(job: Job) -> Result<(), Job> {
    static KEEPER: Mutex<Option<mpsc::Sender<Job>>> = Mutex::new(None);
    let mut keeper = KEEPER.lock().unwrap_or_else(PoisonError::into_inner);
    if keeper.is_none() {
        let (sender, jobs) = mpsc::channel();
        let thread = thread::Builder::new().name("rpc-children".into());
        if thread.spawn(move || keep(&jobs)).is_ok() {
            *keeper = Some(sender);
        }
    }
    match &*keeper {
        Some(sender) => sender.send(job).map_err(|mpsc::SendError(job)| job),
        None => Err(job),
    }
}

/// Starts children, and ends those whose channel is closed. Runs on the `rpc-children` thread for
/// as long as the process.
fn keep(jobs: &mpsc::Receiver<Job>) {
    let mut retired: Vec<Retired> = Vec::new();
    let mut pause = POLL_MIN;
    loop {
        let job = if retired.is_empty() {
            jobs.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            jobs.recv_timeout(pause)
        };
        match job {
            Ok(Job::Start { argv, stderr, reply }) => reply(spawn(&argv, stderr.as_ref())),
            Ok(Job::Retire(child)) => {
                retired.push(Retired::new(child));
                pause = POLL_MIN;
            }
            Err(RecvTimeoutError::Timeout) => pause = (pause * 2).min(POLL_MAX),
            // Unreachable, because the sender is static. Returning would be harmless.
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let now = Instant::now();
        retired.retain_mut(|child| !child.is_reaped(now));
    }
}

/// Child whose channel is closed and which has not been reaped.
struct Retired {
    child: Child,
    killed_at: Instant,
    killed: bool,
}

impl Retired {
    fn new(child: Child) -> Self {
        Self { child, killed_at: Instant::now() + GRACE, killed: false }
    }

    fn is_reaped(&mut self, now: Instant) -> bool {
        match self.child.try_wait() {
            Ok(None) if now >= self.killed_at && !self.killed => {
                // The child is reaped in a later round. A child inside a system call may take long
                // to die, and the other children must not wait for it.
                self.killed = true;
                let _ = self.child.kill();
                false
            }
            Ok(None) => false,
            // An error means that other code has reaped the child.
            Ok(Some(_)) | Err(_) => true,
        }
    }
}

fn spawn(argv: &[String], stderr: Option<&ChildStderr>) -> io::Result<Started> {
    let Some((program, arguments)) = argv.split_first() else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let (ours, theirs) = StdStream::pair()?;
    [&ours, &theirs].into_iter().for_each(widen_unix_socket);
    let socket = ours.try_clone()?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(OwnedFd::from(theirs.try_clone()?)).stdout(OwnedFd::from(theirs));
    if stderr.is_some() {
        command.stderr(Stdio::piped());
    }
    crate::self_start::guard(&mut command)?;
    die_with_us(&mut command);
    let mut child = command.spawn()?;
    if let (Some(ChildStderr(take)), Some(pipe)) = (stderr, child.stderr.take()) {
        take(pipe.into());
    }
    // Dropping `command` closes this process's copies of the child's end. While one of them is
    // open, the stream does not end.
    drop(command);
    let pid = child.id();
    Ok(Started { stream: ours, guard: ChildGuard { process: Mutex::new(Some(child)), pid, socket } })
}

/// Tells the kernel to kill the child as soon as the calling thread is gone. The setting survives
/// `exec`, unless the program raises its privileges.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn die_with_us(command: &mut Command) {
    use std::os::unix::process::CommandExt as _;

    use rustix::io::Errno;
    use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

    let parent = getpid();
    let set_up = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // If the parent died before that call, no signal comes. The child then has another parent.
        if getppid() != Some(parent) {
            return Err(Errno::SRCH.into());
        }
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe work is allowed, since another thread
    // may have held any lock at the time of the fork. The closure makes two system calls, takes no
    // lock, and neither allocates nor frees: `parent` is a plain number, and an `io::Error` made
    // from an error number is one as well. It touches no file descriptor.
    unsafe {
        command.pre_exec(set_up);
    }
}

/// Does nothing, because other kernels have no such signal. The child reads the end of the stream
/// instead.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn die_with_us(_command: &mut Command) {}

/// Child's end of the channel to its parent. Made by [`take_stdio`].
#[derive(Debug)]
#[non_exhaustive]
pub enum StdioEnds {
    /// One socket for input and output, as an `exec:` address makes it.
    Socket(StdStream),
    /// Two pipes or two sockets for input and output, as remote shells make them.
    Pair {
        /// Former standard input.
        read: OwnedFd,
        /// Former standard output.
        write: OwnedFd,
    },
}

impl StdioEnds {
    /// Converts the ends into a channel. Needs a tokio runtime with I/O. With a
    /// [`Pair`](Self::Pair), the parent reads the end of the stream when the channel is dropped,
    /// and not yet when it is shut down.
    ///
    /// # Errors
    ///
    /// Any error that the system reports.
    pub fn into_channel(self) -> io::Result<Channel> {
        match self {
            Self::Socket(stream) => Ok(Channel::new(async_stream(stream)?, STDIO)),
            Self::Pair { read, write } => {
                let io = tokio::io::join(reader(read)?, writer(write)?);
                Ok(Channel::new(io, STDIO))
            }
        }
    }
}

/// Takes standard input and output for the channel to the parent, so that nothing else can use
/// them.
///
/// Afterwards standard input is empty, and output to standard output, such as that of `println!`,
/// goes to standard error. Call this function first in `main`: earlier output has gone to the
/// parent, and breaks the protocol.
///
/// On Linux the function also tells the kernel to kill this process when the thread that started it
/// is gone. Dialling an `exec:` address has done so already, but only for the process that it
/// started directly. This call covers a process behind a shell or another program.
///
/// From then on this process counts as one that serves its parent, and may start its own program as
/// a child ([`self_start::hook_took_over`](crate::self_start::hook_took_over)).
///
/// # Errors
///
/// [`io::ErrorKind::AlreadyExists`] at the second call. [`io::ErrorKind::InvalidInput`] if standard
/// input or output is neither a pipe nor a socket but, say, a terminal. Any other error that the
/// system reports. Standard input and output are then as before.
pub fn take_stdio() -> io::Result<StdioEnds> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::AcqRel) {
        let message = "standard input and output have been taken already";
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, message));
    }
    let ends = move_stdio_away();
    match ends {
        Ok(_) => crate::self_start::hook_took_over(),
        Err(_) => TAKEN.store(false, Ordering::Release),
    }
    ends
}

/// Takes standard input and output, and returns the channel to the parent over them: see
/// [`take_stdio`].
///
/// # Errors
///
/// As [`take_stdio`], in [`TransportError::Io`].
pub async fn stdio_channel() -> Result<Channel, TransportError> {
    let channel = take_stdio().and_then(StdioEnds::into_channel);
    let security = Security { is_parent: true, ..Security::default() };
    let channel = channel.map(|channel| channel.with_security(security));
    channel.map_err(|error| TransportError::Io { address: STDIO.into(), source: Arc::new(error) })
}

/// Name of the parent in errors.
const STDIO: &str = "standard input and output";

fn move_stdio_away() -> io::Result<StdioEnds> {
    // The copies are above the three standard descriptors. They are closed on exec, so that
    // children of this process do not inherit them.
    let read = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
    let write = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3)?;
    let ends = sorted(read, write)?;
    let nothing = OpenOptions::new().read(true).open("/dev/null")?;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    // The steps that are likely to fail come before the first change to standard input.
    rustix::stdio::dup2_stdin(&nothing)?;
    rustix::stdio::dup2_stdout(rustix::stdio::stderr())?;
    Ok(ends)
}

fn sorted(read: OwnedFd, write: OwnedFd) -> io::Result<StdioEnds> {
    let (from, to) = (fstat(&read)?, fstat(&write)?);
    for stat in [&from, &to] {
        if !matches!(FileType::from_raw_mode(stat.st_mode), FileType::Fifo | FileType::Socket) {
            let message = "standard input and output must be a socket or pipes; \
                           start this program through an exec: address";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
    }
    // A named pipe opened for both directions is one file too, but it cannot carry both.
    let is_socket = FileType::from_raw_mode(from.st_mode) == FileType::Socket;
    if is_socket && (from.st_dev, from.st_ino) == (to.st_dev, to.st_ino) {
        Ok(StdioEnds::Socket(read.into()))
    } else {
        Ok(StdioEnds::Pair { read, write })
    }
}

fn reader(fd: OwnedFd) -> io::Result<Box<dyn AsyncRead + Send + Unpin>> {
    if is_pipe(&fd)? {
        Ok(Box::new(pipe::Receiver::from_owned_fd(fd)?))
    } else {
        Ok(Box::new(async_stream(fd.into())?))
    }
}

fn writer(fd: OwnedFd) -> io::Result<Box<dyn AsyncWrite + Send + Unpin>> {
    if is_pipe(&fd)? { Ok(Box::new(pipe::Sender::from_owned_fd(fd)?)) } else { Ok(Box::new(async_stream(fd.into())?)) }
}

fn is_pipe(fd: impl AsFd) -> io::Result<bool> {
    Ok(FileType::from_raw_mode(fstat(fd)?.st_mode) == FileType::Fifo)
}

fn async_stream(stream: StdStream) -> io::Result<UnixStream> {
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

/// Splits a command line into words, as a shell does before it expands anything.
///
/// White space separates words. Between single quotes all characters stand for themselves. Between
/// double quotes a backslash takes the meaning from `"`, `\`, `$` and `` ` ``, and stands for
/// itself before any other character. Outside quotes it takes the meaning from any character.
fn split_words(line: &str) -> Result<Vec<String>, &'static str> {
    let mut words = Vec::new();
    let mut characters = line.chars().peekable();
    loop {
        while characters.next_if(|c| c.is_whitespace()).is_some() {}
        if characters.peek().is_none() {
            return Ok(words);
        }
        let mut word = String::new();
        while let Some(character) = characters.next_if(|c| !c.is_whitespace()) {
            match character {
                '\'' => loop {
                    match characters.next().ok_or("a single quote is not closed")? {
                        '\'' => break,
                        other => word.push(other),
                    }
                },
                '"' => loop {
                    match characters.next().ok_or("a double quote is not closed")? {
                        '"' => break,
                        '\\' => match characters.next_if(|c| matches!(c, '"' | '\\' | '$' | '`')) {
                            Some(escaped) => word.push(escaped),
                            None => word.push('\\'),
                        },
                        other => word.push(other),
                    }
                },
                '\\' => word.push(characters.next().ok_or("nothing follows the backslash")?),
                other => word.push(other),
            }
        }
        words.push(word);
    }
}

/// Returns the command line that [`split_words`] splits into `argv`.
fn quoted(argv: &[String]) -> String {
    let plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | '@' | '%' | '+' | '=' | ':' | ',' | '.' | '/' | '-');
    let quote = |word: &String| {
        if !word.is_empty() && word.chars().all(plain) {
            word.clone()
        } else {
            format!("'{}'", word.replace('\'', r"'\''"))
        }
    };
    let words: Vec<String> = argv.iter().map(quote).collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::process::Stdio;

    use rustix::process::Pid;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// Time limit against hanging, far longer than any step of these tests takes.
    const PATIENCE: Duration = Duration::from_secs(60);

    fn exec(argv: &[&str]) -> Address {
        Address::exec(argv.iter().copied()).unwrap()
    }

    fn guard(channel: &Channel) -> &ChildGuard {
        channel.guard().unwrap().downcast_ref::<Arc<ChildGuard>>().unwrap()
    }

    async fn started(argv: &[&str]) -> Channel {
        dial(&exec(argv), None).await.unwrap()
    }

    fn started_blocking(argv: &[&str]) -> BlockingChannel {
        dial_blocking(&exec(argv), None).unwrap()
    }

    fn pid(guard: &ChildGuard) -> Pid {
        Pid::from_raw(guard.pid().try_into().unwrap()).unwrap()
    }

    /// Waits until no process, not even a zombie, has this id. Returns the time that it took.
    fn reaped(pid: Pid) -> Duration {
        let start = Instant::now();
        while rustix::process::test_kill_process(pid).is_ok() {
            assert!(start.elapsed() < PATIENCE, "{pid:?} is still there");
            thread::sleep(POLL_MIN);
        }
        start.elapsed()
    }

    #[tokio::test]
    async fn bytes_cross_async() {
        let mut channel = started(&["cat"]).await;
        assert!(channel.peer().starts_with("exec:cat (process "));
        channel.io_mut().write_all(b"ping").await.unwrap();
        let mut buffer = [0; 4];
        channel.io_mut().read_exact(&mut buffer).await.unwrap();
        assert_eq!(&buffer, b"ping");
        assert_eq!(guard(&channel).exit_status().unwrap(), None);
        channel.io_mut().shutdown().await.unwrap();
        assert_eq!(channel.io_mut().read(&mut buffer).await.unwrap(), 0);
        assert!(guard(&channel).exited().await.unwrap().success());
    }

    #[test]
    fn bytes_cross_blocking() {
        let mut channel = started_blocking(&["cat"]);
        channel.write_all(b"ping").unwrap();
        let mut buffer = [0; 4];
        channel.read_exact(&mut buffer).unwrap();
        assert_eq!(&buffer, b"ping");
        channel.io().shutdown(Shutdown::Write).unwrap();
        assert_eq!(channel.read(&mut buffer).unwrap(), 0);
        let guard: &Arc<ChildGuard> = channel.guard().unwrap().downcast_ref().unwrap();
        assert!(guard.exited_within(PATIENCE).unwrap().unwrap().success());
    }

    #[test]
    fn every_argv_round_trips() {
        for argv in [
            &["a"][..],
            &["a", "", " ", "'", "\"", "\\", "it's", "$HOME", "*", "\n", "ü", "a\\'b", "a?key=b"],
            &["a b", "trailing "],
            &["//host/program", "x"],
            &["-", "--x=1,2", "#no-comment"],
        ] {
            let address = Address::exec(argv.iter().copied()).unwrap();
            let parsed: Address = address.to_string().parse().unwrap();
            assert_eq!(
                (&parsed, argv_of(&parsed).unwrap()),
                (&address, argv.iter().map(ToString::to_string).collect())
            );
        }
        for text in ["exec:", "exec: ", "exec:''", "exec:'a", "exec:a\0"] {
            assert!(Exec::new().check(&text.parse().unwrap()).is_err(), "{text}");
        }
    }

    #[test]
    fn words_split_as_in_a_shell() {
        for (line, words) in [
            ("", &[][..]),
            (" \t ", &[]),
            ("a  b", &["a", "b"]),
            ("a'b c'd", &["ab cd"]),
            (r#""a \" \\ \n \$x""#, &[r#"a " \ \n $x"#]),
            (r"a\ b \'", &["a b", "'"]),
            ("'' \"\"", &["", ""]),
            ("a|b > $c;d #e", &["a|b", ">", "$c;d", "#e"]),
        ] {
            assert_eq!(split_words(line).unwrap(), words, "{line}");
        }
        for line in ["'a", "\"a", "a\\", "\"a\\\""] {
            assert!(split_words(line).is_err(), "{line}");
        }
    }

    #[tokio::test]
    async fn a_command_that_does_not_exist_is_a_spawn_error() {
        let address = exec(&["/does/not/exist"]);
        for error in [dial(&address, None).await.unwrap_err(), dial_blocking(&address, None).unwrap_err()] {
            let TransportError::Spawn { source, .. } = &error else {
                panic!("{error:?}");
            };
            assert_eq!(source.kind(), io::ErrorKind::NotFound);
            assert_eq!(error.address(), "exec:/does/not/exist");
        }
    }

    #[tokio::test]
    async fn an_early_exit_can_be_explained_after_the_end_of_the_stream() {
        let mut channel = started(&["sh", "-c", "exit 7"]).await;
        assert_eq!(channel.io_mut().read(&mut [0]).await.unwrap(), 0);
        assert_eq!(guard(&channel).exited().await.unwrap().code(), Some(7));
        assert_eq!(guard(&channel).exit_status().unwrap().unwrap().code(), Some(7));
    }

    #[tokio::test]
    async fn a_child_that_exits_at_the_end_of_the_stream_is_reaped_within_the_grace() {
        let channel = started(&["cat"]).await;
        let pid = pid(guard(&channel));
        drop(channel);
        assert!(reaped(pid) < GRACE);
    }

    #[tokio::test]
    async fn a_child_that_ignores_the_end_of_the_stream_is_killed_and_reaped() {
        let channel = started(&["sleep", "1000"]).await;
        let pid = pid(guard(&channel));
        drop(channel);
        reaped(pid);
    }

    #[tokio::test]
    async fn dropping_the_guard_ends_the_stream_while_others_hold_the_bytes() {
        let channel = started(&["cat"]).await;
        let pid = pid(guard(&channel));
        let (mut io, _, guard) = channel.into_parts();
        drop(guard);
        assert_eq!(io.read(&mut [0]).await.unwrap(), 0);
        reaped(pid);
    }

    #[tokio::test]
    async fn a_kill_needs_no_grace() {
        let mut channel = started(&["sleep", "1000"]).await;
        guard(&channel).kill().unwrap();
        assert_eq!(channel.io_mut().read(&mut [0]).await.unwrap(), 0);
        assert!(!guard(&channel).exited().await.unwrap().success());
        guard(&channel).kill().unwrap();
    }

    #[test]
    fn a_child_outlives_the_thread_that_asked_for_it() {
        let asking = thread::spawn(|| started_blocking(&["cat"]));
        let mut channel = asking.join().unwrap();
        channel.write_all(b"x").unwrap();
        channel.read_exact(&mut [0]).unwrap();
    }

    // The tests below need a process that runs code of this crate. They start this test binary with
    // an environment variable that selects the role. Output of the test harness comes before
    // `READY`.

    const ROLE: &str = "RPC_TRANSPORTS_CHILD_TEST_ROLE";
    const READY: &str = "ready\n";

    fn acting(role: &str) -> Vec<String> {
        let binary = std::env::current_exe().unwrap();
        let test = "transports::exec::tests::play_a_role";
        vec![
            "env".into(),
            format!("{ROLE}={role}"),
            binary.to_str().unwrap().into(),
            "--exact".into(),
            "--ignored".into(),
            "--nocapture".into(),
            test.into(),
        ]
    }

    #[test]
    #[ignore = "run by other tests in a process of its own"]
    fn play_a_role() {
        match std::env::var(ROLE).as_deref() {
            Ok("echo") => {
                println!("as yet this goes to the parent");
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    let channel = stdio_channel().await.unwrap();
                    println!("this must not break the protocol");
                    assert_eq!(io::stdin().read(&mut [0]).unwrap(), 0);
                    let again = take_stdio().unwrap_err();
                    assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
                    let (io, _, _) = channel.into_parts();
                    let (mut read, mut write) = tokio::io::split(io);
                    write.write_all(READY.as_bytes()).await.unwrap();
                    tokio::io::copy(&mut read, &mut write).await.unwrap();
                });
            }
            Ok("parent") => {
                let channel = started_blocking(&["sleep", "1000"]);
                let guard: &Arc<ChildGuard> = channel.guard().unwrap().downcast_ref().unwrap();
                println!("{READY}{}", guard.pid());
                // The process lives until it is killed.
                let _ = io::stdin().read(&mut [0]);
            }
            _ => {}
        }
    }

    fn skip_to_ready(output: &mut impl BufRead) {
        let mut line = String::new();
        while !line.ends_with(READY) {
            assert_ne!(output.read_line(&mut line).unwrap(), 0, "{line:?}");
        }
    }

    #[test]
    fn a_child_over_one_socket_serves_and_may_print() {
        let address = Address::exec(acting("echo")).unwrap();
        let channel = dial_blocking(&address, None).unwrap();
        let mut output = BufReader::new(channel.io());
        skip_to_ready(&mut output);
        channel.io().write_all(b"ping").unwrap();
        channel.io().shutdown(Shutdown::Write).unwrap();
        let mut echoed = Vec::new();
        output.read_to_end(&mut echoed).unwrap();
        assert_eq!(echoed, b"ping");
        let guard: &Arc<ChildGuard> = channel.guard().unwrap().downcast_ref().unwrap();
        assert!(guard.exited_within(PATIENCE).unwrap().unwrap().success());
    }

    #[test]
    fn a_child_over_two_pipes_serves_and_may_print() {
        let argv = acting("echo");
        let mut child =
            Command::new(&argv[0]).args(&argv[1..]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        skip_to_ready(&mut output);
        let mut input = child.stdin.take().unwrap();
        input.write_all(b"ping").unwrap();
        drop(input);
        let mut echoed = Vec::new();
        output.read_to_end(&mut echoed).unwrap();
        assert_eq!(echoed, b"ping");
        assert!(child.wait().unwrap().success());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn children_die_with_a_parent_that_is_killed() {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        use rustix::process::{PidfdFlags, pidfd_open};

        let argv = acting("parent");
        let mut parent =
            Command::new(&argv[0]).args(&argv[1..]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(parent.stdout.take().unwrap());
        skip_to_ready(&mut output);
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let grandchild = Pid::from_raw(line.trim().parse().unwrap()).unwrap();
        let grandchild = pidfd_open(grandchild, PidfdFlags::empty()).unwrap();
        parent.kill().unwrap();
        parent.wait().unwrap();
        // The descriptor is readable once the process has ended, even if another process reaps it.
        let mut watched = [PollFd::new(&grandchild, PollFlags::IN)];
        let patience = Timespec::try_from(PATIENCE).unwrap();
        assert_eq!(poll(&mut watched, Some(&patience)).unwrap(), 1);
    }
}
