//! Workspaces that another process uses: the session process, while the server keeps them.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cap_std::ambient_authority;
use cap_std::fs::Dir;
use serde::{Deserialize, Serialize};

use super::workspace_root::RootInner;
use super::{Workspace, WorkspaceKind, WorkspaceLimits};

/// Description of a workspace for another process.
///
/// The borrower counts the contents by itself, as another server does that shares the workspace.
/// The lender keeps the workspace until the borrower has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WorkspaceLoan {
    folder: PathBuf,
    quota_bytes: u64,
    max_entries: u64,
    /// The name of the lender, which no other server has had.
    instance: String,
}

/// Process that keeps the folder of a workspace.
pub(super) enum FolderOwner {
    /// This process.
    Root(Arc<RootInner>),
    /// The process that has lent it.
    Lender { limits: WorkspaceLimits, instance: String, serial: AtomicU64 },
}

impl FolderOwner {
    pub(super) fn limits(&self) -> &WorkspaceLimits {
        match self {
            Self::Root(root) => &root.limits,
            Self::Lender { limits, .. } => limits,
        }
    }

    /// A name that neither this nor another process has used.
    pub(super) fn unique(&self, purpose: &str) -> String {
        match self {
            Self::Root(root) => root.unique(purpose),
            Self::Lender { instance, serial, .. } => {
                format!("{purpose}-{instance}-{}", serial.fetch_add(1, Ordering::Relaxed))
            }
        }
    }
}

impl Workspace {
    /// Returns the description for another process. Valid as long as this reference is kept.
    pub(crate) fn lend(&self) -> WorkspaceLoan {
        let limits = self.0.owner.limits();
        let instance = match &self.0.owner {
            FolderOwner::Root(root) => &root.instance,
            FolderOwner::Lender { instance, .. } => instance,
        };
        WorkspaceLoan {
            // A workspace is always in a folder of its own.
            folder: self.0.path.parent().unwrap_or(Path::new("/")).to_owned(),
            quota_bytes: limits.quota_bytes,
            max_entries: limits.max_entries,
            instance: instance.clone(),
        }
    }

    /// Opens a workspace that another process has lent. Blocks.
    ///
    /// # Errors
    ///
    /// The file system failed.
    pub(crate) fn borrowed(loan: &WorkspaceLoan) -> io::Result<Self> {
        let folder = Dir::open_ambient_dir(&loan.folder, ambient_authority())?;
        let limits = WorkspaceLimits { max_entries: loan.max_entries, ..WorkspaceLimits::with_quota(loan.quota_bytes) };
        // A name that differs from those of the lender and of other borrowers. Files of an earlier
        // borrower with the same process id are removed when the workspace is opened.
        let instance = format!("{}.{}", loan.instance, std::process::id());
        let owner = FolderOwner::Lender { limits, instance, serial: AtomicU64::new(0) };
        Self::open(owner, &folder, &loan.folder, WorkspaceKind::Lent)
    }
}
