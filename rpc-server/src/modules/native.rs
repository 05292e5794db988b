//! The loader of native code, as this build has it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rpc_core::{Module, Registry, Result};
use serde::{Deserialize, Serialize};

use crate::config::ServeConfig;

/// Loads shared libraries into this process.
pub(crate) trait NativeLoader: Send + Sync {
    /// Loads `file`, which nobody changes any more; `name` is what the module calls itself.
    fn load(&self, file: &Path, name: &str) -> Result<Arc<dyn Module>>;

    /// Loads the libraries of the operator, and registers the functions that they bring, unless their names are taken. The
    /// result is how many.
    fn register_globals(&self, registry: &Registry) -> Result<usize>;
}

/// What is to be loaded, and by what.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct NativeSettings {
    /// `libtvm_ffi.so`; `None` for wherever it is found.
    tvm_ffi: Option<PathBuf>,
    /// What these and modules need.
    runtimes: Vec<PathBuf>,
    /// The libraries of the operator.
    libraries: Vec<PathBuf>,
}

/// The libraries and the loader of a server. Cheap to clone; loads nothing until something is wanted.
#[derive(Clone)]
pub(crate) struct Native {
    settings: NativeSettings,
    loader: Arc<dyn NativeLoader>,
}

impl Native {
    pub(crate) fn new(config: &ServeConfig) -> Self {
        // What is no path is a name, which the system would look for in folders of its own.
        let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
        Self::with(NativeSettings {
            tvm_ffi: config.tvm_ffi.as_ref().map(absolute),
            runtimes: config.runtime_library.iter().map(absolute).collect(),
            libraries: config.library.iter().map(absolute).collect(),
        })
    }

    pub(super) fn with(settings: NativeSettings) -> Self {
        let loader = with_loader::loader(&settings);
        Self { settings, loader }
    }

    pub(super) fn settings(&self) -> &NativeSettings {
        &self.settings
    }

    /// The files of the operator's libraries, for messages.
    pub(super) fn libraries(&self) -> String {
        let files = self.settings.runtimes.iter().chain(&self.settings.libraries);
        let names: Vec<_> = files.map(|file| file.display().to_string()).collect();
        names.join(", ")
    }

    pub(super) fn loader(&self) -> Arc<dyn NativeLoader> {
        self.loader.clone()
    }

    /// Loads the libraries of the operator into this process, if there are any, and offers their functions beside those of
    /// `registry`. What the program offers itself keeps its names. Blocks.
    ///
    /// # Errors
    ///
    /// What cannot be loaded, and why.
    pub(crate) fn offer_libraries(&self, registry: &Registry) -> Result<()> {
        if self.settings.libraries.is_empty() && self.settings.runtimes.is_empty() {
            return Ok(());
        }
        let loaded = self.loader.register_globals(registry);
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
        let NativeSettings { tvm_ffi: library, runtimes, libraries } = settings.clone();
        Arc::new(TvmFfi::new(TvmFfiOptions { library, runtimes, libraries }))
    }

    impl NativeLoader for TvmFfi {
        fn load(&self, file: &Path, name: &str) -> Result<Arc<dyn Module>> {
            Self::load(self, file, name)
        }

        fn register_globals(&self, registry: &Registry) -> Result<usize> {
            Self::register_globals(self, registry)
        }
    }
}

/// A configuration that asks for more has been refused before.
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

        fn register_globals(&self, _: &Registry) -> Result<usize> {
            Err(RpcError::unsupported(ConfigError::NoTvmFfi.to_string()))
        }
    }
}
