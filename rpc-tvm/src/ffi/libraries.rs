//! Libraries of the process: `libtvm_ffi.so`, runtimes, and libraries of functions, each loaded
//! once and never unloaded.

use std::collections::{BTreeSet, HashSet};
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use parking_lot::Mutex;

use super::api::{Api, Callbacks};
use super::bindings::Bindings;
use super::options::TvmFfiOptions;
use super::{allocator, callback, locate_library};
use rpc_core::error::{ErrorKind, Result, RpcError};
use rpc_dylib::reason;

/// The loaded libraries. The first `libtvm_ffi.so` serves the whole process: two would not know
/// each other's objects.
static LOADED: Mutex<Option<Loaded>> = Mutex::new(None);

struct Loaded {
    api: &'static Api,
    /// Paths of opened runtimes and libraries of functions.
    opened: HashSet<PathBuf>,
    /// Global functions that libraries of functions have registered.
    offered: BTreeSet<String>,
}

/// Loads the library from the path in the options or else from where it is found, and the other
/// libraries of the options, unless that has been done.
pub(super) fn load(options: &TvmFfiOptions) -> Result<&'static Api> {
    with_loaded(options, |loaded| loaded.api)
}

/// Loads like [`load`], and returns the names of the global functions that libraries have
/// registered.
pub(super) fn offered(options: &TvmFfiOptions) -> Result<(&'static Api, Vec<String>)> {
    with_loaded(options, |loaded| (loaded.api, loaded.offered.iter().cloned().collect()))
}

fn with_loaded<T>(options: &TvmFfiOptions, get: impl FnOnce(&Loaded) -> T) -> Result<T> {
    let mut loaded_libraries = LOADED.lock();
    let loaded = match &mut *loaded_libraries {
        Some(loaded) => loaded,
        None => {
            let path = locate_library::find(options.library.as_deref())?;
            let callbacks = Callbacks { allocate_tensor: allocator::allocate, create_function: callback::create };
            let api = Api::new(Bindings::find(open_global(&path)?, &path)?, callbacks)?;
            loaded_libraries.insert(Loaded { api, opened: HashSet::new(), offered: BTreeSet::new() })
        }
    };
    for path in &options.runtimes {
        loaded.open(path)?;
    }
    for path in &options.libraries {
        if loaded.opened.contains(path) {
            continue;
        }
        let before: HashSet<_> = loaded.api.global_names()?.into_iter().collect();
        loaded.open(path)?;
        let brought = loaded.api.global_names()?.into_iter().filter(|name| !before.contains(name));
        let (of_tvm, offered): (Vec<_>, Vec<_>) = brought.partition(|name| is_of_tvm(name));
        if !of_tvm.is_empty() {
            let (path, count) = (path.display(), of_tvm.len());
            tracing::info!(%path, count, "functions that a library registers under TVM's own names are not offered");
        }
        loaded.offered.extend(offered);
    }
    Ok(get(loaded))
}

impl Loaded {
    /// Opens a library, unless that has been done.
    fn open(&mut self, path: &Path) -> Result<()> {
        if !self.opened.contains(path) {
            open_global(path)?;
            self.opened.insert(path.to_owned());
        }
        Ok(())
    }
}

/// Returns true if a global function is TVM's own. Some of them start programs, or read and write
/// files. They come with every library that needs TVM's runtime, and are not meant to be offered.
fn is_of_tvm(name: &str) -> bool {
    let first = name.split('.').next().unwrap_or(name);
    name.starts_with("__")
        || [
            "arith",
            "cache_flush_cpu_non_first_arg",
            "device_api",
            "disco",
            "ffi",
            "ir",
            "meta_schedule",
            "node",
            "relax",
            "rpc",
            "runtime",
            "s_tir",
            "script",
            "support",
            "target",
            "te",
            "testing",
            "tir",
            "tirx",
            "topi",
            "tvm",
            "vm",
        ]
        .contains(&first)
}

/// Opens a library for good, with its symbols visible to all others.
fn open_global(path: &Path) -> Result<&'static Library> {
    // SAFETY: the operator has named the library, and vouches for its initialisers.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
    let library = library.map_err(|error| {
        let path = path.display();
        RpcError::new(ErrorKind::NotFound, format!("cannot load the library {path}: {}", reason(&error)))
    })?;
    // Never closed, because the last pointer into it cannot be known.
    Ok(Box::leak(Box::new(library)))
}
