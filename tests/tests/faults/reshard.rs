//! Reshards during which a worker is killed, on either side and at any point: all others stop, the
//! error names the session, nothing hangs, and the other session goes on.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use disco::{Content, Cut, DRef, DiscoSession, Options, Reshard, Resharded, Scope, WorkerId};
use rpc_core::{DataType, ErrorKind, Tensor, Value};
use rpc_tests::spmd::{Data, Fixture, Launch, Route};
use rustix::process::Signal;

use crate::peers::signal;

const NODE: &str = env!("CARGO_BIN_EXE_disco_node");

/// Time limit of each reshard on a slow machine: one that takes longer hangs.
const GUARD: Duration = Duration::from_secs(60);

/// Both numbers of workers divide it.
const SHAPE: [i64; 2] = [1536, 768];

/// Ways on which the workers meet: by shared memory, over sockets, and not at all.
const LAUNCHES: [Launch; 3] = [
    Launch::Processes(NODE),
    Launch::Nodes { program: NODE, data: Data::Tcp, route: Route::Straight },
    Launch::Nodes { program: NODE, data: Data::Relayed, route: Route::Straight },
];

fn start(launch: Launch, workers: u32) -> Fixture {
    launch.try_start_with(workers, 1, Options::default()).unwrap()
}

/// Gives each worker its rows of a tensor, all of them ones.
fn rows(session: &DiscoSession) -> DRef {
    let shape = [SHAPE[0] / i64::from(session.num_workers()), SHAPE[1]];
    let ones = Tensor::from_slice(shape, &vec![1.0_f32; (shape[0] * shape[1]) as usize]).unwrap();
    session.broadcast(&ones, None, Scope::World).unwrap()
}

/// Reshards from rows to columns on a thread of its own.
fn reshard(from: &DiscoSession, to: &DiscoSession, part: &DRef) -> mpsc::Receiver<disco::Result<Resharded>> {
    let reshard = Reshard::new(from, to).tensor("w", part, DataType::F32, SHAPE, Cut::shard(0), Cut::shard(1));
    let (give, take) = mpsc::channel();
    std::thread::spawn(move || give.send(reshard.start().wait()));
    take
}

fn outcome(taken: &mpsc::Receiver<disco::Result<Resharded>>) -> disco::Result<Resharded> {
    match taken.recv_timeout(GUARD) {
        Ok(outcome) => outcome,
        Err(RecvTimeoutError::Timeout) => panic!("a reshard has not ended after {GUARD:?}"),
        Err(RecvTimeoutError::Disconnected) => panic!("a reshard has panicked"),
    }
}

fn pid(session: &DiscoSession, worker: u32) -> u32 {
    let pid = session.get_global_func("pid").unwrap().call(()).unwrap();
    match session.debug_get_from_remote(&pid, WorkerId(worker)).wait().unwrap() {
        Content::Value(Value::Int(pid)) => pid as u32,
        other => panic!("{other:?}"),
    }
}

/// Checks that a session whose reshard has failed goes on: its next reshard comes to an end.
fn goes_on(session: &DiscoSession, other: &DiscoSession) {
    // A stop is told once.
    _ = session.sync_all().wait();
    session.sync_all().wait().unwrap();
    let (from, to) = (session, other);
    let resharded = outcome(&reshard(from, to, &rows(from))).unwrap();
    let sum = to.get_global_func("sum").unwrap().call((&resharded.tensors["w"],)).unwrap();
    let expected = SHAPE[0] * SHAPE[1] / i64::from(to.num_workers());
    let sum = to.debug_get_from_remote(&sum, WorkerId(to.num_workers() - 1)).wait().unwrap();
    assert!(matches!(sum, Content::Value(Value::Float(sum)) if sum == expected as f64), "{sum:?}");
}

/// Kills a worker of a session some time after a reshard has begun.
fn killed_after(launch: Launch, is_source: bool, after: Duration) {
    let (from, to) = (start(launch, 2), start(launch, 3));
    let part = rows(&from.session);
    from.session.sync_all().wait().unwrap();
    let (victim, survivor) = if is_source { (&from, &to) } else { (&to, &from) };
    let process = pid(&victim.session, 1);
    let taken = reshard(&from.session, &to.session, &part);
    // The points at which it dies are all there are, and no test waits for one.
    std::thread::sleep(after);
    signal(process, Signal::KILL);
    if let Err(error) = outcome(&taken) {
        assert!(error.to_string().contains("the tensors"), "{error}");
        let kinds = [ErrorKind::PeerLost, ErrorKind::PeerSilent, ErrorKind::Closed, ErrorKind::Cancelled];
        assert!(kinds.contains(&error.cause().kind()), "{error:?}");
    }
    let error = victim.session.sync_all().wait().unwrap_err();
    assert_eq!(error.cause().kind(), ErrorKind::PeerLost, "{error}");
    let mut options = Options::default();
    if matches!(launch, Launch::Nodes { data: Data::Relayed, .. }) {
        // No worker reaches another, however long it tries.
        options.direct_timeout = Duration::from_millis(100);
    }
    let next = Launch::Threads.try_start_with(3, 1, options).unwrap();
    goes_on(&survivor.session, &next.session);
    survivor.session.shutdown().wait().unwrap();
    next.session.shutdown().wait().unwrap();
}

#[test]
fn a_worker_that_is_killed_at_any_point_ends_the_reshard_for_all() {
    for launch in LAUNCHES {
        for is_source in [true, false] {
            for after in [0, 3, 10, 30] {
                eprintln!("{launch:?}, source: {is_source}, after {after} ms");
                killed_after(launch, is_source, Duration::from_millis(after));
            }
        }
    }
}

/// The workers of one session have met at nothing, and wait for one of the other session, which
/// dies in a call before it.
#[test]
fn a_worker_that_is_killed_before_the_reshard_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    for is_source in [true, false] {
        let (from, to) = (start(Launch::Processes(NODE), 2), start(Launch::Processes(NODE), 3));
        let part = rows(&from.session);
        let (victim, survivor) = if is_source { (&from, &to) } else { (&to, &from) };
        let process = pid(&victim.session, 1);
        let path = folder.path().join(format!("{is_source}"));
        let hold = victim.session.get_global_func("hold_on").unwrap();
        hold.call((vec![1_u32], path.to_str().unwrap())).unwrap();
        let taken = reshard(&from.session, &to.session, &part);
        assert!(matches!(taken.recv_timeout(Duration::from_millis(50)), Err(RecvTimeoutError::Timeout)));
        signal(process, Signal::KILL);
        let error = outcome(&taken).unwrap_err();
        let whose = if is_source { "the session that has the tensors" } else { "the session that gets the tensors" };
        assert!(error.to_string().contains(whose), "{error}");
        assert_eq!(error.cause().kind(), ErrorKind::PeerLost, "{error}");
        // No command of the other session has failed.
        survivor.session.sync_all().wait().unwrap();
        survivor.session.shutdown().wait().unwrap();
    }
}
