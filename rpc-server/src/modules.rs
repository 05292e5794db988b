//! Native modules of clients: shared libraries that follow the ABI of TVM-FFI, uploaded, kept, and loaded (`--allow-modules`).
//!
//! ```text
//! upload, or a file at the server ── hashed, checked ──► ModuleStore: HEX.so, which nobody changes
//!                                                             │ by digest, verified
//!                                                             ▼
//!                          load_module("sha256:HEX") ──► loader `tvm_ffi`, in the process of the session
//! ```
//!
//! # What holds
//!
//! 1. **Off by default.** Native code does what the server's user may do. Without `--allow-modules` nothing here does more than
//!    say so; with `--module-digests` modules on that list are taken, and no others.
//! 2. **Only the store is loaded from**, and only what has the digest that it is named by. A file of a workspace, or of the
//!    server, is copied there first: what is loaded can be changed by no client.
//! 3. **In the process of the session.** With `--isolate auto` a server that takes modules has processes for its sessions; it
//!    loads nothing itself. Loaded modules stay until that process ends.
//! 4. **Bounded**: each module (`--max-module`), all of them together (`--module-store-size`), uploads at a time.
//!
//! [`rpc_core::client::Modules`] is the client; [`hash()`] computes what it wants to know of a file.

mod digest_list;
mod error;
mod hash;
mod loader;
mod native;
mod probe;
mod service;
mod store;
mod upload;
pub(crate) mod worker;

pub use digest_list::DigestList;
pub use error::ModuleError;
pub use hash::hash;
pub use store::{ModuleStore, StoreLimits};
pub use upload::ModuleUpload;

/// Whether this build has a loader.
pub(crate) const CAN_LOAD: bool = cfg!(all(feature = "tvm-ffi", target_pointer_width = "64"));

pub(crate) use loader::StoreLoader;
pub(crate) use native::Native;
pub(crate) use probe::{answer_if_asked, check_libraries};
pub(crate) use service::ModuleService;
