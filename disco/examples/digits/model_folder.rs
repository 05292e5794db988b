//! Temporary folder for a model that an example makes. If its program was killed, the next one
//! removes it.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use tempfile::TempDir;

/// Beginning of the names of all such folders.
const PREFIX: &str = "rpc-model-";

/// File in the folder that is locked while its program lives.
const LOCK: &str = "lock";

/// Temporary folder, removed on drop.
pub(crate) struct ModelFolder {
    folder: TempDir,
    /// Lock of the folder, where there are locks. Freed after the folder is gone, or by the system.
    _lock: Option<File>,
}

impl ModelFolder {
    /// Creates a folder in `parent`. Removes there those of this user's programs that are gone, as
    /// far as they can be found and removed.
    pub(crate) fn create_in(parent: &Path) -> io::Result<Self> {
        for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
            let is_model = entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
            if is_model && is_abandoned(&entry.path()) {
                // A folder that cannot be removed is in nobody's way.
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        let folder = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent)?;
        // Without a lock the folder counts as one that is being made, which nobody removes.
        let lock = lock(folder.path()).ok();
        Ok(Self { folder, _lock: lock })
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }
}

fn lock(folder: &Path) -> io::Result<File> {
    let mut lock = File::create_new(folder.join(LOCK))?;
    flock(&lock, FlockOperation::LockExclusive)?;
    // Until then the folder counts as one that is being made.
    lock.write_all(b"locked\n")?;
    Ok(lock)
}

/// Returns true if the program that made this folder is gone, and was this user's.
fn is_abandoned(folder: &Path) -> bool {
    let user = rustix::process::geteuid().as_raw();
    // A link that somebody has put here is not followed.
    if !fs::symlink_metadata(folder).is_ok_and(|found| found.is_dir() && found.uid() == user) {
        return false;
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Ok(lock) = rustix::fs::open(folder.join(LOCK), flags, Mode::empty()) else { return false };
    let lock = File::from(lock);
    lock.metadata().is_ok_and(|found| found.is_file() && found.len() > 0)
        && flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok()
}
