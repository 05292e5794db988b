//! The loader `tvm_ffi`: native modules by their digest, or by the path of a file.

use std::sync::Arc;

use rpc_core::client::Digest;
use rpc_core::{LoadRequest, Module, ModuleLoader, Result};

use super::ModuleService;
use super::link::has_to_be_linked;

/// Loader of `sha256:HEX` from the store, and of files `*.so`, which it copies into the store. The
/// files are those of the session's workspace, or of the server at an absolute path. Files `*.o`
/// and `*.tar` of the workspace are linked before. A server that takes no modules has this loader,
/// too; its error names the flag to set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoreLoader;

impl ModuleLoader for StoreLoader {
    fn name(&self) -> &str {
        "tvm_ffi"
    }

    fn accepts(&self, path: &str) -> bool {
        Digest::from_module_path(path).is_some() || path.ends_with(".so") || has_to_be_linked(path)
    }

    fn load(&self, request: &LoadRequest<'_>) -> Result<Arc<dyn Module>> {
        ModuleService::of(request.context)?.load(request.context, request.path)
    }
}
