//! `rpc-bench forward`: a connection that is carried to a service near a server, as `rpc-cli
//! forward` carries it, beside bare relays.
//!
//! Such a connection passes two processes of ours, `rpc-cli` and the server. Two bare relays, one
//! after the other, are the same way without sessions, identity and policy; one bare relay is the
//! shortest way that is not direct.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::Instant;

use clap::{Args, ValueEnum};
use rpc_server::cli::{Failure, Output, digits};
use rpc_server::config::ServeConfig;
use rpc_server::{RpcServer, ServerProcess};
use rpc_transports::{Address, Bind, ConnectError, Connector, Transports};
use serde::Serialize;

use crate::child_process::{announce, exit_with_stdin};
use crate::statistics::{quantile, rounded};

/// Length of what a client or the service writes at a time.
const PIECE_LEN: usize = 256 << 10;

#[derive(Args, Debug)]
pub(crate) struct ForwardBenchArgs {
    /// Number of samples of each way, taken in turn
    #[arg(long, env = "RPC_BENCH_PAIRS", default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    pairs: u32,
    /// MiB that a sample carries
    #[arg(long, env = "RPC_BENCH_MIB", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=4096))]
    mib: u32,
}

/// A process on the way to the service.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Role {
    /// Server that may carry to the target.
    Server,
    /// Process that has a server carry each connection to the target, as `rpc-cli forward` does.
    Client,
}

#[derive(Args, Debug)]
pub(crate) struct ChildArgs {
    role: Role,
    /// Address of the service, or of the next process on the way
    target: Address,
    /// Server of a client; folder of a server
    extra: Option<String>,
}

/// Direction of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    ToService,
    FromService,
}

/// Measures all ways in turn.
pub(crate) fn run(output: &Output, args: &ForwardBenchArgs) -> Result<(), Failure> {
    let folder = tempfile::tempdir().map_err(|error| Failure::local("cannot make a folder", error))?;
    let service = start_service(u64::from(args.mib) << 20).map_err(|error| Failure::local("cannot listen", error))?;
    let service = Address::from(service).to_string();
    let workdir = folder.path().join("workdir").display().to_string();
    let server = start(Role::Server, &service, Some(&workdir))?;
    let ours = start(Role::Client, &service, Some(server.address()))?;
    let near = start_relay(&service)?;
    let far = start_relay(near.address())?;
    let ways = [service.as_str(), near.address(), far.address(), ours.address()];

    for direction in [Direction::ToService, Direction::FromService] {
        let mut rates = ways.map(|_| Vec::new());
        // The first sample of each way warms it up.
        for sample in 0..=args.pairs {
            for (address, rates) in ways.iter().zip(&mut rates) {
                let rate = transfer(address, direction, args.mib).map_err(|error| Failure::local(*address, error))?;
                if sample > 0 {
                    rates.push(rate);
                }
            }
        }
        report(output, direction, &rates)?;
    }
    Ok(())
}

/// A line of the JSON output. Rates are medians; ratios are medians of those of neighbours.
#[derive(Serialize)]
struct Case {
    case: &'static str,
    unit: &'static str,
    better: &'static str,
    n: usize,
    median: f64,
    two_relays: f64,
    one_relay: f64,
    direct: f64,
    ratio_two_relays: f64,
    ratio_one_relay: f64,
}

fn report(output: &Output, direction: Direction, rates: &[Vec<f64>; 4]) -> Result<(), Failure> {
    let [direct, relay, relays, ours] = rates.each_ref().map(|rates| quantile(rates, 0.5));
    let ratio = |others: &[f64]| {
        let ratios: Vec<_> = rates[3].iter().zip(others).map(|(ours, other)| ours / other).collect();
        quantile(&ratios, 0.5)
    };
    let (to_one, to_two) = (ratio(&rates[1]), ratio(&rates[2]));
    let case = match direction {
        Direction::ToService => "to the service",
        Direction::FromService => "from the service",
    };
    if output.is_json() {
        return output.json(&Case {
            case,
            unit: "MB/s",
            better: "higher",
            n: rates[3].len(),
            median: rounded(ours),
            two_relays: rounded(relays),
            one_relay: rounded(relay),
            direct: rounded(direct),
            ratio_two_relays: rounded(to_two),
            ratio_one_relay: rounded(to_one),
        });
    }
    let [ours, relays, relay, direct, to_one, to_two] = [ours, relays, relay, direct, to_one, to_two].map(digits);
    output.line(&format!(
        "{case}: {ours} MB/s forwarded; two bare relays {relays}, ratio {to_two}; one {relay}, ratio {to_one}; \
         direct {direct}"
    ))
}

fn start(role: Role, target: &str, extra: Option<&str>) -> Result<ServerProcess, Failure> {
    let name = role.to_possible_value();
    spawn(&["forward-child", name.as_ref().map_or("", |name| name.get_name()), target], extra)
}

/// Starts the bare relay of `rpc-bench rpc`.
fn start_relay(target: &str) -> Result<ServerProcess, Failure> {
    spawn(&["session-server", "relay", "tcp://127.0.0.1:0", target], None)
}

fn spawn(args: &[&str], extra: Option<&str>) -> Result<ServerProcess, Failure> {
    let program = std::env::current_exe().map_err(|error| Failure::local("cannot find this program", error))?;
    let mut command = Command::new(program);
    command.args(args).args(extra);
    Ok(ServerProcess::spawn(command)?)
}

/// Starts a service in a thread, until this process ends. A client that begins with one byte gets
/// `len` bytes; from others all is read, and answered with one byte.
fn start_service(len: u64) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let serve = move || {
        for stream in listener.incoming() {
            // What goes wrong here the client finds out.
            let _ = stream.and_then(|stream| serve_one(stream, len));
        }
    };
    std::thread::Builder::new().name("service".to_owned()).spawn(serve)?;
    Ok(address)
}

fn serve_one(mut stream: TcpStream, len: u64) -> io::Result<()> {
    let mut direction = [0];
    stream.read_exact(&mut direction)?;
    if direction == [Direction::FromService as u8] {
        return write_all(&mut stream, len);
    }
    read_all(&mut stream)?;
    stream.write_all(&[1])
}

/// Carries so many MiB over a connection of its own. Returns the rate in MB/s.
fn transfer(address: &str, direction: Direction, mib: u32) -> io::Result<f64> {
    let len = u64::from(mib) << 20;
    let address = address.trim_start_matches("tcp://");
    let mut stream = TcpStream::connect(address)?;
    stream.write_all(&[direction as u8])?;
    let began = Instant::now();
    let received = match direction {
        Direction::ToService => {
            write_all(&mut stream, len)?;
            stream.shutdown(Shutdown::Write)?;
            (read_all(&mut stream)? == 1).then_some(len)
        }
        Direction::FromService => Some(read_all(&mut stream)?),
    };
    if received != Some(len) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(len as f64 / 1e6 / began.elapsed().as_secs_f64())
}

fn write_all(stream: &mut TcpStream, len: u64) -> io::Result<()> {
    let piece = vec![1; PIECE_LEN];
    let mut left = len;
    while left > 0 {
        let next = left.min(PIECE_LEN as u64);
        stream.write_all(&piece[..next as usize])?;
        left -= next;
    }
    Ok(())
}

/// Reads until the end. Returns the number of bytes.
fn read_all(stream: &mut TcpStream) -> io::Result<u64> {
    let (mut bytes, mut piece) = (0, vec![0; PIECE_LEN]);
    while let read @ 1.. = stream.read(&mut piece)? {
        bytes += read as u64;
    }
    Ok(bytes)
}

/// Runs as a process on the way until standard input ends.
pub(crate) fn run_child(args: ChildArgs) -> Result<(), Failure> {
    match args.role {
        Role::Server => serve(args),
        Role::Client => rpc_server::cli::runtime()?.block_on(forward(args)),
    }
}

fn serve(args: ChildArgs) -> Result<(), Failure> {
    let mut config = ServeConfig::default();
    config.listen = vec![Address::from(SocketAddr::from(([127, 0, 0, 1], 0))).into()];
    config.exit_with_stdin = true;
    config.allow_port = vec![args.target.to_string()];
    config.workdir = args.extra.map_or(config.workdir, Into::into);
    match rpc_server::server::exit_code::of_server(&RpcServer::default().config(config).run_blocking()) {
        0 => Ok(()),
        code => Err(Failure::Reported(code)),
    }
}

async fn forward(args: ChildArgs) -> Result<(), Failure> {
    let listen = Address::from(SocketAddr::from(([127, 0, 0, 1], 0)));
    let failed = |error| Failure::Connect(ConnectError::from(error));
    let mut listener = Transports::default().bind(&listen, &Bind::default()).await.map_err(failed)?;
    announce(&listener.local_address().to_string());
    exit_with_stdin()?;
    let (connector, server) = (Connector::new(), args.extra.unwrap_or_default());
    loop {
        let local = listener.accept().await.map_err(failed)?;
        let (connector, server, target) = (connector.clone(), server.clone(), args.target.clone());
        // What goes wrong here the client finds out.
        tokio::spawn(async move {
            let tunnel = connector.open_tunnel(&server, &target).await.map_err(io::Error::other)?;
            tunnel.join(local).await.map(drop)
        });
    }
}
