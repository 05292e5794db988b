//! The mark at which the output of a session stands, for a process that may have to go on with it.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::Ordering;

#[cfg(target_os = "linux")]
use crate::memory_file::MemoryFile;

/// Byte in memory that two processes share: the one that serves a session notes in it whether its
/// output may have stopped inside of a frame. If that process ends, the other one knows by it
/// whether a further frame would be understood.
///
/// The kernel takes a small write as a whole or not at all, unless the client reads too slowly. So
/// a process that is killed in the middle of one, or right behind it, stands at the end of a frame.
/// Behind a large write, the mark may say "inside" although all bytes have left: the client is then
/// not told the reason. A process that is killed right behind a small write that the kernel took in
/// part, from a client that reads too slowly, has not noted it yet: that client then finds the last
/// message inside of a reply.
#[derive(Debug)]
pub(super) struct OutputMark {
    file: MemoryFile,
    /// The last note of this side.
    is_in_frame: bool,
}

/// Largest write, in bytes, that counts as one that is done as a whole.
const WHOLE_WRITE: usize = 4 << 10;

const AT_FRAME_END: u8 = 0;
const IN_FRAME: u8 = 1;

impl OutputMark {
    const LEN: usize = 1;

    /// Creates a mark at the end of a frame, and its file for the other process.
    pub(super) fn create() -> io::Result<(Self, OwnedFd)> {
        let (file, descriptor) = MemoryFile::create("rpc-output-mark", Self::LEN)?;
        Ok((Self { file, is_in_frame: false }, descriptor))
    }

    /// Opens the mark that another process has passed.
    pub(super) fn received(file: &OwnedFd) -> io::Result<Self> {
        Ok(Self { file: MemoryFile::received(file.as_fd(), Self::LEN)?, is_in_frame: false })
    }

    /// Notes that the rest of the output, which has `staged` bytes, is about to be written; none if
    /// all has been written.
    pub(super) fn before_write(&mut self, staged: usize) {
        match staged {
            0 => self.note(false),
            1..=WHOLE_WRITE => {}
            _ => self.note(true),
        }
    }

    /// Notes that `written` of the `staged` bytes were written.
    pub(super) fn after_write(&mut self, written: usize, staged: usize) {
        if written < staged {
            self.note(true);
        }
    }

    /// Notes whether the output stands inside of a frame.
    pub(super) fn note(&mut self, is_in_frame: bool) {
        if std::mem::replace(&mut self.is_in_frame, is_in_frame) != is_in_frame {
            let byte = if is_in_frame { IN_FRAME } else { AT_FRAME_END };
            self.file.first_byte().store(byte, Ordering::Release);
        }
    }

    /// Returns true unless the output may have stopped inside of a frame.
    pub(super) fn is_at_frame_end(&self) -> bool {
        self.file.first_byte().load(Ordering::Acquire) == AT_FRAME_END
    }
}

/// Stands for the file where there is none, so that no socket is passed.
#[cfg(not(target_os = "linux"))]
#[derive(Debug)]
enum MemoryFile {}

#[cfg(not(target_os = "linux"))]
impl MemoryFile {
    fn create(_name: &str, _len: usize) -> io::Result<(Self, OwnedFd)> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn received(_file: std::os::fd::BorrowedFd<'_>, _len: usize) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn first_byte(&self) -> &std::sync::atomic::AtomicU8 {
        match *self {}
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn both_sides_see_where_the_output_stands() {
        let (ours, file) = OutputMark::create().unwrap();
        let mut theirs = OutputMark::received(&file).unwrap();
        drop(file);
        assert!(ours.is_at_frame_end());
        // A small write is done as a whole, if it is.
        theirs.before_write(WHOLE_WRITE);
        assert!(ours.is_at_frame_end());
        theirs.after_write(WHOLE_WRITE - 1, WHOLE_WRITE);
        assert!(!ours.is_at_frame_end());
        theirs.before_write(1);
        assert!(!ours.is_at_frame_end(), "the rest is still missing");
        theirs.after_write(1, 1);
        theirs.before_write(0);
        assert!(ours.is_at_frame_end());
        theirs.before_write(WHOLE_WRITE + 1);
        assert!(!ours.is_at_frame_end());
    }

    #[test]
    fn a_descriptor_that_is_no_mark_is_refused() {
        let (_longer, file) = MemoryFile::create("longer", 2).unwrap();
        assert!(OutputMark::received(&file).is_err());
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(OutputMark::received(&OwnedFd::from(null)).is_err());
    }
}
