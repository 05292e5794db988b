//! Search for `libtvm_ffi.so`.

use std::env;
use std::path::{Path, PathBuf};

use rpc_core::{Result, RpcError};

/// File name of the library.
const NAME: &str = "libtvm_ffi.so";

/// Folder of the library in the package `apache-tvm-ffi`, below the folder of a Python's packages.
const IN_PACKAGES: &str = "tvm_ffi/lib";

/// Programs that mark a folder on the `PATH` as that of a Python environment.
const PROGRAMS: [&str; 2] = ["tvm-ffi-config", "python3"];

/// Environment variable with the path of the library.
pub(super) const VARIABLE: &str = "TVM_FFI_LIBRARY";

/// Returns the path of the library: the `given` one, a file or its folder, or the one in
/// `TVM_FFI_LIBRARY`; or else that of a Python environment, the active one first; or else one that
/// the system's loader finds by its name.
///
/// # Errors
///
/// [`ErrorKind::NotFound`](rpc_core::ErrorKind::NotFound), with all places that were searched.
pub(super) fn find(given: Option<&Path>) -> Result<PathBuf> {
    let named = rpc_dylib::named_by(VARIABLE);
    if let Some(path) = given.or(named.as_deref()) {
        let path = if path.is_dir() { path.join(NAME) } else { path.to_owned() };
        let absent = || {
            RpcError::not_found(format!(
                "{} does not exist: install it with 'pip install apache-tvm-ffi'",
                path.display()
            ))
        };
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
    // SAFETY: a library of that name is requested, and vouches for its initialisers.
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
        "{NAME} was not found: searched {places} and the system's library folders ({reason}); install it with \
         'pip install apache-tvm-ffi', or set --tvm-ffi or {VARIABLE} to its path"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_for_a_missing_library_says_how_to_install_it() {
        let error = find(Some(Path::new("/nonexistent/libtvm_ffi.so"))).unwrap_err();
        assert_eq!(error.kind(), rpc_core::ErrorKind::NotFound);
        assert!(error.message().contains("/nonexistent/libtvm_ffi.so"), "{error}");
        assert!(error.message().contains("pip install apache-tvm-ffi"), "{error}");
    }
}
