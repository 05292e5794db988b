//! Socket files of programs that are killed: a guard removes them.

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rpc_server::ServerProcess;
use rustix::process::{Pid, Signal, kill_process};

use super::cli::command;

/// Time in which a file is gone whose process was killed: two seconds are promised, and a loaded
/// machine gets more.
const GONE_WITHIN: Duration = Duration::from_secs(10);

/// Limit against a test that hangs.
const HANG_LIMIT: Duration = Duration::from_secs(60);

fn wait_until(what: &str, limit: Duration, is_so: impl Fn() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < limit, "not after {limit:?}: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

fn serve(folder: &Path, sockets: &[&str], flags: &[&str]) -> ServerProcess {
    // A descriptor that the server inherits, as from a shell.
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "exec 5< /dev/null; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_rpc-server")]);
    command.args(["serve", "--exit-with-stdin", "--log-level", "error", "--workdir"]).arg(folder.join("work"));
    for socket in sockets {
        command.arg("--listen").arg(format!("unix:{}/{socket}", folder.display()));
    }
    command.args(flags);
    ServerProcess::spawn(command).unwrap()
}

/// Returns the pipes that are among the descriptors of a process.
fn pipes(process: u32) -> Vec<PathBuf> {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{process}/fd")) else { return Vec::new() };
    let links = descriptors.filter_map(|descriptor| fs::read_link(descriptor.ok()?.path()).ok());
    links.filter(|link| link.to_string_lossy().starts_with("pipe:")).collect()
}

/// Returns the id of the guard of a process: it has the other end of a pipe.
fn guard_of(process: u32) -> Option<u32> {
    let pipes = pipes(process);
    let is_guard = |id: &u32| {
        let line = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        let names_guard = line.split(|byte| *byte == 0).any(|word| word == b"--guard-socket-files");
        names_guard && fs::read_link(format!("/proc/{id}/fd/0")).is_ok_and(|input| pipes.contains(&input))
    };
    let processes = fs::read_dir("/proc").unwrap();
    processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).find(is_guard)
}

/// Returns the id of the guard of a process, which may be about to start.
fn wait_for_guard(process: u32) -> u32 {
    wait_until("it has a guard", HANG_LIMIT, || guard_of(process).is_some());
    guard_of(process).unwrap()
}

/// Returns the ids of the children of a process, as text.
fn children(process: u32) -> String {
    let threads = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    threads.filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("children")).ok()).collect()
}

fn kill(process: u32, signal: Signal) {
    kill_process(Pid::from_raw(process as i32).unwrap(), signal).unwrap();
}

#[test]
fn a_killed_program_leaves_no_socket_file_and_no_guard() {
    let folder = tempfile::tempdir().unwrap();
    for isolate in ["none", "process"] {
        let mut server = serve(folder.path(), &["a", "b"], &["--isolate", isolate]);
        let (a, b) = (folder.path().join("a"), folder.path().join("b"));
        assert!(a.exists() && b.exists());
        let guard = wait_for_guard(server.id());
        // The file of another process that has taken the path stays.
        fs::remove_file(&a).unwrap();
        let other = UnixListener::bind(&a).unwrap();
        server.kill().unwrap();
        wait_until("the file is gone", GONE_WITHIN, || !b.exists());
        wait_until("the guard is gone", HANG_LIMIT, || guard_has_ended(guard));
        assert!(a.exists(), "the guard has removed the file of another process");
        drop(other);
        fs::remove_file(&a).unwrap();
    }
    let local = folder.path().join("local");
    let service = folder.path().join("service");
    let server = serve(folder.path(), &["a"], &["--allow-port", &format!("unix:{}", service.display())]);
    let to = format!("unix:{}:unix:{}", local.display(), service.display());
    let mut forward = command(&["forward", &to, server.address()]).stdout(Stdio::null()).spawn().unwrap();
    wait_until("it listens", HANG_LIMIT, || local.exists() && guard_of(forward.id()).is_some());
    wait_for_protection(&mut forward, &local);
    forward.kill().unwrap();
    forward.wait().unwrap();
    wait_until("the file is gone", GONE_WITHIN, || !local.exists());
}

/// Waits until the program accepts connections, before which it has told its guard.
fn wait_for_protection(program: &mut Child, socket: &Path) {
    wait_until("it accepts", HANG_LIMIT, || std::os::unix::net::UnixStream::connect(socket).is_ok());
    assert!(program.try_wait().unwrap().is_none());
}

/// Returns true if the process has ended, even if nobody reaps it.
fn guard_has_ended(guard: u32) -> bool {
    fs::read_to_string(format!("/proc/{guard}/stat")).map_or(true, |stat| stat.contains(") Z "))
}

/// Returns the session of the kernel that a process belongs to: 0 if its leader is outside of the
/// namespace of the tests, as in a container, where `getsid` of rustix panics.
fn kernel_session(process: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // Behind the name, which may hold spaces: state, parent, group, session.
    stat.rsplit_once(')')?.1.split_whitespace().nth(3)?.parse().ok()
}

#[test]
fn a_guard_is_no_child_holds_nothing_of_its_process_and_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let listen = format!("unix:{}/*", folder.path().display());
    let mut server = serve(folder.path(), &["a"], &["--isolate", "none", "--allow-listen", &listen]);
    let guard = wait_for_guard(server.id());
    assert_eq!(children(server.id()), "");
    // Signals of a terminal go to the sessions of the kernel that have one.
    wait_until("it has a session of its own", HANG_LIMIT, || kernel_session(guard) == Some(guard));
    wait_until("it keeps three descriptors", HANG_LIMIT, || {
        fs::read_dir(format!("/proc/{guard}/fd")).is_ok_and(|list| list.count() == 3)
    });
    assert_eq!(pipes(guard).len(), 1);
    assert_eq!(fs::read_link(format!("/proc/{guard}/cwd")).unwrap(), Path::new("/"));
    // Without its guard the server starts another for the next file, and for the earlier ones.
    kill(guard, Signal::KILL);
    wait_until("the guard is gone", HANG_LIMIT, || guard_has_ended(guard));
    let session = rpc_transports::Connector::new().connect_blocking(server.address()).unwrap();
    let b = folder.path().join("b");
    let listener = session.listen(&format!("unix:{}", b.display())).wait().unwrap();
    let second = wait_for_guard(server.id());
    assert_ne!(second, guard);
    server.kill().unwrap();
    wait_until("the files are gone", GONE_WITHIN, || !folder.path().join("a").exists() && !b.exists());
    drop(listener);
    // In good order the files are removed by the process itself.
    let mut server = serve(folder.path(), &["a"], &[]);
    let guard = wait_for_guard(server.id());
    kill(guard, Signal::STOP);
    kill(server.id(), Signal::TERM);
    assert!(server.wait().unwrap().success());
    assert!(!folder.path().join("a").exists());
    let _ = kill_process(Pid::from_raw(guard as i32).unwrap(), Signal::KILL);
}
