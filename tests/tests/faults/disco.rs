//! Disco sessions whose functions fail, workers die or stop, networks part and
//! controllers are killed, over every kind of launch: nothing hangs, errors name worker and cause,
//! `shutdown` returns, and no process is left.

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use disco::{
    Advertise, CclState, Completion, Content, DRef, DiscoError, DiscoSession, Options, ReduceOp, Scope, SocketSession,
    WorkerId,
};
use rpc_core::{DataType, ErrorKind, Tensor, Value};
use rpc_tests::forwarder::{ByteForwarder, Pipe};
use rpc_tests::spmd::{ATTENTIVE, Data, Fixture, Launch, Route, runtime, serve, serve_with};
use rpc_transports::ServeOptions;
use rustix::process::Signal;

use crate::peers::{LIMIT, is_running, pace, repeat_after_stalls, signal};

const NODE: &str = env!("CARGO_BIN_EXE_disco_node");
const CONTROLLER: &str = env!("CARGO_BIN_EXE_disco_controller");

const fn nodes(data: Data, route: Route) -> Launch {
    Launch::Nodes { program: NODE, data, route }
}

/// Launches whose workers are in processes of their own.
const PROCESSES: [Launch; 7] = [
    Launch::Processes(NODE),
    nodes(Data::Shared, Route::Straight),
    nodes(Data::Tcp, Route::Straight),
    nodes(Data::Shared, Route::Chain),
    nodes(Data::Relayed, Route::Chain),
    nodes(Data::Tcp, Route::Line),
    Launch::NodeOfProcesses(NODE),
];

const ALL: [Launch; 8] =
    [Launch::Threads, PROCESSES[0], PROCESSES[1], PROCESSES[2], PROCESSES[3], PROCESSES[4], PROCESSES[5], PROCESSES[6]];

/// Time limit of each test on a slow machine: a test that takes longer hangs.
const GUARD: Duration = Duration::from_secs(60);

/// Runs `body`, and turns a hang into a failure.
fn guarded(name: &str, body: impl FnOnce() + Send + 'static) {
    let (done, outcome) = mpsc::channel::<()>();
    let body = move || {
        body();
        drop(done);
    };
    let test = std::thread::Builder::new().name(name.to_owned()).spawn(body).unwrap();
    match outcome.recv_timeout(GUARD) {
        Err(RecvTimeoutError::Timeout) => panic!("{name} has not finished after {GUARD:?}"),
        _ => test.join().unwrap_or_else(|failure| std::panic::resume_unwind(failure)),
    }
}

/// A session with three workers, and the processes that belong to it.
struct Site {
    launch: Launch,
    session: DiscoSession,
    fixture: Fixture,
    pids: Vec<u32>,
    folder: tempfile::TempDir,
}

/// Runs `test` over each launch, each time with a session of its own. Afterwards the session and
/// its processes have to end.
fn over(launches: &[Launch], options: &Options, test: impl Fn(&Site) + Send + Sync + 'static) {
    let test = Arc::new(test);
    for launch in launches {
        over_launch(*launch, options, &test);
    }
}

/// Does the same as [`over`], with options that have short time limits. Those may pass before a
/// machine that stands still goes on.
fn over_in_short_time(launches: &[Launch], options: &Options, test: impl Fn(&Site) + Send + Sync + 'static) {
    let test = Arc::new(test);
    for launch in launches {
        repeat_after_stalls(|| over_launch(*launch, options, &test));
    }
}

fn over_launch(launch: Launch, options: &Options, test: &Arc<impl Fn(&Site) + Send + Sync + 'static>) {
    let (options, test) = (options.clone(), Arc::clone(test));
    guarded(&format!("{launch:?}"), move || {
        let fixture = launch.try_start_with(3, 1, options).unwrap();
        let session = fixture.session.clone();
        let pids = pids(&session);
        let site = Site { launch, session, fixture, pids, folder: tempfile::tempdir().unwrap() };
        test(&site);
        // The shutdown may fail, but it has to return.
        _ = site.session.shutdown().wait();
        let Site { session, fixture, pids, .. } = site;
        drop((session, fixture));
        for pid in pids.into_iter().filter(|pid| *pid != std::process::id()) {
            eventually("the end of a worker's process", || !is_running(pid));
        }
    });
}

fn pids(session: &DiscoSession) -> Vec<u32> {
    let pid = session.get_global_func("pid").unwrap().call(()).unwrap();
    (0..session.num_workers()).map(|worker| int(session, &pid, worker) as u32).collect()
}

fn int(session: &DiscoSession, register: &DRef, worker: u32) -> i64 {
    match session.debug_get_from_remote(register, WorkerId(worker)).wait().unwrap() {
        Content::Value(Value::Int(int)) => int,
        other => panic!("expected a number, got {other:?}"),
    }
}

fn eventually(what: &str, condition: impl Fn() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < GUARD, "{what} has not come to pass");
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl Site {
    /// Holds these workers in a call until the file at the returned path is made. Returns when the
    /// workers are in the call.
    fn hold(&self, workers: &[u32]) -> PathBuf {
        let path = self.folder.path().join("go");
        let hold = self.session.get_global_func("hold_on").unwrap();
        hold.call((workers.to_vec(), path.to_str().unwrap())).unwrap();
        for worker in workers {
            self.came(&path, *worker);
        }
        path
    }

    fn came(&self, path: &std::path::Path, worker: u32) {
        let sign = PathBuf::from(format!("{}-{worker}", path.display()));
        eventually("a worker's call", || sign.exists());
        std::fs::remove_file(sign).unwrap();
    }

    fn ones(&self, len: i64) -> DRef {
        let x = self.session.empty(&[len], DataType::F32, None).unwrap();
        self.session.get_global_func("add_to").unwrap().call((&x, 1.0)).unwrap();
        x
    }

    /// Checks that commands and collectives work.
    fn works(&self) {
        let sum = self.session.allreduce(&self.ones(4), None, ReduceOp::Sum, Scope::World).unwrap();
        self.session.sync_all().wait().unwrap();
        for worker in 0..self.session.num_workers() {
            let content = self.session.debug_get_from_remote(&sum, WorkerId(worker)).wait().unwrap();
            let Content::Tensor(tensor) = content else { panic!("{content:?}") };
            assert_eq!(tensor.read().unwrap().as_slice::<f32>().unwrap(), [3.0; 4]);
        }
        assert_eq!(self.session.ccl_state(), CclState::Running);
    }

    /// Checks that commands work while collectives are broken, and returns the state of the
    /// collectives.
    fn is_broken(&self) -> disco::Breakage {
        let echo = self.session.get_global_func("echo").unwrap().call((7,)).unwrap();
        for worker in 0..self.session.num_workers() {
            assert_eq!(int(&self.session, &echo, worker), 7);
        }
        let CclState::Broken(breakage) = self.session.ccl_state() else { panic!("{:?}", self.session.ccl_state()) };
        breakage
    }
}

/// Returns the workers and commands of all failures.
fn told(error: &DiscoError) -> Vec<(u32, &str)> {
    error.failures().iter().map(|failure| (failure.worker.0, failure.command.as_str())).collect()
}

#[test]
fn a_function_that_fails_on_one_worker_or_on_all_harms_nothing_else() {
    over(&ALL, &Options::default(), |site| {
        let session = &site.session;
        let bad = session.get_global_func("fail_on").unwrap().call((1,)).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        assert_eq!(told(&error), [(1, "fail_on")]);
        assert_eq!((error.cause().kind(), error.cause().message()), (ErrorKind::Application, "told to fail"));
        let error = session.debug_get_from_remote(&bad, WorkerId(1)).wait().unwrap_err();
        assert_eq!(told(&error), [(1, "fail_on")]);
        session.debug_get_from_remote(&bad, WorkerId(2)).wait().unwrap();
        session.get_global_func("fail").unwrap().call(()).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        assert_eq!(told(&error), [(0, "fail"), (1, "fail"), (2, "fail")]);
        site.works();
    });
}

#[test]
fn a_function_that_fails_between_two_collectives_poisons_the_second_alone() {
    over(&ALL, &Options::default(), |site| {
        let session = &site.session;
        let x = site.ones(4);
        let first = session.allreduce(&x, None, ReduceOp::Sum, Scope::World).unwrap();
        let y = session.get_global_func("tensor_unless").unwrap().call((2,)).unwrap();
        let second = session.allreduce(&y, None, ReduceOp::Sum, Scope::World).unwrap();
        let third = session.allreduce(&first, None, ReduceOp::Max, Scope::World).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        assert_eq!(told(&error), [(2, "tensor_unless")]);
        for worker in 0..3 {
            let poison = session.debug_get_from_remote(&second, WorkerId(worker)).wait().unwrap_err();
            assert!(poison.to_string().contains("no tensor here"), "{poison}");
            session.debug_get_from_remote(&third, WorkerId(worker)).wait().unwrap();
        }
        site.works();
    });
}

#[test]
fn a_panic_is_an_error_of_its_worker() {
    over(&ALL, &Options::default(), |site| {
        let session = &site.session;
        session.get_global_func("panic_on").unwrap().call((1,)).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        assert_eq!(told(&error), [(1, "panic_on")]);
        assert_eq!(error.cause().kind(), ErrorKind::Panic);
        assert!(error.to_string().contains("told to panic"), "{error}");
        site.works();
    });
}

/// Activity of the workers when one of them fails.
#[derive(Clone, Copy, Debug)]
enum State {
    Idle,
    InCall,
    InCollective,
    InCopy,
}

/// Brings the workers into an activity. Returns the worker that is to fail, and a copy in progress.
fn enter(site: &Site, state: State) -> (u32, Option<Completion<Tensor>>) {
    match state {
        State::Idle => (1, None),
        State::InCall => {
            site.hold(&[1]);
            (1, None)
        }
        State::InCollective => {
            let path = site.folder.path().join("go");
            let hold = site.session.get_global_func("hold_in_collectives").unwrap();
            hold.call((path.to_str().unwrap(),)).unwrap();
            site.came(&path, 1);
            (1, None)
        }
        State::InCopy => {
            let x = site.session.empty(&[16 << 20], DataType::U8, None).unwrap();
            site.session.sync_all().wait().unwrap();
            // The copy cannot have ended, because the worker does not run.
            signal(site.pids[0], Signal::STOP);
            site.session.copy_to_worker_0(&Tensor::zeros([1 << 20], DataType::U8).unwrap(), None).unwrap();
            (0, Some(site.session.copy_from_worker_0(&x)))
        }
    }
}

/// Checks that all pending and all later operations fail with the loss of the worker, and that
/// `shutdown` returns.
fn all_hear(site: &Site, worker: u32, kind: &[ErrorKind], copy: Option<Completion<Tensor>>) {
    let session = &site.session;
    let error = session.sync_all().wait().unwrap_err();
    let DiscoError::Session(cause) = &error else { panic!("{error}") };
    assert!(kind.contains(&cause.kind()), "{error:?}");
    assert!(error.to_string().contains(&format!("worker {worker} at ")), "{error}");
    if let Some(copy) = copy {
        assert_eq!(copy.wait().unwrap_err(), error);
    }
    assert_eq!(session.empty(&[1], DataType::F32, None).unwrap_err(), error);
    assert_eq!(session.reinit_ccl().wait().unwrap_err(), error);
    assert_eq!(session.ccl_state(), CclState::Ended(cause.clone()));
    session.shutdown().wait().unwrap();
}

fn killed(state: State) {
    over(&PROCESSES, &Options::default(), move |site| {
        let (victim, copy) = enter(site, state);
        let before = pace::now();
        signal(site.pids[victim as usize], Signal::KILL);
        // A worker that was stopped before may already have been silent for too long.
        let kinds: &[ErrorKind] = match state {
            State::InCopy => &[ErrorKind::PeerLost, ErrorKind::PeerSilent],
            _ => &[ErrorKind::PeerLost],
        };
        all_hear(site, victim, kinds, copy);
        let took = pace::since(before);
        assert!(took < LIMIT, "{took:?}");
        // The parent of a process knows what it died of.
        let is_child = matches!(site.launch, Launch::Processes(_) | Launch::NodeOfProcesses(_));
        if is_child && kinds == [ErrorKind::PeerLost] {
            let error = site.session.sync_all().wait().unwrap_err().to_string();
            assert!(error.contains("the program ended (signal: 9"), "{error}");
        }
    });
}

#[test]
fn a_worker_that_is_killed_while_idle_ends_the_session() {
    killed(State::Idle);
}

#[test]
fn a_worker_that_is_killed_in_a_call_ends_the_session() {
    killed(State::InCall);
}

#[test]
fn a_worker_that_is_killed_in_a_collective_ends_the_session() {
    killed(State::InCollective);
}

#[test]
fn a_worker_that_is_killed_in_a_copy_ends_the_session() {
    killed(State::InCopy);
}

/// Options for sessions whose workers fall silent.
fn attentive() -> Options {
    let mut options = Options::default();
    options.keep_alive = ATTENTIVE;
    options
}

fn stopped(state: State) {
    over_in_short_time(&PROCESSES, &attentive(), move |site| {
        let (victim, copy) = enter(site, state);
        signal(site.pids[victim as usize], Signal::STOP);
        all_hear(site, victim, &[ErrorKind::PeerSilent], copy);
        // The peer next to the worker (controller, node or gateway) has tested it at the keep-alive
        // of the session.
        let told = site.session.sync_all().wait().unwrap_err().to_string();
        assert!(told.contains(&format!("{:?}", 3 * ATTENTIVE)), "{told}");
    });
}

#[test]
fn a_worker_that_stops_answering_while_idle_ends_the_session() {
    stopped(State::Idle);
}

#[test]
fn a_worker_that_stops_answering_in_a_call_ends_the_session() {
    stopped(State::InCall);
}

#[test]
fn a_worker_that_stops_answering_in_a_collective_ends_the_session() {
    stopped(State::InCollective);
}

#[test]
fn a_worker_that_stops_answering_in_a_copy_ends_the_session() {
    stopped(State::InCopy);
}

/// Options with short time limits, which run out in the test.
fn impatient() -> Options {
    let mut options = Options::default();
    options.collective_timeout = Some(Duration::from_secs(1));
    options.stall_timeout = Duration::from_secs(1);
    options.init_timeout = Duration::from_secs(2);
    options.shutdown_timeout = Duration::from_secs(1);
    options
}

#[test]
fn a_worker_that_never_comes_breaks_the_collectives_and_not_the_session() {
    over_in_short_time(&ALL, &impatient(), |site| {
        let session = &site.session;
        let release = site.hold(&[1]);
        session.allreduce(&site.ones(4), None, ReduceOp::Sum, Scope::World).unwrap();
        for worker in [0, 2] {
            let error = session.sync_worker(WorkerId(worker)).wait().unwrap_err();
            assert_eq!(told(&error), [(worker, "allreduce")]);
            let text = error.to_string();
            // The rank whose time passes first breaks the group. The other hears of it from that
            // rank, or from the controller, which then aborts its collective.
            assert_eq!(error.cause().kind(), ErrorKind::DeadlineExceeded, "{text}");
            // The error names the rank, the collective and its size, and the activity of each
            // worker.
            assert!(text.contains("rank 1 never entered allreduce(sum) of 4 float32 #1"), "{text}");
            assert!(text.contains("rank 2: "), "{text}");
        }
        let CclState::Broken(breakage) = session.ccl_state() else { panic!("{:?}", session.ccl_state()) };
        assert_eq!(breakage.culprit, Some(WorkerId(1)), "{breakage:?}");
        // The other workers execute further commands.
        let echo = session.get_global_func("echo").unwrap().call((5,)).unwrap();
        assert_eq!((int(session, &echo, 0), int(session, &echo, 2)), (5, 5));
        // The collectives cannot be made anew while one worker is missing.
        let error = session.reinit_ccl().wait().unwrap_err();
        assert_eq!(error.cause().kind(), ErrorKind::DeadlineExceeded);
        assert!(error.to_string().contains("worker 1 was still busy"), "{error}");
        assert!(session.ccl_state().breakage().is_some());

        std::fs::write(&release, "").unwrap();
        let error = session.sync_worker(WorkerId(1)).wait().unwrap_err();
        assert_eq!(told(&error), [(1, "allreduce")]);
        session.reinit_ccl().wait().unwrap();
        site.works();
        // The collective fails once more, and then the shutdown does not wait for the missing
        // worker.
        std::fs::remove_file(&release).unwrap();
        site.hold(&[1]);
        session.barrier(Scope::World).unwrap();
        let error = session.shutdown().wait().unwrap_err();
        assert_eq!(error.cause().kind(), ErrorKind::DeadlineExceeded);
        assert!(error.to_string().contains('1') && error.to_string().contains("left behind"), "{error}");
        // Threads have to be released; processes end by themselves.
        std::fs::write(&release, "").unwrap();
    });
}

#[test]
fn a_function_that_fails_before_a_collective_of_its_own_breaks_the_collectives_at_once() {
    for another_follows in [false, true] {
        over(&ALL, &Options::default(), move |site| {
            let session = &site.session;
            site.works();
            let x = site.ones(4);
            session.get_global_func("sum_unless").unwrap().call((1,)).unwrap();
            // The second collective has the same type and size, and must not be taken for the
            // first.
            let sum = another_follows.then(|| session.allreduce(&x, None, ReduceOp::Sum, Scope::World).unwrap());
            let error = session.sync_all().wait().unwrap_err();
            let mut expected = vec![(0, "sum_unless"), (1, "sum_unless"), (2, "sum_unless")];
            if another_follows {
                expected.extend([(0, "allreduce"), (1, "allreduce"), (2, "allreduce")]);
            }
            assert_eq!(told(&error), expected, "{error}");
            assert_eq!(error.failures()[1].cause.message(), "told to fail");
            for waiting in [0, 2] {
                let text = error.failures()[waiting].to_string();
                assert!(text.contains("rank 1 went on without a collective"), "{text}");
            }
            if let Some(sum) = sum {
                session.debug_get_from_remote(&sum, WorkerId(1)).wait().unwrap_err();
            }
            assert_eq!(site.is_broken().culprit, Some(WorkerId(1)));
            session.reinit_ccl().wait().unwrap();
            site.works();
        });
    }
}

#[test]
fn collectives_are_aborted_from_the_controller_and_made_anew() {
    over(&ALL, &Options::default(), |site| {
        let session = &site.session;
        // So large that no rank can end it without the others, even where they have begun it before
        // they heard of the abort.
        let x = site.ones(1 << 18);
        let release = site.hold(&[2]);
        session.allreduce(&x, None, ReduceOp::Sum, Scope::World).unwrap();
        session.abort_ccl("enough of this").unwrap();
        for worker in [0, 1] {
            let error = session.sync_worker(WorkerId(worker)).wait().unwrap_err();
            assert_eq!(told(&error), [(worker, "allreduce")]);
            assert_eq!(error.cause().kind(), ErrorKind::Cancelled);
            assert!(error.to_string().contains("enough of this"), "{error}");
        }
        std::fs::write(&release, "").unwrap();
        let error = session.sync_worker(WorkerId(2)).wait().unwrap_err();
        assert_eq!(told(&error), [(2, "allreduce")]);
        let breakage = site.is_broken();
        assert_eq!(breakage.culprit, None);
        assert!(breakage.cause.message().contains("enough of this"), "{breakage:?}");
        // Collectives in between are refused at once, and reported like any failure.
        session.barrier(Scope::World).unwrap();
        session.abort_ccl("again").unwrap();
        let (one, two) = (session.reinit_ccl(), session.reinit_ccl());
        assert_eq!(two.wait().unwrap_err().cause().kind(), ErrorKind::Busy);
        one.wait().unwrap();
        let error = session.sync_all().wait().unwrap_err();
        assert_eq!(told(&error), [(0, "barrier"), (1, "barrier"), (2, "barrier")]);
        site.works();
        // An abort without a cause, and with the name of a backend.
        session.reinit_ccl().wait().unwrap();
        session.init_ccl("host", &[]).wait().unwrap();
        site.works();
    });
}

/// Servers of this process, whose data listeners are reached through forwarders.
#[test]
fn a_partition_between_workers_breaks_the_collectives_until_it_is_over() {
    repeat_after_stalls(|| {
        guarded("partition", || {
            let network = runtime();
            let (addresses, _servers) = serve(&network, 3);
            let anywhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 9));
            let start = || network.block_on(ByteForwarder::start(anywhere, Pipe::default())).unwrap();
            let forwarders: Arc<Vec<ByteForwarder>> = Arc::new((0..3).map(|_| start()).collect());
            let mut options = impatient();
            options.data_addresses = vec![Ipv4Addr::LOCALHOST.into(); 3];
            let asked = Arc::new(Mutex::new(Vec::new()));
            let (through, seen) = (Arc::clone(&forwarders), Arc::clone(&asked));
            options.advertise = Some(Advertise::new(move |worker, bound| {
                seen.lock().unwrap().push(worker);
                let forwarder = &through[worker.0 as usize];
                forwarder.lead_to(bound);
                forwarder.address()
            }));
            let session = SocketSession::new(addresses, 1, 1).options(options).start().wait().unwrap();
            assert_eq!(*asked.lock().unwrap(), [0, 1, 2].map(WorkerId));
            let pass = |passes| forwarders.iter().for_each(|forwarder| forwarder.pass(passes));
            let barrier = || {
                session.barrier(Scope::World).unwrap();
                session.sync_all().wait()
            };
            barrier().unwrap();
            // The network parts in the middle of a large collective, and between two collectives.
            for len in [4, 4 << 20] {
                let x = session.empty(&[len], DataType::F32, None).unwrap();
                session.sync_all().wait().unwrap();
                pass(false);
                session.allreduce(&x, None, ReduceOp::Sum, Scope::World).unwrap();
                let error = session.sync_all().wait().unwrap_err();
                assert_eq!(error.failures().len(), 3, "{error}");
                assert!(error.to_string().contains("allreduce(sum) of"), "{error}");
                let CclState::Broken(breakage) = session.ccl_state() else { panic!("{:?}", session.ccl_state()) };
                assert!(breakage.culprit.is_some(), "{breakage:?}");
                // The session lives, and cannot make the collectives anew over this network.
                let id = session.get_global_func("worker_id").unwrap().call(()).unwrap();
                assert_eq!(int(&session, &id, 2), 2);
                let error = session.reinit_ccl().wait().unwrap_err();
                assert!(error.failures().iter().all(|failure| failure.command == "init_ccl"), "{error}");
                assert!(!error.failures().is_empty(), "{error}");
                assert!(session.ccl_state().breakage().is_some());
                pass(true);
                session.reinit_ccl().wait().unwrap();
                assert_eq!(session.ccl_state(), CclState::Running);
                barrier().unwrap();
            }
            pass(false);
            session.barrier(Scope::World).unwrap();
            // The workers may leave the collective in time, or be left behind.
            if let Err(error) = session.shutdown().wait() {
                assert_eq!(error.cause().kind(), ErrorKind::DeadlineExceeded, "{error}");
            }
        })
    });
}

#[test]
fn a_partition_between_controller_and_worker_ends_the_session_and_frees_the_servers() {
    for collective in [false, true] {
        repeat_after_stalls(|| {
            guarded("partition", move || {
                let network = runtime();
                let options = ServeOptions { keep_alive: ATTENTIVE, ..ServeOptions::default() };
                let (mut addresses, servers) = serve_with(&network, 2, &options);
                let to = addresses[1].trim_start_matches("tcp://").parse().unwrap();
                let forwarder = network.block_on(ByteForwarder::start(to, Pipe::default())).unwrap();
                addresses[1] = format!("tcp://{}", forwarder.address());
                let session = SocketSession::new(addresses, 1, 1).options(attentive()).start().wait().unwrap();
                session.sync_all().wait().unwrap();
                forwarder.pass(false);
                if collective {
                    session.barrier(Scope::World).unwrap();
                }
                let error = session.sync_all().wait().unwrap_err();
                assert_eq!(error.cause().kind(), ErrorKind::PeerSilent, "{error}");
                assert!(error.to_string().contains("worker 1 at tcp://"), "{error}");
                session.shutdown().wait().unwrap();
                eventually("the end of the servers' sessions", || servers.iter().all(|server| server.sessions() == 0));
            })
        });
    }
}

/// A controller in a process of its own, which is killed when this value is dropped.
struct Controller {
    process: Child,
    pids: Vec<u32>,
}

impl Controller {
    fn start(args: &[&str]) -> Self {
        let mut process = Command::new(CONTROLLER).args(args).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let pids = line.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
        Self { process, pids }
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        // The process has ended already, unless the test has failed.
        _ = self.process.kill();
        _ = self.process.wait();
    }
}

const DOINGS: [&str; 3] = ["idle", "call", "collective"];

/// Time limit within which children end after their controller.
const ORPHANED: Duration = Duration::from_secs(2);

#[test]
fn children_end_with_a_controller_that_is_killed() {
    for doing in DOINGS {
        guarded(doing, move || {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("go");
            let mut controller = Controller::start(&[doing, path.to_str().unwrap(), "processes", NODE]);
            assert_eq!(controller.pids.len(), 2);
            if doing != "idle" {
                let sign = format!("{}-1", path.display());
                eventually("a worker's call", || PathBuf::from(&sign).exists());
            }
            let before = pace::now();
            controller.kill();
            for pid in &controller.pids {
                eventually("the end of a child", || !is_running(*pid));
            }
            let took = pace::since(before);
            assert!(took < ORPHANED, "{took:?}");
        });
    }
}

#[test]
fn servers_outlive_a_controller_that_is_killed_and_serve_the_next() {
    for doing in DOINGS {
        guarded(doing, move || {
            let network = runtime();
            let (addresses, servers) = serve(&network, 2);
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("go");
            let mut args = vec![doing, path.to_str().unwrap(), "nodes"];
            args.extend(addresses.iter().map(String::as_str));
            let mut controller = Controller::start(&args);
            assert_eq!(controller.pids, [std::process::id(); 2]);
            if doing != "idle" {
                let sign = format!("{}-1", path.display());
                eventually("a worker's call", || PathBuf::from(&sign).exists());
            }
            assert!(servers.iter().all(|server| server.sessions() == 1));
            controller.kill();
            eventually("the end of the servers' sessions", || servers.iter().all(|server| server.sessions() == 0));
            let session = SocketSession::new(&addresses, 1, 1).start().wait().unwrap();
            session.barrier(Scope::World).unwrap();
            session.sync_all().wait().unwrap();
            session.shutdown().wait().unwrap();
            // A thread that is in a call ends when the call returns.
            std::fs::write(&path, "").unwrap();
        });
    }
}
