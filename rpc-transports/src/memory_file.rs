//! Memory files: sealed files without a name, which processes of one machine map to share memory.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU8;

use rustix::fs::{
    FileType, MemfdFlags, Mode, OFlags, SealFlags, Stat, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate,
    memfd_create, open,
};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Mapping of a memory file: bytes that other processes may read and write at any time. They live
/// until this is dropped.
#[derive(Debug)]
pub struct MemoryFile {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: what is done with the bytes is up to those who take pointers to them; this only tells
// where they are.
unsafe impl Send for MemoryFile {}
// SAFETY: as above.
unsafe impl Sync for MemoryFile {}

impl MemoryFile {
    /// Most descriptors that [`open`](Self::open) has open at a time; it leaves none.
    pub const OPEN_AT_A_TIME: usize = 2;

    /// Creates a memory file of `len` zeroed bytes. It has no name in any folder, so that nothing
    /// is left of it when its last process ends, and can neither shrink nor grow, so that no
    /// process can take pages away from another. `name` is for people who look at the process.
    ///
    /// # Errors
    ///
    /// Any error that the system reports.
    pub fn create(name: &str, len: usize) -> io::Result<(Self, OwnedFd)> {
        let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, len as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((Self::map(file.as_fd(), len)?, file))
    }

    /// Maps a memory file of `len` bytes that the process which has made it has passed on. The
    /// descriptor may be closed afterwards.
    ///
    /// # Errors
    ///
    /// It has another length, or can shrink; any error that the system reports.
    pub fn received(file: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        if u64::try_from(fstat(file)?.st_size) != Ok(len as u64) || !fcntl_get_seals(file)?.contains(SealFlags::SHRINK)
        {
            return Err(io::Error::other("the passed descriptor is no memory file of the expected length"));
        }
        Self::map(file, len)
    }

    /// Returns the first byte, as one that several processes read and write.
    #[must_use]
    pub fn first_byte(&self) -> &AtomicU8 {
        // SAFETY: the mapping has at least one byte and lives as long as the reference. What other
        // processes do with the byte is no worse than what other threads do with an atomic one.
        unsafe { AtomicU8::from_ptr(self.start.as_ptr()) }
    }

    /// Maps the memory file that the process `process` has open as `descriptor`.
    ///
    /// The numbers may come from a peer. So the file is opened only once it is known to be a memory
    /// file of this user: a device, a pipe or a file with a name is never opened. A segment of
    /// another user is refused because its owner could write any process into it, whose memory this
    /// one would read.
    ///
    /// # Errors
    ///
    /// There is no such file, it is of another kind, user or length, or it can shrink.
    pub fn open(process: u32, descriptor: u32, len: usize) -> io::Result<Self> {
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
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps no other.
        let start = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, file, 0)? };
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("the kernel mapped address 0"))?;
        Ok(Self { start, len })
    }

    /// Returns the address of the first byte, which begins a page.
    #[must_use]
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Returns the number of bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a mapping has at least one byte")]
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        // SAFETY: this mapping is ours alone, and is unmapped once. A failure leaves it mapped,
        // which does no harm.
        _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Returns true if a file is one in memory alone: without a name, and on the file system of the
/// kernel's own that holds no others.
fn is_memory_file(found: &Stat) -> io::Result<bool> {
    let own = fstat(memfd_create("probe", MemfdFlags::CLOEXEC)?)?;
    let is_regular = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
    Ok(is_regular && found.st_nlink == 0 && found.st_dev == own.st_dev)
}
