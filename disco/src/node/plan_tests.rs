//! Tests with controllers whose plans name what is none of their session's: a node opens none of
//! it, and answers alike whatever is there.

use std::fs::File;
use std::io::Read;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use rpc_core::{Device, DeviceType, ErrorKind, Packed, SessionLimits};
use serde_json::{Value as Json, json};

use super::raw_controller::{RawController, session, set_up};
use crate::ccl::communicators::CollectiveTimeouts;
use crate::ccl::host;
use crate::wire::command::Command;
use crate::wire::plan::{JoinPlan, Layout, Plan};
use crate::wire::set_up::{CommandPosition, SetUp};

const KEY: [u8; 32] = [7; 32];
const NONCE: [u8; 16] = [1; 16];

/// Returns the error of a worker whose controller plans `join`: of worker 1 of 2, which dials
/// worker 0. Worker 1 listens.
fn refusal(join: &Json) -> String {
    let mut controller = RawController::of_worker(1, 2, u64::MAX);
    controller.listen().unwrap();
    let timeouts = timeouts(Duration::from_millis(200));
    let plan = Plan {
        epoch: 0,
        join: JoinPlan::Threads,
        nccl: false,
        timeouts,
        devices: Vec::new(),
        is_tentative: false,
        meshes: Vec::new(),
    };
    let mut plan = serde_json::to_value(&plan).unwrap();
    plan["join"] = join.clone();
    controller.submit([Command::InitCcl { plan: Packed::encode(&plan).unwrap() }]).unwrap();
    let mut failures = controller.sync();
    let failure = failures.pop().unwrap();
    assert!(failures.is_empty());
    failure.cause.to_string()
}

fn timeouts(join: Duration) -> CollectiveTimeouts {
    CollectiveTimeouts { entry: None, stall: Duration::MAX, join, direct: Duration::MAX }
}

/// Returns an address as messages have it.
fn tcp(address: SocketAddr) -> Json {
    Packed::encode(&address).unwrap().decode().unwrap()
}

/// Returns a plan in which worker 0 has this address.
fn sockets(worker_0: &Json) -> Json {
    let location = json!({"machine": 0, "is_local": false});
    let own = tcp(SocketAddr::from(([127, 0, 0, 1], 1)));
    let world = [worker_0, &own];
    json!({"Sockets": {"key": KEY, "encrypt": false, "world": world, "groups": [], "locations": [location, location]}})
}

/// Regression: a controller learned from errors where something listens.
#[test]
fn open_and_closed_ports_are_not_told_apart() {
    let open = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let rude = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let (open_at, rude_at) = (open.local_addr().unwrap(), rude.local_addr().unwrap());
    // Bound, so that no other program takes the port, and not listened on.
    let closed = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    closed.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let closed_at = closed.local_addr().unwrap().as_socket().unwrap();
    // It answers with what is no handshake. Ends with the test's process.
    std::thread::spawn(move || {
        for stream in rude.incoming() {
            _ = stream.and_then(|mut stream| std::io::Write::write_all(&mut stream, &[9; 64]));
        }
    });
    let ask = |address: SocketAddr| {
        move || {
            let told = refusal(&sockets(&tcp(address)));
            assert!(told.contains(&address.to_string()), "{told}");
            told.replace(&address.to_string(), "ADDRESS")
        }
    };
    let told = [open_at, rude_at, closed_at].map(|address| std::thread::spawn(ask(address)));
    let told = told.map(|one| one.join().unwrap());
    assert!(told[0].contains("has not proven there in time that it belongs to this session"), "{}", told[0]);
    assert_eq!(told[0], told[1]);
    assert_eq!(told[0], told[2]);
}

/// Regression: a loader was asked for a module on whatever device a controller named.
#[test]
fn modules_are_loaded_on_devices_of_the_session_alone() {
    let mut controller = RawController::new(u64::MAX);
    let load = |device| Command::LoadModule { to: 0, path: "no module".to_owned(), device };
    for index in [5, -1] {
        controller.submit([load(Some(Device::new(DeviceType::CUDA, index)))]).unwrap();
        controller.submit([load(Some(Device::new(DeviceType::CPU, index)))]).unwrap();
        let failures = controller.sync();
        assert_eq!(failures.len(), 2, "{failures:?}");
        for (failure, kind) in failures.iter().zip(["cuda", "cpu"]) {
            assert_eq!(failure.cause.kind(), ErrorKind::DeviceUnavailable, "{failure}");
            assert!(failure.cause.message().contains(&format!("no device {kind}:{index}, but cpu:0")), "{failure}");
        }
    }
    controller.submit([load(None), load(Some(Device::cpu()))]).unwrap();
    let kinds: Vec<ErrorKind> = controller.sync().iter().map(|failure| failure.cause.kind()).collect();
    assert_eq!(kinds, [ErrorKind::NotFound; 2]);
}

/// Regression: the same for sockets in the file system, of which no plan needs any.
#[test]
fn paths_of_sockets_are_not_dialled() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("open");
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let told = ["open", "missing"].map(|name| refusal(&sockets(&json!({"Unix": folder.path().join(name)}))));
    assert_eq!(told[0], told[1]);
    assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "it was dialled");
}

/// Returns a plan with a segment that this process, or another one, has open as `descriptor`.
fn segment(process: u32, descriptor: i32) -> Json {
    json!({"Segments": [{"process": process, "descriptor": descriptor, "nonce": NONCE, "size": 2, "epoch": 0}]})
}

/// Regression: a controller made a node open any path, and learned size and permissions from the
/// error.
#[test]
fn files_that_are_no_segments_are_not_told_apart() {
    let secret = tempfile::NamedTempFile::new().unwrap();
    let of_right_size = tempfile::tempfile().unwrap();
    let (real, _memory) = memory_file();
    of_right_size.set_len(real.metadata().unwrap().len()).unwrap();
    let (mut pipe, _writer) = std::io::pipe().unwrap();
    let own = std::process::id();
    let path = json!({"Segments": [{"path": secret.path(), "nonce": NONCE, "size": 2, "epoch": 0}]});
    let malformed = json!({"Segments": [{"path": "/nowhere", "nonce": NONCE, "size": 2, "epoch": 0}]});
    assert_eq!(refusal(&path), refusal(&malformed));

    let told = refusal(&segment(own, i32::MAX));
    assert!(told.contains("shared memory cannot be joined"), "{told}");
    let files = [of_right_size.as_raw_fd(), secret.as_file().as_raw_fd(), pipe.as_raw_fd(), real.as_raw_fd()];
    for descriptor in files {
        assert_eq!(refusal(&segment(own, descriptor)), told);
    }
    assert_eq!(refusal(&segment(1, 0)), told);
    drop(_writer);
    assert_eq!(pipe.read(&mut [0]).unwrap(), 0);
}

/// Returns a plan that lets workers join for ever, as far as the controller may decide.
fn endless(join: &Json, nccl: bool) -> Packed {
    let timeouts = timeouts(Duration::MAX);
    let plan = Plan {
        epoch: 0,
        join: JoinPlan::Threads,
        nccl,
        timeouts,
        devices: Vec::new(),
        is_tentative: false,
        meshes: Vec::new(),
    };
    let mut plan = serde_json::to_value(&plan).unwrap();
    plan["join"] = join.clone();
    Packed::encode(&plan).unwrap()
}

/// Returns true if this process has a thread of the worker.
fn has_thread(worker: u32) -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.into_iter().any(|name| name.trim() == format!("disco-{worker}"))
}

/// Waits until the worker's thread has ended.
fn await_end_of_thread(worker: u32) {
    let within = Instant::now() + Duration::from_secs(60);
    while has_thread(worker) {
        assert!(Instant::now() < within, "worker {worker} outlives its session");
        std::thread::yield_now();
    }
}

/// Sends the plan, and returns when the worker is about to execute it.
fn begin(controller: &mut RawController, plan: Packed) {
    controller.sync_before([Command::InitCcl { plan }]);
}

/// Regression: a worker looked for others until the end of the controller's time limit, also after
/// the session, whether it dialled them or waited for them.
#[test]
fn a_worker_that_looks_for_others_ends_with_its_session() {
    let (worker, size) = (20, 22);
    let mut controller = RawController::of_worker(worker, size, u64::MAX);
    controller.listen().unwrap();
    let other = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let addresses = vec![tcp(other.local_addr().unwrap()); size as usize];
    let locations = vec![json!({"machine": 0, "is_local": false}); size as usize];
    let join =
        json!({"Sockets": {"key": KEY, "encrypt": false, "world": addresses, "groups": [], "locations": locations}});
    begin(&mut controller, endless(&join, false));
    // It dials, and later attempts are refused at once.
    drop(other.accept().unwrap());
    drop(other);
    assert!(has_thread(worker));
    drop(controller);
    await_end_of_thread(worker);
}

/// Regression: the same in a segment that no other process joins.
#[test]
fn a_worker_alone_in_a_segment_ends_with_its_session() {
    let (worker, size) = (3, 5);
    let offer = host::Offer::new(size, &host::Options::default()).unwrap();
    let mut controller = RawController::of_worker(worker, size as u32, u64::MAX);
    let join = json!({"Segments": [offer.ticket()]});
    begin(&mut controller, endless(&join, false));
    drop(controller);
    await_end_of_thread(worker);
}

/// Regression: the same in the collectives by which ranks agree on NCCL, which no abort reached.
#[test]
fn a_worker_that_joins_nccl_alone_ends_with_its_session() {
    let worker = 4;
    let offer = host::Offer::new(5, &host::Options::default()).unwrap();
    let mut controller = RawController::of_worker(worker, 5, u64::MAX);
    begin(&mut controller, endless(&json!({"Segments": [offer.ticket()]}), true));
    // The others join the segment, and do no more.
    let join = |rank| offer.ticket().join(crate::ccl::Rank(rank), &host::Options::default()).unwrap();
    let _others: Vec<_> = std::thread::scope(|scope| {
        let joining: Vec<_> = (0..worker).map(|rank| scope.spawn(move || join(rank))).collect();
        joining.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert!(has_thread(worker));
    drop(controller);
    await_end_of_thread(worker);
}

/// Opens a host with all workers of a session, which are threads.
fn threads(count: u32, max_memory: u64) -> RawController {
    let limits = SessionLimits { max_memory, ..SessionLimits::default() };
    let set_up = SetUp { count, ..set_up(0, Layout { world_size: count, num_groups: 1 }) };
    RawController::open(session().limits(limits), &set_up).unwrap()
}

/// Regression: communicators for all workers of a session were made on a node that had one of them,
/// and none were charged.
#[test]
fn communicators_of_threads_are_made_where_all_workers_are_and_are_charged() {
    let plan = |epoch: u64, meshes: &[Json]| {
        let mut plan: Json = endless(&json!("Threads"), false).decode().unwrap();
        (plan["epoch"], plan["meshes"]) = (epoch.into(), meshes.into());
        Command::InitCcl { plan: Packed::encode(&plan).unwrap() }
    };
    let mut controller = RawController::of_worker(0, 16, u64::MAX);
    controller.submit([plan(0, &[])]).unwrap();
    let failures = controller.sync();
    assert_eq!(failures.len(), 1);
    assert!(failures[0].cause.message().contains("all 16 workers are threads of one process"), "{failures:?}");

    let axes: Vec<Json> = ["a", "b", "c", "d"].iter().map(|name| json!({"name": name, "size": 2})).collect();
    let mesh = json!({"axes": axes});
    // A page at least for each of eight groups along each of four axes.
    let least = 4 * 8 * 4096;
    let mut limited = threads(16, least);
    limited.submit([plan(0, &[]), plan(1, std::slice::from_ref(&mesh))]).unwrap();
    let failures = limited.sync();
    assert_eq!(failures.len(), 16);
    assert!(failures.iter().all(|failure| failure.cause.kind() == ErrorKind::LimitExceeded), "{failures:?}");

    let mut controller = threads(16, u64::MAX);
    controller.submit([plan(0, &[mesh])]).unwrap();
    assert!(controller.sync().is_empty());
    assert!(controller.held() >= least, "{}", controller.held());
    controller.submit([plan(1, &[])]).unwrap();
    assert!(controller.sync().is_empty());
    assert!(controller.held() < least, "{}", controller.held());
}

/// Ranks and addresses are computed from the meshes of a plan, so that they are checked where it
/// arrives.
#[test]
fn a_plan_whose_meshes_do_not_fit_is_refused() {
    let mut controller = RawController::of_worker(1, 2, u64::MAX);
    let mesh = |size: u32| json!({"axes": [{"name": "a", "size": size}]});
    for (meshes, why) in [
        (vec![mesh(3)], "the mesh (a=3) has 3 workers, and the session 2"),
        (vec![mesh(2); 17], "meshes of a session"),
        (vec![mesh(0)], "the axis \"a\" has no workers"),
    ] {
        let mut plan: Json = endless(&json!("Threads"), false).decode().unwrap();
        plan["meshes"] = meshes.into();
        controller.submit([Command::InitCcl { plan: Packed::encode(&plan).unwrap() }]).unwrap();
        let failures = controller.sync();
        assert!(failures.len() == 1 && failures[0].cause.message().contains(why), "{why}: {failures:?}");
    }
}

/// Returns the memory file of an offer of another session, and the offer, which keeps it.
fn memory_file() -> (File, host::Offer) {
    let offer = host::Offer::new(2, &host::Options::default()).unwrap();
    let ticket = serde_json::to_value(offer.ticket()).unwrap();
    let path = format!("/proc/self/fd/{}", ticket["descriptor"]);
    (File::options().read(true).write(true).open(path).unwrap(), offer)
}

/// A segment of another user is refused before it is looked at: that user could write any process
/// into it, whose memory a server of the superuser would then read.
#[test]
fn a_segment_of_another_user_is_refused() {
    let offer = host::Offer::new(1, &host::Options::default()).unwrap();
    let ticket = serde_json::to_value(offer.ticket()).unwrap();
    let path = format!("/proc/self/fd/{}", ticket["descriptor"]);
    let file = OwnedFd::from(File::options().read(true).write(true).open(path).unwrap());
    let nobody = rustix::process::Uid::from_raw(65534);
    if rustix::fs::fchown(&file, Some(nobody), None).is_err() {
        // Only the superuser can make a file of another user.
        assert!(!rustix::process::geteuid().is_root());
        return;
    }
    let error = offer.ticket().join(crate::ccl::Rank(0), &host::Options::default()).err().unwrap();
    assert!(error.message().contains("belongs to another user"), "{error}");
}

/// A host in the place of a lost one takes commands from the session's next number on. Numbers that
/// could overflow are refused before anything is made.
#[test]
fn a_host_begins_behind_the_position_of_its_set_up() {
    let open = |sequence, credit| {
        let begin_after = Some(CommandPosition { sequence, credit });
        let layout = Layout { world_size: 1, num_groups: 1 };
        RawController::open(session(), &SetUp { begin_after, ..set_up(0, layout) })
    };
    for (sequence, credit) in [(u64::MAX, 0), (0, u64::MAX), (CommandPosition::MAX + 1, 0)] {
        let error = open(sequence, credit).err().expect("it is refused");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    }
    for sequence in [7, CommandPosition::MAX] {
        let error = open(sequence, 0).unwrap().submit([Command::Nothing]).unwrap_err();
        let expected = format!("command 1 came where command {} was expected", sequence + 1);
        assert!(error.message().contains(&expected), "{error}");
    }
    assert!(open(0, 0).unwrap().sync().is_empty());
}
