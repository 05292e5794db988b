//! Relay of data between workers that cannot reach each other.
//!
//! A worker that cannot dial another one makes a pair of sockets, keeps one and hands in the other.
//! The node that has opened both workers, or else the controller, has the listener of the other
//! worker dialled from its own node, and copies bytes between the two. For the workers it is a data
//! connection like any other: they prove their identity to each other, and encrypt as on any other
//! connection.
//!
//! An end closes when its last owner drops it, also during a call of `disco.take`. Each idle end
//! has such a call in flight on its session. A host therefore has a limited number of ends, so that
//! the session has room for all other calls.

use std::io;
use std::os::unix::net as unix;
use std::pin::pin;
use std::sync::{Arc, OnceLock, Weak, mpsc as sync};
use std::task::Poll;
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex as SyncMutex;
use rpc_core::limits::OpenFileLease;
use rpc_core::{
    Context, ErrorKind, Lane, RemoteFunction, RemoteObject, Result, RpcError, Session, Shared as SharedObject,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, mpsc};

use crate::ccl::host::Address;
use crate::open_files::OpenFiles;
use crate::wire::relayed_pair::RelayedPair;

/// Most bytes that are carried at a time, and the room that is kept while none have come.
const PIECE: usize = 64 << 10;
const FIRST: usize = 4 << 10;
/// The most ends that a host has at a time; where its session may have few requests, an eighth of
/// those.
const MAX_ENDS: usize = 128;

/// End as an object of a session. Calls on it end with it.
pub(crate) struct EndObject {
    end: Arc<End>,
    open: Arc<ClosedFlag>,
}

impl EndObject {
    pub(crate) fn share(end: End) -> SharedObject<Self> {
        SharedObject(Arc::new(Self { end: Arc::new(end), open: Arc::default() }))
    }

    /// Runs `work` on the end without keeping the object alive.
    pub(crate) fn lend<T>(
        this: SharedObject<Self>,
        work: impl AsyncFnOnce(&End) -> Result<T>,
    ) -> impl Future<Output = Result<T>> {
        let (end, open) = (Arc::clone(&this.0.end), Arc::clone(&this.0.open));
        drop(this);
        async move { open.until(work(&end)).await.unwrap_or_else(|| Err(closed())) }
    }
}

impl Drop for EndObject {
    fn drop(&mut self) {
        self.open.close();
    }
}

/// Flag that closes once, and ends all futures that wait for it.
pub(crate) struct ClosedFlag(Semaphore);

impl Default for ClosedFlag {
    fn default() -> Self {
        Self(Semaphore::new(0))
    }
}

impl ClosedFlag {
    pub(crate) fn close(&self) {
        self.0.close();
    }

    /// Returns the output of the future, unless this is closed before.
    pub(crate) async fn until<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        let (mut future, mut closed) = (pin!(future), pin!(self.0.acquire()));
        std::future::poll_fn(|cx| {
            // There is never a permit to acquire, so that this is ready only once the flag is
            // closed.
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

/// Request of a worker for a relayed connection to another one.
pub(crate) struct RelayRequest {
    pub(crate) between: RelayedPair,
    pub(crate) end: End,
}

impl RelayRequest {
    /// Copies bytes in both directions from now on, until one of the ends or `carrier` closes; or
    /// tells the worker why not.
    pub(crate) fn start(self, to: Result<Destination>, carrier: &Arc<ClosedFlag>) {
        let Self { between, end } = self;
        let RelayedPair { from, to: worker, .. } = between;
        let carried = async move {
            let other = match async { to?.open().await }.await {
                Ok(other) => other,
                Err(error) => return end.answer(Some(error.message().to_owned())).await,
            };
            end.answer(None).await?;
            rpc_core::log_limited!(
                INFO,
                from,
                to = worker,
                "the data of these workers is relayed: one cannot dial the other"
            );
            copy_both_ways(&end, &other).await
        };
        // There is a runtime wherever a worker can make a request.
        let Ok(runtime) = crate::runtime::runtime() else { return };
        let carrier = Arc::clone(carrier);
        runtime.spawn(async move {
            // Both ends close with this, and the ranks see the end of their connection.
            if let Some(Err(error)) = carrier.until(carried).await {
                rpc_core::log_limited!(
                    WARN,
                    from,
                    to = worker,
                    %error,
                    "the data of these workers is not relayed any more"
                );
            }
        });
    }
}

/// Copies bytes in both directions until both have ended.
async fn copy_both_ways(one: &End, other: &End) -> Result<()> {
    tokio::try_join!(copy_one_way(one, other), copy_one_way(other, one)).map(drop)
}

async fn copy_one_way(from: &End, to: &End) -> Result<()> {
    let mut piece = from.take().await?;
    while !piece.is_empty() {
        // The next piece is on its way while this one is.
        ((), piece) = tokio::try_join!(to.give(piece), from.take())?;
    }
    to.give(piece).await
}

/// Directory of the workers of a host and of all nodes below it.
pub(crate) trait WorkerDirectory: Send + Sync {
    /// Returns where the listener of a worker can be dialled, if the worker is at this host or
    /// below it.
    fn destination(&self, worker: u32, communicator: u32) -> Option<Result<Destination>>;
}

/// Address at which a worker's listener can be dialled.
pub(crate) enum Destination {
    /// Address of a listener in this process, and the session that the connection is charged to.
    LocalEnd(Address, OpenFiles),
    /// The host at the other end of a link.
    RemoteEnd { session: Session, host: RemoteObject, worker: u32, communicator: u32 },
}

impl Destination {
    pub(crate) async fn open(self) -> Result<End> {
        match self {
            Self::LocalEnd(address, open_files) => {
                let charged = open_files.reserve(1, "relayed data")?;
                // Its descriptors belong to the runtime of links, no matter which thread polls
                // them.
                let dialling = crate::runtime::runtime()?.spawn(dial(address));
                let stream = dialling.await.unwrap_or_else(|error| Err(RpcError::internal(error.to_string())))?;
                Ok(End::here(stream, None, charged))
            }
            Self::RemoteEnd { session, host, worker, communicator } => {
                let connect = session.get_function("disco.connect").await?;
                let end = connect.call((&host, worker, communicator)).lane(Lane::CONCURRENT).await?;
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

/// End of a relayed connection.
pub(crate) struct End {
    socket: Socket,
    /// Permit by which the end counts.
    _permit: Option<OwnedSemaphorePermit>,
}

enum Socket {
    /// An end in this process.
    LocalEnd(LocalEnd),
    /// An end in another process.
    RemoteEnd(RemoteEnd),
}

impl End {
    fn here(stream: Box<dyn Duplex>, answer: Option<Answer>, open_file: Option<OpenFileLease>) -> Self {
        let (reader, writer) = tokio::io::split(stream);
        let (reader, writer) = (Mutex::new(Box::new(reader) as _), Mutex::new(Box::new(writer) as _));
        let here = LocalEnd { reader, writer, answer: SyncMutex::new(answer), _open_file: open_file };
        Self { socket: Socket::LocalEnd(here), _permit: None }
    }

    /// Returns an end that is an object of a session.
    pub(crate) async fn there(session: &Session, end: RemoteObject) -> Result<Self> {
        let function = |name| session.get_function(name);
        let (take, give, answer) = (function("disco.take"), function("disco.give"), function("disco.answer"));
        let there = RemoteEnd { end, take: take.await?, give: give.await?, answer: answer.await? };
        Ok(Self { socket: Socket::RemoteEnd(there), _permit: None })
    }

    /// Returns the end, with the permit by which it counts.
    pub(crate) fn with_permit(self, permit: OwnedSemaphorePermit) -> Self {
        Self { _permit: Some(permit), ..self }
    }

    pub(crate) async fn take(&self) -> Result<Bytes> {
        match &self.socket {
            Socket::LocalEnd(here) => here.take().await,
            Socket::RemoteEnd(there) => there.take.call((&there.end,)).lane(Lane::CONCURRENT).await,
        }
    }

    pub(crate) async fn give(&self, bytes: Bytes) -> Result<()> {
        match &self.socket {
            Socket::LocalEnd(here) => here.give(bytes).await,
            Socket::RemoteEnd(there) => there.give.call((&there.end, bytes)).lane(Lane::CONCURRENT).await,
        }
    }

    pub(crate) async fn answer(&self, reason: Option<String>) -> Result<()> {
        match &self.socket {
            Socket::LocalEnd(here) => {
                here.answer(reason);
                Ok(())
            }
            Socket::RemoteEnd(there) => there.answer.call((&there.end, reason)).lane(Lane::CONCURRENT).await,
        }
    }
}

/// An end at another process.
struct RemoteEnd {
    end: RemoteObject,
    take: RemoteFunction,
    give: RemoteFunction,
    answer: RemoteFunction,
}

trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// Channel on which a worker hears that its bytes are carried, or why not.
type Answer = sync::Sender<Option<String>>;

/// An end in this process.
struct LocalEnd {
    reader: Mutex<Box<dyn AsyncRead + Send + Unpin>>,
    writer: Mutex<Box<dyn AsyncWrite + Send + Unpin>>,
    answer: SyncMutex<Option<Answer>>,
    /// Charge for the socket.
    _open_file: Option<OpenFileLease>,
}

impl LocalEnd {
    async fn take(&self) -> Result<Bytes> {
        let mut reader = self.reader.lock().await;
        let mut piece = BytesMut::with_capacity(FIRST);
        if reader.read_buf(&mut piece).await? < FIRST {
            return Ok(piece.freeze());
        }
        // There may be more, which need not wait for another call.
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

/// Relayed connections of the workers of one host and of those below it.
pub(crate) struct Relays {
    directory: OnceLock<Weak<dyn WorkerDirectory>>,
    /// Queue of requests for the node above or the controller. Taken when there is none any more.
    above: SyncMutex<Option<mpsc::Sender<RelayRequest>>>,
    waiting: Mutex<mpsc::Receiver<RelayRequest>>,
    permits: Arc<Semaphore>,
    open: Arc<ClosedFlag>,
    open_files: OpenFiles,
}

impl Relays {
    /// Creates the relays of a host that `context`'s session has opened.
    pub(crate) fn new(context: &Context) -> Arc<Self> {
        let ends = (context.limits().max_requests / 8).clamp(1, MAX_ENDS);
        // All that wait have a permit.
        let (above, waiting) = mpsc::channel(ends);
        Arc::new(Self {
            directory: OnceLock::new(),
            above: SyncMutex::new(Some(above)),
            waiting: Mutex::new(waiting),
            permits: Arc::new(Semaphore::new(ends)),
            open: Arc::default(),
            open_files: OpenFiles::of(context),
        })
    }

    /// Sets the directory that knows the workers of the host.
    pub(crate) fn set_directory(&self, host: Weak<dyn WorkerDirectory>) {
        // Set once, where the host is made.
        _ = self.directory.set(host);
    }

    /// Ends all relaying: there is no node above and no controller any more.
    pub(crate) fn close(&self) {
        drop(self.above.lock().take());
        self.open.close();
        self.drop_waiting();
    }

    /// Drops the waiting requests, so that their workers get an error. A task that is fetching does
    /// it by itself.
    fn drop_waiting(&self) {
        if let Ok(mut waiting) = self.waiting.try_lock() {
            waiting.close();
            while let Ok(wanted) = waiting.try_recv() {
                drop(wanted);
            }
        }
    }

    /// Returns the next request for the node above or the controller, once there is one.
    pub(crate) async fn next(&self) -> Result<RelayRequest> {
        let fetched = self.open.until(async { self.waiting.lock().await.recv().await }).await;
        if fetched.is_none() {
            self.drop_waiting();
        }
        fetched.flatten().ok_or_else(closed)
    }

    /// Takes a permit for one more end.
    pub(crate) fn take_permit(&self) -> Result<OwnedSemaphorePermit> {
        let full = |_| {
            let text = "a node relays no more connections at a time, as many as its session has room for; let \
                        workers reach each other directly";
            RpcError::new(ErrorKind::LimitExceeded, text)
        };
        Arc::clone(&self.permits).try_acquire_owned().map_err(full)
    }

    /// Relays a connection: from this host if it knows the other worker, or by the node above or
    /// the controller.
    pub(crate) fn request(&self, wanted: RelayRequest) {
        let RelayedPair { to, communicator, .. } = wanted.between;
        let directory = self.directory.get().and_then(Weak::upgrade);
        if let Some(to) = directory.and_then(|host| host.destination(to, communicator)) {
            return wanted.start(to, &self.open);
        }
        let above = self.above.lock().clone();
        // At the end of the session its worker sees that no host has it.
        let Some(above) = above else { return };
        match self.take_permit() {
            Ok(permit) => {
                let end = wanted.end.with_permit(permit);
                // A request with a permit has room in the queue.
                if let Err(error) = above.try_send(RelayRequest { end, ..wanted }) {
                    tracing::debug!(%error, "a request for relaying came at the end of the session");
                }
            }
            Err(error) => wanted.start(Err(error), &self.open),
        }
    }

    /// Returns a relayed connection to the listener of another worker. Blocks the calling thread.
    ///
    /// # Errors
    ///
    /// No node and no controller may relay, or can; there was no answer in time; or the session has
    /// ended.
    pub(crate) fn connect(&self, between: RelayedPair, until: Instant) -> Result<unix::UnixStream> {
        // The worker's own end is charged as the connection that it becomes.
        let charged = self.open_files.reserve(1, "relayed data")?;
        let (own, other) = unix::UnixStream::pair()?;
        other.set_nonblocking(true)?;
        let (sender, answer) = sync::channel();
        let entered = crate::runtime::runtime()?.enter();
        let other = UnixStream::from_std(other)?;
        drop(entered);
        self.request(RelayRequest { between, end: End::here(Box::new(other), Some(sender), charged) });
        match answer.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(None) => Ok(own),
            Ok(Some(reason)) => Err(RpcError::unsupported(reason)),
            Err(sync::RecvTimeoutError::Timeout) => {
                Err(RpcError::new(ErrorKind::DeadlineExceeded, "no node has answered in time whether data is relayed"))
            }
            Err(sync::RecvTimeoutError::Disconnected) => {
                Err(RpcError::new(ErrorKind::Closed, "the node that was to relay data has gone"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use rpc_core::SessionLimits;

    use super::*;
    use crate::held_memory::tests::limited;

    /// An end closes also during a call on it, whose result has no receiver any more.
    #[test]
    fn an_end_without_owners_closes() {
        let runtime = crate::runtime::runtime().unwrap();
        let (own, mut other) = unix::UnixStream::pair().unwrap();
        own.set_nonblocking(true).unwrap();
        let entered = runtime.enter();
        let end = End::here(Box::new(UnixStream::from_std(own).unwrap()), None, None);
        drop(entered);
        let held = EndObject::share(end);
        let lent = SharedObject(Arc::clone(&held.0));
        let taking = runtime.spawn(EndObject::lend(lent, async move |end| end.take().await));
        drop(held);
        let error = rpc_core::blocking::block_on(taking).unwrap().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed);
        assert_eq!(other.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_host_has_as_many_ends_as_its_session_has_room_for() {
        let limits = SessionLimits { max_requests: 16, ..SessionLimits::default() };
        let relays = Relays::new(&limited(limits));
        let permits: Vec<_> = (0..2).map(|_| relays.take_permit().unwrap()).collect();
        assert_eq!(relays.take_permit().unwrap_err().kind(), ErrorKind::LimitExceeded);
        drop(permits);
        drop(relays.take_permit().unwrap());
    }

    /// A worker that waits gets an error when the node above is gone, whether its request was
    /// fetched or not.
    #[test]
    fn a_worker_that_waits_for_a_relay_hears_of_the_end() {
        let relays = Relays::new(&limited(SessionLimits::default()));
        let until = Instant::now() + std::time::Duration::from_secs(60);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| relays.connect(RelayedPair { from: 1, to: 0, communicator: 0 }, until));
            while relays.permits.available_permits() == MAX_ENDS {
                std::thread::yield_now();
            }
            relays.close();
            assert_eq!(waiting.join().unwrap().unwrap_err().kind(), ErrorKind::Closed);
        });
        let late = relays.connect(RelayedPair { from: 1, to: 0, communicator: 0 }, until).unwrap_err();
        assert_eq!(late.kind(), ErrorKind::Closed);
    }
}
