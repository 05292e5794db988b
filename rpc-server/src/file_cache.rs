//! The cache of files that clients have sent (`--file-cache`), by which the same file is sent once.
//!
//! Any number of processes share it: servers with the same `--workdir`, and the processes of their
//! sessions. On disk, with modes that exclude other users:
//!
//! ```text
//! WORKDIR/cache/lock                   held to reserve room, and to add and remove files
//! WORKDIR/cache/used                   bytes that are reserved, as decimal digits
//! WORKDIR/cache/IDENTITY/new-RANDOM    a file that is being added; locked by its writer
//! WORKDIR/cache/IDENTITY/HEX           a file, 0400, by its SHA-256; its time is its last use
//! ```
//!
//! # What holds
//!
//! 1. **A file has the digest that names it when it reaches a workspace.** A process that adds one
//!    computes the digest itself, and one that copies it computes the digest of the copy before it
//!    puts the copy in place.
//! 2. **Identities share nothing.** IDENTITY is the SHA-256 of the identity's text, in which the
//!    kind of its proof is: the token `alice` is another identity than the certificate `alice`. All
//!    clients over TCP without proof are one, and those that a trusted proxy names alike.
//! 3. **Bounded.** Room for the whole file is reserved before its first byte is written. To make
//!    room, the identity that takes most loses its least recently used file, again and again. What
//!    an identity takes includes the files that it is adding: one that would take most itself makes
//!    room of its own files, or gets none.
//! 4. **A crash leaves no wrong file.** Files are renamed to their names when they are complete.
//!    What a process that died has left is not locked, and is removed when the cache is searched.
//!    It may leave `used` too high, and a search counts anew, before anything is evicted. `used` is
//!    forgotten where a file goes that its remover has not counted itself. Only a program that
//!    writes to a cached file makes it too low, until the next search: hourly at the latest.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use rpc_core::client::Digest;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use crate::config::ServeConfig;
use crate::modules::Hasher;
use crate::sparse::write_data;

/// The cache of a server, as one process uses it. All methods block.
#[derive(Debug)]
pub(crate) struct FileCache {
    folder: PathBuf,
    limit_bytes: u64,
    expiry: Duration,
    lock_timeout: Duration,
}

/// Maximum time for which the lock is waited for. It is held for milliseconds, unless a program of
/// a client, which may run as the same user, stops the process that holds it, or takes it.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval at which the lock is tried.
const LOCK_INTERVAL: Duration = Duration::from_millis(10);

/// Function that returns true once no caller waits for the result any more.
pub(crate) type IsCancelled<'a> = &'a dyn Fn() -> bool;

/// Minimum that a file counts as, in bytes: a block of the usual file systems.
const LEAST: u64 = 4096;

/// Maximum number of files. It bounds the time and memory of a search; a file counts as this part
/// of the limit at least.
const MAX_FILES: u64 = 65_536;

/// Part of the limit that is free after a search that has evicted files, so that not every new file
/// causes one.
const EVICTED_PART: u64 = 8;

const LOCK: &str = "lock";
const USED: &str = "used";
const NEW: &str = "new-";

impl FileCache {
    /// Returns the cache of a server with these settings; `None` if it is off.
    pub(crate) fn of(config: &ServeConfig) -> Option<Arc<Self>> {
        // Without files of clients nothing would remove those of the cache again.
        if config.workspace_quota.0 == 0 {
            return None;
        }
        Self::new(&config.workdir, config.file_cache.0, config.workspace_expiry.0)
    }

    /// Returns the cache of a server with these settings, to [remove](Self::expire) files from: all
    /// of them if it is off. `None` if the server has no files of clients: relays and trackers may
    /// have the same folder as a server.
    pub(crate) fn to_clean(config: &ServeConfig) -> Option<Arc<Self>> {
        let has_files = config.workspace_quota.0 > 0;
        has_files.then(|| Arc::new(Self::open(&config.workdir, config.file_cache.0, config.workspace_expiry.0)))
    }

    fn new(workdir: &Path, limit_bytes: u64, expiry: Duration) -> Option<Arc<Self>> {
        (limit_bytes > 0).then(|| Arc::new(Self::open(workdir, limit_bytes, expiry)))
    }

    fn open(workdir: &Path, limit_bytes: u64, expiry: Duration) -> Self {
        Self { folder: workdir.join("cache"), limit_bytes, expiry, lock_timeout: LOCK_TIMEOUT }
    }

    /// Returns the maximum bytes of all files.
    pub(crate) fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Opens the file of this identity with this digest and length, which counts as a use; `None`
    /// if it is not there. Its content need not have the digest.
    ///
    /// # Errors
    ///
    /// The file system failed.
    pub(crate) fn find(&self, identity: &str, digest: &Digest, len: u64) -> io::Result<Option<File>> {
        let file = match open(&self.path_of(identity, digest)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let metadata = file.metadata()?;
        if !metadata.is_file() || metadata.len() != len {
            return Ok(None);
        }
        file.set_modified(SystemTime::now())?;
        Ok(Some(file))
    }

    /// Begins to add a file of `len` bytes for this identity, and makes room for it. `None` if
    /// there cannot be as much without files of identities that take less, or the lock is not had.
    ///
    /// # Errors
    ///
    /// The file system failed.
    pub(crate) fn begin(
        self: &Arc<Self>,
        identity: &str,
        len: u64,
        is_cancelled: IsCancelled<'_>,
    ) -> io::Result<Option<CacheWriter>> {
        let charge = self.charge(len);
        if charge > self.limit_bytes {
            return Ok(None);
        }
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.folder)?;
        let folder = self.folder_of(identity);
        let Some(held) = self.lock(is_cancelled)? else { return Ok(None) };
        let Some(used) = self.make_room(&folder, charge)? else { return Ok(None) };
        // Counted before it is there, so that a crash leaves a number that is too high.
        self.write_used(used.saturating_add(charge))?;
        let created = create(&folder, len);
        if created.is_err() {
            self.write_used(used)?;
        }
        let (path, file) = created?;
        drop(held);
        Ok(Some(CacheWriter { cache: self.clone(), path, file, hasher: Hasher::new(), len, written: 0, charge }))
    }

    /// Removes a file of this identity that does not have its digest; returns false if the lock is
    /// not had, and the file stays.
    ///
    /// # Errors
    ///
    /// The file system failed.
    pub(crate) fn discard(&self, identity: &str, digest: &Digest, is_cancelled: IsCancelled<'_>) -> io::Result<bool> {
        let path = self.path_of(identity, digest);
        let Some(_held) = self.lock(is_cancelled)? else { return Ok(false) };
        match fs::remove_file(&path) {
            // Another session was faster.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
            removed => removed?,
        }
        self.forget_used()?;
        Ok(true)
    }

    /// Removes the files that have not been used for the time of named workspaces, what died
    /// processes have left, and as much as the limit demands, which may be lower than before.
    /// Returns the number of files.
    ///
    /// # Errors
    ///
    /// The file system failed.
    pub(crate) fn expire(&self, now: SystemTime) -> io::Result<usize> {
        let held = match self.lock(&|| false) {
            // There is no cache yet.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
            held => held?.ok_or_else(|| io::Error::from(io::ErrorKind::TimedOut))?,
        };
        let mut contents = self.search()?;
        let mut removed = 0;
        for owner in &mut contents.owners {
            owner.files.retain(|file| {
                let is_expired = now.duration_since(file.used).is_ok_and(|idle| idle >= self.expiry);
                let is_gone = is_expired && fs::remove_file(owner.folder.join(file.digest.to_string())).is_ok();
                if is_gone {
                    contents.used -= file.charge;
                    removed += 1;
                }
                !is_gone
            });
        }
        if contents.used > self.limit_bytes {
            let (evicted, _) = self.choose_evicted(&mut contents, None, 0);
            removed += contents.remove(evicted);
        }
        for owner in &contents.owners {
            // Fails, as it should, if files are left.
            let _ = fs::remove_dir(&owner.folder);
        }
        self.write_used(contents.used)?;
        drop(held);
        Ok(removed)
    }

    fn path_of(&self, identity: &str, digest: &Digest) -> PathBuf {
        self.folder_of(identity).join(digest.to_string())
    }

    fn folder_of(&self, identity: &str) -> PathBuf {
        let mut hasher = Hasher::new();
        hasher.update(identity.as_bytes());
        self.folder.join(hasher.finish().to_string())
    }

    /// Returns the bytes that a file of this length counts as.
    fn charge(&self, len: u64) -> u64 {
        len.max(LEAST).max(self.limit_bytes / MAX_FILES)
    }

    /// Waits for the lock, which excludes other processes and threads until it is dropped; `None`
    /// if another one holds it for longer than [`LOCK_TIMEOUT`], or the wait is cancelled.
    fn lock(&self, is_cancelled: IsCancelled<'_>) -> io::Result<Option<File>> {
        // A file that is opened again has a lock of its own, which also excludes other threads.
        let file = options().write(true).create(true).truncate(false).mode(0o600).open(self.folder.join(LOCK))?;
        let started = Instant::now();
        loop {
            match rustix::io::retry_on_intr(|| flock(&file, FlockOperation::NonBlockingLockExclusive)) {
                Err(Errno::WOULDBLOCK) if is_cancelled() || started.elapsed() >= self.lock_timeout => return Ok(None),
                Err(Errno::WOULDBLOCK) => thread::sleep(LOCK_INTERVAL),
                locked => return Ok(locked.map(|()| Some(file))?),
            }
        }
    }
}

// These methods are called under the lock.
impl FileCache {
    /// Returns the bytes that are reserved once the owner of `folder` has room for `charge` more;
    /// `None` if there cannot be as much.
    fn make_room(&self, folder: &Path, charge: u64) -> io::Result<Option<u64>> {
        let fits = |used: u64| used.saturating_add(charge) <= self.limit_bytes;
        if let Some(used) = self.read_used().filter(|used| fits(*used)) {
            return Ok(Some(used));
        }
        let mut contents = self.search()?;
        if !fits(contents.used) {
            let adder = contents.owner(folder);
            let (evicted, used) = self.choose_evicted(&mut contents, Some(adder), charge);
            // Nothing is removed in vain.
            if fits(used) {
                contents.remove(evicted);
            }
            self.write_used(contents.used)?;
        }
        Ok(fits(contents.used).then_some(contents.used))
    }

    /// Returns the files to remove until `charge` more bytes fit, which the owner with the index
    /// `adder` adds, and a part of the limit besides, if others have as many; and the bytes that
    /// are then reserved.
    fn choose_evicted(&self, contents: &mut CacheContents, adder: Option<usize>, charge: u64) -> (Vec<Evicted>, u64) {
        let needed = self.limit_bytes.saturating_sub(charge);
        let mut target = needed.saturating_sub(self.limit_bytes / EVICTED_PART);
        if let Some(adder) = adder {
            contents.owners[adder].reserved += charge;
        }
        let mut largest = BinaryHeap::with_capacity(contents.owners.len());
        for (at, owner) in contents.owners.iter_mut().enumerate() {
            // The least recently used one is the last.
            owner.files.sort_unstable_by_key(|file| Reverse(file.used));
            largest.push((owner.held(), at));
        }
        let (mut evicted, mut used) = (Vec::new(), contents.used);
        while used > target {
            let Some((held, at)) = largest.pop() else { break };
            match contents.owners[at].files.pop() {
                Some(file) => {
                    used -= file.charge;
                    largest.push((held - file.charge, at));
                    evicted.push(Evicted { owner: at, file });
                }
                // The others take less.
                None if Some(at) == adder => break,
                // Files that are being added stay, and others do not go for more than is needed.
                None => target = needed,
            }
        }
        (evicted, used)
    }

    /// Returns all files, after removing what died processes have left.
    fn search(&self) -> io::Result<CacheContents> {
        let mut contents = CacheContents::default();
        for entry in fs::read_dir(&self.folder)?.flatten() {
            if entry.file_name().to_str().is_some_and(|name| name.parse::<Digest>().is_ok()) {
                let owner = self.search_folder(entry.path());
                contents.used = contents.used.saturating_add(owner.held());
                contents.owners.push(owner);
            }
        }
        Ok(contents)
    }

    fn search_folder(&self, folder: PathBuf) -> Owner {
        let mut owner = Owner { folder, ..Owner::default() };
        let Ok(entries) = fs::read_dir(&owner.folder) else { return owner };
        let mut new = Vec::new();
        for entry in entries.flatten() {
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            if name.starts_with(NEW) {
                new.push(entry.path());
            } else if let (Ok(digest), Ok(metadata)) = (name.parse(), entry.metadata())
                && metadata.is_file()
            {
                let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                owner.files.push(CachedFile { digest, charge: self.charge(metadata.len()), used });
            }
        }
        // The folder is closed by now: a search has one file besides the folders open at a time.
        owner.reserved = new.iter().fold(0, |sum, path| self.charge_of_new(path).saturating_add(sum));
        owner
    }

    /// Returns what a file counts as that is being added; 0 once it is removed because no process
    /// adds it.
    fn charge_of_new(&self, path: &Path) -> u64 {
        let Ok(file) = open(path) else { return 0 };
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() && fs::remove_file(path).is_ok() {
            return 0;
        }
        file.metadata().map_or(0, |metadata| self.charge(metadata.len()))
    }

    /// Returns the bytes that are reserved; `None` if they are not known.
    fn read_used(&self) -> Option<u64> {
        fs::read_to_string(self.folder.join(USED)).ok()?.trim().parse().ok()
    }

    fn write_used(&self, used: u64) -> io::Result<()> {
        // A crash in between leaves an empty file, after which the files are counted.
        let mut file = options().write(true).create(true).truncate(true).mode(0o600).open(self.folder.join(USED))?;
        file.write_all(used.to_string().as_bytes())
    }

    /// Has the next search count anew: a file is gone that another process may have counted by
    /// another limit, or that a program has made longer.
    fn forget_used(&self) -> io::Result<()> {
        options().write(true).create(true).truncate(true).mode(0o600).open(self.folder.join(USED)).map(drop)
    }

    /// Takes back what this process has added to the bytes that are reserved.
    fn give_back(&self, charge: u64) -> io::Result<()> {
        match self.read_used() {
            Some(used) => self.write_used(used.saturating_sub(charge)),
            None => Ok(()),
        }
    }
}

/// Files of the cache, as a search has found them.
#[derive(Default)]
struct CacheContents {
    /// Bytes that they and the files that are being added count as.
    used: u64,
    owners: Vec<Owner>,
}

impl CacheContents {
    /// Returns the index of the owner of `folder`, who is added if they have no files.
    fn owner(&mut self, folder: &Path) -> usize {
        if let Some(at) = self.owners.iter().position(|owner| owner.folder == folder) {
            return at;
        }
        self.owners.push(Owner { folder: folder.to_owned(), ..Owner::default() });
        self.owners.len() - 1
    }

    /// Removes files from the disk. Returns the number of those that are gone.
    fn remove(&mut self, evicted: Vec<Evicted>) -> usize {
        let mut removed = 0;
        for Evicted { owner, file } in evicted {
            if fs::remove_file(self.owners[owner].folder.join(file.digest.to_string())).is_ok() {
                self.used -= file.charge;
                removed += 1;
            }
        }
        removed
    }
}

/// The files of one identity.
#[derive(Default)]
struct Owner {
    folder: PathBuf,
    files: Vec<CachedFile>,
    /// Bytes that the files that are being added count as.
    reserved: u64,
}

impl Owner {
    /// Returns the bytes that all files count as.
    fn held(&self) -> u64 {
        self.files.iter().fold(self.reserved, |sum, file| sum.saturating_add(file.charge))
    }
}

struct CachedFile {
    digest: Digest,
    /// Bytes that the file counts as.
    charge: u64,
    /// Time of the last use.
    used: SystemTime,
}

/// A file to remove, and the index of its owner.
struct Evicted {
    owner: usize,
    file: CachedFile,
}

/// Creates a file of `len` bytes in `folder`, locked so that no other process takes it for left.
fn create(folder: &Path, len: u64) -> io::Result<(PathBuf, File)> {
    if let Err(error) = fs::DirBuilder::new().mode(0o700).create(folder)
        && error.kind() != io::ErrorKind::AlreadyExists
    {
        return Err(error);
    }
    loop {
        let path = folder.join(format!("{NEW}{:016x}", getrandom::u64()?));
        let file = match options().write(true).create_new(true).mode(0o600).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            file => file?,
        };
        let ready = flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(io::Error::from);
        // Searches count its length.
        return match ready.and_then(|()| file.set_len(len)) {
            Ok(()) => Ok((path, file)),
            Err(error) => {
                let _ = fs::remove_file(&path);
                Err(error)
            }
        };
    }
}

/// A file that is being added to the cache, hashed as it is written. Dropping it removes it.
#[derive(Debug)]
pub(crate) struct CacheWriter {
    cache: Arc<FileCache>,
    /// Path of the file; empty once it is in its place.
    path: PathBuf,
    file: File,
    hasher: Hasher,
    /// Length that was announced.
    len: u64,
    written: u64,
    /// Bytes that are reserved for it.
    charge: u64,
}

impl CacheWriter {
    /// Appends a piece.
    ///
    /// # Errors
    ///
    /// More comes than was announced, or the file system failed.
    pub(crate) fn write(&mut self, piece: &[u8]) -> io::Result<()> {
        let end = self.written.saturating_add(piece.len() as u64);
        if end > self.len {
            return Err(io::Error::other("the file has become longer"));
        }
        write_data(&self.file, self.written, piece)?;
        self.hasher.update(piece);
        self.written = end;
        Ok(())
    }

    /// Puts the file in its place among those of its identity. It replaces one with the same
    /// digest, which may be damaged. The result is `None` if the lock is not had.
    ///
    /// # Errors
    ///
    /// Less has come than was announced, or the file system failed.
    pub(crate) fn commit(mut self, is_cancelled: IsCancelled<'_>) -> io::Result<Option<Digest>> {
        if self.written != self.len {
            return Err(io::Error::other("the file has become shorter"));
        }
        let digest = std::mem::replace(&mut self.hasher, Hasher::new()).finish();
        self.file.set_permissions(fs::Permissions::from_mode(0o400))?;
        let target = self.path.with_file_name(digest.to_string());
        let Some(_held) = self.cache.lock(is_cancelled)? else {
            self.remove();
            return Ok(None);
        };
        let replaces = fs::symlink_metadata(&target).is_ok();
        fs::rename(&self.path, &target)?;
        self.path = PathBuf::new();
        if replaces {
            self.cache.forget_used()?;
        }
        Ok(Some(digest))
    }

    /// Removes the file, and leaves its room to be given back by the caller or the next search.
    /// Returns true if it is gone.
    fn remove(&mut self) -> bool {
        let removed = fs::remove_file(std::mem::take(&mut self.path));
        if let Err(error) = &removed {
            tracing::debug!(%error, "a file that was not added stays until the cache is searched");
        }
        removed.is_ok()
    }
}

impl Drop for CacheWriter {
    fn drop(&mut self) {
        if self.path.as_os_str().is_empty() {
            return;
        }
        if !self.remove() {
            return;
        }
        let given_back = self.cache.lock(&|| false).and_then(|held| match held {
            Some(_held) => self.cache.give_back(self.charge),
            None => Ok(()),
        });
        if let Err(error) = given_back {
            tracing::debug!(%error, "the room of a file that was not added stays taken until the cache is searched");
        }
    }
}

/// Opens a file for reading. Follows no link, and does not wait for a writer of a FIFO.
fn open(path: &Path) -> io::Result<File> {
    options().read(true).open(path)
}

fn options() -> fs::OpenOptions {
    let mut options = File::options();
    options.custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed());
    options
}

#[cfg(test)]
mod tests;
