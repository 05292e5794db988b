//! One file of a workspace, being written or read in pieces.

use std::fmt;
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt as _};

use super::tree::Usage;
use super::{Workspace, WorkspaceError};
use crate::sparse::write_data;

/// A writer of a file of a workspace.
///
/// The bytes go to a file that has no name in the workspace; [`commit`](Self::commit) puts it in
/// place in one step. Until then, and for ever if the writer is dropped instead, what was there
/// before stays as it is. A writer of [`resume_write`](Workspace::resume_write) leaves the
/// beginning of its file when it is dropped. All methods block. The writer keeps its workspace
/// alive.
pub struct FileWriter {
    workspace: Workspace,
    file: File,
    /// Name in the staging folder; empty once the file is in place.
    staged: String,
    path: String,
    /// The cleaned form of `path`.
    target: String,
    expected_bytes: Option<u64>,
    /// End of the last write.
    len_bytes: u64,
    /// End of the bytes that are in the file. Zeros at the end of a write may be left out.
    stored_bytes: u64,
    /// Length of the beginning that has no gap.
    gapless_bytes: u64,
    /// Cleaned path that the beginning gets if the writer is dropped, for a writer that leaves it.
    part: Option<String>,
    /// Usage reserved for this file; at least `len_bytes`.
    reserved: Usage,
    /// True after a failed write: the file has a gap.
    broken: bool,
}

impl FileWriter {
    pub(super) fn new(
        workspace: Workspace,
        path: &str,
        target: String,
        expected_bytes: Option<u64>,
    ) -> Result<Self, WorkspaceError> {
        let reserved = Usage { bytes: expected_bytes.unwrap_or(0), entries: 1 };
        workspace.reserve(path, reserved)?;
        match workspace.create_staged() {
            Ok((staged, file)) => Ok(Self {
                workspace,
                file,
                staged,
                path: path.to_owned(),
                target,
                expected_bytes,
                len_bytes: 0,
                stored_bytes: 0,
                gapless_bytes: 0,
                part: None,
                reserved,
                broken: false,
            }),
            Err(source) => {
                workspace.release(reserved);
                Err(WorkspaceError::io(path, source))
            }
        }
    }

    /// Returns a writer of `expected_bytes` bytes that leaves the beginning of the file as `part`
    /// if it is dropped, and takes that of an earlier writer over.
    pub(super) fn resume(
        workspace: Workspace,
        path: &str,
        target: String,
        part: String,
        expected_bytes: u64,
    ) -> Result<Self, WorkspaceError> {
        let reserved = Usage { bytes: expected_bytes, entries: 1 };
        let Some((staged, file, len_bytes)) = workspace.take_part(path, &part, reserved)? else {
            let mut writer = Self::new(workspace, path, target, Some(expected_bytes))?;
            writer.part = Some(part);
            return Ok(writer);
        };
        Ok(Self {
            workspace,
            file,
            staged,
            path: path.to_owned(),
            target,
            expected_bytes: Some(expected_bytes),
            len_bytes,
            stored_bytes: len_bytes,
            gapless_bytes: len_bytes,
            part: Some(part),
            reserved,
            broken: false,
        })
    }

    /// Ends the writer, and leaves nothing.
    pub fn abort(mut self) {
        self.part = None;
    }

    /// Returns the file in the staging folder.
    pub(crate) fn as_file(&self) -> &File {
        &self.file
    }

    /// Writes `bytes` at `offset`. Pieces may come in any order; a gap that no piece fills reads as
    /// zeros. Long runs of zeros behind all that was written become holes.
    ///
    /// # Errors
    ///
    /// The quota is reached, the announced length is passed, or the file system failed. After an
    /// error the file can no longer be committed.
    pub fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<(), WorkspaceError> {
        if self.broken {
            return Err(self.write_failed());
        }
        let result = self.try_write_at(offset, bytes);
        self.broken = result.is_err();
        result
    }

    /// Sets or clears the permission of the owner to execute the file.
    ///
    /// # Errors
    ///
    /// The file system failed.
    pub fn set_executable(&self, executable: bool) -> Result<(), WorkspaceError> {
        let mode = if executable { 0o700 } else { 0o600 };
        let set = self.file.set_permissions(Permissions::from_mode(mode));
        set.map_err(|source| WorkspaceError::io(&*self.path, source))
    }

    /// Puts the file in place under its path, with the folders that it needs, replacing an earlier
    /// file: a reader sees all of the old file or all of the new one. The bytes are in the kernel
    /// then, not necessarily on the disk.
    ///
    /// # Errors
    ///
    /// Fewer bytes were written than announced, an earlier write failed, the path has come to be a
    /// folder or to lead outside, or the file system failed. The old file is untouched, and the new
    /// one is removed.
    pub fn commit(mut self) -> Result<(), WorkspaceError> {
        if self.broken {
            return Err(self.write_failed());
        }
        if let Some(expected_bytes) = self.expected_bytes.filter(|expected| *expected != self.len_bytes) {
            return Err(WorkspaceError::Incomplete {
                path: self.path.clone(),
                expected_bytes,
                got_bytes: self.len_bytes,
            });
        }
        if self.stored_bytes < self.len_bytes {
            self.file.set_len(self.len_bytes).map_err(|source| WorkspaceError::io(&*self.path, source))?;
        }
        self.workspace.commit(&self.path, &self.target, &self.staged, self.reserved)?;
        self.staged.clear();
        Ok(())
    }

    /// Returns the length that the file will have: the end of the last write.
    pub fn len(&self) -> u64 {
        self.len_bytes
    }

    /// Returns true if nothing has been written.
    pub fn is_empty(&self) -> bool {
        self.len_bytes == 0
    }

    /// Returns the path that the file will have, as the caller gave it.
    pub fn path(&self) -> &str {
        &self.path
    }

    fn try_write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<(), WorkspaceError> {
        // An end beyond u64 is beyond any limit too.
        let end_bytes = offset.saturating_add(bytes.len() as u64);
        if let Some(expected_bytes) = self.expected_bytes.filter(|expected| end_bytes > *expected) {
            return Err(WorkspaceError::PastExpectedEnd { path: self.path.clone(), expected_bytes, end_bytes });
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let more = Usage { bytes: end_bytes.saturating_sub(self.reserved.bytes), entries: 0 };
        if more.bytes > 0 {
            self.workspace.reserve(&self.path, more)?;
            self.reserved = self.reserved.plus(more);
        }
        let written = if offset >= self.len_bytes {
            write_data(&self.file, offset, bytes)
        } else {
            self.file.write_all_at(bytes, offset).map(|()| end_bytes)
        };
        self.stored_bytes = self.stored_bytes.max(written.map_err(|source| WorkspaceError::io(&*self.path, source))?);
        self.len_bytes = self.len_bytes.max(end_bytes);
        if offset <= self.gapless_bytes {
            self.gapless_bytes = self.gapless_bytes.max(end_bytes);
        }
        Ok(())
    }

    /// Puts the beginning of the file in its place. What is counted for it stays reserved on
    /// errors.
    fn keep_part(&mut self, part: &str) -> Result<(), WorkspaceError> {
        self.file.set_len(self.gapless_bytes).map_err(|source| WorkspaceError::io(part, source))?;
        let kept = Usage { bytes: self.gapless_bytes, entries: 1 };
        self.workspace.release(self.reserved.minus(kept));
        self.reserved = kept;
        self.workspace.commit(part, part, &self.staged, kept)
    }

    fn write_failed(&self) -> WorkspaceError {
        WorkspaceError::WriteFailed { path: self.path.clone() }
    }
}

impl fmt::Debug for FileWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileWriter")
            .field("path", &self.path)
            .field("len_bytes", &self.len_bytes)
            .finish_non_exhaustive()
    }
}

impl Drop for FileWriter {
    fn drop(&mut self) {
        if self.staged.is_empty() {
            return;
        }
        let part = self.part.take().filter(|_| !self.broken && self.gapless_bytes > 0);
        if part.is_none_or(|part| self.keep_part(&part).is_err()) {
            self.workspace.discard_staged(&self.staged);
            self.workspace.release(self.reserved);
        }
    }
}

/// A file of a workspace, open for reading.
///
/// Its contents stay as they were when it was opened, even if another file takes its path or it is
/// removed, unless foreign code writes into it. All methods block.
#[derive(Debug)]
pub struct FileReader {
    file: File,
    path: String,
    len_bytes: u64,
}

impl FileReader {
    pub(super) fn new(file: File, path: &str, len_bytes: u64) -> Self {
        Self { file, path: path.to_owned(), len_bytes }
    }

    /// Returns the length in bytes when the file was opened.
    pub fn len(&self) -> u64 {
        self.len_bytes
    }

    /// Returns the file itself.
    pub(crate) fn as_file(&self) -> &File {
        &self.file
    }

    /// Returns true if the file was empty when it was opened.
    pub fn is_empty(&self) -> bool {
        self.len_bytes == 0
    }

    /// Fills `buffer` from `offset` on, and returns how many bytes there were: fewer than asked for
    /// only at the end of the file.
    ///
    /// # Errors
    ///
    /// The file system failed.
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<usize, WorkspaceError> {
        // An offset beyond the limit of the system is beyond the end of the file.
        if i64::try_from(offset).is_err() {
            return Ok(0);
        }
        let mut filled = 0;
        while filled < buffer.len() {
            match self.file.read_at(&mut buffer[filled..], offset + filled as u64) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => {
                    return Err(WorkspaceError::io(&*self.path, source));
                }
            }
        }
        Ok(filled)
    }
}
