//! Lost workers that are replaced: after kill -9 at any moment all go on, or an error says why not,
//! and nothing hangs.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use disco::{
    CclState, Content, DRef, DiscoError, DiscoSession, Failure, Hosting, JoinOptions, NodeListener, NodeRank, OnLoss,
    Options, Part, ProcessSession, ReduceOp, Replacement, Scope, ShardLoader, SocketSession, WorkerId,
};
use rpc_core::blocking::block_on;
use rpc_core::{DataType, ErrorKind, LocalSession, RpcError, Session, Tensor, Value};
use rpc_server::config::{ServeConfig, TrackerConfig};
use rpc_server::tracker::Tracker;
use rpc_server::{RpcServer, Running};
use rpc_tests::digits::{Checkpoint, Digits, EPOCHS, train};
use rpc_tests::forwarder::{ByteForwarder, Pipe};
use rpc_tests::spmd::{Node, registry, runtime, serve};
use rpc_transports::tracker::ServerRequest;
use rpc_transports::{Address, Connector};
use rustix::process::{Pid, Signal, kill_process};
use tokio::runtime::Runtime;

const NODE: &str = env!("CARGO_BIN_EXE_disco_node");

/// Time limit of each test on a slow machine: a test that takes longer hangs.
const GUARD: Duration = Duration::from_secs(120);

/// Runs `body`, and turns a hang into a failure.
fn guarded(body: impl FnOnce() + Send + 'static) {
    let (done, outcome) = mpsc::channel::<()>();
    let test = std::thread::spawn(move || {
        body();
        drop(done);
    });
    match outcome.recv_timeout(GUARD) {
        Err(RecvTimeoutError::Timeout) => panic!("the test has not finished after {GUARD:?}"),
        _ => test.join().unwrap_or_else(|failure| std::panic::resume_unwind(failure)),
    }
}

fn awaiting() -> Options {
    let mut options = Options::default();
    options.on_loss = OnLoss::AwaitReplacement;
    options
}

/// Starts a session of processes that awaits replacements.
fn start(workers: u32) -> DiscoSession {
    ProcessSession::new(workers, 1).command([NODE, "--disco-worker"]).options(awaiting()).start().wait().unwrap()
}

fn value(session: &DiscoSession, register: &DRef, worker: u32) -> Value {
    match session.debug_get_from_remote(register, WorkerId(worker)).wait().unwrap() {
        Content::Value(value) => value,
        other => panic!("expected a value, got {other:?}"),
    }
}

fn elements(session: &DiscoSession, register: &DRef, worker: u32) -> Vec<f32> {
    match session.debug_get_from_remote(register, WorkerId(worker)).wait().unwrap() {
        Content::Tensor(tensor) => tensor.read().unwrap().as_slice::<f32>().unwrap().to_vec(),
        other => panic!("expected a tensor, got {other:?}"),
    }
}

fn pids(session: &DiscoSession) -> Vec<i64> {
    try_pids(session).unwrap()
}

fn try_pids(session: &DiscoSession) -> disco::Result<Vec<i64>> {
    let pid = session.get_global_func("pid")?.call(())?;
    let pid = |worker| match session.debug_get_from_remote(&pid, WorkerId(worker)).wait()? {
        Content::Value(Value::Int(pid)) => Ok(pid),
        other => panic!("{other:?}"),
    };
    (0..session.num_workers()).map(pid).collect()
}

fn kill(pid: i64) {
    send(pid, Signal::KILL);
}

fn send(pid: i64, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

fn connect(runtime: &Runtime, address: &str) -> Session {
    runtime.block_on(Connector::new().connect(address)).unwrap()
}

/// Waits until the session has noticed the loss of these workers.
fn noticed(session: &DiscoSession, workers: &[u32]) {
    let workers: Vec<_> = workers.iter().copied().map(WorkerId).collect();
    eventually("the loss of workers", || session.lost_workers() == workers);
}

fn eventually(what: &str, condition: impl Fn() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < GUARD, "{what} has not come to pass");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Returns true if the error names these workers as lost.
fn is_loss(error: &DiscoError, workers: &[u32]) -> bool {
    error.lost_workers().iter().map(|worker| worker.0).eq(workers.iter().copied())
}

/// Checks that commands and collectives work.
fn works(session: &DiscoSession) {
    let x = session.empty(&[4], DataType::F32, None).unwrap();
    session.get_global_func("add_id").unwrap().call((&x,)).unwrap();
    let sum = session.allreduce(&x, None, ReduceOp::Sum, Scope::World).unwrap();
    session.sync_all().wait().unwrap();
    let n = session.num_workers();
    for worker in 0..n {
        assert_eq!(elements(session, &sum, worker), [(n * (n - 1) / 2) as f32; 4]);
    }
    assert_eq!(session.ccl_state(), CclState::Running);
}

/// Holds these workers in a call until the file at the returned path is made. Returns when they are
/// in it.
fn hold(session: &DiscoSession, folder: &Path, workers: &[u32]) -> PathBuf {
    let path = folder.join("go");
    session.get_global_func("hold_on").unwrap().call((workers.to_vec(), path.to_str().unwrap())).unwrap();
    for worker in workers {
        came(&path, *worker);
    }
    path
}

fn came(path: &Path, worker: u32) {
    let sign = PathBuf::from(format!("{}-{worker}", path.display()));
    eventually("a worker's call", || sign.exists());
    std::fs::remove_file(sign).unwrap();
}

#[test]
fn functions_modules_programs_and_meshes_are_there_again_and_other_registers_say_that_they_are_not() {
    guarded(|| {
        let session = start(4);
        let id = session.get_global_func("worker_id").unwrap();
        let module = session.load_module("arithmetic", None).unwrap();
        let id_times = module.function("id_times").unwrap();
        let square = module.function("square").unwrap();
        // Its functions live on.
        drop(module);
        let mesh = session.mesh(&[("dp", 2), ("tp", 2)]).wait().unwrap();
        let add = session.get_global_func("add_id").unwrap();
        let program = session
            .record(|program| {
                let x = program.parameter();
                program.call(&add, (&x,))?;
                Ok(vec![program.allreduce(&x, None, ReduceOp::Sum, mesh.group("tp")?)?])
            })
            .unwrap();
        let x = session.empty(&[2], DataType::F32, None).unwrap();
        let dropped = session.empty(&[2], DataType::F32, None).unwrap();
        let before = pids(&session);

        kill(before[1]);
        let error = session.sync_all().wait().unwrap_err();
        assert!(is_loss(&error, &[1]), "{error}");
        let text = error.to_string();
        assert!(text.contains("worker 1 at ") && text.contains("DiscoSession::replace or recover"), "{text}");
        // Nothing is possible without it, and nothing waits.
        assert_eq!(session.empty(&[1], DataType::F32, None).unwrap_err(), error);
        assert_eq!(session.copy_from_worker_0(&x).wait().unwrap_err(), error);
        assert_eq!(session.reinit_ccl().wait().unwrap_err(), error);
        let CclState::Broken(breakage) = session.ccl_state() else { panic!("{:?}", session.ccl_state()) };
        assert_eq!(breakage.culprit, Some(WorkerId(1)));
        let other = session.replace(WorkerId(0), Replacement::relaunched()).wait().unwrap_err();
        assert!(other.to_string().contains("worker 0 is not lost"), "{other}");
        drop(dropped);

        session.replace(WorkerId(1), Replacement::relaunched()).wait().unwrap();
        assert_eq!(session.lost_workers(), []);
        works(&session);
        let after = pids(&session);
        assert!(after[1] != before[1] && [0, 2, 3].iter().all(|at| after[*at] == before[*at]));
        assert_eq!(value(&session, &id.call(()).unwrap(), 1), Value::Int(1));
        assert_eq!(value(&session, &square.call((3.0,)).unwrap(), 1), Value::Float(9.0));
        assert_eq!(value(&session, &id_times.call((3.0,)).unwrap(), 1), Value::Float(3.0));
        let sum = session.get_global_func("sum_along").unwrap().call(("dp",)).unwrap();
        assert_eq!(value(&session, &sum, 1), Value::Float(4.0));

        // The register of a tensor has to be set by the program.
        assert_eq!(elements(&session, &x, 0), [0.0; 2]);
        let error = session.debug_get_from_remote(&x, WorkerId(1)).wait().unwrap_err();
        assert_eq!(error.cause().kind(), ErrorKind::NotFound);
        assert!(error.to_string().contains("was not restored on worker 1"), "{error}");
        session.debug_set_register(&x, WorkerId(1), &Tensor::from_slice([2], &[0.0_f32; 2]).unwrap()).unwrap();
        let sums = program.run((&x,)).unwrap();
        assert_eq!([0, 1, 2, 3].map(|worker| elements(&session, &sums[0], worker)[0]), [1.0, 1.0, 5.0, 5.0]);
        session.sync_all().wait().unwrap();
        session.shutdown().wait().unwrap();
    });
}

#[test]
fn a_worker_that_is_killed_in_a_call_or_in_a_collective_is_replaced() {
    guarded(|| {
        for in_collective in [false, true] {
            let session = start(3);
            let folder = tempfile::tempdir().unwrap();
            let before = pids(&session);
            if in_collective {
                let path = folder.path().join("go");
                let hold = session.get_global_func("hold_in_collectives").unwrap();
                hold.call((path.to_str().unwrap(),)).unwrap();
                (0..3).for_each(|worker| came(&path, worker));
            } else {
                hold(&session, folder.path(), &[1]);
            }
            kill(before[1]);
            noticed(&session, &[1]);
            let failures = session.replace(WorkerId(1), Replacement::relaunched()).wait().unwrap();
            // The others have failed in the collective, and are not told of again.
            let mut failed: Vec<_> = failures.iter().map(|failure| failure.worker.0).collect();
            failed.sort_unstable();
            assert_eq!(failed, if in_collective { vec![0, 2] } else { vec![] });
            works(&session);
            session.shutdown().wait().unwrap();
        }
    });
}

/// The others notice the death of a process before its node does, which answers. The error is a
/// loss all the same, and the node is replaced with all of its processes.
#[test]
fn a_process_of_a_node_that_dies_in_a_collective_is_a_loss_of_that_node() {
    guarded(|| {
        let nodes = [0, 1, 2].map(|_| Node::start(NODE));
        let addresses = nodes[..2].iter().map(|node| node.address().to_owned());
        let mut options = awaiting();
        options.hosting = Hosting::Processes;
        let session = SocketSession::new(addresses, 2, 1).options(options).start().wait().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let before = pids(&session);
        let path = folder.path().join("go");
        let held = session.get_global_func("hold_in_collectives").unwrap();
        let held = held.call((path.to_str().unwrap(),)).unwrap();
        (0..4).for_each(|worker| came(&path, worker));
        kill(before[3]);
        let error = session.debug_get_from_remote(&held, WorkerId(0)).wait().unwrap_err();
        assert!(is_loss(&error, &[2, 3]), "{error}");
        let state = session.ccl_state();
        assert_eq!(state.breakage().and_then(|breakage| breakage.culprit), Some(WorkerId(3)), "{state:?}");
        let spare = nodes[2].address().to_owned();
        session.recover(move |_| Replacement::at(spare.clone())).wait().unwrap();
        works(&session);
        session.shutdown().wait().unwrap();
    });
}

#[test]
fn all_workers_may_be_lost_and_are_replaced_one_after_the_other() {
    guarded(|| {
        let session = start(2);
        let id = session.get_global_func("worker_id").unwrap();
        pids(&session).into_iter().for_each(kill);
        noticed(&session, &[0, 1]);
        // The session goes on with the last one only.
        session.replace(WorkerId(0), Replacement::relaunched()).wait().unwrap();
        assert_eq!(session.lost_workers(), [WorkerId(1)]);
        assert!(is_loss(&session.sync_all().wait().unwrap_err(), &[1]));
        session.replace(WorkerId(1), Replacement::relaunched()).wait().unwrap();
        let ids = id.call(()).unwrap();
        assert_eq!([0, 1].map(|worker| value(&session, &ids, worker)), [0, 1].map(Value::Int));
        works(&session);
        session.shutdown().wait().unwrap();
    });
}

#[test]
fn a_loss_ends_a_session_that_does_not_await_replacements() {
    guarded(|| {
        let session = ProcessSession::new(2, 1).command([NODE, "--disco-worker"]).start().wait().unwrap();
        kill(pids(&session)[1]);
        let error = session.sync_all().wait().unwrap_err();
        assert!(matches!(&error, DiscoError::Session(error) if error.kind() == ErrorKind::PeerLost), "{error}");
        let refused = session.replace(WorkerId(1), Replacement::relaunched()).wait().unwrap_err();
        assert_eq!(refused, error);
        session.shutdown().wait().unwrap();
    });
}

/// A program that writes the number of its process to a file, and then is a worker.
fn worker_with_pid_file(folder: &Path) -> (Replacement, PathBuf) {
    let file = folder.join("pid");
    let script = format!("echo $$ > {0}.new; mv {0}.new {0}; exec {NODE} --disco-worker", file.display());
    let address = Address::exec(["sh", "-c", &script]).unwrap().to_string();
    (Replacement::at(address), file)
}

/// The session is kept in the middle of a replacement by a worker that is in a call.
#[test]
fn losses_in_a_replacement_are_errors_and_the_next_one_succeeds() {
    guarded(|| {
        for loses_the_new_one in [false, true] {
            let session = start(3);
            let folder = tempfile::tempdir().unwrap();
            let before = pids(&session);
            let go = hold(&session, folder.path(), &[0]);
            kill(before[1]);
            noticed(&session, &[1]);
            let (replacement, pid_file) = worker_with_pid_file(folder.path());
            let replacing = session.replace(WorkerId(1), replacement);
            eventually("the new worker", || {
                let error = session.barrier(Scope::World).unwrap_err();
                is_loss(&error, &[1]) && error.to_string().contains("has not been restored yet")
            });
            // Nothing else begins meanwhile.
            let busy = session.replace(WorkerId(1), Replacement::relaunched()).wait().unwrap_err();
            assert_eq!(busy.cause().kind(), ErrorKind::Busy, "{busy}");
            let new: i64 = std::fs::read_to_string(pid_file).unwrap().trim().parse().unwrap();
            let lost = if loses_the_new_one { 1 } else { 2 };
            kill(if loses_the_new_one { new } else { before[2] });
            let error = replacing.wait().unwrap_err();
            assert!(is_loss(&error, &[lost]), "{error}");
            std::fs::write(&go, "").unwrap();
            session.recover(|_| Replacement::relaunched()).wait().unwrap();
            works(&session);
            session.shutdown().wait().unwrap();
        }
    });
}

/// The others wait for the new worker, which has stopped and then dies, and give that up at once.
#[test]
fn a_worker_that_dies_while_the_others_join_it_does_not_keep_them_waiting() {
    guarded(|| {
        let mut options = awaiting();
        options.init_timeout = Duration::from_secs(1000);
        let session = ProcessSession::new(3, 1).command([NODE, "--disco-worker"]).options(options);
        let session = session.start().wait().unwrap();
        // Later and later, until the others are joining.
        for attempt in 0.. {
            let folder = tempfile::tempdir().unwrap();
            let before = pids(&session);
            let go = hold(&session, folder.path(), &[0]);
            kill(before[1]);
            noticed(&session, &[1]);
            let (replacement, pid_file) = worker_with_pid_file(folder.path());
            let replacing = session.replace(WorkerId(1), replacement);
            eventually("the new worker", || session.lost_workers() == [WorkerId(1)] && pid_file.exists());
            let new: i64 = std::fs::read_to_string(pid_file).unwrap().trim().parse().unwrap();
            std::thread::sleep(Duration::from_millis(5 * attempt));
            send(new, Signal::STOP);
            std::fs::write(&go, "").unwrap();
            std::thread::sleep(Duration::from_millis(5 * attempt));
            kill(new);
            let outcome = replacing.wait();
            assert!(outcome.is_err(), "{outcome:?}");
            let failures = session.recover(|_| Replacement::relaunched()).wait().unwrap();
            works(&session);
            let is_of_join = |failure: &Failure| failure.cause.message().contains("before all ranks had joined");
            if failures.iter().any(is_of_join) {
                break;
            }
            assert!(attempt < 60, "the others have never been joining when the new worker died");
        }
        session.shutdown().wait().unwrap();
    });
}

/// A session over any sessions goes on with another one. Its nodes may have several workers, which
/// are replaced together.
#[test]
fn a_node_is_replaced_with_all_of_its_workers_by_a_session_of_the_caller() {
    guarded(|| {
        let runtime = runtime();
        let (mut addresses, servers) = serve(&runtime, 3);
        let spare = addresses.pop().unwrap();
        let sessions: Vec<Session> = addresses.iter().map(|address| connect(&runtime, address)).collect();
        let session = DiscoSession::over(sessions, 2, 1, awaiting()).wait().unwrap();
        works(&session);
        servers[1].stop();
        noticed(&session, &[2, 3]);
        let error = session.replace(WorkerId(3), Replacement::relaunched()).wait().unwrap_err();
        assert!(error.to_string().contains("Replacement::over"), "{error}");
        let other = Replacement::over(connect(&runtime, &spare));
        session.replace(WorkerId(3), other).wait().unwrap();
        works(&session);
        session.shutdown().wait().unwrap();
        drop((session, servers));
    });
}

#[test]
fn a_server_at_another_address_takes_the_place_of_a_lost_one() {
    guarded(|| {
        let address = Node::start(NODE);
        let mut nodes = vec![Node::start(NODE), Node::start(NODE)];
        let addresses: Vec<_> = nodes.iter().map(|node| node.address().to_owned()).collect();
        let session = SocketSession::new(addresses, 1, 1).options(awaiting()).start().wait().unwrap();
        drop(nodes.pop());
        noticed(&session, &[1]);
        // Nothing listens there any more.
        session.replace(WorkerId(1), Replacement::relaunched()).wait().unwrap_err();
        assert_eq!(session.lost_workers(), [WorkerId(1)]);
        session.replace(WorkerId(1), Replacement::at(address.address())).wait().unwrap();
        works(&session);
        session.shutdown().wait().unwrap();
    });
}

/// A server of the functions of workers that a tracker hands out.
async fn pooled_server(tracker: &str, folder: &Path, number: u32) -> Running {
    let config = ServeConfig {
        listen: vec!["tcp://127.0.0.1:0".parse().unwrap()],
        workdir: folder.join(number.to_string()),
        tracker: vec![tracker.parse().unwrap()],
        tracker_key: Some("pool".to_owned()),
        allow_disco: Some(true),
        ..ServeConfig::default()
    };
    RpcServer::new(registry()).config(config).start().await.unwrap()
}

#[test]
fn another_server_of_the_tracker_takes_the_place_of_a_lost_one() {
    guarded(|| {
        let (runtime, folder) = (runtime(), tempfile::tempdir().unwrap());
        let listen = vec!["tcp://127.0.0.1:0".parse().unwrap()];
        let config = TrackerConfig { listen, ..TrackerConfig::default() };
        let tracker = runtime.block_on(Tracker::start(&config)).unwrap();
        let address = tracker.server.addresses()[0].to_string();
        let start = |number| runtime.block_on(pooled_server(&address, folder.path(), number));
        let servers = [0, 1].map(start);
        let request = ServerRequest::new("pool").count(2).distinct();
        let session = SocketSession::from_tracker(&address, request.clone(), 1, 1).options(awaiting());
        let session = session.start().wait().unwrap();
        works(&session);
        // Whichever worker it has.
        servers[0].stop();
        eventually("the loss of a worker", || session.lost_workers().len() == 1);
        let mut lost = session.lost_workers();
        let spares = [2, 3].map(start);
        session.recover(|_| Replacement::relaunched()).wait().unwrap();
        works(&session);
        servers[1].stop();
        eventually("the loss of the other worker", || !session.lost_workers().is_empty());
        lost.extend(session.lost_workers());
        lost.sort_unstable();
        assert_eq!(lost, [WorkerId(0), WorkerId(1)]);
        let other = Replacement::from_tracker(Connector::new(), &address, request);
        session.replace(session.lost_workers()[0], other).wait().unwrap();
        works(&session);
        session.shutdown().wait().unwrap();
        drop((session, spares));
    });
}

#[test]
fn the_next_node_that_dials_in_takes_the_place_of_a_lost_one() {
    guarded(|| {
        let runtime = runtime();
        let listener = NodeListener::bind("tcp://127.0.0.1:0").wait().unwrap();
        let address: SocketAddr = listener.address().strip_prefix("tcp://").unwrap().parse().unwrap();
        let cable = runtime.block_on(ByteForwarder::start(address, Pipe::default())).unwrap();
        let join = |address: SocketAddr, rank: Option<u32>| {
            let mut options = JoinOptions::default();
            options.rank = rank.map(|rank| NodeRank { rank, nodes: 2 });
            // It ends with its session, or with its cable.
            std::thread::spawn(move || disco::join(&registry(), &format!("tcp://{address}"), options).wait());
        };
        join(address, Some(0));
        join(cable.address(), Some(1));
        let session = SocketSession::dialled_by(2, &listener, 1, 1).options(awaiting()).start().wait().unwrap();
        works(&session);
        drop(cable);
        noticed(&session, &[1]);
        let replacing = session.replace(WorkerId(1), Replacement::relaunched());
        // The first is for another place.
        join(address, Some(0));
        join(address, Some(1));
        replacing.wait().unwrap();
        works(&session);
        eventually("the node for another place", || listener.waiting() == 1);
        session.shutdown().wait().unwrap();
    });
}

/// Workers without a way to each other have no collectives, before a replacement and after it.
#[test]
fn a_session_without_collectives_goes_on_without_them() {
    guarded(|| {
        let node = || LocalSession::new(registry());
        let nodes = [node(), node()];
        let mut options = awaiting();
        // One address for two nodes.
        options.data_addresses = vec![Ipv4Addr::LOCALHOST.into()];
        let session = DiscoSession::over(nodes.clone().map(Session::new), 1, 1, options).wait().unwrap();
        session.sync_all().wait().unwrap();
        let id = session.get_global_func("worker_id").unwrap();
        nodes[1].close(RpcError::new(ErrorKind::PeerLost, "it was switched off"));
        noticed(&session, &[1]);
        session.replace(WorkerId(1), Replacement::over(Session::new(node()))).wait().unwrap();
        assert_eq!(value(&session, &id.call(()).unwrap(), 1), Value::Int(1));
        session.barrier(Scope::World).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        assert!(error.to_string().contains("the data addresses of 1 of 2 nodes are known"), "{error}");
        session.shutdown().wait().unwrap();
    });
}

#[test]
fn a_function_of_the_program_restores_what_it_wishes() {
    guarded(|| {
        let session = start(2);
        let x = session.empty(&[2], DataType::F32, None).unwrap();
        let calls = Arc::new(AtomicUsize::new(0));
        let guard = session.on_replace({
            let (x, calls) = (x.clone(), Arc::clone(&calls));
            move |session, workers| {
                calls.fetch_add(1, Ordering::Relaxed);
                let ones = Tensor::from_slice([2], &[1.0_f32; 2]).unwrap();
                workers.iter().try_for_each(|worker| session.debug_set_register(&x, *worker, &ones))
            }
        });
        kill(pids(&session)[1]);
        noticed(&session, &[1]);
        session.recover(|_| Replacement::relaunched()).wait().unwrap();
        assert_eq!([0, 1].map(|worker| elements(&session, &x, worker)), [[0.0; 2], [1.0; 2]]);
        // Its error is that of the replacement, after which the session goes on.
        let failing = session.on_replace(|_, _| Err(RpcError::internal("no such state").into()));
        kill(pids(&session)[1]);
        noticed(&session, &[1]);
        let error = session.recover(|_| Replacement::relaunched()).wait().unwrap_err();
        assert!(error.to_string().contains("no such state"), "{error}");
        works(&session);
        // It is called again though none is lost, until it succeeds.
        let error = session.recover(|_| Replacement::relaunched()).wait().unwrap_err();
        assert!(error.to_string().contains("no such state"), "{error}");
        assert_eq!(calls.load(Ordering::Relaxed), 3);
        drop((guard, failing));
        session.recover(|_| Replacement::relaunched()).wait().unwrap();
        kill(pids(&session)[0]);
        noticed(&session, &[0]);
        session.recover(|_| Replacement::relaunched()).wait().unwrap();
        assert_eq!(calls.load(Ordering::Relaxed), 3);
        // With nothing to replace it does nothing.
        assert_eq!(session.recover(|_| Replacement::relaunched()).wait().unwrap(), []);
        session.shutdown().wait().unwrap();
    });
}

/// Writes a file of one weight, a row for each worker.
fn weight_file(folder: &Path, rows: &[f32]) -> PathBuf {
    let header =
        format!(r#"{{"w":{{"dtype":"F32","shape":[{0}],"data_offsets":[0,{1}]}}}}"#, rows.len(), 4 * rows.len());
    let data: Vec<u8> = rows.iter().flat_map(|row| row.to_le_bytes()).collect();
    let path = folder.join("model.safetensors");
    std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()).unwrap();
    path
}

#[test]
fn weights_of_a_restorable_loader_are_read_again_and_a_missing_file_is_a_failure() {
    guarded(|| {
        let session = start(2);
        let folder = tempfile::tempdir().unwrap();
        let path = weight_file(folder.path(), &[1.0, 2.0, 3.0, 4.0]);
        let loader = ShardLoader::open(&session, &path).wait().unwrap();
        let once = loader.load("w", Part::shard(0), None).unwrap();
        let loader = loader.restorable();
        let (shard, whole) =
            (loader.load("w", Part::shard(0), None).unwrap(), loader.load("w", Part::Whole, None).unwrap());
        for without_loader in [false, true] {
            kill(pids(&session)[1]);
            noticed(&session, &[1]);
            session.recover(|_| Replacement::relaunched()).wait().unwrap();
            assert_eq!(elements(&session, &shard, 1), [3.0, 4.0]);
            assert_eq!(elements(&session, &whole, 1), [1.0, 2.0, 3.0, 4.0]);
            let error = session.debug_get_from_remote(&once, WorkerId(1)).wait().unwrap_err();
            assert!(error.to_string().contains("was not restored"), "{error}");
            if !without_loader {
                // The loader works there, too.
                let again = loader.load("w", Part::shard(0), None).unwrap();
                assert_eq!(elements(&session, &again, 1), [3.0, 4.0]);
            }
        }
        drop(loader);
        std::fs::remove_file(&path).unwrap();
        kill(pids(&session)[1]);
        noticed(&session, &[1]);
        let error = session.recover(|_| Replacement::relaunched()).wait().unwrap_err();
        assert!(error.failures().iter().all(|failure| failure.worker == WorkerId(1)), "{error}");
        assert!(error.to_string().contains("model.safetensors"), "{error}");
        works(&session);
        session.shutdown().wait().unwrap();
    });
}

#[test]
fn a_new_worker_takes_registers_of_any_number() {
    guarded(|| {
        let session = start(2);
        let echo = session.get_global_func("echo").unwrap();
        let many: Vec<DRef> = (0..70_000).map(|_| echo.call((0,)).unwrap()).collect();
        kill(pids(&session)[1]);
        noticed(&session, &[1]);
        session.recover(|_| Replacement::relaunched()).wait().unwrap();
        works(&session);
        let (last, next) = (many.last().unwrap(), echo.call((7,)).unwrap());
        assert_eq!(value(&session, &next, 1), Value::Int(7));
        let error = session.debug_get_from_remote(last, WorkerId(1)).wait().unwrap_err();
        assert!(error.to_string().contains("was not restored on worker 1"), "{error}");
        session.shutdown().wait().unwrap();
    });
}

/// Regression: each refused command had a register, and with enough of them no worker could set the
/// next one.
#[test]
fn operations_that_are_refused_while_workers_are_lost_take_no_registers() {
    guarded(|| {
        let session = start(2);
        let echo = session.get_global_func("echo").unwrap();
        let program = session
            .record(|program| {
                let x = program.parameter();
                Ok(vec![program.call(&echo, (&x,))?, program.call(&echo, (&x,))?])
            })
            .unwrap();
        let x = session.empty(&[2], DataType::F32, None).unwrap();
        let tensor = Tensor::from_slice([2], &[0.0_f32; 2]).unwrap();
        kill(pids(&session)[1]);
        noticed(&session, &[1]);
        for _ in 0..20_000 {
            session.empty(&[1], DataType::F32, None).unwrap_err();
            echo.call((0,)).unwrap_err();
            session.allreduce(&x, None, ReduceOp::Sum, Scope::World).unwrap_err();
            session.copy_to_worker_0(&tensor, None).unwrap_err();
            program.run((0,)).unwrap_err();
        }
        session.recover(|_| Replacement::relaunched()).wait().unwrap();
        let next = echo.call((7,)).unwrap();
        assert!(next.register() < 100, "{next:?}");
        assert_eq!([0, 1].map(|worker| value(&session, &next, worker)), [7, 7].map(Value::Int));
        works(&session);
        session.shutdown().wait().unwrap();
    });
}

/// Regression: those after the sixteenth stayed lost, and no error said so.
#[test]
fn any_number_of_nodes_is_replaced_at_once() {
    guarded(|| {
        let node = || LocalSession::new(registry());
        let nodes: Vec<_> = (0..18).map(|_| node()).collect();
        let sessions: Vec<_> = nodes.iter().cloned().map(Session::new).collect();
        let session = DiscoSession::over(sessions, 1, 1, awaiting()).wait().unwrap();
        works(&session);
        nodes.iter().for_each(|node| node.close(RpcError::new(ErrorKind::PeerLost, "it was switched off")));
        eventually("the loss of all", || session.lost_workers().len() == 18);
        session.recover(move |_| Replacement::over(Session::new(node()))).wait().unwrap();
        assert_eq!(session.lost_workers(), []);
        works(&session);
        session.shutdown().wait().unwrap();
    });
}

/// Regression: the replacement waited for as long as a node may take to dial in.
#[test]
fn the_end_of_the_session_ends_the_wait_for_a_new_node() {
    guarded(|| {
        let runtime = runtime();
        let listener = NodeListener::bind("tcp://127.0.0.1:0").wait().unwrap();
        let address: SocketAddr = listener.address().strip_prefix("tcp://").unwrap().parse().unwrap();
        let cable = runtime.block_on(ByteForwarder::start(address, Pipe::default())).unwrap();
        for address in [address, cable.address()] {
            let join = move || disco::join(&registry(), &format!("tcp://{address}"), JoinOptions::default()).wait();
            std::thread::spawn(join);
        }
        let session = SocketSession::dialled_by(2, &listener, 1, 1).join_timeout(Duration::from_secs(1000));
        let session = session.options(awaiting()).start().wait().unwrap();
        drop(cable);
        eventually("the loss of a worker", || session.lost_workers().len() == 1);
        let replacing = session.replace(session.lost_workers()[0], Replacement::relaunched());
        session.shutdown().wait().ok();
        let error = replacing.wait().unwrap_err();
        assert!(error.to_string().contains("the session was shut down"), "{error}");
    });
}

/// Regression: a worker without a function that the others have had no function of the program
/// called for it.
#[test]
fn functions_of_the_program_are_called_though_a_new_worker_lacks_a_function() {
    guarded(|| {
        let node = || LocalSession::new(registry());
        let (nodes, other) = ([node(), node()], registry());
        other.add("of_two", || 2_i64);
        let with = LocalSession::new(other);
        let sessions = [with, nodes[1].clone()].map(Session::new);
        let session = DiscoSession::over(sessions, 1, 1, awaiting()).wait().unwrap();
        let of_two = session.get_global_func("of_two").unwrap();
        session.sync_all().wait().unwrap_err();
        let calls = Arc::new(AtomicUsize::new(0));
        let guard = session.on_replace({
            let calls = Arc::clone(&calls);
            move |_, _| {
                calls.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
        });
        nodes[1].close(RpcError::new(ErrorKind::PeerLost, "it was switched off"));
        noticed(&session, &[1]);
        let error = session.recover(move |_| Replacement::over(Session::new(node()))).wait().unwrap_err();
        assert!(error.to_string().contains("of_two"), "{error}");
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        works(&session);
        drop((guard, of_two));
        session.shutdown().wait().unwrap();
    });
}

#[test]
fn a_tree_of_nodes_does_not_await_replacements() {
    let session = SocketSession::new(["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"], 1, 1).fan_out(1);
    let error = session.options(awaiting()).start().wait().unwrap_err();
    assert!(error.to_string().contains("has no tree of nodes"), "{error}");
}

/// Runs of the training whose workers are killed: as many as this variable says.
const RUNS: &str = "RPC_KILL_RUNS";

/// Kills worker processes, each once, at random times after losses of the training.
struct Killer {
    progress: mpsc::Sender<()>,
    thread: std::thread::JoinHandle<usize>,
}

impl Killer {
    /// Begins to kill some of `processes`, which the training changes.
    fn start(seed: u64, processes: &Arc<Mutex<Vec<i64>>>) -> Self {
        let (progress, progressed) = mpsc::channel();
        let processes = Arc::clone(processes);
        let thread = std::thread::spawn(move || {
            let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let mut next = move || {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                random >> 11
            };
            let mut killed = 0;
            for _ in 0..1 + next() % 4 {
                for _ in 0..=next() % 3 {
                    if progressed.recv().is_err() {
                        return killed;
                    }
                }
                // At any moment of a step, not only at its end.
                std::thread::sleep(Duration::from_micros(next() % 30_000));
                let mut processes = processes.lock().unwrap();
                if !processes.is_empty() {
                    let at = next() as usize % processes.len();
                    kill(processes.swap_remove(at));
                    killed += 1;
                }
            }
            killed
        });
        Self { progress, thread }
    }

    fn finish(self) -> usize {
        drop(self.progress);
        self.thread.join().unwrap()
    }
}

/// Returns the losses and the accuracy of a training, whose workers `seed` kills, and how many.
fn train_and_lose(digits: &Digits, epochs: usize, seed: Option<u64>) -> ((Vec<f64>, f64), usize) {
    let session = start(4);
    let processes = Arc::new(Mutex::new(pids(&session)));
    let killer = seed.map(|seed| Killer::start(seed, &processes));
    let (mut checkpoint, mut losses) = (Checkpoint::default(), Vec::new());
    let mut longest = Duration::ZERO;
    let score = loop {
        let progress = |_, loss| {
            losses.push(loss);
            killer.iter().for_each(|killer| _ = killer.progress.send(()));
        };
        match block_on(train(&mut checkpoint, &session, digits, epochs, None, progress)).unwrap() {
            Ok(score) => break score,
            Err(error) if !error.lost_workers().is_empty() => {
                let noticed = Instant::now();
                session.recover(|_| Replacement::relaunched()).wait().unwrap();
                longest = longest.max(noticed.elapsed());
                // None is killed while they are asked, so that all of these live. A worker that was
                // killed before is found above.
                let mut processes = processes.lock().unwrap();
                if let Ok(found) = try_pids(&session) {
                    *processes = found;
                }
            }
            Err(error) => panic!("{error}"),
        }
    };
    let kills = killer.map_or(0, Killer::finish);
    if let Some(seed) = seed {
        eprintln!("seed {seed}: {kills} kills, longest time to go on {longest:?}");
    }
    session.shutdown().wait().ok();
    ((losses, score.accuracy()), kills)
}

/// A training that loses workers has the same losses, to the last bit, as one that loses none.
#[test]
fn trainings_that_lose_workers_at_random_times_end_as_if_they_had_lost_none() {
    let runs: u64 = std::env::var(RUNS).map_or(2, |runs| runs.parse().unwrap());
    let digits = Arc::new(Digits::load().unwrap());
    let (expected, _) = train_and_lose(&digits, EPOCHS, None);
    assert!(expected.1 >= 0.93, "{}", expected.1);
    let kills = Arc::new(AtomicUsize::new(0));
    for seed in 0..runs {
        let (digits, expected, kills) = (Arc::clone(&digits), expected.clone(), Arc::clone(&kills));
        guarded(move || {
            let (found, killed) = train_and_lose(&digits, EPOCHS, Some(seed));
            assert_eq!(found, expected, "seed {seed}");
            kills.fetch_add(killed, Ordering::Relaxed);
        });
    }
    let kills = kills.load(Ordering::Relaxed);
    assert!(kills as u64 >= runs, "{kills} kills in {runs} trainings show nothing");
}
