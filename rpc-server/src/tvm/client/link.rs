//! The connection to a server: frames in their order, the replies to them, and the bytes of both.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use rpc_core::limits::{MemoryLease, MemoryQuota};
use rpc_core::{Device, ErrorKind, RpcError};
use rpc_tvm::wire::{Expected, Request, ServerReply};
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{Notify, oneshot};

use super::unwritten::Unwritten;

/// Bytes of requests that may be unanswered. One that is larger is sent alone.
const WINDOW: u64 = 4 << 20;

/// Bytes of requests that may be unanswered while one is that may take long. A server that runs a
/// function or waits for a device reads nothing, and a connection whose bytes nobody takes would be
/// given up as if its peer were gone: these fit the buffers of any kernel.
const WINDOW_BEHIND_LONG: u64 = 32 << 10;

/// Number of requests that may be unanswered at a server that survives the end of its client.
const MAX_UNANSWERED: usize = 1024;

/// Length in bytes up to which frames are charged as a whole, when the session begins.
const SMALL: u64 = 512;

/// Bytes that a small frame is charged with: the frame, and its place in lists.
const CHARGE_OF_SMALL: u64 = 2 * SMALL;

/// Length up to which parts of frames are gathered into one write.
const GATHERED: usize = 16 << 10;

/// Function that takes the reply to a request. Called without a lock; must not block.
pub(super) type Then = Box<dyn FnOnce(Result<ServerReply, RpcError>) + Send>;

/// A request on the wire.
pub(super) struct Frame {
    pub(super) parts: Vec<Bytes>,
    pub(super) expected: Expected,
    /// True if the server may wait for a device before it answers. A call may always take long.
    pub(super) waits_for_device: bool,
    /// Charge for what the frame takes beside the request that it was made of.
    pub(super) lease: Option<MemoryLease>,
}

impl Frame {
    /// Returns the frame of a request that has one value as its reply.
    pub(super) fn of(request: &Request) -> Self {
        let device = match request {
            Request::StreamSync { device, .. } | Request::FreeData { device, .. } => Some(*device),
            Request::CopyFrom { from, .. } => Some(from.device),
            Request::CopyAmong { from, to, .. } if from.device == Device::cpu() => Some(to.device),
            Request::CopyAmong { from, .. } => Some(from.device),
            _ => None,
        };
        let waits_for_device = device.is_some_and(|device| device != Device::cpu());
        Self { parts: vec![request.encode().into()], expected: Expected::Value, waits_for_device, lease: None }
    }

    pub(super) fn len(&self) -> u64 {
        self.parts.iter().map(|part| part.len() as u64).sum()
    }
}

/// Requests and replies of a connection. The server answers in the order of the requests.
pub(super) struct Link {
    state: Mutex<LinkState>,
    memory: Arc<MemoryQuota>,
    /// Number of requests that may be unanswered.
    max_unanswered: usize,
    #[allow(dead_code, reason = "held for its drop")]
    small_frames: MemoryLease,
    /// Wakes the writer.
    output: Notify,
    /// Wakes the one that waits for room, or for the end of all requests.
    progress: Notify,
}

#[derive(Default)]
struct LinkState {
    output: VecDeque<Bytes>,
    /// Length of what is being written.
    writing: u64,
    /// Bytes that are not written yet. A server can answer a request that it has not read.
    unwritten: Unwritten,
    unanswered: VecDeque<Unanswered>,
    /// Bytes of the unanswered requests.
    bytes: u64,
    /// Number of those among them that may take long.
    long: usize,
    error: Option<RpcError>,
}

/// A request that was sent, or is about to be.
struct Unanswered {
    expected: Expected,
    len: u64,
    is_long: bool,
    then: Then,
    _lease: Option<MemoryLease>,
}

impl Link {
    /// Creates the link of a connection after its handshake. A server of TVM whose client has
    /// vanished fails for good as it sends a second answer. So one request at a time is unanswered
    /// there, and many are at a server that `survives_clients`.
    ///
    /// # Errors
    ///
    /// There is no memory left for the frames.
    pub(super) fn new(memory: Arc<MemoryQuota>, survives_clients: bool) -> Result<Self, RpcError> {
        let max_unanswered = if survives_clients { MAX_UNANSWERED } else { 1 };
        // Some frames do not wait for room: those that free what no caller has got.
        let small_frames = memory.reserve((max_unanswered as u64 + 1) * CHARGE_OF_SMALL)?;
        let (state, output, progress) = (Mutex::default(), Notify::new(), Notify::new());
        Ok(Self { state, memory, max_unanswered, small_frames, output, progress })
    }

    /// Waits until a frame of `len` bytes may be sent.
    pub(super) async fn room(&self, len: u64) {
        loop {
            let progress = self.progress.notified();
            if self.state.lock().has_room(len, self.max_unanswered) {
                return;
            }
            progress.await;
        }
    }

    /// Waits until all requests are answered.
    pub(super) async fn answered(&self) {
        loop {
            let progress = self.progress.notified();
            if self.state.lock().unanswered.is_empty() {
                return;
            }
            progress.await;
        }
    }

    /// Sends a frame. `then` takes the reply, or the error that there is no memory for the frame.
    /// Those of a fixed length are always sent.
    pub(super) fn send(&self, mut frame: Frame, then: impl FnOnce(Result<ServerReply, RpcError>) + Send + 'static) {
        let len = frame.len();
        // The data of a copy are those of the caller.
        let own = frame.parts.first().map_or(0, |part| part.len() as u64);
        if frame.lease.is_none() && own > SMALL {
            match self.memory.reserve(own) {
                Ok(lease) => frame.lease = Some(lease),
                Err(error) => return then(Err(error)),
            }
        }
        let mut state = self.state.lock();
        if let Some(error) = &state.error {
            let error = error.clone();
            drop(state);
            return then(Err(error));
        }
        state.output.extend(frame.parts);
        state.unwritten.add(len);
        state.bytes += len;
        let is_long = frame.expected == Expected::Call || frame.waits_for_device;
        state.long += usize::from(is_long);
        let (expected, then) = (frame.expected, Box::new(then));
        state.unanswered.push_back(Unanswered { expected, len, is_long, then, _lease: frame.lease });
        drop(state);
        self.output.notify_one();
    }

    /// Sends a frame, and waits for the reply.
    pub(super) async fn ask(&self, frame: Frame) -> Result<ServerReply, RpcError> {
        self.room(frame.len()).await;
        let (sender, reply) = oneshot::channel();
        self.send(frame, |reply| drop(sender.send(reply)));
        reply.await.unwrap_or_else(|_| Err(RpcError::internal("a request was forgotten")))
    }

    /// Sends the last frame, which has no reply, and waits until it is written.
    pub(super) async fn finish(&self, frame: Vec<u8>) {
        self.send_last(frame);
        loop {
            let progress = self.progress.notified();
            if self.state.lock().unwritten.len() == 0 {
                return;
            }
            progress.await;
        }
    }

    /// Sends the last frame, which has no reply.
    pub(super) fn send_last(&self, frame: Vec<u8>) {
        let mut state = self.state.lock();
        state.unwritten.add(frame.len() as u64);
        state.output.push_back(frame.into());
        drop(state);
        self.output.notify_one();
    }

    /// Returns true if there is something to write that has not been taken.
    pub(super) fn has_output(&self) -> bool {
        !self.state.lock().output.is_empty()
    }

    /// Returns true once all that was sent is written.
    pub(super) fn is_written(&self) -> bool {
        self.state.lock().unwritten.len() == 0
    }

    /// Returns the reply that the oldest unanswered request takes.
    pub(super) fn expected(&self) -> Option<Expected> {
        self.state.lock().unanswered.front().map(|request| request.expected)
    }

    /// Answers the oldest unanswered request.
    pub(super) fn answer(&self, reply: Result<ServerReply, RpcError>) {
        let mut state = self.state.lock();
        let Some(request) = state.unanswered.pop_front() else { return };
        state.bytes -= request.len;
        state.long -= usize::from(request.is_long);
        drop(state);
        self.progress.notify_waiters();
        (request.then)(reply);
    }

    /// Fails all requests that are unanswered, and those to come.
    pub(super) fn fail(&self, error: &RpcError) {
        let mut state = self.state.lock();
        state.error = Some(error.clone());
        state.output.clear();
        let writing = state.writing;
        state.unwritten.shrink_to(writing);
        let unanswered = std::mem::take(&mut state.unanswered);
        (state.bytes, state.long) = (0, 0);
        drop(state);
        for request in unanswered {
            (request.then)(Err(error.clone().may_have_run(true)));
        }
    }

    /// Takes what is to be written next, as what was taken before is written: a large part alone,
    /// or small ones together.
    pub(super) fn take_output(&self) -> Option<Bytes> {
        let mut state = self.state.lock();
        let left = state.unwritten.len() - std::mem::take(&mut state.writing);
        state.unwritten.shrink_to(left);
        let first = state.output.pop_front();
        let next = first.map(|first| {
            let fits = |len: usize, part: Option<&Bytes>| part.is_some_and(|part| len + part.len() <= GATHERED);
            if !fits(first.len(), state.output.front()) {
                return first;
            }
            let mut gathered = BytesMut::from(first);
            while fits(gathered.len(), state.output.front())
                && let Some(part) = state.output.pop_front()
            {
                gathered.extend_from_slice(&part);
            }
            gathered.freeze()
        });
        state.writing = next.as_ref().map_or(0, |next| next.len() as u64);
        drop(state);
        self.progress.notify_waiters();
        next
    }
}

impl LinkState {
    fn has_room(&self, len: u64, max_unanswered: usize) -> bool {
        let window = if self.long > 0 { WINDOW_BEHIND_LONG } else { WINDOW };
        let fits = self.bytes.max(self.unwritten.len()) + len <= window && self.unanswered.len() < max_unanswered;
        fits || (self.unanswered.is_empty() && self.unwritten.len() == 0) || self.error.is_some()
    }
}

/// Writes what is sent. Returns the reason for which nothing more can be.
pub(super) async fn write(link: &Link, io: &mut (impl AsyncWrite + Unpin)) -> RpcError {
    loop {
        let more = link.output.notified();
        while let Some(mut part) = link.take_output() {
            let written = async {
                io.write_all_buf(&mut part).await?;
                io.flush().await
            };
            if let Err(error) = written.await {
                return lost(&error);
            }
        }
        more.await;
    }
}

pub(super) fn lost(error: &std::io::Error) -> RpcError {
    let kind = match error.kind() {
        // The kernel has given the connection up.
        std::io::ErrorKind::TimedOut => ErrorKind::PeerSilent,
        _ => ErrorKind::PeerLost,
    };
    RpcError::new(kind, format!("the connection broke: {error}"))
}
