//! Limits of one session on the wire, which both sides state in their handshake.

use rpc_core::proto::Hello;

/// Limits of one session on the wire and in queues.
#[derive(Clone, Debug)]
pub struct WireLimits {
    /// The largest message, in bytes: the arguments of a call, or its return. Copies have no limit.
    /// Default: 64 MiB.
    pub max_message: u64,
    /// The largest payload of a frame, in bytes. Copies are cut into such pieces. Default: 1 MiB.
    pub chunk: u32,
    /// The number of requests that a client may have unanswered. Default: 1,024.
    pub max_requests: u32,
    /// The number of bytes of large requests that a client may have in flight. At least
    /// `max_message`. Default: 65 MiB.
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
