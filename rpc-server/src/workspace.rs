//! Workspaces: the folders of sessions, for exchanged files and modules.
//!
//! A [`WorkspaceRoot`] is the server's `--workdir`, and opens [`Workspace`]s: private ones, which
//! are removed with their session, and named ones, which belong to an identity and stay. The path
//! resolution of the kernel confines all access: no path and no symbolic link leads out of a
//! workspace.
//!
//! On disk, with modes that exclude other users:
//!
//! ```text
//! WORKDIR/lock                             held while servers change what is below
//! WORKDIR/private/SERVER.lock              held while that server lives
//! WORKDIR/private/SERVER/ID/files/         a private workspace
//! WORKDIR/named/IDENTITY/NAME/files/       a named workspace
//! WORKDIR/named/IDENTITY/NAME/lock         held, shared, by its servers; time of the last use
//! …/ID/staging/, …/NAME/staging/           beside each `files/`: writes in progress
//! ```

mod error;
mod files;
mod loan;
mod path;
mod tree;
mod workspace_root;

use std::fmt;
use std::fs::{File, Permissions};
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime};

use cap_std::fs::{Dir, DirBuilder, DirBuilderExt, Metadata, MetadataExt, OpenOptions, OpenOptionsExt};
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::{FlockOperation, OFlags, flock};
use serde::{Deserialize, Serialize};

pub use error::WorkspaceError;
pub use files::{FileReader, FileWriter};
use loan::FolderOwner;
pub(crate) use loan::WorkspaceLoan;
use path::{normalize, normalize_file};
use tree::{Usage, measure, move_entry, purge, walk};
use workspace_root::open_lock_file;
pub use workspace_root::{WorkspaceLimits, WorkspaceRoot};

/// A file in a listing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Path from the root of the workspace, with `/` between the names.
    pub name: String,
    /// Length in bytes.
    pub size: u64,
    /// Time of the last write.
    pub modified: SystemTime,
    /// True if its owner may execute the file.
    pub executable: bool,
}

/// A confined folder of files with a quota. A clone is another reference to the same workspace.
///
/// Paths are relative, with `/` between names; `.` and `..` are resolved by name, before any link
/// is followed. Links may lead anywhere inside. All methods block, and any number of threads may
/// use them at once.
///
/// The quota counts committed files and writes in progress; during a replacement both the old and
/// the new file. Files that foreign code or another server sharing the workspace writes itself are
/// counted when the workspace is opened and whenever the quota seems to be reached: they cannot be
/// hidden, but are not prevented either.
#[derive(Clone)]
pub struct Workspace(Arc<WorkspaceInner>);

struct WorkspaceInner {
    /// Real path of the folder of files.
    path: PathBuf,
    files: Dir,
    staging: Dir,
    home: WorkspaceKind,
    account: Mutex<Account>,
    /// Last, so that the server's own folder outlives the workspace.
    owner: FolderOwner,
}

/// Owner of the folder of a workspace, which determines its removal.
enum WorkspaceKind {
    /// The name in the server's private folder.
    Private(String),
    Named {
        key: (String, String),
        /// Shared lock, which prevents expiry by any server.
        lock: File,
    },
    /// The process that has lent it removes it.
    Lent,
}

#[derive(Default)]
struct Account {
    committed: Usage,
    pending: Usage,
}

impl Workspace {
    /// Returns the real path of the folder, for code that runs in it.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Returns the absolute path at which a file of the workspace is or would be, for code that
    /// runs in it; that of the folder for an empty path.
    ///
    /// # Errors
    ///
    /// The path is malformed or leads outside.
    pub fn absolute(&self, path: &str) -> Result<PathBuf, WorkspaceError> {
        Ok(if path.is_empty() { self.0.path.clone() } else { self.0.path.join(normalize(path)?) })
    }

    /// Returns the real path, without links, of a regular file in the workspace, for loaders that
    /// take a path.
    ///
    /// Code that runs in the workspace can change the answer afterwards.
    ///
    /// # Errors
    ///
    /// The path is malformed or leads outside, or what is there is not a regular file.
    pub fn resolve(&self, path: &str) -> Result<PathBuf, WorkspaceError> {
        let target = normalize_file(path)?;
        self.regular(path, &target)?;
        let real = self.0.files.canonicalize(&target).map_err(at(path))?;
        Ok(self.0.path.join(real))
    }

    /// Lists the files in `folder` and in all folders below it, sorted by name; those of the whole
    /// workspace if it is empty. The path of a file lists that file alone.
    ///
    /// A link to a file inside is listed as a file; other links, devices and the like are not, nor
    /// are names that are not UTF-8, nor paths too long to be given back.
    ///
    /// # Errors
    ///
    /// The path is malformed or leads outside, or nothing is there.
    pub fn list(&self, folder: &str) -> Result<Vec<Entry>, WorkspaceError> {
        self.list_counted(folder, |_| Ok(()))
    }

    /// Lists files as [`list`](Self::list) does, and calls `count` with the length of each name in
    /// bytes, of folders too, before the name is kept. An error of `count` ends the listing.
    ///
    /// # Errors
    ///
    /// Those of [`list`](Self::list), and those of `count`.
    pub(crate) fn list_counted<E: From<WorkspaceError>>(
        &self,
        folder: &str,
        mut count: impl FnMut(usize) -> Result<(), E>,
    ) -> Result<Vec<Entry>, E> {
        let start = if folder.is_empty() { String::new() } else { normalize(folder)? };
        if !start.is_empty() {
            let metadata = self.0.files.metadata(&start).map_err(at(folder))?;
            if !metadata.is_dir() {
                let metadata = self.regular(folder, &start)?;
                return Ok(vec![entry(start, &metadata)]);
            }
        }
        let mut entries = Vec::new();
        let visited = walk(&self.0.files, &start, |name, kind, found| {
            if let Err(error) = count(name.len()) {
                return ControlFlow::Break(error);
            }
            let metadata = match kind {
                kind if kind.is_file() => found.metadata().ok(),
                kind if kind.is_symlink() => self.0.files.metadata(&name).ok(),
                _ => None,
            };
            if let Some(metadata) = metadata.filter(Metadata::is_file) {
                entries.push(entry(name, &metadata));
            }
            ControlFlow::Continue(())
        });
        if let ControlFlow::Break(error) = visited.map_err(at(folder))? {
            return Err(error);
        }
        entries.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// Lists the folders in the workspace, sorted by name, and calls `count` as
    /// [`list_counted`](Self::list_counted) does.
    ///
    /// # Errors
    ///
    /// The file system failed; and those of `count`.
    pub(crate) fn list_folders_counted<E: From<WorkspaceError>>(
        &self,
        mut count: impl FnMut(usize) -> Result<(), E>,
    ) -> Result<Vec<String>, E> {
        let mut folders = Vec::new();
        let visited = walk(&self.0.files, "", |name, kind, _| {
            if kind.is_dir() {
                if let Err(error) = count(name.len()) {
                    return ControlFlow::Break(error);
                }
                folders.push(name);
            }
            ControlFlow::Continue(())
        });
        if let ControlFlow::Break(error) = visited.map_err(at(""))? {
            return Err(error);
        }
        folders.sort_unstable();
        Ok(folders)
    }

    /// Creates a folder, with those that it is in, unless it is there.
    ///
    /// # Errors
    ///
    /// The path is malformed or leads outside, something else is there, a limit is reached, or the
    /// file system failed.
    pub fn create_folder(&self, path: &str) -> Result<(), WorkspaceError> {
        let target = normalize(path)?;
        let mut account = self.account();
        let ends = target.match_indices('/').map(|(end, _)| end).chain([target.len()]);
        for end in ends {
            self.make_parent(path, &target[..end], &mut account)?;
        }
        match self.0.files.metadata(&target).map_err(at(path))?.is_dir() {
            true => Ok(()),
            false => Err(WorkspaceError::NotAFolder { path: path.to_owned() }),
        }
    }

    /// Removes a file, or a folder with all that is in it. A link is removed itself, not what it
    /// leads to.
    ///
    /// A folder is gone at once for others, and is then deleted piece by piece before this returns.
    ///
    /// # Errors
    ///
    /// The path is malformed, leads outside, or names the workspace itself; nothing is there; or
    /// the file system failed.
    pub fn remove(&self, path: &str) -> Result<(), WorkspaceError> {
        let target = normalize(path)?;
        if target.is_empty() {
            return Err(WorkspaceError::IsWorkspace { path: path.to_owned() });
        }
        let metadata = self.0.files.symlink_metadata(&target).map_err(at(path))?;
        let freed = if metadata.is_dir() {
            let condemned = self.0.owner.unique("removed");
            move_entry(&self.0.files, &target, &self.0.staging, &condemned).map_err(at(path))?;
            purge(&self.0.staging, &condemned)
        } else {
            self.0.files.remove_file(&target).map_err(at(path))?;
            Usage::of(&metadata)
        };
        let mut account = self.account();
        account.committed = account.committed.minus(freed);
        Ok(())
    }

    /// Begins to write the file at `path`, which need not exist, nor its folders. Nothing shows
    /// until [`FileWriter::commit`].
    ///
    /// With `expected_len`, in bytes, the quota is reserved now, and only a file of exactly that
    /// length can be committed.
    ///
    /// # Errors
    ///
    /// The path is malformed or leads outside, something that is not a regular file is there, the
    /// quota is reached, or the file system failed.
    pub fn begin_write(&self, path: &str, expected_len: Option<u64>) -> Result<FileWriter, WorkspaceError> {
        let target = self.writable(path)?;
        FileWriter::new(self.clone(), path, target, expected_len)
    }

    /// Begins to write the file at `path`, like [`begin_write`](Self::begin_write), by a writer
    /// that leaves the beginning of the file, as far as it has come, as the file `path` with
    /// `.rpc-part` at its end if it is dropped. If such a file is there, the writer takes it over:
    /// its [length](FileWriter::len) is that of the part.
    ///
    /// # Errors
    ///
    /// Those of [`begin_write`](Self::begin_write).
    pub fn resume_write(&self, path: &str, expected_len: u64) -> Result<FileWriter, WorkspaceError> {
        let target = self.writable(path)?;
        let part = self.writable(&part_of(path))?;
        FileWriter::resume(self.clone(), path, target, part, expected_len)
    }

    /// Returns the cleaned form of `path`, at which a file can be put.
    fn writable(&self, path: &str) -> Result<String, WorkspaceError> {
        let target = normalize_file(path)?;
        match self.regular(path, &target) {
            Ok(_) | Err(WorkspaceError::NotFound { .. }) => Ok(target),
            Err(error) => Err(error),
        }
    }

    /// Opens the file at `path` for reading.
    ///
    /// # Errors
    ///
    /// The path is malformed or leads outside, what is there is not a regular file, or the file
    /// system failed.
    pub fn open_read(&self, path: &str) -> Result<FileReader, WorkspaceError> {
        let target = normalize_file(path)?;
        self.regular(path, &target)?;
        // The file may have changed since, so the open must not block on a FIFO, and the result is
        // checked again.
        let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(flags.bits().cast_signed());
        let file = self.0.files.open_with(&target, &options).map_err(at(path))?;
        let metadata = file.metadata().map_err(at(path))?;
        check_regular(path, &metadata)?;
        Ok(FileReader::new(file.into_std(), path, metadata.len()))
    }

    /// Sets or clears the permission of the owner to execute the file at `path`.
    ///
    /// # Errors
    ///
    /// Those of [`open_read`](Self::open_read).
    pub fn set_executable(&self, path: &str, executable: bool) -> Result<(), WorkspaceError> {
        let file = self.open_read(path)?;
        let mode = if executable { 0o700 } else { 0o600 };
        file.as_file().set_permissions(Permissions::from_mode(mode)).map_err(at(path))
    }

    /// Returns the bytes of committed files and writes in progress, as far as they are known.
    pub fn used_bytes(&self) -> u64 {
        let account = self.account();
        account.committed.plus(account.pending).bytes
    }

    /// Returns the quota in bytes.
    pub fn quota_bytes(&self) -> u64 {
        self.0.owner.limits().quota_bytes
    }

    /// Opens the workspace in `folder`, an open folder with the real path `path`, and creates its
    /// parts if they are missing.
    fn open(owner: FolderOwner, folder: &Dir, path: &Path, home: WorkspaceKind) -> io::Result<Self> {
        let files = make_folder(folder, "files")?;
        let staging = make_folder(folder, "staging")?;
        sweep_staging(&staging)?;
        let account = Account { committed: measure(&files)?, pending: Usage::default() };
        Ok(Self(Arc::new(WorkspaceInner {
            path: path.join("files"),
            files,
            staging,
            home,
            account: Mutex::new(account),
            owner,
        })))
    }

    /// Returns the metadata of `target`, following links, if it is a regular file.
    fn regular(&self, path: &str, target: &str) -> Result<Metadata, WorkspaceError> {
        let metadata = self.0.files.metadata(target).map_err(at(path))?;
        check_regular(path, &metadata)?;
        Ok(metadata)
    }

    /// Counts `more` as pending.
    fn reserve(&self, path: &str, more: Usage) -> Result<(), WorkspaceError> {
        let mut account = self.account();
        self.check_limits(path, &mut account, more)?;
        account.pending = account.pending.plus(more);
        Ok(())
    }

    fn release(&self, less: Usage) {
        let mut account = self.account();
        account.pending = account.pending.minus(less);
    }

    /// Refuses to pass the limits, after measuring what is really there: foreign code may have
    /// removed files.
    fn check_limits(&self, path: &str, account: &mut Account, more: Usage) -> Result<(), WorkspaceError> {
        let limits = self.0.owner.limits();
        let fits = |usage: Usage| usage.bytes <= limits.quota_bytes && usage.entries <= limits.max_entries;
        if fits(account.committed.plus(account.pending).plus(more)) {
            return Ok(());
        }
        if fits(account.pending.plus(more)) {
            account.committed = measure(&self.0.files).map_err(at(path))?;
        }
        let used = account.committed.plus(account.pending);
        let wanted = used.plus(more);
        let path = path.to_owned();
        if fits(wanted) {
            Ok(())
        } else if wanted.bytes > limits.quota_bytes {
            Err(WorkspaceError::QuotaExceeded {
                path,
                needed_bytes: more.bytes,
                used_bytes: used.bytes,
                limit_bytes: limits.quota_bytes,
            })
        } else {
            Err(WorkspaceError::TooManyEntries { path, limit: limits.max_entries })
        }
    }

    /// Creates an empty file in the staging folder, locked so that no other server takes it for
    /// abandoned.
    fn create_staged(&self) -> io::Result<(String, File)> {
        loop {
            let name = self.0.owner.unique("write");
            let mut options = OpenOptions::new();
            options.read(true).write(true).create_new(true).mode(0o600);
            let file = self.0.staging.open_with(&name, &options)?.into_std();
            rustix::io::retry_on_intr(|| flock(&file, FlockOperation::LockExclusive))?;
            // Another server that opens the workspace may have removed the file before it was
            // locked.
            if rustix::fs::fstat(&file)?.st_nlink > 0 {
                return Ok((name, file));
            }
        }
    }

    /// Moves the file `part` to the staging folder, locked as one that is created there, and counts
    /// `reserved` for it as pending. Returns its name there, the file, and its length; `None` if
    /// there is no part, or it is longer than `reserved`, and then nothing is counted.
    fn take_part(
        &self,
        path: &str,
        part: &str,
        reserved: Usage,
    ) -> Result<Option<(String, File, u64)>, WorkspaceError> {
        // Held over the move, so that no measurement counts the file twice or not at all.
        let mut account = self.account();
        let Ok(metadata) = self.0.files.symlink_metadata(part) else { return Ok(None) };
        // A file with two names could be changed by the other one.
        if !metadata.is_file() || metadata.nlink() != 1 || metadata.len() > reserved.bytes {
            return Ok(None);
        }
        let taken = Usage::of(&metadata);
        self.check_limits(path, &mut account, reserved.minus(taken))?;
        let staged = self.0.owner.unique("write");
        if self.0.files.rename(part, &self.0.staging, &staged).is_err() {
            return Ok(None);
        }
        account.committed = account.committed.minus(taken);
        match self.open_staged(&staged) {
            // Unless another program has replaced or changed the file between the two looks.
            Ok((file, len)) if len <= reserved.bytes => {
                account.pending = account.pending.plus(reserved);
                Ok(Some((staged, file, len)))
            }
            _ => {
                self.discard_staged(&staged);
                Ok(None)
            }
        }
    }

    /// Opens and locks a file that was moved to the staging folder. Returns its length, too.
    fn open_staged(&self, staged: &str) -> io::Result<(File, u64)> {
        let mut options = OpenOptions::new();
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        options.read(true).write(true).custom_flags(flags.bits().cast_signed());
        let file = self.0.staging.open_with(staged, &options)?.into_std();
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        let stat = rustix::fs::fstat(&file)?;
        // Another server that opens the workspace may have removed the file before it was locked.
        if stat.st_nlink != 1 || !file.metadata()?.is_file() {
            return Err(io::ErrorKind::NotFound.into());
        }
        file.set_permissions(Permissions::from_mode(0o600))?;
        Ok((file, stat.st_size.unsigned_abs()))
    }

    fn discard_staged(&self, staged: &str) {
        // If this fails, the sweep at the next opening takes the file.
        let _ = self.0.staging.remove_file(staged);
    }

    /// Moves a staged file to `target`, and what was `reserved` for it from pending to committed.
    fn commit(&self, path: &str, target: &str, staged: &str, reserved: Usage) -> Result<(), WorkspaceError> {
        // Held over the move, so that no measurement counts the file twice or not at all.
        let mut account = self.account();
        for (end, _) in target.match_indices('/') {
            self.make_parent(path, &target[..end], &mut account)?;
        }
        let replaced = match self.0.files.symlink_metadata(target) {
            Ok(metadata) => Usage::of(&metadata),
            Err(_) => Usage::default(),
        };
        self.0.staging.rename(staged, &self.0.files, target).map_err(at(path))?;
        account.pending = account.pending.minus(reserved);
        account.committed = account.committed.minus(replaced).plus(reserved);
        Ok(())
    }

    fn make_parent(&self, path: &str, folder: &str, account: &mut Account) -> Result<(), WorkspaceError> {
        if self.0.files.symlink_metadata(folder).is_ok() {
            return Ok(());
        }
        let one = Usage { bytes: 0, entries: 1 };
        self.check_limits(path, account, one)?;
        match self.0.files.create_dir_with(folder, DirBuilder::new().mode(0o700)) {
            Ok(()) => {
                account.committed = account.committed.plus(one);
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            Err(error) => Err(WorkspaceError::from_io(path, error)),
        }
    }

    fn account(&self) -> MutexGuard<'_, Account> {
        // Plain numbers, which a panic elsewhere leaves consistent.
        self.0.account.lock()
    }
}

impl fmt::Debug for Workspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workspace").field("path", &self.0.path).finish_non_exhaustive()
    }
}

impl Drop for WorkspaceInner {
    fn drop(&mut self) {
        let FolderOwner::Root(root) = &self.owner else { return };
        match &self.home {
            WorkspaceKind::Private(name) => {
                purge(&root.own, name);
                // Programs of a session whose process was killed are ended at the same time, and
                // may write until then.
                for _ in 0..REMOVAL_RETRIES {
                    if root.own.symlink_metadata(name).is_err() {
                        return;
                    }
                    thread::sleep(REMOVAL_INTERVAL);
                    purge(&root.own, name);
                }
            }
            WorkspaceKind::Named { key, lock } => {
                // If the time cannot be set, the workspace expires a little early.
                let _ = lock.set_modified(SystemTime::now());
                root.forget(key);
            }
            WorkspaceKind::Lent => {}
        }
    }
}

/// Number of further attempts to remove a private workspace, which foreign code may still fill.
const REMOVAL_RETRIES: u32 = 10;

/// Interval between two attempts.
const REMOVAL_INTERVAL: Duration = Duration::from_millis(20);

/// Returns the path of the file in which an incomplete upload to `path` leaves its beginning.
fn part_of(path: &str) -> String {
    format!("{path}.rpc-part")
}

/// Removes what servers that died have left in a staging folder.
fn sweep_staging(staging: &Dir) -> io::Result<()> {
    for entry in staging.entries()?.flatten() {
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            purge(staging, &name);
        } else if let Ok(file) = open_lock_file(staging, &name, false) {
            // The lock proves that there is no writer; it is held until the file is gone.
            if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
                let _ = staging.remove_file(&name);
            }
        }
    }
    Ok(())
}

fn make_folder(parent: &Dir, name: &str) -> io::Result<Dir> {
    match parent.create_dir_with(name, DirBuilder::new().mode(0o700)) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => parent.open_dir(name),
    }
}

fn entry(name: String, metadata: &Metadata) -> Entry {
    Entry {
        name,
        size: metadata.len(),
        modified: metadata.modified().map_or(SystemTime::UNIX_EPOCH, cap_std::time::SystemTime::into_std),
        executable: cap_std::fs::PermissionsExt::mode(&metadata.permissions()) & 0o100 != 0,
    }
}

fn check_regular(path: &str, metadata: &Metadata) -> Result<(), WorkspaceError> {
    let path = || path.to_owned();
    if metadata.is_file() {
        Ok(())
    } else if metadata.is_dir() {
        Err(WorkspaceError::IsFolder { path: path() })
    } else {
        Err(WorkspaceError::NotARegularFile { path: path() })
    }
}

/// Returns a function for `map_err`: the meaning of a file system error at `path`.
fn at(path: &str) -> impl Fn(io::Error) -> WorkspaceError + '_ {
    |error| WorkspaceError::from_io(path, error)
}

#[cfg(test)]
mod tests;
