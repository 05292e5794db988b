//! `rpc.listen.*`: listeners near the server whose connections a client serves, where the operator
//! allows them.
//!
//! Bytes go by calls, so that it works over every transport, through hops, and in sessions with
//! processes of their own. Memory is bounded by the calls: a read holds one piece once there are
//! bytes, which counts as long as its connection is open; a write holds its argument until the
//! socket has taken it; and nothing else is queued here. Connections that are not accepted wait in
//! the backlog of the system.

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll, ready};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use parking_lot::Mutex;
use rpc_core::client::RemoteConnection;
use rpc_core::limits::{MemoryLease, OpenFileLease};
use rpc_core::{Context, ErrorKind, Permission, Registry, Result, RpcError, SessionLimits, Shared};
use rpc_transports::{Address, Bind, Channel, Listener, TransportError};
use tokio::io::{AsyncReadExt, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::cancellable;
use crate::policy;

/// Maximum number of listeners of a session.
const MAX_LISTENERS: usize = 16;

/// Maximum number of open connections of a session. More wait in the backlog of their listener.
const MAX_CONNECTIONS: usize = 64;

/// Number of requests of a session for each connection that it may have: some reads and writes in
/// flight. Reads that wait must not take all requests, so that writes come through.
const REQUESTS_PER_CONNECTION: usize = 16;

/// Bytes of queued arguments of a session for each connection that it may have: four pieces in
/// flight. Writes that wait must not take all of it, so that those of other connections go on.
const QUEUED_PER_CONNECTION: usize = 4 * RemoteConnection::MAX_PIECE;

/// Maximum number of connections that wait to be accepted.
const BACKLOG: u32 = 64;

/// Descriptors of a listener: the socket, and the one that it keeps in reserve.
const FILES_OF_LISTENER: u64 = 2;

/// Bytes that a listener counts against the memory of its session.
const OBJECT_BYTES: u64 = 2048;

/// Bytes that a connection counts against the memory of its session, with the piece that is read.
const CONNECTION_BYTES: u64 = OBJECT_BYTES + RemoteConnection::MAX_PIECE as u64;

/// Interval at which a wait checks for cancellation.
const CANCEL_CHECK: Duration = Duration::from_millis(250);

/// Size of a first read: an idle connection should be small.
const READ_MIN: usize = 4 << 10;

/// Numbers of listeners and connections that a session may still open.
pub(crate) struct ListenQuota {
    listeners: Arc<Semaphore>,
    connections: Arc<Semaphore>,
}

impl ListenQuota {
    /// Returns the quota of a session with these limits.
    pub(crate) fn new(limits: &SessionLimits) -> Self {
        let (requests, queued) = (limits.max_requests, limits.max_queued_bytes);
        let connections = (requests / REQUESTS_PER_CONNECTION).min(queued / QUEUED_PER_CONNECTION);
        let connections = connections.clamp(1, MAX_CONNECTIONS);
        Self { listeners: Arc::new(Semaphore::new(MAX_LISTENERS)), connections: Arc::new(Semaphore::new(connections)) }
    }
}

pub(super) fn register(registry: &Registry) {
    registry
        .add_async("rpc.listen.open", |context: Context, address: String| async move { open(context, &address).await })
        .add_async("rpc.listen.accept", |context: Context, Shared(listener): Shared<ListenerObject>| {
            // The future does not keep the object, whose drop ends it.
            let (inner, open) = (listener.inner.clone(), listener.open.subscribe());
            async move { while_open(&context, open, "listener", accept(&context, &inner)).await }
        })
        .add_async("rpc.listen.read", |context: Context, Shared(connection): Shared<ConnectionObject>| {
            let (inner, open) = (connection.inner.clone(), connection.open.subscribe());
            async move { while_open(&context, open, "connection", inner.read()).await }
        })
        .add_async("rpc.listen.write", |context: Context, Shared(connection): Shared<ConnectionObject>, data: Bytes| {
            let (inner, open) = (connection.inner.clone(), connection.open.subscribe());
            async move { while_open(&context, open, "connection", inner.write(data)).await }
        })
        .add_async("rpc.listen.finish", |context: Context, Shared(connection): Shared<ConnectionObject>| {
            let (inner, open) = (connection.inner.clone(), connection.open.subscribe());
            async move { while_open(&context, open, "connection", inner.finish()).await }
        });
}

/// Object of a listener. Dropping it stops listening.
struct ListenerObject {
    inner: Arc<ListenerInner>,
    /// Receivers of it learn of the drop.
    open: watch::Sender<()>,
    _memory: MemoryLease,
}

struct ListenerInner {
    listener: tokio::sync::Mutex<Listener>,
    connections: Arc<Semaphore>,
    _permit: OwnedSemaphorePermit,
    _files: OpenFileLease,
}

async fn open(context: Context, address: &str) -> Result<(Shared<ListenerObject>, String)> {
    let parsed: Address = address.parse().map_err(|error: rpc_transports::AddressError| {
        RpcError::invalid_argument(format!("cannot listen at '{address}': {error}"))
    })?;
    policy::check(&context, &Permission::Listen(&parsed.to_string()))
        .map_err(|refusal| refusal.context(format_args!("cannot listen at {parsed}")).without_effect())?;
    // The bytes of other listeners are those of a protocol below.
    if !["tcp", "unix"].contains(&parsed.scheme()) || parsed.key().is_some() {
        return Err(RpcError::unsupported(format!("cannot listen at {parsed}: write tcp://HOST:PORT or unix:PATH")));
    }
    if tokio::runtime::Handle::try_current().is_err() {
        return Err(RpcError::unsupported("a session without a runtime cannot listen"));
    }
    let quota = context.extension::<ListenQuota>();
    let quota = quota.ok_or_else(|| RpcError::unsupported("this session belongs to no server that listens"))?;
    let permit = quota.listeners.clone().try_acquire_owned();
    let permit = permit.map_err(|_| RpcError::limit("listeners", MAX_LISTENERS as u64, MAX_LISTENERS as u64 + 1))?;
    let (memory, files) = (context.reserve_memory(OBJECT_BYTES)?, context.reserve_open_files(FILES_OF_LISTENER)?);
    let bind = Bind { backlog: BACKLOG, ..Bind::default() };
    let listener = crate::transports().bind(&parsed, &bind).await.map_err(listen_error)?;
    let address = listener.local_address().to_string();
    let inner = ListenerInner {
        listener: tokio::sync::Mutex::new(listener),
        connections: quota.connections.clone(),
        _permit: permit,
        _files: files,
    };
    let object = ListenerObject { inner: Arc::new(inner), open: watch::Sender::new(()), _memory: memory };
    Ok((Shared(Arc::new(object)), address))
}

/// Waits for the next connection, and for a place for it before that.
async fn accept(context: &Context, inner: &ListenerInner) -> Result<(Shared<ConnectionObject>, String)> {
    let mut listener = inner.listener.lock().await;
    let permit = inner.connections.clone().acquire_owned().await;
    let permit = permit.map_err(|_| RpcError::internal("the places of connections are never closed"))?;
    let (memory, files) = (context.reserve_memory(CONNECTION_BYTES)?, context.reserve_open_files(1)?);
    let channel = loop {
        let channel = listener.accept().await.map_err(listen_error)?;
        // A connection that has taken the last descriptor of the process is closed.
        if listener.has_reserve() {
            break channel;
        }
    };
    let peer = channel.peer().to_owned();
    let inner = ConnectionInner {
        channel: Mutex::new(Some(channel)),
        reading: tokio::sync::Mutex::new(READ_MIN),
        writing: tokio::sync::Mutex::default(),
    };
    let object = ConnectionObject {
        inner: Arc::new(inner),
        open: watch::Sender::new(()),
        _permit: permit,
        _files: files,
        _memory: memory,
    };
    Ok((Shared(Arc::new(object)), peer))
}

/// Object of an accepted connection. Dropping it closes the connection.
struct ConnectionObject {
    inner: Arc<ConnectionInner>,
    /// Receivers of it learn of the drop.
    open: watch::Sender<()>,
    _permit: OwnedSemaphorePermit,
    _files: OpenFileLease,
    _memory: MemoryLease,
}

impl Drop for ConnectionObject {
    fn drop(&mut self) {
        self.inner.channel.lock().take();
    }
}

struct ConnectionInner {
    /// The connection, until the object is dropped. Locked for one system call at a time.
    channel: Mutex<Option<Channel>>,
    /// Turn of the reads, which keeps their order, and the size of the next one.
    reading: tokio::sync::Mutex<usize>,
    /// Turn of the writes.
    writing: tokio::sync::Mutex<()>,
}

impl ConnectionInner {
    async fn read(&self) -> Result<Option<Bytes>> {
        let mut size = self.reading.lock().await;
        let piece = poll_fn(|cx| self.poll_read(&mut size, cx)).await.map_err(|error| connection_error(&error))?;
        Ok((!piece.is_empty()).then_some(piece))
    }

    /// Reads once. The buffer is made anew each time, so that reads that wait hold none.
    fn poll_read(&self, size: &mut usize, cx: &mut TaskContext<'_>) -> Poll<io::Result<Bytes>> {
        let mut channel = self.channel.lock();
        let Some(channel) = &mut *channel else { return Poll::Ready(Err(io::ErrorKind::NotConnected.into())) };
        let mut piece = BytesMut::with_capacity(*size);
        let mut room = (&mut piece).limit(*size);
        let io = channel.io_mut();
        match pin!(io.read_buf(&mut room)).poll(cx)? {
            Poll::Pending => {
                *size = READ_MIN;
                Poll::Pending
            }
            Poll::Ready(count) => {
                if count == *size {
                    *size = (*size * 4).min(RemoteConnection::MAX_PIECE);
                }
                // A small piece in a large buffer would hold all of it until the client has it.
                let is_small = count < piece.capacity() / 2;
                Poll::Ready(Ok(if is_small { Bytes::copy_from_slice(&piece) } else { piece.freeze() }))
            }
        }
    }

    async fn write(&self, mut data: Bytes) -> Result<()> {
        let _turn = self.writing.lock().await;
        let write = poll_fn(|cx| {
            self.poll_io(|mut io| {
                while !data.is_empty() {
                    match ready!(Pin::new(&mut io).poll_write(cx, &data))? {
                        0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                        count => data.advance(count),
                    }
                }
                Pin::new(&mut io).poll_flush(cx)
            })
        });
        write.await.map_err(|error| connection_error(&error))
    }

    async fn finish(&self) -> Result<()> {
        let _turn = self.writing.lock().await;
        let finished = poll_fn(|cx| self.poll_io(|mut io| Pin::new(&mut io).poll_shutdown(cx)));
        match finished.await {
            // A peer that is gone does not need the end.
            Err(error) if error.kind() != io::ErrorKind::NotConnected => Err(connection_error(&error)),
            _ => Ok(()),
        }
    }

    fn poll_io<T>(
        &self,
        poll: impl FnOnce(&mut dyn rpc_transports::ChannelIo) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        match &mut *self.channel.lock() {
            Some(channel) => poll(channel.io_mut()),
            None => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }
}

/// Runs `work` until the object is dropped, or until no caller waits any more.
async fn while_open<T>(
    context: &Context,
    mut open: watch::Receiver<()>,
    what: &str,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    tokio::select! {
        biased;
        outcome = cancellable(context, CANCEL_CHECK, work) => outcome,
        _ = open.changed() => Err(RpcError::new(ErrorKind::Cancelled, format!("the {what} has been closed"))),
    }
}

fn listen_error(error: TransportError) -> RpcError {
    let kind = match error {
        TransportError::PermissionDenied { .. } | TransportError::Unsupported { .. } => ErrorKind::Unsupported,
        _ => ErrorKind::Io,
    };
    RpcError::new(kind, error.to_string())
}

fn connection_error(error: &io::Error) -> RpcError {
    RpcError::new(ErrorKind::Io, format!("the connection is broken: {error}"))
}
