//! Leases on devices, of sessions in the server's process and in processes of their own.

use std::future::IntoFuture;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use rpc_core::client::{Files, LeaseOptions, LeaseRequest};
use rpc_core::{DataType, Device, ErrorKind, Lane, Pack, RemoteObject, RemoteTensor, Session};
use rpc_server::ServerProcess;
use rpc_server::builtins::{LeasedDevice, ServerInfo};
use rpc_transports::Connector;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value as Json;

/// Time limit against hanging, far longer than any step takes.
const TIME_LIMIT: Duration = Duration::from_secs(30);

const CPU: Device = Device::cpu();

struct Fixture {
    server: ServerProcess,
    folder: tempfile::TempDir,
}

impl Fixture {
    fn start(isolate: &str) -> Self {
        Self::start_with(isolate, &[])
    }

    fn start_with(isolate: &str, args: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = server("serve");
        command.args(["--isolate", isolate, "--workdir"]).arg(folder.path().join("work")).args(args);
        Self { server: ServerProcess::spawn(command).unwrap(), folder }
    }

    async fn connect(&self) -> Session {
        Connector::new().connect(self.server.address()).await.unwrap()
    }

    fn cli(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rpc-cli"));
        command.args(["lease", "cpu:0", self.server.address(), "--json"]).args(args).stdin(Stdio::null());
        command
    }
}

fn server(command: &str) -> Command {
    let mut program = crate::server_program();
    program.args([command, "--listen", "tcp://127.0.0.1:0", "--exit-with-stdin", "--log-level", "error"]);
    program
}

/// Runs a test with a server of each kind of sessions.
async fn with_each_isolation(test: impl AsyncFn(&Fixture)) {
    with_each_isolation_and(&[], test).await;
}

async fn with_each_isolation_and(args: &[&str], test: impl AsyncFn(&Fixture)) {
    for isolate in ["none", "process"] {
        let fixture = Fixture::start_with(isolate, args);
        tokio::time::timeout(TIME_LIMIT, test(&fixture)).await.unwrap_or_else(|_| panic!("{isolate}: the test hangs"));
    }
}

async fn info(session: &Session) -> ServerInfo {
    let Pack(info) = session.get_function("rpc.info").await.unwrap().call(()).await.unwrap();
    info
}

/// Waits until the server has no leases and no requests.
async fn until_free(session: &Session) {
    while !info(session).await.leases.is_empty() {
        tokio::task::yield_now().await;
    }
}

async fn request(session: &Session, priority: i32) -> LeaseRequest {
    session.request_lease(CPU, &LeaseOptions::default().priority(priority)).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_goes_from_one_to_the_next_by_priority_and_arrival() {
    with_each_isolation(async |fixture| {
        let sessions = [(); 4].map(|()| fixture.connect());
        let [holder, first, urgent, cancelled] = sessions;
        let (holder, first, urgent, cancelled) = tokio::join!(holder, first, urgent, cancelled);
        let holder_request = request(&holder, 0).await;
        let lease = holder_request.granted().await.unwrap();
        let first_request = request(&first, 0).await;
        let cancelled_request = request(&cancelled, 0).await;
        let urgent_request = request(&urgent, 1).await;
        let ahead = [&urgent_request, &first_request, &cancelled_request].map(|request| request.ahead().into_future());
        let [of_urgent, of_first, of_cancelled] = ahead;
        assert_eq!((of_urgent.await.unwrap(), of_first.await.unwrap(), of_cancelled.await.unwrap()), (1, 2, 3));
        // Each session sees who has the device, and who is next.
        let leased = info(&first).await.leases.pop().unwrap();
        let of = leased.holder.unwrap();
        let next: Vec<_> = leased.next.iter().map(|next| (&*next.client.identity, next.priority)).collect();
        assert_eq!(of.identity, "anonymous");
        assert_eq!(next, [("anonymous", 1), ("anonymous", 0), ("anonymous", 0)]);
        assert!(leased.next.iter().all(|next| next.client.session != of.session && next.waited_seconds >= 0.0));

        // One that stops waiting leaves the queue, also while its wait is in progress.
        let wait = cancelled_request.granted().start();
        drop((wait, cancelled_request));
        let waiting = async || {
            let Some(LeasedDevice { device, waiting, .. }) = info(&holder).await.leases.pop() else { return 0 };
            assert_eq!(device, "cpu:0");
            waiting
        };
        while waiting().await > 2 {}

        lease.release().await.unwrap();
        assert_eq!(holder_request.granted().await.unwrap_err().kind(), ErrorKind::Cancelled);
        let urgent_lease = urgent_request.granted().await.unwrap();
        assert!(urgent_lease.waited() > Duration::ZERO);
        assert_eq!(first_request.ahead().await.unwrap(), 1);
        // The lease ends with its session.
        drop((urgent_lease, urgent_request, urgent));
        let first_lease = first_request.granted().await.unwrap();
        assert!(first_lease.expires_in() > Duration::from_secs(3000), "{first_lease:?}");
        drop((first_lease, first_request));
        until_free(&first).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_keeps_a_lease_for_too_long_is_ended() {
    with_each_isolation(async |fixture| {
        let next = fixture.connect().await;
        let mut max = Duration::from_millis(50);
        // The lease must not end before its holder knows of it and has been stopped. Where the
        // machine stands still for so long, another holder has a longer one.
        let (holder, _lease) = loop {
            let holder = fixture.connect().await;
            let pid = info(&holder).await.pid;
            let has_process = pid != fixture.server.id();
            max = max.max(Duration::from_millis(if has_process { 1000 } else { 50 }));
            match holder.lease(CPU, &LeaseOptions::default().max_duration(max)).await {
                Ok(lease) => {
                    assert!(lease.expires_in() <= max);
                    // A process that does nothing any more is ended all the same.
                    let stop = || kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), Signal::STOP);
                    if !has_process || stop().is_ok() {
                        break (holder, lease);
                    }
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::SessionTimeout, "{error}"),
            }
            max *= 2;
        };
        let next_lease = next.lease(CPU, &LeaseOptions::default()).await.unwrap();
        let error = holder.ended().await;
        assert_eq!(error.kind(), ErrorKind::SessionTimeout);
        assert!(error.message().contains("its lease on cpu:0"), "{error}");
        drop(next_lease);
        until_free(&next).await;
    })
    .await;
}

/// A client that reads nothing does not keep the device until the server stops waiting for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_does_not_take_its_replies_loses_the_device_in_time() {
    with_each_isolation(async |fixture| {
        let address = fixture.server.address().to_owned();
        // Returns no lease if it has ended before the client knows of it.
        let hold = move |max| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let held = runtime.block_on(async {
                let holder: Session = Connector::new().connect(&address).await.unwrap();
                Files::new(&holder).put_bytes("file", vec![0; 1 << 20]).await.unwrap();
                let open = holder.get_function("rpc.file.open").await.unwrap();
                let (reader, _) = open.call::<(RemoteObject, u64)>(("file",)).await.unwrap();
                let read = holder.get_function("rpc.file.read").await.unwrap();
                let lease = match holder.lease(CPU, &LeaseOptions::default().max_duration(max)).await {
                    Ok(lease) => lease,
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::SessionTimeout, "{error}");
                        return None;
                    }
                };
                // More than the buffers of the connection hold.
                let mut replies: Vec<_> =
                    (0..32).map(|_| read.call::<Vec<u8>>((&reader, 0, 1 << 20)).start()).collect();
                // With the first one answered all are on their way.
                let _ = replies.remove(0).await;
                Some((lease, replies))
            });
            // Nothing reads any more once the runtime does not run.
            (runtime, held)
        };
        let mut max = Duration::from_millis(200);
        let (runtime, held) = loop {
            let hold = hold.clone();
            let (runtime, held) = tokio::task::spawn_blocking(move || hold(max)).await.unwrap();
            if held.is_some() {
                break (runtime, held);
            }
            // The machine stood still for as long as the lease lasts.
            runtime.shutdown_background();
            max *= 2;
        };
        let next = fixture.connect().await;
        // Below the 15 s of silence after which the server gives the holder up in any case.
        let next_lease = tokio::time::timeout(Duration::from_secs(10), next.lease(CPU, &LeaseOptions::default()));
        drop(next_lease.await.expect("the device is free before the holder counts as gone").unwrap());
        runtime.shutdown_background();
        drop(held);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_cannot_be_granted_are_refused() {
    with_each_isolation(async |fixture| {
        let session = fixture.connect().await;
        let request = async |device, options: LeaseOptions| session.lease(device, &options).await.unwrap_err();
        let error = request(Device::new(CPU.kind, 9), LeaseOptions::default()).await;
        assert_eq!(error.kind(), ErrorKind::DeviceUnavailable, "{error}");
        let error = request(CPU, LeaseOptions::default().max_duration(Duration::ZERO)).await;
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        // A session has at most 16 requests.
        let object = session.get_function("rpc.lease.request").await.unwrap();
        let requests: Vec<_> = (0..17).map(|_| object.call::<RemoteObject>((CPU, 0, ())).start()).collect();
        let mut refused = Vec::new();
        let mut queued = Vec::new();
        for request in requests {
            match request.await {
                Ok(request) => queued.push(request),
                Err(error) => refused.push(error),
            }
        }
        assert!(matches!(&refused[..], [error] if error.kind() == ErrorKind::LimitExceeded), "{refused:?}");
        // Waits that are cancelled free the places of admitted requests, of which there are 1,024.
        let wait = session.get_function("rpc.lease.wait").await.unwrap();
        for _ in 0..2 {
            let waits: Vec<_> =
                (0..1000).map(|_| wait.call::<(u64, u64)>((&queued[1],)).concurrent().start()).collect();
            info(&session).await;
            drop(waits);
        }
        drop(queued);
        until_free(&session).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_without_a_lease_wait_for_the_device_where_the_operator_says_so() {
    with_each_isolation_and(&["--lease-policy", "cpu=refuse,cpu:0=wait"], async |fixture| {
        let (holder, other, third) = tokio::join!(fixture.connect(), fixture.connect(), fixture.connect());
        let before = other.upload(&[2], &[1_u8, 2]).await.unwrap();
        let lease = holder.lease(CPU, &LeaseOptions::default()).await.unwrap();
        holder.upload(&[1], &[1_u8]).await.unwrap();
        let error = other.alloc(CPU, DataType::U8, &[1]).timeout(Duration::from_millis(20)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);

        // Calls without tensors go on, and so do other lanes and the holder.
        let waiting = other.download::<u8>(&before).lane(Lane(1)).start();
        let echo = other.get_function("rpc.echo").await.unwrap();
        let echoed = echo.call::<RemoteTensor>((&before,)).lane(Lane(2)).start();
        assert_eq!(echo.call::<i64>((7,)).await.unwrap(), 7);
        // One that asks for a lease while its own requests wait gets the device in its turn.
        let own = other.request_lease(CPU, &LeaseOptions::default()).await.unwrap();
        let of_third = third.alloc(CPU, DataType::U8, &[1]).start();
        holder.upload(&[1], &[1_u8]).await.unwrap();

        // A holder that dies is no holder once its process has ended.
        let pid = info(&holder).await.pid;
        if pid != fixture.server.id() {
            kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), Signal::KILL).unwrap();
        }
        drop((lease, holder));
        assert_eq!(waiting.await.unwrap(), [1, 2]);
        echoed.await.unwrap();
        let lease = own.granted().await.unwrap();
        assert_eq!(info(&other).await.leases.len(), 1);
        lease.release().await.unwrap();
        of_third.await.unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_without_a_lease_are_refused_where_the_operator_says_so() {
    with_each_isolation_and(&["--lease-policy", "cuda=wait", "--lease-policy", "cpu=refuse"], async |fixture| {
        let (holder, other) = tokio::join!(fixture.connect(), fixture.connect());
        let lease = holder.lease(CPU, &LeaseOptions::default()).await.unwrap();
        for first in [true, false] {
            let error = other.alloc(CPU, DataType::U8, &[1]).await.unwrap_err();
            assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::Busy, false), "{first} {error}");
            assert!(error.message().contains("another session holds a lease on cpu:0"), "{error}");
        }
        lease.release().await.unwrap();
        until_free(&other).await;
        other.alloc(CPU, DataType::U8, &[1]).await.unwrap();
    })
    .await;
}

/// Function call of a session that uses the device from [`begin`](Self::begin) to
/// [`end`](Self::end).
struct LongUse {
    reply: tokio::task::JoinHandle<rpc_core::Result<Vec<f64>>>,
    end: std::sync::mpsc::Sender<()>,
}

impl LongUse {
    /// Returns once the function runs.
    async fn begin(session: &Session) -> Self {
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let (end, ended) = std::sync::mpsc::channel();
        let once = std::sync::Mutex::new(Some((begun, ended)));
        let callback = session.callback(move |_: RemoteTensor| {
            if let Some((begun, ended)) = once.lock().unwrap().take() {
                _ = begun.send(());
                _ = ended.recv_timeout(TIME_LIMIT);
            }
            0
        });
        let callback = callback.await.unwrap();
        let tensor = session.upload(&[1], &[7_u8]).await.unwrap();
        let time = session.get_function("rpc.time_function").await.unwrap();
        let reply =
            tokio::spawn(
                async move { time.call::<Vec<f64>>((&callback, 1, 1, 0.0, 0, 0, &tensor)).concurrent().await },
            );
        has_begun.await.expect("the function runs");
        Self { reply, end }
    }

    async fn end(self) {
        self.end.send(()).unwrap();
        self.reply.await.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_begins_when_the_requests_of_other_sessions_have_ended() {
    with_each_isolation_and(&["--lease-policy", "cpu=wait"], async |fixture| {
        let (user, next, third) = tokio::join!(fixture.connect(), fixture.connect(), fixture.connect());
        let running = LongUse::begin(&user).await;
        let lease_request = request(&next, 0).await;
        assert_eq!(lease_request.ahead().await.unwrap(), 0);
        let wait = lease_request.granted().timeout(Duration::from_millis(50)).await;
        assert_eq!(wait.unwrap_err().kind(), ErrorKind::DeadlineExceeded);
        // The processes of the others have to say that they use nothing.
        let leased = loop {
            let mut leases = info(&third).await.leases;
            let leased = leases.pop().expect("a request waits");
            if leased.used_by == 1 {
                break leased;
            }
        };
        assert_eq!((leased.held_seconds, leased.waiting), (0.0, 1));
        // No other session begins to use the device, the user neither; the one that is next may.
        for other in [&user, &third] {
            let error = other.alloc(CPU, DataType::U8, &[1]).concurrent().timeout(Duration::from_millis(20)).await;
            assert_eq!(error.unwrap_err().kind(), ErrorKind::DeadlineExceeded);
        }
        next.alloc(CPU, DataType::U8, &[1]).await.unwrap();
        running.end().await;
        let lease = lease_request.granted().await.unwrap();

        // What the holder has begun goes on after its lease, and the next lease waits for it.
        let running = LongUse::begin(&next).await;
        let of_third = request(&third, 0).await;
        lease.release().await.unwrap();
        let wait = of_third.granted().timeout(Duration::from_millis(50)).await;
        assert_eq!(wait.unwrap_err().kind(), ErrorKind::DeadlineExceeded);
        running.end().await;
        drop(of_third.granted().await.unwrap());
        drop(of_third);
        until_free(&third).await;
        user.alloc(CPU, DataType::U8, &[1]).await.unwrap();
    })
    .await;
}

/// The uses of a process end with it, also of one that does not answer any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_dies_or_stops_keeps_no_device_from_others() {
    let fixture = Fixture::start_with("process", &["--lease-policy", "cpu=wait", "--keep-alive", "2s"]);
    for signal in [Signal::KILL, Signal::STOP] {
        let (user, idle, next) = tokio::join!(fixture.connect(), fixture.connect(), fixture.connect());
        // Sessions whose process has not begun may not use anything yet.
        let pids = [info(&user).await.pid, info(&idle).await.pid];
        let running = LongUse::begin(&user).await;
        for pid in pids {
            kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
        }
        let lease = tokio::time::timeout(TIME_LIMIT, next.lease(CPU, &LeaseOptions::default()));
        drop(lease.await.expect("the device is granted").unwrap());
        assert!(running.reply.await.unwrap().is_err());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_requests_wait_for_the_end_of_one_lease() {
    let fixture = Fixture::start_with("none", &["--lease-policy", "cpu=wait"]);
    let holder = fixture.connect().await;
    let lease = holder.lease(CPU, &LeaseOptions::default()).await.unwrap();
    let mut waiting = Vec::new();
    for _ in 0..10 {
        let session = fixture.connect().await;
        for _ in 0..1000 {
            waiting.push(session.alloc(CPU, DataType::U8, &[1]).concurrent().start());
        }
        // Those before it have been read.
        info(&session).await;
    }
    // Half of them leave.
    waiting.truncate(5000);
    lease.release().await.unwrap();
    for request in waiting {
        tokio::time::timeout(TIME_LIMIT, request).await.unwrap().unwrap();
    }
}

/// 10,000 requests for one lease: each is charged, and those that stay are granted in their turn.
#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_requests_for_a_lease_are_granted_in_their_order() {
    const SESSIONS: u64 = 625;
    const EACH: u64 = 16;
    rpc_server::raise_file_limit();
    let limits = ["--max-sessions", "1000", "--max-sessions-per-peer", "1000", "--max-total-open-files", "100000"];
    let fixture = Fixture::start_with("none", &limits);
    let holder = fixture.connect().await;
    let lease = holder.lease(CPU, &LeaseOptions::default()).await.unwrap();
    let charged_before = info(&holder).await.memory_bytes;
    let mut waiting = Vec::new();
    for _ in 0..SESSIONS {
        let session = fixture.connect().await;
        let requests: Vec<_> =
            (0..EACH).map(|_| session.request_lease(CPU, &LeaseOptions::default()).start()).collect();
        let mut queued = Vec::new();
        for request in requests {
            queued.push(request.await.unwrap());
        }
        waiting.push((session, queued));
    }
    let charged = info(&holder).await.memory_bytes - charged_before;
    assert!(charged >= SESSIONS * EACH * 1024, "{charged}");
    let leased = info(&holder).await.leases.pop().unwrap();
    assert_eq!((leased.waiting, leased.next.len()), (SESSIONS * EACH, 3));
    lease.release().await.unwrap();
    // If a later session had its turn before, it would keep the device, and the wait would not end.
    for (at, (session, queued)) in waiting.into_iter().enumerate() {
        if at % 10 != 0 {
            // Most leave before their turn.
            continue;
        }
        // Those of one session are awaited together: they were sent together, and are queued in any
        // order.
        let mut turns = tokio::task::JoinSet::new();
        for request in &queued {
            let granted = request.granted().start();
            turns.spawn(async move { granted.await.unwrap().release().await.unwrap() });
        }
        let held = tokio::time::timeout(TIME_LIMIT, turns.join_all()).await;
        assert_eq!(held.expect("all of a session have their turn").len() as u64, EACH);
        drop((queued, session));
    }
    until_free(&holder).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_reach_through_hops_and_relays() {
    let relay = ServerProcess::spawn(server("relay")).unwrap();
    let board = format!("{}/board", relay.address());
    let fixture = Fixture::start_with("none", &["--relay", &board, "--lease-policy", "cpu=wait"]);
    let hop = ServerProcess::spawn({
        let mut hop = server("serve");
        hop.args(["--allow-forward", "tcp://127.0.0.1:*", "--workdir"]).arg(fixture.folder.path().join("hop"));
        hop
    });
    let hop = hop.unwrap();
    let holder: Session = Connector::new().via(hop.address()).connect(fixture.server.address()).await.unwrap();
    // The server may not wait at the relay yet.
    let other = tokio::time::timeout(TIME_LIMIT, async {
        loop {
            if let Ok(session) = Connector::new().connect(&board).await {
                return session;
            }
        }
    });
    let other = other.await.unwrap();
    let lease = holder.lease(CPU, &LeaseOptions::default()).await.unwrap();
    let request = request(&other, 0).await;
    assert_eq!(request.ahead().await.unwrap(), 1);
    let waiting = other.alloc(CPU, DataType::U8, &[1]).start();
    holder.alloc(CPU, DataType::U8, &[1]).await.unwrap();
    // The lease ends with the hop.
    drop(hop);
    assert!(holder.lease(CPU, &LeaseOptions::default()).await.is_err());
    drop(request.granted().timeout(TIME_LIMIT).await.unwrap());
    waiting.await.unwrap();
    drop(lease);
}

/// Runs `command` apart from the runtime.
async fn output(mut command: Command) -> (Option<i32>, String, String) {
    let run = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (run.status.code(), text(run.stdout), text(run.stderr))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tool_leases_a_device_for_a_program_or_until_interrupted() {
    let fixture = Fixture::start("none");
    let (cli, address) = (env!("CARGO_BIN_EXE_rpc-cli"), fixture.server.address());
    let script = r#""$0" info "$1" --json; exit 7"#;
    let (code, stdout, stderr) = output(fixture.cli(&["--", "sh", "-c", script, cli, address])).await;
    assert_eq!(code, Some(7), "{stderr}");
    let documents: Vec<Json> = stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let [info, report] = &documents[..] else { panic!("{stdout}") };
    assert_eq!(info["leases"][0]["device"], "cpu:0");
    assert_eq!(info["leases"][0]["holder"]["identity"], "anonymous");
    assert_eq!((&report["device"], &report["exit_code"]), (&"cpu:0".into(), &7.into()));
    assert!(report["held_seconds"].as_f64() > Some(0.0), "{report}");

    let mut time = Command::new(cli);
    time.args(["time", address, "rpc.info", "--lease", "cpu:0", "--flush-cache=64KiB", "--repeat", "3", "--json"]);
    let (code, stdout, stderr) = output(time).await;
    let times: Json = serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{code:?} {stderr}"));
    assert!(times["count"] == 3 && times["p95"] == times["max"], "{times}");

    // A program that takes too long is ended, and so is one that was killed reported.
    let (code, _, stderr) = output(fixture.cli(&["--for", "50ms", "--", "sleep", "1000"])).await;
    assert!(code == Some(124) && stderr.contains("the program took longer than"), "{code:?} {stderr}");
    // The output ends only when those that the program has started have ended, too.
    let deaf = "(trap '' TERM; exec sleep 1000) & wait";
    for (args, expected) in [
        (&["--for", "50ms", "--", "sh", "-c", "sleep 1000 & wait"][..], 124),
        (&["--for", "50ms", "--", "sh", "-c", deaf], 124),
        (&["--", "sh", "-c", "sleep 1000 & exit 3"], 3),
    ] {
        let (code, ..) = output(fixture.cli(args)).await;
        assert_eq!(code, Some(expected), "{args:?}");
    }
    let (code, ..) = output(fixture.cli(&["--", "sh", "-c", "kill -9 $$"])).await;
    assert_eq!(code, Some(137));
    let (code, _, stderr) = output(fixture.cli(&["--", "/no/such/program"])).await;
    assert!(code == Some(1) && stderr.contains("/no/such/program"), "{code:?} {stderr}");

    let mut holder = fixture.cli(&[]).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdout = BufReader::new(holder.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    assert!(line.contains("waited_seconds"), "{line}");
    // Each program says what it waits for, unless the machine was too slow to connect in its time.
    let waits = async |program: &dyn Fn(&str) -> Command, text: &str| {
        let mut last = String::new();
        for limit in ["500ms", "5s", "30s"] {
            let (code, _, stderr) = output(program(limit)).await;
            assert_eq!(code, Some(124), "{stderr}");
            if stderr.contains(text) {
                return stderr;
            }
            last = stderr;
        }
        panic!("it does not say '{text}': {last}");
    };
    waits(&|limit| fixture.cli(&["--timeout", limit]), "waiting for cpu:0").await;
    let time = |limit: &str| {
        let mut time = Command::new(cli);
        time.args(["time", address, "rpc.noop", "--lease", "cpu:0", "--timeout", limit]);
        time
    };
    let stderr = waits(&time, "waiting for cpu:0: 1 before").await;
    assert!(stderr.contains("before this request; held by anonymous (session "), "{stderr}");
    let end = |holder: &std::process::Child, signal| kill_process(Pid::from_child(holder), signal).unwrap();
    end(&holder, Signal::INT);
    line.clear();
    stdout.read_line(&mut line).unwrap();
    assert!(line.contains("held_seconds") && holder.wait().unwrap().success(), "{line}");

    // One that is killed leaves nothing.
    let mut holder = fixture.cli(&[]).stdout(Stdio::piped()).spawn().unwrap();
    BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
    end(&holder, Signal::KILL);
    holder.wait().unwrap();
    let session = fixture.connect().await;
    let lease = session.lease(CPU, &LeaseOptions::default()).timeout(TIME_LIMIT).await.unwrap();
    drop(lease);
}
