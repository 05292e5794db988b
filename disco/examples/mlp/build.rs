//! The build step: compiles the kernels for this machine.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;

use rpc_tvm::TvmFfi;

/// Compiles `kernels.c` into `folder`, with the compiler that `CC` names, or `cc`. The headers are
/// those that lie beside TVM-FFI's library.
pub(crate) fn kernels(folder: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let (_, library) = TvmFfi::default().version()?;
    let include = library.ancestors().nth(2).map(|package| package.join("include"));
    let include = include.filter(|include| include.join("tvm/ffi/c_api.h").is_file());
    let include = include.ok_or_else(|| format!("there are no headers beside {}", library.display()))?;
    let (source, module) = (folder.join("kernels.c"), folder.join("kernels.so"));
    std::fs::write(&source, include_str!("kernels.c"))?;
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let mut command = Command::new(&compiler);
    command.args(["-O3", "-shared", "-fPIC", "-I"]).arg(include).arg(&source).arg("-o").arg(&module);
    let status = command.status().map_err(|error| format!("cannot run {}: {error}", compiler.display()))?;
    if status.success() { Ok(module) } else { Err("the kernels could not be compiled".into()) }
}
