//! Sessions with servers of TVM (`tvm://host:port/KEY`): TVM's own RPC protocol from the client's
//! side.
//!
//! ```text
//! Request ──► session ──► execute ──────────────────► link ──► rpc_tvm::wire ──► server
//!             state:      handles checked, operations  order,   bytes
//!             queue,      as requests of the wire      window
//!             deadlines   ◄────────────── replies ◄──────────
//! ```
//!
//! A session has one of two drivers: a task of tokio (`session`), or the threads that wait for
//! replies (`protocol`), for which `rpc_transports` moves the bytes.
//!
//! The protocol has one order for all requests of a connection, no cancellation and no keep-alive.
//! So a session has one lane in effect: requests of other lanes wait for each other as well. A
//! request that was sent runs to its end, even if its deadline has passed or its caller is gone,
//! and later ones wait for it; to stop it the session has to end. The operating system watches the
//! connection, since nothing in the protocol can.
//!
//! Handles are minted here, and those of the server never leave: a server of TVM takes any number
//! for an address in its memory. A stale handle, a tensor with gaps or beyond its memory, and what
//! else would crash such a server is refused before anything is sent.

mod arguments;
mod client_function;
mod containers;
mod execute;
mod farewell;
mod files;
mod functions;
mod handshake;
mod info;
mod link;
mod measure;
mod objects;
mod opener;
mod outcomes;
mod protocol;
mod replies;
mod server_calls;
mod session;
mod state;
mod timer;
mod tracker_opener;
mod unwritten;
mod upload;
mod values;

pub(crate) use opener::TvmOpener;
pub(crate) use tracker_opener::TvmTrackerOpener;
pub use unwritten::finish_requests;
