//! Where `libtvm_ffi.so` is.

use std::env;
use std::path::{Path, PathBuf};

use rpc_core::{Result, RpcError};

/// The library's file.
const NAME: &str = "libtvm_ffi.so";

/// The folder in which the package `apache-tvm-ffi` keeps it, below the folder of a Python's packages.
const IN_PACKAGES: &str = "tvm_ffi/lib";

/// Programs by which a folder on the `PATH` is known as that of a Python environment.
const PROGRAMS: [&str; 2] = ["tvm-ffi-config", "python3"];

/// The environment variable that names it.
pub(super) const VARIABLE: &str = "TVM_FFI_LIBRARY";

/// The library: the one that is `given`, as a file or as the folder that it lies in, or that `TVM_FFI_LIBRARY` names; or else
/// that of a Python environment, the active one first; or else one that the system's loader finds by its name.
///
/// # Errors
///
/// [`ErrorKind::NotFound`](rpc_core::ErrorKind::NotFound), with all places that were looked at.
pub(super) fn find(given: Option<&Path>) -> Result<PathBuf> {
    let named = rpc_dylib::named_by(VARIABLE);
    if let Some(path) = given.or(named.as_deref()) {
        let path = if path.is_dir() { path.join(NAME) } else { path.to_owned() };
        let absent =
            || RpcError::not_found(format!("{} is not there: 'pip install apache-tvm-ffi' brings it", path.display()));
        return if path.is_file() { Ok(path.clone()) } else { Err(absent()) };
    }
    let mut looked = Vec::new();
    for prefix in rpc_dylib::python_prefixes(&PROGRAMS, |name| env::var_os(name)) {
        let found = rpc_dylib::files_in_python(&prefix, &[Path::new(IN_PACKAGES).join(NAME)]);
        if let Some(library) = found.into_iter().find(|library| library.is_file()) {
            return Ok(library);
        }
        looked.push(prefix);
    }
    let plain = PathBuf::from(NAME);
    // SAFETY: a library of that name is what is asked for, and it answers for what it does when it is loaded.
    match unsafe { rpc_dylib::load(&plain) } {
        Ok(found) => {
            // `Api` opens it again, and keeps it.
            drop(found);
            Ok(plain)
        }
        Err(reason) => Err(absent(&looked, &reason)),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_named_and_not_there_is_told_with_the_way_to_get_it() {
        let error = find(Some(Path::new("/nonexistent/libtvm_ffi.so"))).unwrap_err();
        assert_eq!(error.kind(), rpc_core::ErrorKind::NotFound);
        assert!(error.message().contains("/nonexistent/libtvm_ffi.so"), "{error}");
        assert!(error.message().contains("pip install apache-tvm-ffi"), "{error}");
    }
}
