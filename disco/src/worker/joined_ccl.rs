//! New communicators of a worker, before it enters them.

use rpc_core::Device;

use crate::ccl::communicators::Membership;

/// Communicators that a worker has joined and has not entered yet.
pub(super) struct JoinedCcl {
    pub(super) membership: Membership,
    pub(super) is_accelerated: bool,
    /// New default device of the worker.
    pub(super) device: Device,
}
