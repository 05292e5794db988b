//! Limits of one session on the wire, which both sides state in their handshake.

use rpc_core::proto::Hello;

/// How much one session may have on the wire and in queues.
#[derive(Clone, Debug)]
pub struct WireLimits {
    /// The largest message, in bytes: the arguments of a call, or its return. Copies have no limit.
    /// 64 MiB.
    pub max_message: u64,
    /// The largest payload of a frame, in bytes; copies are cut into such pieces. 1 MiB.
    pub chunk: u32,
    /// The requests that a client may have unanswered. 1,024.
    pub max_requests: u32,
    /// The bytes of large requests that a client may have under way. At least `max_message`. 65
    /// MiB.
    pub window: u64,
}

impl Default for WireLimits {
    fn default() -> Self {
        Self { max_message: 64 << 20, chunk: 1 << 20, max_requests: 1024, window: 65 << 20 }
    }
}

impl WireLimits {
    pub(crate) fn apply(&self, hello: &mut Hello) {
        hello.max_message = self.max_message;
        hello.chunk = self.chunk.max(1);
        hello.max_requests = self.max_requests.max(1);
        hello.window = self.window.max(self.max_message);
    }
}
