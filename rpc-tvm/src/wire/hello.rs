//! The handshake: the hello of the dialling side, the grammar of its key, and the answer.

use std::time::Duration;

use bytes::BufMut;

use super::reader::WireError;

/// First number of a session.
pub const WIRE_MAGIC: i32 = 0xff271;

/// First number of the answer that another one waits under that key.
const DUPLICATE: i32 = WIRE_MAGIC + 1;

/// First number of the answer that there is no match for the key.
const MISMATCH: i32 = WIRE_MAGIC + 2;

/// First number of a connection to a tracker.
pub const TRACKER_MAGIC: i32 = 0x2f271;

/// Largest length of a key in bytes.
pub const MAX_KEY: usize = 4096;

/// Hello of the dialling side: the text of its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Role, key and options, such as `client:board -timeout=60`.
    pub key: String,
}

impl Hello {
    /// Returns the hello on the wire.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        encode(WIRE_MAGIC, Some(&self.key))
    }

    /// Decodes a hello at the beginning of `input`, and returns its length in bytes with it.
    /// Returns `None` if more bytes are needed.
    pub(super) fn decode(input: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        let Some((magic, rest)) = input.split_first_chunk() else { return Ok(None) };
        if i32::from_le_bytes(*magic) != WIRE_MAGIC {
            return Err(WireError::new("the connection does not begin with the magic number of TVM's RPC"));
        }
        let Some((len, rest)) = rest.split_first_chunk() else { return Ok(None) };
        let len = i32::from_le_bytes(*len);
        let checked = usize::try_from(len).ok().filter(|&len| len <= MAX_KEY);
        let len = checked.ok_or_else(|| {
            WireError::new(format!("the key of the client has {len} bytes, and may have {MAX_KEY} at most"))
        })?;
        let Some(key) = rest.get(..len) else { return Ok(None) };
        let key = std::str::from_utf8(key).map_err(|_| WireError::new("the key of the client is not UTF-8"))?;
        Ok(Some((Self { key: key.to_owned() }, 8 + len)))
    }
}

/// Parts of the key in a client's [`Hello`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HelloKey<'a> {
    /// Key that the client wants: what follows `client:`. May be empty.
    pub key: &'a str,
    /// Time for the whole session, from the hello on.
    pub timeout: Option<Duration>,
}

impl<'a> HelloKey<'a> {
    /// Parses the text of a client's key. Unknown options mean nothing.
    ///
    /// # Errors
    ///
    /// The text is no client's, or its time-out is no number of seconds that a clock can count.
    pub fn parse(text: &'a str) -> Result<Self, WireError> {
        let rest = text.trim_ascii_start().strip_prefix("client:").ok_or_else(|| {
            let first = text.split_ascii_whitespace().next().unwrap_or_default();
            WireError::new(format!("the key {first:?} does not begin with 'client:', as that of a client does"))
        })?;
        Self::of_server(rest)
    }

    /// Parses the key of a server, as a chain names it, with the options behind it: the text of a
    /// client's key without its role.
    ///
    /// # Errors
    ///
    /// The time-out is no number of seconds that a clock can count.
    pub fn of_server(text: &'a str) -> Result<Self, WireError> {
        let (key, options) = text.split_once(|c: char| c.is_ascii_whitespace()).unwrap_or((text, ""));
        let words = options.split_ascii_whitespace();
        let mut timeout = None;
        for option in words {
            let Some(seconds) = option.strip_prefix("-timeout=") else { continue };
            let parsed = seconds.parse().ok().and_then(|seconds| {
                let length = Duration::try_from_secs_f64(seconds).ok()?;
                // Zero alone means that there is none.
                Some((seconds != 0.0).then(|| length.max(Duration::from_nanos(1))))
            });
            timeout = parsed.ok_or_else(|| {
                WireError::new(format!("the time-out {seconds:?} of the client is no number of seconds"))
            })?;
        }
        Ok(Self { key, timeout })
    }
}

/// Answer of the listening side to a hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HelloAnswer<'a> {
    /// The session begins; the text is the key of the server, such as `server:board`.
    Accepted(&'a str),
    /// Another one waits under that key already. Proxies alone say so.
    Duplicate,
    /// The key is not that of the server.
    Mismatch,
}

impl HelloAnswer<'_> {
    /// Returns the answer on the wire.
    #[must_use]
    pub fn encode(self) -> Vec<u8> {
        match self {
            Self::Accepted(key) => encode(WIRE_MAGIC, Some(key)),
            Self::Duplicate => encode(DUPLICATE, None),
            Self::Mismatch => encode(MISMATCH, None),
        }
    }
}

/// Answer of the listening side, as the dialling side reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ServerAnswer {
    /// The session begins.
    Accepted {
        /// Key of the server, such as `server:board`, as it has sent it.
        key: String,
    },
    /// Another one waits under that key already. Proxies alone say so.
    Duplicate,
    /// The key is not that of the server, or nobody serves it.
    Mismatch,
}

impl ServerAnswer {
    /// Decodes an answer at the beginning of `input`, and returns its length in bytes with it.
    /// Returns `None` if more bytes are needed.
    pub(super) fn decode(input: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        let Some((code, rest)) = input.split_first_chunk() else { return Ok(None) };
        match i32::from_le_bytes(*code) {
            WIRE_MAGIC => {}
            DUPLICATE => return Ok(Some((Self::Duplicate, 4))),
            MISMATCH => return Ok(Some((Self::Mismatch, 4))),
            _ => return Err(WireError::new("the peer does not answer as a server of TVM's RPC does")),
        }
        let Some((len, rest)) = rest.split_first_chunk() else { return Ok(None) };
        let len = i32::from_le_bytes(*len);
        let checked = usize::try_from(len).ok().filter(|&len| len <= MAX_KEY);
        let len = checked.ok_or_else(|| {
            WireError::new(format!("the key of the server has {len} bytes, and may have {MAX_KEY} at most"))
        })?;
        let Some(key) = rest.get(..len) else { return Ok(None) };
        Ok(Some((Self::Accepted { key: String::from_utf8_lossy(key).into_owned() }, 8 + len)))
    }
}

fn encode(code: i32, key: Option<&str>) -> Vec<u8> {
    let mut output = Vec::new();
    output.put_i32_le(code);
    if let Some(key) = key {
        output.put_i32_le(i32::try_from(key.len()).unwrap_or(i32::MAX));
        output.put_slice(key.as_bytes());
    }
    output
}
