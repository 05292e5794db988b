//! Copies of long buffers, piece by piece. Between two pieces the copying thread checks if the
//! group is broken, and further threads can take pieces.
//!
//! While one rank reads and the others have nothing to do, their cores would be idle: the reading
//! rank uses them by further threads.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::SharedCcl;
use crate::ccl::Operation;
use crate::ccl::host::algorithm::bypasses;
use crate::ccl::host::segment::Segment;

/// Maximum number of threads for one rank: a few are enough for the bandwidth of memory.
const MAX_THREADS: usize = 4;

/// Bytes of each buffer that are processed between two checks if the group is broken.
pub(super) const PIECE: usize = 256 * 1024;

/// Start of a buffer that several threads work on.
pub(super) struct BufferStart(pub *mut u8);

// SAFETY: this is only an address; the code that accesses the bytes says why it may.
unsafe impl Sync for BufferStart {}

impl BufferStart {
    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        self.0.wrapping_add(offset)
    }
}

/// Calls `work` with every piece of `len` bytes. Once a piece fails or the group is broken, no
/// further pieces are begun. Up to `threads` threads, the caller included, take pieces in turn:
/// fewer if the system cannot start more, and only the caller if `len` is too small to be worth a
/// thread. When this returns, no thread is working on a piece any more.
pub(super) fn in_pieces(
    segment: &Segment,
    len: usize,
    threads: usize,
    work: impl Fn(Range<usize>) -> io::Result<()> + Sync,
) -> io::Result<()> {
    let next = AtomicUsize::new(0);
    let take = || {
        while !segment.is_broken() {
            let begin = next.fetch_add(PIECE, Ordering::Relaxed);
            if begin >= len {
                break;
            }
            if let Err(error) = work(begin..len.min(begin + PIECE)) {
                // The rest is not needed.
                next.store(len, Ordering::Relaxed);
                return Err(error);
            }
        }
        Ok(())
    };
    if threads < 2 || !bypasses(len) {
        return take();
    }
    std::thread::scope(|scope| {
        let helper = || std::thread::Builder::new().name("disco-ccl".to_owned()).spawn_scoped(scope, take);
        let helpers: Vec<_> = (1..threads).map_while(|_| helper().ok()).collect();
        let own = take();
        let theirs =
            helpers.into_iter().map(|helper| helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        theirs.fold(own, io::Result::and)
    })
}

impl SharedCcl {
    /// Returns the number of threads that a rank may use to copy data of others: as many as there
    /// are cores that no other rank needs meanwhile. Ranks need not come to the same number.
    pub(super) fn spare_threads(&self, operation: Operation) -> usize {
        let size = self.segment.size();
        let readers = match operation {
            Operation::Broadcast { .. } | Operation::Scatter { .. } => size - 1,
            Operation::Gather { .. } => 1,
            // As many transfers are possible at a time.
            Operation::Send { .. } | Operation::Recv { .. } => size / 2,
            _ => size,
        };
        let others = self.options.ranks_on_machine.unwrap_or(size).saturating_sub(size);
        (self.cores / (readers + others).max(1)).clamp(1, MAX_THREADS)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::ccl::host::memory::Memory;
    use crate::ccl::{BreakCause, Breakdown, Rank};

    /// Not a whole number of pieces.
    const LEN: usize = 8 * 1024 * 1024 + 5;

    fn segment() -> Segment {
        let memory = Memory::heap(Segment::bytes(2, true).unwrap()).unwrap();
        Segment::create(memory, 2, true, 0, [0; 16])
    }

    #[test]
    fn every_byte_is_in_one_piece() {
        for (len, threads) in [(0, 3), (5, 1), (5, 3), (LEN, 1), (LEN, 2), (LEN, 4)] {
            let pieces = Mutex::new(Vec::new());
            in_pieces(&segment(), len, threads, |piece| {
                pieces.lock().unwrap().push(piece);
                Ok(())
            })
            .unwrap();
            let mut pieces = pieces.into_inner().unwrap();
            pieces.sort_by_key(|piece| piece.start);
            let end = pieces.iter().fold(0, |end, piece| {
                assert_eq!(piece.start, end);
                piece.end
            });
            assert_eq!(end, len);
        }
    }

    #[test]
    fn helpers_take_pieces_too() {
        // Neither thread continues before both have begun.
        let both = std::sync::Barrier::new(2);
        let first = Mutex::new(std::collections::HashSet::new());
        in_pieces(&segment(), LEN, 2, |_| {
            if first.lock().unwrap().insert(std::thread::current().id()) {
                both.wait();
            }
            Ok(())
        })
        .unwrap();
        assert_eq!(first.into_inner().unwrap().len(), 2);
    }

    #[test]
    fn an_error_ends_the_work_of_all() {
        let failed = AtomicUsize::new(0);
        let error = in_pieces(&segment(), LEN, 3, |piece| {
            if piece.end < LEN {
                return Ok(());
            }
            failed.fetch_add(1, Ordering::Relaxed);
            Err(io::ErrorKind::UnexpectedEof.into())
        });
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(failed.into_inner(), 1);
    }

    #[test]
    fn a_broken_group_ends_the_work_of_all() {
        let segment = segment();
        let began = AtomicUsize::new(0);
        in_pieces(&segment, LEN, 3, |_| {
            began.fetch_add(1, Ordering::Relaxed);
            segment.break_up(&Breakdown {
                cause: BreakCause::Left,
                rank: Rank(0),
                noticed_by: Rank(0),
                during: String::new(),
                flights: String::new(),
            });
            Ok(())
        })
        .unwrap();
        assert!(began.into_inner() <= 3);
    }
}
