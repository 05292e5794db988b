//! Nodes whose workers execute nothing, many in one process.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Subcommand};
use disco::SimulatedWorkers;
use rpc_core::{LocalSession, Registry, RpcError, SharedSession};
use rpc_server::cli::Failure;
use rpc_transports::{Address, Bind, OpenRequest, ServeOptions, Server, TokioSpawner};

use crate::child_process::{announce, exit_with_stdin};

/// Longest time in which a node may reach the controller.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Args, Debug)]
pub(crate) struct SimulatedNodesArgs {
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand, Debug)]
enum Role {
    /// Serve nodes: the first ones at sockets in a folder, the others at memory addresses
    Serve { folder: PathBuf, roots: u32, nodes: u32 },
    /// Dial a controller
    Join { controller: Address, nodes: u32 },
}

/// Returns the address of one of the nodes that the controller opens.
pub(super) fn root_address(folder: &Path, number: u32) -> String {
    format!("unix:{}", folder.join(number.to_string()).display())
}

/// Returns the address of one of the nodes that others open.
pub(super) fn inner_address(number: u32) -> String {
    format!("memory:scale-{number}")
}

/// Runs as nodes until standard input ends.
pub(crate) fn run_simulated_nodes(args: SimulatedNodesArgs) -> Result<(), Failure> {
    rpc_server::raise_file_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.map_err(|error| Failure::local("cannot start the runtime", error))?;
    let registry = Registry::new();
    disco::register(&registry);
    runtime.block_on(async {
        match args.role {
            Role::Serve { folder, roots, nodes } => {
                for number in 0..nodes {
                    let address = if number < roots { root_address(&folder, number) } else { inner_address(number) };
                    let address: Address = address.parse().map_err(|error| {
                        Failure::local("cannot serve", std::io::Error::other(format!("{address}: {error}")))
                    })?;
                    let listening = node(&registry).listen(&address, &Bind::default()).await;
                    listening.map_err(|error| Failure::Connect(error.into()))?;
                }
                announce(&root_address(&folder, 0));
            }
            Role::Join { controller, nodes } => {
                announce(&controller.to_string());
                for _ in 0..nodes {
                    let (server, controller) = (node(&registry), controller.clone());
                    tokio::spawn(async move {
                        if let Err(error) = disco::join_with(&server, &controller, None, CONNECT_TIMEOUT).await {
                            eprintln!("a node has not joined: {error}");
                        }
                    });
                }
            }
        }
        exit_with_stdin()?;
        std::future::pending().await
    })
}

/// Returns a node with simulated workers, which opens others at memory addresses.
fn node(registry: &Registry) -> Server {
    let registry = registry.clone();
    let open = move |request: &OpenRequest| -> Result<SharedSession, RpcError> {
        let session = LocalSession::builder(registry.clone()).spawner(Arc::new(TokioSpawner::current()));
        let session = session.extension(Arc::new(request.onward.clone())).extension(Arc::new(SimulatedWorkers));
        Ok(Arc::new(session.build()))
    };
    let options = ServeOptions { allow_forward: vec!["memory:*".to_owned()], ..ServeOptions::default() };
    Server::new(Arc::new(open), options)
}
