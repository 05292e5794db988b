//! Memory that ranks share: pages of the process between threads, a sealed memory file between
//! processes.

use std::ptr::NonNull;

#[cfg(target_os = "linux")]
use rpc_transports::MemoryFile;

/// Zeroed bytes that begin on a page's boundary and live until this is dropped.
pub(super) struct Memory {
    start: NonNull<u8>,
    len: usize,
    kind: Kind,
}

enum Kind {
    Heap,
    #[cfg(target_os = "linux")]
    Mapped,
    /// Mapping of a memory file, which is unmapped when the file is dropped.
    #[cfg(target_os = "linux")]
    File(#[allow(dead_code, reason = "held for its drop")] MemoryFile),
}

// SAFETY: what is done with the bytes is up to those who take pointers to them; this only tells
// where they are.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

const PAGE: usize = 4096;

impl Memory {
    /// Allocates memory for one thread of this process.
    pub(super) fn heap(len: usize) -> Option<Self> {
        let layout = std::alloc::Layout::from_size_align(len.max(PAGE), PAGE).ok()?;
        // SAFETY: the layout is not empty.
        let start = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })?;
        Some(Self { start, len: layout.size(), kind: Kind::Heap })
    }

    /// Maps zeroed memory whose pages take room as they are touched, one by one: for the threads of
    /// this process, which use little of it.
    #[cfg(target_os = "linux")]
    pub(super) fn sparse(len: usize) -> Option<Self> {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
        let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        let len = len.max(PAGE);
        // SAFETY: a new mapping at an address of the kernel's choice overlaps no other.
        let start = NonNull::new(unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, kind) }.ok()?)?;
        // With large pages the first word of each part would take 2 MiB. A kernel without large
        // pages refuses the advice.
        // SAFETY: this is about pages that are ours alone, and changes nothing that they hold.
        _ = unsafe { madvise(start.as_ptr(), len, Advice::LinuxNoHugepage) };
        Some(Self { start: start.cast(), len, kind: Kind::Mapped })
    }

    /// Allocates zeroed memory, where the system has no way to map it.
    #[cfg(not(target_os = "linux"))]
    pub(super) fn sparse(len: usize) -> Option<Self> {
        Self::heap(len)
    }

    pub(super) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        match self.kind {
            Kind::Heap => {
                if let Ok(layout) = std::alloc::Layout::from_size_align(self.len, PAGE) {
                    // SAFETY: it came from `alloc_zeroed` with this layout, and is freed once.
                    unsafe { std::alloc::dealloc(self.start.as_ptr(), layout) }
                }
            }
            #[cfg(target_os = "linux")]
            Kind::Mapped => {
                // SAFETY: these pages are ours alone, and are unmapped once. A failure leaves them
                // mapped, which does no harm.
                _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
            }
            #[cfg(target_os = "linux")]
            Kind::File(_) => {}
        }
    }
}

#[cfg(target_os = "linux")]
mod file {
    use std::io;
    use std::os::fd::OwnedFd;

    use super::{Kind, Memory, MemoryFile, NonNull};

    impl Memory {
        /// Creates a memory file that can neither shrink nor grow, and maps it.
        pub(crate) fn create(len: usize) -> io::Result<(Self, OwnedFd)> {
            let (mapping, file) = MemoryFile::create("disco-ccl", len)?;
            Ok((Self::of(mapping)?, file))
        }

        /// Most descriptors that [`open`](Self::open) has open at a time; it leaves none.
        pub(crate) const OPEN_AT_A_TIME: usize = MemoryFile::OPEN_AT_A_TIME;

        /// Maps the memory file that the process `process` has open as `descriptor`, as
        /// [`MemoryFile::open`] does.
        pub(crate) fn open(process: u32, descriptor: u32, len: usize) -> io::Result<Self> {
            MemoryFile::open(process, descriptor, len).and_then(Self::of)
        }

        fn of(mapping: MemoryFile) -> io::Result<Self> {
            let start = NonNull::new(mapping.start()).ok_or_else(|| io::Error::other("a mapping at address 0"))?;
            Ok(Self { start, len: mapping.len(), kind: Kind::File(mapping) })
        }
    }
}
