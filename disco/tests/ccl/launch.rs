//! Runs the same program on every rank, whatever ranks are: threads, or child processes that are
//! this test binary again.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use disco::ccl::{Ccl, Rank, host};

/// Medium between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Launch {
    /// The memory of one process.
    Threads,
    /// A segment, and each other's buffers where they may be read.
    Processes,
    /// A segment alone.
    Segment,
    Tcp,
    /// TCP, encrypted.
    Encrypted,
    Unix,
}

pub(crate) const ALL: [Launch; 6] =
    [Launch::Threads, Launch::Processes, Launch::Segment, Launch::Tcp, Launch::Encrypted, Launch::Unix];

/// Short limits for tests of what takes too long; long ones for all else, because the machine may
/// be busy.
pub(crate) fn options(entry: Duration, stall: Duration) -> host::Options {
    let mut options = host::Options::default();
    options.entry_timeout = Some(entry);
    options.stall_timeout = stall;
    options.join_timeout = Duration::from_secs(120);
    // Whatever does not travel with the announcements.
    options.read_from = Some(0);
    options
}

pub(crate) fn long_limits() -> host::Options {
    options(Duration::from_secs(120), Duration::from_secs(120))
}

/// Arguments by which a process becomes a rank.
#[derive(serde::Serialize, serde::Deserialize)]
pub(crate) enum JoinArguments {
    Segment(host::Ticket),
    /// The key, and the folder or the addresses where all listen.
    Unix(host::SessionKey, std::path::PathBuf, usize),
}

impl JoinArguments {
    pub(crate) fn join(&self, rank: usize, options: &host::Options) -> rpc_core::Result<Box<dyn Ccl>> {
        match self {
            Self::Segment(ticket) => ticket.join(Rank(rank as u32), options),
            Self::Unix(key, folder, size) => {
                let addresses: Vec<_> =
                    (0..*size).map(|rank| host::Address::Unix(folder.join(rank.to_string()))).collect();
                host::Listener::bind(&addresses[rank])?.join(Rank(rank as u32), &addresses, key, options)
            }
        }
    }
}

/// Returns all ranks of a group, made in this process.
pub(crate) fn group(launch: Launch, size: usize, options: &host::Options) -> Vec<Box<dyn Ccl>> {
    if launch == Launch::Threads {
        return host::threads(size, options).expect("a group");
    }
    let mut options = options.clone();
    options.encrypt = launch == Launch::Encrypted;
    options.read_from = options.read_from.filter(|_| launch != Launch::Segment);
    let options = &options;
    let folder = tempfile::tempdir().expect("a folder");
    let offer = host::Offer::new(size, options).expect("a segment");
    let key = host::SessionKey::generate().expect("a key");
    let listeners: Vec<_> = (0..size)
        .map(|rank| match launch {
            Launch::Tcp | Launch::Encrypted => host::Address::Tcp(([127, 0, 0, 1], 0).into()),
            _ => host::Address::Unix(folder.path().join(rank.to_string())),
        })
        .map(|address| host::Listener::bind(&address).expect("to listen"))
        .collect();
    let addresses: Vec<_> = listeners.iter().map(|listener| listener.address().clone()).collect();
    let ticket = offer.ticket();
    std::thread::scope(|scope| {
        let (ticket, addresses, key) = (&ticket, &addresses, &key);
        let ranks: Vec<_> = listeners
            .iter()
            .enumerate()
            .map(|(rank, listener)| {
                scope.spawn(move || match launch {
                    Launch::Processes | Launch::Segment => ticket.join(Rank(rank as u32), options).expect("to join"),
                    _ => listener.join(Rank(rank as u32), addresses, key, options).expect("to join"),
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    })
}

/// Runs `program` on `size` ranks that are threads of this process, over whatever `launch` has
/// between ranks.
pub(crate) fn on_threads<T: Send>(
    launch: Launch,
    size: usize,
    options: &host::Options,
    program: impl Fn(&mut dyn Ccl) -> T + Sync,
) -> Vec<T> {
    let program = &program;
    std::thread::scope(|scope| {
        let ranks = group(launch, size, options).into_iter();
        let ranks: Vec<_> = ranks.map(|mut ccl| scope.spawn(move || program(&mut *ccl))).collect();
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

/// Starts this test binary again to run `program` as `rank`; its test `test` calls [`as_child`]
/// first.
pub(crate) fn start_child(test: &str, program: &str, way: &JoinArguments, rank: usize) -> ChildRank {
    let way = serde_json::to_string(way).expect("a way is serialisable");
    let child = Command::new(std::env::current_exe().expect("this binary"))
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD, format!("{rank} {program} {way}"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .expect("this binary again");
    ChildRank(child)
}

/// Returns the part of this process as a rank, if it is one: the program's name, and the
/// communicator.
pub(crate) fn as_child(options: &host::Options) -> Option<(String, Box<dyn Ccl>)> {
    let text = std::env::var(CHILD).ok()?;
    let mut words = text.splitn(3, ' ');
    let rank = words.next()?.parse().ok()?;
    let program = words.next()?.to_owned();
    let way: JoinArguments = serde_json::from_str(words.next()?).expect("a way");
    Some((program, way.join(rank, options).expect("to join")))
}
