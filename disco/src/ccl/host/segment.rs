//! Memory that the ranks of one machine share: its layout, its words, and the ways to wait for
//! them.
//!
//! It has no locks. Each word is written by one rank only and counts upward (with wrapping), but
//! for these: `BROKEN`, which the first to break the group wins, the two [gates](Gate), to which
//! each rank adds, and each rank's `Bell`, which wakes it.
//!
//! | part | content |
//! | --- | --- |
//! | head | magic, version, size, epoch, nonce; `BROKEN` and the breakdown; the gates |
//! | words | those of each rank |
//! | announcements | two for each rank, used in turn |
//! | block for each rank | two slots, used in turn, for causes of poison and small inputs |
//! | | staging for large inputs |
//! | a box for each ordered pair | words and announcements of both ends, and staging |
//!
//! The words that every rank reads of all others lie together, so that the ranks of a large group
//! find them in their caches. The rest is touched by the ranks that use it alone: the memory of a
//! group takes room as it is used.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::announcement::{Announcement, LEN, MAX_POISON};
use super::memory::Memory;
use crate::ccl::Breakdown;
use crate::sync::{AtomicU32, AtomicU64, wait_on, wake};

/// The largest input that travels in an announcement's slot, in bytes.
pub(super) const INLINE: usize = 16 * 1024;
/// Staging of one rank: this many chunks, used in turn.
pub(super) const STAGES: usize = 4;
/// The bytes of one such chunk. Fewer in unit tests, whose models move many chunks.
pub(super) const STAGE: usize = if cfg!(test) { 16 * 1024 } else { 256 * 1024 };
/// Staging from one rank to another: this many chunks, used in turn.
pub(super) const PARCELS: usize = 2;
/// The bytes of one such chunk, in groups of up to [`FEW`] ranks. Fewer in unit tests.
const PARCEL: usize = if cfg!(test) { 4 * 1024 } else { 128 * 1024 };
/// The bytes of one such chunk in larger groups, in which there are many pairs.
const SMALL_PARCEL: usize = 4 * 1024;
/// Most ranks of a group whose boxes have chunks of full size.
const FEW: usize = 256;

const MAGIC: u64 = u64::from_le_bytes(*b"discoccl");
const VERSION: u32 = 4;
const HEAD: usize = 8192;
const BROKEN: usize = 64;
const BROKEN_LEN: usize = 68;
const BREAKDOWN: usize = 128;
/// The longest breakdown, in bytes.
const BREAKDOWN_ROOM: usize = 4096;

/// The bytes of one rank's words.
const WORDS: usize = 128;
/// The bytes of one announcement, with some to spare: a line of the caches.
const NOTE: usize = 64;

const SLOT_INLINE: usize = MAX_POISON;
const SLOT: usize = SLOT_INLINE + INLINE;
const STAGING: usize = (2 * SLOT).next_multiple_of(4096);
const BLOCK: usize = STAGING + STAGES * STAGE;

const BOX_NOTES: usize = 128;
const BOX_NOTE: usize = NOTE + MAX_POISON;
const BOX_DATA: usize = (BOX_NOTES + 2 * BOX_NOTE).next_multiple_of(4096);

/// Counters at which all ranks meet: each rank adds one when it has come to the gate. So a rank
/// sees with one look if all have come, and the last one wakes the others.
///
/// A process that dies between its own word and the gate leaves the gate one short: so a rank that
/// has waited for long looks at the words themselves.
#[derive(Clone, Copy, Debug)]
#[repr(usize)]
pub(super) enum Gate {
    /// The ranks' [`Word::Entered`].
    Entered = 4352,
    /// The ranks' [`Word::Finished`], in collectives whose ranks wait for each other at the end.
    Finished = 4416,
}

/// The words of a rank: written by that rank, read by all.
#[derive(Clone, Copy, Debug)]
#[repr(usize)]
pub(super) enum Word {
    /// The collective that it has entered last.
    Entered = 0,
    /// The collective that it has finished last: it needs nothing more of it, and uses no other
    /// rank's buffers.
    Finished = 4,
    /// Number of chunks that the rank has put into its staging, in all.
    Produced = 8,
    /// Number of chunks that the rank has reduced.
    Reduced = 12,
    /// Number of chunks that the rank no longer needs of any staging.
    Consumed = 16,
    /// 1 while it touches the others' buffers.
    Busy = 20,
    /// 1 once it has dropped its communicator.
    Left = 24,
    /// 0; 1 when a process has claimed the rank; 2 when that process is ready.
    Joined = 28,
    /// Time at which it entered its last call: milliseconds of the wall clock, wrapped.
    Since = 44,
    /// The rank that it sends to or receives from, and which of the two:
    /// `2 × (rank + 1) + is_send`; 0 otherwise.
    Transfer = 40,
    /// The collective of which it has reduced its share last.
    Halfway = 56,
    /// Count that changes when another rank wakes this one. Written by the others.
    Bell = 64,
    /// Goal of the rank's wait while it is about to sleep: [`AT_GATE`], or a rank's number plus 2;
    /// 0 while it is awake.
    Sleeping = 68,
    /// Process of the rank.
    Pid = 80,
    /// Size in KiB from which it wants to read from the other processes, plus 1; 0 if that is not
    /// known yet, and [`NEVER`] if it cannot.
    Reads = 84,
    /// Address in its process at which the rank has put the group's nonce, for others to try: the
    /// lower half and the upper half.
    ProbeLow = 88,
    ProbeHigh = 92,
}

/// Value of [`Word::Sleeping`] of a rank that waits at a gate.
const AT_GATE: u32 = 1;

/// Offset of the last step, as its caller counts, that a rank is through with without having come
/// to all collectives, perhaps: a `u64` among the words.
const LEFT_STEP: usize = 32;
/// Offset of the step in which a rank sleeps at a gate: a `u64` among the words.
const AWAITED_STEP: usize = 72;

/// As [`Word::Reads`].
pub(super) const NEVER: u32 = u32::MAX;

/// The words of the box from one rank to another: two of the sender's, two of the receiver's.
#[derive(Clone, Copy, Debug)]
#[repr(usize)]
pub(super) enum BoxWord {
    Offered = 0,
    Produced = 4,
    Answered = 64,
    Consumed = 68,
}

/// Place of an announcement, and that of the cause of poison that goes with it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Note {
    announcement: usize,
    poison: usize,
}

/// The shared memory of a group.
pub(super) struct Segment {
    memory: Memory,
    size: usize,
    epoch: u64,
    layout: SegmentLayout,
}

/// Offsets of the parts whose place depends on the number of ranks.
#[derive(Clone, Copy, Debug)]
struct SegmentLayout {
    announcements: usize,
    blocks: usize,
    boxes: usize,
    /// The bytes of one box, and of one chunk in it.
    one_box: usize,
    parcel: usize,
    end: usize,
}

impl SegmentLayout {
    /// Returns the layout for `size` ranks; `None` if no memory has that many bytes. Ranks of one
    /// address space put no data into the boxes.
    fn new(size: usize, in_one_process: bool) -> Option<Self> {
        let parcel = match size {
            _ if in_one_process => 0,
            0..=FEW => PARCEL,
            _ => SMALL_PARCEL,
        };
        let one_box = BOX_DATA + PARCELS * parcel;
        let announcements = size.checked_mul(WORDS)?.checked_add(HEAD)?;
        let blocks = size.checked_mul(2 * NOTE)?.checked_add(announcements)?.checked_next_multiple_of(4096)?;
        let boxes = size.checked_mul(BLOCK)?.checked_add(blocks)?;
        let end = size.checked_mul(size)?.checked_mul(one_box)?.checked_add(boxes)?;
        let this = Self { announcements, blocks, boxes, one_box, parcel, end };
        Some(this).filter(|_| end <= isize::MAX as usize)
    }
}

impl Segment {
    /// Returns the bytes that a group of `size` needs.
    pub(super) fn bytes(size: usize, in_one_process: bool) -> Option<usize> {
        SegmentLayout::new(size, in_one_process).map(|layout| layout.end)
    }

    /// Returns how many of these bytes take room from the beginning, or from the first collective
    /// on: those of the head, the words and the announcements.
    pub(super) fn bytes_at_once(size: usize, in_one_process: bool) -> Option<usize> {
        SegmentLayout::new(size, in_one_process).map(|layout| layout.blocks)
    }

    /// Writes the head into fresh memory of [`bytes`](Self::bytes).
    pub(super) fn create(memory: Memory, size: usize, in_one_process: bool, epoch: u64, nonce: [u8; 16]) -> Self {
        let this = Self::over(memory, size, in_one_process, epoch);
        this.write(8, &VERSION.to_le_bytes());
        this.write(12, &(size as u32).to_le_bytes());
        this.write(16, &epoch.to_le_bytes());
        this.write(24, &nonce);
        this.write(0, &MAGIC.to_le_bytes());
        this
    }

    /// Opens memory that another process has prepared.
    ///
    /// # Errors
    ///
    /// It was prepared for another group, or by another version.
    pub(super) fn open(memory: Memory, size: usize, epoch: u64, nonce: [u8; 16]) -> Result<Self, String> {
        let this = Self::over(memory, size, false, epoch);
        let mut head = [0; 40];
        this.read(0, &mut head);
        let mut expected = [0; 40];
        expected[..8].copy_from_slice(&MAGIC.to_le_bytes());
        expected[8..12].copy_from_slice(&VERSION.to_le_bytes());
        expected[12..16].copy_from_slice(&(size as u32).to_le_bytes());
        expected[16..24].copy_from_slice(&epoch.to_le_bytes());
        expected[24..].copy_from_slice(&nonce);
        if head == expected { Ok(this) } else { Err("the segment is another group's, epoch's or version's".to_owned()) }
    }

    fn over(memory: Memory, size: usize, in_one_process: bool, epoch: u64) -> Self {
        let layout = SegmentLayout::new(size, in_one_process).expect("its bytes have been computed before");
        Self { memory, size, epoch, layout }
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(super) fn word(&self, rank: usize, word: Word) -> &AtomicU32 {
        self.atomic(self.words(rank) + word as usize)
    }

    /// Returns the counter of a gate.
    pub(super) fn gate(&self, gate: Gate) -> &AtomicU32 {
        self.atomic(gate as usize)
    }

    /// Counts a rank at a gate that opens at `target`. The last one to come wakes the others.
    pub(super) fn come_to(&self, gate: Gate, target: u32) {
        // In one order with the sleeper's own two steps, as in `publish`.
        let count = self.gate(gate).fetch_add(1, Ordering::SeqCst).wrapping_add(1);
        if reached(count, target) {
            self.ring_sleepers(|_, awaited| awaited == AT_GATE);
        }
    }

    /// Returns the last step that a rank has left; 0 if it has left none.
    pub(super) fn left_step(&self, rank: usize) -> u64 {
        self.atomic_u64(self.words(rank) + LEFT_STEP).load(Ordering::Acquire)
    }

    /// Stores the last step that a rank has left, and wakes the ranks that wait in it.
    pub(super) fn leave_step(&self, rank: usize, step: u64) {
        self.atomic_u64(self.words(rank) + LEFT_STEP).store(step, Ordering::SeqCst);
        self.ring_sleepers(|sleeper, awaited| match awaited {
            AT_GATE => self.atomic_u64(self.words(sleeper) + AWAITED_STEP).load(Ordering::SeqCst) <= step,
            _ => awaited == waits_for(rank),
        });
    }

    /// Stores that a rank has left the group, and wakes all ranks that sleep.
    pub(super) fn leave(&self, rank: usize) {
        self.word(rank, Word::Left).store(1, Ordering::SeqCst);
        self.ring_sleepers(|_, _| true);
    }

    pub(super) fn box_word(&self, from: usize, to: usize, word: BoxWord) -> &AtomicU32 {
        self.atomic(self.mailbox(from, to) + word as usize)
    }

    /// Returns the offset of a rank's small inputs in the collective `sequence`.
    pub(super) fn inline(&self, rank: usize, sequence: u64) -> *mut u8 {
        self.at(self.slot(rank, sequence).poison + SLOT_INLINE, INLINE)
    }

    /// Returns the chunk number `chunk` of a rank's staging.
    pub(super) fn stage(&self, rank: usize, chunk: u32) -> *mut u8 {
        self.at(self.block(rank) + STAGING + chunk as usize % STAGES * STAGE, STAGE)
    }

    /// Returns the bytes of one chunk of the staging from one rank to another.
    pub(super) fn parcel_len(&self) -> usize {
        self.layout.parcel
    }

    /// Returns the chunk number `chunk` of the staging from one rank to another.
    pub(super) fn parcel(&self, from: usize, to: usize, chunk: u32) -> *mut u8 {
        let len = self.parcel_len();
        self.at(self.mailbox(from, to) + BOX_DATA + chunk as usize % PARCELS * len, len)
    }

    /// Returns the place at which a rank announces the collective `sequence`.
    pub(super) fn slot(&self, rank: usize, sequence: u64) -> Note {
        let turn = (sequence % 2) as usize;
        let announcement = self.layout.announcements + (turn * self.size + rank) * NOTE;
        Note { announcement, poison: self.block(rank) + turn * SLOT }
    }

    /// Returns the place at which the sender, or the receiver, of a pair announces a transfer.
    pub(super) fn note(&self, from: usize, to: usize, by_sender: bool) -> Note {
        let announcement = self.mailbox(from, to) + BOX_NOTES + if by_sender { 0 } else { BOX_NOTE };
        Note { announcement, poison: announcement + NOTE }
    }

    /// Puts an announcement, with its cause of poison, at its place.
    pub(super) fn announce(&self, note: Note, announcement: &Announcement, poison: &[u8]) {
        self.write(note.announcement, &announcement.to_bytes());
        self.write(note.poison, poison);
    }

    /// Returns the announcement at a place.
    pub(super) fn announcement(&self, note: Note) -> Option<Announcement> {
        let mut bytes = [0; LEN];
        self.read(note.announcement, &mut bytes);
        Announcement::from_bytes(&bytes)
    }

    /// Returns the cause of poison of `len` bytes that goes with the announcement at a place.
    pub(super) fn poison(&self, note: Note, len: u32) -> Vec<u8> {
        let mut bytes = vec![0; (len as usize).min(MAX_POISON)];
        self.read(note.poison, &mut bytes);
        bytes
    }

    /// Stores `value`, and wakes the ranks that sleep and wait for this one.
    pub(super) fn publish(&self, word: &AtomicU32, value: u32, by: usize) {
        // In one order with the sleeper's own two steps: either it sees the value, or we see that
        // it sleeps.
        word.store(value, Ordering::SeqCst);
        self.ring_sleepers(|_, awaited| awaited == waits_for(by));
    }

    /// Wakes the ranks that sleep and for which `is_concerned` says so, by their number and what
    /// they wait for.
    fn ring_sleepers(&self, is_concerned: impl Fn(usize, u32) -> bool) {
        for rank in 0..self.size {
            let awaited = self.word(rank, Word::Sleeping).load(Ordering::SeqCst);
            if awaited != 0 && is_concerned(rank, awaited) {
                self.ring(rank);
            }
        }
    }

    /// Sleeps until `peer` publishes something or leaves, or for `at_most`; not at all if `ready`
    /// says so.
    pub(super) fn sleep(&self, rank: usize, peer: usize, at_most: Duration, ready: impl FnOnce() -> bool) {
        self.sleep_for(rank, waits_for(peer), at_most, ready);
    }

    /// Sleeps until a gate opens, or a rank leaves the group or the step `step`, or for `at_most`;
    /// not at all if `ready` says so. Returns true if another rank has woken this one.
    pub(super) fn sleep_at_gate(
        &self,
        rank: usize,
        step: u64,
        at_most: Duration,
        ready: impl FnOnce() -> bool,
    ) -> bool {
        self.atomic_u64(self.words(rank) + AWAITED_STEP).store(step, Ordering::SeqCst);
        self.sleep_for(rank, AT_GATE, at_most, ready)
    }

    fn sleep_for(&self, rank: usize, awaited: u32, at_most: Duration, ready: impl FnOnce() -> bool) -> bool {
        let (bell, sleeping) = (self.word(rank, Word::Bell), self.word(rank, Word::Sleeping));
        let before = bell.load(Ordering::SeqCst);
        sleeping.store(awaited, Ordering::SeqCst);
        let is_ready = ready() || self.is_broken();
        if !is_ready {
            wait_on(bell, before, at_most);
        }
        sleeping.store(0, Ordering::SeqCst);
        is_ready || bell.load(Ordering::SeqCst) != before
    }

    /// Returns true if the group is broken.
    pub(super) fn is_broken(&self) -> bool {
        self.atomic(BROKEN).load(Ordering::SeqCst) != 0
    }

    /// Breaks the group, unless it is broken already, and wakes all ranks. Returns true if it was
    /// not broken before.
    pub(super) fn break_up(&self, breakdown: &Breakdown) -> bool {
        if self.atomic(BROKEN).compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return false;
        }
        let bytes = breakdown.to_bytes(BREAKDOWN_ROOM);
        self.write(BREAKDOWN, &bytes);
        self.atomic(BROKEN_LEN).store(bytes.len() as u32, Ordering::Relaxed);
        self.atomic(BROKEN).store(2, Ordering::SeqCst);
        for rank in 0..self.size {
            self.ring(rank);
        }
        true
    }

    /// Returns the breakdown of the group, if there was one. `None` for a moment after it, too, and
    /// for good if the process that broke it died just then.
    pub(super) fn breakdown(&self) -> Option<Breakdown> {
        if self.atomic(BROKEN).load(Ordering::SeqCst) != 2 {
            return None;
        }
        let len = self.atomic(BROKEN_LEN).load(Ordering::Relaxed) as usize;
        let mut bytes = vec![0; len.min(BREAKDOWN_ROOM)];
        self.read(BREAKDOWN, &mut bytes);
        Breakdown::from_bytes(&bytes)
    }

    fn ring(&self, rank: usize) {
        let bell = self.word(rank, Word::Bell);
        bell.fetch_add(1, Ordering::SeqCst);
        wake(bell);
    }

    fn words(&self, rank: usize) -> usize {
        HEAD + rank * WORDS
    }

    fn block(&self, rank: usize) -> usize {
        self.layout.blocks + rank * BLOCK
    }

    fn mailbox(&self, from: usize, to: usize) -> usize {
        self.layout.boxes + (from * self.size + to) * self.layout.one_box
    }

    fn atomic_u64(&self, offset: usize) -> &AtomicU64 {
        let word = self.at(offset, 8);
        // SAFETY: in the segment, which lives as long as `self`; aligned, because the segment
        // begins on a page and offsets of such words are multiples of eight; and the word is never
        // accessed in another way.
        unsafe { AtomicU64::from_ptr(word.cast()) }
    }

    fn atomic(&self, offset: usize) -> &AtomicU32 {
        let word = self.at(offset, 4);
        // SAFETY: in the segment, which lives as long as `self`; aligned, because the segment
        // begins on a page and offsets of words are multiples of four; and no word is ever accessed
        // in another way.
        unsafe { AtomicU32::from_ptr(word.cast()) }
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        let to = self.at(offset, bytes.len());
        // SAFETY: in the segment. The protocol of words says who may write where and when; a peer
        // that breaks it gets garbage.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) {
        let from = self.at(offset, bytes.len());
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) }
    }

    /// Returns the address of `len` bytes.
    ///
    /// # Panics
    ///
    /// They do not lie in the segment.
    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset + len <= self.memory.len(), "{len} bytes at {offset} are not in the segment");
        // SAFETY: within the memory.
        unsafe { self.memory.start().add(offset) }
    }
}

/// Returns the value of [`Word::Sleeping`] of a rank that waits for `peer`.
fn waits_for(peer: usize) -> u32 {
    peer as u32 + 2
}

/// Returns true if the counter `now` has come to `target`, or beyond.
pub(super) fn reached(now: u32, target: u32) -> bool {
    now.wrapping_sub(target) as i32 >= 0
}

/// Returns the present time, as [`Word::Since`] has it.
pub(super) fn wall_millis() -> u32 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    now.as_millis() as u32
}
