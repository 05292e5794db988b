//! The library of OpenCL: where it is looked for, and if it can be loaded.

use std::env;
use std::path::PathBuf;

/// Environment variable with the paths of the only libraries to load, separated by semicolons; the
/// first that can be loaded is taken. `opencl3` reads it, too.
pub(super) const LIBRARY_VARIABLE: &str = "OPENCL_DYLIB_PATH";

/// Loads the library, which is never unloaded.
///
/// # Errors
///
/// The reason for which it cannot be loaded. If the environment names libraries, no other is tried.
pub(super) fn check() -> Result<(), String> {
    let usual = if cfg!(windows) {
        "OpenCL.dll"
    } else if cfg!(target_os = "macos") {
        "/System/Library/Frameworks/OpenCL.framework/OpenCL"
    } else {
        "libOpenCL.so.1"
    };
    let named = env::var(LIBRARY_VARIABLE).ok().filter(|paths| !paths.is_empty());
    let candidates: Vec<PathBuf> = named.as_deref().unwrap_or(usual).split(';').map(PathBuf::from).collect();
    // SAFETY: loading OpenCL's library runs its initialisers, which have no special requirements.
    let library = rpc_dylib::first(&candidates, |path| unsafe { rpc_dylib::load(path) });
    match library {
        // The driver may have threads of its own.
        Ok(library) => std::mem::forget(library),
        Err(error) => return Err(format!("the library of OpenCL cannot be loaded: {error}")),
    }
    Ok(())
}
