//! A client and a server joined by byte pipes in memory, under virtual time: nothing here waits,
//! and all randomness comes from a seed.

use std::collections::{BTreeMap, VecDeque};
use std::io::IoSlice;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use rpc_core::proto::{
    Admission, Anonymous, ClientEndpoint, ClientEvent, EndpointConfig, FrameHeader, HEADER_LEN, Handshake,
    HandshakeConfig, Hello, Kind, Negotiated, Role, ServerEndpoint, ServerEvent,
};
use rpc_core::reply::{Outcome, ReplySink};
use rpc_core::session::{Operation, Request};
use rpc_core::{Handle, Lane, LocalSession, MemoryQuota, RpcError, RpcSession, Value};

/// Random numbers from a seed (splitmix64).
#[derive(Clone, Debug)]
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    pub(crate) fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

/// Number of bytes that one read or write moves.
#[derive(Clone, Debug)]
pub(crate) enum Cut {
    Whole,
    Every(usize),
    Random(Rng),
}

impl Cut {
    fn size(&mut self, available: usize) -> usize {
        match self {
            Self::Whole => available,
            Self::Every(count) => available.min(*count),
            // Mostly small, sometimes large.
            Self::Random(rng) => {
                let limit = 1 << rng.below(18);
                available.min(1 + rng.below(limit))
            }
        }
    }
}

/// One direction of the channel.
#[derive(Default)]
struct Pipe {
    under_way: VecDeque<(Instant, Bytes)>,
    len: usize,
    /// All bytes that were ever written.
    log: Vec<u8>,
    closed: bool,
}

impl Pipe {
    fn write(&mut self, bytes: &[u8], arrival: Instant) {
        self.log.extend_from_slice(bytes);
        self.len += bytes.len();
        self.under_way.push_back((arrival, Bytes::copy_from_slice(bytes)));
    }

    /// Reads at most `limit` of the bytes that have arrived.
    fn read(&mut self, now: Instant, limit: usize) -> Bytes {
        match self.under_way.front_mut() {
            Some((arrival, bytes)) if *arrival <= now => {
                let taken = bytes.split_to(bytes.len().min(limit));
                if bytes.is_empty() {
                    self.under_way.pop_front();
                }
                self.len -= taken.len();
                taken
            }
            _ => Bytes::new(),
        }
    }

    fn arrived(&self, now: Instant) -> usize {
        self.under_way.front().filter(|(arrival, _)| *arrival <= now).map_or(0, |(_, bytes)| bytes.len())
    }
}

/// Settings of a pair.
#[derive(Clone)]
pub(crate) struct Setup {
    pub(crate) client: Hello,
    pub(crate) server: Hello,
    pub(crate) keep_alive: Duration,
    pub(crate) cut: Cut,
    pub(crate) delay: Duration,
    /// Capacity of the channel in bytes, in each direction.
    pub(crate) capacity: usize,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            client: Hello::new(Role::Client),
            server: Hello::new(Role::Server),
            keep_alive: Duration::from_secs(5),
            cut: Cut::Whole,
            delay: Duration::ZERO,
            capacity: usize::MAX,
        }
    }
}

impl Setup {
    /// Sets the same limits for both sides.
    pub(crate) fn limits(mut self, max_message: u64, window: u64, chunk: u32, max_requests: u32) -> Self {
        for hello in [&mut self.client, &mut self.server] {
            hello.max_message = max_message;
            hello.window = window;
            hello.chunk = chunk;
            hello.max_requests = max_requests;
        }
        self
    }

    pub(crate) fn cut(mut self, cut: Cut) -> Self {
        self.cut = cut;
        self
    }

    pub(crate) fn build(self) -> Pair {
        Pair::new(self)
    }
}

/// Runs a handshake between two offers as far as it goes. Returns the result of each side, the one
/// that dials first.
pub(crate) fn negotiate(client: Hello, server: Hello) -> (Negotiated, Negotiated) {
    let now = Instant::now();
    let config = |hello| HandshakeConfig {
        hello,
        identities: vec![Box::new(Anonymous)],
        hold: false,
        timeout: Duration::from_secs(10),
    };
    let mut dialler = Handshake::dial(config(client), now);
    let mut acceptor = Handshake::accept(config(server), now);
    let (mut ours, mut theirs) = (None, None);
    for _ in 0..4 {
        let mut input = BytesMut::from(&dialler.take_output()[..]);
        theirs = acceptor.handle_input(&mut input).unwrap().or(theirs);
        let mut input = BytesMut::from(&acceptor.take_output()[..]);
        ours = dialler.handle_input(&mut input).unwrap().or(ours);
    }
    (ours.unwrap(), theirs.unwrap())
}

/// An event of the server, in the order of arrival.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Arrived {
    Request(u64),
    Written(u64),
    Cancel(u64),
    Release(Vec<u64>),
    Close,
}

#[derive(Default)]
struct Mail(Mutex<Vec<(u64, Outcome)>>);

impl ReplySink for Mail {
    fn deliver(&self, token: u64, outcome: Outcome) {
        self.0.lock().unwrap().push((token, outcome));
    }
}

pub(crate) struct Pair {
    pub(crate) start: Instant,
    pub(crate) now: Instant,
    pub(crate) client: ClientEndpoint<u64>,
    pub(crate) server: ServerEndpoint,
    /// Session that serves the requests; without it the test does.
    pub(crate) local: Option<LocalSession>,
    mail: Arc<Mail>,
    up: Pipe,
    down: Pipe,
    client_input: BytesMut,
    server_input: BytesMut,
    pub(crate) setup: Setup,
    /// True if the side reads from the channel.
    pub(crate) client_reads: bool,
    pub(crate) server_reads: bool,
    /// True if the server does nothing at all.
    pub(crate) server_asleep: bool,
    server_gone: bool,

    /// Events that the client has reported.
    pub(crate) admitted: Vec<u64>,
    pub(crate) outcomes: BTreeMap<u64, Outcome>,
    pub(crate) answered: Vec<u64>,
    pub(crate) going_away: Option<RpcError>,
    pub(crate) ended: Option<RpcError>,

    /// Events that the server has reported.
    pub(crate) arrived: Vec<Arrived>,
    pub(crate) requests: BTreeMap<u64, Request>,
    /// Values that could not be sent.
    pub(crate) rejected: Vec<Value>,
    pub(crate) server_error: Option<RpcError>,
    server_closing: bool,
    /// Number of turns in which something moved.
    pub(crate) turns: usize,
}

impl Pair {
    pub(crate) fn new(setup: Setup) -> Self {
        let (ours, theirs) = negotiate(setup.client.clone(), setup.server.clone());
        let now = Instant::now();
        let config = EndpointConfig { keep_alive: setup.keep_alive };
        Self {
            start: now,
            now,
            client: ClientEndpoint::new(&ours, config, now),
            server: ServerEndpoint::new(&theirs, config, now),
            local: None,
            mail: Arc::default(),
            up: Pipe::default(),
            down: Pipe::default(),
            client_input: BytesMut::new(),
            server_input: BytesMut::new(),
            setup,
            client_reads: true,
            server_reads: true,
            server_asleep: false,
            server_gone: false,
            admitted: Vec::new(),
            outcomes: BTreeMap::new(),
            answered: Vec::new(),
            going_away: None,
            ended: None,
            arrived: Vec::new(),
            requests: BTreeMap::new(),
            rejected: Vec::new(),
            server_error: None,
            server_closing: false,
            turns: 0,
        }
    }

    /// Sets a local session that serves the requests.
    pub(crate) fn served_by(mut self, local: LocalSession) -> Self {
        self.local = Some(local);
        self
    }

    /// Counts the server's queued memory against `quota`.
    pub(crate) fn within(mut self, quota: &Arc<MemoryQuota>) -> Self {
        self.server = self.server.with_quota(quota.clone());
        self
    }

    /// Submits a request under `id`, which is also the token.
    pub(crate) fn submit(&mut self, id: u64, request: Request) -> Admission<u64> {
        let admission = self.client.submit(id, request, id, self.now);
        match &admission {
            Admission::Now => self.admitted.push(id),
            Admission::Later => {}
            Admission::Refused(token, error) => {
                assert_eq!(*token, id);
                self.tell(id, Err(error.clone()));
            }
        }
        admission
    }

    pub(crate) fn reply(&mut self, id: u64, outcome: Outcome) {
        self.requests.remove(&id);
        self.rejected.extend(self.server.reply(id, outcome));
    }

    /// Takes turns until nothing moves at this time.
    pub(crate) fn run(&mut self) {
        let mut turns = 0;
        loop {
            let mut moved = self.client_turn();
            moved |= self.server_turn();
            if !moved {
                match self.next_arrival() {
                    Some(arrival) => self.now = arrival,
                    None => return,
                }
            }
            turns += 1;
            self.turns += 1;
            assert!(turns < 3_000_000, "the pair does not come to rest");
        }
    }

    /// Lets time pass, from one timeout to the next.
    pub(crate) fn advance(&mut self, time: Duration) {
        let until = self.now + time;
        let mut wakes = 0;
        loop {
            self.run();
            let awake = !self.server_gone && !self.server_asleep;
            let server = awake.then(|| self.server.poll_timeout());
            let next = self.client.poll_timeout().into_iter().chain(server).min();
            match next {
                Some(next) if next <= until => self.now = self.now.max(next),
                _ => break,
            }
            self.tick();
            wakes += 1;
            assert!(wakes < 100_000, "a timeout does not go away");
        }
        self.now = self.now.max(until);
        self.tick();
        self.run();
    }

    fn tick(&mut self) {
        if let Err(error) = self.client.handle_timeout(self.now) {
            self.client.fail(error);
        }
        if !self.server_gone
            && !self.server_asleep
            && let Err(error) = self.server.handle_timeout(self.now)
        {
            self.end_server(error);
        }
    }

    /// Cuts the channel behind the bytes written so far.
    pub(crate) fn cut_off(&mut self) {
        self.up.closed = true;
        self.down.closed = true;
    }

    fn end_server(&mut self, error: RpcError) {
        self.server_error.get_or_insert(error);
        self.server_gone = true;
        self.down.closed = true;
    }

    /// Takes bytes from the client out of the channel, instead of the server.
    pub(crate) fn swallow(&mut self, count: usize) {
        let mut left = count;
        while left > 0 {
            match self.up.read(self.now, left).len() {
                0 => return,
                taken => left -= taken,
            }
        }
    }

    fn next_arrival(&self) -> Option<Instant> {
        let front = |pipe: &Pipe| pipe.under_way.front().map(|(arrival, _)| *arrival);
        let up = front(&self.up).filter(|_| self.server_reads && self.server_error.is_none());
        let down = front(&self.down).filter(|_| self.client_reads);
        up.into_iter().chain(down).filter(|arrival| *arrival > self.now).min()
    }

    fn client_turn(&mut self) -> bool {
        let mut moved = false;
        if self.client_reads && self.client.ended().is_none() {
            let read = match self.client.bulk_target() {
                Some(target) => {
                    let available = self.down.arrived(self.now).min(target.len());
                    let bytes = self.down.read(self.now, self.setup.cut.size(available));
                    target[..bytes.len()].copy_from_slice(&bytes);
                    let outcome =
                        if bytes.is_empty() { Ok(()) } else { self.client.bulk_filled(bytes.len(), self.now) };
                    outcome.map(|()| bytes.len())
                }
                None => {
                    let bytes = self.down.read(self.now, self.setup.cut.size(self.down.arrived(self.now)));
                    self.client_input.extend_from_slice(&bytes);
                    let goes_on = self.client.is_paused();
                    let outcome = if bytes.is_empty() && !goes_on {
                        Ok(())
                    } else {
                        self.client.handle_input(&mut self.client_input, self.now)
                    };
                    outcome.map(|()| bytes.len() + usize::from(goes_on))
                }
            };
            match read {
                Ok(0) if self.down.closed && self.down.len == 0 => {
                    self.client.handle_end_of_stream(self.client_input.len());
                    moved = true;
                }
                Ok(count) => moved |= count > 0,
                Err(error) => {
                    self.client.fail(error);
                    moved = true;
                }
            }
        }
        self.client_events();
        loop {
            self.client.stage();
            let mut slices = [IoSlice::new(&[]); 3];
            let count = self.client.slices(&mut slices);
            let written = write(&mut self.up, &slices[..count], &mut self.setup, self.now);
            if written > 0 {
                self.client.advance(written, self.now);
            }
            moved |= written > 0;
            if written == 0 || !matches!(self.setup.cut, Cut::Whole) {
                break;
            }
        }
        if self.client.ended().is_some() && self.client.is_flushed() && !self.up.closed {
            self.up.closed = true;
            moved = true;
        }
        moved
    }

    pub(crate) fn client_events(&mut self) {
        while let Some(event) = self.client.poll_event() {
            assert!(self.ended.is_none(), "{event:?} after the end");
            match event {
                ClientEvent::Admitted(id) => {
                    assert!(!self.admitted.contains(&id), "request {id} was admitted twice");
                    self.admitted.push(id);
                }
                ClientEvent::Reply(id, outcome) => self.tell(id, outcome),
                ClientEvent::GoingAway(error) => self.going_away = Some(error),
                ClientEvent::Ended(error) => self.ended = Some(error),
            }
        }
    }

    fn tell(&mut self, id: u64, outcome: Outcome) {
        self.answered.push(id);
        if let Some(other) = self.outcomes.insert(id, outcome) {
            panic!("request {id} was answered twice; first with {other:?}");
        }
    }

    fn server_turn(&mut self) -> bool {
        if self.server_asleep || self.server_gone {
            return false;
        }
        let mut moved = false;
        let mail = std::mem::take(&mut *self.mail.0.lock().unwrap());
        for (id, outcome) in mail {
            self.reply(id, outcome);
            moved = true;
        }
        if self.server_reads && self.server_error.is_none() {
            match self.server_input() {
                Ok(0) if self.up.closed && self.up.len == 0 => {
                    let error = self.server.end_of_stream(self.server_input.len());
                    self.end_server(error);
                    return true;
                }
                Ok(count) => moved |= count > 0,
                Err(error) => {
                    self.server.close(Some(&error));
                    self.server_error = Some(error);
                    self.server_closing = true;
                    moved = true;
                }
            }
        }
        loop {
            self.server.stage();
            let mut slices = [IoSlice::new(&[]); 3];
            let count = self.server.slices(&mut slices);
            let written = write(&mut self.down, &slices[..count], &mut self.setup, self.now);
            if written > 0 {
                self.server.advance(written, self.now);
            }
            moved |= written > 0;
            if written == 0 || !matches!(self.setup.cut, Cut::Whole) {
                break;
            }
        }
        // Frames that waited for replies to be sent.
        self.server_events();
        if self.server_closing && self.server.is_flushed() {
            self.server_gone = true;
            self.down.closed = true;
            moved = true;
        }
        moved
    }

    fn server_input(&mut self) -> Result<usize, RpcError> {
        let now = self.now;
        if let Some(target) = self.server.bulk_target() {
            let available = self.up.arrived(now).min(target.len());
            let bytes = self.up.read(now, self.setup.cut.size(available));
            target[..bytes.len()].copy_from_slice(&bytes);
            if !bytes.is_empty() {
                self.server.bulk_filled(bytes.len(), now)?;
                self.server_events();
            }
            return Ok(bytes.len());
        }
        let bytes = self.up.read(now, self.setup.cut.size(self.up.arrived(now)));
        if bytes.is_empty() {
            return Ok(0);
        }
        self.server_input.extend_from_slice(&bytes);
        loop {
            let local = self.local.clone();
            let mut place = |lane, to: &rpc_core::TensorRef, offset, len| {
                local.as_ref().and_then(|local| local.write_in_place(lane, to, offset, len))
            };
            let more = self.server.handle_input(&mut self.server_input, now, &mut place)?;
            self.server_events();
            if !more {
                return Ok(bytes.len());
            }
        }
    }

    fn server_events(&mut self) {
        while let Some(event) = self.server.poll_event() {
            match event {
                ServerEvent::Request { id, request } => {
                    self.arrived.push(Arrived::Request(id));
                    match &self.local {
                        Some(local) => {
                            local.submit(request).reply().deliver_to(self.mail.clone(), id);
                        }
                        None => {
                            self.requests.insert(id, request);
                        }
                    }
                }
                ServerEvent::Written { id, write } => {
                    self.arrived.push(Arrived::Written(id));
                    drop(write);
                    self.reply(id, Ok(Value::Null));
                }
                ServerEvent::Cancel { id } => self.arrived.push(Arrived::Cancel(id)),
                ServerEvent::Release { handles } => {
                    self.arrived.push(Arrived::Release(handles.iter().map(|handle| handle.to_bits()).collect()));
                    if let Some(local) = &self.local {
                        local.submit(Request::new(Operation::Release { handles })).reply().detach();
                    }
                }
                ServerEvent::Close => {
                    self.arrived.push(Arrived::Close);
                    self.close_server(None);
                }
            }
        }
    }

    /// Ends the session at the server.
    pub(crate) fn close_server(&mut self, error: Option<&RpcError>) {
        self.server.close(error);
        self.server_closing = true;
    }

    /// Returns the frames that the client has sent.
    pub(crate) fn client_frames(&self) -> Vec<Frame> {
        frames(&self.up.log)
    }

    /// Returns the frames that the server has sent.
    pub(crate) fn server_frames(&self) -> Vec<Frame> {
        frames(&self.down.log)
    }

    /// Puts bytes into the channel as if the server had sent them.
    pub(crate) fn inject_to_client(&mut self, bytes: &[u8]) {
        self.down.write(bytes, self.now);
    }

    /// Puts bytes into the channel as if the client had sent them.
    pub(crate) fn inject_to_server(&mut self, bytes: &[u8]) {
        self.up.write(bytes, self.now);
    }

    /// Returns the kind of the error that `id` ended with.
    pub(crate) fn error(&self, id: u64) -> &RpcError {
        self.outcomes.get(&id).unwrap_or_else(|| panic!("no reply to {id}")).as_ref().unwrap_err()
    }

    pub(crate) fn requests_in_order(&self) -> Vec<u64> {
        let id = |arrived: &Arrived| match arrived {
            Arrived::Request(id) | Arrived::Written(id) => Some(*id),
            _ => None,
        };
        self.arrived.iter().filter_map(id).collect()
    }

    pub(crate) fn released(&self) -> Vec<u64> {
        let handles = |arrived: &Arrived| match arrived {
            Arrived::Release(handles) => handles.clone(),
            _ => Vec::new(),
        };
        self.arrived.iter().flat_map(handles).collect()
    }
}

fn write(pipe: &mut Pipe, slices: &[IoSlice<'_>], setup: &mut Setup, now: Instant) -> usize {
    let available: usize = slices.iter().map(|slice| slice.len()).sum();
    assert!(slices.is_empty() || available > 0, "a driver is shown something to write, and it is empty");
    if pipe.closed {
        return available;
    }
    let mut left = setup.cut.size(available).min(setup.capacity.saturating_sub(pipe.len));
    let written = left;
    for slice in slices {
        let part = &slice[..slice.len().min(left)];
        if !part.is_empty() {
            pipe.write(part, now + setup.delay);
        }
        left -= part.len();
    }
    written
}

/// A frame as it was on the wire.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub(crate) header: FrameHeader,
    pub(crate) body: Bytes,
    pub(crate) payload: Bytes,
}

impl Frame {
    pub(crate) fn kind(&self) -> Kind {
        self.header.kind
    }

    pub(crate) fn id(&self) -> u64 {
        self.header.id
    }
}

pub(crate) fn frames(bytes: &[u8]) -> Vec<Frame> {
    let mut bytes = Bytes::copy_from_slice(bytes);
    let mut frames = Vec::new();
    while let Some(header) = bytes.first_chunk::<HEADER_LEN>() {
        let header = FrameHeader::decode(header, usize::MAX, usize::MAX).unwrap();
        let payload_len = if header.slot.is_some() { 0 } else { header.payload_len as usize };
        let len = HEADER_LEN + header.body_len as usize + payload_len;
        if bytes.len() < len {
            break;
        }
        let mut frame = bytes.split_to(len).split_off(HEADER_LEN);
        let body = frame.split_to(header.body_len as usize);
        frames.push(Frame { header, body, payload: frame });
    }
    frames
}

/// Returns the bytes of one frame.
pub(crate) fn frame(kind: Kind, id: u64, lane: u32, more: bool, body: &[u8], payload: &[u8]) -> Vec<u8> {
    let (body_len, payload_len) = (body.len() as u32, payload.len() as u32);
    let header = FrameHeader { body_len, payload_len, id, lane, kind, more, slot: None };
    [&header.encode()[..], body, payload].concat()
}

/// Returns a request with `len` bytes of payload.
pub(crate) fn call(lane: u32, len: usize) -> Request {
    call_with(lane, vec![Value::Bytes(vec![7; len].into())])
}

pub(crate) fn call_with(lane: u32, args: Vec<Value>) -> Request {
    Request::new(Operation::Call { function: Handle::from_bits(1), args }).on(Lane(lane))
}

pub(crate) fn object(bits: u64) -> Value {
    Value::Object(rpc_core::Reference::Object(Handle::from_bits(bits)))
}
