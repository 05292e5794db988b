//! The server's folder of workspaces: their creation, expiry and removal.
//!
//! Several servers may share the folder. Each holds a lock as long as it lives, so that the next
//! one to start can tell what a dead one has left; and all take one lock for the moment in which
//! they make, or take away, a workspace.

use std::collections::HashMap;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use cap_std::ambient_authority;
use cap_std::fs::{Dir, OpenOptions, OpenOptionsExt, Permissions, PermissionsExt};
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::{FlockOperation, OFlags, flock};

use super::path::abridged;
use super::tree::{move_entry, purge};
use super::{FolderOwner, Workspace, WorkspaceError, WorkspaceInner, WorkspaceKind, make_folder};
use crate::file_lock::FileLock;

/// Limits of workspaces, and the expiry of named ones.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkspaceLimits {
    /// Maximum bytes of one workspace: its files and the writes in progress. Default 4 GiB: a large
    /// model and its inputs.
    pub quota_bytes: u64,
    /// Maximum number of files and folders of one workspace. Default 65,536: it bounds the time and
    /// memory of a listing, and prevents empty files, which no quota of bytes stops, from using up
    /// the file system.
    pub max_entries: u64,
    /// Maximum number of named workspaces of one identity. Default 16; without a limit each new
    /// name would bring a new quota.
    pub max_named: usize,
    /// Time after the last use at which a named workspace is removed. Default 30 days.
    pub named_expiry: Duration,
}

impl Default for WorkspaceLimits {
    fn default() -> Self {
        Self {
            quota_bytes: 4 << 30,
            max_entries: 65_536,
            max_named: 16,
            named_expiry: Duration::from_secs(30 * 24 * 60 * 60),
        }
    }
}

impl WorkspaceLimits {
    /// Returns the default limits with another quota, in bytes.
    pub fn with_quota(quota_bytes: u64) -> Self {
        Self { quota_bytes, ..Self::default() }
    }
}

/// The server's folder of workspaces. A clone is another reference to the same folder.
///
/// The private workspaces of this server are removed with the last reference to the root and its
/// workspaces.
#[derive(Clone)]
pub struct WorkspaceRoot(Arc<RootInner>);

pub(super) struct RootInner {
    pub(super) limits: WorkspaceLimits,
    /// The real path of the folder.
    path: PathBuf,
    /// Lock for creating and removing workspaces. The mutex excludes threads, the file lock
    /// processes.
    lock: Mutex<File>,
    private: Dir,
    named: Dir,
    /// Name of this server in `private`, unique among all servers.
    pub(super) instance: String,
    /// The folder of that name, for private workspaces and for what is to be deleted.
    pub(super) own: Dir,
    /// Held as long as this server lives.
    _alive: File,
    /// Counter for unique names.
    serial: AtomicU64,
    /// Named workspaces in use, so that sessions share one account of their contents.
    open_named: Mutex<HashMap<(String, String), Weak<WorkspaceInner>>>,
}

/// Maximum length of names of workspaces and identities in bytes.
const MAX_WORKSPACE_NAME_BYTES: usize = 64;

impl WorkspaceRoot {
    /// Opens the folder `dir` for one server, and creates it if it is missing. Private workspaces
    /// of dead servers are removed; those of living ones are left alone.
    ///
    /// # Errors
    ///
    /// The folder cannot be made, opened or locked.
    pub fn open(dir: &Path, limits: WorkspaceLimits) -> Result<Self, WorkspaceError> {
        let shown = dir.display().to_string();
        RootInner::open(dir, limits).map(|inner| Self(Arc::new(inner))).map_err(io_at(&shown))
    }

    /// Returns the path of nothing yet, in the folder that this server has to itself and that goes
    /// with it.
    pub(crate) fn unused_path(&self, purpose: &str) -> PathBuf {
        let root = &self.0;
        root.path.join("private").join(&root.instance).join(root.unique(purpose))
    }

    /// Makes a new workspace, which is removed with all that is in it when the last reference to it
    /// is dropped. That drop blocks while it deletes.
    ///
    /// # Errors
    ///
    /// The file system failed.
    pub fn private(&self) -> Result<Workspace, WorkspaceError> {
        let root = &self.0;
        let name = root.unique("session");
        make_folder(&root.own, &name)
            .and_then(|folder| {
                let path = root.path.join("private").join(&root.instance).join(&name);
                Workspace::open(
                    FolderOwner::Root(Arc::clone(root)),
                    &folder,
                    &path,
                    WorkspaceKind::Private(name.clone()),
                )
            })
            .map_err(io_at(&name))
    }

    /// Opens the workspace `name` of `identity`, or makes it. It is kept until it has been unused
    /// for the time that the limits say. Any number of sessions may have it open.
    ///
    /// # Errors
    ///
    /// `identity` or `name` is not of 1 to 64 ASCII letters, digits, `.`, `_` and `-`, or is `.` or
    /// `..`; the identity has as many workspaces as it may; or the file system failed.
    pub fn named(&self, identity: &str, name: &str) -> Result<Workspace, WorkspaceError> {
        check_name(identity)?;
        check_name(name)?;
        let root = &self.0;
        let key = (identity.to_owned(), name.to_owned());
        let mut open = root.open_named();
        if let Some(inner) = open.get(&key).and_then(Weak::upgrade) {
            return Ok(Workspace(inner));
        }
        let folder = format!("{identity}/{name}");
        let (home, lock) = root.claim_named(identity, name)?;
        let path = root.path.join("named").join(identity).join(name);
        let home_key = WorkspaceKind::Named { key: key.clone(), lock };
        let workspace =
            Workspace::open(FolderOwner::Root(Arc::clone(root)), &home, &path, home_key).map_err(io_at(&folder))?;
        open.insert(key, Arc::downgrade(&workspace.0));
        Ok(workspace)
    }

    /// Removes the named workspaces that have expired at the time `now`, and returns their number.
    /// A workspace that a session of this or another server has open stays. Blocks while it
    /// deletes.
    ///
    /// # Errors
    ///
    /// The folder cannot be read or locked.
    pub fn expire(&self, now: SystemTime) -> Result<usize, WorkspaceError> {
        let root = &self.0;
        let condemned = root.condemn_named(now).map_err(io_at("named"))?;
        // Deleted only now, when the lock is free: it may take long.
        for name in &condemned {
            purge(&root.own, name);
        }
        Ok(condemned.len())
    }
}

impl fmt::Debug for WorkspaceRoot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkspaceRoot")
            .field("path", &self.0.path)
            .field("limits", &self.0.limits)
            .finish_non_exhaustive()
    }
}

/// Refuses a folder of another user, who could hold its locks for ever. Anyone can make one where
/// all users may write. Root may use the folders of others.
fn check_owner(folder: &Path) -> io::Result<()> {
    let (own, owner) = (rustix::process::geteuid().as_raw(), fs::metadata(folder)?.uid());
    if own == 0 || [own, 0].contains(&owner) {
        return Ok(());
    }
    let text = format!("it belongs to another user (number {owner}): remove it, or name another one with --workdir");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

impl RootInner {
    fn open(dir: &Path, limits: WorkspaceLimits) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let path = dir.canonicalize()?;
        check_owner(&path)?;
        let workdir = Dir::open_ambient_dir(&path, ambient_authority())?;
        let [private, named] = ["private", "named"].map(|name| {
            let folder = make_folder(&workdir, name)?;
            workdir.set_permissions(name, Permissions::from_mode(0o700))?;
            io::Result::Ok(folder)
        });
        let (private, named) = (private?, named?);
        let lock = open_lock_file(&workdir, "lock", true)?;

        let held = FileLock::exclusive(&lock)?;
        let (instance, alive) = register(&private)?;
        let own = make_folder(&private, &instance)?;
        let dead = adopt_dead(&private, &instance, &own)?;
        drop(held);
        for name in dead {
            purge(&own, &name);
        }

        Ok(Self {
            limits,
            path,
            lock: Mutex::new(lock),
            private,
            named,
            instance,
            own,
            _alive: alive,
            serial: AtomicU64::new(0),
            open_named: Mutex::default(),
        })
    }

    /// Returns a name that neither this nor another server has used.
    pub(super) fn unique(&self, purpose: &str) -> String {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        format!("{purpose}-{}-{serial}", self.instance)
    }

    /// Removes the entry of a named workspace whose last reference is gone.
    pub(super) fn forget(&self, key: &(String, String)) {
        let mut open = self.open_named();
        // Another session may have opened it in the meantime.
        if open.get(key).is_some_and(|inner| inner.strong_count() == 0) {
            open.remove(key);
        }
    }

    /// Opens the folder of a named workspace, and locks it against expiry.
    fn claim_named(&self, identity: &str, name: &str) -> Result<(Dir, File), WorkspaceError> {
        let shown = format!("{identity}/{name}");
        let guard = self.lock();
        let _held = FileLock::exclusive(&guard).map_err(io_at(&shown))?;
        let owner = make_folder(&self.named, identity).map_err(io_at(&shown))?;
        if owner.symlink_metadata(name).is_err() {
            let count = owner.entries().map_err(io_at(&shown))?.count();
            if count >= self.limits.max_named {
                return Err(WorkspaceError::TooManyWorkspaces {
                    identity: identity.to_owned(),
                    name: name.to_owned(),
                    limit: self.limits.max_named,
                });
            }
        }
        let claim = || {
            let folder = make_folder(&owner, name)?;
            let lock = open_lock_file(&folder, "lock", true)?;
            // Exclusive locks are taken under `_held` only, so this does not wait.
            rustix::io::retry_on_intr(|| flock(&lock, FlockOperation::LockShared))?;
            lock.set_modified(SystemTime::now())?;
            Ok((folder, lock))
        };
        claim().map_err(io_at(&shown))
    }

    /// Moves the expired named workspaces to this server's own folder.
    fn condemn_named(&self, now: SystemTime) -> io::Result<Vec<String>> {
        let guard = self.lock();
        let _held = FileLock::exclusive(&guard)?;
        let mut condemned = Vec::new();
        for identity in self.named.entries()?.flatten() {
            let Ok(owner) = identity.open_dir() else {
                continue;
            };
            let names: Vec<_> = owner.entries()?.flatten().collect();
            for entry in names {
                let Ok(folder) = entry.open_dir() else {
                    continue;
                };
                if !self.is_expired(&folder, now) {
                    continue;
                }
                let target = self.unique("expired");
                if move_entry(&owner, entry.file_name(), &self.own, &target).is_ok() {
                    condemned.push(target);
                }
            }
            // Fails, as it should, if workspaces are left.
            let _ = identity.remove_dir();
        }
        Ok(condemned)
    }

    fn is_expired(&self, folder: &Dir, now: SystemTime) -> bool {
        // A workspace whose maker died before it made the lock is as old as its folder.
        let (used, unused) = match open_lock_file(folder, "lock", false) {
            Ok(lock) => {
                let used = lock.metadata().and_then(|metadata| metadata.modified());
                (used, flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok())
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let used = folder.dir_metadata().and_then(|metadata| metadata.modified());
                (used.map(cap_std::time::SystemTime::into_std), true)
            }
            Err(_) => return false,
        };
        let idle = used.ok().and_then(|used| now.duration_since(used).ok());
        unused && idle.is_some_and(|idle| idle >= self.limits.named_expiry)
    }

    fn lock(&self) -> MutexGuard<'_, File> {
        self.lock.lock()
    }

    fn open_named(&self) -> MutexGuard<'_, HashMap<(String, String), Weak<WorkspaceInner>>> {
        self.open_named.lock()
    }
}

impl Drop for RootInner {
    fn drop(&mut self) {
        purge(&self.private, &self.instance);
        // Last, and still locked: until then other servers can see which server owns the folder.
        let _ = self.private.remove_file(lock_name(&self.instance));
    }
}

/// Finds a name for this server that none has had, and locks it. The caller holds the lock of the
/// folder.
fn register(private: &Dir) -> io::Result<(String, File)> {
    loop {
        // Process ids repeat, above all in containers; times do not, once the loop has seen to
        // equal ones.
        let nanos = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let instance = format!("{}-{nanos:x}", std::process::id());
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        match private.open_with(lock_name(&instance), &options) {
            Ok(file) => {
                let file = file.into_std();
                flock(&file, FlockOperation::NonBlockingLockExclusive)?;
                return Ok((instance, file));
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}

/// Moves what dead servers have left in `private` to `own`, where it can be deleted at leisure, and
/// would be found again if this server died as well. The caller holds the lock of the folder.
fn adopt_dead(private: &Dir, instance: &str, own: &Dir) -> io::Result<Vec<String>> {
    let mut folders = Vec::new();
    let mut living = vec![instance.to_owned()];
    let mut dead_locks = Vec::new();
    for entry in private.entries()?.flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        match name.strip_suffix(".lock") {
            None => folders.push(name.to_owned()),
            Some(owner) if owner == instance => {}
            Some(owner) => {
                let dead = open_lock_file(private, name, false)
                    .is_ok_and(|file| flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok());
                if dead {
                    dead_locks.push(name.to_owned());
                } else {
                    living.push(owner.to_owned());
                }
            }
        }
    }
    let mut adopted = Vec::new();
    for (serial, folder) in folders.iter().filter(|name| !living.contains(name)).enumerate() {
        let target = format!("dead-{serial}");
        match move_entry(private, folder, own, &target) {
            Ok(()) => adopted.push(target),
            // A server that ends removes its own folder, then its lock, without the lock of the
            // folder: it may have been alive when the folder was listed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    for name in dead_locks {
        match private.remove_file(name) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(adopted)
}

fn lock_name(instance: &str) -> String {
    format!("{instance}.lock")
}

/// Opens a file to be locked, without blocking, should it be something else than a file.
pub(super) fn open_lock_file(dir: &Dir, name: &str, create: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(create).mode(0o600);
    options.custom_flags(OFlags::NONBLOCK.bits().cast_signed());
    Ok(dir.open_with(name, &options)?.into_std())
}

fn check_name(name: &str) -> Result<(), WorkspaceError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let valid = (1..=MAX_WORKSPACE_NAME_BYTES).contains(&name.len())
        && name.bytes().all(allowed)
        && name != "."
        && name != "..";
    if valid {
        return Ok(());
    }
    Err(WorkspaceError::InvalidName { name: abridged(name), limit_bytes: MAX_WORKSPACE_NAME_BYTES })
}

/// Returns a function for `map_err`: a failure of the server's own folder at `path`.
fn io_at(path: &str) -> impl Fn(io::Error) -> WorkspaceError + '_ {
    move |source| WorkspaceError::io(path, source)
}
