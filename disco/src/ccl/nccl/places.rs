//! Where a library of collectives for GPUs may be.

use rpc_dylib::LibrarySearch;

/// The environment variable that names the one library to load, by its path.
pub const LIBRARY_VARIABLE: &str = "DISCO_NCCL_LIBRARY";

/// What the system's own search finds NCCL and RCCL by. Runtime packages have no name without a number, and some installations no other.
const NCCL_NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
const RCCL_NAMES: [&str; 2] = ["librccl.so.1", "librccl.so"];

/// What NVIDIA's Python packages install, below the folder of an environment's packages.
const IN_SITE_PACKAGES: &str = "nvidia/nccl/lib/libnccl.so.2";

/// All places, in the order in which they are tried: the one that the environment names and no other, or else the system's libraries, those of
/// Python environments, and RCCL.
pub(super) fn all() -> LibrarySearch {
    LibrarySearch::new(LIBRARY_VARIABLE)
        .system(NCCL_NAMES)
        .active_environments(&[IN_SITE_PACKAGES.into()])
        .system(RCCL_NAMES)
}
