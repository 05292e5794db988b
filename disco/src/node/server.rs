//! The server of a node: its sessions offer workers.

use std::net::IpAddr;
use std::sync::Arc;

use rpc_core::{AccessControl, Devices, LocalSession, Registry, Result as RpcResult, SharedSession};
use rpc_transports::{OpenRequest, ServeOptions, Server, TokioSpawner};

use crate::node::self_start::WorkerSettings;
use crate::worker::rendezvous::DataAddress;

/// Makes a server of sessions with the functions of `registry`, for a client with these rights.
/// Inside of a tokio runtime.
pub(super) fn server_of(
    registry: Registry,
    devices: Devices,
    node: WorkerSettings,
    access: Option<Arc<dyn AccessControl>>,
    data: Option<IpAddr>,
    options: ServeOptions,
) -> Server {
    let options = ServeOptions { max_open_files: node.max_open_files, ..options };
    let open = move |request: &OpenRequest| -> RpcResult<SharedSession> {
        let session = LocalSession::builder(registry.clone()).devices(devices.clone()).limits(node.limits.clone());
        let mut session = session
            .spawner(Arc::new(TokioSpawner::current()))
            .extension(Arc::new(request.onward.clone()))
            .open_files(request.open_files.clone());
        if let Some(access) = &access {
            session = session.access_control(access.clone());
        }
        if let Some(data) = data {
            session = session.extension(Arc::new(DataAddress(data)));
        }
        if let Some(weights) = &node.weights {
            session = session.extension(Arc::new(weights.clone()));
        }
        Ok(Arc::new(session.build()))
    };
    Server::new(Arc::new(open), options)
}
