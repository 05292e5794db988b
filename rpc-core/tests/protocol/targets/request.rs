//! A request that is understood can be made again, and replies are understood or refused.

use std::time::Instant;

use bytes::Bytes;
use rpc_core::Lane;
use rpc_core::proto::{decode_reply, decode_request, encode_request};

pub(crate) fn run(input: &[u8]) {
    let now = Instant::now();
    let (body, payload) = super::body_and_payload(input);
    let payload = Bytes::copy_from_slice(payload);
    let _ = decode_reply(true, body, payload.clone());
    let _ = decode_reply(false, body, payload.clone());
    if let Ok(request) = decode_request(Lane(1), body, payload, now) {
        let (body, payload) = encode_request(&request, now);
        let again = decode_request(Lane(1), &body, payload.concat().into(), now).expect("what was written can be read");
        assert_eq!(format!("{again:?}"), format!("{request:?}"));
    }
}
