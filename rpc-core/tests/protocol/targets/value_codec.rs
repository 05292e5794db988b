//! A value that is understood can be said again.

use bytes::Bytes;
use rpc_core::proto::{decode_value, encode_value};

pub(crate) fn run(input: &[u8]) {
    let (body, payload) = super::body_and_payload(input);
    if let Ok(value) = decode_value(body, Bytes::copy_from_slice(payload)) {
        let (body, payload) = encode_value(&value);
        let again = decode_value(&body, payload.concat().into()).expect("what was written can be read");
        // As text, because a number that is none is not equal to itself.
        assert_eq!(format!("{again:?}"), format!("{value:?}"));
    }
}
