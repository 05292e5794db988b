//! Clients of TVM at a server with `--tvm`: a small one that is written here from the description
//! of the wire, and the real one of the package `apache-tvm`.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::{AtomicI64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rpc_core::function::Rest;
use rpc_core::{DataType, ErrorKind, Registry, Result, Tensor};
use rpc_server::config::{ConfigError, ServeConfig, ServeError, Span};
use rpc_server::{RpcServer, Running, ServerProcess};
use rpc_transports::Connector;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use tokio::runtime::Runtime;

use crate::native_modules::tvm_ffi;

mod isolated;
mod rules;

/// Time limit of events that are expected.
const LIMIT: Duration = Duration::from_secs(30);

/// Codes of frames.
const SHUTDOWN: i32 = 1;
const INIT: i32 = 2;
const CALL: i32 = 3;
const RETURN: i32 = 4;
const EXCEPTION: i32 = 5;
const COPY_FROM: i32 = 6;
const COPY_TO: i32 = 7;
const COPY_ACK: i32 = 8;
const GET_FUNCTION: i32 = 9;
const FREE: i32 = 10;
const SET_DEVICE: i32 = 11;
const ATTRIBUTE: i32 = 12;
const ALLOC_BYTES: i32 = 13;
const FREE_DATA: i32 = 14;
const STREAM_SYNC: i32 = 15;
const COPY_AMONG: i32 = 16;
const ALLOC: i32 = 17;
const CREATE_STREAM: i32 = 18;
const FREE_STREAM: i32 = 19;
const SET_STREAM: i32 = 20;
const CURRENT_STREAM: i32 = 21;

/// A value as the client sends and reads it: its type index, and the bytes behind that.
#[derive(Clone, Debug, PartialEq)]
struct Val(i32, Vec<u8>);

const NONE: Val = Val(0, Vec::new());

fn int(value: i64) -> Val {
    Val(1, value.to_le_bytes().to_vec())
}

fn float(value: f64) -> Val {
    Val(3, value.to_le_bytes().to_vec())
}

fn pointer(handle: u64) -> Val {
    Val(4, handle.to_le_bytes().to_vec())
}

fn sized(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

fn text(text: &str) -> Val {
    Val(8, sized(text.as_bytes()))
}

/// Text or bytes in their boxed form.
fn boxed(first: i32, second: i32, content: &[u8]) -> Val {
    Val(first, [&second.to_le_bytes()[..], &sized(content)].concat())
}

fn bytes(content: &[u8]) -> Val {
    boxed(66, 66, content)
}

fn object(handle: u64) -> Val {
    Val(115, [&115_i32.to_le_bytes()[..], &handle.to_le_bytes()].concat())
}

fn module(handle: u64) -> Val {
    Val(73, handle.to_le_bytes().to_vec())
}

fn device(kind: i32, index: i32) -> Val {
    Val(6, [kind.to_le_bytes(), index.to_le_bytes()].concat())
}

fn cpu() -> Val {
    device(1, 0)
}

/// Header of a tensor on the device `cpu`, of a type's code and bits.
fn header(data: u64, (code, bits): (u8, u8), shape: &[i64], offset: u64) -> Vec<u8> {
    let mut header = data.to_le_bytes().to_vec();
    header.extend([1, 0, 0, 0, 0, 0, 0, 0]);
    header.extend((shape.len() as i32).to_le_bytes());
    header.extend([code, bits, 1, 0]);
    header.extend(shape.iter().flat_map(|dimension| dimension.to_le_bytes()));
    header.extend(offset.to_le_bytes());
    header
}

const U8: (u8, u8) = (1, 8);
const F32: (u8, u8) = (2, 32);
const F64: (u8, u8) = (2, 64);

fn tensor(data: u64, dtype: (u8, u8), shape: &[i64], offset: u64) -> Val {
    Val(7, header(data, dtype, shape, offset))
}

fn sequence(values: &[Val]) -> Vec<u8> {
    let mut sequence = (values.len() as i32).to_le_bytes().to_vec();
    for Val(index, payload) in values {
        sequence.extend(index.to_le_bytes());
        sequence.extend(payload);
    }
    sequence
}

fn frame(code: i32, body: &[u8]) -> Vec<u8> {
    [&(body.len() as u64 + 4).to_le_bytes()[..], &code.to_le_bytes(), body].concat()
}

fn call_frame(function: u64, args: &[Val]) -> Vec<u8> {
    frame(CALL, &[&function.to_le_bytes()[..], &sequence(args)].concat())
}

fn init_frame(constructor: &[Val]) -> Vec<u8> {
    frame(INIT, &[sized(b"0.8.0"), sequence(constructor)].concat())
}

fn copy_to_frame(header: &[u8], data: &[u8]) -> Vec<u8> {
    frame(COPY_TO, &[header, &sized(data)].concat())
}

fn number(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().unwrap())
}

/// Takes the values of a reply apart.
fn values(mut body: &[u8]) -> Vec<Val> {
    let mut take = |len: usize| {
        let (taken, rest) = body.split_at(len);
        body = rest;
        taken.to_vec()
    };
    let index = |bytes: Vec<u8>| i32::from_le_bytes(bytes.try_into().unwrap());
    let count = index(take(4));
    let mut values = Vec::new();
    for _ in 0..count {
        let kind = index(take(4));
        let payload = match kind {
            0 => Vec::new(),
            1..=6 => take(8),
            7 => {
                let mut header = take(24);
                let dimensions = i32::from_le_bytes(header[16..20].try_into().unwrap()) as usize;
                header.extend(take(8 * dimensions + 8));
                header
            }
            8 | 9 => {
                let len = take(8);
                [len.clone(), take(number(&len) as usize)].concat()
            }
            65 => {
                let (second, len) = (take(4), take(8));
                [second, len.clone(), take(number(&len) as usize)].concat()
            }
            other => panic!("a server does not send values of type {other}"),
        };
        values.push(Val(kind, payload));
    }
    assert!(body.is_empty(), "bytes behind the values");
    values
}

/// A client of TVM.
struct Client(TcpStream);

impl Client {
    /// Dials, and says hello with this key. Returns the answer's code, and the server's key.
    fn hello(address: &str, key: &str) -> (Self, i32, String) {
        let mut client = Self(TcpStream::connect(address.strip_prefix("tcp://").unwrap()).unwrap());
        client.0.set_read_timeout(Some(LIMIT)).unwrap();
        client.0.set_write_timeout(Some(LIMIT)).unwrap();
        let hello = [&0xff271_i32.to_le_bytes()[..], &(key.len() as i32).to_le_bytes(), key.as_bytes()].concat();
        client.send(&hello);
        let code = i32::from_le_bytes(client.read(4).try_into().unwrap());
        if code != 0xff271 {
            assert!(client.is_at_end());
            return (client, code, String::new());
        }
        let len = i32::from_le_bytes(client.read(4).try_into().unwrap());
        let key = String::from_utf8(client.read(len as usize)).unwrap();
        (client, code, key)
    }

    /// Connects, and begins the session.
    fn connect(address: &str, key: &str) -> Self {
        let (mut client, code, _) = Self::hello(address, &format!("client:{key}"));
        assert_eq!(code, 0xff271);
        assert_eq!(client.ask(&init_frame(&[])), Ok(vec![NONE]));
        client
    }

    fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    fn read(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Returns true if the server has closed the connection, and nothing is left to be read.
    fn is_at_end(&mut self) -> bool {
        match self.0.read(&mut [0]) {
            Ok(count) => count == 0,
            // Bytes that the server has not read are in its socket as it closes that.
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    fn read_frame(&mut self) -> (i32, Vec<u8>) {
        let len = number(&self.read(8));
        let code = i32::from_le_bytes(self.read(4).try_into().unwrap());
        (code, self.read(len as usize - 4))
    }

    /// Reads a reply: its values, or the text of the error.
    fn reply(&mut self) -> Result<Vec<Val>, String> {
        let (code, body) = self.read_frame();
        let values = values(&body);
        match code {
            RETURN => Ok(values),
            EXCEPTION => {
                assert!(values.len() == 1 && values[0].0 == 8, "{values:?}");
                Err(String::from_utf8(values[0].1[8..].to_vec()).unwrap())
            }
            other => panic!("a reply of code {other}"),
        }
    }

    fn ask(&mut self, frame: &[u8]) -> Result<Vec<Val>, String> {
        self.send(frame);
        self.reply()
    }

    /// Makes a request of values, which has one value as its result.
    fn request(&mut self, code: i32, values: &[Val]) -> Result<Val, String> {
        let result = self.ask(&frame(code, &sequence(values)))?;
        assert_eq!(result.len(), 1, "{result:?}");
        Ok(result[0].clone())
    }

    fn handle(&mut self, code: i32, values: &[Val]) -> u64 {
        let Val(kind, payload) = self.request(code, values).unwrap();
        assert_eq!(kind, 4);
        number(&payload)
    }

    fn function(&mut self, name: &str) -> u64 {
        self.handle(GET_FUNCTION, &[text(name)])
    }

    /// Calls a function. Returns the number in front of the result, and the result.
    fn call(&mut self, function: u64, args: &[Val]) -> Result<(i64, Val), String> {
        let result = self.ask(&call_frame(function, args))?;
        assert_eq!((result.len(), result[0].0), (2, 1), "{result:?}");
        Ok((number(&result[0].1).cast_signed(), result[1].clone()))
    }

    fn call_by_name(&mut self, name: &str, args: &[Val]) -> Result<(i64, Val), String> {
        let function = self.function(name);
        assert_ne!(function, 0, "there is {name}");
        self.call(function, args)
    }

    fn alloc(&mut self, dtype: (u8, u8), shape: &[i64]) -> u64 {
        self.handle(ALLOC, &[tensor(0, dtype, shape, 0), NONE])
    }

    fn copy_to(&mut self, header: &[u8], data: &[u8]) -> Result<(), String> {
        self.ask(&copy_to_frame(header, data)).map(|values| assert_eq!(values, [NONE]))
    }

    fn copy_from(&mut self, header: &[u8], len: u64) -> Result<Vec<u8>, String> {
        self.send(&frame(COPY_FROM, &[header, &len.to_le_bytes()].concat()));
        let (code, body) = self.read_frame();
        match code {
            COPY_ACK => Ok(body),
            EXCEPTION => Err(String::from_utf8(values(&body)[0].1[8..].to_vec()).unwrap()),
            other => panic!("a reply of code {other}"),
        }
    }
}

/// A server in this process.
struct Fixture {
    running: Running,
    runtime: Runtime,
    folder: tempfile::TempDir,
}

impl Fixture {
    fn new(change: impl FnOnce(&mut ServeConfig)) -> Self {
        let registry = Registry::new();
        registry
            .add("tail", || -> Result<Tensor> {
                Tensor::from_slice(vec![4], &[1.0_f32, 2.0, 3.0, 4.0])?.view(8, vec![2], None, DataType::F32)
            })
            .add("columns", || -> Result<Tensor> {
                Tensor::from_slice(vec![4], &[1.0_f32; 4])?.view(0, vec![2], Some(vec![2]), DataType::F32)
            });
        registry.add("list", || vec![vec![1_i64, 2], vec![3]]);
        registry.add_async("never", std::future::pending::<()>);
        let calls = AtomicI64::new(0);
        registry.add("count", move |_: Rest| calls.fetch_add(1, Ordering::Relaxed));
        let folder = tempfile::tempdir().unwrap();
        let mut config = config(folder.path());
        change(&mut config);
        let runtime = Runtime::new().unwrap();
        let running = runtime.block_on(RpcServer::new(registry).config(config).start()).unwrap();
        Self { running, runtime, folder }
    }

    fn address(&self) -> String {
        self.running.addresses()[0].to_string()
    }

    fn connect(&self) -> Client {
        Client::connect(&self.address(), "")
    }

    /// Waits until the server has this number of sessions.
    fn has_sessions(&self, count: usize) {
        let start = Instant::now();
        while self.running.sessions() != count {
            assert!(start.elapsed() < LIMIT, "{} sessions, and not {count}", self.running.sessions());
            std::thread::yield_now();
        }
    }
}

fn config(folder: &Path) -> ServeConfig {
    ServeConfig {
        listen: vec!["tcp://127.0.0.1:0".parse().unwrap()],
        workdir: folder.join("work"),
        tvm: true,
        tvm_self_test: true,
        ..ServeConfig::default()
    }
}

#[test]
fn a_client_is_served_under_its_key_alone() {
    let fixture = Fixture::new(|config| config.key = Some("board:1".to_owned()));
    let address = fixture.address();
    for (key, accepted) in [
        ("client:board:1", true),
        ("client:board:1 -unknown=1 -timeout=60", true),
        ("client:", false),
        ("client:board", false),
        ("server:board:1", false),
        ("board:1", false),
        // Each of these stops a server of TVM for good.
        ("", false),
        ("client:board:1 -timeout=abc", false),
        ("client:board:1 -timeout=-1", false),
        ("client:board:1", true),
    ] {
        let (_, code, own) = Client::hello(&address, key);
        let expected = if accepted { (0xff271, "server:board:1") } else { (0xff273, "") };
        assert_eq!((code, own.as_str()), expected, "{key}");
    }
    // In pieces of a byte.
    let mut slow = TcpStream::connect(address.strip_prefix("tcp://").unwrap()).unwrap();
    for byte in [&0xff271_i32.to_le_bytes()[..], &14_i32.to_le_bytes(), b"client:board:1"].concat() {
        slow.write_all(&[byte]).unwrap();
    }
    let mut code = [0; 4];
    slow.read_exact(&mut code).unwrap();
    assert_eq!(i32::from_le_bytes(code), 0xff271);
    // Native clients come to the same address.
    let session = Connector::new().connect_blocking(&address).unwrap();
    assert!(session.get_function("rpc.echo").wait().is_ok());
}

#[test]
fn a_session_begins_with_its_first_request_and_only_once() {
    let fixture = Fixture::new(|_| {});
    let (mut client, ..) = Client::hello(&fixture.address(), "client:");
    let early = client.request(GET_FUNCTION, &[text("testing.echo")]).unwrap_err();
    assert!(early.contains("Need to call InitRemoteSession first"), "{early}");
    for (constructor, expected) in [
        (vec![text("rpc.Nothing")], "Cannot find session constructor rpc.Nothing"),
        (vec![boxed(65, 65, b"rpc.Connect"), text("h"), int(1), text("k")], "rpc.Connect:\nrefused: "),
        (vec![text("rpc.Connect"), text("h"), int(1)], "a host, a port and a key"),
        (vec![text("rpc.PopenSession"), bytes(b"x")], "by rpc.PopenSession"),
        (vec![text("rpc.WasmSession"), bytes(b"x")], "by rpc.WasmSession"),
        (vec![int(1)], "Cannot find session constructor"),
    ] {
        let error = client.ask(&init_frame(&constructor)).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    let other = frame(INIT, &[sized(b"0.7.0"), sequence(&[])].concat());
    assert!(client.ask(&other).unwrap_err().contains("protocol version mismatch"));
    assert_eq!(client.ask(&init_frame(&[boxed(65, 65, b"rpc.LocalSession")])), Ok(vec![NONE]));
    let second = client.ask(&init_frame(&[])).unwrap_err();
    assert!(second.contains("already been initialized"), "{second}");
    assert_eq!(client.call_by_name("rpc.test.addone", &[int(1)]), Ok((1, int(2))));
}

#[test]
fn functions_take_and_return_values_of_every_kind() {
    let fixture = Fixture::new(|_| {});
    let mut client = fixture.connect();
    let echo = client.function("testing.echo");
    let dtype = Val(5, vec![2, 16, 1, 0, 0, 0, 0, 0]);
    let plain = [
        (1, int(i64::MIN)),
        (2, Val(2, 1_i64.to_le_bytes().to_vec())),
        (3, float(-0.5)),
        (5, dtype),
        (6, device(2, 3)),
        (0, NONE),
    ];
    for (kind, value) in plain {
        assert_eq!(client.call(echo, &[value.clone(), NONE]), Ok((kind, value)));
    }
    assert_eq!(client.call(echo, &[]), Ok((0, NONE)));
    // Each form of a text and of bytes.
    for long in [text("größer"), boxed(11, 65, "größer".as_bytes()), boxed(65, 65, "größer".as_bytes())] {
        assert_eq!(client.call(echo, &[long]), Ok((65, text("größer"))));
    }
    assert_eq!(client.call(echo, &[text("ab\0cd")]), Ok((65, text("ab"))), "the plain form ends at a NUL");
    let with_nul = boxed(65, 65, b"ab\0cd");
    assert_eq!(client.call(echo, std::slice::from_ref(&with_nul)), Ok((65, with_nul)));
    for content in [boxed(12, 66, b"a\0b"), bytes(b"a\0b"), Val(9, sized(b"a\0b"))] {
        assert_eq!(client.call(echo, &[content]), Ok((66, Val(9, sized(b"a\0b")))));
    }
    // A function that is returned, freed after the one that it is from.
    let add = client.function("rpc.test.add_to_lhs");
    let (kind, Val(4, plus)) = client.call(add, &[int(40)]).unwrap() else { panic!("a function is a pointer") };
    assert_eq!(kind, 68);
    assert_eq!(client.request(FREE, &[pointer(add)]), Ok(NONE));
    assert_eq!(client.call(number(&plus), &[int(2)]), Ok((1, int(42))));
    let function = Val(68, plus.clone());
    let (kind, _) = client.call(echo, &[function]).unwrap();
    assert_eq!(kind, 68, "a function of the server is an argument, too");
    // Objects that only their handles stand for.
    let (kind, Val(4, shape)) = client.call_by_name("ffi.Shape", &[int(7), int(8)]).unwrap() else { panic!() };
    assert_eq!(kind, 69);
    let shape = object(number(&shape));
    assert_eq!(client.call_by_name("rpc.testing.GetShapeElem", &[shape.clone(), int(1)]), Ok((1, int(8))));
    assert_eq!(client.call_by_name("rpc.testing.GetShapeSize", &[shape]), Ok((1, int(2))));
    let (kind, Val(4, list)) = client.call_by_name("list", &[]).unwrap() else { panic!() };
    assert_eq!(kind, 71);
    let list = number(&list);
    assert_eq!(client.call(echo, &[object(list)]).unwrap().0, 71);
    assert_eq!(client.request(FREE, &[pointer(list)]), Ok(NONE));
    assert!(client.call(echo, &[object(list)]).unwrap_err().contains("names no object"));
}

#[test]
fn errors_are_texts_and_the_session_goes_on() {
    let fixture = Fixture::new(|_| {});
    let mut client = fixture.connect();
    assert_eq!(client.call_by_name("rpc.test.except", &[text("abc")]), Err("abc".to_owned()));
    let error = client.call_by_name("testing.test_raise_error", &[text("ValueError"), text("a\nb")]);
    assert_eq!(error, Err("a\nb".to_owned()));
    // Errors repeat little: the end of a text is left out, and names have a limit.
    let long = client.call_by_name("rpc.test.except", &[text(&"\u{e9}".repeat(20_000))]).unwrap_err();
    assert_eq!(long, "\u{e9}".repeat(8192) + " … (23616 bytes more)");
    let name = "\x7f".repeat(4097);
    let error = client.request(GET_FUNCTION, &[text(&name)]).unwrap_err();
    assert!(error.contains("has 4097 bytes, and may have 4096"), "{error}");
    for function in ["tvm.rpc.server.load_module", "tvm.rpc.server.download_linked_module", "tvm.rpc.server.listdir"] {
        let error = client.call_by_name(function, &[text(&name)]).unwrap_err();
        assert!(error.contains("has 4097 bytes, and may have 4096"), "{error}");
    }
    // An unknown function is no error, nor is one of a module: clients ask for what may be there.
    assert_eq!(client.function("no.such.function"), 0);
    let get = client.function("tvm.rpc.server.ModuleGetFunction");
    let (kind, Val(4, library)) = client.call_by_name("ffi.SystemLib", &[]).unwrap() else { panic!() };
    assert_eq!(kind, 73);
    let library = number(&library);
    // Clients may send a number for the flag, or leave it out.
    for flag in [vec![boolean(true)], vec![boolean(false)], vec![int(1)], Vec::new()] {
        let args = [vec![module(library), text("f")], flag].concat();
        assert_eq!(client.call(get, &args), Ok((0, NONE)));
    }
    let echo = client.function("testing.echo");
    for (args, expected) in [
        (vec![module(0)], "the module that stands for the session"),
        (vec![module(1234)], "names no module"),
        (vec![Val(68, 99_u64.to_le_bytes().to_vec())], "names no function"),
        (vec![object(echo)], "names no object"),
        (vec![tensor(echo, F32, &[1], 0)], "names no memory"),
        (vec![pointer(1)], "a pointer names nothing"),
    ] {
        let error = client.call(echo, &args).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    for handle in [0, 1 << 40, u64::MAX, library] {
        assert!(client.call(handle, &[]).unwrap_err().contains("names no function"), "{handle}");
    }
    assert!(client.request(FREE, &[int(1)]).unwrap_err().contains("Cannot convert from type `int`"));
    assert_eq!(client.request(FREE, &[NONE]), Ok(NONE));
    assert_eq!(client.request(FREE, &[pointer(echo)]), Ok(NONE));
    assert!(client.request(FREE, &[pointer(echo)]).unwrap_err().contains("was freed"), "twice freed");
    for file in ["m.so", "m.tar", "m.o"] {
        let error = client.call_by_name("tvm.rpc.server.load_module", &[text(file)]).unwrap_err();
        assert!(error.contains("--allow-modules"), "{error}");
    }
    assert!(client.call_by_name("tvm.rpc.server.load_module", &[text("m.txt")]).is_err());
    let error = client.call_by_name("tvm.rpc.server.download_linked_module", &[text("m.tar")]).unwrap_err();
    assert!(error.contains("--allow-modules"), "{error}");
    let error = client.call_by_name("tvm.rpc.server.download_linked_module", &[text("m.so")]).unwrap_err();
    assert!(error.contains("not found"), "{error}");
    let error = client.call_by_name("tvm.rpc.server.ImportModule", &[module(library), module(library)]).unwrap_err();
    assert!(error.contains("imports no modules"), "{error}");
    assert_eq!(client.call_by_name("rpc.test.addone", &[float(0.5)]), Ok((3, float(1.5))));
}

#[test]
fn requests_in_one_piece_are_answered_in_their_order() {
    let fixture = Fixture::new(|_| {});
    let mut client = fixture.connect();
    let (add, data) = (client.function("rpc.test.addone"), client.alloc(U8, &[3]));
    let header = header(data, U8, &[3], 0);
    let read = frame(COPY_FROM, &[&header[..], &3_u64.to_le_bytes()].concat());
    let empty = vec![0; 8];
    let all = [
        call_frame(add, &[int(1)]),
        empty.clone(),
        copy_to_frame(&header, b"abc"),
        read.clone(),
        copy_to_frame(&header, b"def"),
        empty,
        read,
        call_frame(add, &[int(2)]),
        frame(SHUTDOWN, &[]),
    ];
    client.send(&all.concat());
    assert_eq!(client.reply(), Ok(vec![int(1), int(2)]));
    assert_eq!(client.reply(), Ok(vec![NONE]));
    assert_eq!(client.read_frame(), (COPY_ACK, b"abc".to_vec()));
    assert_eq!(client.reply(), Ok(vec![NONE]));
    assert_eq!(client.read_frame(), (COPY_ACK, b"def".to_vec()));
    assert_eq!(client.reply(), Ok(vec![int(1), int(3)]));
    assert!(client.is_at_end());
    fixture.has_sessions(0);
}

#[test]
fn copies_have_offsets_and_stay_within_their_memory() {
    let fixture = Fixture::new(|_| {});
    let mut client = fixture.connect();
    // Several pieces, and one that is not whole.
    let len = (5 << 20) + 3;
    let content: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
    let data = client.alloc(U8, &[len]);
    client.copy_to(&header(data, U8, &[len], 0), &content).unwrap();
    assert_eq!(client.copy_from(&header(data, U8, &[len], 0), len as u64).unwrap(), content);
    // By blocks, as a client with small packets does: the full shape, and an offset.
    client.copy_to(&header(data, U8, &[len], 100), b"hello").unwrap();
    let read = client.copy_from(&header(data, U8, &[len], 98), 9).unwrap();
    assert_eq!(read, [&content[98..100], b"hello", &content[105..107]].concat());
    // Of another shape and type than it was allocated with.
    assert_eq!(client.copy_from(&header(data, F32, &[5, 5], 100), 5).unwrap(), b"hello");
    let past_the_end = [
        client.copy_to(&header(data, U8, &[len], len as u64 - 2), b"abc"),
        client.copy_to(&header(data, U8, &[len], u64::MAX), b"abc"),
        client.copy_to(&header(data, U8, &[len + 1], 0), &vec![0; len as usize + 1]),
        client.copy_from(&header(data, U8, &[len], len as u64 - 2), 3).map(drop),
        client.copy_from(&header(data, U8, &[len], 0), u64::MAX).map(drop),
        client.copy_from(&header(data, U8, &[len], 1 << 63), 0).map(drop),
    ];
    for outcome in past_the_end {
        assert!(outcome.is_err());
    }
    assert_eq!(client.copy_from(&header(data, U8, &[len], 0), 0).unwrap(), b"");
    client.copy_to(&header(data, U8, &[len], 0), b"").unwrap();
    assert!(client.copy_to(&header(data + 1, U8, &[3], 0), b"").unwrap_err().contains("names no memory"));
    // Among tensors, whose shapes and types need not be equal.
    let (from, to) = (client.alloc(F32, &[2, 3]), client.alloc(U8, &[24]));
    client.copy_to(&header(from, F32, &[2, 3], 0), &content[..24]).unwrap();
    let copy = |to: Val| vec![tensor(from, F32, &[2, 3], 0), to, NONE];
    assert_eq!(client.request(COPY_AMONG, &copy(tensor(to, U8, &[24], 0))), Ok(NONE));
    assert_eq!(client.copy_from(&header(to, U8, &[24], 0), 24).unwrap(), content[..24]);
    let unequal = client.request(COPY_AMONG, &copy(tensor(to, U8, &[23], 0))).unwrap_err();
    assert!(unequal.contains("24 bytes to a tensor of 23"), "{unequal}");
    // A view goes to where it is.
    assert_eq!(
        client.request(COPY_AMONG, &[tensor(to, U8, &[4], 20), tensor(from, F32, &[1], 4), pointer(0)]),
        Ok(NONE)
    );
    assert_eq!(client.copy_from(&header(from, F32, &[6], 4), 4).unwrap(), content[20..24]);
    // The freed tensor is gone, and the data for it pass by.
    assert_eq!(client.request(FREE_DATA, &[cpu(), pointer(to)]), Ok(NONE));
    let gone = client.copy_to(&header(to, U8, &[1 << 20], 0), &vec![0; 1 << 20]).unwrap_err();
    assert!(gone.contains("names no memory"), "{gone}");
    assert!(client.request(FREE_DATA, &[cpu(), pointer(to)]).is_err(), "twice freed");
    assert_eq!(client.call_by_name("rpc.test.addone", &[int(1)]), Ok((1, int(2))));
}

#[test]
fn tensors_are_allocated_passed_and_returned() {
    let fixture = Fixture::new(|_| {});
    let mut client = fixture.connect();
    let ones = client.alloc(F64, &[3, 4]);
    let content: Vec<u8> = std::iter::repeat_n(1.0_f64.to_le_bytes(), 12).flatten().collect();
    client.copy_to(&header(ones, F64, &[3, 4], 0), &content).unwrap();
    let check = client.function("rpc.test.remote_tensor_func");
    assert_eq!(client.call(check, &[tensor(ones, F64, &[3, 4], 0)]), Ok((0, NONE)));
    assert!(client.call(check, &[tensor(ones, F64, &[4, 3], 0)]).unwrap_err().contains("not one of 3 times 4"));
    assert!(client.call(check, &[tensor(ones, F64, &[3, 5], 0)]).is_err(), "beyond its memory");
    // A tensor that is an argument comes back as a proper one.
    let echo = client.function("testing.echo");
    for (data, bytes, returned) in [(echo, 96, &[tensor(ones, F64, &[3, 4], 0)][..]), (client.function("tail"), 8, &[])]
    {
        let result = client.ask(&call_frame(data, returned)).unwrap();
        assert_eq!((result.len(), &result[0]), (3, &int(70)));
        let (head, Val(4, handle)) = (&result[1].1, &result[2]) else { panic!("{result:?}") };
        assert_eq!(&head[..8], &handle[..], "one number is good for both ways to free it");
        assert_eq!(number(&head[head.len() - 8..]), 0, "clients drop the offset");
        let expected = if bytes == 96 { content.clone() } else { [3.0_f32, 4.0].map(f32::to_le_bytes).concat() };
        let offset_free = client.copy_from(head, bytes).unwrap();
        assert_eq!(offset_free, expected);
        assert_eq!(client.request(FREE, &[Val(4, handle.clone())]), Ok(NONE));
        assert!(client.copy_from(head, bytes).is_err());
    }
    assert!(client.call_by_name("columns", &[]).unwrap_err().contains("gaps"));
    let name = client.function("rpc.test.remote_return_nd");
    let function = |client: &mut Client, which: &str| match client.call(name, &[text(which)]).unwrap() {
        (68, Val(4, handle)) => number(&handle),
        other => panic!("{other:?}"),
    };
    let (array, element) = (function(&mut client, "get_arr"), function(&mut client, "get_arr_elem"));
    let result = client.ask(&call_frame(array, &[])).unwrap();
    let zeros = result[1].clone();
    assert_eq!(client.request(FREE, &[pointer(array)]), Ok(NONE), "the tensor outlives its function");
    assert_eq!(client.call(element, &[zeros, int(9)]), Ok((3, float(0.0))));
    let own_element = function(&mut client, "get_elem");
    assert_eq!(client.call(own_element, &[int(9)]), Ok((3, float(0.0))));
    for beyond in [10, -1] {
        let error = client.call(own_element, &[int(beyond)]).unwrap_err();
        assert!(error.contains("there is no element"), "{error}");
    }
    // The function itself refers to its tensor, and so does each handle that the client has.
    let both = client.call(name, &[text("neither")]).unwrap_err();
    assert!(both.contains("get_arr, get_elem, get_arr_elem or ref_count"), "{both}");
    let count = function(&mut client, "ref_count");
    assert_eq!(client.call(count, &[]), Ok((1, int(1))));
    assert_eq!(client.call_by_name("rpc.test2.addone", &[int(41)]), Ok((1, int(42))));
    let joined = client.call_by_name("rpc.test.runtime_str_concat", &[text("ab"), boxed(65, 65, b"cd")]);
    assert_eq!(joined, Ok((65, text("abcd"))));
    // Elements of less than a byte are packed: the last byte may have room left.
    for (dtype, count, len) in [((0, 4), 5, 3), ((0, 4), 4, 2), ((1, 1), 9, 2), ((1, 2), 3, 1)] {
        let data = client.alloc(dtype, &[count]);
        let content: Vec<u8> = (1..=len).collect();
        let head = header(data, dtype, &[count], 0);
        client.copy_to(&head, &content).unwrap();
        assert_eq!(client.copy_from(&head, len.into()).unwrap(), content, "{dtype:?}");
        assert!(client.copy_from(&head, u64::from(len) + 1).is_err(), "{dtype:?}");
        let result = client.ask(&call_frame(echo, &[tensor(data, dtype, &[count], 0)])).unwrap();
        assert_eq!(result[1].1[16..32], head[16..32], "the type and the shape stay");
        assert_eq!(client.copy_from(&result[1].1, len.into()).unwrap(), content, "{dtype:?}");
        let other = client.alloc(dtype, &[count]);
        let among = [tensor(data, dtype, &[count], 0), tensor(other, dtype, &[count], 0), pointer(0)];
        assert_eq!(client.request(COPY_AMONG, &among), Ok(NONE));
        assert_eq!(client.copy_from(&header(other, dtype, &[count], 0), len.into()).unwrap(), content);
    }
    // Scopes, sizes and devices that do not exist.
    for (values, expected) in [
        (vec![tensor(0, F32, &[-1], 0), NONE], "invalid argument"),
        (vec![tensor(0, F32, &[4], 0), text("texture")], "texture"),
        (vec![tensor(0, F64, &[i64::MAX], 0), NONE], "invalid argument"),
    ] {
        let error = client.request(ALLOC, &values).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    for scope in ["", "global"] {
        client.handle(ALLOC, &[tensor(0, F32, &[0, 3], 0), text(scope)]);
    }
    let raw = client.handle(ALLOC_BYTES, &[cpu(), int(16), int(64), Val(5, vec![2, 32, 1, 0, 0, 0, 0, 0])]);
    client.copy_to(&header(raw, F64, &[2], 0), &[7; 16]).unwrap();
    assert_eq!(client.request(FREE_DATA, &[cpu(), pointer(raw)]), Ok(NONE));
    let aligned = |alignment| [cpu(), int(16), int(alignment), Val(5, vec![2, 32, 1, 0, 0, 0, 0, 0])];
    let page = client.handle(ALLOC_BYTES, &aligned(4096));
    assert_eq!(client.request(FREE_DATA, &[cpu(), pointer(page)]), Ok(NONE));
    for alignment in [4095, i64::MAX] {
        let error = client.request(ALLOC_BYTES, &aligned(alignment)).unwrap_err();
        assert!(error.contains("power of two"), "{error}");
    }
}

#[test]
fn devices_have_attributes_and_streams() {
    let fixture = Fixture::new(|_| {});
    let mut client = fixture.connect();
    assert_eq!(client.request(ATTRIBUTE, &[cpu(), int(0)]), Ok(int(1)));
    for absent in [device(4, 0), device(1, 7), device(129, 0), device(-1, 0)] {
        assert_eq!(client.request(ATTRIBUTE, &[absent.clone(), int(0)]), Ok(int(0)), "{absent:?}");
        assert!(client.request(ATTRIBUTE, &[absent.clone(), int(1)]).is_err(), "{absent:?}");
        assert!(client.request(SET_DEVICE, &[absent]).is_err());
    }
    let Val(1, memory) = client.request(ATTRIBUTE, &[cpu(), int(14)]).unwrap() else { panic!("memory is a number") };
    assert!(number(&memory) > 0);
    for unknown in [10, 99, 1000, -1, i64::MAX] {
        assert_eq!(client.request(ATTRIBUTE, &[cpu(), int(unknown)]), Ok(NONE), "{unknown}");
    }
    assert_eq!(client.request(SET_DEVICE, &[cpu()]), Ok(NONE));
    assert_eq!(client.handle(CURRENT_STREAM, &[cpu()]), 0);
    let stream = client.handle(CREATE_STREAM, &[cpu()]);
    assert_eq!(client.request(SET_STREAM, &[cpu(), pointer(stream)]), Ok(NONE));
    assert_eq!(client.handle(CURRENT_STREAM, &[cpu()]), stream);
    for which in [0, stream] {
        assert_eq!(client.request(STREAM_SYNC, &[cpu(), pointer(which)]), Ok(NONE));
    }
    assert_eq!(client.request(STREAM_SYNC, &[cpu(), NONE]), Ok(NONE));
    assert!(client.request(STREAM_SYNC, &[cpu(), pointer(99)]).unwrap_err().contains("names no stream"));
    assert!(client.request(SET_STREAM, &[device(1, 1), pointer(stream)]).is_err());
    assert_eq!(client.request(FREE_STREAM, &[cpu(), pointer(stream)]), Ok(NONE));
    assert_eq!(client.handle(CURRENT_STREAM, &[cpu()]), 0);
    assert!(client.request(SET_STREAM, &[cpu(), pointer(stream)]).is_err());
    assert_eq!(client.request(SET_STREAM, &[cpu(), pointer(0)]), Ok(NONE));
    // A stream may be freed as any object, too, also while it is the current one.
    let stream = client.handle(CREATE_STREAM, &[cpu()]);
    assert_eq!(client.request(SET_STREAM, &[cpu(), pointer(stream)]), Ok(NONE));
    assert_eq!(client.request(FREE, &[pointer(stream)]), Ok(NONE));
    assert_eq!(client.handle(CURRENT_STREAM, &[cpu()]), 0);
    assert_eq!(client.request(STREAM_SYNC, &[cpu(), pointer(0)]), Ok(NONE));
}

/// Values of a session's constructor that name a server behind another one.
fn stop(address: &str, key: &str) -> Vec<Val> {
    let (host, port) = address.strip_prefix("tcp://").unwrap().split_once(':').unwrap();
    let host = boxed(65, 65, host.as_bytes());
    vec![boxed(65, 65, b"rpc.Connect"), host, int(port.parse().unwrap()), boxed(11, 65, key.as_bytes()), boolean(false)]
}

fn boolean(value: bool) -> Val {
    Val(2, i64::from(value).to_le_bytes().to_vec())
}

/// Returns a client whose session is at the end of a chain.
fn through(first: &str, stops: &[Val]) -> Client {
    let (mut client, code, _) = Client::hello(first, "client:");
    assert_eq!(code, 0xff271);
    assert_eq!(client.ask(&init_frame(stops)), Ok(vec![NONE]));
    client
}

/// Uses what a client of TVM uses at a server.
fn is_served(client: &mut Client) {
    assert_eq!(client.call_by_name("rpc.test.addone", &[int(41)]), Ok((1, int(42))));
    assert_eq!(client.function("no.such.function"), 0);
    // The error of a function is no end of the session, also where a server would end it by that
    // text.
    for said in ["abc", "RPCSessionTimeoutError: Your 1.5s session has expired"] {
        assert_eq!(client.call_by_name("rpc.test.except", &[text(said)]), Err(said.to_owned()));
    }
    let (68, adder) = client.call_by_name("rpc.test.add_to_lhs", &[int(40)]).unwrap() else { panic!() };
    assert_eq!(client.call(number(&adder.1), &[int(2)]), Ok((1, int(42))));
    let echo = client.function("testing.echo");
    for (sent, received) in
        [(bytes(b"more than seven"), (66, Val(9, sized(b"more than seven")))), (text("a"), (65, text("a")))]
    {
        assert_eq!(client.call(echo, &[sent]), Ok(received));
    }
    let list = client.call_by_name("list", &[]).unwrap();
    assert!(list.0 >= 64 && list.1.0 == 4, "{list:?}");
    assert_eq!(client.request(FREE, std::slice::from_ref(&list.1)), Ok(NONE));
    assert!(client.request(FREE, &[list.1]).unwrap_err().contains("names no object"));
    // Copies in several pieces, into a tensor, out of it, and among two.
    let len = (2 << 20) + 5;
    let content: Vec<u8> = (0..len).map(|at| (at % 239) as u8).collect();
    let (first, second) = (client.alloc(U8, &[len]), client.alloc(U8, &[len]));
    client.copy_to(&header(first, U8, &[len], 0), &content).unwrap();
    let among = [tensor(first, U8, &[len], 0), tensor(second, U8, &[len], 0), pointer(0)];
    assert_eq!(client.request(COPY_AMONG, &among), Ok(NONE));
    assert_eq!(client.request(STREAM_SYNC, &[cpu(), pointer(0)]), Ok(NONE));
    assert_eq!(client.copy_from(&header(second, U8, &[len], 0), len as u64).unwrap(), content);
    assert!(client.copy_from(&header(second, U8, &[len], 1), len as u64).is_err());
    assert_eq!(client.request(FREE_DATA, &[cpu(), pointer(first)]), Ok(NONE));
    let result = client.ask(&call_frame(echo, &[tensor(second, F32, &[2], 4)])).unwrap();
    assert_eq!((result.len(), result[0].clone()), (3, int(70)));
    // Files, modules and measurements are those of the server that serves.
    client.call_by_name("tvm.rpc.server.upload", &[text("f"), bytes(b"content")]).unwrap();
    assert_eq!(client.call_by_name("tvm.rpc.server.listdir", &[text(".")]), Ok((65, text("f"))));
    let file = client.call_by_name("tvm.rpc.server.download", &[text("f")]);
    assert_eq!(file, Ok((66, Val(9, sized(b"content")))));
    assert_eq!(client.call_by_name("tvm.rpc.server.remove", &[text("f")]), Ok((0, NONE)));
    assert!(client.call_by_name("tvm.rpc.server.load_module", &[text("f.so")]).is_err());
    let (73, library) = client.call_by_name("ffi.SystemLib", &[]).unwrap() else { panic!() };
    let find = [module(number(&library.1)), text("f"), boolean(true)];
    assert_eq!(client.call_by_name("tvm.rpc.server.ModuleGetFunction", &find), Ok((0, NONE)));
    let numbers = [1, 0, 2, 3, 0, 100, 0, 1, 0];
    let options = [vec![NONE, text("rpc.test.addone")], numbers.map(int).to_vec(), vec![text("")]].concat();
    let (68, measure) = client.call_by_name("runtime.RPCTimeEvaluator", &options).unwrap() else { panic!() };
    let (66, samples) = client.call(number(&measure.1), &[int(1)]).unwrap() else { panic!() };
    assert_eq!(number(&samples.1), 3 * 8);
    assert_eq!(client.call_by_name("tvm.rpc.server.GetCRTMaxPacketSize", &[]), Ok((1, int(i64::MAX))));
    assert!(client.ask(&init_frame(&[])).unwrap_err().contains("already been initialized"));
}

#[test]
fn a_chain_of_servers_serves_as_one_does() {
    let far = Fixture::new(|config| config.key = Some("far".to_owned()));
    let allow = |stops: &[&str]| {
        let stops: Vec<_> = stops.iter().map(|&stop| stop.to_owned()).collect();
        Fixture::new(|config| config.allow_forward = stops)
    };
    let (middle, first) = (allow(&["tvm://127.0.0.1:*"]), allow(&["tvm://127.0.0.1:*", "tvm://127.0.0.1:*?then=*"]));
    let to_far = stop(&far.address(), "far");
    let through_middle = [stop(&middle.address(), ""), to_far.clone(), vec![text("rpc.LocalSession")]].concat();
    let through_both = [stop(&first.address(), ""), stop(&middle.address(), ""), to_far.clone()].concat();
    for stops in [to_far.clone(), through_middle, through_both] {
        let mut client = through(&first.address(), &stops);
        assert_eq!(far.running.sessions(), 1);
        is_served(&mut client);
        drop(client);
        for fixture in [&first, &middle, &far] {
            fixture.has_sessions(0);
        }
    }
    // Each refusal is an error of the first request, after which another one may be made.
    let (mut client, ..) = Client::hello(&first.address(), "client:");
    for (stops, expected) in [
        (stop(&far.address(), "other"), "has not the key 'other'"),
        (stop("tcp://127.0.0.1:1", ""), "onnection refused"),
        (stop("tcp://127.0.0.2:1", ""), "may not be used to reach 'tvm://127.0.0.2:1'"),
        (vec![stop(&far.address(), "far"); 17].concat(), "servers of a chain"),
        ([to_far.clone(), vec![text("rpc.PopenSession"), bytes(b"x")]].concat(), "rpc.PopenSession cannot follow"),
        // The one in the middle may not lead on to itself by a chain.
        (
            [stop(&middle.address(), ""), stop(&middle.address(), ""), to_far.clone()].concat(),
            "may not be used to reach",
        ),
    ] {
        let error = client.ask(&init_frame(&stops)).unwrap_err();
        assert!(error.contains("session constructor rpc.Connect:\n") && error.contains(expected), "{error}");
    }
    assert_eq!(client.ask(&init_frame(&to_far)), Ok(vec![NONE]));
    is_served(&mut client);
    // Without a word of the operator nothing is reached; a word for one server is none for a chain.
    for (fixture, stops) in [(&far, to_far.clone()), (&middle, [stop(&middle.address(), ""), to_far.clone()].concat())]
    {
        let key = if std::ptr::eq(fixture, &far) { "client:far" } else { "client:" };
        let (mut client, ..) = Client::hello(&fixture.address(), key);
        let error = client.ask(&init_frame(&stops)).unwrap_err();
        assert!(error.contains("may not be used to reach"), "{error}");
    }
}

/// Values of a session's constructor that name a server by its address with a scheme.
fn stop_at(address: &str, key: &str) -> Vec<Val> {
    let text = |text: &str| boxed(65, 65, text.as_bytes());
    vec![text("rpc.Connect"), text(address), int(0), text(key), boolean(false)]
}

#[test]
fn a_chain_ends_at_a_native_server() {
    let folder = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", folder.path().join("far").display());
    let far = Fixture::new(|config| {
        config.listen.push(socket.parse().unwrap());
        (config.tvm, config.key, config.max_handles) = (false, Some("far".to_owned()), 64);
    });
    let allow = ["tcp://127.0.0.1:*", &socket, "tvm://127.0.0.1:*"].map(str::to_owned);
    let first = Fixture::new(|config| config.allow_forward = allow.to_vec());
    let at_local = [stop_at(&far.address(), "far"), vec![text("rpc.LocalSession")]].concat();
    for stops in [stop_at(&far.address(), "far"), stop_at(&socket, "far"), at_local] {
        let mut client = through(&first.address(), &stops);
        assert_eq!((first.running.sessions(), far.running.sessions()), (1, 1));
        is_served(&mut client);
        drop(client);
        first.has_sessions(0);
        far.has_sessions(0);
    }
    // A server of TVM's wire before it is one that dials it: the client is two hops away.
    let before = Fixture::new(|config| config.allow_forward = allow.to_vec());
    let mut client = through(&before.address(), &stop_at(&first.address().replace("tcp", "tvm"), ""));
    assert_eq!(client.call_by_name("rpc.test.addone", &[int(1)]), Ok((1, int(2))));
    drop(client);
    // Objects are the client's: those that it has freed have no place at the server any more.
    let mut client = through(&first.address(), &stop_at(&far.address(), "far"));
    let make = client.function("rpc.test.add_to_lhs");
    let create = |client: &mut Client| client.call(make, &[int(1)]).map(|(_, made)| number(&made.1));
    for _ in 0..200 {
        let adder = create(&mut client).unwrap();
        assert_eq!(client.request(FREE, &[pointer(adder)]), Ok(NONE));
        let memory = client.alloc(U8, &[1]);
        assert_eq!(client.request(FREE_DATA, &[cpu(), pointer(memory)]), Ok(NONE));
    }
    let mut held = Vec::new();
    let error = loop {
        match create(&mut client) {
            Ok(adder) => held.push(adder),
            Err(error) => break error,
        }
        assert!(held.len() <= 64);
    };
    assert!(error.contains("limit"), "{error}");
    for adder in held {
        assert_eq!(client.request(FREE, &[pointer(adder)]), Ok(NONE));
    }
    assert!(create(&mut client).is_ok());
    // Refusals are errors of the first request, after which another one may be made.
    let (mut client, ..) = Client::hello(&first.address(), "client:");
    for (stops, expected) in [
        (stop_at(&far.address(), "other"), "asks for key 'other'"),
        (stop_at(&format!("{}/far", far.address()), ""), "the key of a server is told apart"),
        (stop_at("tcp://127.0.0.1:1", "far"), "onnection refused"),
        (stop_at("tcp://127.0.0.2:1", "far"), "may not be used to reach 'tcp://127.0.0.2:1'"),
        (stop_at("tls://127.0.0.1:1", "far"), "may not be used to reach 'tls://127.0.0.1:1'"),
        (stop_at("unix:/nowhere", "far"), "may not be used to reach 'unix:/nowhere'"),
        (stop_at("tracker://127.0.0.1:1/far", ""), "the key of a server is told apart"),
        ([stop_at(&far.address(), "far"), stop(&far.address(), "far")].concat(), "it ends a chain"),
    ] {
        let error = client.ask(&init_frame(&stops)).unwrap_err();
        assert!(error.contains("session constructor rpc.Connect:\n") && error.contains(expected), "{error}");
    }
    assert_eq!(client.ask(&init_frame(&stop_at(&socket, "far"))), Ok(vec![NONE]));
    is_served(&mut client);
}

/// A client of TVM has no credentials: those of the server that dials are shown.
#[test]
fn a_chain_to_a_native_server_is_encrypted_and_proven_as_a_hop_is() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = folder.path().join("tokens");
    std::fs::write(&tokens, "lab 0123456789abcdef0123456789abcdef\n").unwrap();
    let listen = ["tls", "quic"].map(|scheme| format!("{scheme}://127.0.0.1:0").parse().unwrap());
    let far = Fixture::new(|config| {
        (config.tvm, config.listen, config.token_file) = (false, listen.to_vec(), Some(tokens.clone()));
    });
    let start = |token_file: Option<&Path>| {
        Fixture::new(|config| {
            config.allow_forward = ["tls", "quic"].map(|scheme| format!("{scheme}://127.0.0.1:*")).to_vec();
            config.forward_token_file = token_file.map(Path::to_owned);
        })
    };
    let (first, without_token) = (start(Some(&tokens)), start(None));
    for address in far.running.addresses() {
        let stops = stop_at(&address.to_string(), "");
        let mut client = through(&first.address(), &stops);
        assert_eq!(client.call_by_name("rpc.test.addone", &[int(1)]), Ok((1, int(2))));
        let (mut client, ..) = Client::hello(&without_token.address(), "client:");
        let error = client.ask(&init_frame(&stops)).unwrap_err();
        assert!(error.contains("need to know whom to trust"), "{error}");
    }
}

#[test]
fn the_ends_of_a_chain_are_told_to_its_client() {
    let allowed = ["tvm", "tcp"].map(|scheme| format!("{scheme}://127.0.0.1:*"));
    let first = Fixture::new(|config| config.allow_forward = allowed.to_vec());
    // The server at the end goes away during a call.
    for stops in [|at: &str| stop(at, ""), |at: &str| stop_at(at, "")] {
        let far = Fixture::new(|_| {});
        let mut client = through(&first.address(), &stops(&far.address()));
        let never = client.function("never");
        client.send(&call_frame(never, &[]));
        far.running.stop();
        let error = client.reply().unwrap_err();
        assert!(error.contains("://127.0.0.1") || error.contains("server was stopped"), "{error}");
        // A second error may follow, that of the session; then the connection ends.
        first.has_sessions(0);
    }
    // The time of the client's session at the end of the chain is over.
    let far = Fixture::new(|_| {});
    let (mut client, ..) = Client::hello(&first.address(), "client:");
    let error = client
        .ask(&init_frame(&stop(&far.address(), " -timeout=1.5")))
        .and_then(|_| client.request(GET_FUNCTION, &[text("never")]))
        .and_then(|Val(_, never)| client.ask(&call_frame(number(&never), &[])))
        .unwrap_err();
    assert!(error.starts_with("RPCSessionTimeoutError: Your 1.5s session has expired"), "{error}");
    first.has_sessions(0);
    far.has_sessions(0);
    // The client leaves during a call.
    for stops in [stop(&far.address(), ""), stop_at(&far.address(), "")] {
        let mut client = through(&first.address(), &stops);
        let never = client.function("never");
        client.send(&call_frame(never, &[]));
        far.has_sessions(1);
        drop(client);
        far.has_sessions(0);
        first.has_sessions(0);
    }
}

#[test]
fn functions_of_a_chain_are_those_that_the_operator_lets_through() {
    let far = Fixture::new(|_| {});
    let first = Fixture::new(|config| {
        config.allow_forward = ["tvm", "tcp"].map(|scheme| format!("{scheme}://127.0.0.1:*")).to_vec();
        config.forward_functions = vec!["rpc.test.*".to_owned()];
    });
    // The files of a native server are its own functions, by which this one serves TVM's.
    let mut client = through(&first.address(), &stop_at(&far.address(), ""));
    assert_eq!(client.call_by_name("rpc.test.addone", &[int(1)]), Ok((1, int(2))));
    let error = client.request(GET_FUNCTION, &[text("testing.echo")]).unwrap_err();
    assert!(error.contains("may not be used through this server"), "{error}");
    let error = client.call_by_name("tvm.rpc.server.upload", &[text("f"), bytes(b"x")]).unwrap_err();
    assert!(error.contains("may not be used through this server"), "{error}");
    let mut client = through(&first.address(), &stop(&far.address(), ""));
    assert_eq!(client.call_by_name("rpc.test.addone", &[int(1)]), Ok((1, int(2))));
    for refused in ["testing.echo", "tvm.rpc.server.upload"] {
        let error = client.request(GET_FUNCTION, &[text(refused)]).unwrap_err();
        assert!(error.contains("may not be used through this server"), "{error}");
    }
}

#[test]
fn files_stay_within_the_workspace_of_the_session() {
    let fixture = Fixture::new(|_| {});
    let (mut client, mut other) = (fixture.connect(), fixture.connect());
    let content: Vec<u8> = (0..3 << 20).map(|at| (at % 7) as u8).collect();
    let file = |name: &str| text(name);
    let upload = "tvm.rpc.server.upload";
    assert_eq!(client.call_by_name(upload, &[file("model.bin"), bytes(&content)]), Ok((0, NONE)));
    let back = client.call_by_name("tvm.rpc.server.download", &[file("model.bin")]);
    assert_eq!(back, Ok((66, Val(9, sized(&content)))));
    client.call_by_name(upload, &[file("deep/er"), bytes(b"")]).unwrap();
    let listed = client.call_by_name("tvm.rpc.server.listdir", &[file(".")]);
    assert_eq!(listed, Ok((65, text("deep,model.bin"))));
    let place = client.call_by_name("tvm.rpc.server.workpath", &[file("model.bin")]).unwrap().1;
    let place = String::from_utf8(place.1[8..].to_vec()).unwrap();
    assert_eq!(std::fs::read(place).unwrap(), content);
    for outside in ["../model.bin", "/etc/passwd", "a/../../b"] {
        assert!(client.call_by_name("tvm.rpc.server.workpath", &[file(outside)]).is_err(), "{outside}");
        assert!(client.call_by_name(upload, &[file(outside), bytes(b"x")]).is_err(), "{outside}");
        assert!(client.call_by_name("tvm.rpc.server.download", &[file(outside)]).is_err(), "{outside}");
        assert!(client.call_by_name("tvm.rpc.server.remove", &[file(outside)]).is_err(), "{outside}");
    }
    assert!(other.call_by_name("tvm.rpc.server.download", &[file("model.bin")]).is_err(), "another's file");
    for name in ["model.bin", "model.bin", "", "never-there"] {
        assert_eq!(client.call_by_name("tvm.rpc.server.remove", &[file(name)]), Ok((0, NONE)), "{name}");
    }
    assert!(client.call_by_name("tvm.rpc.server.download", &[file("model.bin")]).is_err());
    drop((client, other));
    fixture.has_sessions(0);
    let start = Instant::now();
    let left = || {
        let servers = std::fs::read_dir(fixture.folder.path().join("work/private")).unwrap().flatten();
        servers.filter_map(|server| std::fs::read_dir(server.path()).ok()).flat_map(Iterator::flatten).count()
    };
    while left() > 0 {
        assert!(start.elapsed() < LIMIT, "the files of a session go with it");
        std::thread::yield_now();
    }
}

#[test]
fn functions_are_measured_with_all_options() {
    let fixture = Fixture::new(|_| {});
    let mut client = fixture.connect();
    let evaluator = client.function("runtime.RPCTimeEvaluator");
    let options = |name: &str, number, repeat, least, cooldown, before: &str| {
        let numbers = [1, 0, number, repeat, least, 100, cooldown, 2, 4096];
        [vec![NONE, text(name)], numbers.map(int).to_vec(), vec![text(before)]].concat()
    };
    for (least, cooldown, before) in [(0, 0, ""), (1, 0, ""), (0, 1, "rpc.noop")] {
        let made = client.call(evaluator, &options("rpc.test.addone", 3, 4, least, cooldown, before)).unwrap();
        let (68, Val(4, handle)) = made else { panic!("{made:?}") };
        let (66, Val(9, samples)) = client.call(number(&handle), &[int(1)]).unwrap() else { panic!() };
        assert_eq!(number(&samples), 4 * 8);
        let seconds = samples[8..].chunks(8).map(|second| f64::from_le_bytes(second.try_into().unwrap()));
        assert!(seconds.into_iter().all(|second| second > 0.0 && second < 10.0), "{samples:?}");
        let wrong = client.call(number(&handle), &[text("no number")]).unwrap_err();
        assert!(wrong.contains("expected int or float"), "{wrong}");
        assert_eq!(client.request(FREE, &[Val(4, handle)]), Ok(NONE));
    }
    // Calls grow until a measurement takes long enough, and the next one begins with as many. They
    // do not where no attempt of no duration is left: the limit is the eighth value.
    for (limit, grows) in [(100, true), (0, false)] {
        let before = client.call_by_name("count", &[]).unwrap().1;
        let mut values = options("count", 1, 2, 3, 0, "");
        values[7] = int(limit);
        let made = client.call(evaluator, &values).unwrap();
        let (66, Val(9, samples)) = client.call(number(&made.1.1), &[]).unwrap() else { panic!() };
        assert_eq!(number(&samples), 2 * 8);
        let after = client.call_by_name("count", &[]).unwrap().1;
        let calls = number(&after.1) - number(&before.1) - 1;
        assert_eq!(calls > 3, grows, "{calls} calls");
        assert!(grows || calls == 3, "one call to begin with, and one for each measurement: {calls}");
    }
    let counted = number(&client.call_by_name("count", &[]).unwrap().1.1);
    // The function that comes first is called before each measurement, and never within one.
    let made = client.call(evaluator, &options("rpc.test.addone", 3, 4, 0, 0, "count")).unwrap();
    client.call(number(&made.1.1), &[int(1)]).unwrap();
    assert_eq!(client.call_by_name("count", &[]), Ok((1, int(counted.cast_signed() + 5))));
    // A pause is made after every second measurement, and not after the last one.
    let started = Instant::now();
    for (repeat, cooldown) in [(4, 50), (2, 1_000_000)] {
        let made = client.call(evaluator, &options("rpc.noop", 1, repeat, 0, cooldown, "")).unwrap();
        let (66, samples) = client.call(number(&made.1.1), &[]).unwrap() else { panic!() };
        assert_eq!(number(&samples.1), repeat as u64 * 8);
    }
    assert!(started.elapsed() >= Duration::from_millis(50));
    for (values, expected) in [
        (options("missing", 1, 1, 0, 0, ""), "missing"),
        (options("rpc.noop", 1, 1, 0, 0, "missing"), "missing"),
        (options("rpc.noop", 0, 1, 0, 0, ""), "number must be at least 1"),
        (options("rpc.noop", 1, i64::MAX, 0, 0, ""), "repeat from 1"),
        (options("rpc.noop", 1, 1, -1, 0, ""), "must not be negative"),
        (options("rpc.noop", 1, 1, 0, 0, "")[..5].to_vec(), "is missing"),
    ] {
        let error = client.call(evaluator, &values).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    assert_eq!(client.call_by_name("tvm.rpc.server.GetCRTMaxPacketSize", &[]), Ok((1, int(i64::MAX))));
}

#[test]
fn a_malformed_message_ends_its_own_connection_alone() {
    let fixture = Fixture::new(|_| {});
    let mut other = fixture.connect();
    for (bytes, expected) in [
        (frame(99, &[]), "code 99"),
        (frame(-7, &[1, 2, 3]), "code -7"),
        (vec![1, 0, 0, 0, 0, 0, 0, 0], "no room for its code"),
        (frame(FREE, &[0; 3]), "ends before"),
        (frame(FREE, &[255; 12]), "-1 values"),
        (frame(FREE, &sequence(&[Val(70, vec![0; 8])])), "type index 70"),
        (frame(COPY_TO, &[7; 64]), "dimensions"),
        (frame(SHUTDOWN, &[0]), "behind its end"),
    ] {
        let mut client = fixture.connect();
        let error = client.ask(&bytes).unwrap_err();
        assert!(error.contains(expected), "{error}");
        assert!(client.is_at_end());
        assert_eq!(other.call_by_name("rpc.test.addone", &[int(1)]), Ok((1, int(2))));
    }
    // Another protocol, and a message that never ends.
    let mut cut = fixture.connect();
    cut.send(&frame(CALL, &[0; 100])[..50]);
    drop(cut);
    fixture.has_sessions(1);
}

#[test]
fn a_client_that_leaves_during_a_call_leaves_nothing_behind() {
    let fixture = Fixture::new(|_| {});
    let mut client = fixture.connect();
    client.alloc(U8, &[1 << 20]);
    let never = client.function("never");
    client.send(&call_frame(never, &[]));
    fixture.has_sessions(1);
    drop(client);
    fixture.has_sessions(0);
    fixture.runtime.block_on(fixture.running.idle());
}

/// Point at which a client is killed: its name, and what the client has done by then with a
/// function that never returns, and with memory of [`KILLED_LEN`] bytes.
type KillPoint = (&'static str, fn(&mut Client, u64, u64));

const KILLED_LEN: i64 = 32 << 20;

const KILL_POINTS: [KillPoint; 8] = [
    ("in a request", |client, never, _| client.send(&call_frame(never, &[])[..15])),
    ("in a call", |client, never, _| client.send(&call_frame(never, &[]))),
    ("in a call, with more behind it", |client, never, data| {
        client.send(&call_frame(never, &[]).repeat(3));
        client.send(&copy_to_frame(&header(data, U8, &[KILLED_LEN], 0), &[1; 5000]));
    }),
    ("in a call, with more behind it than is read ahead", |client, never, _| {
        client.send(&call_frame(never, &[]));
        client.send(&frame(GET_FUNCTION, &sequence(&[text("testing.echo")])).repeat(500));
    }),
    ("in a copy's header", |client, _, data| {
        client.send(&copy_to_frame(&header(data, U8, &[KILLED_LEN], 0), &[1; 100])[..30]);
    }),
    ("in a copy's data", |client, _, data| {
        let copy = copy_to_frame(&header(data, U8, &[KILLED_LEN], 0), &vec![1; KILLED_LEN as usize]);
        client.send(&copy[..3 << 20]);
    }),
    ("in a copy from the server", |client, _, data| {
        let header = header(data, U8, &[KILLED_LEN], 0);
        client.send(&frame(COPY_FROM, &[&header[..], &KILLED_LEN.to_le_bytes()].concat()));
        client.read(1 << 20);
    }),
    ("with answers that it has not read", |client, _, _| {
        client.send(&frame(GET_FUNCTION, &sequence(&[text("testing.echo")])).repeat(100));
    }),
];

#[test]
fn a_client_that_is_killed_at_any_point_leaves_nothing_behind() {
    let far = Fixture::new(|_| {});
    let first = Fixture::new(|config| config.allow_forward = vec!["tvm://127.0.0.1:*".to_owned()]);
    for (name, point) in KILL_POINTS {
        for stops in [Vec::new(), stop(&far.address(), "")] {
            let mut client = through(&first.address(), &stops);
            let (never, data) = (client.function("never"), client.alloc(U8, &[KILLED_LEN]));
            point(&mut client, never, data);
            // The system closes the connections of a process that is killed.
            drop(client);
            first.has_sessions(0);
            far.has_sessions(0);
            let mut next = through(&first.address(), &stops);
            assert_eq!(next.call_by_name("rpc.test.addone", &[int(1)]), Ok((1, int(2))), "{name}");
        }
    }
    // Before there is a session.
    let hello = [&0xff271_i32.to_le_bytes()[..], &7_i32.to_le_bytes(), b"client:", &init_frame(&[])].concat();
    for len in [1, 4, 10, 15, 20, hello.len() - 1] {
        let mut stream = TcpStream::connect(first.address().strip_prefix("tcp://").unwrap()).unwrap();
        stream.write_all(&hello[..len]).unwrap();
    }
    first.has_sessions(0);
    first.runtime.block_on(async {
        first.running.idle().await;
        far.running.idle().await;
    });
}

/// Returns the processes that a server has started for its sessions.
fn processes_of(server: u32) -> Vec<Pid> {
    let mut children = Vec::new();
    for process in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(stat) = std::fs::read_to_string(process.path().join("stat")) else { continue };
        // The fields behind the name, which may have spaces: state, parent.
        let parent = stat.rsplit_once(')').and_then(|(_, fields)| fields.split_whitespace().nth(1)?.parse().ok());
        if parent == Some(server) {
            children.push(Pid::from_raw(process.file_name().to_str().unwrap().parse().unwrap()).unwrap());
        }
    }
    children
}

/// Sends a signal to the processes that a server has started for its sessions.
fn signal_processes(server: u32, signal: Signal) {
    for pid in processes_of(server) {
        // One whose session is over may end by itself meanwhile.
        let sent = kill_process(pid, signal);
        assert!(matches!(sent, Ok(()) | Err(Errno::SRCH)), "{sent:?}");
    }
}

/// Kills the processes that a server has started for its sessions.
fn kill_sessions(server: u32) {
    signal_processes(server, Signal::KILL);
}

/// A server of its own process, which speaks TVM's protocol.
fn server_process(folder: &Path, isolate: &str) -> ServerProcess {
    let mut command = crate::server_program();
    command.args(["serve", "--listen", "tcp://127.0.0.1:0", "--exit-with-stdin", "--log-level", "error", "--workdir"]);
    // All clients are this one machine, for which fewer are allowed where few files may be open.
    command.arg(folder).args(["--allow-forward", "tvm://127.0.0.1:*"]);
    command.args(["--tvm", "--tvm-self-test", "--isolate", isolate, "--max-sessions-per-peer", "256"]);
    ServerProcess::spawn(command).unwrap()
}

/// Each is killed while its clients wait: one of TVM, one of TVM in a chain, and one of this
/// project.
#[test]
fn a_server_or_the_process_of_a_session_that_is_killed_is_an_error_to_its_clients() {
    let folder = tempfile::tempdir().unwrap();
    let first = Fixture::new(|config| config.allow_forward = vec!["tvm://127.0.0.1:*".to_owned()]);
    let connector = Connector::new().transports(rpc_server::transports());
    for kills_session in [false, true] {
        let mut far = server_process(&folder.path().join(kills_session.to_string()), "process");
        let mut direct = Client::connect(far.address(), "");
        let mut chained = through(&first.address(), &stop(far.address(), ""));
        let native = connector.connect_blocking(&far.address().replace("tcp://", "tvm://")).unwrap();
        for client in [&mut direct, &mut chained] {
            let sleep = client.function("rpc.sleep");
            client.send(&call_frame(sleep, &[float(600.0)]));
        }
        let call = native.get_function("rpc.sleep").wait().unwrap().call::<()>((600.0,)).start();
        if kills_session {
            kill_sessions(far.id());
            // A server that is left says why.
            for client in [&mut direct, &mut chained] {
                let error = client.reply().unwrap_err();
                assert!(error.contains("killed by signal 9"), "{error}");
            }
            assert!(call.wait().unwrap_err().message().contains("killed by signal 9"));
            // The process that waited for the next session was killed, too.
            let start = Instant::now();
            while let (mut next, ..) = Client::hello(far.address(), "client:")
                && let Err(error) = next.ask(&init_frame(&[]))
            {
                assert!(start.elapsed() < LIMIT && error.contains("killed by signal 9"), "{error}");
            }
        } else {
            far.kill().unwrap();
            assert!(direct.is_at_end());
            let error = chained.reply().unwrap_err();
            assert!(error.starts_with("peer lost: ") && error.contains("(at tvm://127.0.0.1:"), "{error}");
            assert_eq!(call.wait().unwrap_err().kind(), ErrorKind::PeerLost);
        }
        first.has_sessions(0);
    }
}

/// The server is killed, and the hop in the middle of a chain.
#[test]
fn a_server_that_is_killed_at_any_point_is_the_end_of_its_clients_and_of_nobody_else() {
    let folder = tempfile::tempdir().unwrap();
    let far = Fixture::new(|_| {});
    for (at, (name, point)) in KILL_POINTS.iter().enumerate() {
        let mut middle = server_process(&folder.path().join(at.to_string()), "none");
        let direct = Client::connect(middle.address(), "");
        let chained = through(middle.address(), &stop(&far.address(), ""));
        let mut clients = [direct, chained];
        // The far server alone has a function that never returns. Calls of the other are over.
        for (client, function) in clients.iter_mut().zip(["rpc.noop", "never"]) {
            let (function, data) = (client.function(function), client.alloc(U8, &[KILLED_LEN]));
            point(client, function, data);
        }
        let mut half_open = Client(TcpStream::connect(middle.address().strip_prefix("tcp://").unwrap()).unwrap());
        half_open.0.set_read_timeout(Some(LIMIT)).unwrap();
        half_open.send(&0xff271_i32.to_le_bytes());
        middle.kill().unwrap();
        for client in clients.iter_mut().chain([&mut half_open]) {
            // Answers may be on their way, or the end of the connection is that of the system.
            let end = client.0.read_to_end(&mut Vec::new()).map_err(|error| error.kind());
            assert!(end.is_ok() || end == Err(std::io::ErrorKind::ConnectionReset), "{name}: {end:?}");
        }
        far.has_sessions(0);
        assert_eq!(far.connect().call_by_name("rpc.test.addone", &[int(1)]), Ok((1, int(2))), "{name}");
        far.has_sessions(0);
    }
    far.runtime.block_on(far.running.idle());
}

#[test]
fn the_process_of_a_session_that_is_killed_at_any_point_ends_that_session_alone() {
    let folder = tempfile::tempdir().unwrap();
    let server = server_process(folder.path(), "process");
    // The process that waits for the next session may be killed, too.
    let connect = || {
        let start = Instant::now();
        loop {
            let (mut client, code, _) = Client::hello(server.address(), "client:");
            assert_eq!(code, 0xff271);
            match client.ask(&init_frame(&[])) {
                Ok(_) => return client,
                Err(error) => assert!(start.elapsed() < LIMIT && error.contains("killed by signal 9"), "{error}"),
            }
        }
    };
    for (name, point) in KILL_POINTS {
        let mut client = connect();
        let (function, data) = (client.function("rpc.noop"), client.alloc(U8, &[KILLED_LEN]));
        point(&mut client, function, data);
        // One that has said hello, and no more.
        let (mut begun, ..) = Client::hello(server.address(), "client:");
        kill_sessions(server.id());
        // The server may not have noticed by its first request.
        let error = begun.ask(&init_frame(&[])).and_then(|_| begun.request(GET_FUNCTION, &[text("rpc.noop")]));
        assert!(error.as_ref().is_err_and(|error| error.contains("killed by signal 9")), "{name}: {error:?}");
        let end = client.0.read_to_end(&mut Vec::new()).map_err(|error| error.kind());
        assert!(end.is_ok() || end == Err(std::io::ErrorKind::ConnectionReset), "{name}: {end:?}");
        assert_eq!(connect().call_by_name("rpc.test.addone", &[int(1)]), Ok((1, int(2))), "{name}");
    }
}

#[test]
fn two_hundred_clients_are_served_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let server = server_process(folder.path(), "none");
    let mut clients: Vec<_> = (0..200).map(|_| Client::connect(server.address(), "")).collect();
    let functions: Vec<_> = clients.iter_mut().map(|client| client.function("testing.echo")).collect();
    // All of them are asking before the first one is answered.
    for (at, (client, function)) in clients.iter_mut().zip(&functions).enumerate() {
        client.send(&call_frame(*function, &[int(at as i64)]));
    }
    for (at, client) in clients.iter_mut().enumerate() {
        assert_eq!(client.reply().unwrap()[1], int(at as i64));
    }
}

/// The first call of such clients looks a function up, with all types before all values.
#[test]
fn clients_up_to_tvm_0_20_are_told_so_in_their_form() {
    let fixture = Fixture::new(|_| {});
    let mut client = fixture.connect();
    let name = b"rpc.test.addone";
    let types = [1_i32.to_le_bytes(), 11_i32.to_le_bytes()].concat();
    client.send(&frame(GET_FUNCTION, &[&types[..], &sized(name)].concat()));
    let (code, body) = client.read_frame();
    assert_eq!((code, &body[..8]), (EXCEPTION, &types[..]), "one text, as it was for them");
    let text = String::from_utf8(body[16..].to_vec()).unwrap();
    assert_eq!(number(&body[8..16]), text.len() as u64);
    assert!(text.contains("the client is TVM 0.20 or older"), "{text}");
    // Others are served meanwhile.
    assert_ne!(fixture.connect().function("rpc.test.addone"), 0);
}

#[test]
fn the_time_that_a_client_has_asked_for_ends_its_session() {
    let fixture = Fixture::new(|_| {});
    let (mut client, code, _) = Client::hello(&fixture.address(), "client: -timeout=1.5");
    assert_eq!(code, 0xff271);
    // On a slow machine the time is over at an earlier request.
    let error = client
        .ask(&init_frame(&[]))
        .and_then(|_| client.request(GET_FUNCTION, &[text("never")]))
        .and_then(|Val(_, never)| client.ask(&call_frame(number(&never), &[])))
        .unwrap_err();
    assert!(error.starts_with("RPCSessionTimeoutError: Your 1.5s session has expired"), "{error}");
    assert!(client.is_at_end());
    // The time begins with the hello, whether or not a request follows.
    let (mut client, code, _) = Client::hello(&fixture.address(), "client: -timeout=0.1");
    assert_eq!(code, 0xff271);
    let error = client.reply().unwrap_err();
    assert!(error.starts_with("RPCSessionTimeoutError: Your 0.1s session has expired"), "{error}");
    fixture.has_sessions(0);
}

#[test]
fn the_time_that_a_client_has_asked_for_ends_its_session_while_it_reads_nothing() {
    let fixture = Fixture::new(|config| {
        config.write_timeout = Span(10 * LIMIT);
        config.min_rate = rpc_server::config::ByteSize(0);
    });
    let mut seconds = 0.2;
    let mut client = loop {
        let (mut client, code, _) = Client::hello(&fixture.address(), &format!("client: -timeout={seconds}"));
        assert_eq!(code, 0xff271);
        let begun = client.ask(&init_frame(&[]));
        if let Ok(Val(4, data)) = begun.and_then(|_| client.request(ALLOC, &[tensor(0, U8, &[KILLED_LEN], 0), NONE])) {
            let header = header(number(&data), U8, &[KILLED_LEN], 0);
            client.send(&frame(COPY_FROM, &[&header[..], &KILLED_LEN.to_le_bytes()].concat()));
            let (len, code) = (number(&client.read(8)), client.read(4));
            if code == COPY_ACK.to_le_bytes() {
                assert_eq!(len, KILLED_LEN as u64 + 4);
                break client;
            }
        }
        // On a slow machine the time was over before.
        seconds *= 2.0;
    };
    fixture.has_sessions(0);
    let mut rest = Vec::new();
    let _ = client.0.read_to_end(&mut rest);
    assert!(rest.len() < KILLED_LEN as usize, "the answer is cut off");
}

#[test]
fn an_idle_session_ends_with_the_error_that_clients_know() {
    let fixture = Fixture::new(|config| config.idle_timeout = Some(Span(Duration::from_millis(500))));
    let (mut client, code, _) = Client::hello(&fixture.address(), "client:");
    assert_eq!(code, 0xff271);
    // Nothing is asked after the first request, and on a slow machine not even that in time.
    let error = client.ask(&init_frame(&[])).and_then(|_| client.reply()).unwrap_err();
    assert!(error.starts_with("RPCSessionTimeoutError: "), "{error}");
    assert!(client.is_at_end());
    fixture.has_sessions(0);
}

#[test]
fn a_hello_that_does_not_come_in_time_ends_its_own_connection_alone() {
    let fixture = Fixture::new(|config| config.handshake_timeout = Span(Duration::from_secs(2)));
    let dial = || TcpStream::connect(fixture.address().strip_prefix("tcp://").unwrap()).unwrap();
    let mut silent = Client(dial());
    silent.0.set_read_timeout(Some(LIMIT)).unwrap();
    // Each byte of this one comes early enough after the one before.
    let mut slow = dial();
    let trickle = thread::spawn(move || {
        let hello = [&0xff271_i32.to_le_bytes()[..], &1000_i32.to_le_bytes(), &[b'c'; 999]].concat();
        let sent = hello.iter().take_while(|byte| {
            thread::sleep(Duration::from_millis(50));
            slow.write_all(&[**byte]).is_ok()
        });
        sent.count()
    });
    // Others are served beside many that are in their handshakes.
    let mut half_open: Vec<_> = (0..64).map(|_| dial()).collect();
    for stream in &mut half_open {
        stream.write_all(&0xff271_i32.to_le_bytes()).unwrap();
    }
    assert_eq!(fixture.connect().call_by_name("rpc.test.addone", &[int(1)]), Ok((1, int(2))));
    assert!(silent.is_at_end());
    let sent = trickle.join().unwrap();
    assert!(sent < 1007, "{sent}");
    for stream in half_open {
        let mut client = Client(stream);
        client.0.set_read_timeout(Some(LIMIT)).unwrap();
        assert!(client.is_at_end());
    }
    assert_eq!(fixture.connect().call_by_name("rpc.test.addone", &[int(1)]), Ok((1, int(2))));
}

#[test]
fn a_client_that_neither_reads_nor_sends_what_it_owes_is_cut_off() {
    // The one takes nothing of its answer; of the other a part of a copy comes, and no more.
    let reads_nothing: fn(&mut Client, u64) = |client, data| {
        let header = header(data, U8, &[KILLED_LEN], 0);
        client.send(&frame(COPY_FROM, &[&header[..], &KILLED_LEN.to_le_bytes()].concat()));
    };
    let sends_a_part: fn(&mut Client, u64) = |client, data| {
        let copy = copy_to_frame(&header(data, U8, &[KILLED_LEN], 0), &vec![1; KILLED_LEN as usize]);
        client.send(&copy[..1 << 20]);
    };
    let fixture = Fixture::new(|config| {
        config.write_timeout = Span(Duration::from_millis(500));
        config.min_rate = rpc_server::config::ByteSize(1 << 20);
    });
    for owes in [reads_nothing, sends_a_part] {
        let mut client = fixture.connect();
        let data = client.alloc(U8, &[KILLED_LEN]);
        owes(&mut client, data);
        fixture.has_sessions(0);
        assert_eq!(fixture.connect().call_by_name("rpc.test.addone", &[int(1)]), Ok((1, int(2))));
        fixture.has_sessions(0);
    }
}

#[test]
fn handles_of_one_session_name_nothing_in_another() {
    let fixture = Fixture::new(|_| {});
    let (mut owner, mut other) = (fixture.connect(), fixture.connect());
    let (add, data) = (owner.function("rpc.test.addone"), owner.alloc(U8, &[4]));
    let stream = owner.handle(CREATE_STREAM, &[cpu()]);
    let (71, Val(4, list)) = owner.call_by_name("list", &[]).unwrap() else { panic!() };
    let (list, header) = (number(&list), header(data, U8, &[4], 0));
    owner.copy_to(&header, b"mine").unwrap();
    assert!(other.call(add, &[int(1)]).unwrap_err().contains("names no function"));
    assert!(other.copy_from(&header, 4).is_err() && other.copy_to(&header, b"evil").is_err());
    assert!(other.request(STREAM_SYNC, &[cpu(), pointer(stream)]).is_err());
    assert!(other.request(FREE_DATA, &[cpu(), pointer(data)]).is_err());
    for handle in [add, data, stream, list] {
        assert!(other.request(FREE, &[pointer(handle)]).is_err());
    }
    let echo = other.function("testing.echo");
    for arg in [object(list), tensor(data, U8, &[4], 0)] {
        assert!(other.call(echo, &[arg]).is_err());
    }
    assert_eq!(owner.call(add, &[int(1)]), Ok((1, int(2))));
    assert_eq!(owner.copy_from(&header, 4).unwrap(), b"mine");
    for handle in [add, data, stream, list] {
        assert_eq!(owner.request(FREE, &[pointer(handle)]), Ok(NONE));
    }
}

#[test]
fn limits_of_the_server_are_errors_with_their_names() {
    let fixture = Fixture::new(|config| {
        config.max_sessions = 1;
        config.max_handles = 8;
        config.max_message = rpc_server::config::ByteSize(1 << 20);
        config.max_memory = rpc_server::config::ByteSize(1 << 20);
    });
    let mut client = fixture.connect();
    // A client without a place learns why, by the first request that it makes.
    let (mut second, code, _) = Client::hello(&fixture.address(), "client:");
    assert_eq!(code, 0xff271);
    let error = second.ask(&init_frame(&[])).unwrap_err();
    assert!(error.contains("max_sessions"), "{error}");
    assert!(second.is_at_end());
    let echo = client.function("testing.echo");
    let large = call_frame(echo, &[bytes(&vec![1; 1 << 20])]);
    assert!(client.ask(&large).unwrap_err().contains("max_message"));
    let error = client.request(ALLOC, &[tensor(0, U8, &[2 << 20], 0), NONE]).unwrap_err();
    assert!(error.contains("max_memory"), "{error}");
    let error = (0..20).find_map(|_| client.request(GET_FUNCTION, &[text("rpc.noop")]).err()).unwrap();
    assert!(error.contains("max_handles"), "{error}");
    assert_eq!(client.call(echo, &[int(1)]), Ok((1, int(1))), "the session goes on");
}

#[test]
fn a_server_that_stops_tells_its_clients() {
    let fixture = Fixture::new(|_| {});
    let mut client = fixture.connect();
    client.function("testing.echo");
    fixture.runtime.block_on(fixture.running.drain());
    let error = client.reply().unwrap_err();
    assert!(error.contains("going away"), "{error}");
    assert!(client.is_at_end());
}

#[test]
fn clients_of_tvm_have_the_rights_of_those_without_identity() {
    let rules = tempfile::tempdir().unwrap();
    let policy = rules.path().join("policy.toml");
    std::fs::write(&policy, "[[rule]]\nname = 'all'\nidentities = ['*']\nfunctions = ['rpc.test.*']\n").unwrap();
    let fixture = Fixture::new(|config| config.policy = Some(policy));
    let mut client = fixture.connect();
    assert_eq!(client.call_by_name("rpc.test.addone", &[int(1)]), Ok((1, int(2))));
    let refused = client.request(GET_FUNCTION, &[text("testing.echo")]).unwrap_err();
    assert!(refused.starts_with("refused: "), "{refused}");
    let refused = client.call_by_name("tvm.rpc.server.upload", &[text("a"), bytes(b"b")]).unwrap_err();
    assert!(refused.starts_with("refused: "), "{refused}");
}

#[test]
fn sessions_with_processes_of_their_own_are_as_others() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = crate::server_program();
    command.args(["serve", "--listen", "tcp://127.0.0.1:0", "--exit-with-stdin", "--log-level", "error", "--workdir"]);
    command.arg(folder.path()).args(["--tvm", "--tvm-self-test", "--isolate", "process", "--max-memory", "64MiB"]);
    command.args(["--allow-forward", "tvm://127.0.0.1:*"]);
    let server = ServerProcess::spawn(command).unwrap();
    let mut client = Client::connect(server.address(), "");
    // A chain, whose both ends have such sessions.
    let mut chained = through(server.address(), &stop(server.address(), ""));
    assert_eq!(chained.call_by_name("rpc.test.addone", &[int(1)]), Ok((1, int(2))));
    drop(chained);
    assert_eq!(client.call_by_name("rpc.test.addone", &[int(1)]), Ok((1, int(2))));
    let len = (3 << 20) + 1;
    let content: Vec<u8> = (0..len).map(|at| (at % 241) as u8).collect();
    let data = client.alloc(U8, &[len]);
    client.copy_to(&header(data, U8, &[len], 0), &content).unwrap();
    assert_eq!(client.copy_from(&header(data, U8, &[len], 0), len as u64).unwrap(), content);
    client.call_by_name("tvm.rpc.server.upload", &[text("a"), bytes(b"b")]).unwrap();
    assert_eq!(client.call_by_name("tvm.rpc.server.download", &[text("a")]), Ok((66, Val(9, sized(b"b")))));
    assert_eq!(client.call_by_name("rpc.test.except", &[text("abc")]), Err("abc".to_owned()));
}

#[test]
fn tvm_is_served_only_where_nobody_has_to_prove_who_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |change: &dyn Fn(&mut ServeConfig)| {
        let mut config = config(folder.path());
        change(&mut config);
        config.check().err()
    };
    let listen = |config: &mut ServeConfig, address: &str| config.listen = vec![address.parse().unwrap()];
    assert!(refused(&|_| ()).is_none());
    assert!(refused(&|config| listen(config, "unix:/tmp/x")).is_none());
    let error = refused(&|config| listen(config, "tcp://0.0.0.0:0")).unwrap();
    assert!(matches!(error, ConfigError::InsecureTvm { .. }), "{error:?}");
    assert!(error.to_string().contains("--insecure") && error.to_string().contains("127.0.0.1"), "{error}");
    assert!(
        refused(&|config| {
            listen(config, "tcp://0.0.0.0:0");
            config.insecure = true;
        })
        .is_none()
    );
    let error = refused(&|config| config.token_file = Some("tokens".into())).unwrap();
    assert!(matches!(error, ConfigError::TvmWithIdentity), "{error:?}");
    // Without the setting its first bytes are those of no protocol.
    let runtime = Runtime::new().unwrap();
    let plain = ServeConfig { tvm: false, ..config(folder.path()) };
    let running: Result<_, ServeError> = runtime.block_on(RpcServer::new(Registry::new()).config(plain).start());
    let running = running.unwrap();
    let address = running.addresses()[0].to_string();
    let mut stream = TcpStream::connect(address.strip_prefix("tcp://").unwrap()).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(&[&0xff271_i32.to_le_bytes()[..], &7_i32.to_le_bytes(), b"client:"].concat()).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(!answer.starts_with(&0xff271_i32.to_le_bytes()), "{answer:?}");
}

/// The scenarios of `tvm_client.py`, by the client of the package.
#[test]
fn the_client_of_tvm_itself_is_served() {
    let Some(environment) = tvm_ffi::environment() else { return };
    let Some(mut client) = environment.script("tvm_client.py") else { return };
    let Some(runtime) = environment.tvm_runtime() else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut command = crate::server_program();
    command.args(["serve", "--listen", "tcp://127.0.0.1:0", "--exit-with-stdin", "--log-level", "error", "--workdir"]);
    command.arg(folder.path()).args(["--tvm", "--tvm-self-test", "--key", "board", "--allow-modules", "--tvm-ffi"]);
    command.arg(environment.library()).env_remove("TVM_FFI_LIBRARY");
    // The second has the functions that fill tensors for measurements.
    for library in [runtime.with_file_name("libtvm_runtime_extra.so"), runtime].into_iter().rev() {
        command.arg("--runtime-library").arg(library);
    }
    command.args(["--max-memory", "256MiB", "--allow-forward", "tvm://127.0.0.1:*"]);
    command.args(["--allow-forward", "tvm://127.0.0.1:*?then=*", "--allow-forward", "tcp://127.0.0.1:*"]);
    let server = ServerProcess::spawn(command).unwrap();
    let output = client.arg(server.address().strip_prefix("tcp://").unwrap()).output().unwrap();
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}
