//! The first bytes by which the protocols of TVM are known.

use rpc_transports::Recognition;

/// Recognises a protocol of TVM by its magic number.
pub(super) fn recognize(first: &[u8], magic: i32) -> Recognition {
    recognize_bytes(first, &magic.to_le_bytes())
}

/// Recognises a protocol by the bytes that it begins with.
pub(super) fn recognize_bytes(first: &[u8], expected: &[u8]) -> Recognition {
    if first.starts_with(expected) {
        Recognition::Accept
    } else if expected.starts_with(first) {
        Recognition::NeedMore
    } else {
        Recognition::Decline
    }
}
