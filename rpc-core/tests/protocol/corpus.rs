//! The fuzz targets over the inputs that are kept in `fuzz/corpus`, and over mutations of those: on
//! a stable compiler, a fixed number from fixed seeds.

use std::fs;
use std::path::Path;

use crate::fuzz::{for_seeds, mutate};
use crate::pair::Rng;
use crate::targets;

/// Mutations of all inputs of a target together.
const MUTATIONS: u64 = 3_000;

/// Runs a target over its folder.
fn over(name: &str, target: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(name);
    let mut paths: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "{} is empty", folder.display());
    let inputs: Vec<_> = paths.iter().map(|path| fs::read(path).unwrap()).collect();
    for (path, input) in paths.iter().zip(&inputs) {
        println!("{}", path.display());
        target(input);
    }
    for_seeds(&[], MUTATIONS, |seed| {
        let mut rng = Rng(seed);
        let at = rng.below(inputs.len());
        let mut input = inputs[at].clone();
        mutate(&mut rng, &mut input);
        target(&input);
    });
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
