//! Replies of TVM's tracker, in the spelling of the tracker of TVM itself: its servers in C++ read
//! some of them as text.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, SeqAccess, Unexpected, Visitor};

use super::reader::WireError;
use super::tracker_message::{InfoPort, MAX_TRACKER_MESSAGE, framed};

/// Reply of a tracker.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum TrackerReply<'a> {
    /// The message was obeyed.
    Success,
    /// The message was refused.
    Failure,
    /// A request was refused, for this reason.
    RequestFailed(&'a str),
    /// The server for a request.
    Granted {
        /// Host of the server.
        host: &'a str,
        /// Port of the server.
        port: u16,
        /// Key that the client has to name there.
        match_key: &'a str,
    },
    /// Match keys that no client has been given.
    MatchKeys(&'a [&'a str]),
}

impl TrackerReply<'_> {
    /// Returns the reply on the wire.
    #[must_use]
    pub fn encode(self) -> Vec<u8> {
        let mut text = String::new();
        match self {
            Self::Success => text += "0",
            Self::Failure => text += "-1",
            Self::RequestFailed(reason) => {
                text += "[-1, ";
                push_string(&mut text, reason);
                text += "]";
            }
            Self::Granted { host, port, match_key } => {
                text += "[0, [";
                push_string(&mut text, host);
                text += &format!(", {port}, ");
                push_string(&mut text, match_key);
                text += "]]";
            }
            Self::MatchKeys(keys) => {
                text += "[";
                for (at, key) in keys.iter().enumerate() {
                    text += if at == 0 { "" } else { ", " };
                    push_string(&mut text, key);
                }
                text += "]";
            }
        }
        framed(&text)
    }
}

/// Reply of a tracker to a server.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TrackerAnswer {
    /// Outcome of a message: 0, or the code of an error.
    Code(i64),
    /// Match keys that no client has been given.
    MatchKeys(Vec<String>),
}

impl TrackerAnswer {
    /// Decodes the text of a reply.
    ///
    /// # Errors
    ///
    /// The text is no reply to a message of a server.
    pub fn decode(text: &[u8]) -> Result<Self, WireError> {
        serde_json::from_slice(text).map_err(|error| WireError::new(format!("a malformed reply: {error}")))
    }
}

// Not derived: serde would collect any value before it looks at its type.
impl<'de> Deserialize<'de> for TrackerAnswer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnswerVisitor)
    }
}

/// Reader of a reply.
struct AnswerVisitor;

impl<'de> Visitor<'de> for AnswerVisitor {
    type Value = TrackerAnswer;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a code or a list of match keys")
    }

    fn visit_i64<E>(self, code: i64) -> Result<TrackerAnswer, E> {
        Ok(TrackerAnswer::Code(code))
    }

    fn visit_u64<E: Error>(self, code: u64) -> Result<TrackerAnswer, E> {
        i64::try_from(code).map(TrackerAnswer::Code).map_err(|_| E::invalid_value(Unexpected::Unsigned(code), &self))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<TrackerAnswer, A::Error> {
        let mut keys = Vec::new();
        while let Some(key) = seq.next_element()? {
            keys.push(key);
        }
        Ok(TrackerAnswer::MatchKeys(keys))
    }
}

/// Reply of a tracker to the [`Request`](super::TrackerMessage::Request) of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TrackerGrant {
    /// The server that the client may use once.
    Granted {
        /// Host of the server.
        host: String,
        /// Port of the server.
        port: u16,
        /// Key that the client has to name there.
        match_key: String,
    },
    /// The request was refused, for this reason; it may be empty.
    Refused(String),
}

impl TrackerGrant {
    /// Decodes the text of a reply.
    ///
    /// # Errors
    ///
    /// The text is no reply to a request.
    pub fn decode(text: &[u8]) -> Result<Self, WireError> {
        serde_json::from_slice(text).map_err(|error| WireError::new(format!("a malformed grant: {error}")))
    }
}

// Not derived: serde would collect any value before it looks at its type.
impl<'de> Deserialize<'de> for TrackerGrant {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(GrantVisitor)
    }
}

/// Reader of a grant: `[0, [host, port, matchkey]]`, `[-1, reason]`, or the code of an error alone.
struct GrantVisitor;

impl<'de> Visitor<'de> for GrantVisitor {
    type Value = TrackerGrant;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of a code and a server, or of a code and a reason")
    }

    fn visit_i64<E: Error>(self, code: i64) -> Result<TrackerGrant, E> {
        match code {
            0 => Err(E::invalid_value(Unexpected::Signed(code), &self)),
            _ => Ok(TrackerGrant::Refused(String::new())),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<TrackerGrant, A::Error> {
        let missing = || A::Error::custom("a reply without its fields");
        let grant = match seq.next_element::<i64>()?.ok_or_else(missing)? {
            0 => {
                let (host, port, match_key) = seq.next_element()?.ok_or_else(missing)?;
                TrackerGrant::Granted { host, port, match_key }
            }
            _ => TrackerGrant::Refused(seq.next_element()?.unwrap_or_default()),
        };
        match seq.next_element::<IgnoredAny>()? {
            None => Ok(grant),
            Some(_) => Err(A::Error::custom("more fields than a reply has")),
        }
    }
}

/// Writer of the reply to a [`Summary`](super::TrackerMessage::Summary). Leaves out what would make
/// the message longer than [`MAX_TRACKER_MESSAGE`], so that its client can read it.
#[derive(Clone, Debug, Default)]
pub struct TrackerSummary {
    queues: String,
    servers: String,
}

/// Bytes of a summary around its two lists.
const AROUND: usize = 64;

impl TrackerSummary {
    /// Creates the summary of a tracker without keys and without servers.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the queue of a key: its free servers, and the requests that wait.
    pub fn add_queue(&mut self, key: &str, free: u64, pending: u64) {
        let mut entry = String::new();
        push_string(&mut entry, key);
        entry += &format!(": {{\"free\": {free}, \"pending\": {pending}}}");
        if self.has_room_for(&entry) {
            push_entry(&mut self.queues, &entry);
        }
    }

    /// Adds a server: its name, such as `server:board`, and its address.
    pub fn add_server(&mut self, name: &str, host: &str, port: &InfoPort) {
        let mut entry = "{\"key\": ".to_owned();
        push_string(&mut entry, name);
        entry += ", \"addr\": [";
        push_string(&mut entry, host);
        entry += ", ";
        match port {
            InfoPort::Number(port) => entry += &port.to_string(),
            InfoPort::Text(port) => push_string(&mut entry, port),
        }
        entry += "]}";
        if self.has_room_for(&entry) {
            push_entry(&mut self.servers, &entry);
        }
    }

    /// Returns the reply on the wire.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let Self { queues, servers } = self;
        framed(&format!("[0, {{\"queue_info\": {{{queues}}}, \"server_info\": [{servers}]}}]"))
    }

    fn has_room_for(&self, entry: &str) -> bool {
        self.queues.len() + self.servers.len() + entry.len() + AROUND <= MAX_TRACKER_MESSAGE
    }
}

fn push_entry(list: &mut String, entry: &str) {
    if !list.is_empty() {
        *list += ", ";
    }
    *list += entry;
}

/// Appends a string of JSON.
fn push_string(text: &mut String, string: &str) {
    *text += &serde_json::Value::from(string).to_string();
}
