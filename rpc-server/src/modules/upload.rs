//! Uploads of modules into the store.

use std::fmt;
use std::fs::File;
use std::io::Write as _;

use rpc_core::client::Digest;

use super::hash::Hasher;
use super::{ModuleError, ModuleStore};

/// An upload of a module, hashed as it arrives. Dropping it without [`commit`](Self::commit)
/// removes the file. All methods block.
pub struct ModuleUpload {
    store: ModuleStore,
    digest: Digest,
    expected: u64,
    /// Bytes received.
    len: u64,
    hasher: Hasher,
    /// Name in the folder of the store; empty once the file is in place.
    name: String,
    /// Locked while it is open, so that other processes know that the upload is alive.
    file: File,
    /// True after a failed write: the file may differ from the hashed bytes.
    broken: bool,
}

impl ModuleUpload {
    pub(super) fn new(store: ModuleStore, digest: Digest, expected: u64, name: String, file: File) -> Self {
        Self { store, digest, expected, len: 0, hasher: Hasher::new(), name, file, broken: false }
    }

    /// Appends a piece. `offset` must be the end of the last one.
    ///
    /// # Errors
    ///
    /// [`ModuleError::OutOfOrder`], [`ModuleError::TooLong`], [`ModuleError::Io`]; after any of
    /// them [`ModuleError::Broken`].
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), ModuleError> {
        if self.broken {
            return Err(ModuleError::Broken);
        }
        let written = self.try_write(offset, bytes);
        self.broken = written.is_err();
        written
    }

    /// Puts the module in place, if it is complete and has the announced digest.
    ///
    /// # Errors
    ///
    /// [`ModuleError::TooShort`], [`ModuleError::Mismatch`], [`ModuleError::Broken`],
    /// [`ModuleError::Io`]. The upload is removed then.
    pub fn commit(mut self) -> Result<(), ModuleError> {
        if self.broken {
            return Err(ModuleError::Broken);
        }
        if self.len != self.expected {
            return Err(ModuleError::TooShort { len: self.expected, got: self.len });
        }
        let got = std::mem::replace(&mut self.hasher, Hasher::new()).finish();
        if got != self.digest {
            return Err(ModuleError::Mismatch { announced: self.digest, got });
        }
        self.store.commit(&self.name, &self.file, &self.digest)?;
        self.name.clear();
        Ok(())
    }

    /// Returns the number of bytes received.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns true if no byte has been received.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn try_write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), ModuleError> {
        if offset != self.len {
            return Err(ModuleError::OutOfOrder { offset, expected: self.len });
        }
        let end = self.len.saturating_add(bytes.len() as u64);
        if end > self.expected {
            return Err(ModuleError::TooLong { len: self.expected, end });
        }
        self.file.write_all(bytes)?;
        self.hasher.update(bytes);
        self.len = end;
        Ok(())
    }
}

impl fmt::Debug for ModuleUpload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModuleUpload").field("digest", &self.digest).field("len", &self.len).finish_non_exhaustive()
    }
}

impl Drop for ModuleUpload {
    fn drop(&mut self) {
        if !self.name.is_empty() {
            self.store.discard(&self.name);
        }
    }
}
