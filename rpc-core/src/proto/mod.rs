//! The native protocol as state machines: bytes, calls and the time go in; bytes, events and the next timeout come out.
//!
//! There is no socket, thread or clock in here. A driver owns one [`Handshake`] and then one [`ClientEndpoint`] or
//! [`ServerEndpoint`] for each channel, and does this, in this order, whenever something has happened:
//!
//! 1. **Input.** Bytes that were read go to `handle_input`, or, while `bulk_target` offers memory, straight into that
//!    memory, followed by `bulk_filled`. Passed time goes to `handle_timeout`.
//! 2. **Events.** `poll_event` until it is empty. Acting on one may add commands.
//! 3. **Output.** `stage` moves what is queued to where `slices` shows it; what the channel takes is reported with
//!    `advance`.
//! 4. **Time.** `poll_timeout` says when to call `handle_timeout` next.
//!
//! `PROTOCOL.md` at the root of the repository specifies the bytes.

mod client;
mod codec;
mod frame;
mod handshake;
mod ids;
mod link;
mod message;
mod output;
mod pool;
mod server;

pub use client::{Admission, ClientEndpoint, ClientEvent};
pub use codec::{CodecError, decode_value, encode_value};
pub use frame::{FrameError, FrameHeader, HEADER_LEN, Kind, MAX_BODY_PART};
pub use handshake::{
    ANONYMOUS, Anonymous, Handshake, HandshakeConfig, Hello, Identity, IdentityStep, MAGIC, Negotiated, Role,
    Transcript, VERSION_MAX, VERSION_MIN,
};
pub use link::{BulkRead, LinkConfig};
pub use message::{decode_reply, decode_request, encode_reply, encode_request};
pub use server::{Place, ServerEndpoint, ServerEvent};
