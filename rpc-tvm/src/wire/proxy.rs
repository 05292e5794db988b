//! TVM's proxy, as its peers see it: the hello of a server or client that dials it, without I/O and
//! without a clock.
//!
//! ```text
//! server                             proxy                             client
//!   hello, key "server:KEY"   ──►
//!                                       ◄──   hello, key "client:KEY -timeout=60"
//!        ◄──   i32 0xff271, i32 length, the client's key
//!                   the server's key, i32 length, i32 0xff271   ──►
//!   frames                    ◄──►      ◄──►                         frames
//! ```
//!
//! The answers come when both are there. Until then neither may send anything behind its hello. The
//! text between `server:` or `client:` and the first space has to be the same: the match key.
//! [`ProxyPool`](super::ProxyPool) has those who wait.

use bytes::buf::Limit;
use bytes::{Buf, BufMut, BytesMut};

use super::hello::{Hello, HelloKey, MAX_KEY, ServerAnswer};
use super::reader::WireError;

/// Side of a session that a peer of a proxy is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyRole {
    /// The peer serves a session.
    Server,
    /// The peer wants a session.
    Client,
}

/// Hello of a server or client at a proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyHello {
    /// Side that the peer is.
    pub role: ProxyRole,
    /// Whole text of the key, which the other side gets.
    pub text: String,
    /// Position behind the match key in the text.
    match_key_end: usize,
}

/// Length of `server:` and of `client:` in bytes.
const ROLE_LEN: usize = 7;

impl ProxyHello {
    /// Parses the text of a key.
    ///
    /// # Errors
    ///
    /// The text begins with no role. Or a client gives a time-out that is no number, which would
    /// stop a server of TVM for good.
    pub fn parse(text: &str) -> Result<Self, WireError> {
        let role = if text.starts_with("server:") { ProxyRole::Server } else { ProxyRole::Client };
        if role == ProxyRole::Client {
            HelloKey::parse(text)?;
        }
        if text.starts_with(|first: char| first.is_ascii_whitespace()) {
            return Err(WireError::new("the key begins with a space"));
        }
        let match_key_end = text.find(|next: char| next.is_ascii_whitespace()).unwrap_or(text.len());
        Ok(Self { role, text: text.to_owned(), match_key_end })
    }

    /// Returns the key by which servers and clients find each other. May be empty.
    #[must_use]
    pub fn match_key(&self) -> &str {
        &self.text[ROLE_LEN..self.match_key_end]
    }
}

/// State machine of the proxy's half of a connection, up to the answer.
///
/// Loop: poll the hello until there is one, then read into [`input`](Self::input). Whoever reads a
/// byte behind the hello closes the connection.
#[derive(Debug, Default)]
pub struct ProxyWire(BytesMut);

impl ProxyWire {
    /// Creates the state of a connection of which nothing has been read.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the buffer to read into: it has room for at least one byte.
    pub fn input(&mut self) -> Limit<&mut BytesMut> {
        // One byte more than a hello may have shows what comes too early.
        let room = (2 * size_of::<i32>() + MAX_KEY + 1).saturating_sub(self.0.len()).max(1);
        (&mut self.0).limit(room)
    }

    /// Returns the hello, or `None` if more bytes are needed.
    ///
    /// # Errors
    ///
    /// The peer is no server or client of TVM, or has sent more than its hello.
    pub fn poll_hello(&mut self) -> Result<Option<Hello>, WireError> {
        match Hello::decode(&self.0)? {
            None => Ok(None),
            Some((_, len)) if len < self.0.len() => {
                Err(WireError::new("the peer sends requests before the proxy has answered its hello"))
            }
            Some((hello, _)) => Ok(Some(hello)),
        }
    }
}

/// State machine of a server's half of a connection to a proxy, up to the answer to its hello.
///
/// Loop: poll the answer until there is one, then read into [`input`](Self::input).
#[derive(Debug, Default)]
pub struct ParkedServerWire(BytesMut);

impl ParkedServerWire {
    /// Creates the state of a connection of which nothing has been read.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the buffer to read into: it has room for at least one byte.
    pub fn input(&mut self) -> Limit<&mut BytesMut> {
        let room = (2 * size_of::<i32>() + MAX_KEY).saturating_sub(self.0.len()).max(1);
        (&mut self.0).limit(room)
    }

    /// Returns the answer, with the whole key of the client, or `None` if more bytes are needed.
    ///
    /// # Errors
    ///
    /// The peer is no proxy of TVM.
    pub fn poll_answer(&mut self) -> Result<Option<ServerAnswer>, WireError> {
        let Some((answer, len)) = ServerAnswer::decode(&self.0)? else { return Ok(None) };
        self.0.advance(len);
        Ok(Some(answer))
    }

    /// Returns what was read behind the answer: the client's first frames.
    #[must_use]
    pub fn rest(&self) -> &[u8] {
        &self.0
    }
}
