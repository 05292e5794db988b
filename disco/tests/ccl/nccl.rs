//! A rank of NCCL over a stand-in for the library that works on host memory: results, and what
//! happens when ranks or the library fail.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::time::Duration;

use disco::ccl::nccl::{LIBRARY_VARIABLE, Library, NcclCcl, Options, Version};
use disco::ccl::{
    BreakCause, Breakdown, Buffers, Ccl, CclError, Collective, CollectiveInput, Control, Operation, Outcome, Rank,
    ReduceOp, host,
};
use rpc_conformance::threads::threads_named;
use rpc_core::{DataType, DataTypeCode, Device, ErrorKind, RpcError};

use crate::launch::{self, Launch};
use crate::nccl_library::{
    DriverCall, Fake, compile, controls_of_groups, long_limits, on_devices, on_ranks, on_ranks_of,
};
use ccl_conformance::{Aliasing, assert_mismatch, check, conformance_of};

/// Types of the model that NCCL reduces.
const NUMERIC: [DataType; 10] = [
    DataType::I8,
    DataType::I32,
    DataType::I64,
    DataType::U8,
    DataType::U32,
    DataType::U64,
    DataType::F16,
    DataType::BF16,
    DataType::F32,
    DataType::F64,
];

/// Media of a test's control communicators: one of each kind.
const CONTROLS: [Launch; 3] = [Launch::Threads, Launch::Segment, Launch::Unix];

/// Time of limits that are to run out.
const SHORT: Duration = Duration::from_millis(300);

/// Time of a limit that is not to run out before the one of what hangs, however busy the machine
/// is.
const RUNS_OUT: Duration = Duration::from_secs(2);

fn allreduce(ccl: &mut dyn Ccl, count: usize) -> Result<(), CclError> {
    let mut data = vec![1_u8; count * 4];
    ccl.allreduce(ReduceOp::Sum, DataType::F32, count, Buffers::in_place(&mut data).into())
}

fn breakdown(result: Result<(), CclError>) -> Breakdown {
    match result {
        Err(CclError::Broken(breakdown)) => (*breakdown).clone(),
        other => panic!("the group should be broken: {other:?}"),
    }
}

/// Checks that some calls work.
fn assert_lives(ccl: &mut dyn Ccl) {
    for (seed, operation) in (0..).zip([Operation::Allreduce(ReduceOp::Sum), Operation::AllToAll, Operation::Allgather])
    {
        check(ccl, Collective::new(operation, DataType::F32, 1000), seed, Aliasing::Mixed);
    }
}

#[test]
fn versions_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let Some(old) = compile(folder.path(), "libnccl.so.2", &["-DVERSION=21401"]) else { return };
    let old = Library::open(old).unwrap();
    assert_eq!(old.version(), Version::new(2, 14, 1));
    assert_ne!(old.unique_id().unwrap(), old.unique_id().unwrap());
    assert_eq!(old.error_string(6), "remote error");
    assert_eq!(old.last_error(), "as the test wants it");

    let ancient = compile(folder.path(), "libnccl.so", &["-DVERSION=2804"]).unwrap();
    let error = Library::open(&ancient).unwrap_err().to_string();
    assert!(error.contains("it is version 2.8.4, and 2.14 is needed"), "{error}");
    let stranger = folder.path().join("stranger.so");
    let empty = folder.path().join("empty.c");
    std::fs::write(&empty, "int nothing;").unwrap();
    let cc = std::process::Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&stranger, &empty]).status();
    assert!(cc.unwrap().success());
    let error = Library::open(&stranger).unwrap_err().to_string();
    assert!(error.contains("it has no ncclGetVersion"), "{error}");
}

/// Child process of the test below.
#[test]
fn child() {
    if let Ok(expected) = std::env::var("DISCO_NCCL_TEST_CHILD") {
        let found = Library::load().map_or_else(|error| error.to_string(), |library| library.to_string());
        assert!(found.contains(&expected), "'{expected}' is not in: {found}");
    }
}

#[test]
fn the_environment_names_the_library_and_a_failure_lists_every_place() {
    let folder = tempfile::tempdir().unwrap();
    let Some(library) = compile(folder.path(), "libnccl.so.2", &["-DVERSION=21800"]) else { return };
    let packages = folder.path().join("env/lib/python3.12/site-packages/nvidia/nccl/lib");
    std::fs::create_dir_all(&packages).unwrap();
    let in_python = packages.join("libnccl.so.2");
    std::fs::copy(&library, &in_python).unwrap();
    let environment = folder.path().join("env");
    let missing = folder.path().join("missing.so");
    let nowhere = folder.path().join("nowhere");
    for (variables, expected) in [
        (vec![(LIBRARY_VARIABLE, &library)], library.to_str().unwrap()),
        (vec![(LIBRARY_VARIABLE, &missing), ("VIRTUAL_ENV", &environment)], "missing.so: cannot open"),
        // Whatever the system has itself goes before: then that is found.
        (vec![("CONDA_PREFIX", &environment)], "libnccl.so.2"),
        (vec![("VIRTUAL_ENV", &nowhere)], "libnccl.so: cannot open"),
    ] {
        if expected.starts_with("libnccl.so: ") && Library::load().is_ok() {
            println!("SKIPPED: this machine has a library of its own");
            continue;
        }
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["nccl::child", "--exact"]).env("DISCO_NCCL_TEST_CHILD", expected);
        for name in [LIBRARY_VARIABLE, "VIRTUAL_ENV", "CONDA_PREFIX"] {
            command.env_remove(name);
        }
        let output = command.envs(variables).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}

#[test]
fn every_collective_matches_the_model() {
    for version in [23_203, 21_401] {
        for size in 1..=4 {
            let Some(fake) = Fake::version(version) else { return };
            let launch = CONTROLS[size % CONTROLS.len()];
            on_ranks(&fake, launch, size, &long_limits(), |mut member| conformance_of(&mut member.ccl, &NUMERIC));
            fake.assert_tidy();
        }
    }
}

#[test]
fn a_group_of_a_group_is_in_the_order_of_keys() {
    let Some(fake) = Fake::new() else { return };
    let groups = controls_of_groups(&[2, 2], &launch::long_limits());
    // World rank 0 is the last of the even ones, and 1 of the odd ones.
    let [even, odd]: [Vec<_>; 2] = groups.try_into().ok().unwrap();
    let places = even.into_iter().rev().zip(odd.into_iter().rev()).flat_map(|(even, odd)| [even, odd]);
    let places: Vec<_> = places.map(|control| std::sync::Mutex::new(Some(control))).collect();
    on_ranks(&fake, Launch::Threads, 4, &long_limits(), |mut member| {
        let world = member.ccl.rank().0;
        let control = places[world as usize].lock().unwrap().take().unwrap();
        let mut group = member.ccl.split(world % 2, 10 - world, control).unwrap();
        assert_eq!((group.size(), group.rank()), (2, Rank(u32::from(world < 2))));
        let mut sum = [world as u8];
        for _ in 0..3 {
            sum = [world as u8];
            group.allreduce(ReduceOp::Sum, DataType::U8, 1, Buffers::in_place(&mut sum).into()).unwrap();
            assert_lives(&mut member.ccl);
        }
        assert_eq!(sum, [if world.is_multiple_of(2) { 2 } else { 4 }]);
        assert_lives(&mut group);
    });
    fake.assert_tidy();
}

#[test]
fn a_group_of_a_group_needs_a_newer_library() {
    let Some(fake) = Fake::version(21_701) else { return };
    let controls = controls_of_groups(&[1, 1], &launch::long_limits()).into_iter().flatten();
    let controls: Vec<_> = controls.map(|control| std::sync::Mutex::new(Some(control))).collect();
    on_ranks(&fake, Launch::Threads, 2, &long_limits(), |mut member| {
        let rank = member.ccl.rank().0;
        let control = controls[rank as usize].lock().unwrap().take().unwrap();
        let error = member.ccl.split(rank, 0, control).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().starts_with("ncclCommSplit needs NCCL 2.18, found 2.17.1 (/"), "{error}");
        assert_lives(&mut member.ccl);
    });
    fake.assert_tidy();
}

#[test]
fn poison_and_wrong_arguments_reach_all_ranks_and_the_group_lives() {
    let cause = RpcError::new(ErrorKind::Application, "no data today").with_application_kind("my::Error");
    for launch in CONTROLS {
        let Some(fake) = Fake::new() else { return };
        on_ranks(&fake, launch, 3, &long_limits(), |mut member| {
            let ccl = &mut member.ccl;
            let mut data = vec![7_u8; 400];
            let is_odd = ccl.rank() == Rank(1);
            let input =
                if is_odd { CollectiveInput::Poisoned(cause.clone()) } else { Buffers::in_place(&mut data).into() };
            let error = ccl.allreduce(ReduceOp::Sum, DataType::F32, 100, input).unwrap_err();
            assert!(matches!(&error, CclError::Poisoned { rank: Rank(1), .. }), "{error}");
            assert_eq!(RpcError::from(error), cause);
            let len = if is_odd { 399 } else { 400 };
            let input = Buffers::in_place(&mut data[..len]).into();
            let error = ccl.allreduce(ReduceOp::Sum, DataType::F32, 100, input).unwrap_err();
            assert!(error.to_string().contains("needs a buffer of 400 bytes on rank 1, and it has 399"), "{error}");
            let error = ccl.broadcast(Rank(9), DataType::U8, 1, Buffers::output(&mut data).into()).unwrap_err();
            assert!(error.to_string().contains("no rank 9 among 3"), "{error}");
            let error = ccl.send(ccl.rank(), DataType::U8, 1, Buffers::input(&[1]).into()).unwrap_err();
            assert!(!error.is_broken(), "{error}");
            assert!(data.iter().all(|byte| *byte == 7), "the output was touched");
            assert_lives(ccl);
            assert!(ccl.control().flights().iter().any(|flight| flight.outcome == Outcome::Failed));
        });
        fake.assert_tidy();
    }
}

#[test]
fn calls_that_differ_never_reach_the_library() {
    for launch in CONTROLS {
        let Some(fake) = Fake::new() else { return };
        on_ranks(&fake, launch, 3, &long_limits(), |mut member| {
            let ccl = &mut member.ccl;
            let odd = ccl.rank() == Rank(2);
            let error = allreduce(ccl, if odd { 100_000 } else { 8 }).unwrap_err();
            assert_mismatch(
                &error,
                &["rank 0 is in allreduce(sum) of 8 float32", "rank 2 is in allreduce(sum) of 100000"],
            );
            let error = if odd { ccl.barrier() } else { allreduce(ccl, 50_000) }.unwrap_err();
            assert_mismatch(&error, &["rank 0 is in allreduce(sum) of 50000 float32", "rank 2 is in barrier"]);
            let mut data = [0; 40];
            let result = match ccl.rank() {
                Rank(0) => ccl.send(Rank(1), DataType::U8, 10, Buffers::input(&data[..10]).into()),
                Rank(1) => ccl.recv(Rank(0), DataType::U8, 40, Buffers::output(&mut data).into()),
                _ => return assert_lives(ccl),
            };
            assert_mismatch(&result.unwrap_err(), &["send", "of 10 uint8", "recv", "of 40 uint8"]);
            assert_lives(ccl);
        });
        // All of it was `assert_lives`: three calls a rank, and a copy where one was in place.
        fake.assert_tidy();
    }
}

#[test]
fn a_rank_that_went_on_is_named_at_once() {
    for launch in CONTROLS {
        let Some(fake) = Fake::new() else { return };
        let given_up = AtomicUsize::new(0);
        on_ranks(&fake, launch, 3, &long_limits(), |mut member| {
            let ccl = &mut member.ccl;
            ccl.set_step(7);
            allreduce(ccl, 10).unwrap();
            let is_ahead = ccl.rank() == Rank(1);
            ccl.set_step(8);
            if is_ahead {
                ccl.leave_step();
                while given_up.load(Ordering::Acquire) < 2 {
                    std::thread::yield_now();
                }
            }
            let breakdown = breakdown(allreduce(ccl, 10));
            given_up.fetch_add(1, Ordering::AcqRel);
            assert_eq!((breakdown.cause, breakdown.rank), (BreakCause::OutOfStep, Rank(1)), "{launch:?}");
        });
        fake.assert_tidy();
    }
}

#[test]
fn an_error_of_the_library_on_one_rank_breaks_the_group_for_all() {
    for launch in CONTROLS {
        let Some(fake) = Fake::new() else { return };
        on_ranks(&fake, launch, 3, &long_limits(), |mut member| {
            let ccl = &mut member.ccl;
            allreduce(ccl, 10).unwrap();
            if ccl.rank() == Rank(1) {
                fake.steer("fake_fail", 1, 6);
                fake.steer("fake_hang", 1, 0);
            }
            let first = breakdown(allreduce(ccl, 10));
            assert_eq!(first.rank, Rank(1));
            let text = first.to_string();
            assert!(text.starts_with("rank 1 failed in allreduce(sum) of 10 float32 #"), "{text}");
            assert!(text.contains("ncclAllReduce: remote error (6): as the test wants it"), "{text}");
            assert_eq!(breakdown(allreduce(ccl, 1)), first);
            assert_eq!(RpcError::from(CclError::Broken(Arc::new(first))).kind(), ErrorKind::PeerLost);
        });
        assert_eq!(fake.ask("fake_aborts"), 3, "every rank aborts, and once");
        fake.assert_tidy();
    }
}

#[test]
fn a_collective_that_comes_to_no_end_breaks_the_group_when_its_time_is_up() {
    let Some(fake) = Fake::new() else { return };
    let mut options = long_limits();
    (options.drain_timeout, options.stall_timeout) = (Some(Duration::ZERO), RUNS_OUT);
    on_ranks(&fake, Launch::Unix, 3, &options, |mut member| {
        assert_lives(&mut member.ccl);
        if member.ccl.rank() == Rank(2) {
            fake.steer("fake_hang", 2, 0);
        }
        let breakdown = breakdown(allreduce(&mut member.ccl, 10));
        let text = breakdown.to_string();
        let what = "ncclAllReduce of allreduce(sum) of 10 float32 has not ended within 2s";
        assert!(text.contains(what), "{text}");
        assert!(text.contains("in allreduce(sum) of 10 float32 #"), "{text}");
    });
    fake.assert_tidy();
}

#[test]
fn an_abort_wakes_ranks_that_wait_for_the_library() {
    for launch in CONTROLS {
        let Some(fake) = Fake::new() else { return };
        let (tell, told) = mpsc::channel::<Arc<dyn Control>>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let controls: Vec<_> = told.into_iter().collect();
                // Until they are in it; whether NCCL has been called already makes no difference.
                let is_in = |control: &Arc<dyn Control>| {
                    let last = control.flights().pop();
                    last.is_some_and(|flight| flight.outcome == Outcome::Outstanding)
                };
                while !controls.iter().all(is_in) {
                    std::thread::yield_now();
                }
                controls[1].abort("enough");
            });
            let tell = std::sync::Mutex::new(Some(tell));
            let ready = Barrier::new(3);
            on_ranks(&fake, launch, 3, &long_limits(), |mut member| {
                fake.steer("fake_hang", 0, 0);
                tell.lock().unwrap().as_ref().unwrap().send(member.ccl.control()).unwrap();
                if ready.wait().is_leader() {
                    tell.lock().unwrap().take();
                }
                let breakdown = breakdown(allreduce(&mut member.ccl, 10));
                assert_eq!(breakdown.cause, BreakCause::Aborted("enough".to_owned()));
                assert!(breakdown.during.starts_with("allreduce(sum) of 10 float32"), "{breakdown}");
            });
        });
        assert_eq!(fake.ask("fake_aborts"), 3);
        fake.assert_tidy();
    }
}

#[test]
fn an_abort_that_hangs_is_told_to_the_owner() {
    let Some(fake) = Fake::new() else { return };
    let stuck = Arc::new(AtomicUsize::new(0));
    let mut options = long_limits();
    // The abort of the other rank has the same limit.
    options.abort_timeout = RUNS_OUT;
    let count = Arc::clone(&stuck);
    options.on_stuck = Arc::new(move |breakdown| {
        assert_eq!(breakdown.rank, Rank(0));
        count.fetch_add(1, Ordering::SeqCst);
    });
    on_ranks(&fake, Launch::Threads, 2, &options, |mut member| {
        assert_lives(&mut member.ccl);
        if member.ccl.rank() == Rank(0) {
            fake.steer("fake_hang_abort", 1, 0);
            fake.steer("fake_hang", 0, 0);
            fake.steer("fake_fail", 0, 3);
        }
        breakdown(allreduce(&mut member.ccl, 10));
    });
    assert_eq!((stuck.load(Ordering::SeqCst), fake.ask("fake_hanging_aborts")), (1, 1));
    assert_eq!((fake.ask("fake_live"), fake.ask("fake_violations")), (1, 0), "what hangs is touched no more");
}

/// The device may still write to the buffers of a call that panics, unless the communicator goes
/// before they do.
#[test]
fn a_call_that_panics_aborts_before_its_buffers_go() {
    let Some(fake) = Fake::new() else { return };
    let mut options = long_limits();
    options.stall_timeout = Duration::from_secs(120);
    on_ranks(&fake, Launch::Threads, 2, &options, |mut member| {
        assert_lives(&mut member.ccl);
        if member.ccl.rank() == Rank(0) {
            fake.steer("fake_hang", 0, 0);
            member.stream.panic_in_next_wait();
            let call = std::panic::AssertUnwindSafe(|| allreduce(&mut member.ccl, 10));
            std::panic::catch_unwind(call).unwrap_err();
        }
        let breakdown = breakdown(allreduce(&mut member.ccl, 10));
        assert_eq!(breakdown.cause, BreakCause::Aborted("a panic in the middle of a collective".to_owned()));
    });
    assert_eq!(fake.ask("fake_aborts"), 2);
    fake.assert_tidy();
}

#[test]
fn eight_bit_floats_need_a_newer_library() {
    let eight = [DataTypeCode::FLOAT8_E4M3FN, DataTypeCode::FLOAT8_E5M2].map(|code| DataType::new(code, 8));
    for version in [22_304, 22_401] {
        let Some(fake) = Fake::version(version) else { return };
        on_ranks(&fake, Launch::Threads, 2, &long_limits(), |mut member| {
            for dtype in eight {
                let mut data = [0; 4];
                let result = member.ccl.allreduce(ReduceOp::Max, dtype, 4, Buffers::in_place(&mut data).into());
                match result {
                    Ok(()) => assert!(version > 22_400),
                    Err(error) => {
                        let text = RpcError::from(error).to_string();
                        assert!(text.contains(" needs NCCL 2.24, found 2.23.4 (") && version < 22_400, "{text}");
                    }
                }
                // Data that only moves does so with any version.
                check(&mut member.ccl, Collective::new(Operation::Allgather, dtype, 5), 1, Aliasing::Apart);
                // And with any device.
                for (major, is_able) in [(8, false), (9, version > 22_400), (10, version > 22_400)] {
                    member.stream.pretend(major, 6);
                    let result = member.ccl.allreduce(ReduceOp::Max, dtype, 4, Buffers::in_place(&mut data).into());
                    assert_eq!(result.is_ok(), is_able, "{major} {result:?}");
                    check(&mut member.ccl, Collective::new(Operation::Allgather, dtype, 5), 1, Aliasing::Apart);
                }
            }
        });
        fake.assert_tidy();
    }
}

#[test]
fn types_that_the_library_lacks_are_named() {
    let Some(fake) = Fake::new() else { return };
    on_ranks(&fake, Launch::Threads, 2, &long_limits(), |mut member| {
        for dtype in [DataType::I16, DataType::U16, DataType::BOOL, DataType::new(DataTypeCode::COMPLEX, 64)] {
            let mut data = [0; 32];
            let data = &mut data[..dtype.size_bytes(4).unwrap() as usize];
            let error = member.ccl.allreduce(ReduceOp::Sum, dtype, 4, Buffers::in_place(data).into()).unwrap_err();
            let error = RpcError::from(error);
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.message().ends_with(&format!("NCCL does not reduce {dtype}")), "{error}");
        }
        // Each lane of a vector is an element.
        let lanes = DataType { lanes: 4, ..DataType::F16 };
        check(&mut member.ccl, Collective::new(Operation::Allreduce(ReduceOp::Max), lanes, 33), 1, Aliasing::Apart);
    });
    fake.assert_tidy();
}

#[test]
fn buffers_on_another_device_are_refused() {
    let Some(fake) = Fake::new() else { return };
    let control = host::threads(1, &launch::long_limits()).unwrap().remove(0);
    let id = fake.library.unique_id().unwrap();
    let stream = fake.stream(Device::cuda(1));
    let mut ccl = NcclCcl::new(Arc::clone(&fake.library), id, Rank(0), 1, control, stream, long_limits()).unwrap();
    let mut data = [1_u8; 4];
    let error = ccl.allreduce(ReduceOp::Sum, DataType::F32, 1, Buffers::in_place(&mut data).into()).unwrap_err();
    assert!(error.to_string().contains("NCCL works on memory of cuda:1 here, and the buffers are on cpu:0"), "{error}");
    let start = data.as_mut_ptr();
    // SAFETY: `data` lives until the call returns, and nobody else touches it.
    let buffers =
        unsafe { Buffers::from_raw(Device::cuda(1), Some((start.cast_const(), 4)), Some((start, 4))) }.unwrap();
    ccl.allreduce(ReduceOp::Sum, DataType::F32, 1, buffers.into()).unwrap();
    ccl.barrier().unwrap();
    drop(ccl);
    fake.assert_tidy();
}

#[test]
fn a_rank_that_cannot_join_is_named_to_all() {
    for launch in CONTROLS {
        let Some(fake) = Fake::new() else { return };
        fake.steer("fake_fail_init", 1, 5);
        on_ranks_of(&fake, launch::group(launch, 3, &launch::long_limits()), &long_limits(), |member| {
            let error = member.err().unwrap();
            assert!(error.message().starts_with("rank 1 failed in barrier #1"), "{error}");
            assert!(error.message().contains("ncclCommInitRankConfig: invalid usage (5)"), "{error}");
        });
        fake.assert_tidy();
    }
}

#[test]
fn a_control_communicator_of_another_place_is_refused() {
    let Some(fake) = Fake::new() else { return };
    let control = host::threads(2, &launch::long_limits()).unwrap().remove(1);
    let (id, stream) = (fake.library.unique_id().unwrap(), fake.stream(Device::cpu()));
    let error = NcclCcl::new(Arc::clone(&fake.library), id, Rank(0), 2, control, stream, long_limits()).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::ApiMisuse);
    assert!(error.message().contains("rank 1 of 2, and this is rank 0 of 2"), "{error}");
}

#[test]
fn work_in_front_of_a_collective_may_take_its_time_and_no_longer() {
    let Some(fake) = Fake::new() else { return };
    on_ranks(&fake, Launch::Segment, 2, &long_limits(), |mut member| {
        let is_busy = member.ccl.rank() == Rank(0);
        member.stream.hold(is_busy);
        std::thread::scope(|scope| {
            let stream = &member.stream;
            scope.spawn(move || stream.hold(false));
            allreduce(&mut member.ccl, 10).unwrap();
        });
        assert_lives(&mut member.ccl);
        // The failure there is the reason why there is no input.
        if is_busy {
            member.stream.fail(RpcError::new(ErrorKind::DeviceLost, "a kernel trapped"));
        }
        let error = RpcError::from(allreduce(&mut member.ccl, 10).unwrap_err());
        assert_eq!((error.kind(), error.message()), (ErrorKind::DeviceLost, "a kernel trapped"));
    });
    fake.assert_tidy();
    // Nobody can tell the work of another rank from a hang.
    let mut options = long_limits();
    (options.drain_timeout, options.stall_timeout) = (Some(RUNS_OUT / 2), RUNS_OUT / 2);
    let (tell, told) = mpsc::channel();
    let told = std::sync::Mutex::new(told);
    on_ranks(&fake, Launch::Segment, 2, &options, |mut member| {
        if member.ccl.rank() == Rank(0) {
            member.stream.hold(true);
            tell.send(Arc::clone(&member.stream)).unwrap();
        }
        let breakdown = breakdown(allreduce(&mut member.ccl, 10));
        assert_eq!(breakdown.rank, Rank(1));
        assert!(breakdown.to_string().contains("has not ended within 2s"), "{breakdown}");
        if member.ccl.rank() == Rank(1) {
            // The other one has heard of it, and waits for its own work: it is not taken for stuck.
            eventually("both have aborted", || fake.ask("fake_aborts") == 2);
            told.lock().unwrap().recv().unwrap().hold(false);
        }
    });
    fake.assert_tidy();
}

/// Returns a rank's tensor, on a device as far as the backend is told. It stays until the group is
/// gone.
fn on_device(rank: Rank, data: &mut [f32]) -> Buffers<'static> {
    let (start, len) = (data.as_mut_ptr().cast::<u8>(), size_of_val(data));
    // SAFETY: the tests keep the data until the ranks are gone, and look at it when it is complete.
    let buffers =
        unsafe { Buffers::from_raw(Device::cuda(rank.0 as i32), Some((start.cast_const(), len)), Some((start, len))) };
    buffers.expect("one buffer for both")
}

fn double(ccl: &mut NcclCcl, data: &mut [f32]) -> Result<(), CclError> {
    ccl.allreduce(ReduceOp::Sum, DataType::F32, data.len(), on_device(ccl.rank(), data).into())
}

fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let began = std::time::Instant::now();
    while !is() {
        assert!(began.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::yield_now();
    }
}

#[test]
fn collectives_are_left_to_the_device() {
    let Some(fake) = Fake::new() else { return };
    let issued = AtomicUsize::new(0);
    on_devices(&fake, 2, &long_limits(), |mut member| {
        let mut data = vec![1.0; 8];
        member.stream.hold(true);
        for _ in 0..10 {
            double(&mut member.ccl, &mut data).unwrap();
        }
        assert_eq!(data, [1.0; 8]);
        member.stream.hold(false);
        member.ccl.complete().unwrap();
        assert_eq!(data, [1024.0; 8]);
        // Host memory is lent for the time of the call.
        let mut other = 1.0_f32.to_le_bytes();
        let buffers = Buffers::in_place(&mut other);
        let error = member.ccl.allreduce(ReduceOp::Sum, DataType::F32, 1, buffers.into()).unwrap_err();
        assert!(error.to_string().contains("the buffers are on cpu:0"), "{error}");
        // A barrier is passed when all has come to it.
        double(&mut member.ccl, &mut data).unwrap();
        member.ccl.barrier().unwrap();
        assert_eq!(data, [2048.0; 8]);
        // Nobody runs ahead for ever.
        let mut words = vec![0.0; 8];
        member.stream.hold(true);
        std::thread::scope(|scope| {
            let (ccl, words, issued, stream) = (&mut member.ccl, &mut words, &issued, &member.stream);
            scope.spawn(move || {
                for _ in 0..200 {
                    double(ccl, words).unwrap();
                    issued.fetch_add(1, Ordering::SeqCst);
                }
            });
            eventually("as many as may be", || issued.load(Ordering::SeqCst) >= 2 * 128);
            assert!(issued.load(Ordering::SeqCst) <= 2 * 128);
            stream.hold(false);
        });
        member.ccl.complete().unwrap();
    });
    fake.assert_tidy();
}

#[test]
fn a_loss_on_the_device_is_reported_once_to_each_rank() {
    let Some(fake) = Fake::new() else { return };
    let mut options = long_limits();
    (options.drain_timeout, options.stall_timeout) = (Some(Duration::ZERO), RUNS_OUT);
    let ready = Barrier::new(3);
    on_devices(&fake, 3, &options, |mut member| {
        let mut data = vec![1.0; 8];
        double(&mut member.ccl, &mut data).unwrap();
        member.ccl.complete().unwrap();
        if ready.wait().is_leader() {
            fake.steer("fake_hang", 1, 0);
        }
        ready.wait();
        for _ in 0..3 {
            // The others may have found it broken before this one comes to the third.
            _ = double(&mut member.ccl, &mut data);
        }
        // Nobody asks, and each rank's communicator is aborted: whoever waits for the stream gets
        // on.
        eventually("all have aborted", || fake.ask("fake_aborts") == 3);
        // It is for `complete` to tell, whoever else hears of it before.
        assert!(member.ccl.barrier().unwrap_err().is_broken());
        let lost = breakdown(member.ccl.complete());
        assert!(lost.to_string().contains("has not ended within 2s"), "{lost}");
        member.ccl.complete().unwrap();
        assert_eq!(breakdown(double(&mut member.ccl, &mut data)), lost);
    });
    fake.assert_tidy();
}

/// Lets the next collective of all ranks hang, once each has ended the one before.
fn hang_next(fake: &Fake, ready: &Barrier) {
    ready.wait();
    fake.steer("fake_hang", 1, 0);
    ready.wait();
}

#[test]
fn finished_work_and_calls_without_a_result_are_not_lost() {
    let Some(fake) = Fake::new() else { return };
    let ready = Barrier::new(2);
    on_devices(&fake, 2, &long_limits(), |mut member| {
        let mut data = vec![1.0; 8];
        double(&mut member.ccl, &mut data).unwrap();
        member.ccl.barrier().unwrap();
        hang_next(&fake, &ready);
        std::thread::scope(|scope| {
            let control = member.ccl.control();
            if member.ccl.rank() == Rank(0) {
                scope.spawn(move || control.abort("enough"));
            }
            assert!(member.ccl.barrier().unwrap_err().is_broken());
        });
        member.ccl.complete().unwrap();
        assert_eq!(data, [2.0; 8]);
    });
    fake.assert_tidy();
}

#[test]
fn an_abort_reaches_ranks_that_have_left_all_to_the_device() {
    let Some(fake) = Fake::new() else { return };
    let ready = Barrier::new(3);
    on_devices(&fake, 3, &long_limits(), |mut member| {
        let mut data = vec![1.0; 8];
        fake.steer("fake_hang", 2, 0);
        ready.wait();
        double(&mut member.ccl, &mut data).unwrap();
        ready.wait();
        if member.ccl.rank() == Rank(0) {
            member.ccl.control().abort("enough");
        }
        eventually("all have aborted", || fake.ask("fake_aborts") == 3);
        assert_eq!(breakdown(member.ccl.complete()).cause, BreakCause::Aborted("enough".to_owned()));
    });
    fake.assert_tidy();
}

/// Regression: the thread that should have aborted stood in a query of the device, which waited for
/// the driver's lock, and so for the collective that hung.
#[test]
fn an_abort_does_not_wait_for_a_query_that_waits_for_the_driver() {
    let Some(fake) = Fake::new() else { return };
    let ready = Barrier::new(2);
    on_devices(&fake, 2, &long_limits(), |mut member| {
        let mut data = vec![1.0; 8];
        double(&mut member.ccl, &mut data).unwrap();
        member.ccl.complete().unwrap();
        hang_next(&fake, &ready);
        let lock = member.stream.driver_lock();
        lock.hold(DriverCall::MarkQuery);
        double(&mut member.ccl, &mut data).unwrap();
        // Nor does the thread that aborts.
        lock.hold(DriverCall::MakeCurrent);
        eventually("a query waits for the driver", || lock.waits.load(Ordering::SeqCst) > 0);
        ready.wait();
        member.ccl.control().abort("enough");
        eventually("all have aborted", || fake.ask("fake_aborts") == 2);
        // The end of the hanging collective is not taken for its result.
        assert_eq!(breakdown(member.ccl.complete()).cause, BreakCause::Aborted("enough".to_owned()));
        member.ccl.complete().unwrap();
    });
    fake.assert_tidy();
}

/// Regression: only the queries of marks counted as calls of the driver.
#[test]
fn an_abort_reaches_a_rank_that_stands_in_any_call_of_the_driver() {
    // Each collective makes two marks.
    let calls = [DriverCall::StreamQuery, DriverCall::Scratch, DriverCall::Mark(4), DriverCall::Mark(5)];
    for call in calls {
        let Some(fake) = Fake::new() else { return };
        let ready = Barrier::new(2);
        on_devices(&fake, 2, &long_limits(), |mut member| {
            let mut data = vec![1.0; 8];
            double(&mut member.ccl, &mut data).unwrap();
            member.ccl.complete().unwrap();
            hang_next(&fake, &ready);
            double(&mut member.ccl, &mut data).unwrap();
            ready.wait();
            let (stream, control) = (Arc::clone(&member.stream), member.ccl.control());
            stream.driver_lock().hold(call);
            std::thread::scope(|scope| {
                // `complete` tells of it in any case: it may have been enqueued already.
                scope.spawn(|| match call {
                    DriverCall::Scratch => drop(member.ccl.barrier()),
                    _ => drop(double(&mut member.ccl, &mut data)),
                });
                eventually("a call waits for the driver", || stream.driver_lock().waits.load(Ordering::SeqCst) > 0);
                ready.wait();
                control.abort("enough");
                eventually("all have aborted", || fake.ask("fake_aborts") == 2);
            });
            assert_eq!(breakdown(member.ccl.complete()).cause, BreakCause::Aborted("enough".to_owned()), "{call:?}");
        });
        fake.assert_tidy();
    }
}

/// Regression: only the collectives of the same communicator counted, and the driver waits for
/// those of all communicators before it frees memory.
#[test]
fn memory_is_not_returned_while_another_communicator_of_the_device_has_collectives() {
    let Some(fake) = Fake::new() else { return };
    on_devices(&fake, 2, &long_limits(), |mut member| {
        let rank = member.ccl.rank();
        let control = host::threads(1, &launch::long_limits()).unwrap().remove(0);
        let mut alone = member.ccl.split(rank.0, 0, control).unwrap();
        let (mut data, mut own) = (vec![1.0; 8], vec![1.0; 8]);
        // Room is made once for each kind of call, and other tests may keep the device busy.
        let mut make_room = |alone: &mut NcclCcl, count: usize| {
            let before = member.stream.rooms();
            own.resize(count, 1.0);
            eventually("room is made", || {
                let buffers = on_device(rank, &mut own);
                alone.allreduce(ReduceOp::Sum, DataType::F32, count, buffers.into()).unwrap();
                alone.complete().unwrap();
                member.stream.rooms() > before
            });
        };
        make_room(&mut alone, 8);
        member.stream.hold(true);
        double(&mut member.ccl, &mut data).unwrap();
        let before = member.stream.rooms();
        let mut large = vec![1.0; 4096];
        let buffers = on_device(rank, &mut large);
        alone.allreduce(ReduceOp::Sum, DataType::F32, 4096, buffers.into()).unwrap();
        assert_eq!(member.stream.rooms(), before, "memory is returned during a collective");
        member.stream.hold(false);
        member.ccl.complete().unwrap();
        alone.complete().unwrap();
        make_room(&mut alone, 4096);
    });
    fake.assert_tidy();
}

/// Regression: all threads that knew the time limits stood in the driver.
#[test]
fn a_rank_that_stands_in_the_driver_has_a_time_limit() {
    let Some(fake) = Fake::new() else { return };
    let ready = Barrier::new(2);
    let mut options = long_limits();
    (options.drain_timeout, options.stall_timeout) = (Some(RUNS_OUT / 2), RUNS_OUT / 2);
    on_devices(&fake, 2, &options, |mut member| {
        let mut data = vec![1.0; 8];
        double(&mut member.ccl, &mut data).unwrap();
        member.ccl.complete().unwrap();
        hang_next(&fake, &ready);
        let lock = member.stream.driver_lock();
        lock.hold(DriverCall::MarkQuery);
        double(&mut member.ccl, &mut data).unwrap();
        eventually("all have aborted", || fake.ask("fake_aborts") == 2);
        let breakdown = breakdown(member.ccl.complete());
        let expected = "a call of the device's driver has not returned within 2s";
        assert_eq!(breakdown.cause, BreakCause::Aborted(expected.to_owned()));
    });
    fake.assert_tidy();
}

/// Regression: each abort started a thread that lived for a second, and any controller can ask for
/// as many as it likes.
#[test]
#[cfg(target_os = "linux")]
fn aborts_start_no_threads() {
    let Some(fake) = Fake::new() else { return };
    on_ranks(&fake, Launch::Segment, 2, &long_limits(), |member| {
        let control = member.ccl.control();
        for _ in 0..1000 {
            control.abort("enough");
        }
        // Other tests that run at the same time have few.
        let count = threads_named("nccl-");
        assert!(count < 300, "{count} threads");
    });
    fake.assert_tidy();
}

#[test]
fn a_rank_that_goes_waits_for_what_is_under_way() {
    let Some(fake) = Fake::new() else { return };
    let mut sums = on_devices(&fake, 2, &long_limits(), |mut member| {
        let mut data = vec![3.0; 8];
        member.stream.hold(true);
        double(&mut member.ccl, &mut data).unwrap();
        std::thread::scope(|scope| {
            let stream = Arc::clone(&member.stream);
            scope.spawn(move || stream.hold(false));
            drop(member.ccl);
        });
        data[7]
    });
    assert_eq!((sums.pop(), sums.pop()), (Some(6.0), Some(6.0)));
    fake.assert_tidy();
}

#[test]
fn a_rank_that_leaves_alone_is_named_and_does_not_wait_for_ever() {
    for launch in CONTROLS {
        let Some(fake) = Fake::new() else { return };
        let mut options: Options = long_limits();
        options.close_timeout = SHORT;
        on_ranks(&fake, launch, 3, &options, |mut member| {
            allreduce(&mut member.ccl, 3).unwrap();
            if member.ccl.rank() == Rank(1) {
                return drop(member);
            }
            let breakdown = breakdown(allreduce(&mut member.ccl, 3));
            assert_eq!((breakdown.cause, breakdown.rank), (BreakCause::Left, Rank(1)), "{launch:?}");
        });
        fake.assert_tidy();
    }
}

/// Other work of a rank on its device is its own affair: breaking the group neither waits for
/// it nor ends the process.
#[test]
fn a_group_that_breaks_leaves_the_work_of_others_on_the_stream_alone() {
    let Some(fake) = Fake::new() else { return };
    let mut options = long_limits();
    // An abort that waited for the stream would wait for ever.
    options.abort_timeout = Duration::from_secs(10);
    options.close_timeout = SHORT;
    for poisoned in [false, true] {
        let broken = std::sync::Barrier::new(2);
        on_ranks(&fake, Launch::Segment, 2, &options, |mut member| {
            assert_lives(&mut member.ccl);
            let is_busy = member.ccl.rank() == Rank(0);
            member.stream.hold(is_busy);
            if !is_busy {
                member.ccl.abort("enough");
            }
            let error = if is_busy && poisoned {
                let cause = CollectiveInput::Poisoned(RpcError::internal("no input"));
                member.ccl.allreduce(ReduceOp::Sum, DataType::F32, 10, cause).unwrap_err()
            } else {
                allreduce(&mut member.ccl, 10).unwrap_err()
            };
            assert!(error.is_broken(), "{error}");
            // It has heard of it while its stream is busy still, and goes in good order once that
            // is not.
            broken.wait();
            member.stream.hold(false);
        });
        fake.assert_tidy();
    }
}
