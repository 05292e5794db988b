//! Floods: for each command, a controller that sends as many as it can, and never reads an event. A
//! worker holds no more than the limit of its session and a constant.
//!
//! The table of commands is also a `match` without a wildcard, so that a new command has to be in
//! it.

use rpc_core::{DataType, ErrorKind, Packed, Value};

use super::raw_controller::RawController;
use crate::ccl::communicators::CollectiveTimeouts;
use crate::wire::command::{Command, Kind, OWN, On, Operand, Scope};
use crate::wire::plan::{JoinPlan, Plan};

/// Memory that the controller's session may hold.
const LIMIT: u64 = 1 << 20;

/// Bytes that a worker may take beyond that: what is not charged, and what allocators keep.
const CONSTANT: u64 = 4 << 20;

/// Commands of one flood.
const COUNT: u32 = 40_000;

/// Commands that are sent together.
const BATCH: u32 = 500;

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
    Command::GetGlobalFunc { .. } => Command::GetGlobalFunc { to: number, name: "held".to_owned() },
    Command::CallPacked { .. } => Command::CallPacked { to: number, function: 0, args: vec![Value::Int(1)] },
    Command::LoadModule { .. } => Command::LoadModule { to: number, path: format!("{number:04000}"), device: None },
    Command::ModuleFunction { .. } => Command::ModuleFunction { to: number, module: 0, name: "f".to_owned() },
    Command::Empty { .. } => {
        Command::Empty { to: number, device: None, dtype: DataType::U8, shape: vec![1 << 16], on: On::All }
    },
    Command::CopyToWorker0 { .. } => Command::CopyToWorker0 {
        to: number,
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
    Command::DebugSetRegister { .. } => set(number, 64),
    Command::Collective { .. } => {
        Command::Collective { kind: Kind::Allgather, scope: Scope::World, from: 2, to: number, fresh: true }
    },
    Command::SendRecv { .. } => Command::SendRecv { from: 2, to: number, pairs: vec![(0, 0); 10] },
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
    Packed::encode(&Plan { epoch, join, nccl: false, timeouts, devices, is_tentative: false }).unwrap()
}

/// Sends the flood of these commands, until the node refuses more.
fn send(make: fn(u32) -> Command) {
    let mut controller = RawController::new(LIMIT);
    let tensor = Command::Empty { to: 2, device: None, dtype: DataType::U8, shape: vec![64], on: On::All };
    controller.submit([set(1, LARGE), tensor]).unwrap();
    for batch in 0..COUNT / BATCH {
        let numbers = batch * BATCH..(batch + 1) * BATCH;
        let sent = controller.submit(numbers.map(make));
        assert!(controller.held() <= LIMIT);
        if let Err(error) = sent {
            assert_eq!(error.kind(), ErrorKind::LimitExceeded, "{error}");
            break;
        }
    }
    controller.settle();
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
        let command = make(1);
        let before = memory("VmRSS:");
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        send(make);
        let grown = memory("VmHWM:").saturating_sub(before);
        println!("{}: {} KiB", command.name(), grown >> 10);
        assert!(grown <= LIMIT + CONSTANT, "{} took {grown} bytes", command.name());
    }
}

/// Returns an amount of memory of this process.
fn memory(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}
