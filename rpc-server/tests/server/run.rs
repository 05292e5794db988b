//! Programs of clients: `session.run` and `rpc-cli run`, and what they leave behind.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rpc_core::client::{EndCause, Files, OutputStream, RemoteProcess, RunOutput};
use rpc_core::{ErrorKind, Session};
use rpc_server::ServerProcess;
use rpc_transports::Connector;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value as Json, json};

use super::cli::{Fixture, cli, command, run};

fn connect(fixture: &Fixture) -> Session {
    Connector::new().connect_blocking(fixture.address()).unwrap()
}

/// Runs a script of the shell to its end.
fn shell(session: &Session, script: &str) -> RunOutput {
    session.run("sh").args(["-c", script]).output().wait().unwrap()
}

/// Starts a script, and returns it with the process ids that it prints.
fn start<const N: usize>(session: &Session, script: &str) -> (RemoteProcess, [i32; N]) {
    let process = session.run("sh").args(["-c", script]).start().wait().unwrap();
    let mut text = String::new();
    while text.lines().count() < N || !text.ends_with('\n') {
        let (stream, piece) = process.read_output().wait().unwrap().unwrap();
        assert_eq!(stream, OutputStream::Stdout);
        text += std::str::from_utf8(&piece).unwrap();
    }
    let pids: Vec<_> = text.lines().map(|line| line.parse().unwrap()).collect();
    (process, pids.try_into().unwrap())
}

/// Field of `/proc/PID/stat` after the name: 0 is the state, 1 the parent.
fn stat(pid: i32, field: usize) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(field).map(str::to_owned)
}

fn parent(pid: i32) -> i32 {
    stat(pid, 1).unwrap().parse().unwrap()
}

fn kill(pid: i32) {
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}

fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

fn ends(pid: i32) {
    eventually(&format!("process {pid} does not end"), || stat(pid, 0).is_none_or(|state| state == "Z"));
}

/// A process that leaves the session, the group and the parent of the script, and prints its id.
const STRAY: &str = "(setsid sh -c 'echo $$; exec sleep 1000' &) ";

#[test]
fn programs_return_their_output_and_status() {
    let fixture = Fixture::new(&["--allow-run", "any", "--max-run-processes", "20"]);
    let session = connect(&fixture);

    let output = shell(&session, "echo out; echo err >&2; exit 3");
    assert_eq!((&output.stdout[..], &output.stderr[..]), (&b"out\n"[..], &b"err\n"[..]));
    assert_eq!((output.status.code, output.status.signal, output.status.ended_by), (Some(3), None, None));
    assert_eq!(shell(&session, "kill -9 $$").status.signal, Some(9));
    // The status counts, and not the end of the streams.
    assert_eq!(shell(&session, "exec >&- 2>&-; sleep 0.05; exit 4").status.code, Some(4));

    // Input larger than all buffers on the way, and one that the program does not read.
    let input = vec![b'x'; 3 << 20];
    let count = session.run("wc").arg("-c").stdin(std::io::Cursor::new(input.clone())).output().wait().unwrap();
    assert_eq!(count.stdout, b"3145728\n");
    let unread = session.run("true").stdin(std::io::Cursor::new(input)).output().wait().unwrap();
    assert!(unread.status.success());

    // The folder and the environment.
    let files = Files::new(&session);
    files
        .put_bytes("tool", "#!/bin/sh\necho $1 $KEY; pwd; echo $HOME; env -0 | tr -cd '\\0' | wc -c >&2")
        .wait()
        .unwrap();
    let tool = || session.run("./tool").arg("one").env("KEY", "two").output().wait();
    assert_eq!(tool().unwrap_err().kind(), ErrorKind::Io);
    files.set_executable("tool", true).wait().unwrap();
    let text = String::from_utf8(tool().unwrap().stdout).unwrap();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!((lines[0], lines[1]), ("one two", lines[2]));
    assert!(Path::new(lines[1]).starts_with(fixture.folder.path()), "{text}");

    // Limits, each with the reason.
    let limited = |script: &str| session.run("sh").args(["-c", script]);
    let deaf = limited("trap '' TERM; echo begun; while :; do sleep 1000; done");
    let deaf = deaf.time_limit(Duration::from_millis(100)).output().wait().unwrap();
    assert_eq!((deaf.status.signal, deaf.status.ended_by), (Some(9), Some(EndCause::TimeLimit)));
    assert_eq!(deaf.stdout, b"begun\n");
    let polite = limited("trap 'echo end; exit 5' TERM; sleep 1000 & wait");
    let polite = polite.time_limit(Duration::from_millis(100)).output().wait().unwrap();
    assert_eq!((polite.status.code, polite.stdout), (Some(5), b"end\n".to_vec()));
    let endless = session.run("yes").output_limit(1 << 20).output().wait().unwrap();
    assert_eq!((endless.status.ended_by, endless.stdout.len()), (Some(EndCause::OutputLimit), 1 << 20));
    let bomb = limited("while :; do sleep 1000 & done").output().wait().unwrap();
    assert_eq!(bomb.status.ended_by, Some(EndCause::ProcessLimit));

    let missing = session.run("no-such-program").output().wait().unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound, "{missing}");
    for name in ["PATH", "LD_PRELOAD"] {
        let error = session.run("true").env(name, "/tmp").output().wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains("comes from the operator"), "{error}");
    }
}

/// Rules 3 and 4 of `rpc_server::run`: whoever ends, nothing is left.
#[test]
fn no_process_and_no_file_is_left() {
    let fixture = Fixture::new(&["--allow-run", "sh,cat"]);
    let session = connect(&fixture);

    // The program exits, and leaves a process that has escaped from its group and session.
    let output = shell(&session, &format!("{STRAY}; until [ -e done ]; do echo > done; done"));
    if let Ok(pid) = String::from_utf8(output.stdout).unwrap().trim().parse() {
        ends(pid);
    }
    let (process, [stray]) = start(&session, &format!("{STRAY}; sleep 1000"));
    drop(process);
    ends(stray);
    let (process, [stray]) = start(&session, &format!("{STRAY}; sleep 1000"));
    process.terminate().wait().unwrap();
    while process.read_output().wait().unwrap().is_some() {}
    assert_eq!(process.status().wait().unwrap().ended_by, Some(EndCause::Client));
    assert_eq!(stat(stray, 0), None);

    // The reaper is killed, so that the session process takes its place.
    let (process, [reaper, stray]) = start(&session, &format!("echo $PPID; {STRAY}; sleep 1000"));
    let session_process = parent(reaper);
    kill(reaper);
    let error = process.status().wait().unwrap_err();
    assert!(error.to_string().contains("the process that watches the program was killed"), "{error}");
    ends(stray);

    // The session process is killed.
    let (_process, [stray]) = start(&session, &format!("{STRAY}; sleep 1000"));
    let folder = fs::read_link(format!("/proc/{stray}/cwd")).unwrap();
    kill(session_process);
    ends(stray);
    eventually("the workspace is left", || !folder.exists());

    // The client is killed.
    let script = format!("{STRAY}; sleep 1000");
    let mut client = command(&["run", fixture.address(), "--", "sh", "-c", &script]);
    let mut client = client.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(client.stdout.take().unwrap()).read_line(&mut line).unwrap();
    client.kill().unwrap();
    client.wait().unwrap();
    ends(line.trim().parse().unwrap());

    // Programs that are not listed, and servers that run none.
    let refused = connect(&fixture).run("true").status().wait().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Refused, "{refused}");
    let closed = Fixture::new(&[]);
    let refused = connect(&closed).run("sh").status().wait().unwrap_err();
    assert!(refused.to_string().contains("has not given --allow-run"), "{refused}");
}

/// Starts a relay.
fn relay() -> ServerProcess {
    let mut relay = Command::new(env!("CARGO_BIN_EXE_rpc-server"));
    relay.args(["relay", "--listen", "tcp://127.0.0.1:0", "--exit-with-stdin", "--log-level", "error"]);
    ServerProcess::spawn(relay).unwrap()
}

#[test]
fn the_tool_sends_runs_and_fetches() {
    let fixture = Fixture::new(&["--allow-run", "any"]);
    let hop = Fixture::new(&["--allow-forward", "tcp://127.0.0.1:*"]);
    let source = fixture.path("source");
    fs::create_dir_all(format!("{source}/sub")).unwrap();
    fs::write(format!("{source}/sub/data"), "data").unwrap();
    let build = "#!/bin/sh\ncat; cat source/sub/data; echo $KEY >&2; mkdir -p out/a; echo 1 > out/one.txt; \
                 echo 2 > out/a/two.txt; ln -s /etc/passwd out/link.txt; printf '\\033[2J\\377'; exit 7";
    fs::write(format!("{source}/build"), build).unwrap();
    fs::set_permissions(format!("{source}/build"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(fixture.path("input"), "input ").unwrap();

    let out = fixture.path("fetched");
    let files = ["--send", &source, "--fetch", "out/**.txt", "--out", &out, "--env", "KEY=value", "--stdin"];
    let mut build = command(
        &[&["-q", "-J", hop.address(), "run"], &files[..], &[fixture.address(), "--", "source/build"]].concat(),
    );
    build.stdin(fs::File::open(fixture.path("input")).unwrap());
    let built = build.output().unwrap();
    assert_eq!(built.status.code(), Some(7), "{built:?}");
    assert_eq!((&built.stdout[..], &built.stderr[..]), (&b"input data\x1b[2J\xff"[..], &b"value\n"[..]));
    let fetched = |name: &str| fs::read_to_string(format!("{out}/out/{name}"));
    assert_eq!((fetched("one.txt").unwrap(), fetched("a/two.txt").unwrap()), ("1\n".into(), "2\n".into()));
    assert!(fetched("link.txt").is_err());

    let sh =
        |flags: &[&str], script: &str| cli(&[&["run"], flags, &[fixture.address(), "--", "sh", "-c", script]].concat());
    assert_eq!(sh(&[], "kill -15 $$").code, 143);
    let limited = sh(&["--timeout", "100ms"], "exec sleep 1000");
    assert_eq!(limited.code, 124, "{limited:?}");
    assert!(limited.stderr.contains("'sh' took longer than 100ms"), "{limited:?}");
    let flood = sh(&["--max-output", "1KiB"], "yes");
    assert_eq!((flood.code, flood.stdout.len()), (1, 1024));
    assert!(flood.stderr.contains("its output was more than the limit"), "{flood:?}");
    let lines = sh(&["--json"], "echo ü");
    let lines: Vec<Json> = lines.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let end = json!({ "code": 0, "signal": null, "ended_by": null, "fetched": [] });
    assert_eq!(lines, [json!({ "stream": "stdout", "text": "ü\n" }), end]);
    assert_eq!(run(command(&["run", hop.address(), "--", "true"])).code, 77);

    // Through a relay.
    let relay = relay();
    let board = format!("{}/board", relay.address());
    let socket = format!("unix:{}", fixture.path("socket"));
    let _board = Fixture::new(&["--allow-run", "cat", "--relay", &board, "--listen", &socket]);
    // The server may not wait at the relay yet.
    let mut answer = cli(&["run", &board, "--", "cat", "/proc/sys/kernel/ostype"]);
    for _ in 0..100 {
        if answer.code == 0 {
            break;
        }
        answer = cli(&["run", &board, "--", "cat", "/proc/sys/kernel/ostype"]);
    }
    assert_eq!(answer.ok(), "Linux\n");

    // An interrupted program can end in good order.
    let script = "trap 'echo interrupted; exit 0' TERM; echo $$; sleep 1000 & wait";
    let mut child = command(&["run", fixture.address(), "--", "sh", "-c", script]);
    let mut child = child.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let pid = lines.next().unwrap().unwrap().parse().unwrap();
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(lines.next().unwrap().unwrap(), "interrupted");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    ends(pid);
}
