//! The server's endpoint of a session: receives requests and sends exactly one terminal reply for
//! each.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::Instant;

use bytes::{Buf, BytesMut};

use super::codec::CodecError;
use super::credit_frame::{cost, parse_credit};
use super::endpoint::{EndpointCommon, EndpointConfig, Incoming, Payload, PayloadTarget};
use super::frame::{FrameHeader, Kind, MAX_BODY_PART};
use super::handshake::Negotiated;
use super::id_map::IdMap;
use super::message::{peek_write, read_request, write_reply};
use super::output::{Message, VALUE_SIZE};
use super::shared_window::WindowOpener;
use crate::error::{ErrorKind, Result, RpcError};
use crate::handle::Handle;
use crate::memory_quota::{MemoryLease, MemoryQuota};
use crate::reply::Outcome;
use crate::session::{InPlaceWrite, Lane, Request};
use crate::value::{TensorRef, Value};

/// Largest number of client windows that unsent replies may fill. From one window on, no further
/// requests are begun; the replies of requests that run already fail beyond this number.
const BACKLOG_WINDOWS: u64 = 8;

/// Chunks that a session may queue without counting against the limit of all sessions: as many as
/// one copy has in flight at least. A copy with more in flight goes on with so many if the limit of
/// all sessions is reached.
const FREE_CHUNKS: u64 = 8;

/// Step in bytes by which a session reserves from the limit of all sessions.
const LEASE_STEP: u64 = 256 << 10;

/// Number of the ping that follows a `GoAway`.
const DRAIN_PING: u64 = 1;

/// Event for the driver.
#[derive(Debug)]
pub enum ServerEvent {
    /// A request: submit it, in the order of these events, and answer it with
    /// [`ServerEndpoint::reply`].
    Request {
        /// Id of the request.
        id: u64,
        /// The request.
        request: Request,
    },
    /// A write that was received in place: drop it, and answer it.
    Written {
        /// Id of the request.
        id: u64,
        /// The filled write.
        write: InPlaceWrite,
    },
    /// The caller no longer waits for the request. It must still be answered.
    Cancel {
        /// Id of the request.
        id: u64,
    },
    /// Objects that the client has released.
    Release {
        /// Handles of the objects.
        handles: Vec<Handle>,
    },
    /// The client has closed the session: end it, and call [`ServerEndpoint::close`].
    Close,
}

/// Function that offers memory for a write that is about to arrive; see
/// [`RpcSession::write_in_place`](crate::RpcSession::write_in_place).
pub type InPlaceWriter<'a> = &'a mut dyn FnMut(Lane, &TensorRef, u64, u64) -> Option<InPlaceWrite>;

/// The server's endpoint of one session.
pub struct ServerEndpoint {
    common: EndpointCommon,
    max_requests: usize,
    /// Bytes of large requests that the client may have in flight.
    window: u64,
    /// Bytes of `window` that are in use.
    used: u64,
    /// Memory of unanswered requests in bytes.
    unanswered: u64,
    /// Memory of the requests and replies queued here, counted against the limit of all sessions.
    queued: QueuedMemory,
    /// Bytes of large replies that may still be sent.
    reply_window: u64,
    max_reply: u64,
    in_flight: IdMap<RequestCost>,
    /// Number of replies that have not been sent whole. A client that keeps to its credit has not
    /// seen them.
    unsent: usize,
    /// Costs of large requests and their replies, until the reply has been sent whole: bytes of the
    /// window, bytes of memory.
    unsent_costs: IdMap<(u64, u64)>,
    /// Sum of the bytes of memory in `unsent_costs`.
    backlog: u64,
    /// Backlog above which requests wait, in bytes.
    max_backlog: u64,
    large_replies: VecDeque<Message>,
    events: VecDeque<ServerEvent>,
    /// Memory in bytes of the releases in `events`.
    held_releases: u64,
    /// Most memory in bytes that releases may take while they wait behind held-back requests.
    max_held_releases: u64,
    /// True once the client has sent its last frame. What follows is dropped.
    closed_by_peer: bool,
    closed: bool,
    /// Way to open the window that the client may offer once.
    window_opener: Option<WindowOpener>,
    /// Charge for the open window.
    window_lease: Option<MemoryLease>,
    /// Body of the final `Close` frame, while it waits for replies to be sent.
    close_body: Option<Vec<u8>>,
}

impl ServerEndpoint {
    /// Creates the endpoint after a handshake in which this side became the server.
    pub fn new(negotiated: &Negotiated, config: EndpointConfig, now: Instant) -> Self {
        Self {
            common: EndpointCommon::new(negotiated, config, now),
            max_requests: negotiated.ours.max_requests as usize,
            window: negotiated.ours.window,
            used: 0,
            unanswered: 0,
            queued: QueuedMemory { free: FREE_CHUNKS * u64::from(negotiated.ours.chunk), ..QueuedMemory::default() },
            reply_window: negotiated.theirs.window,
            max_reply: negotiated.theirs.max_message,
            in_flight: IdMap::default(),
            unsent: 0,
            unsent_costs: IdMap::default(),
            backlog: 0,
            max_backlog: negotiated.theirs.window.min(negotiated.ours.window),
            large_replies: VecDeque::new(),
            events: VecDeque::new(),
            held_releases: 0,
            max_held_releases: negotiated.ours.window,
            closed_by_peer: false,
            closed: false,
            window_opener: None,
            window_lease: None,
            close_body: None,
        }
    }

    /// Counts queued memory against `quota`, too, beyond the eight chunks that one copy has in
    /// flight at least. Requests and replies that find no room fail with
    /// [`LimitExceeded`](ErrorKind::LimitExceeded), and the session continues.
    #[must_use]
    pub fn with_quota(mut self, quota: Arc<MemoryQuota>) -> Self {
        self.queued.quota = Some(quota);
        self
    }

    /// Lets the client offer a window of shared memory, which counts against the quota for as long
    /// as the session lasts. For sessions with the feature [`SHARED_MEMORY`](super::SHARED_MEMORY).
    #[must_use]
    pub fn with_window(mut self, opener: WindowOpener) -> Self {
        self.window_opener = Some(opener);
        self
    }

    /// Handles at most one message of the received bytes, so that the driver can act on each in
    /// turn: call it until it returns `false`. The rest that stays in `input` then is the beginning
    /// of a frame: append the next bytes to it. `in_place` is asked for memory when a large write
    /// arrives.
    ///
    /// # Errors
    ///
    /// The peer broke the protocol, or made this side hold more than a limit that ends the session
    /// ([`LimitExceeded`](ErrorKind::LimitExceeded)): call [`close`](Self::close) with the error.
    pub fn handle_input(&mut self, input: &mut BytesMut, now: Instant, in_place: InPlaceWriter<'_>) -> Result<bool> {
        self.common.alive(now);
        self.common.took_shared = false;
        self.note_sent();
        if self.closed_by_peer {
            input.clear();
            return Ok(false);
        }
        let in_flight = &self.in_flight;
        let holds_events_back = !self.events.is_empty();
        let mut target = |header: &FrameHeader, body: &[u8]| {
            // Requests held back here are not known to the session yet, and must run before an
            // in-place write.
            if header.kind != Kind::Request || in_flight.contains_key(&header.id) || holds_events_back {
                return PayloadTarget::Pool;
            }
            let write = peek_write(body, now).filter(|(_, _, len)| *len == u64::from(header.payload_len));
            let write = write.and_then(|(to, offset, len)| in_place(Lane(header.lane), &to, offset, len));
            write.map_or(PayloadTarget::Pool, PayloadTarget::Write)
        };
        let begun = self.in_flight.len() + self.unsent;
        let max_requests = self.max_requests;
        let may_begin = |_: &FrameHeader, partial: usize| {
            if begun + partial < max_requests { Ok(()) } else { Err(too_many(max_requests)) }
        };
        let mut used = 0;
        let (queued, here) = (&mut self.queued, self.unanswered + self.backlog + self.held_releases);
        let mut room = |arriving: u64| queued.cover(here + arriving);
        let handled = match self.common.next(input, &mut used, &mut target, &may_begin, &mut room)? {
            Some(incoming) => self.handle(incoming, now).map(|()| true),
            None => Ok(false),
        };
        input.advance(used);
        handled
    }

    /// Returns true if the last message came through shared memory. Its reply should be written
    /// before the next message is handled, so that both peers copy at the same time.
    pub fn is_paused(&self) -> bool {
        self.common.took_shared
    }

    /// Returns true if there are replies for which the client has to free a part of the shared
    /// memory, and nothing else to write.
    pub fn awaits_slot(&self) -> bool {
        self.common.output.awaits_slot
    }

    /// Returns the bytes of payload that were received and sent through shared memory.
    pub fn shared_bytes(&self) -> (u64, u64) {
        (self.common.shared_bytes, self.common.output.shared_bytes)
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
            Some(incoming) => self.handle(incoming?, now),
            None => Ok(()),
        }
    }

    /// Returns the error for an end of the peer's stream. `input_left` is the number of received
    /// bytes that could not be used.
    pub fn end_of_stream(&self, input_left: usize) -> RpcError {
        self.common.end_of_stream(input_left)
    }

    /// Handles the passage of time: the keep-alive.
    ///
    /// # Errors
    ///
    /// The peer has been silent for too long.
    pub fn handle_timeout(&mut self, now: Instant) -> Result<()> {
        self.common.handle_timeout(now)
    }

    /// Answers a request. If the outcome cannot be sent, the caller gets an error instead, and the
    /// value is returned, so that its objects can be freed.
    pub fn reply(&mut self, id: u64, outcome: Outcome) -> Option<Value> {
        let Some(RequestCost { credit: cost_of_request, memory }) = self.in_flight.remove(&id) else {
            return outcome.ok();
        };
        self.unanswered -= memory;
        if self.closed {
            self.used -= cost_of_request;
            return outcome.ok();
        }
        let (writer, is_error) = write_reply(&outcome, self.common.output.take_body());
        let mut rejected = is_error;
        let kind = if is_error { Kind::Error } else { Kind::Reply };
        let mut message = Message::new(kind, id, 0, writer.body, writer.payload, writer.values);
        let size = message.size as u64;
        let refused = if size > self.max_reply {
            let error = RpcError::limit("max_message", self.max_reply, size);
            Some(error.context("the reply is too large for the client"))
        } else if self.backlog > 0 && cost(message.size) > 0 && self.backlog + size > self.max_unsent_bytes() {
            let error = RpcError::limit("max_backlog", self.max_unsent_bytes(), self.backlog + size);
            Some(error.context("the client takes its replies too slowly, or asks for too much at a time"))
        } else {
            let error = self.queued.cover(self.queued_bytes() + cost(message.size)).err();
            error.map(|error| error.context("the reply found no room"))
        };
        if let Some(error) = refused {
            message = Message::new(Kind::Error, id, 0, error.may_have_run(true).to_wire(), Vec::new(), 0);
            rejected = true;
        }
        self.unsent += 1;
        let cost = cost(message.size);
        if cost > 0 || cost_of_request > 0 {
            self.backlog += cost;
            self.unsent_costs.insert(id, (cost_of_request, cost));
        }
        if cost > 0 && (cost > self.reply_window || !self.large_replies.is_empty()) {
            self.large_replies.push_back(message);
        } else {
            self.reply_window -= cost;
            self.common.output.message(id, message);
        }
        if rejected { outcome.ok() } else { None }
    }

    /// Returns the largest size in bytes of the replies that may wait here to be sent. Those beyond
    /// it become errors; so should those beyond it that wait to be handed over to
    /// [`reply`](Self::reply), by their [costs](Self::reply_cost).
    pub fn max_unsent_bytes(&self) -> u64 {
        self.max_backlog.saturating_mul(BACKLOG_WINDOWS)
    }

    /// Returns the bytes that a reply of this size counts for: none if it is small, since the
    /// number of requests is limited.
    pub fn reply_cost(size: usize) -> u64 {
        cost(size)
    }

    /// Tells the client to make no new requests. Requests that it made before it received this are
    /// still served: see [`is_drained`](Self::is_drained).
    pub fn go_away(&mut self, reason: &RpcError) {
        self.common.control(Kind::GoAway, 0, &reason.to_wire());
        // The pong to this ping arrives behind everything that the client sent before it read the
        // `GoAway`.
        self.common.control(Kind::Ping, DRAIN_PING, &[]);
    }

    /// Returns true once the client has received [`go_away`](Self::go_away) and every request made
    /// before is answered and written.
    pub fn is_drained(&self) -> bool {
        self.common.last_pong == DRAIN_PING && self.is_idle()
    }

    /// Returns the request whose reply waits only for the client's credit: everything ahead of it
    /// has been written.
    pub fn held_back(&self) -> Option<u64> {
        self.large_replies.front().filter(|_| self.is_flushed()).map(|message| message.id)
    }

    /// Returns true if every request received so far is answered and written.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.large_replies.is_empty() && !self.common.is_receiving() && self.is_flushed()
    }

    /// Returns true if a message has begun to arrive, as far as its header was seen.
    pub fn is_receiving(&self) -> bool {
        self.common.is_receiving()
    }

    /// Ends the session. With an `error`, the client is told the reason. Replies that were given
    /// are still sent before, unless the client broke the protocol.
    pub fn close(&mut self, error: Option<&RpcError>) {
        if !std::mem::replace(&mut self.closed, true) {
            let body = error.map(RpcError::to_wire).unwrap_or_default();
            if error.is_some_and(|error| error.kind() == ErrorKind::Protocol) {
                self.common.control(Kind::Close, 0, &body);
            } else {
                self.close_body = Some(body);
            }
        }
    }

    /// Returns the next event. While the backlog of unsent replies is too large, requests are held
    /// back, and releases behind them: call again when more has been written.
    pub fn poll_event(&mut self) -> Option<ServerEvent> {
        if self.backlog > self.max_backlog
            && let Some(ServerEvent::Request { .. } | ServerEvent::Release { .. }) = self.events.front()
        {
            return None;
        }
        let event = self.events.pop_front();
        if let Some(ServerEvent::Release { handles }) = &event {
            self.held_releases -= release_cost(handles.len());
        }
        event
    }

    /// Moves queued frames to where [`slices`](Self::slices) shows them.
    pub fn stage(&mut self) {
        self.common.output.stage();
        self.note_sent();
        if !self.common.output.has_queued()
            && let Some(body) = self.close_body.take()
        {
            self.common.control(Kind::Close, 0, &body);
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
        self.common.output.is_empty() && self.close_body.is_none()
    }

    /// Returns the time when [`handle_timeout`](Self::handle_timeout) must be called next.
    pub fn poll_timeout(&self) -> Instant {
        self.common.poll_timeout()
    }

    /// Returns the number of requests that have not been answered.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    fn handle(&mut self, incoming: Incoming<'_>, now: Instant) -> Result<()> {
        let Some(incoming) = self.common.handle_control(incoming) else { return self.check_window() };
        match incoming.kind {
            Kind::Request => self.handle_request(incoming, now)?,
            Kind::Cancel => {
                let id = incoming.id;
                let held =
                    |event: &ServerEvent| matches!(event, ServerEvent::Request { id: other, .. } if *other == id);
                if let Some(at) = self.events.iter().position(held) {
                    self.events.remove(at);
                    let error = RpcError::new(ErrorKind::Cancelled, "the request was cancelled before it began");
                    self.reply(id, Err(error));
                } else {
                    // In front, so that it passes the events that are held back.
                    self.events.push_front(ServerEvent::Cancel { id });
                }
            }
            Kind::Free => {
                let body = &incoming.body;
                if !body.len().is_multiple_of(8) {
                    return Err(RpcError::new(ErrorKind::Protocol, "malformed list of handles to free"));
                }
                let bits = body.chunks_exact(8).map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap_or_default()));
                self.hold_release(bits.map(Handle::from_bits).collect())?;
            }
            Kind::Credit => {
                let (_, bytes) = parse_credit(&incoming.body)?;
                self.reply_window = self.reply_window.saturating_add(bytes);
                while let Some(message) = self.large_replies.front()
                    && cost(message.size) <= self.reply_window
                {
                    let Some(message) = self.large_replies.pop_front() else { break };
                    self.reply_window -= cost(message.size);
                    self.common.output.message(message.id, message);
                }
            }
            Kind::Close => {
                if !incoming.body.is_empty()
                    && let Ok(error) = RpcError::from_wire(&incoming.body)
                {
                    tracing::debug!(%error, "the client closed the session");
                }
                self.closed_by_peer = true;
                self.events.push_back(ServerEvent::Close);
            }
            Kind::Window if self.window_opener.is_some() => self.open_window(&incoming.body),
            kind => {
                let text = format!("the peer sent a {kind:?} frame, which a client must not send");
                return Err(RpcError::new(ErrorKind::Protocol, text));
            }
        }
        self.check_window()
    }

    /// Opens the window that the client offers, or refuses it: the client goes on without it then.
    fn open_window(&mut self, offer: &[u8]) {
        let Some(WindowOpener { window_bytes, open }) = self.window_opener.take() else { return };
        // A window stays for as long as its session.
        let lease = self.queued.quota.as_ref().map(|quota| quota.reserve_lasting(window_bytes)).transpose();
        match lease.and_then(|lease| Ok((lease, open(offer)?))) {
            Ok((lease, (window, proof))) => {
                self.window_lease = lease;
                self.common.output.window = Some(window);
                self.common.control(Kind::Window, 0, &proof);
            }
            Err(error) => {
                tracing::debug!(%error, "the memory that the client offers to share is not used");
                self.common.control(Kind::Window, 0, &[]);
            }
        }
    }

    /// Queues a release behind the events that wait already, with those of the last release if no
    /// request is in between.
    fn hold_release(&mut self, mut handles: Vec<Handle>) -> Result<()> {
        let merged = match self.events.back_mut() {
            Some(ServerEvent::Release { handles: before }) => {
                let len = before.len();
                before.append(&mut handles);
                release_cost(before.len()) - release_cost(len)
            }
            _ => {
                let cost = release_cost(handles.len());
                self.events.push_back(ServerEvent::Release { handles });
                cost
            }
        };
        self.held_releases += merged;
        if self.backlog <= self.max_backlog {
            // It does not wait: the driver takes it before it reads on.
            return Ok(());
        }
        // A client that keeps its handles within the session's limit stays far below this.
        let refused = if self.held_releases > self.max_held_releases {
            Err(RpcError::limit("window", self.max_held_releases, self.held_releases))
        } else {
            self.queued.cover(self.queued_bytes())
        };
        refused.map_err(|error| error.context("the client frees more objects while it does not read its replies"))
    }

    /// Returns the memory in bytes of the requests, releases and replies that are queued here.
    fn queued_bytes(&self) -> u64 {
        self.unanswered + self.backlog + self.held_releases + self.common.held()
    }

    fn note_sent(&mut self) {
        let sent = &mut self.common.output.sent;
        self.unsent -= sent.len().min(self.unsent);
        if self.unsent_costs.is_empty() {
            sent.clear();
        }
        for id in sent.drain(..) {
            if let Some((request, reply)) = self.unsent_costs.remove(&id) {
                self.used -= request;
                self.backlog -= reply;
            }
        }
        self.queued.settle(self.queued_bytes());
    }

    fn check_window(&mut self) -> Result<()> {
        self.note_sent();
        let used = self.used + self.common.partial_cost();
        let requests = self.in_flight.len() + self.unsent + self.common.partial_count();
        if used > self.window.saturating_add(MAX_BODY_PART as u64) {
            return Err(RpcError::new(
                ErrorKind::Protocol,
                format!("{used} bytes of requests are in flight, above the credit of {}", self.window),
            ));
        }
        if requests > self.max_requests { Err(too_many(self.max_requests)) } else { Ok(()) }
    }

    fn handle_request(&mut self, incoming: Incoming<'_>, now: Instant) -> Result<()> {
        let Incoming { id, lane, body, payload, .. } = incoming;
        if self.in_flight.contains_key(&id) || self.unsent_costs.contains_key(&id) {
            return Err(RpcError::new(ErrorKind::Protocol, format!("request {id} was made twice")));
        }
        let (size, event) = match payload {
            Payload::Written(write) => (body.len(), Ok(ServerEvent::Written { id, write })),
            Payload::Bytes(payload) => {
                let len = body.len() + payload.len();
                match read_request(Lane(lane), &body, payload, now) {
                    Ok((request, values)) => (len.max(values * VALUE_SIZE), Ok(ServerEvent::Request { id, request })),
                    Err(error) => (len, Err(error)),
                }
            }
            Payload::Read(_) => return Err(RpcError::internal("the payload of a request was received as a read")),
            Payload::Refused(error) => {
                self.in_flight.insert(id, RequestCost::default());
                drop(self.reply(id, Err(error.context("the request found no room"))));
                return Ok(());
            }
        };
        let cost = cost(size);
        let memory = match &event {
            // Values may take more memory than the credit for them.
            Ok(ServerEvent::Request { request, .. }) if cost > 0 => cost.max(request.operation.memory() as u64),
            _ => cost,
        };
        self.used += cost;
        self.unanswered += memory;
        self.in_flight.insert(id, RequestCost { credit: cost, memory });
        if cost > 0
            && let Err(error) = self.queued.cover(self.queued_bytes())
        {
            drop(self.reply(id, Err(error.context("the request found no room"))));
            return Ok(());
        }
        match event {
            Ok(event) => self.events.push_back(event),
            // An operation of a later version is an error of that request alone.
            Err(error @ (CodecError::UnknownOperation(_) | CodecError::UnknownAttribute(_))) => {
                drop(self.reply(id, Err(error.into())))
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}

/// Cost of a request that has not been answered; none for a small one.
#[derive(Clone, Copy, Debug, Default)]
struct RequestCost {
    /// Bytes of the client's credit.
    credit: u64,
    /// Bytes of memory.
    memory: u64,
}

/// Memory that one session has queued, counted against the limit of all sessions.
#[derive(Debug, Default)]
struct QueuedMemory {
    quota: Option<Arc<MemoryQuota>>,
    /// Bytes that are not counted.
    free: u64,
    lease: Option<MemoryLease>,
    leased: u64,
}

impl QueuedMemory {
    /// Reserves memory for `bytes` queued bytes in total.
    fn cover(&mut self, bytes: u64) -> Result<()> {
        let Some(quota) = &self.quota else { return Ok(()) };
        let wanted = bytes.saturating_sub(self.free);
        if wanted <= self.leased {
            return Ok(());
        }
        // In steps, because every change is seen by all sessions.
        let wanted = wanted.next_multiple_of(LEASE_STEP);
        match &mut self.lease {
            Some(lease) => lease.resize(wanted)?,
            None => self.lease = Some(quota.reserve(wanted)?),
        }
        self.leased = wanted;
        Ok(())
    }

    /// Returns the memory that is not needed for `bytes` queued bytes in total.
    fn settle(&mut self, bytes: u64) {
        let wanted = bytes.saturating_sub(self.free).next_multiple_of(LEASE_STEP);
        if wanted >= self.leased {
            return;
        }
        self.leased = wanted;
        match &mut self.lease {
            // Shrinking does not fail.
            Some(lease) if wanted > 0 => _ = lease.resize(wanted),
            _ => self.lease = None,
        }
    }
}

/// Returns the memory in bytes that a release of this many handles takes while it waits: a growing
/// list has up to twice the room that it needs.
fn release_cost(handles: usize) -> u64 {
    (size_of::<ServerEvent>() + 2 * handles * size_of::<Handle>()) as u64
}

fn too_many(limit: usize) -> RpcError {
    let text = format!("more requests are in flight than the credit of {limit} allows");
    RpcError::new(ErrorKind::Protocol, text)
}

impl std::fmt::Debug for ServerEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServerEndpoint").field("in_flight", &self.in_flight.len()).finish_non_exhaustive()
    }
}
