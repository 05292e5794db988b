//! A tracker under load:
//!
//!     cargo bench -p rpc-tests --bench tracker   (--json for a line of JSON for each result)
//!
//! Registers 2,000 servers, each over a session of its own, and then makes 500 requests a second,
//! whether or not those before them have been answered. Each place that is granted is taken, held
//! for a while and given back, as servers report it; meanwhile all leases are renewed. The tracker
//! is a process of its own, with the settings of `rpc-server tracker`.
//!
//! A grant is the time from the request to the ticket, seen by the client: `kept` over sessions
//! that stay, as programs have them that ask again and again, and `new` over a session of its own
//! for each, the opening included, as commands have it. The peak of the tracker's memory is over
//! all of it.
//!
//! `tracker_vs_tvm.py` runs this program, too, as the client of a tracker that is there already:
//! `grants TRACKER COUNT` with one server that it registers itself, and `cycles TRACKER COUNT` with
//! a server that is registered as `board`.

// The bench is its own check: it panics at any unexpected result.
#![allow(clippy::unwrap_used)]

#[path = "../tests/faults/peers/mod.rs"]
mod peers;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rpc_core::{Pack, RemoteFunction, RemoteObject, Result, Session, TypedFunction};
use rpc_transports::tracker::{
    DeviceOffer, Grant, MESSAGES, Reach, Registered, Registration, Renewed, ServerRequest, ServerStatus, TrackerClient,
    Use, functions,
};
use rpc_transports::{Bind, Connector, OpenRequest, ServeOptions, Server};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use peers::TrackerPeer;

const SERVERS: usize = 2000;

/// Number of keys, each of as many servers.
const KEYS: usize = 20;

const REQUESTS_PER_SECOND: u64 = 500;

/// Duration of requests over kept sessions, and over new ones.
const DURATIONS: [Duration; 2] = [Duration::from_secs(10), Duration::from_secs(5)];

/// Time for which a server is used.
const HOLD: Duration = Duration::from_millis(100);

/// Number of kept sessions.
const CLIENTS: usize = 50;

/// Target figures.
const P99_AIM: Duration = Duration::from_millis(20);
const MEMORY_AIM: u64 = 64 << 20;

fn main() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    match args.first().map(String::as_str) {
        Some("grants") => runtime.block_on(grants(&args[1], args[2].parse().unwrap())),
        Some("cycles") => runtime.block_on(cycles(&args[1], args[2].parse().unwrap())),
        // `cargo bench` adds arguments of its own.
        _ => runtime.block_on(bench(args.iter().any(|arg| arg == "--json"))),
    }
}

async fn bench(json: bool) {
    // The servers are made up, and cannot prove that they are at their address.
    let tracker = TrackerPeer::start(&["--allow-advertise", "tcp://127.0.0.1"]);
    let site = Site::start().await;
    let begun = Instant::now();
    let pool = Pool::register(tracker.address(), &site, SERVERS).await;
    let registered = begun.elapsed();
    let memory = peers::memory(tracker.pid(), "VmRSS");
    if json {
        let seconds = registered.as_secs_f64();
        let line = serde_json::json!({
            "suite": "tracker", "case": "register", "n": SERVERS, "seconds": seconds, "memory_bytes": memory,
        });
        println!("{line}");
    } else {
        println!("{SERVERS} servers registered in {registered:.2?}; memory {}", mebibytes(memory));
    }
    // The tracker dials each server at its address, which is not measured here.
    let client = TrackerClient::connect(tracker.address()).await.unwrap();
    while client.summary().await.unwrap().servers.iter().any(|server| server.reach == Reach::Untried) {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let kept = Kept::open(tracker.address(), CLIENTS).await;
    for (case, how, duration) in [
        ("kept", Sessions::Kept(kept), DURATIONS[0]),
        ("new", Sessions::New(tracker.address().to_owned()), DURATIONS[1]),
    ] {
        report(json, case, load(&pool, how, duration).await);
    }
    assert_eq!(client.summary().await.unwrap().servers.len(), SERVERS, "no server was lost");
    let peak = peers::memory(tracker.pid(), "VmHWM");
    if json {
        let line = serde_json::json!({
            "suite": "tracker", "case": "memory", "peak_bytes": peak,
            "aim_bytes": MEMORY_AIM, "met": peak <= MEMORY_AIM,
        });
        println!("{line}");
    } else {
        println!("peak memory {} (aim: {}, {})", mebibytes(peak), mebibytes(MEMORY_AIM), verdict(peak <= MEMORY_AIM));
    }
}

/// Measurements under one load.
struct Outcome {
    took: Duration,
    grants: Vec<f64>,
    errors: Vec<String>,
}

fn report(json: bool, case: &str, outcome: Outcome) {
    let Outcome { took, mut grants, errors } = outcome;
    let (n, rate) = (grants.len(), grants.len() as f64 / took.as_secs_f64());
    let (p50, p99, worst) = (quantile(&mut grants, 0.5), quantile(&mut grants, 0.99), quantile(&mut grants, 1.0));
    let met = p99 <= P99_AIM.as_secs_f64() && errors.is_empty();
    if json {
        let line = serde_json::json!({
            "suite": "tracker", "case": case, "n": n, "per_second": rate, "errors": errors.len(),
            "p50_us": p50 * 1e6, "p99_us": p99 * 1e6, "max_us": worst * 1e6, "aim_us": P99_AIM.as_micros(), "met": met,
        });
        println!("{line}");
    } else {
        let [p50, p99, worst] = [p50, p99, worst].map(|seconds| seconds * 1e3);
        println!(
            "{case:5} {n} grants, {rate:.0}/s: p50 {p50:.2} ms, p99 {p99:.2} ms, max {worst:.2} ms, {} errors \
             (aim: p99 {P99_AIM:?} \
             and none, {})",
            errors.len(),
            verdict(met),
        );
    }
    for error in errors.iter().take(5) {
        eprintln!("{case}: {error}");
    }
    assert!(errors.is_empty(), "no request fails");
}

fn verdict(met: bool) -> &'static str {
    if met { "met" } else { "missed" }
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Returns the quantile, or 0 of an empty list.
fn quantile(values: &mut [f64], fraction: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(((values.len().max(1) - 1) as f64 * fraction).round() as usize).copied().unwrap_or(0.0)
}

/// Makes requests at a fixed rate.
async fn load(pool: &Arc<Pool>, sessions: Sessions, duration: Duration) -> Outcome {
    let sessions = Arc::new(sessions);
    let mut requests = JoinSet::new();
    let begun = Instant::now();
    let mut made: u64 = 0;
    let (mut grants, mut errors) = (Vec::new(), Vec::new());
    let mut take = |outcome: Result<f64>| match outcome {
        Ok(seconds) => grants.push(seconds),
        Err(error) => errors.push(error.to_string()),
    };
    while begun.elapsed() < duration {
        // Requests that became due during the sleep are made together.
        while made < (begun.elapsed().as_secs_f64() * REQUESTS_PER_SECOND as f64) as u64 {
            let (pool, sessions, number) = (pool.clone(), sessions.clone(), made);
            requests.spawn(async move { sessions.request(&pool, number).await });
            made += 1;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
        while let Some(outcome) = requests.try_join_next() {
            take(outcome.unwrap());
        }
    }
    while let Some(outcome) = requests.join_next().await {
        take(outcome.unwrap());
    }
    Outcome { took: begun.elapsed(), grants, errors }
}

enum Sessions {
    Kept(Vec<Kept>),
    New(String),
}

impl Sessions {
    /// Asks for a server, uses it, and gives it back. Returns the duration of the grant in seconds.
    async fn request(&self, pool: &Pool, number: u64) -> Result<f64> {
        let begun = Instant::now();
        let request = ServerRequest::new(&key(number as usize)).timeout(Duration::from_secs(30));
        let grants = match self {
            Self::Kept(kept) => kept[number as usize % kept.len()].grant(request).await?,
            Self::New(address) => Kept::new(address).await?.grant(request).await?,
        };
        let took = begun.elapsed().as_secs_f64();
        for grant in grants {
            pool.members[&grant.server].serve(grant.serial, HOLD).await?;
        }
        Ok(took)
    }
}

/// A client's session with the tracker, and the functions that it calls there.
struct Kept {
    request: TypedFunction<(Pack<ServerRequest>,), RemoteObject>,
    wait: RemoteFunction,
}

impl Kept {
    async fn new(address: &str) -> Result<Self> {
        let session = connect(address).await?;
        // Both at once, as `TrackerClient` does.
        let (request, wait) =
            (session.function(functions::REQUEST).start(), session.get_function(functions::WAIT).start());
        Ok(Self { request: request.await?, wait: wait.await? })
    }

    async fn open(address: &str, count: usize) -> Vec<Self> {
        let mut sessions = Vec::new();
        for _ in 0..count {
            sessions.push(Self::new(address).await.unwrap());
        }
        sessions
    }

    async fn grant(&self, request: ServerRequest) -> Result<Vec<Grant>> {
        let place = self.request.call((Pack(request),)).concurrent().await?;
        let Pack(grants) = self.wait.call((&place,)).concurrent().await?;
        Ok(grants)
    }
}

async fn connect(address: &str) -> Result<Session> {
    Connector::new().connect(address).await.map_err(rpc_transports::ConnectError::into_rpc_error)
}

fn key(number: usize) -> String {
    format!("board-{}", number % KEYS)
}

/// Listener at the address of all servers, at which the tracker finds them.
struct Site {
    server: Server,
    address: String,
}

impl Site {
    async fn start() -> Self {
        let refuse = |_: &OpenRequest| -> Result<rpc_core::SharedSession> {
            Err(rpc_core::RpcError::new(rpc_core::ErrorKind::Refused, "nobody is served here"))
        };
        let server = Server::new(Arc::new(refuse), ServeOptions::default());
        let address = server.listen(&"tcp://127.0.0.1:0".parse().unwrap(), &Bind::default()).await.unwrap();
        Self { server, address: address.to_string() }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.server.stop();
    }
}

/// Servers by name.
struct Pool {
    members: HashMap<String, Member>,
}

impl Pool {
    /// Registers the servers, and renews their leases for as long as the runtime lives.
    async fn register(tracker: &str, site: &Site, count: usize) -> Arc<Self> {
        let mut members = HashMap::new();
        let mut joining = JoinSet::new();
        for number in 0..count {
            let (tracker, address) = (tracker.to_owned(), site.address.clone());
            joining.spawn(async move {
                let name = format!("server-{number:04}");
                (name.clone(), Member::register(&tracker, &name, &key(number), address).await)
            });
            if joining.len() >= 64 {
                let (name, member) = joining.join_next().await.unwrap().unwrap();
                members.insert(name, member);
            }
        }
        while let Some(joined) = joining.join_next().await {
            let (name, member) = joined.unwrap();
            members.insert(name, member);
        }
        let pool = Arc::new(Self { members });
        for (at, name) in pool.members.keys().cloned().enumerate() {
            let (pool, share) = (pool.clone(), at as f64 / count as f64);
            tokio::spawn(async move { pool.members[&name].renew(share).await });
        }
        pool
    }
}

/// A server as the tracker sees it.
struct Member {
    registration: RemoteObject,
    renew: RemoteFunction,
    lease: Duration,
    began: Instant,
    /// Uses of the server, which are reported one after the other.
    uses: Mutex<Vec<Use>>,
}

/// Number of the next use.
static NEXT: AtomicU64 = AtomicU64::new(1);

impl Member {
    async fn register(tracker: &str, name: &str, key: &str, address: String) -> Self {
        let session = connect(tracker).await.unwrap();
        let register = session
            .function::<(Pack<Registration>,), (RemoteObject, Pack<Registered>)>(functions::REGISTER)
            .await
            .unwrap();
        let registration = Registration {
            version: MESSAGES.version(),
            name: name.to_owned(),
            key: key.to_owned(),
            labels: BTreeMap::from(
                [("arch", "arm64"), ("rack", "7")].map(|(name, value)| (name.to_owned(), value.to_owned())),
            ),
            devices: vec![DeviceOffer::new("cpu", 1)],
            capacity: 1,
            address: vec![address],
            ticket_key: [7; 32],
            status: ServerStatus::default(),
        };
        let (registration, Pack(registered)) = register.call((Pack(registration),)).await.unwrap();
        Self {
            registration,
            renew: session.get_function(functions::RENEW).await.unwrap(),
            lease: Duration::from_millis(registered.lease_ms),
            began: Instant::now(),
            uses: Mutex::default(),
        }
    }

    /// Renews the lease, at this share of the time between two renewals: real servers did not start
    /// at the same moment.
    async fn renew(&self, share: f64) {
        let interval = self.lease / 3;
        tokio::time::sleep(interval.mul_f64(share)).await;
        loop {
            tokio::time::sleep(interval).await;
            let uses = self.uses.lock().await;
            if self.report(&uses, Vec::new()).await.is_err() {
                // The tracker has ended with the bench. A check before that finds missing servers.
                return;
            }
        }
    }

    /// Serves a client with this ticket for a while.
    async fn serve(&self, serial: u64, hold: Duration) -> Result<()> {
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        {
            let mut uses = self.uses.lock().await;
            uses.push(Use {
                id,
                serial: Some(serial),
                direct: false,
                client: "tcp://127.0.0.1:1".to_owned(),
                for_ms: 0,
                silent_ms: 0,
            });
            self.report(&uses, Vec::new()).await?;
        }
        if !hold.is_zero() {
            tokio::time::sleep(hold).await;
        }
        let mut uses = self.uses.lock().await;
        uses.retain(|used| used.id != id);
        self.report(&uses, vec![serial]).await
    }

    async fn report(&self, uses: &[Use], spent: Vec<u64>) -> Result<()> {
        let now_ms = self.began.elapsed().as_millis() as u64;
        let status = ServerStatus { now_ms, uses: uses.to_vec(), spent, leaving: false, details: None };
        let Pack(Renewed { .. }) = self.renew.call((&self.registration, Pack(status))).await?;
        Ok(())
    }
}

/// One server and one client, which ask, use and give back in turn: the tracker's part alone.
/// Prints microseconds, one line for each: from the request to the grant, and until it is given
/// back.
async fn grants(tracker: &str, count: usize) {
    let site = Site::start().await;
    let member = Member::register(tracker, "server", &key(0), site.address.clone()).await;
    let client = Kept::new(tracker).await.unwrap();
    for _ in 0..count {
        let begun = Instant::now();
        let granted = client.grant(ServerRequest::new(&key(0))).await.unwrap();
        let grant = begun.elapsed();
        member.serve(granted[0].serial, Duration::ZERO).await.unwrap();
        println!("{} {}", grant.as_secs_f64() * 1e6, begun.elapsed().as_secs_f64() * 1e6);
    }
}

/// A real server that is registered already: asks for it, connects, calls it once, and leaves; then
/// the same again, so that each waits for the one before it to be given back. Prints microseconds,
/// one line for each: from the request to the session, and for the whole.
async fn cycles(tracker: &str, count: usize) {
    let client = TrackerClient::connect(tracker).await.unwrap();
    for _ in 0..count {
        let begun = Instant::now();
        let loan = client.request(&ServerRequest::new("board")).await.unwrap();
        let opened = begun.elapsed();
        let echo = loan.session().function::<(i64,), i64>("rpc.echo").await.unwrap();
        assert_eq!(echo.call((42,)).await.unwrap(), 42);
        drop((echo, loan));
        println!("{} {}", opened.as_secs_f64() * 1e6, begun.elapsed().as_secs_f64() * 1e6);
    }
}
