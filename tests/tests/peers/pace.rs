//! Time as those see it who are well: a control beside what is measured.
//!
//! That a peer's end is known within a second is a promise of machines that are not busy with something else. On those that
//! are, everything takes longer: timers fire late, processes wait for their turn. So a limit is measured in beats: each is a
//! pause and then a call of a server in a process of its own, which is well all the time. What slows the measured slows the
//! beats, and a limit that holds in beats is one that a machine which is not busy keeps by the clock. The pace is never ahead of
//! the clock, and behind it by the time of the calls alone, a twentieth or so, when there is nothing else to do.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::{ServerPeer, Transport, connector};

/// The pause of a beat.
const BEAT: Duration = Duration::from_millis(10);

static BEATS: AtomicU32 = AtomicU32::new(0);

static HEART: LazyLock<JoinHandle<()>> = LazyLock::new(|| thread::spawn(beat));

fn beat() {
    let server = ServerPeer::start(Transport::Tcp);
    let session = connector().connect_blocking(server.address()).unwrap();
    let add = session.function::<(i64, i64), i64>("add").wait().unwrap();
    loop {
        thread::sleep(BEAT);
        assert_eq!(add.call((20, 22)).wait().unwrap(), 42);
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

/// How long ago `then` was, which is what [`now`] gave.
pub fn since(then: Duration) -> Duration {
    now().saturating_sub(then)
}
