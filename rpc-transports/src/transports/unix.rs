//! `unix:` addresses: socket files, who owns them, and what to do with one that was left behind.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream as StdStream;
use std::path::{Path, PathBuf};
use std::task::{Context, Poll, ready};
use std::thread;
use std::time::{Duration, Instant};

use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::{UnixListener, UnixStream};

use crate::address::{Address, AddressKind};
use crate::channel::{BlockingChannel, Channel};
use crate::error::TransportError;
use crate::listener::{Accept, Listener};
use crate::transport::{DialOptions, ListenOptions};
use crate::transports::unix_buffer::widen_unix_socket;

pub(crate) async fn dial(address: &Address, options: &DialOptions) -> Result<Channel, TransportError> {
    let mut attempts = Attempts::new(address, options)?;
    let socket = loop {
        match attempts.connect()? {
            Some(socket) => break socket,
            None => tokio::time::sleep(RETRY).await,
        }
    };
    let stream = UnixStream::from_std(socket.into());
    let stream = stream.map_err(|error| TransportError::from_io(address.to_string(), error))?;
    Ok(Channel::new(stream, address.to_string()))
}

pub(crate) fn dial_blocking(address: &Address, options: &DialOptions) -> Result<BlockingChannel, TransportError> {
    let mut attempts = Attempts::new(address, options)?;
    let socket = loop {
        match attempts.connect()? {
            Some(socket) => break socket,
            None => thread::sleep(RETRY),
        }
    };
    let blocking = socket.set_nonblocking(false);
    blocking.map_err(|error| TransportError::from_io(address.to_string(), error))?;
    let stream: StdStream = socket.into();
    Ok(BlockingChannel::new(stream, address.to_string()))
}

pub(crate) async fn bind(address: &Address, options: &ListenOptions) -> Result<Listener, TransportError> {
    let path = path_of(address)?;
    match UnixSource::bind(path, options) {
        Ok(source) => Ok(Listener::new(address.clone(), source)),
        Err(error) => Err(TransportError::from_io(address.to_string(), error)),
    }
}

fn path_of(address: &Address) -> Result<&Path, TransportError> {
    match address.kind() {
        AddressKind::Unix { path } => Ok(path),
        _ => Err(TransportError::unsupported(address, "are not unix:")),
    }
}

/// Connecting takes no time, except while the listener's backlog is full; the kernel offers no way to
/// wait for that with a limit, so we ask again.
struct Attempts<'a> {
    address: &'a Address,
    path: &'a Path,
    limit: Duration,
    deadline: Instant,
}

/// Short against the time a server needs to accept a full backlog.
const RETRY: Duration = Duration::from_millis(5);

const BEHIND_A_FILE: &str =
    "lead on behind a file, such as a socket; if a key is meant, write it as in unix:/run/rpc.sock?key=KEY";

impl<'a> Attempts<'a> {
    fn new(address: &'a Address, options: &DialOptions) -> Result<Self, TransportError> {
        let limit = options.limit();
        Ok(Self { address, path: path_of(address)?, limit, deadline: Instant::now() + limit })
    }

    /// A connected, non-blocking socket, or `None` if it is worth asking again.
    fn connect(&mut self) -> Result<Option<Socket>, TransportError> {
        match connect(self.path) {
            Ok(socket) => Ok(Some(socket)),
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                Err(TransportError::unsupported(self.address, BEHIND_A_FILE))
            }
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
                Err(TransportError::from_io(self.address.to_string(), error))
            }
            Err(_) if Instant::now() < self.deadline => Ok(None),
            Err(_) => Err(TransportError::TimedOut { address: self.address.to_string(), limit: self.limit }),
        }
    }
}

fn connect(path: &Path) -> io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    widen_unix_socket(&socket);
    socket.connect(&SockAddr::unix(path)?)?;
    Ok(socket)
}

/// A listening socket and the file that stands for it.
struct UnixSource {
    listener: UnixListener,
    /// Text by which errors name those who connect.
    peer: String,
    /// Absolute, so that a change of the working folder does not lead us to another file.
    path: PathBuf,
    /// Device and inode of the file. While the socket is open the number is not given out again, so
    /// a file that has it is the one that we made.
    identity: (u64, u64),
}

impl UnixSource {
    fn bind(path: &Path, options: &ListenOptions) -> io::Result<Self> {
        let path = std::path::absolute(path)?;
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        let name = SockAddr::unix(&path)?;
        if let Err(error) = socket.bind(&name) {
            if error.kind() != io::ErrorKind::AddrInUse || !remove_stale(&path)? {
                return Err(error);
            }
            socket.bind(&name)?;
        }
        // Between `bind` and `listen` everybody is refused, so nobody slips in before the mode is set.
        fs::set_permissions(&path, fs::Permissions::from_mode(options.unix_mode))?;
        let identity = identity(&path)?;
        socket.listen(i32::try_from(options.backlog).unwrap_or(i32::MAX))?;
        let source = Self {
            listener: UnixListener::from_std(socket.into())?,
            peer: format!("unix:{}", path.display()),
            path,
            identity,
        };
        // Another server that started at this very moment may have found our socket not yet listening,
        // taken it for stale and put its own in its place. Then the place is the other's.
        if source.is_ours() { Ok(source) } else { Err(io::ErrorKind::AddrInUse.into()) }
    }

    fn is_ours(&self) -> bool {
        identity(&self.path).is_ok_and(|found| found == self.identity)
    }
}

impl Accept for UnixSource {
    fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Channel>> {
        let (stream, _) = ready!(self.listener.poll_accept(cx))?;
        widen_unix_socket(&stream);
        let pid = stream.peer_cred().ok().and_then(|peer| peer.pid());
        let peer = match pid {
            Some(pid) => format!("{} (process {pid})", self.peer),
            None => self.peer.clone(),
        };
        Poll::Ready(Ok(Channel::new(stream, peer)))
    }
}

impl Drop for UnixSource {
    fn drop(&mut self) {
        // Runs before the listener is closed, as `identity` requires.
        if self.is_ours() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes a socket file that nobody listens on. Says whether the path is free now; anything else that
/// stands there, and a socket somebody listens on, is left alone.
fn remove_stale(path: &Path) -> io::Result<bool> {
    let metadata = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        metadata => metadata?,
    };
    if !metadata.file_type().is_socket() {
        return Ok(false);
    }
    let found = (metadata.dev(), metadata.ino());
    // A full backlog also means that somebody listens; only a refusal means that nobody does.
    let refused = connect(path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
    if !refused || identity(path).is_ok_and(|now| now != found) {
        return Ok(false);
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(true),
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use tempfile::TempDir;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    fn place() -> (TempDir, PathBuf, Address) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rpc.sock");
        let address = Address::unix(&path).unwrap();
        (folder, path, address)
    }

    async fn listen(address: &Address) -> Result<Listener, TransportError> {
        bind(address, &ListenOptions::default()).await
    }

    #[tokio::test]
    async fn bytes_cross_async_and_blocking() {
        let (_folder, _, address) = place();
        let mut listener = listen(&address).await.unwrap();
        let mut near = dial(&address, &DialOptions::default()).await.unwrap();
        let mut blocking = dial_blocking(&address, &DialOptions::default()).unwrap();
        let mut buffer = [0; 4];
        for _ in 0..2 {
            let mut far = listener.accept().await.unwrap();
            let own = format!("(process {})", std::process::id());
            assert!(far.peer().contains(&own), "{}", far.peer());
            far.io_mut().write_all(b"ping").await.unwrap();
        }
        near.io_mut().read_exact(&mut buffer).await.unwrap();
        assert_eq!(&buffer, b"ping");
        blocking.read_exact(&mut buffer).unwrap();
        assert_eq!(&buffer, b"ping");
        assert!(blocking.write(b"x").is_err(), "the far side is gone");
    }

    #[tokio::test]
    async fn only_the_own_user_may_connect_unless_told_otherwise() {
        let (_folder, path, address) = place();
        let mode = |path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        drop(listen(&address).await.unwrap());
        let _listener = listen(&address).await.unwrap();
        assert_eq!(mode(&path), 0o600);

        let (_folder, path, address) = place();
        let options = ListenOptions { unix_mode: 0o660, ..Default::default() };
        let _listener = bind(&address, &options).await.unwrap();
        assert_eq!(mode(&path), 0o660);
    }

    #[tokio::test]
    async fn no_file_is_not_found_and_a_file_left_behind_refuses() {
        let (_folder, path, address) = place();
        let error = dial(&address, &DialOptions::default()).await.unwrap_err();
        assert!(matches!(error, TransportError::NotFound { .. }), "{error:?}");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let error = dial_blocking(&address, &DialOptions::default()).unwrap_err();
        assert!(matches!(error, TransportError::Refused { .. }), "{error:?}");
    }

    #[tokio::test]
    async fn a_file_left_behind_is_replaced() {
        let (_folder, path, address) = place();
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let mut listener = listen(&address).await.unwrap();
        let _near = dial(&address, &DialOptions::default()).await.unwrap();
        listener.accept().await.unwrap();
    }

    #[tokio::test]
    async fn a_socket_in_use_and_a_file_of_another_kind_are_left_alone() {
        let (_folder, path, address) = place();
        let listener = listen(&address).await.unwrap();
        let error = listen(&address).await.unwrap_err();
        assert!(matches!(error, TransportError::AddressInUse { .. }), "{error:?}");
        let _near = dial(&address, &DialOptions::default()).await.unwrap();
        drop(listener);

        fs::write(&path, "precious").unwrap();
        let error = listen(&address).await.unwrap_err();
        assert!(matches!(error, TransportError::AddressInUse { .. }), "{error:?}");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[tokio::test]
    async fn dropping_removes_the_own_file_and_no_other() {
        let (_folder, path, address) = place();
        let first = listen(&address).await.unwrap();
        fs::remove_file(&path).unwrap();
        let second = listen(&address).await.unwrap();
        drop(first);
        assert!(path.exists(), "the second listener's file");
        drop(second);
        assert!(!path.exists());
    }

    /// Elsewhere than on Linux a full backlog refuses.
    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn a_full_backlog_times_the_dialler_out_and_counts_as_in_use() {
        let (_folder, _, address) = place();
        let options = ListenOptions { backlog: 1, ..Default::default() };
        let mut listener = bind(&address, &options).await.unwrap();
        let hasty = DialOptions { connect_timeout: Duration::from_millis(20), ..DialOptions::default() };
        let mut queued = Vec::new();
        let error = loop {
            match dial(&address, &hasty).await {
                Ok(channel) => queued.push(channel),
                Err(error) => break error,
            }
            assert!(queued.len() < 16, "the queue never fills");
        };
        for error in [error, dial_blocking(&address, &hasty).unwrap_err()] {
            assert!(matches!(error, TransportError::TimedOut { .. }), "{error:?}");
        }
        let error = listen(&address).await.unwrap_err();
        assert!(matches!(error, TransportError::AddressInUse { .. }), "{error:?}");

        // A dialler that waits gets in as soon as one is accepted.
        let options = DialOptions::default();
        let (near, far) = tokio::join!(dial(&address, &options), listener.accept());
        near.unwrap();
        far.unwrap();
    }
}
