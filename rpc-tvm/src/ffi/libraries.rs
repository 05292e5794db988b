//! The libraries of the process: `libtvm_ffi.so`, runtimes, and libraries of functions, each loaded once and for good.

use std::collections::{BTreeSet, HashSet};
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use parking_lot::Mutex;

use super::api::Api;
use super::{TvmFfiOptions, locate};
use rpc_core::error::{ErrorKind, Result, RpcError};
use rpc_dylib::reason;

/// What has been loaded. The first library serves the process: two would not know each other's objects.
static LOADED: Mutex<Option<Loaded>> = Mutex::new(None);

struct Loaded {
    api: &'static Api,
    /// Runtimes and libraries of functions.
    opened: HashSet<PathBuf>,
    /// The global functions that libraries of functions have brought.
    offered: BTreeSet<String>,
}

/// Loads the library, from where the options say or else from where it is found, and what goes with it, unless that has
/// been done.
pub(super) fn load(options: &TvmFfiOptions) -> Result<&'static Api> {
    with_loaded(options, |loaded| loaded.api)
}

/// As [`load`], and the names of the global functions that libraries have brought.
pub(super) fn offered(options: &TvmFfiOptions) -> Result<(&'static Api, Vec<String>)> {
    with_loaded(options, |loaded| (loaded.api, loaded.offered.iter().cloned().collect()))
}

fn with_loaded<T>(options: &TvmFfiOptions, get: impl FnOnce(&Loaded) -> T) -> Result<T> {
    let mut place = LOADED.lock();
    let loaded = match &mut *place {
        Some(loaded) => loaded,
        None => {
            let path = locate::find(options.library.as_deref())?;
            let api = Api::of(open_global(&path)?, &path)?;
            place.insert(Loaded { api, opened: HashSet::new(), offered: BTreeSet::new() })
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
            tracing::info!(%path, count, "functions that a library brings under names of TVM's own are not offered");
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

/// Whether a global function is TVM's own. Some of them start programs, and read and write files: they come with every
/// library that needs TVM's runtime, and nobody has meant to offer them.
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

/// Opens a library for good, with its symbols for everybody.
fn open_global(path: &Path) -> Result<&'static Library> {
    // SAFETY: whoever runs the program has named the library, and answers for what it does when it is loaded.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
    let library = library.map_err(|error| {
        let path = path.display();
        RpcError::new(ErrorKind::NotFound, format!("cannot load the library {path}: {}", reason(&error)))
    })?;
    // Nobody knows when the last pointer into it is gone.
    Ok(Box::leak(Box::new(library)))
}
