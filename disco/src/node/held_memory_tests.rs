//! Tests with controllers that try to make a node hold too much: it is charged to their session,
//! and beyond the limit it is an error to them.

use std::time::{Duration, Instant};

use rpc_core::{ErrorKind, Value};

use super::raw_controller::RawController;
use crate::wire::command::{Command, OWN, Operand};
use crate::wire::event::{Event, decode_events};
use crate::wire::parameter::ParameterType;

/// Bytes that may be held beyond the limit: by the worker, and by the queue of events.
pub(super) const UNCHARGED: u64 = 2 * (64 << 10);

fn set(to: u32, value: Value<Operand>) -> Command {
    Command::DebugSetRegister { worker: 0, to, value }
}

fn failing() -> Command {
    Command::CallPacked { to: OWN, function: 7, args: Vec::new() }
}

#[test]
fn registers_that_are_killed_make_none() {
    let mut controller = RawController::new(1 << 20);
    controller.submit((1..=300).map(|number| Command::KillReg { register: number * 65_000 })).unwrap();
    assert!(controller.sync().is_empty());
    assert!(controller.held() <= UNCHARGED, "{}", controller.held());
}

#[test]
fn registers_and_their_values_are_charged_until_they_are_killed() {
    const LIMIT: u64 = 16 << 20;
    let mut controller = RawController::new(LIMIT);
    controller.submit((1..=50).map(|number| set(number * 60_000, Value::Int(1)))).unwrap();
    let failures = controller.sync();
    assert!(!failures.is_empty() && failures.len() < 50, "{}", failures.len());
    assert!(failures.iter().any(|failure| failure.cause.kind() == ErrorKind::LimitExceeded), "{failures:?}");
    assert!(controller.held() <= LIMIT);

    let mut controller = RawController::new(LIMIT);
    let text = || Value::Str("x".repeat(1 << 20));
    // The command and its value are there at the same time.
    let mut set_one = |number| {
        controller.submit([set(number, text())])?;
        controller.sync().pop().map_or(Ok(()), |failure| Err(failure.cause))
    };
    let (refused, error) = (0..32).find_map(|number| set_one(number).err().map(|error| (number, error))).unwrap();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded);
    assert!((13..16).contains(&refused), "{refused}");
    controller.submit((0..32).map(|register| Command::KillReg { register })).unwrap();
    controller.submit([set(0, text())]).unwrap();
    assert!(controller.sync().is_empty());
    assert!(controller.held() <= (1 << 20) + UNCHARGED, "{}", controller.held());
}

#[test]
fn programs_and_their_registers_are_charged_until_they_are_forgotten() {
    const STEPS: usize = 10_000;
    let mut controller = RawController::new(8 << 20);
    let program = |program| Command::Define {
        program,
        registers: 1,
        parameters: Vec::new(),
        outputs: Vec::new(),
        steps: (0..STEPS).map(|_| failing()).collect(),
    };
    let define = |controller: &mut RawController, number| {
        controller.submit([program(number)]).unwrap();
        controller.sync()
    };
    let defined = (0..20).find(|number| !define(&mut controller, *number).is_empty()).unwrap();
    assert!((2..=6).contains(&defined), "{defined}");
    // Each time the same number: what it held goes.
    controller.submit((0..defined).map(|program| Command::Forget { program })).unwrap();
    for _ in 0..10 {
        assert!(define(&mut controller, 0).is_empty());
    }

    let wide = Command::Define {
        program: 1,
        registers: 1 << 20,
        parameters: Vec::new(),
        outputs: Vec::new(),
        steps: vec![failing()],
    };
    let run = Command::Run { program: 1, args: Vec::new(), outputs: Vec::new() };
    controller.submit([wide, run]).unwrap();
    let failures = controller.sync();
    assert_eq!(failures.len(), 1);
    assert_eq!(failures[0].cause.kind(), ErrorKind::LimitExceeded);
}

/// Regression: a parameter whose register a later one names, too, stayed charged for good.
#[test]
fn two_parameters_in_one_register_are_charged_once() {
    let mut controller = RawController::new(1 << 20);
    let program = Command::Define {
        program: 1,
        registers: 1,
        parameters: vec![(0, ParameterType::Any), (0, ParameterType::Any)],
        outputs: Vec::new(),
        steps: vec![failing()],
    };
    controller.submit([program]).unwrap();
    let text = || Value::Str("x".repeat(100 << 10));
    for _ in 0..40 {
        controller.submit([Command::Run { program: 1, args: vec![text(), text()], outputs: Vec::new() }]).unwrap();
        let failures = controller.sync();
        assert!(failures.iter().all(|failure| failure.cause.kind() != ErrorKind::LimitExceeded), "{failures:?}");
    }
    assert!(controller.held() <= UNCHARGED, "{}", controller.held());
}

/// Regression: 1,320 bytes of commands made 336 MiB of events, and commands behind them waited
/// beyond the limit of the session.
#[test]
fn a_worker_waits_for_a_controller_that_reads_no_events() {
    const LIMIT: u64 = 4 << 20;
    const FAILURES: usize = 40 * 1000;
    let mut controller = RawController::new(LIMIT);
    let program = Command::Define {
        program: 1,
        registers: 1,
        parameters: Vec::new(),
        outputs: Vec::new(),
        steps: (0..1000).map(|_| failing()).collect(),
    };
    let run = || Command::Run { program: 1, args: Vec::new(), outputs: Vec::new() };
    controller.submit([program]).unwrap();
    controller.submit((0..40).map(|_| run())).unwrap();
    let within = Instant::now() + Duration::from_secs(60);
    while controller.held() < LIMIT - (1 << 20) {
        assert!(Instant::now() < within, "{} bytes are held", controller.held());
        std::thread::yield_now();
    }
    let refused = (0..1000).find_map(|_| controller.submit((0..1000).map(|_| Command::Nothing)).err());
    assert_eq!(refused.unwrap().kind(), ErrorKind::LimitExceeded);
    assert!(controller.held() <= LIMIT);
    // Nothing is lost, and what was refused may be sent again.
    let mut failures = Vec::new();
    while failures.len() < FAILURES {
        let events = controller.events.call::<Value>((&controller.host,)).wait().unwrap();
        failures.extend(decode_events(events).unwrap().into_iter().filter(|event| matches!(event, Event::Failed(_))));
    }
    controller.submit([Command::Nothing]).unwrap();
    assert!(controller.sync().is_empty());
    assert_eq!(failures.len(), FAILURES);
}
