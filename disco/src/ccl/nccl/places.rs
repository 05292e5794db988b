//! Where a library of collectives for GPUs may be.

use std::env;
use std::path::{Path, PathBuf};

use rpc_core::shared_libraries;

/// The environment variable that names the one library to load, by its path.
pub const LIBRARY_VARIABLE: &str = "DISCO_NCCL_LIBRARY";

/// What the system's own search finds NCCL and RCCL by. Runtime packages have no name without a number, and some installations no other.
const NCCL_NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
const RCCL_NAMES: [&str; 2] = ["librccl.so.1", "librccl.so"];

/// What NVIDIA's Python packages install, below the folder of an environment's packages.
const IN_SITE_PACKAGES: &str = "nvidia/nccl/lib/libnccl.so.2";

/// All places, in the order in which they are tried: the one that the environment names and no other, or else the system's libraries, those of
/// Python environments, and RCCL.
pub(super) fn all() -> Vec<PathBuf> {
    if let Some(path) = env::var_os(LIBRARY_VARIABLE).filter(|path| !path.is_empty()) {
        return vec![path.into()];
    }
    let python = shared_libraries::active_environments();
    let python = python.iter().flat_map(|environment| in_python(environment));
    NCCL_NAMES.into_iter().map(PathBuf::from).chain(python).chain(RCCL_NAMES.map(PathBuf::from)).collect()
}

/// The libraries that a Python environment has, of its newest Python first.
fn in_python(environment: &Path) -> Vec<PathBuf> {
    let packages = shared_libraries::python_packages(environment).into_iter();
    packages.map(|packages| packages.join(IN_SITE_PACKAGES)).filter(|library| library.exists()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_python_environment_is_searched_newest_first() {
        let folder = tempfile::tempdir().unwrap();
        let lib = folder.path().join("lib");
        for python in ["python3.9", "python3.12", "python3.13", "perl5"] {
            let packages = lib.join(python).join("site-packages");
            std::fs::create_dir_all(packages.join("nvidia/nccl/lib")).unwrap();
            if python != "python3.13" {
                std::fs::write(packages.join(IN_SITE_PACKAGES), "").unwrap();
            }
        }
        let found = in_python(folder.path());
        let expected =
            ["python3.12", "python3.9"].map(|python| lib.join(python).join("site-packages").join(IN_SITE_PACKAGES));
        assert_eq!(found, expected);
        assert!(in_python(&lib).is_empty());
    }
}
