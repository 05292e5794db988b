//! The fuzz targets that need more than the protocol, over the inputs that are kept, on a stable
//! compiler.

use rpc_tests::forwarder::Random;
use rpc_tests::fuzz_targets::TARGETS;

use crate::kept_inputs;

/// Mutations of all inputs of a target together. `RPC_FUZZ_MUTATIONS` is another number.
const MUTATIONS: u64 = 1500;

#[test]
fn kept_inputs_and_mutations_of_them_break_no_promise() {
    let mutations = std::env::var("RPC_FUZZ_MUTATIONS").map_or(MUTATIONS, |count| count.parse().unwrap());
    let generator = |seed| {
        let mut random = Random::new(seed);
        move |limit| random.below(limit)
    };
    for (name, target) in TARGETS {
        kept_inputs::run(name, mutations, generator, target);
    }
}
