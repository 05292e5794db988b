//! A clock that slows down with the machine, by which time limits of tests are measured.
//!
//! The end of a peer is noticed within a second on machines that are not busy with something else.
//! On busy ones timers fire late and processes wait for their turn. A limit is therefore measured
//! in beats: each beat is a pause, and then a call of a healthy server in a process of its own, and
//! a turn of a thread on each processor. Load slows the beats as it slows the measured processes,
//! so that a limit that holds in beats holds by the clock on an idle machine. A processor that
//! stands still, as those of virtual machines do, stops the beats, whichever thread it holds. The
//! pace is never ahead of the clock. On an idle machine it is behind by the time of the calls and
//! turns alone, a twentieth or so.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{LazyLock, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::{ServerPeer, Transport, connector};

/// Pause of a beat.
const BEAT: Duration = Duration::from_millis(10);

static BEATS: AtomicU32 = AtomicU32::new(0);

/// End and duration of each beat that took longer than ten pauses.
static SLOW: Mutex<Vec<(Instant, Duration)>> = Mutex::new(Vec::new());

static HEART: LazyLock<JoinHandle<()>> = LazyLock::new(|| thread::spawn(beat));

fn beat() {
    let server = ServerPeer::start(Transport::Tcp);
    let session = connector().connect_blocking(server.address()).unwrap();
    let add = session.function::<(i64, i64), i64>("add").wait().unwrap();
    let processors = processors();
    loop {
        let since = Instant::now();
        thread::sleep(BEAT);
        assert_eq!(add.call((20, 22)).wait().unwrap(), 42);
        processors.iter().for_each(|(ask, _)| ask.send(()).unwrap());
        processors.iter().for_each(|(_, answer)| answer.recv().unwrap());
        let took = since.elapsed();
        if took > 10 * BEAT {
            SLOW.lock().unwrap().push((Instant::now(), took));
        }
        BEATS.fetch_add(1, Ordering::AcqRel);
    }
}

/// Starts a thread on each processor of this process, up to the first few. It answers each message.
fn processors() -> Vec<(SyncSender<()>, Receiver<()>)> {
    const MOST: usize = 16;
    let all = sched_getaffinity(None).unwrap();
    let pin = |processor| {
        let (ask, asked) = mpsc::sync_channel(1);
        let (answers, answer) = mpsc::sync_channel(1);
        thread::spawn(move || {
            let mut only = CpuSet::new();
            only.set(processor);
            // A processor that has been taken away meanwhile holds no thread.
            let _ = sched_setaffinity(None, &only);
            while asked.recv().is_ok() && answers.send(()).is_ok() {}
        });
        (ask, answer)
    };
    (0..CpuSet::MAX_CPU).filter(|processor| all.is_set(*processor)).take(MOST).map(pin).collect()
}

/// Returns the time since the first beat. Blocks until there is one.
pub fn now() -> Duration {
    loop {
        assert!(!HEART.is_finished(), "the control has failed");
        match BEATS.load(Ordering::Acquire) {
            0 => thread::sleep(BEAT),
            beats => return BEAT * beats,
        }
    }
}

/// Returns the current time by the clock, for [`worst_since`]. Blocks until there is a beat.
pub fn begin() -> Instant {
    now();
    Instant::now()
}

/// Returns the duration of the slowest beat since then; zero if none was slow. Waits for the end of
/// the present beat: where the machine stands still, that is the slow one, and it may end later
/// than what has failed because of it.
pub fn worst_since(begun: Instant) -> Duration {
    let beats = BEATS.load(Ordering::Acquire);
    while BEATS.load(Ordering::Acquire) == beats && !HEART.is_finished() {
        thread::sleep(BEAT / 10);
    }
    let slow = SLOW.lock().unwrap();
    slow.iter().filter(|(ended, _)| *ended > begun).map(|(_, took)| *took).max().unwrap_or_default()
}

/// Returns the time since `then`, which [`now`] gave.
pub fn since(then: Duration) -> Duration {
    now().saturating_sub(then)
}
