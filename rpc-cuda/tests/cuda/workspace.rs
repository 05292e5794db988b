//! A folder as a session's workspace.

use std::any::Any;
use std::path::PathBuf;
use std::sync::Arc;

use rpc_core::{Result, RpcError, WorkspaceFiles};

pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self(tempfile::tempdir().unwrap()))
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.0.path().join(name), bytes).unwrap();
    }
}

impl WorkspaceFiles for Folder {
    fn resolve(&self, path: &str) -> Result<PathBuf> {
        if path.contains("..") {
            return Err(RpcError::invalid_argument("the path leaves the workspace"));
        }
        Ok(self.0.path().join(path))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
