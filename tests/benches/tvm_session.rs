//! The client of `session_vs_tvm.py`: calls and copies at a server of any kind that has the
//! functions by which TVM's programs check one (`rpc.test.addone`).
//!
//! ```text
//! tvm_session ADDRESS CALLS COPIES MIB
//! ```
//!
//! Prints a line for each call and each copy: what it was, and its time in microseconds.

// The bench is its own check: it panics at any unexpected result.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use bytes::Bytes;
use rpc_core::{DataType, Device};
use rpc_transports::Connector;

fn print(what: &str, began: Instant) {
    let time: Duration = began.elapsed();
    println!("{what} {}", time.as_secs_f64() * 1e6);
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    // `cargo bench` runs all benches, and this one needs a server.
    let [address, calls, copies, mib] = &args[..] else { return };
    let [calls, copies, mib] = [calls, copies, mib].map(|number| number.parse::<usize>().unwrap());
    let connector = Connector::new().transports(rpc_server::transports());
    let began = Instant::now();
    let session = connector.connect_blocking(address).unwrap();
    print("connect", began);
    let add = session.get_function("rpc.test.addone").wait().unwrap();
    for number in 0..calls as i64 {
        let began = Instant::now();
        assert_eq!(add.call::<i64>((number,)).wait().unwrap(), number + 1);
        print("call", began);
    }
    let bytes = Bytes::from(vec![7_u8; mib << 20]);
    let tensor = session.alloc(Device::cpu(), DataType::U8, &[bytes.len() as i64]).wait().unwrap();
    for _ in 0..copies {
        let began = Instant::now();
        session.copy_to_remote(&tensor, bytes.clone()).wait().unwrap();
        print("to", began);
        let began = Instant::now();
        let back = session.copy_from_remote(&tensor).wait().unwrap();
        print("from", began);
        assert!(back == bytes);
    }
}
