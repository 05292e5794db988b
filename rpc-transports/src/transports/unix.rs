//! `unix:` addresses: socket files, their owners, and the replacement of one that was left behind.

use std::any::Any;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream as StdStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::thread;
use std::time::{Duration, Instant};

use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::{UnixListener, UnixStream};

use crate::address::{Address, AddressError, unescaped};
use crate::channel::{BlockingChannel, Channel, Machine, Peer};
use crate::error::TransportError;
use crate::listener::{Accept, Listener};
use crate::transport::{Bind, BoxFuture, Dial, Properties, Reach, Transport};
use crate::transports::unix_buffer::widen_unix_socket;

/// The transport of `unix:` addresses.
#[derive(Clone, Copy, Debug)]
pub struct Unix {
    mode: u32,
}

impl Unix {
    /// Creates the transport. Only this user may connect to its listeners.
    #[must_use]
    pub fn new() -> Self {
        Self { mode: 0o600 }
    }

    /// Sets the file mode of the listeners' socket files. With `0o660` the group may connect, too.
    /// Default: `0o600`, this user alone.
    #[must_use]
    pub fn mode(self, mode: u32) -> Self {
        Self { mode }
    }
}

impl Default for Unix {
    fn default() -> Self {
        Self::new()
    }
}

impl Transport for Unix {
    fn schemes(&self) -> &[&str] {
        &["unix"]
    }

    fn check(&self, at: &Address) -> Result<Properties, AddressError> {
        path_of(at).map(|_| Properties::plain(Reach::Machine))
    }

    fn canonical(&self, at: &Address) -> Result<Address, AddressError> {
        let address = Address::unix(path_of(at)?)?;
        match at.key() {
            Some(key) => address.with_key(key),
            None => Ok(address),
        }
    }

    fn dial<'a>(&'a self, to: &'a Address, with: &'a Dial) -> BoxFuture<'a, Result<Channel, TransportError>> {
        Box::pin(dial(to, with))
    }

    fn dial_blocking(&self, to: &Address, with: &Dial) -> Option<Result<BlockingChannel, TransportError>> {
        Some(dial_blocking(to, with))
    }

    fn tunnel_target(&self, to: &Address) -> Option<Address> {
        Some(to.clone())
    }

    fn bind<'a>(&'a self, at: &'a Address, with: &'a Bind) -> BoxFuture<'a, Result<Listener, TransportError>> {
        Box::pin(bind(at, with, self.mode))
    }
}

impl Address {
    /// Returns the address of a Unix domain socket file.
    ///
    /// # Errors
    ///
    /// [`AddressError::Invalid`] if the path is empty or contains a zero byte.
    pub fn unix(path: impl Into<PathBuf>) -> Result<Self, AddressError> {
        let address = Self::opaque("unix", &escaped(&path.into()))?;
        path_of(&address)?;
        Ok(address)
    }
}

/// Protection of the socket files of listeners against the kill of their process, which cannot
/// remove them then.
pub trait FileGuard: Send + Sync {
    /// Called before a file is made. May block shortly.
    fn prepare(&self);

    /// Protects the file at an absolute path, which has just been made, until the returned value is
    /// dropped: after the listener has removed the file. May block shortly.
    fn protect(&self, file: &Path) -> Box<dyn Any + Send + Sync>;
}

/// Guard of the files of this process.
static FILE_GUARD: OnceLock<Box<dyn FileGuard>> = OnceLock::new();

/// Sets the guard for files that are made from now on. A process has one: later calls do nothing.
pub fn set_file_guard(guard: impl FileGuard + 'static) {
    let _ = FILE_GUARD.set(Box::new(guard));
}

/// Returns the path of a `unix:` address, with `%XX` decoded.
///
/// # Errors
///
/// [`AddressError::Invalid`], which names the problem.
pub fn path_of(address: &Address) -> Result<PathBuf, AddressError> {
    let invalid = |problem| AddressError::invalid(address, format!("{problem}; write for example unix:/run/rpc.sock"));
    let rest = address.rest().ok_or_else(|| invalid("two slashes would start a host name"))?;
    if address.parameters().next().is_some() {
        return Err(invalid("only key= may follow the ? (%3F is a literal ?)"));
    }
    // Written as a URL with an empty host, the same path has three slashes.
    let path = if rest.starts_with("///") { &rest[2..] } else { rest };
    let path = unescaped(path).ok_or_else(|| invalid("% must be followed by two hexadecimal digits"))?;
    match () {
        () if path.is_empty() => Err(invalid("its path is empty")),
        () if path.contains(&0) => Err(invalid("its path contains a zero byte")),
        () => Ok(PathBuf::from(OsString::from_vec(path))),
    }
}

async fn dial(address: &Address, options: &Dial) -> Result<Channel, TransportError> {
    let mut attempts = Attempts::new(address, options)?;
    let socket = loop {
        match attempts.connect()? {
            Some(socket) => break socket,
            None => tokio::time::sleep(RETRY).await,
        }
    };
    let stream = UnixStream::from_std(socket.into());
    let stream = stream.map_err(|error| TransportError::from_io(address.to_string(), error))?;
    let peer = Peer::new(address.to_string()).on(Machine::This).with_process_of(&stream);
    Ok(Channel::new(stream, peer))
}

fn dial_blocking(address: &Address, options: &Dial) -> Result<BlockingChannel, TransportError> {
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
    Ok(BlockingChannel::new(stream, address.to_string()).sharing_memory())
}

async fn bind(address: &Address, options: &Bind, mode: u32) -> Result<Listener, TransportError> {
    let path = path_of(address)?;
    match UnixSource::bind(&path, options, mode) {
        Ok(source) => Ok(Listener::new(address.clone(), source)),
        Err(error) => Err(failure(address, &path, error)),
    }
}

/// Sorts an error of the system. A folder that is missing is another mistake than a server that is
/// not running.
fn failure(address: &Address, path: &Path, error: io::Error) -> TransportError {
    let address = address.to_string();
    match path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        Some(folder) if error.kind() == io::ErrorKind::NotFound && !folder.exists() => {
            TransportError::NoFolder { address, folder: folder.display().to_string(), source: Arc::new(error) }
        }
        _ => TransportError::from_io(address, error),
    }
}

/// Attempts to connect to a socket file. Connecting takes no time, except while the listener's
/// backlog is full. The kernel offers no way to wait for room with a limit, so the attempt is
/// repeated.
struct Attempts<'a> {
    address: &'a Address,
    path: PathBuf,
    limit: Duration,
    deadline: Instant,
}

/// Pause between attempts, short against the time that a server needs to accept a full backlog.
const RETRY: Duration = Duration::from_millis(5);

const BEHIND_A_FILE: &str =
    "lead on behind a file, such as a socket; if a key is meant, write it as in unix:/run/rpc.sock?key=KEY";

impl<'a> Attempts<'a> {
    fn new(address: &'a Address, options: &Dial) -> Result<Self, TransportError> {
        let limit = options.limit();
        Ok(Self { address, path: path_of(address)?, limit, deadline: Instant::now() + limit })
    }

    /// Returns a connected, non-blocking socket, or `None` if another attempt is worthwhile.
    fn connect(&mut self) -> Result<Option<Socket>, TransportError> {
        match connect(&self.path) {
            Ok(socket) => Ok(Some(socket)),
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                Err(TransportError::unsupported(self.address, BEHIND_A_FILE))
            }
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(failure(self.address, &self.path, error)),
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

/// Listening socket and the file that stands for it.
struct UnixSource {
    listener: UnixListener,
    /// Text by which errors name the connecting peers.
    peer: String,
    /// Absolute path, so that a change of the working folder does not lead to another file.
    path: PathBuf,
    /// Device and inode of the file. While the socket is open the number is not given out again, so
    /// a file that has it is this listener's.
    identity: (u64, u64),
    /// Protection of the file, which outlasts it.
    _protected: Option<Box<dyn Any + Send + Sync>>,
}

impl UnixSource {
    fn bind(path: &Path, options: &Bind, mode: u32) -> io::Result<Self> {
        let path = std::path::absolute(path)?;
        if let Some(guard) = FILE_GUARD.get() {
            guard.prepare();
        }
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        let name = SockAddr::unix(&path)?;
        if let Err(error) = socket.bind(&name) {
            if error.kind() != io::ErrorKind::AddrInUse || !remove_stale(&path)? {
                return Err(error);
            }
            socket.bind(&name)?;
        }
        // Between `bind` and `listen` every connection is refused, so none is accepted before the
        // mode is set.
        fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
        let identity = identity(&path)?;
        let protected = FILE_GUARD.get().map(|guard| guard.protect(&path));
        socket.listen(i32::try_from(options.backlog).unwrap_or(i32::MAX))?;
        let source = Self {
            listener: UnixListener::from_std(socket.into())?,
            peer: format!("unix:{}", path.display()),
            path,
            identity,
            _protected: protected,
        };
        // Another server that started at the same moment may have found this socket not yet
        // listening, taken it for stale and replaced it. The path then belongs to that server.
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
        let credentials = stream.peer_cred().ok();
        let peer = match credentials.as_ref().and_then(tokio::net::unix::UCred::pid) {
            Some(pid) => Peer::new(format!("{} (process {pid})", self.peer)),
            None => Peer::new(&self.peer),
        };
        let peer = peer.on(Machine::This).with_process_of(&stream);
        let peer = match &credentials {
            Some(credentials) => peer.with_user(credentials.uid()),
            None => peer,
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

/// Removes a socket file that has no listener. Returns true if the path is free now. A socket that
/// has a listener, and a file of another kind, are left alone.
fn remove_stale(path: &Path) -> io::Result<bool> {
    let metadata = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        metadata => metadata?,
    };
    if !metadata.file_type().is_socket() {
        return Ok(false);
    }
    let found = (metadata.dev(), metadata.ino());
    // A full backlog also means that there is a listener. Only a refusal means that there is none.
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

/// Returns the path, with `%XX` for each byte that would not survive parsing.
fn escaped(path: &Path) -> String {
    let mut text = String::new();
    let mut bytes = path.as_os_str().as_bytes();
    // A path may start with two slashes. In an address, two slashes start a host name and three
    // stand for one slash, so the second slash is escaped.
    if bytes.starts_with(b"//") {
        text.push_str("/%2F");
        bytes = &bytes[2..];
    }
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            if character == '%' || character == '?' || character.is_whitespace() || character.is_control() {
                let mut buffer = [0; 4];
                escape(character.encode_utf8(&mut buffer).as_bytes(), &mut text);
            } else {
                text.push(character);
            }
        }
        escape(chunk.invalid(), &mut text);
    }
    text
}

fn escape(bytes: &[u8], text: &mut String) {
    for byte in bytes {
        let _ = write!(text, "%{byte:02X}");
    }
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

    /// Leaves the file of a socket that is closed. It never listens: a socket that does would go on
    /// for as long as a child has a copy of it, which another test starts at this moment.
    fn leave_behind(path: &Path) {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        socket.bind(&SockAddr::unix(path).unwrap()).unwrap();
    }

    async fn listen(address: &Address) -> Result<Listener, TransportError> {
        bind(address, &Bind::default(), 0o600).await
    }

    #[test]
    fn every_path_round_trips() {
        for path in [&b"/a b?c%d"[..], b"/\xff\xfe\n", b"//x", b"///x", b"a//b", "/\u{a0}ü".as_bytes()] {
            let path = PathBuf::from(OsString::from_vec(path.to_vec()));
            let address = Address::unix(&path).unwrap().with_key("k").unwrap();
            let parsed: Address = address.to_string().parse().unwrap();
            assert_eq!((&parsed, path_of(&parsed).unwrap()), (&address, path), "{address}");
        }
        let same: Address = "unix:///run/%61.sock?key=k".parse().unwrap();
        assert_eq!(Unix::new().canonical(&same).unwrap().to_string(), "unix:/run/a.sock?key=k");
    }

    #[test]
    fn an_address_that_names_no_path_is_invalid() {
        for text in ["unix:", "unix:?key=a", "unix://host/a", "unix:/a%", "unix:/a%0", "unix:/a%00", "unix:/a?b=c"] {
            assert!(Unix::new().check(&text.parse().unwrap()).is_err(), "{text}");
        }
    }

    #[tokio::test]
    async fn bytes_cross_async_and_blocking() {
        let (_folder, _, address) = place();
        let mut listener = listen(&address).await.unwrap();
        let mut near = dial(&address, &Dial::default()).await.unwrap();
        let mut blocking = dial_blocking(&address, &Dial::default()).unwrap();
        let process = Some(std::process::id());
        assert!(near.process() == process || !cfg!(target_os = "linux"));
        assert!(blocking.shares_memory());
        let mut buffer = [0; 4];
        for _ in 0..2 {
            let mut far = listener.accept().await.unwrap();
            let own = format!("(process {})", std::process::id());
            assert!(far.peer().contains(&own), "{}", far.peer());
            assert!(far.process() == process || !cfg!(target_os = "linux"));
            far.io_mut().write_all(b"ping").await.unwrap();
        }
        near.io_mut().read_exact(&mut buffer).await.unwrap();
        assert_eq!(&buffer, b"ping");
        blocking.read_exact(&mut buffer).unwrap();
        assert_eq!(&buffer, b"ping");
        // The far side is gone, once no child has a copy of it, which another test starts at this
        // moment.
        let begun = Instant::now();
        while blocking.write(b"x").is_ok() {
            assert!(begun.elapsed() < Duration::from_secs(60), "the far side is still there");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[tokio::test]
    async fn only_the_own_user_may_connect_unless_told_otherwise() {
        let (_folder, path, address) = place();
        let mode = |path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        drop(listen(&address).await.unwrap());
        let _listener = listen(&address).await.unwrap();
        assert_eq!(mode(&path), 0o600);

        let (_folder, path, address) = place();
        let transport = Unix::new().mode(0o660);
        let _listener = transport.bind(&address, &Bind::default()).await.unwrap();
        assert_eq!(mode(&path), 0o660);
    }

    #[tokio::test]
    async fn no_file_is_not_found_and_a_file_left_behind_refuses() {
        let (_folder, path, address) = place();
        let error = dial(&address, &Dial::default()).await.unwrap_err();
        assert!(matches!(error, TransportError::NotFound { .. }), "{error:?}");
        let elsewhere: Address = "unix:/no/such/folder/socket".parse().unwrap();
        for error in [
            dial(&elsewhere, &Dial::default()).await.unwrap_err(),
            bind(&elsewhere, &Bind::default(), 0o600).await.unwrap_err(),
        ] {
            assert!(error.to_string().contains("/no/such/folder of unix:") && !error.to_string().contains("started"));
        }
        leave_behind(&path);
        let error = dial_blocking(&address, &Dial::default()).unwrap_err();
        assert!(matches!(error, TransportError::Refused { .. }), "{error:?}");
    }

    #[tokio::test]
    async fn a_file_left_behind_is_replaced() {
        let (_folder, path, address) = place();
        leave_behind(&path);
        let mut listener = listen(&address).await.unwrap();
        let _near = dial(&address, &Dial::default()).await.unwrap();
        listener.accept().await.unwrap();
    }

    #[tokio::test]
    async fn a_socket_in_use_and_a_file_of_another_kind_are_left_alone() {
        let (_folder, path, address) = place();
        let listener = listen(&address).await.unwrap();
        let error = listen(&address).await.unwrap_err();
        assert!(matches!(error, TransportError::AddressInUse { .. }), "{error:?}");
        let _near = dial(&address, &Dial::default()).await.unwrap();
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

    /// Runs on Linux only, because on other systems a full backlog refuses.
    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn a_full_backlog_times_the_dialler_out_and_counts_as_in_use() {
        let (_folder, _, address) = place();
        let options = Bind { backlog: 1, ..Default::default() };
        let mut listener = bind(&address, &options, 0o600).await.unwrap();
        let hasty = Dial { connect_timeout: Duration::from_millis(20), ..Dial::default() };
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

        // A waiting dialler gets in as soon as the listener accepts a channel.
        let options = Dial::default();
        let (near, far) = tokio::join!(dial(&address, &options), listener.accept());
        near.unwrap();
        far.unwrap();
    }
}
