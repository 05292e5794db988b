//! The reapers of this session process, and a thread that guards them. Programs have the same user
//! as their reapers, and can stop and kill them.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::process::{Pid, Signal, kill_process};

use super::process_tree::ProcessEntry;
use super::reaper::{REAPER_ARGUMENT, end_orphans};
use crate::this_program::this_program_again;

/// Interval at which the thread looks at the reapers.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Number of looks in sequence after which a reaper that is stopped at each of them is killed.
const STOPPED_LOOKS: u32 = 5;

/// The reapers that have not been reaped.
static REAPERS: Mutex<Vec<Reaper>> = Mutex::new(Vec::new());

/// Held during a look, so that the end of the session waits for one that ends what a failed reaper
/// has left.
static LOOK: Mutex<()> = Mutex::new(());

/// Condition that the list is not empty.
static HAS_REAPERS: Condvar = Condvar::new();

/// True once the thread has been started.
static IS_GUARDED: Mutex<bool> = Mutex::new(false);

struct Reaper {
    process: Child,
    /// Number of the last looks in sequence at which it was stopped.
    stopped_looks: u32,
}

impl Reaper {
    fn pid(&self) -> Pid {
        Pid::from_child(&self.process)
    }

    fn is_stopped(&self) -> bool {
        ProcessEntry::read(self.pid()).is_some_and(|entry| entry.is_stopped)
    }

    /// Lets it run again if its program has stopped it.
    fn resume(&self) {
        let _ = kill_process(self.pid(), Signal::CONT);
    }
}

/// Starts a reaper. Returns its id and the connection to it.
pub(super) fn start_reaper() -> io::Result<(Pid, UnixStream)> {
    {
        let mut is_guarded = IS_GUARDED.lock();
        if !*is_guarded {
            thread::Builder::new().name("rpc-run-guard".to_owned()).spawn(guard)?;
            *is_guarded = true;
        }
    }
    let (control, far) = UnixStream::pair()?;
    let mut command = this_program_again()?;
    command.arg(REAPER_ARGUMENT).stdin(OwnedFd::from(far)).stdout(Stdio::null());
    // Held until the process is in the list, so that it is never taken for an orphan.
    let mut reapers = REAPERS.lock();
    let process = command.spawn()?;
    let reaper = Reaper { process, stopped_looks: 0 };
    let pid = reaper.pid();
    reapers.push(reaper);
    HAS_REAPERS.notify_one();
    Ok((pid, control))
}

/// Lets a reaper run again, if its program has stopped it.
pub(super) fn resume(pid: Pid) {
    // What is not in the list has been reaped, and its id may be that of another process.
    REAPERS.lock().iter().filter(|reaper| reaper.pid() == pid).for_each(Reaper::resume);
}

/// Waits until all reapers have ended: for about `limit`, and some seconds longer if processes
/// cannot be killed. Reapers that stay stopped are killed, and what they leave with them. All
/// programs must have been dropped, or will soon be. Blocks.
pub(crate) fn end_reapers(limit: Duration) {
    let started = Instant::now();
    while started.elapsed() < limit {
        // The server may kill this process before the limit has passed.
        let kills_stopped = started.elapsed() > limit / 4;
        if !look(|reaper| kills_stopped && reaper.is_stopped()) {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Looks at the reapers for ever.
fn guard() {
    loop {
        let mut reapers = REAPERS.lock();
        while reapers.is_empty() {
            HAS_REAPERS.wait(&mut reapers);
        }
        drop(reapers);
        look(|reaper| {
            reaper.stopped_looks = if reaper.is_stopped() { reaper.stopped_looks + 1 } else { 0 };
            reaper.stopped_looks >= STOPPED_LOOKS
        });
        thread::sleep(LOOK_INTERVAL);
    }
}

/// Reaps the reapers that have ended, kills those that `must_end` names, and lets the others run.
/// Ends what failed reapers have left. Returns true if there are others.
fn look(mut must_end: impl FnMut(&mut Reaper) -> bool) -> bool {
    let _look = LOOK.lock();
    let mut reapers = REAPERS.lock();
    let mut has_failed = false;
    reapers.retain_mut(|reaper| {
        if must_end(reaper) {
            let _ = reaper.process.kill();
        } else {
            reaper.resume();
        }
        match reaper.process.try_wait() {
            Ok(None) => true,
            ended => {
                // A reaper that succeeds has left nothing.
                has_failed |= ended.ok().flatten().is_none_or(|status| !status.success());
                false
            }
        }
    });
    let are_left = !reapers.is_empty();
    drop(reapers);
    if has_failed {
        // Its descendants are those of this process, now that it has been reaped.
        end_orphans(is_reaper);
    }
    are_left
}

/// Returns true if `pid` is the id of a reaper.
fn is_reaper(pid: Pid) -> bool {
    REAPERS.lock().iter().any(|reaper| reaper.pid() == pid)
}
