//! New communicators of a worker, before it enters them.

use rpc_core::Device;

use crate::ccl::communicators::Membership;
use crate::wire::mesh::Mesh;

/// Communicators that a worker has joined and has not entered yet.
pub(super) struct JoinedCcl {
    pub(super) membership: Membership,
    pub(super) is_accelerated: bool,
    /// New default device of the worker.
    pub(super) device: Device,
    /// Meshes of the session.
    pub(super) meshes: Vec<Mesh>,
    /// Number of bytes of the meshes, which the worker has counted.
    pub(super) mesh_bytes: usize,
}
