//! Any header is refused, or is what encodes to it.

use rpc_core::proto::{FrameHeader, HEADER_LEN, MAX_BODY_PART};

pub(crate) fn run(bytes: &[u8]) {
    let Some(bytes) = bytes.first_chunk::<HEADER_LEN>() else { return };
    if let Ok(header) = FrameHeader::decode(bytes, MAX_BODY_PART, 1 << 20) {
        assert!(header.body_len as usize <= MAX_BODY_PART && header.payload_len <= 1 << 20);
        assert_eq!(header.encode(), *bytes);
    }
}
