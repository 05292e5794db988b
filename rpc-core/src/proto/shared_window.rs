//! Windows: memory that both peers of a session have mapped, and through which large payloads go.
//!
//! A session that has the feature [`SHARED_MEMORY`] gets at most one window. The client
//! [offers](OfferWindow) it when it first has a large payload to send or to receive, and the server
//! [opens](OpenWindow) it or refuses. From then on a frame with a large payload may carry the
//! number of a slot of the window instead of the payload's bytes. All else about the frame is as
//! without a window: its order, its cost, and where the receiver puts the payload. While all slots
//! are in use large payloads wait.
//!
//! This module knows no memory. A driver passes functions that make and open windows.

use std::collections::VecDeque;
use std::fmt;

use bytes::Bytes;

use crate::error::Result;

/// Name of the feature of sessions that may have a window.
pub const SHARED_MEMORY: &str = "shared_memory";

/// Smallest payload of a frame, in bytes, that goes through a window: smaller ones cost less where
/// they are.
pub const MIN_SHARED: usize = 256 << 10;

/// Memory that this side shares with its peer: slots of some size, some for each direction.
pub trait Window: Send + fmt::Debug {
    /// Copies a payload of `len` bytes, which lies in `pieces`, to a free slot of this side, and
    /// returns the slot's number. The slot is in use until the peer has [taken](Self::take) the
    /// payload. Returns `None` if no slot is free, or if none is large enough.
    fn put(&mut self, pieces: &VecDeque<Bytes>, len: usize) -> Option<u16>;

    /// Returns true if a slot of this side is free. If not, the peer's next [`take`](Self::take)
    /// says that this side waits.
    fn has_room(&mut self) -> bool;

    /// Copies the beginning of a slot of the peer to `into`, and frees the slot. The peer may
    /// change the bytes at any time, so `into` may hold anything afterwards. Returns true if the
    /// peer waits for a free slot, and `None` if there is no such slot, or if it is smaller than
    /// `into`.
    fn take(&mut self, slot: u16, into: &mut [u8]) -> Option<bool>;
}

/// Function that makes a window for a client. Returns `None` if the system has no memory for it.
pub type OfferWindow = Box<dyn FnOnce() -> Option<OfferedWindow> + Send>;

/// Window that a client has made.
pub struct OfferedWindow {
    /// Body of the frame that offers the window, for [`OpenWindow`].
    pub offer: Vec<u8>,
    /// Function that returns the window if it is given the server's proof of having opened it.
    pub confirm: ConfirmWindow,
}

/// Function that checks the answer to an offer.
pub type ConfirmWindow = Box<dyn FnOnce(&[u8]) -> Option<Box<dyn Window>> + Send>;

/// Function that opens the window of an offer at a server. Returns the window, and a proof that it
/// is open, which is not empty.
pub type OpenWindow = Box<dyn FnOnce(&[u8]) -> Result<(Box<dyn Window>, Vec<u8>)> + Send>;

/// Way of a server to open a window.
pub struct WindowOpener {
    /// Memory in bytes that an open window takes.
    pub window_bytes: u64,
    /// Function that opens the window.
    pub open: OpenWindow,
}

/// State of a client's window that is not in use.
pub(super) enum ClientWindow {
    /// There is none, and none is to be offered.
    None,
    /// It may be offered.
    Possible(OfferWindow),
    /// The server has not answered the offer.
    Offered(ConfirmWindow),
}
