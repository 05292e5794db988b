//! Files that are replaced in one step, and never readable by other users.

use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::PkiError;

/// Permissions of a file, and permission to replace another.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// All users may read it.
    Public,
    /// Only its owner may read it.
    Private,
    /// As `Private`, and it must not exist.
    PrivateNew,
}

/// Writes a file. Readers find the old or the new contents, also after a power failure.
pub(crate) fn write(path: &Path, contents: &str, mode: Mode) -> Result<(), PkiError> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // The system creates the file with these permissions, minus the umask, so that it is never more
    // open.
    let permissions = Permissions::from_mode(if mode == Mode::Public { 0o644 } else { 0o600 });
    let result =
        tempfile::Builder::new().prefix(".new-").permissions(permissions).tempfile_in(folder).and_then(|mut file| {
            file.write_all(contents.as_bytes())?;
            file.as_file().sync_all()?;
            if mode == Mode::PrivateNew {
                file.persist_noclobber(path)?
            } else {
                file.persist(path)?
            };
            // Makes the rename durable, too.
            fs::File::open(folder)?.sync_all()
        });
    result.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => PkiError::Exists {
            file: path.to_owned(),
            hint: "another program has made it in the meantime; run this again",
        },
        _ => PkiError::file("write", path, error),
    })
}

/// Reads a text file; `None` if it does not exist.
pub(super) fn read_if_there(path: &Path) -> Result<Option<String>, PkiError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(PkiError::file("read", path, error)),
    }
}
