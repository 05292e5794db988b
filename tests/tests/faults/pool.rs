//! A pool whose members are killed: client, server, relay, hop and tracker, each in every phase of
//! a grant, over TCP, QUIC and Unix sockets.
//!
//! In each case nothing hangs, an error names the lost hop, the tracker and the servers free all
//! that the dead process held, and the pool serves the next client.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rpc_core::{DataType, Device, ErrorKind, Lane, Result, Session};
use rpc_transports::Connector;
use rpc_transports::tracker::{Loan, ServerRequest, Summary, TrackerClient};
use rustix::process::Signal;
use tokio::task::{JoinError, JoinHandle};

use crate::peers::arrivals::Arrivals;
use crate::peers::{
    self, Calls, ClientPeer, KEEP_ALIVE, LIMIT, ServerPeer, TrackerPeer, Transport, at_pace, pace, within,
};

/// Time limit of each step, longer than any takes: a step that needs more hangs.
const TIME_LIMIT: Duration = Duration::from_secs(45);

/// Process that is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Client,
    Server,
    Relay,
    Hop,
    /// Server behind a hop that lives.
    Origin,
    Tracker,
}

/// Phase in which the process is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    Connecting,
    Idle,
    MidCall,
    MidCopy,
}

const MOMENTS: [Moment; 4] = [Moment::Connecting, Moment::Idle, Moment::MidCall, Moment::MidCopy];

macro_rules! each_victim {
    ($($test:ident: $victim:ident $($transport:ident as $name:ident)*;)*) => {$(
        mod $test {
            use super::{Transport, Victim, peers};

            $(#[test]
            fn $name() {
                peers::run_where_silence_counts(|| super::killed(Victim::$victim, Transport::$transport));
            })*
        }
    )*};
}

// A relay serves other machines, and so listens on no Unix socket.
each_victim! {
    a_killed_client_gives_its_server_back: Client Tcp as tcp Quic as quic Unix as unix;
    a_killed_server_is_replaced: Server Tcp as tcp Quic as quic Unix as unix;
    clients_return_to_a_restarted_relay: Relay Tcp as tcp Quic as quic;
    a_killed_hop_is_named: Hop Tcp as tcp Quic as quic Unix as unix;
    a_killed_server_behind_a_hop_is_named: Origin Tcp as tcp Quic as quic Unix as unix;
    a_killed_tracker_disturbs_no_session: Tracker Tcp as tcp Quic as quic Unix as unix;
}

/// A tracker, one server, and the hops between the server and its clients.
struct Pool {
    victim: Victim,
    transport: Transport,
    tracker: TrackerPeer,
    server: ServerPeer,
    relay: Option<ServerPeer>,
    hop: Option<ServerPeer>,
}

/// The tracker has no credentials by which the servers on this machine could prove where they are.
const TRACKER: [&str; 8] = [
    "--lease",
    "2s",
    "--keep-alive",
    "200ms",
    "--ticket-lifetime",
    "1s",
    "--allow-advertise",
    "unix:*,tcp://127.0.0.1,quic://127.0.0.1,tcp://127.0.0.2,quic://127.0.0.2",
];

impl Pool {
    async fn new(victim: Victim, transport: Transport) -> Self {
        let tracker = TrackerPeer::start(&TRACKER);
        let relay = (victim == Victim::Relay).then(|| ServerPeer::relay(transport, None));
        let hop = matches!(victim, Victim::Hop | Victim::Origin).then(|| ServerPeer::quick(transport));
        let server = serve(transport, tracker.address(), relay.as_ref());
        let pool = Self { victim, transport, tracker, server, relay, hop };
        pool.is_whole().await;
        pool
    }

    fn connector(&self) -> Connector {
        let connector = peers::connector().keep_alive(KEEP_ALIVE);
        match &self.hop {
            Some(hop) => connector.via(hop.address()),
            None => connector,
        }
    }

    /// Asks for the server, and connects to it.
    fn request(&self) -> JoinHandle<Result<Loan>> {
        let (connector, tracker) = (self.connector(), self.tracker.address().to_owned());
        tokio::spawn(async move {
            let client = TrackerClient::connect_with(connector, &tracker).await?;
            client.request(&ServerRequest::new("board").timeout(TIME_LIMIT)).await
        })
    }

    async fn loan(&self) -> Loan {
        soon("a server", self.request()).await.unwrap().unwrap()
    }

    async fn summary(&self) -> Result<Summary> {
        let client = TrackerClient::connect_with(peers::connector(), self.tracker.address()).await?;
        client.summary().await
    }

    /// Waits until the tracker has the server, the server is free, and no client waits.
    async fn is_whole(&self) {
        within(TIME_LIMIT, "the pool is whole", async || {
            let Ok(summary) = self.summary().await else { return false };
            let free = matches!(&summary.servers[..], [server] if server.free == 1 && server.holders.is_empty());
            free && summary.queue.is_empty()
        })
        .await;
    }

    /// Checks that the server holds nothing of clients that have ended.
    async fn holds_nothing(&self) {
        let loan = self.loan().await;
        let calls = Calls::over(loan.session().clone());
        within(TIME_LIMIT, "one session is left", async || calls.info().await.sessions == 1).await;
        within(TIME_LIMIT, "no tensor is left", async || calls.info().await.memory_bytes == 0).await;
        within(TIME_LIMIT, "no call is left", async || calls.run::<i64>("tagged.alive", (TAG,)).await == 0).await;
        assert_eq!(peers::children(self.server.pid()), 0);
    }

    fn victim(&mut self) -> &mut ServerPeer {
        match self.victim {
            Victim::Relay => self.relay.as_mut().unwrap(),
            Victim::Hop => self.hop.as_mut().unwrap(),
            _ => &mut self.server,
        }
    }

    fn victim_address(&self) -> &str {
        match self.victim {
            Victim::Tracker => self.tracker.address(),
            Victim::Relay => self.relay.as_ref().unwrap().address(),
            Victim::Hop => self.hop.as_ref().unwrap().address(),
            Victim::Client | Victim::Server | Victim::Origin => self.server.address(),
        }
    }

    fn signal(&mut self, signal: Signal) {
        match self.victim {
            Victim::Tracker => peers::signal(self.tracker.pid(), signal),
            _ => self.victim().signal(signal),
        }
    }

    fn kill(&mut self) {
        match self.victim {
            Victim::Tracker => self.tracker.kill(),
            _ => self.victim().kill(),
        }
    }

    /// Starts another process in place of the killed one.
    fn replace(&mut self) {
        match self.victim {
            Victim::Client => {}
            Victim::Server | Victim::Origin => self.server = serve(self.transport, self.tracker.address(), None),
            Victim::Hop => self.hop = Some(ServerPeer::quick(self.transport)),
            Victim::Relay => {
                let address = self.relay.as_ref().unwrap().address().to_owned();
                self.relay.as_mut().unwrap().exit();
                self.relay = Some(ServerPeer::relay(self.transport, Some(&address)));
            }
            Victim::Tracker => self.tracker = TrackerPeer::at(self.tracker.address(), &TRACKER),
        }
    }
}

fn serve(transport: Transport, tracker: &str, relay: Option<&ServerPeer>) -> ServerPeer {
    let keep_alive = format!("{}ms", KEEP_ALIVE.as_millis());
    let mut flags =
        vec!["--tracker", tracker, "--tracker-key", "board", "--capacity", "1", "--keep-alive", &keep_alive];
    let way = relay.map(|relay| format!("{}/board-1", relay.address()));
    if let Some(way) = &way {
        flags.extend(["--relay", way, "--advertise", way]);
    }
    ServerPeer::with(transport, &flags)
}

const TAG: &str = "under way";

async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    tokio::time::timeout(TIME_LIMIT, future).await.unwrap_or_else(|_| panic!("{what}: not after {TIME_LIMIT:?}"))
}

async fn killed(victim: Victim, transport: Transport) {
    let mut pool = Pool::new(victim, transport).await;
    for moment in MOMENTS {
        println!("{victim:?} over {transport:?}, {moment:?}");
        match (victim, moment) {
            (Victim::Client, Moment::Connecting) => a_client_dies_on_its_way(&pool).await,
            (Victim::Client, _) => a_client_dies(&pool, moment).await,
            (_, Moment::Connecting) => dies_while_a_client_connects(&mut pool).await,
            _ => dies_in_a_session(&mut pool, moment).await,
        }
        pool.is_whole().await;
        pool.holds_nothing().await;
        pool.is_whole().await;
    }
}

/// Regression: a request waited without end at a tracker whose process was stopped, and two minutes
/// at one that was gone.
#[test]
fn a_request_that_waits_at_a_lost_tracker_fails() {
    peers::run_where_silence_counts(|| async {
        for signal in [Signal::KILL, Signal::STOP] {
            let mut tracker = TrackerPeer::start(&TRACKER);
            let connector = peers::connector().keep_alive(KEEP_ALIVE).tracker_outage(peers::DEAD);
            let client = TrackerClient::connect_with(connector, tracker.address()).await.unwrap();
            let asking = client.clone();
            let asking = tokio::spawn(async move { asking.request(&ServerRequest::new("board")).await.map(drop) });
            let queued = async { while client.summary().await.unwrap().queue.is_empty() {} };
            soon("the request is in the queue", queued).await;
            peers::signal(tracker.pid(), signal);
            let error = soon("the request fails", asking).await.unwrap().unwrap_err();
            assert!(error.message().contains("is away"), "{signal:?}: {error}");
            tracker.kill();
        }
    });
}

/// Kills a client that has been granted the server. The server is stopped, so that the client waits
/// there with its ticket.
async fn a_client_dies_on_its_way(pool: &Pool) {
    pool.server.signal(Signal::STOP);
    let mut client = ClientPeer::connecting(&board(pool));
    let granted = async || {
        let Ok(summary) = pool.summary().await else { return false };
        // The tracker may count the server as dead before it notices the end of the client.
        summary.servers.iter().all(|server| !server.holders.is_empty())
    };
    within(TIME_LIMIT, "it is given the server", granted).await;
    client.kill();
    pool.server.signal(Signal::CONT);
}

async fn a_client_dies(pool: &Pool, moment: Moment) {
    let mut client = match moment {
        Moment::Idle => ClientPeer::start("async", &board(pool), 10, 0),
        _ => ClientPeer::busy("async", &board(pool), 10, 1 << 20, TAG),
    };
    let held = async || pool.summary().await.unwrap().servers.iter().any(|server| !server.holders.is_empty());
    within(TIME_LIMIT, "it holds the server", held).await;
    pace::now();
    client.kill();
    let free = async || pool.summary().await.unwrap().servers.iter().all(|server| server.holders.is_empty());
    let took = at_pace(LIMIT, "the tracker knows that it is free", free).await;
    println!("free after {took:?}");
}

fn board(pool: &Pool) -> String {
    format!("{}/board", pool.tracker.address().replace("tcp://", "tracker://"))
}

/// Stops the process, so that a client waits for an answer, and then kills it. A client that has
/// reached the tracker asks again, and is granted the server that is there by then. One that was on
/// its way to the tracker is told what was lost.
async fn dies_while_a_client_connects(pool: &mut Pool) {
    let request = waits_at_the_stopped_victim(pool).await;
    pool.kill();
    pool.replace();
    let answer = soon("an answer", request).await.unwrap();
    if matches!(pool.victim, Victim::Tracker | Victim::Hop) {
        let error = answer.expect_err("the way to the tracker is lost");
        assert!([ErrorKind::PeerLost, ErrorKind::PeerSilent].contains(&error.kind()), "{error}");
        assert!(error.peer().is_some(), "{error}");
    } else {
        let loan = answer.expect("another server");
        assert_eq!(Calls::over(loan.session().clone()).run::<i64>("add", (1, 2)).await, 3);
    }
}

/// Stops the victim, and returns the request of a client once that waits there for an answer. A
/// server that has been silent for 0.6 s gets no clients any more: where a client takes longer to
/// ask for it, because the machine is slow, another one asks anew.
async fn waits_at_the_stopped_victim(pool: &mut Pool) -> JoinHandle<Result<Loan>> {
    const ATTEMPTS: usize = 6;
    for _ in 0..ATTEMPTS {
        pool.signal(Signal::STOP);
        let arrivals = Arrivals::at(pool.victim_address());
        let request = pool.request();
        let has_come = async {
            while !arrivals.have_come() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        if tokio::time::timeout(Duration::from_secs(5), has_come).await.is_ok() {
            return request;
        }
        request.abort();
        let _ = request.await;
        pool.signal(Signal::CONT);
        pool.is_whole().await;
    }
    panic!("no client waits for an answer in {ATTEMPTS} attempts");
}

async fn dies_in_a_session(pool: &mut Pool, moment: Moment) {
    let loan = pool.loan().await;
    let session = loan.session().clone();
    let pending = begin(&session, moment).await;
    let since = pace::now();
    pool.kill();
    if pool.victim == Victim::Tracker {
        // The session goes on without the tracker, and the next tracker learns of it.
        pool.replace();
        let known = async || {
            pool.summary().await.is_ok_and(|summary| summary.servers.iter().any(|server| !server.holders.is_empty()))
        };
        within(TIME_LIMIT, "the tracker knows again who has the server", known).await;
        assert_eq!(Calls::over(session).run::<i64>("add", (1, 2)).await, 3);
        for pending in pending {
            pending.abort();
            let ended = soon("what was under way", pending).await;
            assert!(ended.as_ref().is_err_and(JoinError::is_cancelled), "what was under way does not go on: {ended:?}");
        }
        return;
    }
    let ended = soon("the end of the session", session.ended()).await;
    let took = pace::since(since);
    assert!(took <= LIMIT, "an end that was known after {took:?}");
    let mut errors = vec![ended];
    for pending in pending {
        errors.push(soon("what was under way", pending).await.unwrap().unwrap_err());
    }
    for error in errors {
        assert!([ErrorKind::PeerLost, ErrorKind::PeerSilent].contains(&error.kind()), "{error}");
        assert_eq!(error.hop(), u16::from(pool.victim == Victim::Origin), "the hop that was lost: {error}");
        assert!(error.peer().is_some(), "{error}");
    }
    println!("known after {took:?}");
    pool.replace();
}

/// Starts requests that do not end by themselves.
async fn begin(session: &Session, moment: Moment) -> Vec<JoinHandle<Result<()>>> {
    match moment {
        Moment::MidCall => {
            let hold = session.get_function("hold.tagged").await.unwrap();
            let call = tokio::spawn(async move { hold.call::<()>((TAG,)).lane(Lane(1)).await });
            let calls = Calls::over(session.clone());
            within(TIME_LIMIT, "it runs", async || calls.run::<i64>("tagged.alive", (TAG,)).await == 1).await;
            vec![call]
        }
        Moment::MidCopy => {
            let tensor = session.alloc(Device::cpu(), DataType::U8, &[32 << 20]).await.unwrap();
            let (session, copied) = (session.clone(), Arc::new(AtomicU64::new(0)));
            let seen = copied.clone();
            let copies = tokio::spawn(async move {
                let data = bytes::Bytes::from(vec![1; 32 << 20]);
                loop {
                    let copied = copied.clone();
                    let copy = session.copy_to_remote(&tensor, data.clone());
                    copy.progress(move |bytes| copied.store(bytes, Ordering::Relaxed)).await?;
                }
            });
            within(TIME_LIMIT, "bytes move", async || seen.load(Ordering::Relaxed) > 0).await;
            vec![copies]
        }
        _ => Vec::new(),
    }
}
