//! The communicator of ranks that share memory: threads of one process, or processes of one
//! machine.
//!
//! A collective begins with an announcement by each rank in its slot, to which small inputs are
//! attached. A rank continues when it has seen the announcements of all. Each rank has two slots,
//! which it uses in turn. It writes to a slot again only after all ranks have announced the
//! collective in between, which they do only after they have finished the one that the slot was
//! used for. So a small collective takes one step, and ranks need not report its end.
//!
//! A rank that waits also checks if the group has been broken. That is recorded in one word of the
//! segment, and breaking the group wakes all ranks.

mod direct;
#[cfg(test)]
mod models;
mod pair;
mod pieces;
mod read;
mod small;
mod staged;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rpc_core::RpcError;

use super::algorithm::{Algorithm, Reach, has_input, input_bytes};
use super::announcement::{Announcement, MAX_POISON, agree, ahead};
use super::memory::Memory;
use super::segment::{Gate, Segment, Word, reached, wall_millis};
use super::watched_processes::WatchedProcesses;
use super::{Options, check, kernel};
use crate::ccl::error::{poison_from_bytes, poison_to_bytes};
use crate::ccl::{
    Agreement, BreakCause, Breakdown, Ccl, CclError, Collective, CollectiveInput, Control, Flight, Lent, Operation,
    Rank, Recorder,
};
use crate::sync::{AtomicU32, yield_now};

/// Time for which a rank yields before it sleeps: longer than a collective takes, and not so long
/// that it costs more than a wake-up.
const YIELD: Duration = Duration::from_millis(2);

/// Longest sleep between two checks if the awaited rank is alive, in groups of up to [`MANY`]
/// ranks. In larger ones it is longer, so that the checks of all ranks cost no more.
const SLEEP: Duration = Duration::from_millis(50);

/// Number of ranks from which a group is large.
const MANY: usize = 64;

/// Most lines of the description of what a group's ranks are in.
const MAX_LINES: usize = 16;

/// Number of times that a rank reads a word before it begins to yield, which takes some
/// microseconds. More is useful only if nothing else needs the core; otherwise the awaited rank may
/// be waiting for this core.
const SPINS: u32 = 100;

/// One rank of a group that shares a segment.
pub(super) struct SharedCcl {
    segment: Arc<Segment>,
    rank: usize,
    options: Options,
    reach: Reach,
    /// The other ranks' processes, each of which may die.
    processes: WatchedProcesses,
    recorder: Arc<Recorder>,
    spins: u32,
    /// Time for which the rank yields before it sleeps.
    yield_time: Duration,
    /// Number of cores that this rank may run on.
    cores: usize,
    /// Number of the last collective.
    sequence: u64,
    /// Number of the rank's step, as its caller counts.
    step: u64,
    /// Number of chunks that have gone through the stages since the group began: the same on all
    /// ranks.
    chunks: u32,
    /// Number of collectives at whose end the ranks waited for each other at a gate: the same on
    /// all ranks.
    finishes: u32,
    /// Counts for each other rank that there were transfers with: of transfers to it, and of the
    /// chunks that went through the box for it.
    sent: HashMap<usize, pair::Count>,
    received: HashMap<usize, pair::Count>,
    /// Announcements of the collective in progress, by rank.
    announcements: Vec<Announcement>,
    /// Memory into which inputs of other ranks are read. `None` before its first use.
    scratch: Option<Memory>,
}

/// Event that a rank waits for.
#[derive(Clone, Copy)]
enum Phase {
    /// The other rank enters the collective.
    Entry,
    /// The other rank, which has entered, makes progress.
    Progress,
}

impl SharedCcl {
    pub(super) fn new(
        segment: Arc<Segment>,
        rank: usize,
        options: Options,
        reach: Reach,
        processes: WatchedProcesses,
    ) -> Self {
        let size = segment.size();
        let cores = cores();
        // If ranks have to share a core, spinning only keeps the awaited rank from running.
        let spins = if options.ranks_on_machine.unwrap_or(size).max(size) > cores { 0 } else { SPINS };
        Self {
            segment,
            rank,
            options,
            reach,
            processes,
            recorder: Arc::default(),
            spins,
            yield_time: YIELD,
            cores,
            sequence: 0,
            step: 0,
            chunks: 0,
            finishes: 0,
            sent: HashMap::new(),
            received: HashMap::new(),
            announcements: Vec::new(),
            scratch: None,
        }
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.segment.size()).filter(move |peer| *peer != rank)
    }

    fn word(&self, word: Word) -> &AtomicU32 {
        self.segment.word(self.rank, word)
    }

    fn publish(&self, word: Word, value: u32) {
        self.segment.publish(self.word(word), value, self.rank);
    }

    /// Begins a call: runs a transfer, or a collective as [`collective`](Self::collective) does.
    fn begin(&mut self, collective: Collective, lent: Result<Option<Lent>, RpcError>) -> Result<(), CclError> {
        if self.segment.is_broken() {
            return Err(self.broken());
        }
        let peer = check::transfer(&collective, self.rank(), self.size());
        let sequence = match (peer, collective.operation) {
            (Some(peer), Operation::Send { .. }) => self.sent.entry(peer).or_default().next(),
            (Some(peer), _) => self.received.entry(peer).or_default().next(),
            // A transfer with a rank that does not exist: no other rank takes part.
            (None, Operation::Send { .. } | Operation::Recv { .. }) => 0,
            (None, _) => {
                self.sequence += 1;
                self.sequence
            }
        };
        self.word(Word::Since).store(wall_millis(), Ordering::Relaxed);
        self.recorder.enter(sequence, collective);
        match (collective.operation, peer) {
            (Operation::Send { .. }, Some(peer)) => self.send(peer, collective, lent),
            (Operation::Recv { .. }, Some(peer)) => self.receive(peer, collective, lent),
            (Operation::Send { .. } | Operation::Recv { .. }, None) => {
                check::no_such_peer(&collective, self.rank(), sequence)
            }
            _ => self.collective(collective, lent),
        }
    }

    /// Runs a collective of all ranks. `lent` are this rank's buffers; or `None`, if another
    /// backend moves the data; or the error because of which this rank has no input.
    fn collective(&mut self, collective: Collective, lent: Result<Option<Lent>, RpcError>) -> Result<(), CclError> {
        let size = self.segment.size();
        let bytes = collective.bytes().unwrap_or(0);
        let sequence = self.sequence;
        let slot = self.segment.slot(self.rank, sequence);
        let (lent, poison, is_poisoned) = match lent {
            Ok(lent) => (lent, Vec::new(), false),
            Err(cause) => (None, poison_to_bytes(&cause, MAX_POISON), true),
        };
        let announcement = Announcement {
            collective,
            sequence,
            step: self.step,
            in_place: lent.is_some_and(|lent| lent.in_place),
            has_output: lent.is_some_and(|lent| lent.has_output),
            poison: if is_poisoned { poison.len().max(1) as u32 } else { 0 },
            input: lent.map_or(0, |lent| lent.input.addr() as u64),
            output: lent.map_or(0, |lent| lent.output.addr() as u64),
        };
        self.segment.announce(slot, &announcement, &poison);
        if let Some(lent) = lent
            && has_input(collective.operation, self.rank)
            && self.reach.travels_inline(collective.operation, bytes, size)
        {
            let len = input_bytes(collective.operation, bytes, size);
            // SAFETY: `lent` has that many bytes, and the slot has room for them; no rank reads the
            // slot before `Entered` says so.
            unsafe { kernel::copy(lent.input, self.segment.inline(self.rank, sequence), len, false) };
        }
        self.word(Word::Entered).store(sequence as u32, Ordering::Release);
        self.meet_at(Gate::Entered, sequence as u32, sequence as u32)?;
        self.announcements.clear();
        for rank in 0..size {
            let announcement = self.segment.announcement(self.segment.slot(rank, sequence));
            match announcement.filter(|announcement| announcement.sequence == sequence) {
                Some(announcement) => self.announcements.push(announcement),
                None => {
                    let text = format!("its announcement of #{sequence} makes no sense");
                    return Err(self.break_up(BreakCause::Protocol(text), rank));
                }
            }
        }
        if let Some(rank) = ahead(&self.announcements) {
            return Err(self.break_up(BreakCause::OutOfStep, rank));
        }
        agree(sequence, &self.announcements, |rank| {
            let len = self.announcements[rank.index()].poison;
            poison_from_bytes(&self.segment.poison(self.segment.slot(rank.index(), sequence), len))
        })?;
        let Some(lent) = lent else { return if is_poisoned { Err(self.broken()) } else { Ok(()) } };
        let any_in_place = self.announcements.iter().any(|one| one.in_place);
        match Algorithm::of(&collective, bytes, size, self.reach, any_in_place) {
            Algorithm::Small => self.small(collective, bytes, lent),
            Algorithm::Direct => return self.direct(collective, bytes, lent),
            Algorithm::Read => return self.read_and_finish(collective, bytes, lent),
            Algorithm::Staged => self.staged(collective, bytes, lent)?,
        }
        Ok(())
    }

    /// Waits for all other ranks at a gate, which this rank comes to for the time number `time`:
    /// until all have set their word to `value`, as this one has.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    fn meet_at(&self, gate: Gate, value: u32, time: u32) -> Result<(), CclError> {
        let size = self.segment.size();
        let target = time.wrapping_mul(size as u32);
        let (word, phase) = match gate {
            Gate::Entered => (Word::Entered, Phase::Entry),
            Gate::Finished => (Word::Finished, Phase::Progress),
        };
        self.segment.come_to(gate, target);
        let is_open = || reached(self.segment.gate(gate).load(Ordering::SeqCst), target);
        let has_come = |peer| reached(self.segment.word(peer, word).load(Ordering::Acquire), value);
        let is_out = |peer| self.has_left(peer) || matches!(phase, Phase::Entry) && self.has_left_step(peer);
        // Found here and not in `wait`: a rank that waits for many has to notice any that goes.
        let gone = |from: usize| (from..size).find(|peer| !has_come(*peer) && is_out(*peer));
        if self.is_soon(is_open)? {
            return Ok(());
        }
        let mut began = Instant::now();
        // The lowest rank that had not come at the last look.
        let mut missing = 0;
        loop {
            // A rank that goes before this one says that it sleeps does not wake it.
            let is_rung =
                self.segment.sleep_at_gate(self.rank, self.step, self.sleep_time(), || is_open() || gone(0).is_some());
            if is_open() {
                return Ok(());
            }
            if self.segment.is_broken() {
                return Err(self.broken());
            }
            let before = missing;
            while missing < size && has_come(missing) {
                missing += 1;
            }
            if missing == size {
                // One has died between its word and the gate.
                return Ok(());
            }
            if missing != before {
                began = Instant::now();
            }
            let peer = if is_rung { gone(missing).unwrap_or(missing) } else { missing };
            if let Some(cause) = self.failure_of(peer, phase, began)
                && !has_come(peer)
            {
                return Err(self.break_up(cause, peer));
            }
        }
    }

    /// Waits until `word`, which `peer` writes, has reached `target`.
    ///
    /// # Errors
    ///
    /// The group is broken. This call breaks it if the peer has left or died, or if the time limit
    /// for the `phase` has passed.
    fn wait(&self, word: &AtomicU32, target: u32, peer: usize, phase: Phase) -> Result<(), CclError> {
        let ready = || reached(word.load(Ordering::Acquire), target);
        let has_gone = || self.has_left(peer) || matches!(phase, Phase::Entry) && self.has_left_step(peer);
        if self.is_soon(ready)? {
            return Ok(());
        }
        let began = Instant::now();
        loop {
            // A peer that goes before this rank says that it sleeps does not wake it.
            self.segment.sleep(self.rank, peer, self.sleep_time(), || ready() || has_gone());
            if ready() {
                return Ok(());
            }
            if self.segment.is_broken() {
                return Err(self.broken());
            }
            // The rank may have written the word between the check above and its end.
            if let Some(cause) = self.failure_of(peer, phase, began)
                && !ready()
            {
                return Err(self.break_up(cause, peer));
            }
        }
    }

    /// Spins and yields for a while. Returns true once `ready` says so.
    ///
    /// # Errors
    ///
    /// The group is broken.
    fn is_soon(&self, ready: impl Fn() -> bool) -> Result<bool, CclError> {
        for _ in 0..=self.spins {
            if ready() {
                return Ok(true);
            }
            std::hint::spin_loop();
        }
        let began = Instant::now();
        while began.elapsed() < self.yield_time {
            for _ in 0..16 {
                yield_now();
                if ready() {
                    return Ok(true);
                }
            }
            if self.segment.is_broken() {
                return Err(self.broken());
            }
        }
        Ok(false)
    }

    /// Returns why this rank, which has waited for `peer` since `began`, waits no longer.
    fn failure_of(&self, peer: usize, phase: Phase, began: Instant) -> Option<BreakCause> {
        let (limit, late) = match phase {
            Phase::Entry => (self.options.entry_timeout, BreakCause::NeverEntered),
            Phase::Progress => (Some(self.options.stall_timeout), BreakCause::Silent),
        };
        if self.has_left(peer) {
            Some(BreakCause::Left)
        } else if self.processes.is_dead(peer) {
            Some(BreakCause::Died)
        } else if matches!(phase, Phase::Entry) && self.has_left_step(peer) {
            Some(BreakCause::OutOfStep)
        } else {
            limit.is_some_and(|limit| began.elapsed() >= limit).then_some(late)
        }
    }

    /// Returns the longest sleep between two checks.
    fn sleep_time(&self) -> Duration {
        SLEEP * (self.segment.size() / MANY).max(1) as u32
    }

    /// Returns true if the peer has dropped its communicator.
    fn has_left(&self, peer: usize) -> bool {
        self.segment.word(peer, Word::Left).load(Ordering::Acquire) != 0
    }

    /// Returns true if the peer has left the step that this rank is in, and so will not enter its
    /// collectives.
    fn has_left_step(&self, peer: usize) -> bool {
        let left = self.segment.left_step(peer);
        left != 0 && left >= self.step
    }

    /// Breaks the group because of a failure of `rank`.
    fn break_up(&self, cause: BreakCause, rank: usize) -> CclError {
        let breakdown = Breakdown {
            cause,
            rank: Rank::of(rank),
            noticed_by: Rank::of(self.rank),
            during: during(&self.recorder),
            flights: describe(&self.segment, self.rank, &self.recorder),
        };
        // The first one says so for all.
        if self.segment.break_up(&breakdown) {
            rpc_core::log_limited!(ERROR, rank = self.rank, %breakdown, "a group of collectives is broken");
        }
        self.broken()
    }

    /// Returns the error of the broken group.
    fn broken(&self) -> CclError {
        // The rank that breaks the group writes the breakdown some microseconds after the word that
        // breaks it, unless its process is killed in between.
        let began = Instant::now();
        loop {
            if let Some(breakdown) = self.segment.breakdown() {
                return CclError::Broken(Arc::new(breakdown));
            }
            if began.elapsed() > Duration::from_secs(1) {
                return CclError::Broken(Arc::new(Breakdown {
                    cause: BreakCause::Aborted("the rank that broke the group died while it wrote why".to_owned()),
                    rank: Rank::of(self.rank),
                    noticed_by: Rank::of(self.rank),
                    during: during(&self.recorder),
                    flights: String::new(),
                }));
            }
            yield_now();
        }
    }

    /// Waits until no other thread uses this rank's buffers. The group has been broken: a thread
    /// that begins after that sees it and does not touch them, and a thread that began before
    /// checks it after each piece. So this takes microseconds.
    fn take_back_buffers(&self) {
        for peer in self.peers() {
            while self.reach == Reach::Addresses && self.segment.word(peer, Word::Busy).load(Ordering::SeqCst) != 0 {
                yield_now();
            }
        }
    }
}

impl Ccl for SharedCcl {
    fn rank(&self) -> Rank {
        Rank::of(self.rank)
    }

    fn size(&self) -> usize {
        self.segment.size()
    }

    fn epoch(&self) -> u64 {
        self.segment.epoch()
    }

    fn run(&mut self, collective: Collective, data: CollectiveInput<'_>) -> Result<(), CclError> {
        let lent = check::lend(&collective, &data, self.rank(), self.size());
        let result = self.begin(collective, lent.map(Some));
        if result.as_ref().is_err_and(CclError::is_broken) {
            self.take_back_buffers();
        }
        if self.segment.size() > MANY {
            // Each of many ranks would keep those of all.
            self.announcements = Vec::new();
        }
        self.finish(&result);
        result
    }

    fn set_step(&mut self, step: u64) {
        self.step = step;
    }

    fn leave_step(&mut self) {
        self.segment.leave_step(self.rank, self.step);
    }

    fn control(&self) -> Arc<dyn Control> {
        Arc::new(SharedControl {
            segment: Arc::clone(&self.segment),
            rank: self.rank,
            recorder: Arc::clone(&self.recorder),
        })
    }

    fn into_agreement(self: Box<Self>) -> Result<Box<dyn Agreement>, RpcError> {
        Ok(self)
    }
}

impl Agreement for SharedCcl {
    fn agree(&mut self, collective: Collective, input: Result<(), RpcError>) -> Result<(), CclError> {
        let result = self.begin(collective, input.map(|()| None));
        if result.is_err() {
            self.finish(&result);
        }
        result
    }

    fn check(&mut self) -> Result<(), CclError> {
        if self.segment.is_broken() {
            return Err(self.broken());
        }
        // A rank that leaves sets its word before its process ends.
        match self.peers().find(|peer| self.processes.is_dead(*peer) && !self.has_left(*peer)) {
            Some(peer) => Err(self.break_up(BreakCause::Died, peer)),
            None => Ok(()),
        }
    }

    fn fail(&mut self, cause: BreakCause) -> CclError {
        self.break_up(cause, self.rank)
    }

    fn finish(&mut self, result: &Result<(), CclError>) {
        let Some(flight) = self.recorder.last().filter(|flight| flight.took.is_none()) else { return };
        let is_broken = result.as_ref().is_err_and(CclError::is_broken);
        if !is_broken && flight.collective.operation.peer().is_none() {
            self.word(Word::Finished).store(flight.sequence as u32, Ordering::Release);
        }
        self.recorder.leave(result);
    }
}

impl Drop for SharedCcl {
    fn drop(&mut self) {
        self.segment.leave(self.rank);
    }
}

struct SharedControl {
    segment: Arc<Segment>,
    rank: usize,
    recorder: Arc<Recorder>,
}

impl Control for SharedControl {
    fn abort(&self, reason: &str) {
        self.segment.break_up(&Breakdown {
            cause: BreakCause::Aborted(reason.to_owned()),
            rank: Rank::of(self.rank),
            noticed_by: Rank::of(self.rank),
            during: during(&self.recorder),
            flights: describe(&self.segment, self.rank, &self.recorder),
        });
    }

    fn broken(&self) -> Option<Arc<Breakdown>> {
        self.segment.breakdown().map(Arc::new)
    }

    fn flights(&self) -> Vec<Flight> {
        self.recorder.flights()
    }

    fn describe(&self) -> String {
        describe(&self.segment, self.rank, &self.recorder)
    }
}

/// Returns the text of the call that this rank is in; empty if it is in none.
fn during(recorder: &Recorder) -> String {
    let flight = recorder.last().filter(|flight| flight.took.is_none());
    flight.map_or_else(String::new, |flight| format!("{} #{}", flight.collective, flight.sequence))
}

/// Describes the call that each rank was last seen in, for people. The words of other ranks may
/// change while they are read. In a large group, ranks that say the same share a line, and there
/// are [`MAX_LINES`] lines at most.
fn describe(segment: &Segment, own: usize, recorder: &Recorder) -> String {
    use std::fmt::Write as _;

    let size = segment.size();
    let ahead = (0..size).map(|rank| segment.word(rank, Word::Entered).load(Ordering::Acquire));
    let ahead = ahead.reduce(|a, b| if reached(a, b) { a } else { b }).unwrap_or(0);
    let mut text = String::new();
    if size <= MAX_LINES {
        for rank in 0..size {
            _ = write!(text, "rank {rank}: {}", describe_rank(segment, rank, ahead, true));
            if rank == own
                && let Some(flight) = recorder.last()
            {
                _ = write!(text, " ({flight})");
            }
            text.push('\n');
        }
        return text;
    }
    let mut lines: Vec<(Range<usize>, String)> = Vec::new();
    for rank in 0..size {
        let line = describe_rank(segment, rank, ahead, false);
        if let Some((ranks, _)) = lines.last_mut().filter(|(_, last)| *last == line) {
            ranks.end = rank + 1;
        } else if lines.len() == MAX_LINES {
            _ = writeln!(text, "and {} more ranks", size - rank);
            break;
        } else {
            lines.push((rank..rank + 1, line));
        }
    }
    let lines = lines.into_iter().map(|(ranks, line)| match ranks.len() {
        1 => format!("rank {}: {line}\n", ranks.start),
        _ => format!("ranks {} to {}: {line}\n", ranks.start, ranks.end - 1),
    });
    let mut described: String = lines.collect();
    if let Some(flight) = recorder.last() {
        _ = writeln!(described, "rank {own}: {flight}");
    }
    described + &text
}

/// Describes the call that a rank was last seen in, where the furthest rank has entered the
/// collective `ahead`.
fn describe_rank(segment: &Segment, rank: usize, ahead: u32, with_times: bool) -> String {
    let load = |word| segment.word(rank, word).load(Ordering::Acquire);
    let (entered, finished) = (load(Word::Entered), load(Word::Finished));
    let since = Duration::from_millis(wall_millis().wrapping_sub(load(Word::Since)).into());
    let (for_so_long, so_long_ago) =
        if with_times { (format!(" for {since:.1?}"), format!(", {since:.1?} ago")) } else { Default::default() };
    let call = segment.announcement(segment.slot(rank, entered.into())).map(|one| one.collective.to_string());
    let call = call.unwrap_or_else(|| "a collective".to_owned());
    match load(Word::Transfer) {
        _ if load(Word::Left) != 0 => "left the group".to_owned(),
        0 if finished != entered => format!("in {call} #{entered}{for_so_long}"),
        0 if entered == 0 && ahead != 0 => format!("never entered #{ahead}, nor any collective before"),
        0 if entered == 0 => "in no collective, and has been in none".to_owned(),
        0 if entered != ahead => format!("never entered #{ahead}; its last call was {call} #{entered}{so_long_ago}"),
        0 => format!("in no collective; its last one was {call} #{entered}"),
        transfer if transfer & 1 != 0 => format!("sends to rank {}{for_so_long}", transfer / 2 - 1),
        transfer => format!("receives from rank {}{for_so_long}", transfer / 2 - 1),
    }
}

/// Returns the number of cores of this process. The system is asked once: it reads files for that.
fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}
