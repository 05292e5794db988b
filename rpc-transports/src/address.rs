//! Addresses of peers: one syntax for all schemes, parsed once and printed back byte for byte.
//!
//! An address is hierarchical or opaque:
//!
//! ```text
//! scheme://[user@]host[:port][/KEY][?name=value&…]
//! scheme:rest[?key=KEY&name=value&…]
//! ```
//!
//! Any well-formed scheme parses. The transport of the scheme says with
//! [`Transport::check`](crate::Transport::check) whether the address is one of its own. These come
//! with the crate:
//!
//! | Text | Meaning |
//! | --- | --- |
//! | `tcp://host:port[/KEY]` | a TCP port; IPv6 in brackets; to a listener, 0 is any free port |
//! | `tls://host:port[/KEY]` | the same, encrypted by TLS 1.3 |
//! | `quic://host:port[/KEY]` | a UDP port, spoken to in QUIC |
//! | `unix:/path[?key=KEY]` | a Unix domain socket; in the path `%XX` stands for one byte |
//! | `exec:command line` | a child process, spoken to over its standard input and output |
//! | `memory:NAME` | a listener inside this process |
//! | `local:` | this process itself, without any channel |
//! | `tracker://host:port/KEY` | a server with that key that the tracker gives out |
//! | `tracker+tls://…/KEY`, `tracker+unix:/path?key=KEY`, … | the same, for trackers elsewhere |
//!
//! A *key* names one of several servers that are reached through the same address. The rest of an
//! `exec:` address is a command line: it has no key and no parameters, and a `?` in it is an
//! ordinary character.

mod pattern;

use std::borrow::Cow;
use std::fmt::{self, Write as _};
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;

pub(crate) use self::pattern::glob;
pub(crate) use self::pattern::is_covered;

/// The address of a peer, to dial or to listen on.
///
/// Displaying an address gives the text that was parsed, without the spaces around it. Two
/// addresses are equal if their parts are: the case of scheme and host, leading zeros of a port and
/// spellings of an IPv6 address do not count.
///
/// ```
/// use rpc_transports::Address;
///
/// let address: Address = "tcp://[::1]:9090/board-7".parse()?;
/// assert_eq!(address.scheme(), "tcp");
/// assert_eq!((address.host(), address.port()), (Some("::1"), Some(9090)));
/// assert_eq!(address.key(), Some("board-7"));
/// assert_eq!(address.without_key().to_string(), "tcp://[::1]:9090");
/// # Ok::<(), rpc_transports::AddressError>(())
/// ```
#[derive(Clone)]
pub struct Address {
    parts: Arc<Parts>,
    text: Arc<str>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Parts {
    /// Scheme in lower case.
    scheme: String,
    place: Place,
    key: Option<String>,
    /// Names and values as they stand in the text, without `key`.
    parameters: Vec<(String, String)>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
enum Place {
    Host {
        user: Option<String>,
        /// Lower-case host name, or an IP address; IPv6 without brackets, with its zone if it has
        /// one.
        host: String,
        port: Option<u16>,
    },
    Opaque(String),
}

/// The parameter that holds the key of an opaque address.
const KEY: &str = "key";

/// Schemes whose opaque part is taken as it stands: a command line has question marks of its own.
const VERBATIM: [&str; 1] = ["exec"];

impl Address {
    /// Returns the address of a host: `scheme://host:port`. An IPv6 `host` is given without
    /// brackets.
    ///
    /// # Errors
    ///
    /// [`AddressError::Scheme`] and [`AddressError::Host`] if one of them is malformed.
    pub fn at_host(scheme: &str, host: &str, port: impl Into<Option<u16>>) -> Result<Self, AddressError> {
        let place = Place::Host { user: None, host: checked_host(host, host)?, port: port.into() };
        Ok(Self::from_parts(Parts { scheme: checked_scheme(scheme)?, place, key: None, parameters: Vec::new() }))
    }

    /// Returns an opaque address: `scheme:rest`. Characters of `rest` that mean something in an
    /// address, such as `?`, have to be escaped by a rule of the scheme's own.
    ///
    /// # Errors
    ///
    /// [`AddressError`] if `scheme:rest` is malformed.
    pub fn opaque(scheme: &str, rest: &str) -> Result<Self, AddressError> {
        let this: Self = format!("{}:{rest}", checked_scheme(scheme)?).parse()?;
        match this.parts.place {
            Place::Opaque(_) => Ok(this),
            Place::Host { .. } => Err(AddressError::invalid(&this, "two slashes would start a host name")),
        }
    }

    /// Returns a TCP address. An IPv6 `host` is given without brackets.
    ///
    /// # Errors
    ///
    /// [`AddressError::Host`] if `host` is neither a host name nor an IP address.
    pub fn tcp(host: &str, port: u16) -> Result<Self, AddressError> {
        Self::at_host("tcp", host, port)
    }

    /// Returns the same address with this key, which names one of the servers behind it.
    ///
    /// # Errors
    ///
    /// [`AddressError::Key`] if the key is empty or has characters other than letters, digits and
    /// `-._~:@+=`, or if addresses of this scheme have no place for a key.
    pub fn with_key(self, key: &str) -> Result<Self, AddressError> {
        let key_error = |problem| AddressError::Key { text: key.to_owned(), problem };
        if matches!(self.parts.place, Place::Opaque(_)) && VERBATIM.contains(&self.scheme()) {
            return Err(key_error("a command line has no place for one"));
        }
        if !is_name(key) {
            return Err(key_error(KEY_CHARACTERS));
        }
        Ok(Self::from_parts(Parts { key: Some(key.to_owned()), ..self.into_parts() }))
    }

    /// Returns the same address without a key, which is the one to dial.
    #[must_use]
    pub fn without_key(self) -> Self {
        if self.parts.key.is_none() { self } else { Self::from_parts(Parts { key: None, ..self.into_parts() }) }
    }

    /// Returns the same address with another port. Opaque addresses are returned as they are.
    #[must_use]
    pub fn with_port(self, new: u16) -> Self {
        let mut parts = self.into_parts();
        if let Place::Host { port, .. } = &mut parts.place {
            *port = Some(new);
        }
        Self::from_parts(parts)
    }

    /// Returns the same address with another host. Opaque addresses are returned as they are.
    ///
    /// # Errors
    ///
    /// [`AddressError::Host`] if `new` is neither a host name nor an IP address.
    pub fn with_host(self, new: &str) -> Result<Self, AddressError> {
        let mut parts = self.into_parts();
        if let Place::Host { host, .. } = &mut parts.place {
            *host = checked_host(new, new)?;
        }
        Ok(Self::from_parts(parts))
    }

    /// Returns the same address with another scheme.
    ///
    /// # Errors
    ///
    /// [`AddressError::Scheme`] if `scheme` is malformed.
    pub fn with_scheme(self, scheme: &str) -> Result<Self, AddressError> {
        Ok(Self::from_parts(Parts { scheme: checked_scheme(scheme)?, ..self.into_parts() }))
    }

    /// Returns the word before the first colon, in lower case.
    #[must_use]
    pub fn scheme(&self) -> &str {
        &self.parts.scheme
    }

    /// Returns the user name in front of the host, if there is one.
    #[must_use]
    pub fn user(&self) -> Option<&str> {
        match &self.parts.place {
            Place::Host { user, .. } => user.as_deref(),
            Place::Opaque(_) => None,
        }
    }

    /// Returns the host of a hierarchical address: a lower-case name, or an IP address without
    /// brackets.
    #[must_use]
    pub fn host(&self) -> Option<&str> {
        match &self.parts.place {
            Place::Host { host, .. } => Some(host),
            Place::Opaque(_) => None,
        }
    }

    /// Returns the port, if the address names one.
    #[must_use]
    pub fn port(&self) -> Option<u16> {
        match self.parts.place {
            Place::Host { port, .. } => port,
            Place::Opaque(_) => None,
        }
    }

    /// Returns host and port of an address that has both.
    #[must_use]
    pub fn host_and_port(&self) -> Option<(&str, u16)> {
        self.host().zip(self.port())
    }

    /// Returns the part behind the scheme of an opaque address, without its parameters.
    #[must_use]
    pub fn rest(&self) -> Option<&str> {
        match &self.parts.place {
            Place::Host { .. } => None,
            Place::Opaque(rest) => Some(rest),
        }
    }

    /// Returns the name of one of the servers behind this address, if the address has one.
    #[must_use]
    pub fn key(&self) -> Option<&str> {
        self.parts.key.as_deref()
    }

    /// Returns the value of a parameter, with `%XX` decoded. The key is not one of the parameters.
    ///
    /// Bytes that are not UTF-8 are replaced. A value in which a `%` lacks its two digits is
    /// returned undecoded.
    #[must_use]
    pub fn parameter(&self, name: &str) -> Option<Cow<'_, str>> {
        let value = self.parts.parameters.iter().find(|(known, _)| known == name).map(|(_, value)| value)?;
        match unescaped(value) {
            Some(bytes) if value.contains('%') => Some(Cow::Owned(String::from_utf8_lossy(&bytes).into_owned())),
            _ => Some(Cow::Borrowed(value)),
        }
    }

    /// Returns the names of the parameters.
    pub fn parameters(&self) -> impl Iterator<Item = &str> {
        self.parts.parameters.iter().map(|(name, _)| name.as_str())
    }

    /// Returns true if the host is a loopback IP address or the name `localhost`. Any other name
    /// may stand for any machine. An opaque address has no host.
    ///
    /// The reach of an address is known to its transport:
    /// [`Transport::check`](crate::Transport::check).
    #[must_use]
    pub fn has_loopback_host(&self) -> bool {
        self.host().is_some_and(|host| match host.parse::<IpAddr>() {
            Ok(ip) => ip.to_canonical().is_loopback(),
            Err(_) => host == "localhost",
        })
    }

    /// Returns the parameters as they stand in the text, without the key and the question mark.
    fn query(&self) -> String {
        joined(self.parts.parameters.iter().map(|(name, value)| (name.as_str(), value.as_str())))
    }

    fn from_parts(parts: Parts) -> Self {
        let mut text = format!("{}:", parts.scheme);
        let mut parameters: Vec<(&str, &str)> = Vec::new();
        // Writing to a string cannot fail.
        let _ = match &parts.place {
            Place::Host { user, host, port } => {
                let (user, at) = user.as_ref().map_or(("", ""), |user| (user, "@"));
                let (open, close) = if host.contains(':') { ("[", "]") } else { ("", "") };
                let port = port.map(|port| format!(":{port}")).unwrap_or_default();
                let key = parts.key.as_ref().map(|key| format!("/{key}")).unwrap_or_default();
                write!(text, "//{user}{at}{open}{host}{close}{port}{key}")
            }
            Place::Opaque(rest) => {
                parameters.extend(parts.key.as_deref().map(|key| (KEY, key)));
                write!(text, "{rest}")
            }
        };
        parameters.extend(parts.parameters.iter().map(|(name, value)| (name.as_str(), value.as_str())));
        if !parameters.is_empty() {
            text.push('?');
            text.push_str(&joined(parameters.into_iter()));
        }
        Self { parts: Arc::new(parts), text: text.into() }
    }

    fn into_parts(self) -> Parts {
        Arc::unwrap_or_clone(self.parts)
    }
}

fn joined<'a>(parameters: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    parameters.map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("&")
}

impl PartialEq for Address {
    fn eq(&self, other: &Self) -> bool {
        self.parts == other.parts
    }
}

impl Eq for Address {}

impl Hash for Address {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.parts.hash(state);
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Address({})", self.text)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Conversion to a TCP address without a key.
impl From<SocketAddr> for Address {
    fn from(socket: SocketAddr) -> Self {
        let host = match socket {
            SocketAddr::V6(v6) if v6.scope_id() != 0 => format!("{}%{}", v6.ip(), v6.scope_id()),
            _ => socket.ip().to_string(),
        };
        let place = Place::Host { user: None, host, port: Some(socket.port()) };
        Self::from_parts(Parts { scheme: "tcp".to_owned(), place, key: None, parameters: Vec::new() })
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let text = text.trim_start();
        let no_scheme = || AddressError::NoScheme { text: text.trim_end().into() };
        let (scheme, rest) = text.split_once(':').ok_or_else(no_scheme)?;
        // `host:9090` and `[::1]:9090` seem to begin with a scheme, but their scheme is missing.
        if scheme.is_empty() || is_port(rest.trim_end()) || scheme.starts_with('[') {
            return Err(no_scheme());
        }
        let scheme = checked_scheme(scheme)?;
        let is_verbatim = VERBATIM.contains(&scheme.as_str());
        // Spaces have a meaning of their own in a command line. In other addresses, spaces at the
        // end are a slip.
        let (text, rest) = if is_verbatim { (text, rest) } else { (text.trim_end(), rest.trim_end()) };
        let parts = match rest.strip_prefix("//") {
            // An empty host means that a path follows, written as in a URL.
            Some(body) if !body.starts_with('/') && !is_verbatim => hierarchical(scheme, rest, body)?,
            _ if is_verbatim => {
                Parts { scheme, place: Place::Opaque(rest.to_owned()), key: None, parameters: Vec::new() }
            }
            _ => {
                let (rest, query) = split_query(rest);
                let (key, parameters) = parsed_query(query)?;
                if let Some(key) = &key {
                    check_key(key)?;
                }
                Parts { scheme, place: Place::Opaque(rest.to_owned()), key, parameters }
            }
        };
        Ok(Self { parts: Arc::new(parts), text: text.into() })
    }
}

impl TryFrom<&str> for Address {
    type Error = AddressError;

    fn try_from(text: &str) -> Result<Self, AddressError> {
        text.parse()
    }
}

/// An address, or the text of one.
pub trait ToAddress: Sync {
    /// Returns the address.
    ///
    /// # Errors
    ///
    /// [`AddressError`] if the text is malformed.
    fn to_address(&self) -> Result<Address, AddressError>;
}

impl ToAddress for Address {
    fn to_address(&self) -> Result<Address, AddressError> {
        Ok(self.clone())
    }
}

impl ToAddress for str {
    fn to_address(&self) -> Result<Address, AddressError> {
        self.parse()
    }
}

impl ToAddress for String {
    fn to_address(&self) -> Result<Address, AddressError> {
        self.parse()
    }
}

impl<T: ToAddress + ?Sized> ToAddress for &T {
    fn to_address(&self) -> Result<Address, AddressError> {
        (**self).to_address()
    }
}

/// The reason why a text is not an address. Each message shows an example of the right form.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AddressError {
    /// Missing scheme: the text does not begin with a word and a colon.
    #[error("{text:?} does not say how to connect; write for example tcp://host:9090")]
    NoScheme {
        /// The given text.
        text: String,
    },
    /// Malformed scheme in front of the colon.
    #[error("{text:?} is no scheme: it consists of letters, digits and +-. ; write for example tcp://host:9090")]
    Scheme {
        /// The word before the colon.
        text: String,
    },
    /// Unknown scheme: no transport is registered for it.
    #[error("no transport knows {scheme}: addresses; those that can be used here are {known}")]
    UnknownScheme {
        /// The word before the colon.
        scheme: String,
        /// The known schemes, with commas between them.
        known: String,
    },
    /// Malformed host, or malformed user in front of it.
    #[error("host {text:?}: {problem}; write for example tcp://board.lan:9090 or tcp://[::1]:9090")]
    Host {
        /// The host, or all text after the scheme if the host cannot be told apart.
        text: String,
        /// The problem with it.
        problem: &'static str,
    },
    /// Malformed port.
    #[error("port {text:?} is not a number from 0 to 65535; write for example tcp://board.lan:9090")]
    Port {
        /// The text in the port's place.
        text: String,
    },
    /// Malformed or misplaced key of a server.
    #[error(
        "key {text:?}: {problem}; write for example tcp://host:9090/board-7 or \
         unix:/run/rpc.sock?key=board-7"
    )]
    Key {
        /// The key.
        text: String,
        /// The problem with it.
        problem: &'static str,
    },
    /// Malformed parameters.
    #[error("parameters {text:?}: {problem}; write for example ?name=value&other=value (%3F is a literal ?)")]
    Parameters {
        /// The text behind the question mark.
        text: String,
        /// The problem with it.
        problem: &'static str,
    },
    /// Well-formed address that its transport does not accept.
    #[error("bad address {address}: {problem}")]
    Invalid {
        /// The address.
        address: String,
        /// The problem with it, and the right form.
        problem: String,
    },
}

impl AddressError {
    /// Returns the text that the error is about.
    pub(crate) fn text(&self) -> &str {
        match self {
            Self::NoScheme { text }
            | Self::Scheme { text }
            | Self::UnknownScheme { scheme: text, .. }
            | Self::Host { text, .. }
            | Self::Port { text }
            | Self::Key { text, .. }
            | Self::Parameters { text, .. }
            | Self::Invalid { address: text, .. } => text,
        }
    }

    /// Makes the error by which a transport refuses an address. `problem` names the error in the
    /// address and shows the right form.
    #[must_use]
    pub fn invalid(address: &Address, problem: impl Into<String>) -> Self {
        Self::Invalid { address: address.to_string(), problem: problem.into() }
    }
}

const KEY_CHARACTERS: &str = "it must consist of letters, digits and -._~:@+=";

/// Parses the part behind the scheme; `rest` has the two slashes, and `body` does not.
fn hierarchical(scheme: String, rest: &str, body: &str) -> Result<Parts, AddressError> {
    let host_error = |problem| AddressError::Host { text: rest.into(), problem };
    let (body, query) = split_query(body);
    let (in_query, parameters) = parsed_query(query)?;
    if let Some(key) = in_query {
        return Err(AddressError::Key { text: key, problem: "behind a host it follows a slash" });
    }
    let (authority, key) = body.split_once('/').unwrap_or((body, ""));
    let (user, authority) = match authority.rsplit_once('@') {
        Some((user, authority)) if is_user(user) => (Some(user.to_owned()), authority),
        Some(_) => return Err(host_error("a user name has letters, digits and -._")),
        None => (None, authority),
    };
    let (host, port) = if let Some(bracketed) = authority.strip_prefix('[') {
        let Some((host, after)) = bracketed.split_once(']') else {
            return Err(host_error("its bracket is not closed"));
        };
        if !host.contains(':') {
            return Err(host_error("only IPv6 addresses stand in brackets"));
        }
        match after.strip_prefix(':') {
            Some(port) => (host, Some(port)),
            None if after.is_empty() => (host, None),
            None => return Err(host_error("only a port may follow it")),
        }
    } else {
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        };
        if host.contains(':') {
            return Err(host_error("an IPv6 address needs brackets"));
        }
        (host, port)
    };
    let host = checked_host(host, rest)?;
    let port_of = |port: &str| {
        // `parse` alone would also take a leading plus sign.
        let number = is_port(port).then(|| port.parse().ok()).flatten();
        number.ok_or_else(|| AddressError::Port { text: port.into() })
    };
    let port = port.map(port_of).transpose()?;
    let key = (!key.is_empty()).then(|| key.to_owned());
    if let Some(key) = &key {
        check_key(key)?;
    }
    Ok(Parts { scheme, place: Place::Host { user, host, port }, key, parameters })
}

fn split_query(text: &str) -> (&str, Option<&str>) {
    text.split_once('?').map_or((text, None), |(text, query)| (text, Some(query)))
}

/// Key and other parameters of a query.
type Query = (Option<String>, Vec<(String, String)>);

fn parsed_query(query: Option<&str>) -> Result<Query, AddressError> {
    let Some(query) = query else { return Ok((None, Vec::new())) };
    let error = |problem| AddressError::Parameters { text: query.into(), problem };
    let (mut key, mut parameters) = (None, Vec::new());
    for pair in query.split('&') {
        let (name, value) = pair.split_once('=').ok_or_else(|| error("each is a name and a value"))?;
        if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte)) {
            return Err(error("a name consists of letters, digits, - and _"));
        }
        if value.chars().any(|c| c.is_whitespace() || c.is_control() || matches!(c, '?' | '#')) {
            return Err(error("white space, ? and # are escaped by %XX"));
        }
        let is_known = parameters.iter().any(|(known, _)| known == name) || (name == KEY && key.is_some());
        match name {
            _ if is_known => return Err(error("each name may be given once")),
            KEY => key = Some(value.to_owned()),
            _ => parameters.push((name.to_owned(), value.to_owned())),
        }
    }
    Ok((key, parameters))
}

fn check_key(key: &str) -> Result<(), AddressError> {
    if is_name(key) { Ok(()) } else { Err(AddressError::Key { text: key.into(), problem: KEY_CHARACTERS }) }
}

/// Returns the scheme in lower case.
fn checked_scheme(scheme: &str) -> Result<String, AddressError> {
    let mut bytes = scheme.bytes();
    let starts = bytes.next().is_some_and(|byte| byte.is_ascii_alphabetic());
    if starts && bytes.all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte)) {
        Ok(scheme.to_ascii_lowercase())
    } else {
        Err(AddressError::Scheme { text: scheme.into() })
    }
}

/// Returns the host in canonical form. An error quotes `text`.
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

fn is_user(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
}

fn is_port(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns true if the text has only characters that need no escaping anywhere in an address. Keys
/// and names consist of them.
pub(crate) fn is_name(text: &str) -> bool {
    !text.is_empty() && (text.bytes()).all(|byte| byte.is_ascii_alphanumeric() || b"-._~:@+=".contains(&byte))
}

/// Decodes `%XX`. Returns `None` where a `%` is not followed by two hexadecimal digits.
pub(crate) fn unescaped(text: &str) -> Option<Vec<u8>> {
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
    Some(bytes)
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
    fn texts_come_back_byte_for_byte() {
        for text in [
            "tcp://localhost:9090",
            "tcp://board-7.lan:0",
            "tcp://10.0.0.5:65535/rack:1",
            "TCP://LocalHost:09090/",
            "tcp://[0:0:0:0:0:0:0:1]:1",
            "tcp://[::1]:9090/board-7",
            "tcp://[fe80::1%eth0]:9090",
            "tls://board-7.lan:9090/board-7",
            "quic://[::1]:0/k",
            "ws://gateway.example/board?proxy=none&path=%2Frpc",
            "ssh://me@board:2222/k?program=/opt/rpc%20server",
            "unix:/run/rpc.sock",
            "unix:relative.sock",
            "unix:///run/a.sock",
            "unix:/run/with%20space%3F%25.sock?key=a@b",
            "unix:/run/%FF",
            "unix:/%2Fhost",
            "exec:cat",
            "exec:  cat 'a?b=c' // ",
            "exec:ssh board 'rpc-server serve --stdio' ''",
            "memory:test-1",
            "local:",
            "tracker://pool.lan:9190/h100",
            "tracker+tls://pool.lan:9190/h100",
            "tracker+unix:/run/pool.sock?key=h100",
        ] {
            let address = parsed(text);
            assert_eq!(address.to_string(), text);
            assert_eq!(parsed(&address.to_string()), address);
            assert_eq!(Address::from_parts(address.clone().into_parts()), address, "rebuilt {text}");
        }
    }

    #[test]
    fn spellings_of_the_same_parts_are_equal_and_spaces_around_them_do_not_count() {
        for (text, same) in [
            (" TCP://LocalHost:09090/ ", "tcp://localhost:9090"),
            ("tcp://[0:0:0:0:0:0:0:1]:1", "tcp://[::1]:1"),
            ("local: ", "local:"),
        ] {
            assert_eq!(parsed(text), parsed(same));
            assert_eq!(parsed(text).to_string(), text.trim());
        }
    }

    #[test]
    fn parts_and_parameters_are_told_apart() {
        let address = parsed("ssh://me@board/k?program=a%20b&x=%");
        assert_eq!((address.user(), address.host(), address.port()), (Some("me"), Some("board"), None));
        assert_eq!(address.key(), Some("k"));
        assert_eq!(address.parameter("program").as_deref(), Some("a b"));
        assert_eq!(address.parameter("x").as_deref(), Some("%"));
        assert_eq!(address.parameters().collect::<Vec<_>>(), ["program", "x"]);
        let address = parsed("unix:/a?key=k&mode=x");
        assert_eq!((address.rest(), address.key()), (Some("/a"), Some("k")));
        assert_eq!(address.without_key().to_string(), "unix:/a?mode=x");
        let address = parsed("exec:a?key=k");
        assert_eq!((address.rest(), address.key()), (Some("a?key=k"), None));
    }

    #[test]
    fn the_error_names_the_part_that_is_wrong() {
        use AddressError as E;
        for text in ["", "host", "host:9090", "[::1]:9090", ":"] {
            assert!(matches!(refused(text), E::NoScheme { .. }), "{text}");
        }
        for text in ["1x:a", "a_b:c", "-a:b"] {
            assert!(matches!(refused(text), E::Scheme { .. }), "{text}");
        }
        for text in [
            "tcp://:1",
            "tcp://::1:1",
            "tcp://[::1",
            "tcp://[host]:1",
            "tcp://[::g]:1",
            "tcp://[::1]x",
            "tcp://[::1%]:1",
            "tcp://a..b:1",
            "tcp://us er@host:1",
            "tcp://@host:1",
            "tcp://*:1",
            "tcp://a b:1",
        ] {
            assert!(matches!(refused(text), E::Host { .. }), "{text}");
        }
        for text in ["tcp://h:", "tcp://h:x", "tcp://h:65536", "tcp://h:+1", "tcp://h:-1"] {
            assert!(matches!(refused(text), E::Port { .. }), "{text}");
        }
        for text in ["tcp://h:1/a/b", "tcp://h:1/a b", "tcp://h:1?key=a", "unix:/a?key=", "unix:/a?key=a b"] {
            assert!(matches!(refused(text), E::Key { .. } | E::Parameters { .. }), "{text}");
        }
        for text in ["tcp://h:1/?", "unix:/a?b", "unix:/a?=b", "unix:/a?b=c&b=d", "unix:/a?key=a&key=b"] {
            assert!(matches!(refused(text), E::Parameters { .. }), "{text}");
        }
    }

    #[test]
    fn loopback_is_what_other_machines_cannot_reach() {
        for text in ["tcp://localhost:1", "tcp://127.9.9.9:1", "tcp://[::1]:1", "tcp://[::ffff:127.0.0.1]:1"] {
            assert!(parsed(text).has_loopback_host(), "{text}");
        }
        for text in [
            "tcp://0.0.0.0:1",
            "quic://10.0.0.1:1",
            "tcp://[::]:1",
            "tcp://localhost.lan:1",
            "tcp://127.1:1",
            "unix:/a",
        ] {
            assert!(!parsed(text).has_loopback_host(), "{text}");
        }
    }

    #[test]
    fn keys_belong_to_addresses_that_can_show_them() {
        let address = parsed("tcp://h:1").with_key("a").unwrap();
        assert_eq!((address.key(), address.to_string()), (Some("a"), "tcp://h:1/a".to_owned()));
        assert_eq!(address.without_key(), parsed("tcp://h:1"));
        assert_eq!(parsed("unix:/a").with_key("a").unwrap().to_string(), "unix:/a?key=a");
        assert!(parsed("exec:a").with_key("a").is_err());
        assert!(parsed("tcp://h:1").with_key("a b").is_err());
    }

    #[test]
    fn socket_addresses_convert() {
        for text in ["127.0.0.1:80", "[::1]:80", "[fe80::1%3]:80"] {
            let socket: SocketAddr = text.parse().unwrap();
            assert_eq!(Address::from(socket), parsed(&format!("tcp://{text}")));
        }
    }
}
