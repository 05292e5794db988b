//! The caller's view of a session: [`Session`] with all its operations, references to remote objects, copies, files,
//! uploads of modules, and closures that the session calls back.

pub mod callbacks;
mod copies;
mod files;
mod held_lane;
pub(crate) mod session;
mod uploads;

pub use callbacks::{CallbackHandler, CallbackReturn, NewCallback, RemoteCallback};
pub use copies::{CHUNK, CopyFrom, CopyTo};
pub use files::{FileAction, FileEntry, Files};
pub use session::{Action, Pending, RemoteFunction, RemoteModule, RemoteObject, RemoteTensor, Session, TypedFunction};
pub use uploads::{Digest, DigestError, Modules};
