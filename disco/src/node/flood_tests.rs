//! Floods: for each command, a controller that sends as many as it can, and never reads an event. A
//! worker holds no more than the limit of its session and a constant.
//!
//! The table of commands is also a `match` without a wildcard, so that a new command has to be in
//! it. The functions that only workers can call are here, too; those of nodes, `disco.*`, are
//! flooded over a connection by `tests/tests/held_memory`, which lists them from the registry.

use rpc_conformance::threads::wait_for_rest;
use rpc_core::{DataType, ErrorKind, Packed, Value};
use serde::Serialize;

use super::held_memory_tests::UNCHARGED;
use super::raw_controller::RawController;
use crate::ccl::communicators::CollectiveTimeouts;
use crate::wire::command::{Command, Kind, OWN, On, Operand, Scope};
use crate::wire::mesh::Mesh;
use crate::wire::plan::{JoinPlan, Plan};

/// Memory that the controller's session may hold.
const LIMIT: u64 = 1 << 20;

/// Bytes that a worker may take beyond that: what is not charged, and what allocators keep.
const CONSTANT: u64 = 4 << 20;

/// Commands of one flood.
const COUNT: u32 = 40_000;

/// Commands that are sent together.
const BATCH: u32 = 500;

/// The first of the registers that floods write to; those below are set before.
const FIRST: u32 = 16;

/// Loads of missing modules, and how many of them travel together.
const LOADS: u32 = 10_000;
const LOADS_AT_A_TIME: u32 = 100;

/// Bytes of the value in register 1, which is there twice while it is set.
const LARGE: usize = 256 << 10;

/// Declares the floods: for each kind of command the `number`th one of its flood.
macro_rules! floods {
    ($number:ident; $($kind:pat => $command:expr,)+) => {
        /// Returns the makers of all floods, each of the command with a number.
        fn floods() -> Vec<fn(u32) -> Command> {
            vec![$(|$number: u32| {
                _ = $number;
                $command
            }),+]
        }

        /// Has no wildcard, so that a command that is not in the table does not compile.
        fn _is_in_the_table(command: &Command) {
            match command {
                $($kind => {})+
            }
        }
    };
}

floods! { number;
    Command::Nothing => Command::Nothing,
    Command::KillReg { .. } => Command::KillReg { register: number.wrapping_mul(60_000) & !OWN },
    Command::GetGlobalFunc { .. } => Command::GetGlobalFunc { to: FIRST + number, name: "held".to_owned() },
    Command::CallPacked { .. } => Command::CallPacked { to: FIRST + number, function: 0, args: vec![Value::Int(1)] },
    Command::LoadModule { .. } => load(FIRST + number, number),
    Command::ModuleFunction { .. } => Command::ModuleFunction { to: FIRST + number, module: 3, name: "f".to_owned() },
    Command::Empty { .. } => {
        Command::Empty { to: FIRST + number, device: None, dtype: DataType::U8, shape: vec![1 << 16], on: On::All }
    },
    Command::CopyToWorker0 { .. } => Command::CopyToWorker0 {
        to: FIRST + number,
        fresh: true,
        dtype: DataType::U8,
        shape: vec![1 << 16],
        offset: 0,
        data: vec![1; 16].into(),
        on: On::All,
    },
    Command::CopyFromWorker0 { .. } => Command::CopyFromWorker0 { ticket: number.into(), from: 2 },
    Command::DebugGetFromRemote { .. } => {
        Command::DebugGetFromRemote { ticket: number.into(), worker: 0, from: 1 }
    },
    Command::DebugSetRegister { .. } => set(FIRST + number, 64),
    Command::Collective { .. } => {
        Command::Collective { kind: Kind::Allgather, scope: Scope::World, from: 2, to: FIRST + number, fresh: true }
    },
    Command::SendRecv { .. } => Command::SendRecv { from: 2, to: FIRST + number, pairs: vec![(0, 0); 10] },
    Command::SyncWorker { .. } => Command::SyncWorker { ticket: number.into(), worker: None },
    Command::InitCcl { .. } => Command::InitCcl { plan: plan(number) },
    Command::FinishInitCcl { .. } => Command::FinishInitCcl { epoch: number.into(), enter: true },
    Command::Shutdown { .. } => Command::Shutdown { ticket: number.into() },
    Command::Define { .. } => Command::Define {
        program: number,
        registers: 1,
        parameters: Vec::new(),
        outputs: Vec::new(),
        steps: vec![Command::CallPacked { to: OWN, function: 0, args: Vec::new() }; 10],
    },
    Command::Run { .. } => Command::Run { program: 0, args: Vec::new(), outputs: Vec::new() },
    Command::Forget { .. } => Command::Forget { program: number },
}

/// Returns the command that loads a module by a long path, which is not there.
fn load(to: u32, number: u32) -> Command {
    Command::LoadModule { to, path: format!("{number:04000}"), device: None }
}

/// Returns the command that loads one more module, which is there.
fn load_of_a_module(number: u32) -> Command {
    Command::LoadModule { to: FIRST + number, path: format!("test:{number:04000}"), device: None }
}

/// Registers of functions that only workers can call, and of the files that one of them takes.
const TAKE: u32 = 4;
const LOAD: u32 = 5;
const FILES: u32 = 7;

/// Returns the command that makes a worker's part of a tensor of bytes that are there.
fn take_of_weights(number: u32) -> Command {
    of_weights(number, TAKE, 2)
}

/// Returns the command that makes it of a file, which there is not.
fn load_of_weights(number: u32) -> Command {
    of_weights(number, LOAD, FILES)
}

fn of_weights(number: u32, function: u32, from: u32) -> Command {
    /// Message of that name, see PROTOCOL.md, section 16.1.
    #[derive(Serialize)]
    struct LoadRequest {
        file: u32,
        name: String,
        dtype: DataType,
        shape: [i64; 1],
        start: u64,
        part: &'static str,
        device: Option<()>,
        readers: [u32; 1],
        loader: u64,
    }
    let request = LoadRequest {
        file: 0,
        name: "x".repeat(1000),
        dtype: DataType::U8,
        shape: [64],
        start: 0,
        part: "Whole",
        device: None,
        readers: [0],
        loader: 0,
    };
    let args = vec![Value::Object(Operand::Register(from)), Value::Packed(Packed::encode(&request).unwrap())];
    Command::CallPacked { to: FIRST + number, function, args }
}

/// Returns one command of each kind.
pub(crate) fn of_each_kind() -> Vec<Command> {
    floods().into_iter().map(|make| make(1)).collect()
}

fn set(to: u32, len: usize) -> Command {
    let value: Value<Operand> = Value::Str("x".repeat(len));
    Command::DebugSetRegister { worker: 0, to, value }
}

fn plan(epoch: u32) -> Packed {
    let second = std::time::Duration::from_secs(1);
    let timeouts = CollectiveTimeouts { entry: None, stall: second, join: second, direct: second };
    let join = JoinPlan::Unconnected { reason: "none".to_owned() };
    let (epoch, devices) = (epoch.into(), Vec::new());
    let names: Vec<String> = (0..8).map(|number| format!("{number:064}")).collect();
    let meshes = vec![Mesh::new(names.iter().map(|name| (name.as_str(), 1))).unwrap()];
    Packed::encode(&Plan { epoch, join, nccl: false, timeouts, devices, is_tentative: false, meshes }).unwrap()
}

/// Sends the flood of these commands, until the node refuses more.
fn send(make: fn(u32) -> Command) {
    let mut controller = RawController::new(LIMIT);
    let tensor = Command::Empty { to: 2, device: None, dtype: DataType::U8, shape: vec![64], on: On::All };
    let module = Command::LoadModule { to: 3, path: "test:".to_owned(), device: None };
    let function = |to, name: &str| Command::GetGlobalFunc { to, name: name.to_owned() };
    let (take, load) = (function(TAKE, "disco.weights.take"), function(LOAD, "disco.weights.load"));
    let no_files = Packed::encode(&[(); 0]).unwrap();
    let files = Command::CallPacked { to: FILES, function: 6, args: vec![Value::Packed(no_files)] };
    let before = [set(1, LARGE), tensor, module, take, load, function(6, "disco.weights.open"), files];
    controller.submit(before).unwrap();
    assert!(controller.sync().is_empty());
    for batch in 0..COUNT / BATCH {
        let numbers = batch * BATCH..(batch + 1) * BATCH;
        let sent = controller.submit(numbers.map(make));
        assert!(controller.held() <= LIMIT);
        if let Err(error) = sent {
            assert_eq!(error.kind(), ErrorKind::LimitExceeded, "{error}");
            break;
        }
    }
    // The worker has executed everything, or waits for this controller to read events.
    wait_for_rest();
}

/// Variable that makes [`floods_of_a_process`] send floods.
const CHILD: &str = "DISCO_TEST_FLOODS";

/// Regression: syncs and values were sent to controllers that read nothing, without limit.
#[test]
fn a_controller_that_never_reads_makes_a_worker_hold_its_limit_and_a_constant() {
    // A process of its own, whose memory is that of this test alone.
    let name = "node::flood_tests::floods_of_a_process";
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let output = child.args([name, "--exact", "--nocapture"]).env(CHILD, "1").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
}

/// Sends all floods, in the process that the test above starts.
#[test]
fn floods_of_a_process() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    // Threads, their arenas and all else that is there once.
    send(floods()[0]);
    for make in floods() {
        check_growth(make(1).name(), || send(make));
    }
    check_growth("loads of modules", || send(load_of_a_module));
    check_growth("disco.weights.take", || send(take_of_weights));
    check_growth("disco.weights.load", || send(load_of_weights));
    check_growth("loads of missing modules", load_missing_modules);
}

/// Makes a worker fail to load more modules than may stay, each by another long path. Reads all
/// events: a worker that has to wait for that loads no more.
fn load_missing_modules() {
    let mut controller = RawController::new(LIMIT);
    for batch in 0..LOADS / LOADS_AT_A_TIME {
        let numbers = batch * LOADS_AT_A_TIME..(batch + 1) * LOADS_AT_A_TIME;
        controller.submit(numbers.map(|number| load(FIRST, number))).unwrap();
        let failures = controller.sync();
        assert!(!failures.is_empty());
        assert!(failures.iter().all(|failure| failure.cause.kind() == ErrorKind::NotFound), "{failures:?}");
    }
    assert!(controller.begin_block().is_empty());
    assert!(controller.held() <= UNCHARGED, "{}", controller.held());
}

/// Runs `work`, and checks how much memory the process takes for it.
fn check_growth(name: &str, work: impl FnOnce()) {
    let before = memory("VmRSS:");
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    work();
    let grown = memory("VmHWM:").saturating_sub(before);
    println!("{name}: {} KiB", grown >> 10);
    assert!(grown <= LIMIT + CONSTANT, "{name} took {grown} bytes");
}

/// Returns an amount of memory of this process.
fn memory(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}
