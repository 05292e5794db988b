//! One connection between two ranks: frames out, frames in, and bytes straight from and into
//! buffers.
//!
//! A frame is a head of eight bytes (kind `u8`, three zeros, length `u32`, little-endian) and as
//! many bytes. Data goes in frames of up to [`MAX_DATA`], and only as far as there is room for it
//! at the other end: between ranks that are in the same call, all that comes can be read at once,
//! and word of the end of the group is not stuck behind data that waits for a third rank.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rpc_core::limits::OpenFileLease;

use super::super::announcement::{LEN, MAX_POISON};
use super::super::segment::INLINE;
use super::abort_notice::AbortNotice;
use super::socket::Socket;

const HEAD: usize = 8;
/// The longest frame of data, in bytes.
const MAX_DATA: usize = 256 * 1024;
/// The longest frame of another kind.
const MAX_NOTE: usize = LEN + MAX_POISON + INLINE + 4096;
/// The frames about calls that wait to be taken: a rank says no more than one before it has heard
/// the others' words.
const MAX_NOTES: usize = 2;
/// Room of so many bytes more is worth a word to the peer.
const GRANT: usize = 128 * 1024;
/// Reads of at least this many bytes of data go straight into place.
const STRAIGHT: usize = 8 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum FrameKind {
    /// The announcement of a collective.
    Announcement = 1,
    /// The announcement of the sending side of a transfer.
    Offer = 2,
    /// Announcement of the receiving side.
    Answer = 3,
    /// Bytes of the call that both have agreed on.
    Data = 4,
    /// The group is broken.
    Abort = 5,
    /// The rank goes, with everything done.
    Leave = 6,
    /// The rank is through with a step, and may have left out collectives of it: `u64`.
    LeftStep = 7,
    /// The rank is in a call, and waits for another one.
    Waits = 8,
    /// The rank has room for so many bytes of the data that it takes in a ring, counted from the
    /// first: `u64`.
    Room = 9,
}

impl FrameKind {
    fn of(code: u8) -> Option<Self> {
        use FrameKind::{Abort, Announcement, Answer, Data, Leave, LeftStep, Offer, Room, Waits};

        let all = [Announcement, Offer, Answer, Data, Abort, Leave, LeftStep, Waits, Room];
        all.into_iter().find(|kind| *kind as u8 == code)
    }
}

/// Bytes of a call to send: a stretch of a buffer of which so much is there.
#[derive(Clone, Copy)]
pub(super) struct Outgoing {
    pub(super) start: *const u8,
    pub(super) len: usize,
    /// Number of bytes that are ready to be sent.
    pub(super) ready: usize,
    /// Number of bytes of it that the peer has room for.
    pub(super) room: usize,
    pub(super) sent: usize,
}

impl Outgoing {
    /// Returns the number of bytes that may be sent now.
    fn sendable(&self) -> usize {
        self.ready.min(self.room)
    }
}

/// Room for bytes of a call to receive: a stretch of a buffer, or a ring of `room` bytes that are
/// used again.
#[derive(Clone, Copy)]
pub(super) struct Incoming {
    pub(super) start: *mut u8,
    pub(super) len: usize,
    pub(super) room: usize,
    pub(super) received: usize,
    /// Number of bytes that are no longer needed.
    pub(super) released: usize,
    /// Number of bytes of it that the peer knows it may send.
    pub(super) granted: usize,
    /// True if the data stays when all has come, until the rank that reduces it takes it away.
    pub(super) stays: bool,
}

impl Incoming {
    /// Returns the place of the next bytes, and how many fit there.
    fn place(&self) -> (*mut u8, usize) {
        let at = self.received % self.room.max(1);
        let free = (self.released + self.room).min(self.len) - self.received;
        (self.start.wrapping_add(at), free.min(self.room - at))
    }
}

// SAFETY: the pointers are those of buffers that the call at hand was lent, which may be used from
// any thread; between calls there are none.
unsafe impl Send for Outgoing {}
// SAFETY: as above.
unsafe impl Send for Incoming {}

pub(super) struct Link {
    socket: Box<dyn Socket>,
    /// Whole frames that are to be sent before any data, and the bytes of the first one that have
    /// been sent.
    queued: VecDeque<Vec<u8>>,
    queued_written: usize,
    /// Data to send, one stretch after the other, and the frame of it that is being sent: its head,
    /// and how much is left of head and data.
    pub(super) outgoing: VecDeque<Outgoing>,
    head: [u8; HEAD],
    head_left: usize,
    data_left: usize,
    /// True once the peer takes nothing more.
    is_write_closed: bool,
    /// Bytes that were read and not yet looked at.
    buffer: Box<[u8]>,
    filled: std::ops::Range<usize>,
    /// True if all that had come has been read, so that another attempt would find nothing. `poll`
    /// says when that has changed.
    is_drained: bool,
    /// The frame that is being read: its kind and how much is left.
    frame: Option<(FrameKind, usize)>,
    /// A frame that is not data, while it comes in.
    partial: Vec<u8>,
    notes: VecDeque<(FrameKind, Vec<u8>)>,
    pub(super) incoming: VecDeque<Incoming>,
    abort: Option<Vec<u8>>,
    left_step: u64,
    /// Time at which the peer has last said that it waits for another.
    waited: Option<Instant>,
    /// Number of times that bytes of data, or whole frames that are about calls, have gone either
    /// way.
    progress: u64,
    /// Reason why no more comes; empty if the peer has left.
    gone: Option<String>,
    /// Charge for the connection's descriptor.
    open_file: Option<OpenFileLease>,
}

impl Link {
    /// Makes a link over a connected socket that does not block.
    pub(super) fn new(socket: Box<dyn Socket>) -> Self {
        Self {
            socket,
            queued: VecDeque::new(),
            queued_written: 0,
            outgoing: VecDeque::new(),
            head: [0; HEAD],
            head_left: 0,
            data_left: 0,
            is_write_closed: false,
            buffer: vec![0; 32 * 1024].into(),
            filled: 0..0,
            is_drained: false,
            frame: None,
            partial: Vec::new(),
            notes: VecDeque::new(),
            incoming: VecDeque::new(),
            abort: None,
            left_step: 0,
            waited: None,
            progress: 0,
            gone: None,
            open_file: None,
        }
    }

    /// Sets the charge for the connection's descriptor, which ends with that.
    pub(super) fn set_charge(&mut self, open_file: Option<OpenFileLease>) {
        self.open_file = open_file;
    }

    /// Returns the readiness source of the connection, if there is one.
    pub(super) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.socket.file()
    }

    /// Makes the next [`Link::read`] ask the socket, because more may have come.
    pub(super) fn expect_input(&mut self) {
        self.is_drained = false;
    }

    /// Queues a frame.
    pub(super) fn queue_frame(&mut self, kind: FrameKind, bytes: &[u8]) {
        let mut frame = Vec::with_capacity(HEAD + bytes.len());
        frame.extend_from_slice(&head(kind, bytes.len()));
        frame.extend_from_slice(bytes);
        self.queued.push_back(frame);
    }

    /// Returns the next frame that is about a call and is not data, if it has come.
    pub(super) fn take_note(&mut self) -> Option<(FrameKind, Vec<u8>)> {
        self.notes.pop_front()
    }

    /// Returns the transfer that comes next.
    pub(super) fn awaited(&self) -> Option<&Incoming> {
        self.incoming.iter().find(|one| one.received < one.len)
    }

    /// Gives the first `released` bytes of the first stretch that is coming in free again, and
    /// tells the peer when that is worth a word.
    pub(super) fn release(&mut self, released: usize) {
        let Some(ring) = self.incoming.front_mut() else { return };
        ring.released = released;
        let room = (released + ring.room).min(ring.len);
        if ring.granted < ring.len && (room - ring.granted >= GRANT || room == ring.len) {
            ring.granted = room;
            self.queue_frame(FrameKind::Room, &(room as u64).to_le_bytes());
        }
    }

    /// Returns the breakdown that the peer has sent.
    pub(super) fn abort(&self) -> Option<&[u8]> {
        self.abort.as_deref()
    }

    /// Returns the last step that the peer is through with without having come to all collectives,
    /// perhaps. All that it announced before has been read.
    pub(super) fn left_step(&self) -> u64 {
        self.left_step
    }

    /// Queues the frame that this rank waits for another, unless frames are queued already.
    pub(super) fn queue_waits(&mut self) {
        if self.queued.is_empty() {
            self.queue_frame(FrameKind::Waits, &[]);
        }
    }

    /// Returns true if the peer has said within `period` that it waits for another.
    pub(super) fn waits(&self, period: Duration) -> bool {
        self.waited.is_some_and(|at| at.elapsed() < period)
    }

    /// Changes whenever a call gets on.
    pub(super) fn progress(&self) -> u64 {
        self.progress
    }

    /// Returns the reason why nothing more comes from the peer, once all that it sent has been
    /// taken; empty if it has left.
    pub(super) fn gone(&self) -> Option<&str> {
        self.gone.as_deref()
    }

    /// Returns true if there is anything to write now.
    pub(super) fn wants_output(&self) -> bool {
        if self.gone.is_some() || self.is_write_closed {
            return false;
        }
        let ready = self.outgoing.front().is_some_and(|one| one.sent < one.sendable());
        let begun = self.head_left + self.data_left > 0 || self.socket.holds_back();
        !self.queued.is_empty() || begun || ready
    }

    /// Returns true if there is room for anything that the peer may send now.
    pub(super) fn wants_input(&self) -> bool {
        if self.gone.is_some() || self.abort.is_some() {
            return false;
        }
        match self.frame {
            Some((FrameKind::Data, _)) => self.awaited().is_some_and(|one| one.place().1 > 0),
            _ => self.notes.len() < MAX_NOTES,
        }
    }

    /// Ends the connection when the group is broken: it finishes the frame that has begun and says
    /// `word`. `None` if the peer does not listen. No buffer of the call is used from here on.
    pub(super) fn into_abort_notice(mut self, word: &[u8]) -> Option<AbortNotice> {
        if self.gone.is_some() || self.is_write_closed {
            return None;
        }
        self.queue_frame(FrameKind::Abort, word);
        let mut rest = self.head[HEAD - self.head_left..].to_vec();
        if let Some(next) = self.outgoing.front().filter(|_| self.data_left > 0) {
            // SAFETY: the stretch is of a buffer that the call was lent, and what is ready of it
            // does not change.
            rest.extend_from_slice(unsafe { std::slice::from_raw_parts(next.start.add(next.sent), self.data_left) });
        }
        for (at, frame) in self.queued.iter().enumerate() {
            rest.extend_from_slice(&frame[if at == 0 { self.queued_written } else { 0 }..]);
        }
        Some(AbortNotice::new(self.socket, rest, self.open_file))
    }

    /// Writes as much as the socket takes; says whether that was anything.
    pub(super) fn write(&mut self) -> bool {
        let mut moved = false;
        while self.wants_output() {
            let in_frame = self.head_left + self.data_left > 0;
            if !in_frame && self.queued.is_empty() {
                let ready = self.outgoing.front().map_or(0, |next| next.sendable() - next.sent);
                if ready > 0 {
                    self.data_left = ready.min(MAX_DATA);
                    self.head = head(FrameKind::Data, self.data_left);
                    self.head_left = HEAD;
                }
            }
            let result = if self.head_left + self.data_left > 0 {
                let data = match self.outgoing.front() {
                    // SAFETY: the stretch is of a buffer that the call was lent, and what is ready
                    // of it does not change.
                    Some(next) => unsafe { std::slice::from_raw_parts(next.start.add(next.sent), self.data_left) },
                    None => &[],
                };
                let head = &self.head[HEAD - self.head_left..];
                self.socket.write_vectored(&[IoSlice::new(head), IoSlice::new(data)]).map(Some)
            } else if let Some(frame) = self.queued.front() {
                self.socket.write(&frame[self.queued_written..]).map(Some)
            } else {
                self.socket.flush().map(|()| None)
            };
            match result {
                Ok(None) => moved = true,
                Ok(Some(0)) => self.is_write_closed = true,
                Ok(Some(written)) => {
                    moved = true;
                    self.has_written(written);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // The peer's last words may still be there to read; after them comes the end.
                Err(_) => self.is_write_closed = true,
            }
        }
        moved
    }

    fn has_written(&mut self, written: usize) {
        if self.head_left + self.data_left == 0 {
            self.queued_written += written;
            if self.queued.front().is_some_and(|frame| frame.len() == self.queued_written) {
                let about_calls = self.queued.pop_front().is_some_and(|frame| frame[0] != FrameKind::Waits as u8);
                self.progress += u64::from(about_calls);
                self.queued_written = 0;
            }
            return;
        }
        self.progress += 1;
        let of_head = written.min(self.head_left);
        self.head_left -= of_head;
        self.data_left -= written - of_head;
        if let Some(next) = self.outgoing.front_mut() {
            next.sent += written - of_head;
            if next.sent == next.len && self.head_left == 0 {
                self.outgoing.pop_front();
            }
        }
    }

    /// Reads as much as has come and there is room for; says whether that was anything. A socket
    /// that has been drained is not asked again before [`Link::expect_input`].
    pub(super) fn read(&mut self) -> bool {
        let mut moved = false;
        while self.wants_input() {
            if self.consume() {
                moved = true;
                continue;
            }
            if self.is_drained {
                break;
            }
            // Either the buffer is empty, or it holds a part of a head.
            let straight = match (self.frame, self.awaited()) {
                (Some((FrameKind::Data, left)), Some(incoming)) => {
                    let (place, room) = incoming.place();
                    Some((place, room.min(left))).filter(|(_, len)| *len >= STRAIGHT)
                }
                _ => None,
            };
            let mut asked = None;
            let result = match straight {
                Some((place, len)) => {
                    // SAFETY: room in a buffer that the call was lent, which no other code touches
                    // there.
                    self.socket.read(unsafe { std::slice::from_raw_parts_mut(place, len) })
                }
                None => {
                    self.buffer.copy_within(self.filled.clone(), 0);
                    self.filled = 0..self.filled.len();
                    let room = &mut self.buffer[self.filled.end..];
                    asked = Some(room.len());
                    self.socket.read(room)
                }
            };
            match result {
                Ok(0) => self.lose("the connection ended"),
                Ok(read) => {
                    moved = true;
                    match asked {
                        // Large data keeps coming while it is read, so that the next attempt is
                        // better than a call of `poll`.
                        None => self.has_received(read),
                        Some(asked) => {
                            self.filled.end += read;
                            self.is_drained = read < asked && self.socket.is_drained_by_short_reads();
                        }
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.is_drained = self.socket.file().is_some();
                    break;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => self.lose(&error.to_string()),
            }
        }
        moved
    }

    /// Takes as much as it can from the buffer; returns true if that was anything.
    fn consume(&mut self) -> bool {
        let filled = &self.buffer[self.filled.clone()];
        match self.frame {
            None => {
                let Some(head) = filled.first_chunk::<HEAD>() else { return false };
                let len = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
                match FrameKind::of(head[0]) {
                    Some(FrameKind::Data) if len > 0 && len <= MAX_DATA => self.frame = Some((FrameKind::Data, len)),
                    Some(kind) if kind != FrameKind::Data && len <= MAX_NOTE => self.frame = Some((kind, len)),
                    _ => {
                        self.lose("it sent no frame of this protocol");
                        return false;
                    }
                }
                self.filled.start += HEAD;
                self.finish_note();
                true
            }
            Some((FrameKind::Data, left)) => {
                let Some(incoming) = self.awaited() else { return false };
                let (place, room) = incoming.place();
                let len = filled.len().min(left).min(room);
                if len == 0 {
                    return false;
                }
                // SAFETY: room in a buffer that the call was lent, which no other code touches
                // there.
                unsafe { std::ptr::copy_nonoverlapping(filled.as_ptr(), place, len) };
                self.filled.start += len;
                self.has_received(len);
                true
            }
            Some((kind, left)) => {
                let len = filled.len().min(left);
                if len == 0 {
                    return false;
                }
                self.partial.extend_from_slice(&filled[..len]);
                self.filled.start += len;
                self.frame = Some((kind, left - len));
                self.finish_note();
                true
            }
        }
    }

    /// Counts data that has gone into place.
    fn has_received(&mut self, len: usize) {
        self.progress += 1;
        if let Some((FrameKind::Data, left)) = self.frame {
            self.frame = (left > len).then_some((FrameKind::Data, left - len));
        }
        let at = self.incoming.iter().position(|one| one.received < one.len);
        if let Some((at, incoming)) = at.and_then(|at| Some((at, self.incoming.get_mut(at)?))) {
            incoming.received += len;
            if incoming.received == incoming.len && !incoming.stays {
                self.incoming.remove(at);
            }
        }
    }

    /// Handles the frame that is no data, if it is whole.
    fn finish_note(&mut self) {
        let Some((kind, 0)) = self.frame else { return };
        let bytes = std::mem::take(&mut self.partial);
        self.frame = None;
        self.progress += u64::from(kind != FrameKind::Waits);
        match kind {
            FrameKind::Waits => self.waited = Some(Instant::now()),
            FrameKind::Abort => self.abort = Some(bytes),
            FrameKind::Leave => self.lose(""),
            FrameKind::LeftStep => match bytes.first_chunk() {
                Some(step) => self.left_step = u64::from_le_bytes(*step),
                None => self.lose("it sent no frame of this protocol"),
            },
            FrameKind::Data => {}
            FrameKind::Room => match bytes.first_chunk() {
                Some(room) => {
                    let room = usize::try_from(u64::from_le_bytes(*room)).unwrap_or(usize::MAX);
                    // There is one such stretch in a call, and it stays there until the peer has
                    // told of room for all of it.
                    if let Some(one) = self.outgoing.iter_mut().find(|one| one.room < one.len) {
                        one.room = one.room.max(room);
                    }
                }
                None => self.lose("it sent no frame of this protocol"),
            },
            FrameKind::Announcement | FrameKind::Offer | FrameKind::Answer => self.notes.push_back((kind, bytes)),
        }
    }

    fn lose(&mut self, why: &str) {
        self.gone.get_or_insert_with(|| why.to_owned());
    }
}

fn head(kind: FrameKind, len: usize) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[0] = kind as u8;
    head[4..].copy_from_slice(&(len as u32).to_le_bytes());
    head
}
