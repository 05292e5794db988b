//! A request that is understood can be made again, and replies are understood or refused.

#![no_main]

use std::time::Instant;

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use rpc_core::Lane;
use rpc_core::proto::{decode_reply, decode_request, encode_request};

fuzz_target!(|input: (&[u8], &[u8])| {
    let now = Instant::now();
    let (body, payload) = (input.0, Bytes::copy_from_slice(input.1));
    let _ = decode_reply(true, body, payload.clone());
    let _ = decode_reply(false, body, payload.clone());
    if let Ok(request) = decode_request(Lane(1), body, payload, now) {
        let (body, payload) = encode_request(&request, now);
        let again = decode_request(Lane(1), &body, payload.concat().into(), now).expect("what was written can be read");
        assert_eq!(format!("{again:?}"), format!("{request:?}"));
    }
});
