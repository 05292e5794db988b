//! Byte stream between two ranks.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

/// A stream of bytes, of whichever kind, that does not block.
pub(in super::super) trait Socket: Read + Write + Send {
    /// Returns the file for the system's `poll`; `None` where only an attempt tells whether it can
    /// be read or written.
    fn file(&self) -> Option<BorrowedFd<'_>>;

    /// Returns true if a read that returns less than was asked for has taken all that had come, so
    /// that the next one waits for the system's `poll`.
    fn is_drained_by_short_reads(&self) -> bool {
        false
    }

    /// Returns true if bytes that were written have yet to leave, by a flush or the next write.
    fn holds_back(&self) -> bool {
        false
    }

    /// Lets the other side know that nothing follows: it reads the end behind all that was written.
    ///
    /// # Errors
    ///
    /// The connection is gone.
    fn finish(&mut self) -> io::Result<()> {
        self.file().map_or(Ok(()), |file| socket2::SockRef::from(&file).shutdown(Shutdown::Write))
    }
}

impl Socket for TcpStream {
    fn file(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd())
    }

    fn is_drained_by_short_reads(&self) -> bool {
        true
    }
}

impl Socket for UnixStream {
    fn file(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd())
    }

    fn is_drained_by_short_reads(&self) -> bool {
        true
    }
}
