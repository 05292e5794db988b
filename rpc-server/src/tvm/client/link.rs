//! The connection to a server: frames in their order, the replies to them, and the bytes of both.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use rpc_core::limits::MemoryLease;
use rpc_core::{ErrorKind, RpcError};
use rpc_tvm::wire::{ClientEvent, ClientWire, Expected, Request, ServerReply};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{Notify, oneshot};

use super::session::ClientCore;

/// Bytes of requests that may be unanswered. One that is larger is sent alone.
const WINDOW: u64 = 4 << 20;

/// Bytes of requests that may be unanswered while a call is. A server that runs a function reads
/// nothing, and a connection whose bytes nobody takes would be given up as if its peer were gone:
/// these fit the buffers of any kernel.
const WINDOW_BEHIND_CALL: u64 = 32 << 10;

/// Number of requests that may be unanswered.
const MAX_UNANSWERED: usize = 1024;

/// Length up to which parts of frames are gathered into one write.
const GATHERED: usize = 16 << 10;

/// Text by which a server begins the error that the time of the session is over.
const TIMEOUT: &str = "RPCSessionTimeoutError";

/// Function that takes the reply to a request. Called without a lock; must not block.
pub(super) type Then = Box<dyn FnOnce(Result<ServerReply, RpcError>) + Send>;

/// A request on the wire.
pub(super) struct Frame {
    pub(super) parts: Vec<Bytes>,
    pub(super) expected: Expected,
    /// Charge for what the frame takes beside the request that it was made of.
    pub(super) lease: Option<MemoryLease>,
}

impl Frame {
    /// Returns the frame of a request that has one value as its reply.
    pub(super) fn of(request: &Request) -> Self {
        Self { parts: vec![request.encode().into()], expected: Expected::Value, lease: None }
    }

    pub(super) fn len(&self) -> u64 {
        self.parts.iter().map(|part| part.len() as u64).sum()
    }
}

/// Requests and replies of a connection. The server answers in the order of the requests.
#[derive(Default)]
pub(super) struct Link {
    state: Mutex<LinkState>,
    /// Wakes the writer.
    output: Notify,
    /// Wakes the one that waits for room, or for the end of all requests.
    progress: Notify,
}

#[derive(Default)]
struct LinkState {
    output: VecDeque<Bytes>,
    is_writing: bool,
    unanswered: VecDeque<Unanswered>,
    /// Bytes of the unanswered requests.
    bytes: u64,
    /// Number of calls among them.
    calls: usize,
    error: Option<RpcError>,
}

/// A request that was sent, or is about to be.
struct Unanswered {
    expected: Expected,
    len: u64,
    then: Then,
    _lease: Option<MemoryLease>,
}

impl Link {
    /// Waits until a frame of `len` bytes may be sent.
    pub(super) async fn room(&self, len: u64) {
        loop {
            let progress = self.progress.notified();
            if self.state.lock().has_room(len) {
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

    /// Sends a frame. `then` takes the reply.
    pub(super) fn send(&self, frame: Frame, then: impl FnOnce(Result<ServerReply, RpcError>) + Send + 'static) {
        let len = frame.len();
        let mut state = self.state.lock();
        if let Some(error) = &state.error {
            let error = error.clone();
            drop(state);
            return then(Err(error));
        }
        state.output.extend(frame.parts);
        state.bytes += len;
        state.calls += usize::from(frame.expected == Expected::Call);
        let (expected, then) = (frame.expected, Box::new(then));
        state.unanswered.push_back(Unanswered { expected, len, then, _lease: frame.lease });
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
        self.state.lock().output.push_back(frame.into());
        self.output.notify_one();
        loop {
            let progress = self.progress.notified();
            {
                let state = self.state.lock();
                if state.output.is_empty() && !state.is_writing {
                    return;
                }
            }
            progress.await;
        }
    }

    /// Returns the reply that the oldest unanswered request takes.
    fn expected(&self) -> Option<Expected> {
        self.state.lock().unanswered.front().map(|request| request.expected)
    }

    /// Answers the oldest unanswered request.
    fn answer(&self, reply: Result<ServerReply, RpcError>) {
        let mut state = self.state.lock();
        let Some(request) = state.unanswered.pop_front() else { return };
        state.bytes -= request.len;
        state.calls -= usize::from(request.expected == Expected::Call);
        drop(state);
        self.progress.notify_waiters();
        (request.then)(reply);
    }

    /// Fails all requests that are unanswered, and those to come.
    pub(super) fn fail(&self, error: &RpcError) {
        let mut state = self.state.lock();
        state.error = Some(error.clone());
        state.output.clear();
        let unanswered = std::mem::take(&mut state.unanswered);
        (state.bytes, state.calls) = (0, 0);
        drop(state);
        for request in unanswered {
            (request.then)(Err(error.clone().may_have_run(true)));
        }
    }

    /// Takes what is to be written next: a large part alone, or small ones together.
    fn take_output(&self) -> Option<Bytes> {
        let mut state = self.state.lock();
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
        state.is_writing = next.is_some();
        drop(state);
        if next.is_none() {
            self.progress.notify_waiters();
        }
        next
    }
}

impl LinkState {
    fn has_room(&self, len: u64) -> bool {
        let window = if self.calls > 0 { WINDOW_BEHIND_CALL } else { WINDOW };
        let fits = self.bytes + len <= window && self.unanswered.len() < MAX_UNANSWERED;
        fits || self.unanswered.is_empty() || self.error.is_some()
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

/// Reads replies, and gives them to their requests. Returns the reason for which there are no more.
pub(super) async fn read(core: &ClientCore, io: &mut (impl AsyncRead + Unpin), mut wire: ClientWire) -> RpcError {
    // Charge for the reply that is being collected.
    let mut charged: Option<MemoryLease> = None;
    loop {
        let event = match wire.poll_event(core.link.expected()) {
            Ok(event) => event,
            Err(error) => return RpcError::new(ErrorKind::Protocol, error.to_string()),
        };
        match event {
            Some(ClientEvent::Announced { len }) => match core.memory.reserve(len) {
                Ok(lease) => drop(charged.replace(lease)),
                Err(_) => wire.refuse(),
            },
            Some(ClientEvent::Reply(reply)) => {
                match checked(reply, core) {
                    Err(error) if error.kind() == ErrorKind::SessionTimeout => return error,
                    reply => core.link.answer(reply),
                }
                drop(charged.take());
            }
            Some(ClientEvent::Unasked(text)) => {
                let error = exception(text);
                // The server closes the connection after it, whatever it says.
                let is_timeout = error.kind() == ErrorKind::SessionTimeout;
                let said = error.message().to_owned();
                return if is_timeout { error } else { RpcError::new(ErrorKind::PeerLost, said) };
            }
            Some(ClientEvent::Shutdown) => {
                return RpcError::new(ErrorKind::PeerLost, "the server has ended the session: it died, or was stopped");
            }
            Some(_) => return RpcError::new(ErrorKind::Protocol, "the server says hello twice"),
            None => match io.read_buf(&mut wire.input()).await {
                Ok(0) if wire.is_inside_message() => {
                    return RpcError::new(ErrorKind::PeerLost, "the connection ended inside a message");
                }
                Ok(0) => return RpcError::new(ErrorKind::PeerLost, "the server has closed the connection"),
                Ok(_) => {}
                Err(error) => return lost(&error),
            },
        }
    }
}

/// Returns the reply, or the error that it stands for.
fn checked(reply: ServerReply, core: &ClientCore) -> Result<ServerReply, RpcError> {
    match reply {
        ServerReply::Exception(text) => Err(exception(text).with_peer(&*core.peer).from_next_hop()),
        ServerReply::Unusable(text) => Err(RpcError::new(ErrorKind::Protocol, text).may_have_run(true)),
        ServerReply::TooLarge { len } => {
            let (limit, all) = (core.max_message, core.memory.limit());
            let text = format!(
                "a reply of {len} bytes has been passed over: max_message is {limit}, and all sessions with servers of \
                 TVM may hold {all} together"
            );
            Err(RpcError::new(ErrorKind::LimitExceeded, text).may_have_run(true))
        }
        reply => Ok(reply),
    }
}

/// Returns the error that the text of a server stands for.
fn exception(text: String) -> RpcError {
    let kind = match text.as_str() {
        text if text.starts_with(TIMEOUT) => ErrorKind::SessionTimeout,
        text if text.contains("Device API ") && text.contains(" is not enabled") => ErrorKind::DeviceUnavailable,
        _ => ErrorKind::Application,
    };
    RpcError::new(kind, text).may_have_run(true)
}

pub(super) fn lost(error: &std::io::Error) -> RpcError {
    let kind = match error.kind() {
        // The kernel has given the connection up.
        std::io::ErrorKind::TimedOut => ErrorKind::PeerSilent,
        _ => ErrorKind::PeerLost,
    };
    RpcError::new(kind, format!("the connection broke: {error}"))
}
