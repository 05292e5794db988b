//! Options of the loader.

use std::path::PathBuf;

/// Options of [`TvmFfi`](crate::TvmFfi): the libraries to load.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TvmFfiOptions {
    /// Path of `libtvm_ffi.so`, or its folder. By default the path in the environment variable
    /// `TVM_FFI_LIBRARY`, or else that of the first Python environment with the package
    /// `apache-tvm-ffi` (that of `VIRTUAL_ENV`, of `CONDA_PREFIX`, those on the `PATH`, the user's,
    /// the system's), or else one in the system's library folders.
    pub library: Option<PathBuf>,
    /// Libraries that are loaded first, in this order, with their symbols visible to all others:
    /// runtimes that modules need, such as TVM's `libtvm_runtime.so`. The functions that they
    /// register are for modules alone.
    pub runtimes: Vec<PathBuf>,
    /// Libraries of functions, which are loaded next, in the same way.
    /// [`TvmFfi::register_globals`](crate::TvmFfi::register_globals) registers their functions.
    pub libraries: Vec<PathBuf>,
}
