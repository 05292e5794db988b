//! Bytes that are not written yet, of all sessions of the process with servers of TVM.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes of requests of all sessions that have not been written.
static ALL: AtomicU64 = AtomicU64::new(0);

/// Interval at which the end of all requests is looked for.
const POLL: Duration = Duration::from_millis(1);

/// Bytes of a session's requests that have not been written.
#[derive(Default)]
pub(super) struct Unwritten(u64);

impl Unwritten {
    pub(super) fn len(&self) -> u64 {
        self.0
    }

    pub(super) fn add(&mut self, len: u64) {
        self.0 += len;
        ALL.fetch_add(len, Ordering::Relaxed);
    }

    /// Records that all but `len` bytes have been written or given up.
    pub(super) fn shrink_to(&mut self, len: u64) {
        ALL.fetch_sub(self.0.saturating_sub(len), Ordering::Relaxed);
        self.0 = self.0.min(len);
    }
}

impl Drop for Unwritten {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

/// Waits until no request to a server of TVM is written in part, or until `limit` is over. For a
/// program that is about to end without having ended its sessions: a server of TVM that gets a part
/// of a request serves nobody any more. Blocks.
pub fn finish_requests(limit: Duration) {
    let start = Instant::now();
    while ALL.load(Ordering::Relaxed) > 0 && start.elapsed() < limit {
        std::thread::sleep(POLL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_up_is_waited_for_no_more() {
        let mut unwritten = Unwritten::default();
        unwritten.add(10);
        unwritten.shrink_to(4);
        unwritten.shrink_to(6);
        assert_eq!(unwritten.len(), 4);
        finish_requests(Duration::from_millis(5));
        drop(unwritten);
        finish_requests(Duration::MAX);
    }
}
