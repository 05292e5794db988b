//! Collectives over MPI, among processes that `mpirun` starts: this test binary again, whose test
//! `rank` runs a program by name.

#[path = "ccl/launch.rs"]
#[allow(dead_code)]
mod launch;

use std::process::{Command, Output, Stdio};
use std::time::Duration;

use disco::ccl::host::mpi::{MpiScope, Process};
use disco::ccl::host::{Options, SessionKey};
use disco::ccl::{BreakCause, Breakdown, Buffers, Ccl, CclError, CollectiveInput, Rank, ReduceOp};
use rpc_core::{DataType, ErrorKind, RpcError};

use ccl_conformance::{assert_mismatch, conformance, random_program};
use launch::{Launch, long_limits, on_threads, options};

/// The variable that tells this test binary that it is a rank, and which program to run.
const PROGRAM: &str = "DISCO_CCL_MPI_PROGRAM";

/// Runs a program as a job of so many processes.
fn run(ranks: usize, program: &str) -> Output {
    run_with(&[], ranks, program)
}

fn run_with(more: &[&str], ranks: usize, program: &str) -> Output {
    let mut command = Command::new("mpirun");
    // As root, more processes than cores, and wherever there is time for them: as in a container.
    command
        .args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", &ranks.to_string()])
        .args(more)
        .arg(std::env::current_exe().expect("this binary"))
        .args(["rank", "--exact", "--nocapture", "--test-threads=1"])
        .env(PROGRAM, program)
        .stdin(Stdio::null());
    command.output().expect("mpirun (Debian: apt-get install openmpi-bin)")
}

fn succeeds(ranks: usize, program: &str) -> String {
    let output = run(ranks, program);
    let (out, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} with {ranks} ranks: {}\n{out}\n{errors}", output.status);
    // Each of them has run its program.
    assert_eq!(out.matches("1 passed").count(), ranks, "{out}");
    out.into_owned()
}

#[test]
fn every_collective_matches_the_model() {
    for ranks in [1, 2, 4] {
        succeeds(ranks, "conformance");
    }
}

#[test]
fn every_collective_matches_the_model_when_encrypted() {
    succeeds(3, "encrypted");
}

#[test]
fn results_are_those_of_threads() {
    let printed = succeeds(4, "digest");
    for digest in on_threads(Launch::Threads, 4, &long_limits(), |ccl| random_program(ccl, 7, 40)) {
        assert!(printed.contains(&format!("digest {digest}\n")), "{printed}");
    }
}

#[test]
fn groups_are_apart_and_need_not_be_of_the_whole_job() {
    succeeds(4, "groups");
}

#[test]
fn poison_and_calls_that_differ_are_errors_of_all_and_the_group_lives() {
    succeeds(3, "errors");
}

#[test]
fn a_rank_that_never_comes_goes_on_or_leaves_is_named() {
    succeeds(3, "missing");
}

#[test]
fn an_abort_in_the_middle_of_data_leaves_no_rank_waiting_and_the_group_is_made_anew() {
    succeeds(3, "anew");
}

#[test]
fn a_rank_that_does_not_join_or_belongs_elsewhere_is_named() {
    succeeds(2, "strangers");
}

#[test]
fn a_rank_that_computes_leaves_nothing_behind_that_others_need() {
    let output = run_with(&["--mca", "btl", "tcp,self"], 3, "slow");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// It is for MPI to notice, and it ends the job.
#[test]
fn a_rank_that_dies_ends_the_job() {
    let output = run(3, "dies");
    assert!(!output.status.success());
}

/// A rank of the tests above.
#[test]
fn rank() {
    let Ok(program) = std::env::var(PROGRAM) else { return };
    let process = Process::start().expect("MPI");
    match program.as_str() {
        "conformance" => conformance(&mut *world(process, &long_limits())),
        "encrypted" => {
            let mut options = long_limits();
            options.encrypt = true;
            conformance(&mut *world(process, &options));
        }
        "digest" => println!("digest {}", random_program(&mut *world(process, &long_limits()), 7, 40)),
        "groups" => groups(process),
        "errors" => errors(&mut *world(process, &long_limits())),
        "missing" => missing(process),
        "anew" => anew(process),
        "strangers" => strangers(process),
        "slow" => slow(process),
        "dies" => {
            let mut world = world(process, &long_limits());
            world.barrier().expect("all are there");
            if process.rank() == 1 {
                std::process::abort();
            }
            while world.barrier().is_ok() {}
            // Until MPI ends this process, too.
            std::thread::park();
        }
        other => panic!("no program {other}"),
    }
    process.finish().expect("no messages are left");
}

fn key() -> SessionKey {
    serde_json::from_str(&serde_json::to_string(&[7_u8; 32]).expect("JSON")).expect("a key")
}

fn world(process: &'static Process, options: &Options) -> Box<dyn Ccl> {
    let all: Vec<u32> = (0..process.size()).collect();
    process.join(MpiScope::World, &all, &key(), options).expect("to join")
}

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

/// Data on a slow way gets there while its sender does something else: MPI moves messages
/// only when it is called.
fn slow(process: &'static Process) {
    for encrypt in [false, true] {
        let mut limits = options(Duration::from_secs(120), Duration::from_secs(1));
        limits.encrypt = encrypt;
        limits.epoch = encrypt.into();
        let mut ccl = world(process, &limits);
        for len in [70_000, 1_000_000, 12_000_000] {
            let mut data = vec![1; len];
            match ccl.rank() {
                Rank(0) => ccl.recv(Rank(1), DataType::U8, len, Buffers::output(&mut data).into()),
                Rank(1) => ccl.send(Rank(0), DataType::U8, len, Buffers::input(&data).into()),
                _ => Ok(()),
            }
            .expect("both are there");
            // Longer than a rank may stand still that others wait for.
            if ccl.rank() == Rank(1) {
                let began = std::time::Instant::now();
                while began.elapsed() < Duration::from_millis(1500) {
                    std::hint::spin_loop();
                }
            }
        }
        ccl.barrier().expect("all are there");
    }
}

fn groups(process: &'static Process) {
    // In another order than the job's, without process 0.
    if process.rank() > 0 {
        let mut three = process.join(MpiScope::World, &[3, 1, 2], &key(), &long_limits()).expect("to join");
        let expected = [Rank(1), Rank(2), Rank(0)][process.rank() as usize - 1];
        assert_eq!((three.rank(), three.size()), (expected, 3));
        random_program(&mut *three, 3, 5);
    }
    let mut options = long_limits();
    options.epoch = 1;
    let mut world = world(process, &options);
    let first = process.rank() / 2 * 2;
    let mut group = process.join(MpiScope::Group(0), &[first, first + 1], &key(), &options).expect("to join");
    // Across those, as the axes of a mesh are.
    let column = process.rank() % 2;
    let mut across = process.join(MpiScope::Group(1), &[column, column + 2], &key(), &options).expect("to join");
    for seed in 0..20 {
        random_program(&mut *group, 100 + seed + u64::from(first) * 1000, 3);
        random_program(&mut *across, 5000 + seed + u64::from(column) * 1000, 2);
        random_program(&mut *world, seed, 2);
    }
}

fn errors(ccl: &mut dyn Ccl) {
    let cause = RpcError::new(ErrorKind::Application, "no data today");
    for count in [4, 100_000] {
        let mut data = vec![7_u8; count * 4];
        let input = match ccl.rank() {
            Rank(1) => CollectiveInput::Poisoned(cause.clone()),
            _ => Buffers::in_place(&mut data).into(),
        };
        let error = ccl.allreduce(ReduceOp::Sum, DataType::F32, count, input).expect_err("poison");
        assert_eq!(RpcError::from(error), cause);
        assert!(data.iter().all(|byte| *byte == 7), "the output was touched");
    }
    let odd = ccl.rank() == Rank(2);
    let error = if odd { ccl.barrier() } else { allreduce(ccl, 50_000) }.expect_err("calls that differ");
    assert_mismatch(&error, &["rank 0 is in allreduce(sum) of 50000 float32", "rank 2 is in barrier"]);
    random_program(ccl, 5, 5);
}

fn missing(process: &'static Process) {
    // An epoch for each way to be missed. Only one group has a limit that is to run out: if the
    // world had the same one, a rank could give up there first, and leave the group instead of
    // missing it.
    let short = options(Duration::from_secs(2), Duration::from_secs(120));
    let mut limits = long_limits();
    let mut ccl = world(process, &limits);
    if ccl.rank() == Rank(1) {
        // Until rank 0 ends the world.
        while ccl.barrier().is_ok() {}
    } else {
        let mut never = process.join(MpiScope::Group(0), &[0, 2], &key(), &short).expect("to join");
        ccl.barrier().expect("all are there");
        if never.rank() == Rank(0) {
            let breakdown = breakdown(allreduce(&mut *never, 10));
            assert_eq!((breakdown.cause, breakdown.rank), (BreakCause::NeverEntered, Rank(1)));
            ccl.abort("done");
        } else {
            while ccl.barrier().is_ok() {}
        }
    }
    limits = long_limits();
    limits.epoch = 1;
    let mut ccl = world(process, &limits);
    ccl.set_step(8);
    if ccl.rank() == Rank(1) {
        ccl.leave_step();
        ccl.set_step(9);
    }
    let out_of_step = breakdown(allreduce(&mut *ccl, 100_000));
    assert_eq!((out_of_step.cause, out_of_step.rank), (BreakCause::OutOfStep, Rank(1)));
    limits.epoch = 2;
    let mut ccl = world(process, &limits);
    allreduce(&mut *ccl, 3).expect("all are there");
    if ccl.rank() != Rank(1) {
        let left = breakdown(allreduce(&mut *ccl, 3));
        assert_eq!((left.cause, left.rank), (BreakCause::Left, Rank(1)));
    }
}

fn anew(process: &'static Process) {
    let mut limits = long_limits();
    for epoch in 0..4 {
        limits.epoch = epoch;
        let mut ccl = world(process, &limits);
        allreduce(&mut *ccl, 100_000).expect("all are there");
        let control = ccl.control();
        std::thread::scope(|scope| {
            if ccl.rank() == Rank(1) {
                scope.spawn(move || {
                    while control.flights().len() < 5 {
                        std::thread::yield_now();
                    }
                    control.abort("again");
                });
            }
            let end = loop {
                if let Err(error) = allreduce(&mut *ccl, 3_000_000) {
                    break breakdown(Err(error));
                }
            };
            assert_eq!((end.cause, end.rank), (BreakCause::Aborted("again".to_owned()), Rank(1)));
        });
    }
}

fn strangers(process: &'static Process) {
    let error = process.join(MpiScope::World, &[0, 2], &key(), &long_limits()).err().expect("there is no process 2");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    // Rank 1 is in another epoch.
    let mut limits = long_limits();
    limits.join_timeout = Duration::from_millis(500);
    limits.epoch = process.rank().into();
    let error = process.join(MpiScope::World, &[0, 1], &key(), &limits).err().expect("nobody is there");
    let other = 1 - process.rank();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert!(error.message().contains(&format!("not heard of ranks [{other}]")), "{error}");
    // Another key: they do not even hear of each other.
    limits = long_limits();
    limits.join_timeout = Duration::from_millis(500);
    limits.epoch = 8;
    let own = SessionKey::generate().expect("a key");
    process.join(MpiScope::World, &[0, 1], &own, &limits).err().expect("nobody has that key");
    // One that encrypts and one that does not.
    limits = long_limits();
    limits.epoch = 7;
    limits.encrypt = process.rank() == 1;
    let error = process.join(MpiScope::World, &[0, 1], &key(), &limits).err().expect("they differ");
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(error.message().contains("one of the two encrypts"), "{error}");
}
