//! Inputs of fuzz targets that are kept in `fuzz/corpus`, and mutations of them: a fixed number
//! from fixed seeds. Used by the tests of several crates, each with its generator of numbers.

use std::fs;
use std::path::Path;

/// Runs a target over the inputs in its folder, and over `mutations` of them. `generator` returns,
/// for a seed, a function that draws numbers below a limit.
pub(crate) fn run<G: FnMut(usize) -> usize>(
    name: &str,
    mutations: u64,
    generator: impl Fn(u64) -> G,
    target: fn(&[u8]),
) {
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
        let mut below = generator(seed);
        let mut input = inputs[below(inputs.len())].clone();
        mutate(&mut below, &mut input);
        target(&input);
    }
}

/// Changes a few bytes, or drops, repeats or inserts some.
pub(crate) fn mutate(below: &mut impl FnMut(usize) -> usize, bytes: &mut Vec<u8>) {
    for _ in 0..=below(4) {
        if bytes.is_empty() {
            return;
        }
        let at = below(bytes.len());
        match below(6) {
            0 => bytes[at] ^= 1 << below(8),
            1 => bytes[at] = [0, 1, 0x7f, 0x80, 0xc1, 0xdd, 0xff][below(7)],
            2 => drop(bytes.drain(at..(at + below(40)).min(bytes.len()))),
            3 => bytes.truncate(at),
            4 => {
                let piece = bytes[at..(at + below(80)).min(bytes.len())].to_vec();
                bytes.splice(at..at, piece);
            }
            _ => {
                let piece: Vec<_> = (0..below(30)).map(|_| below(256) as u8).collect();
                bytes.splice(at..at, piece);
            }
        }
    }
}
