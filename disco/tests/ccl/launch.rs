//! Runs the same program on every rank, whatever ranks are: threads, or child processes that are this test binary again.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use disco::ccl::{Ccl, Rank, host};

/// What ranks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Launch {
    Threads,
    Processes,
}

pub(crate) const ALL: [Launch; 2] = [Launch::Threads, Launch::Processes];

/// Short limits for tests of what takes too long; long ones for all else, because the machine may be busy.
pub(crate) fn options(entry: Duration, stall: Duration) -> host::Options {
    let mut options = host::Options::default();
    options.entry_timeout = Some(entry);
    options.stall_timeout = stall;
    options.join_timeout = Duration::from_secs(120);
    options
}

pub(crate) fn patient() -> host::Options {
    options(Duration::from_secs(120), Duration::from_secs(120))
}

/// Runs `program` on `size` ranks that are threads of this process, over whatever `launch` uses between ranks.
pub(crate) fn on_threads<T: Send>(
    launch: Launch,
    size: usize,
    options: &host::Options,
    program: impl Fn(&mut dyn Ccl) -> T + Sync,
) -> Vec<T> {
    let program = &program;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = match launch {
            Launch::Threads => host::threads(size, options)
                .expect("a group")
                .into_iter()
                .map(|mut ccl| scope.spawn(move || program(&mut *ccl)))
                .collect(),
            Launch::Processes => {
                let offer = host::Offer::new(size, options).expect("a segment");
                // The ticket leads through this process, whose end the offer has to outlive the joining of all.
                let offer = std::sync::Arc::new(offer);
                (0..size)
                    .map(|rank| {
                        let offer = std::sync::Arc::clone(&offer);
                        scope.spawn(move || {
                            let mut ccl = offer.ticket().join(Rank(rank as u32), options).expect("to join");
                            program(&mut *ccl)
                        })
                    })
                    .collect()
            }
        };
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// A rank in a process of its own, killed when it is dropped.
pub(crate) struct ChildRank(pub(crate) Child);

impl ChildRank {
    /// Waits until it ends, and says whether it ended well.
    pub(crate) fn finish(mut self, within: Duration) -> bool {
        let began = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait().expect("a child of ours") {
                return status.success();
            }
            assert!(began.elapsed() < within, "a rank's process has not ended within {within:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for ChildRank {
    fn drop(&mut self) {
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

/// The variable that tells this test binary that it is a rank, and which program to run.
const CHILD: &str = "DISCO_CCL_TEST_CHILD";

/// Starts this test binary again to run `program` as `rank`; its test `test` calls [`as_child`] first.
pub(crate) fn start_child(test: &str, program: &str, ticket: &host::Ticket, rank: usize) -> ChildRank {
    let ticket = serde_json::to_string(ticket).expect("a ticket is serialisable");
    let child = Command::new(std::env::current_exe().expect("this binary"))
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD, format!("{rank} {program} {ticket}"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .expect("this binary again");
    ChildRank(child)
}

/// What this process is to do as a rank, if it is one: the program's name, and the communicator.
pub(crate) fn as_child(options: &host::Options) -> Option<(String, Box<dyn Ccl>)> {
    let text = std::env::var(CHILD).ok()?;
    let mut words = text.splitn(3, ' ');
    let rank = words.next()?.parse().ok()?;
    let program = words.next()?.to_owned();
    let ticket: host::Ticket = serde_json::from_str(words.next()?).expect("a ticket");
    Some((program, ticket.join(Rank(rank), options).expect("to join")))
}
