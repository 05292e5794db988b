//! Tickets: reports of the workers that a controller waits for.

use std::task::Waker;

use rpc_core::{LocalValue, Tensor};

use crate::error::Failure;

/// Report or value that a caller waits for.
pub(super) struct Ticket {
    /// Number of workers that have yet to report.
    pub(super) waiting: u32,
    /// A tensor whose bytes are coming.
    pub(super) incoming: Option<Tensor>,
    pub(super) content: Option<std::result::Result<LocalValue, Failure>>,
    pub(super) waker: Option<Waker>,
}
