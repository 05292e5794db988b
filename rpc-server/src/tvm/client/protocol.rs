//! A session as a protocol without input and output, for the threads that wait for replies.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Instant;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use rpc_core::proto::{Admission, ClientEvent};
use rpc_core::reply::ReplyControl as _;
use rpc_core::{ErrorKind, Handle, Operation, Request, Responder, RpcError};
use rpc_transports::{Bulk, ClientProtocol};
use rpc_tvm::wire::{ClientWire, LargeBody};

use super::farewell::LINGER;
use super::replies::Replies;
use super::session::work;
use super::state::ClientCore;

/// Work of a session: its end, and the last frame for the server.
type Work = Pin<Box<dyn Future<Output = (RpcError, Option<Vec<u8>>)> + Send>>;

/// The client's half of a connection, beside what its callers share.
pub(super) struct TvmProtocol {
    core: Arc<ClientCore>,
    replies: Replies,
    /// None once the session has ended.
    work: Option<Work>,
    /// Flag that the work is to be polled, and its waker.
    due: Arc<Due>,
    waker: Waker,
    /// Output that is being written.
    writing: Bytes,
    end: Option<End>,
}

/// The end of a session. The connection lasts longer: a server of TVM stops for good if nobody
/// takes its answers.
struct End {
    error: RpcError,
    is_reported: bool,
    /// Time when the connection is closed, whatever the server does.
    until: Instant,
    /// True once the connection can be closed.
    is_over: bool,
}

#[derive(Default)]
struct Due(AtomicBool);

impl Wake for Due {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

impl TvmProtocol {
    /// Creates the state of a session after the handshake.
    pub(super) fn new(core: ClientCore, wire: ClientWire) -> Self {
        let core = Arc::new(core);
        let due = Arc::new(Due(AtomicBool::new(true)));
        let waker = Waker::from(due.clone());
        let worker = core.clone();
        let work: Work = Box::pin(async move { work(&worker).await });
        Self { core, replies: Replies::new(wire), work: Some(work), due, waker, writing: Bytes::new(), end: None }
    }

    /// Does what can be done without input.
    fn work(&mut self) {
        while self.due.0.swap(false, Ordering::AcqRel) {
            let Some(work) = &mut self.work else { return };
            if let Poll::Ready((error, last)) = work.as_mut().poll(&mut Context::from_waker(&self.waker)) {
                self.end(error, last);
            }
        }
    }

    /// Gives the replies that have arrived to their requests.
    fn take_replies(&mut self) {
        if let Err(error) = self.replies.handle(&self.core) {
            self.end(error, None);
        }
    }

    /// Ends the session, of which callers are told at once. `last` is written behind all that was
    /// sent; without one nothing more is sent than what has been begun.
    fn end(&mut self, error: RpcError, last: Option<Vec<u8>>) {
        if self.end.is_some() {
            return;
        }
        self.work = None;
        let error = error.with_peer(&*self.core.peer);
        tracing::debug!(%error, "a session with a server of TVM has ended");
        self.core.tell(&error);
        match last {
            Some(last) => self.core.link.send_last(last),
            None => self.core.link.fail(&error),
        }
        self.end = Some(End { error, is_reported: false, until: Instant::now() + LINGER, is_over: false });
    }

    /// Ends the connection, of which nothing more is wanted.
    fn close(&mut self) {
        if let Some(end) = &mut self.end {
            end.is_over = true;
            self.writing = Bytes::new();
            self.core.link.fail(&end.error);
            _ = self.core.link.take_output();
        }
    }
}

impl ClientProtocol for TvmProtocol {
    type Bulk = LargeReply;

    fn submit(&mut self, id: u64, request: Request, responder: Responder, now: Instant) -> Admission<Responder> {
        if request.deadline.is_some_and(|deadline| deadline <= now) {
            let error = RpcError::new(ErrorKind::DeadlineExceeded, "the deadline of the request has passed");
            return Admission::Refused(responder, error);
        }
        match self.core.enqueue(id, request, responder) {
            Ok(()) => Admission::Later,
            Err((responder, error)) => Admission::Refused(responder, error),
        }
    }

    fn cancel(&mut self, id: u64) {
        self.core.cancel(id);
    }

    fn abandon(&mut self, id: u64) {
        self.core.cancel(id);
    }

    fn release(&mut self, handles: Vec<Handle>) {
        self.core.release(handles);
    }

    fn shutdown(&mut self, responder: Option<Responder>, deadline: Option<Instant>) {
        match responder {
            None => self.core.abandon(),
            Some(responder) => {
                let request = Request { deadline, ..Request::new(Operation::Shutdown) };
                if let Err((responder, error)) = self.core.enqueue(responder.id(), request, responder) {
                    self.core.outcomes.complete(responder, Err(error));
                }
            }
        }
    }

    fn fail(&mut self, error: RpcError) {
        self.end(error, None);
        self.close();
    }

    fn ended(&self) -> Option<&RpcError> {
        self.end.as_ref().map(|end| &end.error)
    }

    fn poll_event(&mut self) -> Option<ClientEvent<Responder>> {
        if let Some(event) = self.core.outcomes.poll() {
            return Some(event);
        }
        let end = self.end.as_mut().filter(|end| !end.is_reported)?;
        end.is_reported = true;
        Some(ClientEvent::Ended(end.error.clone()))
    }

    fn handle_input(&mut self, input: &mut BytesMut, now: Instant) -> Result<(), RpcError> {
        while self.end.is_none() && !input.is_empty() {
            // A part of it may be in its place already.
            if let Some(mut large) = self.take_bulk() {
                let target = large.unfilled();
                let count = target.len().min(input.len());
                target[..count].copy_from_slice(&input[..count]);
                large.advance(count);
                input.advance(count);
                self.put_bulk(large, now)?;
                continue;
            }
            let mut room = self.replies.wire.input();
            let count = room.remaining_mut().min(input.len());
            room.put_slice(&input[..count]);
            input.advance(count);
            self.take_replies();
        }
        input.clear();
        Ok(())
    }

    fn handle_end_of_stream(&mut self, _: usize) {
        self.end(self.replies.end_of_stream(), None);
        self.close();
    }

    fn handle_timeout(&mut self, now: Instant) -> Result<(), RpcError> {
        match &self.end {
            None => self.core.handle_timeout(now),
            Some(end) if end.until <= now => self.close(),
            Some(_) => {}
        }
        Ok(())
    }

    fn poll_timeout(&self) -> Option<Instant> {
        match &self.end {
            None => self.core.poll_timeout(),
            Some(end) => (!end.is_over).then_some(end.until),
        }
    }

    fn stage(&mut self) {
        self.work();
        if self.writing.is_empty() && self.core.link.has_output() {
            self.writing = self.core.link.take_output().unwrap_or_default();
        }
    }

    fn slices<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        if self.writing.is_empty() {
            return 0;
        }
        slices[0] = IoSlice::new(&self.writing);
        1
    }

    fn advance(&mut self, count: usize, _: Instant) {
        self.writing.advance(count);
        if self.writing.is_empty() {
            // What has been taken counts as written only with this.
            self.writing = self.core.link.take_output().unwrap_or_default();
        }
    }

    fn is_quiet(&self) -> bool {
        self.core.is_quiet()
    }

    fn is_due(&self) -> bool {
        self.due.0.load(Ordering::Acquire)
    }

    fn take_bulk(&mut self) -> Option<LargeReply> {
        if self.end.is_some() { None } else { self.replies.wire.take_large().map(LargeReply) }
    }

    fn put_bulk(&mut self, LargeReply(body): LargeReply, _: Instant) -> Result<(), RpcError> {
        self.replies.wire.put_large(body);
        if self.end.is_none() {
            self.take_replies();
        }
        Ok(())
    }

    fn put_idle_bulk(&mut self, LargeReply(body): LargeReply) {
        self.replies.wire.put_large(body);
    }

    fn is_over(&self) -> bool {
        self.end.as_ref().is_some_and(|end| end.is_over)
    }

    fn has_finished_output(&self) -> bool {
        self.end.is_some() && self.core.link.is_written()
    }

    fn broken(&self, error: &io::Error) -> RpcError {
        self.replies.broken(error)
    }
}

/// A large reply that is received straight into its place.
pub(super) struct LargeReply(LargeBody);

impl Bulk for LargeReply {
    fn unfilled(&mut self) -> &mut [u8] {
        self.0.unfilled()
    }

    fn advance(&mut self, count: usize) {
        self.0.advance(count);
    }
}
