//! The handshake: identities, version, features and limits are agreed before a session begins.
//!
//! The side that dialled speaks first: magic and [`Hello`]. The other side answers with its own
//! magic and `Hello`. Then the sides exchange proofs of identity for as many rounds as the method
//! needs, which also defines the side that begins, until both sides have sent `Accept`. Either side
//! may send `Reject` with an error instead, and close. The role of each side is part of its `Hello`
//! and does not depend on the side that dialled.

use std::time::{Duration, Instant};

use bytes::{Buf, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

use super::frame::{FrameHeader, HEADER_LEN, Kind};
use super::keep_alive_defaults::KEEP_ALIVE;
use crate::error::{ErrorKind, Result, RpcError};

/// First bytes from both sides: a byte that is no text, a name, and line ends that a text-mode
/// channel would change.
pub const MAGIC: [u8; 8] = *b"\x93rpc\r\n\x1a\n";

/// Oldest version of the protocol that this crate speaks.
pub const VERSION_MIN: u16 = 1;

/// Newest version of the protocol that this crate speaks.
pub const VERSION_MAX: u16 = 1;

/// Name of the feature of peers that keep results for later requests
/// ([`Request::pipe`](crate::Request::pipe)).
pub const PIPES: &str = "pipes";

/// Longest body of a frame during the handshake, in bytes.
const MAX_BODY: usize = 64 << 10;

/// Largest number of elements in a list of a hello: empty strings take little on the wire and much
/// in memory.
const MAX_LIST: usize = 64;

/// Largest number of rounds of proofs.
const MAX_ROUNDS: u32 = 16;

/// Role of a side in the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Makes requests.
    Client,
    /// Serves requests.
    Server,
}

impl Role {
    fn other(self) -> Self {
        match self {
            Self::Client => Self::Server,
            Self::Server => Self::Client,
        }
    }
}

/// Offer of one side. On the wire a MessagePack map keyed by field names; unknown fields are
/// skipped.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// Oldest version that the side speaks.
    pub version_min: u16,
    /// Newest version that the side speaks. The highest common version is used.
    pub version_max: u16,
    /// Optional features by name. A feature is used if both sides have it.
    #[serde(default)]
    pub features: Vec<String>,
    /// Role that the side wants.
    pub role: Role,
    /// Methods by which the side can prove its identity and check the peer's, the preferred one
    /// first. The answer to a hello has exactly one, which both sides use.
    pub identities: Vec<String>,
    /// Client: the kind of server that it looks for. Server: its own kind. Empty for any.
    #[serde(default)]
    pub key: String,
    /// Client: the named workspace to use; empty for a private one.
    #[serde(default)]
    pub workspace: String,
    /// Client: the ticket for this server from a tracker, valid for one session; empty without one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub ticket: String,
    /// Client: addresses to forward to, the next one first; empty if this server is to serve the
    /// session.
    #[serde(default)]
    pub forward: Vec<String>,
    /// Client: asks for a tunnel instead of a session. After the handshake the bytes of the channel
    /// are forwarded to and from the one address in `forward`, and a handshake with the peer at
    /// that address follows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tunnel: bool,
    /// Client that is itself a hop: ids of the servers that the chain has passed, in order. Each
    /// server makes up its own id, and refuses a path that contains it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub path: Vec<String>,
    /// Client that is itself a hop: the identity of its own client, proven to it or asserted to it.
    /// Honoured only from hops that the server trusts. Empty for a client that is no hop.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub on_behalf: String,
    /// Side that was dialled: it is a relay. After the handshake the bytes of the channel are
    /// forwarded to and from a server with the client's `key`, and a handshake with that server
    /// follows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub relay: bool,
    /// Program and version, for display only.
    #[serde(default)]
    pub agent: String,
    /// Largest message that the side accepts, body and payload, in bytes.
    pub max_message: u64,
    /// Largest payload of one frame that the side accepts, in bytes.
    pub chunk: u32,
    /// Server: largest number of unanswered requests at one time.
    pub max_requests: u32,
    /// Bytes of large messages that may be in flight to the side at one time. At least
    /// `max_message`.
    pub window: u64,
    /// Time without received bytes after which the side sends a ping, in milliseconds.
    pub keep_alive_ms: u64,
}

/// Both hellos. A proof that covers them cannot be replayed in another handshake, and proves that
/// no one changed them on the way.
#[derive(Clone, Copy, Debug)]
pub struct Transcript<'a> {
    /// True if this side dialled.
    pub dialler: bool,
    /// Body of the hello of the side that dialled, as it was sent.
    pub dialler_hello: &'a [u8],
    /// Body of the hello that answered it.
    pub acceptor_hello: &'a [u8],
}

/// Method by which a side proves its identity and checks the peer's. One per handshake.
pub trait Identity: Send {
    /// Returns the method's name. Both sides must use the same method.
    fn method(&self) -> &str;

    /// Starts the method. Called once, before the first step, when both sides have agreed on it.
    fn begin(&mut self, _transcript: Transcript<'_>) {}

    /// Handles the peer's last proof, if there is one yet, and returns the next step.
    ///
    /// # Errors
    ///
    /// The reason to refuse the peer. The peer is told.
    fn step(&mut self, received: Option<&[u8]>) -> Result<IdentityStep>;
}

/// Next step in a proof of identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdentityStep {
    /// Send these bytes and wait for the answer.
    Send(Vec<u8>),
    /// Wait for the peer.
    Wait,
    /// The peer's identity is proven.
    Proven {
        /// Name of the peer from here on.
        peer: String,
        /// Last proof to send, if the peer needs one.
        last: Option<Vec<u8>>,
    },
}

/// Name of every peer that has proven no identity.
pub const ANONYMOUS: &str = "anonymous";

/// Method without any proof: every peer is [`ANONYMOUS`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Anonymous;

impl Identity for Anonymous {
    fn method(&self) -> &str {
        "none"
    }

    fn step(&mut self, _: Option<&[u8]>) -> Result<IdentityStep> {
        Ok(IdentityStep::Proven { peer: ANONYMOUS.into(), last: None })
    }
}

/// Configuration of one side of a handshake.
pub struct HandshakeConfig {
    /// Offer of this side. Versions and identities are filled in.
    pub hello: Hello,
    /// Methods by which this side can prove its identity, the preferred one first. The order of the
    /// side that dialled decides.
    pub identities: Vec<Box<dyn Identity>>,
    /// True if our `Accept` waits for [`Handshake::approve`]. A server that opens the session first
    /// uses this, so that a failure answers the connection attempt.
    pub hold: bool,
    /// Time limit for the whole handshake.
    pub timeout: Duration,
}

impl Hello {
    /// Returns an offer with this crate's versions and default limits.
    pub fn new(role: Role) -> Self {
        Self {
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            features: Vec::new(),
            role,
            identities: Vec::new(),
            key: String::new(),
            workspace: String::new(),
            ticket: String::new(),
            forward: Vec::new(),
            tunnel: false,
            path: Vec::new(),
            on_behalf: String::new(),
            relay: false,
            agent: concat!("rpc/", env!("CARGO_PKG_VERSION")).to_owned(),
            max_message: 64 << 20,
            chunk: 1 << 20,
            max_requests: 1024,
            window: 65 << 20,
            keep_alive_ms: KEEP_ALIVE.as_millis() as u64,
        }
    }
}

/// Result of a handshake.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Negotiated {
    /// Protocol version of the session.
    pub version: u16,
    /// Role of this side.
    pub role: Role,
    /// Offer of this side.
    pub ours: Hello,
    /// Offer of the peer.
    pub theirs: Hello,
    /// Proven identity of the peer.
    pub identity: String,
}

impl Negotiated {
    /// Returns true if both sides have the optional feature.
    pub fn has_feature(&self, feature: &str) -> bool {
        let has = |hello: &Hello| hello.features.iter().any(|name| name == feature);
        has(&self.ours) && has(&self.theirs)
    }

    /// Returns the name of the [method](Identity::method) by which the peer has proven its
    /// identity.
    pub fn identity_method(&self) -> &str {
        self.ours.identities.first().map_or("", String::as_str)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum HandshakeStage {
    Magic,
    Hello,
    Proof,
    Over,
}

/// One side of a handshake.
pub struct Handshake {
    config: HandshakeConfig,
    dialler: bool,
    /// True if the side that dialled may also be a server.
    takes_servers: bool,
    /// True once our magic has been put into the output.
    greeted: bool,
    stage: HandshakeStage,
    theirs: Option<Hello>,
    /// Body of our hello, once it has been sent.
    our_hello: Vec<u8>,
    /// Name of the peer, once it has been proven.
    proven: Option<String>,
    accepted_by_peer: bool,
    /// Number of pings whose pongs have not arrived.
    unanswered_pings: u32,
    rounds: u32,
    output: BytesMut,
    deadline: Instant,
}

impl Handshake {
    /// Creates the side that dialled. It has output at once.
    pub fn dial(config: HandshakeConfig, now: Instant) -> Self {
        let mut this = Self::new(config, true, now);
        this.send_hello();
        this
    }

    /// Creates the side that was dialled.
    pub fn accept(config: HandshakeConfig, now: Instant) -> Self {
        Self::new(config, false, now)
    }

    /// Lets the side that dialled be a server as well; this side is then the client. No effect on a
    /// side that dialled.
    #[must_use]
    pub fn take_servers(mut self) -> Self {
        self.takes_servers = !self.dialler;
        self
    }

    fn new(mut config: HandshakeConfig, dialler: bool, now: Instant) -> Self {
        config.hello.identities = config.identities.iter().map(|identity| identity.method().to_owned()).collect();
        config.hello.window = config.hello.window.max(config.hello.max_message);
        let deadline = now + config.timeout;
        Self {
            config,
            dialler,
            takes_servers: false,
            greeted: false,
            stage: HandshakeStage::Magic,
            theirs: None,
            our_hello: Vec::new(),
            proven: None,
            accepted_by_peer: false,
            unanswered_pings: 0,
            rounds: 0,
            output: BytesMut::new(),
            deadline,
        }
    }

    /// Handles received bytes, and leaves those that belong to the session in `input`. Returns
    /// `Some` once the handshake is complete; output that is left then must still be written.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`], or any other objection of either side. An objection of this side is
    /// in the output, for the peer.
    pub fn handle_input(&mut self, input: &mut BytesMut) -> Result<Option<Negotiated>> {
        match self.advance(input) {
            Err(error) if self.stage != HandshakeStage::Over => {
                // A peer that does not speak this protocol gets no answer.
                if self.stage != HandshakeStage::Magic || self.dialler {
                    self.send(Kind::Reject, &error.to_wire());
                }
                self.stage = HandshakeStage::Over;
                Err(error)
            }
            outcome => outcome,
        }
    }

    /// Returns the peer's offer and name, when only [`approve`](Self::approve) is missing.
    pub fn awaits_approval(&self) -> Option<(&Hello, &str)> {
        match (&self.theirs, &self.proven) {
            (Some(theirs), Some(peer)) if self.config.hold && self.stage != HandshakeStage::Over => {
                Some((theirs, peer))
            }
            _ => None,
        }
    }

    /// Returns the name of the [method](Identity::method) by which the peer has proven its
    /// identity; `None` before.
    pub fn identity_method(&self) -> Option<&str> {
        // The offer names the agreed method alone.
        self.proven.as_ref().and(self.config.hello.identities.first()).map(String::as_str)
    }

    /// Accepts the peer, after [`awaits_approval`](Self::awaits_approval). Returns `Some` if the
    /// peer's own `Accept` and all its pongs have already arrived, which completes the handshake.
    pub fn approve(&mut self) -> Option<Negotiated> {
        self.awaits_approval()?;
        self.config.hold = false;
        self.send(Kind::Accept, &[]);
        self.finished()
    }

    /// Sends a ping, to check that the peer is alive while one of the sides holds back its
    /// `Accept`. Any input is an answer.
    pub fn ping(&mut self) {
        if self.proven.is_some() && self.stage != HandshakeStage::Over {
            self.unanswered_pings += 1;
            self.send(Kind::Ping, &[]);
        }
    }

    /// Returns the peer's offer, once its identity is proven.
    pub fn proven(&self) -> Option<&Hello> {
        self.proven.as_ref().and(self.theirs.as_ref())
    }

    /// Refuses the peer. The reason is put into the output.
    pub fn refuse(&mut self, error: &RpcError) {
        self.stage = HandshakeStage::Over;
        self.send(Kind::Reject, &error.to_wire());
    }

    fn finished(&mut self) -> Option<Negotiated> {
        if self.config.hold || !self.accepted_by_peer || self.stage == HandshakeStage::Over {
            return None;
        }
        // A relay passes on what follows without reading it, and its client would take a pong for
        // the beginning of the server's handshake.
        if self.unanswered_pings > 0 {
            return None;
        }
        let (peer, theirs) = (self.proven.clone()?, self.theirs.clone()?);
        self.stage = HandshakeStage::Over;
        let ours = self.config.hello.clone();
        let version = ours.version_max.min(theirs.version_max);
        Some(Negotiated { version, role: ours.role, ours, theirs, identity: peer })
    }

    /// Takes the bytes to write.
    pub fn take_output(&mut self) -> Bytes {
        self.output.split().freeze()
    }

    /// Returns the time when [`handle_timeout`](Self::handle_timeout) must be called.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Handles the passage of time.
    ///
    /// # Errors
    ///
    /// The handshake's time limit has passed.
    pub fn handle_timeout(&mut self, now: Instant) -> Result<()> {
        if now < self.deadline {
            return Ok(());
        }
        let missing = match self.stage {
            HandshakeStage::Magic => "the peer has not said which protocol it speaks",
            _ => "the peer has not finished the handshake",
        };
        let text = format!("the time for a handshake is over (handshake_timeout), and {missing}");
        Err(RpcError::new(ErrorKind::PeerSilent, text))
    }

    /// Returns the error for an end of the stream during the handshake.
    pub fn end_of_stream(&self) -> RpcError {
        let when = match self.stage {
            HandshakeStage::Magic => {
                "before it said which protocol it speaks: is it a server of another kind, or at its limit?"
            }
            _ => "in the middle of the handshake",
        };
        RpcError::new(ErrorKind::Refused, format!("the peer closed the connection {when}"))
    }

    fn advance(&mut self, input: &mut BytesMut) -> Result<Option<Negotiated>> {
        if self.stage == HandshakeStage::Magic {
            let len = input.len().min(MAGIC.len());
            if input[..len] != MAGIC[..len] {
                let shown: String =
                    input.iter().take(16).flat_map(|byte| byte.escape_ascii()).map(char::from).collect();
                return Err(RpcError::new(
                    ErrorKind::Protocol,
                    format!(
                        "the peer does not speak this protocol: it began with \"{shown}\"{}",
                        hint(input, self.dialler)
                    ),
                ));
            }
            if input.len() < MAGIC.len() {
                return Ok(None);
            }
            input.advance(MAGIC.len());
            self.stage = HandshakeStage::Hello;
        }
        while self.stage != HandshakeStage::Over {
            let Some(header) = input.first_chunk::<HEADER_LEN>() else { return Ok(None) };
            let header = FrameHeader::decode(header, MAX_BODY, 0)?;
            let len = HEADER_LEN + header.body_len as usize;
            if input.len() < len {
                return Ok(None);
            }
            let frame = input.split_to(len);
            self.handle_frame(header.kind, &frame[HEADER_LEN..])?;
            if let Some(negotiated) = self.finished() {
                return Ok(Some(negotiated));
            }
        }
        Ok(None)
    }

    fn handle_frame(&mut self, kind: Kind, body: &[u8]) -> Result<()> {
        match (self.stage, kind) {
            (_, Kind::Reject) => {
                self.stage = HandshakeStage::Over;
                let malformed = || RpcError::new(ErrorKind::Refused, "the peer refused the session");
                Err(RpcError::from_wire(body).map_or_else(|_| malformed(), RpcError::from_next_hop))
            }
            (HandshakeStage::Hello, Kind::Hello) => self.handle_hello(body),
            (HandshakeStage::Proof, Kind::Proof) => {
                self.rounds += 1;
                if self.proven.is_some() || self.rounds > MAX_ROUNDS {
                    return Err(RpcError::new(ErrorKind::Protocol, "the peer sent more proofs than its method has"));
                }
                self.step(Some(body))
            }
            (HandshakeStage::Proof, Kind::Accept) if !self.accepted_by_peer => {
                self.accepted_by_peer = true;
                Ok(())
            }
            // A side that holds back its `Accept` for long checks that the peer is alive.
            (HandshakeStage::Proof, Kind::Ping) if self.proven.is_some() => {
                if self.output.len() < MAX_BODY {
                    self.send(Kind::Pong, &[]);
                }
                Ok(())
            }
            (HandshakeStage::Proof, Kind::Pong) if self.proven.is_some() => {
                self.unanswered_pings = self.unanswered_pings.saturating_sub(1);
                Ok(())
            }
            (_, kind) => Err(RpcError::new(
                ErrorKind::Protocol,
                format!("the peer sent an unexpected {kind:?} frame in the handshake"),
            )),
        }
    }

    fn handle_hello(&mut self, body: &[u8]) -> Result<()> {
        let malformed = |error| RpcError::new(ErrorKind::Protocol, format!("malformed hello: {error}"));
        let theirs: Hello = crate::msgpack::unpack_map(body).map_err(malformed)?;
        let lists = [&theirs.features, &theirs.identities, &theirs.forward, &theirs.path];
        if lists.iter().any(|list| list.len() > MAX_LIST) {
            let text = format!("a list of the hello has more than {MAX_LIST} elements");
            return Err(RpcError::new(ErrorKind::Protocol, text));
        }
        let ours = &self.config.hello;
        self.theirs = Some(theirs.clone());
        if theirs.version_max < ours.version_min || theirs.version_min > ours.version_max {
            let older = if theirs.version_max < ours.version_min { &theirs } else { ours };
            return Err(RpcError::new(
                ErrorKind::VersionMismatch,
                format!(
                    "no common protocol version: one side speaks {} to {} ({}), the other {} to {} ({}): update the \
                     side that speaks {} to {}",
                    ours.version_min,
                    ours.version_max,
                    ours.agent,
                    theirs.version_min,
                    theirs.version_max,
                    theirs.agent,
                    older.version_min,
                    older.version_max
                ),
            ));
        }
        if theirs.role != ours.role.other() && self.takes_servers {
            self.config.hello.role = theirs.role.other();
        }
        let ours = &self.config.hello;
        if theirs.role != ours.role.other() {
            let role = ours.role;
            return Err(RpcError::new(
                ErrorKind::Refused,
                format!("both sides want to be the {role:?}").to_lowercase(),
            ));
        }
        let Some(method) = self.common_method(&theirs) else {
            let (ours, theirs) = (clip(&ours.identities.join(", ")), clip(&theirs.identities.join(", ")));
            return Err(RpcError::new(
                ErrorKind::Unauthenticated,
                format!("no common method to prove identity: one side has '{ours}', the other '{theirs}'"),
            ));
        };
        let (client, server) = if ours.role == Role::Client { (ours, &theirs) } else { (&theirs, ours) };
        let served_here = client.forward.is_empty() && !server.relay;
        if !client.key.is_empty() && served_here && client.key != server.key {
            return Err(RpcError::new(
                ErrorKind::Refused,
                format!("the client asks for key '{}', and the server has '{}'", clip(&client.key), clip(&server.key)),
            ));
        }
        if theirs.chunk == 0
            || theirs.max_requests == 0
            || theirs.max_message == 0
            || theirs.window < theirs.max_message
        {
            return Err(RpcError::new(ErrorKind::Protocol, "the peer offers limits that let nothing pass"));
        }
        self.stage = HandshakeStage::Proof;
        // From here on only the chosen method is left.
        let method = self.config.identities.swap_remove(method);
        self.config.hello.identities = vec![method.method().to_owned()];
        self.config.identities = vec![method];
        if !self.dialler {
            self.send_hello();
        }
        let ours = std::mem::take(&mut self.our_hello);
        let (dialler_hello, acceptor_hello) = if self.dialler { (&*ours, body) } else { (body, &*ours) };
        let transcript = Transcript { dialler: self.dialler, dialler_hello, acceptor_hello };
        self.config.identities[0].begin(transcript);
        // A method in which the dialler speaks first waits here; one without proofs is done at
        // once.
        self.step(None)
    }

    /// Returns the position of the method to use: the dialler's first one that the acceptor has,
    /// too.
    fn common_method(&self, theirs: &Hello) -> Option<usize> {
        let position = |name: &String| self.config.identities.iter().position(|ours| ours.method() == name);
        match &theirs.identities[..] {
            // The answer to our hello is a decision, so it must name exactly one method.
            [chosen] if self.dialler => position(chosen),
            _ if self.dialler => None,
            offered => offered.iter().find_map(position),
        }
    }

    fn step(&mut self, received: Option<&[u8]>) -> Result<()> {
        match self.config.identities[0].step(received)? {
            IdentityStep::Wait => {}
            IdentityStep::Send(proof) => self.send(Kind::Proof, &proof),
            IdentityStep::Proven { peer, last } => {
                if let Some(last) = last {
                    self.send(Kind::Proof, &last);
                }
                self.proven = Some(peer);
                if !self.config.hold {
                    self.send(Kind::Accept, &[]);
                }
            }
        }
        Ok(())
    }

    fn send_hello(&mut self) {
        let body = rmp_serde::to_vec_named(&self.config.hello).unwrap_or_default();
        self.send(Kind::Hello, &body);
        self.our_hello = body;
    }

    fn send(&mut self, kind: Kind, body: &[u8]) {
        if !std::mem::replace(&mut self.greeted, true) {
            self.output.extend_from_slice(&MAGIC);
        }
        self.output.extend_from_slice(&FrameHeader::control(kind, body.len() as u32).encode());
        self.output.extend_from_slice(body);
    }
}

impl std::fmt::Debug for Handshake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handshake").field("dialler", &self.dialler).finish_non_exhaustive()
    }
}

/// Returns the beginning of a text that a peer chose.
fn clip(text: &str) -> String {
    text.chars().take(64).collect()
}

/// Returns a hint at the protocol that a peer speaks by its first bytes, for the side that dialled
/// it, or was dialled by it.
fn hint(first: &[u8], dialled: bool) -> &'static str {
    match first {
        // An alert, or a part of a handshake.
        [0x15 | 0x16, 0x03, ..] if dialled => "; it speaks TLS: write tls:// or wss:// in its address",
        [0x15 | 0x16, 0x03, ..] => "; it speaks TLS, and this address is not encrypted",
        [b'H', b'T', b'T', b'P', b'/', ..] => "; it is a web server",
        _ => "",
    }
}
