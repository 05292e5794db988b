//! `rpc-server relay` and `rpc-server serve --relay`, as processes.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rpc_server::ServerProcess;
use tempfile::TempDir;

/// Starts a server process, which ends with this one.
fn start(command: &str, folder: &TempDir, flags: &[&str]) -> ServerProcess {
    let mut program = crate::server_program();
    program.args([command, "--exit-with-stdin", "--log-level", "error"]).args(flags);
    program.env("XDG_STATE_HOME", folder.path());
    ServerProcess::spawn(program).unwrap()
}

/// Returns the exit code and the output.
fn run(program: &str, args: &[&str]) -> (i32, String) {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("RPC_") {
            command.env_remove(name);
        }
    }
    let output = command.args(args).stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
    (output.status.code().unwrap(), text)
}

fn cli(args: &[&str]) -> (i32, String) {
    run(env!("CARGO_BIN_EXE_rpc-cli"), args)
}

fn until(args: &[&str], is_so: impl Fn(i32, &str) -> bool) -> String {
    let begun = Instant::now();
    loop {
        let last = cli(args);
        if is_so(last.0, &last.1) {
            return last.1;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "it does not come to that: {last:?}");
    }
}

const LOOPBACK: [&str; 2] = ["--listen", "tcp://127.0.0.1:0"];

#[test]
fn a_server_without_a_listener_is_reached_through_a_relay() {
    let folder = tempfile::tempdir().unwrap();
    let relay = start("relay", &folder, &LOOPBACK);
    let board = format!("{}/board7", relay.address());
    let (code, text) = cli(&["call", &board, "rpc.echo", "42"]);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("no server with key 'board7' waits at this relay"), "{text}");
    // The server listens on an unused socket file as well, whose line tells this test that it is
    // ready.
    let unused = format!("unix:{}", folder.path().join("unused").display());
    let _server = start("serve", &folder, &["--relay", &board, "--capacity", "2", "--listen", &unused]);
    assert_eq!(until(&["call", &board, "rpc.echo", "42"], |code, _| code == 0).trim(), "42");
    for _ in 0..5 {
        assert_eq!(until(&["call", &board, "rpc.echo", "43"], |code, _| code == 0).trim(), "43");
    }
}

/// The transport of another crate works wherever an address is taken.
#[test]
fn websockets_carry_sessions_hops_relays_and_trackers() {
    let folder = tempfile::tempdir().unwrap();
    let listen = ["--listen", "ws://127.0.0.1:0"];
    let server = start("serve", &folder, &listen);
    assert!(server.address().starts_with("ws://127.0.0.1:"), "{}", server.address());
    let (code, text) = cli(&["call", server.address(), "rpc.echo", "42"]);
    assert_eq!((code, text.trim()), (0, "42"));

    let hop = start("serve", &folder, &[&listen[..], &["--allow-forward", "ws://127.0.0.1"]].concat());
    let (code, text) = cli(&["-J", hop.address(), "call", server.address(), "rpc.echo", "43"]);
    assert_eq!((code, text.trim()), (0, "43"));
    let tunnel = format!("tunnel:{}", hop.address());
    let (code, text) = cli(&["-J", &tunnel, "call", server.address(), "rpc.echo", "43"]);
    assert_eq!((code, text.trim()), (0, "43"));

    let relay = start("relay", &folder, &listen);
    let board = format!("{}/board7", relay.address());
    let unused = format!("unix:{}", folder.path().join("unused").display());
    let _parked = start("serve", &folder, &["--relay", &board, "--listen", &unused]);
    assert_eq!(until(&["call", &board, "rpc.echo", "44"], |code, _| code == 0).trim(), "44");

    let tracker = start("tracker", &folder, &LOOPBACK);
    let pool = ["--tracker", tracker.address(), "--tracker-key", "web"];
    let _pooled = start("serve", &folder, &[&listen[..], &pool].concat());
    let any = format!("tracker://{}/web", tracker.address().trim_start_matches("tcp://"));
    assert_eq!(until(&["-q", "call", &any, "rpc.echo", "45"], |code, _| code == 0).trim(), "45");

    // Beyond the loopback interface it is refused like any transport that does not encrypt.
    let (code, text) = run(env!("CARGO_BIN_EXE_rpc-server"), &["serve", "--listen", "ws://0.0.0.0:0"]);
    assert!(code != 0 && text.contains("--insecure"), "{text}");
}

/// A regression: the doctor asked relays for a session without a name, and reported them as broken.
#[test]
fn the_doctor_tells_a_relay_from_a_server() {
    let folder = tempfile::tempdir().unwrap();
    let relay = start("relay", &folder, &LOOPBACK);
    let (code, text) = cli(&["doctor", relay.address()]);
    assert!(code == 2 && text.contains("it is a relay") && text.contains("/NAME"), "{text}");
    let board = format!("{}/board7", relay.address());
    let (code, text) = cli(&["doctor", &board]);
    assert!(code != 0 && text.contains(&format!("--relay {board}")), "{text}");
    let unused = format!("unix:{}", folder.path().join("unused").display());
    let _server = start("serve", &folder, &["--relay", &board, "--capacity", "2", "--listen", &unused]);
    let text = until(&["doctor", &board], |code, _| code == 0);
    assert!(text.contains("'board7' waits at the relay") && text.contains("works"), "{text}");
}

#[test]
fn a_tracker_gives_out_servers_that_wait_at_a_relay() {
    let folder = tempfile::tempdir().unwrap();
    let (relay, tracker) = (start("relay", &folder, &LOOPBACK), start("tracker", &folder, &LOOPBACK));
    let at = tracker.address().to_owned();
    let mut servers = Vec::new();
    for _ in 0..2 {
        let mut program = crate::server_program();
        program.args(["serve", "--relay", relay.address(), "--tracker", &at, "--key", "board", "--log-level", "error"]);
        program.env("XDG_STATE_HOME", folder.path()).stdin(Stdio::piped()).arg("--exit-with-stdin");
        servers.push(program.spawn().unwrap());
    }
    let status = until(&["status", "--tracker", &at], |_, text| text.contains("2 servers"));
    assert_eq!(status.matches(&format!("{}/board-", relay.address())).count(), 2, "{status}");
    let key = format!("{}/board", at.replace("tcp://", "tracker://"));
    for _ in 0..4 {
        // On a machine that stands still the tool would say what it waits for.
        let (code, text) = cli(&["-q", "call", &key, "rpc.echo", "42"]);
        assert_eq!((code, text.trim()), (0, "42"));
    }
    for mut server in servers {
        server.kill().unwrap();
        server.wait().unwrap();
    }
    until(&["status", "--tracker", &at], |_, text| text.contains("0 servers"));
}

#[test]
fn unsafe_settings_are_refused_with_advice() {
    let config = |args: &[&str]| run(env!("CARGO_BIN_EXE_rpc-server"), args);
    let (code, text) = config(&["relay-config", "--listen", "tls://0.0.0.0:9290"]);
    assert_eq!(code, 78);
    assert!(text.contains("--insecure"), "{text}");
    let (code, text) = config(&["config", "--relay", "tcp://gateway.lan:9290/board"]);
    assert_eq!(code, 78);
    assert!(text.contains("--token-file") && text.contains("is a relay"), "{text}");
    let (code, text) = config(&["config", "--relay", "tcp://127.0.0.1:9290"]);
    assert_eq!(code, 78);
    assert!(text.contains("tcp://127.0.0.1:9290/NAME"), "{text}");
    let (code, text) = config(&["config", "--relay", "tcp://127.0.0.1:9290/board"]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("listen = []") && text.contains("relay = [\"tcp://127.0.0.1:9290/board\"]"), "{text}");
    let (code, text) = config(&["relay-config", "--keep-alive", "3s"]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("keep-alive = \"3s\""), "{text}");
}
