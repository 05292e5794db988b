//! Locks on files, between processes.

use std::fs::File;
use std::io;

use rustix::fs::{FlockOperation, flock};

/// A lock on a file, freed on drop. It is for processes: threads that share the file need a mutex
/// besides.
pub(crate) struct FileLock<'a>(&'a File);

impl<'a> FileLock<'a> {
    /// Waits for the lock.
    pub(crate) fn exclusive(file: &'a File) -> io::Result<Self> {
        rustix::io::retry_on_intr(|| flock(file, FlockOperation::LockExclusive))?;
        Ok(Self(file))
    }
}

impl Drop for FileLock<'_> {
    fn drop(&mut self) {
        let _ = flock(self.0, FlockOperation::Unlock);
    }
}
