//! New communicators of a worker, before it enters them.

use std::sync::Arc;

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

/// Meshes of a worker before it entered new communicators without waiting for the others. They come
/// back if the controller finds that others have not entered theirs.
pub(super) struct FormerMeshes {
    /// Epoch of the new communicators.
    pub(super) epoch: u64,
    pub(super) meshes: Arc<[Mesh]>,
    /// Number of their bytes, which the worker has counted.
    pub(super) bytes: usize,
}
