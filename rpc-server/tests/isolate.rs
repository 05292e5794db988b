//! Sessions in processes of their own: crashes end one session alone, and leave nothing behind.
//!
//! This program plays three parts: the tests, the server that they talk to (`serve`, and flags),
//! and the processes of its sessions. So it has a `main` of its own.
//!
//! It looks for processes in `/proc`, so it is for Linux.

// Tests may unwrap, because a panic is how a test fails.
#![allow(clippy::unwrap_used)]

mod own_harness;

use std::future::{Future, IntoFuture};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, process, thread};

use clap::Parser;
use rpc_core::client::{Files, LeaseOptions};
use rpc_core::{DataType, Device, ErrorKind, Pack, Registry, RemoteObject, RpcError, Session};
use rpc_server::builtins::ServerInfo;
use rpc_server::config::{ServeSettings, TrackerConfig};
use rpc_server::tracker::Tracker;
use rpc_server::{RpcServer, ServerProcess, isolate};
use rpc_transports::tracker::{ServerRequest, TICKET_REFUSED, TrackerClient};
use rpc_transports::{Connector, self_start};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use self::own_harness::tests;

fn main() -> ExitCode {
    let registry = registry();
    isolate::run_if_isolated(&registry);
    let args: Vec<_> = env::args().skip(1).collect();
    if args.first().is_some_and(|arg| arg == "serve") {
        let Program { settings } = Program::parse_from(args);
        let config = settings.resolve().unwrap();
        let server = RpcServer::new(registry).config(config);
        return ExitCode::from(rpc_server::server::exit_code::of_server(&server.run_blocking()));
    }
    own_harness::run(&tests![
        isolated_sessions_work_as_sessions_in_the_server_do
        a_crash_is_an_error_to_one_client_alone
        resources_of_a_crashed_session_are_removed
        an_endless_loop_ends_with_its_session
        an_endless_loop_that_blocks_the_connection_ends_too
        a_device_goes_to_the_next_once_the_process_that_held_it_has_ended
        processes_of_a_session_end_with_it
        nothing_survives_a_server_that_is_killed
        a_server_that_is_told_to_stop_lets_calls_finish_and_leaves_nothing
        a_second_signal_ends_even_endless_loops
        a_session_gets_no_more_memory_than_it_may
        a_session_gets_no_more_processor_time_than_it_may
        a_session_gets_no_more_files_than_it_may
        the_limits_of_all_sessions_hold_in_processes_too
        each_session_reserves_its_share_of_the_total_memory
        named_workspaces_are_kept_and_shared
        info_is_about_the_server
        a_dead_spare_process_is_replaced
        a_stopped_spare_process_is_replaced
        sessions_over_unix_sockets_and_standard_input_are_isolated_too
        signals_to_the_process_group_end_no_session_process
        the_process_serves_the_socket_of_its_client
        the_longest_duration_and_the_idle_time_end_sessions
        a_process_that_forges_its_end_loses_its_session
        a_process_cannot_take_the_room_of_all_for_its_queue
        a_client_that_goes_takes_a_stopped_process_with_it
        a_process_that_is_killed_in_the_middle_of_a_copy_ends_one_session
        what_sessions_have_queued_counts_for_all_of_them
        isolated_sessions_need_tickets_and_a_crash_frees_the_slot
    ])
}

#[derive(Parser)]
struct Program {
    #[command(flatten)]
    settings: ServeSettings,
}

fn registry() -> Registry {
    let registry = Registry::new();
    registry
        .add("add", |a: i64, b: i64| a + b)
        .add("started_depth", || env::var(self_start::STARTED_DEPTH).unwrap_or_default())
        .add("panic", |text: String| -> () { panic!("{text}") })
        .add("crash.segv", segv)
        .add("crash.abort", || -> () { process::abort() })
        .add("crash.exit", |code: i64| -> () { process::exit(code.try_into().unwrap()) })
        .add("crash.spin", spin)
        .add("crash.spin_with", |_text: String| spin())
        .add("len", |text: String| text.len() as u64)
        .add("forge", forge)
        .add_inline("crash.spin_inline", spin)
        .add_async("crash.spin_async", || async { spin() })
        .add("crash.eat_memory", eat_memory)
        .add("crash.start", start_sleeper)
        .add("crash.open_files", || {
            let files: Vec<_> = (0..10_000).map_while(|_| fs::File::open("/dev/null").ok()).collect();
            files.len() as u64
        });
    registry
}

fn segv() {
    let nowhere: *mut u8 = std::ptr::without_provenance_mut(16);
    // SAFETY: none. The first page is never mapped, so that this ends the process, which is there
    // for that.
    unsafe { nowhere.write_volatile(1) }
}

fn spin() {
    // The condition is always true, which the compiler does not know.
    while std::hint::black_box(true) {
        std::hint::spin_loop();
    }
}

/// Sends a datagram by each socket of this process that takes one: its link to the server. Returns
/// their number.
fn forge(message: String) -> u64 {
    let mut sent = 0;
    for descriptor in fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let Ok(descriptor) = descriptor.file_name().to_str().unwrap().parse::<i32>() else { continue };
        // SAFETY: at worst the descriptor is closed meanwhile, and another one has its number.
        let socket = unsafe { std::os::fd::BorrowedFd::borrow_raw(descriptor) };
        let is_link = rustix::net::sockopt::socket_type(socket) == Ok(rustix::net::SocketType::DGRAM);
        if is_link && rustix::net::send(socket, message.as_bytes(), rustix::net::SendFlags::DONTWAIT).is_ok() {
            sent += 1;
            break;
        }
    }
    sent
}

/// Allocates pieces of 1 MiB, and returns their number. A limit on memory ends the process before.
fn eat_memory() -> u64 {
    let mut eaten: Vec<Vec<u8>> = Vec::new();
    // Stops at 4 GiB, in case the limit does not work.
    while eaten.len() < 4096 {
        eaten.push(vec![1; 1 << 20]);
    }
    eaten.len() as u64
}

/// Starts a program that does not end, and returns its process id.
#[allow(clippy::zombie_processes, reason = "who ends it is what is being tested")]
fn start_sleeper() -> u64 {
    let child = Command::new("sleep").arg("1000").stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    child.id().into()
}

/// Time limit against hanging, far longer than any step takes.
const TIME_LIMIT: Duration = Duration::from_secs(30);

/// A server that isolates sessions, with a folder of its own.
struct Fixture {
    server: ServerProcess,
    folder: tempfile::TempDir,
}

impl Fixture {
    fn start(args: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["serve", "--isolate", "process", "--listen", "tcp://127.0.0.1:0", "--log-level", "warn"]);
        command.arg("--workdir").arg(folder.path().join("work")).args(args);
        Self { server: ServerProcess::spawn(command).unwrap(), folder }
    }

    async fn connect(&self) -> Session {
        Connector::new().connect(self.server.address()).await.unwrap()
    }

    /// Opens a session whose client can end without closing it, as if the client was killed.
    async fn connect_from_elsewhere(&self) -> (Elsewhere, Session) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let address = self.server.address().to_owned();
        let session = runtime.spawn(async move { Connector::new().connect(&address).await }).await.unwrap().unwrap();
        (Elsewhere(Some(runtime)), session)
    }

    fn pid(&self) -> Pid {
        pid(self.server.id().into())
    }

    /// The folders of private workspaces.
    fn private_workspaces(&self) -> Vec<PathBuf> {
        let Ok(servers) = fs::read_dir(self.folder.path().join("work/private")) else { return Vec::new() };
        let folders = servers.flatten().filter(|entry| entry.path().is_dir());
        folders.flat_map(|server| fs::read_dir(server.path()).unwrap().flatten()).map(|entry| entry.path()).collect()
    }

    /// The processes that the server has started and not reaped.
    fn children(&self) -> Vec<Pid> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.server.id())).unwrap();
        let lists = tasks.flatten().filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
        let pids: Vec<u64> = lists
            .flat_map(|list| list.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<_>>())
            .collect();
        pids.into_iter().map(pid).collect()
    }
}

/// Runtime for the input and output of a session, until dropped.
struct Elsewhere(Option<tokio::runtime::Runtime>);

impl Drop for Elsewhere {
    fn drop(&mut self) {
        self.0.take().unwrap().shutdown_background();
    }
}

fn pid(id: u64) -> Pid {
    Pid::from_raw(id.try_into().unwrap()).unwrap()
}

/// Waits for `done`, and returns how long that took, without the time for which this process itself
/// stood still.
fn until(what: &str, done: impl Fn() -> bool) -> Duration {
    /// Longest time that a look and its pause take while the machine runs.
    const LOOK: Duration = Duration::from_millis(20);
    let start = Instant::now();
    let (mut took, mut last) = (Duration::ZERO, start);
    while !done() {
        assert!(start.elapsed() < TIME_LIMIT, "waiting in vain: {what}");
        thread::sleep(Duration::from_millis(2));
        let now = Instant::now();
        took += (now - last).min(LOOK);
        last = now;
    }
    took
}

/// Waits until the process has ended; a zombie has, though its parent is yet to look.
fn ended(process: Pid) -> Duration {
    let state = || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", process.as_raw_nonzero())).ok()?;
        stat.rsplit(") ").next()?.chars().next()
    };
    until("a process ends", || matches!(state(), None | Some('Z' | 'X')))
}

/// Waits until the process has been reaped.
fn reaped(process: Pid) -> Duration {
    until("a process is reaped", || test_kill_process(process).is_err())
}

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(2 * TIME_LIMIT, test).await.expect("the test hangs") });
}

async fn info(session: &Session) -> ServerInfo {
    let Pack(info) = session.get_function("rpc.info").await.unwrap().call(()).await.unwrap();
    info
}

/// The process that serves the session.
async fn process_of(session: &Session) -> Pid {
    pid(info(session).await.pid.into())
}

async fn call_pid(session: &Session, name: &str) -> Pid {
    pid(session.function::<(), u64>(name).await.unwrap().call(()).await.unwrap())
}

/// Reads a file of the session's workspace.
async fn content(session: &Session, path: &str) -> Vec<u8> {
    let mut content = Vec::new();
    Files::new(session).get(path, &mut content).await.unwrap();
    content
}

/// Calls a function that ends its process.
async fn crash(session: &Session, name: &str) -> RpcError {
    session.get_function(name).await.unwrap().call::<()>(()).await.unwrap_err()
}

/// Calls a function that does not return, and waits until it runs.
async fn begin(session: &Session, name: &str) -> rpc_core::Pending<()> {
    let function = session.get_function(name).await.unwrap();
    let process = process_of(session).await;
    let before = ticks(process);
    // On a lane of its own: on that of `rpc.info` an inline function may find the thread of that
    // call still there, and run on it.
    let mut call = function.call(()).concurrent().start();
    call.admitted().await.unwrap();
    until("the loop runs", || ticks(process) > before + 2);
    call
}

/// Processor time that a process has used, in hundredths of a second.
fn ticks(process: Pid) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{}/stat", process.as_raw_nonzero())).unwrap();
    let fields: Vec<_> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

fn isolated_sessions_work_as_sessions_in_the_server_do() {
    run(async {
        let fixture = Fixture::start(&[]);
        let session = fixture.connect().await;
        assert_ne!(process_of(&session).await, fixture.pid());
        let add = session.function::<(i64, i64), i64>("add").await.unwrap();
        assert_eq!(add.call((1, 2)).await.unwrap(), 3);

        // The mark of a child, by which it would be known if its hook came too late.
        let depth = session.function::<(), String>("started_depth").await.unwrap().call(()).await.unwrap();
        assert_eq!(depth, "1");

        let error = session.function::<(String,), ()>("panic").await.unwrap().call(("on purpose".into(),)).await;
        let error = error.unwrap_err();
        assert!(error.kind() == ErrorKind::Panic && error.message().contains("on purpose"), "{error}");
        let error = session.get_function("no.such").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);

        let data: Vec<u8> = (0..3 << 20).map(|i| (i % 251) as u8).collect();
        let tensor = session.alloc(Device::cpu(), DataType::U8, &[data.len() as i64]).await.unwrap();
        session.copy_to_remote(&tensor, data.clone()).await.unwrap();
        assert!(session.copy_from_remote(&tensor).await.unwrap() == data);

        let object: RemoteObject = session.get_function("rpc.new_object").await.unwrap().call(()).await.unwrap();
        let echo = session.get_function("rpc.echo").await.unwrap();
        let other = fixture.connect().await;
        let foreign = other.get_function("rpc.echo").await.unwrap().call::<RemoteObject>((&object,)).await;
        assert!(foreign.is_err(), "an object of another session");
        let _same: RemoteObject = echo.call((&object,)).await.unwrap();

        let files = Files::new(&session);
        files.put_bytes("folder/file", &b"content"[..]).await.unwrap();
        assert_eq!(content(&session, "folder/file").await, b"content");

        let process = process_of(&session).await;
        session.shutdown().await.unwrap();
        reaped(process);
    });
}

fn a_crash_is_an_error_to_one_client_alone() {
    run(async {
        let fixture = Fixture::start(&[]);
        let neighbour = fixture.connect().await;
        let object: RemoteObject = neighbour.get_function("rpc.new_object").await.unwrap().call(()).await.unwrap();
        for (name, hint) in [
            ("crash.segv", "killed by signal 11 (SIGSEGV)"),
            ("crash.abort", "killed by signal 6 (SIGABRT)"),
            ("crash.exit", "exited with code 7"),
        ] {
            let session = fixture.connect().await;
            let process = process_of(&session).await;
            let waiting =
                session.function::<(f64,), ()>("rpc.sleep").await.unwrap().call((1000.0,)).concurrent().start();
            let error = match name {
                "crash.exit" => session.function::<(i64,), ()>(name).await.unwrap().call((7,)).await.unwrap_err(),
                name => crash(&session, name).await,
            };
            assert!(error.kind() == ErrorKind::PeerLost && error.request_may_have_run(), "{error}");
            assert!(error.message().contains(hint), "{error}");
            let error = waiting.await.unwrap_err();
            assert!(error.message().contains(hint), "all that was under way hears of it: {error}");
            let error = session.get_function("rpc.echo").await.unwrap_err();
            assert!(error.ends_session(), "{error}");
            reaped(process);
        }
        let echo = neighbour.get_function("rpc.echo").await.unwrap();
        let _same: RemoteObject = echo.call((&object,)).await.unwrap();
    });
}

fn resources_of_a_crashed_session_are_removed() {
    run(async {
        let fixture = Fixture::start(&[]);
        let session = fixture.connect().await;
        Files::new(&session).put_bytes("file", &b"content"[..]).await.unwrap();
        let [workspace] = &fixture.private_workspaces()[..] else { panic!("one workspace") };
        assert!(workspace.join("files/file").exists());
        crash(&session, "crash.abort").await;
        until("the workspace is removed", || fixture.private_workspaces().is_empty());
        // A spare process waits for the next client.
        until("one process is left", || fixture.children().len() == 1);
    });
}

/// "About a second": the grace, and what a busy machine adds.
const SOON: Duration = Duration::from_secs(2);

fn an_endless_loop_ends_with_its_session() {
    run(async {
        let fixture = Fixture::start(&[]);
        let (client, session) = fixture.connect_from_elsewhere().await;
        let process = process_of(&session).await;
        let _call = begin(&session, "crash.spin").await;
        drop(client);
        assert!(reaped(process) < SOON);
        until("the workspace is removed", || fixture.private_workspaces().is_empty());
    });
}

fn an_endless_loop_that_blocks_the_connection_ends_too() {
    run(async {
        // The test itself may get no processor for less than three of these intervals.
        let fixture = Fixture::start(&["--keep-alive", "1s"]);
        for name in ["crash.spin_inline", "crash.spin_async"] {
            let session = fixture.connect().await;
            let process = process_of(&session).await;
            let call = begin(&session, name).await;
            if name == "crash.spin_inline" {
                // The process does not answer, and is killed.
                let error = call.await.unwrap_err();
                assert!(error.kind() == ErrorKind::PeerSilent, "{error}");
            } else {
                drop(call);
            }
            drop(session);
            assert!(reaped(process) < SOON);
        }
    });
}

/// The process releases its objects, and the lease with them, while its loop goes on.
fn a_device_goes_to_the_next_once_the_process_that_held_it_has_ended() {
    run(async {
        let fixture = Fixture::start(&[]);
        let (client, holder) = fixture.connect_from_elsewhere().await;
        let process = process_of(&holder).await;
        let _lease = holder.lease(Device::cpu(), &LeaseOptions::default()).await.unwrap();
        let _waiting = holder.request_lease(Device::cpu(), &LeaseOptions::default()).await.unwrap();
        // On a thread of the runtime, for which the process waits before it ends.
        let _call = begin(&holder, "crash.spin_async").await;
        let next = fixture.connect().await;
        let request = next.request_lease(Device::cpu(), &LeaseOptions::default()).await.unwrap();
        drop(client);
        let _lease = request.granted().await.unwrap();
        assert!(test_kill_process(process).is_err(), "the process of the former holder still runs");
    });
}

fn processes_of_a_session_end_with_it() {
    run(async {
        let fixture = Fixture::start(&[]);
        for end in ["crash.segv", "crash.spin", "shutdown"] {
            let (client, session) = fixture.connect_from_elsewhere().await;
            let grandchild = call_pid(&session, "crash.start").await;
            assert!(test_kill_process(grandchild).is_ok());
            match end {
                "crash.segv" => drop(crash(&session, end).await),
                "crash.spin" => drop(begin(&session, end).await),
                _ => session.shutdown().await.unwrap(),
            }
            drop(client);
            assert!(ended(grandchild) < SOON, "{end}");
        }
    });
}

fn nothing_survives_a_server_that_is_killed() {
    run(async {
        let mut fixture = Fixture::start(&[]);
        let (idle, busy) = (fixture.connect().await, fixture.connect().await);
        let grandchild = call_pid(&busy, "crash.start").await;
        let call = begin(&busy, "crash.spin").await;
        until("the next process is there", || fixture.children().len() == 3);
        let children = fixture.children();
        fixture.server.kill().unwrap();
        for process in children.into_iter().chain([grandchild]) {
            assert!(ended(process) < SOON);
        }
        assert!(call.await.unwrap_err().ends_session());
        drop(idle);
    });
}

fn a_server_that_is_told_to_stop_lets_calls_finish_and_leaves_nothing() {
    run(async {
        let mut fixture = Fixture::start(&[]);
        let session = fixture.connect().await;
        let grandchild = call_pid(&session, "crash.start").await;
        let sleep = session.function::<(f64,), ()>("rpc.sleep").await.unwrap();
        let mut call = sleep.call((0.3,)).start();
        call.admitted().await.unwrap();
        // An answer on another lane says that the request before it has arrived too.
        session.get_function("rpc.echo").concurrent().into_future().await.unwrap();
        let children = fixture.children();
        kill_process(fixture.pid(), Signal::TERM).unwrap();
        call.await.unwrap();
        assert_eq!(fixture.server.wait().unwrap().code(), Some(0));
        // The workspaces are gone as soon as the server has ended.
        assert!(fixture.private_workspaces().is_empty());
        for process in children.into_iter().chain([grandchild]) {
            ended(process);
        }
    });
}

fn a_second_signal_ends_even_endless_loops() {
    run(async {
        let mut fixture = Fixture::start(&[]);
        let session = fixture.connect().await;
        let process = process_of(&session).await;
        let call = begin(&session, "crash.spin").await;
        let probe = async {
            // Once new clients are turned away the drain has begun.
            while Connector::new().connect(fixture.server.address()).await.is_ok() {}
        };
        kill_process(fixture.pid(), Signal::TERM).unwrap();
        probe.await;
        kill_process(fixture.pid(), Signal::TERM).unwrap();
        assert_eq!(fixture.server.wait().unwrap().code(), Some(143));
        ended(process);
        assert!(fixture.private_workspaces().is_empty());
        assert!(call.await.unwrap_err().ends_session());
    });
}

fn a_session_gets_no_more_memory_than_it_may() {
    run(async {
        let fixture = Fixture::start(&["--isolate-memory", "256MiB"]);
        let session = fixture.connect().await;
        let error = session.alloc(Device::cpu(), DataType::U8, &[1 << 30]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
        let _tensor = session.alloc(Device::cpu(), DataType::U8, &[64 << 20]).await.unwrap();
        let error = crash(&session, "crash.eat_memory").await;
        assert!(error.kind() == ErrorKind::PeerLost && error.message().contains("isolate_memory is 256MiB"), "{error}");
        fixture.connect().await;
    });
}

fn a_session_gets_no_more_processor_time_than_it_may() {
    run(async {
        let fixture = Fixture::start(&["--isolate-cpu-time", "1s"]);
        let session = fixture.connect().await;
        let error = crash(&session, "crash.spin").await;
        assert!(error.kind() == ErrorKind::PeerLost && error.message().contains("isolate_cpu_time"), "{error}");
        assert!(error.message().contains("SIGXCPU"), "{error}");
    });
}

fn a_session_gets_no_more_files_than_it_may() {
    run(async {
        let fixture = Fixture::start(&["--isolate-files", "64"]);
        let session = fixture.connect().await;
        let open = session.function::<(), u64>("crash.open_files").await.unwrap();
        let opened = open.call(()).await.unwrap();
        assert!((16..64).contains(&opened), "{opened}");
    });
}

fn the_limits_of_all_sessions_hold_in_processes_too() {
    run(async {
        let fixture = Fixture::start(&["--max-memory", "1MiB", "--max-handles", "4", "--max-sessions", "2"]);
        let session = fixture.connect().await;
        let error = session.alloc(Device::cpu(), DataType::U8, &[(1 << 20) + 1]).await.unwrap_err();
        assert!(error.kind() == ErrorKind::LimitExceeded && error.message().contains("max_memory"), "{error}");
        let new_object = session.get_function("rpc.new_object").await.unwrap();
        let mut objects: Vec<RemoteObject> = Vec::new();
        let error = loop {
            match new_object.call(()).await {
                Ok(object) => objects.push(object),
                Err(error) => break error,
            }
        };
        assert!(objects.len() < 4 && error.message().contains("handles"), "{error}");
        let _second = fixture.connect().await;
        let error = Connector::new().connect(fixture.server.address()).await.unwrap_err().into_rpc_error();
        assert!(error.message().contains("max_sessions"), "{error}");
    });
}

fn each_session_reserves_its_share_of_the_total_memory() {
    run(async {
        let fixture = Fixture::start(&["--max-memory", "1MiB", "--max-total-memory", "2MiB"]);
        let (first, _second) = (fixture.connect().await, fixture.connect().await);
        let error = Connector::new().connect(fixture.server.address()).await.unwrap_err().into_rpc_error();
        assert!(error.kind() == ErrorKind::LimitExceeded && error.message().contains("max_total_memory"), "{error}");
        let process = process_of(&first).await;
        drop(first);
        reaped(process);
        while Connector::new().connect(fixture.server.address()).await.is_err() {}
    });
}

fn named_workspaces_are_kept_and_shared() {
    run(async {
        let fixture = Fixture::start(&[]);
        let connector = Connector::new().workspace("shared");
        let (first, second) = (
            connector.connect(fixture.server.address()).await.unwrap(),
            connector.connect(fixture.server.address()).await.unwrap(),
        );
        Files::new(&first).put_bytes("kept", &b"content"[..]).await.unwrap();
        let crashed = process_of(&first).await;
        crash(&first, "crash.segv").await;
        reaped(crashed);
        assert_eq!(content(&second, "kept").await, b"content");
        drop(second);
        let third = connector.connect(fixture.server.address()).await.unwrap();
        assert_eq!(content(&third, "kept").await, b"content");
        assert!(fixture.private_workspaces().is_empty());
    });
}

fn info_is_about_the_server() {
    run(async {
        let fixture = Fixture::start(&["--key", "board"]);
        let (first, second) = (fixture.connect().await, fixture.connect().await);
        let mine = info(&first).await;
        assert_eq!((mine.sessions, mine.key.as_deref()), (2, Some("board")));
        assert!(mine.uptime_seconds > 0.0);
        // A regression: what the session of the caller held was not counted.
        let own = first.alloc(Device::cpu(), DataType::U8, &[1 << 10]).await.unwrap();
        assert_eq!(info(&first).await.memory_bytes, 1 << 10);
        drop(own);
        let _tensor = second.alloc(Device::cpu(), DataType::U8, &[1 << 20]).await.unwrap();
        // The other process reports it in its own time.
        while info(&first).await.memory_bytes != 1 << 20 {}
        crash(&second, "crash.segv").await;
        while info(&first).await.sessions != 1 {}
        assert_eq!(info(&first).await.memory_bytes, 0);
    });
}

fn a_dead_spare_process_is_replaced() {
    run(async {
        let fixture = Fixture::start(&[]);
        until("the spare process is there", || fixture.children().len() == 1);
        let spare = fixture.children()[0];
        kill_process(spare, Signal::KILL).unwrap();
        reaped(spare);
        let session = fixture.connect().await;
        assert_ne!(process_of(&session).await, spare);
    });
}

/// A regression: the next client waited for the process until the handshake's time was over.
fn a_stopped_spare_process_is_replaced() {
    run(async {
        let fixture = Fixture::start(&[]);
        // The server waits for its children until they run their program: one that is stopped
        // before that would stop it, too.
        let runs = |pid: &Pid| {
            let command = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
            command.windows(25).any(|part| part == b"--serve-isolated-session\0")
        };
        until("the spare process is there", || fixture.children().iter().any(runs));
        let spare = fixture.children()[0];
        kill_process(spare, Signal::STOP).unwrap();
        let stat = format!("/proc/{}/stat", spare.as_raw_nonzero());
        until("it is stopped", || fs::read_to_string(&stat).unwrap().contains(") T "));
        let started = Instant::now();
        // The server may have been about to take the process as its spare one: then the next client
        // has it replaced.
        while test_kill_process(spare).is_ok() {
            assert!(started.elapsed() < TIME_LIMIT, "the process is kept");
            let session = fixture.connect().await;
            assert_ne!(process_of(&session).await, spare);
        }
    });
}

fn sessions_over_unix_sockets_and_standard_input_are_isolated_too() {
    run(async {
        let folder = tempfile::tempdir().unwrap();
        let program = env::current_exe().unwrap();
        let unix = format!("unix:{}", folder.path().join("socket").display());
        let fixture = Fixture::start(&["--listen", &unix]);
        let exec =
            format!("exec:{} serve --isolate process --stdio --workdir {}", program.display(), folder.path().display());
        for address in [unix, exec] {
            let session = Connector::new().connect(&address).await.unwrap();
            let process = process_of(&session).await;
            let error = crash(&session, "crash.segv").await;
            assert!(error.message().contains("SIGSEGV"), "{error}");
            ended(process);
        }
        assert!(Path::new(&folder.path().join("private")).exists());
        drop(fixture);
    });
}

fn signals_to_the_process_group_end_no_session_process() {
    run(async {
        let fixture = Fixture::start(&[]);
        let session = fixture.connect().await;
        let process = process_of(&session).await;
        for signal in [Signal::TERM, Signal::INT] {
            kill_process(process, signal).unwrap();
            assert_eq!(process_of(&session).await, process);
        }
        kill_process(process, Signal::KILL).unwrap();
        let error = session.shared().ended().reply().await.unwrap_err();
        assert!(error.message().contains("SIGKILL"), "{error}");
    });
}

/// Calls and copies go on while the server stands still.
fn the_process_serves_the_socket_of_its_client() {
    run(async {
        let folder = tempfile::tempdir().unwrap();
        let unix = format!("unix:{}", folder.path().join("socket").display());
        let fixture = Fixture::start(&["--listen", &unix]);
        for address in [fixture.server.address(), &unix] {
            let session = Connector::new().connect(address).await.unwrap();
            let add = session.function::<(i64, i64), i64>("add").await.unwrap();
            let tensor = session.alloc(Device::cpu(), DataType::U8, &[3 << 20]).await.unwrap();
            kill_process(fixture.pid(), Signal::STOP).unwrap();
            let served = async {
                let data = vec![5; 3 << 20];
                session.copy_to_remote(&tensor, data.clone()).await?;
                assert_eq!(session.copy_from_remote(&tensor).await?, data);
                add.call((1, 2)).await
            };
            let served = tokio::time::timeout(TIME_LIMIT, served).await;
            kill_process(fixture.pid(), Signal::CONT).unwrap();
            assert_eq!(served.expect("the server is on the way").unwrap(), 3, "{address}");
            session.shutdown().await.unwrap();
        }
        until("both sessions are over", || fixture.private_workspaces().is_empty());
    });
}

/// The longest duration also holds while the process can do nothing.
fn the_longest_duration_and_the_idle_time_end_sessions() {
    run(async {
        let fixture = Fixture::start(&["--session-duration", "3s"]);
        for spins in [false, true] {
            let session = fixture.connect().await;
            let process = process_of(&session).await;
            let call = if spins { Some(begin(&session, "crash.spin_inline").await) } else { None };
            let error = session.shared().ended().reply().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::SessionTimeout, "{error}");
            assert!(error.message().contains("session_duration is over"), "{error}");
            drop(call);
            reaped(process);
        }
        let fixture = Fixture::start(&["--idle-timeout", "100ms"]);
        let session = fixture.connect().await;
        let error = session.shared().ended().reply().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::SessionTimeout, "{error}");
    });
}

/// As a process whose client's code finds the link to the server.
fn a_process_that_forges_its_end_loses_its_session() {
    run(async {
        let fixture = Fixture::start(&[]);
        let session = fixture.connect().await;
        let process = process_of(&session).await;
        let forge = session.function::<(String,), u64>("forge").await.unwrap();
        assert_eq!(forge.call(("\u{3}\"ending\"".to_owned(),)).await.unwrap(), 1);
        let error = session.shared().ended().reply().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
        reaped(process);
    });
}

fn a_process_cannot_take_the_room_of_all_for_its_queue() {
    run(async {
        let fixture = Fixture::start(&["--max-total-queued", "1GiB"]);
        let session = fixture.connect().await;
        let forge = session.function::<(String,), u64>("forge").await.unwrap();
        let bytes = 1023_u64 << 20;
        let notice = format!("\u{3}{{\"queue\":{{\"bytes\":{bytes},\"lasting\":false,\"number\":null}}}}");
        assert_eq!(forge.call((notice,)).await.unwrap(), 1);
        // The answer comes from the same thread of the server, behind the forged message.
        process_of(&session).await;
        let other = fixture.connect().await;
        let count = other.function::<(String,), u64>("len").await.unwrap();
        assert_eq!(count.call(("x".repeat(24 << 20),)).await.unwrap(), 24 << 20);
    });
}

fn a_client_that_goes_takes_a_stopped_process_with_it() {
    run(async {
        let fixture = Fixture::start(&[]);
        let (client, session) = fixture.connect_from_elsewhere().await;
        let process = process_of(&session).await;
        kill_process(process, Signal::STOP).unwrap();
        drop(client);
        assert!(reaped(process) < SOON);
        until("the workspace is removed", || fixture.private_workspaces().is_empty());
    });
}

fn a_process_that_is_killed_in_the_middle_of_a_copy_ends_one_session() {
    run(async {
        let fixture = Fixture::start(&[]);
        let other = fixture.connect().await;
        for round in 0..8 {
            let session = fixture.connect().await;
            let process = process_of(&session).await;
            let tensor = session.alloc(Device::cpu(), DataType::U8, &[8 << 20]).await.unwrap();
            let copying = tokio::spawn({
                let session = session.clone();
                async move { loop_of_copies(&session, &tensor).await }
            });
            tokio::time::sleep(Duration::from_millis(round)).await;
            kill_process(process, Signal::KILL).unwrap();
            let error = copying.await.unwrap();
            assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
            let add = other.function::<(i64, i64), i64>("add").await.unwrap();
            assert_eq!(add.call((1, 2)).await.unwrap(), 3);
        }
    });
}

/// Requests that wait behind one that never ends take the room of another session's.
fn what_sessions_have_queued_counts_for_all_of_them() {
    run(async {
        const PIECE: usize = 6 << 20;
        let fixture = Fixture::start(&["--max-total-queued", "24MiB"]);
        let session = fixture.connect().await;
        let spins = session.get_function("crash.spin_with").await.unwrap();
        // The first one runs without end, and the others wait behind it. Eight frames of 1 MiB are
        // free for each session, which leaves room for five of them.
        let mut waiting: Vec<_> = (0..6).map(|_| spins.call::<()>(("x".repeat(PIECE),)).start()).collect();
        let error = waiting.pop().unwrap().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LimitExceeded, "{error}");
        assert!(error.message().contains("max_total_queued is 25165824"), "{error}");

        let other = fixture.connect().await;
        let count = other.function::<(String,), u64>("len").await.unwrap();
        assert_eq!(count.call(("small".to_owned(),)).await.unwrap(), 5);
        let large = || count.call(("y".repeat(12 << 20),));
        let error = large().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LimitExceeded, "{error}");
        drop((waiting, session));
        let started = Instant::now();
        while let Err(error) = large().await {
            assert_eq!(error.kind(), ErrorKind::LimitExceeded, "{error}");
            assert!(started.elapsed() < TIME_LIMIT, "the room is not given back");
        }
    });
}

/// Copies from the tensor until that fails.
async fn loop_of_copies(session: &Session, tensor: &rpc_core::RemoteTensor) -> RpcError {
    loop {
        if let Err(error) = session.copy_from_remote(tensor).await {
            return error;
        }
    }
}

/// The ticket is for the server, which has the session in another process.
fn isolated_sessions_need_tickets_and_a_crash_frees_the_slot() {
    run(async {
        let at = vec!["tcp://127.0.0.1:0".parse().unwrap()];
        let tracker = Tracker::start(&TrackerConfig { listen: at, ..TrackerConfig::default() }).await.unwrap();
        let address = tracker.server.addresses()[0].to_string();
        let fixture = Fixture::start(&["--tracker", &address, "--tracker-key", "board"]);
        let client = TrackerClient::connect(&address).await.unwrap();
        for _ in 0..3 {
            // The server has one slot, for which each request waits.
            let loan = client.request(&ServerRequest::new("board").timeout(TIME_LIMIT)).await.unwrap();
            let add = loan.session().function::<(i64, i64), i64>("add").await.unwrap();
            assert_eq!(add.call((1, 2)).await.unwrap(), 3);
            let holders = tracker.tracker.summary().servers.remove(0).holders;
            assert_eq!(holders.len(), 1, "{holders:?}");
            let error = Connector::new().connect(fixture.server.address()).await.unwrap_err().into_rpc_error();
            assert_eq!(error.application_kind(), Some(TICKET_REFUSED), "{error}");
            crash(loan.session(), "crash.segv").await;
        }
    });
}
