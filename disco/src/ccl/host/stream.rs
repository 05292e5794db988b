//! The communicator of ranks that are connected by sockets, each with each.
//!
//! A collective begins with an announcement to all ranks, to which small inputs are attached, as in
//! shared memory. Large data follows straight from and into the buffers. An allreduce sends each
//! rank the others' contributions to its share, and each rank sends its reduced share to all: the
//! bytes of a ring, in two steps rather than `2 × (n − 1)`, and with one rounding. A broadcast goes
//! in shares too, and each receiver passes its share on.

mod abort_notice;
mod address;
mod connection;
mod framed_connection;
mod group_state;
mod handshake;
mod join;
#[cfg(feature = "mpi")]
mod join_messages;
mod large;
mod secure;
mod socket;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use rpc_core::RpcError;

pub use self::address::{Address, SessionKey};
use self::framed_connection::{FrameKind, Link};
use self::group_state::{GroupState, Lending, Links, WakeSockets};
pub use self::join::Listener;
pub use self::join::OPERATOR_LOG;
pub(crate) use self::join::UnprovenHosts;
#[cfg(feature = "mpi")]
pub(super) use self::join_messages::{Member, by_messages};
#[cfg(feature = "mpi")]
pub(super) use self::socket::Socket;
use super::algorithm::{has_input, input_bytes, route, travels_inline};
use super::announcement::{Announcement, LEN, MAX_POISON, agree, agree_pair, ahead};
use super::{Options, check, kernel};
use crate::ccl::error::{poison_from_bytes, poison_to_bytes};
use crate::ccl::{Agreement, BreakCause, Ccl, CclError, Collective, CollectiveInput, Control, Lent, Operation, Rank};

/// Number of times that a rank that has a core to itself looks at its sockets before it sleeps.
/// Without a core of its own, a rank that yields waits for all that compute, and one that sleeps is
/// woken ahead of them.
const LOOKS: u32 = 60;

/// One rank of a group over sockets.
struct StreamCcl {
    rank: usize,
    size: usize,
    options: Options,
    shared: Arc<GroupState>,
    looks: u32,
    sequence: u64,
    /// Number of the rank's step, as its caller counts.
    step: u64,
    sent: Vec<u64>,
    received: Vec<u64>,
}

impl StreamCcl {
    fn new(rank: usize, peers: Vec<Option<Link>>, options: Options, wake_sockets: WakeSockets) -> Self {
        let size = peers.len();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let crowded = options.ranks_on_machine.unwrap_or(size) > cores;
        Self {
            rank,
            size,
            looks: if crowded { 0 } else { LOOKS },
            shared: Arc::new(GroupState::new(rank, peers, wake_sockets)),
            options,
            sequence: 0,
            step: 0,
            sent: vec![0; size],
            received: vec![0; size],
        }
    }

    /// Returns the same, with so many looks before it sleeps.
    #[cfg(feature = "mpi")]
    fn looking(mut self, looks: u32) -> Self {
        self.looks = looks;
        self
    }

    /// Moves bytes until `step` says that it is done. `step` is called after each movement, and
    /// says which rank it waits for and whether that one has entered the call.
    fn drive(
        &self,
        links: &mut Links,
        mut step: impl FnMut(&mut Links) -> Result<Step, Fault>,
    ) -> Result<(), CclError> {
        let mut looks = 0;
        // Time and extent of the last progress of the call, and the time of the last frame that
        // says that this rank waits.
        let (mut since, mut progress, mut reported) = (Instant::now(), links.progress(), None::<Instant>);
        let shortest = self
            .options
            .entry_timeout
            .map_or(self.options.stall_timeout, |entry| entry.min(self.options.stall_timeout));
        let pulse = shortest / 4;
        loop {
            let moved = self.shared.move_bytes(links);
            let (waits_for, has_entered) = match step(links) {
                // Even if the group is broken by now: this call has all that it needs.
                Ok(Step::Done) => return Ok(()),
                Ok(Step::Moved) => {
                    (looks, since) = (0, Instant::now());
                    continue;
                }
                _ if self.shared.broken.get().is_some() => return Err(self.shared.end(links)),
                Ok(Step::Waits { peer, has_entered }) => (peer, has_entered),
                Err(Fault(cause, rank)) => return Err(self.shared.break_up(links, cause, rank)),
            };
            if moved {
                looks = 0;
                if links.progress() != progress {
                    (since, progress) = (Instant::now(), links.progress());
                }
                continue;
            }
            if let Some(text) = links.peers[waits_for].as_ref().and_then(Link::gone) {
                let cause = if text.is_empty() { BreakCause::Left } else { BreakCause::Link(text.to_owned()) };
                return Err(self.shared.break_up(links, cause, waits_for));
            }
            let left = links.peers[waits_for].as_ref().map_or(0, Link::left_step);
            if !has_entered && left != 0 && left >= self.step {
                return Err(self.shared.break_up(links, BreakCause::OutOfStep, waits_for));
            }
            if looks < self.looks {
                looks += 1;
                links.expect_input();
                std::thread::yield_now();
                continue;
            }
            links.sleep();
            let waited = since.elapsed();
            if waited >= pulse && reported.is_none_or(|at| at.elapsed() >= pulse) {
                reported = Some(Instant::now());
                links.each().for_each(|(_, link)| link.queue_waits());
            }
            let (limit, late) = if has_entered {
                (Some(self.options.stall_timeout), BreakCause::Silent)
            } else {
                (self.options.entry_timeout, BreakCause::NeverEntered)
            };
            // A rank that waits in turn knows better which rank causes the wait, and has more time
            // to report it.
            let in_turn = links.peers[waits_for].as_ref().is_some_and(|link| link.waits(3 * pulse));
            if limit.is_some_and(|limit| waited >= if in_turn { 2 * limit } else { limit }) {
                return Err(self.shared.break_up(links, late, waits_for));
            }
        }
    }

    /// Takes part in a call: with this rank's buffers, with none because another backend has them,
    /// or with the reason why it has no input.
    fn begin(&mut self, collective: Collective, lent: Result<Option<Lent>, RpcError>) -> Result<(), CclError> {
        if self.shared.broken.get().is_some() {
            // The cause may be an abort during a call that had all that it needed, of which the
            // others have not been notified yet.
            return Err(self.shared.end(&mut self.shared.lock()));
        }
        let peer = check::transfer(&collective, self.rank(), self.size);
        let sequence = match (peer, collective.operation) {
            (Some(peer), Operation::Send { .. }) => &mut self.sent[peer],
            (Some(peer), _) => &mut self.received[peer],
            (None, Operation::Send { .. } | Operation::Recv { .. }) => &mut 0,
            (None, _) => &mut self.sequence,
        };
        *sequence += 1;
        let sequence = *sequence;
        let shared = Arc::clone(&self.shared);
        shared.recorder.enter(sequence, collective);
        let mut lending = Lending { shared: &shared, links: shared.lock() };
        let links = &mut *lending.links;
        match (peer, collective.operation) {
            (Some(peer), _) => self.transfer(links, peer, collective, sequence, lent),
            (None, Operation::Send { .. } | Operation::Recv { .. }) => {
                check::no_such_peer(&collective, self.rank(), sequence)
            }
            (None, _) => self.collective(links, collective, lent),
        }
    }

    /// Runs a collective of all ranks.
    fn collective(
        &self,
        links: &mut Links,
        collective: Collective,
        lent: Result<Option<Lent>, RpcError>,
    ) -> Result<(), CclError> {
        let bytes = collective.bytes().unwrap_or(0);
        let inline = travels_inline(collective.operation, bytes, self.size);
        let input_len = input_bytes(collective.operation, bytes, self.size);
        let mut own = announcement(collective, (self.sequence, self.step), &lent);
        if let Ok(Some(lent)) = &lent
            && inline
            && has_input(collective.operation, self.rank)
        {
            // SAFETY: `lent` has that many bytes, and no code writes to them during the call.
            own.extend_from_slice(unsafe { std::slice::from_raw_parts(lent.input, input_len) });
        }
        for (_, link) in links.each() {
            link.queue_frame(FrameKind::Announcement, &own);
        }
        let mut notes: Vec<Option<Vec<u8>>> = vec![None; self.size];
        notes[self.rank] = Some(own);
        self.shared.announced[self.rank].store(self.sequence, Ordering::Relaxed);
        self.drive(links, |links| {
            for (rank, link) in links.each() {
                if notes[rank].is_some() {
                    continue;
                }
                match link.take_note() {
                    Some((FrameKind::Announcement, note)) => {
                        self.shared.announced[rank].store(self.sequence, Ordering::Relaxed);
                        notes[rank] = Some(note);
                    }
                    Some((_, note)) => return Err(out_of_order(rank, &note, self.rank, collective)),
                    None => {}
                }
            }
            let missing = notes.iter().position(Option::is_none);
            // Pending words have to be on their way, too, before this rank goes away to compute.
            let unsaid = links.each().find(|(_, link)| link.wants_output() && link.gone().is_none());
            Ok(match (missing, unsaid) {
                (Some(peer), _) => Step::Waits { peer, has_entered: false },
                (None, Some((peer, _))) => Step::Waits { peer, has_entered: true },
                (None, None) => Step::Done,
            })
        })?;
        let notes: Vec<Vec<u8>> = notes.into_iter().flatten().collect();
        let mut announcements = Vec::with_capacity(self.size);
        for (rank, note) in notes.iter().enumerate() {
            match parse(note).filter(|one| one.sequence == self.sequence) {
                Some(announcement) => announcements.push(announcement),
                None => {
                    let cause = BreakCause::Protocol("its announcement makes no sense".to_owned());
                    return Err(self.shared.break_up(links, cause, rank));
                }
            }
        }
        if let Some(rank) = ahead(&announcements) {
            return Err(self.shared.break_up(links, BreakCause::OutOfStep, rank));
        }
        agree(self.sequence, &announcements, |rank| poison_of(&notes[rank.index()]))?;
        let Some(lent) = lent.map_err(|_| self.shared.end(links))? else { return Ok(()) };
        if inline {
            // All are in this same call, and so have as much to bring.
            let is_short = |rank: usize| has_input(collective.operation, rank) && notes[rank].len() != LEN + input_len;
            if let Some(rank) = (0..self.size).find(|rank| is_short(*rank)) {
                let cause = BreakCause::Protocol("its input is not as long as it should be".to_owned());
                return Err(self.shared.break_up(links, cause, rank));
            }
            self.small(collective, bytes, lent, &notes);
            Ok(())
        } else {
            self.large(links, collective, bytes, lent)
        }
    }

    /// Runs a small collective, for which every rank does all the work itself.
    fn small(&self, collective: Collective, bytes: usize, lent: Lent, notes: &[Vec<u8>]) {
        // No rank is poisoned, so that inputs follow the announcements at once.
        let input = |rank: usize| notes[rank][LEN..].as_ptr();
        let skipped = match collective.operation {
            Operation::ReduceScatter(_) => self.rank * bytes,
            _ => 0,
        };
        match collective.operation.reduce_op() {
            Some(op) => {
                let sources: Vec<*const u8> = (0..self.size).map(|rank| input(rank).wrapping_add(skipped)).collect();
                // SAFETY: every note was found to hold its whole input; results go to `lent` alone.
                unsafe {
                    kernel::reduce(check::numeric(&collective), op, &sources, bytes, &mut |at, block| {
                        kernel::copy(block.as_ptr(), lent.output.add(at), block.len(), false);
                    });
                }
            }
            None => {
                for from in 0..self.size {
                    if let Some((at, to)) = route(collective.operation, bytes, from, self.rank)
                        && lent.has_output
                    {
                        // SAFETY: as above.
                        unsafe { kernel::copy(input(from).add(at), lent.output.add(to), bytes, false) };
                    }
                }
            }
        }
    }

    /// Runs a transfer between two ranks: an offer, an answer, the bytes.
    fn transfer(
        &self,
        links: &mut Links,
        peer: usize,
        collective: Collective,
        sequence: u64,
        lent: Result<Option<Lent>, RpcError>,
    ) -> Result<(), CclError> {
        let is_send = matches!(collective.operation, Operation::Send { .. });
        let own = announcement(collective, (sequence, self.step), &lent);
        let (ours, theirs) =
            if is_send { (FrameKind::Offer, FrameKind::Answer) } else { (FrameKind::Answer, FrameKind::Offer) };
        if let Some(link) = &mut links.peers[peer] {
            link.queue_frame(ours, &own);
        }
        let mut note = None;
        self.drive(links, |links| {
            let Some(link) = &mut links.peers[peer] else { return Ok(Step::Done) };
            if note.is_none() {
                note = match link.take_note() {
                    Some((kind, note)) if kind == theirs => Some(note),
                    Some((_, note)) => return Err(out_of_order(peer, &note, self.rank, collective)),
                    None => None,
                };
            }
            let done = note.is_some() && !link.wants_output();
            Ok(if done { Step::Done } else { Step::Waits { peer, has_entered: note.is_some() } })
        })?;
        let note = note.unwrap_or_default();
        let Some((ours, theirs)) = parse(&own).zip(parse(&note)) else {
            let cause = BreakCause::Protocol("its announcement makes no sense".to_owned());
            return Err(self.shared.break_up(links, cause, peer));
        };
        let (us, them) = ((Rank::of(self.rank), &ours), (Rank::of(peer), &theirs));
        let (sender, receiver) = if is_send { (us, them) } else { (them, us) };
        if let Some(at) = ahead(&[ours, theirs]) {
            return Err(self.shared.break_up(links, BreakCause::OutOfStep, [self.rank, peer][at]));
        }
        agree_pair(sequence, sender, receiver, |rank| poison_of(if rank.index() == self.rank { &own } else { &note }))?;
        let Some(lent) = lent.map_err(|_| self.shared.end(links))? else { return Ok(()) };
        let Some(bytes) = collective.bytes() else { return Err(self.shared.end(links)) };
        self.move_between_two(links, peer, is_send, bytes, lent)
    }
}

/// Outcome of a step of a call.
enum Step {
    Done,
    /// More can be done at once.
    Moved,
    Waits {
        peer: usize,
        has_entered: bool,
    },
}

/// Fault of a rank that breaks the group.
struct Fault(BreakCause, usize);

/// Reports that a rank is in another kind of call than this one can agree or disagree with: it has
/// no place for the other's word.
fn out_of_order(rank: usize, note: &[u8], own: usize, collective: Collective) -> Fault {
    let theirs = parse(note).map_or_else(|| "something else".to_owned(), |one| one.collective.to_string());
    Fault(BreakCause::Protocol(format!("it is in {theirs}, and rank {own} is in {collective}")), rank)
}

/// Returns the announcement of a call, followed by the cause of poison, if there is one.
fn announcement(
    collective: Collective,
    (sequence, step): (u64, u64),
    lent: &Result<Option<Lent>, RpcError>,
) -> Vec<u8> {
    let poison = lent.as_ref().err().map_or_else(Vec::new, |cause| poison_to_bytes(cause, MAX_POISON));
    let buffers = lent.as_ref().ok().and_then(Option::as_ref);
    let announcement = Announcement {
        collective,
        sequence,
        step,
        in_place: buffers.is_some_and(|lent| lent.in_place),
        has_output: buffers.is_some_and(|lent| lent.has_output),
        poison: if lent.is_ok() { 0 } else { poison.len().max(1) as u32 },
        input: 0,
        output: 0,
    };
    let mut bytes = announcement.to_bytes().to_vec();
    bytes.extend_from_slice(&poison);
    bytes
}

fn parse(note: &[u8]) -> Option<Announcement> {
    Announcement::from_bytes(note.first_chunk::<LEN>()?)
}

fn poison_of(note: &[u8]) -> RpcError {
    poison_from_bytes(&note[LEN..])
}

impl Ccl for StreamCcl {
    fn rank(&self) -> Rank {
        Rank::of(self.rank)
    }

    fn size(&self) -> usize {
        self.size
    }

    fn epoch(&self) -> u64 {
        self.options.epoch
    }

    fn run(&mut self, collective: Collective, data: CollectiveInput<'_>) -> Result<(), CclError> {
        let buffers = check::lend(&collective, &data, self.rank(), self.size);
        let result = self.begin(collective, buffers.map(Some));
        self.finish(&result);
        result
    }

    fn set_step(&mut self, step: u64) {
        self.step = step;
    }

    fn leave_step(&mut self) {
        let mut links = self.shared.lock();
        for (_, link) in links.each() {
            link.queue_frame(FrameKind::LeftStep, &self.step.to_le_bytes());
            // The rest goes with the next call.
            link.write();
        }
    }

    fn control(&self) -> Arc<dyn Control> {
        Arc::clone(&self.shared) as Arc<dyn Control>
    }

    fn into_agreement(self: Box<Self>) -> Result<Box<dyn Agreement>, RpcError> {
        Ok(self)
    }
}

impl Agreement for StreamCcl {
    fn agree(&mut self, collective: Collective, input: Result<(), RpcError>) -> Result<(), CclError> {
        let result = self.begin(collective, input.map(|()| None));
        if result.is_err() {
            self.finish(&result);
        }
        result
    }

    fn check(&mut self) -> Result<(), CclError> {
        let links = &mut *self.shared.lock();
        links.expect_input();
        self.shared.move_bytes(links);
        if self.shared.broken.get().is_some() {
            return Err(self.shared.end(links));
        }
        // A rank that has left in good order gives no reason.
        let lost =
            |(rank, link): (usize, &mut Link)| Some((rank, link.gone().filter(|why| !why.is_empty())?.to_owned()));
        let lost = links.each().find_map(lost);
        match lost {
            Some((rank, why)) => Err(self.shared.break_up(links, BreakCause::Link(why), rank)),
            None => Ok(()),
        }
    }

    fn fail(&mut self, cause: BreakCause) -> CclError {
        self.shared.break_up(&mut self.shared.lock(), cause, self.rank)
    }

    fn finish(&mut self, result: &Result<(), CclError>) {
        if self.shared.recorder.last().is_some_and(|flight| flight.took.is_none()) {
            self.shared.recorder.leave(result);
        }
    }
}

impl Drop for StreamCcl {
    fn drop(&mut self) {
        let mut links = self.shared.lock();
        if self.shared.broken.get().is_some() {
            self.shared.end(&mut links);
        }
        for (_, link) in links.each() {
            link.queue_frame(FrameKind::Leave, &[]);
            link.write();
        }
        links.peers.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::ccl::{Buffers, Collective};

    /// No link outlives the buffers of a call that panics.
    #[test]
    fn a_call_that_panics_takes_the_links_with_it() {
        let (own, mut other) = UnixStream::pair().unwrap();
        own.set_nonblocking(true).unwrap();
        let links = vec![None, Some(Link::new(Box::new(own)))];
        let options = Options::default();
        let wake_sockets = WakeSockets::open(&options.open_files).unwrap();
        let mut ccl = StreamCcl::new(0, links, options, wake_sockets);
        let shared = Arc::clone(&ccl.shared);
        let call = std::panic::AssertUnwindSafe(|| {
            let _lent = Lending { shared: &shared, links: shared.lock() };
            panic!("in a call");
        });
        std::panic::catch_unwind(call).unwrap_err();
        assert_eq!(other.read(&mut [0]).unwrap(), 0);
        let barrier = Collective::new(Operation::Barrier, rpc_core::DataType::U8, 0);
        let error = ccl.run(barrier, Buffers::none().into()).unwrap_err();
        assert!(matches!(error, CclError::Broken(_)), "{error}");
    }
}
