//! Queue of bytes to write: control frames first, then messages, frame by frame, with lanes taking
//! turns.

use std::collections::VecDeque;
use std::io::IoSlice;

use bytes::{Buf, Bytes};

use super::frame::{FrameHeader, HEADER_LEN, Kind, MAX_BODY_PART};
use super::id_map::IdMap;
use super::shared_window::{MIN_SHARED, Window};

/// Bytes that each value of a message counts at least. Roughly its decoded size, which may be a
/// hundred times its size on the wire.
pub(super) const VALUE_SIZE: usize = 64;

/// Bytes at which staging stops, so that a control frame never waits behind much data.
const STAGE: usize = 512 << 10;

/// Largest capacity of the buffer for headers and bodies that is kept while there is nothing to
/// write, so that an idle session stays small.
const TAIL_KEPT: usize = 16 << 10;

/// Largest capacity of a message's body that is kept for the next message.
const BODY_KEPT: usize = 256;

/// Smallest payload in bytes that is written from where it is; smaller ones are copied behind their
/// header.
const BY_REFERENCE: usize = 4 << 10;

/// A message that is being sent.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) kind: Kind,
    pub(super) id: u64,
    pub(super) lane: u32,
    body: Vec<u8>,
    /// Bytes of the body that were split off into frames already.
    body_sent: usize,
    payload: VecDeque<Bytes>,
    payload_len: usize,
    /// True once a part of the message has been staged: then all of it has to be sent.
    begun: bool,
    /// Size of the whole message: its length, or more if it has many values.
    pub(super) size: usize,
}

impl Message {
    pub(super) fn new(kind: Kind, id: u64, lane: u32, body: Vec<u8>, payload: Vec<Bytes>, values: usize) -> Self {
        let payload_len = payload.iter().map(Bytes::len).sum::<usize>();
        let size = (body.len() + payload_len).max(values * VALUE_SIZE);
        Self { kind, id, lane, body, body_sent: 0, payload: payload.into(), payload_len, begun: false, size }
    }

    /// Returns the bytes of the payload that have not been staged.
    pub(super) fn payload_len(&self) -> usize {
        self.payload_len
    }

    fn body_left(&self) -> &[u8] {
        &self.body[self.body_sent..]
    }
}

/// Key of a queue. Messages with the same key are sent in order, each whole before the next;
/// different keys take turns.
type OrderKey = u64;

/// Output queue of a channel.
#[derive(Debug)]
pub(super) struct Output {
    control: VecDeque<Vec<u8>>,
    queues: IdMap<VecDeque<Message>>,
    /// Keys with messages to send, in turn.
    turns: VecDeque<OrderKey>,
    /// Bytes that are ready to be written, oldest first.
    staged: VecDeque<Bytes>,
    /// Last staged bytes, still growing.
    tail: Vec<u8>,
    /// Bytes of `tail` that have been written.
    tail_sent: usize,
    staged_len: usize,
    /// Bytes put into the window for frames that are staged.
    shared_len: usize,
    /// Bytes of payload sent through the window.
    pub(super) shared_bytes: u64,
    /// True if all messages that are queued wait for a slot of the window.
    pub(super) awaits_slot: bool,
    /// Window through which large payloads go, if there is one.
    pub(super) window: Option<Box<dyn Window>>,
    /// Largest payload of one frame that the peer accepts.
    chunk: usize,
    /// True if messages, and not only control frames, are staged or queued.
    pub(super) data_pending: bool,
    /// Memory of the body of the last small message, for the next one.
    spare_body: Vec<u8>,
    /// Ids of messages whose last frame has been staged since the caller last drained this list.
    pub(super) sent: Vec<u64>,
}

impl Output {
    pub(super) fn new(chunk: usize) -> Self {
        Self {
            control: VecDeque::new(),
            queues: IdMap::default(),
            turns: VecDeque::new(),
            staged: VecDeque::new(),
            tail: Vec::new(),
            tail_sent: 0,
            staged_len: 0,
            shared_len: 0,
            shared_bytes: 0,
            awaits_slot: false,
            window: None,
            chunk: chunk.max(1),
            data_pending: false,
            spare_body: Vec::new(),
            sent: Vec::new(),
        }
    }

    /// Returns memory for the body of a message.
    pub(super) fn take_body(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.spare_body)
    }

    /// Queues a control frame.
    pub(super) fn control(&mut self, header: FrameHeader, body: &[u8]) {
        self.control.push_back([&header.encode(), body].concat());
    }

    /// Queues a message behind others with the same key.
    pub(super) fn message(&mut self, key: OrderKey, message: Message) {
        self.data_pending = true;
        // Fast path: most messages are small and find empty queues, so they are staged at once.
        let is_next = self.turns.is_empty() && self.control.is_empty() && self.staged() < STAGE;
        if is_next && self.is_one_frame(&message) && !self.has_no_slot_for(&message) {
            self.sent.push(message.id);
            self.stage_frame(message, false);
            return;
        }
        let queue = self.queues.entry(key).or_default();
        if queue.is_empty() {
            self.turns.push_back(key);
        }
        queue.push_back(message);
    }

    /// Removes a message from its queue, unless a part of it has been staged.
    pub(super) fn remove(&mut self, key: OrderKey, id: u64) -> Option<Message> {
        let queue = self.queues.get_mut(&key)?;
        let at = queue.iter().position(|message| message.id == id && !message.begun)?;
        let removed = queue.remove(at);
        if queue.is_empty() {
            self.queues.remove(&key);
            self.turns.retain(|turn| *turn != key);
        }
        removed
    }

    /// Returns true if no more is staged until bytes are written.
    pub(super) fn is_full(&self) -> bool {
        self.staged() >= STAGE || self.control.len() >= STAGE / HEADER_LEN
    }

    /// Returns true if messages wait that have not been staged whole.
    pub(super) fn has_queued(&self) -> bool {
        !self.turns.is_empty()
    }

    /// Returns true if nothing is left to write.
    pub(super) fn is_empty(&self) -> bool {
        self.staged_len == 0 && self.turns.is_empty() && self.control.is_empty()
    }

    /// Moves queued frames to where `slices` shows them.
    pub(super) fn stage(&mut self) {
        let was_drained = self.staged.is_empty() && self.tail_sent == self.tail.len();
        let (mut has_data, mut waiting) = (false, 0);
        while let Some(frame) = self.control.pop_front() {
            self.tail.extend_from_slice(&frame);
            self.staged_len += frame.len();
        }
        while self.staged() < STAGE && waiting < self.turns.len() {
            let Some(key) = self.turns.pop_front() else { break };
            let Some(mut message) = self.queues.get_mut(&key).and_then(VecDeque::pop_front) else { continue };
            if self.has_no_slot_for(&message) {
                // Other messages have their turn meanwhile.
                if let Some(queue) = self.queues.get_mut(&key) {
                    queue.push_front(message);
                }
                self.turns.push_back(key);
                waiting += 1;
                continue;
            }
            (has_data, waiting) = (true, 0);
            if self.is_one_frame(&message) {
                let queue_is_empty = self.queues.get(&key).is_none_or(VecDeque::is_empty);
                if queue_is_empty {
                    self.queues.remove(&key);
                } else {
                    self.turns.push_back(key);
                }
                self.sent.push(message.id);
                self.stage_frame(message, false);
            } else {
                let part = self.split(&mut message);
                self.stage_frame(part, true);
                if let Some(queue) = self.queues.get_mut(&key) {
                    queue.push_front(message);
                }
                self.turns.push_back(key);
            }
        }
        self.awaits_slot = waiting > 0 && waiting == self.turns.len();
        if has_data {
            self.data_pending = true;
        } else if was_drained {
            // Control frames alone: data that waits for a slot does not move.
            self.data_pending = false;
        }
    }

    /// Returns true if a message has to wait for a free slot of the window.
    fn has_no_slot_for(&mut self, message: &Message) -> bool {
        message.payload_len >= MIN_SHARED && self.window.as_mut().is_some_and(|window| !window.has_room())
    }

    /// Returns the bytes that are ready for the peer. Those in the window count as well, so that
    /// the peer learns of each slot before the next one is filled.
    fn staged(&self) -> usize {
        self.staged_len + self.shared_len
    }

    fn is_one_frame(&self, message: &Message) -> bool {
        message.body_left().len() <= MAX_BODY_PART && message.payload_len <= self.chunk
    }

    /// Splits off the next frame of a message that needs several.
    fn split(&self, message: &mut Message) -> Message {
        let body = message.body_left();
        let body = body[..body.len().min(MAX_BODY_PART)].to_vec();
        message.begun = true;
        message.body_sent += body.len();
        let Message { kind, id, lane, .. } = *message;
        let mut part = Message {
            kind,
            id,
            lane,
            body,
            body_sent: 0,
            payload: VecDeque::new(),
            payload_len: 0,
            begun: true,
            size: 0,
        };
        // The whole body goes first, so that a receiver knows the request before its payload.
        while message.body_left().is_empty() && part.payload_len < self.chunk {
            let Some(piece) = message.payload.front_mut() else { break };
            let taken = piece.split_to(piece.len().min(self.chunk - part.payload_len));
            if piece.is_empty() {
                message.payload.pop_front();
            }
            message.payload_len -= taken.len();
            part.payload_len += taken.len();
            part.payload.push_back(taken);
        }
        part
    }

    fn stage_frame(&mut self, mut part: Message, more: bool) {
        let slot = match &mut self.window {
            Some(window) if part.payload_len >= MIN_SHARED => window.put(&part.payload, part.payload_len),
            _ => None,
        };
        let body = part.body_left();
        let header = FrameHeader {
            body_len: body.len() as u32,
            payload_len: part.payload_len as u32,
            id: part.id,
            lane: part.lane,
            kind: part.kind,
            more,
            slot,
        };
        self.staged_len += HEADER_LEN + body.len();
        self.tail.extend_from_slice(&header.encode());
        self.tail.extend_from_slice(body);
        if (1..=BODY_KEPT).contains(&part.body.capacity()) {
            self.spare_body = std::mem::take(&mut part.body);
        }
        if slot.is_some() {
            self.shared_len += part.payload_len;
            self.shared_bytes += part.payload_len as u64;
            return;
        }
        self.staged_len += part.payload_len;
        for piece in part.payload {
            if piece.len() < BY_REFERENCE {
                self.tail.extend_from_slice(&piece);
            } else {
                self.stage_tail();
                self.staged.push_back(piece);
            }
        }
    }

    /// Moves the tail behind the staged bytes, because a piece follows that is not copied.
    fn stage_tail(&mut self) {
        if self.tail_sent < self.tail.len() {
            let mut tail = Bytes::from(std::mem::take(&mut self.tail));
            tail.advance(std::mem::take(&mut self.tail_sent));
            self.staged.push_back(tail);
        }
    }

    /// Fills `slices` with the staged bytes, for a vectored write. Returns the number of slices
    /// filled.
    pub(super) fn slices<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let tail = (self.tail_sent < self.tail.len()).then_some(&self.tail[self.tail_sent..]);
        let mut count = 0;
        for (slice, bytes) in slices.iter_mut().zip(self.staged.iter().map(|bytes| &bytes[..]).chain(tail)) {
            *slice = IoSlice::new(bytes);
            count += 1;
        }
        count
    }

    /// Records that the first `count` staged bytes were written.
    pub(super) fn advance(&mut self, mut count: usize) {
        self.staged_len -= count.min(self.staged_len);
        while count > 0 {
            match self.staged.front_mut() {
                Some(front) if count >= front.len() => {
                    count -= front.len();
                    self.staged.pop_front();
                }
                Some(front) => {
                    front.advance(count);
                    return;
                }
                None => {
                    self.tail_sent = (self.tail_sent + count).min(self.tail.len());
                    break;
                }
            }
        }
        if self.staged.is_empty() && self.tail_sent == self.tail.len() {
            self.tail.clear();
            self.tail_sent = 0;
            self.shared_len = 0;
            if self.tail.capacity() > TAIL_KEPT {
                self.tail = Vec::new();
            }
            self.data_pending = !self.turns.is_empty() && !self.awaits_slot;
        }
    }
}
