//! A protocol that this crate does not know, in a session that is driven by the threads that wait:
//! lines of text, each of which the server sends back.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, IoSlice, Write};
use std::net::TcpListener;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use bytes::{Buf, BytesMut};
use rpc_core::proto::{Admission, BulkRead, ClientEvent};
use rpc_core::{ErrorKind, Handle, Operation, Reference, RemoteFunction, Request, Responder, RpcError, Session, Value};
use rpc_transports::{
    Address, BoxFuture, ClientProtocol, ConnectError, Connector, OpenedBy, SessionOpener, Transports,
};

/// The client's half: a function sends its argument, and returns the line that comes back.
#[derive(Default)]
struct Lines {
    output: BytesMut,
    /// Calls whose lines have not come back.
    waiting: VecDeque<Responder>,
    events: VecDeque<ClientEvent<Responder>>,
    ended: Option<RpcError>,
    /// True once the last reference is gone, and all lines are to be sent before the end.
    is_leaving: bool,
    is_over: bool,
}

impl Lines {
    fn end(&mut self, error: RpcError) {
        if self.ended.is_none() {
            self.events.extend(self.waiting.drain(..).map(|waiting| ClientEvent::Reply(waiting, Err(error.clone()))));
            self.events.push_back(ClientEvent::Ended(error.clone()));
            self.ended = Some(error);
        }
    }
}

impl ClientProtocol for Lines {
    type Bulk = BulkRead;

    fn submit(&mut self, _: u64, request: Request, responder: Responder, _: Instant) -> Admission<Responder> {
        match (self.ended.clone(), request.operation) {
            (Some(error), _) => Admission::Refused(responder, error),
            (None, Operation::Call { args, .. }) => {
                let [Value::Str(line)] = &args[..] else { panic!("{args:?}") };
                self.output.extend_from_slice(line.as_bytes());
                self.output.extend_from_slice(b"\n");
                self.waiting.push_back(responder);
                Admission::Now
            }
            // Answered without the server.
            (None, Operation::GetFunction { .. }) => {
                let function = Value::Object(Reference::Function(Handle::from_bits(1)));
                self.events.push_back(ClientEvent::Reply(responder, Ok(function)));
                Admission::Now
            }
            (None, other) => Admission::Refused(responder, RpcError::unsupported(other.name())),
        }
    }

    fn cancel(&mut self, _: u64) {}

    fn abandon(&mut self, _: u64) {}

    fn release(&mut self, _: Vec<Handle>) {}

    fn shutdown(&mut self, responder: Option<Responder>, _: Option<Instant>) {
        self.events.extend(responder.map(|responder| ClientEvent::Reply(responder, Ok(Value::Null))));
        self.is_leaving = true;
        self.end(RpcError::new(ErrorKind::Closed, "the session was shut down"));
    }

    fn fail(&mut self, error: RpcError) {
        self.end(error);
        self.is_over = true;
    }

    fn ended(&self) -> Option<&RpcError> {
        self.ended.as_ref()
    }

    fn poll_event(&mut self) -> Option<ClientEvent<Responder>> {
        self.events.pop_front()
    }

    fn handle_input(&mut self, input: &mut BytesMut, _: Instant) -> Result<(), RpcError> {
        while let Some(len) = input.iter().position(|byte| *byte == b'\n') {
            let line = input.split_to(len + 1);
            let line = Value::Str(String::from_utf8_lossy(&line[..len]).into_owned());
            self.events.extend(self.waiting.pop_front().map(|waiting| ClientEvent::Reply(waiting, Ok(line))));
        }
        Ok(())
    }

    fn handle_end_of_stream(&mut self, _: usize) {
        self.fail(RpcError::new(ErrorKind::PeerLost, "the server is gone"));
    }

    fn handle_timeout(&mut self, _: Instant) -> Result<(), RpcError> {
        Ok(())
    }

    fn poll_timeout(&self) -> Option<Instant> {
        None
    }

    fn stage(&mut self) {}

    fn slices<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        slices[0] = IoSlice::new(&self.output);
        usize::from(!self.output.is_empty())
    }

    fn advance(&mut self, count: usize, _: Instant) {
        self.output.advance(count);
    }

    fn is_quiet(&self) -> bool {
        self.waiting.is_empty()
    }

    fn put_bulk(&mut self, _: BulkRead, _: Instant) -> Result<(), RpcError> {
        unreachable!("no payload is received apart")
    }

    fn put_idle_bulk(&mut self, _: BulkRead) {}

    fn is_over(&self) -> bool {
        self.is_over
    }

    fn has_finished_output(&self) -> bool {
        self.is_leaving && self.output.is_empty()
    }
}

#[derive(Debug)]
struct LinesOpener;

impl SessionOpener for LinesOpener {
    fn schemes(&self) -> &[&str] {
        &["lines"]
    }

    fn opened_by(&self) -> OpenedBy {
        OpenedBy::Client
    }

    fn open<'a>(&'a self, _: &'a Address, _: &'a Connector) -> BoxFuture<'a, Result<Session, ConnectError>> {
        unreachable!("these sessions are blocking ones")
    }

    fn open_blocking(&self, to: &Address, connector: &Connector) -> Option<Result<Session, ConnectError>> {
        let (host, port) = to.host_and_port()?;
        let open = || {
            let channel = connector.open_channel_blocking(&Address::tcp(host, port)?)?.expect("no runtime is needed");
            Ok(Session::new(connector.start_blocking(channel, Lines::default())?))
        };
        Some(open())
    }
}

/// Starts a server for one client, which returns the lines that it has got, and a session with it.
fn session() -> (Session, JoinHandle<Vec<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("lines://{}", listener.local_addr().unwrap());
    let server = thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut got = Vec::new();
        for line in BufReader::new(&stream).lines() {
            let line = line.unwrap();
            let (is_silent, is_last) = (line == "in silence", line == "go");
            got.push(line);
            if is_last {
                break;
            }
            if !is_silent {
                writeln!(&stream, "{}", got[got.len() - 1]).unwrap();
            }
        }
        got
    });
    let connector = Connector::new().transports(Transports::default().with_opener(LinesOpener));
    (connector.connect_blocking(&address).unwrap(), server)
}

fn call(function: &RemoteFunction, line: &str) -> rpc_core::Result<String> {
    function.call((line,)).wait()
}

#[test]
fn threads_that_wait_drive_any_protocol() {
    let (session, server) = session();
    let echo = session.get_function("echo").wait().unwrap();
    assert_eq!(call(&echo, "one").unwrap(), "one");
    thread::scope(|scope| {
        for line in ["two", "three", "four"] {
            let (session, echo) = (&session, &echo);
            // Requests that are answered at once are answered beside a thread that reads.
            scope.spawn(move || {
                for _ in 0..50 {
                    assert!(session.get_function("echo").wait().is_ok());
                    assert_eq!(call(echo, line).unwrap(), line);
                }
            });
        }
    });
    // Awaited, the thread for all idle sessions moves the bytes.
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    assert_eq!(runtime.block_on(async { echo.call::<String>(("five",)).await }).unwrap(), "five");
    // What has been submitted is written before the end, though nobody waits for it.
    drop(echo.call::<String>(("in silence",)).start());
    drop((echo, session));
    let got = server.join().unwrap();
    assert_eq!((got.len(), got.last().unwrap().as_str()), (153, "in silence"));
}

#[test]
fn the_end_of_the_server_is_told_to_callers_of_any_protocol() {
    let (session, server) = session();
    let echo = session.get_function("echo").wait().unwrap();
    let ended = session.ended();
    let unanswered = echo.call::<String>(("in silence",)).start();
    assert_eq!(call(&echo, "go").map_err(|error| error.kind()).err(), Some(ErrorKind::PeerLost));
    assert_eq!(unanswered.wait().unwrap_err().kind(), ErrorKind::PeerLost);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    assert_eq!(runtime.block_on(ended).kind(), ErrorKind::PeerLost);
    assert_eq!(call(&echo, "more").unwrap_err().kind(), ErrorKind::PeerLost);
    assert_eq!(server.join().unwrap(), ["in silence", "go"]);
}
