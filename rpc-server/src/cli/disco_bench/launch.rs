//! Where the workers of a bench run: sessions of each kind of launch, and the servers that they need.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use disco::{Advertise, DiscoSession, Options, ProcessSession, SocketSession, ThreadedSession};
use rpc_core::{LocalSession, RpcError, SharedSession};
use rpc_transports::tracker::ServerRequest;
use rpc_transports::{
    Address, Certificate, Connector, ListenOptions, OpenRequest, ServeOptions, Server, ServerTls, TokioSpawner,
};

use super::functions::registry;
use crate::cli::bench::{Certificates, announce, exit_with_stdin};
use crate::cli::failure::Failure;
use crate::config::{ListenAddress, ServeConfig, ServeError, TrackerAddress, TrackerConfig};
use crate::server::RpcServer;
use crate::spawn::ServerProcess;
use crate::tracker::Tracker;

/// A way to launch workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Over {
    Threads,
    Processes,
    Tcp,
    Quic,
    Chain,
    Tracker,
    Tree,
    Relay,
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
    /// The server that forwards, or the tracker.
    between: Option<ServerProcess>,
    _folder: tempfile::TempDir,
}

impl Lab {
    pub(super) fn set_up(over: Over, workers: u32, nodes: u32) -> Result<Self, Failure> {
        let folder = tempfile::tempdir().map_err(|error| Failure::local("cannot make a folder", error))?;
        let mut connector = Connector::new();
        let certificates = match over {
            Over::Quic => Some(Certificates::make(folder.path().join("certificates"))?),
            _ => None,
        };
        if let Some(certificates) = &certificates {
            connector = connector.tls(certificates.trust()?);
        }
        let scheme = if over == Over::Quic { "quic" } else { "tcp" };
        let start = |flags: &[&str]| -> Result<ServerProcess, Failure> {
            let program = std::env::current_exe().map_err(|error| Failure::local("cannot find this program", error))?;
            let mut command = Command::new(program);
            command.arg("disco-bench-node").arg(format!("{scheme}://127.0.0.1:0"));
            command.args(flags);
            if let Some(certificates) = &certificates {
                command.arg("--certificates").arg(certificates.folder());
            }
            Ok(ServerProcess::spawn(command)?)
        };
        let count = if over.has_nodes() { nodes.min(workers) } else { 0 };
        let between = match over {
            Over::Chain => Some(start(&["--forward"])?),
            Over::Tracker => Some(start(&["--be-tracker"])?),
            _ => None,
        };
        let address = between.as_ref().map_or_else(String::new, |between| between.address().to_owned());
        let flags: &[&str] = match over {
            Over::Tracker => &["--tracker", &address],
            Over::Tree => &["--forward"],
            _ => &[],
        };
        let nodes = (0..count).map(|_| start(flags)).collect::<Result<_, _>>()?;
        if over == Over::Chain {
            connector = connector.via(&address);
        }
        Ok(Self { over, workers, nodes, connector, between, _folder: folder })
    }

    /// From nothing to a session.
    pub(super) fn start(&self) -> disco::Result<DiscoSession> {
        let session = match self.over {
            Over::Threads => ThreadedSession::new(self.workers, 1).registry(registry()).start(),
            Over::Processes => ProcessSession::new(self.workers, 1).start(),
            Over::Tcp | Over::Quic | Over::Chain | Over::Tracker | Over::Tree | Over::Relay => {
                let mut options = Options::default();
                options.data_addresses = vec![Ipv4Addr::LOCALHOST.into(); self.nodes.len()];
                if self.over == Over::Relay {
                    options.allow_controller_relay = true;
                    options.advertise = Some(Advertise::new(|_, _| NOWHERE));
                }
                let nodes = self.nodes.len() as u32;
                let per_node = self.workers / nodes.max(1);
                let mut session = match &self.between {
                    Some(tracker) if self.over == Over::Tracker => {
                        let all = ServerRequest::new(KEY).count(nodes).distinct();
                        SocketSession::from_tracker(tracker.address(), all, per_node, 1)
                    }
                    _ => SocketSession::new(self.nodes.iter().map(ServerProcess::address), per_node, 1),
                };
                if self.over == Over::Tree {
                    session = session.fan_out(1);
                }
                session.connector(self.connector.clone()).options(options).start()
            }
        };
        session.wait()
    }
}

/// What nodes register as.
const KEY: &str = "disco-bench";

/// Nobody listens there.
const NOWHERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(127, 7, 7, 7)), 1);

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
    /// Register there
    #[arg(long)]
    tracker: Option<TrackerAddress>,
    /// Be that
    #[arg(long)]
    be_tracker: bool,
}

/// Is a node, until standard input ends.
pub(in crate::cli) fn run_node(args: NodeArgs) -> Result<(), Failure> {
    let listen = vec![ListenAddress(args.listen.clone())];
    let failed = |error: ServeError| Failure::local("cannot serve", std::io::Error::other(error));
    if args.be_tracker {
        let config = TrackerConfig { listen, exit_with_stdin: true, ..TrackerConfig::default() };
        return Tracker::run_blocking(&config).map(drop).map_err(failed);
    }
    if let Some(tracker) = args.tracker {
        let config = ServeConfig {
            listen,
            tracker: vec![tracker],
            tracker_key: Some(KEY.to_owned()),
            exit_with_stdin: true,
            ..ServeConfig::default()
        };
        return RpcServer::builder()
            .registry(registry())
            .config(config)
            .build()
            .run_blocking()
            .map(drop)
            .map_err(failed);
    }
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
        let open = move |request: &OpenRequest| -> Result<SharedSession, RpcError> {
            let session = LocalSession::builder(functions.clone()).spawner(Arc::new(TokioSpawner::current()));
            Ok(Arc::new(session.extension(Arc::new(request.onward.clone())).build()))
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
