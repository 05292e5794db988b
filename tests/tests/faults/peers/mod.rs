//! Processes that tests kill, stop and measure: servers, trackers, clients, bad peers.

// Each test program uses a part of this module.
#![allow(dead_code, unreachable_pub)]

pub mod arrivals;
pub mod forge;
pub mod pace;
pub mod raw;
pub mod site;

use std::future::Future;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};
use std::{fs, io, panic, thread};

use rpc_core::proto::{FrameHeader, HEADER_LEN, Hello, Kind, MAGIC, Role};
use rpc_core::{FromReply, IntoArgs, Pack, Packed, Session};
use rpc_server::builtins::ServerInfo;
use rpc_transports::{Address, BlockingIo, ClientTls, Connector, Dial, Transports};
use rustix::process::{Pid, Signal, kill_process};

/// Program of the other processes.
pub const PROGRAM: &str = env!("CARGO_BIN_EXE_faults_peer");

/// Time within which the end of a peer must be noticed, measured by [`pace`].
pub const LIMIT: Duration = Duration::from_secs(1);

/// Keep-alive that is short enough for tests.
pub const KEEP_ALIVE: Duration = Duration::from_millis(200);

/// Time after which a silent peer counts as dead, with [`KEEP_ALIVE`].
pub const DEAD: Duration = Duration::from_millis(600);

/// Runs a test on a runtime of its own, and turns a hang into a failure.
pub fn run<F: Future<Output = ()>>(body: impl FnOnce() -> F + Send + 'static) {
    run_on(2, body);
}

/// Does the same as [`run`], with this number of threads; with none, all runs on the test's thread.
pub fn run_on<F: Future<Output = ()>>(workers: usize, body: impl FnOnce() -> F + Send + 'static) {
    const WATCHDOG: Duration = Duration::from_secs(120);
    let (done, outcome) = mpsc::channel::<()>();
    let test = thread::spawn(move || {
        let mut builder = match workers {
            0 => tokio::runtime::Builder::new_current_thread(),
            _ => tokio::runtime::Builder::new_multi_thread(),
        };
        let runtime = builder.worker_threads(workers.max(1)).enable_all().build().unwrap();
        runtime.block_on(body());
        runtime.shutdown_background();
        drop(done);
    });
    match outcome.recv_timeout(WATCHDOG) {
        Err(RecvTimeoutError::Timeout) => panic!("the test has not finished after {WATCHDOG:?}"),
        _ => test.join().unwrap_or_else(|failure| panic::resume_unwind(failure)),
    }
}

/// Does the same as [`run`], for tests with short keep-alives. A failure that shows nothing,
/// because the machine stood still, is followed by another run.
pub fn run_where_silence_counts<F: Future<Output = ()>>(body: impl Fn() -> F + Send + Sync + 'static) {
    let body = Arc::new(body);
    repeat_after_stalls(|| {
        let this = Arc::clone(&body);
        run(move || this());
    });
}

/// Runs a test whose peers have [`KEEP_ALIVE`], or other time limits of half a second or more. On a
/// machine where a call of a healthy server takes half of [`DEAD`] or more, peers are silent
/// through no fault of theirs. A loss proves nothing then, and the test is run again. Other
/// failures prove nothing where such a call takes so long that a peer that sends its pings in time
/// is given up.
pub fn repeat_after_stalls(body: impl Fn()) {
    const ATTEMPTS: usize = 4;
    // A run that takes longer hangs, and the next one would, too.
    const LONGEST: Duration = Duration::from_secs(55);
    for attempt in 1.. {
        let begun = pace::begin();
        let Err(failure) = panic::catch_unwind(panic::AssertUnwindSafe(&body)) else { return };
        let (took, worst) = (begun.elapsed(), pace::worst_since(begun));
        let text = failure.downcast_ref::<String>().map(String::as_str);
        let text = text.or(failure.downcast_ref::<&str>().copied()).unwrap_or_default();
        let words = ["PeerLost", "PeerSilent", "peer lost", "peer silent", "nothing was heard"];
        let is_of_silence = words.iter().any(|word| text.contains(word));
        let shows_nothing = if is_of_silence { DEAD / 2 } else { DEAD.saturating_sub(KEEP_ALIVE) };
        if attempt == ATTEMPTS || worst < shows_nothing || took > LONGEST {
            panic::resume_unwind(failure);
        }
        println!("a call of a server that is well took {worst:?} meanwhile: the test is run again");
    }
}

/// Loopback address of servers that are started again at the same port. No other test takes the
/// port meanwhile, because all others are at another address.
pub const RESTARTED: &str = "127.0.0.2";

/// Transport that is listened on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    Tcp,
    Unix,
    Tls,
    Quic,
}

impl Transport {
    pub fn scheme(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Unix => "unix",
            Self::Tls => "tls",
            Self::Quic => "quic",
        }
    }
}

/// Certificate of all servers in processes of their own, and its key, as PEM.
static CERTIFICATE: LazyLock<(String, String)> = LazyLock::new(|| {
    let made = rcgen::generate_simple_self_signed(["127.0.0.1", RESTARTED].map(str::to_owned)).unwrap();
    (made.cert.pem(), made.signing_key.serialize_pem())
});

/// Returns a connector that trusts the servers in processes of their own.
pub fn connector() -> Connector {
    // All clients of a program share one trust.
    static TRUST: LazyLock<ClientTls> = LazyLock::new(trust);
    Connector::new().tls(TRUST.clone())
}

/// Creates the trust of one client. Sessions with the same trust share a connection of QUIC.
pub fn trust() -> ClientTls {
    ClientTls::new(CERTIFICATE.0.as_bytes(), None).unwrap()
}

/// A server in a process of its own, which is killed when this value is dropped.
pub struct ServerPeer {
    child: Child,
    address: String,
    _folder: tempfile::TempDir,
}

impl ServerPeer {
    /// Starts a server with default settings, which forwards to any address. Over QUIC, where the
    /// system does not report the death of a client, it has [`KEEP_ALIVE`].
    pub fn start(transport: Transport) -> Self {
        match transport {
            Transport::Quic => Self::quick(transport),
            _ => Self::with(transport, &[]),
        }
    }

    /// Starts a server that notices silence after [`DEAD`].
    pub fn quick(transport: Transport) -> Self {
        Self::with(transport, &["--keep-alive", &format!("{}ms", KEEP_ALIVE.as_millis())])
    }

    /// Starts a server with these flags.
    pub fn with(transport: Transport, flags: &[&str]) -> Self {
        Self::spawn("serve", transport, None, flags)
    }

    /// Starts a server at the address of an earlier one.
    pub fn again(transport: Transport, address: &str) -> Self {
        Self::spawn("serve", transport, Some(address), &[])
    }

    /// Starts a relay that notices silence after [`DEAD`], at any address or at that of an earlier
    /// one.
    pub fn relay(transport: Transport, address: Option<&str>) -> Self {
        Self::spawn("relay", transport, address, &["--keep-alive", &format!("{}ms", KEEP_ALIVE.as_millis())])
    }

    fn spawn(role: &str, transport: Transport, address: Option<&str>, flags: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let address = match (address, transport) {
            (Some(address), _) => address.to_owned(),
            (None, other) if role == "relay" => format!("{}://{RESTARTED}:0", other.scheme()),
            (None, Transport::Unix) => format!("unix:{}", folder.path().join("socket").display()),
            (None, other) => format!("{}://127.0.0.1:0", other.scheme()),
        };
        let mut command = Command::new(PROGRAM);
        command.args([role, "--listen", &address, "--log-level", "error"]).args(flags);
        let (certificate, key) = &*CERTIFICATE;
        let mut files = vec![("cert.pem", certificate, "--cert"), ("key.pem", key, "--cert-key")];
        if role == "serve" {
            command.args(["--allow-forward", "*,unix:*,exec:*", "--workdir"]).arg(folder.path().join("work"));
            files.push(("cert.pem", certificate, "--forward-ca"));
        }
        for (name, content, flag) in files {
            let file = folder.path().join(name);
            fs::write(&file, content).unwrap();
            command.arg(flag).arg(&file);
        }
        // The process ends with the test program.
        command.arg("--exit-with-stdin").stdin(Stdio::piped());
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on ").expect("it says where it listens").to_owned();
        Self { child, address, _folder: folder }
    }

    pub fn address(&self) -> &str {
        &self.address
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
    }

    /// Waits until the system has freed all resources of the killed process, its port included.
    pub fn exit(&mut self) {
        self.child.wait().unwrap();
    }

    pub fn signal(&self, with: Signal) {
        signal(self.pid(), with);
    }

    /// Waits until the process has ended, within [`LIMIT`], and returns its exit status.
    pub fn exit_code(&mut self) -> Option<i32> {
        let since = pace::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(pace::since(since) <= LIMIT, "the server has not ended after {LIMIT:?}");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for ServerPeer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A tracker in a process of its own, which is killed when this value is dropped.
pub struct TrackerPeer {
    child: Child,
    address: String,
    page: Option<String>,
}

impl TrackerPeer {
    /// Starts a tracker on TCP, with these flags, at an address where it may be started again.
    pub fn start(flags: &[&str]) -> Self {
        Self::at(&format!("tcp://{RESTARTED}:0"), flags)
    }

    /// Starts a tracker at this address, which may be that of an earlier one.
    pub fn at(address: &str, flags: &[&str]) -> Self {
        let mut command = Command::new(PROGRAM);
        command.args(["tracker", "--listen", address, "--log-level", "error"]).args(flags);
        command.arg("--exit-with-stdin").stdin(Stdio::piped());
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        let mut line = |what: &str| {
            let mut line = String::new();
            said.read_line(&mut line).unwrap();
            line.trim().strip_prefix(what).expect("it says where it is").to_owned()
        };
        let address = line("listening on ");
        let page = flags.contains(&"--http").then(|| line("status page on "));
        Self { child, address, page }
    }

    pub fn address(&self) -> &str {
        &self.address
    }

    /// Returns the address of the tracker's page, if it has one.
    pub fn page(&self) -> Option<&str> {
        self.page.as_deref()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for TrackerPeer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A client in a process of its own, which holds objects and a tensor. It is killed when this value
/// is dropped.
pub struct ClientPeer {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    /// Process id of the server.
    pub server: u32,
}

impl ClientPeer {
    pub fn start(form: &str, address: &str, objects: u64, bytes: u64) -> Self {
        Self::with(form, address, objects, bytes, &[])
    }

    /// Starts a client that also calls `hold.tagged` with this tag, and copies without end.
    pub fn busy(form: &str, address: &str, objects: u64, bytes: u64, tag: &str) -> Self {
        Self::with(form, address, objects, bytes, &["--busy", tag])
    }

    /// Starts a client without waiting for its session.
    pub fn connecting(address: &str) -> Self {
        Self::spawn("async", address, 0, 0, &[])
    }

    /// Starts a client, and waits for its session. Tries again if a busy machine was so slow that
    /// the server has given the client up.
    fn with(form: &str, address: &str, objects: u64, bytes: u64, flags: &[&str]) -> Self {
        let mut attempts = (0..5).map(|_| Self::try_with(form, address, objects, bytes, flags));
        attempts.find_map(|attempt| attempt).expect("the client says who serves it")
    }

    fn try_with(form: &str, address: &str, objects: u64, bytes: u64, flags: &[&str]) -> Option<Self> {
        let mut this = Self::spawn(form, address, objects, bytes, flags);
        this.server = this.line().parse().ok()?;
        Some(this)
    }

    fn spawn(form: &str, address: &str, objects: u64, bytes: u64, flags: &[&str]) -> Self {
        let mut command = Command::new(PROGRAM);
        command.args(["client", form, address, &objects.to_string(), &bytes.to_string(), &CERTIFICATE.0]).args(flags);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, stdin, stdout, server: 0 }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
    }

    pub fn signal(&self, with: Signal) {
        signal(self.child.id(), with);
    }

    /// Waits for the end of the client's session, and returns the kind of error that ended it.
    pub fn reason(&mut self) -> String {
        self.stdin.write_all(b"\n").unwrap();
        self.line()
    }
}

impl Drop for ClientPeer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a signal. With [`Signal::STOP`], waits until every thread has stopped.
pub fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
    let has_stopped = |thread: io::Result<fs::DirEntry>| {
        let stat = fs::read_to_string(thread.unwrap().path().join("stat")).unwrap_or_default();
        stat.rsplit(')').next().unwrap_or_default().trim_start().starts_with('T')
    };
    while signal == Signal::STOP && !fs::read_dir(format!("/proc/{pid}/task")).unwrap().all(has_stopped) {
        thread::yield_now();
    }
}

/// Returns true if the process runs. A dead process that has not been reaped does not run.
pub fn is_running(pid: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    let state = stat.rsplit(')').next().unwrap().trim_start();
    !state.starts_with(['Z', 'X'])
}

/// Returns a field of `/proc/PID/status`, in bytes.
pub fn memory(pid: u32, field: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Resets the peak of a process's memory.
pub fn reset_peak(pid: u32) {
    fs::write(format!("/proc/{pid}/clear_refs"), "5").unwrap();
}

/// Returns the number of processes that a process has started and not reaped.
pub fn children(pid: u32) -> usize {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    lists.map(|list| list.split_whitespace().count()).sum()
}

pub fn threads(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/task")).unwrap().count()
}

/// Session whose functions are called by name.
#[derive(Clone)]
pub struct Calls(pub Session);

impl Calls {
    pub async fn to(address: &str) -> Self {
        Self::over(connector().connect(address).await.unwrap())
    }

    pub fn over(session: Session) -> Self {
        Self(session)
    }

    pub async fn run<R: FromReply>(&self, name: &str, args: impl IntoArgs) -> R {
        let function = self.0.get_function(name).concurrent().await.unwrap();
        function.call(args).concurrent().await.unwrap()
    }

    /// Returns what all sessions of the server hold.
    pub async fn info(&self) -> ServerInfo {
        let Pack(info) = self.run("rpc.info", ()).await;
        info
    }
}

/// Waits until `condition` holds, for no longer than `limit`. Returns the time that it took.
pub async fn within<F: Future<Output = bool>>(
    limit: Duration,
    what: &str,
    mut condition: impl FnMut() -> F,
) -> Duration {
    let started = Instant::now();
    while !condition().await {
        assert!(started.elapsed() < limit, "{what}: not so after {limit:?}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    started.elapsed()
}

/// Does the same as [`within`], with a limit measured by [`pace`].
pub async fn at_pace<F: Future<Output = bool>>(
    limit: Duration,
    what: &str,
    mut condition: impl FnMut() -> F,
) -> Duration {
    let since = pace::now();
    while !condition().await {
        let took = pace::since(since);
        assert!(took < limit, "{what}: not so after {took:?}, and the limit is {limit:?}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    pace::since(since)
}

/// Blocking TCP peer that writes raw bytes.
pub struct RawPeer {
    pub io: BlockingIo,
}

impl RawPeer {
    pub fn connect(address: &str) -> Self {
        let address: Address = address.parse().unwrap();
        let channel = Transports::default().dial_blocking(&address, &Dial::default()).unwrap().unwrap();
        Self { io: channel.into_parts().0 }
    }

    /// Connects, and completes the handshake of a client.
    pub fn greeted(address: &str) -> Self {
        let mut this = Self::connect(address);
        this.write(&hello(&Hello::new(Role::Client)));
        this.write(&FrameHeader::control(Kind::Accept, 0).encode());
        let mut magic = [0; MAGIC.len()];
        (&this.io).read_exact(&mut magic).unwrap();
        assert_eq!(magic, MAGIC);
        assert_eq!(this.frame().map(|(header, _)| header.kind), Some(Kind::Hello));
        assert_eq!(this.frame().map(|(header, _)| header.kind), Some(Kind::Accept));
        this
    }

    /// Writes bytes, and ignores a closed connection.
    pub fn write(&mut self, bytes: &[u8]) {
        let _ = (&self.io).write_all(bytes);
    }

    pub fn half_close(&self) {
        self.io.shutdown(Shutdown::Write).unwrap();
    }

    /// Reads the next frame. Returns `None` at the end of the stream.
    pub fn frame(&mut self) -> Option<(FrameHeader, Vec<u8>)> {
        let mut header = [0; HEADER_LEN];
        (&self.io).read_exact(&mut header).ok()?;
        let header = FrameHeader::decode(&header, usize::MAX, usize::MAX).unwrap();
        let mut body = vec![0; header.body_len as usize + header.payload_len as usize];
        (&self.io).read_exact(&mut body).ok()?;
        Some((header, body))
    }

    /// Reads to the end of the stream. Returns the bytes, and the time that it took by [`pace`].
    pub fn rest(&mut self) -> (Vec<u8>, Duration) {
        let since = pace::now();
        let mut rest = Vec::new();
        match (&self.io).read_to_end(&mut rest) {
            Ok(_) => {}
            Err(error) => assert!(
                matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe),
                "the connection is cut: {error}"
            ),
        }
        (rest, pace::since(since))
    }
}

/// Returns the magic and the frame of a hello.
pub fn hello(hello: &Hello) -> Vec<u8> {
    // Identity message of an anonymous side.
    let hello = Hello { identities: vec!["none".into()], ..hello.clone() };
    let body = Packed::encode(&hello).unwrap().as_bytes().to_vec();
    let mut bytes = MAGIC.to_vec();
    bytes.extend(FrameHeader::control(Kind::Hello, body.len() as u32).encode());
    bytes.extend(body);
    bytes
}
