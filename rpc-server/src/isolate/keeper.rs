//! The thread that starts the processes of sessions, watches them, ends and reaps them.
//!
//! There is one for all servers of a process, and it never exits: on Linux the signal by which a process learns of the death
//! of its parent follows the *thread* that started it. It holds no locks while it works, and never waits for a process.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};
use std::{env, process, thread};

use rpc_core::Usage;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use tokio::sync::oneshot;

use super::fate::Fate;
use super::messages::Report;
use super::{CHILD_ARGUMENT, GRACE};
use crate::session::ServerState;

/// The process of a session, as its server sees it.
pub(super) struct Process {
    id: u64,
    pid: Pid,
    /// What the session holds, as it has last reported.
    handles: AtomicU64,
    memory_bytes: AtomicU64,
    condemned: AtomicBool,
    end: Mutex<End>,
}

#[derive(Default)]
struct End {
    fate: Option<Fate>,
    waiting: Vec<Waker>,
}

impl Process {
    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    /// Whether it is known to have ended.
    pub(super) fn has_ended(&self) -> bool {
        self.end().fate.is_some()
    }

    pub(super) fn usage(&self) -> Usage {
        let read = |number: &AtomicU64| number.load(Ordering::Relaxed);
        Usage { handles: read(&self.handles), memory_bytes: read(&self.memory_bytes) }
    }

    /// Resolves when the process has been reaped.
    pub(super) fn poll_fate(&self, cx: &mut Context<'_>) -> Poll<Fate> {
        let mut end = self.end();
        match end.fate {
            Some(fate) => Poll::Ready(fate),
            None => {
                if !end.waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
                    end.waiting.push(cx.waker().clone());
                }
                Poll::Pending
            }
        }
    }

    /// The process cannot serve any more: it is killed if it has not ended by itself after [`GRACE`].
    pub(super) fn condemn(&self) {
        if !self.condemned.swap(true, Ordering::Relaxed) {
            submit(Job::Condemn { id: self.id, deadline: Instant::now() + GRACE });
        }
    }

    fn report(&self, usage: Usage) {
        self.handles.store(usage.handles, Ordering::Relaxed);
        self.memory_bytes.store(usage.memory_bytes, Ordering::Relaxed);
    }

    fn end(&self) -> MutexGuard<'_, End> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is done when a process is gone, on the keeper's thread: must not block.
type Afterwards = Box<dyn FnOnce() + Send + Sync>;

/// A process that is in use. Dropping this gives it [`GRACE`] to end, and kills it then.
pub(super) struct Tenancy {
    process: Arc<Process>,
    afterwards: Option<Afterwards>,
}

impl Tenancy {
    pub(super) fn process(&self) -> &Arc<Process> {
        &self.process
    }

    /// What is to be done when this was dropped and the process is gone.
    pub(super) fn afterwards(&mut self, afterwards: impl FnOnce() + Send + Sync + 'static) {
        self.afterwards = Some(Box::new(afterwards));
    }
}

impl Drop for Tenancy {
    fn drop(&mut self) {
        let afterwards = self.afterwards.take();
        submit(Job::Retire { id: self.process.id, deadline: Instant::now() + GRACE, afterwards });
    }
}

/// A process that was started, and the connection to it.
pub(super) struct Started {
    pub(super) stream: UnixStream,
    pub(super) tenancy: Tenancy,
}

/// Starts a process. It may ask for the totals of `state`.
///
/// # Errors
///
/// The program cannot be executed, or the system is out of processes or files.
pub(super) async fn start(state: Arc<ServerState>) -> io::Result<Started> {
    let (reply, answer) = oneshot::channel();
    submit(Job::Start { state, reply });
    // If nobody waits any more, dropping what was started ends it.
    answer.await.unwrap_or_else(|_| Err(io::Error::other("the thread that starts processes is gone")))
}

/// Kills the processes of one server without grace.
pub(super) fn kill_all(state: &Arc<ServerState>) {
    submit(Job::KillAll { state: state.clone() });
}

/// What the keeper is asked to do. The queue is not bounded: its length is that of the sessions that begin or end.
enum Job {
    Start { state: Arc<ServerState>, reply: oneshot::Sender<io::Result<Started>> },
    Condemn { id: u64, deadline: Instant },
    Retire { id: u64, deadline: Instant, afterwards: Option<Afterwards> },
    KillAll { state: Arc<ServerState> },
}

/// The way to the keeper.
struct Desk {
    jobs: Sender<Job>,
    /// A byte on it says that there are jobs.
    bell: UnixStream,
}

/// Hands a job to the keeper, which is started at the first. Without one the job is dropped, and there are no processes.
fn submit(job: Job) {
    static DESK: Mutex<Option<Desk>> = Mutex::new(None);
    let mut desk = DESK.lock().unwrap_or_else(PoisonError::into_inner);
    if desk.is_none() {
        match Desk::open() {
            Ok(opened) => *desk = Some(opened),
            Err(error) => tracing::error!(%error, "cannot start the thread that keeps the processes of sessions"),
        }
    }
    if let Some(desk) = &*desk {
        let _ = desk.jobs.send(job);
        // A bell that is full has been rung.
        let _ = (&desk.bell).write(&[0]);
    }
}

impl Desk {
    fn open() -> io::Result<Self> {
        let (bell, ring) = UnixStream::pair()?;
        bell.set_nonblocking(true)?;
        ring.set_nonblocking(true)?;
        let (jobs, queue) = mpsc::channel();
        let mut keeper = Keeper { queue, ring, tenants: Vec::new(), next_id: 0 };
        thread::Builder::new().name("rpc-isolation".into()).spawn(move || keeper.run())?;
        Ok(Self { jobs, bell })
    }
}

struct Keeper {
    queue: Receiver<Job>,
    ring: UnixStream,
    tenants: Vec<Tenant>,
    next_id: u64,
}

/// A process that has not been reaped.
struct Tenant {
    process: Arc<Process>,
    child: Child,
    /// Readable once the process has ended. Without one, on other systems than Linux, the process is looked at now and then.
    ended: Option<OwnedFd>,
    /// Where reports arrive.
    control: UnixDatagram,
    state: Arc<ServerState>,
    /// It may have ended.
    look: bool,
    /// When it is killed.
    deadline: Option<Instant>,
    killed: bool,
    afterwards: Option<Afterwards>,
}

/// How often processes are looked at whose end is not announced.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// How many reports of one process are read before others have their turn.
const REPORTS_AT_ONCE: usize = 16;

impl Keeper {
    fn run(&mut self) {
        loop {
            let (reports, ended) = self.wait();
            let mut scrap = [0; 64];
            while matches!((&self.ring).read(&mut scrap), Ok(1..)) {}
            while let Ok(job) = self.queue.try_recv() {
                self.act(job);
            }
            // Jobs add tenants at the end, so the numbers still fit.
            for index in reports {
                self.tenants[index].take_reports();
            }
            for index in ended {
                self.tenants[index].look = true;
            }
            let now = Instant::now();
            self.tenants.retain_mut(|tenant| !tenant.is_over(now));
        }
    }

    /// Waits until there is something to do. Returns whose reports are there, and who has ended.
    fn wait(&self) -> (Vec<usize>, Vec<usize>) {
        let now = Instant::now();
        let waits = self.tenants.iter().filter_map(|tenant| tenant.wait(now));
        let timeout = waits.min().and_then(|wait| Timespec::try_from(wait).ok());
        let mut fds = vec![PollFd::new(&self.ring, PollFlags::IN)];
        let mut meanings = Vec::with_capacity(2 * self.tenants.len());
        for (index, tenant) in self.tenants.iter().enumerate() {
            fds.push(PollFd::new(&tenant.control, PollFlags::IN));
            meanings.push((index, false));
            if let Some(ended) = &tenant.ended {
                fds.push(PollFd::new(ended, PollFlags::IN));
                meanings.push((index, true));
            }
        }
        if let Err(error) = poll(&mut fds, timeout.as_ref()) {
            if error != rustix::io::Errno::INTR {
                // The kernel is out of memory. Better late than never.
                thread::sleep(LOOK_INTERVAL);
            }
            return Default::default();
        }
        let there = fds[1..].iter().zip(meanings).filter(|(fd, _)| fd.revents().contains(PollFlags::IN));
        let (ended, reports): (Vec<_>, Vec<_>) = there.map(|(_, meaning)| meaning).partition(|(_, ended)| *ended);
        let index = |(index, _)| index;
        (reports.into_iter().map(index).collect(), ended.into_iter().map(index).collect())
    }

    fn act(&mut self, job: Job) {
        match job {
            Job::Start { state, reply } => {
                let started = self.start(state);
                let _ = reply.send(started);
            }
            Job::Condemn { id, deadline } => {
                if let Some(tenant) = self.tenant(id) {
                    tenant.deadline.get_or_insert(deadline);
                }
            }
            Job::Retire { id, deadline, afterwards } => match self.tenant(id) {
                Some(tenant) => {
                    tenant.deadline.get_or_insert(deadline);
                    tenant.afterwards = afterwards;
                }
                None => {
                    if let Some(afterwards) = afterwards {
                        afterwards();
                    }
                }
            },
            Job::KillAll { state } => {
                let now = Instant::now();
                for tenant in self.tenants.iter_mut().filter(|tenant| Arc::ptr_eq(&tenant.state, &state)) {
                    tenant.deadline = Some(now);
                }
            }
        }
    }

    fn tenant(&mut self, id: u64) -> Option<&mut Tenant> {
        self.tenants.iter_mut().find(|tenant| tenant.process.id == id)
    }

    fn start(&mut self, state: Arc<ServerState>) -> io::Result<Started> {
        let (stream, theirs) = UnixStream::pair()?;
        let (control, reports) = UnixDatagram::pair()?;
        control.set_nonblocking(true)?;
        let (program, name) = this_program()?;
        let mut command = Command::new(program);
        command.arg0(name).arg(CHILD_ARGUMENT).arg(process::id().to_string());
        // In a group of its own, so that all can be killed that it starts in turn.
        command.stdin(OwnedFd::from(theirs)).stdout(OwnedFd::from(reports)).process_group(0);
        let child = command.spawn()?;
        // Our copies of the process's ends go with this.
        drop(command);
        let pid = Pid::from_child(&child);
        self.next_id += 1;
        let process = Arc::new(Process {
            id: self.next_id,
            pid,
            handles: AtomicU64::new(0),
            memory_bytes: AtomicU64::new(0),
            condemned: AtomicBool::new(false),
            end: Mutex::default(),
        });
        self.tenants.push(Tenant {
            process: process.clone(),
            child,
            ended: end_of(pid),
            control,
            state,
            look: false,
            deadline: None,
            killed: false,
            afterwards: None,
        });
        Ok(Started { stream, tenancy: Tenancy { process, afterwards: None } })
    }
}

impl Tenant {
    /// After which time it has to be looked at, whatever happens.
    fn wait(&self, now: Instant) -> Option<Duration> {
        let look = self.ended.is_none().then_some(LOOK_INTERVAL);
        let kill = self.deadline.filter(|_| !self.killed).map(|deadline| deadline.saturating_duration_since(now));
        look.into_iter().chain(kill).min()
    }

    fn take_reports(&self) {
        let mut buffer = [0; Report::LEN + 1];
        for _ in 0..REPORTS_AT_ONCE {
            let Ok(len) = self.control.recv(&mut buffer) else { return };
            let Some(report) = Report::from_bytes(&buffer[..len]) else { continue };
            self.process.report(report.usage);
            if report.asks {
                // If there is no room for the answer, nobody has read those before.
                let _ = self.control.send(&self.state.totals_here().to_bytes());
            }
        }
    }

    /// Whether the process has ended. If so it is reaped, and whoever waits is told.
    fn is_over(&mut self, now: Instant) -> bool {
        // Until the process is reaped, the number of its group cannot become another one's.
        let kill = || kill_process_group(self.process.pid, Signal::KILL);
        if !self.killed && self.deadline.is_some_and(|deadline| deadline <= now) {
            self.killed = true;
            let _ = kill();
        }
        if !std::mem::take(&mut self.look) && self.ended.is_some() {
            return false;
        }
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        match waitid(WaitId::Pid(self.process.pid), look) {
            Ok(None) => return false,
            Ok(Some(_)) => drop(kill()),
            // Somebody else has reaped it, and what it has started cannot be found any more.
            Err(_) => {}
        }
        let status = self.child.try_wait().ok().flatten();
        let fate = Fate { status, killed: self.killed };
        tracing::debug!(pid = self.process.pid.as_raw_nonzero(), ?fate, "the process of a session ended");
        let waiting = {
            let mut end = self.process.end();
            end.fate = Some(fate);
            std::mem::take(&mut end.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
        if let Some(afterwards) = self.afterwards.take() {
            afterwards();
        }
        true
    }
}

/// This very program, even if its file has been replaced since, and the name that it was called by.
pub(crate) fn this_program() -> io::Result<(PathBuf, OsString)> {
    const RUNNING: &str = "/proc/self/exe";
    let path = if Path::new(RUNNING).exists() { RUNNING.into() } else { env::current_exe()? };
    let name = env::args_os().next().unwrap_or_else(|| path.clone().into_os_string());
    Ok((path, name))
}

#[cfg(target_os = "linux")]
fn end_of(pid: Pid) -> Option<OwnedFd> {
    rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok()
}

#[cfg(not(target_os = "linux"))]
fn end_of(_pid: Pid) -> Option<OwnedFd> {
    None
}
