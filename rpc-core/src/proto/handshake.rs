//! The handshake: who we are to each other, which version we speak, and how much each side takes.
//!
//! Whoever dialled speaks first: magic and [`Hello`]. The other side answers with its own magic and `Hello`. Then proofs of
//! identity go to and fro for as many rounds as the method needs, which also says who begins, until both sides have sent `Accept`.
//! Either side may send `Reject` with an error instead, and close. Who serves is part of the `Hello`, and independent of
//! who dialled.

use std::time::{Duration, Instant};

use bytes::{Buf, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

use super::frame::{FrameHeader, HEADER_LEN, Kind};
use crate::error::{ErrorKind, Result, RpcError};

/// The first bytes of both sides: a byte that is no text, a name, and line ends that a text-mode channel would change.
pub const MAGIC: [u8; 8] = *b"\x93rpc\r\n\x1a\n";

/// The oldest version of the protocol that this crate speaks.
pub const VERSION_MIN: u16 = 1;

/// The newest version of the protocol that this crate speaks.
pub const VERSION_MAX: u16 = 1;

/// The longest body of a frame during the handshake.
const MAX_BODY: usize = 64 << 10;

/// How many elements the lists of a hello may have: empty texts take little on the wire and much in memory.
const MAX_LIST: usize = 64;

/// How many rounds of proofs a method may take.
const MAX_ROUNDS: u32 = 16;

/// Which part a side plays in the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// It makes requests.
    Client,
    /// It serves them.
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

/// What a side offers. On the wire a MessagePack map by field names; unknown fields are skipped.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// The oldest version that the side speaks.
    pub version_min: u16,
    /// The newest version that the side speaks. The highest common one is used.
    pub version_max: u16,
    /// Optional abilities by name. One is used if both sides have it.
    #[serde(default)]
    pub features: Vec<String>,
    /// The part that the side wants to play.
    pub role: Role,
    /// The methods by which the side can prove its identity and take proof, the preferred one first. The answer to a hello
    /// has exactly one, which both sides use.
    pub identities: Vec<String>,
    /// Client: the kind of server it looks for. Server: what it is. Empty for any.
    #[serde(default)]
    pub key: String,
    /// Client: the named workspace that it wants; empty for a private one.
    #[serde(default)]
    pub workspace: String,
    /// Client: the text that a tracker gave it for this server; empty without one. Good for one session.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub ticket: String,
    /// Client: the addresses to forward to, the next one first; empty to be served here.
    #[serde(default)]
    pub forward: Vec<String>,
    /// Client: not a session is wanted, but a way: after the handshake the bytes of the channel pass to and from the one
    /// address of `forward`, and the handshake with whoever is there follows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tunnel: bool,
    /// Client that is a hop itself: the servers that the chain has passed, by names that each has made up, the first one in
    /// front. Who finds itself among them refuses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub path: Vec<String>,
    /// Client that is a hop itself: whom its own client has proven to be, or is said to be. Believed only of hops that the
    /// server knows. Empty if it is no hop.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub on_behalf: String,
    /// Dialled side: it only brings its clients and servers together. After the handshake the bytes of the channel pass to and
    /// from a server with the client's `key`, and the handshake with that one follows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub relay: bool,
    /// The program and its version, for people.
    #[serde(default)]
    pub agent: String,
    /// The largest message that the side takes, body and payload, in bytes.
    pub max_message: u64,
    /// The largest payload of one frame that the side takes, in bytes.
    pub chunk: u32,
    /// The requests that may be unanswered at one time: a server's word.
    pub max_requests: u32,
    /// The bytes of large messages that may be under way to the side at one time. At least `max_message`.
    pub window: u64,
    /// How long the side may be idle before it sends a ping, in milliseconds.
    pub keep_alive_ms: u64,
}

/// What both sides have said before the proofs: proofs that cover it cannot be moved to another conversation, and nobody in
/// between can have changed a word of it.
#[derive(Clone, Copy, Debug)]
pub struct Transcript<'a> {
    /// Whether this side dialled.
    pub dialler: bool,
    /// The body of the hello of the side that dialled, as it was sent.
    pub dialler_hello: &'a [u8],
    /// The body of the answer.
    pub acceptor_hello: &'a [u8],
}

/// A method by which a side proves who it is, and makes sure of the peer. One per handshake.
pub trait Identity: Send {
    /// The method's name. Both sides must use the same.
    fn method(&self) -> &str;

    /// Called once, before the first step, when both sides have agreed on this method.
    fn begin(&mut self, _transcript: Transcript<'_>) {}

    /// Takes the peer's last proof, if there is one yet, and gives the next step.
    ///
    /// # Errors
    ///
    /// Why the peer is refused. The peer is told.
    fn step(&mut self, received: Option<&[u8]>) -> Result<IdentityStep>;
}

/// What comes next in a proof of identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdentityStep {
    /// Send this and wait for the answer.
    Send(Vec<u8>),
    /// Wait for the peer.
    Wait,
    /// The peer is who it says; the name is what it will be known by. With bytes, they are sent as the last proof.
    Proven {
        /// What the peer is known by.
        peer: String,
        /// The last proof that the peer needs, if any.
        last: Option<Vec<u8>>,
    },
}

/// Whom peers are known as who have proven nothing.
pub const ANONYMOUS: &str = "anonymous";

/// No proof at all: every peer is [`ANONYMOUS`].
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

/// What a side brings to a handshake.
pub struct HandshakeConfig {
    /// What it offers. Version and identity are filled in.
    pub hello: Hello,
    /// The methods by which it can prove its identity, the preferred one first. Those of the side that dialled are tried in
    /// its order.
    pub identities: Vec<Box<dyn Identity>>,
    /// Whether our `Accept` waits for [`Handshake::approve`]: a server that opens the session first, so that a failure
    /// is an answer to the connection attempt.
    pub hold: bool,
    /// How long the handshake may take.
    pub timeout: Duration,
}

impl Hello {
    /// An offer with this crate's versions and default limits.
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
            keep_alive_ms: 5000,
        }
    }
}

/// What both sides agreed on.
#[derive(Clone, Debug)]
pub struct Negotiated {
    /// The version spoken from here on.
    pub version: u16,
    /// The part that this side plays.
    pub role: Role,
    /// What this side offered.
    pub ours: Hello,
    /// What the peer offered.
    pub theirs: Hello,
    /// Whom the peer has proven to be.
    pub identity: String,
}

impl Negotiated {
    /// Whether both sides have the optional ability.
    pub fn has_feature(&self, feature: &str) -> bool {
        let has = |hello: &Hello| hello.features.iter().any(|name| name == feature);
        has(&self.ours) && has(&self.theirs)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Magic,
    Hello,
    Proof,
    Over,
}

/// One side of a handshake.
pub struct Handshake {
    config: HandshakeConfig,
    dialler: bool,
    /// Whether the dialler may be a server, too.
    takes_servers: bool,
    /// Whether our magic is in the output, or was.
    greeted: bool,
    stage: Stage,
    theirs: Option<Hello>,
    /// The body of our hello, once it is sent.
    our_hello: Vec<u8>,
    /// The peer's name, once it has proven it.
    proven: Option<String>,
    accepted_by_peer: bool,
    rounds: u32,
    output: BytesMut,
    deadline: Instant,
}

impl Handshake {
    /// The side that dialled. It has output at once.
    pub fn dial(config: HandshakeConfig, now: Instant) -> Self {
        let mut this = Self::new(config, true, now);
        this.send_hello();
        this
    }

    /// The side that was dialled.
    pub fn accept(config: HandshakeConfig, now: Instant) -> Self {
        Self::new(config, false, now)
    }

    /// Whoever dials may be a server as well: this side plays the client then. Only of the side that was dialled.
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
            stage: Stage::Magic,
            theirs: None,
            our_hello: Vec::new(),
            proven: None,
            accepted_by_peer: false,
            rounds: 0,
            output: BytesMut::new(),
            deadline,
        }
    }

    /// Takes what was read, and leaves in `input` what belongs to the session behind the handshake. `Some` when the
    /// handshake is done; output that is left then must still be written.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`] and whatever else either side objects to. Our objection is in the output, for the peer.
    pub fn handle_input(&mut self, input: &mut BytesMut) -> Result<Option<Negotiated>> {
        match self.advance(input) {
            Err(error) if self.stage != Stage::Over => {
                // Nothing is said to a peer that does not speak our language.
                if self.stage != Stage::Magic || self.dialler {
                    self.send(Kind::Reject, &error.to_wire());
                }
                self.stage = Stage::Over;
                Err(error)
            }
            outcome => outcome,
        }
    }

    /// The peer's offer and name, when all that is missing is our approval.
    pub fn awaits_approval(&self) -> Option<(&Hello, &str)> {
        match (&self.theirs, &self.proven) {
            (Some(theirs), Some(peer)) if self.config.hold && self.stage != Stage::Over => Some((theirs, peer)),
            _ => None,
        }
    }

    /// Accepts the peer, after [`awaits_approval`](Self::awaits_approval). Input that came before may have been enough to
    /// finish the handshake now.
    pub fn approve(&mut self) -> Option<Negotiated> {
        self.awaits_approval()?;
        self.config.hold = false;
        self.send(Kind::Accept, &[]);
        self.finished()
    }

    /// Asks the peer whether it is still there, while one of the sides holds its `Accept` back. Any input is an answer.
    pub fn ping(&mut self) {
        if self.proven.is_some() && self.stage != Stage::Over {
            self.send(Kind::Ping, &[]);
        }
    }

    /// What the peer has offered, once it has proven who it is.
    pub fn proven(&self) -> Option<&Hello> {
        self.proven.as_ref().and(self.theirs.as_ref())
    }

    /// Refuses the peer, with the reason in the output.
    pub fn refuse(&mut self, error: &RpcError) {
        self.stage = Stage::Over;
        self.send(Kind::Reject, &error.to_wire());
    }

    fn finished(&mut self) -> Option<Negotiated> {
        if self.config.hold || !self.accepted_by_peer || self.stage == Stage::Over {
            return None;
        }
        let (peer, theirs) = (self.proven.clone()?, self.theirs.clone()?);
        self.stage = Stage::Over;
        let ours = self.config.hello.clone();
        let version = ours.version_max.min(theirs.version_max);
        Some(Negotiated { version, role: ours.role, ours, theirs, identity: peer })
    }

    /// What is to be written.
    pub fn take_output(&mut self) -> Bytes {
        self.output.split().freeze()
    }

    /// When [`handle_timeout`](Self::handle_timeout) has to be called.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// The time is up.
    ///
    /// # Errors
    ///
    /// If it really is.
    pub fn handle_timeout(&mut self, now: Instant) -> Result<()> {
        if now < self.deadline {
            return Ok(());
        }
        let waiting = match self.stage {
            Stage::Magic => "the peer has not said which protocol it speaks",
            _ => "the peer has not finished the handshake",
        };
        let text = format!("the time for a handshake is over (handshake_timeout), and {waiting}");
        Err(RpcError::new(ErrorKind::Refused, text))
    }

    /// What the end of the stream means here.
    pub fn end_of_stream(&self) -> RpcError {
        let when = match self.stage {
            Stage::Magic => "before it said which protocol it speaks: is it a server of another kind, or at its limit?",
            _ => "in the middle of the handshake",
        };
        RpcError::new(ErrorKind::Refused, format!("the peer closed the connection {when}"))
    }

    fn advance(&mut self, input: &mut BytesMut) -> Result<Option<Negotiated>> {
        if self.stage == Stage::Magic {
            let len = input.len().min(MAGIC.len());
            if input[..len] != MAGIC[..len] {
                let shown: String =
                    input.iter().take(16).flat_map(|byte| byte.escape_ascii()).map(char::from).collect();
                return Err(RpcError::new(
                    ErrorKind::Protocol,
                    format!("the peer does not speak this protocol: it began with \"{shown}\""),
                ));
            }
            if input.len() < MAGIC.len() {
                return Ok(None);
            }
            input.advance(MAGIC.len());
            self.stage = Stage::Hello;
        }
        while self.stage != Stage::Over {
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
                self.stage = Stage::Over;
                let malformed = || RpcError::new(ErrorKind::Refused, "the peer refused the session");
                Err(RpcError::from_wire(body).map_or_else(|_| malformed(), RpcError::from_next_hop))
            }
            (Stage::Hello, Kind::Hello) => self.handle_hello(body),
            (Stage::Proof, Kind::Proof) => {
                self.rounds += 1;
                if self.proven.is_some() || self.rounds > MAX_ROUNDS {
                    return Err(RpcError::new(ErrorKind::Protocol, "the peer sent more proofs than its method has"));
                }
                self.step(Some(body))
            }
            (Stage::Proof, Kind::Accept) if !self.accepted_by_peer => {
                self.accepted_by_peer = true;
                Ok(())
            }
            // Whoever holds its `Accept` back for long makes sure that the other side is there.
            (Stage::Proof, Kind::Ping) if self.proven.is_some() => {
                if self.output.len() < MAX_BODY {
                    self.send(Kind::Pong, &[]);
                }
                Ok(())
            }
            (Stage::Proof, Kind::Pong) if self.proven.is_some() => Ok(()),
            (_, kind) => Err(RpcError::new(ErrorKind::Protocol, format!("unexpected {kind:?} in the handshake"))),
        }
    }

    fn handle_hello(&mut self, body: &[u8]) -> Result<()> {
        let malformed = |error| RpcError::new(ErrorKind::Protocol, format!("malformed hello: {error}"));
        let theirs: Hello = crate::value::unpack(body).map_err(malformed)?;
        let lists = [&theirs.features, &theirs.identities, &theirs.forward, &theirs.path];
        if lists.iter().any(|list| list.len() > MAX_LIST) {
            let text = format!("a list of the hello has more than {MAX_LIST} elements");
            return Err(RpcError::new(ErrorKind::Protocol, text));
        }
        let ours = &self.config.hello;
        self.theirs = Some(theirs.clone());
        if theirs.version_max < ours.version_min || theirs.version_min > ours.version_max {
            return Err(RpcError::new(
                ErrorKind::VersionMismatch,
                format!(
                    "no common protocol version: one side speaks {} to {}, the other {} to {} ({})",
                    ours.version_min, ours.version_max, theirs.version_min, theirs.version_max, theirs.agent
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
                format!("no common way to prove identity: one side has '{ours}', the other '{theirs}'"),
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
        self.stage = Stage::Proof;
        // From here on there is one method.
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
        // Methods in which the dialler speaks first wait here; one without proofs is done at once.
        self.step(None)
    }

    /// The place of the method to use: the first one of the dialler's that the acceptor has, too.
    fn common_method(&self, theirs: &Hello) -> Option<usize> {
        let place = |name: &String| self.config.identities.iter().position(|ours| ours.method() == name);
        match &theirs.identities[..] {
            // The answer is a decision, not another offer.
            [chosen] if self.dialler => place(chosen),
            _ if self.dialler => None,
            offered => offered.iter().find_map(place),
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

/// The beginning of something that a peer chose.
fn clip(text: &str) -> String {
    text.chars().take(64).collect()
}
