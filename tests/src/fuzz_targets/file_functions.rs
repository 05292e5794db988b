//! Operations on the files of a workspace with any paths, offsets and bytes.

use std::fs;
use std::path::Path;

use rpc_server::workspace::{Workspace, WorkspaceError, WorkspaceLimits, WorkspaceRoot};

use super::split;

/// Bytes that the workspace may hold.
const QUOTA: u64 = 4096;

/// A history of a workspace: operations, each with the number of its kind and its path in front.
///
/// Nothing outside of the workspace is changed or read, and it does not hold more than its quota.
pub fn file_functions(input: &[u8]) {
    // In memory where that is possible: a write to a disk takes longer than all else.
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let outside = folder.path().join("outside");
    fs::write(&outside, OUTSIDE).unwrap();
    let root = WorkspaceRoot::open(&folder.path().join("work"), WorkspaceLimits::with_quota(QUOTA)).unwrap();
    let workspace = root.private().unwrap();
    let mut rest = input;
    while let Some((kind, behind)) = rest.split_first() {
        let (path, behind) = split(behind);
        rest = behind;
        let path = String::from_utf8_lossy(path);
        // A refusal is as good an answer as any other.
        let _ = operate(&workspace, *kind, &path, input);
        assert!(workspace.used_bytes() <= QUOTA, "the workspace holds {} bytes", workspace.used_bytes());
    }
    assert_eq!(fs::read(&outside).unwrap(), OUTSIDE, "a file outside of the workspace has changed");
    let mut names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["outside", "work"], "there are files outside of the workspace");
}

/// Content of a file beside the workspace.
const OUTSIDE: &[u8] = b"not for clients";

fn operate(workspace: &Workspace, kind: u8, path: &str, bytes: &[u8]) -> Result<(), WorkspaceError> {
    let offset = u64::from(kind >> 4) << (4 * (kind & 7));
    match kind % 5 {
        0 => {
            let mut writer = workspace.begin_write(path, (kind & 8 != 0).then_some(offset))?;
            writer.write_at(offset, &bytes[..bytes.len().min(1024)])?;
            writer.commit()?;
        }
        1 => {
            let reader = workspace.open_read(path)?;
            let mut read = vec![0; 1024];
            let count = reader.read_at(offset, &mut read)?;
            assert!(!read[..count].starts_with(OUTSIDE), "a file outside of the workspace was read as {path:?}");
        }
        2 => drop(workspace.list(path)?),
        3 => workspace.remove(path)?,
        _ => {
            let resolved = workspace.resolve(path)?;
            assert!(is_inside(&resolved, workspace.path()), "{path:?} resolves to {}", resolved.display());
        }
    }
    Ok(())
}

fn is_inside(path: &Path, folder: &Path) -> bool {
    path.canonicalize().unwrap().starts_with(folder.canonicalize().unwrap())
}
