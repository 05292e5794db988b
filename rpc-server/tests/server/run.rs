//! Programs of clients: `session.run` and `rpc-cli run`, and what they leave behind.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rpc_core::client::{EndCause, Files, OutputStream, RemoteCommand, RemoteProcess, RunOutput, RunStatus};
use rpc_core::{ErrorKind, Session};
use rpc_server::ServerProcess;
use rpc_transports::Connector;
use rustix::mount::{MountPropagationFlags, mount_bind, mount_change};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{CapabilitySet, UnshareFlags, remove_capability_from_bounding_set, unshare_unsafe};
use serde_json::{Value as Json, json};

use super::cli::{Fixture, cli, command, run};

fn connect(fixture: &Fixture) -> Session {
    Connector::new().connect_blocking(fixture.address()).unwrap()
}

/// Runs a script of the shell to its end.
fn shell(session: &Session, script: &str) -> RunOutput {
    self::script(session, script).output().wait().unwrap()
}

fn script(session: &Session, script: &str) -> RemoteCommand<'static> {
    session.run("sh").args(["-c", script])
}

/// Starts a program, and returns it with the first lines that it prints.
fn start_lines(command: RemoteCommand<'static>, count: usize) -> (RemoteProcess, String) {
    let process = command.start().wait().unwrap();
    let mut text = String::new();
    while text.lines().count() < count || !text.ends_with('\n') {
        let (stream, piece) = process.read_output().wait().unwrap().unwrap();
        assert_eq!(stream, OutputStream::Stdout);
        text += std::str::from_utf8(&piece).unwrap();
    }
    (process, text)
}

/// Starts a script, and returns it with the processes whose ids it prints.
fn start<const N: usize>(session: &Session, text: &str) -> (RemoteProcess, [i32; N]) {
    start_pids(marked(session, text))
}

/// As [`script`]. First prints its namespace of process ids.
fn marked(session: &Session, text: &str) -> RemoteCommand<'static> {
    script(session, &format!("readlink /proc/self/ns/pid; {text}"))
}

/// Starts a [`marked`] script, and returns it with the processes whose ids it prints.
fn start_pids<const N: usize>(command: RemoteCommand<'static>) -> (RemoteProcess, [i32; N]) {
    let (process, lines) = start_lines(command, N + 1);
    let (namespace, ids) = lines.split_once('\n').unwrap();
    let pids: Vec<_> = ids.lines().map(|id| pid_in(namespace, id)).collect();
    (process, pids.try_into().unwrap())
}

/// Ids of all processes.
fn processes() -> impl Iterator<Item = i32> {
    fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok())
}

/// Namespace of process ids of a process.
fn namespace_of(pid: i32) -> Option<String> {
    Some(fs::read_link(format!("/proc/{pid}/ns/pid")).ok()?.to_str()?.to_owned())
}

/// Id here of the process with an id in a namespace.
fn pid_in(namespace: &str, id: &str) -> i32 {
    let is_it = |pid: &i32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        ids.is_some_and(|ids| ids.split_whitespace().last() == Some(id))
            && namespace_of(*pid).as_deref() == Some(namespace)
    };
    processes().find(is_it).unwrap_or_else(|| panic!("no process has the id {id} in {namespace}"))
}

/// Starts a server that may not make namespaces.
fn without_namespaces(flags: &[&str]) -> Fixture {
    // A thread, and what it starts, loses the right; who has not got it cannot lose it.
    let start = || {
        let _ = remove_capability_from_bounding_set(CapabilitySet::SYS_ADMIN);
        Fixture::new(flags)
    };
    std::thread::scope(|scope| scope.spawn(start).join().unwrap())
}

/// Returns true if this user may make a namespace whose `/proc` is its own.
fn may_make_namespaces() -> bool {
    let unshared =
        Command::new("unshare").args(["--pid", "--fork", "--mount-proc", "true"]).stderr(Stdio::null()).status();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let may = unshared.is_ok_and(|status| status.success()) && !mounts.contains(" /proc/");
    if !may {
        eprintln!("SKIPPED: this user may not make namespaces of process ids");
    }
    may
}

/// Terminates a program that has printed `begun`. Returns what it prints afterwards and its status.
fn terminate(command: RemoteCommand<'static>) -> (Vec<u8>, RunStatus) {
    let (process, begun) = start_lines(command, 1);
    assert_eq!(begun, "begun\n");
    process.terminate().wait().unwrap();
    let mut output = Vec::new();
    while let Some((_, piece)) = process.read_output().wait().unwrap() {
        output.extend_from_slice(&piece);
    }
    (output, process.status().wait().unwrap())
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
    signal(pid, Signal::KILL);
}

fn signal(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

/// Limit of what has to be gone: two seconds are promised, and a loaded machine gets more.
const GONE_WITHIN: Duration = Duration::from_secs(10);

/// Limit against hangs.
const HANG_LIMIT: Duration = Duration::from_secs(60);

fn eventually(what: &str, is_so: impl Fn() -> bool) {
    within(HANG_LIMIT, what, is_so);
}

fn within(limit: Duration, what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + limit;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        // The processes that are waited for need the processors.
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn ends(pid: i32) {
    within(GONE_WITHIN, &format!("process {pid} does not end"), || stat(pid, 0).is_none_or(|state| state == "Z"));
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
    let silent = marked(&session, "echo $$; exec >&- 2>&-; read line; exit 4").piped_input();
    let (silent, [pid]) = start_pids(silent);
    let stderr = format!("/proc/{pid}/fd/2");
    within(GONE_WITHIN, "the streams stay open", || fs::symlink_metadata(&stderr).is_err());
    let end = silent.read_output().start();
    silent.write_input("\n").wait().unwrap();
    assert_eq!(end.wait().unwrap(), None);
    assert_eq!(silent.status().wait().unwrap().code, Some(4));

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

    // A script that names no shell; and what programs inherit: the priority that they would have
    // here, which is not that of the process that starts them, no blocked signal, and SIGPIPE,
    // which the server ignores, as the system delivers it.
    files.put_bytes("plain", "echo plain $1\n").wait().unwrap();
    files.set_executable("plain", true).wait().unwrap();
    assert_eq!(session.run("./plain").arg("one").output().wait().unwrap().stdout, b"plain one\n");
    let nice = Command::new("nice").output().unwrap().stdout;
    assert_eq!(script(&session, "nice; sh -c nice").output().wait().unwrap().stdout, nice.repeat(2));
    let signals = |line: &str| {
        let print = format!("sed -n 's/^{line}:\\t//p' /proc/self/status");
        let text = String::from_utf8(script(&session, &print).output().wait().unwrap().stdout).unwrap();
        u64::from_str_radix(text.trim(), 16).unwrap()
    };
    assert_eq!((signals("SigBlk"), signals("SigIgn") & 1 << (Signal::PIPE.as_raw() - 1)), (0, 0));

    // Limits, each with the reason.
    let (output, deaf) = terminate(script(&session, "trap '' TERM; echo begun; while :; do sleep 1000; done"));
    assert_eq!((deaf.signal, deaf.ended_by, &output[..]), (Some(9), Some(EndCause::Client), &b""[..]));
    let (output, polite) = terminate(script(&session, "trap 'echo end; exit 5' TERM; echo begun; sleep 1000 & wait"));
    assert_eq!((polite.code, &output[..]), (Some(5), &b"end\n"[..]));
    let endless = session.run("sleep").arg("1000").time_limit(Duration::from_millis(50)).output().wait().unwrap();
    assert_eq!((endless.status.signal, endless.status.ended_by), (Some(15), Some(EndCause::TimeLimit)));
    let endless = session.run("yes").output_limit(1 << 20).output().wait().unwrap();
    assert_eq!((endless.status.ended_by, endless.stdout.len()), (Some(EndCause::OutputLimit), 1 << 20));
    for bomb in ["while :; do sleep 1000 & done", "while :; do setsid sleep 1000 & done"] {
        let ended = script(&session, bomb).output().wait().unwrap();
        assert_eq!(ended.status.ended_by, Some(EndCause::ProcessLimit), "{bomb}");
    }

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
    nothing_is_left(&fixture);

    // Programs that are not listed, and servers that run none.
    let refused = connect(&fixture).run("true").status().wait().unwrap_err();
    assert_eq!((refused.kind(), refused.request_may_have_run()), (ErrorKind::Refused, false), "{refused}");
    let closed = Fixture::new(&[]);
    let refused = connect(&closed).run("sh").status().wait().unwrap_err();
    assert!(refused.to_string().contains("has not given --allow-run"), "{refused}");
}

/// The same of a server whose reapers find the processes of their programs, which can stop them.
#[test]
fn no_process_and_no_file_is_left_without_a_namespace() {
    let fixture = without_namespaces(&["--allow-run", "sh,cat"]);
    nothing_is_left(&fixture);

    let session = connect(&fixture);
    // The reaper is stopped: once, and again whenever it continues.
    // The program waits for a line, so that its start is complete.
    let stopping = |session: &Session, stop: &str| {
        let text = format!("echo $PPID; echo $$; read line; kill -STOP $PPID; echo stopped; {stop}");
        let (process, pids) = start_pids(marked(session, &text).piped_input());
        process.write_input("\n").wait().unwrap();
        assert_eq!(process.read_output().wait().unwrap().unwrap().1, "stopped\n");
        (process, pids)
    };
    let (process, [reaper, pid]) = stopping(&session, "while :; do :; done");
    assert_eq!(namespace_of(pid), namespace_of(parent(reaper)));
    drop(process);
    ends(pid);
    ends(reaper);
    let other = connect(&fixture);
    let (process, pids) = stopping(&other, "while :; do kill -STOP $PPID; done");
    drop((process, other));
    pids.into_iter().for_each(ends);

    // A stopped reaper has its limits all the same, and the program that insists is killed.
    let limited = script(&session, "kill -STOP $PPID; exec sleep 1000").time_limit(Duration::from_millis(50));
    assert_eq!(limited.status().wait().unwrap().ended_by, Some(EndCause::TimeLimit));
    let (process, pids) = stopping(&session, "while :; do kill -STOP $PPID; done");
    let error = process.status().wait().unwrap_err();
    assert!(error.to_string().contains("was killed"), "{error}");
    pids.into_iter().for_each(ends);
}

fn nothing_is_left(fixture: &Fixture) {
    let session = connect(fixture);

    // The program exits, and leaves a process that has escaped from its group and session.
    let stray = "(setsid sh -c 'echo $$ > new; mv new stray; exec sleep 1000' &)";
    let waiting = format!("{stray}; until [ -e stray ]; do :; done; cat stray; read line");
    let (process, [stray]) = start_pids(marked(&session, &waiting).piped_input());
    process.close_input().wait().unwrap();
    assert_eq!(process.status().wait().unwrap().code, Some(1));
    ends(stray);
    let (process, [stray]) = start(&session, &format!("{STRAY}; sleep 1000"));
    drop(process);
    ends(stray);
    let (process, [stray]) = start(&session, &format!("{STRAY}; sleep 1000"));
    process.terminate().wait().unwrap();
    while process.read_output().wait().unwrap().is_some() {}
    assert_eq!(process.status().wait().unwrap().ended_by, Some(EndCause::Client));
    assert_eq!(stat(stray, 0), None);

    // The reaper is killed, so that the session process takes its place: at the end of the session,
    // and before, whether a call waits for the program or not.
    let other = connect(fixture);
    let (process, [reaper, stray]) = start(&other, &format!("echo $PPID; {STRAY}; sleep 1000"));
    kill(reaper);
    drop((process, other));
    ends(stray);
    let (_process, [reaper, stray]) = start(&session, &format!("echo $PPID; {STRAY}; sleep 1000"));
    kill(reaper);
    ends(stray);
    let (process, [reaper, stray]) = start(&session, &format!("echo $PPID; {STRAY}; sleep 1000"));
    let session_process = parent(reaper);
    kill(reaper);
    let error = process.status().wait().unwrap_err();
    assert!(error.to_string().contains("the process that watches the program was killed"), "{error}");
    ends(stray);

    // A process that ended before its reaper was killed is reaped by the session process.
    let (_process, [reaper, zombie]) = start(&session, "echo $PPID; sleep 0.5 & echo $!; exec sleep 1000");
    eventually("no parent reaps it", || stat(zombie, 0).is_some_and(|state| state == "Z"));
    kill(reaper);
    within(GONE_WITHIN, "it is reaped", || stat(zombie, 0).is_none());

    // The session process is killed.
    let (_process, [stray]) = start(&session, &format!("{STRAY}; sleep 1000"));
    let folder = fs::read_link(format!("/proc/{stray}/cwd")).unwrap();
    kill(session_process);
    ends(stray);
    within(GONE_WITHIN, "the workspace is left", || !folder.exists());

    // The client is killed.
    let script = format!("readlink /proc/self/ns/pid; {STRAY}; sleep 1000");
    let mut client = command(&["run", fixture.address(), "--", "sh", "-c", &script]);
    let mut client = client.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(client.stdout.take().unwrap()).lines().map(Result::unwrap);
    let stray = pid_in(&lines.next().unwrap(), &lines.next().unwrap());
    client.kill().unwrap();
    client.wait().unwrap();
    ends(stray);
}

/// Script that starts its like in a session of its own, and exits.
const HOP: &str = "setsid sh hop & exit";

/// Rule 3 of `rpc_server::run`: processes that escape for ever, each while the one before ends, are
/// ended all at once with their namespace.
#[test]
fn processes_that_fork_for_ever_end_with_their_namespace() {
    if !may_make_namespaces() {
        return;
    }
    let mut fixture = Fixture::new(&["--allow-run", "sh"]);
    let path = fixture.path("held");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    // Each process holds the pipe open, so that its end is that of the last one.
    let text = format!("echo $PPID; exec 3>{path}; for _ in 1 2 3 4 5 6; do setsid sh hop & done; read line; exit 3");
    let start = |session: &Session| {
        Files::new(session).put_bytes("hop", HOP).wait().unwrap();
        let (process, [reaper]) = start_pids(marked(session, &text).piped_input());
        let mut held = fs::File::open(&path).unwrap();
        let (sender, is_over) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let _ = sender.send(held.read_to_end(&mut Vec::new()));
        });
        assert_ne!(namespace_of(reaper), namespace_of(parent(reaper)));
        (process, reaper, is_over)
    };
    let session = connect(&fixture);
    let over = |is_over: std::sync::mpsc::Receiver<std::io::Result<usize>>| {
        is_over.recv_timeout(GONE_WITHIN).unwrap().unwrap()
    };

    // Neither the program nor what it starts can end or stop the reaper.
    let output = shell(&session, "kill -9 $PPID; kill -STOP $PPID; echo $$ $PPID $(ls -d /proc/[0-9]*); exit 3");
    assert_eq!((output.status.code, &output.stdout[..]), (Some(3), &b"2 1 /proc/1 /proc/2 /proc/3\n"[..]));

    let (process, _, is_over) = start(&session);
    process.write_input("\n").wait().unwrap();
    assert_eq!(process.status().wait().unwrap().code, Some(3));
    over(is_over);
    let (process, reaper, is_over) = start(&session);
    kill(reaper);
    assert_eq!(process.status().wait().unwrap_err().kind(), ErrorKind::Io);
    over(is_over);
    let (_process, reaper, is_over) = start(&session);
    kill(parent(reaper));
    over(is_over);
    let session = connect(&fixture);
    let (_process, _, is_over) = start(&session);
    fixture.server.kill().unwrap();
    over(is_over);
}

/// A mount over a part of `/proc`, as container engines make, hides it from programs too.
#[test]
fn a_proc_with_hidden_parts_stays_as_it_is() {
    if !may_make_namespaces() {
        return;
    }
    let hide = || {
        // SAFETY: The folders and mounts of this thread become its own; memory and files do not.
        unsafe { unshare_unsafe(UnshareFlags::FS | UnshareFlags::NEWNS) }.unwrap();
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
        let fixture = Fixture::new(&["--allow-run", "sh"]);
        let own = namespace_of(fixture.server.id() as i32).unwrap();
        let session = connect(&fixture);
        let namespace = |session: &Session| {
            String::from_utf8(shell(session, "readlink /proc/self/ns/pid").stdout).unwrap().trim().to_owned()
        };
        assert_ne!(namespace(&session), own);
        mount_bind("/dev/null", "/proc/kmsg").unwrap();
        // Also in a session that has run programs before.
        for session in [session, connect(&fixture)] {
            assert_eq!(namespace(&session), own);
            assert_eq!(shell(&session, "cat /proc/kmsg").stdout, b"");
        }
    };
    std::thread::scope(|scope| scope.spawn(hide).join().unwrap());
}

/// Script that starts twice as many processes as the one that started it has, each in a session of
/// its own and without its parent, and so 2^(n+1) - 1 in all. Each stays.
const TREE: &str = "[ $1 -gt 0 ] && for _ in 1 2; do (setsid sh tree $(($1 - 1)) &); done; exec sleep 1000";

/// Ids of the processes that run in a folder.
fn processes_in(folder: &Path) -> Vec<i32> {
    let is_in = |pid: &i32| fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd.starts_with(folder));
    processes().filter(is_in).collect()
}

/// Rule 3 of `rpc_server::run`: programs that fork faster than their processes are found.
#[test]
fn many_processes_that_escape_are_counted_and_ended() {
    for start in [Fixture::new, without_namespaces] {
        escaping_processes_are_counted_and_ended(start);
    }
}

fn escaping_processes_are_counted_and_ended(start: fn(&[&str]) -> Fixture) {
    let fixture = start(&["--allow-run", "sh", "--max-run-processes", "60"]);
    let generous = start(&["--allow-run", "sh", "--max-run-processes", "100000"]);
    let grow = |fixture: &Fixture, script: &str| {
        let session = connect(fixture);
        Files::new(&session).put_bytes("tree", TREE).wait().unwrap();
        let (process, [pid]) = start_pids(marked(&session, &format!("echo $$; {script}")).piped_input());
        (session, process, pid)
    };
    let folder = |fixture: &Fixture| fixture.folder.path().canonicalize().unwrap();
    let grows = |fixture: &Fixture| {
        eventually("it does not grow", || processes_in(&folder(fixture)).len() > 60);
    };
    let nothing_is_left = |fixture: &Fixture| {
        within(GONE_WITHIN, "processes are left", || processes_in(&folder(fixture)).is_empty());
    };

    let (_session, process, pid) = grow(&fixture, "read line; exec sh tree 7");
    // The session of the kernel is the program's own, and not that of its reaper.
    assert_eq!(stat(pid, 3).unwrap(), pid.to_string());
    process.write_input("\n").wait().unwrap();
    assert_eq!(process.status().wait().unwrap().ended_by, Some(EndCause::ProcessLimit));
    nothing_is_left(&fixture);
    // While it grows, the program exits; and its session ends.
    let (_session, process, _) = grow(&generous, "sh tree 7 & read line; exit 3");
    grows(&generous);
    process.write_input("\n").wait().unwrap();
    assert_eq!(process.status().wait().unwrap().code, Some(3));
    nothing_is_left(&generous);
    let (session, process, _) = grow(&generous, "exec sh tree 7");
    grows(&generous);
    drop((session, process));
    nothing_is_left(&generous);

    // Few processes by number, but each in a session of the kernel.
    let fixture = start(&["--allow-run", "sh"]);
    let (_session, process, _) = grow(&fixture, "for _ in $(seq 40); do setsid sleep 1000 & done; read line");
    assert_eq!(process.status().wait().unwrap().ended_by, Some(EndCause::ProcessLimit));
    nothing_is_left(&fixture);
}

/// Predicate on the workspace of a run.
type HasBegun = Box<dyn Fn(&Path) -> bool>;

/// Private workspaces of a server with this folder.
fn workspaces(workdir: &Path) -> Vec<PathBuf> {
    let entries = |folder: PathBuf| fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    entries(workdir.join("private")).flat_map(entries).collect()
}

/// Children of a process with this name.
fn children(of: i32, name: &str) -> Vec<i32> {
    let is_child = |pid: &i32| stat(*pid, 1).is_some_and(|parent| parent == of.to_string());
    let has_name = |pid: &i32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == name);
    processes().filter(|pid| is_child(pid) && has_name(pid)).collect()
}

/// Rule 3 of `rpc_server::run`: the server is killed, the process that starts reapers, and a client
/// in each phase of a run.
#[test]
fn whoever_is_killed_leaves_nothing() {
    let mut fixture = Fixture::new(&["--allow-run", "sh"]);
    let session = connect(&fixture);
    let (_process, [reaper, stray]) = start(&session, &format!("echo $PPID; {STRAY}; sleep 1000"));
    let session_process = parent(reaper);
    // The process that starts reapers is stopped, and then killed. The program goes on, and others
    // are started.
    let starter = || children(session_process, "rpc-reapers")[0];
    let first = starter();
    signal(first, Signal::STOP);
    assert_eq!(shell(&session, "echo 1").stdout, b"1\n");
    assert_eq!(starter(), first);
    kill(first);
    assert_eq!(shell(&session, "echo 2").stdout, b"2\n");
    assert_ne!(starter(), first);
    eventually("it does not go on", || stat(stray, 0).is_some_and(|state| state == "S"));
    let starter = starter();
    fixture.server.kill().unwrap();
    [stray, reaper, session_process, starter].into_iter().for_each(ends);

    // A client that sends, one whose program waits for input, and one that fetches.
    let fixture = Fixture::new(&["--allow-run", "sh"]);
    let (small, large) = (fixture.path("small"), fixture.path("large"));
    fs::write(&small, "x").unwrap();
    fs::File::create(&large).unwrap().set_len(2 << 30).unwrap();
    let out = fixture.path("out");
    let workdir = fixture.folder.path().join("workdir").canonicalize().unwrap();
    let program = "echo > begun; (setsid sleep 1000 &); read line";
    let fetched = "(setsid sleep 1000 &); mkdir sub; truncate -s 64G sub/large";
    let has_file =
        |name: &'static str| -> HasBegun { Box::new(move |workspace| workspace.join("files").join(name).exists()) };
    let local = Path::new(&out).join("sub");
    let begun: [(&[&str], &str, HasBegun); 3] = [
        (&["--send", &small, "--send", &large], "true", has_file("small")),
        (&["--stdin"], program, has_file("begun")),
        (&["--fetch", "sub/*", "--out", &out], fetched, Box::new(move |_| local.exists())),
    ];
    for (flags, script, has_begun) in begun {
        let mut client = command(&[&["run"], flags, &[fixture.address(), "--", "sh", "-c", script]].concat());
        let mut client = client.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        eventually("it does not begin", || workspaces(&workdir).iter().any(|workspace| has_begun(workspace)));
        client.kill().unwrap();
        client.wait().unwrap();
        within(GONE_WITHIN, "a process or a file is left", || {
            processes_in(&workdir).is_empty() && workspaces(&workdir).is_empty()
        });
    }
}

/// Artifacts that are no files of the workspace are not fetched, and none is waited for.
#[test]
fn a_fetch_takes_files_of_the_workspace_alone() {
    let fixture = Fixture::new(&["--allow-run", "sh"]);
    let out = fixture.path("fetched");
    let script = "mkdir -p out/sub; echo file > out/file; truncate -s 3M out/sub/sparse; ln -s file out/link; \
                  ln -s /etc/passwd out/passwd; ln -s /etc out/etc; ln -s ../../.. out/up; ln -s none out/dangling; \
                  mkfifo out/pipe; ln -s /dev/zero out/zero";
    let flags = ["run", "--fetch", "out/**", "--out", &out, fixture.address(), "--", "sh", "-c", script];
    let ran = cli(&flags);
    assert_eq!(ran.code, 0, "{ran:?}");
    let names = |folder: &str| {
        let entries = fs::read_dir(format!("{out}/{folder}")).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    assert_eq!(names("out"), ["file", "link", "sub"]);
    assert_eq!(fs::metadata(format!("{out}/out/sub/sparse")).unwrap().len(), 3 << 20);
}

/// Artifacts that change between the listing and their turn: those that are gone are named, and the
/// others come.
#[test]
fn a_fetch_goes_on_without_files_that_have_vanished() {
    let fixture = Fixture::new(&["--allow-run", "sh"]);
    let (out, place) = (fixture.path("fetched"), fixture.path("place"));
    fs::create_dir(&out).unwrap();
    // The first file goes into a pipe, so that the others have their turn when that has been read.
    let pipe = format!("{out}/a");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let script = format!("pwd > {place}; truncate -s 1M a; for name in b c d e; do echo $name > $name; done; exit 3");
    let flags = ["--json", "run", "--fetch", "?", "--out", &out, fixture.address(), "--", "sh", "-c", &script];
    let client = command(&flags).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();

    let (opened, is_open) = std::sync::mpsc::channel();
    let (go_on, goes_on) = std::sync::mpsc::channel::<()>();
    let reader = std::thread::spawn(move || {
        // Opened at both ends: the files have been listed.
        let mut pipe = fs::File::open(pipe).unwrap();
        opened.send(()).unwrap();
        let _ = goes_on.recv();
        std::io::copy(&mut pipe, &mut std::io::sink()).unwrap()
    });
    is_open.recv_timeout(HANG_LIMIT).unwrap();
    let workspace = PathBuf::from(fs::read_to_string(place).unwrap().trim());
    fs::remove_file(workspace.join("b")).unwrap();
    fs::remove_file(workspace.join("c")).unwrap();
    fs::create_dir(workspace.join("c")).unwrap();
    fs::write(workspace.join("new"), "replaced").unwrap();
    fs::rename(workspace.join("new"), workspace.join("d")).unwrap();
    drop(go_on);
    assert_eq!(reader.join().unwrap(), 1 << 20);

    let ended = client.wait_with_output().unwrap();
    let (stdout, stderr) = (String::from_utf8(ended.stdout).unwrap(), String::from_utf8(ended.stderr).unwrap());
    assert_eq!(ended.status.code(), Some(1), "{stderr}");
    let fetched = |name: &str| fs::read_to_string(format!("{out}/{name}")).ok();
    assert_eq!(["b", "c", "d", "e"].map(fetched), [None, None, Some("replaced".into()), Some("e\n".into())]);
    let end: Json = serde_json::from_str(stdout.lines().last().unwrap()).unwrap();
    assert_eq!((&end["code"], &end["fetched"]), (&json!(3), &json!(["a", "d", "e"])));
    assert!(stderr.contains("'b' is not fetched") && stderr.contains("'c' is not fetched"), "{stderr}");
    assert!(stderr.contains("\"not_found\""), "{stderr}");
}

/// A program whose output is not read waits, and ends when its client has dropped it.
#[test]
fn output_that_is_not_read_stops_the_program() {
    let fixture = Fixture::new(&["--allow-run", "sh"]);
    let session = connect(&fixture);
    let (process, pid) = start_flood(&session, "10G");
    drop(process);
    ends(pid);

    // Pieces are as small as a session's limit on queued bytes demands, and none is lost.
    let fixture = Fixture::new(&["--allow-run", "sh", "--max-queued", "300KiB"]);
    let session = connect(&fixture);
    let (process, _) = start_flood(&session, "4M");
    let mut bytes = 0;
    while let Some((_, piece)) = process.read_output().wait().unwrap() {
        assert!(piece.len() <= 300 << 10);
        bytes += piece.len();
    }
    assert_eq!(bytes, 4 << 20);
}

/// Starts a program that writes `bytes`, and waits until it waits for a reader.
fn start_flood(session: &Session, bytes: &str) -> (RemoteProcess, i32) {
    let flood = marked(session, &format!("echo $$; read line; exec head -c {bytes} /dev/zero"));
    let (process, [pid]) = start_pids(flood.piped_input());
    process.write_input("\n").wait().unwrap();
    eventually("it does not wait", || {
        let calls = fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
        let written = calls.lines().find_map(|line| line.strip_prefix("wchar: ")?.parse::<u64>().ok());
        stat(pid, 0).is_some_and(|state| state == "S") && written.is_some_and(|bytes| bytes >= 64 << 10)
    });
    (process, pid)
}

/// Starts a relay whose peers prove themselves by a token.
fn relay(tokens: &str) -> ServerProcess {
    let mut relay = crate::server_program();
    relay.args(["relay", "--listen", "tcp://127.0.0.1:0", "--exit-with-stdin", "--log-level", "error"]);
    relay.args(["--token-file", tokens]);
    ServerProcess::spawn(relay).unwrap()
}

#[test]
fn the_tool_sends_runs_and_fetches() {
    let fixture = Fixture::new(&["--allow-run", "any"]);
    let hop = Fixture::new(&["--allow-forward", "tcp://127.0.0.1:*"]);
    let source = fixture.path("source");
    fs::create_dir_all(format!("{source}/sub")).unwrap();
    fs::create_dir_all(format!("{source}/none/in")).unwrap();
    fs::write(format!("{source}/sub/data"), "data").unwrap();
    let build = "#!/bin/sh\ncat; cat source/sub/data; echo $KEY >&2; mkdir -p out/a out/bare; \
                 [ -d source/none/in ] && echo 1 > out/one.txt; echo 2 > out/a/two.txt; \
                 ln -s /etc/passwd out/link.txt; printf '\\033[2J\\377'; exit 7";
    fs::write(format!("{source}/build"), build).unwrap();
    fs::set_permissions(format!("{source}/build"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(fixture.path("input"), "input ").unwrap();

    let out = fixture.path("fetched");
    let files = [
        "--send",
        &source,
        "--fetch",
        "out/**/*.txt",
        "--fetch",
        "out/b*",
        "--out",
        &out,
        "--env",
        "KEY=value",
        "--stdin",
    ];
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
    assert_eq!(fs::read_dir(format!("{out}/out/bare")).unwrap().count(), 0);

    // A kept folder gets what has changed, and keeps it; a fetched file keeps its permissions.
    let keep = |script: &str| {
        let flags = ["--keep", "--workspace", "w", "--send", &source, "--fetch", "source/build", "--out", &out];
        let ran = cli(&[&["run"], &flags[..], &[fixture.address(), "--", "sh", "-c", script]].concat());
        assert_eq!(ran.code, 0, "{ran:?}");
        ran.stderr
    };
    let told = keep("echo kept > source/kept");
    assert!(told.contains("source/build: ") && !told.contains("unchanged"), "{told}");
    fs::write(format!("{source}/sub/data"), "DATA").unwrap();
    let told = keep("grep DATA source/sub/data && grep kept source/kept && test -x source/build");
    assert!(told.contains("source/build: unchanged") && told.contains("source/sub/data: 4 B sent"), "{told}");
    let mode = fs::metadata(format!("{out}/source/build")).unwrap().permissions().mode();
    assert_eq!(mode & 0o100, 0o100, "{mode:o}");
    fs::write(format!("{source}/sub/data"), "data").unwrap();

    let sh =
        |flags: &[&str], script: &str| cli(&[&["run"], flags, &[fixture.address(), "--", "sh", "-c", script]].concat());
    assert_eq!(sh(&[], "kill -15 $$").code, 143);
    // The program is ended, unless the machine was too slow to connect in its time.
    let is_ended = ["100ms", "5s", "30s"].into_iter().any(|limit| {
        let limited = sh(&["--timeout", limit], "exec sleep 1000");
        assert_eq!(limited.code, 124, "{limited:?}");
        limited.stderr.contains(&format!("'sh' took longer than {limit}"))
    });
    assert!(is_ended, "no program is ended");
    let flood = sh(&["--max-output", "1KiB"], "yes");
    assert_eq!((flood.code, flood.stdout.len()), (1, 1024));
    assert!(flood.stderr.contains("its output was more than the limit"), "{flood:?}");
    let lines = sh(&["--json"], "echo ü");
    let lines: Vec<Json> = lines.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let end = json!({ "code": 0, "signal": null, "ended_by": null, "fetched": [] });
    assert_eq!(lines, [json!({ "stream": "stdout", "text": "ü\n" }), end]);
    assert_eq!(run(command(&["run", hop.address(), "--", "true"])).code, 77);

    // Through a relay.
    let tokens = fixture.path("tokens");
    cli(&["token", "--out", &tokens]).ok();
    let relay = relay(&tokens);
    let board = format!("{}/board", relay.address());
    let socket = format!("unix:{}", fixture.path("socket"));
    let proof = ["--token-file", &tokens, "--forward-token-file", &tokens];
    let board_flags = ["--allow-run", "cat", "--relay", &board, "--listen", &socket];
    let _board = Fixture::new(&[&board_flags[..], &proof].concat());
    // The server may not wait at the relay yet.
    let through = || cli(&["run", "--token-file", &tokens, &board, "--", "cat", "/proc/sys/kernel/ostype"]);
    let begun = Instant::now();
    let mut answer = through();
    while answer.code != 0 && begun.elapsed() < Duration::from_secs(60) {
        answer = through();
    }
    assert_eq!(answer.ok(), "Linux\n");

    // Patterns that match nothing in the folder are refused before the program runs.
    let ran = fixture.path("ran");
    for pattern in ["../*", "/etc/passwd", "out/../../*"] {
        let refused = sh(&["--fetch", pattern], &format!("touch {ran}"));
        assert!(refused.code == 2 && refused.stderr.contains(pattern), "{refused:?}");
        assert!(!Path::new(&ran).exists());
    }

    // An interrupted program can end in good order.
    let script = "readlink /proc/self/ns/pid; trap 'echo interrupted; exit 0' TERM; echo $$; sleep 1000 & wait";
    let mut child = command(&["run", fixture.address(), "--", "sh", "-c", script]);
    let mut child = child.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let namespace = lines.next().unwrap().unwrap();
    let pid = pid_in(&namespace, &lines.next().unwrap().unwrap());
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(lines.next().unwrap().unwrap(), "interrupted");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    ends(pid);

    // A fetch is interrupted, after it has made the folder and the file, which may have no name.
    let script = "mkdir sub; truncate -s 64G sub/large";
    let mut child = command(&["run", "--fetch", "sub/*", "--out", &out, fixture.address(), "--", "sh", "-c", script]);
    let child = child.stderr(Stdio::piped()).spawn().unwrap();
    let folder = format!("{out}/sub/");
    eventually("nothing is fetched", || {
        let open = fs::read_dir(format!("/proc/{}/fd", child.id())).unwrap().flatten();
        let mut files = open.filter_map(|descriptor| fs::read_link(descriptor.path()).ok());
        files.any(|file| file.to_string_lossy().starts_with(&folder))
    });
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let fetch = child.wait_with_output().unwrap();
    let told = String::from_utf8(fetch.stderr).unwrap();
    assert_eq!(fetch.status.code(), Some(130), "{told}");
    assert!(told.contains("sub/large: incomplete, and not kept"), "{told}");
    assert_eq!(fs::read_dir(format!("{out}/sub")).unwrap().count(), 0);
}
