//! Memory that ranks share: pages of the process between threads, a sealed memory file between
//! processes.

use std::ptr::NonNull;

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
        }
    }
}

#[cfg(target_os = "linux")]
mod file {
    use std::fs::File;
    use std::io;
    use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

    use rustix::fs::{
        FileType, MemfdFlags, Mode, OFlags, SealFlags, Stat, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate,
        memfd_create, open,
    };
    use rustix::mm::{MapFlags, ProtFlags, mmap};

    use super::{Kind, Memory, NonNull};

    impl Memory {
        /// Creates a memory file. It has no name in any folder, so that nothing is left of it when
        /// its last process ends, and can neither shrink nor grow, so that no process can take
        /// pages away from another.
        pub(crate) fn create(len: usize) -> io::Result<(Self, OwnedFd)> {
            let file = memfd_create("disco-ccl", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
            ftruncate(&file, len as u64)?;
            fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
            Ok((Self::map(file.as_fd(), len)?, file))
        }

        /// Most descriptors that [`open`](Self::open) has open at a time; it leaves none.
        pub(crate) const OPEN_AT_A_TIME: usize = 2;

        /// Maps the memory file that the process `process` has open as `descriptor`.
        ///
        /// The numbers may come from a peer. So the file is opened only once it is known to be a
        /// memory file of this user: a device, a pipe or a file with a name is never opened. A
        /// segment of another user is refused because its owner could write any process into it,
        /// whose memory this one would read.
        pub(crate) fn open(process: u32, descriptor: u32, len: usize) -> io::Result<Self> {
            // A descriptor of this kind stands for the file and does not open it.
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            let named = open(format!("/proc/{process}/fd/{descriptor}"), flags, Mode::empty())?;
            let found = fstat(&named)?;
            if !is_memory_file(&found)? {
                return Err(io::Error::other("it is no memory file"));
            }
            if found.st_uid != rustix::process::geteuid().as_raw() {
                return Err(io::Error::other("it belongs to another user"));
            }
            if u64::try_from(found.st_size) != Ok(len as u64) {
                return Err(io::Error::other(format!("it has {} bytes, not {len}", found.st_size)));
            }
            let file = File::options().read(true).write(true).open(format!("/proc/self/fd/{}", named.as_raw_fd()))?;
            if !fcntl_get_seals(&file)?.contains(SealFlags::SHRINK) {
                return Err(io::Error::other("it can shrink"));
            }
            Self::map(file.as_fd(), len)
        }

        fn map(file: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
            // SAFETY: a new mapping at an address of the kernel's choice overlaps no other.
            let start = unsafe {
                mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)?
            };
            let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("the kernel mapped address 0"))?;
            Ok(Self { start, len, kind: Kind::Mapped })
        }
    }

    /// Returns true if a file is one in memory alone: without a name, and on the file system of the
    /// kernel's own that holds no others.
    fn is_memory_file(found: &Stat) -> io::Result<bool> {
        let own = fstat(memfd_create("disco-probe", MemfdFlags::CLOEXEC)?)?;
        let is_regular = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
        Ok(is_regular && found.st_nlink == 0 && found.st_dev == own.st_dev)
    }
}
