//! Weights of safetensors files, loaded over every kind of launch, by workers that can read the
//! files and by workers that cannot.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

use disco::{
    Content, DRef, DiscoSession, Options, Part, Scope, ShardLoader, SocketSession, TensorInfo, WeightFolders, WorkerId,
};
use rpc_core::{DataType, Devices, ErrorKind, LocalSession, Session, Tensor, Value};
use rpc_tests::accelerator::Accelerator;
use rpc_tests::spmd::{self, Data, Launch, Node, readable_folder, registry, runtime, serve};
use safetensors::tensor::{Dtype, TensorView, serialize};
use tempfile::TempDir;

use self::model_folder::ModelFolder;

#[path = "../../../disco/examples/digits/model_folder.rs"]
mod model_folder;

const NODE: &str = env!("CARGO_BIN_EXE_disco_node");

/// Runs the test with one worker, with two, and with four in two groups.
fn everywhere(test: impl Fn(&DiscoSession)) {
    spmd::everywhere(NODE, &[(1, 1), (2, 1), (4, 2)], test);
}

/// Names and shapes of the tensors. Their elements are distinct: 0, 1, …
const SHAPES: [(&str, &[usize]); 5] =
    [("cube", &[4, 8, 12]), ("none", &[0, 4]), ("odd", &[5, 3]), ("scalar", &[]), ("x", &[1024, 520])];

fn elements(shape: &[usize]) -> Vec<f32> {
    (0..shape.iter().product::<usize>()).map(|at| at as f32).collect()
}

fn file<'a>(tensors: impl IntoIterator<Item = (&'a str, &'a [usize])>) -> Vec<u8> {
    let all: Vec<_> =
        tensors.into_iter().map(|(name, shape)| (name, shape, rpc_core::dlpack::to_bytes(&elements(shape)))).collect();
    let views =
        all.iter().map(|(name, shape, data)| (*name, TensorView::new(Dtype::F32, shape.to_vec(), data).unwrap()));
    serialize(views, None).unwrap()
}

/// Writes a model in two files, with an index.
fn write_split(folder: &Path) {
    let (first, second) = SHAPES.split_at(2);
    fs::write(folder.join("1.safetensors"), file(first.iter().copied())).unwrap();
    fs::create_dir_all(folder.join("sub")).unwrap();
    // A tensor that the index does not name does not exist.
    fs::write(folder.join("sub/2.safetensors"), file(second.iter().copied().chain([("unnamed", &[1][..])]))).unwrap();
    let place = |(name, _): &(&str, _)| {
        let place = if first.iter().any(|(known, _)| known == name) { "1.safetensors" } else { "sub/2.safetensors" };
        format!("\"{name}\":\"{place}\"")
    };
    let map: Vec<_> = SHAPES.iter().map(place).collect();
    let index = format!("{{\"metadata\":{{\"total_size\":1}},\"weight_map\":{{{}}}}}", map.join(","));
    fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
}

fn readable() -> TempDir {
    tempfile::tempdir_in(readable_folder()).unwrap()
}

fn fetch(session: &DiscoSession, register: &DRef, worker: u32) -> Tensor {
    match session.debug_get_from_remote(register, WorkerId(worker)).wait().unwrap() {
        Content::Tensor(tensor) => tensor,
        other => panic!("expected a tensor, got {other:?}"),
    }
}

/// Checks that the worker has this part of the tensor.
fn assert_part(session: &DiscoSession, register: &DRef, worker: u32, shape: &[usize], dim: usize, range: Range<usize>) {
    let tensor = fetch(session, register, worker);
    let mut part = shape.to_vec();
    if let Some(length) = part.get_mut(dim) {
        *length = range.len();
    }
    assert_eq!(tensor.shape(), part.iter().map(|length| *length as i64).collect::<Vec<_>>());
    let inner: usize = shape.iter().skip(dim + 1).product();
    let length = shape.get(dim).copied().unwrap_or(1);
    let of_part = |at: &f32| range.contains(&(*at as usize / inner % length.max(1))) || shape.is_empty();
    let expected: Vec<f32> = elements(shape).into_iter().filter(of_part).collect();
    assert!(
        tensor.read().unwrap().as_slice::<f32>().unwrap() == expected,
        "worker {worker}, {shape:?}, {dim} {range:?}"
    );
}

fn whole(session: &DiscoSession, register: &DRef, worker: u32, shape: &[usize]) {
    assert_part(session, register, worker, shape, 0, 0..shape.first().copied().unwrap_or(1));
}

/// Loads all tensors by each operation, and compares the parts with the expected ones.
fn check(session: &DiscoSession, loader: &ShardLoader) {
    let names: Vec<_> = loader.tensors().map(|(name, info)| (name.to_owned(), info.shape.clone())).collect();
    let expected = SHAPES.map(|(name, shape)| (name.to_owned(), shape.iter().map(|length| *length as i64).collect()));
    assert_eq!(names, expected);
    let (n, per_group) = (session.num_workers(), session.num_workers() / session.num_groups());
    let all = loader.load_all(|_, _| Some(Part::Whole), None).unwrap();
    let dims: Vec<_> = (0..3).map(|dim| loader.load("cube", Part::shard(dim), None).unwrap()).collect();
    let rule =
        |_: &str, info: &TensorInfo| (info.shape.len() == 2 && info.shape[0] % 2 == 0).then(|| Part::shard_in_group(1));
    let in_group = loader.load_all(rule, None).unwrap();
    assert_eq!(in_group.keys().collect::<Vec<_>>(), ["none", "x"]);
    let rows = loader.load("odd", Part::with("rows"), None).unwrap();
    let names = loader.load("x", Part::with("name_of_weight"), None).unwrap();
    session.sync_all().wait().unwrap();
    for worker in 0..n {
        for (name, shape) in SHAPES {
            whole(session, &all[name], worker, shape);
        }
        for (dim, register) in dims.iter().enumerate() {
            let each = [4, 8, 12][dim] / n as usize;
            let rank = worker as usize;
            assert_part(session, register, worker, &[4, 8, 12], dim, rank * each..(rank + 1) * each);
        }
        let (each, rank) = (520 / per_group as usize, (worker % per_group) as usize);
        assert_part(session, &in_group["x"], worker, &[1024, 520], 1, rank * each..(rank + 1) * each);
        let (w, n) = (worker as usize, n as usize);
        assert_part(session, &rows, worker, &[5, 3], 0, 5 * w / n..5 * (w + 1) / n);
        let told = session.debug_get_from_remote(&names, WorkerId(worker)).wait().unwrap();
        let Content::Value(Value::Str(told)) = told else { panic!("{told:?}") };
        assert_eq!(told, "x float32 [1024, 520] cpu:0");
    }
}

#[test]
fn workers_read_their_parts_wherever_they_are() {
    let folder = readable();
    write_split(folder.path());
    everywhere(|session| {
        let loader = ShardLoader::open(session, folder.path()).wait().unwrap();
        assert_eq!(loader.unreadable(), []);
        check(session, &loader);
    });
}

#[test]
fn the_controller_sends_files_that_no_worker_can_read() {
    let folder = readable();
    write_split(folder.path());
    everywhere(|session| {
        let loader = ShardLoader::open_at(session, folder.path(), readable_folder().join("nobody")).wait().unwrap();
        assert_eq!(loader.unreadable().len(), 2 * session.num_workers() as usize);
        let first = &loader.unreadable()[0];
        assert_eq!((first.worker, &first.file), (WorkerId(0), &folder.path().join("1.safetensors")));
        assert!(first.reason.contains("nobody/1.safetensors"), "{}", first.reason);
        check(session, &loader);
    });
}

/// Each axis of a mesh divides a tensor by itself, whether the workers or the controller read it.
#[test]
fn axes_of_a_mesh_divide_tensors() {
    let folder = readable();
    write_split(folder.path());
    let fixture = Launch::Threads.start(4, 1);
    let session = &fixture.session;
    let mesh = session.mesh(&[("dp", 2), ("tp", 2)]).wait().unwrap();
    let nobody = readable_folder().join("nobody");
    for folder_of_workers in [folder.path(), &nobody] {
        let loader = ShardLoader::open_at(session, folder.path(), folder_of_workers).wait().unwrap();
        for (at, axis) in [(0, "dp"), (1, "tp")] {
            let part = Part::Shard { dim: 1, scope: mesh.group(axis).unwrap() };
            let x = loader.load("x", part, None).unwrap();
            for worker in 0..4 {
                let rank = mesh.coordinates(WorkerId(worker)).unwrap()[at] as usize;
                assert_part(session, &x, worker, &[1024, 520], 1, 260 * rank..260 * (rank + 1));
            }
        }
    }
    session.shutdown().wait().unwrap();
}

/// Starts nodes of this process, of which some may read files.
fn nodes(readers: &[bool], groups: u32, data: Data) -> DiscoSession {
    let sessions = readers.iter().map(|may_read| {
        let session = LocalSession::builder(registry());
        Session::new(if *may_read { session.extension(Arc::new(WeightFolders::anywhere())) } else { session }.build())
    });
    let mut options = Options::default();
    data.set(readers.len() as u32, &mut options);
    DiscoSession::over(sessions, 1, groups, options).wait().unwrap()
}

#[test]
fn workers_that_cannot_read_get_their_parts_from_those_that_can() {
    let folder = tempfile::tempdir().unwrap();
    write_split(folder.path());
    for data in [Data::Shared, Data::Tcp, Data::Relayed] {
        for readers in [[true, false, true, false], [false, true, true, true], [false, false, false, true]] {
            eprintln!("{data:?}, {readers:?}");
            let session = nodes(&readers, 2, data);
            let loader = ShardLoader::open(&session, folder.path()).wait().unwrap();
            let told: Vec<_> = loader.unreadable().iter().map(|one| one.worker).collect();
            let unable = (0..).zip(readers).filter(|(_, able)| !able).map(|(worker, _)| WorkerId(worker));
            // One tensor of the first file, and one of the second.
            let unable: Vec<_> = unable.collect();
            assert_eq!(told, [&unable[..], &unable].concat());
            let says_why = |reason: &str| reason.contains("may read no files") && reason.contains("--weights");
            assert!(loader.unreadable().iter().all(|one| says_why(&one.reason)));
            check(&session, &loader);
            session.shutdown().wait().unwrap();
        }
    }
}

/// Checks that a file of the same name must have the same length and the same header.
#[test]
fn another_file_at_the_same_path_is_not_loaded() {
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let write = |folder: &TempDir, content: &[u8]| fs::write(folder.path().join("model.safetensors"), content).unwrap();
    write(&here, &file([("x", &[2, 2][..])]));
    let cases = [file([("x", &[2, 3][..])]), file([("y", &[2, 2][..])]), b"no weights at all".to_vec()];
    let fixture = Launch::Threads.start(2, 1);
    let session = &fixture.session;
    for other in cases {
        write(&there, &other);
        let loader = ShardLoader::open_at(session, here.path(), there.path()).wait().unwrap();
        assert_eq!(loader.unreadable().len(), 2);
        let reason = &loader.unreadable()[1].reason;
        // No element of the other file is loaded.
        let path = there.path().canonicalize().unwrap().join("model.safetensors");
        let expected = "another file than the controller's: its length or its header is different";
        assert_eq!(*reason, format!("{}: {expected}", path.display()));
        let x = loader.load("x", Part::shard(1), None).unwrap();
        session.sync_all().wait().unwrap();
        assert_part(session, &x, 1, &[2, 2], 1, 1..2);
    }
    // A file with other elements cannot be told apart.
    let mut other = fs::read(here.path().join("model.safetensors")).unwrap();
    *other.last_mut().unwrap() ^= 1;
    write(&there, &other);
    assert_eq!(ShardLoader::open_at(session, here.path(), there.path()).wait().unwrap().unreadable(), []);
    session.shutdown().wait().unwrap();
}

#[test]
fn bad_weights_are_refused_at_once() {
    let folder = readable();
    write_split(folder.path());
    let fixture = Launch::Threads.start(4, 2);
    let session = &fixture.session;
    let loader = ShardLoader::open(session, folder.path()).wait().unwrap();
    let refused = |name: &str, part| loader.load(name, part, None).unwrap_err().to_string();
    assert!(refused("unnamed", Part::Whole).contains("no tensor 'unnamed' among the 5"));
    let told = refused("odd", Part::shard(0));
    for words in ["'odd'", "float32 [5, 3]", "2.safetensors", "does not divide among 4 workers", "Part::With"] {
        assert!(told.contains(words), "{told}");
    }
    assert!(refused("odd", Part::shard_in_group(0)).contains("among 2 workers"));
    assert!(refused("cube", Part::shard(3)).contains("there is no dimension 3"));
    let error = loader.load_all(|_, _| Some(Part::shard(0)), None).unwrap_err();
    assert_eq!(error.cause().kind(), ErrorKind::InvalidArgument);
    // No command was issued.
    session.sync_all().wait().unwrap();

    // Errors of files name the file.
    let refused = |path: &Path| ShardLoader::open(session, path).wait().unwrap_err();
    let nowhere = folder.path().join("nowhere");
    assert_eq!(refused(&nowhere).cause().kind(), ErrorKind::NotFound);
    fs::write(&nowhere, b"123456789").unwrap();
    let told = refused(&nowhere).to_string();
    assert!(told.contains("nowhere: it has 9 bytes"), "{told}");
    fs::write(folder.path().join("sub/2.safetensors"), file([("x", &[1][..])])).unwrap();
    let told = refused(folder.path()).to_string();
    assert!(told.contains("sub/2.safetensors: the index says that tensor 'odd' is there"), "{told}");
    fs::remove_file(folder.path().join("1.safetensors")).unwrap();
    let told = refused(folder.path()).to_string();
    assert!(told.contains("1.safetensors: No such file"), "{told}");
    session.shutdown().wait().unwrap();
}

/// A failure on a worker poisons the tensors that should have been loaded there, and names worker,
/// tensor and file. Workers that wait for this worker fail, too, and the collectives go on.
#[test]
fn a_missing_or_changed_file_fails_the_workers_that_read_it() {
    for data in [Data::Shared, Data::Tcp] {
        let folder = tempfile::tempdir().unwrap();
        write_split(folder.path());
        let session = nodes(&[false, true, true], 1, data);
        let loader = ShardLoader::open(&session, folder.path()).wait().unwrap();
        let path = folder.path().join("1.safetensors");
        fs::rename(&path, folder.path().join("elsewhere")).unwrap();
        let cube = loader.load("cube", Part::Whole, None).unwrap();
        let x = loader.load("x", Part::Whole, None).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        let failures = error.failures();
        assert_eq!(failures.len(), 3, "{error}");
        for (worker, failure) in (0..).zip(failures) {
            let told = failure.to_string();
            assert_eq!(failure.worker, WorkerId(worker));
            assert!(told.contains("tensor 'cube'") && told.contains("1.safetensors: No such file"), "{told}");
        }
        assert!(failures[0].cause.message().contains("worker 1"), "{error}");
        session.debug_get_from_remote(&cube, WorkerId(2)).wait().unwrap_err();
        whole(&session, &x, 0, &[1024, 520]);

        // A file that is written again may be another model.
        fs::write(&path, fs::read(folder.path().join("elsewhere")).unwrap()).unwrap();
        loader.load("cube", Part::Whole, None).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        assert!(error.to_string().contains("changed since its header was read"), "{error}");
        let again = ShardLoader::open(&session, folder.path()).wait().unwrap();
        let cube = again.load("cube", Part::shard_in_group(0), None);
        assert!(cube.unwrap_err().to_string().contains("among 3 workers"));
        check_broadcast(&session);
        session.shutdown().wait().unwrap();
    }
}

/// Returns true if collectives work.
fn check_broadcast(session: &DiscoSession) {
    let x = session.broadcast(&Tensor::from_slice([1], &[7.0_f32]).unwrap(), None, Scope::World).unwrap();
    assert_eq!(fetch(session, &x, session.num_workers() - 1).read().unwrap().as_slice::<f32>().unwrap(), [7.0]);
    session.sync_all().wait().unwrap();
}

#[test]
fn a_function_that_fails_or_is_not_there_fails_on_its_worker() {
    let folder = readable();
    write_split(folder.path());
    let fixture = Launch::Tcp { per_node: 1, data: Data::Shared }.start(2, 1);
    let session = &fixture.session;
    let loader = ShardLoader::open(session, folder.path()).wait().unwrap();
    loader.load("x", Part::with("no_such_function"), None).unwrap();
    let told = session.sync_all().wait().unwrap_err().to_string();
    assert!(told.contains("worker 1") && told.contains("'x'") && told.contains("'no_such_function'"), "{told}");
    // One worker expects another tensor.
    loader.load("x", Part::with("add"), None).unwrap();
    let told = session.sync_all().wait().unwrap_err().to_string();
    assert!(told.contains("function 'add'"), "{told}");
    loader.load("scalar", Part::with("rows"), None).unwrap();
    let told = session.sync_all().wait().unwrap_err().to_string();
    assert!(told.contains("function 'rows'"), "{told}");
    session.shutdown().wait().unwrap();
}

/// The progress counts the bytes of all workers. It grows up to the whole, from each kind of
/// source.
#[test]
fn progress_ends_at_all_requested_bytes() {
    let folder = readable();
    write_split(folder.path());
    let expected = |session: &DiscoSession| {
        let sizes = SHAPES.map(|(_, shape)| shape.iter().product::<usize>() as u64 * 4);
        sizes.iter().sum::<u64>() * u64::from(session.num_workers()) + 2 * 1024 * 520 * 4
    };
    let run = |session: &DiscoSession, workers: &Path| {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let loader = ShardLoader::open_at(session, folder.path(), workers).wait().unwrap();
        let loader = loader.progress({
            let seen = Arc::clone(&seen);
            move |done, total| seen.lock().unwrap().push((done, total))
        });
        let _all = loader.load_all(|_, _| Some(Part::Whole), None).unwrap();
        let _x = loader.load("x", Part::shard_in_group(0), None).unwrap();
        session.sync_all().wait().unwrap();
        let seen = std::mem::take(&mut *seen.lock().unwrap());
        assert!(seen.is_sorted(), "{seen:?}");
        assert_eq!(seen.last(), Some(&(expected(session), expected(session))));
        // Progress is reported no more once the operation is dropped.
        drop(loader);
    };
    for launch in
        [Launch::Threads, Launch::Processes(NODE), Launch::NodeOfProcesses(NODE), Launch::Line { data: Data::Shared }]
    {
        let fixture = launch.start(4, 2);
        run(&fixture.session, folder.path());
        run(&fixture.session, &folder.path().join("nowhere"));
        fixture.session.shutdown().wait().unwrap();
    }
    let session = nodes(&[false, true, false, true], 2, Data::Shared);
    run(&session, folder.path());
    session.shutdown().wait().unwrap();
}

/// Starts a node of this process whose workers have devices with memory that the processor cannot
/// reach.
fn with_accelerator(accelerator: Accelerator, may_read: bool) -> Session {
    let session = LocalSession::builder(registry()).devices(Devices::new().with(Arc::new(accelerator)));
    Session::new(if may_read { session.extension(Arc::new(WeightFolders::anywhere())) } else { session }.build())
}

/// Parts are loaded into memory that the processor cannot reach, whichever worker reads the file.
#[test]
fn parts_come_to_devices_that_satisfy_a_constraint() {
    let (folder, nowhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_split(folder.path());
    let nodes = [true, false].map(|may_read| with_accelerator(Accelerator::default(), may_read));
    let session = DiscoSession::over(nodes, 1, 1, Options::default()).wait().unwrap();
    for workers in [folder.path(), nowhere.path()] {
        let loader = ShardLoader::open_at(&session, folder.path(), workers).wait().unwrap();
        let readers = 2 * usize::from(workers == folder.path());
        assert_eq!(loader.unreadable().len(), 4 - readers);
        for wanted in ["ext_dev:1,scope=fast", "ext_dev,target=ext_dev -rev=2", "cpu"] {
            let load = |name: &str, part| loader.load(name, part, wanted.parse().ok()).unwrap();
            let (all, shard) = (load("odd", Part::Whole), load("cube", Part::shard(1)));
            let (rows, name) = (load("odd", Part::with("rows")), load("x", Part::with("name_of_weight")));
            session.sync_all().wait().unwrap();
            for worker in [0, 1] {
                whole(&session, &all, worker, &[5, 3]);
                assert_part(&session, &shard, worker, &[4, 8, 12], 1, 4 * worker as usize..4 * (worker as usize + 1));
                let divided = 5 * worker as usize / 2..5 * (worker as usize + 1) / 2;
                assert_part(&session, &rows, worker, &[5, 3], 0, divided);
                let told = session.debug_get_from_remote(&name, WorkerId(worker)).wait().unwrap();
                let Content::Value(Value::Str(told)) = told else { panic!("{told:?}") };
                let device = [("ext_dev:1", "ext_dev:1"), ("ext_dev,", "ext_dev:0"), ("cpu", "cpu:0")];
                let device = device.iter().find(|(begin, _)| wanted.starts_with(begin)).unwrap().1;
                assert!(told.ends_with(device), "{told}");
            }
        }
        // If no worker has such a device, all fail, and no worker waits for another one without
        // end.
        loader.load("odd", Part::Whole, "cuda".parse().ok()).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        assert_eq!(error.failures().len(), 2);
        assert!(error.to_string().contains("no device is cuda; there are cpu:0"), "{error}");
    }
    let x = session.empty(&[3], DataType::F32, "ext_dev:1,scope=fast".parse().ok()).unwrap();
    assert_eq!(fetch(&session, &x, 1).shape(), [3]);
    session.shutdown().wait().unwrap();
}

/// Shape of a tensor of bytes that takes several copies to a device, and whose rows do not divide
/// the size of a copy.
const LARGE: [usize; 2] = [40_000, 1000];

/// Writes the tensor `large` to the file, and returns its bytes.
fn write_large(path: &Path) -> Vec<u8> {
    let bytes: Vec<u8> = (0..LARGE[0] * LARGE[1]).map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect();
    let view = TensorView::new(Dtype::U8, LARGE.to_vec(), &bytes).unwrap();
    fs::write(path, serialize([("large", view)], None).unwrap()).unwrap();
    bytes
}

/// A part of any size needs little host memory on its way to other memory.
#[test]
fn large_parts_are_copied_to_devices_in_pieces() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let bytes = write_large(&path);
    let copies = Arc::new(Mutex::new(Vec::new()));
    let nodes = [0, 1].map(|_| {
        let copies = Arc::clone(&copies);
        let watch = move |at, len| {
            copies.lock().unwrap().push((at, len));
            Ok(())
        };
        with_accelerator(Accelerator::watched(watch), true)
    });
    let session = DiscoSession::over(nodes, 1, 1, Options::default()).wait().unwrap();
    let last = Arc::new(Mutex::new((0, 0)));
    let seen = Arc::clone(&last);
    let loader = ShardLoader::open(&session, &path).wait().unwrap();
    let loader = loader.progress(move |done, total| *seen.lock().unwrap() = (done, total));
    let columns = |range: Range<usize>| -> Vec<u8> {
        bytes.chunks_exact(LARGE[1]).flat_map(|row| &row[range.clone()]).copied().collect()
    };
    let half = bytes.len() / 2;
    let cases = [
        (Part::Whole, [bytes.clone(), bytes.clone()]),
        (Part::shard(0), [bytes[..half].to_vec(), bytes[half..].to_vec()]),
        (Part::shard(1), [columns(0..LARGE[1] / 2), columns(LARGE[1] / 2..LARGE[1])]),
        (Part::with("rows"), [bytes[..half].to_vec(), bytes[half..].to_vec()]),
    ];
    for (part, expected) in cases {
        let loaded = loader.load("large", part.clone(), "ext_dev:1,scope=fast".parse().ok()).unwrap();
        session.sync_all().wait().unwrap();
        let copies = std::mem::take(&mut *copies.lock().unwrap());
        assert!(copies.iter().all(|(_, len)| *len <= 8 << 20), "{part:?}: {copies:?}");
        let sum: usize = copies.iter().map(|(_, len)| len).sum();
        assert_eq!(sum, expected.iter().map(Vec::len).sum::<usize>(), "{part:?}: {copies:?}");
        for (worker, expected) in (0..).zip(&expected) {
            let tensor = fetch(&session, &loaded, worker);
            assert!(tensor.read().unwrap().bytes().unwrap() == expected, "{part:?} on worker {worker}");
        }
    }
    let (done, total) = *last.lock().unwrap();
    assert_eq!(done, total);
    session.shutdown().wait().unwrap();
}

/// If reading or copying fails in the middle, both end. The error names the tensor, and no more is
/// read.
#[test]
fn a_failed_copy_to_a_device_is_reported_and_ends_the_reading() {
    type Fault = fn(&Path) -> rpc_core::Result<()>;
    let cut_off: Fault = |path| {
        fs::File::options().write(true).open(path).unwrap().set_len(1000).unwrap();
        Ok(())
    };
    let refuse: Fault = |_| Err(rpc_core::RpcError::new(ErrorKind::DeviceUnavailable, "told to refuse"));
    let panic: Fault = |_| panic!("told to panic");
    for (fault, words) in [
        (cut_off, &["tensor 'large'", "model.safetensors: it is shorter than its header says; it was cut off"][..]),
        (refuse, &["tensor 'large'", "told to refuse"]),
        (panic, &["told to panic"]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().canonicalize().unwrap().join("model.safetensors");
        let _ = write_large(&path);
        let at_fault = path.clone();
        let watch = move |at, _| if at == 0 { fault(&at_fault) } else { Ok(()) };
        let node = with_accelerator(Accelerator::watched(watch), true);
        let session = DiscoSession::over([node], 1, 1, Options::default()).wait().unwrap();
        let loader = ShardLoader::open(&session, &path).wait().unwrap();
        let loaded = loader.load("large", Part::Whole, "ext_dev".parse().ok()).unwrap();
        let error = session.sync_all().wait().unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
        session.debug_get_from_remote(&loaded, WorkerId(0)).wait().unwrap_err();
        // The file is closed.
        let open = fs::read_dir("/proc/self/fd").unwrap().filter_map(|file| fs::read_link(file.ok()?.path()).ok());
        assert!(!open.into_iter().any(|file| file == path));
        check_broadcast(&session);
        session.shutdown().wait().unwrap();
    }
}

/// Progress does not wait for tensors that have not been issued.
#[test]
fn progress_waits_only_for_issued_tensors() {
    let (folder, nowhere) = (readable(), tempfile::tempdir().unwrap());
    write_split(folder.path());
    let session = Launch::Threads.start(2, 1);
    let last = Arc::new(Mutex::new((0, 0)));
    let seen = Arc::clone(&last);
    let loader = ShardLoader::open_at(&session.session, folder.path(), nowhere.path()).wait().unwrap();
    let loader = loader.progress(move |done, total| *seen.lock().unwrap() = (done, total));
    fs::remove_file(folder.path().join("1.safetensors")).unwrap();
    let issued = loader.load_all(|_, _| Some(Part::Whole), None).unwrap_err().to_string();
    assert!(issued.contains("1.safetensors"), "{issued}");
    session.session.sync_all().wait().unwrap();
    let (done, total) = *last.lock().unwrap();
    assert_eq!(done, total);
    session.session.shutdown().wait().unwrap();
}

/// Opening needs many commands, and waits for room in the window like other operations.
#[test]
fn a_small_window_delays_opening_and_nothing_fails() {
    let folder = readable();
    write_split(folder.path());
    let mut options = disco::Options::default();
    options.window = 512;
    let session = disco::ThreadedSession::new(12, 1).registry(registry()).options(options).start().wait().unwrap();
    let open = || runtime().block_on(async { ShardLoader::open(&session, folder.path()).await });
    for loader in [ShardLoader::open(&session, folder.path()).wait(), open()] {
        let x = loader.unwrap().load("x", Part::Whole, None).unwrap();
        session.sync_all().wait().unwrap();
        whole(&session, &x, 11, &[1024, 520]);
    }
    session.shutdown().wait().unwrap();
}

/// The folders that a server lets its workers read apply to workers in processes of their own, too.
#[test]
fn processes_of_a_node_read_what_the_node_may() {
    let (inside, outside) = (readable(), tempfile::tempdir().unwrap());
    let node = Node::start(NODE);
    let mut options = Options::default();
    options.hosting = disco::Hosting::Processes;
    let session = SocketSession::new([node.address()], 2, 1).options(options).start().wait().unwrap();
    for (folder, unable) in [(&inside, 0), (&outside, 4)] {
        write_split(folder.path());
        let loader = ShardLoader::open(&session, folder.path()).wait().unwrap();
        assert_eq!(loader.unreadable().len(), unable);
        assert!(loader.unreadable().iter().all(|one| one.reason.contains("may not read there, only in the folders")));
        check(&session, &loader);
    }
    session.shutdown().wait().unwrap();
}

/// Elements of each size, also two in a byte.
#[test]
fn elements_of_all_types_are_unchanged() {
    let folder = readable();
    let types = [
        (Dtype::BOOL, 8),
        (Dtype::I8, 8),
        (Dtype::U16, 16),
        (Dtype::BF16, 16),
        (Dtype::F16, 16),
        (Dtype::I64, 64),
        (Dtype::C64, 64),
        (Dtype::F8_E4M3, 8),
        (Dtype::F8_E5M2, 8),
        (Dtype::F4, 4),
    ];
    let bytes: Vec<u8> = (0..=255).collect();
    let tensors: BTreeMap<String, _> = types
        .into_iter()
        .map(|(dtype, bits)| (format!("{dtype:?}"), TensorView::new(dtype, vec![4, 8 * 64 / bits], &bytes).unwrap()))
        .collect();
    fs::write(folder.path().join("model.safetensors"), serialize(&tensors, None).unwrap()).unwrap();
    let network = runtime();
    let (addresses, _servers) = serve(&network, 2);
    let session = SocketSession::new(addresses, 1, 1).start().wait().unwrap();
    for workers in [folder.path(), Path::new("/nowhere")] {
        let loader = ShardLoader::open_at(&session, folder.path(), workers).wait().unwrap();
        let parts = loader.load_all(|_, _| Some(Part::shard(0)), None).unwrap();
        session.sync_all().wait().unwrap();
        for (name, part) in &parts {
            let part = fetch(&session, part, 1);
            assert_eq!(part.dtype(), loader.tensor(name).unwrap().dtype);
            assert_eq!(part.read().unwrap().bytes().unwrap(), &bytes[128..], "{name}");
        }
        assert_eq!(loader.tensor("F4").unwrap().dtype.to_string().parse::<DataType>().unwrap().bits, 4);
    }
    session.shutdown().wait().unwrap();
}

/// Regression: each killed `weights` example left 22 MiB in the folder for temporary files.
#[test]
fn the_folder_of_a_killed_example_is_removed_at_the_next_start() {
    let parent = tempfile::tempdir().unwrap();
    let lives = ModelFolder::create_in(parent.path()).unwrap();
    // A killed program's folder is one whose lock the system has freed.
    let killed = parent.path().join("rpc-model-killed");
    fs::create_dir(&killed).unwrap();
    fs::copy(lives.path().join("lock"), killed.join("lock")).unwrap();
    fs::write(killed.join("model.safetensors"), [0; 64]).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    fs::copy(killed.join("lock"), elsewhere.path().join("lock")).unwrap();
    std::os::unix::fs::symlink(elsewhere.path(), parent.path().join("rpc-model-link")).unwrap();
    for (name, is_locked) in [("rpc-model-begun", false), ("others", true)] {
        fs::create_dir(parent.path().join(name)).unwrap();
        fs::write(parent.path().join(name).join("lock"), if is_locked { "locked" } else { "" }).unwrap();
    }

    let next = ModelFolder::create_in(parent.path()).unwrap();
    assert!(!killed.exists());
    assert!(lives.path().exists() && next.path() != lives.path());
    for name in ["rpc-model-link", "rpc-model-begun", "others"] {
        assert!(parent.path().join(name).join("lock").exists(), "{name}");
    }
    drop((lives, next));
    assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 3);
}
