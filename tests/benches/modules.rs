//! Costs of native modules, over TCP on this machine:
//!
//!     cargo bench -p rpc-tests --bench modules   (--json for a line of JSON for each result)
//!
//! Needs TVM-FFI, which tests/modules/prepare.sh installs. The server is this program, once with
//! all sessions in its process, and once with a process for each, like servers that allow modules.
//!
//! * `call`: an empty function of a module beside `rpc.echo` without an argument, both of the
//!   inline kind, and one of the default kind beside `rpc.noop`. The two of a pair take turns in
//!   rounds of calls; of each the median round, and the median of the differences.
//! * `tensor`: the same function with a tensor of 64 MiB beside one of 4 bytes.
//! * `load`: a module that the server has, in a session that has not loaded it yet, and again.

// The bench is its own check: it panics at any unexpected result.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use rpc_core::client::Modules;
use rpc_core::{DataType, Device, Registry, RemoteFunction, RemoteTensor, Session};
use rpc_server::config::{Isolate, ServeConfig};
use rpc_server::{RpcServer, isolate};
use rpc_tests::tvm_ffi::environment;
use rpc_transports::Connector;

const ROUNDS: usize = 41;
const CALLS: u32 = 500;

/// Number of sessions that load.
const LOADS: usize = 21;

fn main() {
    isolate::run_if_isolated(&Registry::new());
    let Some(environment) = environment() else { return };
    let json = std::env::args().any(|arg| arg == "--json");
    let module = environment.compile("kernels.c");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    for isolate in [Isolate::None, Isolate::Process] {
        let folder = tempfile::tempdir().unwrap();
        let config = ServeConfig {
            listen: vec!["tcp://127.0.0.1:0".parse().unwrap()],
            workdir: folder.path().to_owned(),
            allow_modules: true,
            tvm_ffi: Some(environment.library()),
            isolate,
            ..ServeConfig::default()
        };
        let running = runtime.block_on(RpcServer::default().config(config).start()).unwrap();
        let address = running.addresses()[0].to_string();
        let place = if isolate == Isolate::None { "one process" } else { "a process a session" };
        let report = Report { place, json };

        let connect = || Connector::new().connect_blocking(&address).unwrap();
        let code = std::fs::read(&module).unwrap();
        let (digest, _) = rpc_server::modules::hash(&*code).unwrap();
        Modules::new(&connect()).upload_bytes(digest, code).wait().unwrap();
        loads(&report, &connect, digest);
        calls(&report, &connect(), digest);
        drop(running);
    }
    runtime.shutdown_background();
}

struct Report {
    place: &'static str,
    json: bool,
}

impl Report {
    fn print(&self, what: &str, microseconds: &[(&str, f64)]) {
        if self.json {
            let fields: String =
                microseconds.iter().map(|(name, value)| format!(",\"{name}_us\":{value:.3}")).collect();
            println!("{{\"place\":\"{}\",\"what\":\"{what}\"{fields}}}", self.place);
        } else {
            let fields: Vec<_> = microseconds.iter().map(|(name, value)| format!("{name} {value:.2} us")).collect();
            println!("{:<20} {what:<22} {}", self.place, fields.join(", "));
        }
    }
}

fn loads(report: &Report, connect: &dyn Fn() -> Session, digest: rpc_core::client::Digest) {
    let (mut first, mut again) = (Vec::new(), Vec::new());
    for _ in 0..LOADS {
        let session = connect();
        let modules = Modules::new(&session);
        for times in [&mut first, &mut again] {
            let began = Instant::now();
            modules.load(digest).wait().unwrap();
            times.push(microseconds(began.elapsed()));
        }
    }
    report.print("load", &[("first", median(&mut first)), ("again", median(&mut again))]);
}

fn calls(report: &Report, session: &Session, digest: rpc_core::client::Digest) {
    let module = Modules::new(session).load(digest).wait().unwrap();
    let function = |name: &str| module.function(name).wait().unwrap();
    let builtin = |name: &str| session.get_function(name).wait().unwrap();
    let without = |function: RemoteFunction| move || function.call::<()>(()).wait().unwrap();
    pair(report, "call, inline", ("echo", &without(builtin("rpc.echo"))), ("empty", &without(function("empty"))));
    let (noop, empty) = (without(builtin("rpc.noop")), without(function("empty_blocking")));
    pair(report, "call, default kind", ("noop", &noop), ("empty", &empty));

    let tensor = |elements| session.alloc(Device::cpu(), DataType::F32, &[elements]).wait().unwrap();
    let with = |tensor: RemoteTensor| {
        let empty = function("empty");
        move || empty.call::<()>((&tensor,)).wait().unwrap()
    };
    pair(report, "tensor argument", ("4 bytes", &with(tensor(1))), ("64 MiB", &with(tensor(16 << 20))));
}

/// Compares two functions, in turns.
fn pair(report: &Report, what: &str, one: (&str, &dyn Fn()), other: (&str, &dyn Fn())) {
    let (mut ones, mut others, mut differences) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let [first, second] = [one.1, other.1].map(round);
        ones.push(first);
        others.push(second);
        differences.push(second - first);
    }
    let medians =
        [(one.0, median(&mut ones)), (other.0, median(&mut others)), ("difference", median(&mut differences))];
    report.print(what, &medians);
}

/// Returns microseconds per call.
fn round(call: &dyn Fn()) -> f64 {
    let began = Instant::now();
    for _ in 0..CALLS {
        call();
    }
    microseconds(began.elapsed()) / f64::from(CALLS)
}

fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
