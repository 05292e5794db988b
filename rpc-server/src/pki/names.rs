//! Names in certificates: of servers, of clients, and keys of servers.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use rcgen::SanType;
use rpc_transports::Address;
use rustls_pki_types::ServerName;

use super::PkiError;

/// Maximum length of the name in the subject of a certificate.
pub(super) const MAX_NAME: usize = 64;

/// A name or address under which clients reach a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    /// A DNS name, such as `board.lan`; or all names of a domain, such as `*.lab.example`.
    Name(String),
    /// An IP address.
    Address(IpAddr),
}

impl Host {
    pub(super) fn subject_alt_name(&self) -> Result<SanType, PkiError> {
        Ok(match self {
            Self::Name(name) => SanType::DnsName(name.as_str().try_into().map_err(PkiError::signing)?),
            Self::Address(address) => SanType::IpAddress(*address),
        })
    }
}

impl FromStr for Host {
    type Err = PkiError;

    fn from_str(text: &str) -> Result<Self, PkiError> {
        let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
        if let Ok(address) = bare.parse() {
            return Ok(Self::Address(address));
        }
        let plain = text.strip_prefix("*.").unwrap_or(text);
        match ServerName::try_from(plain) {
            Ok(ServerName::DnsName(_)) => Ok(Self::Name(text.to_ascii_lowercase())),
            _ => Err(PkiError::Host { text: text.to_owned() }),
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Address(address) => address.fmt(f),
        }
    }
}

/// Name in a client's certificate: 1 to 64 letters, digits and `.`, `-`, `_`, and not `anonymous`.
/// Default: `client`.
///
/// A server knows the client by this name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientName(pub(super) String);

impl FromStr for ClientName {
    type Err = PkiError;

    fn from_str(text: &str) -> Result<Self, PkiError> {
        let fits = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
        if matches!(text, "" | "." | ".." | "anonymous") || text.len() > MAX_NAME || !text.chars().all(fits) {
            return Err(PkiError::ClientName { text: text.to_owned() });
        }
        Ok(Self(text.to_owned()))
    }
}

/// Key of a server that a client may use, in the form of keys in addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerKey(pub(super) String);

impl FromStr for ServerKey {
    type Err = PkiError;

    fn from_str(text: &str) -> Result<Self, PkiError> {
        let any = Address::from(SocketAddr::from(([127, 0, 0, 1], 1)));
        any.with_key(text).map_err(|source| PkiError::ServerKey { source })?;
        Ok(Self(text.to_owned()))
    }
}

impl Default for ClientName {
    fn default() -> Self {
        Self("client".to_owned())
    }
}

impl fmt::Display for ClientName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
