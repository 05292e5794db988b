//! Hostile peers at servers that do not serve sessions themselves: each session is in a process of
//! its own (`--isolate process`), or behind a gateway (`--allow-forward`). The attacks of
//! `hostile.rs` harm no client there either, and leave no process and no session behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rpc_core::proto::{FrameHeader, Hello, Kind, MAGIC, Role};
use rpc_core::{Lane, Operation, Session};
use rpc_transports::{Connector, Dial};
use tokio::io::AsyncReadExt;
use tokio::task::JoinSet;

use crate::peers::raw::{Raw, cut_off, frame, function_in, request, trickle};
use crate::peers::site::{GoodClient, TIME_LIMIT, soon, works};
use crate::peers::{self, Calls, ServerPeer, Transport, children, forge, memory, reset_peak, within};

/// Location of the sessions of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SessionHost {
    /// In processes of their own.
    Isolated,
    /// At another server, behind a gateway.
    Behind,
}

/// A server whose sessions are elsewhere.
struct Front {
    server: ServerPeer,
    /// Server of the sessions, if it is another one.
    origin: Option<ServerPeer>,
}

impl Front {
    /// Starts the servers. `flags` are those of the server that peers reach.
    fn start(host: SessionHost, transport: Transport, flags: &[&str]) -> Self {
        match host {
            SessionHost::Isolated => {
                let server = ServerPeer::with(transport, &[&["--isolate", "process"], flags].concat());
                Self { server, origin: None }
            }
            SessionHost::Behind => {
                Self { server: ServerPeer::with(transport, flags), origin: Some(ServerPeer::with(transport, &[])) }
            }
        }
    }

    fn connector(&self) -> Connector {
        match self.origin {
            Some(_) => peers::connector().via(self.server.address()),
            None => peers::connector(),
        }
    }

    /// Returns the address that clients connect to.
    fn target(&self) -> &str {
        self.origin.as_ref().unwrap_or(&self.server).address()
    }

    async fn connect(&self) -> Session {
        soon("connect", self.connector().connect(self.target())).await.unwrap()
    }

    /// Returns the hello of a client that wants a session here.
    fn hello(&self) -> Hello {
        let forward = self.origin.iter().map(|origin| origin.address().to_owned()).collect();
        Hello { forward, ..Hello::new(Role::Client) }
    }

    /// Connects a peer by a connection of its own.
    async fn raw(&self) -> Raw {
        Raw::dial_to(self.server.address(), peers::trust()).await
    }

    /// Returns the processes that peers could make grow.
    fn processes(&self) -> Vec<u32> {
        self.origin.iter().chain([&self.server]).map(ServerPeer::pid).collect()
    }

    /// Checks that there are sessions for these clients alone: at a server in front of processes
    /// one process for each and a spare one, at the origin of a gateway one session for each.
    async fn is_left_with(&self, clients: &[&Session]) {
        let what = "all that the others had is gone";
        match &self.origin {
            Some(origin) => {
                let watcher = Calls::to(origin.address()).await;
                within(TIME_LIMIT, what, async || watcher.info().await.sessions == clients.len() as u64 + 1).await;
            }
            None => {
                let pid = self.server.pid();
                within(TIME_LIMIT, what, async || children(pid) == clients.len() + 1).await;
            }
        }
    }
}

async fn forged_handles_reach_nothing_of_another_session(host: SessionHost, transport: Transport) {
    let front = Front::start(host, transport, &[]);
    forge::handles_of_others(front.connector(), front.target(), 300_000).await;
    front.is_left_with(&[]).await;
}

/// Peers stall in the magic, in the hello, and before the `Accept`: they send a byte now and then,
/// or nothing.
async fn a_handshake_cannot_be_drawn_out(host: SessionHost, transport: Transport) {
    // The good client connects all the time, and has this limit, too.
    let front = Front::start(host, transport, &["--handshake-timeout", "3s"]);
    let early = front.connect().await;
    let good = GoodClient::start(front.connector(), front.target());
    let hello = peers::hello(&front.hello());
    let mut peers = JoinSet::new();
    for at_once in [1, 8, 40, hello.len() - 1] {
        for count in [0, 1000] {
            for _ in 0..4 {
                let mut raw = front.raw().await;
                raw.write(&hello[..at_once]).await;
                // The hello has fewer than a thousand bytes.
                let slowly = if at_once == 1 { vec![hello[1]; count] } else { Vec::new() };
                peers.spawn(async move { cut_off(raw.channel.io_mut(), &slowly).await });
            }
        }
    }
    // These peers have no session before their `Accept`, of which they send one byte.
    for count in [0, 1, 20] {
        let mut raw = front.raw().await;
        raw.write(&hello).await;
        let accept = FrameHeader::control(Kind::Accept, 0).encode();
        raw.write(&accept[..count]).await;
        peers.spawn(async move { drop(raw.rest().await) });
    }
    while let Some(peer) = soon("a peer is cut off", peers.join_next()).await {
        peer.unwrap();
    }
    good.stays_unharmed().await;
    works(&early).await;
    front.is_left_with(&[&early]).await;
}

/// A silent peer costs no process and no session elsewhere.
async fn half_open_connections_take_little_memory(host: SessionHost, transport: Transport) {
    // No handshake ends by its time limit.
    let front = Front::start(host, transport, &["--max-handshakes", "32", "--handshake-timeout", "180s"]);
    let early = front.connect().await;
    // The handshake is complete at the server, too.
    works(&early).await;
    let mut held = JoinSet::new();
    let cut_off = Arc::new(AtomicU64::new(0));
    for _ in 0..100 {
        let (address, cut_off) = (front.server.address().to_owned(), cut_off.clone());
        held.spawn(async move {
            // With TLS the connection may end before there is a channel.
            let options = Dial { tls: Some(peers::trust()), ..Dial::default() };
            if let Ok(channel) = rpc_transports::Transports::default().dial(&address.parse().unwrap(), &options).await {
                let mut raw = Raw { channel };
                raw.write(&MAGIC).await;
                let _ = raw.channel.io_mut().read_to_end(&mut Vec::new()).await;
            }
            cut_off.fetch_add(1, Ordering::AcqRel);
        });
    }
    // The connections beyond the limit are closed; the flood displaces its own oldest ones.
    within(TIME_LIMIT, "the flood is over", async || cut_off.load(Ordering::Acquire) == 68).await;
    for _ in 0..5 {
        works(&front.connect().await).await;
    }
    works(&early).await;
    front.is_left_with(&[&early]).await;
    held.shutdown().await;
}

/// Requests that arrive byte by byte delay no other client.
async fn slow_requests_delay_no_other_client(host: SessionHost, transport: Transport) {
    const PEERS: usize = 8;
    let front = Front::start(host, transport, &[]);
    let good = GoodClient::start(front.connector(), front.target());
    let mut slow = JoinSet::new();
    let words = request(1, Lane(0), Operation::GetFunction { name: "add".to_owned() });
    for _ in 0..PEERS {
        let mut raw = front.raw().await.greet(&front.hello()).await;
        let words = words.clone();
        slow.spawn(async move {
            trickle(raw.channel.io_mut(), &words).await;
            // The request is answered in the end.
            assert_eq!(raw.frame().await.map(|(header, _)| header.kind), Some(Kind::Reply));
        });
    }
    let session = front.connect().await;
    for _ in 0..20 {
        works(&session).await;
    }
    while let Some(peer) = soon("a slow peer", slow.join_next()).await {
        peer.unwrap();
    }
    good.stays_unharmed().await;
    front.is_left_with(&[&session]).await;
}

/// Peers ask for 300 MiB each and read nothing. The bytes that are kept for them have a limit in
/// every process, and the peers are cut off in the end.
async fn peers_that_read_nothing_are_cut_off(host: SessionHost, transport: Transport) {
    const PEERS: usize = 4;
    const CALLS: u64 = 300;
    let flags = ["--write-timeout", "2s", "--max-message", "2MiB", "--max-queued", "4MiB"];
    let front = Front::start(host, transport, &flags);
    let early = front.connect().await;
    works(&early).await;
    let good = GoodClient::start(front.connector(), front.target());
    let before: Vec<_> = front.processes().into_iter().map(|pid| (pid, memory(pid, "VmRSS"))).collect();
    for (pid, _) in &before {
        reset_peak(*pid);
    }
    let mut held = Vec::new();
    for _ in 0..PEERS {
        let hello = Hello { max_message: 2 << 20, window: 4 << 20, ..front.hello() };
        let mut raw = front.raw().await.greet(&hello).await;
        raw.write(&request(1, Lane(0), Operation::GetFunction { name: "bulk".to_owned() })).await;
        let function = function_in(&raw.frame().await.unwrap().1);
        for id in 2..CALLS + 2 {
            raw.write(&request(id, Lane(id as u32 % 16), Operation::Call { function, args: Vec::new() })).await;
        }
        held.push(raw);
    }
    good.stays_unharmed().await;
    works(&early).await;
    front.is_left_with(&[&early]).await;
    for (pid, before) in before {
        let grown = memory(pid, "VmHWM").saturating_sub(before);
        println!("{host:?} {transport:?}: {:.1} MiB more in process {pid}", grown as f64 / f64::from(1 << 20));
        assert!(grown < LIMIT, "{grown} bytes for peers that read nothing");
    }
    drop(held);
}

/// Bytes that one process may keep for four peers, however much they ask for: ten windows each, as
/// at a plain server, and the contents of sockets and buffers.
const LIMIT: u64 = (4 * 10 * 4 + 48) << 20;

/// Nonsense after the handshake ends its own session, in both kinds of server.
async fn nonsense_ends_its_own_session(host: SessionHost, transport: Transport) {
    let front = Front::start(host, transport, &[]);
    let good = GoodClient::start(front.connector(), front.target());
    let early = front.connect().await;
    let nonsense = [
        vec![0xff; 24],
        frame(Kind::Request, 1, &[0xc1]),
        frame(Kind::Reply, 1, &[0xc0]),
        frame(Kind::Free, 0, &[1, 2, 3]),
        frame(Kind::Credit, 0, &[1, 2, 3]),
        FrameHeader::control(Kind::Request, u32::MAX).encode().to_vec(),
    ];
    for nonsense in nonsense {
        let mut raw = front.raw().await.greet(&front.hello()).await;
        raw.write(&nonsense).await;
        let said = raw.rest().await;
        assert!(peers::raw::last_word(&said).is_some(), "{}", said.escape_ascii());
    }
    works(&early).await;
    good.stays_unharmed().await;
    front.is_left_with(&[&early]).await;
}

/// Makes the tests for both kinds of server, over several transports.
macro_rules! each {
    ($($test:ident)*) => {$(
        mod $test {
            use super::*;

            each! { $test: isolated_tcp(Isolated, Tcp) isolated_tls(Isolated, Tls) isolated_quic(Isolated, Quic)
                behind_tcp(Behind, Tcp) behind_tls(Behind, Tls) behind_quic(Behind, Quic) }
        }
    )*};
    ($test:ident: $($name:ident($place:ident, $transport:ident))*) => {$(
        #[test]
        fn $name() {
            peers::run(|| super::$test(SessionHost::$place, Transport::$transport));
        }
    )*};
}

each! {
    forged_handles_reach_nothing_of_another_session
    a_handshake_cannot_be_drawn_out
    half_open_connections_take_little_memory
    slow_requests_delay_no_other_client
    peers_that_read_nothing_are_cut_off
    nonsense_ends_its_own_session
}
