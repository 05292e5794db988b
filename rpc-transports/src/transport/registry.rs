//! The registry of transports and session openers: which of them serves an address.

use std::fmt;
use std::sync::Arc;

use super::{Bind, Dial, Properties, Transport};
use crate::address::{Address, AddressError, glob, is_covered, scheme_of_pattern};
use crate::channel::{BlockingChannel, Channel};
use crate::connect::SessionOpener;
use crate::error::TransportError;
use crate::listener::Listener;

/// The transports and session openers that a program uses, by the schemes of their addresses. Cheap
/// to clone.
///
/// The default has the transports that this crate was compiled with, and the openers of `local:`
/// and `tracker://` addresses.
///
/// ```
/// use rpc_transports::{Address, Bind, Dial, Transports};
/// use tokio::io::{AsyncReadExt, AsyncWriteExt};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let transports = Transports::default();
/// let address: Address = "memory:registry".parse()?;
/// let mut listener = transports.bind(&address, &Bind::default()).await?;
/// let mut near = transports.dial(&address, &Dial::default()).await?;
/// let mut far = listener.accept().await?;
///
/// near.io_mut().write_all(b"hello").await?;
/// let mut greeting = [0; 5];
/// far.io_mut().read_exact(&mut greeting).await?;
/// assert_eq!(&greeting, b"hello");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Transports(Arc<[Entry]>);

/// Entry of the registry.
#[derive(Clone)]
enum Entry {
    Transport(Arc<dyn Transport>),
    Opener(Arc<dyn SessionOpener>),
}

/// Schemes of this crate's transports that were not compiled in, each with the Cargo feature that
/// enables it.
const SWITCHED_OFF: &[(&str, &str)] = &[
    #[cfg(not(feature = "tcp"))]
    ("tcp", "tcp"),
    #[cfg(not(feature = "tls"))]
    ("tls", "tls"),
    #[cfg(not(feature = "quic"))]
    ("quic", "quic"),
    #[cfg(not(feature = "unix"))]
    ("unix", "unix"),
    #[cfg(not(feature = "exec"))]
    ("exec", "exec"),
    #[cfg(not(feature = "exec"))]
    ("ssh", "exec"),
];

impl Transports {
    /// Creates a registry without any transport or opener.
    #[must_use]
    pub fn empty() -> Self {
        Self(Arc::default())
    }

    /// Adds a transport. It takes precedence over those before it that have the same scheme, so
    /// that a transport of this crate can be replaced by one with other settings.
    #[must_use]
    pub fn with(self, transport: impl Transport) -> Self {
        self.with_entry(Entry::Transport(Arc::new(transport)))
    }

    /// Adds a session opener. It takes precedence over transports and openers before it that have
    /// the same scheme.
    #[must_use]
    pub fn with_opener(self, opener: impl SessionOpener) -> Self {
        self.with_entry(Entry::Opener(Arc::new(opener)))
    }

    fn with_entry(self, added: Entry) -> Self {
        Self([added].into_iter().chain(self.0.iter().cloned()).collect())
    }

    /// Returns the known schemes, in alphabetical order.
    #[must_use]
    pub fn schemes(&self) -> Vec<&str> {
        let mut schemes: Vec<&str> = self.0.iter().flat_map(|entry| entry.schemes()).copied().collect();
        schemes.sort_unstable();
        schemes.dedup();
        schemes
    }

    /// Returns the transport of the scheme, if there is one.
    #[must_use]
    pub fn get(&self, scheme: &str) -> Option<&dyn Transport> {
        match self.entry(scheme)? {
            Entry::Transport(transport) => Some(&**transport),
            Entry::Opener(_) => None,
        }
    }

    /// Returns the session opener of the scheme, if there is one.
    #[must_use]
    pub fn opener(&self, scheme: &str) -> Option<&dyn SessionOpener> {
        match self.entry(scheme)? {
            Entry::Transport(_) => None,
            Entry::Opener(opener) => Some(&**opener),
        }
    }

    /// Returns the transport of an address.
    ///
    /// # Errors
    ///
    /// [`AddressError::UnknownScheme`], which lists the known ones, and
    /// [`TransportError::Unsupported`] for the address of a session opener, and for a transport of
    /// this crate that was not compiled in.
    pub fn of(&self, address: &Address) -> Result<&dyn Transport, TransportError> {
        match self.entry_of(address)? {
            Entry::Transport(transport) => Ok(&**transport),
            Entry::Opener(_) => Err(TransportError::unsupported(address, NO_CHANNEL)),
        }
    }

    fn entry(&self, scheme: &str) -> Option<&Entry> {
        self.0.iter().find(|entry| entry.serves(scheme))
    }

    fn entry_of(&self, address: &Address) -> Result<&Entry, TransportError> {
        let scheme = address.scheme();
        if let Some(entry) = self.entry(scheme) {
            return Ok(entry);
        }
        if let Some((_, feature)) = SWITCHED_OFF.iter().find(|(switched_off, _)| *switched_off == scheme) {
            let why = format!("are switched off in this build; enable the Cargo feature {feature}");
            return Err(TransportError::unsupported(address, why));
        }
        let known = self.schemes().join(", ");
        Err(AddressError::UnknownScheme { scheme: scheme.to_owned(), known }.into())
    }

    /// Returns the properties of the way to `address`, as its transport or session opener declares
    /// them.
    ///
    /// # Errors
    ///
    /// [`AddressError::UnknownScheme`], and [`TransportError::Address`] if the transport or the
    /// opener does not accept the address.
    pub fn check(&self, address: &Address) -> Result<Properties, TransportError> {
        Ok(self.entry_of(address)?.check(address)?)
    }

    /// Opens a channel to the peer at `address`. Needs a tokio runtime with I/O and time.
    ///
    /// The transport ignores the key of the address, which is for the handshake. Dropping the
    /// future gives up the attempt; a child that was being started is ended.
    ///
    /// # Errors
    ///
    /// [`TransportError`], which hints at the cause.
    pub async fn dial(&self, address: &Address, with: &Dial) -> Result<Channel, TransportError> {
        self.check(address)?;
        self.of(address)?.dial(address, with).await
    }

    /// Opens a channel on this thread, without a runtime. Blocks for up to the time limit. Returns
    /// `None` if the transport needs a runtime.
    ///
    /// # Errors
    ///
    /// As [`dial`](Self::dial).
    pub fn dial_blocking(&self, address: &Address, with: &Dial) -> Result<Option<BlockingChannel>, TransportError> {
        self.check(address)?;
        self.of(address)?.dial_blocking(address, with).transpose()
    }

    /// Opens a channel to `address` over a channel that leads there already.
    ///
    /// # Errors
    ///
    /// Those of [`dial`](Self::dial), and [`TransportError::Unsupported`] for addresses that a
    /// stream of bytes does not lead to.
    pub async fn dial_over(&self, address: &Address, over: Channel, with: &Dial) -> Result<Channel, TransportError> {
        self.check(address)?;
        let transport = self.of(address)?;
        if transport.tunnel_target(address).is_none() {
            return Err(TransportError::unsupported(
                address,
                "cannot be reached through a tunnel, which passes a stream of bytes",
            ));
        }
        transport.dial_over(address, over, with).await
    }

    /// Listens on `address`. Needs a tokio runtime with I/O and time.
    ///
    /// # Errors
    ///
    /// [`TransportError`]; addresses that can only be dialled are [`TransportError::Unsupported`].
    pub async fn bind(&self, address: &Address, with: &Bind) -> Result<Listener, TransportError> {
        self.check(address)?;
        self.of(address)?.bind(address, with).await
    }

    /// Checks that `pattern` can stand for an address that these transports serve, by the rules of
    /// [`matches`](Self::matches). Patterns that stand for nothing are mostly misspelt.
    ///
    /// # Errors
    ///
    /// [`AddressError::Pattern`]; and [`AddressError::UnknownScheme`], which lists the known ones.
    pub fn check_pattern(&self, pattern: &str) -> Result<(), AddressError> {
        let Some(scheme) = scheme_of_pattern(pattern)? else { return Ok(()) };
        let is_known = self.0.iter().any(|entry| {
            entry.serves(scheme) || (scheme.contains('*') && entry.schemes().iter().any(|known| glob(scheme, known)))
        });
        if is_known {
            return Ok(());
        }
        Err(AddressError::UnknownScheme { scheme: scheme.to_owned(), known: self.schemes().join(", ") })
    }

    /// Returns true if `pattern` stands for `address`.
    ///
    /// A pattern is an address in which `*` stands for any text within one part: the scheme, the
    /// host or the port. A pattern without a port stands for all ports. `*` alone stands for any
    /// address with a host. A pattern for IP addresses, such as `tcp://10.0.0.*`, stands for no
    /// host name: the owner of `10.0.0.example.org` decides where that name leads. A user or
    /// parameters in the address have to be in the pattern, too. The key is ignored.
    ///
    /// Opaque addresses, such as paths, and addresses at which programs are started need a pattern
    /// that begins with the scheme itself.
    #[must_use]
    pub fn matches(&self, pattern: &str, address: &Address) -> bool {
        let Ok(entry) = self.entry_of(address) else {
            // Nothing is known of the address, so the pattern must be the same text.
            return pattern == address.to_string();
        };
        match (entry.check(address), entry.canonical(address)) {
            (Ok(properties), Ok(canonical)) => is_covered(pattern, &canonical, properties.starts_programs),
            _ => false,
        }
    }
}

const NO_CHANNEL: &str = "lead to a session, and to no channel that could be dialled, listened on or tunnelled to; \
     connect there, as the last stop";

impl Entry {
    fn schemes(&self) -> &[&str] {
        match self {
            Self::Transport(transport) => transport.schemes(),
            Self::Opener(opener) => opener.schemes(),
        }
    }

    fn serves(&self, scheme: &str) -> bool {
        match self {
            Self::Transport(transport) => transport.schemes().contains(&scheme),
            Self::Opener(opener) => opener.serves(scheme),
        }
    }

    fn check(&self, at: &Address) -> Result<Properties, AddressError> {
        match self {
            Self::Transport(transport) => transport.check(at),
            Self::Opener(opener) => opener.check(at),
        }
    }

    fn canonical(&self, at: &Address) -> Result<Address, AddressError> {
        match self {
            Self::Transport(transport) => transport.canonical(at),
            Self::Opener(opener) => opener.canonical(at),
        }
    }
}

impl fmt::Debug for Transports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Transports").field(&self.schemes()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_operation_that_a_transport_lacks_is_unsupported_and_says_why() {
        let exec: Address = "exec:cat".parse().unwrap();
        let error = Transports::default().bind(&exec, &Bind::default()).await.unwrap_err();
        assert!(matches!(error, TransportError::Unsupported { .. }), "{error:?}");
        let memory: Address = "memory:registry-test".parse().unwrap();
        assert!(Transports::default().dial_blocking(&memory, &Dial::default()).unwrap().is_none());
    }

    #[tokio::test]
    async fn an_unknown_scheme_is_an_error_that_lists_the_known_ones() {
        let address: Address = "carrier-pigeon://roof".parse().unwrap();
        let error = Transports::default().dial(&address, &Dial::default()).await.unwrap_err();
        assert!(matches!(error, TransportError::Address(_)), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("carrier-pigeon:") && text.contains("memory"), "{text}");
        assert!(Transports::empty().dial(&"memory:x".parse().unwrap(), &Dial::default()).await.is_err());
    }

    #[test]
    fn what_is_undeclared_is_cautious() {
        let properties = Properties::default();
        assert!(!properties.is_local() && !properties.encrypted && properties.starts_programs);
    }
}
