//! Where a peer is: the text form of an address, parsed once into a value that is valid.
//!
//! | Text | Meaning |
//! | --- | --- |
//! | `tcp://host:port[/KEY]` | a TCP port; IPv6 in brackets; port 0 asks for any free port when listening |
//! | `tls://host:port[/KEY]` | the same, encrypted by TLS 1.3 |
//! | `quic://host:port[/KEY]` | a UDP port, spoken to in QUIC |
//! | `unix:/path[?key=KEY]` | a Unix domain socket; in the path `%XX` stands for one byte |
//! | `exec:command line` | a child process, spoken to over its standard input and output |
//! | `memory:NAME` | a listener inside this process |
//! | `local:` | this process itself, without any channel |
//! | `tracker://host:port/KEY` | whichever server the tracker at that TCP port gives out under that key |
//! | `tracker+tls://…/KEY`, `tracker+quic://…/KEY`, `tracker+unix:/path?key=KEY` | the same, where the tracker is reached otherwise |
//!
//! A *key* names one of several servers that are reached through the same address. A command line is
//! split into words as a shell would, but no shell runs: quotes and backslashes work, while `$`, `*`,
//! `|`, `>`, `;` and `#` are ordinary characters.

mod pattern;

use std::ffi::OsString;
use std::fmt::{self, Write as _};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

pub(crate) use self::pattern::glob;
pub use self::pattern::matches_pattern;

/// The address of a peer, to dial or to listen on.
///
/// Parsing and displaying round-trip: `address.to_string().parse()` gives an equal address.
///
/// ```
/// use rpc_transports::Address;
///
/// let address: Address = "tcp://[::1]:9090/board-7".parse()?;
/// assert_eq!(address.key(), Some("board-7"));
/// assert!(address.is_loopback());
/// assert_eq!(address.without_key().to_string(), "tcp://[::1]:9090");
/// # Ok::<(), rpc_transports::AddressError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// Only ever built by the constructors below, which check every part.
    kind: AddressKind,
    /// `Some` only for kinds whose text has a place for it: those with a host, Unix, and trackers.
    key: Option<String>,
}

/// What an [`Address`] points at.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AddressKind {
    /// A TCP port.
    Tcp {
        /// Lower-case host name, or an IP address; IPv6 without brackets, with its zone if it has one.
        host: String,
        /// The port; 0 means "any free one" to a listener.
        port: u16,
    },
    /// A TCP port behind which TLS is spoken.
    Tls {
        /// As for TCP; the server's certificate must be for it.
        host: String,
        /// As for TCP.
        port: u16,
    },
    /// A UDP port behind which QUIC is spoken.
    Quic {
        /// As for TCP; the server's certificate must be for it.
        host: String,
        /// As for TCP.
        port: u16,
    },
    /// A Unix domain socket.
    Unix {
        /// The socket file.
        path: PathBuf,
    },
    /// A child process.
    Exec {
        /// The program and its arguments; never empty, and the program's name is not empty.
        argv: Vec<String>,
    },
    /// A listener in this process.
    Memory {
        /// The name that it was bound to.
        name: String,
    },
    /// This process.
    Local,
    /// One of the servers that a tracker gives out. It is asked for one each time a session is opened.
    Tracker {
        /// Where the tracker is: a TCP, TLS, QUIC or Unix address without a key.
        at: Box<Address>,
    },
}

impl Address {
    /// A TCP address. An IPv6 `host` is given without brackets.
    ///
    /// # Errors
    ///
    /// [`AddressError::Host`] if `host` is neither a host name nor an IP address.
    pub fn tcp(host: &str, port: u16) -> Result<Self, AddressError> {
        let host = checked_host(host, host)?;
        Ok(Self::from_kind(AddressKind::Tcp { host, port }))
    }

    /// A TCP address behind which TLS is spoken.
    ///
    /// # Errors
    ///
    /// As [`tcp`](Self::tcp).
    pub fn tls(host: &str, port: u16) -> Result<Self, AddressError> {
        let host = checked_host(host, host)?;
        Ok(Self::from_kind(AddressKind::Tls { host, port }))
    }

    /// A QUIC address.
    ///
    /// # Errors
    ///
    /// As [`tcp`](Self::tcp).
    pub fn quic(host: &str, port: u16) -> Result<Self, AddressError> {
        let host = checked_host(host, host)?;
        Ok(Self::from_kind(AddressKind::Quic { host, port }))
    }

    /// The address of a Unix domain socket file.
    ///
    /// # Errors
    ///
    /// [`AddressError::Path`] if the path is empty or contains a zero byte.
    pub fn unix(path: impl Into<PathBuf>) -> Result<Self, AddressError> {
        let path = path.into();
        let problem = if path.as_os_str().is_empty() {
            "it is empty"
        } else if path.as_os_str().as_bytes().contains(&0) {
            "it contains a zero byte"
        } else {
            return Ok(Self::from_kind(AddressKind::Unix { path }));
        };
        let text = path.display().to_string();
        Err(AddressError::Path { text, problem })
    }

    /// The address of a child process that is started when dialled.
    ///
    /// # Errors
    ///
    /// [`AddressError::Command`] if there is no program, or a word contains a zero byte.
    pub fn exec<I>(argv: I) -> Result<Self, AddressError>
    where
        I: IntoIterator,
        I::Item: Into<String>,
    {
        let argv: Vec<String> = argv.into_iter().map(Into::into).collect();
        let problem = if argv.first().is_none_or(String::is_empty) {
            "it names no program"
        } else if argv.iter().any(|word| word.contains('\0')) {
            "it contains a zero byte"
        } else {
            return Ok(Self::from_kind(AddressKind::Exec { argv }));
        };
        let text = quoted(&argv);
        Err(AddressError::Command { text, problem })
    }

    /// The address of a listener inside this process.
    ///
    /// # Errors
    ///
    /// [`AddressError::Name`] if the name is empty or has characters other than those of a key.
    pub fn memory(name: &str) -> Result<Self, AddressError> {
        if !is_name(name) {
            return Err(AddressError::Name { text: name.into() });
        }
        Ok(Self::from_kind(AddressKind::Memory { name: name.into() }))
    }

    /// This process.
    #[must_use]
    pub fn local() -> Self {
        Self::from_kind(AddressKind::Local)
    }

    /// One of the servers that the tracker `at` gives out, under `key`; any of them without one.
    ///
    /// # Errors
    ///
    /// [`AddressError::Tracker`] if no tracker can be asked there; as [`with_key`](Self::with_key) for the key.
    pub fn tracker(at: Self, key: Option<&str>) -> Result<Self, AddressError> {
        let has_form = matches!(
            at.kind,
            AddressKind::Tcp { .. } | AddressKind::Tls { .. } | AddressKind::Quic { .. } | AddressKind::Unix { .. }
        );
        if !has_form {
            return Err(AddressError::Tracker { text: at.to_string() });
        }
        let this = Self::from_kind(AddressKind::Tracker { at: Box::new(at.without_key()) });
        match key {
            Some(key) => this.with_key(key),
            None => Ok(this),
        }
    }

    /// The same address with this key: which of the servers behind it is meant.
    ///
    /// # Errors
    ///
    /// [`AddressError::Key`] if the key is empty or has characters other than letters, digits and
    /// `-._~:@+=`, or if addresses of this kind have no place for a key.
    pub fn with_key(self, key: &str) -> Result<Self, AddressError> {
        let text = || key.to_owned();
        let has_place = matches!(self.kind, AddressKind::Unix { .. } | AddressKind::Tracker { .. });
        if self.host_and_port().is_none() && !has_place {
            let problem = "only tcp://, tls://, quic://, unix: and tracker:// addresses have one";
            return Err(AddressError::Key { text: text(), problem });
        }
        if !is_name(key) {
            let problem = "it must consist of letters, digits and -._~:@+=";
            return Err(AddressError::Key { text: text(), problem });
        }
        Ok(Self { key: Some(text()), ..self })
    }

    /// The same address without a key: what is dialled.
    #[must_use]
    pub fn without_key(self) -> Self {
        Self { key: None, ..self }
    }

    /// The same address with another port; kinds without ports are returned as they are.
    #[must_use]
    pub fn with_port(mut self, new: u16) -> Self {
        match &mut self.kind {
            AddressKind::Tcp { port, .. } | AddressKind::Tls { port, .. } | AddressKind::Quic { port, .. } => {
                *port = new
            }
            AddressKind::Tracker { at } => **at = at.clone().with_port(new),
            AddressKind::Unix { .. } | AddressKind::Exec { .. } | AddressKind::Memory { .. } | AddressKind::Local => {}
        }
        self
    }

    /// Which of the servers behind this address is meant, if the address says.
    #[must_use]
    pub fn key(&self) -> Option<&str> {
        self.key.as_deref()
    }

    /// What the address points at.
    #[must_use]
    pub fn kind(&self) -> &AddressKind {
        &self.kind
    }

    /// The word before the first colon: `tcp`, `tls`, `quic`, `unix`, `exec`, `memory`, `local` or `tracker`.
    #[must_use]
    pub fn scheme(&self) -> &'static str {
        match self.kind {
            AddressKind::Tcp { .. } => "tcp",
            AddressKind::Tls { .. } => "tls",
            AddressKind::Quic { .. } => "quic",
            AddressKind::Unix { .. } => "unix",
            AddressKind::Exec { .. } => "exec",
            AddressKind::Memory { .. } => "memory",
            AddressKind::Local => "local",
            AddressKind::Tracker { .. } => "tracker",
        }
    }

    /// The same place without encryption, for a `tls://` address.
    pub(crate) fn over_tcp(mut self) -> Self {
        if let AddressKind::Tls { host, port } = self.kind {
            self.kind = AddressKind::Tcp { host, port };
        }
        self
    }

    /// Where the tracker is, if a tracker is to be asked for the server.
    #[must_use]
    pub fn tracker_address(&self) -> Option<&Self> {
        match &self.kind {
            AddressKind::Tracker { at } => Some(at),
            _ => None,
        }
    }

    /// Host and port, of the kinds that have them. That of a tracker says nothing of the server, and is not given.
    #[must_use]
    pub fn host_and_port(&self) -> Option<(&str, u16)> {
        match &self.kind {
            AddressKind::Tcp { host, port } | AddressKind::Tls { host, port } | AddressKind::Quic { host, port } => {
                Some((host, *port))
            }
            AddressKind::Unix { .. }
            | AddressKind::Exec { .. }
            | AddressKind::Memory { .. }
            | AddressKind::Local
            | AddressKind::Tracker { .. } => None,
        }
    }

    /// The port, of the kinds that have one.
    #[must_use]
    pub fn port(&self) -> Option<u16> {
        self.host_and_port().map(|(_, port)| port)
    }

    /// Whether what is said there can be neither read nor changed on the way: TLS and QUIC.
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        matches!(self.kind, AddressKind::Tls { .. } | AddressKind::Quic { .. })
    }

    /// Whether the channel is a socket of the system's and nothing more, which any thread can block on.
    pub(crate) fn has_plain_socket(&self) -> bool {
        matches!(self.kind, AddressKind::Tcp { .. } | AddressKind::Unix { .. } | AddressKind::Exec { .. })
    }

    /// The same kind of address for `socket`, without a key. Kinds without a host become TCP.
    #[cfg(feature = "tcp")]
    pub(crate) fn at(&self, socket: SocketAddr) -> Self {
        let mut address = Self::from(socket);
        if let AddressKind::Tcp { host, port } = address.kind {
            address.kind = match self.kind {
                AddressKind::Tls { .. } => AddressKind::Tls { host, port },
                AddressKind::Quic { .. } => AddressKind::Quic { host, port },
                _ => AddressKind::Tcp { host, port },
            };
        }
        address
    }

    /// Whether only this machine can reach a listener bound here.
    ///
    /// True for all kinds without a host, for loopback IP addresses and the name `localhost`; any other
    /// host name counts as reachable, whatever it may resolve to.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        if let AddressKind::Tracker { at } = &self.kind {
            return at.is_loopback();
        }
        let Some((host, _)) = self.host_and_port() else {
            return true;
        };
        match host.parse::<IpAddr>() {
            Ok(ip) => ip.to_canonical().is_loopback(),
            Err(_) => host == "localhost",
        }
    }

    fn from_kind(kind: AddressKind) -> Self {
        Self { kind, key: None }
    }
}

/// A TCP address without a key.
impl From<SocketAddr> for Address {
    fn from(socket: SocketAddr) -> Self {
        let host = match socket {
            SocketAddr::V6(v6) if v6.scope_id() != 0 => format!("{}%{}", v6.ip(), v6.scope_id()),
            _ => socket.ip().to_string(),
        };
        let port = socket.port();
        Self::from_kind(AddressKind::Tcp { host, port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = self.scheme();
        match &self.kind {
            AddressKind::Tcp { host, port } | AddressKind::Tls { host, port } | AddressKind::Quic { host, port } => {
                if host.contains(':') {
                    write!(f, "{scheme}://[{host}]:{port}")?;
                } else {
                    write!(f, "{scheme}://{host}:{port}")?;
                }
            }
            AddressKind::Unix { path } => write!(f, "unix:{}", escaped(path))?,
            AddressKind::Exec { argv } => write!(f, "exec:{}", quoted(argv))?,
            AddressKind::Memory { name } => write!(f, "memory:{name}")?,
            AddressKind::Local => f.write_str("local:")?,
            AddressKind::Tracker { at } => {
                let text = at.to_string();
                let rest = text.strip_prefix(at.scheme()).unwrap_or(&text);
                match at.kind {
                    AddressKind::Tcp { .. } => write!(f, "tracker{rest}")?,
                    _ => write!(f, "tracker+{}{rest}", at.scheme())?,
                }
            }
        }
        let place = self.tracker_address().unwrap_or(self);
        match (&place.kind, &self.key) {
            (AddressKind::Unix { .. }, Some(key)) => write!(f, "?key={key}"),
            (_, Some(key)) => write!(f, "/{key}"),
            (_, None) => Ok(()),
        }
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let text = text.trim_start();
        let Some((scheme, rest)) = text.split_once(':') else {
            return Err(AddressError::NoScheme { text: text.trim_end().into() });
        };
        let scheme = scheme.to_ascii_lowercase();
        // The words of a command carry their own meaning of spaces; elsewhere one at the end is a slip.
        match scheme.as_str() {
            "exec" => parse_exec(rest),
            "tcp" => parse_host(rest.trim_end(), |host, port| AddressKind::Tcp { host, port }),
            "tls" => parse_host(rest.trim_end(), |host, port| AddressKind::Tls { host, port }),
            "quic" => parse_host(rest.trim_end(), |host, port| AddressKind::Quic { host, port }),
            "unix" => parse_unix(rest.trim_end()),
            "memory" => Self::memory(rest.trim_end()),
            "local" if rest.trim_end().is_empty() => Ok(Self::local()),
            "local" => Err(AddressError::NotEmpty { text: text.trim_end().into() }),
            "tracker" => parse_tracker("tcp", rest),
            _ if scheme.starts_with("tracker+") => parse_tracker(&scheme["tracker+".len()..], rest),
            // `host:9090` and `[::1]:9090` look like a scheme and are a forgotten one.
            _ if is_port(rest.trim_end()) || scheme.starts_with('[') => {
                Err(AddressError::NoScheme { text: text.trim_end().into() })
            }
            _ => Err(AddressError::UnknownScheme { scheme }),
        }
    }
}

impl TryFrom<&str> for Address {
    type Error = AddressError;

    fn try_from(text: &str) -> Result<Self, AddressError> {
        text.parse()
    }
}

/// Why a text is not an address. Each message shows an example of the right form.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AddressError {
    /// There is no word with a colon in front.
    #[error("{text:?} does not say how to connect; write for example tcp://host:9090")]
    NoScheme {
        /// What was given.
        text: String,
    },
    /// The word before the colon means nothing to us.
    #[error(
        "no addresses start with {scheme}:; write for example tcp://host:9090, quic://host:9090, unix:/run/rpc.sock, \
         exec:program --argument, memory:name, local: or tracker://host:port/KEY"
    )]
    UnknownScheme {
        /// The word before the colon.
        scheme: String,
    },
    /// No tracker can be asked there.
    #[error(
        "no tracker can be asked at {text:?}; write tracker://host:port/KEY, tracker+tls://host:port/KEY, \
         tracker+quic://host:port/KEY or tracker+unix:/path?key=KEY"
    )]
    Tracker {
        /// The address of the tracker.
        text: String,
    },
    /// The host of a TCP, TLS or QUIC address.
    #[error("host {text:?}: {problem}; write for example tcp://board.lan:9090 or tcp://[::1]:9090")]
    Host {
        /// The host, or all after the scheme if no host can be told apart.
        text: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The port of a TCP, TLS or QUIC address.
    #[error("port {text:?} is not a number from 0 to 65535; write for example tcp://board.lan:9090")]
    Port {
        /// What stands in the port's place.
        text: String,
    },
    /// The key of a server.
    #[error(
        "key {text:?}: {problem}; write for example tcp://host:9090/board-7 or \
         unix:/run/rpc.sock?key=board-7"
    )]
    Key {
        /// The key.
        text: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The path of a Unix domain socket.
    #[error("path {text:?}: {problem}; write for example unix:/run/rpc.sock")]
    Path {
        /// The path as given.
        text: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A command line.
    #[error("command {text:?}: {problem}; write for example exec:ssh board 'rpc-server serve --stdio'")]
    Command {
        /// The command line.
        text: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The name of a listener in memory.
    #[error("name {text:?} must consist of letters, digits and -._~:@+=; write for example memory:test-1")]
    Name {
        /// The name.
        text: String,
    },
    /// Something follows `local:`.
    #[error("{text:?} says more than there is to say about this process; write local:")]
    NotEmpty {
        /// What was given.
        text: String,
    },
}

fn parse_host(rest: &str, kind: impl FnOnce(String, u16) -> AddressKind) -> Result<Address, AddressError> {
    let host_error = |problem| AddressError::Host { text: rest.into(), problem };
    let Some(body) = rest.strip_prefix("//") else {
        return Err(host_error("two slashes are missing before it"));
    };
    let (authority, key) = body.split_once('/').unwrap_or((body, ""));
    let (host, port) = if let Some(bracketed) = authority.strip_prefix('[') {
        let Some((host, after)) = bracketed.split_once(']') else {
            return Err(host_error("its bracket is not closed"));
        };
        if !host.contains(':') {
            return Err(host_error("only IPv6 addresses stand in brackets"));
        }
        let port = after.strip_prefix(':');
        (host, port.ok_or_else(|| host_error("no port follows it"))?)
    } else {
        let Some((host, port)) = authority.rsplit_once(':') else {
            return Err(host_error("no port follows it"));
        };
        if host.contains(':') {
            return Err(host_error("an IPv6 address needs brackets"));
        }
        (host, port)
    };
    let host = checked_host(host, rest)?;
    // `parse` alone would also take a leading plus sign.
    let port =
        (is_port(port).then(|| port.parse().ok()).flatten()).ok_or_else(|| AddressError::Port { text: port.into() })?;
    let address = Address::from_kind(kind(host, port));
    if key.is_empty() { Ok(address) } else { address.with_key(key) }
}

fn parse_unix(rest: &str) -> Result<Address, AddressError> {
    let path_error = |problem| AddressError::Path { text: rest.into(), problem };
    let (path, query) = match rest.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (rest, None),
    };
    // Written as a URL with an empty host, the same path has three slashes.
    let path = match path.strip_prefix("//") {
        Some(after) if after.starts_with('/') => after,
        Some(_) => return Err(path_error("two slashes would start a host name")),
        None => path,
    };
    let Some(path) = unescaped(path) else {
        return Err(path_error("% must be followed by two hexadecimal digits"));
    };
    let address = Address::unix(path)?;
    match query.map(|query| query.strip_prefix("key=")) {
        None => Ok(address),
        Some(Some(key)) => address.with_key(key),
        Some(None) => Err(path_error("only key= may follow the ? (%3F is a literal ?)")),
    }
}

/// The address of a tracker that is reached by `scheme`, and the key to ask it for.
fn parse_tracker(scheme: &str, rest: &str) -> Result<Address, AddressError> {
    let text = format!("{scheme}:{rest}");
    if !matches!(scheme, "tcp" | "tls" | "quic" | "unix") {
        return Err(AddressError::Tracker { text });
    }
    let at: Address = text.parse()?;
    let key = at.key.clone();
    Address::tracker(at, key.as_deref())
}

fn parse_exec(rest: &str) -> Result<Address, AddressError> {
    let argv = split_words(rest).map_err(|problem| AddressError::Command { text: rest.into(), problem })?;
    Address::exec(argv)
}

/// The host in canonical form; `text` is what an error quotes.
fn checked_host(host: &str, text: &str) -> Result<String, AddressError> {
    let host_error = |problem| AddressError::Host { text: text.into(), problem };
    if host.is_empty() {
        return Err(host_error("it is empty (to listen everywhere, write [::])"));
    }
    if host.contains(':') {
        let (ip, zone) = match host.split_once('%') {
            Some((ip, zone)) => (ip, Some(zone)),
            None => (host, None),
        };
        let Ok(ip) = ip.parse::<Ipv6Addr>() else {
            return Err(host_error("it is not an IPv6 address"));
        };
        return match zone {
            None => Ok(ip.to_string()),
            Some(zone) if is_host_name(zone) => Ok(format!("{ip}%{zone}")),
            Some(_) => Err(host_error("its zone is not an interface")),
        };
    }
    if !is_host_name(host) {
        return Err(host_error("a host name has letters, digits, hyphens and single dots"));
    }
    Ok(host.to_ascii_lowercase())
}

fn is_host_name(text: &str) -> bool {
    let label = |label: &str| {
        !label.is_empty() && (label.bytes()).all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    };
    let without_root = text.strip_suffix('.').unwrap_or(text);
    text.len() <= 253 && without_root.split('.').all(label)
}

fn is_port(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Keys and names use only characters that need no escaping anywhere an address may stand.
fn is_name(text: &str) -> bool {
    !text.is_empty() && (text.bytes()).all(|byte| byte.is_ascii_alphanumeric() || b"-._~:@+=".contains(&byte))
}

/// The path with each byte that would not survive parsing as `%XX`.
fn escaped(path: &Path) -> String {
    let mut text = String::new();
    let mut bytes = path.as_os_str().as_bytes();
    // A path may start with two slashes, but our text for that is three of them and one dropped.
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

/// The path behind the text, or `None` where a `%` is not followed by two digits.
fn unescaped(text: &str) -> Option<PathBuf> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte == b'%' {
            let (digits, after) = rest.split_at_checked(2)?;
            let digit = |byte: u8| char::from(byte).to_digit(16);
            let value = digit(digits[0])? * 16 + digit(digits[1])?;
            bytes.push(u8::try_from(value).ok()?);
            rest = after;
        } else {
            bytes.push(byte);
        }
    }
    Some(PathBuf::from(OsString::from_vec(bytes)))
}

/// Splits a command line into words, as a shell does before it expands anything.
///
/// White space separates words. Between single quotes all characters stand for themselves. Between
/// double quotes a backslash takes the meaning from `"`, `\`, `$` and `` ` `` and is itself before
/// anything else. Outside quotes it takes the meaning from any character.
fn split_words(line: &str) -> Result<Vec<String>, &'static str> {
    let mut words = Vec::new();
    let mut characters = line.chars().peekable();
    loop {
        while characters.next_if(|c| c.is_whitespace()).is_some() {}
        if characters.peek().is_none() {
            return Ok(words);
        }
        let mut word = String::new();
        while let Some(character) = characters.next_if(|c| !c.is_whitespace()) {
            match character {
                '\'' => loop {
                    match characters.next().ok_or("a single quote is not closed")? {
                        '\'' => break,
                        other => word.push(other),
                    }
                },
                '"' => loop {
                    match characters.next().ok_or("a double quote is not closed")? {
                        '"' => break,
                        '\\' => match characters.next_if(|c| matches!(c, '"' | '\\' | '$' | '`')) {
                            Some(escaped) => word.push(escaped),
                            None => word.push('\\'),
                        },
                        other => word.push(other),
                    }
                },
                '\\' => word.push(characters.next().ok_or("nothing follows the backslash")?),
                other => word.push(other),
            }
        }
        words.push(word);
    }
}

/// The command line that [`split_words`] splits into these words.
fn quoted(argv: &[String]) -> String {
    let plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | '@' | '%' | '+' | '=' | ':' | ',' | '.' | '/' | '-');
    let quote = |word: &String| {
        if !word.is_empty() && word.chars().all(plain) {
            word.clone()
        } else {
            format!("'{}'", word.replace('\'', r"'\''"))
        }
    };
    let words: Vec<String> = argv.iter().map(quote).collect();
    words.join(" ")
}

/// What a peer's name says about its machine: not the port or the process, of which one machine has many.
pub(crate) fn machine_of(peer: &str) -> String {
    let address = peer.parse::<Address>().ok();
    let host = address.as_ref().and_then(Address::host_and_port).map(|(host, _)| host.to_owned());
    // Whoever is not behind an address with a host is here.
    host.unwrap_or_else(|| "this machine".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Address {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    fn refused(text: &str) -> AddressError {
        match text.parse::<Address>() {
            Ok(address) => panic!("{text} was taken as {address:?}"),
            Err(error) => error,
        }
    }

    #[test]
    fn canonical_texts_come_back_unchanged() {
        for text in [
            "tcp://localhost:9090",
            "tcp://board-7.lan:0",
            "tcp://10.0.0.5:65535/rack:1",
            "tcp://[::1]:9090/board-7",
            "tcp://[fe80::1%eth0]:9090",
            "tls://board-7.lan:9090/board-7",
            "tls://[::1]:9090",
            "quic://10.0.0.5:9090",
            "quic://[::1]:0/k",
            "unix:/run/rpc.sock",
            "unix:relative.sock",
            "unix:/run/with%20space%3F%25.sock?key=a@b",
            "unix:/run/%FF",
            "unix:/%2Fhost",
            "exec:cat",
            "exec:ssh board 'rpc-server serve --stdio' ''",
            "memory:test-1",
            "local:",
            "tracker://pool.lan:9190/h100",
            "tracker://[::1]:9190",
            "tracker+tls://pool.lan:9190/h100",
            "tracker+quic://pool.lan:9190",
            "tracker+unix:/run/pool.sock?key=h100",
        ] {
            let address = parsed(text);
            assert_eq!(address.to_string(), text);
            assert_eq!(parsed(&address.to_string()), address);
        }
    }

    #[test]
    fn other_spellings_become_canonical() {
        for (text, canonical) in [
            (" TCP://LocalHost:09090/ ", "tcp://localhost:9090"),
            ("tcp://[0:0:0:0:0:0:0:1]:1", "tcp://[::1]:1"),
            ("unix:///run/a.sock", "unix:/run/a.sock"),
            ("exec:  a\t\"b\" \\ c  ", "exec:a b ' c'"),
            ("local: ", "local:"),
        ] {
            assert_eq!(parsed(text).to_string(), canonical);
        }
    }

    #[test]
    fn every_path_round_trips() {
        for path in [&b"/a b?c%d"[..], b"/\xff\xfe\n", b"//x", b"///x", b"a//b", "/\u{a0}ü".as_bytes()] {
            let path = PathBuf::from(OsString::from_vec(path.to_vec()));
            let address = Address::unix(&path).unwrap().with_key("k").unwrap();
            assert_eq!(parsed(&address.to_string()), address, "{address}");
        }
    }

    #[test]
    fn every_argv_round_trips() {
        for argv in [
            &["a"][..],
            &["a", "", " ", "'", "\"", "\\", "it's", "$HOME", "*", "\n", "ü", "a\\'b"],
            &["a b", "trailing "],
            &["-", "--x=1,2", "#no-comment"],
        ] {
            let address = Address::exec(argv.iter().copied()).unwrap();
            assert_eq!(parsed(&address.to_string()), address, "{address}");
        }
    }

    #[test]
    fn words_split_as_in_a_shell() {
        for (line, words) in [
            ("", &[][..]),
            (" \t ", &[]),
            ("a  b", &["a", "b"]),
            ("a'b c'd", &["ab cd"]),
            (r#""a \" \\ \n \$x""#, &[r#"a " \ \n $x"#]),
            (r"a\ b \'", &["a b", "'"]),
            ("'' \"\"", &["", ""]),
            ("a|b > $c;d #e", &["a|b", ">", "$c;d", "#e"]),
        ] {
            assert_eq!(split_words(line).unwrap(), words, "{line}");
        }
        for line in ["'a", "\"a", "a\\", "\"a\\\""] {
            assert!(split_words(line).is_err(), "{line}");
        }
    }

    #[test]
    fn the_error_names_the_part_that_is_wrong() {
        use AddressError as E;
        for text in ["", "host", "host:9090", "[::1]:9090"] {
            assert!(matches!(refused(text), E::NoScheme { .. }), "{text}");
        }
        for text in ["http://host", ":", "ftp:x"] {
            assert!(matches!(refused(text), E::UnknownScheme { .. }), "{text}");
        }
        for text in [
            "tcp:host:1",
            "tcp://host",
            "tcp://:1",
            "tcp://::1:1",
            "tcp://[::1]",
            "tcp://[::1",
            "tcp://[host]:1",
            "tcp://[::g]:1",
            "tcp://[::1%]:1",
            "tcp://a..b:1",
            "tcp://user@host:1",
            "tcp://*:1",
            "tcp://a b:1",
        ] {
            assert!(matches!(refused(text), E::Host { .. }), "{text}");
        }
        for text in ["tcp://h:", "tcp://h:x", "tcp://h:65536", "tcp://h:+1", "tcp://h:-1"] {
            assert!(matches!(refused(text), E::Port { .. }), "{text}");
        }
        for text in ["tcp://h:1/a/b", "tcp://h:1/a b", "tcp://h:1/?", "unix:/a?key="] {
            assert!(matches!(refused(text), E::Key { .. }), "{text}");
        }
        for text in ["unix:", "unix:?key=a", "unix://host/a", "unix:/a%", "unix:/a%0", "unix:/a%00", "unix:/a?b"] {
            assert!(matches!(refused(text), E::Path { .. }), "{text}");
        }
        for text in ["exec:", "exec: ", "exec:''", "exec:'a", "exec:a\0"] {
            assert!(matches!(refused(text), E::Command { .. }), "{text}");
        }
        for text in ["memory:", "memory:a b", "memory:a/b"] {
            assert!(matches!(refused(text), E::Name { .. }), "{text}");
        }
        assert!(matches!(refused("local:x"), E::NotEmpty { .. }));
    }

    #[test]
    fn a_tracker_is_asked_where_its_address_says() {
        let address = parsed("tracker+tls://pool.lan:9190/h100");
        assert_eq!(address.tracker_address(), Some(&parsed("tls://pool.lan:9190")));
        assert_eq!((address.key(), address.host_and_port()), (Some("h100"), None));
        assert_eq!(parsed("tracker://127.0.0.1:1").tracker_address(), Some(&parsed("tcp://127.0.0.1:1")));
        assert!(parsed("tracker://127.0.0.1:1").is_loopback() && !parsed("tracker://pool:1").is_loopback());
        for text in ["tracker+exec:cat", "tracker+tracker://h:1", "tracker+memory:m", "tracker+:x"] {
            assert!(matches!(refused(text), AddressError::Tracker { .. }), "{text}");
        }
        assert!(matches!(refused("tracker:x"), AddressError::Host { .. }));
        assert!(Address::tracker(Address::local(), None).is_err());
    }

    #[test]
    fn loopback_is_what_other_machines_cannot_reach() {
        for text in [
            "tcp://localhost:1",
            "tcp://127.9.9.9:1",
            "tcp://[::1]:1",
            "tcp://[::ffff:127.0.0.1]:1",
            "unix:/a",
            "exec:a",
            "memory:a",
            "local:",
        ] {
            assert!(parsed(text).is_loopback(), "{text}");
        }
        for text in [
            "tcp://0.0.0.0:1",
            "tls://0.0.0.0:1",
            "quic://10.0.0.1:1",
            "tcp://[::]:1",
            "tcp://10.0.0.1:1",
            "tcp://localhost.lan:1",
            "tcp://127.1:1",
        ] {
            assert!(!parsed(text).is_loopback(), "{text}");
        }
    }

    #[test]
    fn keys_belong_to_kinds_that_can_show_them() {
        let address = parsed("tcp://h:1").with_key("a").unwrap();
        assert_eq!(address.key(), Some("a"));
        assert_eq!(address.without_key(), parsed("tcp://h:1"));
        assert!(parsed("exec:a").with_key("a").is_err());
        assert!(parsed("local:").with_key("a").is_err());
    }

    #[test]
    fn socket_addresses_convert() {
        for text in ["127.0.0.1:80", "[::1]:80", "[fe80::1%3]:80"] {
            let socket: SocketAddr = text.parse().unwrap();
            assert_eq!(Address::from(socket), parsed(&format!("tcp://{text}")));
        }
    }
}
