//! Local file in which a download leaves its beginning if it does not complete, for the next one to
//! continue.

use std::fs::{self, File};
use std::io::{self, Seek as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rpc_core::client::Digest;
use rustix::fs::{FlockOperation, OFlags, flock};

use super::failure::Failure;
use super::files::digest_of;
use super::new_file::set_executable;
use super::output::{Output, size};
use crate::sparse::SparseWriter;

/// End of the name of the file, behind the name of the complete one.
const SUFFIX: &str = ".rpc-part";

/// The beginning of a file, beside its target and locked, so that no other download writes to it.
/// Dropping it says how long it is, unless it was [persisted](Self::persist).
pub(super) struct PartialFile {
    file: File,
    path: PathBuf,
    target: PathBuf,
    output: Output,
    is_complete: bool,
}

impl PartialFile {
    /// Opens the beginning of `target`, which is empty if there is none.
    pub(super) fn open(target: &Path, output: &Output) -> Result<Self, Failure> {
        let mut path = target.as_os_str().to_owned();
        path.push(SUFFIX);
        let path = PathBuf::from(path);
        let file = open_locked(&path).map_err(|error| Failure::file("cannot write", &path, error))?;
        Ok(Self { file, path, target: target.to_owned(), output: *output, is_complete: false })
    }

    /// Returns the length in bytes.
    pub(super) fn len(&self) -> Result<u64, Failure> {
        self.file.metadata().map(|metadata| metadata.len()).map_err(|error| self.failed(error))
    }

    /// Returns the SHA-256 of the content.
    pub(super) async fn digest(&self) -> Result<Digest, Failure> {
        let rewound = self.file.try_clone().and_then(|mut file| file.rewind().map(|()| file));
        digest_of(rewound.map_err(|error| self.failed(error))?, &self.path).await
    }

    /// Removes what is behind the first `start` bytes, and returns a writer for a thread that
    /// continues there.
    pub(super) fn writer(&self, start: u64) -> Result<SparseWriter, Failure> {
        let file = self.file.set_len(start).and_then(|()| self.file.try_clone());
        file.map(|file| SparseWriter::new(file, start)).map_err(|error| self.failed(error))
    }

    /// Gives the complete file its name. What had the name before is replaced.
    pub(super) fn persist(mut self, executable: bool) -> Result<(), Failure> {
        let set = if executable { set_executable(&self.file) } else { Ok(()) };
        // The lock is held until the file has its name: see `open_locked`.
        set.and_then(|()| fs::rename(&self.path, &self.target)).map_err(|error| self.failed(error))?;
        self.is_complete = true;
        Ok(())
    }

    fn failed(&self, error: io::Error) -> Failure {
        Failure::file("cannot write", &self.path, error)
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if self.is_complete {
            return;
        }
        match self.len() {
            Ok(len) if len > 0 => {
                let (path, len) = (self.path.display(), size(len));
                self.output.note(&format!("{path}: {len} are kept; the same command continues behind them"));
            }
            _ => _ = fs::remove_file(&self.path),
        }
    }
}

/// Opens and locks a file, which is created if it is not there. A link is not followed.
fn open_locked(path: &Path) -> io::Result<File> {
    loop {
        let mut options = File::options();
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        options.read(true).write(true).create(true).truncate(false).custom_flags(flags.bits().cast_signed());
        let file = options.open(path)?;
        let opened = file.metadata()?;
        if !opened.is_file() {
            return Err(io::Error::other("it is no regular file"));
        }
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(io::Error::other("another download writes to it")),
            outcome => outcome?,
        }
        // Another download that held the lock may have renamed the file to its target, or removed
        // it, after it was opened here.
        match fs::symlink_metadata(path) {
            Ok(named) if (named.dev(), named.ino()) == (opened.dev(), opened.ino()) => return Ok(file),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::super::output::ColorChoice;
    use super::*;

    #[test]
    fn a_part_is_kept_for_one_download_at_a_time_and_an_empty_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("target");
        let path = folder.path().join("target.rpc-part");
        let output = Output::new(false, true, ColorChoice::Never);
        let open = || PartialFile::open(&target, &output);

        drop(open().unwrap());
        assert!(!path.exists());
        let part = open().unwrap();
        part.writer(0).unwrap().write_all(b"part, and more").unwrap();
        assert!(open().err().unwrap().to_string().contains("rpc-part"));
        drop(part);
        let part = open().unwrap();
        assert_eq!(part.len().unwrap(), 14);
        part.writer(4).unwrap().write_all(b"s").unwrap();
        part.persist(false).unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "parts");
        assert!(!path.exists());

        std::os::unix::fs::symlink(&target, &path).unwrap();
        assert!(open().is_err());
        assert_eq!(fs::read_to_string(&target).unwrap(), "parts");
    }
}
