//! A controller of Disco in a process of its own, for tests that kill it.
//!
//! Arguments: the location of the two workers (`processes PROGRAM`, or `nodes` and an address for
//! each), their activity (`idle`, `call` or `collective`), and the file that releases them. The
//! program prints the process ids of the workers, and waits.

// The program serves tests: any error is a reason to panic.
#![allow(clippy::unwrap_used)]

use disco::{Content, DiscoSession, ProcessSession, SocketSession, WorkerId};
use rpc_core::Value;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (doing, path, launch) = (args[0].as_str(), args[1].as_str(), &args[2..]);
    let starting = match launch[0].as_str() {
        "processes" => ProcessSession::new(2, 1).command([launch[1].as_str(), "--disco-worker"]).start(),
        _ => SocketSession::new(&launch[1..], 1, 1).start(),
    };
    let session = starting.wait().unwrap();
    let pids = pids(&session);
    let held = match doing {
        "call" => Some(session.get_global_func("hold_on").unwrap().call((vec![0_u32, 1], path)).unwrap()),
        "collective" => Some(session.get_global_func("hold_in_collectives").unwrap().call((path,)).unwrap()),
        _ => None,
    };
    println!("{} {}", pids[0], pids[1]);
    loop {
        std::thread::park();
        // Nothing unparks this thread, so that the workers are held until the process is killed.
        let _ = &held;
    }
}

fn pids(session: &DiscoSession) -> Vec<i64> {
    let pid = session.get_global_func("pid").unwrap().call(()).unwrap();
    let pid = |worker| match session.debug_get_from_remote(&pid, WorkerId(worker)).wait().unwrap() {
        Content::Value(Value::Int(pid)) => pid,
        other => panic!("{other:?}"),
    };
    (0..session.num_workers()).map(pid).collect()
}
