//! Work on many bytes, piece by piece: between two pieces one looks at whether the group is broken,
//! and other threads may take pieces too.
//!
//! A rank that reads while others have nothing to do would leave their cores idle, where it could
//! have them.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::SharedCcl;
use crate::ccl::Operation;
use crate::ccl::host::plan::bypasses;
use crate::ccl::host::segment::Segment;

/// The most threads that work for one rank: a few fill what memory can give.
const MAX_THREADS: usize = 4;

/// Number of bytes of each buffer are worked on between two looks at whether the group is broken.
pub(super) const PIECE: usize = 256 * 1024;

/// Start of a buffer that several threads work on.
pub(super) struct BufferStart(pub *mut u8);

// SAFETY: this only tells where the bytes are; the code that touches them says why it may.
unsafe impl Sync for BufferStart {}

impl BufferStart {
    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        self.0.wrapping_add(offset)
    }
}

/// Calls `work` with every piece of `len` bytes, until one fails or the group is broken; pieces
/// that have not begun then are left out. `threads` is the number of threads that take pieces in
/// turn, the caller included: fewer if the system gives no more, and the caller alone if the bytes
/// are not worth a thread. All are done when this returns.
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
    /// Returns the number of threads that a rank may use to take data of others: the cores that no
    /// other rank needs meanwhile. Each rank decides for itself; they need not agree.
    pub(super) fn spare_threads(&self, operation: Operation) -> usize {
        let size = self.segment.size();
        let readers = match operation {
            Operation::Broadcast { .. } | Operation::Scatter { .. } => size - 1,
            Operation::Gather { .. } => 1,
            // There may be as many as this at a time.
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
        let memory = Memory::heap(Segment::bytes(2).unwrap()).unwrap();
        Segment::create(memory, 2, 0, [0; 16])
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
        // Neither thread goes on until two are there.
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
