//! `rpc-server tracker`, `rpc-server serve --tracker` and `rpc-cli`, as processes.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rpc_server::ServerProcess;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value as Json;
use tempfile::TempDir;

/// Starts a server process, which ends with this one.
fn start(command: &str, folder: &TempDir, flags: &[&str]) -> ServerProcess {
    let mut program = crate::server_program();
    program.args([command, "--listen", "tcp://127.0.0.1:0", "--exit-with-stdin", "--log-level", "error"]).args(flags);
    // Folder for the files of sessions.
    program.env("XDG_STATE_HOME", folder.path());
    ServerProcess::spawn(program).unwrap()
}

/// Returns the exit code and the output.
fn cli(args: &[&str]) -> (i32, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rpc-cli"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("RPC_CLI_") {
            command.env_remove(name);
        }
    }
    let output = command.args(args).stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
    (output.status.code().unwrap(), text)
}

/// Runs the tool until its output satisfies the predicate. Returns the output.
fn until(args: &[&str], is_so: impl Fn(&str) -> bool) -> String {
    let begun = Instant::now();
    loop {
        let last = cli(args);
        if is_so(&last.1) {
            return last.1;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "it does not come to that: {last:?}");
    }
}

#[test]
fn a_tracker_and_its_servers_are_used_from_the_shell() {
    let folder = tempfile::tempdir().unwrap();
    let tracker = start("tracker", &folder, &[]);
    let at = tracker.address().to_owned();
    let key = |key: &str| format!("{}/{key}", at.replace("tcp://", "tracker://"));

    let (code, text) = cli(&["doctor", &key("board")]);
    assert_eq!(code, 69, "{text}");
    assert!(text.contains("never registered") && text.contains("--tracker-key"), "{text}");

    let flags = ["--tracker", &at, "--tracker-key", "board", "--label", "arch=arm64,rack=7", "--capacity", "2"];
    let server = start("serve", &folder, &flags);
    let text =
        until(&["status", "--tracker", &at], |text| text.contains("1 server, 2 of 2 slots free, 0 requests waiting"));
    for expected in ["board", "2/2", "arch=arm64 rack=7", "1×cpu", server.address()] {
        assert!(text.contains(expected), "{expected} in {text}");
    }
    let format = |format: &str| cli(&["status", "--tracker", &at, "-o", format]).1;
    assert_eq!(format("name").trim(), server.address());
    assert_eq!(serde_json::from_str::<Json>(&format("json")).unwrap()["servers"][0]["key"], "board");
    // Errors are documents, too.
    let error = cli(&["status", "--tracker", "tcp://127.0.0.1:1", "-o", "json"]);
    assert!(error.0 == 69 && serde_json::from_str::<Json>(&error.1).unwrap()["error"]["exit_code"] == 69, "{error:?}");

    // On a machine that stands still the tool says what it waits for, but not if it is to be quiet.
    let (code, text) = cli(&["-q", "call", &key("board"), "rpc.echo", "42"]);
    assert_eq!((code, text.trim()), (0, "42"));
    // A further requirement, which another server meets and this one does not.
    let wanted = |flags: &[&str]| cli(&[&["-q", "call", &key(""), "rpc.echo", "42"], flags].concat());
    let (code, text) = wanted(&["--want", "cpu", "--label", "rack=7,arch=arm64"]);
    assert_eq!((code, text.trim()), (0, "42"));
    for flags in [["--want", "cuda,target=cuda -arch=sm_90"], ["--label", "rack=8"]] {
        let (code, text) = wanted(&[&flags[..], &["--timeout", "300ms"]].concat());
        assert_eq!(code, 124, "{flags:?} {text}");
    }
    let (code, text) = cli(&["ping", "tcp://127.0.0.1:1", "--want", "cpu"]);
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("is no tracker://"), "{text}");
    let (code, text) = cli(&["call", server.address(), "rpc.echo", "42"]);
    assert_eq!(code, 77, "{text}");
    assert!(text.contains("no ticket") && text.contains("--allow-direct"), "{text}");

    let text = until(&["status", "--tracker", &key("x"), "--json"], |text| text.contains("\"reached\""));
    let summary: Json = serde_json::from_str(&text).unwrap();
    assert_eq!(summary["servers"][0]["labels"]["arch"], "arm64");
    assert_eq!(summary["servers"][0]["capacity"], 2);

    let (code, text) = cli(&["doctor", &key("board")]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("1 server with the key 'board'"), "{text}");
    let (code, text) = cli(&["doctor", &key("bord")]);
    assert_eq!(code, 69, "{text}");
    assert!(text.contains("key mismatch") && text.contains("there are: board"), "{text}");
    let (code, text) = cli(&["doctor", &server.address().replace("tcp://", "tracker://")]);
    assert_ne!(code, 0, "{text}");

    drop(server);
    until(&["doctor", &key("board")], |text| text.contains("gone: "));
    // The time-out names what it has waited for, if the machine was fast enough to ask.
    let call = ["call", "--timeout", "2s", &key("board"), "rpc.echo", "42"];
    until(&call, |text| text.contains("took longer than 2s: gone: "));

    // A regression: a server that was stopped in good order was told as lost.
    let server = start("serve", &folder, &flags);
    until(&["status", "--tracker", &at], |text| text.contains("1 server, "));
    kill_process(Pid::from_raw(server.id() as i32).unwrap(), Signal::TERM).unwrap();
    until(&["doctor", &key("board")], |text| text.contains("stopped: "));
    let (code, text) = cli(&["status", "--tracker", &at]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("it was stopped") && !text.contains("lost"), "{text}");
}

#[test]
fn contradicting_options_are_refused_at_once() {
    let config = |args: &[&str]| {
        let output = crate::server_program().args(args).output().unwrap();
        (
            output.status.code().unwrap(),
            String::from_utf8(output.stdout).unwrap() + &String::from_utf8_lossy(&output.stderr),
        )
    };
    let (code, text) = config(&["config", "--tracker", "tcp://pool:9190"]);
    assert_eq!(code, 78);
    assert!(text.contains("--tracker-key"), "{text}");
    let (code, text) = config(&["config", "--tracker", "tracker://pool:9190/board", "--tracker-key", "board"]);
    assert_eq!(code, 2, "{text}");
    let (code, text) = config(&["config", "--label", "arm64"]);
    assert_eq!(code, 2);
    assert!(text.contains("arch=arm64"), "{text}");
    let (code, text) = config(&["tracker-config", "--listen", "tcp://0.0.0.0:9190"]);
    assert_eq!(code, 78);
    assert!(text.contains("--insecure"), "{text}");

    let (code, text) = config(&["config", "--tracker", "tracker+tls://pool:9190", "--key", "board", "--label", "a=b"]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("tracker = [\"tls://pool:9190\"]") && text.contains("label = [\"a=b\"]"), "{text}");
    let (code, text) = config(&["tracker-config", "--lease", "3s"]);
    assert_eq!(code, 0, "{text}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tracker.toml");
    std::fs::write(&file, &text).unwrap();
    let (code, again) = config(&["tracker-config", "--config", file.to_str().unwrap()]);
    assert_eq!((code, again), (0, text));
}

#[test]
fn a_server_that_is_drained_goes_to_no_more_clients_until_that_is_undone() {
    let folder = tempfile::tempdir().unwrap();
    let (closed, tracker) = (start("tracker", &folder, &[]), start("tracker", &folder, &["--allow-kick"]));
    let both = [closed.address(), tracker.address()].join(",");
    let flags = ["--tracker", &both, "--tracker-key", "board", "--capacity", "2"];
    let server = start("serve", &folder, &flags);
    let board = format!("{}/board", tracker.address().replace("tcp://", "tracker://"));
    let call = |flags: &[&str]| cli(&[&["-q", "call", &board, "rpc.echo", "42"], flags].concat());
    for tracker in [&closed, &tracker] {
        until(&["status", "--tracker", tracker.address()], |text| text.contains("2 of 2 slots free"));
    }

    // The operator lets nobody do it by default.
    let (code, text) = cli(&["drain", "--tracker", closed.address(), server.address()]);
    assert!(code == 77 && text.contains("--allow-kick"), "{code} {text}");
    let drain = |args: &[&str]| cli(&[&["drain", "--tracker", tracker.address()], args].concat());
    let (code, text) = drain(&["nothing"]);
    assert!(code == 1 && text.contains("no server has the name"), "{code} {text}");

    // A client keeps its session.
    let mut holder = Command::new(env!("CARGO_BIN_EXE_rpc-cli"));
    holder.args(["ping", &board]);
    let (_holder, line) = first_line(&mut holder);
    assert!(line.contains("reply from"), "{line}");
    let (code, text) = drain(&[server.address()]);
    assert!(code == 0 && text.contains("1 client may go on"), "{code} {text}");
    let (code, text) = cli(&["status", "--tracker", tracker.address()]);
    assert!(code == 0 && text.contains("0 of 0 slots free") && text.contains("draining for "), "{code} {text}");
    // The time-out names what it has waited for, if the machine was fast enough to ask.
    let late = ["call", &board, "rpc.echo", "42", "--timeout", "2s"];
    until(&late, |text| text.contains("took longer than 2s: draining: 1 server"));
    let (code, text) = cli(&["doctor", &board]);
    assert_eq!(code, 69, "{text}");
    assert!(text.contains("draining: 1 server with the key 'board'") && text.contains("--undo"), "{text}");

    let (code, text) = drain(&["--undo", server.address()]);
    assert_eq!(code, 0, "{text}");
    let (code, text) = call(&[]);
    assert_eq!((code, text.trim()), (0, "42"));
}

/// A child process that is killed with this value.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a program. Returns the first line that it prints, too.
fn first_line(command: &mut Command) -> (KillOnDrop, String) {
    let mut child = KillOnDrop(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (child, line)
}

/// A web server stands for all programs that speak a protocol of their own.
#[test]
fn a_server_of_a_tracker_runs_programs_and_is_held_while_a_service_near_it_is_forwarded() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("page"), "hello").unwrap();
    let mut web = Command::new("python3");
    web.args(["-u", "-m", "http.server", "0", "--bind", "127.0.0.1"]).current_dir(folder.path()).stderr(Stdio::null());
    let (_web, line) = first_line(&mut web);
    let port = line.split(' ').nth(5).unwrap();
    let tracker = start("tracker", &folder, &[]);
    let service = format!("tcp://127.0.0.1:{port}");
    let pool = ["--tracker", tracker.address(), "--tracker-key", "board", "--allow-port", &service];
    let server = start("serve", &folder, &[&pool[..], &["--allow-run", "sh"]].concat());
    let board = format!("{}/board", tracker.address().replace("tcp://", "tracker://"));
    // A program runs there as well, at a server that has what it wants.
    let (code, text) = cli(&["run", "--want", "cpu", &board, "--", "sh", "-c", "echo $HOME; exit 3"]);
    assert!(code == 3 && text.contains(folder.path().to_str().unwrap()), "{code} {text}");
    let mut forward = Command::new(env!("CARGO_BIN_EXE_rpc-cli"));
    forward.args(["forward", &format!("0:{port}"), &board, "--json"]).stderr(Stdio::piped());
    let (mut forward, line) = first_line(&mut forward);
    let started: Json = serde_json::from_str(&line).unwrap();
    assert_eq!(started["address"], server.address(), "{started}");
    let local = started["local"].as_str().unwrap().strip_prefix("tcp://").unwrap();
    for _ in 0..2 {
        let mut stream = TcpStream::connect(local).unwrap();
        stream.write_all(b"GET /page HTTP/1.0\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.contains("200 OK") && answer.ends_with("hello"), "{answer}");
    }
    until(&["status", "--tracker", tracker.address()], |text| text.contains("0 of 1 slot free"));
    // Without the server there is nothing to forward.
    drop(server);
    let mut report = String::new();
    forward.0.stderr.take().unwrap().read_to_string(&mut report).unwrap();
    assert!(!forward.0.wait().unwrap().success() && report.contains("error"), "{report}");
}
