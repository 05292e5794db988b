//! Our clients at servers of TVM (`tvm://`): at a server of this project that speaks TVM's protocol,
//! at one of the package `apache-tvm`, and at small servers that tell what they were asked.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use bytes::{BufMut as _, Bytes};
use rpc_core::client::{Files, Modules};
use rpc_core::{
    DataType, DataTypeCode, Device, DeviceAttribute, DeviceType, ErrorKind, Handle, Operation, Reference, Registry,
    RemoteFunction, RemoteModule, RemoteTensor, Request, Result, RpcSession as _, Session, Tensor, TensorRef,
    TensorView, Value, VirtualDevice,
};
use rpc_server::builtins::{TimeOptions, time_function};
use rpc_server::config::ServeConfig;
use rpc_server::{RpcServer, Running};
use rpc_transports::Connector;
use rpc_tvm::wire::{self, HelloAnswer, ServerEvent, ServerWire, TensorHeader, WireLimits, WireValue};
use tokio::runtime::Runtime;

use super::cli::{cli, failing_cli};
use crate::native_modules::tvm_ffi;

/// Time limit of events that are expected.
const LIMIT: Duration = Duration::from_secs(30);

/// A server of this project that speaks TVM's protocol.
struct Fixture {
    running: Running,
    runtime: Runtime,
    _folder: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        let registry = Registry::new();
        registry.add("tail", || -> Result<Tensor> {
            Tensor::from_slice(vec![4], &[1.0_f32, 2.0, 3.0, 4.0])?.view(8, vec![2], None, DataType::F32)
        });
        registry.add("misalignment", |x: TensorView, alignment: i64| {
            x.bytes().map(|bytes| (bytes.as_ptr().addr() % alignment as usize) as i64)
        });
        registry.add("list", || vec![1_i64, 2]);
        registry.add_async("never", std::future::pending::<()>);
        let folder = tempfile::tempdir().unwrap();
        let config = ServeConfig {
            listen: vec!["tcp://127.0.0.1:0".parse().unwrap()],
            workdir: folder.path().join("work"),
            key: Some("board".to_owned()),
            tvm: true,
            tvm_self_test: true,
            allow_forward: vec!["tvm://127.0.0.1:*".to_owned()],
            ..ServeConfig::default()
        };
        let runtime = Runtime::new().unwrap();
        let running = runtime.block_on(RpcServer::new(registry).config(config).start()).unwrap();
        Self { running, runtime, _folder: folder }
    }

    fn address(&self) -> String {
        self.running.addresses()[0].to_string().replace("tcp://", "tvm://") + "/board"
    }

    /// Waits until the server has no more sessions than `count`.
    fn is_left_with(&self, count: usize) {
        let start = Instant::now();
        while self.running.sessions() != count {
            assert!(start.elapsed() < LIMIT, "{} sessions are left", self.running.sessions());
            std::thread::yield_now();
        }
    }

    fn connect(&self) -> Session {
        connect(&self.address()).unwrap()
    }
}

fn connector() -> Connector {
    Connector::new().transports(rpc_server::transports())
}

fn connect(address: &str) -> Result<Session> {
    connector().connect_blocking(address).map_err(|error| error.into_rpc_error())
}

fn function(session: &Session, name: &str) -> RemoteFunction {
    session.get_function(name).wait().unwrap()
}

fn submit(session: &Session, operation: Operation) -> Result<Value> {
    session.shared().submit(Request::new(operation)).reply().wait()
}

fn kind_of<T: std::fmt::Debug>(outcome: Result<T>) -> ErrorKind {
    outcome.unwrap_err().kind()
}

fn reference(tensor: &RemoteTensor) -> TensorRef {
    TensorRef {
        storage: tensor.handle(),
        byte_offset: tensor.byte_offset(),
        shape: tensor.shape().to_vec(),
        strides: None,
        dtype: tensor.dtype(),
        device: tensor.device(),
    }
}

#[test]
fn functions_are_called_with_values_of_every_kind() {
    let fixture = Fixture::new();
    let session = fixture.connect();
    assert!(!session.is_local() && !session.is_encrypted());
    let echo = function(&session, "testing.echo");
    for value in [
        Value::Null,
        Value::Bool(true),
        Value::Int(i64::MIN),
        Value::Float(-0.5),
        Value::Str(String::new()),
        Value::Str("grün\0rot".to_owned()),
        Value::Bytes(Bytes::from_static(&[0, 255])),
        Value::DataType(DataType::F16),
        Value::Device(Device::new(DeviceType::CUDA, 3)),
    ] {
        assert_eq!(echo.call::<Value>((value.clone(),)).wait().unwrap(), value);
    }
    let typed = session.function::<(i64,), i64>("rpc.test.addone").wait().unwrap();
    assert_eq!(typed.call((41,)).wait().unwrap(), 42);
    // Functions are results and arguments, and a list stays at the server.
    let adder: RemoteFunction = function(&session, "rpc.test.add_to_lhs").call((40_i64,)).wait().unwrap();
    assert_eq!(adder.call::<i64>((2_i64,)).wait().unwrap(), 42);
    assert!(echo.call::<RemoteFunction>((&adder,)).wait().is_ok());
    let list: Value = function(&session, "list").call(()).wait().unwrap();
    assert!(matches!(list, Value::Object(Reference::Object(_))), "{list:?}");
    session.release(&list);
    // Errors have the text of the function, and the session goes on.
    let error = function(&session, "rpc.test.except").call::<()>(("no such luck",)).wait().unwrap_err();
    assert_eq!((error.kind(), error.message()), (ErrorKind::Application, "no such luck"));
    assert!(error.peer().is_some() && error.request_may_have_run());
    // The same with the text by which servers say that the time of the session is over.
    let said = "RPCSessionTimeoutError: not this session";
    let error = function(&session, "rpc.test.except").call::<()>((said,)).wait().unwrap_err();
    assert_eq!((error.kind(), error.message()), (ErrorKind::SessionTimeout, said));
    assert_eq!(kind_of(session.get_function("missing").wait()), ErrorKind::NotFound);
    // What the protocol has no form for is refused here.
    let packed = Value::Packed(rpc_core::Packed::encode(&1).unwrap());
    for unsendable in [packed, Value::List(vec![]), Value::Map(vec![])] {
        assert_eq!(kind_of(echo.call::<Value>((unsendable,)).wait()), ErrorKind::Unsupported);
    }
    // A shape is built there by a function that the server has.
    let element = function(&session, "rpc.testing.GetShapeElem");
    assert_eq!(element.call::<i64>((Value::Shape(vec![4, 5, 6]), 2_i64)).wait().unwrap(), 6);
    assert_eq!(function(&session, "rpc.echo").call::<i64>((7_i64,)).wait().unwrap(), 7);
    session.shutdown().wait().unwrap();
    assert_eq!(kind_of(session.get_function("rpc.test.addone").wait()), ErrorKind::Closed);
}

#[test]
fn tensors_are_allocated_copied_and_passed() {
    let fixture = Fixture::new();
    let session = fixture.connect();
    // Larger than a piece of a copy, and than what may be unanswered.
    let count = 3_000_001;
    let data: Vec<u8> = (0..count).map(|at| (at % 251) as u8).collect();
    let first = session.alloc(Device::cpu(), DataType::U8, &[count]).wait().unwrap();
    let second = session.alloc(Device::cpu(), DataType::U8, &[count]).wait().unwrap();
    session.copy_to_remote(&first, data.clone()).wait().unwrap();
    session.copy_among_remote(&first, &second).wait().unwrap();
    assert_eq!(session.copy_from_remote(&second).wait().unwrap(), data);
    // Offsets of a copy, and a scalar.
    let scalar = session.alloc(Device::cpu(), DataType::F64, &[]).wait().unwrap();
    let write = |offset, data: &'static [u8]| {
        let (to, data) = (reference(&scalar), Bytes::from_static(data));
        submit(&session, Operation::Write { to: to.into(), offset, data })
    };
    write(0, &[0; 8]).unwrap();
    write(6, &[0xf0, 0x3f]).unwrap();
    write(8, &[]).unwrap();
    for echo in ["testing.echo", "rpc.echo"] {
        let same: RemoteTensor = function(&session, echo).call((&scalar,)).wait().unwrap();
        assert_eq!(session.copy_from_remote(&same).wait().unwrap(), 1_f64.to_le_bytes()[..]);
    }
    // A view that a function returns begins where it should, and ends there.
    let tail: RemoteTensor = function(&session, "tail").call(()).wait().unwrap();
    assert_eq!(session.copy_from_remote(&tail).wait().unwrap(), [3.0_f32, 4.0].map(f32::to_le_bytes).concat());
    assert_eq!(session.attribute(Device::cpu(), DeviceAttribute::Exists).wait().unwrap(), Value::Bool(true));
    let cuda = Device::new(DeviceType::CUDA, 99);
    assert_eq!(session.attribute(cuda, DeviceAttribute::Exists).wait().unwrap(), Value::Bool(false));
    let stream = session.create_stream(Device::cpu()).wait().unwrap();
    session.set_stream(Device::cpu(), Some(&stream)).wait().unwrap();
    session.stream_wait(Device::cpu(), None).wait().unwrap();
    let (cpu, other) = (Device::cpu(), session.create_stream(Device::cpu()).wait().unwrap());
    for (from, to) in [(Some(&stream), Some(&other)), (None, Some(&other)), (Some(&other), None)] {
        session.sync_stream_from_to((cpu, from), (cpu, to)).wait().unwrap();
    }
    session.free_stream(stream).wait().unwrap();
    let freed = other.clone();
    session.free_stream(other).wait().unwrap();
    let sync = |from, to| kind_of(session.sync_stream_from_to((cpu, from), (cpu, to)).wait());
    assert_eq!(sync(Some(&freed), None), ErrorKind::InvalidHandle);
    assert_eq!(sync(None, Some(&freed)), ErrorKind::InvalidHandle);
}

#[test]
fn memory_is_aligned_as_requested() {
    let fixture = Fixture::new();
    let session = fixture.connect();
    let alloc = |alignment| session.alloc_aligned(Device::cpu(), DataType::F32, &[2, 3], alignment).wait();
    for alignment in [64, 4096, 1 << 20] {
        for _ in 0..3 {
            let tensor = alloc(alignment).unwrap();
            let misalignment = function(&session, "misalignment").call::<i64>((&tensor, alignment as i64));
            assert_eq!(misalignment.wait().unwrap(), 0, "{alignment}");
            assert_eq!(session.copy_from_remote(&tensor).wait().unwrap().len(), 24);
        }
    }
    for wrong in [3, u64::MAX, 1 << 63] {
        assert_eq!(kind_of(alloc(wrong)), ErrorKind::InvalidArgument, "{wrong}");
    }
    // The request of TVM that carries an alignment has no scope.
    let scoped: VirtualDevice = "cpu:0,scope=host".parse().unwrap();
    let refused = session.alloc_aligned(&scoped, DataType::U8, &[1], 4096).wait();
    assert!(matches!(kind_of(refused), ErrorKind::Unsupported | ErrorKind::DeviceUnavailable));
}

/// Each of these would crash a server of TVM, or change memory that is not the client's.
#[test]
fn what_would_crash_a_server_is_refused_here() {
    let fixture = Fixture::new();
    let session = fixture.connect();
    let tensor = session.alloc(Device::cpu(), DataType::U8, &[4]).wait().unwrap();
    let function = function(&session, "testing.echo");
    let (good, handle) = (reference(&tensor), function.handle());
    let call = |tensor: TensorRef| submit(&session, Operation::Call { function: handle, args: vec![tensor.into()] });
    let gaps = TensorRef { shape: vec![2], strides: Some(vec![2]), ..good.clone() };
    let dense = TensorRef { shape: vec![2, 2], strides: Some(vec![2, 1]), ..good.clone() };
    let beyond = TensorRef { byte_offset: 1, ..good.clone() };
    let far = TensorRef { byte_offset: u64::MAX, ..good.clone() };
    let larger = TensorRef { dtype: DataType::F32, ..good.clone() };
    let elsewhere = TensorRef { device: Device::new(DeviceType::CUDA, 0), ..good.clone() };
    let marked = TensorRef { device: Device::new(DeviceType(129), 0), ..good.clone() };
    let no_tensor = TensorRef { storage: handle, ..good.clone() };
    assert_eq!(kind_of(call(gaps)), ErrorKind::Unsupported);
    assert!(call(dense).is_ok());
    for wrong in [&beyond, &far, &larger, &elsewhere, &marked] {
        assert_eq!(kind_of(call(wrong.clone())), ErrorKind::InvalidArgument, "{wrong:?}");
    }
    assert_eq!(kind_of(call(no_tensor)), ErrorKind::InvalidHandle);
    let copy = |offset, len| submit(&session, Operation::Read { from: good.clone().into(), offset, len, into: None });
    for (offset, len) in [(0, 5), (4, 1), (u64::MAX, 1), (1, u64::MAX)] {
        assert_eq!(kind_of(copy(offset, len)), ErrorKind::InvalidArgument, "{offset} {len}");
    }
    let marked = Device::new(DeviceType(128), 0);
    assert_eq!(kind_of(session.alloc(marked, DataType::U8, &[1]).wait()), ErrorKind::InvalidArgument);
    let device_arg = submit(&session, Operation::Call { function: handle, args: vec![Value::Device(marked)] });
    assert_eq!(kind_of(device_arg), ErrorKind::InvalidArgument);
    // Handles of the server's own numbering are none here, and one is freed once.
    for made_up in [0, 1, u64::MAX] {
        let handle = Handle::from_bits(made_up);
        assert_eq!(kind_of(session.free_handle(handle).wait()), ErrorKind::InvalidHandle);
        let module = Value::Object(Reference::Module(handle));
        let called = submit(&session, Operation::Call { function: function.handle(), args: vec![module] });
        assert_eq!(kind_of(called), ErrorKind::InvalidHandle);
    }
    session.free_handle(good.storage).wait().unwrap();
    assert_eq!(kind_of(session.free_handle(good.storage).wait()), ErrorKind::InvalidHandle);
    assert_eq!(kind_of(call(good)), ErrorKind::InvalidHandle);
    assert_eq!(function.call::<i64>((1_i64,)).wait().unwrap(), 1);
}

/// A call that was sent runs on: nothing in the protocol stops it but the end of the connection.
#[test]
fn deadlines_pass_at_once_and_the_end_of_the_session_stops_what_runs() {
    let fixture = Fixture::new();
    let session = fixture.connect();
    let (never, echo) = (function(&session, "never"), function(&session, "rpc.echo"));
    let mut limit = Duration::from_millis(50);
    let error = loop {
        let error = never.call::<()>(()).deadline(Instant::now() + limit).wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
        // On a busy machine the time may be over before it is sent.
        if error.request_may_have_run() || limit > LIMIT {
            break error;
        }
        limit *= 2;
    };
    assert!(error.request_may_have_run());
    let behind = echo.call::<i64>((1_i64,)).deadline(Instant::now() + limit).start();
    assert_eq!(kind_of(behind.wait()), ErrorKind::DeadlineExceeded);
    // A shutdown does not wait for what nobody waits for.
    let other = fixture.connect();
    let waiting = function(&other, "never");
    let mut limit = Duration::from_millis(50);
    while !waiting.call::<()>(()).deadline(Instant::now() + limit).wait().unwrap_err().request_may_have_run() {
        limit *= 2;
    }
    other.shutdown().wait().unwrap();
    drop((waiting, other));
    fixture.is_left_with(1);
    // It waits for what somebody waits for, up to its own deadline.
    let other = fixture.connect();
    let call = function(&other, "never").call::<()>(()).start();
    let shutdown = other.shutdown().deadline(Instant::now() + Duration::from_millis(50)).wait();
    assert_eq!(kind_of(shutdown), ErrorKind::DeadlineExceeded);
    drop((call, other));
    fixture.is_left_with(1);
    // Callers that are gone do not keep the session.
    drop(never.call::<()>(()).start());
    assert_eq!(fixture.running.sessions(), 1);
    drop((never, echo, session));
    fixture.is_left_with(0);
}

#[test]
fn a_session_ends_after_the_time_that_its_address_names() {
    let fixture = Fixture::new();
    let mut seconds = 0.2;
    // On a busy machine the time may be over before the function is called.
    let (session, never) = loop {
        let session = connect(&format!("{}?timeout={seconds}", fixture.address())).unwrap();
        match session.get_function("never").wait() {
            Ok(never) => break (session, never),
            Err(error) => assert_eq!(error.kind(), ErrorKind::SessionTimeout, "{error}"),
        }
        seconds *= 2.0;
    };
    let error = never.call::<()>(()).wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::SessionTimeout, "{error}");
    assert!(error.message().contains(&format!("{seconds}s session has expired")), "{error}");
    let ended = fixture.runtime.block_on(session.ended());
    assert_eq!(ended.kind(), ErrorKind::SessionTimeout);
    assert_eq!(kind_of(session.get_function("never").wait()), ErrorKind::SessionTimeout);
}

#[test]
fn a_server_is_refused_for_its_key_and_what_is_no_server_for_its_answer() {
    let fixture = Fixture::new();
    let bare = fixture.address().replace("/board", "");
    let error = connect(&bare).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert!(connector().key("board").connect_blocking(&bare).is_ok());
    assert_eq!(
        kind_of(connector().key("a b").connect_blocking(&bare).map_err(|error| error.into_rpc_error())),
        ErrorKind::InvalidArgument
    );
    // Nobody listens: the port is that of a socket that does not.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tvm://{}", listener.local_addr().unwrap());
    let silent = connector().handshake_timeout(Duration::from_millis(50)).connect_blocking(&address);
    let error = silent.unwrap_err().into_rpc_error();
    assert_eq!(error.kind(), ErrorKind::PeerSilent, "{error}");
    assert!(error.message().contains("serves one client"), "{error}");
    drop(listener);
    assert_eq!(kind_of(connect(&address)), ErrorKind::PeerLost);
}

/// A server of TVM that the test itself is.
struct Board {
    stream: TcpStream,
    wire: ServerWire,
}

impl Board {
    /// Starts a server for one client. Returns its address.
    fn start<T: Send + 'static>(serve: impl FnOnce(Self) -> T + Send + 'static) -> (String, JoinHandle<T>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("tvm://{}", listener.local_addr().unwrap());
        let served = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            let mut board = Self { stream, wire: ServerWire::new(WireLimits::default()) };
            assert!(matches!(board.next(), Some(ServerEvent::Hello(_))));
            serve(board)
        });
        (address, served)
    }

    /// As [`start`](Self::start), for a server that has begun the session. `max_packet` is the
    /// largest frame that it says to take.
    fn begun<T: Send + 'static>(
        max_packet: Option<i64>,
        serve: impl FnOnce(Self) -> T + Send + 'static,
    ) -> (String, JoinHandle<T>) {
        Self::start(move |mut board| {
            board.send(&HelloAnswer::Accepted("server:").encode());
            assert!(matches!(board.request(), Some(wire::Request::Init { .. })));
            board.wire.begin();
            board.value(WireValue::None);
            assert!(matches!(board.request(), Some(wire::Request::GetFunction { .. })));
            board.value(WireValue::Pointer(if max_packet.is_some() { 9 } else { 0 }));
            if let Some(size) = max_packet {
                assert!(matches!(board.request(), Some(wire::Request::Call { function: 9, .. })));
                board.result(WireValue::Int(size));
                assert_eq!(board.request(), Some(wire::Request::Free { handle: 9 }));
                board.value(WireValue::None);
            }
            serve(board)
        })
    }

    /// Returns the next event, or `None` once the client has left.
    fn next(&mut self) -> Option<ServerEvent> {
        loop {
            if let Some(event) = self.wire.poll_event().unwrap() {
                return Some(event);
            }
            let mut buffer = [0; 4096];
            let room = self.wire.input().remaining_mut().min(buffer.len());
            match self.stream.read(&mut buffer[..room]) {
                Ok(0) | Err(_) => return None,
                Ok(count) => self.wire.input().put_slice(&buffer[..count]),
            }
        }
    }

    /// Returns the next request; `None` for a copy to the server, and once the client has left.
    fn request(&mut self) -> Option<wire::Request> {
        match self.next() {
            Some(ServerEvent::Request(request)) => Some(request),
            _ => None,
        }
    }

    /// Takes the data of a copy.
    fn payload(&mut self) -> Vec<u8> {
        let mut data = Vec::new();
        while self.wire.payload_left() > 0 {
            data.extend_from_slice(self.wire.payload());
            self.wire.advance_payload(self.wire.payload().len());
            if self.wire.payload_left() > 0 {
                assert!(self.wire.poll_event().unwrap().is_none());
                let mut byte = [0; 4096];
                let room = self.wire.input().remaining_mut().min(byte.len());
                let count = self.stream.read(&mut byte[..room]).unwrap();
                self.wire.input().put_slice(&byte[..count]);
            }
        }
        data
    }

    fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// Answers a client that sends nothing more. Fails if the client does not take the answers.
    fn answer_after_the_end(&mut self) {
        std::io::copy(&mut self.stream, &mut std::io::sink()).unwrap();
        for _ in 0..200 {
            self.send(&[0; 64 << 10]);
        }
    }

    /// Ends the connection. What the client still sends is read, so that it gets all of the answer.
    fn leave(mut self) {
        self.stream.shutdown(Shutdown::Write).unwrap();
        let _ = std::io::copy(&mut self.stream, &mut std::io::sink());
    }

    fn value(&mut self, value: WireValue) {
        self.send(&wire::returned(&[value]));
    }

    fn result(&mut self, value: WireValue) {
        self.send(&wire::returned_call(wire::CallResult::Plain(value)));
    }
}

/// Looks a function up, and fails if there is no answer in time.
fn find(session: &Session, name: &str) -> Result<RemoteFunction> {
    session.get_function(name).deadline(Instant::now() + LIMIT).wait()
}

/// Size of packets that servers of this project tell, which survive clients that vanish.
const UNLIMITED: Option<i64> = Some(i64::MAX);

#[test]
fn requests_are_on_the_wire_before_earlier_ones_are_answered() {
    let (address, board) = Board::begun(UNLIMITED, |mut board| {
        let asked: Vec<_> = (0..3).map(|_| board.request().unwrap()).collect();
        for handle in 1..=3 {
            board.value(WireValue::Pointer(handle));
        }
        let mut freed = Vec::new();
        while let Some(request) = board.request().filter(|request| *request != wire::Request::Shutdown) {
            let wire::Request::Free { handle } = request else { panic!("{request:?}") };
            freed.push(handle);
            board.value(WireValue::None);
        }
        (asked.len(), freed)
    });
    let session = connect(&address).unwrap();
    let found: Vec<_> =
        ["a", "b", "c"].map(|name| session.get_function(name).deadline(Instant::now() + LIMIT).start()).into();
    let found: Vec<RemoteFunction> = found.into_iter().map(|found| found.wait().unwrap()).collect();
    // Each is freed once: by the drop, before the session ends.
    drop(found);
    session.shutdown().wait().unwrap();
    drop(session);
    assert_eq!(board.join().unwrap(), (3, vec![1, 2, 3]));
}

#[test]
fn data_wait_for_a_call_and_are_not_sent_if_their_caller_is_gone() {
    let (address, board) = Board::begun(UNLIMITED, |mut board| {
        assert!(matches!(board.request(), Some(wire::Request::Alloc { .. })));
        board.value(WireValue::Pointer(64));
        assert!(matches!(board.request(), Some(wire::Request::GetFunction { .. })));
        board.value(WireValue::Pointer(8));
        assert!(matches!(board.request(), Some(wire::Request::Call { function: 8, .. })));
        // A small request is sent behind the call; the copy would have come before it.
        assert!(matches!(board.request(), Some(wire::Request::GetFunction { .. })));
        board.result(WireValue::Int(5));
        board.value(WireValue::Pointer(0));
    });
    let session = connect(&address).unwrap();
    let tensor = session.alloc(Device::cpu(), DataType::U8, &[1 << 20]).wait().unwrap();
    let call = find(&session, "slow").unwrap().call::<i64>(()).start();
    let write = Operation::Write { to: reference(&tensor).into(), offset: 0, data: vec![1; 1 << 20].into() };
    let expired = Request { deadline: Some(Instant::now()), ..Request::new(write) };
    let error = session.shared().submit(expired).reply().wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert_eq!(kind_of(find(&session, "missing")), ErrorKind::NotFound);
    assert_eq!(call.wait().unwrap(), 5);
    drop((tensor, session));
    board.join().unwrap();
}

/// A server of TVM fails for good at the second answer that nobody takes, and so if the program of
/// its client ends while two requests are unanswered.
#[test]
fn a_server_of_tvm_has_one_request_at_a_time() {
    let (begun, has_begun) = tokio::sync::oneshot::channel();
    let (go_on, goes_on) = std::sync::mpsc::channel();
    let mut begun = Some(begun);
    let (address, board) = Board::begun(None, move |mut board| {
        let mut named = |name: &str, handle| {
            let Some(wire::Request::GetFunction { name: asked }) = board.request() else { panic!("a look-up") };
            assert_eq!(asked.as_str(), name);
            if let Some(begun) = begun.take() {
                begun.send(()).unwrap();
                goes_on.recv().unwrap();
            }
            board.value(WireValue::Pointer(handle));
        };
        named("first", 8);
        named("third", 16);
        let Some(wire::Request::Call { function: 8, .. }) = board.request() else { panic!("a call") };
        // Neither the end of an object nor that of the session waits for the call.
        assert_eq!(board.request(), Some(wire::Request::Shutdown));
    });
    let session = connect(&address).unwrap();
    let first = session.get_function("first").deadline(Instant::now() + LIMIT).start();
    has_begun.blocking_recv().unwrap();
    // Time in which it would have been sent.
    let second = session.get_function("second").deadline(Instant::now() + Duration::from_millis(50)).wait();
    let error = second.unwrap_err();
    assert!(error.kind() == ErrorKind::DeadlineExceeded && !error.request_may_have_run(), "{error}");
    let third = session.get_function("third").deadline(Instant::now() + LIMIT).start();
    go_on.send(()).unwrap();
    let (first, third) = (first.wait().unwrap(), third.wait().unwrap());
    // On a busy machine the time may be over before it is sent.
    let mut limit = Duration::from_millis(50);
    while !first.call::<()>(()).deadline(Instant::now() + limit).wait().unwrap_err().request_may_have_run() {
        limit *= 2;
    }
    drop((first, third));
    // Time in which they would be freed.
    let behind = session.get_function("fourth").deadline(Instant::now() + Duration::from_millis(50)).wait();
    assert_eq!(kind_of(behind), ErrorKind::DeadlineExceeded);
    session.shutdown().deadline(Instant::now() + LIMIT).wait().unwrap();
    board.join().unwrap();
}

/// A caller that waits on its thread and one that awaits share a session, whose requests take
/// turns.
#[test]
fn requests_that_are_awaited_go_on_between_calls_that_are_waited_for() {
    const COUNT: u64 = 20;
    let (address, board) = Board::begun(None, |mut board| {
        let mut found = 0;
        loop {
            match board.request() {
                Some(wire::Request::GetFunction { .. }) => {
                    found += 1;
                    board.value(WireValue::Pointer(8));
                }
                Some(wire::Request::Free { .. }) => board.value(WireValue::None),
                _ => return found,
            }
        }
    });
    let session = connect(&address).unwrap();
    let other = session.clone();
    let awaiting = thread::spawn(move || {
        current_thread().block_on(async {
            for _ in 0..COUNT {
                other.get_function("awaited").deadline(Instant::now() + LIMIT).await.unwrap();
            }
        });
    });
    for _ in 0..COUNT {
        find(&session, "waited").unwrap();
    }
    awaiting.join().unwrap();
    drop(session);
    assert_eq!(board.join().unwrap(), 2 * COUNT);
}

/// Regression: the thread that moves the bytes of awaited requests slept without a limit once one
/// without a deadline was under way.
#[test]
fn a_deadline_passes_behind_a_request_that_is_awaited_without_one() {
    let (address, board) = Board::begun(UNLIMITED, |mut board| while board.next().is_some() {});
    let session = connect(&address).unwrap();
    let outcome = current_thread().block_on(async {
        let mut first = std::pin::pin!(session.get_function("first").into_future());
        assert!(tokio::time::timeout(Duration::from_millis(50), &mut first).await.is_err());
        let second = session.get_function("second").deadline(Instant::now() + Duration::from_millis(50));
        tokio::time::timeout(LIMIT, second.into_future()).await
    });
    assert_eq!(kind_of(outcome.expect("no deadline has passed")), ErrorKind::DeadlineExceeded);
    drop(session);
    board.join().unwrap();
}

#[test]
fn a_server_that_never_stops_to_answer_is_left_when_the_handshake_has_lasted_too_long() {
    let is_over = Arc::new(AtomicBool::new(false));
    let stop = is_over.clone();
    let (address, board) = Board::start(move |mut board| {
        board.send(&HelloAnswer::Accepted("server:").encode());
        let mut answer = wire::returned(&[WireValue::None]).to_vec();
        answer[..8].copy_from_slice(&(1_u64 << 60).to_le_bytes());
        board.send(&answer);
        while !stop.load(Ordering::Relaxed) && board.stream.write_all(&[0; 4096]).is_ok() {}
    });
    let (told, outcome) = std::sync::mpsc::channel();
    thread::spawn(move || {
        let session = connector().handshake_timeout(Duration::from_millis(200)).connect_blocking(&address);
        told.send(session.map(drop).map_err(|error| error.into_rpc_error())).unwrap();
    });
    assert_eq!(kind_of(outcome.recv_timeout(LIMIT).unwrap()), ErrorKind::PeerSilent);
    is_over.store(true, Ordering::Relaxed);
    board.join().unwrap();
}

/// A server of TVM whose answers nobody takes stops for good.
#[test]
fn what_is_unanswered_at_the_end_is_taken() {
    let (begun, has_begun) = tokio::sync::oneshot::channel();
    let (address, board) = Board::begun(UNLIMITED, move |mut board| {
        assert!(matches!(board.request(), Some(wire::Request::GetFunction { .. })));
        board.value(WireValue::Pointer(8));
        for _ in 0..2 {
            assert!(matches!(board.request(), Some(wire::Request::Call { function: 8, .. })));
        }
        begun.send(()).unwrap();
        board.answer_after_the_end();
    });
    let session = connect(&address).unwrap();
    let slow = find(&session, "slow").unwrap();
    let calls = [slow.call::<()>(()).start(), slow.call::<()>(()).start()];
    has_begun.blocking_recv().unwrap();
    drop((calls, slow, session));
    board.join().unwrap();
    // The same before there is a session.
    let (begun, has_begun) = tokio::sync::oneshot::channel();
    let (address, board) = Board::start(move |mut board| {
        board.send(&HelloAnswer::Accepted("server:").encode());
        assert!(matches!(board.request(), Some(wire::Request::Init { .. })));
        begun.send(()).unwrap();
        board.answer_after_the_end();
    });
    let runtime = Runtime::new().unwrap();
    runtime.block_on(async {
        let connector = connector().handshake_timeout(LIMIT);
        tokio::select! {
            session = connector.connect(&address) => panic!("{session:?}"),
            begun = has_begun => begun.unwrap(),
        }
    });
    board.join().unwrap();
}

#[test]
fn files_are_sent_once_and_lists_are_charged() {
    let (address, board) = Board::begun(None, |mut board| {
        let names = wire::CallResult::Str(",".repeat(1 << 20).into());
        for answer in [wire::exception("no room"), wire::returned_call(names)] {
            assert!(matches!(board.request(), Some(wire::Request::GetFunction { .. })));
            board.value(WireValue::Pointer(8));
            assert!(matches!(board.request(), Some(wire::Request::Call { function: 8, .. })));
            board.send(&answer);
        }
        assert!(matches!(board.request(), Some(wire::Request::GetFunction { .. })));
        board.value(WireValue::Pointer(0));
    });
    let session = connect(&address).unwrap();
    let call = |name: &str, args: Vec<Value>| {
        let function = function(&session, name);
        submit(&session, Operation::Call { function: function.handle(), args })
    };
    let file = call("rpc.file.begin_write", vec!["x".into(), Value::Null]).unwrap();
    let write = |at: i64| call("rpc.file.write", vec![file.clone(), at.into(), Bytes::from_static(b"data").into()]);
    write(0).unwrap();
    write(4).unwrap();
    // A second attempt has no data to send.
    assert_eq!(kind_of(call("rpc.file.commit", vec![file.clone()])), ErrorKind::Application);
    assert_eq!(kind_of(call("rpc.file.commit", vec![file.clone()])), ErrorKind::InvalidArgument);
    assert_eq!(kind_of(write(8)), ErrorKind::InvalidArgument);
    // Each name would be a path of its own.
    let error = Files::new(&session).ls(&"d/".repeat(500)).wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded, "{error}");
    assert_eq!(kind_of(find(&session, "missing")), ErrorKind::NotFound);
    drop(session);
    board.join().unwrap();
}

#[test]
fn copies_go_in_pieces_of_what_the_server_takes() {
    let (address, board) = Board::begun(Some(120), |mut board| {
        let (mut memory, mut sizes) = (vec![0; 200], Vec::new());
        while let Some(event) = board.next() {
            match event {
                ServerEvent::Request(wire::Request::Alloc { .. }) => board.value(WireValue::Pointer(64)),
                ServerEvent::CopyTo { to, len } => {
                    assert_eq!((to.data, to.size_bytes()), (64, Some(len)));
                    let at = to.byte_offset as usize;
                    let data = board.payload();
                    memory[at..at + data.len()].copy_from_slice(&data);
                    sizes.push(len);
                    board.value(WireValue::None);
                }
                ServerEvent::Request(wire::Request::CopyFrom { from, len }) => {
                    let at = from.byte_offset as usize;
                    sizes.push(len);
                    board.send(&wire::copy_ack_header(len));
                    let data = memory[at..at + len as usize].to_vec();
                    board.send(&data);
                }
                ServerEvent::Request(wire::Request::Shutdown) => break,
                _ => board.value(WireValue::None),
            }
        }
        sizes
    });
    let session = connect(&address).unwrap();
    let tensor = session.alloc(Device::cpu(), DataType::F32, &[50]).wait().unwrap();
    let data: Vec<u8> = (0..200).collect();
    session.copy_to_remote(&tensor, data.clone()).wait().unwrap();
    assert_eq!(session.copy_from_remote(&tensor).wait().unwrap(), data);
    session.shutdown().wait().unwrap();
    assert_eq!(board.join().unwrap(), [64, 64, 64, 8].repeat(2));
}

/// Turns the bytes of each element around, as a server with the other order of bytes does by the
/// type that a copy names.
fn swapped(dtype: DataType, data: &[u8]) -> Vec<u8> {
    let element = (usize::from(dtype.bits) * usize::from(dtype.lanes)).div_ceil(8);
    data.chunks(element).flat_map(|element| element.iter().rev().copied()).collect()
}

#[test]
fn pieces_of_a_copy_are_of_whole_elements() {
    let vector = |code, bits, lanes| DataType { lanes, ..DataType::new(code, bits) };
    let (int, float) = (DataTypeCode::INT, DataTypeCode::FLOAT);
    for (dtype, count) in [
        (DataType::U8, 200),
        (DataType::BOOL, 200),
        (DataType::F16, 100),
        (DataType::F64, 25),
        (vector(float, 32, 3), 17),
        (vector(float, 16, 5), 21),
        (vector(float, 64, 8), 3),
        (vector(int, 8, 7), 30),
        (vector(int, 4, 1), 401),
    ] {
        let (address, board) = Board::begun(Some(120), move |mut board| {
            let mut memory = vec![0; 256];
            while let Some(event) = board.next() {
                match event {
                    ServerEvent::Request(wire::Request::Alloc { header, .. }) => {
                        assert_eq!((header.dtype, &header.shape[..]), (dtype, &[count][..]));
                        board.value(WireValue::Pointer(64));
                    }
                    ServerEvent::CopyTo { to, len } => {
                        assert_eq!(to.size_bytes(), Some(len));
                        let (at, data) = (to.byte_offset as usize, board.payload());
                        memory[at..at + data.len()].copy_from_slice(&swapped(to.dtype, &data));
                        board.value(WireValue::None);
                    }
                    ServerEvent::Request(wire::Request::CopyFrom { from, len }) => {
                        let at = from.byte_offset as usize;
                        let data = swapped(from.dtype, &memory[at..at + len as usize]);
                        board.send(&[&wire::copy_ack_header(len)[..], &data].concat());
                    }
                    ServerEvent::Request(wire::Request::Shutdown) => break,
                    _ => board.value(WireValue::None),
                }
            }
            memory
        });
        let session = connect(&address).unwrap();
        let tensor = session.alloc(Device::cpu(), dtype, &[count]).wait().unwrap();
        let len = dtype.size_bytes(count as u64).unwrap();
        let data: Vec<u8> = (1..=len).map(|at| at as u8).collect();
        session.copy_to_remote(&tensor, data.clone()).wait().unwrap();
        assert_eq!(session.copy_from_remote(&tensor).wait().unwrap(), data);
        session.shutdown().wait().unwrap();
        assert_eq!(board.join().unwrap()[..data.len()], swapped(dtype, &data), "{dtype}");
    }
}

#[test]
fn a_tensor_of_an_impossible_size_is_freed() {
    let (address, board) = Board::begun(UNLIMITED, |mut board| {
        assert!(matches!(board.request(), Some(wire::Request::GetFunction { .. })));
        board.value(WireValue::Pointer(5));
        assert!(matches!(board.request(), Some(wire::Request::Call { function: 5, .. })));
        let shape = vec![i64::MAX, i64::MAX];
        let header = TensorHeader { data: 6, device: Device::cpu(), dtype: DataType::F32, shape, byte_offset: 0 };
        board.send(&wire::returned_call(wire::CallResult::Tensor(header, 77)));
        let mut freed = Vec::new();
        while let Some(wire::Request::Free { handle }) = board.request() {
            freed.push(handle);
            board.value(WireValue::None);
        }
        freed
    });
    let session = connect(&address).unwrap();
    let large = find(&session, "large").unwrap();
    let error = large.call::<Value>(()).deadline(Instant::now() + LIMIT).wait().unwrap_err();
    assert!(error.request_may_have_run(), "{error}");
    drop(large);
    session.shutdown().wait().unwrap();
    assert_eq!(board.join().unwrap(), [77, 5]);
}

#[test]
fn a_server_that_breaks_the_protocol_ends_its_session_alone() {
    let huge = [&(u64::MAX / 2).to_le_bytes()[..], &4_i32.to_le_bytes(), &[0; 100]].concat();
    let unasked = [wire::returned(&[WireValue::Pointer(0)]), wire::returned(&[WireValue::None])].concat();
    let is_timed_out = wire::exception("RPCSessionTimeoutError: over");
    for (answer, expected) in [
        (wire::returned(&[WireValue::Bool(true)]), ErrorKind::Protocol),
        (wire::returned(&[]), ErrorKind::Protocol),
        (wire::Request::Call { function: 1, args: Vec::new() }.encode(), ErrorKind::Protocol),
        (wire::copy_ack_header(4).to_vec(), ErrorKind::Protocol),
        (vec![1, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0], ErrorKind::Protocol),
        (huge, ErrorKind::PeerLost),
        (unasked, ErrorKind::NotFound),
        (wire::shutdown(), ErrorKind::PeerLost),
        (is_timed_out, ErrorKind::SessionTimeout),
        (wire::exception("no"), ErrorKind::Application),
        (vec![0; 8 * 1000], ErrorKind::PeerLost),
        (Vec::new(), ErrorKind::PeerLost),
    ] {
        let sent = answer.clone();
        let (address, board) = Board::begun(None, move |mut board| {
            board.request().unwrap();
            board.send(&sent);
            board.leave();
        });
        let session = connect(&address).unwrap();
        assert_eq!(kind_of(find(&session, "x")), expected, "{answer:x?}");
        board.join().unwrap();
        let ended = current_thread().block_on(session.ended());
        assert!(ended.ends_session(), "{ended}");
    }
    // Before there is a session.
    for (answer, expected) in [
        (b"HTTP/1.1 400 Bad Request".to_vec(), ErrorKind::Protocol),
        (HelloAnswer::Mismatch.encode(), ErrorKind::Refused),
        (HelloAnswer::Duplicate.encode(), ErrorKind::Refused),
        (Vec::new(), ErrorKind::PeerLost),
        (
            [HelloAnswer::Accepted("server:").encode(), wire::exception("other version")].concat(),
            ErrorKind::VersionMismatch,
        ),
        ([HelloAnswer::Accepted("server:").encode(), wire::shutdown()].concat(), ErrorKind::PeerLost),
    ] {
        let (address, board) = Board::start(move |mut board| {
            board.send(&answer);
            board.leave();
        });
        let error = connector().handshake_timeout(LIMIT).connect_blocking(&address).unwrap_err().into_rpc_error();
        assert_eq!(error.kind(), expected, "{error}");
        board.join().unwrap();
    }
}

#[test]
fn the_command_line_works_at_a_server_of_tvm() {
    let fixture = Fixture::new();
    let address = &fixture.address();
    let run = cli(&["call", address, "rpc.test.addone", "41"]);
    assert_eq!((run.code, run.stdout.trim()), (0, "42"), "{}", run.stderr);
    let run = cli(&["time", address, "rpc.test.addone", "1", "--repeat", "3"]);
    assert!(run.code == 0 && run.stdout.contains("(3 samples)"), "{}{}", run.stdout, run.stderr);
    let run = cli(&["info", address]);
    assert!(run.code == 0 && run.stdout.contains("TVM RPC 0.8.0") && run.stdout.contains("cpu:0"), "{}", run.stdout);
    let run = cli(&["doctor", address]);
    assert!(run.code == 0 && run.stdout.contains("works"), "{}{}", run.stdout, run.stderr);
    // A file that is put is there for as long as the session.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file.bin");
    let (file, copy) = (file.to_str().unwrap(), folder.path().join("copy.bin"));
    std::fs::write(file, [7; 100_000]).unwrap();
    let run = cli(&["put", address, file]);
    assert!(run.code == 0 && run.stderr.starts_with("file.bin: 97.66 KiB in "), "{}{}", run.stdout, run.stderr);
    let run = failing_cli(&["get", address, "file.bin", copy.to_str().unwrap()]);
    assert!(run.code != 0 && run.stderr.contains("file.bin"), "{}", run.stderr);
    assert!(!copy.exists());
    let run = failing_cli(&["functions", address]);
    assert!(run.code != 0 && run.stderr.contains("the server cannot list its functions"), "{}", run.stderr);
    let run = failing_cli(&["call", address, "rpc.test.except", "no such luck"]);
    assert!(run.code != 0 && run.stderr.contains("no such luck"), "{}", run.stderr);
}

#[test]
fn files_are_sent_fetched_and_removed() {
    let fixture = Fixture::new();
    let session = fixture.connect();
    let files = Files::new(&session);
    // Several pieces, which the protocol sends as one.
    let data: Vec<u8> = (0..2_500_000_u32).map(|at| (at % 249) as u8).collect();
    files.put_bytes("models/a.bin", data.clone()).wait().unwrap();
    files.put("empty", &[][..]).wait().unwrap();
    let mut copy = Vec::new();
    assert_eq!(files.get("models/a.bin", &mut copy).wait().unwrap(), data.len() as u64);
    assert!(copy == data);
    let mut names: Vec<_> = files.ls("").wait().unwrap().into_iter().map(|file| file.name).collect();
    names.sort_unstable();
    assert_eq!(names, ["empty", "models"]);
    assert_eq!(files.ls("models").wait().unwrap()[0].name, "models/a.bin");
    assert_eq!(files.folders().wait().unwrap(), ["models"]);
    files.rm("models/a.bin").wait().unwrap();
    assert_eq!(kind_of(files.rm("models/a.bin").wait()), ErrorKind::NotFound);
    assert!(files.get("models/a.bin", &mut copy).wait().is_err());
    for outside in ["../x", "/etc/passwd"] {
        assert_eq!(kind_of(files.put_bytes(outside, "x").wait()), ErrorKind::InvalidArgument);
        assert_eq!(kind_of(files.get(outside, &mut copy).wait()), ErrorKind::InvalidArgument);
        assert_eq!(kind_of(files.rm(outside).wait()), ErrorKind::InvalidArgument);
        assert_eq!(kind_of(session.load_module(outside).wait()), ErrorKind::InvalidArgument);
    }
    // One message holds a file: more is refused before anything is kept.
    let error = files.put_sized("large", 65 << 20, std::io::repeat(0)).wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded, "{error}");
    assert!(error.message().contains("max_message"), "{error}");
}

/// A server of the package `apache-tvm`, whose process ends with this.
struct StockServer(Child);

impl StockServer {
    /// Starts the server. Returns it, and its address; `None` without TVM.
    fn start(environment: &tvm_ffi::Environment) -> Option<(Self, String)> {
        environment.script("tvm_server.py").map(Self::of_script)
    }

    /// Starts the server of a script, which prints its port.
    fn of_script(mut script: Command) -> (Self, String) {
        script.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut server = Self(script.spawn().unwrap());
        let mut port = String::new();
        BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut port).unwrap();
        (server, format!("tvm://127.0.0.1:{}/board", port.trim()))
    }
}

impl Drop for StockServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_server_of_tvm_itself_is_used() {
    let Some(environment) = tvm_ffi::environment() else { return };
    let (Some(model), Some((_server, address))) = (environment.model(), StockServer::start(environment)) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let session = connector().handshake_timeout(LIMIT).connect_blocking(&address).unwrap();
    // The server is used and left in good order below, and serves one session after the other.
    assert_eq!(function(&session, "test.add").call::<i64>((40_i64, 2_i64)).wait().unwrap(), 42);
    let echo = function(&session, "test.echo");
    for value in [
        Value::Null,
        Value::Bool(true),
        Value::Float(0.5),
        Value::Str("short".to_owned()),
        Value::Device(Device::cpu()),
    ] {
        assert_eq!(echo.call::<Value>((value.clone(),)).wait().unwrap(), value);
    }
    for text in ["a text of more than seven bytes", ""] {
        assert_eq!(echo.call::<String>((text,)).wait().unwrap(), text);
    }
    for bytes in [&b"short"[..], b"more than seven bytes \0\xff"] {
        assert_eq!(echo.call::<Bytes>((Bytes::from_static(bytes),)).wait().unwrap(), bytes);
    }
    // Containers are built there.
    let show = function(&session, "test.show");
    let list = Value::List(vec![1_i64.into(), "two".into(), Value::List(vec![0.5.into()])]);
    let map = Value::Map(vec![("a".into(), Value::Shape(vec![2, 3])), ("b".into(), Value::List(vec![]))]);
    for (value, shown) in
        [(list, "[1, two, [0.5]]"), (map, "{a: (2, 3), b: []}"), (Value::Shape(vec![]), "()"), (Value::Int(7), "7")]
    {
        assert_eq!(show.call::<String>((value,)).wait().unwrap(), shown);
    }
    let many = Value::List(vec![Value::List(vec![]); 300]);
    assert_eq!(kind_of(show.call::<String>((many,)).wait()), ErrorKind::LimitExceeded);
    let error = function(&session, "test.raise").call::<()>(("too bad",)).wait().unwrap_err();
    assert_eq!((error.kind(), error.message()), (ErrorKind::Application, "too bad"));
    let adder: RemoteFunction = function(&session, "test.adder").call((40_i64,)).wait().unwrap();
    assert_eq!(adder.call::<i64>((2_i64,)).wait().unwrap(), 42);
    // Tensors: of this side with their copies, of the server, and as arguments.
    let count = 600_000;
    let tensor = session.alloc(Device::cpu(), DataType::F32, &[count]).wait().unwrap();
    let data = rpc_core::dlpack::to_bytes(&vec![0.5_f32; count as usize]);
    session.copy_to_remote(&tensor, data.clone()).wait().unwrap();
    assert!(session.copy_from_remote(&tensor).wait().unwrap() == data);
    let sum: f64 = function(&session, "test.sum").call((&tensor,)).wait().unwrap();
    assert!((sum - count as f64 / 2.0).abs() < 1.0, "{sum}");
    let ones: RemoteTensor = function(&session, "test.ones").call((3_i64,)).wait().unwrap();
    session.copy_among_remote(&ones, &tensor.view(8, DataType::F32, &[3], None)).wait().unwrap();
    let start = session.copy_range_from_remote(&tensor, 4..12).wait().unwrap();
    assert_eq!(start, rpc_core::dlpack::to_bytes(&[0.5_f32, 1.0]));
    assert_eq!(session.attribute(Device::cpu(), DeviceAttribute::Exists).wait().unwrap(), Value::Bool(true));
    // A function that returns its argument: servers of TVM cannot send that.
    assert_eq!(kind_of(echo.call::<Value>((&ones,)).wait()), ErrorKind::Protocol);
    assert_eq!(echo.call::<i64>((1_i64,)).wait().unwrap(), 1);
    // Files, modules by their path and by their digest, and measurements.
    let files = Files::new(&session);
    let code = std::fs::read(environment.compile("kernels.c")).unwrap();
    files.put_bytes("kernels.so", code.clone()).wait().unwrap();
    let mut copy = Vec::new();
    files.get("kernels.so", &mut copy).wait().unwrap();
    assert!(copy == code);
    assert_eq!(kind_of(files.ls("").wait()), ErrorKind::Unsupported);
    assert_eq!(kind_of(files.folders().wait()), ErrorKind::Unsupported);
    files.rm("never-there").wait().unwrap();
    assert_eq!(kind_of(function(&session, "rpc.echo").call::<Value>((&ones,)).wait()), ErrorKind::Unsupported);
    let digest = rpc_server::modules::hash(std::fs::File::open(environment.compile("kernels.c")).unwrap()).unwrap().0;
    let modules = Modules::new(&session);
    assert!(modules.upload_bytes(digest, code.clone()).wait().unwrap());
    assert!(!modules.upload_bytes(digest, code).wait().unwrap());
    for module in [session.load_module("kernels.so"), modules.load(digest)] {
        let module = module.wait().unwrap();
        let scale = module.function("scale").wait().unwrap();
        scale.call::<()>((&ones, &ones, 2.0)).wait().unwrap();
        let options = TimeOptions { number: 2, repeat: 3, ..TimeOptions::default() };
        let samples =
            current_thread().block_on(time_function(&session, &scale, &options, (&ones, &ones, 1.0))).unwrap();
        assert!(samples.len() == 3 && samples.iter().all(|sample| *sample > 0.0), "{samples:?}");
        assert_eq!(kind_of(module.function("missing").wait()), ErrorKind::NotFound);
    }
    assert_eq!(session.copy_from_remote(&ones).wait().unwrap(), rpc_core::dlpack::to_bytes(&[4.0_f32; 3]));
    runs_a_compiled_model(&session, model);
    session.shutdown().wait().unwrap();
    drop(session);
    // The next session, by the command line; the server lists its functions.
    let run = cli(&["functions", &address, "test."]);
    assert!(run.code == 0 && run.stdout.contains("test.adder"), "{}{}", run.stdout, run.stderr);
    // Sessions that end with requests unanswered: the frees of many handles, and two calls.
    let connect = || connector().handshake_timeout(LIMIT).connect_blocking(&address).unwrap();
    let session = connect();
    let found: Vec<_> = (0..20).map(|_| function(&session, "test.add")).collect();
    drop((found, session));
    let session = connect();
    let sleep = function(&session, "test.sleep");
    let calls = [sleep.call::<()>((0.2,)).start(), sleep.call::<()>((0.2,)).start()];
    // Time in which both are sent.
    let _ = session.get_function("test.add").deadline(Instant::now() + Duration::from_millis(50)).wait();
    drop((calls, sleep, session));
    let session = connect();
    assert_eq!(function(&session, "test.add").call::<i64>((1_i64, 2_i64)).wait().unwrap(), 3);
    session.shutdown().wait().unwrap();
    // A program is killed that has asked for more than the call that runs.
    let begun = folder.path().join("begun");
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.args(["--exact", "tvm_client::a_program_that_is_killed"]);
    let mut program = program.env(AT, &address).env(BEGUN, &begun).stdout(Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    while !begun.exists() {
        assert!(start.elapsed() < LIMIT && program.try_wait().unwrap().is_none(), "the program has not called");
        thread::sleep(Duration::from_millis(1));
    }
    // Time in which what follows the call is sent.
    thread::sleep(Duration::from_millis(50));
    program.kill().unwrap();
    program.wait().unwrap();
    std::fs::remove_file(&begun).unwrap();
    let session = connect();
    assert_eq!(function(&session, "test.add").call::<i64>((3_i64, 2_i64)).wait().unwrap(), 5);
    session.shutdown().wait().unwrap();
    // Chains of servers: of ours and TVM's, in either order.
    let ours = Fixture::new();
    let behind = |first: &str, second: &str| format!("{first}?then={}", second.strip_prefix("tvm://").unwrap());
    for (chain, name) in
        [(behind(&ours.address(), &address), "test.echo"), (behind(&address, &ours.address()), "testing.echo")]
    {
        let session = connector().handshake_timeout(LIMIT).connect_blocking(&chain).unwrap();
        assert_eq!(function(&session, name).call::<String>(("through",)).wait().unwrap(), "through");
        let tensor = session.alloc(Device::cpu(), DataType::U8, &[5]).wait().unwrap();
        session.copy_to_remote(&tensor, &b"abcde"[..]).wait().unwrap();
        assert_eq!(session.copy_from_remote(&tensor).wait().unwrap(), b"abcde"[..]);
        Files::new(&session).put_bytes("x", "y").wait().unwrap();
        session.shutdown().wait().unwrap();
    }
    let nowhere = connector().handshake_timeout(LIMIT).connect_blocking(&behind(&address, "tvm://127.0.0.1:1"));
    let error = nowhere.unwrap_err().into_rpc_error();
    assert!(error.kind() == ErrorKind::Refused && error.message().contains("the one behind it"), "{error}");
}

/// The client of an older version of TVM at our server, and our client at its server.
fn talks_to_version(version: &str) {
    let Some(environment) = tvm_ffi::environment() else { return };
    let Some(mut script) = environment.script_of_version(version, "tvm_version.py") else { return };
    let ours = Fixture::new();
    let at = ours.address();
    script.arg(at.strip_prefix("tvm://").unwrap().strip_suffix("/board").unwrap()).arg(version);
    // The client has passed when the server's port is known.
    let (_server, address) = StockServer::of_script(script);
    assert!(address.starts_with("tvm://127.0.0.1:") && address != "tvm://127.0.0.1:/board", "the client has failed");
    ours.is_left_with(0);
    let session = connector().handshake_timeout(LIMIT).connect_blocking(&address).unwrap();
    let echo = function(&session, "test.echo");
    for value in [
        Value::Null,
        Value::Bool(true),
        Value::Int(i64::MIN),
        Value::Float(0.5),
        Value::Str("a text of more than seven bytes".to_owned()),
        Value::Bytes(Bytes::from_static(b"more than seven bytes \0\xff")),
        Value::DataType(DataType::F16),
        Value::Device(Device::cpu()),
    ] {
        assert_eq!(echo.call::<Value>((value.clone(),)).wait().unwrap(), value);
    }
    let list = Value::List(vec![1_i64.into(), Value::Shape(vec![2, 3])]);
    assert_eq!(function(&session, "test.show").call::<String>((list,)).wait().unwrap(), "[1, (2, 3)]");
    let adder: RemoteFunction = function(&session, "test.adder").call((40_i64,)).wait().unwrap();
    assert_eq!(adder.call::<i64>((2_i64,)).wait().unwrap(), 42);
    let error = function(&session, "test.raise").call::<()>(("too bad",)).wait().unwrap_err();
    assert_eq!((error.kind(), error.message()), (ErrorKind::Application, "too bad"));
    assert_eq!(kind_of(session.get_function("missing").wait()), ErrorKind::NotFound);
    let count = 1 << 20;
    let tensor = session.alloc(Device::cpu(), DataType::F32, &[count]).wait().unwrap();
    let data = rpc_core::dlpack::to_bytes(&vec![0.5_f32; count as usize]);
    session.copy_to_remote(&tensor, data.clone()).wait().unwrap();
    assert!(session.copy_from_remote(&tensor).wait().unwrap() == data);
    let ones: RemoteTensor = function(&session, "test.ones").call((3_i64,)).wait().unwrap();
    assert_eq!(session.copy_from_remote(&ones).wait().unwrap(), rpc_core::dlpack::to_bytes(&[1.0_f32; 3]));
    let (files, mut copy) = (Files::new(&session), Vec::new());
    files.put_bytes("x.bin", data.clone()).wait().unwrap();
    files.get("x.bin", &mut copy).wait().unwrap();
    assert!(copy == data);
    session.shutdown().wait().unwrap();
}

#[test]
fn the_client_and_the_server_of_tvm_0_25_are_peers() {
    talks_to_version("0.25");
}

#[test]
fn the_client_and_the_server_of_tvm_0_26_are_peers() {
    talks_to_version("0.26");
}

/// Uploads a model that TVM has compiled, runs and times it: as `tvm_model.py` does.
fn runs_a_compiled_model(session: &Session, folder: &Path) {
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
    let code = read("model.so");
    let (modules, digest) = (Modules::new(session), rpc_server::modules::hash(&code[..]).unwrap().0);
    modules.upload_bytes(digest, code).wait().unwrap();
    let function = |module: &RemoteModule, name: &str| module.function(name).wait().unwrap();
    let library = modules.load(digest).wait().unwrap();
    let machine: RemoteModule = function(&library, "vm_load_executable").call(()).wait().unwrap();
    function(&machine, "vm_initialization").call::<()>((1, 0, 2)).wait().unwrap();
    let main = function(&machine, "main");
    let input = |name: &str, shape: &[i64]| {
        let tensor = session.alloc(Device::cpu(), DataType::F32, shape).wait().unwrap();
        session.copy_to_remote(&tensor, read(name)).wait().unwrap();
        tensor
    };
    let (x, hidden, output) =
        (input("x.f32", &[4, 64]), input("hidden.f32", &[64, 32]), input("output.f32", &[32, 10]));
    let classes: RemoteTensor = main.call((&x, &hidden, &output)).wait().unwrap();
    assert!(session.copy_from_remote(&classes).wait().unwrap() == read("classes.f32")[..], "the numbers differ");
    let options = TimeOptions { number: 2, repeat: 3, ..TimeOptions::default() };
    let samples = current_thread().block_on(time_function(session, &main, &options, (&x, &hidden, &output))).unwrap();
    assert!(samples.len() == 3 && samples.iter().all(|sample| *sample > 0.0), "{samples:?}");
}

/// The same server is a node by its native protocol.
#[test]
fn disco_does_not_go_over_the_protocol_of_tvm_and_says_so() {
    let fixture = Fixture::new();
    let start = |address: String| disco::SocketSession::new([address], 1, 1).connector(connector()).start().wait();
    let error = start(fixture.address()).unwrap_err();
    assert_eq!(error.cause().kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("reach the node by its native protocol"), "{error}");
    start(fixture.address().replace("tvm://", "tcp://")).unwrap().shutdown().wait().unwrap();
}

/// Environment variable with the address at which `a_client_of_a_scenario` works.
const CLIENT_AT: &str = "RPC_TESTS_CLIENT_AT";

/// Lets the scenarios of a script in `tests/python` run `a_client_of_a_scenario`, as
/// `tvm_model.check_ours` does.
pub(crate) fn name_client_to(script: &mut Command) {
    script.env("RPC_TESTS_CLIENT", std::env::current_exe().unwrap());
}

/// A client of this project at a server under the test functions of TVM, for scenarios of real
/// servers, trackers and proxies. Does nothing as a test.
#[test]
fn a_client_of_a_scenario() {
    let Ok(address) = std::env::var(CLIENT_AT) else { return };
    let model = std::env::var("RPC_TESTS_MODEL").unwrap();
    let session = connector().handshake_timeout(LIMIT).queue_timeout(LIMIT).connect_blocking(&address).unwrap();
    assert_eq!(function(&session, "rpc.test.addone").call::<i64>((41_i64,)).wait().unwrap(), 42);
    let text: String = function(&session, "rpc.test.strcat").call(("abc", 11_i64)).wait().unwrap();
    assert_eq!(text, "abc:11");
    let data = rpc_core::dlpack::to_bytes(&vec![0.5_f32; 100_000]);
    let tensor = session.alloc(Device::cpu(), DataType::F32, &[100_000]).wait().unwrap();
    session.copy_to_remote(&tensor, data.clone()).wait().unwrap();
    assert!(session.copy_from_remote(&tensor).wait().unwrap() == data);
    runs_a_compiled_model(&session, Path::new(&model));
    session.shutdown().wait().unwrap();
    println!("the client has done its work");
}

/// Environment variables of a program that is killed: the server's address, and the file by which
/// the server says that the call has begun.
const AT: &str = "RPC_TESTS_KILLED_AT";
const BEGUN: &str = "RPC_TESTS_KILLED_BEGUN";

/// The program that `the_server_of_tvm_itself_is_used` kills. Does nothing as a test.
#[test]
fn a_program_that_is_killed() {
    let (Ok(address), Ok(begun)) = (std::env::var(AT), std::env::var(BEGUN)) else { return };
    let session = connector().handshake_timeout(LIMIT).connect_blocking(&address).unwrap();
    let (wait, add) = (function(&session, "test.wait"), function(&session, "test.add"));
    let _call = wait.call::<()>((begun,)).start();
    let _further: Vec<_> = (0..10).map(|_| add.call::<i64>((1_i64, 1_i64)).start()).collect();
    thread::sleep(LIMIT);
}

#[test]
fn a_call_that_is_waited_for_needs_no_other_thread() {
    let fixture = Fixture::new();
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.args(["--exact", "tvm_client::a_program_without_a_runtime"]).env(WITHOUT_RUNTIME_AT, fixture.address());
    let run = program.output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stdout));
}

/// Environment variable of a program without a runtime: the server's address.
const WITHOUT_RUNTIME_AT: &str = "RPC_TESTS_WITHOUT_RUNTIME_AT";

/// The program of the test above. Does nothing as a test.
#[test]
fn a_program_without_a_runtime() {
    let Ok(address) = std::env::var(WITHOUT_RUNTIME_AT) else { return };
    let session = connect(&address).unwrap();
    assert_eq!(function(&session, "testing.echo").call::<i64>((7_i64,)).wait().unwrap(), 7);
    let tensor = session.alloc(Device::cpu(), DataType::U8, &[100_000]).wait().unwrap();
    session.copy_to_remote(&tensor, vec![3; 100_000]).wait().unwrap();
    assert!(session.copy_from_remote(&tensor).wait().unwrap()[..] == [3; 100_000]);
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten();
    let names = threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok());
    let names: Vec<_> = names.map(|name| name.trim().to_owned()).collect();
    assert!(names.iter().all(|name| name != "rpc-io"), "{names:?}");
    session.shutdown().wait().unwrap();
}

fn current_thread() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}
