//! Identity of a peer, with the kind of its proof.

use std::fmt;
use std::str::FromStr;

use rpc_core::proto::{ANONYMOUS, Negotiated};

use super::identity_proofs::{CERTIFICATE, SAME_CONNECTION, TOKEN};

/// Identity of a client, with the kind of its proof: the holder of the token `alice` is another one
/// than the holder of the certificate `alice`. Written `token:alice`, `cert:alice`, `unix:1000`,
/// `via:gateway/alice` or `anonymous`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PeerIdentity {
    /// A client that has proven nothing.
    Anonymous,
    /// A client that has proven nothing, at a Unix socket: the user that it runs as, according to
    /// the kernel.
    UnixUser(u32),
    /// The holder of a token with this name.
    Token(String),
    /// The holder of a certificate with this name.
    Certificate(String),
    /// A client that a [trusted proxy](crate::ServeOptions::trust_proxy) has named.
    Asserted {
        /// Name that the proxy has proven.
        proxy: String,
        /// Name of the client.
        name: String,
    },
}

impl PeerIdentity {
    /// Returns the name alone, without the kind of its proof: `anonymous` without one.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Anonymous | Self::UnixUser(_) => ANONYMOUS,
            Self::Token(name) | Self::Certificate(name) | Self::Asserted { name, .. } => name,
        }
    }

    /// Returns the identity of a peer whose proof has no name: its Unix user, if that is known.
    pub(crate) fn without_proof(user: Option<u32>) -> Self {
        user.map_or(Self::Anonymous, Self::UnixUser)
    }

    /// Returns the identity that a handshake has proven. `earlier` is the one that was known for
    /// the connection when the handshake began.
    pub(crate) fn of_handshake(proven: &ProvenName, earlier: Option<&Self>, user: Option<u32>) -> Self {
        match (proven.method.as_str(), earlier) {
            (TOKEN, _) => Self::Token(proven.name.clone()),
            (CERTIFICATE, _) => Self::Certificate(proven.name.clone()),
            (SAME_CONNECTION, Some(earlier)) => earlier.clone(),
            _ => Self::without_proof(user),
        }
    }
}

impl fmt::Display for PeerIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Anonymous => f.write_str(ANONYMOUS),
            Self::UnixUser(user) => write!(f, "unix:{user}"),
            Self::Token(name) => write!(f, "token:{name}"),
            Self::Certificate(name) => write!(f, "cert:{name}"),
            Self::Asserted { proxy, name } => write!(f, "via:{proxy}/{name}"),
        }
    }
}

impl FromStr for PeerIdentity {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<Self, IdentityError> {
        let malformed = || IdentityError { text: text.to_owned() };
        let named = |name: &str| if name.is_empty() { Err(malformed()) } else { Ok(name.to_owned()) };
        match text.split_once(':') {
            None if text == ANONYMOUS => Ok(Self::Anonymous),
            Some(("unix", user)) => user.parse().map(Self::UnixUser).map_err(|_| malformed()),
            Some(("token", name)) => named(name).map(Self::Token),
            Some(("cert", name)) => named(name).map(Self::Certificate),
            Some(("via", rest)) => {
                let (proxy, name) = rest.split_once('/').ok_or_else(malformed)?;
                Ok(Self::Asserted { proxy: named(proxy)?, name: named(name)? })
            }
            _ => Err(malformed()),
        }
    }
}

/// Error of a text that is no identity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is no identity: write token:NAME, cert:NAME, unix:NUMBER, via:PROXY/NAME or anonymous")]
pub struct IdentityError {
    /// The text.
    pub text: String,
}

/// Name that a peer has proven in a handshake, and the method of the proof.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProvenName {
    pub(crate) name: String,
    pub(crate) method: String,
}

impl ProvenName {
    /// Returns the outcome of a handshake that is over.
    pub(crate) fn of(negotiated: &Negotiated) -> Self {
        Self { name: negotiated.identity.clone(), method: negotiated.identity_method().to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_told_apart_by_the_kind_of_its_proof() {
        let proven = |method: &str, name: &str| ProvenName { name: name.to_owned(), method: method.to_owned() };
        let earlier = PeerIdentity::Certificate("alice".to_owned());
        for (method, name, expected) in [
            (TOKEN, "alice", "token:alice"),
            (CERTIFICATE, "alice", "cert:alice"),
            (SAME_CONNECTION, "alice", "cert:alice"),
            (ANONYMOUS, ANONYMOUS, "unix:1000"),
        ] {
            let identity = PeerIdentity::of_handshake(&proven(method, name), Some(&earlier), Some(1000));
            assert_eq!(identity.to_string(), expected);
        }
        let asserted = PeerIdentity::Asserted { proxy: "gateway".to_owned(), name: "alice".to_owned() };
        assert_eq!((asserted.to_string().as_str(), asserted.name()), ("via:gateway/alice", "alice"));
        assert_eq!(PeerIdentity::UnixUser(0).name(), ANONYMOUS);
        for text in ["token:alice", "cert:via:x/y", "unix:0", "via:gateway/a/b", "anonymous"] {
            assert_eq!(text.parse::<PeerIdentity>().unwrap().to_string(), text);
        }
        for text in ["", "alice", "token:", "unix:root", "via:gateway", "via:/x"] {
            assert_eq!(text.parse::<PeerIdentity>(), Err(IdentityError { text: text.to_owned() }));
        }
    }
}
