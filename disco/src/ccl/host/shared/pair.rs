//! Transfers between two ranks. The segment has a *box* for each sender and receiver: two
//! announcements, four counters, and room for chunks.
//!
//! The sender announces its call, the receiver answers with its own announcement, and both compare
//! the two. Then the data moves: in one copy if the receiver can read the sender's buffer and that
//! is worth it, and otherwise in chunks through the box.

use std::sync::atomic::Ordering;

use rpc_core::RpcError;

use super::direct::Busy;
use super::{Phase, SharedCcl};
use crate::ccl::error::{poison_from_bytes, poison_to_bytes};
use crate::ccl::host::algorithm::{Reach, bypasses};
use crate::ccl::host::announcement::{Announcement, MAX_POISON, agree_pair, ahead};
use crate::ccl::host::kernel;
use crate::ccl::host::segment::{BoxWord, PARCELS, Word};
use crate::ccl::{BreakCause, CclError, Collective, Lent, Rank};

/// Transfers from one rank to another so far, and the chunks that went through their box.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Count {
    transfers: u64,
    chunks: u32,
}

impl Count {
    /// Returns the count after so many transfers and chunks.
    #[cfg(test)]
    pub(super) fn after(transfers: u64, chunks: u32) -> Self {
        Self { transfers, chunks }
    }

    /// Counts another transfer, and returns its number.
    pub(super) fn next(&mut self) -> u64 {
        self.transfers += 1;
        self.transfers
    }
}

impl SharedCcl {
    pub(super) fn send(
        &mut self,
        to: usize,
        collective: Collective,
        lent: Result<Option<Lent>, RpcError>,
    ) -> Result<(), CclError> {
        self.word(Word::Transfer).store(2 * (to as u32 + 1) + 1, Ordering::Relaxed);
        let result = self.send_inner(to, collective, lent);
        self.word(Word::Transfer).store(0, Ordering::Relaxed);
        result
    }

    pub(super) fn receive(
        &mut self,
        from: usize,
        collective: Collective,
        lent: Result<Option<Lent>, RpcError>,
    ) -> Result<(), CclError> {
        self.word(Word::Transfer).store(2 * (from as u32 + 1), Ordering::Relaxed);
        let result = self.receive_inner(from, collective, lent);
        self.word(Word::Transfer).store(0, Ordering::Relaxed);
        result
    }

    fn send_inner(
        &mut self,
        to: usize,
        collective: Collective,
        lent: Result<Option<Lent>, RpcError>,
    ) -> Result<(), CclError> {
        let Count { transfers: sequence, chunks: before } = self.sent.get(&to).copied().unwrap_or_default();
        self.note(self.rank, to, true, collective, sequence, &lent);
        self.publish_in_box(self.rank, to, BoxWord::Offered, sequence as u32);
        let answered = self.segment.box_word(self.rank, to, BoxWord::Answered);
        self.wait(answered, sequence as u32, to, Phase::Entry)?;
        self.compare(self.rank, to, sequence)?;
        let Some(lent) = lent.map_err(|_| self.broken())? else { return Ok(()) };
        let Some(bytes) = collective.bytes() else { return Err(self.broken()) };
        let consumed = self.segment.box_word(self.rank, to, BoxWord::Consumed);
        if self.is_taken(bytes) {
            self.sent.entry(to).or_default().chunks = before.wrapping_add(1);
            return self.wait(consumed, before.wrapping_add(1), to, Phase::Progress);
        }
        let parcel_len = self.segment.parcel_len();
        let chunks = bytes.div_ceil(parcel_len) as u32;
        for chunk in 0..chunks {
            let count = before.wrapping_add(chunk);
            self.wait(consumed, count.wrapping_add(1).wrapping_sub(PARCELS as u32), to, Phase::Progress)?;
            let begin = chunk as usize * parcel_len;
            let len = parcel_len.min(bytes - begin);
            // SAFETY: the range is in the input, and the receiver has consumed the earlier content
            // of this part of the box.
            unsafe { kernel::copy(lent.input.add(begin), self.segment.parcel(self.rank, to, count), len, false) };
            self.publish_in_box(self.rank, to, BoxWord::Produced, count.wrapping_add(1));
        }
        self.sent.entry(to).or_default().chunks = before.wrapping_add(chunks);
        Ok(())
    }

    fn receive_inner(
        &mut self,
        from: usize,
        collective: Collective,
        lent: Result<Option<Lent>, RpcError>,
    ) -> Result<(), CclError> {
        let Count { transfers: sequence, chunks: before } = self.received.get(&from).copied().unwrap_or_default();
        let offered = self.segment.box_word(from, self.rank, BoxWord::Offered);
        self.wait(offered, sequence as u32, from, Phase::Entry)?;
        // The sender reads this note after the answer that follows, and leaves its own note
        // unchanged until then.
        self.note(from, self.rank, false, collective, sequence, &lent);
        let agreed = self.compare(from, self.rank, sequence);
        let offer = self.segment.announcement(self.segment.note(from, self.rank, true));
        self.publish_in_box(from, self.rank, BoxWord::Answered, sequence as u32);
        agreed?;
        let Some(lent) = lent.map_err(|_| self.broken())? else { return Ok(()) };
        let (Some(bytes), Some(offer)) = (collective.bytes(), offer) else { return Err(self.broken()) };
        if self.is_taken(bytes) {
            let threads = self.spare_threads(collective.operation);
            if matches!(self.reach, Reach::Reads(_)) {
                self.read(from, offer.input, lent.output, bytes, threads)?;
            } else {
                let busy = Busy::begin(&self.segment, self.rank).ok_or_else(|| self.broken())?;
                // SAFETY: both ranks are threads of this process and agree on the size, and `busy`
                // keeps the sender's buffer lent.
                unsafe { self.pull(offer.input as usize as *const u8, lent.output, bytes, threads)? };
                drop(busy);
            }
            self.received.entry(from).or_default().chunks = before.wrapping_add(1);
            self.publish_in_box(from, self.rank, BoxWord::Consumed, before.wrapping_add(1));
            return Ok(());
        }
        let parcel_len = self.segment.parcel_len();
        let chunks = bytes.div_ceil(parcel_len) as u32;
        for chunk in 0..chunks {
            let count = before.wrapping_add(chunk);
            let produced = self.segment.box_word(from, self.rank, BoxWord::Produced);
            self.wait(produced, count.wrapping_add(1), from, Phase::Progress)?;
            let begin = chunk as usize * parcel_len;
            let len = parcel_len.min(bytes - begin);
            let parcel = self.segment.parcel(from, self.rank, count);
            // SAFETY: the sender does not change this part of the box until this rank has consumed
            // it, and the output has room.
            unsafe { kernel::copy(parcel, lent.output.add(begin), len, bypasses(bytes)) };
            self.publish_in_box(from, self.rank, BoxWord::Consumed, count.wrapping_add(1));
        }
        self.received.entry(from).or_default().chunks = before.wrapping_add(chunks);
        Ok(())
    }

    /// Returns true if the receiver reads `bytes` bytes directly from the sender's buffer.
    fn is_taken(&self, bytes: usize) -> bool {
        match self.reach {
            Reach::Addresses => true,
            Reach::Reads(from) => bytes >= from,
            Reach::Segment => false,
        }
    }

    /// Writes this rank's announcement to the box of `from` and `to`.
    fn note(
        &self,
        from: usize,
        to: usize,
        by_sender: bool,
        collective: Collective,
        sequence: u64,
        lent: &Result<Option<Lent>, RpcError>,
    ) {
        let poison = lent.as_ref().err().map_or_else(Vec::new, |cause| poison_to_bytes(cause, MAX_POISON));
        let poison_len = if lent.is_ok() { 0 } else { poison.len().max(1) as u32 };
        let announcement = Announcement {
            collective,
            sequence,
            step: self.step,
            in_place: false,
            has_output: !by_sender,
            poison: poison_len,
            input: lent.as_ref().ok().and_then(Option::as_ref).map_or(0, |lent| lent.input.addr() as u64),
            output: 0,
        };
        self.segment.announce(self.segment.note(from, to, by_sender), &announcement, &poison);
    }

    /// Compares the two announcements in the box of `from` and `to`.
    fn compare(&self, from: usize, to: usize, sequence: u64) -> Result<(), CclError> {
        let offsets = [true, false].map(|by_sender| self.segment.note(from, to, by_sender));
        let [Some(sender), Some(receiver)] = offsets.map(|offset| self.segment.announcement(offset)) else {
            let peer = if from == self.rank { to } else { from };
            return Err(self.break_up(BreakCause::Protocol("its announcement makes no sense".to_owned()), peer));
        };
        if let Some(at) = ahead(&[sender, receiver]) {
            return Err(self.break_up(BreakCause::OutOfStep, [from, to][at]));
        }
        agree_pair(sequence, (Rank::of(from), &sender), (Rank::of(to), &receiver), |rank| {
            let (offset, len) =
                if rank.index() == from { (offsets[0], sender.poison) } else { (offsets[1], receiver.poison) };
            poison_from_bytes(&self.segment.poison(offset, len))
        })
    }

    fn publish_in_box(&self, from: usize, to: usize, word: BoxWord, value: u32) {
        self.segment.publish(self.segment.box_word(from, to, word), value, self.rank);
    }
}
