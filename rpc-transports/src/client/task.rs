//! The client's session over a channel whose bytes are moved by a task of the tokio runtime.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use bytes::BytesMut;
use parking_lot::MutexGuard;
use rpc_core::proto::{ClientEndpoint, ClientEvent, Negotiated};
use rpc_core::{ErrorKind, Request, Responder, RpcError, RpcSession, SharedSession, Submission};
use tokio::io::AsyncWrite;

use super::SessionConfig;
use super::state::{Change, ClientState, Locked, Pump, SessionRef};
use crate::channel::{Channel, ChannelGuard, ExplainEnd};
use crate::channel_io::{Alarm, Flush, ReadAhead, SLICES, poll_write};
use crate::clock;
use crate::handshake::identity_proofs::Connection;
use crate::session_io::SessionIo;
use crate::shared_memory;
use crate::transport::BoxFuture;

/// A session at the far end of a channel. Cheap to clone; clones are the same session.
///
/// Made by [`Connector`](crate::Connector). Dropping the last clone, and with it the last reference
/// to a remote object, closes the session in good order.
#[derive(Clone)]
pub struct ClientSession(SessionRef<TaskPump>);

/// Pump whose bytes a task moves.
struct TaskPump {
    /// Connection that the channel shares with other channels, if its transport has such
    /// connections.
    connection: Option<Arc<Connection>>,
    end: Option<Arc<dyn ExplainEnd>>,
}

impl ClientSession {
    /// Starts the session after a handshake, and its task. `input` holds the bytes that were read
    /// beyond the handshake.
    pub(crate) fn spawn(channel: Channel, negotiated: &Negotiated, input: BytesMut, config: SessionConfig) -> Self {
        let SessionConfig { endpoint: config, spin } = config;
        let (connection, end) = (channel.security().connection.clone(), channel.end().cloned());
        let is_encrypted = channel.security().is_protected();
        let (io, peer, guard) = channel.into_session_parts(spin);
        let endpoint = ClientEndpoint::new(negotiated, config, clock::now());
        let endpoint = shared_memory::offered_by(endpoint, negotiated);
        let session = ClientState::new(endpoint, (TaskPump { connection, end }, None), peer, is_encrypted);
        tokio::spawn(PumpTask {
            session: session.clone(),
            wire: Wire { io, read: ReadAhead::new(input), alarm: Alarm::new(), flush: Flush::default() },
            events: Vec::new(),
            explaining: None,
            _guard: guard,
        });
        Self(SessionRef::new(session))
    }

    /// Returns the address of the peer.
    pub fn peer(&self) -> &str {
        self.0.peer()
    }
}

impl std::fmt::Debug for ClientSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ClientSession").field(&self.peer()).finish()
    }
}

impl RpcSession for ClientSession {
    fn submit(&self, request: Request) -> Submission {
        self.0.as_session().submit(request)
    }

    fn inner(&self) -> Option<&dyn RpcSession> {
        Some(self.0.as_session())
    }

    fn into_shared(self) -> SharedSession {
        self.0.into_shared()
    }
}

impl Pump for TaskPump {
    type Endpoint = ClientEndpoint<Responder>;

    /// Waker of the task, while it waits.
    type Locked = Option<Waker>;

    fn endpoint_changed(_: &ClientState<Self>, mut locked: MutexGuard<'_, Locked<Self>>, _: Change) {
        let task = locked.pump.take();
        drop(locked);
        if let Some(task) = task {
            task.wake();
        }
    }

    fn end(&self) -> Option<&Arc<dyn ExplainEnd>> {
        self.end.as_ref()
    }

    fn session_ended(&self, error: &RpcError) {
        if let Some(connection) = &self.connection
            && error.kind() == ErrorKind::PeerSilent
        {
            connection.suspect();
        }
    }
}

/// Number of events for which memory is kept between two batches: an idle session should be small.
const KEPT_EVENTS: usize = 8;

/// Task that moves bytes between channel and endpoint.
struct PumpTask {
    session: Arc<ClientState<TaskPump>>,
    wire: Wire,
    /// Events on their way to callers. Empty between two batches, and kept for its memory.
    events: Vec<ClientEvent<Responder>>,
    /// Explanation of the session's end, while it is waited for.
    explaining: Option<BoxFuture<'static, Option<String>>>,
    /// Guard of the channel's resources, such as a child process.
    _guard: Option<ChannelGuard>,
}

impl Future for PumpTask {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Self { session, wire, events, explaining, .. } = &mut *self;
        let mut spins = wire.io.spins();
        loop {
            let mut locked = session.lock();
            let outcome = wire.poll(&mut locked, cx);
            locked.take_events(events);
            let finished = locked.has_ended() && (outcome.is_pending() || locked.endpoint.is_flushed());
            if outcome.is_pending() && events.is_empty() && !finished {
                match &locked.pump {
                    Some(task) if task.will_wake(cx.waker()) => {}
                    _ => locked.pump = Some(cx.waker().clone()),
                }
                let awaits_reply = !locked.endpoint.is_quiet();
                drop(locked);
                // A caller that changes the endpoint takes the waker.
                let is_changed = || session.try_lock().is_some_and(|locked| locked.pump.is_none());
                if awaits_reply && spins > 0 && wire.io.spin(is_changed) {
                    spins -= 1;
                    if spins > 0 {
                        continue;
                    }
                    // Another task of this thread has its turn first.
                    cx.waker().wake_by_ref();
                }
                return Poll::Pending;
            }
            drop(locked);
            // The callers whose requests are complete may need this thread to go on.
            if !events.is_empty() {
                spins = 0;
            }
            if let Some(end) = session.unexplained_end(events) {
                let end = Arc::clone(end);
                let explaining = explaining.get_or_insert_with(|| Box::pin(async move { end.explain().await }));
                // The events are kept, and no caller learns of the end before.
                session.explain(ready!(explaining.as_mut().poll(cx)));
            }
            session.deliver(events.drain(..));
            if events.capacity() > KEPT_EVENTS {
                *events = Vec::new();
            }
            if finished {
                // The session is over, so the rest of its output is not waited for.
                let _ = Pin::new(&mut wire.io).poll_shutdown(cx);
                return Poll::Ready(());
            }
        }
    }
}

/// The task's side of the channel.
struct Wire {
    io: SessionIo,
    read: ReadAhead,
    alarm: Alarm,
    flush: Flush,
}

impl Wire {
    /// Handles timeouts, writes and reads once. Ready if more could be done at once.
    fn poll(&mut self, locked: &mut Locked<TaskPump>, cx: &mut Context<'_>) -> Poll<()> {
        // Repeats until the alarm is set to the next timeout, for which nothing else would wake
        // this task.
        while let Some(now) = self.alarm.poll(locked.endpoint.poll_timeout(), cx) {
            locked.handle_timeout(now);
            if locked.has_ended() {
                return Poll::Ready(());
            }
        }
        if let Err(error) = self.poll_output(&mut locked.endpoint, cx) {
            if locked.has_ended() {
                // The rest of the output has no reader, and another attempt would fail as well.
                return Poll::Pending;
            }
            // A peer that closed may have sent the reason: its last bytes can still be read.
            if !self.read_to_end(locked, cx) {
                locked.channel_broke(&error);
            }
            return Poll::Ready(());
        }
        match ready!(self.poll_input(&mut locked.endpoint, cx)) {
            Ok(()) => {}
            Err(InputError::Broken(error)) => locked.channel_broke(&error),
            Err(InputError::Protocol(error)) => {
                locked.endpoint.fail(error);
                let _ = self.poll_output(&mut locked.endpoint, cx);
            }
        }
        Poll::Ready(())
    }

    /// Reads the input that has arrived. Returns true if it has ended the session.
    fn read_to_end(&mut self, locked: &mut Locked<TaskPump>, cx: &mut Context<'_>) -> bool {
        while !locked.has_ended() {
            if !matches!(self.poll_input(&mut locked.endpoint, cx), Poll::Ready(Ok(()))) {
                return false;
            }
        }
        true
    }

    fn poll_output(&mut self, endpoint: &mut ClientEndpoint<Responder>, cx: &mut Context<'_>) -> io::Result<()> {
        loop {
            endpoint.stage();
            let mut slices = [IoSlice::new(&[]); SLICES];
            let count = endpoint.slices(&mut slices);
            if count == 0 {
                return self.flush.poll(&mut self.io, cx);
            }
            match poll_write(&mut self.io, &slices[..count], cx) {
                Poll::Pending => return Ok(()),
                Poll::Ready(Ok(written)) => {
                    self.flush.want();
                    endpoint.advance(written, clock::now());
                }
                Poll::Ready(Err(error)) => return Err(error),
            }
        }
    }

    fn poll_input(
        &mut self,
        endpoint: &mut ClientEndpoint<Responder>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), InputError>> {
        let (io, read) = (&mut self.io, &mut self.read);
        if endpoint.is_paused() {
            return Poll::Ready(endpoint.handle_input(&mut read.buffer, clock::now()).map_err(InputError::Protocol));
        }
        let count = match endpoint.bulk_target() {
            Some(target) => {
                let count = ready!(read.poll_into(io, target, cx)).map_err(InputError::Broken)?;
                if count > 0 {
                    return Poll::Ready(endpoint.bulk_filled(count, clock::now()).map_err(InputError::Protocol));
                }
                0
            }
            None => ready!(read.poll_more(io, cx)).map_err(InputError::Broken)?,
        };
        if count == 0 {
            if endpoint.ended().is_some() {
                // The end of the stream would be read for ever while there is output that the peer
                // does not take.
                return Poll::Pending;
            }
            endpoint.handle_end_of_stream(read.buffer.len());
            return Poll::Ready(Ok(()));
        }
        Poll::Ready(endpoint.handle_input(&mut read.buffer, clock::now()).map_err(InputError::Protocol))
    }
}

enum InputError {
    Broken(io::Error),
    Protocol(RpcError),
}
