//! Servers that load native code, with the real TVM-FFI: from the shell and from programs, and when
//! that code is broken.
#[allow(dead_code, unreachable_pub, reason = "other tests use more of it")]
#[path = "../../../tests/src/tvm_ffi.rs"]
pub(crate) mod tvm_ffi;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use rpc_core::client::{Digest, Modules};
use rpc_core::{DataType, Device, ErrorKind, RemoteFunction, RemoteModule, RpcError, Session};
use rpc_server::ServerProcess;
use rpc_server::builtins::{TimeOptions, time_function};
use rpc_transports::Connector;
use tempfile::TempDir;

use tvm_ffi::{Environment, environment};

struct Fixture {
    server: ServerProcess,
    _folder: TempDir,
}

impl Fixture {
    /// A server that takes modules, with these flags beside.
    fn new(environment: &Environment, flags: &[&str]) -> Self {
        Self::with(&[&["--allow-modules", "--tvm-ffi", environment.library().to_str().unwrap()], flags].concat())
    }

    fn with(flags: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let server = ServerProcess::spawn(serve(folder.path(), flags)).unwrap();
        Self { server, _folder: folder }
    }

    fn connect(&self) -> Session {
        Connector::new().connect_blocking(self.server.address()).unwrap()
    }

    fn cli(&self, name: &str, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rpc-cli"));
        command.arg(name).arg(self.server.address()).args(args).env_remove("TVM_FFI_LIBRARY");
        command.output().unwrap()
    }
}

fn serve(folder: &Path, flags: &[&str]) -> Command {
    let mut command = crate::server_program();
    command.args(["serve", "--listen", "tcp://127.0.0.1:0", "--exit-with-stdin", "--log-level", "error", "--workdir"]);
    command.arg(folder).args(flags).env_remove("TVM_FFI_LIBRARY");
    command
}

fn digest_of(file: &Path) -> Digest {
    rpc_server::modules::hash(&*fs::read(file).unwrap()).unwrap().0
}

fn load(session: &Session, file: &Path) -> Result<RemoteModule, RpcError> {
    let (modules, digest) = (Modules::new(session), digest_of(file));
    modules.upload_bytes(digest, fs::read(file).unwrap()).wait()?;
    modules.load(digest).wait()
}

fn call(module: &RemoteModule, name: &str) -> Result<(), RpcError> {
    module.function(name).wait()?.call::<()>(()).wait()
}

#[track_caller]
fn said(output: &Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn functions_are_called_timed_and_listed_from_the_shell() {
    let Some(environment) = environment() else { return };
    let fixture = Fixture::new(environment, &[]);
    let module = environment.compile("kernels.cc");
    let file = module.to_str().unwrap();
    let (code, stdout, stderr) = said(&fixture.cli("call", &["--module", file, "add", "20", "22"]));
    assert_eq!((code, stdout.trim()), (0, "42"), "{stderr}");
    // The server has the module by now.
    let digest = format!("sha256:{}", digest_of(&module));
    let (code, stdout, stderr) = said(&fixture.cli("call", &["--module", &digest, "identity", "7"]));
    assert_eq!((code, stdout.trim()), (0, "7"), "{stderr}");
    let (code, stdout, stderr) = said(&fixture.cli("functions", &["--module", &digest]));
    assert_eq!(code, 0, "{stderr}");
    for line in ["(tensor, tensor, tensor) -> null", "(int, int) -> int", "({str: any}) -> {str: any}"] {
        assert!(stdout.contains(line), "{stdout}");
    }
    assert!(!stdout.contains("metadata"), "{stdout}");
    let (code, stdout, stderr) = said(&fixture.cli("time", &["--module", file, "--repeat", "3", "add", "1", "2"]));
    assert!(code == 0 && stdout.contains("median"), "{stdout}{stderr}");
    let (code, _, stderr) = said(&fixture.cli("call", &["--module", file, "raise", "ValueError", "too bad"]));
    assert!(code != 0 && stderr.contains("too bad") && stderr.contains("ValueError"), "{stderr}");
}

#[test]
fn a_module_is_sent_once_and_loaded_by_others() {
    let Some(environment) = environment() else { return };
    let fixture = Fixture::new(environment, &[]);
    let file = environment.compile("kernels.c");
    let (first, second) = (fixture.connect(), fixture.connect());
    call(&load(&first, &file).unwrap(), "empty").unwrap();
    let modules = Modules::new(&second);
    assert!(modules.has(digest_of(&file)).wait().unwrap());
    let module = modules.load(digest_of(&file)).wait().unwrap();
    // A second load, and one by the path, give the same module.
    let again = second.load_module(file.to_str().unwrap()).wait().unwrap();
    for module in [module, again] {
        let x = second.alloc(Device::cpu(), DataType::F32, &[2]).wait().unwrap();
        second.copy_to_remote(&x, rpc_core::dlpack::to_bytes(&[1.0_f32, 2.0])).wait().unwrap();
        module.function("scale").wait().unwrap().call::<()>((&x, &x, 2.0)).wait().unwrap();
        let bytes = second.copy_from_remote(&x).wait().unwrap();
        assert_eq!(rpc_core::dlpack::from_bytes::<f32>(&bytes), [2.0, 4.0]);
    }
}

#[test]
fn object_files_are_linked_before_they_are_loaded() {
    let Some(environment) = environment() else { return };
    let folder = tempfile::tempdir().unwrap();
    let run = |program: &str, args: &[&str]| {
        let status = Command::new(program).args(args).current_dir(folder.path()).status().unwrap();
        assert!(status.success(), "{program} {args:?}");
    };
    fs::write(
        folder.path().join("one.c"),
        "int __tvm_ffi_one(void *self, const void *args, int count, void *result) { (void)self, (void)args; \
         (void)count, (void)result; return 0; }",
    )
    .unwrap();
    fs::write(folder.path().join("two.c"), "int more(void) { return 2; }").unwrap();
    run("cc", &["-c", "-fPIC", "one.c", "two.c"]);
    run("tar", &["cf", "both.tar", "one.o", "two.o"]);
    run("tar", &["czf", "packed.tar", "one.o", "two.o"]);
    fs::write(folder.path().join("bad.o"), "no object").unwrap();
    let fixture = Fixture::new(environment, &[]);
    let session = fixture.connect();
    let files = rpc_core::client::Files::new(&session);
    for name in ["one.o", "both.tar", "packed.tar", "bad.o"] {
        files.put_bytes(name, fs::read(folder.path().join(name)).unwrap()).wait().unwrap();
    }
    for name in ["one.o", "both.tar", "packed.tar"] {
        call(&session.load_module(name).wait().unwrap(), "one").unwrap();
    }
    // Linked alone, to a file.
    let link = session.get_function("rpc.module.link").wait().unwrap();
    link.call::<()>(("both.tar", "both.so")).wait().unwrap();
    let mut library = Vec::new();
    files.get("both.so", &mut library).wait().unwrap();
    assert!(library.starts_with(b"\x7fELF"));
    call(&session.load_module("both.so").wait().unwrap(), "one").unwrap();
    for (path, library) in [("both.so", "x.so"), ("bad.o", "x.so"), ("one.o", "../x.so")] {
        let error = link.call::<()>((path, library)).wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    }
    let error = session.load_module("bad.o").wait().unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidArgument && error.message().contains("cannot link"), "{error}");
    let error = session.load_module("missing.tar").wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    // With a list the bytes of the library are not known before.
    let list = folder.path().join("list");
    fs::write(&list, "").unwrap();
    let listed = Fixture::new(environment, &["--module-digests", list.to_str().unwrap()]);
    let session = listed.connect();
    let files = rpc_core::client::Files::new(&session);
    files.put_bytes("one.o", fs::read(folder.path().join("one.o")).unwrap()).wait().unwrap();
    let link = session.get_function("rpc.module.link").wait().unwrap();
    assert_eq!(link.call::<()>(("one.o", "one.so")).wait().unwrap_err().kind(), ErrorKind::Refused);
    let error = session.load_module("one.o").wait().unwrap_err();
    assert!(error.kind() == ErrorKind::Refused && error.message().contains("--module-digests"), "{error}");
}

#[test]
fn functions_of_imported_modules_are_found_through_the_importer() {
    let Some(environment) = environment() else { return };
    for (isolate, is_shared) in [("process", false), ("none", true)] {
        let fixture = Fixture::new(environment, &["--isolate", isolate]);
        let session = fixture.connect();
        let module = |source: &str| load(&session, &environment.compile(source)).unwrap();
        let (importer, imported) = (module("kernels.c"), module("kernels.cc"));
        let missing = importer.function("add").wait().unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound, "{missing}");
        let add_import = session.get_function("rpc.module.add_import").wait().unwrap();
        let added = add_import.call::<()>((&importer, &imported)).wait();
        if is_shared {
            // Other sessions would get the functions, too.
            assert_eq!(added.unwrap_err().kind(), ErrorKind::Unsupported);
            continue;
        }
        added.unwrap();
        drop(imported);
        let add = importer.function("add").wait().unwrap();
        assert_eq!(add.call::<i64>((40, 2)).wait().unwrap(), 42);
        assert!(importer.function("scale").wait().is_ok());
        let own = session.get_function("rpc.module.own_function").wait().unwrap();
        let scale = own.call::<RemoteFunction>((&importer, "scale")).wait();
        assert!(scale.is_ok(), "{:?}", scale.err());
        let add = own.call::<RemoteFunction>((&importer, "add")).wait().unwrap_err();
        assert_eq!(add.kind(), ErrorKind::NotFound, "{add}");
        let cycle = add_import.call::<()>((&importer, &importer)).wait().unwrap_err();
        assert_eq!(cycle.kind(), ErrorKind::Application, "{cycle}");
        // Another session has modules of its own.
        let other = load(&fixture.connect(), &environment.compile("kernels.c")).unwrap();
        assert_eq!(other.function("add").wait().unwrap_err().kind(), ErrorKind::NotFound);
    }
}

#[test]
fn functions_are_timed_where_they_run() {
    let Some(environment) = environment() else { return };
    let fixture = Fixture::new(environment, &[]);
    let session = fixture.connect();
    let scale = load(&session, &environment.compile("kernels.c")).unwrap().function("scale").wait().unwrap();
    let x = session.alloc(Device::cpu(), DataType::F32, &[1 << 16]).wait().unwrap();
    let options = TimeOptions { number: 2, repeat: 5, ..TimeOptions::default() };
    let times =
        rpc_core::blocking::block_on(time_function(&session, &scale, &options, (&x, &x, 1.0))).unwrap().unwrap();
    assert!(times.len() == 5 && times.iter().all(|time| *time > 0.0), "{times:?}");
}

#[test]
fn libraries_of_the_operator_bring_functions_by_name() {
    let Some(environment) = environment() else { return };
    let library = environment.compile("globals.cc");
    let tvm_ffi = environment.library();
    for isolate in ["process", "none"] {
        let flags =
            ["--isolate", isolate, "--library", library.to_str().unwrap(), "--tvm-ffi", tvm_ffi.to_str().unwrap()];
        let fixture = Fixture::with(&flags);
        let (code, stdout, stderr) = said(&fixture.cli("call", &["tests.triple", "14"]));
        assert_eq!((code, stdout.trim()), (0, "42"), "{stderr}");
        let (_, stdout, _) = said(&fixture.cli("functions", &["--all"]));
        assert!(
            stdout.contains("tests.greet") && stdout.contains("rpc.echo") && !stdout.contains("ffi.Array"),
            "{stdout}"
        );
        // --library does not allow the modules of clients.
        let error = fixture.connect().load_module(library.to_str().unwrap()).wait().unwrap_err();
        assert!(error.message().contains("--allow-modules"), "{error}");
    }
}

#[test]
fn functions_of_a_runtime_are_for_modules_alone() {
    let Some(environment) = environment() else { return };
    let Some(runtime) = environment.tvm_runtime() else { return };
    let (runtime, tvm_ffi, library) = (runtime, environment.library(), environment.compile("globals.cc"));
    let [runtime, tvm_ffi, library] = [&runtime, &tvm_ffi, &library].map(|path| path.to_str().unwrap());
    for flags in [["--runtime-library", runtime], ["--library", runtime]] {
        let flags = [&flags[..], &["--library", library, "--tvm-ffi", tvm_ffi]].concat();
        let fixture = Fixture::with(&flags);
        let session = fixture.connect();
        let triple = session.function::<(i64,), i64>("tests.triple").wait().unwrap();
        assert_eq!(triple.call((2,)).wait().unwrap(), 6);
        // The first starts any program, and the other writes to any memory that it is told.
        for name in ["rpc.CreatePipeClient", "cache_flush_cpu_non_first_arg"] {
            let error = session.get_function(name).wait().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotFound, "{flags:?}: {error}");
        }
    }
    // Clients that may load modules get what measurements need.
    let fixture = Fixture::new(environment, &["--runtime-library", runtime]);
    let session = fixture.connect();
    assert_eq!(session.get_function("rpc.CreatePipeClient").wait().unwrap_err().kind(), ErrorKind::NotFound);
    let flush = session.get_function("cache_flush_cpu_non_first_arg").wait().unwrap();
    let x = session.alloc(Device::cpu(), DataType::F32, &[1 << 10]).wait().unwrap();
    flush.call::<()>((&x, &x)).wait().unwrap();
}

#[test]
fn module_that_ends_its_process_is_an_error_to_one_client() {
    let Some(environment) = environment() else { return };
    let fixture = Fixture::new(environment, &["--isolate-memory", "2GiB"]);
    let file = environment.compile("kernels.c");
    let bystander = fixture.connect();
    let adder = load(&bystander, &environment.compile("kernels.cc")).unwrap().function("add").wait().unwrap();
    for (name, words) in [
        ("segfaults", "SIGSEGV"),
        ("aborts", "SIGABRT"),
        ("exits", "code 7"),
        ("overflows_the_stack", "SIGSEGV"),
        ("eats_memory", "SIGABRT"),
    ] {
        let module = load(&fixture.connect(), &file).unwrap();
        let error = call(&module, name).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerLost, "{name}: {error}");
        assert!(error.message().contains(words) && error.request_may_have_run(), "{name}: {error}");
        assert_eq!(adder.call::<i64>((1, 2)).wait().unwrap(), 3, "after {name}");
    }
    call(&load(&fixture.connect(), &file).unwrap(), "empty").unwrap();
}

#[test]
fn function_that_never_returns_ends_with_its_session() {
    let Some(environment) = environment() else { return };
    let fixture = Fixture::new(environment, &[]);
    let session = fixture.connect();
    let pid = session.get_function("rpc.info").wait().unwrap();
    let rpc_core::Pack(info): rpc_core::Pack<rpc_server::builtins::ServerInfo> = pid.call(()).wait().unwrap();
    let module = load(&session, &environment.compile("kernels.c")).unwrap();
    let endless = module.function("never_returns").wait().unwrap();
    let mut limit = Duration::from_millis(50);
    loop {
        let error = endless.call::<()>(()).timeout(limit).wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
        if error.request_may_have_run() {
            break;
        }
        // The machine stood still before the request was sent.
        assert!(limit < Duration::from_secs(30), "{error}");
        limit *= 2;
    }
    // Other lanes go on.
    let empty = module.function("empty").concurrent().wait().unwrap();
    empty.call::<()>(()).concurrent().wait().unwrap();
    drop((pid, module, empty, endless, session));
    let process = format!("/proc/{}", info.pid);
    let begun = Instant::now();
    while Path::new(&process).exists() {
        assert!(begun.elapsed() < Duration::from_secs(30), "the process goes on");
        std::thread::yield_now();
    }
    call(&load(&fixture.connect(), &environment.compile("kernels.c")).unwrap(), "empty").unwrap();
}

#[test]
fn files_that_are_no_modules_say_what_is_wrong_with_them() {
    let Some(environment) = environment() else { return };
    let fixture = Fixture::new(environment, &[]);
    let session = fixture.connect();
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, content: &[u8]| {
        let file = folder.path().join(name);
        fs::write(&file, content).unwrap();
        file
    };
    let module = fs::read(environment.compile("kernels.c")).unwrap();
    let mut foreign = module.clone();
    // The machine of the header: one that there is not, in either order of bytes.
    foreign[18..20].copy_from_slice(&[0x34, 0x12]);
    for (file, words) in [
        (write("text.so", b"#!/bin/sh\nexit 0\n"), "not an ELF file"),
        (write("foreign.so", &foreign), "built for"),
        (write("cut.so", &module[..module.len() / 2]), "damaged ELF file"),
        (environment.compile("undefined.c"), "nobody_has_this"),
        (environment.library().with_file_name("libtvm_ffi.so"), "exports no symbol that begins with __tvm_ffi_"),
    ] {
        let error = load(&session, &file).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.message().contains(words), "{error}");
    }
    let module = load(&session, &environment.compile("kernels.c")).unwrap();
    let error = module.function("no_such_function").wait().unwrap_err();
    assert!(error.kind() == ErrorKind::NotFound && error.message().contains("scale"), "{error}");
}

#[test]
fn another_abi_is_refused_and_an_absent_library_says_how_to_get_it() {
    let Some(environment) = environment() else { return };
    let other = environment.compile("other_abi.c");
    let module = environment.compile("kernels.c");
    let empty = tempfile::tempdir().unwrap();
    for (library, words) in
        [(other.to_str().unwrap(), "ABI"), (empty.path().to_str().unwrap(), "pip install apache-tvm-ffi")]
    {
        let fixture = Fixture::with(&["--allow-modules", "--tvm-ffi", library]);
        let session = fixture.connect();
        let error = load(&session, &module).unwrap_err();
        assert!(error.message().contains(words) && error.message().contains(library), "{error}");
        // The session goes on.
        session.get_function("rpc.noop").wait().unwrap().call::<()>(()).wait().unwrap();
    }
    let error = load(&Fixture::with(&["--allow-modules", "--tvm-ffi", other.to_str().unwrap()]).connect(), &module);
    let error = error.unwrap_err();
    assert!(error.kind() == ErrorKind::Unsupported && error.message().contains("0.9.3"), "{error}");
}

#[test]
fn a_module_goes_to_all_workers_of_a_server_whose_store_has_room_for_one() {
    let Some(environment) = environment() else { return };
    let file = environment.compile("kernels.cc");
    let len = fs::metadata(&file).unwrap().len();
    let room = format!("{}", len + len / 2);
    for hosting in [disco::Hosting::Threads, disco::Hosting::Processes] {
        let fixture = Fixture::new(environment, &["--module-store-size", &room]);
        let mut options = disco::Options::default();
        options.hosting = hosting;
        let nodes = disco::SocketSession::new([fixture.server.address()], 3, 1).options(options);
        let session = nodes.start().wait().unwrap();
        let path = session.upload_module(&file).wait().unwrap();
        assert_eq!(path, digest_of(&file).module_path());
        let sum = session.load_module(&path, None).unwrap().function("add").unwrap().call((20, 22)).unwrap();
        for worker in 0..3 {
            let content = session.debug_get_from_remote(&sum, disco::WorkerId(worker)).wait().unwrap();
            assert!(matches!(content, disco::Content::Value(rpc_core::Value::Int(42))), "{content:?}");
        }
        // The second time no bytes are sent.
        assert_eq!(session.upload_module(&file).wait().unwrap(), path);
        session.shutdown().wait().unwrap();
    }
}
