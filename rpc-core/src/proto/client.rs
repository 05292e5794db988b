//! The client's endpoint of a session: sends requests and matches replies to them by id.

mod admission;
mod unsent;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::io::IoSlice;
use std::time::Instant;

use bytes::{Buf, BytesMut};

use self::admission::{AdmissionQueue, QueuedRequest};
use self::unsent::Unsent;
use super::credit_frame::{cost, encode_credit, parse_credit};
use super::endpoint::{BulkRead, EndpointCommon, EndpointConfig, Incoming, Payload, PayloadTarget};
use super::frame::{FrameHeader, Kind};
use super::handshake::{Negotiated, PIPES};
use super::id_map::IdMap;
use super::message::{is_bytes_reply, read_reply, write_request};
use super::output::{Message, VALUE_SIZE};
use super::shared_window::{ClientWindow, MIN_SHARED, OfferWindow, OfferedWindow};
use crate::error::{ErrorKind, Result, RpcError};
use crate::handle::Handle;
use crate::reply::Outcome;
use crate::session::{Lane, Operation, ReadBuffer, Request};
use crate::value::Value;

/// Largest number of handles in one `Free` frame.
const FREES_PER_FRAME: usize = 8000;

/// Outcome of submitting a request.
#[derive(Debug)]
pub enum Admission<T> {
    /// The request is admitted: its position in its lane is fixed.
    Now,
    /// The request waits for credit. [`ClientEvent::Admitted`] follows.
    Later,
    /// The request will not be sent.
    Refused(T, RpcError),
}

/// Event for the driver. `T` is the token that the driver passed with the request.
#[derive(Debug)]
pub enum ClientEvent<T> {
    /// The request is admitted: its position in its lane is fixed.
    Admitted(T),
    /// The request has ended with this outcome.
    Reply(T, Outcome),
    /// The server accepts no new requests.
    GoingAway(RpcError),
    /// The session has ended. This is the last event; all replies have been reported before.
    Ended(RpcError),
}

struct InFlight<T> {
    /// The driver's token. `None` once the driver has been told the outcome.
    token: Option<T>,
    /// Bytes of credit that return with the reply.
    cost: u64,
    into: Option<ReadBuffer>,
    order: u64,
    cancel: CancelState,
    /// True if the caller is gone, and the request counts as orphaned until it has been sent whole.
    is_orphan: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum CancelState {
    None,
    /// To be sent when the request has been sent whole, so that the cancellation does not overtake
    /// it.
    Requested,
    Sent,
}

enum SessionState<T> {
    Open,
    /// The server has sent `GoAway`: no new requests.
    Draining(RpcError),
    /// Shut down by the driver: closes once every request is answered.
    Closing(Vec<T>),
    /// `Close` has been sent.
    CloseSent(Vec<T>),
    Ended(RpcError),
}

/// The client's endpoint of one session. `T` is a token that the driver gets back with each event,
/// such as a [`Responder`](crate::Responder).
pub struct ClientEndpoint<T> {
    common: EndpointCommon,
    state: SessionState<T>,
    /// Limit of the peer, in bytes.
    max_message: u64,
    max_requests: usize,
    /// True if the server keeps results for later requests.
    keeps_results: bool,
    window: u64,
    in_flight: IdMap<InFlight<T>>,
    queued: AdmissionQueue<T>,
    deadlines: BinaryHeap<Reverse<(Instant, u64)>>,
    /// Released objects, each with the number of submissions before it, sent or not: a free must
    /// not overtake those.
    frees: VecDeque<(u64, Handle)>,
    /// Size in bytes of the requests whose caller is gone, and that have not been sent whole.
    orphaned: u64,
    /// Size of the largest of them so far.
    largest_orphan: u64,
    /// Most memory in bytes that `frees` and orphaned requests may take: the peer reads too little
    /// then.
    max_held: u64,
    submissions: u64,
    unsent: Unsent,
    /// Number of the numbered ping to answer. The answer must not overtake requests either.
    pong: Option<u64>,
    /// Bytes received whose credit has not been returned to the server.
    consumed: u64,
    grant_at: u64,
    shared: ClientWindow,
    events: VecDeque<ClientEvent<T>>,
}

impl<T: Clone> ClientEndpoint<T> {
    /// Creates the endpoint after a handshake in which this side became the client.
    pub fn new(negotiated: &Negotiated, config: EndpointConfig, now: Instant) -> Self {
        Self {
            common: EndpointCommon::new(negotiated, config, now),
            state: SessionState::Open,
            max_message: negotiated.theirs.max_message,
            max_requests: negotiated.theirs.max_requests as usize,
            keeps_results: negotiated.has_feature(PIPES),
            window: negotiated.theirs.window,
            in_flight: IdMap::default(),
            queued: AdmissionQueue::default(),
            deadlines: BinaryHeap::new(),
            frees: VecDeque::new(),
            orphaned: 0,
            largest_orphan: 0,
            max_held: negotiated.ours.window,
            submissions: 0,
            unsent: Unsent::default(),
            pong: None,
            consumed: 0,
            // The credit held back must leave room for the largest reply, or the server would wait
            // for ever.
            grant_at: (negotiated.ours.window / 4)
                .min(negotiated.ours.window.saturating_sub(negotiated.ours.max_message)),
            shared: ClientWindow::None,
            events: VecDeque::new(),
        }
    }

    /// Offers the server a window of shared memory when there is a large payload to send or to
    /// receive. For sessions with the feature [`SHARED_MEMORY`](super::SHARED_MEMORY).
    #[must_use]
    pub fn with_window(mut self, offer: OfferWindow) -> Self {
        self.shared = ClientWindow::Possible(offer);
        self
    }

    /// Handles received bytes. The rest that stays in `input` is the beginning of a frame, unless
    /// the endpoint [pauses](Self::is_paused): append the next bytes to it.
    ///
    /// # Errors
    ///
    /// The peer broke the protocol: call [`fail`](Self::fail) with the error.
    pub fn handle_input(&mut self, input: &mut BytesMut, now: Instant) -> Result<()> {
        self.common.alive(now);
        self.common.took_shared = false;
        let mut used = 0;
        let outcome = self.handle_messages(input, &mut used);
        // A session that has ended drops all further input.
        let used = if let SessionState::Ended(_) = self.state { input.len() } else { used };
        input.advance(used);
        outcome
    }

    fn handle_messages(&mut self, input: &[u8], used: &mut usize) -> Result<()> {
        while !matches!(self.state, SessionState::Ended(_)) {
            let in_flight = &self.in_flight;
            let mut target = |header: &FrameHeader, body: &[u8]| match in_flight.get(&header.id) {
                Some(InFlight { into, .. }) if is_bytes_reply(body, header.payload_len.into()) => {
                    match into.as_ref().and_then(ReadBuffer::take) {
                        Some(buffer) if buffer.len() == header.payload_len as usize => PayloadTarget::Read(buffer),
                        Some(buffer) => {
                            into.as_ref().inspect(|into| into.put_back(buffer));
                            PayloadTarget::Pool
                        }
                        None => PayloadTarget::Pool,
                    }
                }
                _ => PayloadTarget::Pool,
            };
            let may_begin = |header: &FrameHeader, _| {
                if in_flight.contains_key(&header.id) { Ok(()) } else { Err(unexpected_reply(header.id)) }
            };
            match self.common.next(input, used, &mut target, &may_begin, &mut |_| Ok(()))? {
                Some(incoming) => self.handle(incoming)?,
                None => break,
            }
            if self.common.took_shared {
                break;
            }
        }
        Ok(())
    }

    /// Returns true if the last message came through shared memory, and the input may hold further
    /// ones. They wait, so that the server can fill the next slots while the caller goes on.
    pub fn is_paused(&self) -> bool {
        self.common.took_shared
    }

    /// Returns memory to read into directly, while a large payload is being received.
    pub fn bulk_target(&mut self) -> Option<&mut [u8]> {
        self.common.bulk_target()
    }

    /// Records that the first `count` bytes of the bulk target were read.
    ///
    /// # Errors
    ///
    /// As [`handle_input`](Self::handle_input).
    pub fn bulk_filled(&mut self, count: usize, now: Instant) -> Result<()> {
        match self.common.bulk_filled(count, now) {
            Some(incoming) => self.handle(incoming?),
            None => Ok(()),
        }
    }

    /// Takes out the large payload that is being received, so that it can be filled without locking
    /// the endpoint.
    pub fn take_bulk(&mut self) -> Option<BulkRead> {
        self.common.take_bulk()
    }

    /// Puts back the payload that [`take_bulk`](Self::take_bulk) returned.
    ///
    /// # Errors
    ///
    /// As [`handle_input`](Self::handle_input).
    pub fn put_bulk(&mut self, bulk: BulkRead, now: Instant) -> Result<()> {
        match self.common.put_bulk(bulk, now) {
            Some(incoming) => self.handle(incoming?),
            None => Ok(()),
        }
    }

    /// Puts the payload back like [`put_bulk`](Self::put_bulk), when no bytes were read in the
    /// meantime.
    pub fn put_idle_bulk(&mut self, bulk: BulkRead) {
        self.common.put_idle_bulk(bulk);
    }

    /// Handles the peer's end of stream. `input_left` is the number of received bytes that could
    /// not be used.
    pub fn handle_end_of_stream(&mut self, input_left: usize) {
        let error = match &self.state {
            SessionState::CloseSent(_) => closed(),
            _ => self.common.end_of_stream(input_left),
        };
        self.end(error);
    }

    /// Handles the passage of time: deadlines and keep-alive.
    ///
    /// # Errors
    ///
    /// The peer has been silent for too long: call [`fail`](Self::fail) with the error.
    pub fn handle_timeout(&mut self, now: Instant) -> Result<()> {
        while let Some(Reverse((deadline, id))) = self.deadlines.peek().copied() {
            if deadline > now {
                break;
            }
            self.deadlines.pop();
            self.expire(id);
        }
        self.common.handle_timeout(now)
    }

    fn expire(&mut self, id: u64) {
        let error = deadline_exceeded();
        if let Some(request) = self.queued.remove(id) {
            self.events.push_back(ClientEvent::Reply(request.token, Err(error)));
            // Requests behind it may need less credit.
            self.admit_queued();
            return;
        }
        let sent = !self.unsent.contains(id);
        let Some(request) = self.in_flight.get_mut(&id) else { return };
        if let Some(token) = request.token.take() {
            self.events.push_back(ClientEvent::Reply(token, Err(error.may_have_run(sent))));
        }
        self.cancel(id);
        self.close_if_quiet();
    }

    /// Submits a request. `id` is chosen by the driver and must not have been used before. Releases
    /// and shutdowns have methods of their own.
    pub fn submit(&mut self, id: u64, request: Request, token: T, now: Instant) -> Admission<T> {
        match &self.state {
            SessionState::Open => {}
            SessionState::Draining(error) | SessionState::Ended(error) => {
                return Admission::Refused(token, error.clone().may_have_run(false));
            }
            SessionState::Closing(_) | SessionState::CloseSent(_) => return Admission::Refused(token, closed()),
        }
        if request.deadline.is_some_and(|deadline| deadline <= now) {
            return Admission::Refused(token, deadline_exceeded());
        }
        let writer = write_request(&request, now, self.common.output.take_body());
        if let Some(invalid) = writer.invalid {
            return Admission::Refused(token, RpcError::invalid_argument(invalid));
        }
        if writer.has_pipes && !self.keeps_results {
            let text = "the server is too old to keep results for later requests (feature 'pipes')";
            return Admission::Refused(token, RpcError::unsupported(text));
        }
        let message = Message::new(Kind::Request, id, request.lane.0, writer.body, writer.payload, writer.values);
        if message.size as u64 > self.max_message {
            let error = RpcError::limit("max_message", self.max_message, message.size as u64);
            return Admission::Refused(token, error.context("the request is too large; copies have no such limit"));
        }
        let is_large_read = matches!(request.operation, Operation::Read { len, .. } if len >= MIN_SHARED as u64);
        if is_large_read || message.payload_len() >= MIN_SHARED {
            self.offer_window();
        }
        let into = match request.operation {
            Operation::Read { into, .. } => into,
            _ => None,
        };
        let Request { lane, deadline, .. } = request;
        if let Some(deadline) = deadline {
            self.forget_deadlines();
            self.deadlines.push(Reverse((deadline, id)));
        }
        self.submissions += 1;
        let request = QueuedRequest { id, submission: self.submissions, token, lane, message, into };
        if self.queued.is_behind(lane, &request.message) || !self.has_credit(&request.message) {
            self.queued.push(request);
            return Admission::Later;
        }
        self.admit(request);
        Admission::Now
    }

    /// Offers the window, unless that has been done or the session is about to end.
    fn offer_window(&mut self) {
        if !matches!(self.state, SessionState::Open) {
            return;
        }
        match std::mem::replace(&mut self.shared, ClientWindow::None) {
            ClientWindow::Possible(offer) => {
                if let Some(OfferedWindow { offer, confirm }) = offer() {
                    self.shared = ClientWindow::Offered(confirm);
                    self.common.control(Kind::Window, 0, &offer);
                }
            }
            other => self.shared = other,
        }
    }

    /// Handles the answer to the offer of the window.
    fn handle_window(&mut self, proof: &[u8]) -> Result<()> {
        let protocol = |text: &'static str| Err(RpcError::new(ErrorKind::Protocol, text));
        match std::mem::replace(&mut self.shared, ClientWindow::None) {
            ClientWindow::Offered(_) if proof.is_empty() => {
                tracing::debug!("the server does not use the memory that it could share");
                Ok(())
            }
            ClientWindow::Offered(confirm) => match confirm(proof) {
                Some(window) => {
                    self.common.output.window = Some(window);
                    Ok(())
                }
                None => protocol("the peer has opened another shared memory than the one offered"),
            },
            _ => protocol("the peer answers an offer of shared memory that was not made"),
        }
    }

    /// Releases objects. They are freed after all requests that were submitted before.
    pub fn release(&mut self, handles: impl IntoIterator<Item = Handle>) {
        // Nothing may follow `Close`, and the end of a session frees everything that it held.
        if !matches!(self.state, SessionState::CloseSent(_) | SessionState::Ended(_)) {
            let submissions = self.submissions;
            self.frees.extend(handles.into_iter().map(|handle| (submissions, handle)));
            self.check_held();
        }
    }

    /// Ends the session if the peer makes this side hold too much that no caller waits for.
    fn check_held(&mut self) {
        // A growing list has up to twice the room that it needs.
        let frees = 2 * size_of::<(u64, Handle)>() * self.frees.len();
        let held = self.orphaned + frees as u64;
        // One request may be larger than the window of this side, which is for what it receives.
        let limit = self.max_held.saturating_add(self.largest_orphan);
        if held > limit {
            let error = RpcError::limit("window", limit, held);
            self.fail(error.context("the peer does not read what callers release or no longer wait for"));
        }
    }

    /// Cancels a request. It still ends with [`ClientEvent::Reply`].
    pub fn cancel(&mut self, id: u64) {
        let cancelled = || RpcError::new(ErrorKind::Cancelled, "the request was cancelled before it was sent");
        if let Some(request) = self.queued.remove(id) {
            self.events.push_back(ClientEvent::Reply(request.token, Err(cancelled())));
            self.admit_queued();
            return;
        }
        let unsent = self.unsent.contains(id);
        let Some(request) = self.in_flight.get_mut(&id) else { return };
        if unsent {
            if self.common.output.remove(request.order, id).is_some() {
                self.unsent.remove(id);
                self.finish(id, Err(cancelled()));
            } else {
                request.cancel = CancelState::Requested;
                if request.token.is_none() && !std::mem::replace(&mut request.is_orphan, true) {
                    self.orphaned += request.cost;
                    self.largest_orphan = self.largest_orphan.max(request.cost);
                    self.check_held();
                }
            }
        } else if request.cancel != CancelState::Sent {
            request.cancel = CancelState::Sent;
            self.common.control(Kind::Cancel, id, &[]);
        }
    }

    /// Cancels a request like [`cancel`](Self::cancel), for a caller that is gone. It
    /// [ends](ClientEvent::Reply) at once, and the end of the session does not wait for its reply.
    pub fn abandon(&mut self, id: u64) {
        if !self.queued.contains(id) {
            let Some(request) = self.in_flight.get_mut(&id) else { return };
            if let Some(token) = request.token.take() {
                let error =
                    RpcError::new(ErrorKind::Cancelled, "the caller no longer waits for the reply").may_have_run(true);
                self.events.push_back(ClientEvent::Reply(token, Err(error)));
            }
        }
        self.cancel(id);
        self.close_if_quiet();
    }

    /// Closes the session once all requests that were not abandoned have ended. `token` is returned
    /// with the end.
    pub fn shutdown(&mut self, token: Option<T>) {
        match &mut self.state {
            SessionState::Open | SessionState::Draining(_) => {
                self.state = SessionState::Closing(token.into_iter().collect())
            }
            SessionState::Closing(tokens) | SessionState::CloseSent(tokens) => tokens.extend(token),
            SessionState::Ended(_) => {
                self.events.extend(token.map(|token| ClientEvent::Reply(token, Ok(Value::Null))));
            }
        }
        self.close_if_quiet();
    }

    /// Ends the session at once with `error`. The peer is told if it broke the protocol.
    pub fn fail(&mut self, error: RpcError) {
        if error.kind() == ErrorKind::Protocol && !matches!(self.state, SessionState::Ended(_)) {
            self.common.control(Kind::Close, 0, &error.to_wire());
        }
        self.end(error);
    }

    /// Returns the next event.
    pub fn poll_event(&mut self) -> Option<ClientEvent<T>> {
        self.events.pop_front()
    }

    /// Moves queued frames to where [`slices`](Self::slices) shows them.
    pub fn stage(&mut self) {
        self.common.output.stage();
        self.note_sent();
        // Frees that cannot be written soon wait in the list, which is bounded.
        let most = if self.common.output.is_full() { 0 } else { 8 * FREES_PER_FRAME };
        let mut more = self.stage_frees(most);
        if self.unsent.is_empty()
            && let Some(id) = self.pong.take()
        {
            self.common.control(Kind::Pong, id, &[]);
            more = true;
        }
        if more {
            self.common.output.stage();
        }
    }

    /// Fills `slices` with the bytes to write, for a vectored write. Returns the number of slices
    /// filled.
    pub fn slices<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        self.common.output.slices(slices)
    }

    /// Records that the first `count` bytes of the slices were written.
    pub fn advance(&mut self, count: usize, now: Instant) {
        self.common.advance(count, now);
    }

    /// Returns true if nothing is left to write.
    pub fn is_flushed(&self) -> bool {
        self.common.output.is_empty() && self.frees.is_empty() && self.pong.is_none()
    }

    /// Returns the time when [`handle_timeout`](Self::handle_timeout) must be called next.
    pub fn poll_timeout(&self) -> Option<Instant> {
        if let SessionState::Ended(_) = self.state {
            return None;
        }
        let keep_alive = self.common.poll_timeout();
        Some(self.deadlines.peek().map_or(keep_alive, |Reverse((deadline, _))| keep_alive.min(*deadline)))
    }

    /// Returns the error with which the session ended, if it has ended.
    pub fn ended(&self) -> Option<&RpcError> {
        if let SessionState::Ended(error) = &self.state { Some(error) } else { None }
    }

    /// Returns true if the server has the feature [`PIPES`]: it keeps results for later requests.
    pub fn keeps_results(&self) -> bool {
        self.keeps_results
    }

    /// Returns true if no request is in flight or waits for credit.
    pub fn is_quiet(&self) -> bool {
        self.in_flight.is_empty() && self.queued.is_empty()
    }

    fn has_credit(&self, message: &Message) -> bool {
        self.in_flight.len() < self.max_requests && cost(message.size) <= self.window
    }

    fn admit(&mut self, request: QueuedRequest<T>) {
        let QueuedRequest { id, submission, token, lane, message, into } = request;
        let cost = cost(message.size);
        self.window -= cost;
        // Each concurrent request is a lane of its own.
        let order = if lane == Lane::CONCURRENT { id | 1 << 63 } else { lane.0.into() };
        self.in_flight.insert(
            id,
            InFlight { token: Some(token), cost, into, order, cancel: CancelState::None, is_orphan: false },
        );
        self.common.output.message(order, message);
        // Most requests are staged whole at once.
        if self.common.output.sent.pop_if(|sent| *sent == id).is_none() {
            self.unsent.insert(id, submission);
        }
    }

    fn admit_queued(&mut self) {
        while self.in_flight.len() < self.max_requests
            && let Some(request) = self.queued.next(self.window)
        {
            self.events.push_back(ClientEvent::Admitted(request.token.clone()));
            self.admit(request);
        }
    }

    /// Removes the deadlines of ended requests, once they outnumber those of the others.
    fn forget_deadlines(&mut self) {
        if self.deadlines.len() >= 64 + 2 * (self.in_flight.len() + self.queued.len()) {
            let (in_flight, queued) = (&self.in_flight, &self.queued);
            self.deadlines.retain(|Reverse((_, id))| in_flight.contains_key(id) || queued.contains(*id));
        }
    }

    /// Processes the ids of requests whose last frame has been staged.
    fn note_sent(&mut self) {
        let mut cancelled = false;
        while let Some(id) = self.common.output.sent.pop() {
            self.unsent.remove(id);
            let Some(request) = self.in_flight.get_mut(&id) else { continue };
            if std::mem::take(&mut request.is_orphan) {
                self.orphaned -= request.cost;
            }
            if request.cancel == CancelState::Requested {
                request.cancel = CancelState::Sent;
                self.common.control(Kind::Cancel, id, &[]);
                cancelled = true;
            }
        }
        if cancelled {
            self.close_if_quiet();
        }
    }

    /// Queues at most `most` of the frees that no request holds back. Returns true if there were
    /// any.
    fn stage_frees(&mut self, most: usize) -> bool {
        if self.frees.is_empty() || most == 0 {
            return false;
        }
        let limit = self.unsent.oldest().into_iter().chain(self.queued.oldest()).min().unwrap_or(u64::MAX);
        let count = self.frees.iter().take(most).take_while(|(submissions, _)| *submissions < limit).count();
        let mut body = Vec::with_capacity(8 * count.min(FREES_PER_FRAME));
        for (at, (_, handle)) in self.frees.drain(..count).enumerate() {
            body.extend_from_slice(&handle.to_bits().to_le_bytes());
            if body.len() == 8 * FREES_PER_FRAME || at + 1 == count {
                self.common.control(Kind::Free, 0, &body);
                body.clear();
            }
        }
        count > 0
    }

    fn handle(&mut self, incoming: Incoming<'_>) -> Result<()> {
        if incoming.kind == Kind::Ping && incoming.id != 0 {
            self.pong = self.pong.max(Some(incoming.id));
            return Ok(());
        }
        let Some(incoming) = self.common.handle_control(incoming) else { return Ok(()) };
        match incoming.kind {
            Kind::Reply | Kind::Error => self.handle_reply(incoming),
            Kind::Credit => {
                let (requests, bytes) = parse_credit(&incoming.body)?;
                self.max_requests = self.max_requests.saturating_add(requests as usize);
                self.window = self.window.saturating_add(bytes);
                self.admit_queued();
                Ok(())
            }
            Kind::GoAway => {
                let error = RpcError::from_wire(&incoming.body).map(RpcError::from_next_hop).unwrap_or_else(|_| {
                    RpcError::new(ErrorKind::Draining, "the server is going away and takes no new requests")
                });
                if let SessionState::Open = self.state {
                    self.state = SessionState::Draining(error.clone());
                }
                for request in self.queued.take_all() {
                    self.events.push_back(ClientEvent::Reply(request.token, Err(error.clone())));
                }
                self.events.push_back(ClientEvent::GoingAway(error));
                Ok(())
            }
            Kind::Window => self.handle_window(&incoming.body),
            Kind::Close => {
                let error = match &self.state {
                    SessionState::CloseSent(_) => closed(),
                    _ if incoming.body.is_empty() => RpcError::new(ErrorKind::Closed, "the server closed the session"),
                    _ => RpcError::from_wire(&incoming.body).map_or_else(|_| closed(), RpcError::from_next_hop),
                };
                self.end(error);
                Ok(())
            }
            kind => Err(RpcError::new(
                ErrorKind::Protocol,
                format!("the peer sent a {kind:?} frame, which a server must not send"),
            )),
        }
    }

    fn handle_reply(&mut self, incoming: Incoming<'_>) -> Result<()> {
        let Incoming { kind, id, body, payload, .. } = incoming;
        if !self.in_flight.contains_key(&id) {
            return Err(unexpected_reply(id));
        }
        // A peer that guesses ids must not make this side forget requests that it still holds.
        if self.unsent.contains(id) {
            let text = format!("the peer sent a reply to request {id} before the request was sent");
            return Err(RpcError::new(ErrorKind::Protocol, text));
        }
        let (outcome, size) = match payload {
            Payload::Bytes(payload) => {
                let len = body.len() + payload.len();
                let (outcome, values) = read_reply(kind == Kind::Error, &body, payload)?;
                (outcome, len.max(values * VALUE_SIZE))
            }
            Payload::Read(buffer) => {
                let len = body.len() + buffer.len();
                if let Some(into) = self.in_flight.get(&id).and_then(|request| request.into.as_ref()) {
                    into.put_back(buffer);
                }
                (Ok(Value::Null), len)
            }
            Payload::Written(_) => return Err(RpcError::internal("the payload of a reply was received as a write")),
            Payload::Refused(error) => return Err(error),
        };
        if size >= MIN_SHARED {
            // Another one may follow: what a call returns is not known before.
            self.offer_window();
        }
        self.consumed += cost(size);
        if self.consumed > self.grant_at {
            self.common.control(Kind::Credit, 0, &encode_credit(0, self.consumed));
            self.consumed = 0;
        }
        self.finish(id, outcome);
        Ok(())
    }

    fn finish(&mut self, id: u64, outcome: Outcome) {
        let Some(request) = self.in_flight.remove(&id) else { return };
        self.window = self.window.saturating_add(request.cost);
        match (request.token, outcome) {
            (Some(token), outcome) => self.events.push_back(ClientEvent::Reply(token, outcome)),
            (None, Ok(value)) => self.release(value.handles()),
            (None, Err(_)) => {}
        }
        self.admit_queued();
        self.close_if_quiet();
    }

    fn close_if_quiet(&mut self) {
        if let SessionState::Closing(tokens) = &mut self.state
            && self.queued.is_empty()
            && self.in_flight.values().all(|request| request.token.is_none() && request.cancel == CancelState::Sent)
        {
            self.state = SessionState::CloseSent(std::mem::take(tokens));
            self.stage_frees(usize::MAX);
            self.common.control(Kind::Close, 0, &[]);
        }
    }

    fn end(&mut self, error: RpcError) {
        if let SessionState::Ended(_) = self.state {
            return;
        }
        let unsent = std::mem::take(&mut self.unsent);
        for (id, request) in std::mem::take(&mut self.in_flight) {
            if let Some(token) = request.token {
                let error = error.clone().may_have_run(!unsent.contains(id));
                self.events.push_back(ClientEvent::Reply(token, Err(error)));
            }
        }
        for request in self.queued.take_all() {
            self.events.push_back(ClientEvent::Reply(request.token, Err(error.clone().may_have_run(false))));
        }
        if let SessionState::Closing(tokens) | SessionState::CloseSent(tokens) =
            std::mem::replace(&mut self.state, SessionState::Ended(error.clone()))
        {
            for token in tokens {
                self.events.push_back(ClientEvent::Reply(token, Ok(Value::Null)));
            }
        }
        self.frees.clear();
        self.orphaned = 0;
        self.deadlines.clear();
        self.pong = None;
        // References to the session may live long, and should not keep memory.
        self.shared = ClientWindow::None;
        self.common.output.window = None;
        self.events.push_back(ClientEvent::Ended(error));
    }
}

impl<T> std::fmt::Debug for ClientEndpoint<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClientEndpoint")
            .field("in_flight", &self.in_flight.len())
            .field("queued", &self.queued.len())
            .finish_non_exhaustive()
    }
}

fn deadline_exceeded() -> RpcError {
    RpcError::new(ErrorKind::DeadlineExceeded, "the request's deadline passed")
}

fn closed() -> RpcError {
    RpcError::new(ErrorKind::Closed, "the session was shut down")
}

fn unexpected_reply(id: u64) -> RpcError {
    RpcError::new(ErrorKind::Protocol, format!("the peer sent a reply to request {id}, which was not made"))
}
