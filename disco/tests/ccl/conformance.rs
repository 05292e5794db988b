//! Every collective, type and size on every launch kind, against a sequential model.

use std::time::Duration;

use disco::ccl::{Buffers, ReduceOp, host};
use rpc_core::DataType;

use crate::launch::{ALL, JoinArguments, Launch, as_child, long_limits, on_threads, start_child};
use ccl_conformance::{conformance, random_program};

#[test]
fn every_collective_matches_the_model_between_threads() {
    (1..=5).for_each(|size| drop(on_threads(Launch::Threads, size, &long_limits(), |ccl| conformance(ccl))));
}

#[test]
fn every_collective_matches_the_model_through_a_segment() {
    [1, 2, 5]
        .into_iter()
        .for_each(|size| drop(on_threads(Launch::Segment, size, &long_limits(), |ccl| conformance(ccl))));
}

#[test]
fn every_collective_matches_the_model_from_each_others_buffers() {
    (1..=5).for_each(|size| drop(on_threads(Launch::Processes, size, &long_limits(), |ccl| conformance(ccl))));
}

#[test]
fn every_collective_matches_the_model_over_tcp() {
    (1..=5).for_each(|size| drop(on_threads(Launch::Tcp, size, &long_limits(), |ccl| conformance(ccl))));
}

#[test]
fn every_collective_matches_the_model_over_encrypted_connections() {
    [2, 4]
        .into_iter()
        .for_each(|size| drop(on_threads(Launch::Encrypted, size, &long_limits(), |ccl| conformance(ccl))));
}

#[test]
fn every_collective_matches_the_model_over_unix_sockets() {
    [2, 5].into_iter().for_each(|size| drop(on_threads(Launch::Unix, size, &long_limits(), |ccl| conformance(ccl))));
}

/// The rank in a process of its own that the test below starts.
#[test]
fn child() {
    if let Some((program, mut ccl)) = as_child(&long_limits()) {
        match program.as_str() {
            "conformance" => conformance(&mut *ccl),
            other => panic!("no program {other}"),
        }
    }
}

#[test]
fn ranks_in_processes_of_their_own_match_the_model() {
    for size in [3] {
        let offer = host::Offer::new(size, &long_limits()).unwrap();
        let ranks: Vec<_> = (0..size)
            .map(|rank| start_child("conformance::child", "conformance", &JoinArguments::Segment(offer.ticket()), rank))
            .collect();
        for rank in ranks {
            assert!(rank.finish(Duration::from_secs(240)));
        }
    }
}

/// The same bits on every run and on every launch kind; that all ranks have the same is part of the
/// model.
#[test]
fn results_depend_neither_on_the_run_nor_on_the_launch() {
    for size in [2, 4] {
        let run = |launch| on_threads(launch, size, &long_limits(), |ccl| random_program(ccl, 7, 40));
        let first = run(ALL[0]);
        for launch in ALL.into_iter().chain([ALL[0]]) {
            assert_eq!(run(launch), first, "{launch:?}");
        }
    }
}

/// In large groups data goes other ways than in small ones, and the results are those of a fold in
/// the order of ranks.
#[test]
fn many_ranks_have_the_same_sums_whichever_way_their_data_goes() {
    for (launch, size) in [(Launch::Threads, 200), (Launch::Segment, 40), (Launch::Processes, 40)] {
        // Between processes the first two travel with the announcements.
        for count in [1, 3000, 4000, 20_000] {
            let of_rank = |rank: usize| (0..count).map(move |at| (rank + 1) as f32 / (at + 3) as f32);
            let mut expected: Vec<f32> = of_rank(0).collect();
            for rank in 1..size {
                expected.iter_mut().zip(of_rank(rank)).for_each(|(sum, next)| *sum += next);
            }
            on_threads(launch, size, &long_limits(), |ccl| {
                for _ in 0..2 {
                    let mut data: Vec<u8> = of_rank(ccl.rank().0 as usize).flat_map(f32::to_ne_bytes).collect();
                    ccl.allreduce(ReduceOp::Sum, DataType::F32, count, Buffers::in_place(&mut data).into()).unwrap();
                    let sums = data.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes));
                    assert!(sums.eq(expected.iter().copied()), "{launch:?}, {count}");
                }
                ccl.barrier().unwrap();
                let mut all = vec![0; 4 * size];
                let own = ccl.rank().0.to_ne_bytes();
                ccl.allgather(DataType::U32, 1, Buffers::new(&own, &mut all).into()).unwrap();
                let ranks = all.as_chunks().0.iter().map(|bytes| u32::from_ne_bytes(*bytes));
                assert!(ranks.eq(0..size as u32), "{launch:?}");
            });
        }
    }
}

/// Two groups at once, and a group within a group, do not disturb each other.
#[test]
fn groups_are_apart() {
    let worlds = host::threads(4, &long_limits()).unwrap();
    let groups = [host::threads(2, &long_limits()).unwrap(), host::threads(2, &long_limits()).unwrap()];
    let groups = groups.into_iter().flatten();
    std::thread::scope(|scope| {
        for (mut world, mut group) in worlds.into_iter().zip(groups) {
            scope.spawn(move || {
                for seed in 0..20 {
                    let of_group = 100 + seed + u64::from(world.rank().0 / 2) * 1000;
                    random_program(&mut *group, of_group, 3);
                    random_program(&mut *world, seed, 2);
                }
            });
        }
    });
}
