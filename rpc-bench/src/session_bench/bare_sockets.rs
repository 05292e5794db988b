//! Bare sockets: servers, relays and clients that ours are compared with.
//!
//! A client first sends its task in [`REQUEST_LEN`] bytes: a letter and a length, little-endian.
//!
//! * `e`: the server echoes the bytes as they arrive;
//! * `w`: the client writes that many bytes and gets one byte as acknowledgement, repeatedly;
//! * `r`: the client writes one byte and gets that many bytes, repeatedly.
//!
//! Each side of a copy reuses one buffer of the copy's whole length, as our copies reuse a tensor
//! and its source.

use std::io::{self, Read, Write};
use std::net::{TcpListener as StdTcpListener, TcpStream as StdTcpStream};
use std::os::unix::net::{UnixListener as StdUnixListener, UnixStream as StdUnixStream};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};

use quinn::Endpoint;
use rpc_server::cli::Failure;
use rpc_transports::{Address, BlockingIo, unix};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

use super::bare_tls::{BareTls, QuicStream, Tls, quic_client, quic_server};
use crate::certificates::Certificates;

const REQUEST_LEN: usize = 9;

/// Bytes that a call moves in each direction: about as many as a small call of ours.
pub(super) const MESSAGE_LEN: usize = 64;

/// Buffer length of an echo, and of each direction of a relay.
const BUFFER_LEN: usize = 64 << 10;
const RELAY_BUFFER_LEN: usize = 256 << 10;

/// Task that a client asks a server for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Task {
    Echo,
    Write(usize),
    Read(usize),
}

impl Task {
    fn encode(self) -> [u8; REQUEST_LEN] {
        let (letter, len) = match self {
            Self::Echo => (b'e', 0),
            Self::Write(len) => (b'w', len),
            Self::Read(len) => (b'r', len),
        };
        let mut request = [letter; REQUEST_LEN];
        request[1..].copy_from_slice(&(len as u64).to_le_bytes());
        request
    }

    fn decode(request: [u8; REQUEST_LEN]) -> io::Result<Self> {
        let [letter, len @ ..] = request;
        let len = usize::try_from(u64::from_le_bytes(len)).map_err(io::Error::other)?;
        match letter {
            b'e' => Ok(Self::Echo),
            b'w' => Ok(Self::Write(len)),
            b'r' => Ok(Self::Read(len)),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

fn failed(source: io::Error) -> Failure {
    Failure::local("bare sockets failed", source)
}

/// Returns the socket of an address. Fails for addresses without a port or a path.
fn socket(address: &Address) -> Result<Socket<'_>, Failure> {
    match (address.scheme(), address.host_and_port()) {
        ("tcp" | "tls", Some((host, port))) => Ok(Socket::Tcp((host, port))),
        ("quic", Some((_, port))) => Ok(Socket::Quic(port)),
        ("unix", _) => unix::path_of(address).map(Socket::Unix).map_err(|error| Failure::Usage(error.to_string())),
        _ => Err(Failure::Usage(format!("bare sockets cannot use {address}"))),
    }
}

enum Socket<'a> {
    Tcp((&'a str, u16)),
    Unix(PathBuf),
    Quic(u16),
}

/// Stream over any of the transports.
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
    Tls(BareTls),
    Quic(QuicStream),
}

/// Means by which a client connects.
#[derive(Clone)]
pub(super) enum Connector {
    Plain,
    Tls(Tls),
    Quic(Endpoint),
}

impl Connector {
    /// Returns the connector for servers with this scheme and these certificates. Needs a tokio
    /// runtime.
    pub(super) fn new(scheme: &str, certificates: Option<&Certificates>) -> Result<Self, Failure> {
        match (scheme, certificates) {
            ("tls", Some(certificates)) => Tls::client(certificates).map(Self::Tls),
            ("quic", Some(certificates)) => quic_client(certificates).map(Self::Quic),
            _ => Ok(Self::Plain),
        }
    }

    async fn connect(&self, address: &Address) -> Result<Stream, Failure> {
        let connect = async {
            match (socket(address), self) {
                (Ok(Socket::Tcp(target)), Self::Tls(tls)) => {
                    let stream = TcpStream::connect(target).await?;
                    stream.set_nodelay(true)?;
                    tls.secure(stream).await.map(Stream::Tls)
                }
                (Ok(Socket::Tcp(target)), _) => TcpStream::connect(target).await.and_then(Stream::from_tcp),
                (Ok(Socket::Unix(path)), _) => UnixStream::connect(path).await.map(Stream::Unix),
                (Ok(Socket::Quic(port)), Self::Quic(endpoint)) => {
                    QuicStream::connect(endpoint, port).await.map(Stream::Quic)
                }
                _ => Err(io::ErrorKind::Unsupported.into()),
            }
        };
        connect.await.map_err(failed)
    }
}

impl Stream {
    fn from_tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self::Tcp(stream))
    }

    /// Writes and flushes.
    async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes).await?;
        self.flush().await
    }
}

macro_rules! on_stream {
    ($this:ident, $stream:ident => $call:expr) => {
        match $this.get_mut() {
            Self::Tcp(stream) => {
                let $stream = Pin::new(stream);
                $call
            }
            Self::Unix(stream) => {
                let $stream = Pin::new(stream);
                $call
            }
            Self::Tls(stream) => {
                let $stream = Pin::new(stream);
                $call
            }
            Self::Quic(stream) => {
                let $stream = Pin::new(stream);
                $call
            }
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        on_stream!(self, stream => stream.poll_read(cx, buffer))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        on_stream!(self, stream => stream.poll_write(cx, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_stream!(self, stream => stream.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_stream!(self, stream => stream.poll_shutdown(cx))
    }
}

/// Listener on any of the transports.
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
    Tls(TcpListener, Tls),
    Quic(Endpoint),
}

pub(super) async fn listener(address: &Address, certificates: Option<&Certificates>) -> Result<Listener, Failure> {
    match (socket(address)?, certificates) {
        (Socket::Tcp(target), Some(certificates)) => {
            let listener = TcpListener::bind(target).await.map_err(failed)?;
            Ok(Listener::Tls(listener, Tls::server(certificates)?))
        }
        (Socket::Tcp(target), None) => TcpListener::bind(target).await.map(Listener::Tcp).map_err(failed),
        (Socket::Unix(path), _) => UnixListener::bind(path).map(Listener::Unix).map_err(failed),
        (Socket::Quic(_), Some(certificates)) => quic_server(certificates).map(Listener::Quic),
        (Socket::Quic(_), None) => Err(Failure::Usage(format!("{address} needs certificates"))),
    }
}

impl Listener {
    pub(super) fn address(&self) -> Result<String, Failure> {
        match self {
            Self::Tcp(listener) => {
                listener.local_addr().map(|address| Address::from(address).to_string()).map_err(failed)
            }
            Self::Unix(listener) => {
                let address = listener.local_addr().map_err(failed)?;
                unix_address(address.as_pathname())
            }
            Self::Tls(listener, _) => listener.local_addr().map(|address| format!("tls://{address}")).map_err(failed),
            Self::Quic(endpoint) => endpoint.local_addr().map(|address| format!("quic://{address}")).map_err(failed),
        }
    }

    /// Runs `handle` for each client. Failures of one client are ignored.
    async fn for_each<F, Served>(&self, handle: F) -> Result<(), Failure>
    where
        F: Fn(Stream) -> Served + Clone + Send + Sync + 'static,
        Served: Future<Output = io::Result<()>> + Send + 'static,
    {
        loop {
            let handle = handle.clone();
            match self {
                Self::Tcp(listener) => {
                    let (stream, _) = listener.accept().await.map_err(failed)?;
                    tokio::spawn(handle(Stream::from_tcp(stream).map_err(failed)?));
                }
                Self::Unix(listener) => {
                    let (stream, _) = listener.accept().await.map_err(failed)?;
                    tokio::spawn(handle(Stream::Unix(stream)));
                }
                Self::Tls(listener, tls) => {
                    let (stream, _) = listener.accept().await.map_err(failed)?;
                    let tls = tls.clone();
                    tokio::spawn(async move {
                        stream.set_nodelay(true)?;
                        handle(Stream::Tls(tls.secure(stream).await?)).await
                    });
                }
                Self::Quic(endpoint) => {
                    let Some(incoming) = endpoint.accept().await else { return Ok(()) };
                    tokio::spawn(async move {
                        let connection = incoming.await?;
                        loop {
                            tokio::spawn(handle(Stream::Quic(QuicStream::accept(&connection).await?)));
                        }
                        #[allow(unreachable_code, reason = "it gives the type that the block returns")]
                        io::Result::Ok(())
                    });
                }
            }
        }
    }
}

fn unix_address(path: Option<&Path>) -> Result<String, Failure> {
    let address = Address::unix(path.unwrap_or(Path::new("")));
    address.map(|address| address.to_string()).map_err(|error| Failure::Usage(error.to_string()))
}

/// Serves clients on the thread of the runtime.
pub(super) async fn serve(listener: &Listener) -> Result<(), Failure> {
    listener.for_each(serve_stream).await
}

async fn serve_stream(mut stream: Stream) -> io::Result<()> {
    let mut request = [0; REQUEST_LEN];
    stream.read_exact(&mut request).await?;
    match Task::decode(request)? {
        Task::Echo => {
            let mut buffer = vec![0; BUFFER_LEN];
            loop {
                let count = stream.read(&mut buffer).await?;
                if count == 0 {
                    return Ok(());
                }
                stream.send(&buffer[..count]).await?;
            }
        }
        Task::Write(len) => {
            let mut buffer = vec![1; len];
            loop {
                stream.read_exact(&mut buffer).await?;
                stream.send(&[1]).await?;
            }
        }
        Task::Read(len) => {
            let buffer = vec![1; len];
            loop {
                stream.read_exact(&mut [0]).await?;
                stream.send(&buffer).await?;
            }
        }
    }
}

/// Forwards the bytes of each client to `target`, and back.
pub(super) async fn relay(listener: &Listener, target: &str, connector: Connector) -> Result<(), Failure> {
    let target: Address = target.parse().map_err(|error| Failure::Usage(format!("{error}")))?;
    let forward = move |mut near: Stream| {
        let (target, connector) = (target.clone(), connector.clone());
        async move {
            let mut far = connector.connect(&target).await.map_err(|error| io::Error::other(error.to_string()))?;
            let (size, near, far) = (RELAY_BUFFER_LEN, &mut near, &mut far);
            tokio::io::copy_bidirectional_with_sizes(near, far, size, size).await.map(drop)
        }
    };
    listener.for_each(forward).await
}

/// Client of [`serve`].
pub(super) struct Client {
    stream: Stream,
    buffer: Vec<u8>,
}

impl Client {
    pub(super) async fn connect(connector: &Connector, address: &Address, task: Task) -> Result<Self, Failure> {
        Self::on(connector.connect(address).await?, task).await
    }

    /// Opens another client: a stream of the same connection over QUIC, else a connection.
    pub(super) async fn another(&self, connector: &Connector, address: &Address) -> Result<Self, Failure> {
        match &self.stream {
            Stream::Quic(stream) => {
                let stream = QuicStream::open(stream.connection()).await.map_err(failed)?;
                Self::on(Stream::Quic(stream), Task::Echo).await
            }
            _ => Self::connect(connector, address, Task::Echo).await,
        }
    }

    async fn on(mut stream: Stream, task: Task) -> Result<Self, Failure> {
        stream.send(&task.encode()).await.map_err(failed)?;
        let len = match task {
            Task::Echo => BUFFER_LEN,
            Task::Write(_) => 0,
            Task::Read(len) => len,
        };
        // Written once, so that its pages exist.
        Ok(Self { stream, buffer: vec![1; len] })
    }

    /// Sends one message and receives its echo.
    pub(super) async fn call(&mut self) -> Result<(), Failure> {
        let message = &mut self.buffer[..MESSAGE_LEN];
        self.stream.send(message).await.map_err(failed)?;
        self.stream.read_exact(message).await.map_err(failed)?;
        Ok(())
    }

    /// Sends `count` messages and receives their echoes, with up to `window` of them in flight.
    pub(super) async fn pipeline(&mut self, count: usize, window: usize) -> Result<(), Failure> {
        let messages = vec![1; window * MESSAGE_LEN];
        let (mut sent, mut received) = (0, 0);
        while received < count * MESSAGE_LEN {
            let done = received / MESSAGE_LEN;
            let more = (count - sent).min(window - (sent - done));
            self.stream.send(&messages[..more * MESSAGE_LEN]).await.map_err(failed)?;
            sent += more;
            let bytes = self.stream.read(&mut self.buffer).await.map_err(failed)?;
            if bytes == 0 {
                return Err(failed(io::ErrorKind::UnexpectedEof.into()));
            }
            received += bytes;
        }
        Ok(())
    }

    pub(super) async fn write(&mut self, data: &[u8]) -> Result<(), Failure> {
        self.stream.send(data).await.map_err(failed)?;
        self.stream.read_exact(&mut [0]).await.map(drop).map_err(failed)
    }

    pub(super) async fn read(&mut self) -> Result<(), Failure> {
        self.stream.send(&[1]).await.map_err(failed)?;
        self.stream.read_exact(&mut self.buffer).await.map(drop).map_err(failed)
    }
}

/// Blocking listener.
pub(super) enum StdListener {
    Tcp(StdTcpListener),
    Unix(StdUnixListener),
}

pub(super) fn std_listener(address: &Address) -> Result<StdListener, Failure> {
    match socket(address)? {
        Socket::Tcp(target) => StdTcpListener::bind(target).map(StdListener::Tcp).map_err(failed),
        Socket::Unix(path) => StdUnixListener::bind(path).map(StdListener::Unix).map_err(failed),
        Socket::Quic(_) => Err(failed(io::ErrorKind::Unsupported.into())),
    }
}

impl StdListener {
    pub(super) fn address(&self) -> Result<String, Failure> {
        match self {
            Self::Tcp(listener) => {
                listener.local_addr().map(|address| Address::from(address).to_string()).map_err(failed)
            }
            Self::Unix(listener) => {
                let address = listener.local_addr().map_err(failed)?;
                unix_address(address.as_pathname())
            }
        }
    }

    fn accept(&self) -> io::Result<BlockingIo> {
        match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nodelay(true)?;
                Ok(stream.into())
            }
            Self::Unix(listener) => listener.accept().map(|(stream, _)| stream.into()),
        }
    }
}

/// Echoes the bytes of each client, on one thread per client.
pub(super) fn serve_std(listener: &StdListener) -> Result<(), Failure> {
    loop {
        let stream = listener.accept().map_err(failed)?;
        let serve = move || -> io::Result<()> {
            let mut stream = &stream;
            stream.read_exact(&mut [0; REQUEST_LEN])?;
            let mut buffer = vec![0; BUFFER_LEN];
            loop {
                let count = stream.read(&mut buffer)?;
                if count == 0 {
                    return Ok(());
                }
                stream.write_all(&buffer[..count])?;
            }
        };
        std::thread::Builder::new().name("bare".to_owned()).spawn(serve).map_err(failed)?;
    }
}

/// Client of [`serve_std`].
pub(super) struct StdClient(BlockingIo);

impl StdClient {
    pub(super) fn connect(address: &Address) -> Result<Self, Failure> {
        let connect = || -> io::Result<BlockingIo> {
            match socket(address) {
                Ok(Socket::Tcp(target)) => {
                    let stream = StdTcpStream::connect(target)?;
                    stream.set_nodelay(true)?;
                    Ok(stream.into())
                }
                Ok(Socket::Unix(path)) => StdUnixStream::connect(path).map(Into::into),
                _ => Err(io::ErrorKind::Unsupported.into()),
            }
        };
        let stream = connect().map_err(failed)?;
        (&stream).write_all(&Task::Echo.encode()).map_err(failed)?;
        Ok(Self(stream))
    }

    /// Sends one message and receives its echo.
    pub(super) fn call(&mut self) -> Result<(), Failure> {
        let mut message = [1; MESSAGE_LEN];
        let mut stream = &self.0;
        stream.write_all(&message).and_then(|()| stream.read_exact(&mut message)).map_err(failed)
    }
}
