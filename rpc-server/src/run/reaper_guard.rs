//! The reapers of this session process, and a thread that guards them. Programs have the same user
//! as their reapers, and can stop and kill them.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use super::process_tree::ProcessEntry;
use super::reaper::{KILL_LIMIT, end_orphans};
use super::reaper_server;

/// Interval at which the thread looks at the reapers.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Number of looks in sequence after which a reaper that is stopped at each of them is killed.
const STOPPED_LOOKS: u32 = 5;

/// Time after which a reaper that is stopped at the end of the session is killed.
const STOPPED_AT_END: Duration = Duration::from_millis(125);

/// The reapers, and what failed ones have left.
static GUARDED: Mutex<Guarded> = Mutex::new(Guarded { reapers: Vec::new(), has_orphans: false });

/// Held during a look, so that the end of the session waits for one that ends what a failed reaper
/// has left.
static LOOK: Mutex<()> = Mutex::new(());

/// Condition that there is something to guard.
static IS_NEEDED: Condvar = Condvar::new();

/// True once the thread has been started.
static IS_GUARDED: Mutex<bool> = Mutex::new(false);

struct Guarded {
    /// The reapers that have not been reaped.
    reapers: Vec<Reaper>,
    /// True while processes may be left by a reaper that has failed.
    has_orphans: bool,
}

impl Guarded {
    fn is_idle(&self) -> bool {
        self.reapers.is_empty() && !self.has_orphans
    }
}

struct Reaper {
    pid: Pid,
    /// Connection to it, whose end ends its program.
    control: Arc<UnixStream>,
    /// Number of the last looks in sequence at which it was stopped.
    stopped_looks: u32,
}

impl Reaper {
    fn is_stopped(&self) -> bool {
        ProcessEntry::read(self.pid).is_some_and(|entry| entry.is_stopped)
    }

    /// Reaps the reaper if it has ended; `None` if it runs, else true if it has succeeded.
    fn reap(&self) -> Option<bool> {
        match waitpid(Some(self.pid), WaitOptions::NOHANG) {
            Ok(None) | Err(Errno::INTR) => None,
            Ok(Some((_, status))) => Some(status.exit_status() == Some(0)),
            Err(_) => Some(false),
        }
    }

    /// Lets it run again if its program has stopped it.
    fn resume(&self) {
        let _ = kill_process(self.pid, Signal::CONT);
    }
}

/// Starts a reaper. Returns its id and the connection to it.
pub(super) fn start_reaper() -> io::Result<(Pid, Arc<UnixStream>)> {
    {
        let mut is_guarded = IS_GUARDED.lock();
        if !*is_guarded {
            thread::Builder::new().name("rpc-run-guard".to_owned()).spawn(guard)?;
            *is_guarded = true;
        }
    }
    // It stays in the session of the kernel of this process until it is sent its program, so that
    // it is not taken for an orphan before it is in the list.
    let (pid, control) = reaper_server::start_reaper()?;
    let control = Arc::new(control);
    GUARDED.lock().reapers.push(Reaper { pid, control: control.clone(), stopped_looks: 0 });
    IS_NEEDED.notify_one();
    Ok((pid, control))
}

/// Lets a reaper run again, if its program has stopped it.
pub(super) fn resume(pid: Pid) {
    // What is not in the list has been reaped, and its id may be that of another process.
    GUARDED.lock().reapers.iter().filter(|reaper| reaper.pid == pid).for_each(Reaper::resume);
}

/// Begins to end all programs of this process.
pub(crate) fn end_programs() {
    for reaper in &GUARDED.lock().reapers {
        let _ = reaper.control.shutdown(Shutdown::Both);
        reaper.resume();
    }
}

/// Ends all programs, and waits until their reapers have ended: for about `limit`, and some seconds
/// longer if processes cannot be killed. Reapers that stay stopped are killed, and what they leave
/// with them. Blocks.
pub(crate) fn end_reapers(limit: Duration) {
    let started = Instant::now();
    end_programs();
    loop {
        let elapsed = started.elapsed();
        if !look(|reaper| elapsed > STOPPED_AT_END && reaper.is_stopped()) || elapsed > limit {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Looks at the reapers for ever.
fn guard() {
    loop {
        let mut guarded = GUARDED.lock();
        while guarded.is_idle() {
            IS_NEEDED.wait(&mut guarded);
        }
        drop(guarded);
        look(|reaper| {
            reaper.stopped_looks = if reaper.is_stopped() { reaper.stopped_looks + 1 } else { 0 };
            reaper.stopped_looks >= STOPPED_LOOKS
        });
        thread::sleep(LOOK_INTERVAL);
    }
}

/// Reaps the reapers that have ended, kills those that `must_end` names, and lets the others run.
/// Ends what failed reapers have left. Returns true if there are others, or processes are left.
fn look(mut must_end: impl FnMut(&mut Reaper) -> bool) -> bool {
    let _look = LOOK.lock();
    let mut guarded = GUARDED.lock();
    let mut has_failed = false;
    guarded.reapers.retain_mut(|reaper| {
        if must_end(reaper) {
            let _ = kill_process(reaper.pid, Signal::KILL);
        } else {
            reaper.resume();
        }
        let ended = reaper.reap();
        // A reaper that succeeds has left nothing.
        has_failed |= ended == Some(false);
        ended.is_none()
    });
    let has_orphans = has_failed || guarded.has_orphans;
    guarded.has_orphans = has_orphans;
    drop(guarded);
    if has_orphans {
        // Descendants of a reaper that has been reaped are those of this process. What the kernel
        // holds then is looked at again, once each time.
        let limit = if has_failed { KILL_LIMIT } else { Duration::ZERO };
        let is_over = end_orphans(is_reaper, limit);
        GUARDED.lock().has_orphans = !is_over;
    }
    !GUARDED.lock().is_idle()
}

/// Returns true if `pid` is the id of a reaper.
fn is_reaper(pid: Pid) -> bool {
    GUARDED.lock().reapers.iter().any(|reaper| reaper.pid == pid)
}
