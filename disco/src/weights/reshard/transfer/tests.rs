//! Unit tests of the moves of workers, as threads of one process.

// Ranges of dimensions, and not what is in them.
#![allow(clippy::single_range_in_vec_init)]

use rpc_core::ErrorKind;

use super::*;
use crate::ccl::host;
use crate::held_memory::tests::context;
use crate::weights::reshard::plan::{CutTensor, Move, plan};
use crate::weights::reshard::region::Region;

const LIMIT: u64 = 64 << 20;

/// Returns a tensor's part, whose elements are their numbers in the whole.
fn part(shape: &[i64; 2], region: &Region) -> Tensor {
    let [rows, columns] = &region.0[..] else { panic!("two dimensions") };
    let elements: Vec<f32> =
        rows.clone().flat_map(|row| columns.clone().map(move |column| (row * shape[1] + column) as f32)).collect();
    Tensor::from_slice(region.shape(), &elements).unwrap()
}

fn tasks(moves: &[Move], sources: u32) -> (Vec<Vec<WorkerMove>>, Vec<Vec<WorkerMove>>) {
    let piece = |one: &Move| piece_len(&one.from, &one.to);
    let of = |worker: u32, is_source: bool| {
        let own = moves.iter().filter(|one| worker == if is_source { one.source } else { one.destination });
        let task = own.map(|one| match is_source {
            true => {
                WorkerMove { tensor: 0, peer: sources + one.destination, runs: one.from.clone(), piece: piece(one) }
            }
            false => WorkerMove { tensor: 0, peer: one.source, runs: one.to.clone(), piece: piece(one) },
        });
        task.collect()
    };
    ((0..sources).map(|worker| of(worker, true)).collect(), (0..8).map(|worker| of(worker, false)).collect())
}

/// Moves a tensor from workers with these parts to workers with those, each a thread of a session
/// with so much memory. Returns the outcome of each.
fn moved(shape: [i64; 2], from: &[Region], to: &[Region], limit: u64) -> Vec<Result<()>> {
    let tensor = CutTensor {
        name: "w".to_owned(),
        dtype: DataType::F32,
        shape: shape.to_vec(),
        from: from.to_vec(),
        to: to.to_vec(),
    };
    let moves = plan(&[tensor], &|_, _| false).unwrap();
    let (sending, receiving) = tasks(&moves, from.len() as u32);
    let (sources, expected): (Vec<_>, Vec<_>) =
        (from.iter().map(|one| part(&shape, one)).collect(), to.iter().map(|one| part(&shape, one)).collect());
    let made: Vec<_> = to.iter().map(|one| Tensor::zeros(one.shape(), DataType::F32).unwrap()).collect();
    let ranks = host::threads(from.len() + to.len(), &host::Options::default()).unwrap();
    let outcomes = std::thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .into_iter()
            .enumerate()
            .map(|(rank, mut ccl)| {
                let (sources, made, sending, receiving) = (&sources, &made, &sending, &receiving);
                scope.spawn(move || {
                    let context = context(limit);
                    let done = match rank.checked_sub(sources.len()) {
                        None => send_all(&context, &mut *ccl, &sources[rank..=rank], &sending[rank]),
                        Some(rank) => receive_all(&context, &mut *ccl, &made[rank..=rank], &receiving[rank]),
                    };
                    done.inspect_err(|error| ccl.abort(error.message()))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    if outcomes.iter().all(Result::is_ok) {
        for (made, expected) in made.iter().zip(&expected) {
            assert!(
                made.read().unwrap().as_slice::<f32>().unwrap() == expected.read().unwrap().as_slice::<f32>().unwrap()
            );
        }
    }
    outcomes
}

fn rows(shape: [i64; 2], count: i64) -> Vec<Region> {
    (0..count).map(|at| Region(vec![shape[0] * at / count..shape[0] * (at + 1) / count, 0..shape[1]])).collect()
}

fn columns(shape: [i64; 2], count: i64) -> Vec<Region> {
    (0..count).map(|at| Region(vec![0..shape[0], shape[1] * at / count..shape[1] * (at + 1) / count])).collect()
}

#[test]
fn pieces_of_any_length_come_to_their_places() {
    // Short runs; runs longer than a piece that is gathered; and one run.
    for shape in [[48, 60], [1000, 700], [8, 300_000], [3, 2_000_000]] {
        for (from, to) in [
            (rows(shape, 2), columns(shape, 3)),
            (columns(shape, 3), rows(shape, 2)),
            (rows(shape, 3), rows(shape, 2)),
            (columns(shape, 2), columns(shape, 3)),
            (vec![Region::whole(&shape); 2], columns(shape, 2)),
        ] {
            moved(shape, &from, &to, LIMIT).into_iter().collect::<Result<()>>().unwrap();
        }
    }
}

/// The buffer for pieces is memory of the session, and there is one of them.
#[test]
fn a_buffer_is_charged_and_a_session_without_room_for_it_ends_the_moves() {
    let shape = [1000, 700];
    let moved_with = |limit| moved(shape, &rows(shape, 2), &columns(shape, 2), limit);
    assert!(moved_with(GATHERED).iter().all(Result::is_ok));
    let outcomes = moved_with(GATHERED / 2);
    let kinds: Vec<_> = outcomes.iter().map(|outcome| outcome.as_ref().unwrap_err().kind()).collect();
    assert!(kinds.contains(&ErrorKind::LimitExceeded), "{kinds:?}");
    // Rows to rows need none.
    assert!(moved(shape, &rows(shape, 2), &rows(shape, 3), 0).iter().all(Result::is_ok));
}

#[test]
fn pieces_are_whole_runs_of_both_sides() {
    let runs = |len, run| ByteRuns { len, start: 0, run, outer: vec![(len / run, run)] };
    for (from, to, expected) in [
        ((1 << 30, 1 << 30), (1 << 30, 1 << 30), MAX_PIECE),
        ((100, 100), (100, 100), 100),
        ((1 << 30, 3000), (1 << 30, 1 << 30), GATHERED / 3000 * 3000),
        ((1 << 30, 1 << 20), (1 << 30, 1 << 30), 1 << 20),
        // Runs that are longer than a piece are divided.
        ((3 << 30, 3 << 28), (3 << 30, 3 << 30), MAX_PIECE),
        ((9 << 20, 9 << 20), (27 << 20, 9 << 20), 9 << 20),
        (((1 << 27) - 39, (1 << 27) - 39), (3 * ((1 << 27) - 39), (1 << 27) - 39), GATHERED),
        ((6000, 6), (6000, 60), GATHERED / 6 * 6),
    ] {
        let piece = piece_len(&runs(from.0, from.1), &runs(to.0, to.1));
        assert_eq!(piece, expected, "{from:?} {to:?}");
    }
}

#[test]
fn moves_of_a_peer_are_checked() {
    let tensor = Tensor::zeros([4], DataType::F32).unwrap();
    let runs = ByteRuns { len: 16, start: 0, run: 16, outer: Vec::new() };
    let good = WorkerMove { tensor: 0, peer: 0, runs: runs.clone(), piece: 16 };
    check(std::slice::from_ref(&good), std::slice::from_ref(&tensor)).unwrap();
    for odd in [
        WorkerMove { tensor: 1, ..good.clone() },
        WorkerMove { piece: 0, ..good.clone() },
        WorkerMove { piece: MAX_PIECE + 1, ..good.clone() },
        WorkerMove { runs: ByteRuns { start: 1, ..runs.clone() }, ..good.clone() },
    ] {
        check(&[odd], std::slice::from_ref(&tensor)).unwrap_err();
    }
    let mut out = [0; 8];
    read(&tensor, &runs, 8, &mut out).unwrap();
    read(&tensor, &runs, 9, &mut out).unwrap_err();
    write(&tensor, &runs, u64::MAX, &out).unwrap_err();
}
