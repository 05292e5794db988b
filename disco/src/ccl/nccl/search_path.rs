//! Search path of the NCCL library.

use rpc_dylib::LibrarySearch;

/// The environment variable that names the one library to load, by its path.
pub const LIBRARY_VARIABLE: &str = "DISCO_NCCL_LIBRARY";

/// File names of NCCL for the system's own search. Runtime packages have only the name with a
/// number, and some installations only the one without.
const NCCL_NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// Path of the library in NVIDIA's Python packages, below the folder of an environment's packages.
const IN_SITE_PACKAGES: &str = "nvidia/nccl/lib/libnccl.so.2";

/// Returns the places in the order in which they are tried: only the one in [`LIBRARY_VARIABLE`] if
/// that is set, and otherwise the system's libraries and those of Python environments.
pub(super) fn all() -> LibrarySearch {
    LibrarySearch::new(LIBRARY_VARIABLE).system(NCCL_NAMES).active_environments(&[IN_SITE_PACKAGES.into()])
}
