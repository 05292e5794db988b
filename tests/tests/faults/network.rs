//! Sessions over bad networks: loss, delay, reordering, streams in small pieces, addresses that
//! change, and peers that fall silent. The network consists of forwarders in this process, or of
//! network namespaces where the system permits them.

use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rpc_core::blocking::allow_blocking;
use rpc_core::{DataType, Device, ErrorKind, Lane, RemoteTensor, Session};
use rpc_server::config::{Isolate, ServeConfig, Span};
use rpc_server::{RpcServer, Running};
use rpc_tests::forwarder::{ByteForwarder, Pipe, Random, UdpForwarder, Weather};
use rpc_tests::functions;
use rpc_tests::harness::{Form, on_thread};
use rpc_transports::ServeOptions;
use rpc_tvm::wire::Request::{Call, GetFunction, Init};
use rpc_tvm::wire::{Hello, PROTOCOL_VERSION};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::peers::site::{Authority, Site, TIME_LIMIT, soon};
use crate::peers::{self, DEAD, KEEP_ALIVE, Transport, pace, within};

/// Size of the copies, in bytes.
const COPY: usize = 4 << 20;

/// Keep-alive with which a peer counts as dead after [`DEAD`].
const QUICK: Duration = KEEP_ALIVE;

/// Time limit, measured by [`pace`], within which the silence of a peer is noticed with [`QUICK`].
/// It has room for a part of an interval, because bytes in flight may still have arrived.
const NOTICED: Duration = DEAD.saturating_add(Duration::from_millis(100));

/// Keep-alive that sends no ping in the time of a test.
const NEVER: Duration = Duration::from_secs(120);

/// Starts a server for one test.
async fn site(keep_alive: Duration, transport: Transport) -> Site {
    site_at("127.0.0.1", keep_alive, transport, Arc::new(Authority::new())).await
}

async fn site_at(host: &str, keep_alive: Duration, transport: Transport, authority: Arc<Authority>) -> Site {
    let options = ServeOptions { keep_alive, ..ServeOptions::default() };
    Site::at(host, transport, options, functions::registry(), authority).await
}

/// Returns a connector to `site` that dials the address of a forwarder.
async fn connect(form: Form, site: &Site, transport: Transport, to: SocketAddr) -> Session {
    let address = format!("{}://{to}", transport.scheme());
    let connector = site.connector();
    let connected = async move {
        match form {
            Form::Async => connector.connect(&address).await,
            Form::Blocking => on_thread(move || connector.connect_blocking(&address)).await,
        }
    };
    soon("the client connects", connected).await.unwrap()
}

/// Checks that a session ends in time because its peer is silent. `since` is a time of [`pace`].
async fn falls_silent(session: &Session, since: Duration) -> Duration {
    let ended = soon("the silence is noticed", session.ended()).await;
    let took = pace::since(since);
    assert_eq!(ended.kind(), ErrorKind::PeerSilent, "{ended}");
    assert!(took <= NOTICED, "noticed after {took:?}");
    took
}

/// Checks that the server has ended all sessions in the same time.
async fn is_let_go_of(site: &Site, since: Duration) {
    within(TIME_LIMIT, "the server has no session", async || site.server.sessions() == 0).await;
    let took = pace::since(since);
    assert!(took <= NOTICED, "the server has noticed after {took:?}");
    site.is_empty().await;
}

async fn tensor(session: &Session, bytes: usize) -> RemoteTensor {
    soon("alloc", session.alloc(Device::cpu(), DataType::U8, &[bytes as i64])).await.unwrap()
}

async fn calls_are_right(session: &Session, form: Form, calls: i64) {
    let add = soon("get", session.function::<(i64, i64), i64>("add")).await.unwrap();
    match form {
        Form::Async => {
            let pending: Vec<_> =
                (0..calls).map(|call| add.call((call, 1)).lane(Lane(call as u32 % 3)).start()).collect();
            for (call, pending) in pending.into_iter().enumerate() {
                assert_eq!(soon("a call", pending).await.unwrap(), call as i64 + 1);
            }
        }
        Form::Blocking => {
            let all = on_thread(move || (0..calls).all(|call| add.call((call, 1)).wait().unwrap() == call + 1));
            assert!(soon("calls", all).await);
        }
    }
}

async fn copies_are_right(session: &Session, form: Form, bytes: usize, seed: u64) {
    let tensor = tensor(session, bytes).await;
    let data: bytes::Bytes = Random::new(seed).bytes(bytes).into();
    let (to, from) = (session.copy_to_remote(&tensor, data.clone()), session.copy_from_remote(&tensor));
    let back = match form {
        Form::Async => {
            soon("a copy there", to).await.unwrap();
            soon("a copy back", from).await.unwrap()
        }
        Form::Blocking => {
            soon("a copy there", on_thread(move || to.wait())).await.unwrap();
            soon("a copy back", on_thread(move || from.wait())).await.unwrap()
        }
    };
    assert!(back == data, "what was copied comes back");
}

/// Bad radio link: one of twenty datagrams is lost, and each takes 50 ms.
const RADIO: Weather =
    Weather { seed: 1, lost: 50, delay: Duration::from_millis(50), late: 100, late_by: Duration::from_millis(20) };

async fn over_quic(form: Form, weather: Weather, calls: i64, bytes: usize) {
    let site = site(Duration::from_secs(5), Transport::Quic).await;
    let target = site.socket_address();
    let forwarder = UdpForwarder::start(target, weather).unwrap();
    let session = connect(form, &site, Transport::Quic, forwarder.address()).await;
    calls_are_right(&session, form, calls).await;
    copies_are_right(&session, form, bytes, weather.seed).await;
    assert!(weather.lost == 0 || forwarder.lost() > 0, "nothing was lost of {:?}", forwarder.passed());
}

/// Size of copies over the radio link: smaller, because loss and round trip both limit a
/// connection.
#[test]
fn quic_is_right_where_datagrams_are_lost_late_and_reordered() {
    peers::run(|| over_quic(Form::Async, RADIO, 10, 128 << 10));
}

#[test]
fn blocking_quic_is_right_where_datagrams_are_lost_late_and_reordered() {
    peers::run(|| over_quic(Form::Blocking, RADIO, 3, 64 << 10));
}

#[test]
fn quic_copies_are_right_where_datagrams_are_lost_and_reordered() {
    let weather = Weather { seed: 2, delay: Duration::from_micros(500), late_by: Duration::from_millis(2), ..RADIO };
    peers::run(move || over_quic(Form::Async, weather, 100, COPY));
}

#[test]
fn quic_copies_are_right_over_a_long_way() {
    let weather = Weather { seed: 3, lost: 0, late: 1, ..RADIO };
    peers::run(move || over_quic(Form::Async, weather, 10, COPY));
}

async fn over_streams(transport: Transport, form: Form) {
    let site = site(Duration::from_secs(5), transport).await;
    let target = site.socket_address();
    for (pipe, calls, bytes) in [
        // The pieces split each header, length and body.
        (Pipe { seed: 4, longest_piece: 5, ..Pipe::default() }, 20, 8 << 10),
        (Pipe { seed: 5, longest_piece: 3000, ..Pipe::default() }, 100, COPY),
        (Pipe { seed: 6, longest_piece: 100_000, delay: Duration::from_millis(50) }, 3, COPY),
    ] {
        let forwarder = ByteForwarder::start(target, pipe).await.unwrap();
        let session = connect(form, &site, transport, forwarder.address()).await;
        calls_are_right(&session, form, calls).await;
        copies_are_right(&session, form, bytes, pipe.seed).await;
    }
}

/// Bytes that TLS has accepted and the socket has not stay in a buffer. They once left it only with
/// the next write, which may be a ping seconds later. The socket has to be full and slow to show
/// it.
async fn the_last_bytes_leave_a_channel_that_was_full(transport: Transport, form: Form) {
    let site = site(NEVER, transport).await;
    let target = site.socket_address();
    let pipe = Pipe { seed: 11, longest_piece: 100_000, delay: Duration::from_millis(20) };
    let forwarder = ByteForwarder::start(target, pipe).await.unwrap();
    let session = connect(form, &site, transport, forwarder.address()).await;
    for seed in 0..10 {
        copies_are_right(&session, form, COPY, seed).await;
    }
}

/// The address of the client, as the server sees it, changes in the middle of a copy, as when a NAT
/// forgets its mapping.
async fn a_copy_goes_on_when_the_address_changes(form: Form) {
    let site = site(Duration::from_secs(1), Transport::Quic).await;
    let target = site.socket_address();
    // The delay makes a copy last for a while.
    let weather = Weather { seed: 7, delay: Duration::from_millis(2), ..Weather::default() };
    let forwarder = Arc::new(UdpForwarder::start(target, weather).unwrap());
    let session = connect(form, &site, Transport::Quic, forwarder.address()).await;
    let tensor = tensor(&session, COPY).await;
    let data: bytes::Bytes = Random::new(7).bytes(COPY).into();
    // The datagrams of each direction that had passed when the address changed.
    let changed = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
    let change = || {
        let (forwarder, changed, done) = (forwarder.clone(), changed.clone(), AtomicBool::new(false));
        move |copied: u64| {
            if copied < COPY as u64 && !done.swap(true, Ordering::AcqRel) {
                forwarder.rebind();
                let (to_server, to_client) = forwarder.passed();
                changed[0].store(to_server, Ordering::Release);
                changed[1].store(to_client, Ordering::Release);
            }
        }
    };
    let passed_since = || {
        let (to_server, to_client) = forwarder.passed();
        let [before_to_server, before_to_client] = [0, 1].map(|at: usize| changed[at].swap(0, Ordering::AcqRel));
        assert!(before_to_server > 0, "the address has changed");
        (to_server - before_to_server, to_client - before_to_client)
    };
    let to = session.copy_to_remote(&tensor, data.clone()).progress(change());
    let from = session.copy_from_remote(&tensor);
    match form {
        Form::Async => soon("a copy there", to).await.unwrap(),
        Form::Blocking => soon("a copy there", on_thread(move || to.wait())).await.unwrap(),
    }
    let (to_server, to_client) = passed_since();
    assert!(to_server > 100 && to_client > 10, "{to_server} and {to_client} datagrams have passed since");
    let from = from.progress(change());
    let back = match form {
        Form::Async => soon("a copy back", from).await.unwrap(),
        Form::Blocking => soon("a copy back", on_thread(move || from.wait())).await.unwrap(),
    };
    let (to_server, to_client) = passed_since();
    assert!(to_server > 10 && to_client > 100, "{to_server} and {to_client} datagrams have passed since");
    assert!(back == data, "what was copied comes back");
    // An idle session survives, too: its next call tells the server the new address.
    forwarder.rebind();
    calls_are_right(&session, form, 3).await;
    assert_eq!(site.server.sessions(), 1);
}

/// Forwarder of either kind, which can fall silent.
enum Forwarder {
    Udp(UdpForwarder),
    Bytes(ByteForwarder),
}

impl Forwarder {
    async fn start(transport: Transport, target: SocketAddr) -> Self {
        match transport {
            Transport::Quic => Self::Udp(UdpForwarder::start(target, Weather::default()).unwrap()),
            _ => Self::Bytes(ByteForwarder::start(target, Pipe::default()).await.unwrap()),
        }
    }

    fn address(&self) -> SocketAddr {
        match self {
            Self::Udp(forwarder) => forwarder.address(),
            Self::Bytes(forwarder) => forwarder.address(),
        }
    }

    fn pass(&self, passes: bool) {
        match self {
            Self::Udp(forwarder) => forwarder.pass(passes, passes),
            Self::Bytes(forwarder) => forwarder.pass(passes),
        }
    }
}

/// A running call, a call that is queued behind it, and a copy.
struct Pending {
    running: rpc_core::Pending<()>,
    queued: rpc_core::Pending<i64>,
    copy: tokio::task::JoinHandle<rpc_core::Result<()>>,
}

impl Pending {
    async fn start(session: &Session) -> Self {
        let hold = soon("get", session.get_function("hold.tagged")).await.unwrap();
        let add = soon("get", session.get_function("add")).await.unwrap();
        let tensor = tensor(session, COPY).await;
        let running = hold.call::<()>(("outage",)).lane(Lane(1)).start();
        let queued = add.call::<i64>((1, 2)).lane(Lane(1)).start();
        // Some copy is always in flight.
        let (session, data) = (session.clone(), bytes::Bytes::from(vec![1; COPY]));
        let copy = tokio::spawn(async move {
            loop {
                session.copy_to_remote(&tensor, data.clone()).lane(Lane(2)).await?;
            }
        });
        // The earlier requests have left this process.
        assert_eq!(soon("a call", add.call::<i64>((20, 22)).concurrent()).await.unwrap(), 42);
        Self { running, queued, copy }
    }

    async fn fail(self) {
        for error in [
            soon("the running call ends", self.running).await.unwrap_err(),
            soon("the queued call ends", self.queued).await.unwrap_err(),
            soon("the copy ends", self.copy).await.unwrap().unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::PeerSilent, "{error}");
            assert!(error.peer().is_some(), "{error}");
        }
    }
}

async fn silence_is_noticed_on_both_sides(transport: Transport, form: Form) {
    let site = site(QUICK, transport).await;
    let target = site.socket_address();
    let forwarder = Forwarder::start(transport, target).await;
    let idle = connect(form, &site, transport, forwarder.address()).await;
    let busy = connect(form, &site, transport, forwarder.address()).await;
    let pending = Pending::start(&busy).await;
    assert_eq!(site.server.sessions(), 2);
    let since = pace::now();
    forwarder.pass(false);
    let (idle, busy, ()) =
        tokio::join!(falls_silent(&idle, since), falls_silent(&busy, since), is_let_go_of(&site, since));
    println!("{transport:?}: noticed after {idle:?} without and {busy:?} with something under way");
    pending.fail().await;
}

/// A session survives a silence that is shorter than what its keep-alive allows.
async fn a_silence_shorter_than_the_keep_alive_ends_nothing(transport: Transport, form: Form) {
    let site = site(Duration::from_secs(5), transport).await;
    let target = site.socket_address();
    let forwarder = Forwarder::start(transport, target).await;
    let session = connect(form, &site, transport, forwarder.address()).await;
    let add = soon("get", session.function::<(i64, i64), i64>("add")).await.unwrap();
    forwarder.pass(false);
    let mut call = add.call((1, 2)).start();
    // The pause is the silence that is tested.
    assert!(tokio::time::timeout(Duration::from_millis(700), &mut call).await.is_err(), "nothing passes");
    forwarder.pass(true);
    assert_eq!(soon("a call", call).await.unwrap(), 3);
    copies_are_right(&session, form, 1 << 20, 8).await;
    assert_eq!(site.server.sessions(), 1);
}

/// The server dies silently, and another one starts at its address. The client would try the old
/// connection in vain until QUIC gives it up, which takes much longer than the session's
/// keep-alive.
#[test]
fn a_client_reaches_a_quic_server_that_began_anew() {
    peers::run_where_silence_counts(|| async {
        let site = site(QUICK, Transport::Quic).await;
        let target = site.socket_address();
        let forwarder = UdpForwarder::start(target, Weather::default()).unwrap();
        let session = connect(Form::Async, &site, Transport::Quic, forwarder.address()).await;
        let since = pace::now();
        forwarder.pass(false, false);
        falls_silent(&session, since).await;
        let other = site_at("127.0.0.1", QUICK, Transport::Quic, site.authority.clone()).await;
        forwarder.lead_to(other.socket_address());
        forwarder.pass(true, true);
        let address = format!("quic://{}", forwarder.address());
        let again = site.connector().handshake_timeout(5 * DEAD);
        let again = soon("the client connects", again.connect(&address)).await;
        let again = again.unwrap_or_else(|error| panic!("{error}: {:?}", error.clone().into_rpc_error()));
        calls_are_right(&again, Form::Async, 3).await;
        assert_eq!(other.server.sessions(), 1);
    });
}

const CLIENT_IP: &str = "10.77.0.1";
const OTHER_CLIENT_IP: &str = "10.77.0.3";
const SERVER_IP: &str = "10.77.0.2";

/// Two network namespaces with a wire between them. They are removed when this value is dropped.
struct Wire {
    client: NamespaceThread,
    server: NamespaceThread,
    names: Names,
}

/// Names of two namespaces, which are removed when this value is dropped.
struct Names([String; 2]);

impl Drop for Names {
    fn drop(&mut self) {
        for name in &self.0 {
            // The second namespace may not have been made.
            let _ = ip(&format!("netns del {name}"));
        }
    }
}

/// Environment variable with which the tests that need network namespaces fail if these cannot be
/// made.
const REQUIRE: &str = "RPC_TESTS_REQUIRE_NETNS";

fn is_required() -> bool {
    std::env::var_os(REQUIRE).is_some_and(|value| !value.is_empty() && value != "0")
}

/// Thread in a namespace, with a runtime.
struct NamespaceThread {
    runtime: Handle,
    _end: oneshot::Sender<()>,
}

fn ip(args: &str) -> Result<(), String> {
    let output = Command::new("ip").args(args.split_whitespace()).output();
    match output {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("ip {args}: {}", String::from_utf8_lossy(&output.stderr).trim())),
        Err(error) => Err(format!("ip: {error}")),
    }
}

impl Wire {
    /// Makes the namespaces. Returns `None` and prints the reason if they cannot be made; with
    /// [`REQUIRE`] set it panics instead.
    fn new() -> Option<Self> {
        match Self::try_new() {
            Ok(wire) => Some(wire),
            Err(why) => {
                assert!(!is_required(), "{REQUIRE} is set, and network namespaces cannot be made here ({why})");
                println!("skipped: network namespaces cannot be made here ({why})");
                None
            }
        }
    }

    fn try_new() -> Result<Self, String> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let names = ["client", "server"].map(|side| format!("rpc-{}-{number}-{side}", std::process::id()));
        let names = Names(names);
        let [client, server] = &names.0;
        ip(&format!("netns add {client}"))?;
        ip(&format!("netns add {server}"))?;
        ip(&format!("-n {client} link add wire type veth peer name wire netns {server}"))?;
        for (name, address) in [(client, CLIENT_IP), (server, SERVER_IP)] {
            ip(&format!("-n {name} addr add {address}/24 dev wire"))?;
            ip(&format!("-n {name} link set wire up"))?;
        }
        Ok(Self { client: NamespaceThread::enter(client)?, server: NamespaceThread::enter(server)?, names })
    }

    fn pull(&self) {
        ip(&format!("-n {} link set wire down", self.names.0[0])).unwrap();
    }

    /// Takes the server off the wire: what the client sends vanishes.
    fn pull_server(&self) {
        ip(&format!("-n {} link set wire down", self.names.0[1])).unwrap();
    }

    fn plug_in(&self) {
        ip(&format!("-n {} link set wire up", self.names.0[0])).unwrap();
    }

    /// Adds another address to the client, and removes the old one.
    fn move_client(&self) {
        let name = &self.names.0[0];
        ip(&format!("-n {name} addr add {OTHER_CLIENT_IP}/24 dev wire")).unwrap();
        ip(&format!("-n {name} addr del {CLIENT_IP}/24 dev wire")).unwrap();
        // Removing the first address may remove others of the same network.
        let _ = ip(&format!("-n {name} addr add {OTHER_CLIENT_IP}/24 dev wire"));
    }

    async fn session(&self, keep_alive: Duration, transport: Transport) -> (Site, Session) {
        let site =
            self.server.run(async move { site_at(SERVER_IP, keep_alive, transport, Arc::new(Authority::new())).await });
        let site = site.await;
        let session = self.connect(&site).await;
        (site, session)
    }

    /// Starts a server that speaks TVM's protocol.
    async fn serve_tvm(&self) -> (Running, tempfile::TempDir) {
        let serve = async {
            let registry = rpc_core::Registry::new();
            registry.add_async("never", std::future::pending::<()>);
            let folder = tempfile::tempdir().unwrap();
            let config = ServeConfig {
                listen: vec![format!("tcp://{SERVER_IP}:0").parse().unwrap()],
                workdir: folder.path().to_owned(),
                isolate: Isolate::None,
                tvm: true,
                insecure: true,
                keep_alive: Span(Duration::from_millis(500)),
                ..ServeConfig::default()
            };
            (RpcServer::new(registry).config(config).start().await.unwrap(), folder)
        };
        self.server.run(serve).await
    }

    async fn connect(&self, site: &Site) -> Session {
        let (connector, address) = (site.connector(), site.address.clone());
        self.client.run(async move { soon("connect", connector.connect(&address)).await.unwrap() }).await
    }
}

impl NamespaceThread {
    fn enter(name: &str) -> Result<Self, String> {
        let namespace = File::open(format!("/run/netns/{name}")).map_err(|error| error.to_string())?;
        let (made, receiver) = mpsc::channel();
        thread::spawn(move || {
            let entered = move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network));
            if let Err(error) = entered {
                let _ = made.send(Err(error.to_string()));
                return;
            }
            // The runtime runs on this thread alone.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let (end, ended) = oneshot::channel();
            made.send(Ok(Self { runtime: runtime.handle().clone(), _end: end })).unwrap();
            // The thread ends when its owner is dropped.
            let _ = runtime.block_on(ended);
            runtime.shutdown_background();
        });
        receiver.recv().unwrap()
    }

    async fn run<T: Send + 'static>(&self, future: impl Future<Output = T> + Send + 'static) -> T {
        soon("what runs in a namespace", self.runtime.spawn(future)).await.unwrap()
    }
}

/// Duration of the outage.
const OUTAGE: Duration = Duration::from_secs(3);

async fn a_session_outlives_a_short_outage(transport: Transport, _: Form) {
    let Some(wire) = Wire::new() else { return };
    let (site, session) = wire.session(Duration::from_secs(5), transport).await;
    let tensor = tensor(&session, COPY).await;
    let add = soon("get", session.function::<(i64, i64), i64>("add")).await.unwrap();
    let data: bytes::Bytes = Random::new(9).bytes(COPY).into();
    let copied = Arc::new(AtomicU64::new(0));
    let count = copied.clone();
    let to = session.copy_to_remote(&tensor, data.clone()).progress(move |bytes| count.store(bytes, Ordering::Release));
    let copy = tokio::spawn(async move { to.await });
    within(TIME_LIMIT, "the copy moves", async || copied.load(Ordering::Acquire) > 0).await;
    wire.pull();
    let call = add.call((1, 2)).lane(Lane(1)).start();
    // The pause is the outage that is tested.
    tokio::time::sleep(OUTAGE).await;
    wire.plug_in();
    soon("the copy ends", copy).await.unwrap().unwrap();
    assert_eq!(soon("the call ends", call).await.unwrap(), 3);
    assert!(soon("a copy back", session.copy_from_remote(&tensor)).await.unwrap() == data);
    assert_eq!(site.server.sessions(), 1);
}

async fn a_long_outage_ends_the_session_on_both_sides(transport: Transport, _: Form) {
    let Some(wire) = Wire::new() else { return };
    let (site, session) = wire.session(QUICK, transport).await;
    let pending = Pending::start(&session).await;
    wire.pull();
    // The program that pulls it takes a while to start and to end.
    let since = pace::now();
    tokio::join!(falls_silent(&session, since), is_let_go_of(&site, since));
    pending.fail().await;
    wire.plug_in();
    let again = wire.connect(&site).await;
    calls_are_right(&again, Form::Async, 3).await;
    assert_eq!(site.server.sessions(), 1);
}

/// TVM's protocol has no pings, and a server that runs a function reads nothing: the kernel looks
/// after a server whose packets vanish, at an idle session and behind a call, in either form.
#[test]
fn a_server_of_tvm_whose_packets_vanish_is_noticed() {
    peers::run(|| async {
        let Some(wire) = Wire::new() else { return };
        let (server, _folder) = wire.serve_tvm().await;
        let address = server.addresses()[0].to_string().replace("tcp://", "tvm://");
        // Given up after three times as long.
        let connector =
            || peers::connector().transports(rpc_server::transports()).keep_alive(Duration::from_millis(500));
        let connect = || {
            let connector = connector();
            let address = address.clone();
            wire.client.run(async move { soon("connect", connector.connect(&address)).await.unwrap() })
        };
        let connect_blocking = || {
            let connector = connector();
            let address = address.clone();
            // The socket belongs to the thread's network.
            wire.client.run(async move { allow_blocking(|| connector.connect_blocking(&address)).unwrap() })
        };
        let (idle, busy) = (connect().await, connect().await);
        let (idle_blocking, busy_blocking) = (connect_blocking().await, connect_blocking().await);
        let never = soon("get", busy.function::<(), ()>("never")).await.unwrap();
        let call = never.call(()).start();
        let never = soon("get", busy_blocking.function::<(), ()>("never")).await.unwrap();
        let waiting = tokio::task::spawn_blocking(move || never.call(()).wait().unwrap_err());
        within(TIME_LIMIT, "the calls run", async || server.sessions() == 4).await;
        wire.pull_server();
        let call = async { soon("the call ends", call).await.unwrap_err() };
        let waiting = async { soon("the waiting call ends", waiting).await.unwrap() };
        let idle = async { soon("the silence is noticed", idle.ended()).await };
        let idle_blocking = async { soon("the silence is noticed", idle_blocking.ended()).await };
        let (call, waiting, idle, idle_blocking) = tokio::join!(call, waiting, idle, idle_blocking);
        for ended in [call, waiting, idle, idle_blocking] {
            assert!(ended.ends_session(), "{ended}");
            assert!(matches!(ended.kind(), ErrorKind::PeerSilent | ErrorKind::PeerLost), "{ended}");
        }
    });
}

/// The same of a client: the server frees what its session holds, while it is idle and in a call.
#[test]
fn a_client_of_tvm_whose_packets_vanish_is_noticed() {
    peers::run(|| async {
        let Some(wire) = Wire::new() else { return };
        let (server, _folder) = wire.serve_tvm().await;
        let at = server.addresses()[0].to_string().replace("tcp://", "");
        let begin = move || {
            let at = at.clone();
            async move {
                let mut client = TcpStream::connect(&at).await.unwrap();
                let hello = Hello { key: "client:".to_owned() }.encode();
                let init = Init { version: PROTOCOL_VERSION.into(), constructor: Vec::new() }.encode();
                client.write_all(&[hello, init].concat()).await.unwrap();
                // The answers to both.
                client.read_exact(&mut [0; 15 + 20]).await.unwrap();
                client
            }
        };
        let idle = wire.client.run(begin()).await;
        let busy = wire.client.run(async move {
            let mut client = begin().await;
            let find = GetFunction { name: "never".into() }.encode();
            client.write_all(&find).await.unwrap();
            let mut found = [0; 28];
            client.read_exact(&mut found).await.unwrap();
            let function = u64::from_le_bytes(*found.last_chunk().unwrap());
            client.write_all(&Call { function, args: Vec::new() }.encode()).await.unwrap();
            client
        });
        let clients = (idle, busy.await);
        within(TIME_LIMIT, "both have sessions", async || server.sessions() == 2).await;
        wire.pull();
        within(TIME_LIMIT, "the server has noticed", async || server.sessions() == 0).await;
        drop(clients);
    });
}

/// The client's machine gets another address in the middle of a copy.
#[test]
fn a_quic_session_goes_on_when_the_machine_changes_its_address() {
    peers::run(|| async {
        let Some(wire) = Wire::new() else { return };
        let (site, session) = wire.session(Duration::from_secs(1), Transport::Quic).await;
        let tensor = tensor(&session, 4 * COPY).await;
        let data: bytes::Bytes = Random::new(10).bytes(4 * COPY).into();
        let copied = Arc::new(AtomicU64::new(0));
        let count = copied.clone();
        let to = session.copy_to_remote(&tensor, data.clone());
        let to = to.progress(move |bytes| count.store(bytes, Ordering::Release));
        let copy = tokio::spawn(async move { to.await });
        within(TIME_LIMIT, "the copy moves", async || copied.load(Ordering::Acquire) > 0).await;
        wire.move_client();
        soon("the copy ends", copy).await.unwrap().unwrap();
        assert!(soon("a copy back", session.copy_from_remote(&tensor)).await.unwrap() == data);
        assert_eq!(site.server.sessions(), 1);
    });
}

/// Makes each test over several transports, and with both clients where they differ.
macro_rules! each {
    ($run:ident: $($test:ident: $($name:ident($transport:ident, $form:ident))*;)*) => {$(
        mod $test {
            use super::*;

            $(#[test]
            fn $name() {
                peers::$run(|| super::$test(Transport::$transport, Form::$form));
            })*
        }
    )*};
}

each! { run:
    over_streams: tcp_async(Tcp, Async) tcp_blocking(Tcp, Blocking) tls(Tls, Async) tls_blocking(Tls, Blocking);
    the_last_bytes_leave_a_channel_that_was_full: tcp(Tcp, Async) tls(Tls, Async);
    a_silence_shorter_than_the_keep_alive_ends_nothing:
        tcp_async(Tcp, Async) tcp_blocking(Tcp, Blocking) tls(Tls, Async) quic(Quic, Async);
    a_session_outlives_a_short_outage: tcp(Tcp, Async) tls(Tls, Async) quic(Quic, Async);
}

each! { run_where_silence_counts:
    silence_is_noticed_on_both_sides:
        tcp_async(Tcp, Async) tcp_blocking(Tcp, Blocking) tls(Tls, Async)
        quic(Quic, Async) quic_blocking(Quic, Blocking);
    a_long_outage_ends_the_session_on_both_sides: tcp(Tcp, Async) tls(Tls, Async) quic(Quic, Async);
}

#[test]
fn a_copy_goes_on_when_the_address_changes_async() {
    peers::run(|| a_copy_goes_on_when_the_address_changes(Form::Async));
}

#[test]
fn a_copy_goes_on_when_the_address_changes_blocking() {
    peers::run(|| a_copy_goes_on_when_the_address_changes(Form::Blocking));
}
