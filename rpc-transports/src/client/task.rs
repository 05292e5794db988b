//! The client's session over a channel, driven by a task of the tokio runtime.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker, ready};
use std::time::Instant;

use bytes::BytesMut;
use rpc_core::proto::{Admission, ClientEndpoint, ClientEvent, LinkConfig, Negotiated};
use rpc_core::reply::ReplyControl;
use rpc_core::{ErrorKind, Operation, Request, Responder, RpcError, RpcSession, Submission, Value};

use tokio::io::AsyncWrite;

use crate::channel::{Channel, ChannelGuard, ChannelIo};
use crate::channel_io::{Alarm, Flush, ReadAhead, SLICES, poll_write};
use crate::handshake::identity::Connection;

/// A session at the far end of a channel. Cheap to clone; clones are the same session.
///
/// Made by [`Connector`](crate::Connector). Dropping the last clone, and with it the last reference to a remote object,
/// closes the session in good order.
#[derive(Clone)]
pub struct ClientSession(Arc<Owner>);

/// Closes the session when the last reference is gone. The driving task holds the inner part only.
struct Owner(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    next_id: AtomicU64,
    /// Any time at all, for those who do not look at it.
    begun: Instant,
    peer: String,
    /// Whether the channel is encrypted, at least up to where it is passed on.
    is_encrypted: bool,
    /// What requests hold of the session.
    control: Weak<Self>,
}

struct State {
    endpoint: ClientEndpoint<Responder>,
    driver: Option<Waker>,
    /// Who wants to hear of the end.
    watchers: Vec<Responder>,
}

impl ClientSession {
    /// The session behind a handshake, and its driver running as a task. `input` is what was read beyond the handshake.
    pub(crate) fn spawn(channel: Channel, negotiated: &Negotiated, input: BytesMut, config: LinkConfig) -> Self {
        let connection = channel.security().connection.clone();
        let is_encrypted = channel.security().is_encrypted() || channel.security().encrypted_way;
        let (io, peer, guard) = channel.into_parts();
        let now = Instant::now();
        let endpoint = ClientEndpoint::new(negotiated, config, now);
        let shared = Arc::new_cyclic(|control| Shared {
            state: Mutex::new(State { endpoint, driver: None, watchers: Vec::new() }),
            next_id: AtomicU64::new(1),
            begun: Instant::now(),
            peer,
            is_encrypted,
            control: control.clone(),
        });
        let alarm = Alarm::new();
        let driver = Driver {
            shared: shared.clone(),
            io,
            read: ReadAhead::new(input),
            alarm,
            flush: Flush::default(),
            events: Vec::new(),
            connection,
            _guard: guard,
        };
        tokio::spawn(driver);
        Self(Arc::new(Owner(shared)))
    }

    /// The address of the peer.
    pub fn peer(&self) -> &str {
        &self.0.0.peer
    }
}

impl std::fmt::Debug for ClientSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ClientSession").field(&self.0.0.peer).finish()
    }
}

impl RpcSession for ClientSession {
    fn is_encrypted(&self) -> bool {
        self.0.0.is_encrypted
    }

    fn submit(&self, request: Request) -> Submission {
        let shared = &self.0.0;
        match request.operation {
            Operation::Release { handles } => {
                shared.command(|state| state.endpoint.release(handles));
                Submission::ready(Ok(Value::Null))
            }
            Operation::Shutdown => {
                let (submission, responder) = shared.pending();
                responder.admit();
                let over = shared.command(|state| {
                    let over = state.endpoint.ended().is_some();
                    if !over {
                        state.endpoint.shutdown(Some(responder.clone()));
                    }
                    over
                });
                if over {
                    // Nobody drives the session any more, and there is nothing left to do.
                    responder.complete(Ok(Value::Null));
                }
                submission
            }
            _ => {
                let (submission, responder) = shared.pending();
                let token = responder.clone();
                // Only a deadline needs the time.
                let now = if request.deadline.is_some() { Instant::now() } else { shared.begun };
                let admission = shared.command(|state| state.endpoint.submit(responder.id(), request, token, now));
                match admission {
                    Admission::Now => responder.admit(),
                    Admission::Later => {}
                    Admission::Refused(_, error) => {
                        responder.complete(Err(error.with_peer(&*shared.peer)));
                    }
                }
                submission
            }
        }
    }

    fn ended(&self) -> Submission {
        let (submission, responder) = self.0.0.pending();
        responder.admit();
        let mut state = self.0.0.state();
        match state.endpoint.ended().cloned() {
            Some(error) => {
                drop(state);
                responder.complete(Err(error.with_peer(&*self.0.0.peer)));
            }
            None => state.watchers.push(responder),
        }
        submission
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.command(|state| state.endpoint.shutdown(None));
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // The endpoint does not run foreign code, so a panic inside of the lock would be a bug of its own, reported there.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pending(&self) -> (Submission, Responder) {
        let control: Arc<dyn ReplyControl> = match self.control.upgrade() {
            Some(shared) => shared,
            None => Arc::new(Gone),
        };
        Submission::pending(control, self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// Changes the state, and wakes the driver to act on it.
    fn command<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state();
        let result = change(&mut state);
        let driver = state.driver.take();
        drop(state);
        if let Some(driver) = driver {
            driver.wake();
        }
        result
    }
}

/// The control of a session that is being torn down.
struct Gone;

impl ReplyControl for Gone {
    fn cancel(&self, _: u64) {}
    fn discard(&self, _: Value) {}
}

impl ReplyControl for Shared {
    fn cancel(&self, id: u64) {
        self.command(|state| state.endpoint.cancel(id));
    }

    fn abandon(&self, id: u64) {
        self.command(|state| state.endpoint.abandon(id));
    }

    fn discard(&self, reply: Value) {
        self.command(|state| state.endpoint.release(reply.handles()));
    }
}

/// Tells callers what has happened, outside of the session's lock: completing a request may run anything.
pub(crate) fn report(events: impl IntoIterator<Item = ClientEvent<Responder>>, peer: &str) -> Option<RpcError> {
    let mut ended = None;
    for event in events {
        match event {
            ClientEvent::Admitted(responder) => responder.admit(),
            ClientEvent::Reply(responder, outcome) => {
                let local = |error: RpcError| if error.hop() == 0 { error.with_peer(peer) } else { error };
                responder.complete(outcome.map_err(local));
            }
            ClientEvent::GoingAway(error) => tracing::debug!(peer, %error, "the server is going away"),
            ClientEvent::Ended(error) => ended = Some(error.with_peer(peer)),
        }
    }
    ended
}

/// How many events may come together for which memory is kept: an idle session should be small.
const KEPT_EVENTS: usize = 8;

/// The task that moves bytes between channel and endpoint.
struct Driver {
    shared: Arc<Shared>,
    io: Box<dyn ChannelIo>,
    read: ReadAhead,
    alarm: Alarm,
    flush: Flush,
    /// What is on its way to callers; empty, and kept for its memory.
    events: Vec<ClientEvent<Responder>>,
    /// The connection that the channel is one of several on.
    connection: Option<Arc<Connection>>,
    /// What has to live as long as the channel.
    _guard: Option<ChannelGuard>,
}

impl Future for Driver {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        loop {
            let mut state = this.shared.state();
            let wire = Wire { io: &mut *this.io, read: &mut this.read, alarm: &mut this.alarm, flush: &mut this.flush };
            let outcome = turn(&mut state, wire, cx);
            let events = &mut this.events;
            while let Some(event) = state.endpoint.poll_event() {
                events.push(event);
            }
            let finished = state.endpoint.ended().is_some() && (outcome.is_pending() || state.endpoint.is_flushed());
            if outcome.is_pending() && events.is_empty() && !finished {
                match &state.driver {
                    Some(driver) if driver.will_wake(cx.waker()) => {}
                    _ => state.driver = Some(cx.waker().clone()),
                }
                return Poll::Pending;
            }
            drop(state);
            let ended = report(events.drain(..), &this.shared.peer);
            if events.capacity() > KEPT_EVENTS {
                *events = Vec::new();
            }
            if let Some(error) = ended {
                if let Some(connection) = &this.connection
                    && error.kind() == ErrorKind::PeerSilent
                {
                    connection.suspect();
                }
                let watchers = std::mem::take(&mut this.shared.state().watchers);
                for watcher in watchers {
                    watcher.complete(Err(error.clone()));
                }
            }
            if finished {
                // What is left of the output is not worth waiting for: the session is over.
                let _ = Pin::new(&mut this.io).poll_shutdown(cx);
                return Poll::Ready(());
            }
        }
    }
}

/// The driver's side of the channel.
struct Wire<'a> {
    io: &'a mut dyn ChannelIo,
    read: &'a mut ReadAhead,
    alarm: &'a mut Alarm,
    flush: &'a mut Flush,
}

/// One turn: time, output, input. Ready if there may be more to do at once.
fn turn(state: &mut State, wire: Wire<'_>, cx: &mut Context<'_>) -> Poll<()> {
    let Wire { io, read, alarm, flush } = wire;
    // Until the alarm is set to the next time: nothing else may wake this task.
    while let Some(now) = alarm.poll(state.endpoint.poll_timeout(), cx) {
        if let Err(error) = state.endpoint.handle_timeout(now) {
            state.endpoint.fail(error);
            return Poll::Ready(());
        }
    }
    if let Err(error) = poll_output(&mut state.endpoint, io, flush, cx) {
        if state.endpoint.ended().is_some() {
            // What was still to be written has no reader, and trying again would fail for ever.
            return Poll::Pending;
        }
        // A peer that closed has perhaps said why: what it wrote is still to be read.
        if read_rest(state, io, read, cx) {
            return Poll::Ready(());
        }
        state.endpoint.fail(lost(&error));
        return Poll::Ready(());
    }
    match ready!(poll_input(&mut state.endpoint, io, read, cx)) {
        Ok(()) => {}
        Err(InputError::Lost(error)) => state.endpoint.fail(lost(&error)),
        Err(InputError::Protocol(error)) => {
            state.endpoint.fail(error);
            let _ = poll_output(&mut state.endpoint, io, flush, cx);
        }
    }
    Poll::Ready(())
}

fn read_rest(state: &mut State, io: &mut dyn ChannelIo, read: &mut ReadAhead, cx: &mut Context<'_>) -> bool {
    while state.endpoint.ended().is_none() {
        if !matches!(poll_input(&mut state.endpoint, io, read, cx), Poll::Ready(Ok(()))) {
            return false;
        }
    }
    true
}

fn lost(error: &io::Error) -> RpcError {
    RpcError::new(ErrorKind::PeerLost, format!("the connection broke: {error}"))
}

fn poll_output(
    endpoint: &mut ClientEndpoint<Responder>,
    io: &mut dyn ChannelIo,
    flush: &mut Flush,
    cx: &mut Context<'_>,
) -> io::Result<()> {
    loop {
        endpoint.stage();
        let mut slices = [IoSlice::new(&[]); SLICES];
        let count = endpoint.slices(&mut slices);
        if count == 0 {
            return flush.poll(io, cx);
        }
        match poll_write(io, &slices[..count], cx) {
            Poll::Pending => return Ok(()),
            Poll::Ready(Ok(written)) => {
                flush.want();
                endpoint.advance(written, Instant::now());
            }
            Poll::Ready(Err(error)) => return Err(error),
        }
    }
}

enum InputError {
    Lost(io::Error),
    Protocol(RpcError),
}

fn poll_input(
    endpoint: &mut ClientEndpoint<Responder>,
    io: &mut dyn ChannelIo,
    read: &mut ReadAhead,
    cx: &mut Context<'_>,
) -> Poll<Result<(), InputError>> {
    let outcome = match endpoint.bulk_target() {
        Some(target) => {
            let count = ready!(read.poll_into(io, target, cx)).map_err(InputError::Lost)?;
            if count > 0 {
                return Poll::Ready(endpoint.bulk_filled(count, Instant::now()).map_err(InputError::Protocol));
            }
            0
        }
        None => ready!(read.poll_more(io, cx)).map_err(InputError::Lost)?,
    };
    if outcome == 0 {
        if endpoint.ended().is_some() {
            // The end would be read again for ever, where output is left that the peer does not take.
            return Poll::Pending;
        }
        endpoint.handle_end_of_stream(read.buffer.len());
        return Poll::Ready(Ok(()));
    }
    Poll::Ready(endpoint.handle_input(&mut read.buffer, Instant::now()).map_err(InputError::Protocol))
}
