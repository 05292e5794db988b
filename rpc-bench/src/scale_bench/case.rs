//! One session: its start, calls to all of its workers, and the memory of its controller.

use std::fmt;
use std::process::Command;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use disco::{DiscoSession, NodeListener, SocketSession, ThreadedSession};
use rpc_server::ServerProcess;
use rpc_server::cli::Failure;
use rpc_transports::{Bind, Connector, ServeOptions};
use serde::Serialize;

use crate::disco_bench::{EMPTY, registry};
use crate::statistics::quantile;

/// Kind of session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Kind {
    Threads,
    Nodes,
    Simulated,
    DialIn,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_possible_value().map_or(Ok(()), |value| f.write_str(value.get_name()))
    }
}

#[derive(Args, Debug)]
pub(crate) struct CaseArgs {
    /// Kind of session
    kind: Kind,
    /// Number of workers
    workers: u32,
    /// Time for calls, in seconds
    seconds: f64,
}

/// Figures of a session: one line of output, of words in this order.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) nodes: u32,
    pub(super) start_ms: f64,
    pub(super) call_ms: f64,
    pub(super) call_p99_ms: f64,
    pub(super) n: usize,
    pub(super) controller_bytes: u64,
}

impl Measured {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace();
        Some(Self {
            nodes: words.next()?.parse().ok()?,
            start_ms: words.next()?.parse().ok()?,
            call_ms: words.next()?.parse().ok()?,
            call_p99_ms: words.next()?.parse().ok()?,
            n: words.next()?.parse().ok()?,
            controller_bytes: words.next()?.parse().ok()?,
        })
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { nodes, start_ms, call_ms, call_p99_ms, n, controller_bytes } = self;
        write!(f, "{nodes} {start_ms} {call_ms} {call_p99_ms} {n} {controller_bytes}")
    }
}

/// Most nodes with workers that execute commands.
const MAX_NODES: u32 = 8;

/// Most simulated workers of a node.
const MAX_SIMULATED: u32 = 64;

/// Most nodes that the controller opens itself, and that each node opens.
const FAN_OUT: u32 = 64;

/// Least number of calls.
const MIN_CALLS: usize = 5;

/// Measures one session, and prints the [`Measured`].
pub(crate) fn run_case(args: &CaseArgs) -> Result<(), Failure> {
    rpc_server::raise_file_limit();
    let testbed = Testbed::set_up(args.kind, args.workers)?;
    // What any session takes once, such as the threads of the runtime, is no cost of its workers.
    let first = ThreadedSession::new(1, 1).start().wait()?;
    first.sync_all().wait()?;
    first.shutdown().wait()?;
    let before = memory_bytes()?;
    let began = Instant::now();
    let (session, _dialling_in) = testbed.start()?;
    session.sync_all().wait()?;
    let start_ms = began.elapsed().as_secs_f64() * 1e3;
    let empty = session.get_global_func(EMPTY)?;
    session.sync_all().wait()?;
    let limit = Duration::try_from_secs_f64(args.seconds).unwrap_or(Duration::MAX);
    let (mut calls, began) = (Vec::new(), Instant::now());
    while calls.len() < MIN_CALLS || began.elapsed() < limit {
        let began = Instant::now();
        empty.call(())?;
        session.sync_all().wait()?;
        calls.push(began.elapsed().as_secs_f64() * 1e3);
    }
    let measured = Measured {
        nodes: testbed.nodes,
        start_ms,
        call_ms: quantile(&calls, 0.5),
        call_p99_ms: quantile(&calls, 0.99),
        n: calls.len(),
        controller_bytes: memory_bytes()?.saturating_sub(before),
    };
    println!("{measured}");
    drop(empty);
    Ok(session.shutdown().wait()?)
}

/// Requirements of a session before it starts.
struct Testbed {
    kind: Kind,
    workers: u32,
    nodes: u32,
    servers: Vec<ServerProcess>,
    folder: tempfile::TempDir,
    runtime: tokio::runtime::Runtime,
}

impl Testbed {
    fn set_up(kind: Kind, workers: u32) -> Result<Self, Failure> {
        let folder = tempfile::tempdir().map_err(|error| Failure::local("cannot make a folder", error))?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.map_err(|error| Failure::local("cannot start the runtime", error))?;
        // Each node has as many workers.
        let nodes = match kind {
            Kind::Threads => 1,
            Kind::Nodes => largest_divisor(workers, MAX_NODES),
            Kind::Simulated => workers / largest_divisor(workers, MAX_SIMULATED),
            Kind::DialIn => workers,
        };
        let mut servers = Vec::new();
        match kind {
            Kind::Threads | Kind::DialIn => {}
            Kind::Nodes => {
                for _ in 0..nodes {
                    servers.push(start(&["disco-node", "tcp://127.0.0.1:0"])?);
                }
            }
            Kind::Simulated => {
                let (path, roots) = (folder.path().display().to_string(), nodes.min(FAN_OUT).to_string());
                servers.push(start(&["simulated-nodes", "serve", &path, &roots, &nodes.to_string()])?);
            }
        }
        Ok(Self { kind, workers, nodes, servers, folder, runtime })
    }

    /// Starts the session; and the process of nodes that dial in.
    fn start(&self) -> Result<(DiscoSession, Option<ServerProcess>), Failure> {
        let per_node = self.workers / self.nodes;
        let session = match self.kind {
            Kind::Threads => ThreadedSession::new(self.workers, 1).registry(registry()).start(),
            Kind::Nodes => SocketSession::new(self.servers.iter().map(ServerProcess::address), per_node, 1).start(),
            Kind::Simulated => SocketSession::over(self.roots()?, per_node, 1).fan_out(FAN_OUT as usize).start(),
            Kind::DialIn => {
                let most = 2 * super::MAX_REAL as usize;
                let serve = ServeOptions { max_sessions_per_peer: most, ..ServeOptions::default() };
                let listener = NodeListener::bind_with("tcp://127.0.0.1:0", Bind::default(), serve).wait()?;
                let session = SocketSession::dialled_by(self.nodes as usize, &listener, per_node, 1).start();
                let nodes = start(&["simulated-nodes", "join", &listener.address(), &self.nodes.to_string()])?;
                return Ok((session.wait()?, Some(nodes)));
            }
        };
        Ok((session.wait()?, None))
    }

    /// Opens sessions with the nodes that the controller opens itself. Returns them with the
    /// addresses of those below each.
    fn roots(&self) -> Result<Vec<(rpc_core::Session, Vec<String>)>, Failure> {
        let roots = self.nodes.min(FAN_OUT);
        let mut below = roots..self.nodes;
        let root = |number: u32| {
            let address = super::simulated_nodes::root_address(self.folder.path(), number);
            let session = self.runtime.block_on(Connector::new().connect(&address)).map_err(Failure::Connect)?;
            let count = (below.len() as u32).div_ceil(roots - number) as usize;
            let addresses = below.by_ref().take(count).map(super::simulated_nodes::inner_address);
            Ok((session, addresses.collect()))
        };
        (0..roots).map(root).collect()
    }
}

/// Starts this program again, as a server.
fn start(arguments: &[&str]) -> Result<ServerProcess, Failure> {
    let program = std::env::current_exe().map_err(|error| Failure::local("cannot find this program", error))?;
    let mut command = Command::new(program);
    command.args(arguments);
    Ok(ServerProcess::spawn(command)?)
}

/// Returns the largest divisor of `number` up to `most`.
fn largest_divisor(number: u32, most: u32) -> u32 {
    (1..=most).rev().find(|divisor| number.is_multiple_of(*divisor)).unwrap_or(1)
}

/// Returns the memory that this process has written to, in bytes.
fn memory_bytes() -> Result<u64, Failure> {
    let unknown = |error| Failure::local("cannot tell the memory of this process", error);
    let status = std::fs::read_to_string("/proc/self/status").map_err(unknown)?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kibibytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kibibytes.map(|kibibytes| kibibytes << 10).ok_or_else(|| unknown(std::io::Error::other("no RssAnon")))
}
