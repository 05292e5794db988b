//! Files that appear whole, in one step, and that nobody else can ever read.

use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::PkiError;

/// Who may read a file, and whether it may take the place of another.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// All may read it.
    Public,
    /// Its owner alone may read it.
    Private,
    /// As `Private`, and it must not be there yet.
    PrivateNew,
}

/// Writes a file. Whoever opens it finds the old contents or the new, also after a power failure.
pub(super) fn write(path: &Path, contents: &str, mode: Mode) -> Result<(), PkiError> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // The system creates the file with these permissions, less what the umask forbids: no moment is in between.
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
            // So that the rename lasts, too.
            fs::File::open(folder)?.sync_all()
        });
    result.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => {
            PkiError::Exists { file: path.to_owned(), hint: "somebody has made it in the meantime; run this again" }
        }
        _ => PkiError::file("write", path, error),
    })
}

/// The contents of a text file, or `None` if it is not there.
pub(super) fn read_if_there(path: &Path) -> Result<Option<String>, PkiError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(PkiError::file("read", path, error)),
    }
}
