//! The magic numbers by which the protocols of TVM are known.

use rpc_transports::Recognition;

/// Recognises a protocol of TVM by its magic number.
pub(super) fn recognize(first: &[u8], magic: i32) -> Recognition {
    let magic = magic.to_le_bytes();
    if first.starts_with(&magic) {
        Recognition::Accept
    } else if magic.starts_with(first) {
        Recognition::NeedMore
    } else {
        Recognition::Decline
    }
}
