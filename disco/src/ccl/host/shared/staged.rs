//! Large collectives in chunks through the stages of the segment: between processes that cannot
//! read each other's memory, of data too small for that, and of exchanges in place. A chunk is
//! still in the caches when it is read.
//!
//! Every rank counts the chunks that it has produced, reduced and consumed since the group began.
//! All ranks count the same number in each collective, so that a collective need not wait for the
//! end of the one before. Work on a chunk is spread over rounds, one for each step, so that a rank
//! waits only for work that its peers did one round earlier.

use super::{Phase, SharedCcl};
use crate::ccl::host::algorithm::{bypasses, is_personal, route, share};
use crate::ccl::host::segment::{STAGE, STAGES, Word};
use crate::ccl::host::{check, kernel};
use crate::ccl::{CclError, Collective, Lent, Operation};

impl SharedCcl {
    pub(super) fn staged(&mut self, collective: Collective, bytes: usize, lent: Lent) -> Result<(), CclError> {
        let chunks = match collective.operation {
            Operation::Allreduce(_) => self.staged_allreduce(collective, bytes, lent),
            _ => self.staged_exchange(collective, bytes, lent),
        }?;
        self.chunks = self.chunks.wrapping_add(chunks);
        Ok(())
    }

    /// Waits until the `word` of all other ranks has reached `target`.
    fn wait_for_all(&self, word: Word, target: u32) -> Result<(), CclError> {
        for peer in self.peers() {
            self.wait(self.segment.word(peer, word), target, peer, Phase::Progress)?;
        }
        Ok(())
    }

    /// Runs an allreduce: each rank reduces its share of each chunk for all ranks. Returns the
    /// number of chunks to count.
    fn staged_allreduce(&self, collective: Collective, bytes: usize, lent: Lent) -> Result<u32, CclError> {
        let size = self.segment.size();
        let Some(op) = collective.operation.reduce_op() else { return Ok(0) };
        let longest = share(bytes, 0, size).len();
        // Data that fits into all stages together goes as one chunk: ranks wait fewer times then,
        // and it is too little data to gain from overlapping.
        let whole = STAGES * STAGE / size / 64 * 64;
        let (part, stages_each) = if longest <= whole { (whole, STAGES as u32) } else { (STAGE / size / 64 * 64, 1) };
        // Each chunk has a part for each rank, its owner. A rank leaves its own part free for its
        // result.
        let chunks = longest.div_ceil(part) as u32;
        // Value of the counters after so many chunks.
        let count_at = |chunk: u32| self.chunks.wrapping_add(chunk * stages_each);
        // Start and length of a chunk in the share of `owner`.
        let piece = |owner: usize, chunk: u32| {
            let share = share(bytes, owner, size);
            let begin = (share.start + chunk as usize * part).min(share.end);
            (begin, part.min(share.end - begin))
        };
        let stage = |rank: usize, chunk: u32, owner: usize| {
            let first = if stages_each == 1 { self.chunks.wrapping_add(chunk) } else { 0 };
            self.segment.stage(rank, first).wrapping_add(owner * part)
        };
        let bypass = bypasses(bytes);
        let mut sources = vec![std::ptr::null(); size];
        for round in 0..chunks + 2 {
            if round < chunks {
                self.wait_for_all(Word::Consumed, count_at(round + 1).wrapping_sub(STAGES as u32))?;
                for owner in self.peers() {
                    let (begin, len) = piece(owner, round);
                    // SAFETY: `begin..begin + len` is in the input, and only this rank writes to
                    // its stage, whose earlier content all ranks have consumed.
                    unsafe { kernel::copy(lent.input.add(begin), stage(self.rank, round, owner), len, false) };
                }
                self.publish(Word::Produced, count_at(round + 1));
            }
            if let Some(chunk) = round.checked_sub(1).filter(|chunk| *chunk < chunks) {
                self.wait_for_all(Word::Produced, count_at(round))?;
                let (begin, len) = piece(self.rank, chunk);
                for (rank, source) in sources.iter_mut().enumerate() {
                    *source = stage(rank, chunk, self.rank).cast_const();
                }
                sources[self.rank] = lent.input.wrapping_add(begin);
                let result = stage(self.rank, chunk, self.rank);
                // SAFETY: the parts of the other ranks have been produced, the part of the result
                // is not a source, and the output is this rank's. It may be its input: only bytes
                // that have been read are overwritten.
                unsafe {
                    kernel::reduce(check::numeric(&collective), op, &sources, len, &mut |at, block| {
                        kernel::copy(block.as_ptr(), result.add(at), block.len(), false);
                        kernel::copy(block.as_ptr(), lent.output.add(begin + at), block.len(), bypass);
                    });
                }
                self.publish(Word::Reduced, count_at(round));
            }
            if let Some(chunk) = round.checked_sub(2) {
                for owner in self.peers() {
                    let (begin, len) = piece(owner, chunk);
                    let reduced = self.segment.word(owner, Word::Reduced);
                    self.wait(reduced, count_at(round - 1), owner, Phase::Progress)?;
                    // SAFETY: the owner has written its result there, and does not change it until
                    // this rank has consumed it. In place, this part of the input was copied to the
                    // stage two rounds ago.
                    unsafe { kernel::copy(stage(owner, chunk, owner), lent.output.add(begin), len, bypass) };
                }
                self.publish(Word::Consumed, count_at(round - 1));
            }
        }
        Ok(chunks * stages_each)
    }

    /// Runs all other collectives: each rank copies the data that others need to its stages, and
    /// reads its own from theirs. Returns the number of chunks to count.
    fn staged_exchange(&self, collective: Collective, bytes: usize, lent: Lent) -> Result<u32, CclError> {
        let size = self.segment.size();
        let operation = collective.operation;
        let personal = is_personal(operation);
        let shares = if personal { size } else { 1 };
        let whole = STAGES * STAGE / shares / 64 * 64;
        // As in an allreduce, except that two ranks gain more if one copies to the stages while the
        // other copies from them.
        let (part, stages_each) =
            if size > 2 && bytes <= whole { (whole, STAGES as u32) } else { (STAGE / shares / 64 * 64, 1) };
        let chunks = bytes.div_ceil(part) as u32;
        let count_at = |chunk: u32| self.chunks.wrapping_add(chunk * stages_each);
        let piece = |chunk: u32| {
            let begin = chunk as usize * part;
            (begin, part.min(bytes - begin))
        };
        let stage = |rank: usize, chunk: u32, to: usize| {
            let first = if stages_each == 1 { self.chunks.wrapping_add(chunk) } else { 0 };
            let stage = self.segment.stage(rank, first);
            if personal { stage.wrapping_add(to * part) } else { stage }
        };
        // Receivers, and the offset of the data for each in this rank's input. Data for all is
        // listed once.
        let mut sends: Vec<(usize, usize)> =
            self.peers().filter_map(|to| Some((to, route(operation, bytes, self.rank, to)?.0))).collect();
        if !personal {
            sends.truncate(1);
        }
        let receives: Vec<(usize, usize)> =
            self.peers().filter_map(|from| Some((from, route(operation, bytes, from, self.rank)?.1))).collect();
        let end = count_at(chunks);
        if sends.is_empty() {
            self.publish(Word::Produced, end);
        }
        if receives.is_empty() {
            self.publish(Word::Consumed, end);
        }
        self.publish(Word::Reduced, end);
        let bypass = bypasses(bytes);
        let own = route(operation, bytes, self.rank, self.rank).filter(|_| lent.has_output);
        if let (Some((at, to)), None) = (own, operation.reduce_op()) {
            let (from, to) = (lent.input.wrapping_add(at), lent.output.wrapping_add(to));
            if from != to.cast_const() {
                // SAFETY: both are this rank's, and do not overlap.
                unsafe { kernel::copy(from, to, bytes, bypass) };
            }
        }
        let mut sources = vec![std::ptr::null(); size];
        for round in 0..=chunks {
            let count = count_at(round);
            if round < chunks && !sends.is_empty() {
                self.wait_for_all(Word::Consumed, count_at(round + 1).wrapping_sub(STAGES as u32))?;
                let (begin, len) = piece(round);
                for &(to, at) in &sends {
                    // SAFETY: as in an allreduce.
                    unsafe { kernel::copy(lent.input.add(at + begin), stage(self.rank, round, to), len, false) };
                }
                self.publish(Word::Produced, count_at(round + 1));
            }
            // The only rank of a group receives nothing, but still reduces its own input.
            let takes_part = !receives.is_empty() || operation.reduce_op().is_some();
            let Some(chunk) = round.checked_sub(1).filter(|_| takes_part) else { continue };
            let (begin, len) = piece(chunk);
            for &(from, to) in &receives {
                self.wait(self.segment.word(from, Word::Produced), count, from, Phase::Progress)?;
                if operation.reduce_op().is_none() && lent.has_output {
                    // SAFETY: the sender does not change its stage until this rank has consumed it.
                    // In place, this part of the input was copied to the stage one round ago.
                    unsafe {
                        kernel::copy(stage(from, chunk, self.rank), lent.output.add(to + begin), len, bypass);
                    }
                }
            }
            if let Some(op) = operation.reduce_op() {
                for (rank, source) in sources.iter_mut().enumerate() {
                    *source = stage(rank, chunk, self.rank).cast_const();
                }
                sources[self.rank] = lent.input.wrapping_add(self.rank * bytes + begin);
                // SAFETY: as above. In place, the output is this rank's part of the input, which no
                // other rank reads.
                unsafe {
                    kernel::reduce(check::numeric(&collective), op, &sources, len, &mut |at, block| {
                        kernel::copy(block.as_ptr(), lent.output.add(begin + at), block.len(), bypass);
                    });
                }
            }
            self.publish(Word::Consumed, count);
        }
        Ok(chunks * stages_each)
    }
}
