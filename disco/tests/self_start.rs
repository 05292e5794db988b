//! Programs that would start themselves without end are refused: this program is such a program.
//!
//! Without arguments it runs the tests: each starts this program as one of the [`VICTIMS`], which
//! lack a hook or call it where their children never come. Whatever is started adds a line to a
//! file, and ends at once if the file has more than [`MOST_STARTS`] lines; a limit on processes and
//! a time limit stand behind that.
//!
//! `rpc-server`, which stands above this crate, is a development dependency: its servers start
//! their program again, too.

// It is a test: whatever goes wrong is a reason to panic.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio, exit};
use std::time::{Duration, Instant};

use disco::ProcessSession;
use rpc_core::Registry;
use rpc_server::config::{Isolate, ServeConfig};
use rpc_server::{RpcServer, ServerProcess};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process_group, setrlimit};

/// Variable that names what this program is to be.
const VICTIM: &str = "SELF_START_VICTIM";
/// Variable that names the file of starts.
const STARTS: &str = "SELF_START_FILE";
/// Variable that names the file of errors.
const ERRORS: &str = "SELF_START_ERRORS";
/// Variables that name this program and a copy of it.
const ORIGINAL: &str = "SELF_START_ORIGINAL";
const COPY: &str = "SELF_START_COPY";

/// The most processes that a victim may become before the test ends it.
const MOST_STARTS: usize = 12;

/// A launch that must fail.
type Launch = fn() -> Result<(), String>;

/// The name of each victim, what it launches, how many processes it may become, and the text that
/// its error or that of a child has to have.
const VICTIMS: [(&str, Launch, usize, &str); 13] = [
    // The first launch fails, so that there is one start.
    ("workers without a hook", launch_workers, 1, "disco::serve_if_worker(&registry);"),
    ("a server without a hook", launch_server, 1, "rpc_server::run_as_child_if_asked(&registry);"),
    // The hook is there, and the children lose the argument that it looks for: the mark stops them.
    ("workers by a command that drops the argument", launch_workers_by_command, 3, "RPC_STARTED_BY"),
    ("workers by a name on the path", launch_workers_by_name, 3, "RPC_STARTED_BY"),
    ("workers by a wrapper", launch_workers_by_wrapper, 3, "RPC_STARTED_BY"),
    // Each of the two workers starts two more, and those are the children of children.
    ("workers by two paths in turn", launch_workers_by_the_other_path, 7, "RPC_STARTED_DEPTH"),
    ("a server whose hook looks away", launch_server_with_mark, 1, "RPC_STARTED_BY"),
    ("isolated sessions whose hook looks away", launch_session_process_with_mark, 1, "RPC_STARTED_BY"),
    // A connector may start its own program, and the child may not.
    ("a connector to its own path", connect_to_own_path, 2, "RPC_STARTED_BY"),
    ("a connector to its own name on the path", connect_to_own_name, 2, "RPC_STARTED_BY"),
    ("a connector to itself behind a shell", connect_to_itself_behind_a_shell, 2, "RPC_STARTED_BY"),
    ("connectors by two paths in turn", connect_to_the_other_path, 3, "RPC_STARTED_DEPTH"),
    // The program has the same path on another machine, where no process of this one starts it.
    ("a connector by ssh whose hook looks away", connect_by_ssh, 1, "ssh failed"),
];

fn main() {
    if let Ok(victim) = std::env::var(VICTIM) {
        count_this_start();
        let (_, launch, ..) = VICTIMS.iter().find(|(name, ..)| *name == victim).unwrap();
        if let Err(error) = launch() {
            append(ERRORS, &error);
            exit(1);
        }
        exit(0);
    }
    for (victim, _, starts, text) in VICTIMS {
        refuses(victim, starts, text);
        println!("test {victim} ... ok");
    }
}

fn launch_workers() -> Result<(), String> {
    ProcessSession::new(2, 1).start().wait().map(drop).map_err(|error| error.to_string())
}

fn launch_server() -> Result<(), String> {
    ServerProcess::spawn_self().map(drop).map_err(|error| error.to_string())
}

fn launch_workers_by_command() -> Result<(), String> {
    launch_command([own_path()])
}

fn launch_workers_by_name() -> Result<(), String> {
    launch_command([own_name()])
}

fn launch_workers_by_wrapper() -> Result<(), String> {
    launch_command(["env".to_owned(), own_path()])
}

fn launch_workers_by_the_other_path() -> Result<(), String> {
    launch_command([other_path()])
}

fn launch_command(command: impl IntoIterator<Item = String>) -> Result<(), String> {
    disco::serve_if_worker(&Registry::new());
    let session = ProcessSession::new(2, 1).command(command);
    session.start().wait().map(drop).map_err(|error| error.to_string())
}

fn connect_to_own_path() -> Result<(), String> {
    connect([own_path()])
}

fn connect_to_own_name() -> Result<(), String> {
    connect([own_name()])
}

fn connect_to_itself_behind_a_shell() -> Result<(), String> {
    connect(["sh".to_owned(), "-c".to_owned(), format!("exec '{}' again", own_path())])
}

fn connect_to_the_other_path() -> Result<(), String> {
    connect([other_path()])
}

/// Connects to the program that a command starts, which serves nobody.
fn connect(command: impl IntoIterator<Item = String>) -> Result<(), String> {
    let address = rpc_transports::Address::exec(command).unwrap();
    let session = rpc_transports::Connector::new().connect_blocking(&address);
    session.map(drop).map_err(|error| error.into_rpc_error().to_string())
}

/// Connects through a stand-in for `ssh` that cannot reach the host.
fn connect_by_ssh() -> Result<(), String> {
    let unreachable = rpc_transports::ssh::Ssh::new().command("sh", ["-c", "exit 255", "ssh"]);
    let connector =
        rpc_transports::Connector::new().transports(rpc_transports::Transports::default().with(unreachable));
    let session = connector.connect_blocking(&format!("ssh://board?program={}", own_path()));
    session.map(drop).map_err(|error| error.into_rpc_error().to_string())
}

/// Returns the name of this program. Its folder is on the path.
fn own_name() -> String {
    std::env::current_exe().unwrap().file_name().unwrap().to_str().unwrap().to_owned()
}

/// Returns the path of the copy in the original program, and of the original in the copy.
fn other_path() -> String {
    [ORIGINAL, COPY].map(|path| std::env::var(path).unwrap()).into_iter().find(|path| *path != own_path()).unwrap()
}

fn own_path() -> String {
    std::env::current_exe().unwrap().to_str().unwrap().to_owned()
}

fn launch_server_with_mark() -> Result<(), String> {
    rpc_server::run_as_child_if_asked(&Registry::new());
    launch_server()
}

fn launch_session_process_with_mark() -> Result<(), String> {
    let registry = Registry::new();
    rpc_server::isolate::run_if_isolated(&registry);
    let folder = tempfile::tempdir().unwrap();
    let config = ServeConfig {
        listen: vec![format!("unix:{}", folder.path().join("socket").display()).parse().unwrap()],
        workdir: folder.path().join("work"),
        isolate: Isolate::Process,
        ..ServeConfig::default()
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let server = RpcServer::new(registry).config(config).start().await.unwrap();
        let session = rpc_transports::Connector::new().connect(&server.addresses()[0].to_string()).await;
        session.map(drop).map_err(|error| error.into_rpc_error().to_string())
    })
}

/// Adds a line to the file of starts. Ends this process if there are too many.
fn count_this_start() {
    append(STARTS, "started");
    let starts = fs::read_to_string(std::env::var_os(STARTS).unwrap()).unwrap();
    if starts.lines().count() > MOST_STARTS {
        exit(99);
    }
}

/// Adds a line to the file that a variable names.
fn append(variable: &str, line: &str) {
    let path = std::env::var_os(variable).unwrap();
    let mut file = fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
    file.write_all(format!("{line}\n").as_bytes()).unwrap();
}

/// Checks that a victim launches nothing that launches: it becomes `starts` processes, and their
/// error has `text`.
fn refuses(victim: &str, starts: usize, text: &str) {
    let folder = tempfile::tempdir().unwrap();
    let (file, errors) = (folder.path().join("starts"), folder.path().join("errors"));
    fs::write(&file, "").unwrap();
    let own = std::env::current_exe().unwrap();
    let mut command = Command::new(&own);
    command.env(VICTIM, victim).env(STARTS, &file).env(ERRORS, &errors).process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut folders = vec![own.parent().unwrap().to_owned()];
    folders.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap()));
    command.env("PATH", std::env::join_paths(folders).unwrap());
    if victim.ends_with("by two paths in turn") {
        let copy = folder.path().canonicalize().unwrap().join("copy");
        fs::copy(&own, &copy).unwrap();
        command.env(ORIGINAL, &own).env(COPY, copy);
    }
    if victim.ends_with("whose hook looks away") {
        // As its own program would have started it.
        command.env(rpc_transports::self_start::STARTED_BY, &own);
    }
    limit_processes();
    let mut child = command.spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if Instant::now() >= deadline => break None,
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let group = Pid::from_raw(child.id().cast_signed()).unwrap();
    // Whatever is left of it; mostly nothing is.
    let _ = kill_process_group(group, Signal::KILL);
    let output = fs::read_to_string(&errors).unwrap_or_default();
    let started = fs::read_to_string(&file).unwrap().lines().count();
    assert_eq!(status.map(|status| status.code()), Some(Some(1)), "{victim}: {started} starts; {output}");
    assert!(output.contains(text), "{victim}: {output}");
    assert!(started <= starts, "{victim}: {started} starts instead of {starts}; {output}");
}

/// Bounds the processes of this user, for whom that holds (not for root).
fn limit_processes() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nproc);
    let limit = 4096;
    let current = Some(current.map_or(limit, |current| current.min(limit)));
    setrlimit(Resource::Nproc, Rlimit { current, maximum }).unwrap();
}
