//! A program with a `main` of its own, which adds a dialect to the daemon and a session opener to
//! the command line, and its tests.
//!
//! Started with `OWN_MAIN` in its environment it is the daemon or the command line, else the tests.

// Tests may unwrap, because a panic is how a test fails.
#![allow(clippy::unwrap_used)]

mod own_harness;

use std::env;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use rpc_core::{ErrorKind, LocalSession, Registry, RpcError, Session};
use rpc_transports::{
    Address, BoxFuture, ConnectError, Connector, Dialect, DialectConnection, DialectRequest, Dialects, Recognition,
    SessionOpener,
};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use self::own_harness::tests;

/// Variable of the environment by which this program is the `daemon` or the `cli`.
const OWN_MAIN: &str = "OWN_MAIN";

/// Time limit of events that are expected.
const LIMIT: Duration = Duration::from_secs(20);

fn main() -> ExitCode {
    let transports = rpc_server::transports().with_opener(Calculator);
    match env::var(OWN_MAIN).as_deref() {
        Ok("daemon") => return rpc_server::daemon::main_with(transports, Dialects::default().with(Echoes)),
        Ok("cli") => return rpc_server::cli::main_with(transports),
        _ => {}
    }
    own_harness::run(&tests![
        the_daemon_speaks_the_dialects_of_its_program
        a_handshake_of_a_dialect_that_gives_way_is_no_refusal
        doctor_opens_sessions_by_the_openers_of_its_program
    ])
}

/// Dialect of a tilde, which is answered by a question mark, and a byte, which is answered by the
/// same, by the server's function `rpc.echo`.
#[derive(Debug)]
struct Echoes;

impl Dialect for Echoes {
    fn name(&self) -> &str {
        "echoes"
    }

    fn recognize(&self, first: &[u8]) -> Recognition {
        if first.starts_with(b"~") { Recognition::Accept } else { Recognition::Decline }
    }

    fn serve<'a>(&'a self, connection: &'a mut DialectConnection) -> BoxFuture<'a, Result<(), RpcError>> {
        Box::pin(async move {
            let io = connection.io();
            io.read_u8().await.map_err(broken)?;
            io.write_all(b"?").await.map_err(broken)?;
            let byte = io.read_u8().await.map_err(broken)?;
            let session = connection.open(DialectRequest::default()).await?;
            let echo = session.get_function("rpc.echo").await?.call::<i64>((i64::from(byte),)).await?;
            connection.io().write_all(&[echo as u8]).await.map_err(broken)
        })
    }
}

/// Addresses `calculator:`, each session a fresh one.
#[derive(Debug)]
struct Calculator;

impl SessionOpener for Calculator {
    fn schemes(&self) -> &[&str] {
        &["calculator"]
    }

    fn open<'a>(&'a self, _: &'a Address, _: &'a Connector) -> BoxFuture<'a, Result<Session, ConnectError>> {
        Box::pin(async { Ok(Session::new(LocalSession::new(Registry::new()))) })
    }
}

fn broken(error: io::Error) -> RpcError {
    RpcError::new(ErrorKind::PeerLost, error.to_string())
}

/// The daemon, killed when dropped.
struct Daemon {
    child: Child,
    address: String,
    _folder: tempfile::TempDir,
}

impl Daemon {
    fn start(args: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["serve", "--listen", "tcp://127.0.0.1:0", "--workdir"]).arg(folder.path()).args(args);
        command
            .env_clear()
            .env("OCL_ICD_VENDORS", "/nowhere")
            .env(OWN_MAIN, "daemon")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on ").unwrap().to_owned();
        Self { child, address, _folder: folder }
    }

    /// Connects, and says the first byte of the dialect. Returns once the dialect has answered.
    fn greet(&self) -> TcpStream {
        let mut stream = TcpStream::connect(self.address.strip_prefix("tcp://").unwrap()).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.write_all(b"~").unwrap();
        assert_eq!(read(&mut stream), Some(b'?'));
        stream
    }

    /// Stops the daemon, and returns its log.
    fn stop(mut self) -> String {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        let mut log = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        assert!(self.child.wait().unwrap().success(), "{log}");
        log
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the next byte, or `None` at the end.
fn read(stream: &mut TcpStream) -> Option<u8> {
    let mut byte = [0];
    match stream.read(&mut byte) {
        Ok(1) => Some(byte[0]),
        Ok(_) => None,
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => None,
        Err(error) => panic!("{error}"),
    }
}

fn the_daemon_speaks_the_dialects_of_its_program() {
    let daemon = Daemon::start(&[]);
    let mut client = daemon.greet();
    client.write_all(&[42]).unwrap();
    assert_eq!((read(&mut client), read(&mut client)), (Some(42), None));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let session = Connector::new().connect(&daemon.address).await.unwrap();
        assert_eq!(session.get_function("rpc.echo").await.unwrap().call::<i64>((7,)).await.unwrap(), 7);
    });
    daemon.stop();
}

fn a_handshake_of_a_dialect_that_gives_way_is_no_refusal() {
    let daemon = Daemon::start(&["--max-handshakes", "1", "--log-level", "debug"]);
    let (mut first, mut second) = (daemon.greet(), daemon.greet());
    assert_eq!(read(&mut first), None, "it has given way");
    second.write_all(&[42]).unwrap();
    assert_eq!(read(&mut second), Some(42));
    let log = daemon.stop();
    assert!(log.contains("a handshake gave way"), "{log}");
    assert!(!log.contains("refused a client"), "{log}");
}

fn doctor_opens_sessions_by_the_openers_of_its_program() {
    let run = |address: &str| {
        let mut command = Command::new(env::current_exe().unwrap());
        let output = command
            .args(["doctor", address])
            .env_clear()
            .env("OCL_ICD_VENDORS", "/nowhere")
            .env(OWN_MAIN, "cli")
            .output()
            .unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap())
    };
    for address in ["calculator:", "local:"] {
        let (works, text) = run(address);
        assert!(works && text.contains(&format!("{address} opened one")), "{text}");
    }
    let (works, text) = run("abacus:");
    assert!(!works, "{text}");
}
