//! Errors of collectives: of one call on all ranks, or of the group.

use std::fmt;
use std::sync::Arc;

use rpc_core::{ErrorKind, RpcError};
use serde::{Deserialize, Serialize};

use super::Rank;

/// Failure of a collective. It is cheap to clone, and becomes an [`RpcError`] with `into`.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CclError {
    /// Two ranks made different calls. Every rank of the group gets this error, and the group lives
    /// on.
    #[error(
        "collective #{sequence}: rank {} is in {} and rank {} is in {}; all ranks must make the same call",
        .first.0, .first.1,
        .second.0, .second.1
    )]
    Mismatch {
        /// The number of the collective in the group.
        sequence: u64,
        /// The lowest rank, and its call.
        first: (Rank, String),
        /// The lowest rank that made another, and its call.
        second: (Rank, String),
    },
    /// A rank had no input, or called wrongly. Every rank of the group gets this error, and the
    /// group lives on.
    #[error("rank {rank} had no input for collective #{sequence}: {cause}")]
    Poisoned {
        /// The number of the collective in the group.
        sequence: u64,
        /// The lowest rank without an input.
        rank: Rank,
        /// Reason why it had none.
        cause: RpcError,
    },
    /// The group is broken and has to be made anew.
    #[error("{0}")]
    Broken(Arc<Breakdown>),
}

/// Text by which a breakdown, which has no kinds of errors, says that a device has no more memory.
/// It is CUDA's and NCCL's own.
pub(super) const OUT_OF_MEMORY: &str = "out of memory";

impl CclError {
    /// Returns true if the communicator is of no more use.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        matches!(self, Self::Broken(_))
    }
}

impl From<CclError> for RpcError {
    /// Turns poison into its cause again, so that an error keeps its face however many collectives
    /// it runs through.
    fn from(error: CclError) -> Self {
        match error {
            CclError::Mismatch { .. } => Self::invalid_argument(error.to_string()),
            CclError::Poisoned { cause, .. } => cause,
            CclError::Broken(breakdown) => {
                let kind = match &breakdown.cause {
                    BreakCause::Backend(text) if text.contains(OUT_OF_MEMORY) => ErrorKind::OutOfMemory,
                    BreakCause::Died | BreakCause::Left | BreakCause::Link(_) | BreakCause::Backend(_) => {
                        ErrorKind::PeerLost
                    }
                    BreakCause::Silent => ErrorKind::PeerSilent,
                    BreakCause::NeverEntered => ErrorKind::DeadlineExceeded,
                    BreakCause::Aborted(_) => ErrorKind::Cancelled,
                    BreakCause::OutOfStep => ErrorKind::Application,
                    BreakCause::Protocol(_) => ErrorKind::Protocol,
                };
                Self::new(kind, breakdown.to_string()).may_have_run(true)
            }
        }
    }
}

/// Breakdown of a group, as the rank saw it that noticed first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Breakdown {
    /// Cause of the breakdown.
    pub cause: BreakCause,
    /// The rank that it happened to; for an abort, the one that called it.
    pub rank: Rank,
    /// Rank that noticed first.
    pub noticed_by: Rank,
    /// The call in which it was noticed, such as `allreduce(sum) of 1048576 float32 #128`; empty
    /// between calls.
    pub during: String,
    /// Calls that the ranks were known to be in then, one line each.
    pub flights: String,
}

/// Cause of a breakdown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum BreakCause {
    /// The rank's process ended.
    Died,
    /// The rank dropped its communicator.
    Left,
    /// The rank was in the collective and stopped taking part.
    Silent,
    /// The rank is there and did not come to the collective in time.
    NeverEntered,
    /// The rank is there and went on without the collective: what should have brought it there
    /// failed, or took another way.
    OutOfStep,
    /// [`Control::abort`](super::Control::abort) was called, for this reason.
    Aborted(String),
    /// The connection to the rank broke.
    Link(String),
    /// The rank sent what it should not have.
    Protocol(String),
    /// The backend that moves the data for the rank failed, or did not finish.
    Backend(String),
}

impl Breakdown {
    /// Encodes it for shared memory and connections, no longer than `room` bytes.
    pub(crate) fn to_bytes(&self, room: usize) -> Vec<u8> {
        let mut this = self.clone();
        loop {
            let bytes = rmp_serde::to_vec_named(&this).unwrap_or_default();
            if bytes.len() <= room {
                return bytes;
            }
            // The table of flights is the longest part and the least needed; what remains is cut
            // short.
            this.flights.clear();
            this.during = cut(&this.during, room / 4);
            match &mut this.cause {
                BreakCause::Aborted(text)
                | BreakCause::Link(text)
                | BreakCause::Protocol(text)
                | BreakCause::Backend(text) => *text = cut(text, room / 4),
                BreakCause::Died
                | BreakCause::Left
                | BreakCause::Silent
                | BreakCause::NeverEntered
                | BreakCause::OutOfStep => {}
            }
        }
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        rmp_serde::from_slice(bytes).ok()
    }
}

impl fmt::Display for Breakdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let during = if self.during.is_empty() { "between collectives" } else { &self.during };
        let rank = self.rank;
        match &self.cause {
            BreakCause::Died => write!(f, "rank {rank} died; noticed by rank {} in {during}", self.noticed_by),
            BreakCause::Left => {
                write!(f, "rank {rank} left the group; noticed by rank {} in {during}", self.noticed_by)
            }
            BreakCause::Silent => write!(f, "rank {rank} stopped in the middle of {during}"),
            BreakCause::NeverEntered => write!(f, "rank {rank} never entered {during}"),
            BreakCause::OutOfStep => {
                let noticed_by = self.noticed_by;
                write!(
                    f,
                    "rank {rank} went on without a collective that others wait in; noticed by rank {noticed_by} in \
                     {during}"
                )
            }
            BreakCause::Aborted(reason) => write!(f, "aborted by rank {rank} ({during}): {reason}"),
            BreakCause::Link(text) => {
                write!(f, "rank {} lost its connection to rank {rank} in {during}: {text}", self.noticed_by)
            }
            BreakCause::Protocol(text) => write!(f, "rank {rank} broke the protocol in {during}: {text}"),
            BreakCause::Backend(text) => write!(f, "rank {rank} failed in {during}: {text}"),
        }?;
        if self.flights.is_empty() { Ok(()) } else { write!(f, "; {}", self.flights.trim_end().replace('\n', "; ")) }
    }
}

/// Returns the first `len` bytes of `text`, or somewhat fewer.
pub(crate) fn cut(text: &str, len: usize) -> String {
    let end = (0..=len.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    text[..end.unwrap_or(0)].to_owned()
}

/// The facts of an [`RpcError`] that travel as a cause of poison.
#[derive(Serialize, Deserialize)]
struct Cause {
    kind: u16,
    message: String,
    peer: Option<String>,
    backtrace: Option<String>,
    application_kind: Option<String>,
    may_have_run: bool,
}

/// Encodes a cause of poison for shared memory and connections, no longer than `room` bytes.
pub(crate) fn poison_to_bytes(error: &RpcError, room: usize) -> Vec<u8> {
    let mut cause = Cause {
        kind: error.kind().code(),
        message: error.message().to_owned(),
        peer: error.peer().map(str::to_owned),
        backtrace: error.backtrace().map(str::to_owned),
        application_kind: error.application_kind().map(str::to_owned),
        may_have_run: error.request_may_have_run(),
    };
    loop {
        let bytes = rmp_serde::to_vec_named(&cause).unwrap_or_default();
        if bytes.len() <= room {
            return bytes;
        }
        cause.backtrace = None;
        cause.message = cut(&cause.message, room / 2);
        cause.peer = cause.peer.map(|peer| cut(&peer, room / 8));
        cause.application_kind = cause.application_kind.map(|kind| cut(&kind, room / 8));
    }
}

/// Reads what [`poison_to_bytes`] wrote.
pub(crate) fn poison_from_bytes(bytes: &[u8]) -> RpcError {
    let Ok(cause) = rmp_serde::from_slice::<Cause>(bytes) else {
        return RpcError::new(ErrorKind::Protocol, "a poisoned rank gave no readable cause");
    };
    let mut error = RpcError::new(ErrorKind::from_code(cause.kind), cause.message).may_have_run(cause.may_have_run);
    if let Some(peer) = cause.peer {
        error = error.with_peer(peer);
    }
    if let Some(backtrace) = cause.backtrace {
        error = error.with_backtrace(backtrace);
    }
    if let Some(kind) = cause.application_kind {
        error = error.with_application_kind(kind);
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_keep_their_facts_and_fit_the_room() {
        let error = RpcError::new(ErrorKind::Application, "no such board")
            .with_peer("tcp://10.0.0.1:1")
            .with_application_kind("my::Error")
            .with_backtrace("frame 0");
        assert_eq!(poison_from_bytes(&poison_to_bytes(&error, 2048)), error);
        let long = RpcError::new(ErrorKind::Panic, "ä".repeat(9000)).with_backtrace("b".repeat(9000));
        let bytes = poison_to_bytes(&long, 2048);
        assert!(bytes.len() <= 2048);
        let back = poison_from_bytes(&bytes);
        assert_eq!(back.kind(), ErrorKind::Panic);
        assert!(back.message().len() > 900);
    }

    #[test]
    fn a_breakdown_fits_the_room() {
        let breakdown = Breakdown {
            cause: BreakCause::Aborted("because ".repeat(1000)),
            rank: Rank(2),
            noticed_by: Rank(0),
            during: "barrier #7".to_owned(),
            flights: "rank 0\n".repeat(1000),
        };
        let back = Breakdown::from_bytes(&breakdown.to_bytes(1024)).unwrap();
        assert_eq!((back.rank, back.during.as_str()), (Rank(2), "barrier #7"));
        assert!(back.to_string().starts_with("aborted by rank 2 (barrier #7): because because"));
    }
}
