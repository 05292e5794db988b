//! A bad network in user space: forwarders that lose, delay, reorder, split and swallow the bytes
//! that pass through them.
//!
//! The seed decides the fate of the n-th datagram of a direction, and the end of the n-th piece of
//! a stream. The times of arrival, and so which datagram is the n-th, depend on the machine.

use std::collections::{BinaryHeap, HashMap};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::{Notify, mpsc};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep_until};

/// Generator of numbers that look random and follow from a seed (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates the generator of this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns the next number, which is below `limit`. `limit` is not 0.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.number() % limit as u64) as usize
    }

    /// Returns up to `limit` bytes, and at least one.
    pub fn bytes_up_to(&mut self, limit: usize) -> Vec<u8> {
        let count = 1 + self.below(limit);
        self.bytes(count)
    }

    /// Returns `count` bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(count + 8);
        while bytes.len() < count {
            bytes.extend_from_slice(&self.number().to_le_bytes());
        }
        bytes.truncate(count);
        bytes
    }
}

/// Guard that ends a task when it is dropped.
struct Task(AbortHandle);

impl Task {
    fn spawn(future: impl Future<Output = ()> + Send + 'static) -> Self {
        Self(tokio::spawn(future).abort_handle())
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Conditions for datagrams on their way, the same in both directions. By default, none.
#[derive(Clone, Copy, Debug, Default)]
pub struct Weather {
    /// Seed, which decides the datagrams that are lost or late.
    pub seed: u64,
    /// Number of datagrams that are lost, of a thousand.
    pub lost: usize,
    /// Delay of each datagram.
    pub delay: Duration,
    /// Number of datagrams that are late, and so overtaken by others, of a thousand.
    pub late: usize,
    /// Additional delay of late datagrams.
    pub late_by: Duration,
}

/// Forwarder of datagrams between clients and one server, like a NAT: the server sees each client
/// at a port of the forwarder. It ends when it is dropped.
pub struct UdpForwarder {
    shared: Arc<UdpShared>,
    address: SocketAddr,
    _tasks: [Task; 3],
}

struct UdpShared {
    near: Arc<UdpSocket>,
    weather: Weather,
    server: Mutex<SocketAddr>,
    routes: Mutex<HashMap<SocketAddr, Route>>,
    to_server: Line,
    to_clients: Line,
    silent_to_server: AtomicBool,
    silent_to_clients: AtomicBool,
}

/// Port at which the server sees one client.
struct Route {
    far: Arc<UdpSocket>,
    _back: Task,
}

/// One direction of the datagrams.
struct Line {
    fates: Mutex<Random>,
    queue: mpsc::UnboundedSender<Datagram>,
    number: AtomicU64,
    passed: AtomicU64,
    lost: AtomicU64,
}

struct Datagram {
    due: Instant,
    number: u64,
    from: Arc<UdpSocket>,
    to: SocketAddr,
    bytes: Vec<u8>,
}

impl UdpForwarder {
    /// Starts a forwarder to `server`.
    ///
    /// # Errors
    ///
    /// There is no port.
    pub fn start(server: SocketAddr, weather: Weather) -> io::Result<Self> {
        let near = socket()?;
        let address = near.local_addr()?;
        let (to_server, server_queue) = Line::new(weather.seed);
        let (to_clients, client_queue) = Line::new(!weather.seed);
        let shared = Arc::new(UdpShared {
            near,
            weather,
            server: Mutex::new(server),
            routes: Mutex::default(),
            to_server,
            to_clients,
            silent_to_server: AtomicBool::new(false),
            silent_to_clients: AtomicBool::new(false),
        });
        let tasks = [
            Task::spawn(deliver(server_queue)),
            Task::spawn(deliver(client_queue)),
            Task::spawn(forward_to_server(shared.clone())),
        ];
        Ok(Self { shared, address, _tasks: tasks })
    }

    /// Returns the address that clients dial.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Gives all clients new ports at which the server sees them. Datagrams that the server sends
    /// to the old ones are lost.
    pub fn rebind(&self) {
        self.shared.routes.lock().clear();
    }

    /// Puts another server behind the address.
    pub fn lead_to(&self, server: SocketAddr) {
        *self.shared.server.lock() = server;
        self.rebind();
    }

    /// Passes datagrams from now on, or drops them: those to the server, and those to clients.
    pub fn pass(&self, to_server: bool, to_clients: bool) {
        self.shared.silent_to_server.store(!to_server, Ordering::Release);
        self.shared.silent_to_clients.store(!to_clients, Ordering::Release);
    }

    /// Returns the number of datagrams that have passed so far, to the server and to clients.
    pub fn passed(&self) -> (u64, u64) {
        (self.shared.to_server.passed.load(Ordering::Acquire), self.shared.to_clients.passed.load(Ordering::Acquire))
    }

    /// Returns the number of datagrams of either direction that have been lost so far.
    pub fn lost(&self) -> u64 {
        self.shared.to_server.lost.load(Ordering::Acquire) + self.shared.to_clients.lost.load(Ordering::Acquire)
    }
}

impl std::fmt::Debug for UdpForwarder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UdpForwarder").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Line {
    fn new(seed: u64) -> (Self, mpsc::UnboundedReceiver<Datagram>) {
        let (queue, delivery) = mpsc::unbounded_channel();
        let counters = [(); 3].map(|()| AtomicU64::new(0));
        let [number, passed, lost] = counters;
        (Self { fates: Mutex::new(Random::new(seed)), queue, number, passed, lost }, delivery)
    }

    fn send(&self, weather: &Weather, from: &Arc<UdpSocket>, to: SocketAddr, bytes: &[u8]) {
        let mut fates = self.fates.lock();
        // Both numbers are drawn for each datagram, so that one setting does not shift the other.
        let (is_lost, is_late) = (fates.below(1000) < weather.lost, fates.below(1000) < weather.late);
        drop(fates);
        if is_lost {
            self.lost.fetch_add(1, Ordering::AcqRel);
            return;
        }
        let late = if is_late { weather.late_by } else { Duration::ZERO };
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let due = Instant::now() + weather.delay + late;
        self.passed.fetch_add(1, Ordering::AcqRel);
        // The task that delivers ends with the forwarder.
        let _ = self.queue.send(Datagram { due, number, from: from.clone(), to, bytes: bytes.to_vec() });
    }
}

/// Orders datagrams so that the one that is due first is the greatest.
impl Ord for Datagram {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (other.due, other.number).cmp(&(self.due, self.number))
    }
}

impl PartialOrd for Datagram {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Datagram {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Datagram {}

/// Receive buffer in bytes: larger than a burst of the sender, so that only the conditions above
/// lose datagrams.
const SOCKET_BUFFER: usize = 4 << 20;

fn socket() -> io::Result<Arc<UdpSocket>> {
    let socket = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    socket.set_nonblocking(true)?;
    // The system may allow less.
    let _ = rustix::net::sockopt::set_socket_recv_buffer_size(&socket, SOCKET_BUFFER);
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, SOCKET_BUFFER);
    UdpSocket::from_std(socket).map(Arc::new)
}

async fn deliver(mut queue: mpsc::UnboundedReceiver<Datagram>) {
    let mut under_way: BinaryHeap<Datagram> = BinaryHeap::new();
    loop {
        let due = under_way.peek().map(|datagram| datagram.due);
        tokio::select! {
            biased;
            received = queue.recv() => match received {
                Some(datagram) => under_way.push(datagram),
                None => return,
            },
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                if let Some(datagram) = under_way.pop() {
                    // A datagram for a closed port is lost.
                    let _ = datagram.from.send_to(&datagram.bytes, datagram.to).await;
                }
            }
        }
    }
}

const LONGEST_DATAGRAM: usize = 64 << 10;

async fn forward_to_server(shared: Arc<UdpShared>) {
    let mut buffer = vec![0; LONGEST_DATAGRAM];
    loop {
        // An error here belongs to a datagram that was sent before.
        let Ok((len, client)) = shared.near.recv_from(&mut buffer).await else { continue };
        if shared.silent_to_server.load(Ordering::Acquire) {
            continue;
        }
        let server = *shared.server.lock();
        let far = match shared.routes.lock().entry(client) {
            std::collections::hash_map::Entry::Occupied(route) => route.get().far.clone(),
            std::collections::hash_map::Entry::Vacant(vacant) => {
                let Ok(far) = socket() else { continue };
                let back = Task::spawn(forward_to_client(shared.clone(), far.clone(), client));
                vacant.insert(Route { far: far.clone(), _back: back });
                far
            }
        };
        shared.to_server.send(&shared.weather, &far, server, &buffer[..len]);
    }
}

async fn forward_to_client(shared: Arc<UdpShared>, far: Arc<UdpSocket>, client: SocketAddr) {
    let mut buffer = vec![0; LONGEST_DATAGRAM];
    loop {
        let Ok((len, _)) = far.recv_from(&mut buffer).await else { continue };
        if !shared.silent_to_clients.load(Ordering::Acquire) {
            shared.to_clients.send(&shared.weather, &shared.near, client, &buffer[..len]);
        }
    }
}

/// Conditions for bytes on their way, the same in both directions. By default, none.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pipe {
    /// Seed, which decides the ends of pieces.
    pub seed: u64,
    /// Delay of each byte.
    pub delay: Duration,
    /// Maximum number of bytes that are written at a time; 0 for no limit.
    pub longest_piece: usize,
}

/// Forwarder of TCP connections to one server. It ends when it is dropped.
pub struct ByteForwarder {
    address: SocketAddr,
    server: Arc<Mutex<SocketAddr>>,
    silence: Arc<Silence>,
    _task: Task,
}

#[derive(Default)]
struct Silence {
    silent: AtomicBool,
    ended: Notify,
}

impl Silence {
    async fn over(&self) {
        loop {
            let ended = self.ended.notified();
            if !self.silent.load(Ordering::Acquire) {
                return;
            }
            ended.await;
        }
    }
}

impl ByteForwarder {
    /// Starts a forwarder to `server`.
    ///
    /// # Errors
    ///
    /// There is no port.
    pub async fn start(server: SocketAddr, pipe: Pipe) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let silence = Arc::<Silence>::default();
        let server = Arc::new(Mutex::new(server));
        let accept = accept_streams(listener, server.clone(), pipe, silence.clone());
        Ok(Self { address, server, silence, _task: Task::spawn(accept) })
    }

    /// Leads new connections to another server.
    pub fn lead_to(&self, server: SocketAddr) {
        *self.server.lock() = server;
    }

    /// Returns the address that clients dial.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Passes bytes from now on, or holds them up. Connections stay in both cases.
    pub fn pass(&self, passes: bool) {
        self.silence.silent.store(!passes, Ordering::Release);
        self.silence.ended.notify_waiters();
    }
}

impl std::fmt::Debug for ByteForwarder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ByteForwarder").field("address", &self.address).finish_non_exhaustive()
    }
}

async fn accept_streams(listener: TcpListener, server: Arc<Mutex<SocketAddr>>, pipe: Pipe, silence: Arc<Silence>) {
    // The set of tasks is dropped with this task, and ends its tasks.
    let mut streams = JoinSet::new();
    for number in 0.. {
        let Ok((near, _)) = listener.accept().await else { return };
        let silence = silence.clone();
        let seed = pipe.seed.wrapping_add(number);
        let server = *server.lock();
        streams.spawn(async move {
            let far = TcpStream::connect(server).await?;
            near.set_nodelay(true)?;
            far.set_nodelay(true)?;
            let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
            let there = carry(near_in, far_out, Pipe { seed, ..pipe }, &silence);
            let back = carry(far_in, near_out, Pipe { seed: !seed, ..pipe }, &silence);
            tokio::try_join!(there, back).map(|_| ())
        });
        while streams.try_join_next().is_some() {}
    }
}

/// Limit of reads that have not been written yet: with a delay this limits the rate.
const READS_UNDER_WAY: usize = 256;

async fn carry(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, pipe: Pipe, silence: &Silence) -> io::Result<()> {
    let (queue, mut under_way) = mpsc::channel::<(Instant, Vec<u8>)>(READS_UNDER_WAY);
    let read = async move {
        let mut buffer = vec![0; 64 << 10];
        loop {
            let count = from.read(&mut buffer).await?;
            if count == 0 || queue.send((Instant::now() + pipe.delay, buffer[..count].to_vec())).await.is_err() {
                return io::Result::Ok(());
            }
        }
    };
    let write = async {
        let mut random = Random::new(pipe.seed);
        // Pieces end at the same offsets of the stream, however it was read.
        let mut left = 0;
        while let Some((due, bytes)) = under_way.recv().await {
            sleep_until(due).await;
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                silence.over().await;
                if left == 0 {
                    left = if pipe.longest_piece == 0 { usize::MAX } else { 1 + random.below(pipe.longest_piece) };
                }
                let (piece, behind) = rest.split_at(left.min(rest.len()));
                to.write_all(piece).await?;
                (left, rest) = (left - piece.len(), behind);
                if left == 0 {
                    // The other side reads the piece by itself.
                    tokio::task::yield_now().await;
                }
            }
        }
        to.shutdown().await
    };
    tokio::try_join!(read, write).map(|_| ())
}
