//! Memory of arrays that are copied out of sessions.
//!
//! Fresh memory costs more than the copy into it: the kernel clears it page by page as it is first
//! written. So an array that is freed leaves its memory to the next copies of about its size, for a
//! short while, and fresh memory is asked for in huge pages.

use std::alloc::{Layout, alloc_zeroed};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use parking_lot::Mutex;
use pyo3::PyResult;
use pyo3::exceptions::PyMemoryError;

use crate::operation::Birth;

/// Smallest size in bytes of memory that is kept: the allocator keeps smaller pieces itself.
const MIN: usize = 1 << 20;

/// Most memory in bytes that is kept.
const MAX_KEPT: usize = 256 << 20;

/// Time for which memory is kept.
const KEPT_FOR: Duration = Duration::from_secs(2);

static KEPT: Mutex<Kept> = Mutex::new(Kept { pieces: Vec::new(), trimmer: None });

struct Kept {
    /// Pieces with the times at which they were freed, oldest first.
    pieces: Vec<(BytesMut, Instant)>,
    /// Process whose thread frees pieces that are kept for too long, while there are any.
    trimmer: Option<Birth>,
}

/// Memory of an array, which is kept for the next ones once the array is freed.
pub(crate) struct ArrayMemory {
    bytes: BytesMut,
    birth: Birth,
}

impl ArrayMemory {
    pub(crate) fn new(bytes: BytesMut) -> Self {
        Self { bytes, birth: Birth::now() }
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for ArrayMemory {
    fn drop(&mut self) {
        // In the child of a fork it stays with the parent's.
        if self.birth.is_here() && (MIN..=MAX_KEPT).contains(&self.bytes.capacity()) {
            keep(std::mem::take(&mut self.bytes));
        }
    }
}

/// Returns `len` bytes for an array: memory that was kept, or else fresh memory. Its content is
/// unspecified.
///
/// # Errors
///
/// `MemoryError` if there is not as much.
pub(crate) fn memory(len: usize) -> PyResult<BytesMut> {
    if len >= MIN
        && let Some(mut kept) = take(len)
    {
        kept.resize(len, 0);
        return Ok(kept);
    }
    fresh(len).ok_or_else(|| PyMemoryError::new_err(format!("no memory for an array of {len} bytes")))
}

fn take(len: usize) -> Option<BytesMut> {
    // The lock may have been held by another thread when this process forked.
    let mut kept = KEPT.try_lock()?;
    let fits = |(piece, _): &(BytesMut, Instant)| (len..=len.saturating_add(len / 8)).contains(&piece.capacity());
    let at = kept.pieces.iter().rposition(fits)?;
    Some(kept.pieces.remove(at).0)
}

fn fresh(len: usize) -> Option<BytesMut> {
    if len == 0 {
        return Some(BytesMut::new());
    }
    let layout = Layout::array::<u8>(len).ok()?;
    // SAFETY: the layout has a size.
    let start = unsafe { alloc_zeroed(layout) };
    if start.is_null() {
        return None;
    }
    // SAFETY: the allocation is one of `len` bytes without alignment, and all are zero.
    let memory = unsafe { Vec::from_raw_parts(start, len, len) };
    want_huge_pages(&memory);
    // This takes the memory over as it is.
    Some(BytesMut::from(bytes::Bytes::from(memory)))
}

/// Asks for huge pages, of which there are few to clear.
pub(crate) fn want_huge_pages(memory: &[u8]) {
    #[cfg(target_os = "linux")]
    if memory.len() >= 4 * MIN {
        let page = rustix::param::page_size();
        let range = memory.as_ptr_range();
        let start = (range.start as usize).next_multiple_of(page);
        let end = range.end as usize / page * page;
        // SAFETY: the pages lie in the memory, and the advice changes no content. A kernel without
        // huge pages refuses it, which changes nothing.
        let _ = unsafe {
            rustix::mm::madvise(start as *mut _, end.saturating_sub(start), rustix::mm::Advice::LinuxHugepage)
        };
    }
    let _ = memory;
}

fn keep(piece: BytesMut) {
    let mut freed = Vec::new();
    let Some(mut kept) = KEPT.try_lock() else { return };
    kept.pieces.push((piece, Instant::now()));
    while kept.pieces.iter().map(|(piece, _)| piece.capacity()).sum::<usize>() > MAX_KEPT {
        freed.push(kept.pieces.remove(0));
    }
    if !kept.trimmer.is_some_and(Birth::is_here) {
        match std::thread::Builder::new().name("rpc-array-memory".to_owned()).spawn(trim) {
            Ok(_) => kept.trimmer = Some(Birth::now()),
            Err(_) => freed.append(&mut kept.pieces),
        }
    }
    drop(kept);
    // Without the lock: it takes a while.
    drop(freed);
}

/// Frees pieces that are kept for too long, until there are none.
fn trim() {
    loop {
        std::thread::sleep(KEPT_FOR);
        let now = Instant::now();
        let mut kept = KEPT.lock();
        let freed: Vec<_> = kept.pieces.extract_if(.., |(_, since)| now.duration_since(*since) >= KEPT_FOR).collect();
        let is_over = kept.pieces.is_empty();
        if is_over {
            kept.trimmer = None;
        }
        drop(kept);
        drop(freed);
        if is_over {
            return;
        }
    }
}
