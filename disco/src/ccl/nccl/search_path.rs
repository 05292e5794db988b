//! Search path of the library of collectives for GPUs.

use rpc_dylib::LibrarySearch;

/// The environment variable that names the one library to load, by its path.
pub const LIBRARY_VARIABLE: &str = "DISCO_NCCL_LIBRARY";

/// Names by which the system's own search finds NCCL. Runtime packages have no name without a
/// number, and some installations no other.
const NCCL_NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// Path of the library in NVIDIA's Python packages, below the folder of an environment's packages.
const IN_SITE_PACKAGES: &str = "nvidia/nccl/lib/libnccl.so.2";

/// Returns all places, in the order in which they are tried: the one that the environment names and
/// no other, or else the system's libraries and those of Python environments.
pub(super) fn all() -> LibrarySearch {
    LibrarySearch::new(LIBRARY_VARIABLE).system(NCCL_NAMES).active_environments(&[IN_SITE_PACKAGES.into()])
}
