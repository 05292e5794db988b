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
//! | `ssh://[user@]host[:port][/KEY][?program=PATH]` | a server started on another machine through `ssh` |
//! | `memory:NAME` | a listener inside this process |
//! | `local:` | this process itself, without any channel |
//! | `tracker://host:port/KEY` | a server with that key that the tracker gives out |
//! | `tracker+tls://…/KEY`, `tracker+unix:/path?key=KEY`, … | the same, for trackers elsewhere |
//!
//! A *key* names one of several servers that are reached through the same address. The rest of an
//! `exec:` address is a command line: it has no key and no parameters, and a `?` in it is an
//! ordinary character.

mod convert;
mod error;
mod grammar;
mod pattern;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;

pub use self::convert::ToAddress;
pub use self::error::AddressError;
use self::grammar::{KEY_CHARACTERS, Location, Parts, VERBATIM, checked_host, checked_scheme, joined, parse};
pub(crate) use self::grammar::{is_name, unescaped};
pub use self::pattern::glob;
pub(crate) use self::pattern::{is_covered, scheme_of_pattern};

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

impl Address {
    /// Returns the address of a host: `scheme://host:port`. An IPv6 `host` is given without
    /// brackets.
    ///
    /// # Errors
    ///
    /// [`AddressError::Scheme`] and [`AddressError::Host`] if one of them is malformed.
    pub fn at_host(scheme: &str, host: &str, port: impl Into<Option<u16>>) -> Result<Self, AddressError> {
        let location = Location::Host { user: None, host: checked_host(host, host)?, port: port.into() };
        Ok(Self::from_parts(Parts { scheme: checked_scheme(scheme)?, location, key: None, parameters: Vec::new() }))
    }

    /// Returns an opaque address: `scheme:rest`. Characters of `rest` that mean something in an
    /// address, such as `?`, have to be escaped by a rule of the scheme's own.
    ///
    /// # Errors
    ///
    /// [`AddressError`] if `scheme:rest` is malformed.
    pub fn opaque(scheme: &str, rest: &str) -> Result<Self, AddressError> {
        let this: Self = format!("{}:{rest}", checked_scheme(scheme)?).parse()?;
        match this.parts.location {
            Location::Opaque(_) => Ok(this),
            Location::Host { .. } => Err(AddressError::invalid(&this, "two slashes would start a host name")),
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
        if matches!(self.parts.location, Location::Opaque(_)) && VERBATIM.contains(&self.scheme()) {
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
        if let Location::Host { port, .. } = &mut parts.location {
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
        if let Location::Host { host, .. } = &mut parts.location {
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
        match &self.parts.location {
            Location::Host { user, .. } => user.as_deref(),
            Location::Opaque(_) => None,
        }
    }

    /// Returns the host of a hierarchical address: a lower-case name, or an IP address without
    /// brackets.
    #[must_use]
    pub fn host(&self) -> Option<&str> {
        match &self.parts.location {
            Location::Host { host, .. } => Some(host),
            Location::Opaque(_) => None,
        }
    }

    /// Returns the port, if the address names one.
    #[must_use]
    pub fn port(&self) -> Option<u16> {
        match self.parts.location {
            Location::Host { port, .. } => port,
            Location::Opaque(_) => None,
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
        match &self.parts.location {
            Location::Host { .. } => None,
            Location::Opaque(rest) => Some(rest),
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
        Self { text: parts.text().into(), parts: Arc::new(parts) }
    }

    fn into_parts(self) -> Parts {
        Arc::unwrap_or_clone(self.parts)
    }
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

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let (text, parts) = parse(text)?;
        Ok(Self { parts: Arc::new(parts), text: text.into() })
    }
}
