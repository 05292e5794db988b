//! The caller's view of a session: [`Session`] with all its operations, references to remote
//! objects, copies, files, programs, leases, listeners, uploads of modules, sends to other
//! sessions, and closures that the session calls back.

pub(crate) mod action;
mod alloc;
pub mod callbacks;
mod copies;
mod file_cache;
mod files;
mod lane_deadlock;
mod leases;
mod listen;
mod module_upload;
mod operations;
mod partial_files;
mod piece_window;
mod pipes;
mod promise;
pub(crate) mod references;
mod run;
mod send;
pub(crate) mod session;
mod session_module;
mod window_size;

pub use action::{Action, Pending, ScopedAction, ScopedPending};
pub use alloc::AllocDevice;
pub use callbacks::{CallbackHandler, CallbackReturn, RemoteCallback};
pub use copies::CHUNK;
pub use file_cache::FileCache;
pub use files::{FileEntry, Files};
pub use leases::{Lease, LeaseOptions, LeaseRequest};
pub use listen::{RemoteConnection, RemoteListener};
pub use module_upload::{Digest, DigestError, Modules};
pub use partial_files::{RemoteFile, ResumableUpload};
pub use pipes::Pipe;
pub use references::{RemoteFunction, RemoteModule, RemoteObject, RemoteTensor, TypedFunction};
pub use run::{EndCause, OutputStream, RemoteCommand, RemoteProcess, RunOutput, RunRequest, RunStatus};
pub use send::SendRoute;
pub use session::Session;
pub use session_module::SessionModule;
