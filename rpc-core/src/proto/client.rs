//! The client's side of a session: requests out, replies in, each matched by its number.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet, VecDeque};
use std::io::IoSlice;
use std::time::Instant;

use bytes::{Buf, BytesMut};

use super::frame::{FrameHeader, Kind};
use super::handshake::Negotiated;
use super::ids::IdMap;
use super::link::{BulkRead, Incoming, Link, LinkConfig, Payload, Target, VALUE_SIZE, cost};
use super::message::{is_bytes_reply, read_reply, write_request};
use super::output::Message;
use crate::error::{ErrorKind, Result, RpcError};
use crate::handle::Handle;
use crate::reply::Outcome;
use crate::session::{Lane, Operation, ReadBuffer, Request};
use crate::value::Value;

/// Handles that fit into one frame that frees them.
const FREES_PER_FRAME: usize = 8000;

/// What became of a request that was submitted.
#[derive(Debug)]
pub enum Admission<T> {
    /// It has its place in the order.
    Now,
    /// It waits for credit; [`ClientEvent::Admitted`] will tell.
    Later,
    /// It will not be sent.
    Refused(T, RpcError),
}

/// What the driver is told. `T` is what it gave with the request.
#[derive(Debug)]
pub enum ClientEvent<T> {
    /// The request has its place in the order.
    Admitted(T),
    /// The request is over.
    Reply(T, Outcome),
    /// The server takes no new requests.
    GoingAway(RpcError),
    /// The session has ended: nothing else follows. All replies have been reported before.
    Ended(RpcError),
}

struct InFlight<T> {
    /// Gone if the caller has been answered already.
    token: Option<T>,
    /// Bytes of credit that come back with the reply.
    cost: u64,
    into: Option<ReadBuffer>,
    order: u64,
    cancel: Cancel,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Cancel {
    No,
    /// As soon as the request has left whole, so that the cancellation does not arrive before it.
    Wanted,
    Sent,
}

struct Waiting<T> {
    id: u64,
    submission: u64,
    token: T,
    lane: Lane,
    message: Message,
    into: Option<ReadBuffer>,
}

enum State<T> {
    Open,
    /// The server goes away: nothing new.
    Draining(RpcError),
    /// We want to close as soon as all is answered.
    Closing(Vec<T>),
    /// We have said that we close.
    CloseSent(Vec<T>),
    Ended(RpcError),
}

/// The client's side of one session. `T` is what the driver wants back with each event, such as a
/// [`Responder`](crate::Responder).
pub struct ClientEndpoint<T> {
    link: Link,
    state: State<T>,
    /// Of the peer.
    max_message: u64,
    max_requests: usize,
    window: u64,
    in_flight: IdMap<InFlight<T>>,
    waiting: VecDeque<Waiting<T>>,
    deadlines: BinaryHeap<Reverse<(Instant, u64)>>,
    /// Objects let go, each with the number of submissions before it: it must not overtake those, sent or not.
    frees: VecDeque<(u64, Handle)>,
    submissions: u64,
    /// Admitted requests that have not left whole: number of the submission, and id.
    unsent: VecDeque<(u64, u64)>,
    /// The answer to a numbered ping. It must not overtake requests either.
    pong: Option<u64>,
    /// Received bytes for which credit has not been given back.
    consumed: u64,
    grant_at: u64,
    events: VecDeque<ClientEvent<T>>,
}

impl<T: Clone> ClientEndpoint<T> {
    /// The endpoint behind a handshake in which this side became the client.
    pub fn new(negotiated: &Negotiated, config: LinkConfig, now: Instant) -> Self {
        Self {
            link: Link::new(negotiated, config, now),
            state: State::Open,
            max_message: negotiated.theirs.max_message,
            max_requests: negotiated.theirs.max_requests as usize,
            window: negotiated.theirs.window,
            in_flight: IdMap::default(),
            waiting: VecDeque::new(),
            deadlines: BinaryHeap::new(),
            frees: VecDeque::new(),
            submissions: 0,
            unsent: VecDeque::new(),
            pong: None,
            consumed: 0,
            // What is held back must leave room for the largest reply, or the server would wait for ever.
            grant_at: (negotiated.ours.window / 4)
                .min(negotiated.ours.window.saturating_sub(negotiated.ours.max_message)),
            events: VecDeque::new(),
        }
    }

    /// Takes what was read. What is left in `input` is the beginning of a frame: keep it, and append to it.
    ///
    /// # Errors
    ///
    /// The peer broke the protocol: call [`fail`](Self::fail) with the error.
    pub fn handle_input(&mut self, input: &mut BytesMut, now: Instant) -> Result<()> {
        self.link.alive(now);
        let mut used = 0;
        let outcome = self.handle_messages(input, &mut used);
        // Of a session that is over nothing more is understood.
        let used = if let State::Ended(_) = self.state { input.len() } else { used };
        input.advance(used);
        outcome
    }

    fn handle_messages(&mut self, input: &[u8], used: &mut usize) -> Result<()> {
        while !matches!(self.state, State::Ended(_)) {
            let in_flight = &self.in_flight;
            let mut target = |header: &FrameHeader, body: &[u8]| match in_flight.get(&header.id) {
                Some(InFlight { into, .. }) if is_bytes_reply(body, header.payload_len.into()) => {
                    match into.as_ref().and_then(ReadBuffer::take) {
                        Some(buffer) if buffer.len() == header.payload_len as usize => Target::Read(buffer),
                        Some(buffer) => {
                            into.as_ref().inspect(|into| into.put_back(buffer));
                            Target::Pool
                        }
                        None => Target::Pool,
                    }
                }
                _ => Target::Pool,
            };
            let begins = |header: &FrameHeader, _| {
                if in_flight.contains_key(&header.id) { Ok(()) } else { Err(unasked(header.id)) }
            };
            match self.link.next(input, used, &mut target, &begins, &mut |_| Ok(()))? {
                Some(incoming) => self.handle(incoming)?,
                None => break,
            }
        }
        Ok(())
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
            Some(incoming) => self.handle(incoming?),
            None => Ok(()),
        }
    }

    /// Takes the large payload out that is being received, to be filled without holding the endpoint.
    pub fn take_bulk(&mut self) -> Option<BulkRead> {
        self.link.take_bulk()
    }

    /// Puts back what [`take_bulk`](Self::take_bulk) gave.
    ///
    /// # Errors
    ///
    /// As [`handle_input`](Self::handle_input).
    pub fn put_bulk(&mut self, bulk: BulkRead, now: Instant) -> Result<()> {
        match self.link.put_bulk(bulk, now) {
            Some(incoming) => self.handle(incoming?),
            None => Ok(()),
        }
    }

    /// As [`put_bulk`](Self::put_bulk), when nothing was read in the meantime.
    pub fn put_idle_bulk(&mut self, bulk: BulkRead) {
        self.link.put_idle_bulk(bulk);
    }

    /// The peer has closed its side. `input_left` is the length of what could not be used.
    pub fn handle_end_of_stream(&mut self, input_left: usize) {
        let error = match &self.state {
            State::CloseSent(_) => closed(),
            _ => self.link.end_of_stream(input_left),
        };
        self.end(error);
    }

    /// Time has passed.
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
        self.link.handle_timeout(now)
    }

    fn expire(&mut self, id: u64) {
        let error = deadline_exceeded();
        if let Some(at) = self.waiting.iter().position(|waiting| waiting.id == id) {
            if let Some(waiting) = self.waiting.remove(at) {
                self.events.push_back(ClientEvent::Reply(waiting.token, Err(error)));
            }
            // What was behind it in its lane may need less.
            self.admit_waiting();
            return;
        }
        let sent = !self.is_unsent(id);
        let Some(request) = self.in_flight.get_mut(&id) else { return };
        if let Some(token) = request.token.take() {
            self.events.push_back(ClientEvent::Reply(token, Err(error.may_have_run(sent))));
        }
        self.cancel(id);
        self.close_if_quiet();
    }

    /// Submits a request under a number of the driver's choosing that it has not used before. Releases and shutdowns have
    /// methods of their own.
    pub fn submit(&mut self, id: u64, request: Request, token: T, now: Instant) -> Admission<T> {
        match &self.state {
            State::Open => {}
            State::Draining(error) | State::Ended(error) => {
                return Admission::Refused(token, error.clone().may_have_run(false));
            }
            State::Closing(_) | State::CloseSent(_) => return Admission::Refused(token, closed()),
        }
        if request.deadline.is_some_and(|deadline| deadline <= now) {
            return Admission::Refused(token, deadline_exceeded());
        }
        let writer = write_request(&request, now);
        if let Some(invalid) = writer.invalid {
            return Admission::Refused(token, RpcError::invalid_argument(invalid));
        }
        let message = Message::new(Kind::Request, id, request.lane.0, writer.body, writer.payload, writer.values);
        if message.size as u64 > self.max_message {
            let error = RpcError::limit("max_message", self.max_message, message.size as u64);
            return Admission::Refused(token, error.context("the request is too large; copies have no such limit"));
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
        let waiting = Waiting { id, submission: self.submissions, token, lane, message, into };
        let behind = self.waiting.iter().any(|other| other.lane == lane && lane != Lane::CONCURRENT);
        if behind || !self.has_credit(&waiting.message) {
            self.waiting.push_back(waiting);
            return Admission::Later;
        }
        self.admit(waiting);
        Admission::Now
    }

    /// Lets objects go. They are freed behind all requests that were submitted before.
    pub fn release(&mut self, handles: impl IntoIterator<Item = Handle>) {
        // Nothing follows our word that we close, and the end of a session frees what it held.
        if !matches!(self.state, State::CloseSent(_) | State::Ended(_)) {
            let submissions = self.submissions;
            self.frees.extend(handles.into_iter().map(|handle| (submissions, handle)));
        }
    }

    /// Nobody waits for the request any more. It still ends with [`ClientEvent::Reply`].
    pub fn cancel(&mut self, id: u64) {
        let cancelled = || RpcError::new(ErrorKind::Cancelled, "the request was cancelled before it was sent");
        if let Some(at) = self.waiting.iter().position(|waiting| waiting.id == id) {
            if let Some(waiting) = self.waiting.remove(at) {
                self.events.push_back(ClientEvent::Reply(waiting.token, Err(cancelled())));
            }
            self.admit_waiting();
            return;
        }
        let unsent = self.is_unsent(id);
        let Some(request) = self.in_flight.get_mut(&id) else { return };
        if unsent {
            if self.link.output.remove(request.order, id).is_some() {
                self.unsent.retain(|(_, other)| *other != id);
                self.finish(id, Err(cancelled()));
            } else {
                request.cancel = Cancel::Wanted;
            }
        } else if request.cancel != Cancel::Sent {
            request.cancel = Cancel::Sent;
            self.link.control(Kind::Cancel, id, &[]);
        }
    }

    /// As [`cancel`](Self::cancel), and its caller is gone. It is [over](ClientEvent::Reply) at once, and the end of the session does
    /// not wait for an answer to it.
    pub fn abandon(&mut self, id: u64) {
        if !self.waiting.iter().any(|waiting| waiting.id == id) {
            let Some(request) = self.in_flight.get_mut(&id) else { return };
            if let Some(token) = request.token.take() {
                let error = RpcError::new(ErrorKind::Cancelled, "nobody waits for the reply").may_have_run(true);
                self.events.push_back(ClientEvent::Reply(token, Err(error)));
            }
        }
        self.cancel(id);
        self.close_if_quiet();
    }

    /// Ends the session in good order: as soon as all is answered that somebody waits for. `token` comes back with the end.
    pub fn shutdown(&mut self, token: Option<T>) {
        match &mut self.state {
            State::Open | State::Draining(_) => self.state = State::Closing(token.into_iter().collect()),
            State::Closing(tokens) | State::CloseSent(tokens) => tokens.extend(token),
            State::Ended(_) => {
                self.events.extend(token.map(|token| ClientEvent::Reply(token, Ok(Value::Null))));
            }
        }
        self.close_if_quiet();
    }

    /// Ends the session at once, because of `error`. The peer is told if it broke the protocol.
    pub fn fail(&mut self, error: RpcError) {
        if error.kind() == ErrorKind::Protocol && !matches!(self.state, State::Ended(_)) {
            self.link.control(Kind::Close, 0, &error.to_wire());
        }
        self.end(error);
    }

    /// The next thing to know.
    pub fn poll_event(&mut self) -> Option<ClientEvent<T>> {
        self.events.pop_front()
    }

    /// Moves what is queued to where [`slices`](Self::slices) shows it.
    pub fn stage(&mut self) {
        self.link.output.stage();
        self.note_sent();
        let mut more = self.stage_frees();
        if self.unsent.is_empty()
            && let Some(id) = self.pong.take()
        {
            self.link.control(Kind::Pong, id, &[]);
            more = true;
        }
        if more {
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
        self.link.output.is_empty() && self.frees.is_empty() && self.pong.is_none()
    }

    /// When to call [`handle_timeout`](Self::handle_timeout).
    pub fn poll_timeout(&self) -> Option<Instant> {
        if let State::Ended(_) = self.state {
            return None;
        }
        let link = self.link.poll_timeout();
        Some(self.deadlines.peek().map_or(link, |Reverse((deadline, _))| link.min(*deadline)))
    }

    /// Why the session has ended, if it has.
    pub fn ended(&self) -> Option<&RpcError> {
        if let State::Ended(error) = &self.state { Some(error) } else { None }
    }

    /// Whether any request is admitted or waits.
    pub fn is_quiet(&self) -> bool {
        self.in_flight.is_empty() && self.waiting.is_empty()
    }

    fn has_credit(&self, message: &Message) -> bool {
        self.in_flight.len() < self.max_requests && cost(message.size) <= self.window
    }

    fn admit(&mut self, waiting: Waiting<T>) {
        let Waiting { id, submission, token, lane, message, into } = waiting;
        let cost = cost(message.size);
        self.window -= cost;
        // Concurrent requests are lanes of their own.
        let order = if lane == Lane::CONCURRENT { id | 1 << 63 } else { lane.0.into() };
        self.in_flight.insert(id, InFlight { token: Some(token), cost, into, order, cancel: Cancel::No });
        self.unsent.push_back((submission, id));
        self.link.output.message(order, message);
        self.note_sent();
    }

    fn admit_waiting(&mut self) {
        let mut blocked: Vec<Lane> = Vec::new();
        let mut at = 0;
        while let Some(waiting) = self.waiting.get(at) {
            if self.in_flight.len() >= self.max_requests {
                return;
            }
            if blocked.contains(&waiting.lane) || !self.has_credit(&waiting.message) {
                if waiting.lane != Lane::CONCURRENT {
                    blocked.push(waiting.lane);
                }
                at += 1;
            } else if let Some(waiting) = self.waiting.remove(at) {
                self.events.push_back(ClientEvent::Admitted(waiting.token.clone()));
                self.admit(waiting);
            }
        }
    }

    /// Forgets the deadlines of requests that are over, once they are the most.
    fn forget_deadlines(&mut self) {
        if self.deadlines.len() >= 64 + 2 * (self.in_flight.len() + self.waiting.len()) {
            let waiting: HashSet<_> = self.waiting.iter().map(|waiting| waiting.id).collect();
            let in_flight = &self.in_flight;
            self.deadlines.retain(|Reverse((_, id))| in_flight.contains_key(id) || waiting.contains(id));
        }
    }

    fn is_unsent(&self, id: u64) -> bool {
        self.unsent.iter().any(|(_, unsent)| *unsent == id)
    }

    /// Takes note of the requests whose last frame has been staged.
    fn note_sent(&mut self) {
        let mut cancelled = false;
        while let Some(id) = self.link.output.sent.pop() {
            if self.unsent.back().is_some_and(|(_, last)| *last == id) {
                self.unsent.pop_back();
            } else {
                self.unsent.retain(|(_, other)| *other != id);
            }
            if let Some(request) = self.in_flight.get_mut(&id)
                && request.cancel == Cancel::Wanted
            {
                request.cancel = Cancel::Sent;
                self.link.control(Kind::Cancel, id, &[]);
                cancelled = true;
            }
        }
        if cancelled {
            self.close_if_quiet();
        }
    }

    /// Queues the frees that nothing holds back. Whether there were any.
    fn stage_frees(&mut self) -> bool {
        if self.frees.is_empty() {
            return false;
        }
        // Requests are admitted lane by lane, so those that have not left are in no order; those that wait are.
        let unsent = self.unsent.iter().map(|(submission, _)| *submission).min();
        let waiting = self.waiting.front().map(|waiting| waiting.submission);
        let limit = unsent.into_iter().chain(waiting).min().unwrap_or(u64::MAX);
        let count = self.frees.iter().take_while(|(submissions, _)| *submissions < limit).count();
        let mut body = Vec::with_capacity(8 * count.min(FREES_PER_FRAME));
        for (at, (_, handle)) in self.frees.drain(..count).enumerate() {
            body.extend_from_slice(&handle.to_bits().to_le_bytes());
            if body.len() == 8 * FREES_PER_FRAME || at + 1 == count {
                self.link.control(Kind::Free, 0, &body);
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
        let Some(incoming) = self.link.handle_control(incoming) else { return Ok(()) };
        match incoming.kind {
            Kind::Reply | Kind::Error => self.handle_reply(incoming),
            Kind::Credit => {
                let (requests, bytes) = parse_credit(&incoming.body)?;
                self.max_requests = self.max_requests.saturating_add(requests as usize);
                self.window = self.window.saturating_add(bytes);
                self.admit_waiting();
                Ok(())
            }
            Kind::GoAway => {
                let error = RpcError::from_wire(&incoming.body).map(RpcError::from_next_hop).unwrap_or_else(|_| {
                    RpcError::new(ErrorKind::Draining, "the server is going away and takes no new requests")
                });
                if let State::Open = self.state {
                    self.state = State::Draining(error.clone());
                }
                for waiting in std::mem::take(&mut self.waiting) {
                    self.events.push_back(ClientEvent::Reply(waiting.token, Err(error.clone())));
                }
                self.events.push_back(ClientEvent::GoingAway(error));
                Ok(())
            }
            Kind::Close => {
                let error = match &self.state {
                    State::CloseSent(_) => closed(),
                    _ if incoming.body.is_empty() => RpcError::new(ErrorKind::Closed, "the server closed the session"),
                    _ => RpcError::from_wire(&incoming.body).map_or_else(|_| closed(), RpcError::from_next_hop),
                };
                self.end(error);
                Ok(())
            }
            kind => Err(RpcError::new(ErrorKind::Protocol, format!("a server does not send {kind:?}"))),
        }
    }

    fn handle_reply(&mut self, incoming: Incoming<'_>) -> Result<()> {
        let Incoming { kind, id, body, payload, .. } = incoming;
        if !self.in_flight.contains_key(&id) {
            return Err(unasked(id));
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
            Payload::Written(_) => return Err(RpcError::internal("a reply was received as a write")),
            Payload::Refused(error) => return Err(error),
        };
        self.consumed += cost(size);
        if self.consumed > self.grant_at {
            self.link.control(Kind::Credit, 0, &encode_credit(0, self.consumed));
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
        self.admit_waiting();
        self.close_if_quiet();
    }

    fn close_if_quiet(&mut self) {
        if let State::Closing(tokens) = &mut self.state
            && self.waiting.is_empty()
            && self.in_flight.values().all(|request| request.token.is_none() && request.cancel == Cancel::Sent)
        {
            self.state = State::CloseSent(std::mem::take(tokens));
            self.stage_frees();
            self.link.control(Kind::Close, 0, &[]);
        }
    }

    fn end(&mut self, error: RpcError) {
        if let State::Ended(_) = self.state {
            return;
        }
        let unsent: Vec<_> = std::mem::take(&mut self.unsent).into_iter().map(|(_, id)| id).collect();
        for (id, request) in std::mem::take(&mut self.in_flight) {
            if let Some(token) = request.token {
                let error = error.clone().may_have_run(!unsent.contains(&id));
                self.events.push_back(ClientEvent::Reply(token, Err(error)));
            }
        }
        for waiting in std::mem::take(&mut self.waiting) {
            self.events.push_back(ClientEvent::Reply(waiting.token, Err(error.clone().may_have_run(false))));
        }
        if let State::Closing(tokens) | State::CloseSent(tokens) =
            std::mem::replace(&mut self.state, State::Ended(error.clone()))
        {
            for token in tokens {
                self.events.push_back(ClientEvent::Reply(token, Ok(Value::Null)));
            }
        }
        self.frees.clear();
        self.deadlines.clear();
        self.pong = None;
        self.events.push_back(ClientEvent::Ended(error));
    }
}

impl<T> std::fmt::Debug for ClientEndpoint<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClientEndpoint")
            .field("in_flight", &self.in_flight.len())
            .field("waiting", &self.waiting.len())
            .finish_non_exhaustive()
    }
}

fn deadline_exceeded() -> RpcError {
    RpcError::new(ErrorKind::DeadlineExceeded, "the request's deadline passed")
}

fn closed() -> RpcError {
    RpcError::new(ErrorKind::Closed, "the session was shut down")
}

fn unasked(id: u64) -> RpcError {
    RpcError::new(ErrorKind::Protocol, format!("a reply to request {id}, which was not made"))
}

/// The body of a credit frame: u32 requests, u64 bytes.
pub(super) fn encode_credit(requests: u32, bytes: u64) -> [u8; 12] {
    let mut body = [0; 12];
    body[..4].copy_from_slice(&requests.to_le_bytes());
    body[4..].copy_from_slice(&bytes.to_le_bytes());
    body
}

pub(super) fn parse_credit(body: &[u8]) -> Result<(u32, u64)> {
    let malformed = || RpcError::new(ErrorKind::Protocol, "malformed credit");
    let (requests, bytes) = body.split_first_chunk::<4>().ok_or_else(malformed)?;
    let bytes = bytes.try_into().map_err(|_| malformed())?;
    Ok((u32::from_le_bytes(*requests), u64::from_le_bytes(bytes)))
}
