//! Costs of a good client beside hostile ones, and the rate of new clients:
//!
//!     cargo bench -p rpc-tests --bench hostile   (--json for a line of JSON for each result)
//!
//! A good client calls, one call after the other, over TCP, TLS and QUIC: alone, and then beside
//! peers that
//!
//! * open connections and never go on,
//! * begin handshakes with something wrong in them,
//! * ask for a lot and read nothing.
//!
//! Server, client and hostile peers are processes of their own; where there are cores for it the
//! server has one to itself, and the hostile peers yield to the client on the others, so that what
//! is seen is the server's doing. They come at a fixed rate. Alone and beside are measured in turn;
//! a figure is the median over the rounds, and a ratio the median of the rounds' ratios. Cold
//! handshakes are new connections, each with a session, by clients that the server has never seen.

// The bench is its own check: it panics at any unexpected result.
#![allow(clippy::unwrap_used)]

#[path = "../tests/faults/peers/mod.rs"]
mod peers;

use std::collections::VecDeque;
use std::future::Future;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rpc_core::proto::{Hello, MAGIC, Role};
use rpc_core::{Lane, Operation, TypedFunction};
use rpc_tests::forwarder::{Random, UdpForwarder, Weather};
use rpc_transports::{Address, ClientTls, Connector, Dial};
use rustix::process::{Resource, Rlimit, getrlimit, nice, setrlimit};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;

use peers::raw::{Raw, function_in, mutated, request};
use peers::{ServerPeer, Transport};

const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_millis(300);

/// Time limit within which the server is rid of hostile peers that have gone.
const PAUSE: Duration = Duration::from_millis(150);

/// Cold handshakes of one round.
const COLD: usize = 64;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.first().map(String::as_str) {
        Some("attack") => block_on(attack(&args[1], &args[2])),
        // `cargo bench` adds arguments of its own.
        _ => bench(args.iter().any(|arg| arg == "--json")),
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

fn bench(json: bool) {
    let cores = Cores::choose();
    for transport in [Transport::Tcp, Transport::Tls, Transport::Quic] {
        cores.enter(cores.server);
        let server = ServerPeer::with(transport, &[]);
        cores.enter(cores.others);
        for attack in ["half-open", "fuzzed", "never-reading"] {
            report(json, transport, attack, &beside(transport, attack, &server));
        }
        cold(json, transport, &server);
    }
}

/// Cores of the server and of the other processes; `None` on a machine with a single core.
struct Cores {
    server: Option<usize>,
    others: Option<usize>,
}

impl Cores {
    fn choose() -> Self {
        let allowed = sched_getaffinity(None).unwrap();
        let mut cores = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core));
        let (first, second) = (cores.next(), cores.next());
        if second.is_none() {
            eprintln!("there is one core for all: the figures are also those of the hostile peers' own work");
        }
        Self { server: first.filter(|_| second.is_some()), others: second }
    }

    /// Pins the thread, and the processes that it starts, to a core.
    fn enter(&self, core: Option<usize>) {
        let Some(core) = core else { return };
        let mut set = CpuSet::new();
        set.set(core);
        sched_setaffinity(None, &set).unwrap();
    }
}

/// One phase of a round.
struct Phase {
    rate: f64,
    p50: f64,
    p99: f64,
}

struct Round {
    alone: Phase,
    beside: Phase,
    attacks: f64,
}

fn beside(transport: Transport, attack: &str, server: &ServerPeer) -> Vec<Round> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let session = runtime.block_on(peers::connector().connect(server.address())).unwrap();
    let echo = runtime.block_on(session.function::<(i64,), i64>("rpc.echo").into_future()).unwrap();
    runtime.block_on(phase(&echo));
    let round = |_| {
        let alone = runtime.block_on(phase(&echo));
        let attackers = Attackers::start(transport, attack, server.address());
        let beside = runtime.block_on(phase(&echo));
        let attacks = attackers.stop();
        runtime.block_on(async { tokio::time::sleep(PAUSE).await });
        Round { alone, beside, attacks }
    };
    (0..ROUNDS).map(round).collect()
}

async fn phase(echo: &TypedFunction<(i64,), i64>) -> Phase {
    let begun = Instant::now();
    let mut calls = Vec::new();
    while begun.elapsed() < ROUND {
        let call = Instant::now();
        let number = calls.len() as i64;
        assert_eq!(echo.call((number,)).await.unwrap(), number, "a good client is served");
        calls.push(call.elapsed().as_secs_f64() * 1e6);
    }
    let rate = calls.len() as f64 / begun.elapsed().as_secs_f64();
    Phase { rate, p50: quantile(&mut calls, 0.5), p99: quantile(&mut calls, 0.99) }
}

fn quantile(values: &mut [f64], fraction: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * fraction).round() as usize]
}

fn median(rounds: &[Round], value: impl Fn(&Round) -> f64) -> f64 {
    quantile(&mut rounds.iter().map(value).collect::<Vec<_>>(), 0.5)
}

fn report(json: bool, transport: Transport, attack: &str, rounds: &[Round]) {
    let of = |value: fn(&Round) -> f64| median(rounds, value);
    let (alone, beside) = (of(|round| round.alone.rate), of(|round| round.beside.rate));
    let ratio = of(|round| round.beside.rate / round.alone.rate);
    let (p50_alone, p50) = (of(|round| round.alone.p50), of(|round| round.beside.p50));
    let (p99_alone, p99) = (of(|round| round.alone.p99), of(|round| round.beside.p99));
    let attacks = of(|round| round.attacks);
    let scheme = transport.scheme();
    if json {
        let line = serde_json::json!({
            "suite": scheme, "case": attack, "rounds": rounds.len(), "attacks_per_second": attacks,
            "calls_per_second": beside, "alone_calls_per_second": alone, "ratio": ratio,
            "p50_us": p50, "alone_p50_us": p50_alone, "p99_us": p99, "alone_p99_us": p99_alone,
        });
        return println!("{line}");
    }
    if (transport, attack) == (Transport::Tcp, "half-open") {
        println!(
            "calls/s, p50 and p99 in µs of a good client: alone, beside hostile peers, and the ratio of the rates"
        );
        println!("{:5} {:14} {:>9}  {:>22}  {:>22}  {:>5}", "", "hostile", "attacks/s", "alone", "beside", "ratio");
    }
    println!(
        "{scheme:5} {attack:14} {attacks:9.0}  {alone:8.0} {p50_alone:6.0} {p99_alone:6.0}  {beside:8.0} {p50:6.0} \
         {p99:6.0}  {ratio:5.2}"
    );
}

/// Opens new connections, each with a session.
fn cold(json: bool, transport: Transport, server: &ServerPeer) {
    let (mut rates, mut all) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        // A trust of its own gives each client a new connection, which resumes nothing.
        let connectors: Vec<_> = (0..COLD).map(|_| Connector::new().tls(peers::trust())).collect();
        let took: Vec<f64> = block_on(async {
            let mut took = Vec::new();
            for connector in &connectors {
                let begun = Instant::now();
                let session = connector.connect(server.address()).await.unwrap();
                took.push(begun.elapsed().as_secs_f64());
                drop(session);
            }
            took
        });
        rates.push(COLD as f64 / took.iter().sum::<f64>());
        all.extend(took.iter().map(|seconds| seconds * 1e6));
    }
    let (rate, p50, p99) = (quantile(&mut rates, 0.5), quantile(&mut all, 0.5), quantile(&mut all, 0.99));
    let scheme = transport.scheme();
    if json {
        let (case, n) = ("cold-handshake", all.len());
        let line = serde_json::json!({
            "suite": scheme, "case": case, "n": n, "sessions_per_second": rate, "p50_us": p50, "p99_us": p99,
        });
        return println!("{line}");
    }
    println!("{scheme:5} cold handshakes: {rate:.0} sessions/s, one after the other; p50 {p50:.0} µs, p99 {p99:.0} µs");
}

/// Process of hostile peers.
struct Attackers {
    child: Child,
    said: BufReader<ChildStdout>,
}

impl Attackers {
    /// Starts the process, and waits until its attacks run.
    fn start(transport: Transport, attack: &str, address: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["attack", attack, address]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        let mut this = Self { child, said };
        assert_eq!(this.line(), "under way", "{transport:?} {attack}");
        this
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// Number of attacks in a second.
    fn stop(mut self) -> f64 {
        drop(self.child.stdin.take());
        let rate = self.line().parse().expect("hostile peers say how many they were");
        self.child.wait().unwrap();
        rate
    }
}

static ATTACKS: AtomicU64 = AtomicU64::new(0);

/// Counts one attack. After the first ones it prints that the attacks run.
fn count() {
    if ATTACKS.fetch_add(1, Ordering::AcqRel) == 20 {
        println!("under way");
        std::io::stdout().flush().unwrap();
        std::thread::spawn(|| {
            let (begun, before) = (Instant::now(), ATTACKS.load(Ordering::Acquire));
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            let attacks = ATTACKS.load(Ordering::Acquire) - before;
            println!("{:.0}", attacks as f64 / begun.elapsed().as_secs_f64());
            std::process::exit(0);
        });
    }
}

async fn attack(attack: &str, address: &str) {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    // The good client has priority if both are on one core.
    let _ = nice(19);
    let datagrams = address.starts_with("quic");
    match attack {
        "half-open" if datagrams => half_open_quic(address).await,
        "half-open" => half_open(address).await,
        "fuzzed" if datagrams => fuzzed_datagrams(address).await,
        "fuzzed" => fuzzed(address).await,
        _ => never_reading(address).await,
    }
}

fn socket_address(address: &str) -> SocketAddr {
    address.split_once("://").unwrap().1.parse().unwrap()
}

/// Runs the attack a fixed number of times in each millisecond.
async fn at_rate(per_millisecond: usize, mut attack: impl AsyncFnMut()) {
    let mut clock = tokio::time::interval(Duration::from_millis(1));
    // Missed turns are skipped.
    clock.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    loop {
        clock.tick().await;
        for _ in 0..per_millisecond {
            attack().await;
            count();
        }
    }
}

/// Number of connections, larger than a server's limit on handshakes.
const HELD: usize = 1500;

async fn half_open(address: &str) {
    let (address, mut held) = (socket_address(address), VecDeque::new());
    at_rate(2, async || {
        let Ok(mut stream) = TcpStream::connect(address).await else { return };
        let _ = stream.write_all(&MAGIC[..3]).await;
        held.push_back(stream);
        if held.len() > HELD {
            held.pop_front();
        }
    })
    .await;
}

/// Begins connections whose clients never answer the server.
async fn half_open_quic(address: &str) {
    let hole = UdpForwarder::start(socket_address(address), Weather::default()).unwrap();
    hole.pass(true, false);
    let through: Address = format!("quic://{}", hole.address()).parse().unwrap();
    let mut held = VecDeque::new();
    at_rate(1, async || {
        let through = through.clone();
        held.push_back(tokio::spawn(async move { dial(&through).await }));
        if held.len() > HELD {
            held.pop_front().unwrap().abort();
        }
        tokio::task::yield_now().await;
    })
    .await;
}

async fn dial(address: &Address) {
    let options = Dial { tls: Some(ClientTls::unverified(None).unwrap()), ..Dial::default() };
    let _ = rpc_transports::Transports::default().dial(address, &options).await;
}

/// Returns the first bytes of a client of this kind of server.
async fn beginning(scheme: &str) -> Vec<u8> {
    let mut first = vec![0; 2000];
    let len = match scheme {
        "tcp" => return peers::hello(&Hello::new(Role::Client)),
        "tls" => {
            let catcher = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = format!("tls://{}", catcher.local_addr().unwrap()).parse().unwrap();
            let client = tokio::spawn(async move { dial(&address).await });
            let (mut stream, _) = catcher.accept().await.unwrap();
            let len = stream.read(&mut first).await.unwrap();
            client.abort();
            len
        }
        _ => {
            let catcher = UdpSocket::bind("127.0.0.1:0").await.unwrap();
            let address = format!("quic://{}", catcher.local_addr().unwrap()).parse().unwrap();
            let client = tokio::spawn(async move { dial(&address).await });
            let (len, _) = catcher.recv_from(&mut first).await.unwrap();
            client.abort();
            len
        }
    };
    first.truncate(len);
    first
}

async fn fuzzed(address: &str) {
    let valid = beginning(address.split_once(':').unwrap().0).await;
    let (address, mut random) = (socket_address(address), Random::new(53));
    at_rate(2, async || {
        let Ok(mut stream) = TcpStream::connect(address).await else { return };
        let _ = stream.write_all(&mutated(&valid, &mut random)).await;
    })
    .await;
}

async fn fuzzed_datagrams(address: &str) {
    let valid = beginning("quic").await;
    let (address, mut random) = (socket_address(address), Random::new(59));
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    at_rate(5, async || {
        let bytes = mutated(&valid, &mut random);
        let _ = socket.send_to(&bytes[..bytes.len().min(1400)], address).await;
    })
    .await;
}

/// Runs peers that ask for 64 MiB each, which costs the server nothing to make, read nothing, and
/// connect anew.
async fn never_reading(address: &str) {
    const PEERS: usize = 8;
    let mut peers = JoinSet::new();
    for _ in 0..PEERS {
        let address = address.to_owned();
        peers.spawn(async move {
            loop {
                let raw = Raw::dial_to(&address, ClientTls::unverified(None).unwrap()).await;
                let mut raw = raw.greet(&Hello { window: 64 << 20, ..Hello::new(Role::Client) }).await;
                raw.write(&request(1, Lane(0), Operation::GetFunction { name: "bulk.made".to_owned() })).await;
                let function = function_in(&raw.frame().await.unwrap().1);
                for id in 2..66 {
                    raw.write(&request(id, Lane(id as u32 % 8), Operation::Call { function, args: Vec::new() })).await;
                    count();
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        });
    }
    // A task ends only by a failure.
    peers.join_next().await.unwrap().unwrap()
}
