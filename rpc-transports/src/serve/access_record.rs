//! Record of a session in the log: the client, what it used, how long, how many bytes, and the
//! reason of the end.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use rpc_core::log_limit::LogLimit;
use rpc_core::{ErrorKind, RpcError};

use crate::clock;

/// Target of the records, by which a log filter can choose them.
const TARGET: &str = "rpc_access";

/// Limit on the rate of records. A busy server has many, and all of them are wanted.
static RECORDS: LogLimit = LogLimit::with_max_lines(2000);

/// Note of a session's factory on what the client uses, for the record of the session in the log.
/// Cheap to clone; clones are the same note.
#[derive(Clone, Default)]
pub struct SessionNote(Arc<OnceLock<Arc<dyn fmt::Display + Send + Sync>>>);

impl SessionNote {
    /// Sets the note. It is formatted once, at the end of the session. Later calls have no effect.
    pub fn set(&self, note: Arc<dyn fmt::Display + Send + Sync>) {
        let _ = self.0.set(note);
    }
}

impl fmt::Debug for SessionNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.get() {
            Some(note) => write!(f, "SessionNote({note})"),
            None => f.write_str("SessionNote"),
        }
    }
}

/// Traffic of a session so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Traffic {
    pub(super) requests: u64,
    /// Bytes from the client.
    pub(super) received: u64,
    /// Bytes to the client.
    pub(super) sent: u64,
}

/// Facts about a session for its record in the log.
pub(super) struct AccessRecord {
    peer: Arc<str>,
    identity: Box<str>,
    note: SessionNote,
    opened: Instant,
}

impl AccessRecord {
    pub(super) fn new(peer: &str, identity: &str, note: SessionNote) -> Self {
        Self { peer: peer.into(), identity: identity.into(), note, opened: clock::now() }
    }

    pub(super) fn peer(&self) -> Arc<str> {
        self.peer.clone()
    }

    /// Logs the end of a session in this protocol, and that its client has broken rules if it has.
    pub(super) fn log_end_of_session(&self, reason: &RpcError, traffic: Option<&Traffic>) {
        log_fault(&self.peer, reason);
        self.log_end(&reason.message(), traffic);
    }

    /// Logs the end of the session.
    pub(super) fn log_end(&self, reason: &dyn fmt::Display, traffic: Option<&Traffic>) {
        let now = clock::now();
        if tracing::enabled!(target: TARGET, tracing::Level::INFO)
            && let Some(left_out) = RECORDS.admit(now)
        {
            let seconds = (now.saturating_duration_since(self.opened).as_secs_f64() * 1e3).round() / 1e3;
            tracing::info!(
                target: TARGET,
                left_out = left_out.map(tracing::field::display),
                peer = &*self.peer,
                identity = &*self.identity,
                used = self.note.0.get().map(tracing::field::display),
                seconds,
                requests = traffic.map(|traffic| traffic.requests),
                received = traffic.map(|traffic| traffic.received),
                sent = traffic.map(|traffic| traffic.sent),
                %reason,
                "session ended"
            );
        }
    }
}

/// Logs that a session ends because its client has broken rules.
pub(super) fn log_fault(peer: &str, reason: &RpcError) {
    match reason.kind() {
        ErrorKind::Protocol => rpc_core::log_limited!(WARN, peer, %reason, "a client broke the protocol"),
        ErrorKind::LimitExceeded => rpc_core::log_limited!(WARN, peer, %reason, "a client went over a limit"),
        _ => {}
    }
}

/// Logs a request that this server has refused by a limit or a rule. Its client has been told;
/// operators look for it in the log.
pub(super) fn log_refused_request(peer: &str, error: &RpcError) {
    // Refusals of servers behind this one are in their logs.
    if error.hop() == 0 && matches!(error.kind(), ErrorKind::LimitExceeded | ErrorKind::Refused) {
        rpc_core::log_limited!(WARN, peer, %error, "refused a request");
    }
}
