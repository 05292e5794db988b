//! `rpc-bench rpc` as a program.

use std::process::{Command, Stdio};

use rpc_server::config::ServeConfig;
use rpc_server::server::{RpcServer, Running};
use serde_json::{Value as Json, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// Exit code and output of a run.
#[derive(Debug)]
struct Run {
    code: i32,
    stdout: String,
    stderr: String,
}

/// Runs `rpc-bench rpc ARGS…`.
fn bench(args: &[&str]) -> Run {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rpc-bench"));
    for (name, _) in std::env::vars_os() {
        if ["RPC_CLI_", "RPC_BENCH_"].iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    let output = command.arg("rpc").args(args).stdin(Stdio::null()).output().unwrap();
    Run {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

fn lines(run: &Run) -> Vec<Json> {
    assert_eq!(run.code, 0, "{}", run.stderr);
    run.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Server in this process, with a folder for its workspaces.
struct LocalServer {
    address: String,
    _running: Running,
    _runtime: Runtime,
    _folder: TempDir,
}

impl LocalServer {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let runtime = Runtime::new().unwrap();
        let listen = vec!["tcp://127.0.0.1:0".parse().unwrap()];
        let config = ServeConfig { listen, workdir: folder.path().to_owned(), ..ServeConfig::default() };
        let running = runtime.block_on(RpcServer::default().config(config).start()).unwrap();
        let address = running.addresses()[0].to_string();
        Self { address, _running: running, _runtime: runtime, _folder: folder }
    }

    fn address(&self) -> &str {
        &self.address
    }
}

#[test]
fn prints_a_line_for_every_case() {
    let server = LocalServer::start();
    let lines = lines(&bench(&[server.address(), "--json", "--iterations", "1", "--seconds", "0"]));
    let cases: Vec<_> = lines.iter().map(|line| line["case"].as_str().unwrap()).collect();
    let expected = [
        "call",
        "call_blocking_client",
        "call_blocking_fn",
        "call_pipelined_64",
        "copy_to_64B",
        "copy_to_4KiB",
        "copy_to_1MiB",
        "copy_to_64MiB",
        "copy_to_256MiB",
        "copy_from_64B",
        "copy_from_4KiB",
        "copy_from_1MiB",
        "copy_from_64MiB",
        "copy_from_256MiB",
        "connect",
        "object_churn",
    ];
    assert_eq!(cases, expected);
    for line in &lines {
        assert_eq!((&line["suite"], &line["n"]), (&json!("rpc-tcp"), &json!(1)), "{line}");
        assert!(line["median"].as_f64().unwrap() > 0.0 && line["p99"].as_f64().unwrap() > 0.0, "{line}");
        assert!(["µs", "GB/s", "calls/s", "objects/s"].contains(&line["unit"].as_str().unwrap()), "{line}");
        assert!(line.get("ratio").is_none());
    }
}

#[test]
fn started_servers_are_compared_with_bare_sockets() {
    for transport in ["tcp", "unix"] {
        let lines = lines(&bench(&[
            "--json",
            "--baseline",
            "--hop",
            "--iterations=2",
            "--seconds=0",
            "--pin=same",
            "--transport",
            transport,
            "--cases=call*,copy_*_4KiB,copy_*_1hop,connect,object_churn",
        ]));
        assert_eq!(lines.len(), 4 + 2 + 2 + 3, "{lines:?}");
        for line in lines {
            assert_eq!(line["suite"], format!("rpc-{transport}"));
            assert!(line["baseline"].as_f64().unwrap() > 0.0 && line["ratio"].as_f64().unwrap() > 0.0, "{line}");
            let hop = line["case"].as_str().unwrap().ends_with("_1hop");
            assert_eq!(line.get("ratio_direct").is_some() && line.get("direct").is_some(), hop, "{line}");
        }
    }
}

#[test]
fn measurements_that_cannot_be_compared_are_refused() {
    let server = LocalServer::start();
    for args in [&["--cases", "nothing"][..], &["--cases", "call_1hop"], &["--pin", "same"], &["--seconds", "-1"]] {
        let run = bench(&[&[server.address()], args].concat());
        assert_eq!(run.code, 2, "{run:?}");
    }
    assert_eq!(bench(&["exec:cat", "--baseline"]).code, 2);
    assert_eq!(bench(&["-J", server.address()]).code, 2);
}
