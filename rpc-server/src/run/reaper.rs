//! The reaper process of one program: it starts the program, and ends and reaps all that the
//! program starts.
//!
//! The reaper has a session of the kernel of its own, so that signals to the session process and
//! its group do not reach it: it ends when the connection does.

use std::collections::HashSet;
use std::fs;
use std::io::{self, Read as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use std::{process, thread};

use rpc_core::client::{EndCause, RunStatus};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, WaitStatus, getpid, kill_process_group, pidfd_open, set_child_subreaper,
    set_parent_process_death_signal, setsid, wait, waitpid,
};

use super::messages::{self, ProgramSetup, ReaperStart, Started, TERMINATE};
use super::namespace;
use super::process_tree::{ProcessEntry, SignalledGroups, descendants, for_each_descendant, newest_pid};
use super::start::start;
use super::system_calls::exit_at_once;
use crate::isolate::GRACE;
use crate::server::exit_code;
use crate::socket_guard::is_guard;

/// First argument of a reaper process that is executed, instead of copied.
pub(crate) const REAPER_ARGUMENT: &str = "--reap-run-program";

/// Time in which killed processes are gone, unless the kernel holds them.
pub(super) const KILL_LIMIT: Duration = Duration::from_secs(2);

/// Interval at which the processes of a program are counted, and those that have ended are reaped.
const TICK: Duration = Duration::from_millis(100);

/// The same interval while many processes are started.
const SHORT_TICK: Duration = Duration::from_millis(5);

/// Interval at which the processes of a program are counted that has enough of them to exceed its
/// limit by leaving their session of the kernel.
const SESSIONS_TICK: Duration = Duration::from_secs(1);

/// Number of new processes in a millisecond, of the whole system, from which the interval is short.
const MANY_IN_MS: f64 = 0.25;

/// Returns the number of processes that a session of the kernel counts as, beside those in it,
/// where a program may have `max`.
///
/// The scheduler gives each session as large a part of the processors as the server
/// (`sched_autogroup_enabled`). A program that computed in hundreds of them would keep the server
/// from seeing for many seconds that its client is lost.
fn session_cost(max: u32) -> u32 {
    (max / 32).min(32)
}

/// Runs one program and exits. Standard input is the connection to the session process.
pub(crate) fn run_executed() -> ! {
    match io::stdin().as_fd().try_clone_to_owned() {
        Ok(control) => run(control.into()),
        Err(error) => {
            exit_code::report(&error);
            process::exit(exit_code::FAILURE.into());
        }
    }
}

/// Number of looks at most in which a server kills what is left of a session process: its thread
/// has the other processes to look after.
const ORPHAN_LOOKS: u32 = 5;

/// Runs one program and exits.
pub(super) fn run(control: UnixStream) -> ! {
    let outcome = serve(&control);
    if let Err(error) = &outcome {
        exit_code::report(error);
    }
    exit_at_once(if outcome.is_ok() { 0 } else { exit_code::FAILURE })
}

fn serve(control: &UnixStream) -> io::Result<()> {
    let _ = rustix::thread::set_name(c"rpc-run");
    let id = namespace::outer_pid().unwrap_or_else(getpid).as_raw_nonzero().get();
    if namespace::is_own() && namespace::mount_proc().is_err() {
        return messages::send(control, &ReaperStart::NoNamespace(Some(id)));
    }
    messages::send(control, &ReaperStart::Ready(id))?;
    let Some((setup, streams)) = ProgramSetup::receive(control)? else { return Ok(()) };
    // Not before: the session process knows this reaper now, and does not take it for an orphan.
    setsid()?;
    set_child_subreaper(Some(getpid()))?;
    // A reaper that its program has stopped runs again when the session process is killed, which
    // could continue it. Harmless at other times: the thread that has started it may end earlier.
    set_parent_process_death_signal(Some(Signal::CONT))?;
    let started = Instant::now();
    let pid = match start(&setup, streams) {
        Ok(pid) => pid,
        Err(error) => {
            let number = error.raw_os_error().unwrap_or(Errno::INVAL.raw_os_error());
            return messages::send(control, &Started::Failed(number));
        }
    };
    let mut program = Program {
        pid,
        exit: None,
        ended_by: None,
        // A time that no clock can express is never reached.
        deadline: setup.time_limit.and_then(|limit| started.checked_add(limit)),
        processes: ProcessLimit::new(pid, setup.max_processes),
    };
    let told = messages::send(control, &Started::Running);
    let watched = told.and_then(|()| program.watch(control));
    // Kills the program, too, if it still runs.
    program.kill();
    if watched.is_ok() {
        // Without the session process there is no one to tell.
        let _ = messages::send(control, &program.status());
    }
    program.kill_late_descendants();
    watched
}

/// A running program.
struct Program {
    /// Id of the program, and of its process group, until it is reaped.
    pid: Pid,
    /// Exit status, once it has been reaped.
    exit: Option<WaitStatus>,
    ended_by: Option<EndCause>,
    /// Time of the next step: the end of the time limit, or of the grace.
    deadline: Option<Instant>,
    processes: ProcessLimit,
}

impl Program {
    /// Waits until the program has exited or is to be killed.
    fn watch(&mut self, mut control: &UnixStream) -> io::Result<()> {
        let exited = pidfd_open(self.pid, PidfdFlags::empty())?;
        loop {
            let tick = self.processes.tick;
            let left = self.deadline.map_or(tick, |deadline| deadline.saturating_duration_since(Instant::now()));
            let timeout = Timespec::try_from(left.min(tick)).ok();
            let mut fds = [PollFd::new(&exited, PollFlags::IN), PollFd::new(control, PollFlags::IN)];
            match poll(&mut fds, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let [has_exited, has_command] = [&fds[0], &fds[1]].map(|fd| !fd.revents().is_empty());
            // Before any descendant is reaped, so that the program still has its id.
            if has_exited || self.exit.is_some() {
                return Ok(());
            }
            if has_command {
                let mut byte = [0];
                match control.read(&mut byte) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    // The session has ended, or its process has.
                    Ok(0) | Err(_) => return Ok(()),
                    Ok(_) if byte == [TERMINATE] => self.terminate(EndCause::Client),
                    // A newer program may send another byte.
                    Ok(_) => {}
                }
            }
            if self.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                if self.ended_by.is_some() {
                    return Ok(());
                }
                self.terminate(EndCause::TimeLimit);
            }
            self.reap();
            if self.processes.is_exceeded() {
                self.ended_by.get_or_insert(EndCause::ProcessLimit);
                return Ok(());
            }
        }
    }

    /// Begins to end the program, unless that has begun.
    fn terminate(&mut self, cause: EndCause) {
        if self.ended_by.is_none() {
            self.ended_by = Some(cause);
            self.deadline = Some(Instant::now() + GRACE);
            // A stopped program receives the first signal only after the second.
            for signal in [Signal::TERM, Signal::CONT] {
                let _ = kill_process_group(self.pid, signal);
            }
        }
    }

    /// Reaps the program, if it has exited, and those of its descendants that have become children
    /// of this process. Returns true if there are others.
    fn reap(&mut self) -> bool {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) if pid == self.pid => self.exit = Some(status),
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => return true,
                Err(_) => return false,
            }
        }
    }

    /// Kills the program and all its descendants, and reaps them, for at most [`KILL_LIMIT`].
    fn kill(&mut self) {
        let deadline = Instant::now() + KILL_LIMIT;
        if namespace::is_own() {
            namespace::kill_all();
            while self.reap() && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(1));
            }
            return;
        }
        if self.exit.is_none() {
            // The whole group at once, so that its processes cannot fork faster than they are
            // found.
            let _ = kill_process_group(self.pid, Signal::KILL);
        }
        // Orphans are children of this process, so that without a child there is no descendant.
        while self.reap() && Instant::now() < deadline {
            // Those that have been killed are not reaped while others live: where the system has no
            // room for more processes, that would make room.
            while kill_descendants() > 0 && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Kills and reaps descendants until none is left: those that fork as fast as they are killed,
    /// and those that the kernel holds. In a namespace the kernel waits for the latter.
    fn kill_late_descendants(&mut self) {
        if namespace::is_own() {
            return;
        }
        let mut pause = Duration::from_millis(1);
        while self.reap() {
            while kill_descendants() > 0 {
                thread::sleep(pause);
                pause = (2 * pause).min(TICK);
            }
        }
    }

    fn status(&self) -> RunStatus {
        let exit = self.exit.as_ref();
        RunStatus {
            code: exit.and_then(|exit| exit.exit_status()),
            signal: exit.and_then(|exit| exit.terminating_signal()),
            ended_by: self.ended_by,
        }
    }
}

/// Kills all descendants that are found, each as soon as it is found. Returns the number of those
/// that had not ended.
fn kill_descendants() -> u32 {
    let (mut live, mut groups) = (0, SignalledGroups::default());
    let kill = |process: &ProcessEntry| {
        live += u32::from(!process.is_zombie);
        groups.signal(process, Signal::KILL);
    };
    for_each_descendant(getpid(), |_| true, kill);
    live
}

/// Processes of a program.
#[derive(Clone, Copy, Debug)]
struct Count {
    processes: u32,
    /// Sessions of the kernel in which they are, beside that of the program.
    sessions: u32,
}

impl Count {
    /// Returns what counts against the limit `max`.
    fn total(self, max: u32) -> u32 {
        self.sessions.saturating_mul(session_cost(max)).saturating_add(self.processes)
    }

    /// Counts the descendants that have not ended. Above `max` it kills those that it finds, as
    /// among many processes the next look may be a long time away. `program` leads the program's
    /// own session of the kernel.
    fn of_descendants(program: Pid, max: u32) -> Self {
        let (mut count, mut groups) = (Self { processes: 0, sessions: 0 }, SignalledGroups::default());
        let mut seen = HashSet::from([program.as_raw_nonzero().get()]);
        let count_one = |process: &ProcessEntry| {
            if !process.is_zombie {
                count.processes += 1;
                count.sessions += u32::from(seen.insert(process.session));
            }
            if count.total(max) > max {
                groups.signal(process, Signal::KILL);
            }
        };
        for_each_descendant(getpid(), |_| true, count_one);
        count
    }
}

/// Limit on the processes of a program.
struct ProcessLimit {
    /// The program, and so the session of the kernel that it leads.
    program: Pid,
    max: u32,
    /// The last count, and its time.
    counted: (Count, Instant),
    /// Id of the newest process of the system at that time.
    newest: Option<u32>,
    /// Time of the last look, and the id at that time.
    looked: (Instant, Option<u32>),
    /// True if there were several more processes at the last count than at that before.
    has_grown: bool,
    /// Time until the next look.
    tick: Duration,
}

impl ProcessLimit {
    /// Returns the limit for a program that has just been started. Its processes are counted at the
    /// first look, which most programs do not live to see.
    fn new(program: Pid, max: u32) -> Self {
        let now = Instant::now();
        let counted = (Count { processes: 1, sessions: 0 }, now);
        Self { program, max, counted, newest: None, looked: (now, None), has_grown: true, tick: SHORT_TICK }
    }

    /// Returns true if the program has more processes than it may. Counts them only if the system
    /// has started enough since the last time.
    fn is_exceeded(&mut self) -> bool {
        let (now, newest) = (Instant::now(), newest_pid());
        let since = |before: Option<u32>| newest?.checked_sub(before?);
        let (before, newest_before) = std::mem::replace(&mut self.looked, (now, newest));
        let elapsed_ms = now.duration_since(before).as_secs_f64() * 1e3;
        let has_many = match since(newest_before) {
            Some(started) => f64::from(started) > MANY_IN_MS * elapsed_ms.max(1.0),
            // A service may not see what the system has started (`ProcSubset=pid`).
            None => self.has_grown,
        };
        self.tick = if has_many { SHORT_TICK } else { TICK };
        if since(self.newest).is_some_and(|started| !self.may_be_exceeded(started, now)) {
            return false;
        }
        self.newest = newest;
        let counted = Count::of_descendants(self.program, self.max);
        self.has_grown = counted.processes > self.counted.0.processes.saturating_add(1);
        self.counted = (counted, now);
        counted.total(self.max) > self.max
    }

    /// Returns true if the processes are to be counted, where the system has started `started` of
    /// them since the last count.
    fn may_be_exceeded(&self, started: u32, now: Instant) -> bool {
        let (counted, time) = self.counted;
        let total = |processes, sessions| Count { processes, sessions }.total(self.max);
        let processes = counted.processes.saturating_add(started);
        // Those that were there may have left their session meanwhile, which no other number shows.
        let is_due = now.duration_since(time) >= SESSIONS_TICK && total(processes, processes) > self.max;
        is_due || total(processes, counted.sessions.saturating_add(started)) > self.max
    }
}

/// Makes this session process the parent of the descendants that a failed reaper leaves.
pub(crate) fn adopt_orphans() -> io::Result<()> {
    Ok(set_child_subreaper(Some(getpid()))?)
}

/// Kills and reaps the processes that a failed reaper has left to this session process: those that
/// are in another session of the kernel than it is, and are neither reapers nor the guard of socket
/// files. `is_reaper` is asked after each look at the processes, so that it knows a reaper that was
/// started before the look. Goes on for at most `limit`. Returns true if none is left.
pub(super) fn end_orphans(is_reaper: impl Fn(Pid) -> bool, limit: Duration) -> bool {
    let Some(own) = ProcessEntry::read(getpid()) else { return false };
    let is_orphan =
        |process: &ProcessEntry| process.session != own.session && !is_reaper(process.pid) && !is_guard(process.pid);
    let deadline = Instant::now() + limit;
    // One look may miss a process whose parent ends meanwhile.
    let mut empty_looks = 0;
    while empty_looks < 2 {
        let orphans = descendants(getpid(), is_orphan);
        if orphans.is_empty() {
            empty_looks += 1;
            continue;
        }
        empty_looks = 0;
        orphans.iter().for_each(ProcessEntry::kill);
        for orphan in &orphans {
            // Only its parent can reap it, which is this process once its own parent has ended.
            let _ = waitpid(Some(orphan.pid), WaitOptions::NOHANG);
        }
        if Instant::now() >= deadline {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Kills what failed reapers have left to a session process that is about to be killed, and cannot
/// do so itself any more. Leaves its reapers, which end their programs when it is gone.
pub(crate) fn kill_orphans_of(session_process: Pid) {
    let executable = |pid: Pid| fs::read_link(format!("/proc/{}/exe", pid.as_raw_nonzero())).ok();
    let Some(own) = ProcessEntry::read(session_process) else { return };
    let own_executable = executable(session_process);
    let is_orphan =
        |process: &ProcessEntry| process.session != own.session && executable(process.pid) != own_executable;
    // Those that are started during one look are found by the next.
    for _ in 0..ORPHAN_LOOKS {
        let orphans = descendants(session_process, is_orphan);
        if orphans.is_empty() {
            return;
        }
        orphans.iter().for_each(ProcessEntry::kill);
    }
}
