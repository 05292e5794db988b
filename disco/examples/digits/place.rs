//! Launches of an example's workers, each started from nothing and ended with the program.
//!
//! `rpc-server`, which stands above this crate, is a development dependency: its servers and
//! trackers are places of workers.

use std::process::{Command, ExitCode};

use clap::Subcommand;
use disco::{Completion, DiscoSession, Options, ProcessSession, SocketSession, ThreadedSession};
use rpc_core::Registry;
use rpc_server::config::{ServeSettings, TrackerSettings};
use rpc_server::isolate::gpu;
use rpc_server::server::exit_code;
use rpc_server::{RpcServer, ServerProcess, logging, pki, tracker};
use rpc_transports::tracker::ServerRequest;
use rpc_transports::{ClientTls, Connector, Tokens};

/// Over what the controller reaches its workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Over {
    /// Threads of this process
    Threads,
    /// Child processes of this one
    Processes,
    /// Servers at TCP addresses of this machine
    Tcp,
    /// Servers at QUIC addresses of this machine, which share a token with the controller
    Quic,
    /// Servers behind one that forwards to them
    Chain,
    /// Servers that a tracker hands out
    Tracker,
}

/// Other parts that the program can play, for itself or for one on another machine.
#[derive(Subcommand)]
pub(crate) enum Role {
    /// Serve the functions of workers
    Serve(#[command(flatten)] Box<ServeSettings>),
    /// Hand out servers
    Tracker(#[command(flatten)] Box<TrackerSettings>),
}

impl Role {
    pub(crate) fn run(self, registry: Registry) -> ExitCode {
        let served = match self {
            Self::Serve(settings) => settings.resolve().map_err(Into::into).and_then(|config| {
                logging::init(&config.log_level, config.log_format);
                RpcServer::new(registry).devices(gpu::for_server(&config)).config(config).run_blocking()
            }),
            Self::Tracker(settings) => {
                settings.resolve().map_err(Into::into).and_then(|config| tracker::Tracker::run_blocking(&config))
            }
        };
        exit_code::of_server(&served).into()
    }
}

/// Arguments that say where the workers run.
#[derive(clap::Args)]
pub(crate) struct PlaceArgs {
    /// Number of workers
    #[arg(long, default_value_t = 4, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=64))]
    workers: u32,
    /// Place in which they run
    #[arg(long, value_enum, default_value_t = Over::Processes)]
    over: Over,
    /// Use servers that this program has started elsewhere, with "serve", and --workers at each;
    /// may be repeated
    #[arg(long, value_name = "ADDRESS", conflicts_with = "over")]
    connect: Vec<String>,
}

impl PlaceArgs {
    /// Returns true if the workers are child processes of this one.
    #[allow(dead_code, reason = "not every example asks")]
    pub(crate) fn is_over_processes(&self) -> bool {
        self.connect.is_empty() && self.over == Over::Processes
    }

    /// Returns true if servers run the workers, of which this program knows nothing but what they
    /// offer.
    #[allow(dead_code, reason = "not every example asks")]
    pub(crate) fn is_on_servers(&self) -> bool {
        !self.connect.is_empty() || !matches!(self.over, Over::Threads | Over::Processes)
    }
}

/// Session and servers. Dropping it ends the servers.
pub(crate) struct Place {
    pub(crate) session: DiscoSession,
    _servers: Vec<ServerProcess>,
}

type Failure = Box<dyn std::error::Error>;

impl Place {
    /// `flags` are for the servers, where any are started.
    #[allow(dead_code, reason = "not every example has the default options")]
    pub(crate) fn open(args: PlaceArgs, registry: Registry, flags: &[&str]) -> Result<Self, Failure> {
        Self::open_with(args, registry, flags, Options::default())
    }

    /// As [`open`](Self::open), with these options of the session.
    pub(crate) fn open_with(
        args: PlaceArgs,
        registry: Registry,
        flags: &[&str],
        options: Options,
    ) -> Result<Self, Failure> {
        let PlaceArgs { workers, over, connect } = args;
        if !connect.is_empty() {
            let session = SocketSession::new(connect, workers, 1).options(options).start().wait()?;
            return Ok(Self { session, _servers: Vec::new() });
        }
        let mut servers = Vec::new();
        let session = match over {
            Over::Threads => {
                let devices = gpu::devices(&registry);
                ThreadedSession::new(workers, 1).registry(registry).devices(devices).options(options).start()
            }
            // This program again: `serve_if_worker`, in `main`, does the rest.
            Over::Processes => ProcessSession::new(workers, 1).options(options).start(),
            Over::Tcp => SocketSession::new(serve(&mut servers, workers, flags)?, 1, 1).options(options).start(),
            Over::Quic => over_quic(&mut servers, workers, flags, options)?,
            Over::Chain => {
                let addresses = serve(&mut servers, workers, flags)?;
                let gateway = serve(&mut servers, 1, &["--allow-forward", "tcp://127.0.0.1:*"])?.remove(0);
                SocketSession::new(addresses, 1, 1).connector(Connector::new().via(&gateway)).options(options).start()
            }
            Over::Tracker => {
                let tracker = spawn(&["tracker", "--listen", "tcp://127.0.0.1:0", "--exit-with-stdin"])?;
                let address = tracker.address().to_owned();
                let of_tracker = ["--tracker", &address, "--tracker-key", "workers"];
                serve(&mut servers, workers, &[&of_tracker, flags].concat())?;
                // It goes last.
                servers.push(tracker);
                let all = ServerRequest::new("workers").count(workers).distinct();
                SocketSession::from_tracker(address, all, 1, 1).options(options).start()
            }
        };
        Ok(Self { session: session.wait()?, _servers: servers })
    }
}

/// QUIC is always encrypted; who the other side is the token proves, to both.
fn over_quic(
    servers: &mut Vec<ServerProcess>,
    workers: u32,
    flags: &[&str],
    options: Options,
) -> Result<Completion<DiscoSession>, Failure> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("token");
    let token = pki::token_file::generate(Some("workers"))?;
    pki::token_file::store(&token, &file)?;
    let path = file.to_str().ok_or("the folder for temporary files has no name in UTF-8")?;
    let quic = ["--listen", "quic://127.0.0.1:0", "--token-file", path];
    let addresses = serve(servers, workers, &[&quic, flags].concat())?;
    let connector = Connector::new().tokens(Tokens::parse(&token)?).tls(ClientTls::unverified(None)?);
    Ok(SocketSession::new(addresses, 1, 1).connector(connector).options(options).start())
}

/// Starts so many servers with the functions of workers. Their addresses.
fn serve(servers: &mut Vec<ServerProcess>, count: u32, flags: &[&str]) -> Result<Vec<String>, Failure> {
    let listen: &[&str] = if flags.contains(&"--listen") { &[] } else { &["--listen", "tcp://127.0.0.1:0"] };
    let mut addresses = Vec::new();
    for _ in 0..count {
        let server = spawn(&[&["serve", "--exit-with-stdin", "--log-level", "warn"], listen, flags].concat())?;
        addresses.push(server.address().to_owned());
        servers.push(server);
    }
    Ok(addresses)
}

/// This program, as something else.
fn spawn(args: &[&str]) -> Result<ServerProcess, Failure> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(args);
    Ok(ServerProcess::spawn(command)?)
}
