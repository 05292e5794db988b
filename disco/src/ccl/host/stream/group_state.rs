//! State of one rank of a group over sockets, which the communicator shares with its [`Control`]:
//! the links to the other ranks, and the reason if the group is broken.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use rpc_core::RpcError;
use rpc_core::limits::OpenFileLease;

use super::abort_notice;
use super::framed_connection::Link;
use crate::ccl::{BreakCause, Breakdown, CclError, Control, Flight, Rank, Recorder};
use crate::open_files::OpenFiles;

/// The longest sleep between two looks at the clock.
const SLEEP: Duration = Duration::from_millis(100);

/// The same where a rank has to look for itself.
const NAP: Duration = Duration::from_micros(100);

/// The longest breakdown that is sent, in bytes.
const BREAKDOWN_ROOM: usize = 4096;

/// State of one rank.
pub(super) struct GroupState {
    pub(super) rank: usize,
    /// Links to the other ranks. The communicator holds them during a call, and otherwise the
    /// thread that aborts.
    links: Mutex<Links>,
    pub(super) broken: OnceLock<Arc<Breakdown>>,
    pub(super) recorder: Recorder,
    /// The last collective that each rank has announced to this one.
    pub(super) announced: Vec<AtomicU64>,
    /// A byte in it wakes the communicator.
    waker: UnixStream,
    /// Charge for both ends of that.
    _open_files: Option<OpenFileLease>,
}

/// Both ends of the socket that wakes a communicator. They are opened before a rank connects to
/// others: once it has joined them, it has all that it needs.
pub(super) struct WakeSockets {
    waker: UnixStream,
    wake: UnixStream,
    open_files: Option<OpenFileLease>,
}

impl WakeSockets {
    /// Opens the socket.
    ///
    /// # Errors
    ///
    /// The session or the system may open no more.
    pub(super) fn open(open_files: &OpenFiles) -> Result<Self, RpcError> {
        let open_files = open_files.reserve(2, "waking a communicator")?;
        let (waker, wake) = UnixStream::pair()?;
        waker.set_nonblocking(true)?;
        wake.set_nonblocking(true)?;
        Ok(Self { waker, wake, open_files })
    }
}

/// The connections of one rank.
pub(super) struct Links {
    /// Links in the order of ranks; `None` at this rank's own index.
    pub(super) peers: Vec<Option<Link>>,
    wake: UnixStream,
}

impl Links {
    pub(super) fn each(&mut self) -> impl Iterator<Item = (usize, &mut Link)> {
        self.peers.iter_mut().enumerate().filter_map(|(rank, link)| Some((rank, link.as_mut()?)))
    }

    /// Changes whenever a call gets on.
    pub(super) fn progress(&self) -> u64 {
        self.peers.iter().flatten().map(Link::progress).sum()
    }

    /// Sleeps until a socket is ready for its link, another thread wakes the rank, or [`SLEEP`] is
    /// over; only for [`NAP`] if a link waits for something that no file descriptor tells of.
    pub(super) fn sleep(&mut self) {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};

        let mut at_most = SLEEP;
        let mut ranks = Vec::with_capacity(self.peers.len());
        let links = self.peers.iter().enumerate().filter_map(|(rank, link)| {
            let link = link.as_ref()?;
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, link.wants_input());
            flags.set(PollFlags::OUT, link.wants_output());
            let wants = !flags.is_empty();
            match link.file().filter(|_| wants) {
                Some(file) => {
                    ranks.push(rank);
                    Some(PollFd::from_borrowed_fd(file, flags))
                }
                None => {
                    at_most = if wants { NAP } else { at_most };
                    None
                }
            }
        });
        let mut files: Vec<_> = links.collect();
        files.push(PollFd::new(&self.wake, PollFlags::IN));
        let at_most = Timespec { tv_sec: 0, tv_nsec: at_most.subsec_nanos().into() };
        let is_told = poll(&mut files, Some(&at_most)).is_ok();
        // All but the readiness to write: an error or the end of a connection are read, too. All
        // sockets are tried if nothing was told of them.
        let mut events = files.iter().map(PollFd::revents);
        ranks.retain(|_| {
            let events = events.next();
            !is_told || events.is_some_and(|events| !events.difference(PollFlags::OUT).is_empty())
        });
        drop(files);
        for rank in ranks {
            if let Some(link) = &mut self.peers[rank] {
                link.expect_input();
            }
        }
    }

    /// Makes the next attempt read from all sockets, because more may have come.
    pub(super) fn expect_input(&mut self) {
        self.each().for_each(|(_, link)| link.expect_input());
    }

    /// Tells all ranks that the group is broken, and lets go of the connections and of the buffers
    /// that they were to fill or to send.
    pub(super) fn notify_abort(&mut self, breakdown: &Breakdown) {
        let word = breakdown.to_bytes(BREAKDOWN_ROOM);
        let links = self.peers.iter_mut().filter_map(Option::take);
        abort_notice::drain_and_close(links.filter_map(|link| link.into_abort_notice(&word)).collect());
    }
}

impl GroupState {
    /// Creates the state of `rank`, with its links in the order of ranks.
    pub(super) fn new(rank: usize, peers: Vec<Option<Link>>, wake_sockets: WakeSockets) -> Self {
        let size = peers.len();
        let WakeSockets { waker, wake, open_files } = wake_sockets;
        Self {
            rank,
            links: Mutex::new(Links { peers, wake }),
            broken: OnceLock::new(),
            recorder: Recorder::default(),
            announced: (0..size).map(|_| AtomicU64::new(0)).collect(),
            waker,
            _open_files: open_files,
        }
    }

    /// Reads and writes all that can be moved, but from sockets that have been drained, and finds
    /// out if another rank has broken the group. Returns true if anything moved.
    pub(super) fn move_bytes(&self, links: &mut Links) -> bool {
        let mut moved = false;
        for (rank, link) in links.each() {
            // The last frame of a peer is read before a write that would fail because it has gone,
            // or behind it: a failed write leaves the link readable.
            moved |= link.read();
            moved |= link.write();
            if let Some(bytes) = link.abort() {
                let breakdown = Breakdown::from_bytes(bytes);
                let breakdown = breakdown.unwrap_or_else(|| self.breakdown(BreakCause::Left, rank));
                _ = self.broken.set(Arc::new(breakdown));
            }
        }
        moved
    }

    /// Breaks the group, unless it is broken, and returns the error.
    pub(super) fn break_up(&self, links: &mut Links, cause: BreakCause, rank: usize) -> CclError {
        let breakdown = Arc::new(self.breakdown(cause, rank));
        if self.broken.set(Arc::clone(&breakdown)).is_ok() {
            rpc_core::log_limited!(ERROR, rank = self.rank, %breakdown, "a group of collectives is broken");
        }
        self.end(links)
    }

    /// Notifies the others, unless that has been done, and returns the error. The group is broken.
    pub(super) fn end(&self, links: &mut Links) -> CclError {
        let breakdown = self.broken.get_or_init(|| Arc::new(self.breakdown(BreakCause::Left, self.rank)));
        links.notify_abort(breakdown);
        CclError::Broken(Arc::clone(breakdown))
    }

    pub(super) fn breakdown(&self, cause: BreakCause, rank: usize) -> Breakdown {
        let flight = self.recorder.last().filter(|flight| flight.took.is_none());
        Breakdown {
            cause,
            rank: Rank::of(rank),
            noticed_by: Rank::of(self.rank),
            during: flight.map_or_else(String::new, |flight| format!("{} #{}", flight.collective, flight.sequence)),
            flights: self.describe(),
        }
    }

    pub(super) fn describe(&self) -> String {
        use std::fmt::Write as _;

        let announced: Vec<u64> = self.announced.iter().map(|one| one.load(Ordering::Relaxed)).collect();
        let ahead = announced.iter().copied().max().unwrap_or(0);
        let mut text = String::new();
        for (rank, announced) in announced.into_iter().enumerate() {
            _ = match self.recorder.last().filter(|_| rank == self.rank) {
                Some(flight) => writeln!(text, "rank {rank}: {flight}"),
                None if announced == ahead => writeln!(text, "rank {rank}: has entered #{announced}"),
                None => writeln!(text, "rank {rank}: never entered #{ahead}; its last one was #{announced}"),
            };
        }
        text
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Links> {
        self.links.lock()
    }
}

/// The links while they have the buffers of a call. If the call panics they go, before those
/// buffers do.
pub(super) struct Lending<'a> {
    pub(super) shared: &'a GroupState,
    pub(super) links: MutexGuard<'a, Links>,
}

impl Drop for Lending<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.links.peers.iter_mut().for_each(|link| *link = None);
            self.shared.broken.get_or_init(|| Arc::new(self.shared.breakdown(BreakCause::Left, self.shared.rank)));
        }
    }
}

impl Control for GroupState {
    fn abort(&self, reason: &str) {
        let breakdown = self.breakdown(BreakCause::Aborted(reason.to_owned()), self.rank);
        if self.broken.set(Arc::new(breakdown)).is_err() {
            return;
        }
        match self.links.try_lock() {
            Some(mut links) => _ = self.end(&mut links),
            // The communicator is in a call, and tells the others itself. If the byte does not fit,
            // there are some there already.
            None => _ = std::io::Write::write(&mut &self.waker, &[1]),
        }
    }

    fn broken(&self) -> Option<Arc<Breakdown>> {
        self.broken.get().cloned()
    }

    fn flights(&self) -> Vec<Flight> {
        self.recorder.flights()
    }

    fn describe(&self) -> String {
        Self::describe(self)
    }
}
