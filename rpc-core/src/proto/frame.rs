//! Frames: the fixed header in front of every piece of a message, and its encoding.
//!
//! All numbers are little-endian.
//!
//! | offset | width | field | range |
//! | --- | --- | --- | --- |
//! | 0 | 4 | bytes of body that follow | ≤ [`MAX_BODY_PART`] |
//! | 4 | 4 | bytes of payload behind the body | ≤ the receiver's chunk |
//! | 8 | 8 | request id, or 0 | |
//! | 16 | 4 | lane | |
//! | 20 | 1 | kind | [`Kind`] |
//! | 21 | 1 | flags: bit 0, the message continues in another frame | others are 0 |
//! | 22 | 2 | reserved | 0 |

use crate::error::{ErrorKind, RpcError};

/// Length of a header in bytes.
pub const HEADER_LEN: usize = 24;

/// Largest part of a body in one frame; the rest of a longer body continues in further frames.
pub const MAX_BODY_PART: usize = 64 << 10;

const FLAG_MORE: u8 = 1;

const FLAG_SHARED: u8 = 2;

/// Type of a frame. The numbers are those on the wire; 48 and above are reserved for later
/// versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Kind {
    /// Handshake: the versions, features and limits that a side offers.
    Hello = 1,
    /// Handshake: a side accepts the session.
    Accept = 2,
    /// Handshake: a side refuses the session and closes.
    Reject = 3,
    /// Handshake: one round of the proof of identity.
    Proof = 4,
    /// A request from the client.
    Request = 16,
    /// The terminal reply to a request that succeeded.
    Reply = 17,
    /// The terminal reply to a request that failed.
    Error = 18,
    /// Asks for a [`Kind::Pong`].
    Ping = 32,
    /// Answers a [`Kind::Ping`].
    Pong = 33,
    /// The client no longer waits for a request.
    Cancel = 34,
    /// Handles of objects that the client has released.
    Free = 35,
    /// Credit: the receiver may send this many more requests and bytes.
    Credit = 36,
    /// The server accepts no new requests.
    GoAway = 37,
    /// The session ends; nothing follows from the side that sends it.
    Close = 38,
    /// Client: offers a window of shared memory. Server: answers the offer.
    Window = 39,
}

impl Kind {
    const ALL: [Self; 15] = [
        Self::Hello,
        Self::Accept,
        Self::Reject,
        Self::Proof,
        Self::Request,
        Self::Reply,
        Self::Error,
        Self::Ping,
        Self::Pong,
        Self::Cancel,
        Self::Free,
        Self::Credit,
        Self::GoAway,
        Self::Close,
        Self::Window,
    ];

    fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == code)
    }

    /// Returns true if frames of this kind carry parts of a message, which may be long.
    pub(crate) fn is_data(self) -> bool {
        matches!(self, Self::Request | Self::Reply | Self::Error)
    }
}

/// A frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// Bytes of body that follow.
    pub body_len: u32,
    /// Bytes of payload that follow the body, or that lie in a slot of the window.
    pub payload_len: u32,
    /// Id of the request, or 0.
    pub id: u64,
    /// Lane of the request.
    pub lane: u32,
    /// Type of the frame.
    pub kind: Kind,
    /// True if the message continues in another frame.
    pub more: bool,
    /// Slot of the sender that holds the payload, which does not follow the body then.
    pub slot: Option<u16>,
}

/// Error in a frame header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// A kind that this version does not know.
    #[error("unknown frame kind {0}")]
    UnknownKind(u8),
    /// A flag that this version does not know, or that does not fit the kind.
    #[error("flags {flags:#04x} do not fit a frame of kind {kind:?}")]
    BadFlags {
        /// Kind of the frame.
        kind: Kind,
        /// All flags of the frame.
        flags: u8,
    },
    /// A value other than 0 in the reserved field.
    #[error("the reserved field holds {0:#06x}")]
    Reserved(u16),
    /// A body above the limit.
    #[error("a frame body of {got} bytes is above the limit of {limit}")]
    BodyTooLong {
        /// The limit in bytes.
        limit: usize,
        /// Length that the header claims, in bytes.
        got: u32,
    },
    /// A payload above the limit.
    #[error("a frame payload of {got} bytes is above the limit of {limit}")]
    PayloadTooLong {
        /// The limit in bytes.
        limit: usize,
        /// Length that the header claims, in bytes.
        got: u32,
    },
}

impl From<FrameError> for RpcError {
    fn from(error: FrameError) -> Self {
        Self::new(ErrorKind::Protocol, error.to_string())
    }
}

impl FrameHeader {
    /// Returns a header without payload, id and lane.
    pub fn control(kind: Kind, body_len: u32) -> Self {
        Self { body_len, payload_len: 0, id: 0, lane: 0, kind, more: false, slot: None }
    }

    /// Encodes the header.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[0..4].copy_from_slice(&self.body_len.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.payload_len.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.id.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.lane.to_le_bytes());
        bytes[20] = self.kind as u8;
        bytes[21] = if self.more { FLAG_MORE } else { 0 } | if self.slot.is_some() { FLAG_SHARED } else { 0 };
        bytes[22..24].copy_from_slice(&self.slot.unwrap_or_default().to_le_bytes());
        bytes
    }

    /// Decodes a header and checks its lengths, before the caller reserves memory for them.
    ///
    /// # Errors
    ///
    /// Any [`FrameError`].
    pub fn decode(bytes: &[u8; HEADER_LEN], max_body: usize, max_payload: usize) -> Result<Self, FrameError> {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let kind = Kind::from_code(bytes[20]).ok_or(FrameError::UnknownKind(bytes[20]))?;
        let flags = bytes[21];
        let (more, shared) = (flags & FLAG_MORE != 0, flags & FLAG_SHARED != 0);
        let (body_len, payload_len) = (u32_at(0), u32_at(4));
        let is_known = flags & !(FLAG_MORE | FLAG_SHARED) == 0;
        if !is_known || (flags != 0 && !kind.is_data()) || (shared && payload_len == 0) {
            return Err(FrameError::BadFlags { kind, flags });
        }
        let last = u16::from_le_bytes([bytes[22], bytes[23]]);
        if !shared && last != 0 {
            return Err(FrameError::Reserved(last));
        }
        let slot = shared.then_some(last);
        if body_len as usize > max_body {
            return Err(FrameError::BodyTooLong { limit: max_body, got: body_len });
        }
        let max_payload = if kind.is_data() { max_payload } else { 0 };
        if payload_len as usize > max_payload {
            return Err(FrameError::PayloadTooLong { limit: max_payload, got: payload_len });
        }
        let id = u64::from(u32_at(8)) | u64::from(u32_at(12)) << 32;
        Ok(Self { body_len, payload_len, id, lane: u32_at(16), kind, more, slot })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn golden_header() {
        let header = FrameHeader {
            body_len: 5,
            payload_len: 0x0010_0000,
            id: 0x0102_0304_0506_0708,
            lane: 9,
            kind: Kind::Request,
            more: true,
            slot: None,
        };
        let bytes = header.encode();
        assert_eq!(bytes, [5, 0, 0, 0, 0, 0, 0x10, 0, 8, 7, 6, 5, 4, 3, 2, 1, 9, 0, 0, 0, 16, 1, 0, 0],);
        assert_eq!(FrameHeader::decode(&bytes, 100, 1 << 20), Ok(header));
        let shared = FrameHeader { more: false, slot: Some(7), ..header };
        let bytes = shared.encode();
        assert_eq!(bytes, [5, 0, 0, 0, 0, 0, 0x10, 0, 8, 7, 6, 5, 4, 3, 2, 1, 9, 0, 0, 0, 16, 2, 7, 0],);
        assert_eq!(FrameHeader::decode(&bytes, 100, 1 << 20), Ok(shared));
    }

    #[test]
    fn a_slot_needs_its_flag_and_a_payload_of_data() {
        let decode = |header: FrameHeader| FrameHeader::decode(&header.encode(), 100, 1 << 20);
        let shared = FrameHeader { payload_len: 1, slot: Some(0), ..FrameHeader::control(Kind::Reply, 0) };
        assert_eq!(decode(shared), Ok(shared));
        let empty = FrameHeader { payload_len: 0, ..shared };
        assert_eq!(decode(empty), Err(FrameError::BadFlags { kind: Kind::Reply, flags: 2 }));
        let control = FrameHeader { kind: Kind::Ping, ..shared };
        assert_eq!(decode(control), Err(FrameError::BadFlags { kind: Kind::Ping, flags: 2 }));
        let mut bytes = shared.encode();
        (bytes[21], bytes[22]) = (0, 3);
        assert_eq!(FrameHeader::decode(&bytes, 100, 1 << 20), Err(FrameError::Reserved(3)));
    }

    #[test]
    fn lengths_above_the_limit_are_refused_before_anything_is_reserved() {
        let mut bytes = FrameHeader::control(Kind::Request, 101).encode();
        assert_eq!(FrameHeader::decode(&bytes, 100, 10), Err(FrameError::BodyTooLong { limit: 100, got: 101 }));
        bytes[0] = 0;
        bytes[4] = 11;
        assert_eq!(FrameHeader::decode(&bytes, 100, 10), Err(FrameError::PayloadTooLong { limit: 10, got: 11 }));
        bytes[20] = Kind::Ping as u8;
        assert_eq!(FrameHeader::decode(&bytes, 100, 100), Err(FrameError::PayloadTooLong { limit: 0, got: 11 }));
    }

    proptest! {
        #[test]
        fn decoded_header_encodes_to_the_same_bytes(bytes: [u8; HEADER_LEN]) {
            if let Ok(header) = FrameHeader::decode(&bytes, MAX_BODY_PART, 1 << 20) {
                prop_assert_eq!(header.encode(), bytes);
            }
        }
    }
}
