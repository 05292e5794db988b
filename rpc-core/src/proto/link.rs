//! What client and server have in common: frames in and out, long messages, keep-alive.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};

use super::frame::{FrameHeader, HEADER_LEN, Kind, MAX_BODY_PART};
use super::handshake::Negotiated;
use super::ids::IdMap;
use super::output::Output;
use super::pool::{BufferPool, PooledBuffer};
use crate::error::{ErrorKind, Result, RpcError};
use crate::session::InPlaceWrite;

/// Payloads from this size on are received straight into the memory where they belong.
const BULK: usize = 16 << 10;

/// Messages up to this size, body and payload, need no credit in bytes: their number is limited already.
const SMALL: usize = 4 << 10;

/// What each value of a message counts at least: about what it takes once it is decoded, which may be a hundred times its
/// bytes on the wire.
pub(super) const VALUE_SIZE: usize = 64;

/// What a message takes of the window, by its size.
pub(super) fn cost(size: usize) -> u64 {
    if size > SMALL { size as u64 } else { 0 }
}

/// How many silent keep-alive intervals mean that the peer is gone.
const SILENT_INTERVALS: u32 = 3;

/// The longest interval: longer than any session, and short enough to add to a time.
const MAX_KEEP_ALIVE: Duration = Duration::from_secs(1 << 30);

/// How a channel is watched.
#[derive(Clone, Copy, Debug)]
pub struct LinkConfig {
    /// A channel on which nothing was received for this long is tested with a ping, and is given up after three times as
    /// long. 5 seconds.
    pub keep_alive: Duration,
}

impl Default for LinkConfig {
    fn default() -> Self {
        Self { keep_alive: Duration::from_secs(5) }
    }
}

/// A message, or a frame without payload, that has arrived whole.
#[derive(Debug)]
pub(super) struct Incoming<'a> {
    pub(super) kind: Kind,
    pub(super) id: u64,
    pub(super) lane: u32,
    /// Where it was read, for most messages.
    pub(super) body: Cow<'a, [u8]>,
    pub(super) payload: Payload,
}

/// Where a payload is now.
#[derive(Debug)]
pub(super) enum Payload {
    Bytes(Bytes),
    /// In the tensor.
    Written(InPlaceWrite),
    /// In the buffer that the caller of a read gave.
    Read(BytesMut),
    /// Dropped as it came: there was no room for it.
    Refused(RpcError),
}

/// Where a large payload should go, as the side decides that knows its requests.
pub(super) enum Target {
    /// Nowhere in particular.
    Pool,
    Write(InPlaceWrite),
    /// A buffer of exactly the payload's length.
    Read(BytesMut),
}

/// A large payload that is being received into the place where it belongs.
///
/// A driver that must not hold the endpoint while it reads takes it out, fills it, and puts it back.
#[derive(Debug)]
pub struct BulkRead {
    header: FrameHeader,
    body: Vec<u8>,
    target: BulkTarget,
    filled: usize,
}

#[derive(Debug)]
enum BulkTarget {
    Pool(PooledBuffer),
    Write(InPlaceWrite),
    Read(BytesMut),
    /// Over and over, until the payload has passed.
    Scrap(Box<[u8; BULK]>, RpcError),
}

impl BulkRead {
    /// The part that has not been filled yet.
    pub fn unfilled(&mut self) -> &mut [u8] {
        match &mut self.target {
            BulkTarget::Pool(buffer) => &mut buffer.as_mut()[self.filled..],
            BulkTarget::Read(buffer) => &mut buffer[self.filled..],
            BulkTarget::Write(write) => write.unfilled(),
            BulkTarget::Scrap(scrap, _) => {
                let left = self.header.payload_len as usize - self.filled;
                &mut scrap[..left.min(BULK)]
            }
        }
    }

    /// The memory that was reserved for it.
    fn reserved(&self) -> usize {
        match self.target {
            BulkTarget::Pool(_) => self.header.payload_len as usize,
            _ => 0,
        }
    }

    /// Says that the first `count` bytes of [`unfilled`](Self::unfilled) were read.
    pub fn advance(&mut self, count: usize) {
        self.filled += count;
        if let BulkTarget::Write(write) = &mut self.target {
            write.advance(count);
        }
    }

    fn is_full(&self) -> bool {
        self.filled == self.header.payload_len as usize
    }
}

/// A message of which more frames are to come.
#[derive(Debug, Default)]
struct Partial {
    kind: Option<Kind>,
    lane: u32,
    body: Vec<u8>,
    payload: BytesMut,
    /// Of what has come so far, also of what was dropped.
    len: usize,
    /// Why what comes is dropped, if it is.
    refused: Option<RpcError>,
}

impl Partial {
    /// Drops what has come, and what will. Gives how much memory that was.
    fn refuse(&mut self, error: RpcError) -> usize {
        let freed = self.held();
        (self.body, self.payload) = (Vec::new(), BytesMut::new());
        self.refused.get_or_insert(error);
        freed
    }

    fn held(&self) -> usize {
        self.body.len() + self.payload.len()
    }
}

/// The state that both sides keep.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) output: Output,
    max_message: u64,
    chunk: usize,
    bulk: Option<BulkRead>,
    partials: IdMap<Partial>,
    /// What the partial messages take of the window.
    partial_cost: u64,
    max_partial_cost: u64,
    /// The memory that they take.
    partial_held: usize,
    pool: BufferPool,
    keep_alive: Duration,
    /// When something was last received, or data of ours last moved.
    last_life: Instant,
    /// When the next ping is due, if nothing is received until then.
    next_ping: Instant,
    /// The pings that were sent since something was last received.
    pings: u32,
    /// The highest number of a ping that was answered; those of the keep-alive have 0.
    pub(super) last_pong: u64,
}

impl Link {
    pub(super) fn new(negotiated: &Negotiated, config: LinkConfig, now: Instant) -> Self {
        let keep_alive = config.keep_alive.clamp(Duration::from_millis(1), MAX_KEEP_ALIVE);
        Self {
            output: Output::new(negotiated.theirs.chunk as usize),
            max_message: negotiated.ours.max_message,
            chunk: negotiated.ours.chunk as usize,
            bulk: None,
            partials: IdMap::default(),
            partial_cost: 0,
            partial_held: 0,
            max_partial_cost: negotiated.ours.window.saturating_add(MAX_BODY_PART as u64),
            pool: BufferPool::default(),
            keep_alive,
            last_life: now,
            next_ping: now + keep_alive,
            pings: 0,
            last_pong: 0,
        }
    }

    /// Memory to read into directly, while a large payload is under way.
    pub(super) fn bulk_target(&mut self) -> Option<&mut [u8]> {
        self.bulk.as_mut().map(BulkRead::unfilled)
    }

    /// Says that the first `count` bytes of the bulk target were read.
    pub(super) fn bulk_filled(&mut self, count: usize, now: Instant) -> Option<Result<Incoming<'static>>> {
        self.alive(now);
        let bulk = self.bulk.as_mut()?;
        bulk.advance(count);
        self.finish_bulk()
    }

    pub(super) fn take_bulk(&mut self) -> Option<BulkRead> {
        self.bulk.take()
    }

    /// Takes back what [`take_bulk`](Self::take_bulk) gave.
    pub(super) fn put_bulk(&mut self, bulk: BulkRead, now: Instant) -> Option<Result<Incoming<'static>>> {
        self.alive(now);
        self.bulk = Some(bulk);
        self.finish_bulk()
    }

    pub(super) fn put_idle_bulk(&mut self, bulk: BulkRead) {
        self.bulk = Some(bulk);
    }

    fn finish_bulk(&mut self) -> Option<Result<Incoming<'static>>> {
        let bulk = self.bulk.take_if(|bulk| bulk.is_full())?;
        let payload = match bulk.target {
            BulkTarget::Pool(buffer) => Payload::Bytes(buffer.into_bytes()),
            BulkTarget::Write(write) => Payload::Written(write),
            BulkTarget::Read(buffer) => Payload::Read(buffer),
            BulkTarget::Scrap(_, error) => Payload::Refused(error),
        };
        self.part(bulk.header, Cow::Owned(bulk.body), payload).transpose()
    }

    /// Says that bytes were received.
    pub(super) fn alive(&mut self, now: Instant) {
        self.last_life = now;
        self.next_ping = now + self.keep_alive;
        self.pings = 0;
    }

    /// Takes the next whole message from `input` behind the first `used` bytes, if there is one, and counts what it took
    /// as used. `target` is asked where a large payload should go, `begins` whether a message of several frames may begin
    /// beside that many others, and `room` whether the messages that are incomplete may take that many bytes together. Without
    /// room a message is dropped as it comes.
    pub(super) fn next<'a>(
        &mut self,
        input: &'a [u8],
        used: &mut usize,
        target: &mut dyn FnMut(&FrameHeader, &[u8]) -> Target,
        begins: &dyn Fn(&FrameHeader, usize) -> Result<()>,
        room: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<Option<Incoming<'a>>> {
        loop {
            let input = &input[*used..];
            if let Some(bulk) = &mut self.bulk {
                let unfilled = bulk.unfilled();
                let count = unfilled.len().min(input.len());
                unfilled[..count].copy_from_slice(&input[..count]);
                *used += count;
                bulk.advance(count);
                match self.finish_bulk() {
                    Some(message) => return message.map(Some),
                    None if self.bulk.is_some() => return Ok(None),
                    // It was one part of a message.
                    None => continue,
                }
            }
            let Some(header) = input.first_chunk::<HEADER_LEN>() else { return Ok(None) };
            let header = FrameHeader::decode(header, MAX_BODY_PART, self.chunk)?;
            let (body_len, payload_len) = (header.body_len as usize, header.payload_len as usize);
            let is_bulk = payload_len >= BULK;
            if input.len() < HEADER_LEN + body_len + if is_bulk { 0 } else { payload_len } {
                return Ok(None);
            }
            self.check_size(&header)?;
            if header.more && !self.is_partial(&header) {
                begins(&header, self.partials.len())?;
            }
            let body = &input[HEADER_LEN..HEADER_LEN + body_len];
            let whole = !header.more && !self.is_partial(&header);
            if is_bulk {
                let target = match if whole { target(&header, body) } else { Target::Pool } {
                    Target::Pool => match self.refusal(&header, room) {
                        None => BulkTarget::Pool(self.pool.take(payload_len)),
                        Some(error) => BulkTarget::Scrap(Box::new([0; BULK]), error),
                    },
                    Target::Write(write) => BulkTarget::Write(write),
                    Target::Read(buffer) => BulkTarget::Read(buffer),
                };
                let body = body.to_vec();
                *used += HEADER_LEN + body_len;
                self.bulk = Some(BulkRead { header, body, target, filled: 0 });
                continue;
            }
            let payload = &input[HEADER_LEN + body_len..HEADER_LEN + body_len + payload_len];
            let payload = match if whole { None } else { self.refusal(&header, room) } {
                Some(error) => Payload::Refused(error),
                None if payload.is_empty() => Payload::Bytes(Bytes::new()),
                None => Payload::Bytes(Bytes::copy_from_slice(payload)),
            };
            *used += HEADER_LEN + body_len + payload_len;
            let body = Cow::Borrowed(body);
            if let Some(message) = self.part(header, body, payload)? {
                return Ok(Some(message));
            }
        }
    }

    /// Why the payload of a frame is not kept: there is no room for it, or there was none for what came before.
    fn refusal(&self, header: &FrameHeader, room: &mut dyn FnMut(u64) -> Result<()>) -> Option<RpcError> {
        let before = self.partials.get(&header.id).filter(|_| header.kind.is_data());
        let refused = before.and_then(|partial| partial.refused.clone());
        let held = self.held() + u64::from(header.body_len) + u64::from(header.payload_len);
        refused.or_else(|| room(held).err())
    }

    /// Whether a frame goes on with a message that has begun. Control frames between its frames may bear the same number.
    fn is_partial(&self, header: &FrameHeader) -> bool {
        header.kind.is_data() && self.partials.contains_key(&header.id)
    }

    /// Checks the size of a message with its next frame, before anything is reserved for it.
    fn check_size(&self, header: &FrameHeader) -> Result<()> {
        let partial = self.partials.get(&header.id).filter(|_| header.kind.is_data());
        let before = partial.map_or(0, |partial| partial.len);
        let len = before as u64 + u64::from(header.body_len) + u64::from(header.payload_len);
        // A little more than the limit is let through, because the sender may not count the body.
        if len > self.max_message.saturating_add(MAX_BODY_PART as u64) {
            let limit = self.max_message;
            return Err(RpcError::new(
                ErrorKind::Protocol,
                format!("a message of {len} bytes; max_message is {limit}"),
            ));
        }
        if header.more || before > 0 {
            let all = self.partial_cost - cost(before) + cost(len as usize);
            if all > self.max_partial_cost {
                let limit = self.max_partial_cost;
                return Err(RpcError::new(
                    ErrorKind::Protocol,
                    format!("{all} bytes under way, and credit for {limit}"),
                ));
            }
        }
        Ok(())
    }

    /// Takes a whole frame, and gives the message if this was its last.
    fn part<'a>(&mut self, header: FrameHeader, body: Cow<'a, [u8]>, payload: Payload) -> Result<Option<Incoming<'a>>> {
        let FrameHeader { kind, id, lane, more, .. } = header;
        if !more && !self.is_partial(&header) {
            return Ok(Some(Incoming { kind, id, lane, body, payload }));
        }
        let partial = self.partials.entry(id).or_default();
        if *partial.kind.get_or_insert(kind) != kind {
            return Err(RpcError::new(ErrorKind::Protocol, "the frames of a message are of different kinds"));
        }
        partial.lane = lane;
        self.partial_cost -= cost(partial.len);
        partial.len += header.body_len as usize + header.payload_len as usize;
        match payload {
            Payload::Bytes(bytes) => {
                partial.body.extend_from_slice(&body);
                partial.payload.extend_from_slice(&bytes);
                self.partial_held += body.len() + bytes.len();
            }
            Payload::Refused(error) => self.partial_held -= partial.refuse(error),
            Payload::Written(_) | Payload::Read(_) => {
                return Err(RpcError::internal("a part of a message was received in place"));
            }
        }
        if more {
            self.partial_cost += cost(partial.len);
            return Ok(None);
        }
        let Some(partial) = self.partials.remove(&id) else { return Ok(None) };
        self.partial_held -= partial.held();
        let payload = match partial.refused {
            None => Payload::Bytes(partial.payload.freeze()),
            Some(error) => Payload::Refused(error),
        };
        Ok(Some(Incoming { kind, id, lane, body: Cow::Owned(partial.body), payload }))
    }

    /// What the messages that have begun to arrive take of the window so far.
    pub(super) fn partial_cost(&self) -> u64 {
        self.partial_cost
    }

    /// The memory that messages take which have begun to arrive.
    pub(super) fn held(&self) -> u64 {
        (self.partial_held + self.bulk.as_ref().map_or(0, BulkRead::reserved)) as u64
    }

    /// How many messages have begun to arrive.
    pub(super) fn partial_count(&self) -> usize {
        self.partials.len()
    }

    /// Whether a message has begun to arrive, as far as its head was seen.
    pub(super) fn is_receiving(&self) -> bool {
        self.bulk.is_some() || !self.partials.is_empty()
    }

    pub(super) fn control(&mut self, kind: Kind, id: u64, body: &[u8]) {
        let header = FrameHeader { id, ..FrameHeader::control(kind, body.len() as u32) };
        self.output.control(header, body);
    }

    /// Answers what needs no knowledge of requests. Gives the rest back.
    pub(super) fn handle_control<'a>(&mut self, incoming: Incoming<'a>) -> Option<Incoming<'a>> {
        match incoming.kind {
            Kind::Ping => {
                // A peer that sends pings and reads nothing is not owed an answer to each: memory is bounded.
                if !self.output.is_full() {
                    self.control(Kind::Pong, incoming.id, &[]);
                }
                None
            }
            Kind::Pong => {
                self.last_pong = self.last_pong.max(incoming.id);
                None
            }
            _ => Some(incoming),
        }
    }

    pub(super) fn advance(&mut self, count: usize, now: Instant) {
        let data = self.output.data_pending;
        self.output.advance(count);
        // While data of ours moves out the peer is at least reading. Pings and the like do not count, nor does the last
        // of the data, because those only fill buffers on this side.
        if data && self.output.data_pending {
            self.last_life = now;
        }
    }

    pub(super) fn poll_timeout(&self) -> Instant {
        if self.pings + 1 < SILENT_INTERVALS { self.next_ping } else { self.next_ping.min(self.silent_at()) }
    }

    fn silent_at(&self) -> Instant {
        self.last_life + self.keep_alive * SILENT_INTERVALS
    }

    pub(super) fn handle_timeout(&mut self, now: Instant) -> Result<()> {
        // Without the pings it was this side that was asleep, and what the peer has sent may not have been read yet.
        if now >= self.silent_at() && self.pings + 1 >= SILENT_INTERVALS {
            let limit = self.keep_alive * SILENT_INTERVALS;
            return Err(RpcError::new(ErrorKind::PeerSilent, format!("nothing was heard from the peer for {limit:?}")));
        }
        if now >= self.next_ping {
            self.control(Kind::Ping, 0, &[]);
            self.next_ping = now + self.keep_alive;
            self.pings = self.pings.saturating_add(1);
        }
        Ok(())
    }

    /// What an end of the stream means, where no orderly end was agreed.
    pub(super) fn end_of_stream(&self, input_left: usize) -> RpcError {
        let inside = input_left > 0 || self.is_receiving();
        let when = if inside { "in the middle of a message" } else { "without a word" };
        RpcError::new(ErrorKind::PeerLost, format!("the peer closed the connection {when}"))
    }
}
