//! Golden bytes of the messages that `serde` writes, as MessagePack. Names of fields and variants
//! are part of them: whoever changes one raises [`VERSION`].

use std::time::Duration;

use rpc_core::Packed;
use serde::Serialize;

use crate::ccl::membership::CollectiveTimeouts;
use crate::options::Hosting;
use crate::wire::event::LogLine;
use crate::wire::plan::{JoinPlan, Layout, Plan};
use crate::wire::relayed_pair::RelayedPair;
use crate::wire::set_up::{ChildNode, MpiProcess, NodeInfo, SetUp, VERSION, WorkerProcess};

fn assert_bytes(message: &impl Serialize, golden: &str) {
    let packed = Packed::encode(message).unwrap();
    let hex: String = packed.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, golden);
}

#[test]
fn set_ups_keep_their_bytes() {
    assert_eq!(VERSION, 3);
    let set_up = SetUp {
        version: VERSION,
        layout: Layout { world_size: 4, num_groups: 2 },
        first: 2,
        count: 1,
        hosting: Hosting::Threads,
        pin: false,
        logs: Some(2),
        report_every: 2_097_152,
        keep_alive_ms: 200,
        children: vec![ChildNode { address: "tcp://b:1".to_owned(), children: Vec::new() }],
    };
    assert_bytes(
        &set_up,
        "8aa776657273696f6e03a66c61796f757482aa776f726c645f73697a6504aa6e756d5f67726f75707302a56669727374\
         02a5636f756e7401a7686f7374696e67a754687265616473a370696ec2a46c6f677302ac7265706f72745f6576657279\
         ce00200000ad6b6565705f616c6976655f6d73ccc8a86368696c6472656e9182a761646472657373a9\
         7463703a2f2f623a31a86368696c6472656e90",
    );
    let mpi = Some(MpiProcess { job: "j".to_owned(), rank: 3 });
    let info = NodeInfo {
        processes: vec![WorkerProcess { count: 2, machine: "m".to_owned(), mpi }],
        is_encrypted_below: true,
        data_addresses: vec![None],
    };
    assert_bytes(
        &info,
        "83a970726f6365737365739183a5636f756e7402a76d616368696e65a16da36d706982a36a6f62a16aa472616e6b03b2\
         69735f656e637279707465645f62656c6f77c3ae646174615f61646472657373657391c0",
    );
}

#[test]
fn plans_keep_their_bytes() {
    let timeouts = CollectiveTimeouts { entry: None, stall: Duration::from_secs(15), join: Duration::from_secs(30) };
    let join = JoinPlan::Apart { why: "no way".to_owned() };
    let plan = Plan { epoch: 1, join, nccl: false, timeouts, devices: Vec::new() };
    assert_bytes(
        &plan,
        "85a565706f636801a46a6f696e81a5417061727481a3776879a66e6f20776179a46e63636cc2a874696d656f75747383\
         a5656e747279c0a57374616c6c82a4736563730fa56e616e6f7300a46a6f696e82a4736563731ea56e616e6f7300a764\
         65766963657390",
    );
    let pair = RelayedPair { from: 1, to: 2, is_world: true };
    assert_bytes(&pair, "83a466726f6d01a2746f02a869735f776f726c64c3");
}

#[test]
fn lines_of_logs_keep_their_bytes() {
    let line = LogLine { level: 1, target: "t".to_owned(), text: "x=1".to_owned(), missing_before: 7 };
    assert_bytes(&line, "84a56c6576656c01a6746172676574a174a474657874a3783d31ae6d697373696e675f6265666f726507");
}
