//! Tickets: the waits of callers for reports of workers, by number.

use std::task::Waker;

use rpc_core::{LocalValue, Tensor};

use crate::error::Failure;

/// A wait of a caller for reports of workers, or for the content of a register.
pub(super) struct Ticket {
    /// Number of workers that have yet to report.
    pub(super) waiting: u32,
    /// Tensor whose bytes are being received.
    pub(super) incoming: Option<Tensor>,
    pub(super) content: Option<std::result::Result<LocalValue, Failure>>,
    pub(super) waker: Option<Waker>,
}
