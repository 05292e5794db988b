//! A network in virtual time: hosts, connections between them, delay, loss, cuts, stalls and
//! restarts, all drawn from one seed.
//!
//! Each [host](SimulatedNetwork::host) has a transport for `sim://HOST:PORT` addresses, to be given
//! to servers, trackers, relays and connectors. It wants a runtime with one thread whose clock is
//! paused: tokio then moves the clock to the next timer whenever no task can go on, so that minutes
//! of silence pass in no time. The seed decides everything in the network. What it does not decide
//! are tokio's random choices between branches that are ready at once, and the threads of blocking
//! functions, which the clock does not wait for.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use parking_lot::Mutex;
use rpc_transports::{
    Accept, Address, AddressError, Bind, BoxFuture, Channel, Dial, Listener, Machine, Peer, Properties, Reach,
    Transport, TransportError, Transports,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep, sleep, sleep_until, timeout_at};

use crate::forwarder::Random;

/// Bytes that one direction of a connection holds; a writer waits for more room.
const WINDOW: usize = 64 << 10;

/// Connections that wait to be accepted, for each listener.
const BACKLOG: usize = 64;

/// Delay of links, and how often a packet is lost.
#[derive(Clone, Copy, Debug)]
pub struct Conditions {
    /// Least time from one host to another.
    pub delay: Duration,
    /// Longest time that is added to it at random, for each piece.
    pub jitter: Duration,
    /// Number of pieces in a thousand that are lost once and sent again.
    pub loss: usize,
}

/// Time after which a lost piece is sent again, as a kernel's first retransmission.
const RETRANSMISSION: Duration = Duration::from_millis(200);

/// The network. Clones are the same network.
#[derive(Clone)]
pub struct SimulatedNetwork(Arc<Mutex<State>>);

struct State {
    random: Random,
    conditions: Conditions,
    listeners: HashMap<(String, u16), mpsc::Sender<Channel>>,
    next_port: u16,
    connections: Vec<Connection>,
    /// Pairs of hosts between which nothing moves, in both orders.
    stalled: HashSet<(String, String)>,
}

/// Connection between two hosts, until both ends have been dropped.
struct Connection {
    hosts: [String; 2],
    pipes: [Weak<Mutex<Pipe>>; 2],
}

impl SimulatedNetwork {
    /// Creates a network without hosts.
    pub fn new(seed: u64, conditions: Conditions) -> Self {
        Self(Arc::new(Mutex::new(State {
            random: Random::new(seed),
            conditions,
            listeners: HashMap::new(),
            next_port: 1024,
            connections: Vec::new(),
            stalled: HashSet::new(),
        })))
    }

    /// Returns the transports of a host: this network's alone, so that nothing leaves it.
    pub fn host(&self, name: &str) -> Transports {
        Transports::empty().with(Host { network: self.clone(), name: name.into() })
    }

    /// Resets all connections between two hosts. New ones can be made.
    pub fn cut(&self, a: &str, b: &str) {
        self.reset(|[from, to]| (from == a && to == b) || (from == b && to == a));
    }

    /// Resets all connections of a host, as when its machine restarts and hears of them again. Its
    /// listeners end with the servers that own them.
    pub fn restart(&self, host: &str) {
        self.reset(|hosts| hosts.iter().any(|name| name == host));
    }

    /// Holds back all bytes between two hosts, and new connections, until [`heal`](Self::heal).
    /// Neither side is told.
    pub fn stall(&self, a: &str, b: &str) {
        let mut state = self.0.lock();
        state.stalled.insert((a.into(), b.into()));
        state.stalled.insert((b.into(), a.into()));
        state.apply_stalls();
    }

    /// Ends all stalls.
    pub fn heal(&self) {
        let mut state = self.0.lock();
        state.stalled.clear();
        state.apply_stalls();
    }

    /// Returns the number of connections that have an end left.
    pub fn connections(&self) -> usize {
        let mut state = self.0.lock();
        state.connections.retain(Connection::is_used);
        state.connections.len()
    }

    fn reset(&self, concerns: impl Fn(&[String; 2]) -> bool) {
        let state = self.0.lock();
        for connection in state.connections.iter().filter(|connection| concerns(&connection.hosts)) {
            connection.pipes().for_each(|pipe| pipe.lock().reset());
        }
    }
}

impl fmt::Debug for SimulatedNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedNetwork").finish_non_exhaustive()
    }
}

impl State {
    fn is_stalled(&self, hosts: &[String; 2]) -> bool {
        self.stalled.contains(&(hosts[0].clone(), hosts[1].clone()))
    }

    fn apply_stalls(&mut self) {
        self.connections.retain(Connection::is_used);
        for connection in &self.connections {
            let stalled = self.is_stalled(&connection.hosts);
            connection.pipes().for_each(|pipe| pipe.lock().set_stalled(stalled));
        }
    }

    /// Draws the time that one piece takes.
    fn transit(&mut self) -> Duration {
        let jitter = self.conditions.jitter.mul_f64(self.random.below(1024) as f64 / 1024.0);
        let lost = self.random.below(1000) < self.conditions.loss;
        self.conditions.delay + jitter + if lost { RETRANSMISSION } else { Duration::ZERO }
    }

    /// Makes a connection, and returns the two ends.
    fn connect(&mut self, network: &SimulatedNetwork, hosts: [String; 2]) -> [SimulatedStream; 2] {
        let stalled = self.is_stalled(&hosts);
        let pipes = [(); 2].map(|()| Arc::new(Mutex::new(Pipe { stalled, ..Pipe::default() })));
        self.connections.retain(Connection::is_used);
        self.connections.push(Connection { hosts, pipes: [0, 1].map(|index| Arc::downgrade(&pipes[index])) });
        let [there, back] = pipes;
        let end = |incoming: &Arc<Mutex<Pipe>>, outgoing: &Arc<Mutex<Pipe>>| SimulatedStream {
            network: network.clone(),
            incoming: incoming.clone(),
            outgoing: outgoing.clone(),
            due: None,
        };
        [end(&back, &there), end(&there, &back)]
    }
}

impl Connection {
    fn pipes(&self) -> impl Iterator<Item = Arc<Mutex<Pipe>>> {
        self.pipes.iter().filter_map(Weak::upgrade)
    }

    fn is_used(&self) -> bool {
        self.pipes.iter().any(|pipe| pipe.strong_count() > 0)
    }
}

/// One host of the network, as the transport of its programs.
struct Host {
    network: SimulatedNetwork,
    name: String,
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Host").field(&self.name).finish()
    }
}

impl Transport for Host {
    fn schemes(&self) -> &[&str] {
        &["sim"]
    }

    fn check(&self, at: &Address) -> Result<Properties, AddressError> {
        match at.host() {
            // No identities are needed where nobody else can listen.
            Some(_) => Ok(Properties::plain(Reach::Machine)),
            None => Err(AddressError::invalid(at, "write for example sim://server:1")),
        }
    }

    fn tunnel_target(&self, to: &Address) -> Option<Address> {
        Some(to.clone())
    }

    fn dial<'a>(&'a self, to: &'a Address, with: &'a Dial) -> BoxFuture<'a, Result<Channel, TransportError>> {
        Box::pin(self.connect_to(to, with))
    }

    fn bind<'a>(&'a self, at: &'a Address, _with: &'a Bind) -> BoxFuture<'a, Result<Listener, TransportError>> {
        Box::pin(async move { self.listen_on(at).map_err(|error| TransportError::from_io(at.to_string(), error)) })
    }
}

impl Host {
    async fn connect_to(&self, to: &Address, with: &Dial) -> Result<Channel, TransportError> {
        let limit = with.limit();
        let deadline = Instant::now() + limit;
        let timed_out = || TransportError::TimedOut { address: to.to_string(), limit };
        let refused = || TransportError::from_io(to.to_string(), io::ErrorKind::ConnectionRefused.into());
        let hosts = [self.name.clone(), to.host().unwrap_or_default().to_owned()];
        let round_trip = self.network.0.lock().transit() * 2;
        timeout_at(deadline, sleep(round_trip)).await.map_err(|_| timed_out())?;
        // A stalled link answers nothing, not even that nobody listens. It may heal in time.
        while self.network.0.lock().is_stalled(&hosts) {
            if Instant::now() >= deadline {
                return Err(timed_out());
            }
            sleep(RETRANSMISSION).await;
        }
        let mut state = self.network.0.lock();
        let key = (hosts[1].clone(), to.port().unwrap_or_default());
        let Some(listener) = state.listeners.get(&key).cloned() else { return Err(refused()) };
        let [near, far] = state.connect(&self.network, hosts);
        drop(state);
        let far = Channel::new(far, Peer::new(format!("sim://{}:0", self.name)).on(Machine::This));
        listener.try_send(far).map_err(|_| refused())?;
        Ok(Channel::new(near, Peer::new(to.to_string()).on(Machine::This)))
    }

    fn listen_on(&self, at: &Address) -> io::Result<Listener> {
        let mut state = self.network.0.lock();
        let port = match at.port() {
            Some(0) | None => {
                state.next_port += 1;
                state.next_port
            }
            Some(port) => port,
        };
        let key = (self.name.clone(), port);
        if state.listeners.contains_key(&key) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let (sender, queue) = mpsc::channel(BACKLOG);
        state.listeners.insert(key.clone(), sender);
        drop(state);
        let source = Accepting { network: self.network.clone(), key, queue };
        Ok(Listener::new(at.clone().with_port(port), source))
    }
}

/// Source of a listener's channels. Its port is free again when it is dropped.
struct Accepting {
    network: SimulatedNetwork,
    key: (String, u16),
    queue: mpsc::Receiver<Channel>,
}

impl Accept for Accepting {
    fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Channel>> {
        self.queue.poll_recv(cx).map(|channel| channel.ok_or_else(|| io::ErrorKind::BrokenPipe.into()))
    }
}

impl Drop for Accepting {
    fn drop(&mut self) {
        self.network.0.lock().listeners.remove(&self.key);
    }
}

/// One direction of a connection.
#[derive(Default)]
struct Pipe {
    /// Pieces on their way, with the times of their arrival, which do not decrease.
    pieces: VecDeque<(Instant, Bytes)>,
    /// Sum of the lengths of `pieces`.
    bytes: usize,
    /// Arrival of the end of the stream, once its writer has ended it.
    end: Option<Instant>,
    /// True once the connection has been reset.
    is_reset: bool,
    /// True once the reader is gone.
    is_unread: bool,
    stalled: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl Pipe {
    fn reset(&mut self) {
        self.is_reset = true;
        self.pieces.clear();
        self.bytes = 0;
        self.wake_both();
    }

    fn set_stalled(&mut self, stalled: bool) {
        self.stalled = stalled;
        self.wake_both();
    }

    fn wake_both(&mut self) {
        self.reader.take().into_iter().chain(self.writer.take()).for_each(Waker::wake);
    }

    /// Returns the time at which something that is written now arrives: not before what was
    /// written earlier.
    fn arrival(&self, transit: Duration) -> Instant {
        let arrival = Instant::now() + transit;
        self.pieces.back().map_or(arrival, |(last, _)| arrival.max(*last))
    }
}

/// One end of a connection.
struct SimulatedStream {
    network: SimulatedNetwork,
    incoming: Arc<Mutex<Pipe>>,
    outgoing: Arc<Mutex<Pipe>>,
    /// Timer of the next arrival.
    due: Option<Pin<Box<Sleep>>>,
}

impl SimulatedStream {
    /// Waits for `at`.
    fn poll_due(&mut self, cx: &mut Context<'_>, at: Instant) -> Poll<()> {
        let due = self.due.get_or_insert_with(|| Box::pin(sleep_until(at)));
        if due.deadline() != at {
            due.as_mut().reset(at);
        }
        due.as_mut().poll(cx)
    }
}

impl AsyncRead for SimulatedStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let incoming = self.incoming.clone();
        let mut pipe = incoming.lock();
        pipe.reader = Some(cx.waker().clone());
        if pipe.is_reset {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        if pipe.stalled {
            return Poll::Pending;
        }
        let Some(next) = pipe.pieces.front().map(|(at, _)| *at).or(pipe.end) else { return Poll::Pending };
        ready!(self.poll_due(cx, next));
        while into.remaining() > 0
            && let Some((at, piece)) = pipe.pieces.front_mut()
            && *at <= Instant::now()
        {
            let count = piece.len().min(into.remaining());
            into.put_slice(&piece[..count]);
            piece.advance(count);
            if piece.is_empty() {
                pipe.pieces.pop_front();
            }
            pipe.bytes -= count;
        }
        if let Some(writer) = pipe.writer.take() {
            writer.wake();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for SimulatedStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        // The network's lock is taken before a pipe's, everywhere.
        let mut state = self.network.0.lock();
        let mut pipe = self.outgoing.lock();
        if pipe.is_reset || pipe.is_unread {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        if pipe.end.is_some() {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let room = WINDOW - pipe.bytes;
        if room == 0 {
            pipe.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        // Pieces end anywhere: now and then after a few bytes.
        let longest = if state.random.below(8) == 0 { 1 + state.random.below(16) } else { room };
        let count = data.len().min(room).min(longest);
        let arrival = pipe.arrival(state.transit());
        pipe.pieces.push_back((arrival, Bytes::copy_from_slice(&data[..count])));
        pipe.bytes += count;
        if let Some(reader) = pipe.reader.take() {
            reader.wake();
        }
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.end_output();
        Poll::Ready(Ok(()))
    }
}

impl SimulatedStream {
    fn end_output(&self) {
        let mut state = self.network.0.lock();
        let mut pipe = self.outgoing.lock();
        if pipe.end.is_none() {
            pipe.end = Some(pipe.arrival(state.transit()));
            if let Some(reader) = pipe.reader.take() {
                reader.wake();
            }
        }
    }
}

impl Drop for SimulatedStream {
    fn drop(&mut self) {
        self.end_output();
        let mut pipe = self.incoming.lock();
        pipe.is_unread = true;
        if let Some(writer) = pipe.writer.take() {
            writer.wake();
        }
    }
}
