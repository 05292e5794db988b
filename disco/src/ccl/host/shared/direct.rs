//! Large collectives between threads of one process: each rank accesses the buffers of the others,
//! whose addresses are in the announcements.
//!
//! A rank's buffers are lent to all ranks from its announcement until its call returns. The call
//! succeeds only once all ranks have finished, and returns an error only once the group is broken
//! and no rank has its word [`Word::Busy`] set.

use std::sync::atomic::Ordering;

use super::SharedCcl;
use super::pieces::{BufferStart, PIECE, in_pieces};
use crate::ccl::host::algorithm::{bypasses, route, share};
use crate::ccl::host::segment::{Gate, Segment, Word};
use crate::ccl::host::{check, kernel};
use crate::ccl::{CclError, Collective, Lent, Operation};

/// Guard during whose life this rank may access the buffers of other ranks.
pub(super) struct Busy<'a>(&'a Segment, usize);

impl<'a> Busy<'a> {
    /// Begins the access to the buffers of other ranks. Returns `None` if the group is broken,
    /// because the buffers may have been freed.
    pub(super) fn begin(segment: &'a Segment, rank: usize) -> Option<Self> {
        // Sequentially consistent with breaking the group and reading this word: either the rank
        // that breaks the group sees this rank busy, or this rank sees the group broken.
        segment.word(rank, Word::Busy).store(1, Ordering::SeqCst);
        let this = Self(segment, rank);
        (!segment.is_broken()).then_some(this)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.word(self.1, Word::Busy).store(0, Ordering::SeqCst);
    }
}

impl SharedCcl {
    pub(super) fn direct(&mut self, collective: Collective, bytes: usize, lent: Lent) -> Result<(), CclError> {
        let busy = Busy::begin(&self.segment, self.rank).ok_or_else(|| self.broken())?;
        // SAFETY: the ranks are threads of this process and agree on the call, so that the
        // addresses are those of buffers whose lengths were checked for this call. `busy` keeps
        // them lent.
        unsafe {
            match collective.operation {
                Operation::Allreduce(_) => {
                    let share = share(bytes, self.rank, self.segment.size());
                    let outputs = self.announcements.iter().map(|one| one.output as usize as *mut u8);
                    let outputs: Vec<*mut u8> = outputs.map(|output| output.wrapping_add(share.start)).collect();
                    self.reduce(collective, share.start, share.len(), &outputs)?;
                }
                Operation::ReduceScatter(_) => self.reduce(collective, self.rank * bytes, bytes, &[lent.output])?,
                operation => {
                    let threads = self.spare_threads(operation);
                    for from in 0..self.segment.size() {
                        if let Some((at, to)) = route(operation, bytes, from, self.rank)
                            && lent.has_output
                        {
                            let input = self.announcements[from].input as usize as *const u8;
                            self.pull(input.wrapping_add(at), lent.output.wrapping_add(to), bytes, threads)?;
                        }
                    }
                }
            }
        }
        drop(busy);
        let sequence = self.sequence as u32;
        self.word(Word::Finished).store(sequence, Ordering::Release);
        self.finishes = self.finishes.wrapping_add(1);
        self.meet_at(Gate::Finished, sequence, self.finishes)
    }

    /// Reduces the bytes `at..at + len` of all inputs, and writes the result to all `outputs`.
    ///
    /// # Safety
    ///
    /// The buffers are lent, and no other rank accesses these parts of them.
    unsafe fn reduce(
        &self,
        collective: Collective,
        at: usize,
        len: usize,
        outputs: &[*mut u8],
    ) -> Result<(), CclError> {
        let Some(op) = collective.operation.reduce_op() else { return Ok(()) };
        let inputs: Vec<*const u8> = self.announcements.iter().map(|one| one.input as usize as *const u8).collect();
        let bypass = bypasses(len);
        let mut sources = inputs.clone();
        for done in (0..len).step_by(PIECE) {
            for (source, input) in sources.iter_mut().zip(&inputs) {
                *source = input.wrapping_add(at + done);
            }
            let piece = PIECE.min(len - done);
            // SAFETY: promised by the caller. An output may be an input: only bytes that have been
            // read from all inputs are overwritten.
            unsafe {
                kernel::reduce(check::numeric(&collective), op, &sources, piece, &mut |offset, block| {
                    for output in outputs {
                        kernel::copy(block.as_ptr(), output.add(done + offset), block.len(), bypass);
                    }
                });
            }
            if self.segment.is_broken() {
                return Err(self.broken());
            }
        }
        Ok(())
    }

    /// Copies `len` bytes from another rank's buffer, or from this rank's own, with up to `threads`
    /// threads.
    ///
    /// # Safety
    ///
    /// As [`reduce`](Self::reduce).
    pub(super) unsafe fn pull(&self, from: *const u8, to: *mut u8, len: usize, threads: usize) -> Result<(), CclError> {
        // In place: the bytes are already there.
        if from == to.cast_const() {
            return Ok(());
        }
        let (from, to) = (BufferStart(from.cast_mut()), BufferStart(to));
        // SAFETY: promised by the caller; every piece is copied once.
        let copied = in_pieces(&self.segment, len, threads, |piece| unsafe {
            kernel::copy(from.at(piece.start), to.at(piece.start), piece.len(), bypasses(len));
            Ok(())
        });
        if copied.is_err() || self.segment.is_broken() {
            return Err(self.broken());
        }
        Ok(())
    }
}
