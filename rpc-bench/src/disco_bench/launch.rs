//! Sessions of each kind of launch, and the servers that they need.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use disco::{Advertise, DiscoSession, Options, ProcessSession, SocketSession, ThreadedSession};
use rpc_core::{LocalSession, RpcError, SessionLimits, SharedSession};
use rpc_server::cli::Failure;
use rpc_server::config::{ListenAddress, ServeConfig, ServeError, TrackerAddress, TrackerConfig};
use rpc_server::tracker::Tracker;
use rpc_server::{RpcServer, ServerProcess};
use rpc_transports::tracker::ServerRequest;
use rpc_transports::{
    Address, Bind, Certificate, Connector, OpenRequest, ServeOptions, Server, ServerTls, TokioSpawner,
};

use super::functions::registry;
use crate::certificates::Certificates;
use crate::child_process::{announce, exit_with_stdin};

/// Kind of launch of the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Launch {
    Threads,
    Processes,
    Tcp,
    Quic,
    Chain,
    Tracker,
    Tree,
    Relay,
}

impl Launch {
    pub(super) fn has_nodes(self) -> bool {
        !matches!(self, Self::Threads | Self::Processes)
    }
}

impl fmt::Display for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_possible_value().map_or(Ok(()), |value| f.write_str(value.get_name()))
    }
}

/// Servers and settings for sessions of one kind of launch and number of workers.
pub(super) struct Testbed {
    pub(super) launch: Launch,
    pub(super) workers: u32,
    nodes: Vec<ServerProcess>,
    connector: Connector,
    /// Forwarding server of `chain`, or the tracker.
    intermediary: Option<ServerProcess>,
    _folder: tempfile::TempDir,
}

impl Testbed {
    pub(super) fn set_up(launch: Launch, workers: u32, nodes: u32) -> Result<Self, Failure> {
        let folder = tempfile::tempdir().map_err(|error| Failure::local("cannot make a folder", error))?;
        let mut connector = Connector::new();
        let certificates = match launch {
            Launch::Quic => Some(Certificates::make(folder.path().join("certificates"))?),
            _ => None,
        };
        if let Some(certificates) = &certificates {
            connector = connector.tls(certificates.client_tls()?);
        }
        let scheme = if launch == Launch::Quic { "quic" } else { "tcp" };
        let start = |flags: &[&str]| -> Result<ServerProcess, Failure> {
            let program = std::env::current_exe().map_err(|error| Failure::local("cannot find this program", error))?;
            let mut command = Command::new(program);
            command.arg("disco-node").arg(format!("{scheme}://127.0.0.1:0"));
            command.args(flags);
            if let Some(certificates) = &certificates {
                command.arg("--certificates").arg(certificates.folder());
            }
            Ok(ServerProcess::spawn(command)?)
        };
        let count = if launch.has_nodes() { nodes.min(workers) } else { 0 };
        let intermediary = match launch {
            Launch::Chain => Some(start(&["--forward"])?),
            Launch::Tracker => Some(start(&["--be-tracker"])?),
            _ => None,
        };
        let address = intermediary.as_ref().map_or_else(String::new, |intermediary| intermediary.address().to_owned());
        let flags: &[&str] = match launch {
            Launch::Tracker => &["--tracker", &address],
            Launch::Tree => &["--forward"],
            _ => &[],
        };
        let nodes = (0..count).map(|_| start(flags)).collect::<Result<_, _>>()?;
        if launch == Launch::Chain {
            connector = connector.via(&address);
        }
        Ok(Self { launch, workers, nodes, connector, intermediary, _folder: folder })
    }

    /// Starts a session.
    pub(super) fn start(&self) -> disco::Result<DiscoSession> {
        let session = match self.launch {
            Launch::Threads => ThreadedSession::new(self.workers, 1).registry(registry()).start(),
            Launch::Processes => ProcessSession::new(self.workers, 1).start(),
            Launch::Tcp | Launch::Quic | Launch::Chain | Launch::Tracker | Launch::Tree | Launch::Relay => {
                let mut options = Options::default();
                options.data_addresses = vec![Ipv4Addr::LOCALHOST.into(); self.nodes.len()];
                if self.launch == Launch::Relay {
                    options.allow_controller_relay = true;
                    options.advertise = Some(Advertise::new(|_, _| UNREACHABLE));
                }
                let nodes = self.nodes.len() as u32;
                let per_node = self.workers / nodes.max(1);
                let mut session = match &self.intermediary {
                    Some(tracker) if self.launch == Launch::Tracker => {
                        let all = ServerRequest::new(KEY).count(nodes).distinct();
                        SocketSession::from_tracker(tracker.address(), all, per_node, 1)
                    }
                    _ => SocketSession::new(self.nodes.iter().map(ServerProcess::address), per_node, 1),
                };
                if self.launch == Launch::Tree {
                    session = session.fan_out(1);
                }
                session.connector(self.connector.clone()).options(options).start()
            }
        };
        session.wait()
    }
}

/// Key under which nodes register.
const KEY: &str = "rpc-bench";

/// Most threads of a session at a node.
const MAX_THREADS: usize = 2048;

/// Address on which nothing listens.
const UNREACHABLE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(127, 7, 7, 7)), 1);

#[derive(Args, Debug)]
pub(crate) struct NodeArgs {
    /// Address to listen on
    listen: Address,
    /// Forward to any address
    #[arg(long)]
    forward: bool,
    /// Folder with certificates
    #[arg(long)]
    certificates: Option<PathBuf>,
    /// Tracker to register with
    #[arg(long)]
    tracker: Option<TrackerAddress>,
    /// Run as a tracker
    #[arg(long)]
    be_tracker: bool,
}

/// Runs as a node until standard input ends.
pub(crate) fn run_node(args: NodeArgs) -> Result<(), Failure> {
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
        return RpcServer::new(registry()).config(config).run_blocking().map(drop).map_err(failed);
    }
    let mut options = Bind::default();
    if let Some(certificates) = args.certificates.map(Certificates::existing) {
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
            // Workers are threads of the session.
            let limits = SessionLimits { max_threads: MAX_THREADS, ..SessionLimits::default() };
            let session = LocalSession::builder(functions.clone()).limits(limits);
            let session = session.spawner(Arc::new(TokioSpawner::current()));
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
