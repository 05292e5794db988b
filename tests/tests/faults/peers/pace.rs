//! Time as those see it who are well: a control beside what is measured.
//!
//! That a peer's end is known within a second is a promise of machines that are not busy with
//! something else. On those that are, everything takes longer: timers fire late, processes wait for
//! their turn. So a limit is measured in beats: each is a pause and then a call of a server in a
//! process of its own, which is well all the time. What slows the measured slows the beats, and a
//! limit that holds in beats is one that a machine which is not busy keeps by the clock. The pace
//! is never ahead of the clock, and behind it by the time of the calls alone, a twentieth or so,
//! when there is nothing else to do.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::{ServerPeer, Transport, connector};

/// The pause of a beat.
const BEAT: Duration = Duration::from_millis(10);

static BEATS: AtomicU32 = AtomicU32::new(0);

/// When each beat ended that took longer than ten pauses, and how long it took.
static SLOW: Mutex<Vec<(Instant, Duration)>> = Mutex::new(Vec::new());

static HEART: LazyLock<JoinHandle<()>> = LazyLock::new(|| thread::spawn(beat));

fn beat() {
    let server = ServerPeer::start(Transport::Tcp);
    let session = connector().connect_blocking(server.address()).unwrap();
    let add = session.function::<(i64, i64), i64>("add").wait().unwrap();
    loop {
        let since = Instant::now();
        thread::sleep(BEAT);
        assert_eq!(add.call((20, 22)).wait().unwrap(), 42);
        let took = since.elapsed();
        if took > 10 * BEAT {
            SLOW.lock().unwrap().push((Instant::now(), took));
        }
        BEATS.fetch_add(1, Ordering::AcqRel);
    }
}

/// The time since the first beat. Blocks until there is one.
pub fn now() -> Duration {
    loop {
        assert!(!HEART.is_finished(), "the control has failed");
        match BEATS.load(Ordering::Acquire) {
            0 => thread::sleep(BEAT),
            beats => return BEAT * beats,
        }
    }
}

/// When something began, for [`worst_since`]. Blocks until there is a beat.
pub fn begin() -> Instant {
    now();
    Instant::now()
}

/// The longest that a beat has taken since then, where one was slow.
pub fn worst_since(begun: Instant) -> Duration {
    let slow = SLOW.lock().unwrap();
    slow.iter().filter(|(ended, _)| *ended > begun).map(|(_, took)| *took).max().unwrap_or_default()
}

/// Returns the time since `then`, which [`now`] gave.
pub fn since(then: Duration) -> Duration {
    now().saturating_sub(then)
}
