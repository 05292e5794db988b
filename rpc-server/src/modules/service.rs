//! The module service of a process: imports files into the store, loads modules from it, and keeps
//! them loaded.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::{Mutex, MutexGuard};
use rpc_core::client::Digest;
use rpc_core::limits::MemoryLease;
use rpc_core::{Context, Function, Module, Result, RpcError};
use rustix::fs::OFlags;

use super::link::{has_to_be_linked, link};
use super::store::{ModuleStore, PIECE, StoreLimits};
use super::tvm_ffi::{Native, NativeLoader};
use super::{DigestList, ModuleError, worker_modules};
use crate::builtins::workspace;
use crate::config::ServeConfig;

/// Modules of one process: an extension of its sessions, if the operator allows modules.
pub(crate) struct ModuleService {
    store: ModuleStore,
    loader: Arc<dyn NativeLoader>,
    /// Loaded modules, which are never unloaded, because other code may have pointers into them.
    /// Each is charged to the session that loaded it, and so to all together, for good.
    loaded: Mutex<HashMap<Digest, Arc<ModuleSlot>>>,
    /// Imported files with their times and digests, by device and inode.
    imported: Mutex<HashMap<(u64, u64), (Fingerprint, Digest)>>,
    /// Charges for imports of modules by modules, which last as long as the process; `None` if
    /// sessions share the modules, which then import no others.
    module_imports: Option<Mutex<Vec<MemoryLease>>>,
}

/// Sessions whose modules a service has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// One session, whose process this is.
    OneSession,
    /// Several sessions.
    Sessions,
}

/// A module, once it is loaded. The lock is held while it is being loaded, so that it is loaded
/// once.
type ModuleSlot = Mutex<Option<LoadedModule>>;

struct LoadedModule {
    module: Arc<dyn Module>,
    _charge: MemoryLease,
}

/// Bytes that a loaded module is charged with beside the length of its file.
const ENTRY_COST: u64 = 1024;

/// Bytes that an import of a module by another one is charged with.
const IMPORT_COST: u64 = 256;

/// Maximum number of imports of modules by modules.
const MAX_MODULE_IMPORTS: usize = 1024;

/// Fingerprint of a file: its length, and the times of the last change of its bytes and of its
/// inode, in seconds and nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fingerprint {
    len: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// Minimum age of a change before the times of a file identify it: two changes in one tick of the
/// clock have equal times.
const SETTLED: Duration = Duration::from_secs(2);

/// Maximum number of remembered files. Further files are hashed at each import.
const MAX_IMPORTED: usize = 1024;

impl ModuleService {
    /// Opens the service of a server or a session with these settings; `None` if modules are not
    /// allowed. Blocks.
    ///
    /// # Errors
    ///
    /// The folder of the store cannot be used.
    pub(crate) fn open(
        config: &ServeConfig,
        admitted: Option<DigestList>,
        native: &Native,
        sharing: Sharing,
    ) -> Result<Option<Arc<Self>>, ModuleError> {
        if !config.allow_modules {
            return Ok(None);
        }
        let folder = config.module_store.clone().unwrap_or_else(|| config.workdir.join("modules"));
        let limits = StoreLimits {
            max_bytes: config.module_store_size.0,
            max_module_bytes: config.max_module.0,
            expiry: config.module_expiry.0,
        };
        let store = ModuleStore::open(&folder, limits, admitted.map(Arc::new))?;
        let module_imports = (sharing == Sharing::OneSession).then(Mutex::default);
        Ok(Some(Arc::new(Self { module_imports, ..Self::new(store, native.loader()) })))
    }

    /// Returns an error if the library that modules need is not there or cannot be loaded. Blocks.
    pub(crate) fn check_library(&self) -> Result<()> {
        self.loader.check_library()
    }

    pub(super) fn new(store: ModuleStore, loader: Arc<dyn NativeLoader>) -> Self {
        Self { store, loader, loaded: Mutex::default(), imported: Mutex::default(), module_imports: None }
    }

    /// Returns the service of the session, or in a worker process that of the process.
    ///
    /// # Errors
    ///
    /// [`ModuleError::Off`]; in a worker process also the errors of opening the store.
    pub(crate) fn of(context: &Context) -> Result<Arc<Self>, ModuleError> {
        match context.extension::<Self>() {
            Some(service) => Ok(service),
            None => worker_modules::service()?.ok_or(ModuleError::Off),
        }
    }

    pub(crate) fn store(&self) -> &ModuleStore {
        &self.store
    }

    /// Loads a module by its digest or by the path of a file, or returns the loaded one. Blocks.
    pub(super) fn load(&self, context: &Context, path: &str) -> Result<Arc<dyn Module>> {
        let (digest, name) = match Digest::from_module_path(path) {
            Some(digest) => {
                let digest = digest.map_err(|source| ModuleError::NoDigest { text: clip(path), source })?;
                // Shortened to the part that people compare.
                (digest, digest.module_path()[..19].to_owned())
            }
            None => (self.import(context, path)?, path.to_owned()),
        };
        let slot = lock(&self.loaded).entry(digest).or_default().clone();
        let mut loaded = lock(&slot);
        if let Some(loaded) = &*loaded {
            return Ok(Arc::clone(&loaded.module));
        }
        match self.load_stored(context, &digest, &name) {
            Ok(new) => Ok(Arc::clone(&loaded.insert(new).module)),
            // A failed load must leave no entry behind.
            Err(error) => {
                // Another thread may be waiting for this slot to fill it, or may have replaced it.
                let mut slots = lock(&self.loaded);
                if slots.get(&digest).is_some_and(|known| Arc::ptr_eq(known, &slot) && Arc::strong_count(known) == 2) {
                    slots.remove(&digest);
                }
                Err(error)
            }
        }
    }

    /// Loads a stored module, which is charged before it is loaded.
    fn load_stored(&self, context: &Context, digest: &Digest, name: &str) -> Result<LoadedModule> {
        let file = self.store.verified(digest)?;
        let len = file.metadata().map_err(RpcError::from)?.len();
        let charge = context.reserve_memory(len.saturating_add(ENTRY_COST))?;
        Ok(LoadedModule { module: self.loader.load(&file, name)?, _charge: charge })
    }

    /// Imports a file of the session's workspace, or one of the server at an absolute path, into
    /// the store. Object files of the workspace are linked first. Blocks.
    pub(crate) fn import(&self, context: &Context, path: &str) -> Result<Digest> {
        if !path.starts_with('/') {
            let workspace = workspace(context)?;
            let file = workspace.open_read(path)?;
            if has_to_be_linked(path) {
                if self.store.is_limited_to_list() {
                    return Err(ModuleError::LinkWithList { path: path.to_owned() }.into());
                }
                let limit = self.store.limits().max_module_bytes;
                let linked = link(context, &workspace, path, file.as_file(), limit)?;
                return Ok(self.import_file(path, &linked.file)?);
            }
            return Ok(self.import_file(path, file.as_file())?);
        }
        let imported = open(path).and_then(|file| self.import_file(path, &file));
        Ok(imported.map_err(|error| match error {
            // Without a list a client may run any code and read any file anyway. With a list it
            // must not learn the digests of files or whether they exist.
            ModuleError::NotListed { .. }
            | ModuleError::ReadFile { .. }
            | ModuleError::NoFile { .. }
            | ModuleError::Empty
            | ModuleError::TooLarge { .. }
                if self.store.is_limited_to_list() =>
            {
                ModuleError::NotListedHere { path: clip(path) }
            }
            error => error,
        })?)
    }

    /// Adds a module to the imports of another one, where functions that it lacks are looked up.
    pub(crate) fn add_import(&self, context: &Context, importer: &dyn Module, imported: &dyn Module) -> Result<()> {
        let Some(imports) = &self.module_imports else {
            let text = "modules import no others where sessions share them: it needs a process for each session \
                        (--isolate process), or link them into one library";
            return Err(RpcError::unsupported(text));
        };
        let mut imports = lock(imports);
        if imports.len() >= MAX_MODULE_IMPORTS {
            let (limit, count) = (MAX_MODULE_IMPORTS as u64, MAX_MODULE_IMPORTS as u64 + 1);
            return Err(RpcError::limit("imports of modules", limit, count));
        }
        let charge = context.reserve_memory(IMPORT_COST)?;
        self.loader.add_import(importer, imported)?;
        imports.push(charge);
        Ok(())
    }

    /// Returns a function of the module itself, and not of one that it imports.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`](rpc_core::ErrorKind::NotFound).
    pub(crate) fn own_function(&self, module: &dyn Module, name: &str) -> Result<Function> {
        if self.loader.has_own_function(module, name)? {
            return module.function(name);
        }
        Err(RpcError::not_found(format!("the module {} itself has no function '{name}'", module.name())))
    }

    /// Links object files of the session's workspace to a shared library there, which is not
    /// loaded. Blocks.
    pub(crate) fn link(&self, context: &Context, path: &str, library: &str) -> Result<()> {
        let workspace = workspace(context)?;
        let file = workspace.open_read(path)?;
        if !has_to_be_linked(path) {
            let text = format!("{path:?} is no object file (.o), and no archive of such files (.tar)");
            return Err(RpcError::invalid_argument(text));
        }
        if self.store.is_limited_to_list() {
            return Err(ModuleError::LinkWithList { path: path.to_owned() }.into());
        }
        let limit = self.store.limits().max_module_bytes;
        let linked = link(context, &workspace, path, file.as_file(), limit)?;
        let len = linked.file.metadata().map_err(RpcError::from)?.len();
        let mut written = workspace.begin_write(library, Some(len))?;
        let _staged = context.stage(PIECE as u64)?;
        let (mut piece, mut offset) = (vec![0; PIECE], 0);
        while offset < len {
            let count = linked.file.read_at(&mut piece, offset).map_err(RpcError::from)?;
            if count == 0 {
                break;
            }
            written.write_at(offset, &piece[..count])?;
            offset += count as u64;
        }
        Ok(written.commit()?)
    }

    fn import_file(&self, path: &str, file: &File) -> Result<Digest, ModuleError> {
        let unreadable = |source| ModuleError::ReadFile { path: path.to_owned(), source };
        let metadata = file.metadata().map_err(unreadable)?;
        let (key, stamp) = ((metadata.dev(), metadata.ino()), Fingerprint::of(&metadata));
        let known = lock(&self.imported).get(&key).filter(|(known, _)| *known == stamp).map(|(_, digest)| *digest);
        // The store may have removed it since, unless it is loaded.
        if let Some(digest) = known
            && (lock(&self.loaded).contains_key(&digest) || self.store.contains(&digest)?)
        {
            return Ok(digest);
        }
        let digest = self.store.import(path, file)?;
        let age = metadata.modified().ok().and_then(|modified| SystemTime::now().duration_since(modified).ok());
        if age.is_some_and(|age| age >= SETTLED) {
            let mut imported = lock(&self.imported);
            if imported.len() >= MAX_IMPORTED {
                imported.clear();
            }
            imported.insert(key, (stamp, digest));
        }
        Ok(digest)
    }
}

impl Fingerprint {
    fn of(metadata: &std::fs::Metadata) -> Self {
        Self {
            len: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

/// Opens a file of the server. Does not wait for a writer of a FIFO.
fn open(path: &str) -> Result<File, ModuleError> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let opened = File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path);
    opened.map_err(|source| ModuleError::ReadFile { path: clip(path), source })
}

/// Shortens a text for an error.
fn clip(text: &str) -> String {
    text.chars().take(256).collect()
}

/// Locks `mutex`. A panic of a loader leaves an empty slot, which is consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

#[cfg(test)]
mod tests;
