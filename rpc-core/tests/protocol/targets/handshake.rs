//! A handshake takes any bytes, in pieces. The first byte says which side it is and how large the
//! pieces are.

use std::time::{Duration, Instant};

use bytes::BytesMut;
use rpc_core::proto::{Anonymous, Handshake, HandshakeConfig, Hello, MAGIC, Role};

pub(crate) fn run(bytes: &[u8]) {
    let Some((&choice, bytes)) = bytes.split_first() else { return };
    let config = HandshakeConfig {
        hello: Hello::new(if choice & 1 == 0 { Role::Server } else { Role::Client }),
        identities: vec![Box::new(Anonymous)],
        hold: choice & 2 != 0,
        timeout: Duration::from_secs(1),
    };
    let now = Instant::now();
    let mut side = if choice & 4 == 0 { Handshake::accept(config, now) } else { Handshake::dial(config, now) };
    // Random bytes never are the magic number.
    let bytes = if choice & 8 == 0 { [&MAGIC[..], bytes].concat() } else { bytes.to_vec() };
    let mut input = BytesMut::new();
    for piece in bytes.chunks(1 + usize::from(choice >> 4)) {
        input.extend_from_slice(piece);
        match side.handle_input(&mut input) {
            Ok(None) => {}
            Ok(Some(_)) | Err(_) => break,
        }
        if side.awaits_approval().is_some() && side.approve().is_some() {
            break;
        }
    }
    side.take_output();
}
