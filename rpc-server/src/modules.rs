//! Native modules of clients (`--allow-modules`): shared libraries that follow the ABI of TVM-FFI,
//! uploaded, stored, and loaded.
//!
//! ```text
//! upload, or a file at the server ── hashed, checked ──► ModuleStore: HEX.so, never changed
//!                                                             │ by digest, verified
//!                                                             ▼
//!                          load_module("sha256:HEX") ──► loader `tvm_ffi`, in the session process
//! ```
//!
//! # What holds
//!
//! 1. **Off by default.** Native code can do everything that the user of the server can do. Without
//!    `--allow-modules` all functions here return an error that says so; with `--module-digests`
//!    only the modules on that list are taken.
//! 2. **Modules are loaded from the store only**, and only if their bytes have the digest that
//!    names them. A file of a workspace or of the server is copied into the store first, so that no
//!    client can change it after the check.
//! 3. **In the process of the session.** With `--isolate auto` a server that takes modules starts a
//!    process for each session and loads nothing itself. Loaded modules stay until that process
//!    ends.
//! 4. **Bounded**: each module (`--max-module`), all modules together (`--module-store-size`), and
//!    the number of uploads in progress.
//!
//! [`rpc_core::client::Modules`] is the client; [`hash()`] computes the digest that it needs.

mod digest_list;
mod error;
mod hash;
mod link;
mod probe;
mod service;
mod store;
mod store_loader;
mod tvm_ffi;
mod upload;
pub(crate) mod worker_modules;

pub use digest_list::DigestList;
pub use error::ModuleError;
pub use hash::hash;
pub(crate) use hash::{FILE_PIECE, Hasher};
pub use store::{ModuleStore, StoreLimits};
pub(crate) use tvm_ffi::FOR_MEASUREMENTS;
pub use upload::ModuleUpload;

/// True if this build has a loader of native modules.
pub(crate) const CAN_LOAD: bool = cfg!(all(feature = "tvm-ffi", target_pointer_width = "64"));

pub(crate) use probe::{answer_if_asked, check_libraries};
pub(crate) use service::{ModuleService, Sharing};
pub(crate) use store::PIECE;
pub(crate) use store_loader::StoreLoader;
pub(crate) use tvm_ffi::Native;

/// Returns true if the client of this context may bring any native code: modules are allowed, and
/// there is no list of those that are.
#[cfg(feature = "opencl")]
pub(crate) fn takes_any_native_code(context: &rpc_core::Context) -> bool {
    ModuleService::of(context).is_ok_and(|service| !service.store().is_limited_to_list())
}
