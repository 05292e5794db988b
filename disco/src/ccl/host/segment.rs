//! Memory that the ranks of one machine share: its layout, its words, and the ways to wait for
//! them.
//!
//! It has no locks. Each word is written by one rank only and counts upward (with wrapping), but
//! for three: `BROKEN`, which the first to break the group wins, and each rank's `Bell` and
//! `Sleeping`, which wake it.
//!
//! | part | content |
//! | --- | --- |
//! | head | magic, version, size, epoch, nonce; `BROKEN` and the breakdown |
//! | block for each rank | its words; two slots, used in turn, for announcements and small inputs |
//! | | staging for large inputs |
//! | a box for each ordered pair | words and announcements of both ends, and staging |

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
/// The bytes of one such chunk. Fewer in unit tests.
pub(super) const PARCEL: usize = if cfg!(test) { 4 * 1024 } else { 128 * 1024 };

const MAGIC: u64 = u64::from_le_bytes(*b"discoccl");
const VERSION: u32 = 3;
const HEAD: usize = 8192;
const BROKEN: usize = 64;
const BROKEN_LEN: usize = 68;
const BREAKDOWN: usize = 128;
/// The longest breakdown, in bytes.
const BREAKDOWN_ROOM: usize = 4096;

const SLOTS: usize = 128;
const SLOT_INLINE: usize = 64 + MAX_POISON;
const SLOT: usize = SLOT_INLINE + INLINE;
const STAGING: usize = (SLOTS + 2 * SLOT).next_multiple_of(4096);
const BLOCK: usize = STAGING + STAGES * STAGE;

const BOX_NOTES: usize = 128;
const BOX_DATA: usize = (BOX_NOTES + 2 * SLOT_INLINE).next_multiple_of(4096);
const BOX: usize = BOX_DATA + PARCELS * PARCEL;

/// The words of a rank's block: written by that rank, read by all.
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
    /// Process of the rank.
    Pid = 32,
    /// Time at which it entered its last call: milliseconds of the wall clock, wrapped.
    Since = 36,
    /// The rank that it sends to or receives from, and which of the two:
    /// `2 × (rank + 1) + is_send`; 0 otherwise.
    Transfer = 40,
    /// Size in KiB from which it wants to read from the other processes, plus 1; 0 if that is not
    /// known yet, and [`NEVER`] if it cannot.
    Reads = 44,
    /// Address in its process at which the rank has put the group's nonce, for others to try: the
    /// lower half and the upper half.
    ProbeLow = 48,
    ProbeHigh = 52,
    /// The collective of which it has reduced its share last.
    Halfway = 56,
    /// Count that changes when another rank wakes this one. Written by the others.
    Bell = 64,
    /// 1 while the rank is about to sleep. Read by the others.
    Sleeping = 68,
}

/// Offset of the last step, as its caller counts, that a rank is through with without having come
/// to all collectives, perhaps: a `u64`, behind the words.
const LEFT_STEP: usize = 72;

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

/// The shared memory of a group.
pub(super) struct Segment {
    memory: Memory,
    size: usize,
    epoch: u64,
}

impl Segment {
    /// Returns the bytes that a group of `size` needs.
    pub(super) fn bytes(size: usize) -> Option<usize> {
        let boxes = size.checked_mul(size)?.checked_mul(BOX)?;
        size.checked_mul(BLOCK)?.checked_add(boxes)?.checked_add(HEAD).filter(|bytes| *bytes <= isize::MAX as usize)
    }

    /// Writes the head into fresh memory of [`bytes`](Self::bytes).
    pub(super) fn create(memory: Memory, size: usize, epoch: u64, nonce: [u8; 16]) -> Self {
        let this = Self { memory, size, epoch };
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
        let this = Self { memory, size, epoch };
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

    pub(super) fn size(&self) -> usize {
        self.size
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(super) fn word(&self, rank: usize, word: Word) -> &AtomicU32 {
        self.atomic(self.block(rank) + word as usize)
    }

    /// Returns the last step that a rank has left; 0 if it has left none.
    pub(super) fn left_step(&self, rank: usize) -> u64 {
        self.left_step_word(rank).load(Ordering::Acquire)
    }

    /// Stores the last step that a rank has left, and wakes the ranks that sleep.
    pub(super) fn leave_step(&self, rank: usize, step: u64) {
        self.left_step_word(rank).store(step, Ordering::SeqCst);
        self.wake_sleepers(rank);
    }

    pub(super) fn box_word(&self, from: usize, to: usize, word: BoxWord) -> &AtomicU32 {
        self.atomic(self.mailbox(from, to) + word as usize)
    }

    /// Returns the offset of a rank's small inputs in the collective `sequence`.
    pub(super) fn inline(&self, rank: usize, sequence: u64) -> *mut u8 {
        self.at(self.slot(rank, sequence) + SLOT_INLINE, INLINE)
    }

    /// Returns the chunk number `chunk` of a rank's staging.
    pub(super) fn stage(&self, rank: usize, chunk: u32) -> *mut u8 {
        self.at(self.block(rank) + STAGING + chunk as usize % STAGES * STAGE, STAGE)
    }

    /// Returns the chunk number `chunk` of the staging from one rank to another.
    pub(super) fn parcel(&self, from: usize, to: usize, chunk: u32) -> *mut u8 {
        self.at(self.mailbox(from, to) + BOX_DATA + chunk as usize % PARCELS * PARCEL, PARCEL)
    }

    /// Returns the offset at which a rank announces the collective `sequence`.
    pub(super) fn slot(&self, rank: usize, sequence: u64) -> usize {
        self.block(rank) + SLOTS + (sequence % 2) as usize * SLOT
    }

    /// Returns the offset at which the sender, or the receiver, of a pair announces a transfer.
    pub(super) fn note(&self, from: usize, to: usize, by_sender: bool) -> usize {
        self.mailbox(from, to) + BOX_NOTES + if by_sender { 0 } else { SLOT_INLINE }
    }

    /// Puts an announcement, with its cause of poison, at `offset`.
    pub(super) fn announce(&self, offset: usize, announcement: &Announcement, poison: &[u8]) {
        self.write(offset, &announcement.to_bytes());
        self.write(offset + 64, poison);
    }

    /// Returns the announcement at `offset`.
    pub(super) fn announcement(&self, offset: usize) -> Option<Announcement> {
        let mut bytes = [0; LEN];
        self.read(offset, &mut bytes);
        Announcement::from_bytes(&bytes)
    }

    /// Returns the cause of poison of `len` bytes that goes with the announcement at `offset`.
    pub(super) fn poison(&self, offset: usize, len: u32) -> Vec<u8> {
        let mut bytes = vec![0; (len as usize).min(MAX_POISON)];
        self.read(offset + 64, &mut bytes);
        bytes
    }

    /// Stores `value`, and wakes the ranks that sleep.
    pub(super) fn publish(&self, word: &AtomicU32, value: u32, by: usize) {
        // In one order with the sleeper's own two steps: either it sees the value, or we see that
        // it sleeps.
        word.store(value, Ordering::SeqCst);
        self.wake_sleepers(by);
    }

    /// Wakes the ranks that sleep, all but this one.
    fn wake_sleepers(&self, by: usize) {
        for rank in (0..self.size).filter(|rank| *rank != by) {
            if self.word(rank, Word::Sleeping).load(Ordering::SeqCst) != 0 {
                self.ring(rank);
            }
        }
    }

    /// Sleeps until `rank` is woken, or for `at_most`; not at all if `ready` says so.
    pub(super) fn sleep(&self, rank: usize, at_most: Duration, ready: impl FnOnce() -> bool) {
        let (bell, sleeping) = (self.word(rank, Word::Bell), self.word(rank, Word::Sleeping));
        let before = bell.load(Ordering::SeqCst);
        sleeping.store(1, Ordering::SeqCst);
        if !ready() && !self.is_broken() {
            wait_on(bell, before, at_most);
        }
        sleeping.store(0, Ordering::SeqCst);
    }

    /// Returns true if the group is broken.
    pub(super) fn is_broken(&self) -> bool {
        self.atomic(BROKEN).load(Ordering::SeqCst) != 0
    }

    /// Breaks the group, unless it is broken already, and wakes all ranks.
    pub(super) fn break_up(&self, breakdown: &Breakdown) {
        if self.atomic(BROKEN).compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return;
        }
        let bytes = breakdown.to_bytes(BREAKDOWN_ROOM);
        self.write(BREAKDOWN, &bytes);
        self.atomic(BROKEN_LEN).store(bytes.len() as u32, Ordering::Relaxed);
        self.atomic(BROKEN).store(2, Ordering::SeqCst);
        for rank in 0..self.size {
            self.ring(rank);
        }
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

    fn block(&self, rank: usize) -> usize {
        HEAD + rank * BLOCK
    }

    fn mailbox(&self, from: usize, to: usize) -> usize {
        HEAD + self.size * BLOCK + (from * self.size + to) * BOX
    }

    fn left_step_word(&self, rank: usize) -> &AtomicU64 {
        let word = self.at(self.block(rank) + LEFT_STEP, 8);
        // SAFETY: in the segment, which lives as long as `self`; aligned, because blocks begin on a
        // page and the offset is a multiple of eight; and the word is never accessed in another
        // way.
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

/// Returns true if the counter `now` has come to `target`, or beyond.
pub(super) fn reached(now: u32, target: u32) -> bool {
    now.wrapping_sub(target) as i32 >= 0
}

/// Returns the present time, as [`Word::Since`] has it.
pub(super) fn wall_millis() -> u32 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    now.as_millis() as u32
}
