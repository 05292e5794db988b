//! Our client at a server around TVM's minimal runtime, of which the servers of small boards are
//! made. It is compiled here from the sources in TVM's package.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
use rpc_core::client::{Files, Modules};
use rpc_core::{DataType, Device, DeviceType, ErrorKind, Packed, RemoteFunction, Session, Value};
use rpc_server::builtins::{TimeOptions, time_function};
use rpc_transports::Connector;

use crate::native_modules::tvm_ffi;

/// Time limit of the handshake.
const LIMIT: Duration = Duration::from_secs(30);

/// The server, which serves one session.
struct MinimalServer(Child);

impl MinimalServer {
    fn start(program: &Path) -> (Self, Session) {
        let mut server = Self(Command::new(program).stdout(Stdio::piped()).spawn().unwrap());
        let mut port = String::new();
        BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut port).unwrap();
        let address = format!("tvm://127.0.0.1:{}/board", port.trim());
        let connector = Connector::new().transports(rpc_server::transports()).handshake_timeout(LIMIT);
        (server, connector.connect_blocking(&address).unwrap())
    }

    /// Waits for the end of the server, which ends in good order with its session.
    fn ends(mut self, session: Session) {
        session.shutdown().wait().unwrap();
        drop(session);
        let status = self.0.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}

impl Drop for MinimalServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn function(session: &Session, name: &str) -> RemoteFunction {
    session.get_function(name).wait().unwrap()
}

#[test]
fn a_server_of_the_minimal_runtime_is_used() {
    let Some(environment) = tvm_ffi::environment() else { return };
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = environment.minimal_server(folder.path()) else { return };
    let (server, session) = MinimalServer::start(&program);
    assert_eq!(function(&session, "board.add").call::<i64>((40_i64, 2_i64)).wait().unwrap(), 42);
    let join = function(&session, "board.join");
    let joined: String = join.call(("a longer text", Bytes::from_static(b"and more than seven bytes"))).wait().unwrap();
    assert_eq!(joined, "a longer text:and more than seven bytes");
    let adder: RemoteFunction = function(&session, "board.adder").call((40_i64,)).wait().unwrap();
    assert_eq!(adder.call::<i64>((2_i64,)).wait().unwrap(), 42);

    // Arrays of 4 MB, there and back.
    let count = 1 << 20;
    let values: Vec<f32> = (0..count).map(|at| at as f32).collect();
    let tensor = session.alloc(Device::cpu(), DataType::F32, &[count]).wait().unwrap();
    session.copy_to_remote(&tensor, rpc_core::dlpack::to_bytes(&values)).wait().unwrap();
    function(&session, "board.double").call::<()>((&tensor,)).wait().unwrap();
    let doubled: Vec<f32> = values.iter().map(|value| value * 2.0).collect();
    assert!(session.copy_from_remote(&tensor).wait().unwrap() == rpc_core::dlpack::to_bytes(&doubled));
    let double = function(&session, "board.double");
    let options = TimeOptions { number: 2, repeat: 3, ..TimeOptions::default() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let samples = runtime.block_on(time_function(&session, &double, &options, (&tensor,))).unwrap();
    assert!(samples.len() == 3 && samples.iter().all(|sample| *sample > 0.0), "{samples:?}");

    // Errors, after which the session goes on.
    let error = function(&session, "board.fail").call::<()>(("too bad",)).wait().unwrap_err();
    assert_eq!((error.kind(), error.message()), (ErrorKind::Application, "too bad"));
    assert_eq!(session.get_function("board.missing").wait().unwrap_err().kind(), ErrorKind::NotFound);
    let wrong = function(&session, "board.add").call::<()>(("no number", 1_i64)).wait().unwrap_err();
    assert_eq!(wrong.kind(), ErrorKind::Application, "{wrong}");
    let no_device = session.alloc(Device::new(DeviceType::CUDA, 0), DataType::U8, &[1]).wait().unwrap_err();
    assert!(no_device.message().contains("cuda"), "{no_device}");
    // It has no folder for files, and loads no modules: errors that say so.
    let files = Files::new(&session);
    let error = files.put_bytes("x", "y").wait().unwrap_err();
    assert!(error.message().contains("tvm.rpc.server.workpath"), "{error}");
    let error = files.ls("").wait().unwrap_err();
    assert!(error.kind() == ErrorKind::Unsupported && error.message().contains("tvm.rpc.server.listdir"), "{error}");
    let digest = rpc_server::modules::hash(&b"no module"[..]).unwrap().0;
    let error = Modules::new(&session).upload_bytes(digest, &b"no module"[..]).wait().unwrap_err();
    assert!(error.message().contains("tvm.rpc.server.workpath"), "{error}");
    // Values that the protocol has no form for are refused before anything is sent.
    let packed = Value::Packed(Packed::encode(&1).unwrap());
    let error = function(&session, "board.add").call::<i64>((packed, 1_i64)).wait().unwrap_err();
    assert!(error.kind() == ErrorKind::Unsupported && !error.request_may_have_run(), "{error}");
    assert_eq!(function(&session, "board.add").call::<i64>((1_i64, 2_i64)).wait().unwrap(), 3);
    drop((tensor, double, adder, join));
    server.ends(session);
}
