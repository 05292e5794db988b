//! The program `rpc-server`: start, signals, standard input and output, exit codes.

use std::future::IntoFuture;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use rpc_core::{DataType, Device, ErrorKind, Pending, Session};
use rpc_server::ServerProcess;
use rpc_transports::Connector;
use rustix::process::{Pid, Signal, kill_process};

use crate::NO_OPENCL;

fn program(args: &[&str]) -> Command {
    let mut command = crate::server_program();
    command.args(args).env_clear().env(NO_OPENCL.0, NO_OPENCL.1);
    command
}

fn output(args: &[&str]) -> Output {
    program(args).stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// A server whose log can be read, killed when dropped.
struct Daemon {
    child: Child,
    address: String,
    log: BufReader<ChildStderr>,
    _folder: tempfile::TempDir,
}

impl Daemon {
    fn start(args: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self::spawn(program(&["serve"]), folder, args)
    }

    fn spawn(mut command: Command, folder: tempfile::TempDir, args: &[&str]) -> Self {
        command.args(["--listen", "tcp://127.0.0.1:0", "--workdir"]);
        command.arg(folder.path()).args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on ").unwrap().to_owned();
        let log = BufReader::new(child.stderr.take().unwrap());
        Self { child, address, log, _folder: folder }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Reads the log up to a line with `text`.
    fn await_log(&mut self, text: &str) -> String {
        let mut line = String::new();
        while !line.contains(text) {
            line.clear();
            assert_ne!(self.log.read_line(&mut line).unwrap(), 0, "the log ended without '{text}'");
        }
        line
    }

    /// Returns the exit code. Waits for ten seconds at most.
    fn exit_code(mut self) -> Option<i32> {
        wait(&mut self.child).code()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn wait(child: &mut Child) -> ExitStatus {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        assert!(start.elapsed() < Duration::from_secs(10), "the server does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn connect(runtime: &tokio::runtime::Runtime, address: &str) -> Session {
    runtime.block_on(Connector::new().connect(address)).unwrap()
}

/// Begins a call and waits until it has arrived at the server.
fn start_sleep(runtime: &tokio::runtime::Runtime, session: &Session, seconds: f64) -> Pending<()> {
    let sleep = runtime.block_on(session.function::<(f64,), ()>("rpc.sleep").into_future()).unwrap();
    let mut call = sleep.call((seconds,)).start();
    runtime.block_on(call.admitted()).unwrap();
    // An answer on another lane says that the request before it has arrived too.
    runtime.block_on(session.get_function("rpc.echo").concurrent().into_future()).unwrap();
    call
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

#[test]
fn a_signal_ends_an_idle_server_in_good_order() {
    for signal in [Signal::TERM, Signal::INT] {
        let daemon = Daemon::start(&[]);
        daemon.signal(signal);
        assert_eq!(daemon.exit_code(), Some(0));
    }
}

#[test]
fn a_running_call_is_waited_for_after_one_signal_and_not_after_two() {
    let runtime = runtime();
    for (seconds, signals, code) in [(0.3, 1, 0), (3600.0, 2, 143)] {
        let mut daemon = Daemon::start(&["--log-level", "debug"]);
        let session = connect(&runtime, &daemon.address);
        let call = start_sleep(&runtime, &session, seconds);
        daemon.signal(Signal::TERM);
        daemon.await_log("draining");
        if signals == 2 {
            daemon.signal(Signal::TERM);
        }
        assert_eq!(daemon.exit_code(), Some(code));
        let outcome = runtime.block_on(call);
        match signals {
            1 => outcome.unwrap(),
            _ => assert!(outcome.unwrap_err().ends_session()),
        }
    }
}

#[test]
fn the_ready_file_holds_the_printed_address_and_is_removed_at_the_stop() {
    let folder = tempfile::tempdir().unwrap();
    let ready = folder.path().join("ready");
    let daemon = Daemon::start(&["--ready-file", ready.to_str().unwrap()]);
    let from_file = std::fs::read_to_string(&ready).unwrap();
    assert_eq!(from_file.trim(), daemon.address);
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.exit_code(), Some(0));
    assert!(!ready.exists());
}

#[test]
fn logs_can_be_json_lines() {
    let mut daemon = Daemon::start(&["--log-format", "json"]);
    let line = daemon.await_log("listening");
    let event: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!((event["level"].as_str(), event["address"].as_str()), (Some("INFO"), Some(&*daemon.address)));
}

#[test]
fn a_server_process_ends_with_its_standard_input_and_when_it_is_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = program(&["serve", "--listen", "tcp://127.0.0.1:0", "--exit-with-stdin", "--workdir"]);
    command.arg(folder.path());
    let server = ServerProcess::spawn(command).unwrap();
    let pid = Pid::from_raw(server.id().try_into().unwrap()).unwrap();
    connect(&runtime(), server.address());
    drop(server);
    assert!(rustix::process::test_kill_process(pid).is_err(), "killed and reaped");

    let mut command = program(&["serve", "--listen", "tcp://127.0.0.1:0", "--exit-with-stdin", "--workdir"]);
    command.arg(folder.path()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    BufReader::new(&mut stdout).read_line(&mut String::new()).unwrap();
    drop(child.stdin.take());
    assert_eq!(wait(&mut child).code(), Some(0));
}

#[test]
fn a_server_process_that_does_not_come_up_is_an_error() {
    let error = ServerProcess::spawn(program(&["serve", "--listen", "tcp://0.0.0.0:0"])).unwrap_err();
    assert!(error.to_string().contains("78"), "{error}");
    ServerProcess::spawn(Command::new("/nonexistent/program")).unwrap_err();
}

#[test]
fn one_session_is_served_on_standard_input_and_output() {
    let folder = tempfile::tempdir().unwrap();
    let program = env!("CARGO_BIN_EXE_rpc-server");
    let address = format!("exec:{program} serve --stdio --workdir {}", folder.path().display());
    let runtime = runtime();
    let session = connect(&runtime, &address);
    runtime.block_on(async {
        let echo = session.get_function("rpc.echo").await.unwrap();
        assert_eq!(echo.call::<i64>((7,)).await.unwrap(), 7);
    });
}

#[test]
fn exit_codes_say_what_is_wrong() {
    let code = |output: &Output| output.status.code();
    let folder = tempfile::tempdir().unwrap();
    let workdir = folder.path().to_str().unwrap();
    assert_eq!(code(&output(&["serve", "--no-such-flag"])), Some(2));
    assert_eq!(code(&output(&["serve", "--keep-alive", "soon"])), Some(2));

    let insecure = output(&["serve", "--listen", "tcp://0.0.0.0:0"]);
    assert_eq!(code(&insecure), Some(78));
    assert!(text(&insecure.stderr).contains("--insecure") && insecure.stdout.is_empty());

    let bad_file = folder.path().join("bad.toml");
    std::fs::write(&bad_file, "max-mesage = \"1MiB\"").unwrap();
    let unknown = output(&["serve", "--config", bad_file.to_str().unwrap()]);
    assert_eq!(code(&unknown), Some(78));
    assert!(text(&unknown.stderr).contains("max-mesage"), "{}", text(&unknown.stderr));

    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", taken.local_addr().unwrap());
    let in_use = output(&["serve", "--workdir", workdir, "--listen", &address]);
    assert_eq!(code(&in_use), Some(69));
    assert!(text(&in_use.stderr).contains(&address), "{}", text(&in_use.stderr));
}

/// A regression: servers started with settings that could not have any effect.
#[test]
fn settings_that_do_nothing_keep_the_server_from_starting() {
    let folder = tempfile::tempdir().unwrap();
    let workdir = folder.path().to_str().unwrap();
    for (flags, words) in [
        (["--allow-forward", "tpc://10.0.0.5:9090"], "tpc: addresses"),
        (["--allow-forward", "10.0.0.5"], "tcp://10.0.0.*:9090"),
        (["--weights", "/no/such/folder"], "/no/such/folder (--weights)"),
        (["--tvm-ffi", "/no/such/library"], "/no/such/library (--tvm-ffi)"),
        (["--label", "arch=arm64"], "give --tracker"),
        (["--python", "models.digits"], "pip install tensor-rpc"),
    ] {
        let refused = output(&[&["serve", "--listen", "tcp://127.0.0.1:0", "--workdir", workdir], &flags[..]].concat());
        let stderr = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(78), "{flags:?}: {stderr}");
        assert!(stderr.contains(words), "{flags:?}: {stderr}");
    }
}

#[test]
fn a_flag_overrides_the_environment_and_the_environment_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("server.toml");
    std::fs::write(&file, "max-message = \"1MiB\"\nmax-memory = \"1MiB\"\nmax-total-memory = \"1MiB\"").unwrap();
    let mut command = program(&["config", "--max-message", "3MiB"]);
    command.env("RPC_SERVER_CONFIG", &file).env("RPC_SERVER_MAX_MESSAGE", "2MiB").env("RPC_SERVER_MAX_MEMORY", "2MiB");
    command.env("RPC_SERVER_INSECURE", "true").env("RPC_SERVER_LISTEN", "tcp://127.0.0.1:1,unix:/tmp/a");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let config: toml::Table = text(&output.stdout).parse().unwrap();
    assert_eq!(config["max-message"].as_str(), Some("3MiB"));
    assert_eq!(config["max-memory"].as_str(), Some("2MiB"));
    assert_eq!(config["max-total-memory"].as_str(), Some("1MiB"));
    assert_eq!(config["keep-alive"].as_str(), Some("5s"));
    assert_eq!(config["insecure"].as_bool(), Some(true));
    assert_eq!(config["listen"].as_array().unwrap().len(), 2);
}

#[test]
fn help_completions_and_manual_pages_are_printed() {
    let help = output(&["serve", "--help"]);
    for word in ["RPC_SERVER_KEEP_ALIVE", "Exit codes", "--port-range", "78"] {
        assert!(text(&help.stdout).contains(word), "{word}");
    }
    for shell in ["bash", "zsh", "fish"] {
        assert!(text(&output(&["completions", shell]).stdout).contains("rpc-server"));
    }
    assert!(text(&output(&["man"]).stdout).contains(".TH"));
    let folder = tempfile::tempdir().unwrap();
    assert!(output(&["man", folder.path().to_str().unwrap()]).status.success());
    assert!(Path::new(&folder.path().join("rpc-server-serve.1")).exists());
}

#[test]
fn a_client_of_a_killed_server_gets_an_error() {
    let mut daemon = Daemon::start(&[]);
    let runtime = runtime();
    let session = connect(&runtime, &daemon.address);
    let call = start_sleep(&runtime, &session, 3600.0);
    daemon.child.kill().unwrap();
    let error =
        runtime.block_on(async { tokio::time::timeout(Duration::from_secs(5), call).await.unwrap().unwrap_err() });
    assert!(error.kind() == ErrorKind::PeerLost && error.request_may_have_run(), "{error:?}");
    let mut rest = String::new();
    daemon.log.read_to_string(&mut rest).unwrap();
    assert!(!rest.contains("panicked"), "{rest}");
}

/// A regression: the log at `info` said nothing of sessions, and of limits that they reached.
#[test]
fn the_log_says_what_a_session_did_and_which_limit_it_reached() {
    let mut daemon = Daemon::start(&["--max-memory", "1KiB", "--log-format", "json"]);
    let runtime = runtime();
    let session = connect(&runtime, &daemon.address);
    let echo = runtime.block_on(session.get_function("rpc.echo").into_future()).unwrap();
    assert_eq!(runtime.block_on(echo.call::<i64>((7,)).into_future()).unwrap(), 7);
    let empty = runtime.block_on(session.alloc(Device::cpu(), DataType::F32, &[1000]).into_future());
    assert_eq!(empty.unwrap_err().kind(), ErrorKind::LimitExceeded);
    runtime.block_on(session.shutdown().into_future()).unwrap();
    let json = |line: String| serde_json::from_str::<serde_json::Value>(&line).unwrap();
    let refused = json(daemon.await_log("refused a request"));
    assert_eq!(refused["level"], "WARN");
    assert!(refused["error"].as_str().unwrap().contains("max_memory"), "{refused}");
    let record = json(daemon.await_log("session ended"));
    assert_eq!((&*record["level"].to_string(), &record["target"]), ("\"INFO\"", &"rpc_access".into()));
    assert_eq!((&record["identity"], &record["used"]), (&"anonymous".into(), &"rpc.echo".into()));
    assert_eq!(record["reason"], "the client closed the session");
    for number in ["seconds", "requests", "received", "sent"] {
        assert!(record[number].as_f64().unwrap() > 0.0 || number == "seconds", "{number}: {record}");
    }
    assert_eq!(record["peer"], refused["peer"]);
}

/// A regression: the log at `info` was empty when the disk of the workspaces was full.
#[test]
fn a_file_system_that_fails_is_logged() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("data");
    std::fs::write(&file, vec![7; 64 << 10]).unwrap();
    // A limit on the size of files stands in for the full disk. Its signal is ignored, so that the
    // write fails instead.
    let mut command = Command::new("/bin/sh");
    let limited = "trap '' XFSZ; ulimit -f 8; exec \"$0\" serve \"$@\"";
    command.args(["-c", limited, env!("CARGO_BIN_EXE_rpc-server")]).env_clear().env(NO_OPENCL.0, NO_OPENCL.1);
    let mut daemon = Daemon::spawn(command, folder, &[]);
    let put = Command::new(env!("CARGO_BIN_EXE_rpc-cli"))
        .env_clear()
        .env(NO_OPENCL.0, NO_OPENCL.1)
        .args(["put", &daemon.address])
        .arg(&file)
        .output();
    let put = put.unwrap();
    assert_eq!(put.status.code(), Some(1), "{}", text(&put.stderr));
    daemon.await_log("the file system of the workspaces failed");
}
