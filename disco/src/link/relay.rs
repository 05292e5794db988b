//! The relay: how the data of workers that cannot reach each other gets from one to the other all the same.
//!
//! A worker that cannot dial another one makes a pair of sockets, keeps one and hands in the other. Whoever is above both, a node that has opened both or
//! else the controller, has the listener of the other one dialled from where that is, and carries bytes between the two. For the workers it is a
//! data connection like any other: they prove to each other who they are, and encrypt what they would encrypt.
//!
//! An end closes when nobody holds it any more, also where somebody takes from it. Each one has a call under way on its session for as long as it is idle, so
//! that a host has only so many that the session has room for all else.

use std::io;
use std::os::unix::net as unix;
use std::pin::pin;
use std::sync::{Arc, OnceLock, Weak, mpsc as sync};
use std::task::Poll;
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex as SyncMutex;
use rpc_core::{
    ErrorKind, Lane, RemoteFunction, RemoteObject, Result, RpcError, Session, SessionLimits, Shared as SharedObject,
};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, mpsc};

use crate::ccl::host::Address;

/// How many bytes are carried at a time, and for how many there is room while none have come.
const PIECE: usize = 64 << 10;
const FIRST: usize = 4 << 10;
/// The most ends that a host has at a time; where its session may have few requests, an eighth of those.
const MAX_ENDS: usize = 128;

/// An end as an object of a session. What is under way on it ends with it.
pub(crate) struct Held {
    end: Arc<End>,
    open: Arc<Closing>,
}

impl Held {
    pub(crate) fn share(end: End) -> SharedObject<Self> {
        SharedObject(Arc::new(Self { end: Arc::new(end), open: Arc::default() }))
    }

    /// Does something with the end, and holds no more of it than that.
    pub(crate) fn lend<T>(
        this: SharedObject<Self>,
        work: impl AsyncFnOnce(&End) -> Result<T>,
    ) -> impl Future<Output = Result<T>> {
        let (end, open) = (Arc::clone(&this.0.end), Arc::clone(&this.0.open));
        drop(this);
        async move { open.until(work(&end)).await.unwrap_or_else(|| Err(closed())) }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.open.close();
    }
}

/// Something that ends once, and with it what waits in it.
pub(crate) struct Closing(Semaphore);

impl Default for Closing {
    fn default() -> Self {
        Self(Semaphore::new(0))
    }
}

impl Closing {
    pub(crate) fn close(&self) {
        self.0.close();
    }

    /// What the future gives, unless this is closed before.
    async fn until<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        let (mut future, mut closed) = (pin!(future), pin!(self.0.acquire()));
        std::future::poll_fn(|cx| {
            // There is never anything to acquire, so that this is ready at the end alone.
            if closed.as_mut().poll(cx).is_ready() {
                return Poll::Ready(None);
            }
            future.as_mut().poll(cx).map(Some)
        })
        .await
    }
}

fn closed() -> RpcError {
    RpcError::new(ErrorKind::Closed, "the relayed connection has ended")
}

/// Between whom bytes are to be carried.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Between {
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// For the communicator of all, or that of their group.
    pub(crate) is_world: bool,
}

/// A worker's wish for a way to another one.
pub(crate) struct Wanted {
    pub(crate) between: Between,
    pub(crate) end: End,
}

impl Wanted {
    /// Carries bytes there and back from now on, until one of both ends closes or whoever carries does; or says why not.
    pub(crate) fn start(self, to: Result<Destination>, carrier: &Arc<Closing>) {
        let Self { between, end } = self;
        let Between { from, to: worker, .. } = between;
        let carried = async move {
            let other = match async { to?.open().await }.await {
                Ok(other) => other,
                Err(error) => return end.answer(Some(error.message().to_owned())).await,
            };
            end.answer(None).await?;
            tracing::info!(from, to = worker, "the data of these workers is relayed: one cannot dial the other");
            carry(&end, &other).await
        };
        // There is one wherever a worker could wish for something.
        let Ok(runtime) = crate::runtime::runtime() else { return };
        let carrier = Arc::clone(carrier);
        runtime.spawn(async move {
            // Both ends close with this, and the ranks see the end of their connection.
            if let Some(Err(error)) = carrier.until(carried).await {
                tracing::warn!(from, to = worker, %error, "the data of these workers is not relayed any more");
            }
        });
    }
}

/// Carries bytes in both directions until both are at their ends.
async fn carry(one: &End, other: &End) -> Result<()> {
    tokio::try_join!(carry_on(one, other), carry_on(other, one)).map(drop)
}

async fn carry_on(from: &End, to: &End) -> Result<()> {
    let mut piece = from.take().await?;
    while !piece.is_empty() {
        // The next piece is on its way while this one is.
        ((), piece) = tokio::try_join!(to.give(piece), from.take())?;
    }
    to.give(piece).await
}

/// Directory of the workers of a host and of all nodes below it.
pub(crate) trait WorkerDirectory: Send + Sync {
    /// Returns where the listener of a worker can be dialled, if the worker is at this host or below it.
    fn destination(&self, worker: u32, is_world: bool) -> Option<Result<Destination>>;
}

/// Where a worker's listener can be dialled.
pub(crate) enum Destination {
    /// In this process.
    Here(Address),
    /// At the other end of a link.
    There { session: Session, host: RemoteObject, worker: u32, is_world: bool },
}

impl Destination {
    pub(crate) async fn open(self) -> Result<End> {
        match self {
            Self::Here(address) => {
                // Its descriptors belong to the runtime of links, whoever polls them.
                let dialling = crate::runtime::runtime()?.spawn(dial(address));
                let stream = dialling.await.unwrap_or_else(|error| Err(RpcError::internal(error.to_string())))?;
                Ok(End::here(stream, None))
            }
            Self::There { session, host, worker, is_world } => {
                let connect = session.get_function("disco.connect").await?;
                let end = connect.call((&host, worker, is_world)).lane(Lane::CONCURRENT).await?;
                End::there(&session, end).await
            }
        }
    }
}

async fn dial(address: Address) -> Result<Box<dyn Duplex>> {
    Ok(match address {
        Address::Tcp(address) => {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            Box::new(stream)
        }
        Address::Unix(path) => Box::new(UnixStream::connect(path).await?),
    })
}

/// One end of what is carried.
pub(crate) struct End {
    socket: Socket,
    /// Where it counts.
    _place: Option<OwnedSemaphorePermit>,
}

enum Socket {
    /// In this process.
    Here(Here),
    /// In another one.
    There(There),
}

impl End {
    fn here(stream: Box<dyn Duplex>, answer: Option<Answer>) -> Self {
        let (reader, writer) = tokio::io::split(stream);
        let (reader, writer) = (Mutex::new(Box::new(reader) as _), Mutex::new(Box::new(writer) as _));
        Self { socket: Socket::Here(Here { reader, writer, answer: SyncMutex::new(answer) }), _place: None }
    }

    /// An end that is an object of a session.
    pub(crate) async fn there(session: &Session, end: RemoteObject) -> Result<Self> {
        let function = |name| session.get_function(name);
        let (take, give, answer) = (function("disco.take"), function("disco.give"), function("disco.answer"));
        let there = There { end, take: take.await?, give: give.await?, answer: answer.await? };
        Ok(Self { socket: Socket::There(there), _place: None })
    }

    /// The end, with this place.
    pub(crate) fn at(self, place: OwnedSemaphorePermit) -> Self {
        Self { _place: Some(place), ..self }
    }

    pub(crate) async fn take(&self) -> Result<Bytes> {
        match &self.socket {
            Socket::Here(here) => here.take().await,
            Socket::There(there) => there.take.call((&there.end,)).lane(Lane::CONCURRENT).await,
        }
    }

    pub(crate) async fn give(&self, bytes: Bytes) -> Result<()> {
        match &self.socket {
            Socket::Here(here) => here.give(bytes).await,
            Socket::There(there) => there.give.call((&there.end, bytes)).lane(Lane::CONCURRENT).await,
        }
    }

    pub(crate) async fn answer(&self, reason: Option<String>) -> Result<()> {
        match &self.socket {
            Socket::Here(here) => {
                here.answer(reason);
                Ok(())
            }
            Socket::There(there) => there.answer.call((&there.end, reason)).lane(Lane::CONCURRENT).await,
        }
    }
}

/// An end at another process.
struct There {
    end: RemoteObject,
    take: RemoteFunction,
    give: RemoteFunction,
    answer: RemoteFunction,
}

trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// Where a worker waits to hear whether its bytes are carried, or why not.
type Answer = sync::Sender<Option<String>>;

/// An end in this process.
struct Here {
    reader: Mutex<Box<dyn AsyncRead + Send + Unpin>>,
    writer: Mutex<Box<dyn AsyncWrite + Send + Unpin>>,
    answer: SyncMutex<Option<Answer>>,
}

impl Here {
    async fn take(&self) -> Result<Bytes> {
        let mut reader = self.reader.lock().await;
        let mut piece = BytesMut::with_capacity(FIRST);
        if reader.read_buf(&mut piece).await? < FIRST {
            return Ok(piece.freeze());
        }
        // There is more, perhaps, which need not wait for another turn.
        piece.resize(PIECE, 0);
        let more = std::future::poll_fn(|cx| {
            let mut room = ReadBuf::new(&mut piece[FIRST..]);
            match std::pin::Pin::new(&mut **reader).poll_read(cx, &mut room) {
                Poll::Ready(read) => Poll::Ready(read.map(|()| room.filled().len())),
                Poll::Pending => Poll::Ready(Ok::<_, io::Error>(0)),
            }
        });
        let more = more.await?;
        piece.truncate(FIRST + more);
        Ok(piece.freeze())
    }

    async fn give(&self, bytes: Bytes) -> Result<()> {
        let mut writer = self.writer.lock().await;
        let given = if bytes.is_empty() { writer.shutdown().await } else { writer.write_all(&bytes).await };
        Ok(given?)
    }

    fn answer(&self, reason: Option<String>) {
        if let Some(waiting) = self.answer.lock().take() {
            // It may have given up.
            _ = waiting.send(reason);
        }
    }
}

/// What the workers of one host, and those below it, want to have carried.
pub(crate) struct Relays {
    directory: OnceLock<Weak<dyn WorkerDirectory>>,
    /// For whoever is above. Taken when there is nobody any more.
    above: SyncMutex<Option<mpsc::Sender<Wanted>>>,
    waiting: Mutex<mpsc::Receiver<Wanted>>,
    places: Arc<Semaphore>,
    open: Arc<Closing>,
}

impl Relays {
    pub(crate) fn new(limits: &SessionLimits) -> Arc<Self> {
        let ends = (limits.max_requests / 8).clamp(1, MAX_ENDS);
        // All that wait have a place.
        let (above, waiting) = mpsc::channel(ends);
        Arc::new(Self {
            directory: OnceLock::new(),
            above: SyncMutex::new(Some(above)),
            waiting: Mutex::new(waiting),
            places: Arc::new(Semaphore::new(ends)),
            open: Arc::default(),
        })
    }

    /// Sets the directory that knows the workers of the host.
    pub(crate) fn belong_to(&self, host: Weak<dyn WorkerDirectory>) {
        // Set once, where the host is made.
        _ = self.directory.set(host);
    }

    /// Nobody is above any more, and nothing is carried.
    pub(crate) fn close(&self) {
        drop(self.above.lock().take());
        self.open.close();
        self.disappoint();
    }

    /// Lets go of what nobody will carry, so that those who wait hear so. Whoever fetches does it himself.
    fn disappoint(&self) {
        if let Ok(mut waiting) = self.waiting.try_lock() {
            waiting.close();
            while let Ok(wanted) = waiting.try_recv() {
                drop(wanted);
            }
        }
    }

    /// What whoever is above is to carry, once there is any.
    pub(crate) async fn next(&self) -> Result<Wanted> {
        let fetched = self.open.until(async { self.waiting.lock().await.recv().await }).await;
        if fetched.is_none() {
            self.disappoint();
        }
        fetched.flatten().ok_or_else(closed)
    }

    /// A place for one more end.
    pub(crate) fn place(&self) -> Result<OwnedSemaphorePermit> {
        let full = |_| {
            let text = "a node relays no more connections at a time, as many as its session has room for; let workers reach each other directly";
            RpcError::new(ErrorKind::LimitExceeded, text)
        };
        Arc::clone(&self.places).try_acquire_owned().map_err(full)
    }

    /// Sees to it that these bytes are carried: from here, if there is a way, or by whoever is above.
    pub(crate) fn want(&self, wanted: Wanted) {
        let Between { to, is_world, .. } = wanted.between;
        let directory = self.directory.get().and_then(Weak::upgrade);
        if let Some(to) = directory.and_then(|host| host.destination(to, is_world)) {
            return wanted.start(to, &self.open);
        }
        let above = self.above.lock().clone();
        // At the end of the session its worker sees that nobody has it.
        let Some(above) = above else { return };
        match self.place() {
            Ok(place) => {
                let end = wanted.end.at(place);
                // Whoever has a place has room in the queue.
                if let Err(error) = above.try_send(Wanted { end, ..wanted }) {
                    tracing::debug!(%error, "a wish for a relay came at the end");
                }
            }
            Err(error) => wanted.start(Err(error), &self.open),
        }
    }

    /// A connection to the listener of another worker. Waits on the calling thread.
    ///
    /// # Errors
    ///
    /// Nobody may carry its bytes, or can; nobody has said so in time; or the session has ended.
    pub(crate) fn connect(&self, between: Between, until: Instant) -> Result<unix::UnixStream> {
        let (own, other) = unix::UnixStream::pair()?;
        other.set_nonblocking(true)?;
        let (sender, answer) = sync::channel();
        let entered = crate::runtime::runtime()?.enter();
        let other = UnixStream::from_std(other)?;
        drop(entered);
        self.want(Wanted { between, end: End::here(Box::new(other), Some(sender)) });
        match answer.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(None) => Ok(own),
            Ok(Some(reason)) => Err(RpcError::unsupported(reason)),
            Err(sync::RecvTimeoutError::Timeout) => {
                Err(RpcError::new(ErrorKind::DeadlineExceeded, "nobody has said in time whether data is relayed"))
            }
            Err(sync::RecvTimeoutError::Disconnected) => {
                Err(RpcError::new(ErrorKind::Closed, "whoever was to relay data has gone"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// Also while a call is under way on it, which is of no more use to anybody.
    #[test]
    fn an_end_that_nobody_holds_closes() {
        let runtime = crate::runtime::runtime().unwrap();
        let (own, mut other) = unix::UnixStream::pair().unwrap();
        own.set_nonblocking(true).unwrap();
        let entered = runtime.enter();
        let end = End::here(Box::new(UnixStream::from_std(own).unwrap()), None);
        drop(entered);
        let held = Held::share(end);
        let lent = SharedObject(Arc::clone(&held.0));
        let taking = runtime.spawn(Held::lend(lent, async move |end| end.take().await));
        drop(held);
        let error = rpc_core::blocking::block_on(taking).unwrap().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed);
        assert_eq!(other.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_host_has_as_many_ends_as_its_session_has_room_for() {
        let limits = SessionLimits { max_requests: 16, ..SessionLimits::default() };
        let relays = Relays::new(&limits);
        let places: Vec<_> = (0..2).map(|_| relays.place().unwrap()).collect();
        assert_eq!(relays.place().unwrap_err().kind(), ErrorKind::LimitExceeded);
        drop(places);
        drop(relays.place().unwrap());
    }

    /// Whoever waits hears so when nobody is above any more, whether his wish was fetched or not.
    #[test]
    fn who_waits_for_a_relay_hears_of_the_end() {
        let relays = Relays::new(&SessionLimits::default());
        let until = Instant::now() + std::time::Duration::from_secs(60);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| relays.connect(Between { from: 1, to: 0, is_world: true }, until));
            while relays.places.available_permits() == MAX_ENDS {
                std::thread::yield_now();
            }
            relays.close();
            assert_eq!(waiting.join().unwrap().unwrap_err().kind(), ErrorKind::Closed);
        });
        let late = relays.connect(Between { from: 1, to: 0, is_world: true }, until).unwrap_err();
        assert_eq!(late.kind(), ErrorKind::Closed);
    }
}
