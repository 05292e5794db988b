//! Paths of files in a workspace, as clients write them: their one normal form, and their limits.

use super::WorkspaceError;

/// Maximum length of a name in a path: that of the usual file systems.
pub(super) const MAX_NAME_BYTES: usize = 255;
/// Maximum length of a path.
pub(super) const MAX_PATH_BYTES: usize = 1024;

/// Returns `path` in the form `a/b/c`, without `.`, `..` and doubled slashes; empty for the
/// workspace itself.
///
/// This gives each file one name only. It does not confine the path: links may still lead outside,
/// and the kernel's resolution refuses those when the path is used.
pub(super) fn normalize(path: &str) -> Result<String, WorkspaceError> {
    let given = || path.to_owned();
    if path.is_empty() {
        return Err(WorkspaceError::EmptyPath);
    }
    if path.len() > MAX_PATH_BYTES {
        return Err(WorkspaceError::PathTooLong {
            path: abridged(path),
            len_bytes: path.len(),
            limit_bytes: MAX_PATH_BYTES,
        });
    }
    if path.contains('\0') {
        return Err(WorkspaceError::NulByte { path: given() });
    }
    if path.starts_with('/') {
        return Err(WorkspaceError::AbsolutePath { path: given() });
    }
    let mut names = Vec::new();
    for name in path.split('/') {
        match name {
            "" | "." => {}
            ".." => {
                if names.pop().is_none() {
                    return Err(WorkspaceError::OutsideWorkspace { path: given() });
                }
            }
            name if name.len() > MAX_NAME_BYTES => {
                return Err(WorkspaceError::PathTooLong {
                    path: given(),
                    len_bytes: name.len(),
                    limit_bytes: MAX_NAME_BYTES,
                });
            }
            name => names.push(name),
        }
    }
    Ok(names.join("/"))
}

/// As [`normalize`], for a path that must name a file.
pub(super) fn normalize_file(path: &str) -> Result<String, WorkspaceError> {
    let target = normalize(path)?;
    if target.is_empty() || path.ends_with('/') {
        return Err(WorkspaceError::IsFolder { path: path.to_owned() });
    }
    Ok(target)
}

/// Shortens `text` for an error.
pub(super) fn abridged(text: &str) -> String {
    text.chars().take(64).collect()
}
