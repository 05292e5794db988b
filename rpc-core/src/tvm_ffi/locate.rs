//! Where `libtvm_ffi.so` is.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::error::{Result, RpcError};
use crate::shared_libraries::{self, reason};

/// The library's file.
const NAME: &str = "libtvm_ffi.so";

/// The environment variable that names it.
pub(super) const VARIABLE: &str = "TVM_FFI_LIBRARY";

/// The library: the one that is `given`, as a file or as the folder that it lies in, or that `TVM_FFI_LIBRARY` names; or else
/// that of a Python environment, the active one first; or else one that the system's loader finds by its name.
///
/// # Errors
///
/// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound), with all places that were looked at.
pub(super) fn find(given: Option<&Path>) -> Result<PathBuf> {
    let named = env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    if let Some(path) = given.or(named.as_deref()) {
        let path = if path.is_dir() { path.join(NAME) } else { path.to_owned() };
        let absent =
            || RpcError::not_found(format!("{} is not there: 'pip install apache-tvm-ffi' brings it", path.display()));
        return if path.is_file() { Ok(path.clone()) } else { Err(absent()) };
    }
    let mut looked = Vec::new();
    for prefix in prefixes(|name| env::var_os(name)) {
        for library in libraries_in(&prefix) {
            if library.is_file() {
                return Ok(library);
            }
        }
        looked.push(prefix);
    }
    let plain = PathBuf::from(NAME);
    // SAFETY: a library of that name is what is asked for, and it answers for what it does when it is loaded.
    match unsafe { libloading::os::unix::Library::new(&plain) } {
        Ok(found) => {
            // `Api` opens it again, and keeps it.
            drop(found);
            Ok(plain)
        }
        Err(error) => Err(absent(&looked, &reason(&error))),
    }
}

fn absent(looked: &[PathBuf], reason: &str) -> RpcError {
    let looked: Vec<_> = looked.iter().map(|path| path.display().to_string()).collect();
    let places = if looked.is_empty() { "no Python environment was found".to_owned() } else { looked.join(", ") };
    RpcError::not_found(format!(
        "{NAME} was not found: looked in {places}, and where the system has its libraries ({reason}); 'pip install apache-tvm-ffi' \
         brings it; name it with --tvm-ffi or {VARIABLE} if it lies elsewhere"
    ))
}

/// Where Python packages may lie: below an active environment, beside the interpreters and tools on the path, in the user's
/// folder, in the system's.
fn prefixes(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let mut prefixes = Vec::new();
    let mut add = |prefix: PathBuf| {
        if !prefixes.contains(&prefix) {
            prefixes.push(prefix);
        }
    };
    shared_libraries::environments(&variable).into_iter().for_each(&mut add);
    for folder in variable("PATH").iter().flat_map(env::split_paths) {
        let has_python = ["tvm-ffi-config", "python3"].iter().any(|name| folder.join(name).is_file());
        if let Some(prefix) = folder.parent().filter(|_| has_python && folder.is_absolute()) {
            add(prefix.to_owned());
        }
    }
    variable("HOME").map(|home| PathBuf::from(home).join(".local")).into_iter().for_each(&mut add);
    ["/usr/local", "/usr"].map(PathBuf::from).into_iter().for_each(&mut add);
    prefixes
}

/// Where the package `apache-tvm-ffi` keeps the library in the Pythons of `prefix`, the newest first.
fn libraries_in(prefix: &Path) -> Vec<PathBuf> {
    let packages = shared_libraries::python_packages(prefix).into_iter();
    packages.map(|packages| packages.join("tvm_ffi/lib").join(NAME)).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_active_environment_comes_first_and_the_newest_python_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        for (prefix, python) in [("venv", "python3.9"), ("venv", "python3.11"), ("tools", "python3.12")] {
            let lib = root.join(prefix).join("lib").join(python).join("site-packages/tvm_ffi/lib");
            fs::create_dir_all(&lib).unwrap();
            fs::write(lib.join(NAME), "").unwrap();
        }
        fs::create_dir_all(root.join("tools/bin")).unwrap();
        fs::write(root.join("tools/bin/tvm-ffi-config"), "").unwrap();
        let variable = |name: &str| match name {
            "VIRTUAL_ENV" => Some(root.join("venv").into_os_string()),
            "PATH" => Some(env::join_paths([root.join("empty/bin"), root.join("tools/bin")]).unwrap()),
            _ => None,
        };
        let prefixes = prefixes(variable);
        assert_eq!(prefixes[..2], [root.join("venv"), root.join("tools")]);
        let found: Vec<_> = libraries_in(&prefixes[0]).into_iter().filter(|library| library.is_file()).collect();
        let expected = ["python3.11", "python3.9"]
            .map(|python| root.join("venv/lib").join(python).join("site-packages/tvm_ffi/lib").join(NAME));
        assert_eq!(found, expected);
    }

    #[test]
    fn a_library_that_is_named_and_not_there_is_told_with_the_way_to_get_it() {
        let error = find(Some(Path::new("/nonexistent/libtvm_ffi.so"))).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::NotFound);
        assert!(error.message().contains("/nonexistent/libtvm_ffi.so"), "{error}");
        assert!(error.message().contains("pip install apache-tvm-ffi"), "{error}");
    }
}
