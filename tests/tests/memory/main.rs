//! Memory and threads that a server uses for sessions and copies. The server is a process of its
//! own, so that no other code counts. The figures are printed: `cargo test -p rpc-tests --test
//! memory -- --nocapture`.

// Failures are what tests are for.
#![allow(clippy::unwrap_used)]

#[path = "../faults/peers/mod.rs"]
mod peers;

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use rpc_core::proto::{FrameHeader, Hello, Kind, MAGIC, Role};
use rpc_core::{DataType, Device, ErrorKind, RemoteTensor, Session};
use rpc_tests::harness::on_thread;
use rpc_transports::Connector;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use peers::{Calls, RawPeer, ServerPeer, Transport, memory, reset_peak, threads, within};

const MIB: u64 = 1 << 20;

/// Time limit of what is waited for, longer than any takes.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Size of the copies, in bytes.
const COPY: u64 = 256 * MIB;

macro_rules! tests {
    ($($test:ident: $body:expr;)*) => {$(
        #[test]
        fn $test() {
            peers::run(|| $body);
        }
    )*};
}

tests! {
    copies_over_tcp: copies(Transport::Tcp);
    copies_over_unix_sockets: copies(Transport::Unix);
    copies_by_the_blocking_client_over_tcp: copies_blocking(Transport::Tcp);
    copies_by_the_blocking_client_over_unix_sockets: copies_blocking(Transport::Unix);
    copies_through_a_hop_over_tcp: copies_through_a_hop(Transport::Tcp);
    copies_through_a_hop_over_unix_sockets: copies_through_a_hop(Transport::Unix);
    idle_sessions_over_tcp: idle_sessions(Transport::Tcp);
    idle_sessions_over_unix_sockets: idle_sessions(Transport::Unix);
    idle_sessions_that_were_busy_once: sessions_that_were_busy(Transport::Tcp);
    claims_over_tcp: claims(Transport::Tcp);
    claims_over_unix_sockets: claims(Transport::Unix);
}

/// Peak of a process's memory above its memory at the time when this value was made.
struct Peak {
    pid: u32,
    before: u64,
}

impl Peak {
    fn of(pid: u32) -> Self {
        reset_peak(pid);
        Self { pid, before: memory(pid, "VmRSS") }
    }

    fn growth(&self) -> u64 {
        memory(self.pid, "VmHWM").saturating_sub(self.before)
    }
}

fn report(what: &str, transport: Transport, bytes: u64, limit: u64) {
    println!("{what} ({transport:?}): {:.1} MiB, limit {} MiB", bytes as f64 / MIB as f64, limit / MIB);
    assert!(bytes <= limit, "{what} ({transport:?}): {bytes} bytes, and no more than {limit} are allowed");
}

async fn tensor(session: &Session) -> RemoteTensor {
    session.alloc(Device::cpu(), DataType::U8, &[COPY as i64]).await.unwrap()
}

fn pattern() -> Bytes {
    // A computation for each byte would take most of the time in a debug build.
    let block: Vec<u8> = (0..65_521_u32).map(|at| (at >> 8) as u8 ^ at as u8).collect();
    let mut bytes = BytesMut::with_capacity(COPY as usize);
    while bytes.len() < COPY as usize {
        let left = COPY as usize - bytes.len();
        bytes.extend_from_slice(&block[..block.len().min(left)]);
    }
    bytes.freeze()
}

/// Uses the session once, so that its code is loaded and its buffers exist.
async fn warm(session: &Session) {
    let tensor = session.alloc(Device::cpu(), DataType::U8, &[8]).await.unwrap();
    session.copy_to_remote(&tensor, vec![0; 8]).await.unwrap();
    session.copy_from_remote(&tensor).await.unwrap();
}

async fn copies(transport: Transport) {
    let server = ServerPeer::start(transport);
    let session = Connector::new().connect(server.address()).await.unwrap();
    warm(&session).await;
    let data = pattern();
    let peak = Peak::of(server.pid());
    let tensor = tensor(&session).await;
    session.copy_to_remote(&tensor, data.clone()).await.unwrap();
    report("copy_to of 256 MiB, tensor included", transport, peak.growth(), COPY + 16 * MIB);
    let peak = Peak::of(server.pid());
    let back = session.copy_from_remote(&tensor).await.unwrap();
    report("copy_from of 256 MiB, above the tensor", transport, peak.growth(), 16 * MIB);
    assert!(back == data, "what was copied comes back");
}

async fn copies_blocking(transport: Transport) {
    on_thread(move || {
        let server = ServerPeer::start(transport);
        let session = Connector::new().connect_blocking(server.address()).unwrap();
        let small = session.alloc(Device::cpu(), DataType::U8, &[8]).wait().unwrap();
        session.copy_to_remote(&small, vec![0; 8]).wait().unwrap();
        let data = pattern();
        let peak = Peak::of(server.pid());
        let tensor = session.alloc(Device::cpu(), DataType::U8, &[COPY as i64]).wait().unwrap();
        session.copy_to_remote(&tensor, data.clone()).wait().unwrap();
        report("copy_to of 256 MiB by the blocking client, tensor included", transport, peak.growth(), COPY + 16 * MIB);
        let peak = Peak::of(server.pid());
        let mine = Peak::of(std::process::id());
        let buffer = BytesMut::zeroed(COPY as usize);
        let back = session.copy_from_remote_into(&tensor, None, buffer).wait().unwrap();
        report("copy_from of 256 MiB by the blocking client, above the tensor", transport, peak.growth(), 16 * MIB);
        println!("of which the client sees {:.1} MiB, other tests included", mine.growth() as f64 / MIB as f64);
        assert!(back == data, "what was copied comes back");
    })
    .await;
}

async fn copies_through_a_hop(transport: Transport) {
    let (origin, hop) = (ServerPeer::start(transport), ServerPeer::start(transport));
    let session = Connector::new().via(hop.address()).connect(origin.address()).await.unwrap();
    warm(&session).await;
    let data = pattern();
    let (at_origin, at_hop) = (Peak::of(origin.pid()), Peak::of(hop.pid()));
    let tensor = tensor(&session).await;
    session.copy_to_remote(&tensor, data.clone()).await.unwrap();
    report("copy_to of 256 MiB through a hop, at the hop", transport, at_hop.growth(), 24 * MIB);
    report(
        "copy_to of 256 MiB through a hop, at the origin, tensor included",
        transport,
        at_origin.growth(),
        COPY + 16 * MIB,
    );
    let (at_origin, at_hop) = (Peak::of(origin.pid()), Peak::of(hop.pid()));
    let back = session.copy_from_remote(&tensor).await.unwrap();
    report("copy_from of 256 MiB through a hop, at the hop", transport, at_hop.growth(), 24 * MIB);
    report(
        "copy_from of 256 MiB through a hop, at the origin, above the tensor",
        transport,
        at_origin.growth(),
        16 * MIB,
    );
    assert!(back == data, "what was copied comes back");
}

fn allow_many_files() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
}

const SESSIONS: u64 = 1000;

async fn idle_sessions(transport: Transport) {
    allow_many_files();
    let server = ServerPeer::start(transport);
    let watcher = Calls::to(server.address()).await;
    assert_eq!(watcher.info().await.sessions, 1);
    let (memory_before, threads_before) = (memory(server.pid(), "VmRSS"), threads(server.pid()));
    let mut sessions = Vec::new();
    for _ in 0..SESSIONS {
        sessions.push(Connector::new().connect(server.address()).await.unwrap());
    }
    assert_eq!(watcher.info().await.sessions, SESSIONS + 1);
    let grown = memory(server.pid(), "VmRSS").saturating_sub(memory_before);
    let more = threads(server.pid()).saturating_sub(threads_before);
    println!(
        "an idle session ({transport:?}): {:.1} KiB; threads of all: {more}",
        grown as f64 / 1024.0 / SESSIONS as f64
    );
    report("1,000 idle sessions", transport, grown, 32 * MIB);
    // The runtime may start helper threads, and keeps few.
    let keep_none = async || threads(server.pid()) <= threads_before + 2;
    within(TIME_LIMIT, "idle sessions have no threads", keep_none).await;
    drop(sessions);
    within(TIME_LIMIT, "the sessions end", async || watcher.info().await.sessions == 1).await;
}

async fn sessions_that_were_busy(transport: Transport) {
    allow_many_files();
    let server = ServerPeer::start(transport);
    let watcher = Calls::to(server.address()).await;
    let (memory_before, threads_before) = (memory(server.pid(), "VmRSS"), threads(server.pid()));
    let mut sessions = Vec::new();
    for number in 0..200 {
        let session = Calls::to(server.address()).await;
        // A blocking function, and a frame that is larger than the first read.
        assert_eq!(session.run::<i64>("add", (number, 1)).await, number + 1);
        let echoed: Bytes = session.run("echo", (Bytes::from(vec![7; 1 << 20]),)).await;
        assert_eq!(echoed.len(), 1 << 20);
        sessions.push(session);
    }
    let settled =
        within(TIME_LIMIT, "the threads of idle lanes retire", async || threads(server.pid()) <= threads_before + 2)
            .await;
    let grown = memory(server.pid(), "VmRSS").saturating_sub(memory_before);
    println!(
        "200 sessions that moved 1 MiB: {:.1} KiB each, threads retired after {settled:?}",
        grown as f64 / 1024.0 / 200.0
    );
    drop(sessions);
    within(TIME_LIMIT, "the sessions end", async || watcher.info().await.sessions == 1).await;
}

/// Peers that announce large messages and send nothing.
async fn claims(transport: Transport) {
    allow_many_files();
    let server = ServerPeer::start(transport);
    let watcher = Calls::to(server.address()).await;
    watcher.info().await;
    let address = server.address().to_owned();
    let peak = Peak::of(server.pid());
    let peers = on_thread(move || announce(&address)).await;
    // The server has read all of it by the time of this answer, or soon after.
    for _ in 0..100 {
        watcher.info().await;
    }
    report("600 peers that announce 1 MiB or more each", transport, peak.growth(), 24 * MIB);
    drop(peers);
    within(TIME_LIMIT, "the peers have gone", async || watcher.info().await.sessions == 1).await;
    // Shapes are lengths, too.
    let peak = Peak::of(server.pid());
    for shape in [&[i64::MAX][..], &[1 << 46], &[1 << 40, 1 << 40], &[i64::MAX, i64::MAX, 0], &[-1]] {
        let refused = watcher.0.alloc(Device::cpu(), DataType::F32, shape).await;
        match refused {
            Ok(tensor) => assert_eq!(tensor.size_bytes(), 0, "{shape:?}"),
            Err(error) => {
                let kind = error.kind();
                assert!(
                    matches!(kind, ErrorKind::OutOfMemory | ErrorKind::InvalidArgument | ErrorKind::LimitExceeded),
                    "{error}"
                );
            }
        }
    }
    report("impossible tensors", transport, peak.growth(), MIB);
}

fn announce(address: &str) -> Vec<RawPeer> {
    let mut peers = Vec::new();
    let head = |id, more, body_len, payload_len| {
        FrameHeader { id, more, payload_len, ..FrameHeader::control(Kind::Request, body_len) }.encode()
    };
    // The first request: it gets a function by this name.
    let body = [&[0x93, 0x01, 0xc0, 0x91, 0xa3][..], b"add"].concat();
    for _ in 0..200 {
        // A whole chunk of payload.
        let mut peer = RawPeer::greeted(address);
        peer.write(&[&head(1, false, body.len() as u32, 1 << 20)[..], &body].concat());
        peers.push(peer);
        // The largest body.
        let mut peer = RawPeer::greeted(address);
        peer.write(&[&head(1, true, 64 << 10, 1 << 20)[..], &body].concat());
        peers.push(peer);
        // A hello with absurd limits, and with a list of features that never comes.
        let mut hello = Hello::new(Role::Client);
        (hello.max_message, hello.window, hello.chunk, hello.max_requests) = (u64::MAX, u64::MAX, u32::MAX, u32::MAX);
        let mut peer = RawPeer::connect(address);
        peer.write(&peers::hello(&hello));
        peers.push(peer);
        let mut peer = RawPeer::connect(address);
        peer.write(&[&MAGIC[..], &FrameHeader::control(Kind::Hello, 64 << 10).encode()].concat());
        peers.push(peer);
    }
    // A body whose lists and texts claim four billion elements.
    for claim in
        [&b"\xdd\xff\xff\xff\xff"[..], b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"]
    {
        for prefix in [&[0x93, 0x01, 0xc0][..], &[0x93, 0x02, 0xc0, 0x92, 0x00], &[0x93, 0x03, 0xc0, 0x94]] {
            let body = [prefix, claim].concat();
            let mut peer = RawPeer::greeted(address);
            peer.write(&[&head(1, false, body.len() as u32, 0)[..], &body].concat());
            peers.push(peer);
        }
    }
    peers
}
