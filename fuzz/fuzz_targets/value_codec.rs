//! A value that is understood can be said again.

#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use rpc_core::proto::{decode_value, encode_value};

fuzz_target!(|input: (&[u8], &[u8])| {
    let (body, payload) = input;
    if let Ok(value) = decode_value(body, Bytes::copy_from_slice(payload)) {
        let (body, payload) = encode_value(&value);
        let again = decode_value(&body, payload.concat().into()).expect("what was written can be read");
        // As text, because a number that is none is not equal to itself.
        assert_eq!(format!("{again:?}"), format!("{value:?}"));
    }
});
