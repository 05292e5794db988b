//! Any header is refused, or is what encodes to it.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rpc_core::proto::{FrameHeader, HEADER_LEN, MAX_BODY_PART};

fuzz_target!(|bytes: [u8; HEADER_LEN]| {
    if let Ok(header) = FrameHeader::decode(&bytes, MAX_BODY_PART, 1 << 20) {
        assert!(header.body_len as usize <= MAX_BODY_PART && header.payload_len <= 1 << 20);
        assert_eq!(header.encode(), bytes);
    }
});
