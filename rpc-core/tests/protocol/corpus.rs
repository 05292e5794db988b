//! The fuzz targets of the protocol over the inputs that are kept, on a stable compiler.

use crate::kept_inputs;
use crate::pair::Rng;
use crate::targets;

/// Mutations of all inputs of a target together.
const MUTATIONS: u64 = 3_000;

/// Runs a target over its folder.
fn over(name: &str, target: fn(&[u8])) {
    let generator = |seed| {
        let mut rng = Rng(seed);
        move |limit| rng.below(limit)
    };
    kept_inputs::run(name, MUTATIONS, generator, target);
}

#[test]
fn client_ops() {
    over("client_ops", targets::client_ops::run);
}

#[test]
fn frame_decoder() {
    over("frame_decoder", targets::frame_decoder::run);
}

#[test]
fn handshake() {
    over("handshake", targets::handshake::run);
}

#[test]
fn request() {
    over("request", targets::request::run);
}

#[test]
fn server_ops() {
    over("server_ops", targets::server_ops::run);
}

#[test]
fn value_codec() {
    over("value_codec", targets::value_codec::run);
}
