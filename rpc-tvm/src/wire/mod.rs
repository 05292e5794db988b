//! TVM's own RPC protocol, as state machines without I/O and without a clock: what a server needs
//! so that the client of `tvm.rpc` works with it, and what a client needs to use TVM's servers.
//!
//! It is the protocol that TVM 0.22 and later speak (the text of its version has been `0.8.0` since
//! TVM 0.8; earlier releases encode values in another way). One TCP connection is one session:
//!
//! ```text
//! client                                          server
//!   i32 magic 0xff271, i32 length, key     ──►             hello.rs
//!          ◄──   i32 code, i32 length, key of the server
//!   frame: InitServer, then one request after the other  ──►   server.rs, request.rs
//!          ◄──   one frame for each, in order              reply.rs
//!
//! frame       u64 length of the rest | i32 code | body
//! sequence    i32 count | count × (i32 type index | payload)    value.rs
//! tensor      u64 data, i32 device type, i32 device index, i32 dimensions, u8 code, u8 bits,
//!             u16 lanes, i64 × dimensions, u64 byte offset       tensor_header.rs
//! ```
//!
//! All numbers are little-endian, and nothing is aligned. An empty frame means nothing and may
//! stand between any two others.
//!
//! [`ServerWire`] is the server's half of a connection. Its driver reads into
//! [`ServerWire::input`], takes events from [`ServerWire::poll_event`], and writes what the
//! functions of this module encode. A frame is announced before it is kept, so that the driver can
//! charge it, or refuse it; a refused frame is read and dropped, and the session goes on.
//!
//! [`ClientWire`] is the client's half, in the same manner: it is told which reply comes next, and
//! announces those that are large.
//!
//! [`TrackerWire`] is the tracker's half of a connection to TVM's tracker, another protocol with a
//! magic number of its own.
//!
//! [`ProxyWire`] is the proxy's half of a connection to TVM's proxy up to the answer: from then on
//! the proxy passes bytes. [`ProxyPool`] pairs servers and clients.
//!
//! # Limits
//!
//! A peer's numbers are checked before memory is reserved for them: the length of a key
//! ([`MAX_KEY`]), of a frame's body ([`WireLimits::max_body`]), the number of values
//! ([`MAX_VALUES`]) and of dimensions ([`MAX_DIMENSIONS`]). The data of copies are never collected
//! here: the driver takes them in pieces.

mod client;
#[cfg(test)]
mod client_tests;
mod frame;
mod frame_code;
mod hello;
mod proxy;
mod proxy_pool;
#[cfg(test)]
mod proxy_tests;
mod reader;
mod reply;
mod request;
mod server;
mod tensor_header;
#[cfg(test)]
mod tests;
mod tracker;
mod tracker_message;
mod tracker_reply;
#[cfg(test)]
mod tracker_tests;
mod value;

pub use client::{ClientEvent, ClientWire, Expected, LargeBody, ServerReply};
pub use frame_code::FrameCode;
pub use hello::{Hello, HelloAnswer, HelloKey, MAX_KEY, ServerAnswer, TRACKER_MAGIC, WIRE_MAGIC};
pub use proxy::{ParkedServerWire, ProxyHello, ProxyRole, ProxyWire};
pub use proxy_pool::{ProxyArrival, ProxyPool, WaitId};
pub use reader::WireError;
pub use reply::{
    CallResult, ResultKind, copy_ack_header, exception, returned, returned_bytes_header, returned_call, returned_text,
    shutdown, timeout_text,
};
pub use request::{PROTOCOL_VERSION, Request};
pub use server::{ServerEvent, ServerWire, WireLimits};
pub use tensor_header::{MAX_DIMENSIONS, TensorHeader};
pub use tracker::{TrackerEvent, TrackerWire};
pub use tracker_message::{InfoPort, MAX_TRACKER_MESSAGE, PeerInfo, TrackerMessage};
pub use tracker_reply::{TrackerAnswer, TrackerGrant, TrackerReply, TrackerSummary};
pub use value::{MAX_VALUES, Text, WireValue, encode_values};
