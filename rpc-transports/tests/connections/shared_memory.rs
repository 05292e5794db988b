//! Tests of copies through shared memory: a copy between processes of one machine does not go
//! through their socket, and it does where they cannot share memory.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use rpc_core::{DataType, Device, LocalSession, Registry, RemoteTensor, RpcError, Session, SharedSession};
use rpc_transports::{Channel, Connector, OpenRequest, Peer, ServeOptions, Server};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};

/// Bytes of a copy: more chunks than a window has slots.
const LEN: usize = (10 << 20) + (300 << 10) + 5;

/// More than all headers of a copy take, and much less than a chunk.
const LITTLE: u64 = 64 << 10;

/// End of a channel that counts the bytes of both directions.
struct Counting {
    io: DuplexStream,
    bytes: Arc<AtomicU64>,
}

impl AsyncRead for Counting {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.io).poll_read(cx, buffer))?;
        self.bytes.fetch_add((buffer.filled().len() - before) as u64, Ordering::Relaxed);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Counting {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let count = ready!(Pin::new(&mut self.io).poll_write(cx, bytes))?;
        self.bytes.fetch_add(count as u64, Ordering::Relaxed);
        Poll::Ready(Ok(count))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// A session whose channel counts its bytes, and a tensor of it.
struct Counted {
    session: Session,
    tensor: RemoteTensor,
    bytes: Arc<AtomicU64>,
}

impl Counted {
    /// Opens a session between two peers. `client` is the process that the server takes its client
    /// for; `None` if it does not know.
    async fn open(connector: Connector, options: ServeOptions, client: Option<u32>) -> Self {
        let open =
            |_: &OpenRequest| -> Result<SharedSession, RpcError> { Ok(Arc::new(LocalSession::new(Registry::new()))) };
        let server = Server::new(Arc::new(open), options);
        let (ours, theirs) = tokio::io::duplex(1 << 20);
        let peer = Peer::new("the client");
        let peer = client.map_or(peer.clone(), |process| peer.with_process(process));
        server.serve_channel(Channel::new(theirs, peer));
        let bytes = Arc::new(AtomicU64::new(0));
        let io = Counting { io: ours, bytes: bytes.clone() };
        let channel = Channel::new(io, Peer::new("the server").with_process(std::process::id()));
        let session = connector.connect_channel(channel).await.unwrap();
        let tensor = session.alloc(Device::cpu(), DataType::U8, &[LEN as i64]).await.unwrap();
        Self { session, tensor, bytes }
    }

    /// Copies to the tensor and back. Returns the bytes that have gone through the channel on each
    /// way.
    async fn copy(&self, seed: u8) -> [u64; 2] {
        let mut data = vec![0; LEN];
        for (number, part) in data.chunks_mut(4099).enumerate() {
            part.fill(number as u8 ^ seed);
        }
        let data = Bytes::from(data);
        let before = self.bytes.load(Ordering::Relaxed);
        self.session.copy_to_remote(&self.tensor, data.clone()).await.unwrap();
        let between = self.bytes.load(Ordering::Relaxed);
        assert!(self.session.copy_from_remote(&self.tensor).await.unwrap() == data);
        [between - before, self.bytes.load(Ordering::Relaxed) - between]
    }
}

#[tokio::test]
async fn copies_between_processes_of_one_machine_do_not_go_through_the_channel() {
    let counted = Counted::open(Connector::new(), ServeOptions::default(), Some(std::process::id())).await;
    // The first copy begins before the server has opened the memory.
    counted.copy(1).await;
    for seed in 2..4 {
        let [to, from] = counted.copy(seed).await;
        assert!(to < LITTLE && from < LITTLE, "{to} and {from} bytes of {LEN}");
    }
}

#[tokio::test]
async fn copies_go_through_the_channel_where_no_memory_is_shared() {
    let process = Some(std::process::id());
    let few = ServeOptions { max_total_queued: 16 << 20, ..ServeOptions::default() };
    for (case, connector, options, client) in [
        ("the client does not want it", Connector::new().shared_memory(false), ServeOptions::default(), process),
        ("the server does not know the process", Connector::new(), ServeOptions::default(), None),
        ("the server finds no such process", Connector::new(), ServeOptions::default(), Some(u32::MAX)),
        ("there is no room for the window", Connector::new(), few, process),
    ] {
        let counted = Counted::open(connector, options, client).await;
        for seed in 1..3 {
            let [to, from] = counted.copy(seed).await;
            assert!(to > LEN as u64 && from > LEN as u64, "{case}: {to} and {from} bytes of {LEN}");
        }
    }
}
