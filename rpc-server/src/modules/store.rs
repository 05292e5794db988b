//! The store: a folder of modules, named by their SHA-256.
//!
//! Any number of processes share it. On disk:
//!
//! ```text
//! STORE/lock               held to list the modules, make room, or reserve space
//! STORE/HEX.so             a module, complete, 0400; its time is that of its last use
//! STORE/upload-RANDOM      an upload, 0600, of the announced length; locked by its writer
//! ```
//!
//! The folder itself is the only account: an upload reserves its space by a file of its full
//! length, so that all processes see the same. A process that dies leaves an upload that is not
//! locked, which the next process removes.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::{Mutex, MutexGuard};
use rpc_core::client::Digest;
use rustix::fs::{AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, flock, openat, statat, unlinkat};
use rustix::io::Errno;

use super::hash::{FILE_PIECE, hash};
use super::{DigestList, ModuleError, ModuleUpload};
use crate::config::{ByteSize, Span};
use crate::file_lock::FileLock;

/// Limits of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreLimits {
    /// Bytes of all modules and uploads together. A module counts as 4 KiB at least. Default 4 GiB.
    pub max_bytes: u64,
    /// Bytes of one module. Default 512 MiB: libraries of kernels for several GPUs have a few
    /// hundred.
    pub max_module_bytes: u64,
    /// Time without use after which a module makes room for another. Default 30 days.
    pub expiry: Duration,
}

impl Default for StoreLimits {
    fn default() -> Self {
        Self { max_bytes: 4 << 30, max_module_bytes: 512 << 20, expiry: Duration::from_secs(30 * 24 * 60 * 60) }
    }
}

/// A folder of modules. A clone is another reference to the same store. All methods block.
#[derive(Clone)]
pub struct ModuleStore(Arc<StoreInner>);

struct StoreInner {
    /// The real path of the folder.
    path: PathBuf,
    folder: OwnedFd,
    /// Lock file. The mutex excludes threads, the file lock processes.
    lock: Mutex<File>,
    limits: StoreLimits,
    /// Modules that may be stored; `None` for any.
    admitted: Option<Arc<DigestList>>,
}

/// Minimum that a module counts as, in bytes: a block of the usual file systems, so that many small
/// modules do not exceed the limit.
const LEAST: u64 = 4096;

/// Bytes of a tensor that are copied into the store at a time.
pub(crate) const PIECE: usize = 1 << 20;

/// Maximum number of uploads in progress, of all processes.
const MAX_UPLOADS: usize = 64;

const LOCK: &str = "lock";

/// Lock file for imports of the same module at the same time.
const IMPORT_LOCK: &str = "import";
const SUFFIX: &str = ".so";
const UPLOAD: &str = "upload-";

impl ModuleStore {
    /// Opens the store in `folder`, and creates the folder for this user alone if it is missing.
    /// With a list the store takes and gives only the modules on it.
    ///
    /// # Errors
    ///
    /// [`ModuleError::Folder`], and [`ModuleError::Exposed`] for a folder that others may write to.
    pub fn open(folder: &Path, limits: StoreLimits, admitted: Option<Arc<DigestList>>) -> Result<Self, ModuleError> {
        let failed = |source| ModuleError::Folder { folder: folder.to_owned(), source };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
        let path = folder.canonicalize().map_err(failed)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = rustix::fs::open(&path, flags, Mode::empty()).map_err(|errno| failed(errno.into()))?;
        let opened = File::from(opened);
        let metadata = opened.metadata().map_err(failed)?;
        let (mode, owner) = (metadata.mode() & 0o7777, metadata.uid());
        if mode & 0o022 != 0 || !is_ours(owner) {
            return Err(ModuleError::Exposed { folder: path, mode, owner });
        }
        // Modules are loaded by their paths: a user who may rename a parent folder could replace
        // it. In a sticky folder users may rename only their own entries.
        for above in path.ancestors().skip(1) {
            let metadata = fs::symlink_metadata(above).map_err(failed)?;
            let (mode, owner) = (metadata.mode() & 0o7777, metadata.uid());
            if (mode & 0o022 != 0 && mode & 0o1000 == 0) || !is_ours(owner) {
                return Err(ModuleError::Exposed { folder: above.to_owned(), mode, owner });
            }
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let lock = openat(&opened, LOCK, flags, Mode::RUSR | Mode::WUSR).map_err(|errno| failed(errno.into()))?;
        let lock = Mutex::new(File::from(lock));
        let store = Self(Arc::new(StoreInner { path, folder: opened.into(), lock, limits, admitted }));
        store.locked(|store| store.list().map(drop)).map_err(|error| match error {
            ModuleError::Io(source) => failed(source),
            error => error,
        })?;
        Ok(store)
    }

    /// Returns true if the module is stored, which counts as a use.
    ///
    /// # Errors
    ///
    /// [`ModuleError::NotListed`]; and [`ModuleError::Io`].
    pub fn contains(&self, digest: &Digest) -> Result<bool, ModuleError> {
        self.admit(digest)?;
        self.locked(|store| store.touch(digest)).map(|found| found.is_some())
    }

    /// Waits until no other process or thread imports, and excludes others until the guard is
    /// dropped. Of several imports of one module only the first needs room; the others find it
    /// stored.
    pub(crate) fn importing(&self) -> Result<File, ModuleError> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        // A file that is opened again has a lock of its own, which also excludes other threads.
        let file = openat(&self.0.folder, IMPORT_LOCK, flags, Mode::RUSR | Mode::WUSR).map_err(io::Error::from)?;
        rustix::io::retry_on_intr(|| flock(&file, FlockOperation::LockExclusive)).map_err(io::Error::from)?;
        Ok(File::from(file))
    }

    /// Begins an upload of a module with this digest and length in bytes, and makes room for it.
    /// The module appears at [`ModuleUpload::commit`].
    ///
    /// # Errors
    ///
    /// [`ModuleError::NotListed`], [`ModuleError::Empty`], [`ModuleError::TooLarge`],
    /// [`ModuleError::Full`], [`ModuleError::TooManyUploads`], [`ModuleError::Io`].
    pub fn begin_upload(&self, digest: Digest, len: u64) -> Result<ModuleUpload, ModuleError> {
        self.admit(&digest)?;
        self.check_len(len)?;
        let (name, file) = self.locked(|store| {
            store.make_room(len)?;
            // The upload cannot be removed as abandoned before it is locked: abandoned uploads are
            // removed under the same lock.
            let (name, file) = store.create()?;
            let ready = flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(io::Error::from);
            match ready.and_then(|()| file.set_len(len)) {
                Ok(()) => Ok((name, file)),
                Err(error) => {
                    store.discard(&name);
                    Err(error.into())
                }
            }
        })?;
        Ok(ModuleUpload::new(self.clone(), digest, len, name, file))
    }

    /// Copies a file into the store, unless the module is there already. `path` names the file in
    /// errors.
    ///
    /// # Errors
    ///
    /// [`ModuleError::NoFile`], [`ModuleError::ReadFile`], and those of
    /// [`begin_upload`](Self::begin_upload) and of the upload, if the file changes meanwhile.
    pub fn import(&self, path: &str, file: &File) -> Result<Digest, ModuleError> {
        let unreadable = |source| ModuleError::ReadFile { path: path.to_owned(), source };
        let metadata = file.metadata().map_err(unreadable)?;
        if !metadata.is_file() {
            return Err(ModuleError::NoFile { path: path.to_owned() });
        }
        self.check_len(metadata.len())?;
        let mut from_start = file;
        from_start.rewind().map_err(unreadable)?;
        // Limited, because the file may grow while it is read.
        let (digest, len) = hash(from_start.take(self.0.limits.max_module_bytes + 1)).map_err(unreadable)?;
        self.check_len(len)?;
        if self.contains(&digest)? {
            return Ok(digest);
        }
        // The file is read twice, so that no byte of a refused module is written.
        let mut upload = self.begin_upload(digest, len)?;
        from_start.rewind().map_err(unreadable)?;
        let mut piece = vec![0; FILE_PIECE];
        loop {
            match from_start.read(&mut piece) {
                Ok(0) => break,
                Ok(count) => upload.write(upload.len(), &piece[..count])?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(unreadable(error)),
            }
        }
        upload.commit()?;
        Ok(digest)
    }

    /// Returns the path of a module's file for loading, after checking its digest. Only this user
    /// can change the file. Counts as a use. Reads the whole file.
    ///
    /// # Errors
    ///
    /// [`ModuleError::NotListed`], [`ModuleError::NotFound`], [`ModuleError::Damaged`],
    /// [`ModuleError::Io`].
    pub fn verified(&self, digest: &Digest) -> Result<PathBuf, ModuleError> {
        self.admit(digest)?;
        let found = self.locked(|store| store.touch(digest))?;
        let file = found.ok_or(ModuleError::NotFound { digest: *digest })?;
        // After a crash of the machine the file may have its name but not its bytes.
        if hash(&file)?.0 != *digest {
            self.locked(|store| {
                store.discard(&entry_name(digest));
                Ok(())
            })?;
            return Err(ModuleError::Damaged { digest: *digest });
        }
        Ok(self.0.path.join(entry_name(digest)))
    }

    /// Returns the limits.
    pub fn limits(&self) -> &StoreLimits {
        &self.0.limits
    }

    /// Returns true if the store takes only the modules of a list.
    pub fn is_limited_to_list(&self) -> bool {
        self.0.admitted.is_some()
    }

    fn admit(&self, digest: &Digest) -> Result<(), ModuleError> {
        match &self.0.admitted {
            Some(list) if !list.admits(digest) => Err(ModuleError::NotListed { digest: *digest }),
            _ => Ok(()),
        }
    }

    fn check_len(&self, len: u64) -> Result<(), ModuleError> {
        match len {
            0 => Err(ModuleError::Empty),
            len if len > self.0.limits.max_module_bytes => {
                Err(ModuleError::too_large(len, self.0.limits.max_module_bytes))
            }
            _ => Ok(()),
        }
    }

    /// Runs `work` while the lock excludes all other processes.
    fn locked<T>(&self, work: impl FnOnce(&StoreInner) -> Result<T, ModuleError>) -> Result<T, ModuleError> {
        let guard: MutexGuard<'_, File> = self.0.lock.lock();
        let _held = FileLock::exclusive(&guard)?;
        work(&self.0)
    }

    /// Renames the file of a complete upload. If the module has arrived in the meantime, the
    /// earlier file stays, because it may be loaded already.
    pub(super) fn commit(&self, upload: &str, file: &File, digest: &Digest) -> Result<(), ModuleError> {
        file.set_permissions(fs::Permissions::from_mode(0o400))?;
        self.locked(|store| {
            if store.touch(digest)?.is_some() {
                store.discard(upload);
                return Ok(());
            }
            let name = entry_name(digest);
            Ok(rustix::fs::renameat(&store.folder, upload, &store.folder, name).map_err(io::Error::from)?)
        })
    }

    pub(super) fn discard(&self, upload: &str) {
        self.0.discard(upload);
    }
}

impl fmt::Debug for ModuleStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModuleStore")
            .field("path", &self.0.path)
            .field("limits", &self.0.limits)
            .finish_non_exhaustive()
    }
}

/// A file of the store.
struct StoredFile {
    name: String,
    /// Number of bytes that the file counts as.
    bytes: u64,
    used: SystemTime,
    is_upload: bool,
}

// All methods are called under the lock.
impl StoreInner {
    /// Lists the modules and uploads, after removing abandoned uploads.
    fn list(&self) -> Result<Vec<StoredFile>, ModuleError> {
        let mut all = Vec::new();
        for entry in Dir::read_from(&self.folder).map_err(io::Error::from)? {
            let entry = entry.map_err(io::Error::from)?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            let is_upload = name.starts_with(UPLOAD);
            if !is_upload && !is_entry(name) {
                continue;
            }
            let stat = match statat(&self.folder, name, AtFlags::SYMLINK_NOFOLLOW) {
                // Links and folders are not made by this store, and count as nothing.
                Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile => stat,
                _ => continue,
            };
            if is_upload && self.is_left(name) {
                self.discard(name);
                continue;
            }
            let bytes = u64::try_from(stat.st_size).unwrap_or(0).max(LEAST);
            let since = Duration::from_secs(u64::try_from(stat.st_mtime).unwrap_or(0));
            let used = SystemTime::UNIX_EPOCH.checked_add(since).unwrap_or(SystemTime::UNIX_EPOCH);
            all.push(StoredFile { name: name.to_owned(), bytes, used, is_upload });
        }
        Ok(all)
    }

    /// Returns true if an upload is abandoned.
    fn is_left(&self, name: &str) -> bool {
        self.open(name).is_ok_and(|file| flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok())
    }

    /// Removes unused modules until `len` more bytes fit.
    fn make_room(&self, len: u64) -> Result<(), ModuleError> {
        let all = self.list()?;
        if all.iter().filter(|found| found.is_upload).count() >= MAX_UPLOADS {
            return Err(ModuleError::TooManyUploads { limit: MAX_UPLOADS });
        }
        let StoreLimits { max_bytes, expiry, .. } = self.limits;
        let more = len.max(LEAST);
        let fits = |held: u64| held.saturating_add(more) <= max_bytes;
        let mut held = all.iter().fold(0_u64, |sum, found| sum.saturating_add(found.bytes));
        if fits(held) {
            return Ok(());
        }
        let now = SystemTime::now();
        let is_unused = |found: &&StoredFile| now.duration_since(found.used).is_ok_and(|idle| idle >= expiry);
        for found in all.iter().filter(|found| !found.is_upload).filter(is_unused) {
            // Processes that have loaded it keep their mapping.
            self.discard(&found.name);
            held -= found.bytes;
        }
        if fits(held) {
            return Ok(());
        }
        Err(ModuleError::Full { len, held, limit: ByteSize(max_bytes), expiry: Span(expiry) })
    }

    /// Creates a file for an upload.
    fn create(&self) -> io::Result<(String, File)> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        loop {
            let name = format!("{UPLOAD}{:016x}", getrandom::u64()?);
            match openat(&self.folder, &name, flags, Mode::RUSR | Mode::WUSR) {
                Ok(file) => return Ok((name, file.into())),
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Opens a module, if it is stored, and records its use. Removes an entry that is not a file
    /// writable by this user or root only, because no store has made it.
    fn touch(&self, digest: &Digest) -> Result<Option<File>, ModuleError> {
        let name = entry_name(digest);
        let file = match self.open(&name) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(None),
            // The entry is a link.
            Err(Errno::LOOP) => {
                self.discard(&name);
                return Ok(None);
            }
            Err(errno) => return Err(io::Error::from(errno).into()),
        };
        let metadata = file.metadata()?;
        if !metadata.is_file() || metadata.mode() & 0o022 != 0 || !is_ours(metadata.uid()) {
            let (mode, owner) = (metadata.mode() & 0o7777, metadata.uid());
            rpc_core::log_limited!(
                WARN,
                name,
                mode = format_args!("{mode:o}"),
                owner,
                "removed from the store of modules: others may write to it"
            );
            self.discard(&name);
            return Ok(None);
        }
        match file.set_modified(SystemTime::now()) {
            // The file is one of root for this user: its use cannot be recorded, so it expires as
            // if it were never used.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            outcome => outcome?,
        }
        Ok(Some(file))
    }

    /// Opens a file for reading. Follows no link, and does not wait for a writer of a FIFO.
    fn open(&self, name: &str) -> rustix::io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        openat(&self.folder, name, flags, Mode::empty()).map(File::from)
    }

    fn discard(&self, name: &str) {
        match unlinkat(&self.folder, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => {
                rpc_core::log_limited!(WARN, name, error = %errno, "cannot remove a file from the store of modules")
            }
        }
    }
}

/// Returns true if files of `owner` can be trusted: those of this user, and of root, who could
/// change anything anyway.
fn is_ours(owner: u32) -> bool {
    owner == rustix::process::geteuid().as_raw() || owner == 0
}

fn entry_name(digest: &Digest) -> String {
    format!("{digest}{SUFFIX}")
}

fn is_entry(name: &str) -> bool {
    name.strip_suffix(SUFFIX).is_some_and(|stem| stem.parse::<Digest>().is_ok())
}

#[cfg(test)]
mod tests;
