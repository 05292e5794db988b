//! Security of a channel: facts about its far end that are known before the protocol begins.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rpc_core::{ErrorKind, RpcError};

use super::peer_identity::PeerIdentity;

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
    /// True if the connection had carried another channel before this one was opened. Set on the
    /// dialling side.
    pub(crate) reuses_connection: bool,
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
            reuses_connection: self.reuses_connection,
        }
    }

    /// Returns the identity that the peer has proven before on the same connection, under the rules
    /// with the number `rules`.
    pub(crate) fn proven_earlier(&self, rules: u64) -> Option<PeerIdentity> {
        self.connection.as_ref().and_then(|connection| connection.proven(rules))
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

    /// Returns true if the channel is encrypted, at least as far as a hop that forwards it.
    pub(crate) fn is_protected(&self) -> bool {
        self.is_encrypted() || self.first_link_encrypted
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
    proven: Mutex<Option<(u64, PeerIdentity)>>,
    /// True once the peer has not answered on one of the channels.
    suspect: AtomicBool,
    /// Number of sessions in which the peer is served without a proof, and the function that sets
    /// its limits. `None` once the peer has proven its identity, after which its limits stay.
    probation: Mutex<Option<(u32, SetLimits)>>,
    /// Function that returns how often anything was received from the peer, and the round-trip
    /// time.
    pulse: Option<Pulse>,
}

/// Standing of the peer of a connection, by which the transport limits the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "quic"), allow(dead_code, reason = "other transports have one channel per connection"))]
pub(crate) enum Standing {
    /// The peer has proven its identity.
    Proven,
    /// The peer has proven nothing, and is served in so many sessions that need no proof.
    Unproven { sessions: u32 },
}

type SetLimits = Box<dyn FnMut(Standing) + Send>;

/// Mark of a session in which a peer is served without a proof of identity.
pub(crate) struct UnprovenSession(Arc<Connection>);

type Pulse = Box<dyn Fn() -> (u64, Duration) + Send + Sync>;

/// Least time to wait for a peer that may be gone. A live peer acknowledges what it gets, even if
/// its answer takes longer.
const SHORTEST_SILENCE: Duration = Duration::from_secs(1);

/// Least time in round trips, for peers that are far away.
const SILENT_ROUND_TRIPS: u32 = 6;

impl Connection {
    /// Remembers the identity that a handshake on one of the channels has proven under the rules
    /// with the number `rules`.
    pub(crate) fn prove(&self, rules: u64, peer: PeerIdentity) {
        *self.proven.lock() = Some((rules, peer));
        let probation = self.probation.lock().take();
        if let Some((_, mut set_limits)) = probation {
            set_limits(Standing::Proven);
        }
    }

    /// Counts a session in which the peer is served without a proof, until the mark is dropped.
    pub(crate) fn serve_unproven(self: &Arc<Self>) -> UnprovenSession {
        self.count_unproven(|sessions| sessions + 1);
        UnprovenSession(self.clone())
    }

    fn count_unproven(&self, change: impl FnOnce(u32) -> u32) {
        // The lock is held so that the limits are set in the order of the changes.
        if let Some((sessions, set_limits)) = &mut *self.probation.lock() {
            *sessions = change(*sessions);
            set_limits(Standing::Unproven { sessions: *sessions });
        }
    }

    /// Creates a connection whose peer has low limits until it has proven its identity, and while
    /// it is not served without a proof. `set_limits` is called for each change of its standing.
    #[cfg(feature = "quic")]
    pub(crate) fn on_probation(set_limits: impl FnMut(Standing) + Send + 'static) -> Self {
        Self { probation: Mutex::new(Some((0, Box::new(set_limits)))), ..Self::default() }
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

    /// Returns true if the peer has not proven its identity and is not served without a proof.
    #[cfg(feature = "quic")]
    pub(crate) fn is_on_probation(&self) -> bool {
        self.probation.lock().as_ref().is_some_and(|(sessions, _)| *sessions == 0)
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
    fn proven(&self, rules: u64) -> Option<PeerIdentity> {
        let proven = self.proven.lock();
        proven.as_ref().filter(|(under, _)| *under == rules).map(|(_, peer)| peer.clone())
    }
}

impl Drop for UnprovenSession {
    fn drop(&mut self) {
        self.0.count_unproven(|sessions| sessions - 1);
    }
}

#[cfg(all(test, feature = "quic"))]
mod tests {
    use super::*;

    #[test]
    fn probation_returns_with_the_end_of_the_last_session_without_a_proof() {
        let standings = Arc::new(Mutex::new(Vec::new()));
        let recorded = standings.clone();
        let connection = Arc::new(Connection::on_probation(move |standing| recorded.lock().push(standing)));
        let taken = || std::mem::take(&mut *standings.lock());
        let unproven = |sessions| Standing::Unproven { sessions };
        assert!(connection.is_on_probation());

        let (first, second) = (connection.serve_unproven(), connection.serve_unproven());
        assert!(!connection.is_on_probation());
        drop((first, second));
        assert!(connection.is_on_probation(), "the peer has proven nothing");
        assert_eq!(taken(), [1, 2, 1, 0].map(unproven));

        let session = connection.serve_unproven();
        connection.prove(0, PeerIdentity::Token("alice".to_owned()));
        assert_eq!(taken(), [unproven(1), Standing::Proven]);
        drop(session);
        assert!(!connection.is_on_probation(), "a proof is for good");
        assert_eq!(taken(), []);
    }
}
