//! The supervisor: a thread that starts session processes, watches them, kills and reaps them.
//!
//! All servers of a process share one supervisor, which never exits: on Linux the signal that
//! reports the death of a parent follows the *thread* that started the child. It holds no lock
//! while it works, and never waits for one process.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::process::Child;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};
use std::{process, thread};

use parking_lot::{Mutex, MutexGuard};
use rpc_core::{MemoryQuota, RpcError, Usage};
use rpc_transports::program::Program;
use rpc_transports::{EndReport, PassedConnection, self_start};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use tokio::sync::{OwnedSemaphorePermit, oneshot, watch};

use super::compiler_cache::CompilerCache;
use super::exit_cause::ExitCause;
use super::messages::{ControlAnswer, ControlMessage, LeaseAnswer, SessionNotice, SessionOrder};
use super::passed_client::{PassJob, PassedClient};
use super::process_leases::{LeaseCheck, ProcessLeases};
use super::process_logs::{self, ProcessLogs};
use super::{CHILD_ARGUMENT, GRACE};
use crate::leases::SessionLeases;
use crate::recent_logs::LogRing;
use crate::run::kill_orphans_of;
use crate::server::functions_used::FunctionsUsed;
use crate::server::server_state::ServerState;

/// A session process, as the server sees it.
pub(super) struct Process {
    id: u64,
    pid: Pid,
    /// Usage of the session, as last reported.
    handles: AtomicU64,
    memory_bytes: AtomicU64,
    /// Time that the process has to end after its session.
    grace: Duration,
    kill_requested: AtomicBool,
    /// Leases of the session, from its begin to the end of the process.
    leases: Mutex<Option<ProcessLeases>>,
    /// Access of the session to the log of the server, if its client may read that.
    logs: Mutex<Option<ProcessLogs>>,
    /// True while the process has to be told which devices are reserved for other sessions.
    reservations_changed: AtomicBool,
    /// Report of the process on the end of the session, if it has served the client's socket.
    end_report: watch::Sender<Option<EndReport>>,
    /// True once the client of a process that serves its socket has closed the connection.
    client_is_gone: AtomicBool,
    /// Functions that the client has fetched, for the record of the session in the log.
    functions_used: Arc<FunctionsUsed>,
    end: Mutex<EndState>,
}

#[derive(Default)]
struct EndState {
    exit_cause: Option<ExitCause>,
    wakers: Vec<Waker>,
}

impl Process {
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn end_report(&self) -> &watch::Sender<Option<EndReport>> {
        &self.end_report
    }

    /// Returns true once the client of a process that serves its socket has closed the connection.
    pub(super) fn has_no_client(&self) -> bool {
        self.client_is_gone.load(Ordering::Acquire)
    }

    pub(super) fn functions_used(&self) -> &Arc<FunctionsUsed> {
        &self.functions_used
    }

    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    /// Returns true once the process has been reaped.
    pub(super) fn has_ended(&self) -> bool {
        self.end().exit_cause.is_some()
    }

    /// Returns true if a signal has stopped the process, so that it would not serve.
    pub(super) fn is_stopped(&self) -> bool {
        let stopped = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        !self.has_ended() && matches!(waitid(WaitId::Pid(self.pid), stopped), Ok(Some(_)))
    }

    pub(super) fn usage(&self) -> Usage {
        let read = |number: &AtomicU64| number.load(Ordering::Relaxed);
        Usage { handles: read(&self.handles), memory_bytes: read(&self.memory_bytes) }
    }

    /// Returns the exit cause once the process has been reaped.
    pub(super) fn poll_exit_cause(&self, cx: &mut Context<'_>) -> Poll<ExitCause> {
        let mut end = self.end();
        match end.exit_cause {
            Some(exit_cause) => Poll::Ready(exit_cause),
            None => {
                if !end.wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
                    end.wakers.push(cx.waker().clone());
                }
                Poll::Pending
            }
        }
    }

    /// Kills the process after its grace, unless it ends by itself. Called when it cannot serve any
    /// more.
    pub(super) fn kill_after_grace(&self) {
        if !self.kill_requested.swap(true, Ordering::Relaxed) {
            submit(Job::KillAfterGrace { id: self.id, deadline: Instant::now() + self.grace });
        }
    }

    /// Lets the process have leases from now on, for its session. The process is told which devices
    /// are reserved for other sessions, of those that sessions without a lease do not share.
    pub(super) fn set_leases(self: &Arc<Self>, session: SessionLeases, check: LeaseCheck) {
        let id = self.id;
        let answer = move |answer| submit(Job::Answer { id, answer: ControlAnswer::Lease(answer), place: None });
        let leases = ProcessLeases::new(session, check, answer);
        // Set before the observer, whose first call sends the present reservations.
        let mut own = self.leases.lock();
        let leases = own.insert(leases);
        leases.observe_reservations(Waker::from(Arc::new(ReservationObserver(Arc::downgrade(self)))));
    }

    /// Lets the process read the log of the server, for its session. Needs a tokio runtime.
    pub(super) fn set_logs(&self, ring: Arc<LogRing>) {
        let id = self.id;
        let answer = move |answer, place| {
            submit(Job::Answer { id, answer: ControlAnswer::Logs(answer), place: Some(place) });
        };
        *self.logs.lock() = Some(ProcessLogs::new(ring, answer));
    }

    /// Keeps the devices that the session holds until [`end_leases`](Self::end_leases). Called when
    /// the session ends, before the process learns of it.
    pub(super) fn session_ends(&self) {
        if let Some(leases) = &*self.leases.lock() {
            leases.session_ends();
        }
    }

    /// Ends all leases of the process.
    pub(super) fn end_leases(&self) {
        let leases = self.leases.lock().take();
        drop(leases);
    }

    fn report(&self, usage: Usage) {
        self.handles.store(usage.handles, Ordering::Relaxed);
        self.memory_bytes.store(usage.memory_bytes, Ordering::Relaxed);
    }

    fn end(&self) -> MutexGuard<'_, EndState> {
        self.end.lock()
    }
}

/// Observer of the reservations of devices: makes the supervisor tell the process.
struct ReservationObserver(Weak<Process>);

impl Wake for ReservationObserver {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let Some(process) = self.0.upgrade() else { return };
        // One job for any number of changes, so that clients cannot fill the queue.
        if !process.reservations_changed.swap(true, Ordering::AcqRel) {
            submit(Job::ReservationsChanged { id: process.id });
        }
    }
}

/// Callback after the end of a process. Runs on the thread of the supervisor and must not block.
type OnExit = Box<dyn FnOnce() + Send + Sync>;

/// Owner of a process. Dropping it gives the process its grace to end, and kills it then.
pub(super) struct ProcessGuard {
    process: Arc<Process>,
    on_exit: Option<OnExit>,
}

impl ProcessGuard {
    pub(super) fn process(&self) -> &Arc<Process> {
        &self.process
    }

    /// Sets the callback that runs after the drop of this guard and the end of the process.
    pub(super) fn on_exit(&mut self, on_exit: impl FnOnce() + Send + Sync + 'static) {
        self.on_exit = Some(Box::new(on_exit));
    }
}

impl Drop for ProcessGuard {
    fn drop(&mut self) {
        let on_exit = self.on_exit.take();
        let deadline = Instant::now() + self.process.grace;
        submit(Job::Release { id: self.process.id, deadline, on_exit });
    }
}

/// A started process and the connection to it.
pub(super) struct Started {
    pub(super) stream: UnixStream,
    pub(super) process_guard: ProcessGuard,
    /// Kept until the process has ended, if it has used it.
    pub(super) compiler_cache: CompilerCache,
}

/// Starts `program` as a session process, which may ask for the totals of `state`, and has `grace`
/// to end after its session.
///
/// # Errors
///
/// The program cannot be executed, or the system is out of processes or files.
pub(super) async fn start(
    program: Arc<Program>,
    compiler_cache: CompilerCache,
    state: Arc<ServerState>,
    grace: Duration,
) -> io::Result<Started> {
    let (reply, answer) = oneshot::channel();
    submit(Job::Start { program, compiler_cache, state, grace, reply });
    // If the caller is gone, the drop of the reply ends the process.
    answer.await.unwrap_or_else(|_| Err(io::Error::other("the thread that starts processes is gone")))
}

/// Kills all processes of one server without grace.
pub(super) fn kill_all(state: &Arc<ServerState>) {
    submit(Job::KillAll { state: state.clone() });
}

/// Job for the supervisor. The queue is not bounded: each entry stands for a session that begins or
/// ends, and those are limited, or for an answer to a process. Between two looks at the queue the
/// supervisor takes a [few](MESSAGES_AT_ONCE) messages of each process.
pub(super) enum Job {
    Start {
        program: Arc<Program>,
        compiler_cache: CompilerCache,
        state: Arc<ServerState>,
        grace: Duration,
        reply: oneshot::Sender<io::Result<Started>>,
    },
    KillAfterGrace {
        id: u64,
        deadline: Instant,
    },
    Release {
        id: u64,
        deadline: Instant,
        on_exit: Option<OnExit>,
    },
    KillAll {
        state: Arc<ServerState>,
    },
    /// The place is that of a read of log lines, and is free once the answer has been sent.
    Answer {
        id: u64,
        answer: ControlAnswer,
        place: Option<OwnedSemaphorePermit>,
    },
    ReservationsChanged {
        id: u64,
    },
    Pass(PassJob),
}

/// Handle of the supervisor.
struct SupervisorHandle {
    jobs: Sender<Job>,
    /// One byte on this socket wakes the supervisor.
    wake_sender: UnixStream,
}

/// Sends a job to the supervisor, which starts at the first job. If it cannot start, the job is
/// dropped, and no process can be started.
pub(super) fn submit(job: Job) {
    static HANDLE: Mutex<Option<SupervisorHandle>> = Mutex::new(None);
    let mut handle = HANDLE.lock();
    if handle.is_none() {
        match SupervisorHandle::open() {
            Ok(opened) => *handle = Some(opened),
            Err(error) => rpc_core::log_limited!(ERROR, %error, "cannot start the supervisor of session processes"),
        }
    }
    if let Some(handle) = &*handle {
        let _ = handle.jobs.send(job);
        // A full socket buffer holds a wake-up already.
        let _ = (&handle.wake_sender).write(&[0]);
    }
}

impl SupervisorHandle {
    fn open() -> io::Result<Self> {
        let (wake_sender, wake_receiver) = UnixStream::pair()?;
        wake_sender.set_nonblocking(true)?;
        wake_receiver.set_nonblocking(true)?;
        let (jobs, queue) = mpsc::channel();
        let mut supervisor = Supervisor { queue, wake_receiver, children: Vec::new(), next_id: 0 };
        thread::Builder::new().name("rpc-isolation".into()).spawn(move || supervisor.run())?;
        Ok(Self { jobs, wake_sender })
    }
}

struct Supervisor {
    queue: Receiver<Job>,
    wake_receiver: UnixStream,
    children: Vec<ChildEntry>,
    next_id: u64,
}

/// Entry of a process that has not been reaped.
struct ChildEntry {
    process: Arc<Process>,
    child: Child,
    /// Pidfd, readable once the process has ended. Other systems than Linux have none; there the
    /// process is polled.
    ended: Option<OwnedFd>,
    /// Socket on which messages arrive.
    control: UnixDatagram,
    /// Client, once the process serves its socket.
    client: Option<PassedClient>,
    unsent: UnsentAnswers,
    state: Arc<ServerState>,
    /// True if the process may have ended.
    look: bool,
    /// Time at which the process is killed.
    deadline: Option<Instant>,
    killed: bool,
    on_exit: Option<OnExit>,
}

/// Occurrence that wakes the supervisor.
#[derive(Clone, Copy)]
enum Occurrence {
    /// Messages of the process have arrived, or there is room for answers.
    Messages,
    /// The process has ended.
    Ended,
    /// The client of a process that serves its socket has closed the connection.
    ClientGone,
}

/// Event of a socket whose peer sends no more. Input alone is no event, and wakes nobody.
#[cfg(target_os = "linux")]
const HANGUP: PollFlags = PollFlags::RDHUP;
#[cfg(not(target_os = "linux"))]
const HANGUP: PollFlags = PollFlags::empty();

/// Interval at which processes without a pidfd are polled.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Maximum number of messages that are read of one process before the others.
const MESSAGES_AT_ONCE: usize = 16;

/// Number of times that messages are taken of a process that has ended: as many as its socket
/// holds.
const LAST_ROUNDS: usize = 64;

/// Number of unsent answers at which a process is killed: one that runs reads them at once.
const MAX_UNSENT: usize = 4096;

/// Length of unsent answers, together and in bytes, at which a process is killed.
const MAX_UNSENT_BYTES: usize = 4 << 20;

/// Answers that a process's socket had no room for.
#[derive(Default)]
struct UnsentAnswers {
    /// Each with the place of the read of log lines that it answers.
    answers: VecDeque<(Vec<u8>, Option<OwnedSemaphorePermit>)>,
    bytes: usize,
}

impl UnsentAnswers {
    fn is_empty(&self) -> bool {
        self.answers.is_empty()
    }

    /// Returns true if a process that runs would not let so much wait.
    fn are_too_many(&self) -> bool {
        self.answers.len() >= MAX_UNSENT || self.bytes >= MAX_UNSENT_BYTES
    }

    fn push(&mut self, answer: Vec<u8>, place: Option<OwnedSemaphorePermit>) {
        self.bytes += answer.len();
        self.answers.push_back((answer, place));
    }

    fn first(&self) -> Option<&[u8]> {
        self.answers.front().map(|(answer, _)| answer.as_slice())
    }

    fn remove_first(&mut self) {
        self.bytes -= self.answers.pop_front().map_or(0, |(answer, _)| answer.len());
    }
}

impl Supervisor {
    fn run(&mut self) {
        loop {
            let occurrences = self.wait();
            let mut scrap = [0; 64];
            while matches!((&self.wake_receiver).read(&mut scrap), Ok(1..)) {}
            while let Ok(job) = self.queue.try_recv() {
                self.act(job);
            }
            // Jobs only append children, so the indices are still valid.
            let now = Instant::now();
            for (index, occurrence) in occurrences {
                let child = &mut self.children[index];
                match occurrence {
                    Occurrence::Messages => _ = child.take_messages(),
                    Occurrence::Ended => child.look = true,
                    Occurrence::ClientGone => {
                        // The process may not notice, or not want to.
                        if let Some(client) = &mut child.client {
                            client.close();
                        }
                        child.process.client_is_gone.store(true, Ordering::Release);
                        child.process.session_ends();
                        child.deadline.get_or_insert(now + child.process.grace);
                    }
                }
            }
            self.children.retain_mut(|child| !child.is_over(now));
        }
    }

    /// Waits for work. Returns what has happened, with the indices of the processes.
    fn wait(&self) -> Vec<(usize, Occurrence)> {
        let now = Instant::now();
        let waits = self.children.iter().filter_map(|child| child.wait(now));
        let timeout = waits.min().and_then(|wait| Timespec::try_from(wait).ok());
        let mut fds = vec![PollFd::new(&self.wake_receiver, PollFlags::IN)];
        let mut meanings = Vec::with_capacity(2 * self.children.len());
        for (index, child) in self.children.iter().enumerate() {
            let has_unsent = !child.unsent.is_empty();
            let events = if has_unsent { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            fds.push(PollFd::new(&child.control, events));
            meanings.push((index, Occurrence::Messages));
            if let Some(ended) = &child.ended {
                fds.push(PollFd::new(ended, PollFlags::IN));
                meanings.push((index, Occurrence::Ended));
            }
            if let Some(client) = child.client.as_ref().and_then(|client| client.socket.as_ref()) {
                fds.push(PollFd::new(client, HANGUP));
                meanings.push((index, Occurrence::ClientGone));
            }
        }
        if let Err(error) = poll(&mut fds, timeout.as_ref()) {
            if error != rustix::io::Errno::INTR {
                // The kernel is out of memory: try again later.
                thread::sleep(LOOK_INTERVAL);
            }
            return Default::default();
        }
        let happened = |(fd, (_, meaning)): &(&PollFd<'_>, (usize, Occurrence))| match meaning {
            Occurrence::Messages | Occurrence::Ended => fd.revents().intersects(PollFlags::IN | PollFlags::OUT),
            Occurrence::ClientGone => !fd.revents().is_empty(),
        };
        fds[1..].iter().zip(meanings).filter(happened).map(|(_, occurrence)| occurrence).collect()
    }

    fn act(&mut self, job: Job) {
        match job {
            Job::Start { program, compiler_cache, state, grace, reply } => {
                let started = self.start(&program, compiler_cache, state, grace);
                let _ = reply.send(started);
            }
            Job::KillAfterGrace { id, deadline } => {
                if let Some(child) = self.child(id) {
                    child.deadline.get_or_insert(deadline);
                }
            }
            Job::Release { id, deadline, on_exit } => match self.child(id) {
                Some(child) => {
                    child.deadline.get_or_insert(deadline);
                    child.on_exit = on_exit;
                }
                None => {
                    if let Some(on_exit) = on_exit {
                        on_exit();
                    }
                }
            },
            Job::Answer { id, answer, place } => {
                if let Some(child) = self.child(id) {
                    child.answer(&answer, place);
                }
            }
            Job::ReservationsChanged { id } => {
                if let Some(child) = self.child(id) {
                    child.send_unsent();
                }
            }
            Job::Pass(PassJob { id, connection, queued, reply }) => {
                let passed = match self.child(id) {
                    Some(child) => child.pass(*connection, queued),
                    None => Err(io::Error::other("the process of the session has ended")),
                };
                let _ = reply.send(passed);
            }
            Job::KillAll { state } => {
                let now = Instant::now();
                for child in self.children.iter_mut().filter(|child| Arc::ptr_eq(&child.state, &state)) {
                    child.deadline = Some(now);
                }
            }
        }
    }

    fn child(&mut self, id: u64) -> Option<&mut ChildEntry> {
        self.children.iter_mut().find(|child| child.process.id == id)
    }

    fn start(
        &mut self,
        program: &Program,
        compiler_cache: CompilerCache,
        state: Arc<ServerState>,
        grace: Duration,
    ) -> io::Result<Started> {
        let (stream, child_stream) = UnixStream::pair()?;
        let (control, reports) = UnixDatagram::pair()?;
        control.set_nonblocking(true)?;
        let mut command = self_start::command(program)?;
        command.arg(CHILD_ARGUMENT).arg(process::id().to_string());
        // In a process group of its own, so that the processes that it starts are killed with it.
        command.stdin(OwnedFd::from(child_stream)).stdout(OwnedFd::from(reports)).process_group(0);
        compiler_cache.give_to(&mut command);
        let child = command.spawn()?;
        // This closes our copies of the child's sockets.
        drop(command);
        let pid = Pid::from_child(&child);
        self.next_id += 1;
        let process = Arc::new(Process {
            id: self.next_id,
            pid,
            handles: AtomicU64::new(0),
            memory_bytes: AtomicU64::new(0),
            grace,
            kill_requested: AtomicBool::new(false),
            leases: Mutex::default(),
            logs: Mutex::default(),
            reservations_changed: AtomicBool::new(false),
            end_report: watch::Sender::default(),
            client_is_gone: AtomicBool::new(false),
            functions_used: Arc::default(),
            end: Mutex::default(),
        });
        self.children.push(ChildEntry {
            process: process.clone(),
            child,
            ended: end_of(pid),
            control,
            client: None,
            unsent: UnsentAnswers::default(),
            state,
            look: false,
            deadline: None,
            killed: false,
            on_exit: None,
        });
        Ok(Started { stream, process_guard: ProcessGuard { process, on_exit: None }, compiler_cache })
    }
}

/// Returns true for an error of a socket whose process is gone.
fn is_gone(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, NotConnected};
    matches!(error.kind(), BrokenPipe | ConnectionRefused | ConnectionReset | NotConnected)
}

impl ChildEntry {
    /// Returns the time after which the process needs attention without an event.
    fn wait(&self, now: Instant) -> Option<Duration> {
        let look = self.ended.is_none().then_some(LOOK_INTERVAL);
        let kill = self.deadline.filter(|_| !self.killed).map(|deadline| deadline.saturating_duration_since(now));
        look.into_iter().chain(kill).min()
    }

    /// Sends answers that have waited for room, and takes some messages of the process. Returns
    /// true if there may be more.
    fn take_messages(&mut self) -> bool {
        self.send_unsent();
        let mut buffer = [0; ControlMessage::MAX_LEN];
        for _ in 0..MESSAGES_AT_ONCE {
            let Ok(len) = self.control.recv(&mut buffer) else { return false };
            let mut refused = None;
            match ControlMessage::from_bytes(&buffer[..len]) {
                Some(ControlMessage::Report(report)) => {
                    self.process.report(report.usage);
                    if report.asks {
                        self.answer(&ControlAnswer::Totals(self.state.totals_here()), None);
                    }
                }
                Some(ControlMessage::Lease(command)) => {
                    if let Some(leases) = &mut *self.process.leases.lock() {
                        leases.act(command);
                    }
                }
                Some(ControlMessage::Logs(command)) => match &*self.process.logs.lock() {
                    Some(logs) => refused = logs.act(command).err(),
                    None => refused = Some(process_logs::not_allowed(command.question)),
                },
                Some(ControlMessage::Session(SessionNotice::Queue { bytes, lasting, number })) => {
                    let outcome = match &mut self.client {
                        Some(client) => client.queue(bytes, lasting),
                        None => Err(RpcError::internal("the process serves no client")),
                    };
                    if let Some(number) = number {
                        self.answer(&ControlAnswer::Order(SessionOrder::Queued { number, outcome }), None);
                    }
                }
                // All notices are about a session that the process serves.
                Some(ControlMessage::Session(_)) if self.client.is_none() => {}
                Some(ControlMessage::Session(SessionNotice::Ending)) => {
                    // From here on no lease of the session ends by its time, so that the process
                    // has to end by its own.
                    self.process.session_ends();
                    self.deadline.get_or_insert(Instant::now() + self.process.grace);
                }
                Some(ControlMessage::Session(SessionNotice::Ended { report, functions })) => {
                    functions.iter().for_each(|name| self.process.functions_used.add(name));
                    self.process.end_report.send_replace(Some(report));
                }
                None => {}
            }
            if let Some(refused) = refused {
                self.answer(&ControlAnswer::Logs(refused), None);
            }
        }
        true
    }

    /// Passes the socket of the client, and watches it from then on.
    fn pass(&mut self, connection: PassedConnection, queued: Arc<MemoryQuota>) -> io::Result<()> {
        let PassedConnection { socket, mark, state } = connection;
        let order = ControlAnswer::Order(SessionOrder::Take(Box::new(state))).to_bytes();
        if order.len() > ControlAnswer::MAX_LEN || !self.unsent.is_empty() || self.process.has_ended() {
            return Err(io::Error::other("there is too much input to be passed on, or the process does not read"));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SessionOrder::DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let descriptors = [socket.as_fd(), mark.as_fd()];
        ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        sendmsg(&self.control, &[IoSlice::new(&order)], &mut ancillary, SendFlags::NOSIGNAL)?;
        self.client = Some(PassedClient::new(socket, queued));
        Ok(())
    }

    /// Sends an answer as soon as the socket has room, in order.
    fn answer(&mut self, answer: &ControlAnswer, place: Option<OwnedSemaphorePermit>) {
        self.unsent.push(answer.to_bytes(), place);
        self.send_unsent();
        if self.unsent.are_too_many() {
            self.unsent = UnsentAnswers::default();
            self.deadline = Some(Instant::now());
        }
    }

    /// Sends what has waited for room, and then the devices that are reserved for other sessions,
    /// if they have changed: a process that does not read is sent the last of many changes.
    fn send_unsent(&mut self) {
        loop {
            while let Some(answer) = self.unsent.first() {
                match self.control.send(answer) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                    Err(error) if !is_gone(&error) => {
                        // The process would wait for what is lost, and others for its answer.
                        self.unsent = UnsentAnswers::default();
                        self.deadline = Some(Instant::now());
                        return;
                    }
                    _ => self.unsent.remove_first(),
                }
            }
            // Cleared before the reservations are read, so that no later change is missed.
            if !self.process.reservations_changed.swap(false, Ordering::AcqRel) {
                return;
            }
            let list = self.process.leases.lock().as_ref().and_then(ProcessLeases::take_reserved_for_others);
            let answer =
                list.map(|(number, devices)| ControlAnswer::Lease(LeaseAnswer::ReservedForOthers { number, devices }));
            if let Some(answer) = answer {
                self.unsent.push(answer.to_bytes(), None);
            }
        }
    }

    /// Returns true once the process has ended. Then reaps it, and wakes the tasks that wait for
    /// the exit cause.
    fn is_over(&mut self, now: Instant) -> bool {
        // The process group id cannot be reused before the process is reaped.
        let kill = || kill_process_group(self.process.pid, Signal::KILL);
        let status = || {
            let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
            waitid(WaitId::Pid(self.process.pid), look)
        };
        if !self.killed && self.deadline.is_some_and(|deadline| deadline <= now) {
            // One that has ended by itself keeps its exit cause, however late this thread looks.
            if matches!(status(), Ok(None)) {
                self.killed = true;
                if self.process.grace > GRACE {
                    kill_orphans_of(self.process.pid);
                }
                let _ = kill();
            } else {
                self.look = true;
            }
        }
        if !std::mem::take(&mut self.look) && self.ended.is_some() {
            return false;
        }
        match status() {
            Ok(None) => return false,
            Ok(Some(_)) => drop(kill()),
            // Other code has reaped it, and its process group cannot be found any more.
            Err(_) => {}
        }
        // Its last messages, such as the report on the session. Other processes may have its
        // socket, and send without end.
        let mut rounds = 0..LAST_ROUNDS;
        while rounds.next().is_some() && self.take_messages() {}
        let status = self.child.try_wait().ok().flatten();
        let exit_cause = ExitCause { status, killed: self.killed };
        tracing::debug!(pid = self.process.pid.as_raw_nonzero(), ?exit_cause, "a session process has ended");
        let wakers = {
            let mut end = self.process.end();
            end.exit_cause = Some(exit_cause);
            std::mem::take(&mut end.wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
        if let Some(on_exit) = self.on_exit.take() {
            on_exit();
        }
        true
    }
}

#[cfg(target_os = "linux")]
fn end_of(pid: Pid) -> Option<OwnedFd> {
    rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok()
}

#[cfg(not(target_os = "linux"))]
fn end_of(_pid: Pid) -> Option<OwnedFd> {
    None
}
