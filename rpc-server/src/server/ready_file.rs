//! The ready file, by which scripts learn the addresses of a server that is ready.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rpc_transports::Address;
use tempfile::NamedTempFile;

use crate::config::ServeError;

/// A file with one address a line, which exists exactly as long as the server serves.
pub(super) struct ReadyFile(PathBuf);

impl ReadyFile {
    /// Removes the file of an earlier server.
    pub(super) fn claim(path: &Path) -> Result<Self, ServeError> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(path, error)),
            _ => Ok(Self(path.to_owned())),
        }
    }

    /// Writes the file in one step, so that readers never see a part of it.
    pub(super) fn write(&self, addresses: &[Address]) -> Result<(), ServeError> {
        let folder = self.0.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let write = || {
            let mut file = NamedTempFile::new_in(folder)?;
            for address in addresses {
                writeln!(file, "{address}")?;
            }
            file.persist(&self.0)?;
            Ok(())
        };
        write().map_err(|error| failed(&self.0, error))
    }
}

impl Drop for ReadyFile {
    fn drop(&mut self) {
        // The file may be gone already, with its folder.
        let _ = fs::remove_file(&self.0);
    }
}

fn failed(path: &Path, source: io::Error) -> ServeError {
    ServeError::ReadyFile { file: path.to_owned(), source }
}
