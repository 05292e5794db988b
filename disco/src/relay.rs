//! The relay: how the data of workers that cannot reach each other gets from one to the other all the same.
//!
//! A worker that cannot dial another one makes a pair of sockets, keeps one and hands in the other. Whoever is above both, a node that has opened both or
//! else the controller, has the listener of the other one dialled from where that is, and carries bytes between the two. For the workers it is a
//! data connection like any other: they prove to each other who they are, and encrypt what they would encrypt.
//!
//! | function | parameters | result |
//! | --- | --- | --- |
//! | `disco.relays` | host | an end, and between whom it is to lead, packed, once a worker there or below asks for that; `Closed` when none will any more |
//! | `disco.connect` | host, worker, whether it is the world's | an end, at which that worker's listener is |
//! | `disco.answer` | end, reason | null: its worker may begin, or if there is a reason gives up |
//! | `disco.take` | end | the next bytes that come out of it, up to 256 KiB; none at the end |
//! | `disco.give` | end, bytes | null, once it has taken them; none are the end |
//!
//! An end closes when nobody holds it any more.

use std::os::unix::net as unix;
use std::sync::{Arc, Mutex as SyncMutex, OnceLock, PoisonError, Weak, mpsc as sync};
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use rpc_core::{
    ErrorKind, Lane, Pack, Registry, RemoteFunction, RemoteObject, Result, RpcError, Session, Shared as SharedObject,
};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, mpsc};

use crate::ccl::host::Address;
use crate::host::WorkerHost;

/// How many bytes are carried at a time.
const PIECE: usize = 256 << 10;
/// How many ends one host has at a time, and how many wishes of its workers wait to be fetched.
const MAX_ENDS: usize = 4096;

/// Adds the relay's functions to those that drive workers.
pub(crate) fn register(registry: &Registry) {
    registry
        .add_async("disco.relays", |host: SharedObject<WorkerHost>| {
            let relays = Arc::clone(host.0.relays());
            // The host itself may go while somebody waits.
            drop(host);
            async move {
                let Wanted { between, end } = relays.next().await?;
                Ok::<_, RpcError>((SharedObject(Arc::new(end)), Pack(between)))
            }
        })
        .add_async("disco.connect", |host: SharedObject<WorkerHost>, worker: u32, is_world: bool| {
            let way = host.0.way_to(worker, is_world);
            async move {
                let nobody = || RpcError::invalid_argument(format!("worker {worker} is not at this node"));
                let end = way.ok_or_else(nobody)??.open().await?;
                Ok::<_, RpcError>(SharedObject(Arc::new(end)))
            }
        })
        .add_async("disco.answer", |end: SharedObject<End>, reason: String| async move { end.0.answer(&reason).await })
        .add_async("disco.take", |end: SharedObject<End>| async move { end.0.take().await })
        .add_async("disco.give", |end: SharedObject<End>, bytes: Bytes| async move { end.0.give(bytes).await });
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
    /// Carries bytes to where `way` leads and back from now on, until one of both ends closes; or says why not.
    pub(crate) fn start(self, way: Result<Way>) {
        let Self { between: Between { from, to, .. }, end } = self;
        let carried = async move {
            let other = match async { way?.open().await }.await {
                Ok(other) => other,
                Err(error) => return end.answer(error.message()).await,
            };
            end.answer("").await?;
            tokio::try_join!(carry(&end, &other), carry(&other, &end)).map(drop)
        };
        // There is one wherever a worker could wish for something.
        let Ok(runtime) = crate::runtime::runtime() else { return };
        runtime.spawn(async move {
            // The ranks see the end of the connection, and know better what it means.
            if let Err(error) = carried.await {
                tracing::debug!(from, to, %error, "data of workers is not relayed any more");
            }
        });
    }
}

async fn carry(from: &End, to: &End) -> Result<()> {
    let mut piece = from.take().await?;
    while !piece.is_empty() {
        // The next piece is on its way while this one is.
        ((), piece) = tokio::try_join!(to.give(piece), from.take())?;
    }
    to.give(piece).await
}

/// Where a worker's listener can be dialled.
pub(crate) enum Way {
    /// In this process.
    Here(Address, OwnedSemaphorePermit),
    /// At the other end of a link.
    There { session: Session, host: RemoteObject, worker: u32, is_world: bool },
}

impl Way {
    async fn open(self) -> Result<End> {
        match self {
            Self::Here(address, place) => {
                // Its descriptors belong to the runtime of links, whoever polls them.
                let dialling = crate::runtime::runtime()?.spawn(dial(address));
                let stream = dialling.await.unwrap_or_else(|error| Err(RpcError::internal(error.to_string())))?;
                Ok(End::Here(Socket::new(stream, None, place)))
            }
            Self::There { session, host, worker, is_world } => {
                let connect = session.get_function("disco.connect").await?;
                let end = connect.call((&host, worker, is_world)).lane(Lane::CONCURRENT).await?;
                Far::open(&session, end).await
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
pub(crate) enum End {
    Here(Socket),
    There(Far),
}

impl End {
    async fn take(&self) -> Result<Bytes> {
        match self {
            Self::Here(socket) => socket.take().await,
            Self::There(far) => far.take.call((&far.end,)).lane(Lane::CONCURRENT).await,
        }
    }

    async fn give(&self, bytes: Bytes) -> Result<()> {
        match self {
            Self::Here(socket) => socket.give(bytes).await,
            Self::There(far) => far.give.call((&far.end, bytes)).lane(Lane::CONCURRENT).await,
        }
    }

    async fn answer(&self, reason: &str) -> Result<()> {
        match self {
            Self::Here(socket) => {
                socket.answer(reason);
                Ok(())
            }
            Self::There(far) => far.answer.call((&far.end, reason)).lane(Lane::CONCURRENT).await,
        }
    }
}

/// An end at another process.
pub(crate) struct Far {
    end: RemoteObject,
    take: RemoteFunction,
    give: RemoteFunction,
    answer: RemoteFunction,
}

impl Far {
    pub(crate) async fn open(session: &Session, end: RemoteObject) -> Result<End> {
        let function = |name| session.get_function(name);
        let (take, give, answer) = (function("disco.take"), function("disco.give"), function("disco.answer"));
        Ok(End::There(Self { end, take: take.await?, give: give.await?, answer: answer.await? }))
    }
}

trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// An end in this process.
pub(crate) struct Socket {
    reader: Mutex<Box<dyn AsyncRead + Send + Unpin>>,
    writer: Mutex<Box<dyn AsyncWrite + Send + Unpin>>,
    /// Where a worker waits to hear whether its bytes are carried.
    answer: SyncMutex<Option<sync::Sender<String>>>,
    _place: OwnedSemaphorePermit,
}

impl Socket {
    fn new(stream: Box<dyn Duplex>, answer: Option<sync::Sender<String>>, place: OwnedSemaphorePermit) -> Self {
        let (reader, writer) = tokio::io::split(stream);
        Self {
            reader: Mutex::new(Box::new(reader)),
            writer: Mutex::new(Box::new(writer)),
            answer: SyncMutex::new(answer),
            _place: place,
        }
    }

    async fn take(&self) -> Result<Bytes> {
        let mut piece = BytesMut::with_capacity(PIECE);
        self.reader.lock().await.read_buf(&mut piece).await?;
        Ok(piece.freeze())
    }

    async fn give(&self, bytes: Bytes) -> Result<()> {
        let mut writer = self.writer.lock().await;
        let given = if bytes.is_empty() { writer.shutdown().await } else { writer.write_all(&bytes).await };
        Ok(given?)
    }

    fn answer(&self, reason: &str) {
        if let Some(waiting) = self.answer.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // It may have given up.
            _ = waiting.send(reason.to_owned());
        }
    }
}

/// What the workers of one host, and those below it, want to have carried.
pub(crate) struct Relays {
    host: OnceLock<Weak<WorkerHost>>,
    /// For whoever is above. Taken when there is nobody any more.
    above: SyncMutex<Option<mpsc::Sender<Wanted>>>,
    waiting: Mutex<mpsc::Receiver<Wanted>>,
    places: Arc<Semaphore>,
}

impl Relays {
    pub(crate) fn new() -> Arc<Self> {
        let (above, waiting) = mpsc::channel(MAX_ENDS);
        let places = Arc::new(Semaphore::new(MAX_ENDS));
        let (above, waiting) = (SyncMutex::new(Some(above)), Mutex::new(waiting));
        Arc::new(Self { host: OnceLock::new(), above, waiting, places })
    }

    /// Whose they are.
    pub(crate) fn belong_to(&self, host: &Arc<WorkerHost>) {
        // Set once, where the host is made.
        _ = self.host.set(Arc::downgrade(host));
    }

    /// Nobody is above any more.
    pub(crate) fn close(&self) {
        drop(self.above.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// What whoever is above is to carry, once there is any.
    async fn next(&self) -> Result<Wanted> {
        let wanted = self.waiting.lock().await.recv().await;
        wanted.ok_or_else(|| RpcError::new(ErrorKind::Closed, "the workers of this host have ended"))
    }

    /// A place for one more end.
    pub(crate) fn place(&self) -> Result<OwnedSemaphorePermit> {
        let place = Arc::clone(&self.places).try_acquire_owned();
        place.map_err(|_| RpcError::limit("the relayed connections of a node", MAX_ENDS as u64, MAX_ENDS as u64 + 1))
    }

    /// Sees to it that these bytes are carried: from here, if there is a way, or by whoever is above.
    pub(crate) fn want(&self, wanted: Wanted) {
        let Between { to, is_world, .. } = wanted.between;
        let host = self.host.get().and_then(Weak::upgrade);
        if let Some(way) = host.and_then(|host| host.way_to(to, is_world)) {
            return wanted.start(way);
        }
        let above = self.above.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // At the end of the session its worker sees that nobody has it.
        let Some(above) = above else { return };
        if let Err(error) = above.try_send(wanted) {
            let full = RpcError::limit(
                "the connections of a node that wait to be relayed",
                MAX_ENDS as u64,
                MAX_ENDS as u64 + 1,
            );
            error.into_inner().start(Err(full));
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
        let end = End::Here(Socket::new(Box::new(other), Some(sender), self.place()?));
        self.want(Wanted { between, end });
        match answer.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(reason) if reason.is_empty() => Ok(own),
            Ok(reason) => Err(RpcError::unsupported(reason)),
            Err(sync::RecvTimeoutError::Timeout) => {
                Err(RpcError::new(ErrorKind::DeadlineExceeded, "nobody has said in time whether data is relayed"))
            }
            Err(sync::RecvTimeoutError::Disconnected) => {
                Err(RpcError::new(ErrorKind::Closed, "whoever was to relay data has gone"))
            }
        }
    }
}
