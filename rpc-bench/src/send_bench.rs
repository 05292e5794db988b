//! `rpc-bench send`: a tensor that one server sends to another, beside a bare copy between two
//! processes.
//!
//! The bare copy is a process that writes the bytes to another over one connection, from a buffer
//! to a buffer, and gets one byte when all have arrived. A send makes a connection of its own each
//! time, and is asked for by a client in a third process, as is the bare copy.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use clap::{Args, ValueEnum};
use rpc_core::client::SendRoute;
use rpc_core::{DataType, Device, RemoteTensor, Session};
use rpc_server::cli::{Failure, Output, digits};
use rpc_server::config::{Isolate, ServeConfig};
use rpc_server::{RpcServer, ServerProcess};
use rpc_transports::{Address, Connector};
use serde::Serialize;

use crate::child_process::{announce, exit_with_stdin};
use crate::statistics::{quantile, rounded};

#[derive(Args, Debug)]
pub(crate) struct SendBenchArgs {
    /// Number of samples of each way, taken in turn
    #[arg(long, env = "RPC_BENCH_PAIRS", default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    pairs: u32,
    /// MiB of the tensor
    #[arg(long, env = "RPC_BENCH_MIB", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=4096))]
    mib: u32,
}

/// Process that takes part in a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Role {
    /// Server of ours that may send to others of this machine.
    Source,
    /// Server of ours that may not.
    Destination,
    /// Bare process that writes to the target when it is asked to.
    BareSource,
    /// Bare process that is written to.
    BareDestination,
}

#[derive(Args, Debug)]
pub(crate) struct ChildArgs {
    role: Role,
    /// Folder of a server
    #[arg(long)]
    workdir: Option<PathBuf>,
    /// Address that a bare source writes to
    #[arg(long)]
    target: Option<Address>,
}

/// Measures all ways in turn.
pub(crate) fn run(output: &Output, args: &SendBenchArgs) -> Result<(), Failure> {
    let folder = tempfile::tempdir().map_err(|error| Failure::local("cannot make a folder", error))?;
    let servers = [(Role::Source, "source"), (Role::Destination, "destination"), (Role::Destination, "other")];
    let [source, destination, other] = servers.map(|(role, name)| start(role, &folder.path().join(name), None));
    let (source, destination, other) = (source?, destination?, other?);
    let bare_destination = start(Role::BareDestination, folder.path(), None)?;
    let bare_source = start(Role::BareSource, folder.path(), Some(bare_destination.address()))?;

    let len = u64::from(args.mib) << 20;
    let direct = OurCopy::new(&source, &destination, len)?;
    let through_client = OurCopy::new(&other, &destination, len)?;
    let mut bare = BareCopy::new(bare_source.address(), len).map_err(bare_failed)?;
    let mut rates = [Vec::new(), Vec::new(), Vec::new()];
    // The first sample of each way warms it up.
    for sample in 0..=args.pairs {
        let taken = [direct.rate(true)?, bare.rate().map_err(bare_failed)?, through_client.rate(false)?];
        if sample > 0 {
            rates.iter_mut().zip(taken).for_each(|(rates, rate)| rates.push(rate));
        }
    }
    report(output, &rates)
}

/// The JSON output. Rates are medians; ratios are medians of those of neighbours.
#[derive(Serialize)]
struct Case {
    case: &'static str,
    unit: &'static str,
    better: &'static str,
    n: usize,
    median: f64,
    bare: f64,
    through_client: f64,
    ratio_bare: f64,
    ratio_through_client: f64,
}

fn report(output: &Output, rates: &[Vec<f64>; 3]) -> Result<(), Failure> {
    let [direct, bare, client] = rates.each_ref().map(|rates| quantile(rates, 0.5));
    let ratio = |others: &[f64]| {
        let ratios: Vec<_> = rates[0].iter().zip(others).map(|(ours, other)| ours / other).collect();
        quantile(&ratios, 0.5)
    };
    let (to_bare, to_client) = (ratio(&rates[1]), ratio(&rates[2]));
    if output.is_json() {
        return output.json(&Case {
            case: "send",
            unit: "MB/s",
            better: "higher",
            n: rates[0].len(),
            median: rounded(direct),
            bare: rounded(bare),
            through_client: rounded(client),
            ratio_bare: rounded(to_bare),
            ratio_through_client: rounded(to_client),
        });
    }
    let [direct, bare, client, to_bare, to_client] = [direct, bare, client, to_bare, to_client].map(digits);
    output.line(&format!(
        "send: {direct} MB/s from server to server; bare copy {bare}, ratio {to_bare}; through the client {client}, \
         ratio {to_client}"
    ))
}

/// Two sessions, and a tensor in each.
struct OurCopy {
    from: RemoteTensor,
    to: RemoteTensor,
}

impl OurCopy {
    fn new(source: &ServerProcess, destination: &ServerProcess, len: u64) -> Result<Self, Failure> {
        let connect = |server: &ServerProcess| -> Result<Session, Failure> {
            Connector::new().connect_blocking(server.address()).map_err(Failure::Connect)
        };
        let (near, far) = (connect(source)?, connect(destination)?);
        let shape = [len as i64];
        let alloc = |session: &Session| session.alloc(Device::cpu(), DataType::U8, &shape).wait();
        let copy = Self { from: alloc(&near)?, to: alloc(&far)? };
        // Memory that has never been written to may be one page of zeros.
        for tensor in [&copy.from, &copy.to] {
            tensor.session().copy_to_remote(tensor, vec![1; len as usize]).wait()?;
        }
        Ok(copy)
    }

    /// Returns the rate of one send in MB/s.
    fn rate(&self, is_direct: bool) -> Result<f64, Failure> {
        let began = Instant::now();
        let route = self.from.session().send(&self.from, &self.to.session(), &self.to).wait()?;
        let rate = megabytes_per_second(self.from.size_bytes(), began);
        match route {
            SendRoute::Direct { .. } if is_direct => Ok(rate),
            SendRoute::ThroughClient { .. } if !is_direct => Ok(rate),
            other => Err(Failure::local("a send took another route", io::Error::other(other.to_string()))),
        }
    }
}

/// Control connection to a bare source.
struct BareCopy {
    control: TcpStream,
    len: u64,
}

impl BareCopy {
    fn new(source: &str, len: u64) -> io::Result<Self> {
        let mut control = connect(source)?;
        control.write_all(&len.to_le_bytes())?;
        Ok(Self { control, len })
    }

    /// Returns the rate of one copy in MB/s.
    fn rate(&mut self) -> io::Result<f64> {
        let began = Instant::now();
        self.control.write_all(&[1])?;
        self.control.read_exact(&mut [0])?;
        Ok(megabytes_per_second(self.len, began))
    }
}

fn megabytes_per_second(len: u64, began: Instant) -> f64 {
    len as f64 / 1e6 / began.elapsed().as_secs_f64()
}

fn bare_failed(error: io::Error) -> Failure {
    Failure::local("the bare copy failed", error)
}

fn connect(address: &str) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address.trim_start_matches("tcp://"))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn start(role: Role, workdir: &Path, target: Option<&str>) -> Result<ServerProcess, Failure> {
    let program = std::env::current_exe().map_err(|error| Failure::local("cannot find this program", error))?;
    let name = role.to_possible_value();
    let mut command = Command::new(program);
    command.args(["send-child", name.as_ref().map_or("", |name| name.get_name())]).arg("--workdir").arg(workdir);
    if let Some(target) = target {
        command.args(["--target", target]);
    }
    Ok(ServerProcess::spawn(command)?)
}

/// Runs as a process that takes part, until standard input ends.
pub(crate) fn run_child(args: ChildArgs) -> Result<(), Failure> {
    if matches!(args.role, Role::Source | Role::Destination) {
        return serve(args);
    }
    let listener = TcpListener::bind("127.0.0.1:0").map_err(bare_failed)?;
    announce(&Address::from(listener.local_addr().map_err(bare_failed)?).to_string());
    exit_with_stdin()?;
    let (stream, _) = listener.accept().map_err(bare_failed)?;
    let copied = match args.target {
        Some(target) => write_when_asked(stream, &target.to_string()),
        None => read_all(stream),
    };
    copied.map_err(bare_failed)
}

fn serve(args: ChildArgs) -> Result<(), Failure> {
    let mut config = ServeConfig::default();
    config.listen = vec![Address::from(SocketAddr::from(([127, 0, 0, 1], 0))).into()];
    config.exit_with_stdin = true;
    config.isolate = Isolate::None;
    config.workdir = args.workdir.unwrap_or(config.workdir);
    if args.role == Role::Source {
        config.allow_peer = vec!["tcp://127.0.0.1:*".to_owned()];
    }
    match rpc_server::server::exit_code::of_server(&RpcServer::default().config(config).run_blocking()) {
        0 => Ok(()),
        code => Err(Failure::Reported(code)),
    }
}

/// Writes a buffer to `target` for each byte of `control`, and answers it when all has arrived.
fn write_when_asked(mut control: TcpStream, target: &str) -> io::Result<()> {
    control.set_nodelay(true)?;
    let mut len = [0; 8];
    control.read_exact(&mut len)?;
    let mut to = connect(target)?;
    to.write_all(&len)?;
    let buffer = vec![1; usize::try_from(u64::from_le_bytes(len)).map_err(io::Error::other)?];
    while control.read(&mut [0])? > 0 {
        to.write_all(&buffer)?;
        to.read_exact(&mut [0])?;
        control.write_all(&[1])?;
    }
    Ok(())
}

/// Reads a buffer again and again, and answers each time with one byte.
fn read_all(mut from: TcpStream) -> io::Result<()> {
    from.set_nodelay(true)?;
    let mut len = [0; 8];
    from.read_exact(&mut len)?;
    let mut buffer = vec![1; usize::try_from(u64::from_le_bytes(len)).map_err(io::Error::other)?];
    loop {
        match from.read_exact(&mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            read => read?,
        }
        from.write_all(&[1])?;
    }
}
