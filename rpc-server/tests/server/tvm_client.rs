//! Our clients at servers of TVM (`tvm://`): at a server of this project that speaks TVM's protocol.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rpc_core::{
    DataType, Device, DeviceAttribute, DeviceType, ErrorKind, Handle, Operation, Reference, Registry, RemoteFunction,
    RemoteTensor, Request, Result, RpcSession as _, Session, Tensor, TensorRef, Value,
};
use rpc_server::config::ServeConfig;
use rpc_server::{RpcServer, Running};
use rpc_transports::Connector;
use tokio::runtime::Runtime;

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
        registry.add("list", || vec![1_i64, 2]);
        registry.add_async("never", std::future::pending::<()>);
        let folder = tempfile::tempdir().unwrap();
        let config = ServeConfig {
            listen: vec!["tcp://127.0.0.1:0".parse().unwrap()],
            workdir: folder.path().join("work"),
            key: Some("board".to_owned()),
            tvm: true,
            tvm_self_test: true,
            ..ServeConfig::default()
        };
        let runtime = Runtime::new().unwrap();
        let running = runtime.block_on(RpcServer::new(registry).config(config).start()).unwrap();
        Self { running, runtime, _folder: folder }
    }

    fn address(&self) -> String {
        self.running.addresses()[0].to_string().replace("tcp://", "tvm://") + "/board"
    }

    /// Waits until the server has no sessions.
    fn has_no_sessions(&self) {
        let start = Instant::now();
        while self.running.sessions() != 0 {
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
    assert_eq!(kind_of(session.get_function("missing").wait()), ErrorKind::NotFound);
    // What the protocol has no form for is refused here.
    for unsendable in [Value::Shape(vec![1]), Value::List(vec![]), Value::Map(vec![])] {
        assert_eq!(kind_of(echo.call::<Value>((unsendable,)).wait()), ErrorKind::Unsupported);
    }
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
        submit(&session, Operation::Write { to, offset, data })
    };
    write(0, &[0; 8]).unwrap();
    write(6, &[0xf0, 0x3f]).unwrap();
    write(8, &[]).unwrap();
    let echo = function(&session, "testing.echo");
    let same: RemoteTensor = echo.call((&scalar,)).wait().unwrap();
    assert_eq!(session.copy_from_remote(&same).wait().unwrap(), 1_f64.to_le_bytes()[..]);
    // A view that a function returns begins where it should, and ends there.
    let tail: RemoteTensor = function(&session, "tail").call(()).wait().unwrap();
    assert_eq!(session.copy_from_remote(&tail).wait().unwrap(), [3.0_f32, 4.0].map(f32::to_le_bytes).concat());
    assert_eq!(session.attribute(Device::cpu(), DeviceAttribute::Exists).wait().unwrap(), Value::Bool(true));
    let cuda = Device::new(DeviceType::CUDA, 99);
    assert_eq!(session.attribute(cuda, DeviceAttribute::Exists).wait().unwrap(), Value::Bool(false));
    let stream = session.create_stream(Device::cpu()).wait().unwrap();
    session.set_stream(Device::cpu(), Some(&stream)).wait().unwrap();
    session.stream_wait(Device::cpu(), None).wait().unwrap();
    session.free_stream(stream).wait().unwrap();
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
    let copy = |offset, len| submit(&session, Operation::Read { from: good.clone(), offset, len, into: None });
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
    let never = function(&session, "never");
    let begun = Instant::now();
    let running = never.call::<()>(()).deadline(begun + Duration::from_millis(50)).start();
    let behind =
        function(&session, "rpc.echo").call::<i64>((1_i64,)).deadline(begun + Duration::from_millis(60)).start();
    let error = running.wait().unwrap_err();
    assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::DeadlineExceeded, true));
    assert_eq!(kind_of(behind.wait()), ErrorKind::DeadlineExceeded);
    // Callers that are gone do not keep the session.
    drop(never.call::<()>(()).start());
    assert_eq!(fixture.running.sessions(), 1);
    drop((never, session));
    fixture.has_no_sessions();
}

#[test]
fn a_session_ends_after_the_time_that_its_address_names() {
    let fixture = Fixture::new();
    let session = connect(&format!("{}?timeout=0.2", fixture.address())).unwrap();
    let error = function(&session, "never").call::<()>(()).wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::SessionTimeout, "{error}");
    assert!(error.message().contains("0.2s session has expired"), "{error}");
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
