//! The fuzz targets over the inputs that are kept in `fuzz/corpus`, and over mutations of those: a
//! fixed number from fixed seeds.

use std::fs;
use std::path::Path;

use rpc_tests::forwarder::Random;
use rpc_tests::fuzz_targets::TARGETS;

/// Mutations of all inputs of a target together. `RPC_FUZZ_MUTATIONS` is another number.
const MUTATIONS: u64 = 1500;

#[test]
fn kept_inputs_and_mutations_of_them_break_no_promise() {
    let mutations = std::env::var("RPC_FUZZ_MUTATIONS").map_or(MUTATIONS, |count| count.parse().unwrap());
    for (name, target) in TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(name);
        let mut paths: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        assert!(!paths.is_empty(), "{} is empty", folder.display());
        let inputs: Vec<_> = paths.iter().map(|path| fs::read(path).unwrap()).collect();
        for (path, input) in paths.iter().zip(&inputs) {
            println!("{}", path.display());
            target(input);
        }
        for seed in 1..=mutations {
            println!("{name}, seed {seed}");
            let mut random = Random::new(seed);
            let mut input = inputs[random.below(inputs.len())].clone();
            mutate(&mut random, &mut input);
            target(&input);
        }
    }
}

fn mutate(random: &mut Random, bytes: &mut Vec<u8>) {
    for _ in 0..=random.below(4) {
        if bytes.is_empty() {
            return;
        }
        let at = random.below(bytes.len());
        match random.below(6) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = [0, 1, 0x7f, 0x80, 0xc1, 0xdd, 0xff][random.below(7)],
            2 => drop(bytes.drain(at..(at + random.below(40)).min(bytes.len()))),
            3 => bytes.truncate(at),
            4 => {
                let piece = bytes[at..(at + random.below(80)).min(bytes.len())].to_vec();
                bytes.splice(at..at, piece);
            }
            _ => {
                let piece = random.bytes_up_to(30);
                bytes.splice(at..at, piece);
            }
        }
    }
}
