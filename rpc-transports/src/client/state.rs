//! State of a client's session: requests, replies, frees and ends. This module performs no input or
//! output.
//!
//! [`ClientState`] is the session as its callers see it, with the endpoint of its
//! [protocol](super::protocol) under one lock. A [`Pump`] moves the bytes between the endpoint and
//! the channel: the [task](super::task) of an async runtime, or the [threads](super::blocking) that
//! wait for replies.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};
use rpc_core::blocking::Driver;
use rpc_core::proto::{Admission, ClientEvent};
use rpc_core::reply::ReplyControl;
use rpc_core::{ErrorKind, Operation, Request, Responder, RpcError, RpcSession, SharedSession, Submission, Value};

use super::protocol::ClientProtocol;
use crate::channel::ExplainEnd;
use crate::clock;

/// Mover of a session's bytes, with the state that it needs for that.
pub(super) trait Pump: Send + Sync + Sized + 'static {
    /// Endpoint of the session's protocol.
    type Endpoint: ClientProtocol;

    /// Part of the pump that the session's lock guards, beside the endpoint.
    type Locked: Send;

    /// Ensures that a caller's change of the endpoint is written. Called with the lock held;
    /// releases it.
    fn endpoint_changed(session: &ClientState<Self>, locked: MutexGuard<'_, Locked<Self>>, change: Change);

    /// Informs the pump of the reason for the session's end. Called after the pending requests have
    /// failed, and before the end watchers complete.
    fn session_ended(&self, error: &RpcError) {
        let _ = error;
    }

    /// Returns the source of explanations for the channel's end, if there is one.
    fn end(&self) -> Option<&Arc<dyn ExplainEnd>>;

    /// Drives the session in the background from now on, because a caller awaits a reply instead of
    /// waiting for it.
    fn attend(session: &ClientState<Self>) {
        let _ = session;
    }

    /// As [`Driver::attend_soon`].
    fn attend_soon(session: &ClientState<Self>) {
        Self::attend(session);
    }

    /// True if threads that wait for a reply have to call [`drive`](Self::drive).
    const DRIVEN_BY_CALLERS: bool = false;

    /// Moves the session's bytes on the calling thread until `done` returns true.
    fn drive(session: &ClientState<Self>, done: &dyn Fn() -> bool) {
        let _ = (session, done);
    }
}

/// Change that a caller has made to the endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// A request, or an orderly shutdown: the caller waits for the reply, and so the bytes get
    /// moved.
    Request,
    /// A cancellation, which has to be written at once: the caller may not wait any more.
    Cancel,
    /// Objects to be freed: written with the next request, or after a while.
    Release,
    /// The end of the last reference to the session, and so of every caller.
    Close,
}

/// Session at the far end of a channel, shared by its callers and its pump.
pub(super) struct ClientState<P: Pump> {
    pub(super) pump: P,
    peer: String,
    /// True if the channel is encrypted, at least as far as a hop that forwards it.
    is_encrypted: bool,
    locked: Mutex<Locked<P>>,
    next_id: AtomicU64,
    /// Explanation of the channel's end; `None` inside if its source knows none.
    explanation: OnceLock<Option<String>>,
    /// Substitute for the current time in requests without a deadline, which do not use it: reading
    /// the clock costs.
    created: Instant,
}

/// Part of the session that its lock guards.
pub(super) struct Locked<P: Pump> {
    pub(super) endpoint: P::Endpoint,
    pub(super) pump: P::Locked,
    /// Submissions that complete when the session ends.
    end_watchers: Vec<Responder>,
    /// True once the end watchers have been completed.
    is_end_reported: bool,
}

impl<P: Pump> ClientState<P> {
    /// Creates the state of a session whose handshake is done.
    pub(super) fn new(
        endpoint: P::Endpoint,
        (pump, locked): (P, P::Locked),
        peer: String,
        is_encrypted: bool,
    ) -> Arc<Self> {
        Arc::new(Self {
            pump,
            peer,
            is_encrypted,
            locked: Mutex::new(Locked { endpoint, pump: locked, end_watchers: Vec::new(), is_end_reported: false }),
            next_id: AtomicU64::new(1),
            explanation: OnceLock::new(),
            created: clock::now(),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Locked<P>> {
        self.locked.lock()
    }

    /// Locks the session, unless another thread has locked it.
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, Locked<P>>> {
        self.locked.try_lock()
    }

    /// Delivers events to their callers. The session must not be locked: completing a request may
    /// run any code.
    pub(super) fn deliver(&self, events: impl IntoIterator<Item = ClientEvent<Responder>>) {
        let peer = &*self.peer;
        let mut ended = None;
        for event in events {
            match event {
                ClientEvent::Admitted(responder) => responder.admit(),
                ClientEvent::Reply(responder, outcome) => {
                    let local =
                        |error: RpcError| if error.hop() == 0 { self.explained(error).with_peer(peer) } else { error };
                    responder.complete(outcome.map_err(local));
                }
                ClientEvent::GoingAway(error) => tracing::debug!(peer, %error, "the server is going away"),
                ClientEvent::Ended(error) => ended = Some(self.explained(error).with_peer(peer)),
            }
        }
        let Some(error) = ended else { return };
        self.pump.session_ended(&error);
        let mut locked = self.lock();
        locked.is_end_reported = true;
        let watchers = std::mem::take(&mut locked.end_watchers);
        drop(locked);
        for watcher in watchers {
            watcher.complete(Err(error.clone()));
        }
    }

    /// Returns the source that can explain the session's end, if these events report that end, the
    /// far side has caused it, and it has not been explained yet. The end is the last event.
    pub(super) fn unexplained_end(&self, events: &[ClientEvent<Responder>]) -> Option<&Arc<dyn ExplainEnd>> {
        let Some(ClientEvent::Ended(error)) = events.last() else { return None };
        if is_of_the_end(error) && self.explanation.get().is_none() { self.pump.end() } else { None }
    }

    /// Sets the explanation of the channel's end, before the end is delivered.
    pub(super) fn explain(&self, explanation: Option<String>) {
        _ = self.explanation.set(explanation);
    }

    /// Adds the explanation of the channel's end to an error that stems from it.
    fn explained(&self, error: RpcError) -> RpcError {
        match self.explanation.get() {
            Some(Some(end)) if is_of_the_end(&error) => error.context(end),
            _ => error,
        }
    }

    /// Completes the request of a caller that comes after the session's end with its error: at
    /// once, or with the end watchers if the end is still being explained.
    fn refuse(&self, responder: Responder, error: RpcError) {
        let mut locked = self.lock();
        if self.pump.end().is_some() && is_of_the_end(&error) && !locked.is_end_reported {
            locked.end_watchers.push(responder);
            return;
        }
        drop(locked);
        responder.complete(Err(self.explained(error).with_peer(&*self.peer)));
    }

    fn change<T>(&self, change: Change, apply: impl FnOnce(&mut P::Endpoint) -> T) -> T {
        let mut locked = self.lock();
        let result = apply(&mut locked.endpoint);
        P::endpoint_changed(self, locked, change);
        result
    }

    fn pending(self: &Arc<Self>) -> (Submission, Responder) {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        if P::DRIVEN_BY_CALLERS {
            Submission::driven(self.clone(), self.clone(), id)
        } else {
            Submission::pending(self.clone(), id)
        }
    }
}

impl<P: Pump> Locked<P> {
    /// Acts on the endpoint's timeout, if it is due at `now`.
    pub(super) fn handle_timeout(&mut self, now: Instant) {
        if let Err(error) = self.endpoint.handle_timeout(now) {
            self.endpoint.fail(error);
        }
    }

    /// Ends the session, because the channel is broken.
    pub(super) fn channel_broke(&mut self, error: &io::Error) {
        let error = self.endpoint.broken(error);
        self.endpoint.fail(error);
    }

    /// Returns true once the session has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.endpoint.ended().is_some()
    }

    /// Returns true once the channel can be closed.
    pub(super) fn is_over(&self) -> bool {
        self.endpoint.is_over()
    }

    /// Appends the events since the last call to `events`.
    pub(super) fn take_events(&mut self, events: &mut Vec<ClientEvent<Responder>>) {
        events.extend(std::iter::from_fn(|| self.endpoint.poll_event()));
    }
}

impl<P: Pump> ReplyControl for ClientState<P> {
    fn cancel(&self, id: u64) {
        self.change(Change::Cancel, |endpoint| endpoint.cancel(id));
    }

    fn abandon(&self, id: u64) {
        self.change(Change::Cancel, |endpoint| endpoint.abandon(id));
    }

    fn discard(&self, reply: Value) {
        self.change(Change::Release, |endpoint| endpoint.release(reply.handles()));
    }
}

impl<P: Pump> Driver for ClientState<P> {
    fn attend(&self) {
        P::attend(self);
    }

    fn attend_soon(&self) {
        P::attend_soon(self);
    }

    fn drive(&self, done: &dyn Fn() -> bool) {
        P::drive(self, done);
    }
}

/// Returns true if an error stems from the end of the channel to the peer.
fn is_of_the_end(error: &RpcError) -> bool {
    error.hop() == 0 && error.kind() == ErrorKind::PeerLost
}

/// Reference to a session. The session closes in good order when the last clone is gone, while its
/// pump still holds the state.
pub(super) struct SessionRef<P: Pump>(Arc<LastReference<P>>);

struct LastReference<P: Pump>(Arc<ClientState<P>>);

impl<P: Pump> SessionRef<P> {
    pub(super) fn new(state: Arc<ClientState<P>>) -> Self {
        Self(Arc::new(LastReference(state)))
    }

    pub(super) fn peer(&self) -> &str {
        &self.state().peer
    }

    /// Returns the session as its callers see it.
    pub(super) fn as_session(&self) -> &dyn RpcSession {
        &*self.0
    }

    /// Returns the pointer that all clones share.
    pub(super) fn into_shared(self) -> SharedSession {
        self.0
    }

    fn state(&self) -> &Arc<ClientState<P>> {
        self.0.state()
    }
}

impl<P: Pump> LastReference<P> {
    fn state(&self) -> &Arc<ClientState<P>> {
        &self.0
    }
}

impl<P: Pump> Clone for SessionRef<P> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<P: Pump> Drop for LastReference<P> {
    fn drop(&mut self) {
        self.0.change(Change::Close, |endpoint| endpoint.shutdown(None, None));
    }
}

impl<P: Pump> RpcSession for LastReference<P> {
    fn is_encrypted(&self) -> bool {
        self.state().is_encrypted
    }

    fn keeps_results(&self) -> bool {
        self.state().lock().endpoint.keeps_results()
    }

    fn submit(&self, request: Request) -> Submission {
        let state = self.state();
        match request.operation {
            Operation::Release { handles } => {
                state.change(Change::Release, |endpoint| endpoint.release(handles));
                Submission::ready(Ok(Value::Null))
            }
            Operation::Shutdown => {
                let (submission, responder) = state.pending();
                responder.admit();
                let has_ended = state.change(Change::Request, |endpoint| {
                    let has_ended = endpoint.ended().is_some();
                    if !has_ended {
                        endpoint.shutdown(Some(responder.clone()), request.deadline);
                    }
                    has_ended
                });
                if has_ended {
                    // No pump would complete the request any more, and no work is left.
                    responder.complete(Ok(Value::Null));
                }
                submission
            }
            _ => {
                let (submission, responder) = state.pending();
                let token = responder.clone();
                let now = if request.deadline.is_some() { clock::now() } else { state.created };
                let submit = |endpoint: &mut P::Endpoint| endpoint.submit(responder.id(), request, token, now);
                match state.change(Change::Request, submit) {
                    Admission::Now => responder.admit(),
                    Admission::Later => {}
                    Admission::Refused(_, error) => state.refuse(responder, error),
                }
                submission
            }
        }
    }

    fn ended(&self) -> Submission {
        let (submission, responder) = self.state().pending();
        responder.admit();
        let mut locked = self.state().lock();
        match locked.endpoint.ended().cloned() {
            Some(error) => {
                drop(locked);
                self.state().refuse(responder, error);
            }
            None => locked.end_watchers.push(responder),
        }
        submission
    }
}
