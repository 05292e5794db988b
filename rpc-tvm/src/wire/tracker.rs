//! TVM's tracker, as its peers see it: the tracker's half of a connection, without I/O and without
//! a clock.
//!
//! ```text
//! server or client                                    tracker
//!   i32 magic 0x2f271               ──►
//!          ◄──   the same magic
//!   i32 length | JSON text          ──►     tracker_message.rs
//!          ◄──   i32 length | JSON text     tracker_reply.rs
//! ```
//!
//! Every message is a list that begins with its code, and has one reply. Replies come in the order
//! of the messages, except for that to a request for a server, which comes when there is one.
//!
//! [`TrackerWire`] reads the messages. A large one is announced before it is kept, so that the
//! driver can charge it. A message that breaks the protocol ends the connection, as at a tracker of
//! TVM: its peers have no other way to be told.

use bytes::buf::Limit;
use bytes::{Buf, BufMut, BytesMut};

use super::hello::TRACKER_MAGIC;
use super::reader::WireError;
use super::tracker_message::{MAX_TRACKER_MESSAGE, TrackerMessage};

/// Length in bytes up to which messages are not announced, and room for bytes that are read ahead.
const READ_AHEAD: usize = 4 << 10;

/// Event of a connection to a tracker.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum TrackerEvent {
    /// The magic has arrived, and is sent back. Messages follow.
    Hello,
    /// A message of this length follows. The next poll collects it.
    Announced {
        /// Length in bytes.
        len: usize,
    },
    /// A message has arrived.
    Message(TrackerMessage),
}

/// State machine of the tracker's half of a connection.
///
/// Loop: poll events until there is none, then read into [`input`](Self::input).
#[derive(Debug, Default)]
pub struct TrackerWire {
    /// Bytes that were read and not consumed.
    pub(super) input: BytesMut,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Stage {
    /// The magic is awaited.
    #[default]
    Magic,
    /// The length of a message is awaited.
    Length,
    /// A message is awaited.
    Message { len: usize },
}

impl TrackerWire {
    /// Creates the state of a connection of which nothing has been read.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the buffer to read into: it has room for at least one byte.
    pub fn input(&mut self) -> Limit<&mut BytesMut> {
        let wanted = match self.stage {
            Stage::Message { len } => len.max(READ_AHEAD),
            _ => READ_AHEAD,
        };
        let room = wanted.saturating_sub(self.input.len()).max(1);
        self.input.reserve(room);
        (&mut self.input).limit(room)
    }

    /// Returns the next event, or `None` if more bytes are needed.
    ///
    /// # Errors
    ///
    /// The peer has broken the protocol. The connection cannot go on.
    pub fn poll_event(&mut self) -> Result<Option<TrackerEvent>, WireError> {
        match self.stage {
            Stage::Magic => {
                let Some(magic) = self.take_number() else { return Ok(None) };
                if magic != TRACKER_MAGIC {
                    return Err(WireError::new("the connection does not begin with the magic number of TVM's tracker"));
                }
                self.stage = Stage::Length;
                Ok(Some(TrackerEvent::Hello))
            }
            Stage::Length => {
                let Some(len) = self.take_number() else { return Ok(None) };
                let checked = usize::try_from(len).ok().filter(|len| (1..=MAX_TRACKER_MESSAGE).contains(len));
                let len = checked.ok_or_else(|| {
                    let text = format!("a message of {len} bytes, and 1 to {MAX_TRACKER_MESSAGE} are allowed");
                    WireError::new(text)
                })?;
                self.stage = Stage::Message { len };
                if len > READ_AHEAD { Ok(Some(TrackerEvent::Announced { len })) } else { self.poll_event() }
            }
            Stage::Message { len } => {
                if self.input.len() < len {
                    return Ok(None);
                }
                let message = TrackerMessage::decode(&self.input[..len])?;
                self.input.advance(len);
                self.stage = Stage::Length;
                if self.input.is_empty() {
                    // The memory of a large message is not kept.
                    self.input = BytesMut::new();
                }
                Ok(Some(TrackerEvent::Message(message)))
            }
        }
    }

    /// Returns true if a part of a message has arrived.
    #[must_use]
    pub fn is_inside_message(&self) -> bool {
        !self.input.is_empty() || matches!(self.stage, Stage::Message { .. })
    }

    fn take_number(&mut self) -> Option<i32> {
        (self.input.len() >= 4).then(|| self.input.get_i32_le())
    }
}
