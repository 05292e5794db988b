//! The bodies of the fuzz targets of `fuzz/`: each takes any bytes, and panics where the protocol
//! breaks a promise.

#![allow(dead_code, reason = "each fuzz target is a program that uses one of them")]

pub(crate) mod client_ops;
pub(crate) mod frame_decoder;
pub(crate) mod handshake;
pub(crate) mod request;
pub(crate) mod server_ops;
pub(crate) mod value_codec;

/// Takes an input apart: the first two bytes are the length of the body, and the payload follows
/// it.
fn body_and_payload(input: &[u8]) -> (&[u8], &[u8]) {
    let Some((len, rest)) = input.split_first_chunk::<2>() else { return (input, &[]) };
    rest.split_at(usize::from(u16::from_le_bytes(*len)).min(rest.len()))
}
