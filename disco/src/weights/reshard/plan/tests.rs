//! Unit tests of the plan of a reshard, against a model of all workers' memory.

// Ranges of dimensions, and not what is in them.
#![allow(clippy::single_range_in_vec_init)]

use std::ops::Range;

use proptest::prelude::*;

use super::*;

/// Byte of the model that nothing was written to.
const UNWRITTEN: u64 = u64::MAX;

/// Returns the numbers of the bytes of a part, in the order of its memory: a byte's number is its
/// position in the whole tensor.
fn memory(dtype: DataType, shape: &[i64], part: &Region) -> Vec<u64> {
    let size = dtype.bits_per_element() / 8;
    let mut bytes = Vec::new();
    for element in 0..shape.iter().product::<i64>() {
        let (mut rest, mut is_in) = (element, true);
        for (dim, range) in part.0.iter().enumerate().rev() {
            is_in &= range.contains(&(rest % shape[dim]));
            rest /= shape[dim];
        }
        if is_in {
            bytes.extend((0..size).map(|byte| element as u64 * size + byte));
        }
    }
    bytes
}

/// Plans one tensor, does the moves in the model, and checks that every byte of a destination has
/// come once, and from its place in the tensor. Returns the moves.
fn check(dtype: DataType, shape: &[i64], from: &[Region], to: &[Region]) -> Result<Vec<Move>> {
    let (from, to) = (from.to_vec(), to.to_vec());
    let tensor = CutTensor { name: "w".to_owned(), dtype, shape: shape.to_vec(), from, to };
    let moves = plan(std::slice::from_ref(&tensor), &|_, _| false)?;
    let sources: Vec<_> = tensor.from.iter().map(|part| memory(dtype, shape, part)).collect();
    let expected: Vec<_> = tensor.to.iter().map(|part| memory(dtype, shape, part)).collect();
    let mut found: Vec<_> = expected.iter().map(|bytes| vec![UNWRITTEN; bytes.len()]).collect();
    for one in &moves {
        let (source, destination) = (&sources[one.source as usize], &mut found[one.destination as usize]);
        one.from.check(source.len() as u64).unwrap();
        one.to.check(destination.len() as u64).unwrap();
        assert!(one.from.len == one.to.len && one.from.len > 0, "{one:?}");
        let bytes = |runs: &ByteRuns| runs.ranges(0..runs.len).flatten().map(|at| at as usize).collect::<Vec<_>>();
        for (at, to) in bytes(&one.from).into_iter().zip(bytes(&one.to)) {
            assert_eq!(std::mem::replace(&mut destination[to], source[at]), UNWRITTEN, "{one:?} writes again");
        }
        // One divides the other, so that pieces can be whole runs of both.
        let (short, long) = (one.from.run.min(one.to.run), one.from.run.max(one.to.run));
        assert!(long.is_multiple_of(short), "{one:?}");
    }
    assert!(found == expected, "{tensor:?}");
    check_order(&moves);
    Ok(moves)
}

/// Checks that workers that do their moves in order, each waiting for its peer, come to an end.
fn check_order(moves: &[Move]) {
    let queue = |side: fn(&Move) -> u32, worker| (0..moves.len()).filter(move |at| side(&moves[*at]) == worker);
    let ends = |one: &Move| (one.source, one.destination);
    let workers = moves.iter().map(|one| one.source.max(one.destination) + 1).max().unwrap_or(0);
    let mut sending: Vec<_> = (0..workers).map(|worker| queue(|one| one.source, worker).peekable()).collect();
    let mut receiving: Vec<_> = (0..workers).map(|worker| queue(|one| one.destination, worker).peekable()).collect();
    let mut left = moves.len();
    while left > 0 {
        let before = left;
        for (at, one) in moves.iter().enumerate() {
            let (source, destination) = ends(one);
            let (sending, receiving) = (&mut sending[source as usize], &mut receiving[destination as usize]);
            if sending.peek() == Some(&at) && receiving.peek() == Some(&at) {
                sending.next();
                receiving.next();
                left -= 1;
            }
        }
        assert!(left < before, "workers wait for each other");
    }
}

/// Cuts dimension `dim` at these positions.
fn cut(shape: &[i64], dim: usize, at: &[i64]) -> Vec<Region> {
    let ends = at.iter().copied().chain([shape[dim]]);
    let mut start = 0;
    ends.map(|end| {
        let mut region = Region::whole(shape);
        region.0[dim] = std::mem::replace(&mut start, end)..end;
        region
    })
    .collect()
}

fn even(shape: &[i64], dim: usize, count: i64) -> Vec<Region> {
    cut(shape, dim, &(1..count).map(|at| shape[dim] * at / count).collect::<Vec<_>>())
}

fn region_in(shape: Vec<i64>) -> impl Strategy<Value = Region> {
    let range = |length: i64| (0..=length, 0..=length).prop_map(|(a, b)| a.min(b)..a.max(b));
    shape.into_iter().map(range).collect::<Vec<_>>().prop_map(Region)
}

/// Parts of workers: cut along a dimension, also where they are empty, the whole each, or any.
fn parts(shape: &[i64]) -> BoxedStrategy<Vec<Region>> {
    let any = prop::collection::vec(region_in(shape.to_vec()), 1..5);
    let (owned, whole) = (shape.to_vec(), Region::whole(shape));
    let replicated = (1..5_usize).prop_map(move |count| vec![whole.clone(); count]);
    if shape.is_empty() {
        return replicated.boxed();
    }
    let along = (0..shape.len(), prop::collection::vec(0.0..=1.0_f64, 0..4), 1..3_usize);
    let along = along.prop_map(move |(dim, mut at, copies)| {
        at.sort_by(f64::total_cmp);
        let at: Vec<_> = at.into_iter().map(|at| (owned[dim] as f64 * at) as i64).collect();
        let cut = cut(&owned, dim, &at);
        std::iter::repeat_n(cut, copies).flatten().collect()
    });
    prop_oneof![any, replicated, along.clone(), along].boxed()
}

fn case() -> impl Strategy<Value = (DataType, Vec<i64>, Vec<Region>, Vec<Region>)> {
    let dtype = prop::sample::select(vec![DataType::U8, DataType::BF16, DataType::F32]);
    let shape = prop::collection::vec(0..7_i64, 0..4);
    (dtype, shape).prop_flat_map(|(dtype, shape)| {
        let parts = (parts(&shape), parts(&shape));
        (Just(dtype), Just(shape), parts).prop_map(|(dtype, shape, (from, to))| (dtype, shape, from, to))
    })
}

proptest! {
    /// Any cuts: all bytes come once, from a right source; or the plan is refused, because some
    /// elements are nowhere.
    #[test]
    fn every_byte_comes_once_from_where_it_is((dtype, shape, from, to) in case()) {
        let planned = check(dtype, &shape, &from, &to);
        let is_held = |element: &Region| from.iter().any(|part| part.contains(element));
        let elements = |part: &Region| {
            part.0.iter().fold(vec![Region(Vec::new())], |all, range| {
                let longer = |one: &Region, at: i64| Region(one.0.iter().cloned().chain([at..at + 1]).collect());
                all.iter().flat_map(|one| range.clone().map(move |at| longer(one, at))).collect()
            })
        };
        let all_held = to.iter().filter(|part| !part.is_empty()).flat_map(elements).all(|one| is_held(&one));
        prop_assert_eq!(planned.is_ok(), all_held, "{:?}", planned);
    }

    /// Any order of dividing a region leaves the same elements.
    #[test]
    fn a_region_without_another_is_the_rest((outer, inner) in (region_in(vec![5, 6, 4]), region_in(vec![5, 6, 4]))) {
        if let Some(hole) = outer.intersection(&inner) {
            let rest = outer.without(&hole);
            let volume: u128 = rest.iter().map(Region::volume).sum();
            prop_assert_eq!(volume + hole.volume(), outer.volume());
            for (at, part) in rest.iter().enumerate() {
                prop_assert!(!part.is_empty() && outer.contains(part) && part.intersection(&hole).is_none());
                prop_assert!(rest[..at].iter().all(|other| other.intersection(part).is_none()));
            }
        }
    }

    /// Sources with all of a tensor send about as much each.
    #[test]
    fn sources_that_have_the_same_share_the_load(
        (n, m, dim, copies) in (1..9_usize, 1..9_i64, 0..2_usize, any::<bool>()),
    ) {
        let shape = [5040, 1680];
        let from = vec![Region::whole(&shape); n];
        let to = if copies { vec![Region::whole(&shape); m as usize] } else { even(&shape, dim, m) };
        let tensor = CutTensor { name: String::new(), dtype: DataType::F32, shape: shape.to_vec(), from, to };
        let moves = plan(&[tensor.clone(), tensor], &|_, _| false).unwrap();
        let mut loads = vec![0; n];
        moves.iter().for_each(|one| loads[one.source as usize] += one.from.len);
        let largest = moves.iter().map(|one| one.from.len).max().unwrap();
        let (most, least) = (*loads.iter().max().unwrap(), *loads.iter().min().unwrap());
        prop_assert!(least > 0 && most - least <= largest, "{:?}", loads);
        prop_assert!(moves.len() <= 2 * (n + m as usize), "{} moves", moves.len());
    }
}

/// A tensor of half bytes whose parts would begin within a byte is taken from one source.
#[test]
fn elements_of_half_a_byte_are_not_divided_within_one() {
    let dtype: DataType = "int4".parse().unwrap();
    for shape in [vec![(1_i64 << 20) + 2], vec![1002, 1001]] {
        let (from, to) = (vec![Region::whole(&shape); 2], vec![Region::whole(&shape)]);
        let tensor = CutTensor { name: String::new(), dtype, shape: shape.clone(), from, to };
        let moves = plan(&[tensor], &|_, _| false).unwrap();
        let moved: u64 = moves.iter().map(|one| one.to.len).sum();
        assert_eq!((moves.len(), moved), (1, (shape.iter().product::<i64>() / 2) as u64));
    }
}

fn counts(moves: &[Move]) -> Vec<(u32, u32, u64)> {
    moves.iter().map(|one| (one.source, one.destination, one.to.len)).collect()
}

#[test]
fn cuts_along_one_dimension_are_runs_of_both_sides() {
    let shape = [8, 6];
    let moves = check(DataType::F32, &shape, &even(&shape, 0, 2), &even(&shape, 0, 4)).unwrap();
    assert!(moves.iter().all(|one| one.from.are_contiguous() && one.to.are_contiguous()));
    assert_eq!(counts(&moves), [(0, 0, 48), (0, 1, 48), (1, 2, 48), (1, 3, 48)]);
    let moves = check(DataType::F32, &shape, &even(&shape, 0, 4), &even(&shape, 0, 2)).unwrap();
    assert_eq!(moves.len(), 4);
    // Rows of two columns, which are behind each other at the destination.
    let moves = check(DataType::F32, &shape, &even(&shape, 0, 2), &even(&shape, 1, 3)).unwrap();
    assert_eq!(moves.len(), 6);
    let one = &moves[0];
    assert_eq!((one.source, one.destination), (0, 0));
    assert_eq!(one.from, ByteRuns { len: 32, start: 0, run: 8, outer: vec![(4, 24)] });
    assert_eq!(one.to, ByteRuns { len: 32, start: 0, run: 32, outer: vec![] });
    // Uneven, and with a worker that has nothing.
    let moves = check(DataType::U8, &[10, 3], &cut(&[10, 3], 0, &[7, 7]), &cut(&[10, 3], 0, &[1, 5])).unwrap();
    assert_eq!(counts(&moves), [(0, 0, 3), (2, 2, 9), (0, 1, 12), (0, 2, 6)]);
}

#[test]
fn replicas_are_sent_once_to_each_that_wants_them() {
    let shape = [6, 4];
    let whole = vec![Region::whole(&shape); 2];
    // From copies to a cut, and back.
    let moves = check(DataType::F32, &shape, &whole, &even(&shape, 1, 4)).unwrap();
    assert_eq!(moves.iter().map(|one| one.source).collect::<Vec<_>>().len(), 4);
    assert_eq!(moves.iter().filter(|one| one.source == 0).count(), 2);
    let moves = check(DataType::F32, &shape, &even(&shape, 1, 4), &whole).unwrap();
    assert_eq!(moves.len(), 8);
    // The source on the machine of a destination goes before one with less to send.
    let tensor = |name: &str| CutTensor {
        name: name.to_owned(),
        dtype: DataType::F32,
        shape: shape.to_vec(),
        from: whole.clone(),
        to: even(&shape, 0, 3),
    };
    let moves = plan(&[tensor("a"), tensor("b")], &|source, _| source == 1).unwrap();
    assert!(moves.len() == 6 && moves.iter().all(|one| one.source == 1));
}

#[test]
fn what_no_source_has_and_what_cannot_be_cut_is_refused() {
    let shape = [4, 2];
    let error = check(DataType::F32, &shape, &[Region(vec![0..3, 0..2])], &even(&shape, 0, 2)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    for words in ["tensor 'w'", "the elements [3..4, 0..2]", "worker 1"] {
        assert!(error.message().contains(words), "{error}");
    }
    let nibbles = "int4".parse().unwrap();
    let error = check(nibbles, &[3, 3], &even(&[3, 3], 0, 3), &even(&[3, 3], 1, 3)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    // As many moves as elements, which no one needs.
    let shape = [1 << 10, 1 << 9];
    let rows = even(&shape, 0, shape[0]);
    let columns = even(&shape, 1, shape[1]);
    let tensor =
        CutTensor { name: "w".to_owned(), dtype: DataType::U8, shape: shape.to_vec(), from: rows, to: columns };
    assert_eq!(plan(&[tensor], &|_, _| false).unwrap_err().kind(), ErrorKind::LimitExceeded);
}

#[test]
fn a_region_is_divided_along_its_first_dimension_that_can_be() {
    let lengths = |region: Region, count| -> Vec<Range<i64>> {
        region.split(count).into_iter().map(|part| part.0[1].clone()).collect()
    };
    assert_eq!(lengths(Region(vec![3..4, 2..7]), 2), [2..4, 4..7]);
    assert_eq!(lengths(Region(vec![3..4, 2..4]), 9), [2..3, 3..4]);
    assert_eq!(Region(vec![]).split(3), [Region(vec![])]);
}
