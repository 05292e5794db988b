//! Folders from which the workers of a node may read weights.

use std::path::{Component, Path, PathBuf};

use rpc_core::{ErrorKind, Result, RpcError};
use serde::{Deserialize, Serialize};

/// Folders from which the workers of a node may read weights, set by its operator as an
/// [extension](rpc_core::Context::extension) of the sessions that the node serves. Without it they
/// may read no files, and get tensors from other workers or from the controller.
///
/// Workers that are threads or child processes of the controller may read all files that its
/// process may.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightFolders {
    /// `None` is all files.
    folders: Option<Vec<PathBuf>>,
}

impl WeightFolders {
    /// Allows files in these folders, and in folders below them. A symbolic link counts as its
    /// target.
    pub fn new<P: Into<PathBuf>>(folders: impl IntoIterator<Item = P>) -> Self {
        Self { folders: Some(folders.into_iter().map(Into::into).collect()) }
    }

    /// Allows all files that the process may read, for nodes whose controllers may read everything.
    pub fn anywhere() -> Self {
        Self { folders: None }
    }

    /// Returns the real path of a file, if it may be read.
    ///
    /// # Errors
    ///
    /// The file is outside of the folders, or missing in one of them. For paths outside of the
    /// folders, the error is the same whether the file exists or not.
    pub(crate) fn admit(&self, path: &Path) -> Result<PathBuf> {
        let is_plain = path.is_absolute() && !path.components().any(|part| part == Component::ParentDir);
        let Some(folders) = &self.folders else {
            // The path as given, so that a link whose target changes is noticed.
            return Ok(path.to_owned());
        };
        let denied = || {
            let text = format!(
                "{}: this node's workers may not read there, only in the folders that its operator names (--weights \
                 of rpc-server)",
                path.display()
            );
            RpcError::new(ErrorKind::Refused, text)
        };
        let is_within = |real: &Path| {
            folders.iter().any(|folder| folder.canonicalize().is_ok_and(|folder| real.starts_with(folder)))
        };
        match path.canonicalize() {
            Ok(real) if is_within(&real) => Ok(real),
            // The longest part of the path that exists, dangling links included, has to be in one
            // of the folders.
            Err(error) if is_plain => {
                let mut there = path.ancestors().skip_while(|part| part.symlink_metadata().is_err());
                let is_told = there
                    .next()
                    .is_some_and(|part| part != path && part.canonicalize().is_ok_and(|real| is_within(&real)));
                if !is_told {
                    return Err(denied());
                }
                Err(RpcError::new(ErrorKind::NotFound, format!("{}: {error}", path.display())))
            }
            _ => Err(denied()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_in_the_folders_alone() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let (models, other) = (root.join("models"), root.join("other"));
        for folder in [&models, &other] {
            std::fs::create_dir(folder).unwrap();
            std::fs::write(folder.join("file"), "").unwrap();
        }
        std::os::unix::fs::symlink(other.join("file"), models.join("out")).unwrap();
        std::os::unix::fs::symlink(&models, root.join("link")).unwrap();
        std::os::unix::fs::symlink(&other, models.join("beyond")).unwrap();
        std::os::unix::fs::symlink(other.join("nothing"), models.join("dangling")).unwrap();
        let folders = WeightFolders::new([&models]);
        let admit = |path: &str| folders.admit(&root.join(path)).map_err(|error| error.kind());
        assert_eq!(admit("models/file"), Ok(models.join("file")));
        assert_eq!(admit("link/file"), Ok(models.join("file")));
        assert_eq!(admit("models/none"), Err(ErrorKind::NotFound));
        for path in [
            "other/file",
            "other/none",
            "models/out",
            "models/../other/file",
            "models/../other/none",
            "modelsx",
            "models/beyond/file",
            "models/beyond/none",
            "models/dangling",
            "models/dangling/none",
        ] {
            assert_eq!(admit(path), Err(ErrorKind::Refused), "{path}");
        }
        let (here, gone) = (other.join("file"), other.join("none"));
        assert_eq!(WeightFolders::anywhere().admit(&here), Ok(here));
        let told = |path: &Path| folders.admit(path).unwrap_err().to_string().replace(&path.display().to_string(), "");
        assert_eq!(told(&gone), told(&other.join("file")));
    }
}
