//! Errors of workspaces, with advice to the caller.

use std::io;

/// Error of an operation on a workspace.
///
/// The paths are those that the caller gave, so that a message can be shown as it is.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkspaceError {
    /// The path is empty.
    #[error("the path is empty, name a file in the workspace")]
    EmptyPath,
    /// The path holds a NUL byte.
    #[error("path {path:?} holds a NUL byte, remove it")]
    NulByte {
        /// The path as it was given.
        path: String,
    },
    /// The path, or one name in it, is too long.
    #[error("path {path:?} or a name in it has {len_bytes} bytes, use at most {limit_bytes} bytes there")]
    PathTooLong {
        /// The beginning of the path given.
        path: String,
        /// The length of what is too long: the path, or one name in it.
        len_bytes: usize,
        /// The limit.
        limit_bytes: usize,
    },
    /// The path starts at the root of the file system.
    #[error("path {path:?} is absolute, give it relative to the workspace")]
    AbsolutePath {
        /// The path as it was given.
        path: String,
    },
    /// The path, or a symbolic link on it, leads out of the workspace.
    #[error("path {path:?} leads outside the workspace, name a file inside it")]
    OutsideWorkspace {
        /// The path as it was given.
        path: String,
    },
    /// There is no entry at the path.
    #[error("there is no {path:?} in the workspace, list it to see what there is")]
    NotFound {
        /// The path as it was given.
        path: String,
    },
    /// A folder is there, where a file is meant.
    #[error("{path:?} is a folder, name a file in it")]
    IsFolder {
        /// The path as it was given.
        path: String,
    },
    /// A file is there, where a folder is meant, perhaps in the middle of the path.
    #[error("{path:?} goes through a file as if it were a folder, remove that file first")]
    NotAFolder {
        /// The path as it was given.
        path: String,
    },
    /// A device, FIFO or socket is there, where a file is meant.
    #[error("{path:?} is neither a file nor a folder, name a regular file")]
    NotARegularFile {
        /// The path as it was given.
        path: String,
    },
    /// The path names the workspace as a whole.
    #[error("{path:?} is the workspace itself, name a file or folder in it")]
    IsWorkspace {
        /// The path as it was given.
        path: String,
    },
    /// The workspace would hold more bytes than it may.
    #[error(
        "writing {path:?} takes {needed_bytes} bytes more while {used_bytes} are in use, and the workspace is \
         limited to {limit_bytes}: remove files or ask for a larger quota"
    )]
    QuotaExceeded {
        /// The path as it was given.
        path: String,
        /// The bytes that this write would have added.
        needed_bytes: u64,
        /// The bytes of the files there and of the writes in progress.
        used_bytes: u64,
        /// The quota.
        limit_bytes: u64,
    },
    /// The workspace would hold more files and folders than it may.
    #[error(
        "writing {path:?} would make more than the {limit} files and folders that the workspace may hold, remove some"
    )]
    TooManyEntries {
        /// The path as it was given.
        path: String,
        /// Files and folders allowed.
        limit: u64,
    },
    /// More bytes were written than were announced.
    #[error(
        "a write to {path:?} ends at byte {end_bytes} although {expected_bytes} bytes were announced, \
         begin again with the right length"
    )]
    PastExpectedEnd {
        /// The path as it was given.
        path: String,
        /// The announced length.
        expected_bytes: u64,
        /// End of the write.
        end_bytes: u64,
    },
    /// Fewer bytes were written than were announced, so nothing was put in place.
    #[error("{path:?} was announced with {expected_bytes} bytes and only {got_bytes} came, write it again")]
    Incomplete {
        /// The path as it was given.
        path: String,
        /// The announced length.
        expected_bytes: u64,
        /// End of the last write.
        got_bytes: u64,
    },
    /// An earlier write to this file failed, so nothing was put in place.
    #[error("an earlier write to {path:?} failed, begin it again")]
    WriteFailed {
        /// The path as it was given.
        path: String,
    },
    /// The name of a workspace, or of the identity it belongs to, has a form that is not allowed.
    #[error(
        "{name:?} cannot name a workspace or its owner, use 1 to {limit_bytes} ASCII letters, digits, '.', '_' and \
         '-', and neither '.' nor '..'"
    )]
    InvalidName {
        /// The name given; its beginning, if it is long.
        name: String,
        /// The bytes allowed.
        limit_bytes: usize,
    },
    /// The identity has as many named workspaces as it may.
    #[error("{identity:?} has {limit} named workspaces already and cannot have {name:?} too, use one of those")]
    TooManyWorkspaces {
        /// Owner of the workspaces.
        identity: String,
        /// The name given.
        name: String,
        /// Named workspaces allowed to an identity.
        limit: usize,
    },
    /// The file system failed.
    #[error("the file system failed at {path:?}, see the cause")]
    Io {
        /// The path given, or the server's folder.
        path: String,
        /// Error of the system.
        #[source]
        source: io::Error,
    },
}

impl WorkspaceError {
    /// Returns the error of a file system that failed at `path`, and logs it: the operator has to
    /// know of a full disk, for example, which is no fault of the client.
    pub(super) fn io(path: impl Into<String>, source: io::Error) -> Self {
        let path = path.into();
        rpc_core::log_limited!(WARN, path, error = %source, "the file system of the workspaces failed");
        Self::Io { path, source }
    }

    /// Gives an error of the confined file system, met at `path`, its meaning here.
    pub(super) fn from_io(path: &str, source: io::Error) -> Self {
        use rustix::io::Errno;

        let path = path.to_owned();
        match source.raw_os_error().map(Errno::from_raw_os_error) {
            // A path that escapes is refused by cap-std itself, with an error that has no number.
            None if source.kind() == io::ErrorKind::PermissionDenied => Self::OutsideWorkspace { path },
            Some(Errno::NOENT) => Self::NotFound { path },
            Some(Errno::NOTDIR) => Self::NotAFolder { path },
            Some(Errno::ISDIR) => Self::IsFolder { path },
            Some(Errno::NAMETOOLONG) => {
                let len_bytes = path.len();
                Self::PathTooLong { path, len_bytes, limit_bytes: super::path::MAX_NAME_BYTES }
            }
            _ => Self::io(path, source),
        }
    }
}
