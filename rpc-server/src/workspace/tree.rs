//! Folder trees of any depth and width, visited and removed with a bounded stack and few open
//! files.
//!
//! The trees are made by peers and by foreign code, so neither their depth nor their permissions
//! are trusted: nothing here recurses.

use std::ffi::OsStr;
use std::io;
use std::ops::ControlFlow;

use cap_std::fs::{Dir, DirEntry, FileType, Permissions, PermissionsExt};

use super::path::MAX_PATH_BYTES;

/// Usage by files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    /// Bytes in files.
    pub(super) bytes: u64,
    /// Number of files, folders and other entries.
    pub(super) entries: u64,
}

impl Usage {
    pub(super) fn plus(self, other: Self) -> Self {
        Self { bytes: self.bytes.saturating_add(other.bytes), entries: self.entries.saturating_add(other.entries) }
    }

    pub(super) fn minus(self, other: Self) -> Self {
        Self { bytes: self.bytes.saturating_sub(other.bytes), entries: self.entries.saturating_sub(other.entries) }
    }

    /// Returns the usage of one entry.
    pub(super) fn of(metadata: &cap_std::fs::Metadata) -> Self {
        Self { bytes: if metadata.is_file() { metadata.len() } else { 0 }, entries: 1 }
    }
}

/// Calls `visit`, until it breaks, with each entry below `start` (a cleaned path, empty for all of
/// `root`), named from `root` on.
///
/// Links are visited and not followed. What cannot be named by a caller (a name that is not UTF-8,
/// or a path too long) or read is left out, and so is what vanishes meanwhile.
///
/// # Errors
///
/// `start` cannot be opened as a folder.
pub(super) fn walk<B>(
    root: &Dir,
    start: &str,
    mut visit: impl FnMut(String, FileType, &DirEntry) -> ControlFlow<B>,
) -> io::Result<ControlFlow<B>> {
    let first = root.open_dir(if start.is_empty() { "." } else { start })?;
    let mut folders = vec![start.to_owned()];
    let mut opened = Some(first);
    while let Some(folder) = folders.pop() {
        let Some(dir) = opened.take().or_else(|| root.open_dir(&folder).ok()) else {
            continue;
        };
        let Ok(entries) = dir.entries() else { continue };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let (Some(name), Ok(kind)) = (name.to_str(), entry.file_type()) else {
                continue;
            };
            let name = if folder.is_empty() { name.to_owned() } else { format!("{folder}/{name}") };
            if name.len() > MAX_PATH_BYTES {
                continue;
            }
            if kind.is_dir() {
                folders.push(name.clone());
            }
            let visited = visit(name, kind, &entry);
            if visited.is_break() {
                return Ok(visited);
            }
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// Returns the sum over all entries in `root`.
pub(super) fn measure(root: &Dir) -> io::Result<Usage> {
    let mut usage = Usage::default();
    let _: ControlFlow<()> = walk(root, "", |_, _, entry| {
        if let Ok(metadata) = entry.metadata() {
            usage = usage.plus(Usage::of(&metadata));
        }
        ControlFlow::Continue(())
    })?;
    Ok(usage)
}

/// Removes `name` in `parent`, a file or a folder with all that is in it, and returns what that
/// was.
///
/// Folders inside are first moved up, to `NAME.1`, `NAME.2` … in `parent`: so depth costs neither
/// stack nor open files. Links are removed, never followed. What cannot be removed stays.
pub(super) fn purge(parent: &Dir, name: &str) -> Usage {
    let mut freed = Usage::default();
    let mut moved = 0_u64;
    let mut pending = vec![name.to_owned()];
    while let Some(folder) = pending.pop() {
        if parent.remove_dir(&folder).is_ok() {
            freed.entries += 1;
            continue;
        }
        let Ok(metadata) = parent.symlink_metadata(&folder) else {
            continue;
        };
        if !metadata.is_dir() {
            if parent.remove_file(&folder).is_ok() {
                freed = freed.plus(Usage::of(&metadata));
            }
            continue;
        }
        let Ok(entries) = open_own(parent, &folder).and_then(|dir| Ok((dir.entries()?, dir))) else {
            continue;
        };
        let (entries, dir) = entries;
        let mut progress = false;
        let mut children = Vec::new();
        for entry in entries.flatten() {
            let child = entry.file_name();
            let Ok(metadata) = entry.metadata() else {
                continue;
            };
            if !metadata.is_dir() || dir.remove_dir(&child).is_ok() {
                if metadata.is_dir() || dir.remove_file(&child).is_ok() {
                    freed = freed.plus(Usage::of(&metadata));
                    progress = true;
                }
                continue;
            }
            moved += 1;
            let target = format!("{name}.{moved}");
            if move_entry(&dir, &child, parent, &target).is_ok() {
                children.push(target);
                progress = true;
            }
        }
        // A round without progress ends the loop.
        if progress {
            pending.push(folder);
        }
        pending.append(&mut children);
    }
    freed
}

/// Moves `from` in `dir` to `to` in `target`. A folder that its maker has locked is opened up
/// first.
pub(super) fn move_entry(dir: &Dir, from: impl AsRef<OsStr>, target: &Dir, to: &str) -> io::Result<()> {
    let from = from.as_ref();
    match dir.rename(from, target, to) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            dir.set_permissions(from, Permissions::from_mode(0o700))?;
            dir.rename(from, target, to)
        }
        result => result,
    }
}

/// Opens a folder of ours, although foreign code may have taken our rights to it away.
fn open_own(parent: &Dir, folder: &str) -> io::Result<Dir> {
    parent.set_permissions(folder, Permissions::from_mode(0o700))?;
    parent.open_dir(folder)
}
