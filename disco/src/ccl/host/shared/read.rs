//! Large collectives between processes that may read each other's memory: each rank reads from the
//! buffers of the others, whose addresses are in the announcements. So data is copied once, and
//! ranks wait for each other once or twice, whatever the size.
//!
//! No rank writes to the memory of another. A call succeeds only once all ranks that read from its
//! buffers have finished. It returns an error at once: other ranks may still read from its buffers,
//! but they check before they return that the group is broken, and do not use what they have read.

use super::pieces::{BufferStart, in_pieces};
use super::{Phase, SharedCcl};
use crate::ccl::host::algorithm::{bypasses, route, share};
use crate::ccl::host::memory::Memory;
use crate::ccl::host::segment::Word;
use crate::ccl::host::{check, kernel, process_memory};
use crate::ccl::{BreakCause, CclError, Collective, Lent, Operation};

/// Bytes of all other ranks' inputs that are reduced at a time: as much as a second-level cache
/// holds beside the result.
const SCRATCH: usize = 256 * 1024;

impl SharedCcl {
    pub(super) fn read_and_finish(&mut self, collective: Collective, bytes: usize, lent: Lent) -> Result<(), CclError> {
        let size = self.segment.size();
        let sequence = self.sequence as u32;
        match collective.operation {
            Operation::Allreduce(_) => {
                let own = share(bytes, self.rank, size);
                let (input, output) = (lent.input.wrapping_add(own.start), lent.output.wrapping_add(own.start));
                self.read_and_reduce(collective, own.start, own.len(), input, output)?;
                self.publish(Word::Halfway, sequence);
                let in_place = self.announcements.iter().any(|one| one.in_place);
                let mut owners: Vec<usize> = (1..size).map(|step| (self.rank + step) % size).collect();
                if in_place {
                    // These writes overwrite inputs, which all other ranks must have read before.
                    for &owner in &owners {
                        self.wait(self.segment.word(owner, Word::Halfway), sequence, owner, Phase::Progress)?;
                    }
                } else {
                    // Owners that have finished their share come first.
                    let is_there = |owner: &usize| {
                        super::reached(
                            self.segment.word(*owner, Word::Halfway).load(super::Ordering::Acquire),
                            sequence,
                        )
                    };
                    owners.sort_by_key(|owner| !is_there(owner));
                }
                for owner in owners {
                    self.wait(self.segment.word(owner, Word::Halfway), sequence, owner, Phase::Progress)?;
                    let theirs = share(bytes, owner, size);
                    let from = self.announcements[owner].output.wrapping_add(theirs.start as u64);
                    self.read(owner, from, lent.output.wrapping_add(theirs.start), theirs.len(), 1)?;
                }
            }
            Operation::ReduceScatter(_) => {
                let at = self.rank * bytes;
                self.read_and_reduce(collective, at, bytes, lent.input.wrapping_add(at), lent.output)?;
            }
            operation if lent.has_output => {
                let threads = self.spare_threads(operation);
                for step in 0..size {
                    let from = (self.rank + step) % size;
                    let Some((at, to)) = route(operation, bytes, from, self.rank) else { continue };
                    let to = lent.output.wrapping_add(to);
                    if from == self.rank {
                        let own = lent.input.wrapping_add(at);
                        if own != to.cast_const() {
                            // SAFETY: both buffers are this rank's, and do not overlap.
                            unsafe { kernel::copy(own, to, bytes, bypasses(bytes)) };
                        }
                    } else {
                        self.read(from, self.announcements[from].input.wrapping_add(at as u64), to, bytes, threads)?;
                    }
                }
            }
            _ => {}
        }
        self.publish(Word::Finished, sequence);
        for peer in self.peers().filter(|peer| self.is_read_by(collective.operation, *peer)) {
            self.wait(self.segment.word(peer, Word::Finished), sequence, peer, Phase::Progress)?;
        }
        Ok(())
    }

    /// Returns true if `peer` reads from this rank's buffers in this operation.
    fn is_read_by(&self, operation: Operation, peer: usize) -> bool {
        matches!(operation, Operation::Allreduce(_)) || route(operation, 1, self.rank, peer).is_some()
    }

    /// Reduces the bytes `at..at + len` of all inputs to `output`. `input` is the address of these
    /// bytes in this rank's input.
    fn read_and_reduce(
        &mut self,
        collective: Collective,
        at: usize,
        len: usize,
        input: *const u8,
        output: *mut u8,
    ) -> Result<(), CclError> {
        let Some(op) = collective.operation.reduce_op() else { return Ok(()) };
        let size = self.segment.size();
        // Whole cache lines, so that no element is split.
        let part = (SCRATCH / size.max(2).saturating_sub(1)).clamp(4096, 128 * 1024) / 64 * 64;
        if self.scratch.is_none() {
            // In whole pages, because the kernel copies much faster to an address at the beginning
            // of a cache line.
            self.scratch = Memory::heap(part * size);
        }
        let Some(scratch) = self.scratch.as_ref().map(Memory::start) else {
            return Err(self.break_up(BreakCause::Aborted("no memory for a reduction".to_owned()), self.rank));
        };
        let mut sources: Vec<*const u8> = vec![std::ptr::null(); size];
        let bypass = bypasses(len);
        for done in (0..len).step_by(part) {
            let piece = part.min(len - done);
            for (rank, source) in sources.iter_mut().enumerate() {
                if rank == self.rank {
                    *source = input.wrapping_add(done);
                } else {
                    let place = scratch.wrapping_add(rank * part);
                    let from = self.announcements[rank].input.wrapping_add((at + done) as u64);
                    self.read(rank, from, place, piece, 1)?;
                    *source = place.cast_const();
                }
            }
            // SAFETY: the pieces in `scratch` have just been filled, and the other buffers are this
            // rank's own. Its output may be its input: only bytes that have been read are
            // overwritten.
            unsafe {
                kernel::reduce(check::numeric(&collective), op, &sources, piece, &mut |offset, block| {
                    kernel::copy(block.as_ptr(), output.add(done + offset), block.len(), bypass);
                });
            }
        }
        Ok(())
    }

    /// Reads `len` bytes at the address `from` in the process of `peer` to `to` in this process,
    /// with up to `threads` threads.
    pub(super) fn read(&self, peer: usize, from: u64, to: *mut u8, len: usize, threads: usize) -> Result<(), CclError> {
        let process = self.segment.word(peer, Word::Pid).load(super::Ordering::Relaxed);
        let to = BufferStart(to);
        // SAFETY: `to` has room for `len` bytes, which no other code accesses: a buffer that was
        // lent to the call, or scratch memory. Every piece is read once.
        let read = in_pieces(&self.segment, len, threads, |piece| unsafe {
            process_memory::read(process, from.wrapping_add(piece.start as u64), to.at(piece.start), piece.len())
        });
        if self.segment.is_broken() {
            return Err(self.broken());
        }
        read.map_err(|error| {
            let cause = if self.processes.is_dead(peer) {
                BreakCause::Died
            } else {
                BreakCause::Link(format!("its buffer cannot be read: {error}"))
            };
            self.break_up(cause, peer)
        })
    }
}
