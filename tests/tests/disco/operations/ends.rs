//! Failures and ends: poisoned registers, lost workers, shutdowns.

use super::*;

#[test]
fn failures_poison_registers_and_are_reported_once() {
    everywhere(NODE, &[(2, 1), (4, 2)], |session| {
        let n = session.num_workers();
        let fails = session.get_global_func("fail_on").unwrap();
        let bad = fails.call((1,)).unwrap();
        let add = session.get_global_func("add").unwrap();
        let worse = add.call((&bad, 1.0)).unwrap();
        let fine = add.call((1.0, 1.0)).unwrap();
        session.sync_worker(WorkerId(0)).wait().unwrap();
        let error = session.sync_worker(WorkerId(1)).wait().unwrap_err();
        let [failure] = error.failures() else { panic!("{error}") };
        assert_eq!((failure.worker, failure.command.as_str()), (WorkerId(1), "fail_on"));
        assert_eq!((failure.cause.kind(), failure.cause.message()), (ErrorKind::Application, "told to fail"));
        session.sync_all().wait().unwrap();
        // Poisoned registers keep their cause, and the other workers have their results.
        for register in [&bad, &worse] {
            let poison = session.debug_get_from_remote(register, WorkerId(1)).wait().unwrap_err();
            assert_eq!(poison.failures(), error.failures());
        }
        assert_eq!(value(session, &worse, 0), Value::Float(2.0));
        assert_eq!(value(session, &fine, 1), Value::Float(2.0));

        // One worker has no input: no worker has an output, and the group goes on.
        let x = session.get_global_func("tensor_unless").unwrap().call((1,)).unwrap();
        let sum = session.allreduce(&x, None, ReduceOp::Sum, Scope::World).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        assert_eq!(error.failures().len(), 1, "{error}");
        for worker in 0..n {
            let poison = session.debug_get_from_remote(&sum, WorkerId(worker)).wait().unwrap_err();
            assert!(poison.to_string().contains("no tensor here"), "{poison}");
        }
        let healthy = by_worker(session, &[2]);
        session.allreduce(&healthy, None, ReduceOp::Sum, Scope::World).unwrap();
        session.sync_all().wait().unwrap();

        // Failures by a panic on one worker, by an unknown name, and by tensors that do not fit.
        session.get_global_func("panic_on").unwrap().call((0,)).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        assert_eq!(error.cause().kind(), ErrorKind::Panic);
        let unknown = session.get_global_func("no such function").unwrap();
        unknown.call(()).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        assert_eq!(error.failures().len(), n as usize, "{error}");
        let small = session.empty(&[1], DataType::F32, None).unwrap();
        session.allreduce(&healthy, Some(&small), ReduceOp::Sum, Scope::World).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        assert_eq!(error.failures().len(), n as usize);
        assert!(error.to_string().contains("the source is float32 [2], the destination float32 [1]"), "{error}");
        assert_eq!(error.failures()[1].worker, WorkerId(1));
        // Misuse is an error at once.
        let error = session.sync_worker(WorkerId(n)).wait().unwrap_err();
        assert!(error.to_string().contains("there is no worker"), "{error}");
    });
}

#[test]
fn registers_come_back_in_order_under_random_drops() {
    everywhere(NODE, &[(2, 1)], |session| {
        let echo = session.get_global_func("echo").unwrap();
        let mut random = 0x2545_f491_4f6c_dd1d_u64;
        let mut live: Vec<(DRef, i64)> = Vec::new();
        let mut highest = 0;
        for step in 0..3000_i64 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            if live.len() > 20 || (random.is_multiple_of(3) && !live.is_empty()) {
                let at = random as usize / 3 % live.len();
                live.swap_remove(at);
            } else {
                let made = echo.call((step,)).unwrap();
                highest = highest.max(made.register());
                live.push((made, step));
            }
            if step % 500 == 0 {
                for (register, expected) in &live {
                    assert_eq!(value(session, register, 1), Value::Int(*expected));
                }
            }
        }
        assert!(highest < 64, "registers are used again, and {highest} was reached");
    });
}

#[test]
fn a_small_window_delays_the_controller_and_loses_nothing() {
    let mut options = disco::Options::default();
    options.window = 4096;
    let session = disco::ThreadedSession::new(2, 1).registry(rpc_tests::spmd::registry()).options(options);
    let session = session.start().wait().unwrap();
    let x = session.empty(&[1], DataType::F32, None).unwrap();
    let add = session.get_global_func("add_to").unwrap();
    for _ in 0..2000 {
        add.call((&x, 1.0)).unwrap();
    }
    assert_eq!(tensor(&session, &x, 1).1, [2000.0]);
    session.shutdown().wait().unwrap();
    // Operations of an ended session fail, and a second shutdown succeeds.
    let error = add.call((&x, 1.0)).unwrap_err();
    assert!(matches!(&error, DiscoError::Session(error) if error.kind() == ErrorKind::Closed), "{error}");
    session.shutdown().wait().unwrap();
}

#[test]
fn async_programs_await() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let session = disco::ThreadedSession::new(2, 1).registry(rpc_tests::spmd::registry()).start().await.unwrap();
        session.room().await.unwrap();
        let id = session.get_global_func("worker_id").unwrap().call(()).unwrap();
        assert!(matches!(
            session.debug_get_from_remote(&id, WorkerId(1)).await.unwrap(),
            Content::Value(Value::Int(1))
        ));
        session.sync_all().await.unwrap();
        session.shutdown().await.unwrap();
    });
}

/// Returns true once the process has ended and been reaped, which may take a while; false if it
/// takes too long.
fn has_gone(pid: i64) -> bool {
    let began = Instant::now();
    while std::path::Path::new(&format!("/proc/{pid}/stat")).exists() {
        if began.elapsed() > Duration::from_secs(60) {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

fn pids(session: &DiscoSession) -> Vec<i64> {
    let pid = session.get_global_func("pid").unwrap().call(()).unwrap();
    (0..session.num_workers())
        .map(|worker| match value(session, &pid, worker) {
            Value::Int(pid) => pid,
            other => panic!("{other:?}"),
        })
        .collect()
}

#[test]
fn no_process_is_left_after_a_shutdown_or_without_one() {
    for shut_down in [true, false] {
        let fixture = Launch::Processes(NODE).start(2, 1);
        let pids = pids(&fixture.session);
        if shut_down {
            fixture.session.shutdown().wait().unwrap();
        }
        drop(fixture);
        assert!(pids.iter().all(|pid| has_gone(*pid)));
    }
}

#[test]
fn a_dead_worker_fails_all_operations_of_the_session() {
    for in_collective in [false, true] {
        let fixture = Launch::Processes(NODE).start(3, 1);
        let session = &fixture.session;
        let pids = pids(session);
        let x = by_worker(session, &[4]);
        session.get_global_func("die_on").unwrap().call((1,)).unwrap();
        if in_collective {
            session.allreduce(&x, None, ReduceOp::Sum, Scope::World).unwrap();
        }
        let error = session.sync_all().wait().unwrap_err();
        let lost =
            |error: &DiscoError| matches!(error, DiscoError::Session(error) if error.kind() == ErrorKind::PeerLost);
        assert!(lost(&error), "{error}");
        assert!(error.to_string().contains("worker 1 at "), "{error}");
        // Later operations fail with the same error.
        assert_eq!(session.copy_from_worker_0(&x).wait().unwrap_err(), error);
        assert_eq!(session.empty(&[1], DataType::F32, None).unwrap_err(), error);
        session.shutdown().wait().unwrap();
        assert!(pids.iter().all(|pid| has_gone(*pid)));
    }
}

#[test]
fn servers_are_free_again_after_a_session() {
    for (shut_down, data) in
        [(true, Data::Shared), (false, Data::Shared), (true, Data::Relayed), (false, Data::Relayed)]
    {
        let mut fixture = Launch::Tcp { per_node: 1, data }.start(2, 1);
        fixture.session.barrier(Scope::World).unwrap();
        fixture.session.sync_all().wait().unwrap();
        assert_eq!(fixture.sessions(), 2);
        let other = Launch::Threads.start(1, 1).session;
        let session = std::mem::replace(&mut fixture.session, other);
        if shut_down {
            session.shutdown().wait().unwrap();
        }
        drop(session);
        let began = Instant::now();
        while fixture.sessions() > 0 {
            assert!(began.elapsed() < Duration::from_secs(60), "the servers still have sessions");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn references_of_one_session_are_refused_by_another() {
    let (one, two) = (Launch::Threads.start(1, 1).session, Launch::Threads.start(1, 1).session);
    let x = one.empty(&[1], DataType::F32, None).unwrap();
    let echo = two.get_global_func("echo").unwrap();
    let errors = [
        echo.call((&x,)).unwrap_err(),
        one.call_packed(&echo, ()).unwrap_err(),
        two.barrier(Scope::World).and(two.allreduce(&x, None, ReduceOp::Sum, Scope::World)).unwrap_err(),
    ];
    for error in errors {
        assert!(error.to_string().contains("belongs to another session"), "{error}");
    }
}

#[test]
fn shutdown_returns_though_a_worker_is_busy() {
    let fixture = Launch::Threads.start(2, 1);
    let session = &fixture.session;
    session.get_global_func("sleep_on").unwrap().call((1, 20_000)).unwrap();
    let error = session.shutdown().wait().unwrap_err();
    assert_eq!(error.cause().kind(), ErrorKind::DeadlineExceeded);
    let error = session.sync_all().wait().unwrap_err();
    assert_eq!(error.cause().kind(), ErrorKind::Closed);
}
