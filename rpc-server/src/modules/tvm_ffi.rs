//! The loader of shared libraries: TVM-FFI, or none if this build lacks it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rpc_core::{Module, Registry, Result, RpcError};
use serde::{Deserialize, Serialize};

use crate::config::ServeConfig;

/// Loader of shared libraries into this process.
pub(crate) trait NativeLoader: Send + Sync {
    /// Loads `file`, which must not change any more. `name` is the name of the module.
    fn load(&self, file: &Path, name: &str) -> Result<Arc<dyn Module>>;

    /// Returns an error if the library that modules need is not there or cannot be loaded. Loads it
    /// otherwise.
    fn check_library(&self) -> Result<()>;

    /// Registers those of these functions of the operator's libraries that are there, TVM's own
    /// too, except for names that are taken.
    fn register_named(&self, registry: &Registry, names: &[&str]) -> Result<()> {
        let _ = (registry, names);
        Ok(())
    }

    /// Adds a module to the imports of another one, where functions that it lacks are looked up.
    fn add_import(&self, importer: &dyn Module, imported: &dyn Module) -> Result<()> {
        let _ = (importer, imported);
        Err(RpcError::unsupported("modules of this loader import no others"))
    }

    /// Returns true if a module has the function itself, and not by an import.
    fn has_own_function(&self, module: &dyn Module, name: &str) -> Result<bool> {
        Ok(module.functions().iter().any(|(own, _)| own == name))
    }

    /// Loads the operator's libraries and registers their functions, except for names that are
    /// taken. Returns the number of functions.
    fn register_globals(&self, registry: &Registry) -> Result<usize>;
}

/// Libraries to load, and the library that loads them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct NativeSettings {
    /// File `libtvm_ffi.so`; `None` to search for it.
    tvm_ffi: Option<PathBuf>,
    /// Libraries that modules and `libraries` depend on.
    runtimes: Vec<PathBuf>,
    /// The operator's libraries (`--library`).
    libraries: Vec<PathBuf>,
    /// True if clients may load modules, and so call any function.
    allows_modules: bool,
}

/// Functions of TVM's runtime that programs call which measure what they have uploaded. They trust
/// what they are given, and so are for clients that may load modules.
pub(crate) const FOR_MEASUREMENTS: [&str; 3] =
    ["cache_flush_cpu_non_first_arg", "tvm.contrib.random.random_fill", "tvm.contrib.random.random_fill_for_measure"];

/// Libraries and loader of a server. Cheap to clone; nothing is loaded before its first use.
#[derive(Clone)]
pub(crate) struct Native {
    settings: NativeSettings,
    loader: Arc<dyn NativeLoader>,
}

impl Native {
    pub(crate) fn new(config: &ServeConfig) -> Self {
        // The system searches its own folders for a name without a slash, so paths are made
        // absolute.
        let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
        Self::with(NativeSettings {
            tvm_ffi: config.tvm_ffi.as_ref().map(absolute),
            runtimes: config.runtime_library.iter().map(absolute).collect(),
            libraries: config.library.iter().map(absolute).collect(),
            allows_modules: config.allow_modules,
        })
    }

    pub(super) fn with(settings: NativeSettings) -> Self {
        let loader = with_loader::loader(&settings);
        Self { settings, loader }
    }

    pub(super) fn settings(&self) -> &NativeSettings {
        &self.settings
    }

    /// Returns the files of the operator's libraries, for messages.
    pub(super) fn libraries(&self) -> String {
        let files = self.settings.runtimes.iter().chain(&self.settings.libraries);
        let names: Vec<_> = files.map(|file| file.display().to_string()).collect();
        names.join(", ")
    }

    pub(super) fn loader(&self) -> Arc<dyn NativeLoader> {
        self.loader.clone()
    }

    /// Loads the operator's libraries into this process, if there are any, and adds their functions
    /// to `registry`, except for names that the program has taken. Blocks.
    ///
    /// # Errors
    ///
    /// A library cannot be loaded.
    pub(crate) fn offer_libraries(&self, registry: &Registry) -> Result<()> {
        if self.settings.libraries.is_empty() && self.settings.runtimes.is_empty() {
            return Ok(());
        }
        let mut loaded = self.loader.register_globals(registry);
        if self.settings.allows_modules && loaded.is_ok() {
            loaded = self.loader.register_named(registry, &FOR_MEASUREMENTS).and(loaded);
        }
        let count = loaded.map_err(|error| error.context(format_args!("loading {}", self.libraries())))?;
        tracing::debug!(count, libraries = self.libraries(), "functions of libraries");
        Ok(())
    }
}

#[cfg(all(feature = "tvm-ffi", target_pointer_width = "64"))]
mod with_loader {
    use std::path::Path;
    use std::sync::Arc;

    use rpc_core::{Module, Registry, Result};
    use rpc_tvm::{TvmFfi, TvmFfiOptions};

    use super::{NativeLoader, NativeSettings};

    pub(super) fn loader(settings: &NativeSettings) -> Arc<dyn NativeLoader> {
        let NativeSettings { tvm_ffi: library, runtimes, libraries, .. } = settings.clone();
        Arc::new(TvmFfi::new(TvmFfiOptions { library, runtimes, libraries }))
    }

    impl NativeLoader for TvmFfi {
        fn load(&self, file: &Path, name: &str) -> Result<Arc<dyn Module>> {
            Self::load(self, file, name)
        }

        fn register_named(&self, registry: &Registry, names: &[&str]) -> Result<()> {
            Self::register_named(self, registry, names)
        }

        fn check_library(&self) -> Result<()> {
            self.version().map(drop)
        }

        fn add_import(&self, importer: &dyn Module, imported: &dyn Module) -> Result<()> {
            Self::add_import(self, importer, imported)
        }

        fn has_own_function(&self, module: &dyn Module, name: &str) -> Result<bool> {
            Self::has_own_function(self, module, name)
        }

        fn register_globals(&self, registry: &Registry) -> Result<usize> {
            Self::register_globals(self, registry)
        }
    }
}

/// Replacement in builds without the loader. [`ServeConfig::check`] refuses settings that need one.
#[cfg(not(all(feature = "tvm-ffi", target_pointer_width = "64")))]
mod with_loader {
    use std::path::Path;
    use std::sync::Arc;

    use rpc_core::{Module, Registry, Result, RpcError};

    use super::{NativeLoader, NativeSettings};
    use crate::config::ConfigError;

    pub(super) fn loader(_: &NativeSettings) -> Arc<dyn NativeLoader> {
        Arc::new(Absent)
    }

    struct Absent;

    impl NativeLoader for Absent {
        fn load(&self, _: &Path, _: &str) -> Result<Arc<dyn Module>> {
            Err(RpcError::unsupported(ConfigError::NoTvmFfi.to_string()))
        }

        fn check_library(&self) -> Result<()> {
            Err(RpcError::unsupported(ConfigError::NoTvmFfi.to_string()))
        }

        fn register_globals(&self, _: &Registry) -> Result<usize> {
            Err(RpcError::unsupported(ConfigError::NoTvmFfi.to_string()))
        }
    }
}
