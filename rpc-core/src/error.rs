//! What can go wrong with a request, as data that crosses hops unchanged.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

/// The result of anything that a session does.
pub type Result<T, E = RpcError> = std::result::Result<T, E>;

/// What happened, in one word that programs can match on.
///
/// Each kind has a number of its own on the wire ([`ErrorKind::code`]); a number that this version does not know
/// arrives as [`ErrorKind::Unknown`] and keeps its value when it is forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A kind that this version does not know.
    Unknown(u16),
    /// No function, module or loader of that name.
    NotFound,
    /// A handle that is stale, forged, freed, of another kind, or of another session.
    InvalidHandle,
    /// An argument has the wrong type, count, shape, range or encoding.
    InvalidArgument,
    /// The function ran and returned an error of its own.
    Application,
    /// The function panicked. Nobody but its caller is affected.
    Panic,
    /// The request was cancelled by its caller.
    Cancelled,
    /// The request's deadline passed.
    DeadlineExceeded,
    /// The session's own time limit passed.
    SessionTimeout,
    /// A configured limit was reached; the message names it.
    LimitExceeded,
    /// The device has not enough memory.
    OutOfMemory,
    /// The device does not exist here; the message says why.
    DeviceUnavailable,
    /// The device failed for this session and cannot be used by it any more.
    DeviceLost,
    /// A tensor is borrowed by the same call in a conflicting way, or is in use where waiting is not possible.
    Busy,
    /// The peer, the device or this build cannot do that.
    Unsupported,
    /// The session was shut down in an orderly way, by either side.
    Closed,
    /// The peer takes no new requests because it is going away.
    Draining,
    /// The link to the peer broke, or the peer died.
    PeerLost,
    /// The peer is connected and has been silent for longer than the keep-alive allows.
    PeerSilent,
    /// A peer broke the protocol.
    Protocol,
    /// The peer refused the session: its key, its policy, its capacity, or a hop that may not be used.
    Refused,
    /// One side of the session has not proven who it is, or not in a way that the other accepts.
    Unauthenticated,
    /// The peers have no version of the protocol in common.
    VersionMismatch,
    /// A file or socket operation failed.
    Io,
    /// The calling program used the interface wrongly.
    ApiMisuse,
    /// Our own bug.
    Internal,
}

/// Who has to act on an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Fault {
    /// The program that made the request.
    Caller,
    /// The function, module or device that served it.
    Callee,
    /// A peer's implementation.
    Peer,
    /// The network or a process on the way.
    Link,
    /// Limits set by an operator.
    Limit,
    /// This project.
    Internal,
}

macro_rules! kinds {
    ($($code:literal $kind:ident $name:literal $fault:ident;)*) => {
        impl ErrorKind {
            /// The number that stands for this kind on the wire.
            pub const fn code(self) -> u16 {
                match self {
                    Self::Unknown(code) => code,
                    $(Self::$kind => $code,)*
                }
            }

            /// The kind that `code` stands for.
            pub const fn from_code(code: u16) -> Self {
                match code {
                    $($code => Self::$kind,)*
                    other => Self::Unknown(other),
                }
            }

            /// A stable lower-case name, as used in JSON output and metrics.
            pub const fn name(self) -> &'static str {
                match self {
                    Self::Unknown(_) => "unknown",
                    $(Self::$kind => $name,)*
                }
            }

            /// Who has to act.
            pub const fn fault(self) -> Fault {
                match self {
                    Self::Unknown(_) => Fault::Callee,
                    $(Self::$kind => Fault::$fault,)*
                }
            }
        }
    };
}

kinds! {
    1 NotFound "not_found" Caller;
    2 InvalidHandle "invalid_handle" Caller;
    3 InvalidArgument "invalid_argument" Caller;
    4 Application "application" Callee;
    5 Panic "panic" Callee;
    6 Cancelled "cancelled" Caller;
    7 DeadlineExceeded "deadline_exceeded" Callee;
    8 SessionTimeout "session_timeout" Limit;
    9 LimitExceeded "limit_exceeded" Limit;
    10 OutOfMemory "out_of_memory" Callee;
    11 DeviceUnavailable "device_unavailable" Caller;
    12 DeviceLost "device_lost" Callee;
    13 Busy "busy" Caller;
    14 Unsupported "unsupported" Caller;
    15 Closed "closed" Caller;
    16 Draining "draining" Link;
    17 PeerLost "peer_lost" Link;
    18 PeerSilent "peer_silent" Link;
    19 Protocol "protocol" Peer;
    20 Refused "refused" Caller;
    21 Io "io" Callee;
    22 ApiMisuse "api_misuse" Caller;
    23 Internal "internal" Internal;
    24 Unauthenticated "unauthenticated" Caller;
    25 VersionMismatch "version_mismatch" Peer;
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(code) => write!(f, "unknown error {code}"),
            kind => f.write_str(&kind.name().replace('_', " ")),
        }
    }
}

impl Serialize for ErrorKind {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u16(self.code())
    }
}

impl<'de> Deserialize<'de> for ErrorKind {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        u16::deserialize(deserializer).map(Self::from_code)
    }
}

/// An error of a session, at whichever hop it arose.
///
/// It is one pointer wide and cheap to clone, because the end of a session is reported to every pending call.
///
/// Its `serde` form is the one on the wire: a map that keeps all facts.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RpcError(Box<Facts>);

/// The facts of an [`RpcError`], and its form on the wire: a map, so that fields can be added.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Facts {
    kind: ErrorKind,
    message: Cow<'static, str>,
    /// How many links lie between the reader of this error and the place where it arose.
    #[serde(default)]
    hop: u16,
    /// The address of the peer or link concerned, where one is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    peer: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    backtrace: Option<String>,
    /// The function's own name for its error, such as a Rust type name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    application_kind: Option<String>,
    #[serde(default)]
    may_have_run: bool,
}

impl RpcError {
    /// An error that arose here, for a request that has not run.
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Self(Box::new(Facts {
            kind,
            message: message.into(),
            hop: 0,
            peer: None,
            backtrace: None,
            application_kind: None,
            may_have_run: false,
        }))
    }

    /// Says that the request may have had an effect before it failed.
    #[must_use]
    pub fn may_have_run(mut self, may_have_run: bool) -> Self {
        self.0.may_have_run = may_have_run;
        self
    }

    /// Names the peer or link concerned, unless one is named already.
    #[must_use]
    pub fn with_peer(mut self, peer: impl Into<String>) -> Self {
        self.0.peer.get_or_insert_with(|| peer.into());
        self
    }

    /// Adds the backtrace of the place where the error arose.
    #[must_use]
    pub fn with_backtrace(mut self, backtrace: impl Into<String>) -> Self {
        self.0.backtrace = Some(backtrace.into());
        self
    }

    /// Adds the function's own name for its error.
    #[must_use]
    pub fn with_application_kind(mut self, kind: impl Into<String>) -> Self {
        self.0.application_kind = Some(kind.into());
        self
    }

    /// Puts `context` in front of the message.
    #[must_use]
    pub fn context(mut self, context: impl fmt::Display) -> Self {
        self.0.message = format!("{context}: {}", self.0.message).into();
        self
    }

    /// The same error, seen from one link further away. Called by whoever receives an error from a peer.
    #[must_use]
    pub fn from_next_hop(mut self) -> Self {
        self.0.hop = self.0.hop.saturating_add(1);
        self
    }

    /// What happened.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Who has to act.
    pub fn fault(&self) -> Fault {
        self.0.kind.fault()
    }

    /// What happened, in words.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// How many links lie between here and the place where the error arose: 0 is this process, 1 the peer, and so on.
    pub fn hop(&self) -> u16 {
        self.0.hop
    }

    /// The address of the peer or link concerned, where one is known.
    pub fn peer(&self) -> Option<&str> {
        self.0.peer.as_deref()
    }

    /// The backtrace taken where the error arose, if there is one.
    pub fn backtrace(&self) -> Option<&str> {
        self.0.backtrace.as_deref()
    }

    /// The function's own name for its error, such as `std::num::ParseIntError`.
    pub fn application_kind(&self) -> Option<&str> {
        self.0.application_kind.as_deref()
    }

    /// Whether the request may have had an effect; if not, repeating it is safe.
    pub fn request_may_have_run(&self) -> bool {
        self.0.may_have_run
    }

    /// Whether a time limit ran out.
    pub fn is_timeout(&self) -> bool {
        matches!(self.kind(), ErrorKind::DeadlineExceeded | ErrorKind::SessionTimeout | ErrorKind::PeerSilent)
    }

    /// Whether the session is over, so that nothing else will work on it either.
    pub fn ends_session(&self) -> bool {
        matches!(
            self.kind(),
            ErrorKind::Closed
                | ErrorKind::PeerLost
                | ErrorKind::PeerSilent
                | ErrorKind::Protocol
                | ErrorKind::SessionTimeout
                | ErrorKind::Refused
        )
    }

    /// Whether the same request may be sent again, on a new session, without running twice.
    pub fn is_retryable(&self) -> bool {
        !self.request_may_have_run() && (self.fault() == Fault::Link || self.kind() == ErrorKind::Busy)
    }

    /// The error as a MessagePack map, its form on the wire.
    pub(crate) fn to_wire(&self) -> Vec<u8> {
        rmp_serde::to_vec_named(&*self.0).unwrap_or_default()
    }

    /// Reads what [`to_wire`](Self::to_wire) wrote.
    pub(crate) fn from_wire(bytes: &[u8]) -> Result<Self, rmp_serde::decode::Error> {
        crate::value::unpack(bytes).map(|facts| Self(Box::new(facts)))
    }
}

/// Short forms for the errors that many places report.
impl RpcError {
    /// [`ErrorKind::InvalidArgument`].
    pub fn invalid_argument(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::InvalidArgument, message)
    }

    /// [`ErrorKind::NotFound`].
    pub fn not_found(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::NotFound, message)
    }

    /// [`ErrorKind::Unsupported`].
    pub fn unsupported(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Unsupported, message)
    }

    /// [`ErrorKind::LimitExceeded`]; `limit` is the name under which it is configured.
    pub fn limit(limit: &str, allowed: u64, wanted: u64) -> Self {
        Self::new(ErrorKind::LimitExceeded, format!("{limit} is {allowed}, and {wanted} would be needed"))
    }

    /// [`ErrorKind::Internal`].
    pub fn internal(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }
}

impl fmt::Display for RpcError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.0.kind, self.0.message)?;
        if let Some(kind) = &self.0.application_kind {
            write!(f, " [{kind}]")?;
        }
        match (&self.0.peer, self.0.hop) {
            (Some(peer), 0) => write!(f, " (at {peer})"),
            (Some(peer), hop) => write!(f, " (at {peer}, hop {hop})"),
            (None, 0) => Ok(()),
            (None, hop) => write!(f, " (hop {hop})"),
        }?;
        if self.0.may_have_run { f.write_str(" (the request may have run)") } else { Ok(()) }
    }
}

impl fmt::Debug for RpcError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for RpcError {}

impl From<std::io::Error> for RpcError {
    fn from(error: std::io::Error) -> Self {
        Self::new(ErrorKind::Io, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_keep_their_numbers_and_unknown_ones_survive() {
        for code in 0..200 {
            assert_eq!(ErrorKind::from_code(code).code(), code);
        }
        assert_eq!(ErrorKind::from_code(1), ErrorKind::NotFound);
        assert_eq!(ErrorKind::from_code(23), ErrorKind::Internal);
    }

    #[test]
    fn an_error_crosses_the_wire_with_all_its_facts() {
        let error = RpcError::new(ErrorKind::Application, "no such board")
            .may_have_run(true)
            .with_peer("tcp://10.0.0.1:1")
            .with_backtrace("frame 0")
            .with_application_kind("my::Error");
        let far = RpcError::from_wire(&error.to_wire()).unwrap().from_next_hop();
        assert_eq!(far.hop(), 1);
        assert_eq!(far.backtrace(), Some("frame 0"));
        assert_eq!(
            far.to_string(),
            "application: no such board [my::Error] (at tcp://10.0.0.1:1, hop 1) (the request may have run)"
        );
    }
}
