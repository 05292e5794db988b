//! State that both endpoints share: received frames, partial messages, output and keep-alive.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};

use super::buffer_pool::{BufferPool, PooledBuffer};
use super::credit_frame::{cost, encode_credit};
use super::frame::{FrameHeader, HEADER_LEN, Kind, MAX_BODY_PART};
use super::handshake::Negotiated;
use super::id_map::IdMap;
use super::keep_alive_defaults::{KEEP_ALIVE, SILENT_INTERVALS};
use super::output::Output;
use crate::error::{ErrorKind, Result, RpcError};
use crate::session::InPlaceWrite;

/// Smallest payload, in bytes, that is received directly into its destination.
const MIN_BULK_BYTES: usize = 16 << 10;

/// Longest keep-alive interval: longer than any session, and short enough to be added to a time.
const MAX_KEEP_ALIVE: Duration = Duration::from_secs(1 << 30);

/// Settings of an endpoint.
#[derive(Clone, Copy, Debug)]
pub struct EndpointConfig {
    /// Time without received bytes after which a ping is sent. The channel fails after three such
    /// intervals. [`KEEP_ALIVE`] by default.
    pub keep_alive: Duration,
}

impl Default for EndpointConfig {
    fn default() -> Self {
        Self { keep_alive: KEEP_ALIVE }
    }
}

/// A complete message, or a complete control frame.
#[derive(Debug)]
pub(super) struct Incoming<'a> {
    pub(super) kind: Kind,
    pub(super) id: u64,
    pub(super) lane: u32,
    /// The message's body; borrowed from the input buffer for most messages.
    pub(super) body: Cow<'a, [u8]>,
    pub(super) payload: Payload,
}

/// Payload of a message, by where it was received.
#[derive(Debug)]
pub(super) enum Payload {
    Bytes(Bytes),
    /// In the tensor.
    Written(InPlaceWrite),
    /// In the buffer that the caller of a read passed.
    Read(BytesMut),
    /// Dropped while it arrived, because there was no room for it.
    Refused(RpcError),
}

/// Destination of a large payload, chosen by the endpoint, which knows its requests.
pub(super) enum PayloadTarget {
    /// A pooled buffer.
    Pool,
    Write(InPlaceWrite),
    /// A buffer of exactly the payload's length.
    Read(BytesMut),
}

/// A large payload that is being received directly into its destination.
///
/// A driver that must not lock the endpoint while it reads takes this value out, fills it, and puts
/// it back.
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
    /// One small buffer, overwritten until the whole payload has been read and dropped.
    Discarded(Box<[u8; MIN_BULK_BYTES]>, RpcError),
}

impl BulkRead {
    /// Returns the part that has not been filled yet.
    pub fn unfilled(&mut self) -> &mut [u8] {
        match &mut self.target {
            BulkTarget::Pool(buffer) => &mut buffer.as_mut()[self.filled..],
            BulkTarget::Read(buffer) => &mut buffer[self.filled..],
            BulkTarget::Write(write) => write.unfilled(),
            BulkTarget::Discarded(scratch, _) => {
                let left = self.header.payload_len as usize - self.filled;
                &mut scratch[..left.min(MIN_BULK_BYTES)]
            }
        }
    }

    /// Returns the memory in bytes that was reserved for this payload.
    fn reserved(&self) -> usize {
        match self.target {
            BulkTarget::Pool(_) => self.header.payload_len as usize,
            _ => 0,
        }
    }

    /// Records that the first `count` bytes of [`unfilled`](Self::unfilled) were read.
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

/// A message with frames still to come.
#[derive(Debug, Default)]
struct PartialMessage {
    /// Kind and lane of the first frame, which all further ones repeat.
    first: Option<(Kind, u32)>,
    body: Vec<u8>,
    payload: BytesMut,
    /// Length received so far in bytes, including dropped bytes.
    len: usize,
    /// Reason why the message is dropped as it arrives, if it is.
    refused: Option<RpcError>,
}

impl PartialMessage {
    /// Drops everything received so far and everything that still arrives. Returns the memory freed
    /// in bytes.
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

/// State that the client's and the server's endpoint share.
#[derive(Debug)]
pub(super) struct EndpointCommon {
    pub(super) output: Output,
    max_message: u64,
    chunk: usize,
    bulk: Option<BulkRead>,
    partials: IdMap<PartialMessage>,
    /// Bytes of the window that the partial messages take.
    partial_cost: u64,
    max_partial_cost: u64,
    /// Memory in bytes that the partial messages take.
    partial_held: usize,
    pool: BufferPool,
    keep_alive: Duration,
    /// Last time when bytes were received, or when data of this side moved out.
    last_sign_of_life: Instant,
    /// Time of the next ping, if nothing is received before.
    next_ping: Instant,
    /// Number of pings sent since bytes were last received.
    pings: u32,
    /// True if the last message came through the window.
    pub(super) took_shared: bool,
    /// Bytes of payload received through the window.
    pub(super) shared_bytes: u64,
    /// Highest number of a ping that was answered. The pings of the keep-alive have number 0.
    pub(super) last_pong: u64,
}

impl EndpointCommon {
    pub(super) fn new(negotiated: &Negotiated, config: EndpointConfig, now: Instant) -> Self {
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
            last_sign_of_life: now,
            next_ping: now + keep_alive,
            pings: 0,
            took_shared: false,
            shared_bytes: 0,
            last_pong: 0,
        }
    }

    /// Returns memory to read into directly, while a large payload is being received.
    pub(super) fn bulk_target(&mut self) -> Option<&mut [u8]> {
        self.bulk.as_mut().map(BulkRead::unfilled)
    }

    /// Records that the first `count` bytes of the bulk target were read.
    pub(super) fn bulk_filled(&mut self, count: usize, now: Instant) -> Option<Result<Incoming<'static>>> {
        self.alive(now);
        let bulk = self.bulk.as_mut()?;
        bulk.advance(count);
        self.finish_bulk()
    }

    pub(super) fn take_bulk(&mut self) -> Option<BulkRead> {
        self.bulk.take()
    }

    /// Takes back the payload that [`take_bulk`](Self::take_bulk) returned.
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
            BulkTarget::Discarded(_, error) => Payload::Refused(error),
        };
        self.part(bulk.header, Cow::Owned(bulk.body), payload).transpose()
    }

    /// Records that bytes were received.
    pub(super) fn alive(&mut self, now: Instant) {
        self.last_sign_of_life = now;
        self.next_ping = now + self.keep_alive;
        self.pings = 0;
    }

    /// Takes the next complete message from `input` behind the first `used` bytes, if there is one,
    /// and adds the length consumed to `used`. `target` chooses the destination of a large payload.
    /// `may_begin` decides if a message of several frames may begin beside that many other partial
    /// messages. `room` decides if the incomplete messages may take that many bytes together.
    /// Without room a message is dropped as it arrives.
    pub(super) fn next<'a>(
        &mut self,
        input: &'a [u8],
        used: &mut usize,
        target: &mut dyn FnMut(&FrameHeader, &[u8]) -> PayloadTarget,
        may_begin: &dyn Fn(&FrameHeader, usize) -> Result<()>,
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
                    // The payload belonged to one frame of a message of several.
                    None => continue,
                }
            }
            let Some(header) = input.first_chunk::<HEADER_LEN>() else { return Ok(None) };
            let header = FrameHeader::decode(header, MAX_BODY_PART, self.chunk)?;
            let (body_len, payload_len) = (header.body_len as usize, header.payload_len as usize);
            if header.slot.is_some() && self.output.window.is_none() {
                return Err(RpcError::new(ErrorKind::Protocol, "a payload in shared memory, and none is shared"));
            }
            let is_bulk = payload_len >= MIN_BULK_BYTES || header.slot.is_some();
            if input.len() < HEADER_LEN + body_len + if is_bulk { 0 } else { payload_len } {
                return Ok(None);
            }
            self.check_size(&header)?;
            if header.more && !self.is_partial(&header) {
                may_begin(&header, self.partials.len())?;
            }
            let body = &input[HEADER_LEN..HEADER_LEN + body_len];
            let whole = !header.more && !self.is_partial(&header);
            if is_bulk {
                let target = match if whole { target(&header, body) } else { PayloadTarget::Pool } {
                    PayloadTarget::Pool => match self.refusal(&header, room) {
                        None => BulkTarget::Pool(self.pool.take(payload_len)),
                        Some(error) => BulkTarget::Discarded(Box::new([0; MIN_BULK_BYTES]), error),
                    },
                    PayloadTarget::Write(write) => BulkTarget::Write(write),
                    PayloadTarget::Read(buffer) => BulkTarget::Read(buffer),
                };
                let body = body.to_vec();
                *used += HEADER_LEN + body_len;
                self.bulk = Some(BulkRead { header, body, target, filled: 0 });
                if let Some(slot) = header.slot {
                    self.fill_from_window(slot)?;
                }
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

    /// Fills the bulk payload from a slot of the window.
    fn fill_from_window(&mut self, slot: u16) -> Result<()> {
        let (Some(bulk), Some(window)) = (&mut self.bulk, &mut self.output.window) else { return Ok(()) };
        let taken = match bulk.target {
            // What is dropped need not be copied; the slot is free then, too.
            BulkTarget::Discarded(..) => {
                bulk.filled = bulk.header.payload_len as usize;
                window.take(slot, &mut [])
            }
            _ => {
                let target = bulk.unfilled();
                let taken = window.take(slot, target);
                let count = target.len();
                bulk.advance(count);
                taken
            }
        };
        self.took_shared = true;
        self.shared_bytes += u64::from(bulk.header.payload_len);
        let len = bulk.header.payload_len;
        let Some(is_awaited) = taken else {
            let text = format!("no slot {slot} of the shared memory holds {len} bytes");
            return Err(RpcError::new(ErrorKind::Protocol, text));
        };
        // Any frame makes the peer look for a slot, so that a peer to which others go needs no
        // more.
        if is_awaited && !self.output.is_full() {
            self.control(Kind::Credit, 0, &encode_credit(0, 0));
        }
        Ok(())
    }

    /// Returns the reason to drop a frame's payload: no room for it, or for an earlier frame of its
    /// message.
    fn refusal(&self, header: &FrameHeader, room: &mut dyn FnMut(u64) -> Result<()>) -> Option<RpcError> {
        let before = self.partials.get(&header.id).filter(|_| header.kind.is_data());
        let refused = before.and_then(|partial| partial.refused.clone());
        let held = self.held() + u64::from(header.body_len) + u64::from(header.payload_len);
        refused.or_else(|| room(held).err())
    }

    /// Returns true if a frame continues a partial message. Control frames between its frames may
    /// have the same id.
    fn is_partial(&self, header: &FrameHeader) -> bool {
        header.kind.is_data() && self.partials.contains_key(&header.id)
    }

    /// Checks a message's size including its next frame, before memory is reserved for the frame.
    fn check_size(&self, header: &FrameHeader) -> Result<()> {
        let partial = self.partials.get(&header.id).filter(|_| header.kind.is_data());
        let before = partial.map_or(0, |partial| partial.len);
        let len = before as u64 + u64::from(header.body_len) + u64::from(header.payload_len);
        // Slightly more than the limit is accepted, because the sender may not count the body.
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
                    format!("{all} bytes of messages are in flight, above the credit of {limit}"),
                ));
            }
        }
        Ok(())
    }

    /// Adds a frame to its message. Returns the message if this was its last frame.
    fn part<'a>(&mut self, header: FrameHeader, body: Cow<'a, [u8]>, payload: Payload) -> Result<Option<Incoming<'a>>> {
        let FrameHeader { kind, id, lane, more, .. } = header;
        if !more && !self.is_partial(&header) {
            return Ok(Some(Incoming { kind, id, lane, body, payload }));
        }
        let partial = self.partials.entry(id).or_default();
        let (first_kind, first_lane) = *partial.first.get_or_insert((kind, lane));
        if first_kind != kind {
            return Err(RpcError::new(ErrorKind::Protocol, "the frames of a message are of different kinds"));
        }
        if first_lane != lane {
            return Err(RpcError::new(ErrorKind::Protocol, "the frames of a message name different lanes"));
        }
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

    /// Returns the bytes of the window that the partial messages take so far.
    pub(super) fn partial_cost(&self) -> u64 {
        self.partial_cost
    }

    /// Returns the memory in bytes that partial messages and the bulk payload take.
    pub(super) fn held(&self) -> u64 {
        (self.partial_held + self.bulk.as_ref().map_or(0, BulkRead::reserved)) as u64
    }

    /// Returns the number of messages that have begun to arrive.
    pub(super) fn partial_count(&self) -> usize {
        self.partials.len()
    }

    /// Returns true if a message has begun to arrive, as far as its header was seen.
    pub(super) fn is_receiving(&self) -> bool {
        self.bulk.is_some() || !self.partials.is_empty()
    }

    pub(super) fn control(&mut self, kind: Kind, id: u64, body: &[u8]) {
        let header = FrameHeader { id, ..FrameHeader::control(kind, body.len() as u32) };
        self.output.control(header, body);
    }

    /// Handles pings and pongs, which concern no request. Returns every other message.
    pub(super) fn handle_control<'a>(&mut self, incoming: Incoming<'a>) -> Option<Incoming<'a>> {
        match incoming.kind {
            Kind::Ping => {
                // A peer that sends pings and reads nothing does not get a pong for each: memory
                // stays bounded.
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
        // While data of this side moves out, the peer is at least reading. Control frames do not
        // count, nor does the last of the data, because those only fill buffers on this side.
        if data && self.output.data_pending {
            self.last_sign_of_life = now;
        }
    }

    pub(super) fn poll_timeout(&self) -> Instant {
        if self.pings + 1 < SILENT_INTERVALS { self.next_ping } else { self.next_ping.min(self.silent_at()) }
    }

    fn silent_at(&self) -> Instant {
        self.last_sign_of_life + self.keep_alive * SILENT_INTERVALS
    }

    pub(super) fn handle_timeout(&mut self, now: Instant) -> Result<()> {
        // If the pings were not sent, this side was asleep, and bytes from the peer may be waiting
        // unread.
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

    /// Returns the error for an end of the stream without an orderly close.
    pub(super) fn end_of_stream(&self, input_left: usize) -> RpcError {
        let inside = input_left > 0 || self.is_receiving();
        let when = if inside { "in the middle of a message" } else { "without closing the session" };
        RpcError::new(ErrorKind::PeerLost, format!("the peer closed the connection {when}"))
    }
}
