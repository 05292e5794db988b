//! Random programs, compared with a plain interpreter that goes through the workers one after the
//! other. The workers of a session hold the same values and report the same failures, over every
//! kind of launch.
//!
//! The interpreter has the documented rules and no others: values follow from commands in their
//! order, a failure poisons the registers that should have been set and is reported once, and a
//! collective with a failed input has no output on any worker. Reductions fold in the order of
//! ranks, so that floats agree to the bit; NaNs count as equal to each other.
//!
//! `PROPTEST_CASES` says how many programs are tried.

mod collective;
mod data;
mod interpreter;
mod program;
mod session;
mod slot;

use std::cell::RefCell;
use std::collections::HashMap;
use std::time::Duration;

use disco::Options;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, FileFailurePersistence, TestCaseError, TestRunner};
use rpc_tests::spmd::{Data, Fixture, Launch};

use interpreter::interpret;
use program::{Program, program};
use session::perform;

const NODE: &str = env!("CARGO_BIN_EXE_disco_node");

const LAUNCHES: [Launch; 6] = [
    Launch::Threads,
    Launch::Processes(NODE),
    Launch::Tcp { per_node: 1, data: Data::Shared },
    Launch::Tcp { per_node: 1, data: Data::Tcp },
    Launch::Chain,
    Launch::Line { data: Data::Relayed },
];

/// Number of programs of a run, unless `PROPTEST_CASES` says otherwise.
const CASES: u32 = 120;

/// Sessions that a program has left usable, for the next program.
#[derive(Default)]
struct Sessions(HashMap<(usize, (u32, u32)), Fixture>);

impl Sessions {
    fn take(&mut self, launch: usize, shape: (u32, u32)) -> Fixture {
        self.0.remove(&(launch, shape)).unwrap_or_else(|| {
            let mut options = Options::default();
            // A hang is a failure, so that the program can be shrunk.
            options.collective_timeout = Some(Duration::from_secs(10));
            LAUNCHES[launch].try_start_with(shape.0, shape.1, options).unwrap()
        })
    }
}

fn agree(sessions: &RefCell<Sessions>, program: &Program) -> Result<(), TestCaseError> {
    let expected = interpret(program).trace;
    for (launch, kind) in LAUNCHES.into_iter().enumerate() {
        let fixture = sessions.borrow_mut().take(launch, program.shape);
        let found = perform(&fixture.session, program);
        prop_assert_eq!(found.as_ref(), Ok(&expected), "{:?}", kind);
        sessions.borrow_mut().0.insert((launch, program.shape), fixture);
    }
    Ok(())
}

#[test]
fn programs_come_to_success_and_to_failure_in_every_collective() {
    let mut runner = TestRunner::deterministic();
    let mut counts: HashMap<&str, [u32; 2]> = HashMap::new();
    for _ in 0..2000 {
        let program = program().new_tree(&mut runner).unwrap().current();
        for (collective, [moved, failed]) in interpret(&program).collectives {
            let count = counts.entry(collective).or_default();
            *count = [count[0] + moved, count[1] + failed];
        }
    }
    assert_eq!(counts.len(), 7, "{counts:?}");
    let enough = |(_, [moved, failed]): (&&str, &[u32; 2])| *moved >= 50 && *failed >= 50;
    assert!(counts.iter().all(enough), "{counts:?}");
}

#[test]
fn workers_have_the_results_of_a_sequential_program() {
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { Config::default().cases } else { CASES };
    let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/disco/model/failures.proptest-regressions");
    let config = Config {
        cases,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(seeds))),
        max_shrink_iters: 2000,
        ..Config::default()
    };
    let sessions = RefCell::default();
    let outcome = TestRunner::new(config).run(&program(), |program| agree(&sessions, &program));
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
}
