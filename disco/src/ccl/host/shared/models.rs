//! Models of collectives through a segment: whatever the order of the ranks' steps, results are
//! right, no rank waits for a word that is there, and a rank that goes is noticed by all.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rpc_core::{DataType, RpcError};
use shuttle::thread;

use super::{SharedCcl, pair};
use crate::ccl::host::Options;
use crate::ccl::host::algorithm::Reach;
use crate::ccl::host::memory::Memory;
use crate::ccl::host::segment::{BoxWord, Gate, Segment, Word};
use crate::ccl::host::watched_processes::WatchedProcesses;
use crate::ccl::{BreakCause, Buffers, Ccl, CclError, Collective, Operation, Rank, ReduceOp};
use crate::sync::modelled::explore;

/// Elements of data that travels with the announcements, of data that goes through the stages, and
/// of data that does not fit into them at once.
const SMALL: usize = 3;
const LARGE: usize = 5000;
const HUGE: usize = 30_000;

/// Returns the ranks of a group that goes through its segment, after so many collectives,
/// transfers and chunks. They do not yield before they sleep.
fn ranks_after<const N: usize>(collectives: u64, chunks: u32) -> [SharedCcl; N] {
    let memory = Memory::heap(Segment::bytes(N, false).unwrap()).unwrap();
    let segment = Arc::new(Segment::create(memory, N, false, 0, [0; 16]));
    segment.gate(Gate::Entered).store((collectives as u32).wrapping_mul(N as u32), Ordering::Relaxed);
    for rank in 0..N {
        let set = |word, value| segment.word(rank, word).store(value, Ordering::Relaxed);
        [Word::Entered, Word::Finished, Word::Halfway].into_iter().for_each(|word| set(word, collectives as u32));
        [Word::Produced, Word::Reduced, Word::Consumed].into_iter().for_each(|word| set(word, chunks));
        for peer in 0..N {
            let set = |word, value| segment.box_word(rank, peer, word).store(value, Ordering::Relaxed);
            [BoxWord::Offered, BoxWord::Answered].into_iter().for_each(|word| set(word, collectives as u32));
            [BoxWord::Produced, BoxWord::Consumed].into_iter().for_each(|word| set(word, chunks));
        }
    }
    std::array::from_fn(|rank| {
        let options = Options { ranks_on_machine: Some(usize::MAX), entry_timeout: None, ..Options::default() };
        let processes = WatchedProcesses::default();
        let mut ccl = SharedCcl::new(Arc::clone(&segment), rank, options, Reach::Segment, processes);
        ccl.yield_time = Duration::ZERO;
        (ccl.sequence, ccl.chunks) = (collectives, chunks);
        ccl.sent = (0..N).map(|peer| (peer, pair::Count::after(collectives, chunks))).collect();
        ccl.received = ccl.sent.clone();
        ccl
    })
}

fn ranks<const N: usize>() -> [SharedCcl; N] {
    ranks_after(0, 0)
}

/// Runs each rank on a thread of its own; returns their results.
fn each<const N: usize, T: Send + 'static>(
    ranks: [SharedCcl; N],
    run: impl Fn(SharedCcl) -> T + Clone + Send + 'static,
) -> [T; N] {
    let threads = ranks.map(|rank| {
        let run = run.clone();
        thread::spawn(move || run(rank))
    });
    threads.map(|thread| thread.join().unwrap())
}

/// Returns numbers from `first` on, as bytes. They differ, so that no chunk is taken for another.
fn numbers(first: i32, count: usize) -> Vec<u8> {
    (first..).take(count).flat_map(i32::to_ne_bytes).collect()
}

/// Adds up all ranks' [`numbers`] from `value` and the rank's own number on, in place.
fn sum(ccl: &mut SharedCcl, value: i32, count: usize) -> Result<Vec<i32>, CclError> {
    let mut data = numbers(value + ccl.rank as i32, count);
    let collective = Collective::new(Operation::Allreduce(ReduceOp::Sum), DataType::I32, count);
    ccl.run(collective, Buffers::in_place(&mut data).into())?;
    Ok(data.as_chunks().0.iter().copied().map(i32::from_ne_bytes).collect())
}

/// Returns the result of [`sum`] on two ranks.
fn sums(value: i32, count: usize) -> Vec<i32> {
    (value..).take(count).map(|value| 2 * value + 1).collect()
}

/// Sends [`numbers`] to the next rank, and returns what came from the one before.
fn pass_on(ccl: &mut SharedCcl, value: i32, count: usize) -> Result<Vec<i32>, CclError> {
    let (size, rank) = (ccl.size(), ccl.rank);
    let input = numbers(value + rank as i32, count);
    let mut output = vec![0; input.len()];
    let [to, from] = [rank + 1, rank + size - 1].map(|peer| Rank::of(peer % size));
    let [send, receive] =
        [Operation::Send { to }, Operation::Recv { from }].map(|one| Collective::new(one, DataType::I32, count));
    // Rank 0 begins, so that no ranks wait in a circle.
    for is_send in if rank == 0 { [true, false] } else { [false, true] } {
        if is_send {
            ccl.run(send, Buffers::new(&input, &mut []).into())?;
        } else {
            ccl.run(receive, Buffers::new(&[], &mut output).into())?;
        }
    }
    Ok(output.as_chunks().0.iter().copied().map(i32::from_ne_bytes).collect())
}

/// The counters of the group pass 2³¹ and 2³².
#[test]
fn collectives_add_up_whatever_the_order_of_steps() {
    for (collectives, chunks) in [(0, 0), ((1 << 31) - 2, (1 << 31) - 5), ((1 << 32) - 2, u32::MAX - 4)] {
        explore(move || {
            let rounds = |mut ccl: SharedCcl| {
                for (round, count) in (1..).zip([SMALL, LARGE, HUGE, SMALL]) {
                    assert_eq!(sum(&mut ccl, round, count).unwrap(), sums(round, count));
                }
            };
            each(ranks_after::<2>(collectives, chunks), rounds);
        });
    }
}

#[test]
fn transfers_arrive_whatever_the_order_of_steps() {
    for (transfers, chunks) in [(0, 0), ((1 << 32) - 2, u32::MAX - 1)] {
        explore(move || {
            let rounds = |mut ccl: SharedCcl| {
                let before = (ccl.rank as i32 + 1) % 2;
                for (round, count) in (1..).zip([SMALL, LARGE, SMALL]) {
                    assert_eq!(
                        pass_on(&mut ccl, round, count).unwrap(),
                        (round + before..).take(count).collect::<Vec<_>>()
                    );
                }
            };
            each(ranks_after::<2>(transfers, chunks), rounds);
        });
    }
}

fn broken(error: CclError) -> (BreakCause, Rank) {
    let CclError::Broken(breakdown) = error else { panic!("{error}") };
    (breakdown.cause.clone(), breakdown.rank)
}

/// The others have what came before, and all name the one that has left, or the cause that another
/// one has found before.
#[test]
fn a_rank_that_leaves_is_noticed_by_all() {
    explore(|| {
        let told = each(ranks::<3>(), |mut ccl| {
            assert_eq!(sum(&mut ccl, 1, SMALL).unwrap(), [6, 9, 12]);
            // Dropping it leaves the group.
            if ccl.rank == 2 { None } else { Some(broken(sum(&mut ccl, 2, LARGE).unwrap_err())) }
        });
        assert_eq!(told, [Some((BreakCause::Left, Rank(2))), Some((BreakCause::Left, Rank(2))), None]);
    });
}

/// Regression: steps were counted in 32 bits, and those that were left in as many.
#[test]
fn a_rank_that_leaves_its_step_is_noticed_after_any_number_of_steps() {
    for step in [1, 1 << 31, 1 << 32, (1 << 33) + 1] {
        explore(move || {
            let told = each(ranks::<2>(), move |mut ccl| {
                ccl.set_step(step);
                if ccl.rank == 1 {
                    // The collective of the step before, which it is through with.
                    ccl.set_step(step - 1);
                    ccl.leave_step();
                    ccl.set_step(step);
                }
                assert_eq!(sum(&mut ccl, 1, SMALL).unwrap(), sums(1, SMALL));
                if ccl.rank == 0 {
                    return Some(broken(sum(&mut ccl, 2, SMALL).unwrap_err()));
                }
                ccl.leave_step();
                // It stays in the group meanwhile.
                while !ccl.segment.is_broken() {
                    thread::yield_now();
                }
                None
            });
            assert_eq!(told, [Some((BreakCause::OutOfStep, Rank(1))), None]);
        });
    }
}

#[test]
fn an_abort_reaches_every_rank_wherever_it_is() {
    explore(|| {
        let ranks = ranks::<2>();
        let controls = ranks.each_ref().map(Ccl::control);
        let aborting = controls.map(|control| {
            let rank = format!("{:p}", Arc::as_ptr(&control));
            thread::spawn(move || control.abort(&rank))
        });
        let told = each(ranks, |mut ccl| {
            for _ in 0..3 {
                if let Err(error) = sum(&mut ccl, 1, SMALL) {
                    return broken(error).0;
                }
            }
            while !ccl.segment.is_broken() {
                thread::yield_now();
            }
            broken(sum(&mut ccl, 1, SMALL).unwrap_err()).0
        });
        aborting.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(matches!(&told[0], BreakCause::Aborted(_)), "{told:?}");
        assert_eq!(told[0], told[1]);
    });
}

/// A poisoned collective leaves the group as it was.
#[test]
fn a_poisoned_collective_changes_nothing_for_the_next_one() {
    explore(|| {
        each(ranks::<2>(), |mut ccl| {
            let collective = Collective::new(Operation::Allreduce(ReduceOp::Sum), DataType::I32, LARGE);
            let mut data = vec![0; 4 * LARGE];
            let error = match ccl.rank {
                0 => ccl.run(collective, Buffers::in_place(&mut data).into()).unwrap_err(),
                _ => {
                    let cause = RpcError::invalid_argument("no input");
                    ccl.run(collective, crate::ccl::CollectiveInput::Poisoned(cause)).unwrap_err()
                }
            };
            assert!(matches!(error, CclError::Poisoned { .. }), "{error}");
            assert_eq!(sum(&mut ccl, 1, SMALL).unwrap(), sums(1, SMALL));
        });
    });
}
