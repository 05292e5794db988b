//! The client's half of a connection: from the bytes of a server to its answer to the hello and to
//! its replies.

use bytes::buf::Limit;
use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::frame::{FRAME_HEADER, READ_AHEAD, peek_header, take_body};
use super::frame_code::FrameCode;
use super::hello::ServerAnswer;
use super::reader::{Reader, WireError};
use super::reply::CallResult;
use super::server::WireLimits;
use super::value::{WireValue, decode_exception, decode_values};

/// Largest body of a reply of one value, and of an error, in bytes.
const MAX_SMALL_BODY: u64 = 64 << 10;

/// Reply that a request takes. A client keeps them in the order of its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Expected {
    /// One value.
    Value,
    /// The result of a call.
    Call,
    /// Bytes of a tensor, exactly so many.
    Data {
        /// Number of bytes.
        len: u64,
    },
}

/// Reply of a server.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ServerReply {
    /// The value of a request.
    Value(WireValue),
    /// The result of a call.
    Call(CallResult),
    /// Bytes of a tensor.
    Data(Bytes),
    /// The text of an error.
    Exception(String),
    /// A result that is none of the above, with the reason. It has been passed over.
    Unusable(String),
    /// A result that was larger than the limit, or that [`ClientWire::refuse`] has refused. It has
    /// been passed over.
    TooLarge {
        /// Length of its body in bytes.
        len: u64,
    },
}

/// Event of a connection.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ClientEvent {
    /// The server has answered the hello.
    Answer(ServerAnswer),
    /// The body of a reply follows, which is larger than what is read ahead. The next poll collects
    /// it, unless [`ClientWire::refuse`] is called before.
    Announced {
        /// Length of the body in bytes.
        len: u64,
    },
    /// The reply to the oldest request that has none.
    Reply(ServerReply),
    /// An error that no request has caused: the reason for which the server is about to close the
    /// connection.
    Unasked(String),
    /// The server has ended the session.
    Shutdown,
}

/// State machine of the client's half of a connection.
///
/// Loop: poll events until there is none, then read into [`input`](Self::input). A poll is given
/// the reply that the oldest unanswered request takes, by which the lengths and kinds of frames are
/// checked before memory is reserved.
#[derive(Debug)]
pub struct ClientWire {
    limits: WireLimits,
    /// Bytes that were read and not consumed.
    input: BytesMut,
    /// Body that is being filled elsewhere, while it is here.
    large: Option<LargeBody>,
    stage: Stage,
}

/// Body of a large reply, to read into without the state machine.
#[derive(Debug)]
pub struct LargeBody {
    buffer: BytesMut,
    filled: usize,
}

impl LargeBody {
    /// Returns the part that has not been filled yet.
    pub fn unfilled(&mut self) -> &mut [u8] {
        &mut self.buffer[self.filled..]
    }

    /// Records that the first `count` bytes of [`unfilled`](Self::unfilled) were filled.
    pub fn advance(&mut self, count: usize) {
        self.filled = (self.filled + count).min(self.buffer.len());
    }
}

#[derive(Debug)]
enum Stage {
    /// The answer to the hello is awaited.
    Answer,
    /// A frame is awaited, or the rest of its header.
    Header,
    /// The body of a frame is awaited.
    Body { code: FrameCode, len: usize, expected: Option<Expected> },
    /// Bytes are dropped until the frame ends.
    Refused { left: u64, len: u64 },
}

impl ClientWire {
    /// Creates the state of a connection of which nothing has been read.
    #[must_use]
    pub fn new(limits: WireLimits) -> Self {
        Self { limits, input: BytesMut::new(), large: None, stage: Stage::Answer }
    }

    /// Returns the buffer to read into: it has room for at least one byte.
    pub fn input(&mut self) -> Limit<&mut BytesMut> {
        let room = match &self.stage {
            Stage::Body { len, .. } if *len > READ_AHEAD => len.saturating_sub(self.input.len()),
            _ => READ_AHEAD.saturating_sub(self.input.len()),
        };
        let room = room.max(1);
        self.input.reserve(room);
        (&mut self.input).limit(room)
    }

    /// Returns the next event, or `None` if more bytes are needed. `expected` is the reply that the
    /// oldest unanswered request takes.
    ///
    /// # Errors
    ///
    /// The server has broken the protocol. The connection cannot go on.
    pub fn poll_event(&mut self, expected: Option<Expected>) -> Result<Option<ClientEvent>, WireError> {
        loop {
            match &mut self.stage {
                Stage::Answer => {
                    let Some((answer, len)) = ServerAnswer::decode(&self.input)? else { return Ok(None) };
                    self.input.advance(len);
                    self.stage = Stage::Header;
                    return Ok(Some(ClientEvent::Answer(answer)));
                }
                Stage::Header => match self.read_header(expected)? {
                    Step::NeedMore => return Ok(None),
                    Step::Continue => {}
                    Step::Event(event) => return Ok(Some(event)),
                },
                Stage::Body { code, len, expected } => {
                    let (code, len, expected) = (*code, *len, *expected);
                    if self.input.len() < len {
                        return Ok(None);
                    }
                    let body = take_body(&mut self.input, len);
                    self.stage = Stage::Header;
                    return event(code, body, expected).map(Some);
                }
                Stage::Refused { left, len } => {
                    let passed = (*left).min(self.input.len() as u64);
                    *left -= passed;
                    // Not more than the input has.
                    self.input.advance(passed as usize);
                    if *left > 0 {
                        return Ok(None);
                    }
                    let len = *len;
                    self.stage = Stage::Header;
                    return Ok(Some(ClientEvent::Reply(ServerReply::TooLarge { len })));
                }
            }
        }
    }

    /// Takes out the body of a large reply of which a part is awaited: an alternative to
    /// [`input`](Self::input). Nothing else may be done until it is [put back](Self::put_large).
    pub fn take_large(&mut self) -> Option<LargeBody> {
        let len = match self.stage {
            Stage::Body { len, .. } if len > READ_AHEAD && self.input.len() < len => len,
            _ => return None,
        };
        Some(self.large.take().unwrap_or_else(|| {
            let filled = self.input.len();
            let mut buffer = BytesMut::zeroed(len);
            buffer[..filled].copy_from_slice(&self.input);
            self.input.clear();
            LargeBody { buffer, filled }
        }))
    }

    /// Puts back what [`take_large`](Self::take_large) returned.
    pub fn put_large(&mut self, body: LargeBody) {
        if body.filled == body.buffer.len() {
            self.input = body.buffer;
        } else {
            self.large = Some(body);
        }
    }

    /// Refuses the reply that was announced: it is dropped as it arrives.
    pub fn refuse(&mut self) {
        if let Stage::Body { len, .. } = self.stage {
            self.stage = Stage::Refused { left: len as u64, len: len as u64 };
        }
    }

    /// Returns true if the server has sent a part of a message, and no more.
    #[must_use]
    pub fn is_inside_message(&self) -> bool {
        !(self.input.is_empty() && matches!(self.stage, Stage::Header | Stage::Answer))
    }

    fn read_header(&mut self, expected: Option<Expected>) -> Result<Step, WireError> {
        let Some((number, len)) = peek_header(&mut self.input)? else { return Ok(Step::NeedMore) };
        let code = FrameCode::from_number(number).filter(|code| !code.is_request() || *code == FrameCode::Shutdown);
        let code = code.ok_or_else(|| WireError::new(format!("a server does not send frames of code {number}")))?;
        let limit = match (code, expected) {
            (FrameCode::Shutdown, _) => 0,
            (FrameCode::Exception, _) => self.limits.max_body.max(MAX_SMALL_BODY),
            (FrameCode::Return, Some(Expected::Value)) => MAX_SMALL_BODY,
            (FrameCode::Return, Some(Expected::Call)) => self.limits.max_body,
            (FrameCode::CopyAck, Some(Expected::Data { len: asked })) if asked == len => len,
            (FrameCode::CopyAck, Some(Expected::Data { len: asked })) => {
                return Err(WireError::new(format!("{asked} bytes of a tensor were asked for, and {len} came")));
            }
            (code, None) => {
                return Err(WireError::new(format!("the server sent {}, and nothing was asked", code.name())));
            }
            (code, Some(_)) => {
                return Err(WireError::new(format!("{} is not the reply to what was asked", code.name())));
            }
        };
        self.input.advance(FRAME_HEADER);
        let fitting = usize::try_from(len).ok().filter(|_| len <= limit);
        let Some(body) = fitting else {
            if code == FrameCode::Shutdown || expected.is_none() {
                return Err(WireError::new(format!("a frame {} of {len} bytes", code.name())));
            }
            self.stage = Stage::Refused { left: len, len };
            return Ok(Step::Continue);
        };
        self.stage = Stage::Body { code, len: body, expected };
        // There is no reply to refuse where nothing was asked.
        let is_announced = body > READ_AHEAD && expected.is_some();
        if body > READ_AHEAD && !is_announced {
            return Err(WireError::new(format!("the server sent {len} bytes, and nothing was asked")));
        }
        Ok(if is_announced { Step::Event(ClientEvent::Announced { len }) } else { Step::Continue })
    }
}

/// Decodes the body of a frame whose code fits what is expected. Values that are none are the
/// matter of this one reply, since the frame says where it ends.
fn event(code: FrameCode, body: Bytes, expected: Option<Expected>) -> Result<ClientEvent, WireError> {
    let mut reader = Reader::new(body, code.name());
    let reply = match (code, expected) {
        (FrameCode::Shutdown, _) => return Ok(ClientEvent::Shutdown),
        (FrameCode::Exception, expected) => match (decode_exception(reader), expected) {
            (Ok(text), Some(_)) => ServerReply::Exception(text),
            (Ok(text), None) => return Ok(ClientEvent::Unasked(text)),
            (Err(error), _) => ServerReply::Unusable(error.to_string()),
        },
        (FrameCode::CopyAck, _) => ServerReply::Data(reader.rest()),
        (_, expected) => {
            let values = decode_values(&mut reader).and_then(|values| reader.finish().map(|()| values));
            match (values, expected) {
                (Ok(values), Some(Expected::Call)) => CallResult::of_values(values).map(ServerReply::Call),
                (Ok(values), _) => match <[WireValue; 1]>::try_from(values) {
                    Ok([value]) => Ok(ServerReply::Value(value)),
                    Err(values) => Err(WireError::new(format!("{} values in place of one", values.len()))),
                },
                (Err(error), _) => Err(error),
            }
            .unwrap_or_else(|error| ServerReply::Unusable(error.to_string()))
        }
    };
    Ok(ClientEvent::Reply(reply))
}

/// Outcome of reading the header of a frame.
enum Step {
    NeedMore,
    Continue,
    Event(ClientEvent),
}
