//! Security of a channel: facts about its far end that are known before the protocol begins.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rpc_core::{ErrorKind, RpcError};

/// Facts about the far end of a channel that are known before the protocol begins.
///
/// A value that says more than the default comes with an encrypted stream. It cannot be copied, so
/// that what secures one stream is claimed for one channel. The transport puts it on the right one.
#[derive(Default)]
pub struct Security {
    /// Value that only the two ends of this TLS connection have.
    pub(crate) binding: Option<[u8; 32]>,
    /// True if the channel runs over another channel, whose first part is encrypted.
    pub(crate) first_link_encrypted: bool,
    /// True if the dialling side has checked the other side's certificate.
    pub(crate) server_verified: bool,
    /// Name by which the dialling side is known from its certificate. Set on the dialled side.
    pub(crate) certificate: Option<String>,
    /// Keys of the servers that this certificate is for; empty for all servers.
    pub(crate) keys: Arc<[String]>,
    /// True if the dialling side has shown a certificate. Set on the dialling side.
    pub(crate) showed_certificate: bool,
    /// True if the far end has started this process, and need not prove anything to it.
    pub(crate) is_parent: bool,
    /// Connection that carries this channel beside others.
    pub(crate) connection: Option<Arc<Connection>>,
}

impl Security {
    /// Returns a copy, for the stages of one connection and the channels that it carries. Not
    /// public, so that transports of other crates cannot put one stream's security on another.
    pub(crate) fn duplicate(&self) -> Self {
        Self {
            binding: self.binding,
            first_link_encrypted: self.first_link_encrypted,
            server_verified: self.server_verified,
            certificate: self.certificate.clone(),
            keys: self.keys.clone(),
            showed_certificate: self.showed_certificate,
            is_parent: self.is_parent,
            connection: self.connection.clone(),
        }
    }

    /// Checks whether a client with this proven identity may use a server with the key `key`, or be
    /// forwarded to one.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`]: the client's certificate is for servers with other keys.
    pub(crate) fn may_use(&self, identity: &str, key: &str) -> rpc_core::Result<()> {
        let limited = self.certificate.as_deref() == Some(identity) && !self.keys.is_empty();
        if !limited || self.keys.iter().any(|allowed| allowed == key) {
            return Ok(());
        }
        let (keys, this) = (self.keys.join(", "), if key.is_empty() { "one without a key" } else { key });
        let text = format!("the client's certificate is for servers with the key {keys}, and this is {this}");
        Err(RpcError::new(ErrorKind::Refused, text))
    }

    /// Returns true if the channel can be neither read nor changed on its route. The far end need
    /// not have been verified.
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        self.binding.is_some()
    }
}

impl fmt::Debug for Security {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Security")
            .field("encrypted", &self.is_encrypted())
            .field("certificate", &self.certificate)
            .finish_non_exhaustive()
    }
}

/// State that the channels of one connection share.
#[derive(Default)]
pub(crate) struct Connection {
    /// Identity that the peer has proven on one of the channels, and the number of the rules that
    /// applied.
    proven: Mutex<Option<(u64, String)>>,
    /// True once the peer has not answered on one of the channels.
    suspect: AtomicBool,
    /// Callback that raises the peer's limits to those of proven peers. Called once, when the peer
    /// has proven its identity or is served without a proof.
    admit: Mutex<Option<Admit>>,
    /// Function that returns how often anything was received from the peer, and the round-trip
    /// time.
    pulse: Option<Pulse>,
}

type Admit = Box<dyn FnOnce() + Send>;

type Pulse = Box<dyn Fn() -> (u64, Duration) + Send + Sync>;

/// Least time to wait for a peer that may be gone. A live peer acknowledges what it gets, even if
/// its answer takes longer.
const SHORTEST_SILENCE: Duration = Duration::from_secs(1);

/// Least time in round trips, for peers that are far away.
const SILENT_ROUND_TRIPS: u32 = 6;

impl Connection {
    /// Remembers the identity that a handshake on one of the channels has proven under the rules
    /// with the number `rules`.
    pub(crate) fn prove(&self, rules: u64, peer: &str) {
        *self.proven.lock() = Some((rules, peer.to_owned()));
        self.admit();
    }

    /// Ends the probation of a peer, also of one that is served without a proof. Its limits are
    /// those of proven peers from now on.
    pub(crate) fn admit(&self) {
        let admit = self.admit.lock().take();
        if let Some(admit) = admit {
            admit();
        }
    }

    /// Creates a connection whose peer has low limits until it has proven its identity or is served
    /// without a proof. `admit` raises them.
    #[cfg(feature = "quic")]
    pub(crate) fn on_probation(admit: impl FnOnce() + Send + 'static) -> Self {
        Self { admit: Mutex::new(Some(Box::new(admit))), ..Self::default() }
    }

    /// Creates a connection with a pulse.
    #[cfg(feature = "quic")]
    pub(crate) fn with_pulse(pulse: impl Fn() -> (u64, Duration) + Send + Sync + 'static) -> Self {
        Self { pulse: Some(Box::new(pulse)), ..Self::default() }
    }

    /// Resolves when nothing has been received from the peer for longer than an acknowledgement
    /// takes, after the caller has sent something. Never resolves if anything is received.
    pub(crate) async fn silence(&self) {
        if let Some(pulse) = &self.pulse {
            let (before, round_trip) = pulse();
            tokio::time::sleep(SHORTEST_SILENCE.max(round_trip * SILENT_ROUND_TRIPS)).await;
            if pulse().0 == before {
                return;
            }
        }
        std::future::pending().await
    }

    /// Returns true until the peer has proven its identity or is served without a proof.
    #[cfg(feature = "quic")]
    pub(crate) fn is_on_probation(&self) -> bool {
        self.admit.lock().is_some()
    }

    /// Remembers that the peer does not answer, although the connection has not ended.
    pub(crate) fn suspect(&self) {
        self.suspect.store(true, Ordering::Relaxed);
    }

    /// Returns true if the peer may be gone.
    #[cfg(feature = "quic")]
    pub(crate) fn is_suspect(&self) -> bool {
        self.suspect.load(Ordering::Relaxed)
    }

    /// Returns the identity that was proven under the rules with this number.
    pub(super) fn proven(&self, rules: u64) -> Option<String> {
        let proven = self.proven.lock();
        proven.as_ref().filter(|(under, _)| *under == rules).map(|(_, peer)| peer.clone())
    }
}
