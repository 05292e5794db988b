//! Segments between processes of one machine: the offer of a segment, and joining it as a rank.
//!
//! The offering process makes a memory file without a name, and the ticket says where that process
//! has it open. A process can join if it may open the files of that process (it has the same user)
//! and knows the nonce.

use std::collections::HashSet;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use ring::rand::{SecureRandom, SystemRandom};
use rpc_core::limits::OpenFileLease;
use rpc_core::{ErrorKind, RpcError};
use serde::{Deserialize, Serialize};

use super::algorithm::Reach;
use super::join_deadline::JoinDeadline;
use super::memory::Memory;
use super::process_memory;
use super::segment::{NEVER, Segment, Word};
use super::shared::SharedCcl;
use super::watched_processes::WatchedProcesses;
use super::{Options, segment_bytes};
use crate::ccl::{Ccl, Rank};
use crate::number_list::NumberList;

/// A segment for a group of processes of this machine. It can be joined while this lives; ranks
/// that have joined keep what they have.
#[derive(Debug)]
pub struct Offer {
    ticket: Ticket,
    /// Open file that the ticket names.
    _file: OwnedFd,
    /// Charge for that file.
    _open_file: Option<OpenFileLease>,
}

/// Ticket by which a rank joins. The program that starts the ranks hands it to each. It has a form
/// for `serde`, and is a secret of the group.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// Process that has the memory file open.
    process: u32,
    /// Its number there.
    descriptor: u32,
    nonce: [u8; 16],
    size: u32,
    epoch: u64,
}

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { process, descriptor, size, .. } = self;
        f.debug_struct("Ticket")
            .field("process", process)
            .field("descriptor", descriptor)
            .field("size", size)
            .finish_non_exhaustive()
    }
}

impl Offer {
    /// Makes a segment for `size` ranks.
    ///
    /// # Errors
    ///
    /// A size of 0 or above [`MAX_SHARED_RANKS`](super::MAX_SHARED_RANKS); no memory, or no such
    /// files on this system.
    pub fn new(size: usize, options: &Options) -> Result<Self, RpcError> {
        let open_file = options.open_files.reserve(1, "a segment")?;
        let (memory, file) = Memory::create(segment_bytes(size, false)?)?;
        let mut nonce = [0; 16];
        let random = SystemRandom::new().fill(&mut nonce);
        random.map_err(|_| RpcError::internal("the system gives no random numbers"))?;
        drop(Segment::create(memory, size, false, options.epoch, nonce));
        let (process, descriptor) = (std::process::id(), file.as_raw_fd() as u32);
        let ticket = Ticket { process, descriptor, nonce, size: size as u32, epoch: options.epoch };
        Ok(Self { ticket, _file: file, _open_file: open_file })
    }

    /// Returns the ticket, the same for every rank.
    #[must_use]
    pub fn ticket(&self) -> Ticket {
        self.ticket.clone()
    }
}

impl Ticket {
    /// Joins the group as `rank`, and waits until all ranks have. Of the options, the epoch is the
    /// ticket's.
    ///
    /// # Errors
    ///
    /// * [`ErrorKind::NotFound`]: the offer is gone, or belongs to another user or another machine
    ///   (or container).
    /// * [`ErrorKind::Refused`]: it is another group's; or the rank has been taken.
    /// * [`ErrorKind::DeadlineExceeded`]: some ranks did not come within [`Options::join_timeout`];
    ///   the message names them.
    pub fn join(&self, rank: Rank, options: &Options) -> Result<Box<dyn Ccl>, RpcError> {
        let size = self.size as usize;
        if rank.index() >= size {
            return Err(RpcError::invalid_argument(format!("no rank {rank} in a group of {size}")));
        }
        let opening = options.open_files.reserve(Memory::OPEN_AT_A_TIME, "opening a segment")?;
        let segment = self.open()?;
        drop(opening);
        let own = rank.index();
        let joined = segment.word(own, Word::Joined);
        if joined.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return Err(RpcError::new(ErrorKind::Refused, format!("rank {rank} has joined already")));
        }
        segment.word(own, Word::Pid).store(std::process::id(), Ordering::Relaxed);
        // The probe has an address of its own, which stays until all have tried.
        let probe = Box::new(self.nonce);
        let address = probe.as_ptr().addr() as u64;
        segment.word(own, Word::ProbeLow).store(address as u32, Ordering::Relaxed);
        segment.word(own, Word::ProbeHigh).store((address >> 32) as u32, Ordering::Relaxed);
        segment.publish(joined, 2, own);
        // From here on the others find a rank that has left, if this one gives up.
        let options = Options { epoch: self.epoch, ..options.clone() };
        let until = JoinDeadline::of(&options);
        await_all(&segment, own, until, &options, |peer| {
            segment.word(peer, Word::Joined).load(Ordering::Acquire) == 2
        })?;
        let word = |peer: usize, word: Word| segment.word(peer, word).load(Ordering::Acquire);
        let pids: Vec<u32> = (0..size).map(|peer| word(peer, Word::Pid)).collect();
        // Before the last thing that the others wait for: once they have joined, so has this rank.
        let processes = WatchedProcesses::open(&pids, &options.open_files);
        let processes = processes.inspect_err(|_| segment.leave(own))?;
        // Ranks of one process can be read alike.
        let mut tried = HashSet::new();
        let mut is_readable = |peer: usize| !tried.insert(pids[peer]) || can_read(&segment, peer, self.nonce);
        let from = options.read_from.filter(|_| (0..size).all(&mut is_readable));
        let from = from.map_or(NEVER, |from| u32::try_from(from / 1024 + 1).unwrap_or(NEVER));
        segment.publish(segment.word(own, Word::Reads), from, own);
        await_all(&segment, own, until, &options, |peer| word(peer, Word::Reads) != 0)?;
        drop(probe);
        // All have to go the same way.
        let all_read = from != NEVER && (0..size).all(|peer| word(peer, Word::Reads) == from);
        let reach = if all_read { Reach::Reads((from as usize - 1) * 1024) } else { Reach::Segment };
        Ok(Box::new(SharedCcl::new(segment, own, options, reach, processes)))
    }
}

/// Segments that ranks of this process have open, with their tickets. All of them share one
/// mapping: the tables of the system for a large one take as much memory as many ranks do.
static OPEN: Mutex<Vec<(Ticket, Weak<Segment>)>> = Mutex::new(Vec::new());

impl Ticket {
    /// Opens the segment, or finds it where another rank of this process has it open.
    fn open(&self) -> Result<Arc<Segment>, RpcError> {
        let mut open = OPEN.lock();
        open.retain(|(_, segment)| segment.strong_count() > 0);
        if let Some(segment) = open.iter().find_map(|(ticket, segment)| segment.upgrade().filter(|_| ticket == self)) {
            return Ok(segment);
        }
        let Self { process, descriptor, .. } = self;
        let size = self.size as usize;
        let memory = Memory::open(*process, *descriptor, segment_bytes(size, false)?).map_err(|error| {
            let text =
                format!("cannot open the group's segment, descriptor {descriptor} of process {process}: {error}");
            RpcError::new(ErrorKind::NotFound, text)
        })?;
        let segment = Segment::open(memory, size, self.epoch, self.nonce);
        let segment = Arc::new(segment.map_err(|text| RpcError::new(ErrorKind::Refused, text))?);
        open.push((self.clone(), Arc::downgrade(&segment)));
        Ok(segment)
    }
}

/// Waits until all ranks are as `is_there` says, or one of those that are not has given up.
fn await_all(
    segment: &Segment,
    own: usize,
    until: JoinDeadline<'_>,
    options: &Options,
    is_there: impl Fn(usize) -> bool,
) -> Result<(), RpcError> {
    let size = segment.size();
    while let Some(missing) = (0..size).find(|peer| !is_there(*peer)) {
        if until.is_over() {
            segment.leave(own);
            let missing = NumberList::of((missing..size).filter(|peer| !is_there(*peer)));
            let text = format!("rank {missing} did not join within {:?}", options.join_timeout);
            return Err(until.error(text));
        }
        // A rank that was there may leave in good order at any time.
        let has_left = |peer: usize| segment.word(peer, Word::Left).load(Ordering::Acquire) == 1;
        if let Some(peer) = (missing..size).find(|peer| has_left(*peer) && !is_there(*peer)) {
            segment.leave(own);
            let text = format!("rank {peer} has given up joining; its own error says why");
            return Err(RpcError::new(ErrorKind::PeerLost, text));
        }
        segment.sleep(own, missing, Duration::from_millis(50), || is_there(missing));
    }
    Ok(())
}

/// Returns true if this process can read from that of `peer`, which has put the nonce somewhere.
fn can_read(segment: &Segment, peer: usize, nonce: [u8; 16]) -> bool {
    let word = |word: Word| segment.word(peer, word).load(Ordering::Acquire);
    let address = u64::from(word(Word::ProbeLow)) | u64::from(word(Word::ProbeHigh)) << 32;
    let mut found = [0; 16];
    // SAFETY: `found` is ours, and as long.
    let read = unsafe { process_memory::read(word(Word::Pid), address, found.as_mut_ptr(), found.len()) };
    read.is_ok() && found == nonce
}

#[cfg(test)]
mod tests {
    use rpc_core::OpenFileQuota;

    use super::*;
    use crate::held_memory::tests::context_of;
    use crate::open_files::OpenFiles;

    /// Returns the segment of an offer to two ranks, as the second of them has it.
    fn open(offer: &Offer) -> Segment {
        let Ticket { process, descriptor, nonce, size, epoch } = offer.ticket();
        let memory = Memory::open(process, descriptor, segment_bytes(size as usize, false).unwrap()).unwrap();
        Segment::open(memory, size as usize, epoch, nonce).unwrap()
    }

    /// Regression: the others had joined by then, and did not hear of it.
    #[test]
    fn a_rank_that_may_not_watch_the_others_gives_up_before_they_have_joined() {
        let all = Memory::OPEN_AT_A_TIME as u64;
        let quota = OpenFileQuota::new("max_open_files", all, None);
        let context = context_of(|session| session.open_files(quota.clone()));
        let options = Options { open_files: OpenFiles::of(&context), ..Options::default() };
        let offer = Offer::new(2, &Options::default()).unwrap();
        let segment = open(&offer);
        std::thread::scope(|scope| {
            let joining = scope.spawn(|| offer.ticket().join(Rank(0), &options).err());
            while segment.word(0, Word::Joined).load(Ordering::Acquire) != 2 {
                std::thread::yield_now();
            }
            let _used_up = quota.reserve(all).unwrap();
            // Of any other process.
            segment.word(1, Word::Pid).store(std::process::id() + 1, Ordering::Relaxed);
            segment.publish(segment.word(1, Word::Joined), 2, 1);
            let error = joining.join().unwrap().unwrap();
            assert_eq!(error.kind(), ErrorKind::LimitExceeded, "{error}");
        });
        let told = [Word::Left, Word::Reads].map(|word| segment.word(0, word).load(Ordering::Acquire));
        assert_eq!(told, [1, 0]);
    }

    #[test]
    fn a_rank_waits_for_none_that_has_given_up() {
        let offer = Offer::new(2, &Options::default()).unwrap();
        let segment = open(&offer);
        segment.word(1, Word::Joined).store(2, Ordering::Release);
        segment.word(1, Word::Left).store(1, Ordering::Release);
        let options = Options { join_timeout: Duration::from_secs(3600), ..Options::default() };
        let error = offer.ticket().join(Rank(0), &options).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
        assert!(error.message().contains("rank 1 has given up"), "{error}");
    }
}
