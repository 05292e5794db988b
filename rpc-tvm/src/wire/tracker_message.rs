//! Messages to TVM's tracker: JSON lists that begin with a code.

use std::fmt;

use bytes::BufMut;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::reader::WireError;

/// Largest length of a message in bytes.
pub const MAX_TRACKER_MESSAGE: usize = 1 << 20;

/// Code of a [`TrackerMessage::Ping`].
const PING: i64 = 1;
const STOP: i64 = 2;
const PUT: i64 = 3;
const REQUEST: i64 = 4;
const UPDATE_INFO: i64 = 5;
const SUMMARY: i64 = 6;
const PENDING_MATCH_KEYS: i64 = 7;

/// A message of a server or client to its tracker.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum TrackerMessage {
    /// The peer asks for a sign of life.
    Ping,
    /// The tracker is to end.
    Stop {
        /// Secret of the process that has started the tracker.
        stop_key: String,
    },
    /// A server is free for one session.
    Put {
        /// Key that clients ask for.
        key: String,
        /// Port of the server.
        port: u16,
        /// Key that the client has to name at the server.
        match_key: String,
        /// Host of the server, if it is not the one that the connection comes from.
        host: Option<String>,
    },
    /// A client asks for a server.
    Request {
        /// Key of the server.
        key: String,
        /// Name of the client's user. Empty from clients of TVM.
        user: String,
        /// Priority: higher ones come first.
        priority: i64,
    },
    /// A server describes itself.
    UpdateInfo(PeerInfo),
    /// A client asks for the state of the tracker.
    Summary,
    /// A server asks for its match keys that no client has been given.
    PendingMatchKeys,
}

/// Description of a peer. Fields that are absent leave what was said before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerInfo {
    /// Name, such as `server:board`.
    pub key: Option<String>,
    /// Host and port. Without a host, it is the one that the connection comes from.
    pub address: Option<(Option<String>, InfoPort)>,
}

/// Port in a [`PeerInfo`], in the form in which the peer has sent it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum InfoPort {
    /// A number, from servers in Python.
    Number(u16),
    /// A text, from servers in C++ and Java.
    Text(String),
}

impl PeerInfo {
    /// Takes over the fields of a later description.
    pub fn merge(&mut self, later: Self) {
        self.key = later.key.or(self.key.take());
        self.address = later.address.or(self.address.take());
    }
}

impl TrackerMessage {
    /// Returns the message on the wire.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let text = match self {
            Self::Ping => json!([PING]),
            Self::Stop { stop_key } => json!([STOP, stop_key]),
            Self::Put { key, port, match_key, host } => json!([PUT, key, [port, match_key], host]),
            Self::Request { key, user, priority } => json!([REQUEST, key, user, priority]),
            Self::UpdateInfo(PeerInfo { key, address }) => {
                let mut fields = serde_json::Map::new();
                fields.extend(key.as_ref().map(|key| ("key".to_owned(), json!(key))));
                fields.extend(address.as_ref().map(|address| ("addr".to_owned(), json!(address))));
                json!([UPDATE_INFO, fields])
            }
            Self::Summary => json!([SUMMARY]),
            Self::PendingMatchKeys => json!([PENDING_MATCH_KEYS]),
        };
        framed(&text.to_string())
    }

    /// Decodes the text of a message.
    pub(super) fn decode(text: &[u8]) -> Result<Self, WireError> {
        serde_json::from_slice(text).map_err(|error| WireError::new(format!("a malformed message: {error}")))
    }
}

impl<'de> Deserialize<'de> for TrackerMessage {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(MessageVisitor)
    }
}

/// Reader of a message, which holds nothing but the fields of its code.
struct MessageVisitor;

impl<'de> Visitor<'de> for MessageVisitor {
    type Value = TrackerMessage;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list that begins with a code")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<TrackerMessage, A::Error> {
        let message = match next(&mut seq, "code")? {
            PING => TrackerMessage::Ping,
            STOP => TrackerMessage::Stop { stop_key: next(&mut seq, "stop key")? },
            PUT => {
                let key = next(&mut seq, "key")?;
                let (port, match_key) = next(&mut seq, "port and match key")?;
                // Old servers send three fields.
                let host = seq.next_element::<Option<String>>()?.flatten();
                TrackerMessage::Put { key, port, match_key, host }
            }
            REQUEST => TrackerMessage::Request {
                key: next(&mut seq, "key")?,
                user: next(&mut seq, "user")?,
                priority: next(&mut seq, "priority")?,
            },
            UPDATE_INFO => TrackerMessage::UpdateInfo(next(&mut seq, "description")?),
            SUMMARY => TrackerMessage::Summary,
            PENDING_MATCH_KEYS => TrackerMessage::PendingMatchKeys,
            code => return Err(A::Error::custom(format_args!("an unknown code, {code}"))),
        };
        match seq.next_element::<IgnoredAny>()? {
            None => Ok(message),
            Some(_) => Err(A::Error::custom("more fields than its code has")),
        }
    }
}

/// Reads a field that has to be there.
fn next<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(seq: &mut A, name: &str) -> Result<T, A::Error> {
    seq.next_element()?.ok_or_else(|| A::Error::custom(format_args!("no {name}")))
}

// Not derived: serde would collect any value before it looks at its type.
impl<'de> Deserialize<'de> for InfoPort {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PortVisitor)
    }
}

/// Reader of a port.
struct PortVisitor;

impl Visitor<'_> for PortVisitor {
    type Value = InfoPort;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a port")
    }

    fn visit_u64<E: Error>(self, port: u64) -> Result<InfoPort, E> {
        u16::try_from(port).map(InfoPort::Number).map_err(|_| E::invalid_value(Unexpected::Unsigned(port), &self))
    }

    fn visit_str<E: Error>(self, port: &str) -> Result<InfoPort, E> {
        Ok(InfoPort::Text(port.to_owned()))
    }
}

impl<'de> Deserialize<'de> for PeerInfo {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(InfoVisitor)
    }
}

/// Reader of a description. Skips fields that the tracker does not use.
struct InfoVisitor;

impl<'de> Visitor<'de> for InfoVisitor {
    type Value = PeerInfo;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a description")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<PeerInfo, A::Error> {
        let mut info = PeerInfo::default();
        while let Some(field) = map.next_key::<String>()? {
            match field.as_str() {
                "key" => info.key = Some(map.next_value()?),
                "addr" => info.address = Some(map.next_value()?),
                _ => _ = map.next_value::<IgnoredAny>()?,
            }
        }
        Ok(info)
    }
}

/// Returns a message or a reply on the wire: its length, and its text.
pub(super) fn framed(text: &str) -> Vec<u8> {
    let mut message = Vec::with_capacity(4 + text.len());
    message.put_i32_le(i32::try_from(text.len()).unwrap_or(i32::MAX));
    message.put_slice(text.as_bytes());
    message
}
