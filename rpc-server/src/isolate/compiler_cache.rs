//! Folder of one process for what compilers of drivers keep, such as PoCL's kernels.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::Command;

use crate::workspace::WorkspaceRoot;

/// A folder that no other process is told of, so that no client's process puts code where another
/// loads it from. It is made when it is first used, and removed on drop, which blocks.
pub(super) struct CompilerCache(PathBuf);

impl CompilerCache {
    /// Names a folder among the workspaces of the server, which alone has them.
    pub(super) fn new(root: &WorkspaceRoot) -> Self {
        Self(root.unused_path("cache"))
    }

    /// Lets a process have the folder.
    pub(super) fn give_to(&self, command: &mut Command) {
        command.env("POCL_CACHE_DIR", &self.0);
    }
}

impl Drop for CompilerCache {
    fn drop(&mut self) {
        match fs::remove_dir_all(&self.0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::debug!(%error, path = %self.0.display(), "the cache of a compiler is left");
            }
            _ => {}
        }
    }
}
