//! The server's half of a connection: from the bytes of a client to its hello and its requests.

use bytes::buf::Limit;
use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::frame::{FRAME_HEADER, READ_AHEAD, peek_header, take_body};
use super::frame_code::FrameCode;
use super::hello::Hello;
use super::reader::{Reader, WireError};
use super::reply::{exception, exception_for_old_client};
use super::request::{Request, RequestError, is_of_old_client};
use super::tensor_header::{TensorHeader, check_dimensions};

/// Bytes behind the header of a tensor in a copy to the server: the number of bytes that follow.
const COPY_LEN: u64 = 8;

/// Limits on what a peer sends.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct WireLimits {
    /// Largest body of a frame, except for the data of copies. 64 MiB by default.
    pub max_body: u64,
}

impl WireLimits {
    /// Returns limits with this largest body.
    #[must_use]
    pub const fn new(max_body: u64) -> Self {
        Self { max_body }
    }
}

impl Default for WireLimits {
    fn default() -> Self {
        Self::new(64 << 20)
    }
}

/// Event of a connection.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ServerEvent {
    /// The hello has arrived. Frames follow.
    Hello(Hello),
    /// The body of a frame follows, which is larger than what is read ahead. The next poll collects
    /// it, unless [`ServerWire::refuse`] is called before.
    Announced {
        /// Length of the body in bytes.
        len: u64,
    },
    /// A request has arrived.
    Request(Request),
    /// A copy to the server begins: its [payload](ServerWire::payload) follows, and has to be taken
    /// before the next poll, or refused.
    CopyTo {
        /// Destination.
        to: TensorHeader,
        /// Number of bytes.
        len: u64,
    },
    /// The frame to send in reply to a request that is none, or that was refused.
    Answer(Vec<u8>),
}

/// State machine of the server's half of a connection.
///
/// Loop: poll events until there is none, then read into [`input`](Self::input). Every event but
/// [`Hello`](ServerEvent::Hello) and [`Announced`](ServerEvent::Announced) is a request that takes
/// one reply, in the order of the events, except for [`Request::Shutdown`].
#[derive(Debug)]
pub struct ServerWire {
    limits: WireLimits,
    /// Bytes that were read and not consumed.
    pub(super) input: BytesMut,
    stage: Stage,
    /// True once the session has begun.
    has_begun: bool,
}

#[derive(Debug)]
enum Stage {
    /// The hello is awaited.
    Hello,
    /// A frame is awaited, or the rest of its header.
    Header,
    /// The body of a frame is awaited.
    Body { code: FrameCode, len: usize },
    /// The header of the tensor of a copy is awaited; `len` bytes of the body follow, with it.
    CopyHeader { len: u64 },
    /// The data of a copy are awaited.
    Payload { left: u64 },
    /// Bytes are dropped until the frame ends, and `answer` is sent then.
    Refused { left: u64, answer: Vec<u8> },
}

impl ServerWire {
    /// Creates the state of a connection of which nothing has been read.
    #[must_use]
    pub fn new(limits: WireLimits) -> Self {
        Self { limits, input: BytesMut::new(), stage: Stage::Hello, has_begun: false }
    }

    /// Creates the state of a connection whose session has begun, with nothing read of its next
    /// request: that of another process, from which [`take_unread`](Self::take_unread) has taken
    /// the rest of the input.
    #[must_use]
    pub fn begun(limits: WireLimits) -> Self {
        Self { limits, input: BytesMut::new(), stage: Stage::Header, has_begun: true }
    }

    /// Returns true once the session has begun.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Takes the input that was read and not used. It begins with a frame if nothing of one has
    /// been used, as behind the reply to [`Request::Init`].
    pub fn take_unread(&mut self) -> BytesMut {
        std::mem::take(&mut self.input)
    }

    /// Puts back what [`take_unread`](Self::take_unread) has taken, in front of what was read
    /// since.
    pub fn put_back(&mut self, unread: &[u8]) {
        let read = std::mem::replace(&mut self.input, BytesMut::from(unread));
        self.input.extend_from_slice(&read);
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

    /// Returns true if there is room to read ahead while a request is served.
    #[must_use]
    pub fn can_read_ahead(&self) -> bool {
        self.input.len() < READ_AHEAD
    }

    /// Returns the next event, or `None` if more bytes are needed.
    ///
    /// # Errors
    ///
    /// The client has broken the protocol. The connection cannot go on.
    pub fn poll_event(&mut self) -> Result<Option<ServerEvent>, WireError> {
        loop {
            match &mut self.stage {
                Stage::Hello => {
                    let Some((hello, len)) = Hello::decode(&self.input)? else { return Ok(None) };
                    self.input.advance(len);
                    self.stage = Stage::Header;
                    return Ok(Some(ServerEvent::Hello(hello)));
                }
                Stage::Header => match self.read_header()? {
                    Step::NeedMore => return Ok(None),
                    Step::Continue => {}
                    Step::Event(event) => return Ok(Some(event)),
                },
                Stage::Body { code, len } => {
                    let (code, len) = (*code, *len);
                    if self.input.len() < len {
                        return Ok(None);
                    }
                    let body = take_body(&mut self.input, len);
                    self.stage = Stage::Header;
                    return self.request(code, body).map(Some);
                }
                Stage::CopyHeader { len } => {
                    let len = *len;
                    let Some((to, data)) = self.read_copy_header(len)? else { return Ok(None) };
                    self.stage = Stage::Payload { left: data };
                    if let Some(answer) = self.too_early(FrameCode::CopyToRemote) {
                        self.stage = Stage::Refused { left: data, answer };
                        continue;
                    }
                    return Ok(Some(ServerEvent::CopyTo { to, len: data }));
                }
                // The driver has taken the payload, or there is none.
                Stage::Payload { left: 0 } => self.stage = Stage::Header,
                Stage::Payload { .. } => return Ok(None),
                Stage::Refused { left, answer } => {
                    let passed = (*left).min(self.input.len() as u64);
                    *left -= passed;
                    // Not more than the input has.
                    self.input.advance(passed as usize);
                    if *left > 0 {
                        return Ok(None);
                    }
                    let answer = std::mem::take(answer);
                    self.stage = Stage::Header;
                    return Ok(Some(ServerEvent::Answer(answer)));
                }
            }
        }
    }

    /// Records that the session has begun: the reply to [`Request::Init`] is no error.
    pub fn begin(&mut self) {
        self.has_begun = true;
    }

    /// Refuses the frame that was announced, or the rest of a copy: it is dropped, and the error of
    /// this text is its [answer](ServerEvent::Answer).
    pub fn refuse(&mut self, text: &str) {
        let left = match &self.stage {
            Stage::Body { len, .. } => *len as u64,
            Stage::Payload { left } => *left,
            _ => return,
        };
        self.stage = Stage::Refused { left, answer: exception(text) };
    }

    /// Returns the bytes of a copy's payload that have been read ahead.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        let len = self.payload_left().min(self.input.len() as u64);
        &self.input[..len as usize]
    }

    /// Records that `count` bytes of [`payload`](Self::payload) have been taken.
    pub fn advance_payload(&mut self, count: usize) {
        if let Stage::Payload { left } = &mut self.stage {
            let count = (count as u64).min(*left).min(self.input.len() as u64);
            *left -= count;
            self.input.advance(count as usize);
        }
    }

    /// Records that the driver has read `count` bytes of the payload elsewhere, when none was left
    /// in [`payload`](Self::payload).
    pub fn payload_was_read(&mut self, count: u64) {
        if let Stage::Payload { left } = &mut self.stage {
            *left = left.saturating_sub(count);
        }
    }

    /// Returns the number of bytes of the payload that have not been taken.
    #[must_use]
    pub fn payload_left(&self) -> u64 {
        match self.stage {
            Stage::Payload { left } => left,
            _ => 0,
        }
    }

    /// Returns true if the client has sent a part of a message, and no more.
    #[must_use]
    pub fn is_inside_message(&self) -> bool {
        !(self.input.is_empty() && matches!(self.stage, Stage::Header))
    }

    fn read_header(&mut self) -> Result<Step, WireError> {
        let Some((number, len)) = peek_header(&mut self.input)? else { return Ok(Step::NeedMore) };
        let code = FrameCode::from_number(number).filter(|code| code.is_request());
        let code = code.ok_or_else(|| WireError::new(format!("a client does not send frames of code {number}")))?;
        self.input.advance(FRAME_HEADER);
        if code == FrameCode::CopyToRemote {
            self.stage = Stage::CopyHeader { len };
            return Ok(Step::Continue);
        }
        let fitting = usize::try_from(len).ok().filter(|_| len <= self.limits.max_body);
        let Some(body) = fitting else {
            let (name, limit) = (code.name(), self.limits.max_body);
            let text = format!("a frame {name} of {len} bytes is more than max_message allows, which is {limit}");
            self.stage = Stage::Refused { left: len, answer: exception(&text) };
            return Ok(Step::Continue);
        };
        self.stage = Stage::Body { code, len: body };
        Ok(if body > READ_AHEAD { Step::Event(ServerEvent::Announced { len }) } else { Step::Continue })
    }

    /// Reads what is in front of the data of a copy: the header of the tensor, and the number of
    /// bytes.
    fn read_copy_header(&mut self, len: u64) -> Result<Option<(TensorHeader, u64)>, WireError> {
        let name = FrameCode::CopyToRemote.name();
        let malformed = || WireError::new(format!("{name} has not the length that its header says"));
        let at = TensorHeader::DIMENSIONS_AT;
        let Some(dimensions) = self.input.get(at..at + 4).and_then(|bytes| bytes.first_chunk()) else {
            return if len < at as u64 + 4 { Err(malformed()) } else { Ok(None) };
        };
        let header_len = TensorHeader::encoded_len(check_dimensions(i32::from_le_bytes(*dimensions))?);
        let data = len.checked_sub(header_len as u64 + COPY_LEN).ok_or_else(malformed)?;
        let len = header_len + COPY_LEN as usize;
        if self.input.len() < len {
            return Ok(None);
        }
        let mut reader = Reader::new(Bytes::copy_from_slice(&self.input[..len]), name);
        let header = TensorHeader::decode(&mut reader)?;
        if reader.u64()? != data {
            return Err(malformed());
        }
        self.input.advance(len);
        Ok(Some((header, data)))
    }

    fn request(&self, code: FrameCode, body: Bytes) -> Result<ServerEvent, WireError> {
        if code == FrameCode::GetGlobalFunc && is_of_old_client(&body) {
            let text = "this server speaks the RPC of TVM 0.22 and later, and the client is TVM 0.20 or older: \
                        update TVM at the client";
            return Ok(ServerEvent::Answer(exception_for_old_client(text)));
        }
        let request = match Request::decode(code, body) {
            Ok(request) => request,
            Err(RequestError::Malformed(error)) => return Err(error),
            Err(RequestError::Values(text)) => return Ok(ServerEvent::Answer(exception(&text))),
        };
        Ok(match self.too_early(code) {
            Some(answer) => ServerEvent::Answer(answer),
            None => ServerEvent::Request(request),
        })
    }

    /// Returns the answer to a request that does not fit the state of the session.
    fn too_early(&self, code: FrameCode) -> Option<Vec<u8>> {
        match code {
            FrameCode::Shutdown => None,
            FrameCode::InitServer if self.has_begun => Some(exception("Server has already been initialized")),
            FrameCode::InitServer => None,
            _ if self.has_begun => None,
            _ => Some(exception("Need to call InitRemoteSession first before any further actions")),
        }
    }
}

/// Outcome of reading the header of a frame.
enum Step {
    NeedMore,
    Continue,
    Event(ServerEvent),
}
