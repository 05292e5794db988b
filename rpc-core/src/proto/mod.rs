//! The native protocol as state machines: bytes, calls and the current time go in; bytes, events
//! and the next timeout come out.
//!
//! This module has no sockets, threads or clock. A driver owns one [`Handshake`] and then one
//! [`ClientEndpoint`] or [`ServerEndpoint`] for each channel. Whenever something has happened, it
//! does these steps in this order:
//!
//! 1. **Input.** Passes received bytes to `handle_input`, or, while `bulk_target` offers memory,
//!    reads straight into that memory and calls `bulk_filled`. While `is_paused` returns true, does
//!    the steps 2 and 3 and calls `handle_input` again before it reads on. Passes the current time
//!    to `handle_timeout`.
//! 2. **Events.** Calls `poll_event` until it returns `None`. Handling an event may add commands.
//! 3. **Output.** Calls `stage`, which moves queued frames to where `slices` shows them, and
//!    reports the bytes that the channel took with `advance`.
//! 4. **Time.** Calls `handle_timeout` no later than `poll_timeout` says.
//!
//! `PROTOCOL.md` at the root of the repository specifies the bytes.

mod buffer_pool;
mod client;
mod codec;
mod credit_frame;
mod endpoint;
mod frame;
mod handshake;
mod id_map;
mod keep_alive_defaults;
mod message;
mod output;
mod server;
mod shared_window;

pub use client::{Admission, ClientEndpoint, ClientEvent};
pub use codec::{CodecError, decode_value, encode_value};
pub use endpoint::{BulkRead, EndpointConfig};
pub use frame::{FrameError, FrameHeader, HEADER_LEN, Kind, MAX_BODY_PART};
pub use handshake::{
    ANONYMOUS, Anonymous, Handshake, HandshakeConfig, Hello, Identity, IdentityStep, MAGIC, Negotiated, PIPES, Role,
    Transcript, VERSION_MAX, VERSION_MIN,
};
pub use keep_alive_defaults::{KEEP_ALIVE, SILENT_INTERVALS};
pub use message::{decode_reply, decode_request, encode_reply, encode_request};
pub use server::{InPlaceWriter, ServerEndpoint, ServerEvent};
pub use shared_window::{
    ConfirmWindow, MIN_SHARED, OfferWindow, OfferedWindow, OpenWindow, SHARED_MEMORY, Window, WindowOpener,
};
