//! Property: whatever a client sends without reading the answers, its server holds no more memory
//! than the limits say, and a constant.
//!
//! The kinds of frames, the operations and the built-in functions come from the code. One that is
//! new fails the test until it has a recipe. The allocator counts, and this is the only test of the
//! binary, so that nothing else is counted. What a device holds counts, too: it is host memory
//! here.
//!
//! A flood goes on until the client has sent several times what would be allowed to stay, or the
//! server has ended the connection, or takes no more. The last is proven: the connection is full,
//! and every thread of the process waits. What was held is read at such moments, too, so that
//! everything that was taken has been worked on.
//!
//! Clients of TVM have floods of their own: each request of their protocol, and each function that
//! the server has for them, the largest of them through one server to the next, too. So have
//! servers and clients of TVM at a tracker, and clients of a hop behind which a server of TVM lies.
//!
//! The commands of Disco, and the functions that only its workers can call, have floods of their
//! own in `disco/src/node/flood_tests.rs`.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod allocator;
mod disco_recipes;
mod peer;
mod recipes;
mod tvm_floods;
mod tvm_liars;

use std::path::Path;
use std::time::{Duration, Instant};

use rpc_conformance::threads::wait_for_rest;
use rpc_core::{Devices, Registry};
use rpc_server::config::{ByteSize, Isolate, RelayConfig, ServeConfig, TrackerConfig};
use rpc_server::server::Relay;
use rpc_server::tracker::{RunningTracker, Tracker};
use rpc_server::{RpcServer, builtins};
use rpc_tests::accelerator::Accelerator;

use allocator::{held_bytes, peak_bytes, reset_peak};
use peer::{Peer, Written, header_of};
use recipes::{Answer, Flood, Recipe};
use rpc_tvm::wire::FrameCode;
use rpc_tvm::wire::WireValue;
use tvm_floods::Frames;
use tvm_liars::Lie;

const MIB: u64 = 1 << 20;

pub(crate) const MAX_MEMORY: u64 = 4 * MIB;
const MAX_QUEUED: u64 = MIB;
const MAX_TOTAL_QUEUED: u64 = 4 * MIB;
const MAX_FRAME: u64 = 256 << 10;
const MAX_HANDLES: u64 = 1024;
const MAX_THREADS: u64 = 2;
const MAX_REQUESTS: u32 = 64;

/// Most bytes that the limits above admit for one session.
const QUOTA: u64 = MAX_MEMORY
    // Arguments, beside what counts for all sessions, and staging buffers.
    + 2 * MAX_QUEUED
    // Replies that are not read, before they become errors.
    + 8 * MAX_QUEUED
    + MAX_TOTAL_QUEUED
    // Eight frames of each session do not count.
    + 8 * MAX_FRAME
    // A handle with a small object.
    + MAX_HANDLES * 1024;

/// Memory that a session may take beside its quota: buffers of the connection and of the frames in
/// progress, half a MiB of staged output, and the growth of lists.
const CONSTANT: u64 = 4 * MIB;

/// Bytes that a flood of large frames goes on for, unless the server stops it.
const FLOOD: u64 = 4 * QUOTA;

/// Number of frames that a flood goes on for, unless the server stops it: as many small ones would
/// be too much to stay as well, since each takes several hundred bytes if it is kept as a request.
const FRAMES: u64 = 60_000;

/// Length in bytes from which a request counts against the server's window.
const COSTS_NOTHING: usize = 4096;

/// Number of peers that a relay serves.
const MAX_RELAYED: usize = 64;

/// Time limit of events that are expected.
const LIMIT: Duration = Duration::from_secs(60);

/// A server with small limits.
struct Fixture {
    folder: tempfile::TempDir,
    /// Bytes that the process holds without sessions.
    idle: usize,
    /// Most bytes that one session may hold by the limits.
    quota: u64,
    findings: Vec<String>,
}

impl Fixture {
    async fn start() -> (Self, rpc_server::Running, Registry) {
        let folder = tempfile::tempdir().unwrap();
        let socket = format!("unix:{}", folder.path().join("socket").display());
        let config = ServeConfig {
            listen: vec![socket.parse().unwrap()],
            workdir: folder.path().join("work"),
            isolate: Isolate::None,
            max_memory: ByteSize(MAX_MEMORY),
            max_queued: ByteSize(MAX_QUEUED),
            max_total_queued: ByteSize(MAX_TOTAL_QUEUED),
            max_message: ByteSize(256 << 10),
            max_frame: ByteSize(MAX_FRAME),
            max_handles: MAX_HANDLES as usize,
            max_threads: MAX_THREADS as usize,
            max_requests: MAX_REQUESTS,
            allow_modules: true,
            allow_disco: Some(true),
            allow_listen: vec!["tcp://127.0.0.1:*".into()],
            allow_peer: vec!["tcp://127.0.0.1:*".into()],
            allow_forward: vec!["tvm://127.0.0.1:*".into(), socket],
            tvm: true,
            ..ServeConfig::default()
        };
        let registry = Registry::new();
        registry.add_loader(std::sync::Arc::new(recipes::TestLoader));
        let devices = Devices::new().with(std::sync::Arc::new(Accelerator::default()));
        let server = RpcServer::new(registry.clone()).devices(devices).config(config);
        let running = server.start().await.unwrap();
        (Self { folder, idle: 0, quota: QUOTA, findings: Vec::new() }, running, registry)
    }

    /// Starts a tracker that takes servers and clients of TVM.
    async fn start_tracker() -> (Self, RunningTracker) {
        let folder = tempfile::tempdir().unwrap();
        let listen = vec![format!("unix:{}", folder.path().join("socket").display()).parse().unwrap()];
        let config = TrackerConfig { listen, tvm: true, ..TrackerConfig::default() };
        let running = Tracker::start(&config).await.unwrap();
        // What a session of a tracker may have queued.
        let quota = config.serve_config().max_queued.0;
        (Self { folder, idle: 0, quota, findings: Vec::new() }, running)
    }

    /// Starts a relay that takes servers and clients of TVM.
    async fn start_relay() -> (Self, rpc_server::Running) {
        let folder = tempfile::tempdir().unwrap();
        let listen = vec![format!("unix:{}", folder.path().join("socket").display()).parse().unwrap()];
        let config = RelayConfig { listen, tvm: true, max_sessions: MAX_RELAYED, ..RelayConfig::default() };
        let running = Relay::new(&config).unwrap().start().await.unwrap();
        let idle = held_bytes() + MIB as usize;
        (Self { folder, idle, quota: 0, findings: Vec::new() }, running)
    }

    /// Has more peers of TVM wait at a relay than may, each with the longest key. Records what it
    /// held.
    fn flood_of_waiting(&mut self) {
        let before = reset_peak();
        let peers: Vec<_> = (0..2 * MAX_RELAYED)
            .map(|number| {
                let mut peer = Peer::dial(&self.socket());
                let role = ["server:", "client:"][number % 2];
                peer.send(&tvm_floods::longest_hello(&format!("{role}{number}")));
                peer
            })
            .collect();
        wait_for_rest();
        self.quota = MAX_RELAYED as u64 * (64 << 10);
        self.record("peers of TVM that wait", before, &format!("{} of them", peers.len()));
        drop(peers);
        self.settle("peers of TVM that wait");
    }

    fn socket(&self) -> std::path::PathBuf {
        Path::new(self.folder.path()).join("socket")
    }

    /// Floods the server: first within the client's credit, then beyond it. Records what it held.
    ///
    /// # Panics
    ///
    /// The first request of the flood is not answered as the recipe says, or the server ends the
    /// connection although the recipe keeps to the protocol and the client to its credit.
    fn flood(&mut self, name: &str, make: impl FnOnce(&mut Peer) -> Recipe) {
        self.flood_from(name, Peer::connect(&self.socket()), make);
        self.settle(name);
    }

    /// Floods the server as this peer, as [`flood`](Self::flood) does.
    fn flood_from(&mut self, name: &str, mut peer: Peer, make: impl FnOnce(&mut Peer) -> Recipe) {
        let Recipe { mut frames, answer } = make(&mut peer);
        if !matches!(answer, Answer::EndsConnection | Answer::NoRequest) {
            let frame = frames(&mut peer, 1);
            answer.check(name, &mut peer, &frame);
        }
        peer.begin_flood();
        wait_for_rest();
        let before = reset_peak();
        // The first request is in flight already, if the server has not answered it.
        let mut flood = FloodProgress { number: 1, sent: 0, written: Written::All, next: Vec::new() };
        flood.send_within_credit(&mut peer, &mut frames);
        let within_credit = flood.number;
        let has_ended = flood.written == Written::Ended || peer.unread().has_ended;
        assert!(
            has_ended == matches!(answer, Answer::EndsConnection),
            "{name}: after {within_credit} frames within the client's credit the connection has ended: {has_ended}"
        );
        flood.send_the_rest(&mut peer, &mut frames);
        let FloodProgress { number, sent, written, .. } = flood;
        let what = format!("{sent} bytes sent in {number} frames, {within_credit} within the credit: {written:?}");
        self.record(name, before, &what);
    }

    /// Records what the server has held at most since it held `before` bytes.
    fn record(&mut self, name: &str, before: usize, what: &str) {
        let held = peak_bytes().saturating_sub(before) as u64;
        println!("{name}: {:.1} MiB held, {what}", held as f64 / MIB as f64);
        if held > self.quota + CONSTANT {
            self.findings.push(format!("{name}: {held} bytes were held"));
        }
    }

    /// Floods the server as a client of TVM. Records what it held.
    fn flood_by_tvm(&mut self, name: &str, make: impl FnOnce(&mut Peer) -> Frames) {
        self.flood_as(name, Peer::connect_by_tvm(&self.socket(), Vec::new()), make);
        self.settle(name);
    }

    /// Floods a native server, which is the one here, as a client of TVM that has come through the
    /// server here. Records what both held.
    fn flood_native_chain(&mut self, name: &str, make: impl FnOnce(&mut Peer) -> Frames) {
        let (name, address) = (format!("{name} at a native server"), format!("unix:{}", self.socket().display()));
        let stop = vec!["rpc.Connect".into(), address.as_str().into(), WireValue::Int(0), "".into()];
        self.flood_as(&name, Peer::connect_by_tvm(&self.socket(), stop), make);
        self.settle(&name);
    }

    /// Floods a server of TVM that lies, by a native client behind the hop that the server here is,
    /// and by a client of TVM. Records what the hop held.
    fn flood_liar(&mut self, lie: Lie) {
        let (name, liar) = (format!("{lie:?} of TVM's server behind a hop"), lie.start());
        let peer = Peer::connect_through(&self.socket(), vec![format!("tvm://{}", liar.at)]);
        self.flood_from(&name, peer, |peer| lie.flood(peer));
        liar.stop();
        self.settle(&name);
        let (name, liar) = (format!("{lie:?} of TVM's server in a chain"), lie.start());
        let (host, port) = (liar.at.ip().to_string(), WireValue::Int(liar.at.port().into()));
        let stop = vec!["rpc.Connect".into(), host.as_str().into(), port, "".into(), WireValue::Bool(false)];
        let peer = Peer::connect_by_tvm(&self.socket(), stop);
        self.flood_as(&name, peer, |peer| lie.flood_by_tvm(peer));
        liar.stop();
        self.settle(&name);
    }

    /// Floods the server as this peer. Records what it held.
    fn flood_as(&mut self, name: &str, mut peer: Peer, make: impl FnOnce(&mut Peer) -> Frames) {
        let mut frames = make(&mut peer);
        peer.begin_flood();
        wait_for_rest();
        let before = reset_peak();
        let (mut number, mut sent, mut written) = (0, 0, Written::All);
        while written == Written::All && sent < 4 * self.quota && number < FRAMES {
            let mut batch = Vec::new();
            while batch.len() < 64 << 10 {
                number += 1;
                batch.extend(frames(number));
            }
            written = peer.write(&batch);
            sent += batch.len() as u64;
        }
        wait_for_rest();
        self.record(name, before, &format!("{sent} bytes sent in {number} frames: {written:?}"));
    }

    /// Waits until the memory of the last session is free again.
    fn settle(&mut self, name: &str) {
        let start = Instant::now();
        while held_bytes() > self.idle + MIB as usize {
            if start.elapsed() > LIMIT {
                self.findings.push(format!("{name}: {} bytes stay", held_bytes() - self.idle));
                break;
            }
            std::thread::yield_now();
        }
    }
}

/// A flood, as far as it has been sent.
struct FloodProgress {
    /// Number of the last frame.
    number: u64,
    sent: u64,
    /// Fate of the last bytes.
    written: Written,
    /// Frame that has found no credit.
    next: Vec<u8>,
}

impl FloodProgress {
    fn goes_on(&self) -> bool {
        self.written == Written::All && self.sent < FLOOD && self.number < FRAMES
    }

    fn write(&mut self, peer: &mut Peer, bytes: &[u8]) {
        self.written = peer.write(bytes);
        self.sent += bytes.len() as u64;
    }

    /// Sends as much as a client may whose requests are unanswered until their replies have come.
    fn send_within_credit(&mut self, peer: &mut Peer, frames: &mut Flood) {
        let mut unanswered: Vec<(u64, u64)> = Vec::new();
        loop {
            let before = self.sent;
            // One more may be in flight from before the flood.
            while self.goes_on() && unanswered.len() < MAX_REQUESTS as usize - 1 {
                if self.next.is_empty() {
                    self.number += 1;
                    self.next = frames(peer, self.number);
                }
                let len = self.next.len();
                let cost = if len > COSTS_NOTHING { len as u64 } else { 0 };
                if unanswered.iter().map(|(_, cost)| cost).sum::<u64>() + cost > peer.window() {
                    break;
                }
                let frame = std::mem::take(&mut self.next);
                unanswered.push((header_of(&frame).id, cost));
                self.write(peer, &frame);
            }
            if self.sent == before {
                return;
            }
            wait_for_rest();
            let unread = peer.unread();
            if unread.has_ended {
                return;
            }
            unanswered.retain(|(id, _)| !unread.answered.contains(id));
        }
    }

    /// Sends the rest of the flood without regard to credit, until the server stops it. A server
    /// that has ended the connection keeps no more either of what still comes.
    fn send_the_rest(&mut self, peer: &mut Peer, frames: &mut Flood) {
        let mut batch = std::mem::take(&mut self.next);
        while self.goes_on() {
            while batch.len() < 64 << 10 {
                self.number += 1;
                batch.extend(frames(peer, self.number));
            }
            self.write(peer, &batch);
            batch.clear();
        }
        wait_for_rest();
    }
}

#[test]
fn a_client_that_reads_nothing_makes_its_server_hold_no_more_than_the_limits_say() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (mut fixture, running, registry) = runtime.block_on(Fixture::start());
    // The first session starts threads and fills caches.
    drop(Peer::connect(&fixture.socket()));
    fixture.idle = held_bytes();

    let kinds = recipes::frame_kinds();
    assert!(kinds.contains(&rpc_core::proto::Kind::Hello) && kinds.contains(&rpc_core::proto::Kind::Close));
    for kind in kinds {
        fixture.flood(&format!("{kind:?} frames"), |_| recipes::of_frames(kind));
    }
    let operations = recipes::operations();
    assert!(operations.starts_with(&[1, 2, 3]), "{operations:?}");
    for number in operations {
        fixture.flood(&format!("operation {number}"), |peer| recipes::of_operation(number, peer));
    }
    for (name, arg) in [("large", recipes::large()), ("small", rpc_core::Value::Null)] {
        fixture.flood(&format!("{name} results that are kept"), |peer| recipes::of_kept_results(peer, arg));
    }
    fixture.flood("calls that take a large result several times", recipes::of_named_results);
    fixture.flood("calls that wait and name results", recipes::of_waiting_names);
    fixture.flood("reads of a device", recipes::of_device_reads);
    fixture.flood("loads of missing modules", recipes::of_failing_loads);
    fixture.flood("reads of what a listener's peer sends", recipes::of_listened_bytes);
    builtins::register(&registry);
    for (name, _) in registry.functions() {
        fixture.flood(&name, |peer| recipes::of_function(&name, peer));
    }
    for &code in FrameCode::ALL.iter().filter(|code| code.is_request()) {
        fixture.flood_by_tvm(&format!("TVM's {}", code.name()), |peer| tvm_floods::of_requests(code, peer));
    }
    for name in tvm_floods::FUNCTIONS {
        fixture.flood_by_tvm(name, |peer| tvm_floods::of_function(name, peer));
    }
    fixture.flood_by_tvm("lists that TVM's client holds", tvm_floods::of_held_lists);
    fixture.flood_by_tvm("lists that TVM's client names", tvm_floods::of_named_lists);
    fixture.flood_native_chain("lists that TVM's client holds", tvm_floods::of_held_lists);
    for code in [FrameCode::CallFunc, FrameCode::CopyFromRemote, FrameCode::CopyToRemote] {
        fixture.flood_native_chain(&format!("TVM's {}", code.name()), |peer| tvm_floods::of_requests(code, peer));
    }
    fixture.flood_by_tvm("TVM's empty frames", tvm_floods::of_empty_frames);
    fixture.flood_by_tvm("an endless frame of TVM", tvm_floods::of_an_endless_frame);
    for lie in Lie::ALL {
        fixture.flood_liar(lie);
    }
    assert!(fixture.findings.is_empty(), "the limits admit {}:\n{}", QUOTA + CONSTANT, fixture.findings.join("\n"));
    running.stop();
    drop((running, fixture));

    let (mut fixture, running) = runtime.block_on(Fixture::start_tracker());
    let flood_tracker = |fixture: &mut Fixture, name: &str| {
        let peer = Peer::connect_by_tvm_tracker(&fixture.socket());
        fixture.flood_as(&format!("TVM's {name}"), peer, |peer| tvm_floods::at_a_tracker(name, peer));
        fixture.settle(name);
    };
    // The first registrations begin histories, which stay.
    fixture.idle = held_bytes() + 16 * MIB as usize;
    flood_tracker(&mut fixture, "PUT of new places");
    wait_for_rest();
    fixture.idle = held_bytes();
    for name in tvm_floods::AT_A_TRACKER {
        flood_tracker(&mut fixture, name);
    }
    assert!(fixture.findings.is_empty(), "the limits admit {}:\n{}", fixture.quota, fixture.findings.join("\n"));
    running.server.stop();
    drop((running, fixture));

    let (mut fixture, running) = runtime.block_on(Fixture::start_relay());
    fixture.flood_of_waiting();
    fixture.idle = held_bytes();
    fixture.flood_of_waiting();
    for name in tvm_floods::AT_A_PROXY {
        // Twice the largest message, which is charged; others have the buffers of the connection.
        fixture.quota = if name.contains("message") { 20 * MIB } else { 2 * MIB };
        let (peer, mut other) = (Peer::dial(&fixture.socket()), Peer::dial(&fixture.socket()));
        fixture.flood_as(name, peer, |peer| tvm_floods::at_a_proxy(name, peer, &mut other));
    }
    assert!(fixture.findings.is_empty(), "more is held than should be:\n{}", fixture.findings.join("\n"));
    running.stop();
}
