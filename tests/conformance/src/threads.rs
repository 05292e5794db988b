//! Threads of this process: proof that all of them but one wait. For tests of peers that read
//! nothing, in a process without other tests.

use std::fs;
use std::time::{Duration, Instant};

/// Time limit for the others to come to rest.
const LIMIT: Duration = Duration::from_secs(60);

/// A waiting thread: its id, and how often it has left its processor. The second number changes
/// whenever it has run and waits again.
#[derive(PartialEq, Eq, Debug)]
struct WaitingThread {
    id: i32,
    switches: u64,
}

/// Returns true if there is a moment, during this call, at which every other thread of the process
/// waits. What they do then continues only when this thread, a timer or another process does
/// something.
///
/// # Panics
///
/// The system does not show the states of threads in `/proc`.
pub fn all_others_wait() -> bool {
    // A thread that waits in both, and has not run in between, waits at the end of the first.
    let first = waiting_threads();
    first.is_some() && first == waiting_threads()
}

/// Waits for a moment at which every other thread of the process waits.
///
/// # Panics
///
/// There is none within a minute.
pub fn wait_for_rest() {
    let start = Instant::now();
    while !all_others_wait() {
        assert!(start.elapsed() < LIMIT, "threads of the server are at work for ever");
        std::thread::yield_now();
    }
}

/// Returns the other threads of the process, if all of them wait.
fn waiting_threads() -> Option<Vec<WaitingThread>> {
    // `PID/task/TID`
    let own = fs::read_link("/proc/thread-self").unwrap();
    let own: i32 = own.file_name().unwrap().to_str().unwrap().parse().unwrap();
    let ids = fs::read_dir("/proc/self/task").unwrap();
    let ids = ids.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap());
    ids.filter(|id: &i32| *id != own).map(waiting_thread).collect()
}

/// Returns the thread, if it waits.
fn waiting_thread(id: i32) -> Option<WaitingThread> {
    // It may have ended.
    let status = fs::read_to_string(format!("/proc/self/task/{id}/status")).ok()?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap().trim();
    let switches = |name| field(name).parse::<u64>().unwrap();
    field("State").starts_with('S').then(|| WaitingThread {
        id,
        switches: switches("voluntary_ctxt_switches") + switches("nonvoluntary_ctxt_switches"),
    })
}
