//! Servers, a hop, a relay, a tracker and their clients on a simulated network, under seeded delay,
//! loss, cuts, stalls and restarts.
//!
//! Each seed is a history of some virtual minutes. After it, the network heals and the clients
//! leave, and these must hold: every request has had one outcome, no call ran twice, results are
//! right, no session, object or byte is left at a server, the tracker has every server and every
//! place back, and each way leads to a working session again.
//!
//! All functions are inline or asynchronous, because the virtual clock does not wait for the
//! threads of blocking ones.

#[cfg(target_os = "linux")]
mod disco_links;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rpc_core::{DataType, Device, ErrorKind, Registry, Result, RpcError, Session, Shared};
use rpc_server::server::{Relay, RpcServer, Running};
use rpc_server::tracker::{RunningTracker, Tracker};
use rpc_server::{ServeConfig, TrackerConfig};
use rpc_tests::forwarder::Random;
use rpc_tests::simulated_network::{Conditions, SimulatedNetwork};
use rpc_transports::Connector;
use rpc_transports::tracker::{ServerRequest, TrackerClient};
use tokio::runtime::Builder;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

/// Seeds of an ordinary run. `RPC_SIMULATION_SEEDS=FIRST..END` runs others.
const SEEDS: std::ops::Range<u64> = 0..50;

/// Virtual time within which anything must end: longer than all limits of sessions together.
const PATIENCE: Duration = Duration::from_secs(600);

/// Number of clients, each with a host of its own.
const CLIENTS: usize = 3;

/// Interval of keep-alive.
const KEEP_ALIVE: Duration = Duration::from_secs(1);

/// Numbers of what happened, by name.
type Tally = BTreeMap<String, u64>;

#[test]
fn nothing_is_lost_and_nothing_is_left() {
    let mut least = vec![("operations".to_owned(), 8.0), ("losses".to_owned(), 0.25)];
    least.extend(WAYS.map(|way| (format!("sessions: {way:?}"), 0.5)));
    least.extend(["cut", "stall", "restart"].map(|disturbance| (disturbance.to_owned(), 0.5)));
    run_histories(seeds(SEEDS), &mut Builder::new_current_thread(), history, &least);
}

/// Runs the histories of `seeds`, each on a runtime of its own with a clock that is paused. Checks
/// the `least` number of what has to happen in one, on average: histories in which nothing happens
/// would prove nothing.
fn run_histories<F: Future<Output = Tally>>(
    seeds: std::ops::Range<u64>,
    runtime: &mut Builder,
    history: impl Fn(u64) -> F,
    least: &[(String, f64)],
) {
    let mut tally = Tally::new();
    for seed in seeds.clone() {
        println!("seed {seed}");
        let runtime = runtime.enable_all().start_paused(true).build().unwrap();
        for (what, count) in runtime.block_on(history(seed)) {
            *tally.entry(what).or_default() += count;
        }
    }
    println!("{tally:#?}");
    let histories = seeds.end - seeds.start;
    for (what, least) in least {
        let count = tally.get(what).copied().unwrap_or_default();
        let is_enough = count as f64 >= least * histories as f64;
        assert!(is_enough || histories < 25, "{what}: {count} in {histories} histories");
    }
}

/// Returns the seeds of this run, which are `ordinary` unless others are wanted.
fn seeds(ordinary: std::ops::Range<u64>) -> std::ops::Range<u64> {
    let Ok(text) = std::env::var("RPC_SIMULATION_SEEDS") else { return ordinary };
    let (first, end) = text.split_once("..").expect("RPC_SIMULATION_SEEDS is FIRST..END");
    first.parse().expect("a number before ..")..end.parse().expect("a number after ..")
}

async fn history(seed: u64) -> Tally {
    let mut random = Random::new(seed);
    let conditions = conditions(&mut random);
    let network = SimulatedNetwork::new(random.number(), conditions);
    let mut world = World::start(network.clone(), &HOSTS, KEEP_ALIVE).await;
    let ledger = world.ledger.clone();
    let clients = (0..CLIENTS).map(|index| {
        let client = Client {
            connector: connector(&network, &format!("client-{index}"), KEEP_ALIVE),
            random: Random::new(random.number()),
            ledger: ledger.clone(),
        };
        tokio::spawn(client.run())
    });
    let clients = clients.collect();
    let disturbances = 2 + random.below(8);
    world.go_through(&mut random, disturbances, Duration::from_secs(4), clients).await;
    world.serves_on_every_way().await;
    world.is_clean().await;
    std::mem::take(&mut ledger.tally.lock())
}

/// Draws the conditions of a network.
fn conditions(random: &mut Random) -> Conditions {
    Conditions {
        delay: Duration::from_micros(50 + random.below(20_000) as u64),
        jitter: Duration::from_micros(1 + random.below(50_000) as u64),
        loss: random.below(30),
    }
}

/// Draws the number of a call: values are at most 2⁶³ − 1.
fn call_number(random: &mut Random) -> u64 {
    random.number() >> 1
}

async fn patiently<F: Future>(what: &str, future: F) -> F::Output {
    match timeout(PATIENCE, future).await {
        Ok(output) => output,
        Err(_) => panic!("{what}: no end after {PATIENCE:?} of virtual time"),
    }
}

fn connector(network: &SimulatedNetwork, host: &str, keep_alive: Duration) -> Connector {
    Connector::new().transports(network.host(host)).keep_alive(keep_alive)
}

/// Record of what the functions of all servers have done.
#[derive(Default)]
struct Ledger {
    /// Number of times that each call has run, by the number that its client has given it.
    runs: Mutex<HashMap<u64, u32>>,
    /// Objects that are alive at the servers.
    objects: AtomicI64,
    tally: Mutex<Tally>,
    #[cfg(target_os = "linux")]
    steps: Arc<disco_links::Steps>,
}

impl Ledger {
    fn count(&self, what: impl Into<String>) {
        *self.tally.lock().entry(what.into()).or_default() += 1;
    }

    fn ran(&self, call: u64) -> u32 {
        self.runs.lock().get(&call).copied().unwrap_or_default()
    }
}

/// Object of a server that counts itself.
struct Counted(Arc<Ledger>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.objects.fetch_sub(1, Ordering::Relaxed);
    }
}

fn functions(ledger: &Arc<Ledger>) -> Registry {
    let registry = Registry::new();
    let recorded = ledger.clone();
    registry.add_inline("double", move |call: u64, x: i64| {
        *recorded.runs.lock().entry(call).or_default() += 1;
        2 * x
    });
    let recorded = ledger.clone();
    registry.add_async("double.later", move |call: u64, x: i64, ms: u64| {
        *recorded.runs.lock().entry(call).or_default() += 1;
        async move {
            sleep(Duration::from_millis(ms)).await;
            2 * x
        }
    });
    let counted = ledger.clone();
    registry.add_inline("object", move || {
        counted.objects.fetch_add(1, Ordering::Relaxed);
        Shared(Arc::new(Counted(counted.clone())))
    });
    #[cfg(target_os = "linux")]
    disco_links::register(&registry, &ledger.steps);
    registry.add_inline("object.use", |Shared(_): Shared<Counted>| 1_i64);
    registry
}

/// Ways from a client to a server.
const WAYS: [Way; 4] = [Way::Direct, Way::Hop, Way::Relay, Way::Tracker];

#[derive(Clone, Copy, Debug)]
enum Way {
    Direct,
    Hop,
    Relay,
    Tracker,
}

impl Way {
    async fn connect(self, connector: &Connector) -> Result<Session> {
        let connected = match self {
            Self::Direct => connector.connect("sim://near:1").await,
            Self::Hop => connector.clone().via("sim://hop:1").connect("sim://near:1").await,
            Self::Relay => connector.connect("sim://relay:1/far").await,
            Self::Tracker => {
                let tracker = TrackerClient::connect_with(connector.clone(), "sim://tracker:1").await?;
                let request = ServerRequest::new("board").timeout(Duration::from_secs(30));
                return tracker.request(&request).await.map(|loan| loan.session().clone());
            }
        };
        connected.map_err(|error| error.into_rpc_error())
    }
}

/// One client: it connects, works, and leaves, several times.
struct Client {
    connector: Connector,
    random: Random,
    ledger: Arc<Ledger>,
}

impl Client {
    async fn run(mut self) {
        for _ in 0..3 {
            let way = WAYS[self.random.below(WAYS.len())];
            match patiently("a connection", way.connect(&self.connector)).await {
                Ok(session) => {
                    self.ledger.count(format!("sessions: {way:?}"));
                    self.work(&session).await;
                }
                // A relay has no server with this key while the server is on its way back.
                Err(error) if matches!(way, Way::Relay) && error.kind() == ErrorKind::NotFound => {}
                Err(error) => check_refusal(&error),
            }
        }
    }

    async fn work(&mut self, session: &Session) {
        for _ in 0..1 + self.random.below(12) {
            let done = patiently("an operation", self.operation(session)).await;
            match done {
                Ok(()) => self.ledger.count("operations"),
                Err(error) if error.kind() == ErrorKind::DeadlineExceeded => {}
                Err(error) => {
                    check_loss(&error);
                    self.ledger.count("losses");
                    return;
                }
            }
            sleep(Duration::from_millis(self.random.below(800) as u64)).await;
        }
    }

    async fn operation(&mut self, session: &Session) -> Result<()> {
        match self.random.below(6) {
            0 => self.calls(session, 1).await,
            1 => self.calls(session, 16).await,
            2 => {
                let objects = 1 + self.random.below(8);
                let (make, take) = (session.get_function("object").await?, session.get_function("object.use").await?);
                for _ in 0..objects {
                    let object: rpc_core::RemoteObject = make.call(()).await?;
                    assert_eq!(take.call::<i64>((&object,)).await?, 1);
                }
                Ok(())
            }
            3 => {
                let data = bytes::Bytes::from(self.random.bytes_up_to(600_000));
                let tensor = session.alloc(Device::cpu(), DataType::U8, &[data.len() as i64]).await?;
                session.copy_to_remote(&tensor, data.clone()).await?;
                assert_eq!(session.copy_from_remote(&tensor).await?, data);
                Ok(())
            }
            4 => {
                // Dropped at any moment: the call is cancelled.
                let limit = Duration::from_millis(self.random.below(300) as u64);
                timeout(limit, self.calls(session, 4)).await.unwrap_or(Ok(()))
            }
            _ => {
                let call = call_number(&mut self.random);
                let (limit, takes) = (self.random.below(400) as u64, self.random.below(400) as u64);
                let function = session.get_function("double.later").await?;
                let doubled = function.call::<i64>((call, 4, takes)).timeout(Duration::from_millis(limit)).await;
                self.check(call, 4, doubled)
            }
        }
    }

    /// Makes calls at the same time, half of them to the function that takes its time.
    async fn calls(&mut self, session: &Session, count: usize) -> Result<()> {
        let (now, later) = (session.get_function("double").await?, session.get_function("double.later").await?);
        let started: Vec<_> = (0..count)
            .map(|index| {
                let (call, x) = (call_number(&mut self.random), index as i64);
                let reply = match index % 2 {
                    0 => now.call::<i64>((call, x)).concurrent().start(),
                    _ => later.call::<i64>((call, x, self.random.below(200) as u64)).concurrent().start(),
                };
                (call, x, reply)
            })
            .collect();
        let mut outcome = Ok(());
        for (call, x, reply) in started {
            let doubled = reply.await;
            outcome = outcome.and(self.check(call, x, doubled));
        }
        outcome
    }

    /// Checks the outcome of a call against what the servers have done.
    fn check(&self, call: u64, x: i64, doubled: Result<i64>) -> Result<()> {
        let ran = self.ledger.ran(call);
        assert!(ran <= 1, "call {call} ran {ran} times");
        let doubled = doubled?;
        assert_eq!((doubled, ran), (2 * x, 1), "result of call {call}, and how often it ran");
        Ok(())
    }
}

/// Checks that an error is one that the network can cause.
fn check_loss(error: &RpcError) {
    let expected = [
        ErrorKind::PeerLost,
        ErrorKind::PeerSilent,
        ErrorKind::Refused,
        ErrorKind::SessionTimeout,
        ErrorKind::Closed,
        ErrorKind::DeadlineExceeded,
        // A server that is about to restart.
        ErrorKind::Draining,
    ];
    assert!(expected.contains(&error.kind()), "{:?}: {error}", error.kind());
}

/// Checks that an error is one that the network can cause where a client connects: its place may be
/// taken by a session that is lost without the server's knowledge.
fn check_refusal(error: &RpcError) {
    if error.kind() != ErrorKind::LimitExceeded {
        check_loss(error);
    }
}

/// All servers, and the network between them.
struct World {
    network: SimulatedNetwork,
    /// Hosts of servers, which restart now and then.
    hosts: &'static [&'static str],
    keep_alive: Duration,
    ledger: Arc<Ledger>,
    folder: tempfile::TempDir,
    /// Servers by their hosts. Absent while they restart.
    servers: HashMap<&'static str, Running>,
    tracker: Option<RunningTracker>,
}

/// Hosts of a world, in the order in which they start.
const HOSTS: [&str; 5] = ["tracker", "relay", "hop", "near", "far"];

impl World {
    async fn start(network: SimulatedNetwork, hosts: &'static [&'static str], keep_alive: Duration) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (ledger, servers) = (Arc::default(), HashMap::new());
        let mut world = Self { network, hosts, keep_alive, ledger, folder, servers, tracker: None };
        for host in hosts {
            world.serve(host).await;
        }
        world
    }

    fn has(&self, host: &str) -> bool {
        self.hosts.contains(&host)
    }

    async fn serve(&mut self, host: &'static str) {
        let transports = self.network.host(host);
        let listen = vec![format!("sim://{host}:1").parse().unwrap()];
        let keep_alive = rpc_server::config::Span(self.keep_alive);
        if host == "tracker" {
            let patterns = vec!["sim://*".to_owned()];
            let config = TrackerConfig { listen, allow_advertise: patterns, keep_alive, ..TrackerConfig::default() };
            self.tracker = Some(Tracker::start_with(&config, transports).await.unwrap());
            return;
        }
        if host == "relay" {
            let config = rpc_server::config::RelayConfig { listen, keep_alive, ..Default::default() };
            let relay = Relay::with_transports(&config, transports).unwrap();
            self.servers.insert(host, relay.start().await.unwrap());
            return;
        }
        let (workdir, allow_forward) = (self.folder.path().join(host), vec!["sim://*".to_owned()]);
        let mut config = ServeConfig { workdir, allow_forward, keep_alive, ..ServeConfig::default() };
        match host {
            "hop" => config.listen = listen,
            "near" => (config.listen, config.allow_direct) = (listen, true),
            _ => {
                config.listen = listen;
                if self.has("relay") {
                    config.listen = Vec::new();
                    config.relay = vec!["sim://relay:1/far".parse().unwrap()];
                }
                config.allow_direct = true;
            }
        }
        config.allow_disco = Some(host != "hop");
        if host != "hop" && self.has("tracker") {
            config.tracker = vec!["sim://tracker:1".parse().unwrap()];
            config.tracker_key = Some("board".to_owned());
            config.capacity = 2;
        }
        let server = RpcServer::new(functions(&self.ledger)).config(config).transports(transports);
        self.servers.insert(host, server.start().await.unwrap());
    }

    /// Does so many evil things, with pauses of up to `pause`, while the clients work. Returns once
    /// they have left, the network has healed, and nothing of them is left.
    async fn go_through(
        &mut self,
        random: &mut Random,
        disturbances: usize,
        pause: Duration,
        clients: Vec<JoinHandle<()>>,
    ) {
        for _ in 0..disturbances {
            sleep(Duration::from_millis(random.below(pause.as_millis() as usize) as u64)).await;
            self.disturb(random).await;
        }
        self.network.heal();
        for client in clients {
            patiently("a client", client).await.expect("a client has failed");
        }
        self.is_clean().await;
    }

    /// Does one evil thing.
    async fn disturb(&mut self, random: &mut Random) {
        let host = self.hosts[random.below(self.hosts.len())];
        let other = match random.below(2) {
            0 => self.hosts[random.below(self.hosts.len())].to_owned(),
            _ => format!("client-{}", random.below(CLIENTS)),
        };
        match random.below(4) {
            0 => {
                self.ledger.count("cut");
                self.network.cut(host, &other);
            }
            1 => {
                self.ledger.count("stall");
                self.network.stall(host, &other);
            }
            2 => self.network.heal(),
            _ => {
                self.ledger.count("restart");
                self.network.restart(host);
                drop(self.servers.remove(host));
                if host == "tracker" {
                    self.tracker = None;
                }
                // At least so long that the listener that was there has ended.
                sleep(Duration::from_millis(1 + random.below(5_000) as u64)).await;
                self.serve(host).await;
            }
        }
    }

    /// Waits until nothing of any client is left.
    async fn is_clean(&self) {
        let held = async {
            while !self.holds_nothing() {
                sleep(Duration::from_millis(100)).await;
            }
        };
        if timeout(PATIENCE, held).await.is_err() {
            let totals: Vec<_> = self.servers.iter().map(|(host, server)| (host, server.state().totals())).collect();
            let summary = self.tracker.as_ref().map(|tracker| tracker.tracker.summary());
            let objects = self.ledger.objects.load(Ordering::Relaxed);
            panic!("left after {PATIENCE:?}: {totals:?}, {objects} objects, tracker: {summary:#?}");
        }
        let ran_twice: Vec<_> = self.ledger.runs.lock().iter().filter(|(_, runs)| **runs > 1).map(|x| *x.0).collect();
        assert!(ran_twice.is_empty(), "calls that ran more than once: {ran_twice:?}");
    }

    fn holds_nothing(&self) -> bool {
        let is_empty = |server: &Running| {
            let totals = server.state().totals();
            totals.sessions == 0 && totals.handles == 0 && totals.memory_bytes == 0
        };
        let has_places = |tracker: &RunningTracker| {
            let summary = tracker.tracker.summary();
            let free = |server: &rpc_transports::tracker::ServerSummary| server.free == server.capacity;
            summary.servers.len() == 2 && summary.servers.iter().all(free) && summary.queue.is_empty()
        };
        self.servers.values().all(is_empty)
            && self.ledger.objects.load(Ordering::Relaxed) == 0
            && (!self.has("tracker") || self.tracker.as_ref().is_some_and(has_places))
    }

    /// Checks that a new client reaches a server on each way.
    async fn serves_on_every_way(&self) {
        let connector = connector(&self.network, "client-0", self.keep_alive);
        for way in WAYS {
            let connected = async {
                loop {
                    match way.connect(&connector).await {
                        Ok(session) => return session,
                        Err(error) => println!("{way:?}: {error}"),
                    }
                    sleep(Duration::from_millis(100)).await;
                }
            };
            let session = patiently("a connection of a new client", connected).await;
            let double = session.get_function("double").await.unwrap();
            assert_eq!(double.call::<i64>((i64::MAX as u64 - way as u64, 21)).await.unwrap(), 42);
        }
    }
}
