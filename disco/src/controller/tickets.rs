//! Tickets: what a controller waits for until its workers say so.

use std::task::Waker;

use rpc_core::{LocalValue, Tensor};

use crate::error::Failure;

/// Something that somebody waits for.
pub(super) struct Ticket {
    /// How many workers have still to say so.
    pub(super) waiting: u32,
    /// A tensor whose bytes are coming.
    pub(super) incoming: Option<Tensor>,
    pub(super) content: Option<std::result::Result<LocalValue, Failure>>,
    pub(super) waker: Option<Waker>,
}
