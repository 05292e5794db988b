//! Tensors that go from the workers of one session to those of another one: every cut, by every way
//! on which the workers can meet.

// Ranges of dimensions, and not what is in them.
#![allow(clippy::single_range_in_vec_init)]

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use disco::{Content, Cut, DRef, DataRoute, DiscoSession, Options, Reshard, Resharded, SocketSession, WorkerId};
use rpc_core::{DataType, Devices, ErrorKind, LocalSession, Session, Tensor};
use rpc_tests::accelerator::Accelerator;
use rpc_tests::spmd::{Data, Fixture, Launch, Node, registry};

const NODE: &str = env!("CARGO_BIN_EXE_disco_node");

/// A cut, and the box that each worker has by it.
#[derive(Clone, Debug)]
struct Division {
    cut: Cut,
    boxes: Vec<Vec<Range<i64>>>,
}

fn whole_box(shape: &[i64]) -> Vec<Range<i64>> {
    shape.iter().map(|length| 0..*length).collect()
}

fn along(shape: &[i64], dim: usize, lengths: &[i64]) -> Vec<Vec<Range<i64>>> {
    let mut end = 0;
    let part = |length: &i64| {
        let mut part = whole_box(shape);
        end += length;
        part[dim] = end - length..end;
        part
    };
    lengths.iter().map(part).collect()
}

/// Returns the divisions of a tensor among so many workers, in groups of two; of a large one only
/// the usual ones.
fn divisions(shape: &[i64], workers: usize) -> Vec<Division> {
    let even = |dim: usize, count: usize| vec![shape[dim] / count as i64; count];
    let mut all = vec![Division { cut: Cut::Whole, boxes: vec![whole_box(shape); workers] }];
    let divided = (0..shape.len()).filter(|dim| shape[*dim] % workers as i64 == 0);
    all.extend(divided.map(|dim| Division { cut: Cut::shard(dim), boxes: along(shape, dim, &even(dim, workers)) }));
    if shape.iter().product::<i64>() > 1 << 16 {
        return all;
    }
    for dim in 0..shape.len() {
        let group = along(shape, dim, &even(dim, 2));
        let boxes = (0..workers).map(|worker| group[worker % 2].clone()).collect();
        all.push(Division { cut: Cut::shard_in_group(dim), boxes });
        // One of four has nothing.
        let mut lengths = vec![0; workers];
        lengths[0] = shape[dim] / 3;
        lengths[workers - 1] = 1;
        lengths[workers / 2] += shape[dim] - lengths.iter().sum::<i64>();
        all.push(Division { cut: Cut::lengths(dim, lengths.clone()), boxes: along(shape, dim, &lengths) });
    }
    // Parts that overlap.
    let mut boxes = vec![whole_box(shape); workers];
    boxes[0][0] = 0..shape[0] / 2;
    boxes[1][0] = shape[0] / 3..shape[0];
    all.push(Division { cut: Cut::boxes(boxes.clone()), boxes });
    all
}

/// Returns the elements of a box of a tensor whose elements are their numbers, plus a seed.
fn elements(shape: &[i64], part: &[Range<i64>], seed: i64) -> Vec<f32> {
    let mut numbers = vec![0];
    for (length, range) in shape.iter().zip(part) {
        numbers = numbers.iter().flat_map(|number| range.clone().map(move |at| number * length + at)).collect();
    }
    numbers.into_iter().map(|number| (number + seed) as f32).collect()
}

fn lengths(part: &[Range<i64>]) -> Vec<i64> {
    part.iter().map(|range| range.end - range.start).collect()
}

/// Gives each worker of a session its part of a tensor.
fn place(session: &DiscoSession, shape: &[i64], division: &Division, seed: i64) -> DRef {
    let part = session.empty(&[0], DataType::U8, None).unwrap();
    for (worker, own) in (0..).map(WorkerId).zip(&division.boxes) {
        let tensor = Tensor::from_slice(lengths(own), &elements(shape, own, seed)).unwrap();
        session.debug_set_register(&part, worker, &tensor).unwrap();
    }
    part
}

fn check(session: &DiscoSession, part: &DRef, shape: &[i64], division: &Division, seed: i64, what: &str) {
    for (worker, own) in (0..).map(WorkerId).zip(&division.boxes) {
        let content = session.debug_get_from_remote(part, worker).wait().unwrap();
        let Content::Tensor(tensor) = content else { panic!("{what}: worker {worker} has {content:?}") };
        assert_eq!((tensor.dtype(), tensor.shape()), (DataType::F32, &lengths(own)[..]), "{what}, worker {worker}");
        let expected = elements(shape, own, seed);
        assert!(tensor.read().unwrap().as_slice::<f32>().unwrap() == expected, "{what}: worker {worker} has others");
    }
}

/// Reshards a tensor by all cuts of one session to all cuts of the other one, at once.
fn all_cuts(from: &DiscoSession, to: &DiscoSession, shape: &[i64]) -> Resharded {
    let count = |session: &DiscoSession| session.num_workers() as usize;
    let (sources, destinations) = (divisions(shape, count(from)), divisions(shape, count(to)));
    let parts: Vec<DRef> = (0..).zip(&sources).map(|(seed, division)| place(from, shape, division, seed)).collect();
    let mut reshard = Reshard::new(from, to);
    let mut expected = Vec::new();
    for (seed, (division, part)) in sources.iter().zip(&parts).enumerate() {
        for wanted in &destinations {
            let name = format!("{shape:?}, {:?} to {:?}", division.cut, wanted.cut);
            reshard = reshard.tensor(&name, part, DataType::F32, shape, division.cut.clone(), wanted.cut.clone());
            expected.push((name, wanted, seed as i64));
        }
    }
    let resharded = reshard.start().wait().unwrap();
    assert_eq!(resharded.tensors.len(), expected.len());
    for (name, division, seed) in &expected {
        check(to, &resharded.tensors[name], shape, division, *seed, name);
    }
    let per_division = |one: &Division| one.boxes.iter().map(|part| lengths(part).iter().product::<i64>()).sum::<i64>();
    let elements: i64 = destinations.iter().map(per_division).sum();
    assert_eq!(resharded.bytes, 4 * elements as u64 * sources.len() as u64);
    for session in [from, to] {
        session.sync_all().wait().unwrap();
    }
    resharded
}

fn start(launch: Launch, workers: u32) -> Fixture {
    launch.start(workers, workers / 2)
}

/// Reshards from two workers to four and from four to two.
fn both_ways(from: Launch, to: Launch, shapes: &[&[i64]], route: &DataRoute) {
    let (two, four) = (start(from, 2), start(to, 4));
    for (from, to) in [(&two.session, &four.session), (&four.session, &two.session)] {
        for shape in shapes {
            eprintln!("{} to {}, {shape:?}", from.num_workers(), to.num_workers());
            let resharded = all_cuts(from, to, shape);
            assert_eq!(&resharded.route, route);
        }
    }
    two.session.shutdown().wait().unwrap();
    four.session.shutdown().wait().unwrap();
}

/// Sizes for each way of sending pieces: gathered and scattered, in long runs, and whole.
const SHAPES: [&[i64]; 3] = [&[12, 8], &[4, 4, 36, 8], &[2, 4, 1 << 17]];

#[test]
fn threads_of_one_process_copy_from_each_other() {
    both_ways(Launch::Threads, Launch::Threads, &SHAPES, &DataRoute::Process);
    let tcp = Launch::Tcp { per_node: 2, data: Data::Shared };
    both_ways(Launch::Threads, tcp, &SHAPES[..1], &DataRoute::Process);
}

#[test]
fn processes_of_one_machine_share_memory() {
    both_ways(Launch::Processes(NODE), Launch::Processes(NODE), &SHAPES, &DataRoute::SharedMemory);
    both_ways(Launch::Threads, Launch::NodeOfProcesses(NODE), &SHAPES[..1], &DataRoute::SharedMemory);
}

#[test]
fn workers_with_data_addresses_connect_to_each_other() {
    let route = DataRoute::Sockets { encrypted: false };
    let tcp = Launch::Tcp { per_node: 1, data: Data::Tcp };
    both_ways(tcp, tcp, &SHAPES, &route);
    both_ways(Launch::Line { data: Data::Tcp }, Launch::Processes(NODE), &SHAPES[..1], &route);
}

#[test]
fn the_controller_passes_on_what_workers_cannot_send_to_each_other() {
    // Time for which workers try to reach each other.
    let mut options = Options::default();
    (options.direct_timeout, options.init_timeout) = (Duration::from_millis(100), Duration::from_secs(2));
    let start = |launch: Launch, workers: u32| launch.try_start_with(workers, workers / 2, options.clone()).unwrap();
    let relayed = Launch::Tcp { per_node: 2, data: Data::Relayed };
    let (two, four) = (start(relayed, 2), start(Launch::Threads, 4));
    let (two, four) = (&two.session, &four.session);
    for (from, to, shape) in [(two, four, SHAPES[0]), (four, two, SHAPES[0]), (two, four, SHAPES[2])] {
        let resharded = all_cuts(from, to, shape);
        let DataRoute::Controller { reason } = &resharded.route else { panic!("{:?}", resharded.route) };
        assert!(reason.contains(" of the session that ") && reason.contains("rank "), "{reason}");
    }
    // Not where that is not wanted.
    let shape = [8, 4];
    let division = &divisions(&shape, 2)[1];
    let part = place(two, &shape, division, 0);
    let reshard = Reshard::new(two, four).direct();
    let reshard = reshard.tensor("x", &part, DataType::F32, shape, division.cut.clone(), Cut::Whole);
    let error = reshard.start().wait().unwrap_err();
    assert_eq!(error.cause().kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("have no way to each other"), "{error}");
    for session in [two, four] {
        session.sync_all().wait().unwrap();
        session.shutdown().wait().unwrap();
    }
}

/// Nodes on other machines, whose data addresses are not known, are no way either.
#[test]
fn nodes_of_other_machines_without_data_addresses_go_through_the_controller() {
    let (Some(first), Some(second)) = (Node::apart(NODE, None), Node::apart(NODE, None)) else {
        return eprintln!("SKIPPED: no namespaces of processes");
    };
    let session = |node: &Node| SocketSession::new([node.address()], 2, 1).start().wait().unwrap();
    let (from, to) = (session(&first), session(&second));
    let resharded = all_cuts(&from, &to, &[12, 8]);
    let DataRoute::Controller { reason } = &resharded.route else { panic!("{:?}", resharded.route) };
    assert!(reason.contains("the data address of worker 0 of the session that has the tensors"), "{reason}");
    from.shutdown().wait().unwrap();
    to.shutdown().wait().unwrap();
}

/// Parts in memory that the processor cannot reach, on either side.
#[test]
fn tensors_go_from_and_to_the_memory_of_devices() {
    let node = || {
        let session = LocalSession::builder(registry()).devices(Devices::new().with(Arc::new(Accelerator::default())));
        Session::new(session.build())
    };
    let session = |workers| DiscoSession::over([node()], workers, 1, Options::default()).wait().unwrap();
    let (from, to) = (session(2), session(3));
    let shape = [12, 9];
    let division = Division { cut: Cut::shard(0), boxes: along(&shape, 0, &[6, 6]) };
    let host = place(&from, &shape, &division, 3);
    // To the device of the sources first, by a copy there.
    let device = "ext_dev:1".parse().unwrap();
    let there = Reshard::new(&to, &from).device(device);
    let whole = Division { cut: Cut::Whole, boxes: vec![whole_box(&shape); 3] };
    let part = place(&to, &shape, &whole, 5);
    let there = there.tensor("x", &part, DataType::F32, shape, Cut::Whole, Cut::shard(1)).start();
    let error = there.wait().unwrap_err();
    // 9 columns do not divide by two.
    assert!(error.to_string().contains("tensor 'x'"), "{error}");
    let device = "ext_dev:1".parse().unwrap();
    let there = Reshard::new(&to, &from).device(device);
    let there = there.tensor("x", &part, DataType::F32, shape, Cut::Whole, Cut::shard(0)).start().wait().unwrap();
    check(&from, &there.tensors["x"], &shape, &division, 5, "to a device");
    let back = Reshard::new(&from, &to);
    let back = back.tensor("x", &there.tensors["x"], DataType::F32, shape, Cut::shard(0), Cut::shard(1));
    let back = back.tensor("y", &host, DataType::F32, shape, Cut::shard(0), Cut::lengths(1, [2, 3, 4]));
    let back = back.start().wait().unwrap();
    let columns = |lengths: &[i64]| Division { cut: Cut::Whole, boxes: along(&shape, 1, lengths) };
    check(&to, &back.tensors["x"], &shape, &columns(&[3, 3, 3]), 5, "from a device");
    check(&to, &back.tensors["y"], &shape, &columns(&[2, 3, 4]), 3, "from host memory");
    from.shutdown().wait().unwrap();
    to.shutdown().wait().unwrap();
}

/// Elements of other sizes, and two in a byte.
#[test]
fn elements_of_all_sizes_are_unchanged() {
    let (from, to) = (start(Launch::Threads, 2), start(Launch::Threads, 4));
    let bytes: Vec<u8> = (0..=255).collect();
    for dtype in ["int4", "uint8", "bfloat16", "float64"] {
        let dtype: DataType = dtype.parse().unwrap();
        let columns = 8 * 64 / i64::from(dtype.bits);
        let part = from.session.empty(&[0], DataType::U8, None).unwrap();
        for worker in [0, 1] {
            let half = Tensor::from_slice([128], &bytes[128 * worker..][..128]).unwrap();
            let half = half.view(0, [2, columns], None, dtype).unwrap();
            from.session.debug_set_register(&part, WorkerId(worker as u32), &half).unwrap();
        }
        let reshard = Reshard::new(&from.session, &to.session);
        let reshard = reshard.tensor("x", &part, dtype, [4, columns], Cut::shard(0), Cut::shard(1));
        let x = &reshard.start().wait().unwrap().tensors["x"];
        for worker in 0..4 {
            let content = to.session.debug_get_from_remote(x, WorkerId(worker)).wait().unwrap();
            let Content::Tensor(part) = content else { panic!("{content:?}") };
            let rows = (0..4).flat_map(|row| bytes[64 * row + 16 * worker as usize..][..16].to_vec());
            assert_eq!(part.read().unwrap().bytes().unwrap(), rows.collect::<Vec<_>>(), "{dtype}");
        }
    }
    from.session.shutdown().wait().unwrap();
    to.session.shutdown().wait().unwrap();
}

#[test]
fn what_does_not_fit_is_an_error_before_any_byte_moves() {
    let (two, four) = (start(Launch::Threads, 2), start(Launch::Threads, 4));
    let (from, to) = (&two.session, &four.session);
    let shape = [8, 4];
    let rows = Division { cut: Cut::shard(0), boxes: along(&shape, 0, &[4, 4]) };
    let part = place(from, &shape, &rows, 0);
    let reshard = |from: &DiscoSession, to: &DiscoSession, dtype, shape: &[i64], cuts: (Cut, Cut)| {
        let error = Reshard::new(from, to).tensor("w", &part, dtype, shape, cuts.0, cuts.1).start().wait().unwrap_err();
        assert_eq!(error.cause().kind(), ErrorKind::InvalidArgument, "{error}");
        error.to_string()
    };
    let f32 = DataType::F32;
    let cuts = || (Cut::shard(0), Cut::shard(1));
    for (error, words) in [
        (reshard(from, to, DataType::I32, &shape, cuts()), "has float32 [4, 4] of it, and was to have int32 [4, 4]"),
        (
            reshard(from, to, f32, &[8, 8], cuts()),
            "worker 0 of the session that has the tensors has float32 [4, 4] of it, and was to have float32 [4, 8]",
        ),
        (reshard(from, to, f32, &shape, (Cut::Whole, Cut::Whole)), "was to have float32 [8, 4]"),
        (reshard(from, to, f32, &shape, (Cut::shard(0), Cut::shard(2))), "there is no dimension 2"),
        (reshard(from, to, f32, &[8, 6], (Cut::shard(0), Cut::shard(1))), "does not divide among"),
        (reshard(from, to, f32, &shape, (Cut::lengths(0, [4]), Cut::Whole)), "1 parts for the 2 workers"),
        (
            reshard(from, to, f32, &[9, 4], (Cut::boxes([vec![0..4], vec![4..8]]), Cut::Whole)),
            "no worker has the elements",
        ),
        (reshard(from, from, f32, &shape, cuts()), "within one session"),
        (reshard(to, from, f32, &shape, cuts()), "another session"),
    ] {
        assert!(error.contains(words), "{error}");
    }
    let twice = Reshard::new(from, to).tensor("w", &part, f32, shape, Cut::shard(0), Cut::Whole);
    let twice = twice.tensor("w", &part, f32, shape, Cut::shard(0), Cut::Whole).start().wait().unwrap_err();
    assert!(twice.to_string().contains("two tensors of a reshard have the name 'w'"), "{twice}");
    // No command has failed, and a reshard of nothing is one.
    for session in [from, to] {
        session.sync_all().wait().unwrap();
    }
    let nothing = Reshard::new(from, to).start().wait().unwrap();
    assert!(nothing.tensors.is_empty() && nothing.bytes == 0);
    two.session.shutdown().wait().unwrap();
    four.session.shutdown().wait().unwrap();
}

/// Tensors that are there already are filled, in place, and have to fit.
#[test]
fn tensors_that_are_there_are_filled() {
    let relayed = Launch::Tcp { per_node: 2, data: Data::Relayed };
    for launch in [Launch::Threads, Launch::Processes(NODE), relayed] {
        let (two, four) = (start(launch, 2), start(Launch::Threads, 4));
        let shape = [8, 4];
        let (rows, columns) = (&divisions(&shape, 2)[1], &divisions(&shape, 4)[2]);
        let (part, there) = (place(&two.session, &shape, rows, 0), place(&four.session, &shape, columns, 100));
        let reshard = |wanted: &Division, filled: &DRef| {
            let reshard = Reshard::new(&two.session, &four.session);
            let reshard = reshard.tensor("w", &part, DataType::F32, shape, rows.cut.clone(), wanted.cut.clone());
            reshard.fill(filled).start().wait()
        };
        check(&four.session, &there, &shape, columns, 100, "before");
        reshard(columns, &there).unwrap();
        check(&four.session, &there, &shape, columns, 0, "after");
        let error = reshard(&divisions(&shape, 4)[0], &there).unwrap_err();
        let words =
            "worker 0 of the session that gets the tensors has float32 [8, 1] of it, and was to have float32 [8, 4]";
        assert!(error.to_string().contains(words), "{error}");
        for session in [&two.session, &four.session] {
            session.sync_all().wait().unwrap();
            session.shutdown().wait().unwrap();
        }
    }
}

/// Reshards that are started at once, in both directions, do not wait for each other in a circle.
#[test]
fn reshards_in_both_directions_at_once_come_to_an_end() {
    for launch in [Launch::Threads, Launch::Processes(NODE)] {
        let (two, four) = (start(launch, 2), start(launch, 4));
        std::thread::scope(|scope| {
            for round in 0..4 {
                let (from, to) = if round % 2 == 0 { (&two, &four) } else { (&four, &two) };
                scope.spawn(|| all_cuts(&from.session, &to.session, &[8, 12]));
            }
        });
        two.session.shutdown().wait().unwrap();
        four.session.shutdown().wait().unwrap();
    }
}

/// A worker that fails by itself, for want of a device, ends the reshard for all, and the sessions
/// go on.
#[test]
fn a_worker_that_fails_ends_the_reshard_for_all() {
    let (two, four) = (start(Launch::Processes(NODE), 2), start(Launch::Threads, 4));
    let shape = [8, 4];
    let rows = Division { cut: Cut::shard(0), boxes: along(&shape, 0, &[4, 4]) };
    let part = place(&two.session, &shape, &rows, 0);
    let reshard = Reshard::new(&two.session, &four.session).device("cuda".parse().unwrap());
    let reshard = reshard.tensor("w", &part, DataType::F32, shape, Cut::shard(0), Cut::shard(1));
    let error = reshard.start().wait().unwrap_err().to_string();
    assert!(error.contains("cuda") || error.contains("gets the tensors"), "{error}");
    for session in [&two.session, &four.session] {
        let error = session.sync_all().wait().unwrap_err();
        assert_eq!(error.failures().len() as u32, session.num_workers(), "{error}");
        session.sync_all().wait().unwrap();
    }
    all_cuts(&two.session, &four.session, &shape);
    two.session.shutdown().wait().unwrap();
    four.session.shutdown().wait().unwrap();
}
