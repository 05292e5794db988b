//! Errors of requests and sessions, as data that crosses hops unchanged.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

/// Result of any operation of a session.
pub type Result<T, E = RpcError> = std::result::Result<T, E>;

/// Kind of an error, for programs to match on.
///
/// Each kind has a number of its own on the wire ([`ErrorKind::code`]). A number that this version
/// does not know arrives as [`ErrorKind::Unknown`] and keeps its value when it is forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A kind that this version does not know.
    Unknown(u16),
    /// No function, module or loader of that name exists.
    NotFound,
    /// A handle that is stale, forged, freed, of another kind, or of another session.
    InvalidHandle,
    /// An argument has the wrong type, count, shape, range or encoding.
    InvalidArgument,
    /// The function ran and returned an error of its own.
    Application,
    /// The function panicked. Other calls are not affected.
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
    /// The device does not exist here; the message gives the reason.
    DeviceUnavailable,
    /// The device failed for this session, which cannot use it any more.
    DeviceLost,
    /// A tensor is borrowed by the same call in a conflicting way, or is in use where waiting is
    /// not possible; or another session has the device for itself.
    Busy,
    /// The peer, the device or this build does not support the operation.
    Unsupported,
    /// The session was shut down in an orderly way, by either side.
    Closed,
    /// The peer accepts no new requests because it is going away.
    Draining,
    /// The link to the peer broke, or the peer died.
    PeerLost,
    /// The peer is connected and has been silent for longer than the keep-alive allows, or than a
    /// handshake may take.
    PeerSilent,
    /// A peer broke the protocol.
    Protocol,
    /// The peer refused the session: for its key, its policy, its capacity, or a hop that may not
    /// be used. Or it refused a request, for which the client has no right.
    Refused,
    /// One side has not proven its identity, or not by a method that the other side accepts.
    Unauthenticated,
    /// The peers have no protocol version in common.
    VersionMismatch,
    /// A file or socket operation failed.
    Io,
    /// The calling program used the API wrongly.
    ApiMisuse,
    /// A bug in this project.
    Internal,
}

/// Party that has to act on an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Fault {
    /// The program that made the request.
    Caller,
    /// The function, module or device that served the request.
    Callee,
    /// The implementation of a peer.
    Peer,
    /// The network, or a process on the way.
    Link,
    /// The operator, who sets limits.
    Limit,
    /// This project.
    Internal,
}

macro_rules! kinds {
    ($($code:literal $kind:ident $name:literal $fault:ident;)*) => {
        impl ErrorKind {
            /// Returns the number of this kind on the wire.
            pub const fn code(self) -> u16 {
                match self {
                    Self::Unknown(code) => code,
                    $(Self::$kind => $code,)*
                }
            }

            /// Returns the kind with this number.
            pub const fn from_code(code: u16) -> Self {
                match code {
                    $($code => Self::$kind,)*
                    other => Self::Unknown(other),
                }
            }

            /// Returns the stable lower-case name, as used in JSON output and metrics.
            pub const fn name(self) -> &'static str {
                match self {
                    Self::Unknown(_) => "unknown",
                    $(Self::$kind => $name,)*
                }
            }

            /// Returns the party that has to act.
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

/// An error of a session, from any hop.
///
/// One pointer wide and cheap to clone, because the end of a session is reported to every pending
/// call.
///
/// The `serde` form is the one on the wire: a map that keeps all facts.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RpcError(Box<Facts>);

/// Facts of an [`RpcError`], and its form on the wire: a map, so that fields can be added.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
struct Facts {
    kind: ErrorKind,
    message: Cow<'static, str>,
    /// Number of links between the reader of this error and its origin.
    #[serde(default)]
    hop: u16,
    /// Address of the peer or link concerned, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    peer: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    backtrace: Option<String>,
    /// The function's own name for its error, such as a Rust type name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    application_kind: Option<String>,
    #[serde(default)]
    may_have_run: bool,
    /// True if a function has said so of the error that it returns, until it has returned.
    #[serde(skip)]
    without_effect: bool,
}

impl RpcError {
    /// Creates an error that arose in this process, for a request that has not run.
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Self(Box::new(Facts {
            kind,
            message: message.into(),
            hop: 0,
            peer: None,
            backtrace: None,
            application_kind: None,
            may_have_run: false,
            without_effect: false,
        }))
    }

    /// Sets if the request may have had an effect before it failed.
    #[must_use]
    pub fn may_have_run(mut self, may_have_run: bool) -> Self {
        self.0.may_have_run = may_have_run;
        self
    }

    /// Marks an error that a function returns before it has had any effect, such as a refusal. Its
    /// caller is told that the request has not run; after other errors of functions it
    /// [may have](Self::request_may_have_run).
    #[must_use]
    pub fn without_effect(mut self) -> Self {
        self.0.without_effect = true;
        self
    }

    /// Returns the error as the caller of the function that has returned it gets it.
    pub(crate) fn returned_by_function(mut self) -> Self {
        // Cleared: a function that passes on the error of another may have had effects itself.
        self.0.may_have_run = !std::mem::take(&mut self.0.without_effect);
        self
    }

    /// Names the peer or link concerned, unless one is named already.
    #[must_use]
    pub fn with_peer(mut self, peer: impl Into<String>) -> Self {
        self.0.peer.get_or_insert_with(|| peer.into());
        self
    }

    /// Adds the backtrace from the origin of the error.
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

    /// Counts one more link to the error's origin. Called by every receiver of an error from a
    /// peer.
    #[must_use]
    pub fn from_next_hop(mut self) -> Self {
        self.0.hop = self.0.hop.saturating_add(1);
        self
    }

    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns the party that has to act.
    pub fn fault(&self) -> Fault {
        self.0.kind.fault()
    }

    /// Returns the message.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// Returns the number of links to the error's origin: 0 is this process, 1 the peer, and so on.
    pub fn hop(&self) -> u16 {
        self.0.hop
    }

    /// Returns the address of the peer or link concerned, if known.
    pub fn peer(&self) -> Option<&str> {
        self.0.peer.as_deref()
    }

    /// Returns the backtrace from the error's origin, if there is one.
    pub fn backtrace(&self) -> Option<&str> {
        self.0.backtrace.as_deref()
    }

    /// Returns the function's own name for its error, such as `std::num::ParseIntError`.
    pub fn application_kind(&self) -> Option<&str> {
        self.0.application_kind.as_deref()
    }

    /// Returns true if the request may have had an effect. If not, repeating it is safe.
    pub fn request_may_have_run(&self) -> bool {
        self.0.may_have_run
    }

    /// Returns true if a time limit ran out.
    pub fn is_timeout(&self) -> bool {
        matches!(self.kind(), ErrorKind::DeadlineExceeded | ErrorKind::SessionTimeout | ErrorKind::PeerSilent)
    }

    /// Returns true if the session has ended, so that no further request can succeed on it.
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

    /// Returns true if the same request may be sent again, on a new session, without running twice.
    pub fn is_retryable(&self) -> bool {
        !self.request_may_have_run() && (self.fault() == Fault::Link || self.kind() == ErrorKind::Busy)
    }

    /// Encodes the error as a MessagePack map, its form on the wire.
    pub(crate) fn to_wire(&self) -> Vec<u8> {
        rmp_serde::to_vec_named(&*self.0).unwrap_or_default()
    }

    /// Decodes the output of [`to_wire`](Self::to_wire).
    pub(crate) fn from_wire(bytes: &[u8]) -> Result<Self, rmp_serde::decode::Error> {
        crate::msgpack::unpack_map(bytes).map(|facts| Self(Box::new(facts)))
    }
}

/// Short forms for common errors.
impl RpcError {
    /// Creates an [`ErrorKind::InvalidArgument`].
    pub fn invalid_argument(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::InvalidArgument, message)
    }

    /// Creates an [`ErrorKind::NotFound`].
    pub fn not_found(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::NotFound, message)
    }

    /// Creates an [`ErrorKind::Unsupported`].
    pub fn unsupported(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Unsupported, message)
    }

    /// Creates an [`ErrorKind::LimitExceeded`]; `limit` is the name under which the limit is
    /// configured.
    pub fn limit(limit: &str, allowed: u64, wanted: u64) -> Self {
        Self::new(ErrorKind::LimitExceeded, format!("{limit} is {allowed}, and {wanted} would be needed"))
    }

    /// Creates an [`ErrorKind::Internal`].
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

/// As `Display`, followed by the backtrace of the error, if there is one. A `main` that returns the
/// error prints this.
impl fmt::Debug for RpcError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)?;
        match &self.0.backtrace {
            Some(backtrace) => write!(f, "\n\nbacktrace of the place where it arose:\n{}", backtrace.trim_end()),
            None => Ok(()),
        }
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

    #[test]
    fn a_program_that_returns_an_error_prints_one_line_and_the_backtrace_if_there_is_one() {
        let error = RpcError::invalid_argument("argument 0 of `add`: expected float, got str").from_next_hop();
        let line = "invalid argument: argument 0 of `add`: expected float, got str (hop 1)";
        assert_eq!(format!("{error:?}"), line);
        let error = error.with_backtrace("at src/main.rs:1:1\n");
        assert_eq!(
            format!("{error:?}"),
            format!("{line}\n\nbacktrace of the place where it arose:\nat src/main.rs:1:1")
        );
    }
}
