//! NVIDIA's libraries: their names and paths, and loading them.

use std::ffi::c_int;
use std::path::{Path, PathBuf};

use libloading::Library;
use rpc_dylib::{LibrarySearch, LoadFailures};

/// Environment variable with the path of the only driver to load.
pub(super) const DRIVER_VARIABLE: &str = "RPC_CUDA_DRIVER_LIBRARY";

/// Environment variable with the path of the only cuBLAS to load.
pub(super) const BLAS_VARIABLE: &str = "RPC_CUDA_BLAS_LIBRARY";

/// Returns the candidates for the driver: only the one that the environment names, or else the
/// system's. The name with a number comes first, because the toolkit has a stub library for linkers
/// under the other name, which may be in the search path.
pub(super) fn driver() -> LibrarySearch {
    let usual = if cfg!(windows) { &["nvcuda.dll"][..] } else { &["libcuda.so.1", "libcuda.so"] };
    LibrarySearch::new(DRIVER_VARIABLE).system(usual)
}

/// Returns the candidates for cuBLAS, for CUDA up to the major version `newest`: only the one that
/// the environment names, or else the system's, the newest first, and then those of Python
/// environments.
pub(super) fn cublas(newest: c_int) -> LibrarySearch {
    LibrarySearch::new(BLAS_VARIABLE).system(cublas_names(newest)).active_environments(&cublas_in_python(newest))
}

/// Loads the first candidate that can be loaded.
///
/// # Errors
///
/// The system's errors for candidates that exist, or that are named by a path. Others were just not
/// found.
pub(super) fn load(search: &LibrarySearch) -> Result<Library, LoadFailures> {
    search.first(|path| {
        // The part of cuBLAS that the other one needs. The system would not find it outside of its
        // own folders.
        let beside = beside(path).filter(|beside| beside.exists());
        // SAFETY: loading NVIDIA's libraries runs their initialisers, which have no special
        // requirements.
        let (beside, library) =
            unsafe { (beside.and_then(|beside| rpc_dylib::load(&beside).ok()), rpc_dylib::load(path)?) };
        // Never unloaded, like the library that needs it.
        std::mem::forget(beside);
        Ok(library)
    })
}

/// Returns the path of `libcublasLt` in the folder of this `libcublas`, if it is one.
fn beside(path: &Path) -> Option<PathBuf> {
    let version = path.file_name()?.to_str()?.strip_prefix("libcublas.")?;
    let folder = path.parent().filter(|folder| *folder != Path::new(""))?;
    Some(folder.join(format!("libcublasLt.{version}")))
}

/// Returns the possible names of cuBLAS, the newest first.
fn cublas_names(newest: c_int) -> Vec<PathBuf> {
    if cfg!(windows) {
        return versions(newest).map(|version| format!("cublas64_{version}.dll").into()).collect();
    }
    let numbered = versions(newest).map(|version| format!("libcublas.so.{version}"));
    numbered.chain(["libcublas.so".to_owned()]).map(PathBuf::from).collect()
}

/// Returns the paths of NVIDIA's packages below a folder of Python packages, the newest first.
fn cublas_in_python(newest: c_int) -> Vec<PathBuf> {
    let of_version = |version: c_int| {
        // From CUDA 13 on, all libraries are in one folder.
        let folder = if version < 13 { "cublas".to_owned() } else { format!("cu{version}") };
        format!("nvidia/{folder}/lib/libcublas.so.{version}").into()
    };
    versions(newest).map(of_version).collect()
}

/// Returns the major versions of CUDA whose cuBLAS can be used, the newest first.
fn versions(newest: c_int) -> impl Iterator<Item = c_int> {
    (OLDEST_CUBLAS..=newest.max(OLDEST_CUBLAS)).rev()
}

/// First major version with `cublasGemmEx` and these constants.
const OLDEST_CUBLAS: c_int = 11;

#[cfg(all(test, not(windows)))]
mod tests {
    use super::*;

    #[test]
    fn the_newest_library_that_the_driver_can_run_comes_first() {
        let names =
            |newest| cublas_names(newest).into_iter().map(|name| name.display().to_string()).collect::<Vec<_>>();
        assert_eq!(names(12), ["libcublas.so.12", "libcublas.so.11", "libcublas.so"]);
        assert_eq!(names(0), ["libcublas.so.11", "libcublas.so"]);
    }

    #[test]
    fn a_python_environment_has_the_libraries_of_nvidias_packages() {
        let folder = tempfile::tempdir().unwrap();
        let packages = folder.path().join("lib/python3.12/site-packages/nvidia");
        let [twelve, thirteen] = ["cublas/lib/libcublas.so.12", "cu13/lib/libcublas.so.13"].map(|at| packages.join(at));
        for library in [&twelve, &thirteen] {
            std::fs::create_dir_all(library.parent().unwrap()).unwrap();
            std::fs::write(library, "").unwrap();
        }
        let found = |newest| rpc_dylib::files_in_python(folder.path(), &cublas_in_python(newest));
        assert_eq!(found(13), [thirteen, twelve.clone()]);
        assert_eq!(found(12), std::slice::from_ref(&twelve));
        assert!(found(11).is_empty());
        assert_eq!(beside(&twelve).unwrap(), packages.join("cublas/lib/libcublasLt.so.12"));
        assert_eq!(beside(Path::new("libcublas.so.12")), None);
        // A library that exists and cannot be loaded is reported.
        let search = LibrarySearch::new("A_VARIABLE_THAT_IS_NEVER_SET").system([twelve.clone()]);
        let error = load(&search).unwrap_err().to_string();
        assert!(error.starts_with(&format!("none of {} was found; ", twelve.display())), "{error}");
    }

    #[test]
    fn the_driver_comes_before_the_stub_for_linkers() {
        if rpc_dylib::named_by(DRIVER_VARIABLE).is_none() {
            assert_eq!(driver().candidates(), ["libcuda.so.1", "libcuda.so"].map(PathBuf::from));
        }
    }
}
