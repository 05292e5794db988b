//! `rpc-cli forward`: services near a server and near the client, over every kind of way to the
//! server, and what is left when something fails.

use std::io::{BufRead as _, BufReader, ErrorKind as IoErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::pin::Pin;
use std::process::{Child, Command, Stdio};
use std::task::{Context, Waker};
use std::thread;
use std::time::{Duration, Instant};

use rpc_core::client::{RemoteConnection, RemoteListener};
use rpc_core::{ErrorKind, Session};
use rpc_server::ServerProcess;
use rpc_transports::Connector;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen as listen_with_backlog, socket_with,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value as Json;
use tempfile::TempDir;

use super::cli::{Fixture, cli, command, failing_cli, unused};

/// Time in which everything is gone that belonged to a process that was killed: two seconds are
/// promised, and a loaded machine gets more.
const GONE_WITHIN: Duration = Duration::from_secs(10);

/// Limit against a test that hangs.
const HANG_LIMIT: Duration = Duration::from_secs(60);

/// A program that is killed with this value.
struct Running {
    child: Child,
    /// First line that it printed.
    started: Json,
}

impl Running {
    /// Starts `rpc-cli forward --json`, and waits until it forwards.
    fn forward(args: &[&str]) -> Self {
        let mut command = command(&[&["forward", "--json"], args].concat());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        if line.is_empty() {
            let mut report = String::new();
            child.stderr.take().unwrap().read_to_string(&mut report).unwrap();
            panic!("{args:?}: {report}");
        }
        Self { child, started: serde_json::from_str(&line).unwrap() }
    }

    /// Returns the address that it forwards.
    fn at(&self) -> &str {
        self.started.get("remote").or_else(|| self.started.get("local")).unwrap().as_str().unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A stream of either kind.
trait Stream: Read + Write + Send {
    fn finish(&self);
}

impl Stream for TcpStream {
    fn finish(&self) {
        // The other side may be gone.
        let _ = self.shutdown(Shutdown::Write);
    }
}

impl Stream for UnixStream {
    fn finish(&self) {
        // The other side may be gone.
        let _ = self.shutdown(Shutdown::Write);
    }
}

/// Connects to the address. Reads and writes that hang fail.
fn connect(address: &str) -> std::io::Result<Box<dyn Stream>> {
    let limit = Some(HANG_LIMIT);
    if let Some(path) = address.strip_prefix("unix:") {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(limit)?;
        stream.set_write_timeout(limit)?;
        return Ok(Box::new(stream));
    }
    let stream = TcpStream::connect(address.strip_prefix("tcp://").unwrap())?;
    stream.set_read_timeout(limit)?;
    stream.set_write_timeout(limit)?;
    Ok(Box::new(stream))
}

/// Service that answers to each client, once that has sent its end, with all that it has sent.
/// Returns its port.
fn mirror() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            thread::spawn(move || reflect(Box::new(stream.unwrap())));
        }
    });
    port
}

fn reflect(mut stream: Box<dyn Stream>) {
    let mut bytes = Vec::new();
    // A client may be killed.
    if stream.read_to_end(&mut bytes).is_ok() && stream.write_all(&bytes).is_ok() {
        stream.finish();
    }
}

/// As [`mirror`], at a socket file.
fn mirror_at(path: &str) {
    let listener = UnixListener::bind(path).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            thread::spawn(move || reflect(Box::new(stream.unwrap())));
        }
    });
}

/// Checks that three connections at a time lead from `address` to a [`mirror`].
fn check_mirror(address: &str) {
    thread::scope(|scope| {
        for seed in 0..3_u32 {
            scope.spawn(move || {
                let mut stream = connect(address).unwrap();
                let sent: Vec<u8> =
                    (0..(1_u32 << 20) + seed).map(|at| (at.wrapping_mul(seed + 7) >> 3) as u8).collect();
                stream.write_all(&sent).unwrap();
                stream.finish();
                let mut received = Vec::new();
                stream.read_to_end(&mut received).unwrap();
                assert!(received == sent, "{address}: {} bytes of {}", received.len(), sent.len());
            });
        }
    });
}

/// A socket that listens. The kernel's number of it tells it from one of another test that is given
/// the same port afterwards.
struct Listening {
    address: String,
    inode: Option<String>,
}

impl Listening {
    /// Returns the socket that listens at `address`.
    fn at(address: &str) -> Self {
        let started = Instant::now();
        let mut inode = None;
        // A look at the kernel's list may miss a socket while others come and go.
        while address.starts_with("tcp:") && inode.is_none() {
            assert!(started.elapsed() < HANG_LIMIT, "nothing listens at {address}");
            inode = inode_at(address);
        }
        Self { address: address.to_owned(), inode }
    }

    /// Waits until the socket and its file are gone. Fails after `limit`.
    fn wait_until_gone(&self, limit: Duration) {
        let Self { address, inode } = self;
        let started = Instant::now();
        let is_gone = || match address.strip_prefix("unix:") {
            Some(path) => !Path::new(path).exists(),
            None => inode_at(address) != *inode,
        };
        while !is_gone() {
            assert!(started.elapsed() < limit, "{address} is still there");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Returns the kernel's number of the socket that listens at a port of 127.0.0.1.
fn inode_at(address: &str) -> Option<String> {
    const LISTENING: &str = "0A";
    let port: u16 = address.strip_prefix("tcp://127.0.0.1:").unwrap().parse().unwrap();
    let local = format!("0100007F:{port:04X}");
    let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let mut sockets = sockets.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let found = sockets.find(|fields| fields.get(1) == Some(&&*local) && fields.get(3) == Some(&LISTENING))?;
    Some(found[9].to_owned())
}

/// Starts a server that may listen at all loopback ports and in `folder`.
fn serve(folder: &TempDir, at: &str, flags: &[&str]) -> ServerProcess {
    let mut command = crate::server_program();
    command.args(["serve", "--listen", at, "--exit-with-stdin", "--log-level", "error"]);
    command.arg("--workdir").arg(folder.path().join("workdir")).args(flags);
    command.arg("--allow-listen").arg(format!("tcp://127.0.0.1:*,unix:{}/*", folder.path().display()));
    ServerProcess::spawn(command).unwrap()
}

#[test]
fn a_port_near_the_server_leads_here_over_every_way_to_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let (port, path) = (mirror(), |name: &str| format!("unix:{}/{name}", folder.path().display()));
    let plain = serve(&folder, "tcp://127.0.0.1:0", &["--isolate", "none", "--allow-forward", "*,unix:*"]);
    let isolated = tempfile::tempdir().unwrap();
    let isolated = serve(&isolated, &path("isolated"), &["--isolate", "process"]);
    let stdio = format!(
        "exec:{} serve --stdio --workdir {}/stdio --log-level error --allow-listen tcp://127.0.0.1:*",
        env!("CARGO_BIN_EXE_rpc-server"),
        folder.path().display()
    );
    let tunnel = format!("tunnel:{}", plain.address());
    let to = |at: &str| format!("{at}:{port}");
    let ways: &[&[&str]] = &[
        &["-R", &to("0"), plain.address()],
        &["-R", &to(&path("listener")), plain.address()],
        &["-R", &to("127.0.0.1:0"), isolated.address()],
        &["-R", &to("0"), "-J", plain.address(), isolated.address()],
        &["--reverse", &to("0"), "-J", &tunnel, isolated.address()],
        &["-R", &to("0"), &stdio],
    ];
    for way in ways {
        let forward = Running::forward(way);
        check_mirror(forward.at());
        // A second user of the address is refused.
        if forward.at().starts_with("unix:") {
            let again = failing_cli(&[&["forward"], *way].concat());
            assert!(again.code == 1 && again.stderr.contains("in use"), "{again:?}");
        }
        let listening = Listening::at(forward.at());
        forward.signal(Signal::TERM);
        listening.wait_until_gone(HANG_LIMIT);
    }
}

#[test]
fn the_operator_allows_addresses_and_the_answer_comes_at_once() {
    let fixture = Fixture::new(&["--allow-listen", "tcp://127.0.0.1:*"]);
    let forward = |to: &str| failing_cli(&["forward", "-R", to, fixture.address()]);
    for (to, code, text) in [
        ("127.0.0.2:0:80", 77, "--allow-listen"),
        ("unix:/tmp/x:80", 77, "--allow-listen"),
        // In use by the server.
        (&format!("{}:80", fixture.address().strip_prefix("tcp://").unwrap()), 1, "in use"),
    ] {
        let run = forward(to);
        assert!(run.code == code && run.stderr.contains(text), "{to}: {run:?}");
    }
    let can = |permission: &str| cli(&["can", permission, fixture.address()]).code;
    assert_eq!((can("listen:tcp://127.0.0.1:80"), can("listen:tcp://127.0.0.2:80")), (0, 1));
    let closed = Fixture::new(&[]);
    let run = failing_cli(&["forward", "-R", "0:80", closed.address()]);
    assert!(run.code == 77 && run.stderr.contains("--allow-listen"), "{run:?}");
    assert_eq!(cli(&["can", "call:rpc.listen.open", closed.address()]).code, 1);
    // Addresses that other transports have are none of plain sockets.
    let any = Fixture::new(&["--allow-listen", "*"]);
    let session = Connector::new().connect_blocking(any.address()).unwrap();
    for address in ["ws://127.0.0.1:0", "tcp://127.0.0.1:0/key"] {
        assert_eq!(session.listen(address).wait().unwrap_err().kind(), ErrorKind::Unsupported, "{address}");
    }
}

#[test]
fn a_service_that_refuses_ends_its_connection_and_the_others_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(&folder, "tcp://127.0.0.1:0", &[]);
    let service = format!("{}/service", folder.path().display());
    let mut forward = Running::forward(&["-R", &format!("0:unix:{service}"), server.address()]);
    let mut bytes = Vec::new();
    // It is closed or reset.
    let _ = connect(forward.at()).unwrap().read_to_end(&mut bytes);
    assert!(bytes.is_empty());
    let mut report = String::new();
    BufReader::new(forward.child.stderr.take().unwrap()).read_line(&mut report).unwrap();
    assert!(report.contains(&service), "{report}");
    mirror_at(&service);
    is_mirrored(forward.at());
}

/// Listens at a path, and lets no connection in: the backlog is full. The sockets keep it so.
fn stalled_service(path: &str) -> Vec<OwnedFd> {
    let socket = || socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap();
    let address = SocketAddrUnix::new(path).unwrap();
    let listener = socket();
    bind(&listener, &address).unwrap();
    listen_with_backlog(&listener, 0).unwrap();
    let mut sockets = vec![listener];
    loop {
        let waiting = socket();
        let connected = rustix::net::connect(&waiting, &address);
        sockets.push(waiting);
        if connected.is_err() {
            return sockets;
        }
    }
}

#[test]
fn a_service_that_stalls_costs_the_time_limit_of_its_connection_alone() {
    // Both at once, since each waits.
    thread::scope(|scope| {
        for direction in [&[][..], &["-R"]] {
            scope.spawn(|| a_stalled_service(direction));
        }
    });
}

fn a_stalled_service(direction: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let service = format!("{}/service", folder.path().display());
    // The server has more time than the tool, which reports its own limit then.
    let flags = ["--handshake-timeout", "60s", "--allow-port", &format!("unix:{service}")];
    let server = serve(&folder, "tcp://127.0.0.1:0", &flags);
    let to = format!("0:unix:{service}");
    let sockets = stalled_service(&service);
    // Long enough for all the steps that are to succeed on a machine that is busy.
    let mut forward = Running::forward(&[direction, &["--timeout", "10s", &to, server.address()]].concat());
    let mut bytes = Vec::new();
    // It is closed or reset.
    let _ = connect(forward.at()).unwrap().read_to_end(&mut bytes);
    assert!(bytes.is_empty());
    let mut report = String::new();
    BufReader::new(forward.child.stderr.take().unwrap()).read_line(&mut report).unwrap();
    assert!(report.contains("10s") && report.contains(&service), "{report}");
    drop(sockets);
    std::fs::remove_file(&service).unwrap();
    mirror_at(&service);
    is_mirrored(forward.at());
}

/// Checks that a mirror answers at an address.
fn is_mirrored(address: &str) {
    let (mut stream, mut bytes) = (connect(address).unwrap(), Vec::new());
    stream.write_all(b"who is there?").unwrap();
    stream.finish();
    stream.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, b"who is there?");
}

/// Opens a session with a listener.
fn listen(server: &ServerProcess) -> (Session, RemoteListener) {
    let session = Connector::new().connect_blocking(server.address()).unwrap();
    let listener = session.listen("tcp://127.0.0.1:0").wait().unwrap();
    (session, listener)
}

/// Connects to the listener. Returns both ends.
fn connect_to(listener: &RemoteListener) -> (Box<dyn Stream>, RemoteConnection) {
    let accepting = listener.accept().start();
    let near = connect(listener.address()).unwrap();
    (near, accepting.wait().unwrap())
}

#[test]
fn listeners_and_connections_of_a_session_are_limited() {
    let folder = tempfile::tempdir().unwrap();
    for flags in [&["--isolate", "none"][..], &["--isolate", "process", "--max-requests", "64"]] {
        let server = serve(&folder, "tcp://127.0.0.1:0", flags);
        let (session, listener) = listen(&server);
        let open = || session.listen("tcp://127.0.0.1:0").wait();
        let mut others: Vec<_> = (1..16).map(|_| open().unwrap()).collect();
        assert_eq!(open().unwrap_err().kind(), ErrorKind::LimitExceeded);
        others.pop();
        // The server closes it in the background.
        let started = Instant::now();
        let again = loop {
            match open() {
                Ok(listener) => break listener,
                Err(error) => assert!(error.kind() == ErrorKind::LimitExceeded && started.elapsed() < HANG_LIMIT),
            }
        };
        others.push(again);
        // Few requests allow few connections, so that reads that wait do not take all of them.
        let most = if flags.len() > 2 { 4 } else { 64 };
        let mut connections: Vec<_> = (0..most).map(|_| connect_to(&listener)).collect();
        let mut next = connect(listener.address()).unwrap();
        let mut waiting = listener.accept().start();
        let mut reads: Vec<_> = connections.iter().map(|(_, connection)| connection.read().start()).collect();
        // With all that wait, calls are served.
        for (near, connection) in &mut connections {
            connection.write("hello").wait().unwrap();
            near.read_exact(&mut [0; 5]).unwrap();
        }
        // One more waits for a place.
        let polled = Pin::new(&mut waiting).poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending(), "there are more connections than the session may have");
        reads.clear();
        let (mut near, connection) = connections.pop().unwrap();
        drop(connection);
        assert_eq!(near.read(&mut [0]).unwrap_or(0), 0);
        let connection = waiting.wait().unwrap();
        next.write_all(b"x").unwrap();
        assert_eq!(connection.read().wait().unwrap().unwrap(), "x");
    }
}

/// A regression: a connection of which only one side had ended kept its place.
#[test]
fn sides_that_do_not_end_keep_no_place() {
    const PLACES: usize = 4;
    let folder = tempfile::tempdir().unwrap();
    let server = serve(&folder, "tcp://127.0.0.1:0", &["--max-requests", "64"]);
    // Of those that send nothing, the service keeps its side open, or ends it before the peer does.
    let forgetful = |ends: bool| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::spawn(move || {
            let mut kept = Vec::new();
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                if ends {
                    stream.finish();
                }
                let mut bytes = Vec::new();
                let mut first = [0];
                while !ends && bytes.is_empty() && stream.read(&mut first).is_ok_and(|count| count > 0) {
                    bytes.extend(first);
                    let _ = stream.write_all(&bytes);
                }
                kept.push(stream);
            }
        });
        port
    };
    thread::scope(|scope| {
        for ends in [false, true] {
            let (port, server) = (forgetful(ends), &server);
            scope.spawn(move || {
                let forward = Running::forward(&["-R", &format!("0:{port}"), server.address()]);
                let peer = |_| {
                    let stream = connect(forward.at()).unwrap();
                    if !ends {
                        stream.finish();
                    }
                    stream
                };
                let _peers: Vec<_> = (0..=PLACES).map(peer).collect();
                let mut last = connect(forward.at()).unwrap();
                if ends {
                    assert_eq!(last.read(&mut [0]).unwrap(), 0);
                } else {
                    last.write_all(b"x").unwrap();
                    last.read_exact(&mut [0]).unwrap();
                }
            });
        }
    });
}

#[test]
fn a_connection_counts_with_the_piece_that_is_read_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(&folder, "tcp://127.0.0.1:0", &["--max-memory", "1MiB"]);
    let (_session, listener) = listen(&server);
    let connections: Vec<_> = (0..3).map(|_| connect_to(&listener)).collect();
    let error = listener.accept().wait().unwrap_err();
    assert!(error.kind() == ErrorKind::LimitExceeded && error.message().contains("max_memory"), "{error}");
    drop(connections);
}

#[test]
fn a_side_that_does_not_read_stops_the_other_and_a_close_ends_all() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(&folder, "tcp://127.0.0.1:0", &[]);
    let (session, listener) = listen(&server);
    let stream = |address: &str| {
        let stream = TcpStream::connect(address.strip_prefix("tcp://").unwrap()).unwrap();
        stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
        stream
    };
    // The client does not read: the peer cannot send more than the system's buffers hold.
    let accepting = listener.accept().start();
    let mut near = stream(listener.address());
    let connection = accepting.wait().unwrap();
    let piece = vec![7; 1 << 20];
    let sent = (0..256).take_while(|_| near.write_all(&piece).is_ok()).count();
    assert!(sent < 256, "all has been taken, and nothing read");
    // The peer does not read: a write waits, until the connection is closed.
    let large = vec![0; 60 << 20];
    let waiting = connection.write(large).start();
    let (function, reading) = (session.function::<(i64,), i64>("rpc.echo").wait().unwrap(), connection.read().start());
    assert_eq!(function.call((1,)).wait().unwrap(), 1);
    assert_eq!(reading.wait().unwrap().unwrap()[0], 7);
    // The write keeps the connection until it is over.
    drop(connection);
    drop(waiting);
    near.set_read_timeout(Some(HANG_LIMIT)).unwrap();
    let ended = near.read_to_end(&mut Vec::new());
    assert!(ended.is_ok() || ended.unwrap_err().kind() == IoErrorKind::ConnectionReset);
    // So does one that waits keep its listener.
    let (listening, accepting) = (Listening::at(listener.address()), listener.accept().start());
    drop(listener);
    assert_eq!(function.call((2,)).wait().unwrap(), 2);
    drop(connect(&listening.address).unwrap());
    drop(accepting);
    listening.wait_until_gone(HANG_LIMIT);
}

#[test]
fn nothing_is_left_of_a_client_or_server_that_is_killed() {
    let (folder, port) = (tempfile::tempdir().unwrap(), mirror());
    for isolate in ["none", "process"] {
        let mut server = serve(&folder, "tcp://127.0.0.1:0", &["--isolate", isolate]);
        let path = format!("unix:{}/{isolate}", folder.path().display());
        let (at, file) = (format!("0:{port}"), format!("{path}:{port}"));
        let start = || [&at, &file].map(|to| Running::forward(&["-R", to, server.address()]));
        let clients = start();
        for mut client in clients {
            let mut stream = connect(client.at()).unwrap();
            stream.write_all(b"x").unwrap();
            let listening = Listening::at(client.at());
            client.child.kill().unwrap();
            listening.wait_until_gone(GONE_WITHIN);
            // The connection is closed, too.
            assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0);
        }
        let clients = start().map(|client| (Listening::at(client.at()), client));
        server.kill().unwrap();
        for (listening, mut client) in clients {
            listening.wait_until_gone(GONE_WITHIN);
            assert_eq!(client.child.wait().unwrap().code(), Some(69));
        }
    }
}

#[test]
fn a_local_port_is_opened_only_if_the_server_can_be_reached_and_no_place_is_held_then() {
    let port = mirror();
    let service = format!("tcp://127.0.0.1:{port}");
    let run = failing_cli(&["forward", &format!("0:{port}"), &unused()]);
    assert!(run.code == 69 && run.stdout.is_empty(), "{run:?}");
    // A server that takes connections and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = format!("tcp://{}", silent.local_addr().unwrap());
    let run = failing_cli(&["forward", &format!("0:{port}"), &silent, "--timeout", "300ms"]);
    assert!(run.code == 124 && run.stdout.is_empty(), "{run:?}");

    // With one place, the connection takes it: the command has given it back.
    let fixture = Fixture::new(&["--max-sessions", "1", "--allow-port", &service]);
    let forward = Running::forward(&[&format!("0:{port}"), fixture.address()]);
    let started = Instant::now();
    loop {
        let mut stream = connect(forward.at()).unwrap();
        let mut received = Vec::new();
        // Closed without a word while the server has not noticed the end of the first session.
        if stream.write_all(b"x").is_ok() {
            stream.finish();
            let _ = stream.read_to_end(&mut received);
        }
        if received == b"x" {
            break;
        }
        assert!(started.elapsed() < HANG_LIMIT);
    }
    // A server that needs a ticket for sessions needs none for tunnels.
    let pool = ["--tracker", "tcp://127.0.0.1:1", "--tracker-key", "board", "--allow-port", &service];
    let fixture = Fixture::new(&pool);
    let forward = Running::forward(&[&format!("0:{port}"), fixture.address()]);
    check_mirror(forward.at());
}

/// Starts a Python program that prints its port and runs until its standard input ends.
fn python(script: &str, packages: Option<&Path>) -> (Child, String) {
    let mut command = Command::new("python3");
    command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    if let Some(packages) = packages {
        command.env("PYTHONPATH", packages);
    }
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (child, line.trim().to_owned())
}

const WEB_SERVER: &str = "
import http.server, sys, threading
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def do_PUT(self):
        body = self.rfile.read(int(self.headers['Content-Length']))
        self.send_response(200)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)
sys.stdin.read()
";

/// Two requests over one connection, one of them large.
const WEB_CLIENT: &str = "
import http.client, sys
connection = http.client.HTTPConnection('127.0.0.1', int(sys.argv[1]), timeout=60)
for body in [b'hello', bytes(range(256)) * 20000]:
    connection.request('PUT', '/page', body)
    assert connection.getresponse().read() == body
";

const TVM_SERVER: &str = "
import os, socket, sys
from tvm import rpc
with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    port = probe.getsockname()[1]
server = rpc.Server('127.0.0.1', port, port + 100, silent=True)
print(server.port, flush=True)
sys.stdin.read()
# terminate() needs a further package.
server.proc._proc.kill()
os._exit(0)
";

const TVM_CLIENT: &str = "
import sys, numpy, tvm
from tvm import rpc
session = rpc.connect('127.0.0.1', int(sys.argv[1]))
sent = numpy.random.default_rng(7).standard_normal((512, 1024)).astype('float32')
received = tvm.runtime.tensor(sent, session.cpu(0)).numpy()
assert (received == sent).all()
assert session.get_function('tvm.rpc.server.workpath')('x').endswith('x')
";

/// Runs a stock client of a stock server, by way of a hop, in each direction.
fn check_stock_programs(server: &str, client: &str, packages: Option<&Path>, directions: &[&[&str]]) {
    let (mut service, port) = python(server, packages);
    let folder = tempfile::tempdir().unwrap();
    let hop = serve(&folder, "tcp://127.0.0.1:0", &["--allow-forward", "tcp://127.0.0.1:*"]);
    let other = tempfile::tempdir().unwrap();
    let origin = serve(&other, "tcp://127.0.0.1:0", &["--allow-port", &format!("tcp://127.0.0.1:{port}")]);
    for direction in directions {
        let to = format!("0:{port}");
        let forward = Running::forward(&[*direction, &[&to, "-J", hop.address(), origin.address()]].concat());
        let mut command = Command::new("python3");
        command.args(["-c", client, forward.at().rsplit_once(':').unwrap().1]);
        if let Some(packages) = packages {
            command.env("PYTHONPATH", packages);
        }
        assert!(command.status().unwrap().success(), "{direction:?}");
    }
    drop(service.stdin.take());
    service.wait().unwrap();
}

#[test]
fn stock_http_programs_talk_through_a_hop_both_ways() {
    check_stock_programs(WEB_SERVER, WEB_CLIENT, None, &[&[], &["-R"]]);
}

/// `tests/modules/prepare.sh` brings TVM.
#[test]
fn the_stock_rpc_of_tvm_goes_through_a_hop() {
    let packages = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tvm-ffi/packages");
    if !packages.join("tvm/rpc/server.py").is_file() {
        assert!(std::env::var_os("RPC_TESTS_REQUIRE_TVM").is_none(), "there is no TVM");
        println!("SKIPPED: there is no TVM: tests/modules/prepare.sh brings it");
        return;
    }
    check_stock_programs(TVM_SERVER, TVM_CLIENT, Some(&packages), &[&[]]);
}
