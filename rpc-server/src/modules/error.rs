//! Errors of modules, with advice to the caller.

use std::io;
use std::path::PathBuf;

use rpc_core::client::{Digest, DigestError};
use rpc_core::{ErrorKind, RpcError};

use crate::config::{ByteSize, Span};

/// Error of a module, an upload or a store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModuleError {
    /// The server takes no modules.
    #[error(
        "this server takes no modules, which are native code with all rights of its user: the operator allows them by \
         --allow-modules"
    )]
    Off,
    /// The module is not on the operator's list.
    #[error("the module {digest} is not on the server's list of modules (--module-digests)")]
    NotListed {
        /// The module.
        digest: Digest,
    },
    /// A file of the server is not a listed module. The error tells nothing else about the file.
    #[error(
        "{path:?} is no file here whose digest is on the server's list of modules (--module-digests); of other files \
         nothing is told"
    )]
    NotListedHere {
        /// The path as it was given.
        path: String,
    },
    /// The store does not have the module.
    #[error("the server has no module {digest}: upload it, it may have been removed since")]
    NotFound {
        /// The module.
        digest: Digest,
    },
    /// The stored file did not match its digest, and has been removed.
    #[error("the server's copy of the module {digest} was damaged, and is removed: upload it again")]
    Damaged {
        /// The module.
        digest: Digest,
    },
    /// A text is not a digest.
    #[error("{text:?} names no module: {source}")]
    NoDigest {
        /// Beginning of the text.
        text: String,
        /// The reason.
        source: DigestError,
    },
    /// The module is larger than the limit.
    #[error("a module of {len} bytes is larger than this server takes ({limit}, --max-module)")]
    TooLarge {
        /// Length of the module in bytes.
        len: u64,
        /// The limit.
        limit: ByteSize,
    },
    /// The module has no bytes.
    #[error("the module is empty: name a shared library")]
    Empty,
    /// The store has no room.
    #[error(
        "there is no room for a module of {len} bytes: modules take {held} bytes of {limit} (--module-store-size), and \
         none has been unused for {expiry} (--module-expiry); the operator can change these limits, or remove files \
         from the folder (--module-store)"
    )]
    Full {
        /// Length of the module in bytes.
        len: u64,
        /// Bytes of modules and uploads in progress.
        held: u64,
        /// The limit.
        limit: ByteSize,
        /// Time without use after which a module makes room.
        expiry: Span,
    },
    /// Too many uploads are in progress.
    #[error("{limit} uploads of modules are in progress at this server, and there can be no more: try again later")]
    TooManyUploads {
        /// The limit.
        limit: usize,
    },
    /// The pieces of an upload did not arrive in order.
    #[error("a piece at byte {offset} came where byte {expected} of the module was due: send pieces in order")]
    OutOfOrder {
        /// Offset of the piece.
        offset: u64,
        /// Expected offset.
        expected: u64,
    },
    /// More bytes arrived than were announced.
    #[error("{len} bytes were announced, and a piece ends at byte {end}: begin again with the right length")]
    TooLong {
        /// The announced length.
        len: u64,
        /// End of the piece.
        end: u64,
    },
    /// Fewer bytes arrived than were announced.
    #[error("{len} bytes were announced, and {got} have come: send the rest before the commit")]
    TooShort {
        /// The announced length.
        len: u64,
        /// Bytes received.
        got: u64,
    },
    /// The bytes received do not have the announced digest.
    #[error("what has come is the module {got}, and {announced} was announced: the file has changed, or is another")]
    Mismatch {
        /// Announced digest.
        announced: Digest,
        /// Digest of the bytes received.
        got: Digest,
    },
    /// Writing an earlier piece failed.
    #[error("an earlier piece of this module failed: begin the upload again")]
    Broken,
    /// The upload was committed, or has failed.
    #[error("this upload is over: it was committed already, or failed; begin another")]
    Over,
    /// A file that should be imported cannot be read.
    #[error("cannot read {path:?} at the server: {source}")]
    ReadFile {
        /// The path as it was given.
        path: String,
        /// Error of the system.
        source: io::Error,
    },
    /// The file to import is a folder, a device or the like.
    #[error("{path:?} at the server is no regular file: name a shared library")]
    NoFile {
        /// The path as it was given.
        path: String,
    },
    /// An archive is malformed, or has other files than objects.
    #[error("cannot link {path:?}: {problem}")]
    Archive {
        /// The path as it was given.
        path: String,
        /// The problem.
        problem: String,
    },
    /// Object files cannot be linked where modules are listed by their digests.
    #[error(
        "{path:?} would have to be linked here, and the server takes listed modules only (--module-digests): link it \
         to a shared library before the upload"
    )]
    LinkWithList {
        /// The path as it was given.
        path: String,
    },
    /// The server has no compiler.
    #[error("object files need a compiler at the server to be linked (c++ or cc): upload a shared library instead")]
    NoLinker,
    /// The linker has failed.
    #[error("{linker} cannot link the module: {said}")]
    Link {
        /// The program.
        linker: &'static str,
        /// Its status, and what it has said.
        said: String,
    },
    /// The list of digests cannot be read.
    #[error("cannot read the list of modules {} (--module-digests)", file.display())]
    ReadDigests {
        /// The file.
        file: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// A line of the list is not a digest.
    #[error("line {line} of {} (--module-digests) is no digest: {problem}", file.display())]
    Digests {
        /// The file.
        file: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The problem.
        problem: String,
    },
    /// The folder of the store belongs to another user, or other users may write to it.
    #[error(
        "other users may write to {} (mode {mode:o}, owner {owner}), and the modules in it are run: give \
         --module-store a folder of this user, and take the rights of others with chmod go-w",
        folder.display()
    )]
    Exposed {
        /// The folder.
        folder: PathBuf,
        /// Mode of the folder.
        mode: u32,
        /// User id of the folder's owner.
        owner: u32,
    },
    /// The folder of the store cannot be made or opened.
    #[error("cannot use the folder {} for modules (--module-store)", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The file system failed in the folder of the store.
    #[error("the server's store of modules failed: {0}")]
    Io(#[from] io::Error),
}

impl ModuleError {
    pub(super) fn too_large(len: u64, limit: u64) -> Self {
        Self::TooLarge { len, limit: ByteSize(limit) }
    }

    fn kind(&self) -> ErrorKind {
        match self {
            Self::Off | Self::NotListed { .. } | Self::NotListedHere { .. } | Self::LinkWithList { .. } => {
                ErrorKind::Refused
            }
            Self::NoLinker => ErrorKind::Unsupported,
            Self::NotFound { .. } => ErrorKind::NotFound,
            Self::TooLarge { .. } | Self::Full { .. } | Self::TooManyUploads { .. } => ErrorKind::LimitExceeded,
            Self::Damaged { .. }
            | Self::Io(_)
            | Self::ReadFile { .. }
            | Self::Folder { .. }
            | Self::Exposed { .. }
            | Self::ReadDigests { .. }
            | Self::Digests { .. } => ErrorKind::Io,
            Self::NoDigest { .. }
            | Self::Empty
            | Self::OutOfOrder { .. }
            | Self::TooLong { .. }
            | Self::TooShort { .. }
            | Self::Mismatch { .. }
            | Self::Broken
            | Self::Over
            | Self::Archive { .. }
            | Self::Link { .. }
            | Self::NoFile { .. } => ErrorKind::InvalidArgument,
        }
    }
}

impl From<ModuleError> for RpcError {
    fn from(error: ModuleError) -> Self {
        let kind = match &error {
            ModuleError::ReadFile { source, .. } if source.kind() == io::ErrorKind::NotFound => ErrorKind::NotFound,
            error => error.kind(),
        };
        Self::new(kind, error.to_string())
    }
}
