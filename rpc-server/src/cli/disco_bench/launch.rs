//! Where the workers of a bench run: sessions of each kind of launch, and the servers that they need.

use std::fmt;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use disco::{DiscoSession, Options, ProcessSession, SocketSession, ThreadedSession};
use rpc_core::{LocalSession, RpcError, SharedSession};
use rpc_transports::{
    Address, Certificate, Connector, ListenOptions, OpenRequest, ServeOptions, Server, ServerTls, TokioSpawner,
};

use super::functions::registry;
use crate::cli::bench::{Certificates, announce, exit_with_stdin};
use crate::cli::failure::Failure;
use crate::spawn::ServerProcess;

/// A way to launch workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Over {
    Threads,
    Processes,
    Tcp,
    Quic,
    Chain,
}

impl Over {
    pub(super) fn has_nodes(self) -> bool {
        !matches!(self, Self::Threads | Self::Processes)
    }
}

impl fmt::Display for Over {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_possible_value().map_or(Ok(()), |value| f.write_str(value.get_name()))
    }
}

/// All that sessions of one kind and size need, to be started any number of times.
pub(super) struct Lab {
    pub(super) over: Over,
    pub(super) workers: u32,
    nodes: Vec<ServerProcess>,
    connector: Connector,
    _gateway: Option<ServerProcess>,
    _folder: tempfile::TempDir,
}

impl Lab {
    pub(super) fn set_up(over: Over, workers: u32, nodes: u32) -> Result<Self, Failure> {
        let folder = tempfile::tempdir().map_err(|error| Failure::local("cannot make a folder", error))?;
        let mut connector = Connector::new().keep_alive(KEEP_ALIVE);
        let certificates = match over {
            Over::Quic => Some(Certificates::make(folder.path().join("certificates"))?),
            _ => None,
        };
        if let Some(certificates) = &certificates {
            connector = connector.tls(certificates.trust()?);
        }
        let scheme = if over == Over::Quic { "quic" } else { "tcp" };
        let start = |forward: bool| -> Result<ServerProcess, Failure> {
            let program = std::env::current_exe().map_err(|error| Failure::local("cannot find this program", error))?;
            let mut command = Command::new(program);
            command.arg("disco-bench-node").arg(format!("{scheme}://127.0.0.1:0"));
            if forward {
                command.arg("--forward");
            }
            if let Some(certificates) = &certificates {
                command.arg("--certificates").arg(certificates.folder());
            }
            Ok(ServerProcess::spawn(command)?)
        };
        let count = if over.has_nodes() { nodes.min(workers) } else { 0 };
        let nodes = (0..count).map(|_| start(false)).collect::<Result<_, _>>()?;
        let gateway = if over == Over::Chain { Some(start(true)?) } else { None };
        if let Some(gateway) = &gateway {
            connector = connector.via(gateway.address());
        }
        Ok(Self { over, workers, nodes, connector, _gateway: gateway, _folder: folder })
    }

    /// From nothing to a session.
    pub(super) fn start(&self) -> disco::Result<DiscoSession> {
        let session = match self.over {
            Over::Threads => ThreadedSession::new(self.workers, 1).registry(registry()).start(),
            Over::Processes => ProcessSession::new(self.workers, 1).start(),
            Over::Tcp | Over::Quic | Over::Chain => {
                let mut options = Options::default();
                options.data_addresses = vec![Ipv4Addr::LOCALHOST.into(); self.nodes.len()];
                let addresses = self.nodes.iter().map(ServerProcess::address);
                let per_node = self.workers / (self.nodes.len() as u32).max(1);
                let session = SocketSession::new(addresses, per_node, 1);
                session.connector(self.connector.clone()).options(options).start()
            }
        };
        session.wait()
    }
}

/// As long as Disco's own default.
const KEEP_ALIVE: std::time::Duration = std::time::Duration::from_millis(200);

#[derive(Args, Debug)]
pub(in crate::cli) struct NodeArgs {
    /// Where to listen
    listen: Address,
    /// Forward to anywhere
    #[arg(long)]
    forward: bool,
    /// A folder with certificates
    #[arg(long)]
    certificates: Option<PathBuf>,
}

/// Is a node, until standard input ends.
pub(in crate::cli) fn run_node(args: NodeArgs) -> Result<(), Failure> {
    let mut options = ListenOptions::default();
    if let Some(certificates) = args.certificates.map(Certificates::made) {
        let read = |path: PathBuf| std::fs::read(&path).map_err(|error| Failure::file("cannot read", &path, error));
        let (chain, key) = (read(certificates.certificate())?, read(certificates.key())?);
        let tls = Certificate::from_pem(&chain, &key).and_then(|certificate| ServerTls::new(certificate, None));
        options.tls =
            Some(tls.map_err(|error| Failure::local("cannot use the certificates", std::io::Error::other(error)))?);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.map_err(|error| Failure::local("cannot start the runtime", error))?;
    runtime.block_on(async {
        let functions = registry();
        disco::register(&functions);
        let open = move |_: &OpenRequest| -> Result<SharedSession, RpcError> {
            let spawner = Arc::new(TokioSpawner::current());
            Ok(Arc::new(LocalSession::builder(functions.clone()).spawner(spawner).build()))
        };
        let mut served = ServeOptions::default();
        if args.forward {
            served.allow_forward = vec!["*".to_owned()];
        }
        let server = Server::new(Arc::new(open), served);
        let address = server.listen(&args.listen, &options).await;
        announce(&address.map_err(|error| Failure::Connect(error.into()))?.to_string());
        exit_with_stdin()?;
        std::future::pending().await
    })
}
