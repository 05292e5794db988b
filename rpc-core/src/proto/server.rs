//! The server's side of a session: requests in, one terminal reply out for each.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::Instant;

use bytes::{Buf, BytesMut};

use super::client::parse_credit;
use super::codec::CodecError;
use super::frame::{FrameHeader, Kind, MAX_BODY_PART};
use super::handshake::Negotiated;
use super::ids::IdMap;
use super::link::{Incoming, Link, LinkConfig, Payload, Target, VALUE_SIZE, cost};
use super::message::{peek_write, read_request, write_reply};
use super::output::Message;
use crate::error::{ErrorKind, Result, RpcError};
use crate::handle::Handle;
use crate::limits::{MemoryLease, MemoryQuota};
use crate::reply::Outcome;
use crate::session::{InPlaceWrite, Lane, Request};
use crate::value::{TensorRef, Value};

/// How many of the client's windows replies may fill that have not left. From one on no further requests are begun; those
/// that run then may still reply, and fail beyond this.
const BACKLOG_WINDOWS: u64 = 8;

/// How many chunks a session may have queued that do not count against what all sessions may: what one copy has under way.
const FREE_CHUNKS: u64 = 8;

/// Of what all sessions may have queued, each takes in such steps.
const LEASE_STEP: u64 = 256 << 10;

/// The number of the ping that follows a `GoAway`.
const DRAIN_PING: u64 = 1;

/// What the driver is told.
#[derive(Debug)]
pub enum ServerEvent {
    /// A request: submit it, in the order of these events, and answer it with [`ServerEndpoint::reply`].
    Request {
        /// The request's number.
        id: u64,
        /// The request.
        request: Request,
    },
    /// A write that was received in place: drop it, and answer it.
    Written {
        /// The request's number.
        id: u64,
        /// The write, filled.
        write: InPlaceWrite,
    },
    /// The caller does not wait for the request any more; it is still to be answered.
    Cancel {
        /// The request's number.
        id: u64,
    },
    /// Objects that the client has let go.
    Release {
        /// Their handles.
        handles: Vec<Handle>,
    },
    /// The client has finished: end the session, and close with [`ServerEndpoint::close`].
    Close,
}

/// Offers memory for a write that is about to arrive; see [`RpcSession::write_in_place`](crate::RpcSession::write_in_place).
pub type Place<'a> = &'a mut dyn FnMut(Lane, &TensorRef, u64, u64) -> Option<InPlaceWrite>;

/// The server's side of one session.
pub struct ServerEndpoint {
    link: Link,
    max_requests: usize,
    /// What the client may have under way in large requests, and has.
    window: u64,
    used: u64,
    /// What those of them take that are not answered.
    asked: u64,
    /// What the requests and replies that are queued here take in memory, counted against a limit of all sessions.
    queued: Queued,
    /// What we may still send in large replies.
    reply_window: u64,
    max_reply: u64,
    in_flight: IdMap<u64>,
    /// Replies that have not left whole. A client that keeps to its credit has not seen them.
    unsent: usize,
    /// What large requests and their replies, which have not left whole, still take: of the window, and of memory.
    unsent_costs: IdMap<(u64, u64)>,
    /// The sum of the latter.
    backlog: u64,
    /// From which backlog on requests wait.
    max_backlog: u64,
    large_replies: VecDeque<Message>,
    events: VecDeque<ServerEvent>,
    closed: bool,
    /// Our last word, while it waits for replies to leave.
    last_word: Option<Vec<u8>>,
}

impl ServerEndpoint {
    /// The endpoint behind a handshake in which this side became the server.
    pub fn new(negotiated: &Negotiated, config: LinkConfig, now: Instant) -> Self {
        Self {
            link: Link::new(negotiated, config, now),
            max_requests: negotiated.ours.max_requests as usize,
            window: negotiated.ours.window,
            used: 0,
            asked: 0,
            queued: Queued { free: FREE_CHUNKS * u64::from(negotiated.ours.chunk), ..Queued::default() },
            reply_window: negotiated.theirs.window,
            max_reply: negotiated.theirs.max_message,
            in_flight: IdMap::default(),
            unsent: 0,
            unsent_costs: IdMap::default(),
            backlog: 0,
            max_backlog: negotiated.theirs.window.min(negotiated.ours.window),
            large_replies: VecDeque::new(),
            events: VecDeque::new(),
            closed: false,
            last_word: None,
        }
    }

    /// Counts what is queued here against `quota`, too, beyond what one copy has under way: eight chunks. Requests and replies
    /// that find no room fail with [`LimitExceeded`](ErrorKind::LimitExceeded), and the session goes on.
    #[must_use]
    pub fn with_quota(mut self, quota: Arc<MemoryQuota>) -> Self {
        self.queued.quota = Some(quota);
        self
    }

    /// Takes what was read, and at most one message of it, so that the driver can act on each in turn: call it until it
    /// says `false`. What is left in `input` then is the beginning of a frame: keep it, and append to it. `place` is asked
    /// for memory when a large write arrives.
    ///
    /// # Errors
    ///
    /// The peer broke the protocol: call [`close`](Self::close) with the error.
    pub fn handle_input(&mut self, input: &mut BytesMut, now: Instant, place: Place<'_>) -> Result<bool> {
        self.link.alive(now);
        self.note_sent();
        let in_flight = &self.in_flight;
        let holds_back = !self.events.is_empty();
        let mut target = |header: &FrameHeader, body: &[u8]| {
            // What is held back is not known to whoever offers the place, and goes before it.
            if header.kind != Kind::Request || in_flight.contains_key(&header.id) || holds_back {
                return Target::Pool;
            }
            let write = peek_write(body, now).filter(|(_, _, len)| *len == u64::from(header.payload_len));
            let write = write.and_then(|(to, offset, len)| place(Lane(header.lane), &to, offset, len));
            write.map_or(Target::Pool, Target::Write)
        };
        let begun = self.in_flight.len() + self.unsent;
        let max_requests = self.max_requests;
        let begins = |_: &FrameHeader, partial: usize| {
            if begun + partial < max_requests { Ok(()) } else { Err(too_many(max_requests)) }
        };
        let mut used = 0;
        let (queued, here) = (&mut self.queued, self.asked + self.backlog);
        let mut room = |arriving: u64| queued.cover(here + arriving);
        let handled = match self.link.next(input, &mut used, &mut target, &begins, &mut room)? {
            Some(incoming) => self.handle(incoming, now).map(|()| true),
            None => Ok(false),
        };
        input.advance(used);
        handled
    }

    /// Memory to read into directly, while a large payload is under way.
    pub fn bulk_target(&mut self) -> Option<&mut [u8]> {
        self.link.bulk_target()
    }

    /// Says that the first `count` bytes of the bulk target were read.
    ///
    /// # Errors
    ///
    /// As [`handle_input`](Self::handle_input).
    pub fn bulk_filled(&mut self, count: usize, now: Instant) -> Result<()> {
        match self.link.bulk_filled(count, now) {
            Some(incoming) => self.handle(incoming?, now),
            None => Ok(()),
        }
    }

    /// What it means that the peer has closed its side. `input_left` is the length of what could not be used.
    pub fn end_of_stream(&self, input_left: usize) -> RpcError {
        self.link.end_of_stream(input_left)
    }

    /// Time has passed.
    ///
    /// # Errors
    ///
    /// The peer has been silent for too long.
    pub fn handle_timeout(&mut self, now: Instant) -> Result<()> {
        self.link.handle_timeout(now)
    }

    /// Answers a request. If the answer cannot be sent the caller gets an error instead, and the value comes back, for its
    /// objects to be freed.
    pub fn reply(&mut self, id: u64, outcome: Outcome) -> Option<Value> {
        let Some(cost_of_request) = self.in_flight.remove(&id) else { return outcome.ok() };
        self.asked -= cost_of_request;
        if self.closed {
            self.used -= cost_of_request;
            return outcome.ok();
        }
        let (writer, is_error) = write_reply(&outcome);
        let mut rejected = is_error;
        let kind = if is_error { Kind::Error } else { Kind::Reply };
        let mut message = Message::new(kind, id, 0, writer.body, writer.payload, writer.values);
        let size = message.size as u64;
        let refused = if size > self.max_reply {
            let error = RpcError::limit("max_message", self.max_reply, size);
            Some(error.context("the reply is too large for the client"))
        } else if self.backlog > 0
            && cost(message.size) > 0
            && self.backlog + size > self.max_backlog.saturating_mul(BACKLOG_WINDOWS)
        {
            let error = RpcError::limit("max_backlog", self.max_backlog * BACKLOG_WINDOWS, self.backlog + size);
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
            self.link.output.message(id, message);
        }
        if rejected { outcome.ok() } else { None }
    }

    /// Tells the client to make no new requests. Those that it made before it hears of this are still served: see
    /// [`is_drained`](Self::is_drained).
    pub fn go_away(&mut self, reason: &RpcError) {
        self.link.control(Kind::GoAway, 0, &reason.to_wire());
        // The answer to this ping comes behind everything that the client sent before it read the above.
        self.link.control(Kind::Ping, DRAIN_PING, &[]);
    }

    /// Whether the client has heard of [`go_away`](Self::go_away), and all that it asked before is answered and written.
    pub fn is_drained(&self) -> bool {
        self.link.last_pong == DRAIN_PING && self.is_idle()
    }

    /// The request whose reply waits for the client's credit alone: all that is ahead of it has been written.
    pub fn held_back(&self) -> Option<u64> {
        self.large_replies.front().filter(|_| self.is_flushed()).map(|message| message.id)
    }

    /// Whether everything that the client has asked so far is answered and written.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.large_replies.is_empty() && !self.link.is_receiving() && self.is_flushed()
    }

    /// Whether a message has begun to arrive, as far as its head was seen.
    pub fn is_receiving(&self) -> bool {
        self.link.is_receiving()
    }

    /// Ends the session. With an `error`, the client is told why. Replies that were given are still sent before, unless
    /// the client broke the protocol.
    pub fn close(&mut self, error: Option<&RpcError>) {
        if !std::mem::replace(&mut self.closed, true) {
            let body = error.map(RpcError::to_wire).unwrap_or_default();
            if error.is_some_and(|error| error.kind() == ErrorKind::Protocol) {
                self.link.control(Kind::Close, 0, &body);
            } else {
                self.last_word = Some(body);
            }
        }
    }

    /// The next thing to know. While much of what was replied has not left, requests wait, and what follows them: call again
    /// when more has been written.
    pub fn poll_event(&mut self) -> Option<ServerEvent> {
        if self.backlog > self.max_backlog
            && let Some(ServerEvent::Request { .. } | ServerEvent::Release { .. }) = self.events.front()
        {
            return None;
        }
        self.events.pop_front()
    }

    /// Moves what is queued to where [`slices`](Self::slices) shows it.
    pub fn stage(&mut self) {
        self.link.output.stage();
        self.note_sent();
        if !self.link.output.has_queued()
            && let Some(body) = self.last_word.take()
        {
            self.link.control(Kind::Close, 0, &body);
            self.link.output.stage();
        }
    }

    /// What is to be written, for a vectored write. Returns how many slices were filled.
    pub fn slices<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        self.link.output.slices(slices)
    }

    /// Says that the first `count` bytes of the slices were written.
    pub fn advance(&mut self, count: usize, now: Instant) {
        self.link.advance(count, now);
    }

    /// Whether nothing is left to write.
    pub fn is_flushed(&self) -> bool {
        self.link.output.is_empty() && self.last_word.is_none()
    }

    /// When to call [`handle_timeout`](Self::handle_timeout).
    pub fn poll_timeout(&self) -> Instant {
        self.link.poll_timeout()
    }

    /// How many requests have not been answered.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    fn handle(&mut self, incoming: Incoming<'_>, now: Instant) -> Result<()> {
        let Some(incoming) = self.link.handle_control(incoming) else { return self.check_window() };
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
                    // Past what is held back.
                    self.events.push_front(ServerEvent::Cancel { id });
                }
            }
            Kind::Free => {
                let body = &incoming.body;
                if !body.len().is_multiple_of(8) {
                    return Err(RpcError::new(ErrorKind::Protocol, "malformed list of handles to free"));
                }
                let bits = body.chunks_exact(8).map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap_or_default()));
                self.events.push_back(ServerEvent::Release { handles: bits.map(Handle::from_bits).collect() });
            }
            Kind::Credit => {
                let (_, bytes) = parse_credit(&incoming.body)?;
                self.reply_window = self.reply_window.saturating_add(bytes);
                while let Some(message) = self.large_replies.front()
                    && cost(message.size) <= self.reply_window
                {
                    let Some(message) = self.large_replies.pop_front() else { break };
                    self.reply_window -= cost(message.size);
                    self.link.output.message(message.id, message);
                }
            }
            Kind::Close => {
                if !incoming.body.is_empty()
                    && let Ok(error) = RpcError::from_wire(&incoming.body)
                {
                    tracing::debug!(%error, "the client closed the session");
                }
                self.events.push_back(ServerEvent::Close);
            }
            kind => return Err(RpcError::new(ErrorKind::Protocol, format!("a client does not send {kind:?}"))),
        }
        self.check_window()
    }

    /// The memory that requests and replies take which are queued here.
    fn queued_bytes(&self) -> u64 {
        self.asked + self.backlog + self.link.held()
    }

    fn note_sent(&mut self) {
        let sent = &mut self.link.output.sent;
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
        self.queued.settle(self.asked + self.backlog + self.link.held());
    }

    fn check_window(&mut self) -> Result<()> {
        self.note_sent();
        let used = self.used + self.link.partial_cost();
        let requests = self.in_flight.len() + self.unsent + self.link.partial_count();
        if used > self.window.saturating_add(MAX_BODY_PART as u64) {
            return Err(RpcError::new(
                ErrorKind::Protocol,
                format!("{used} bytes under way, and credit for {}", self.window),
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
            Payload::Read(_) => return Err(RpcError::internal("a request was received as a read")),
            Payload::Refused(error) => {
                self.in_flight.insert(id, 0);
                drop(self.reply(id, Err(error.context("the request found no room"))));
                return Ok(());
            }
        };
        let cost = cost(size);
        self.used += cost;
        self.asked += cost;
        self.in_flight.insert(id, cost);
        if cost > 0
            && let Err(error) = self.queued.cover(self.queued_bytes())
        {
            drop(self.reply(id, Err(error.context("the request found no room"))));
            return Ok(());
        }
        match event {
            Ok(event) => self.events.push_back(event),
            // Something that a later version may know concerns nobody but its caller.
            Err(error @ CodecError::UnknownOperation(_)) => drop(self.reply(id, Err(error.into()))),
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}

/// What a session has queued, counted against what all sessions may.
#[derive(Debug, Default)]
struct Queued {
    quota: Option<Arc<MemoryQuota>>,
    /// What does not count.
    free: u64,
    lease: Option<MemoryLease>,
    leased: u64,
}

impl Queued {
    /// Makes sure that `bytes` may be queued.
    fn cover(&mut self, bytes: u64) -> Result<()> {
        let Some(quota) = &self.quota else { return Ok(()) };
        let wanted = bytes.saturating_sub(self.free);
        if wanted <= self.leased {
            return Ok(());
        }
        // In steps, because each is seen by all sessions.
        let wanted = wanted.next_multiple_of(LEASE_STEP);
        match &mut self.lease {
            Some(lease) => lease.resize(wanted)?,
            None => self.lease = Some(quota.reserve(wanted)?),
        }
        self.leased = wanted;
        Ok(())
    }

    /// Gives back what is not needed for `bytes`.
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

fn too_many(limit: usize) -> RpcError {
    RpcError::new(ErrorKind::Protocol, format!("more requests under way than the {limit} that there is credit for"))
}

impl std::fmt::Debug for ServerEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServerEndpoint").field("in_flight", &self.in_flight.len()).finish_non_exhaustive()
    }
}
