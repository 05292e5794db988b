//! Forwarding: a session that passes every request on to another session.

use rpc_core::{Request, RpcSession, SharedSession, Submission};

/// A session that forwards to another one, usually that of the next hop.
///
/// Nothing is decoded on the way but the request's envelope: handles, arguments, deadlines, lanes
/// and cancellation pass as they are, and bytes pass by reference. What chains, isolation and
/// relays stand on.
pub struct ProxySession {
    next: SharedSession,
}

impl ProxySession {
    /// Forwards to `next`.
    pub fn new(next: SharedSession) -> Self {
        Self { next }
    }
}

impl std::fmt::Debug for ProxySession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ProxySession")
    }
}

impl RpcSession for ProxySession {
    fn submit(&self, request: Request) -> Submission {
        self.next.submit(request)
    }

    fn is_encrypted(&self) -> bool {
        self.next.is_encrypted()
    }

    fn ended(&self) -> Submission {
        self.next.ended()
    }
}
