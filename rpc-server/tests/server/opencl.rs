//! The daemon on a machine with an OpenCL device, such as that of PoCL. Without one each test
//! prints that and passes; with `RPC_TESTS_REQUIRE_OPENCL=1` it fails instead.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use rpc_core::client::Files;
use rpc_core::{DataType, Device, ErrorKind, Pack, RemoteFunction, RemoteTensor, Session, Value, VirtualDevice};
use rpc_server::ServerProcess;
use rpc_server::builtins::{ServerInfo, TimeOptions, time_function};
use rpc_transports::Connector;
use rpc_transports::tracker::{ServerRequest, TrackerClient};

const KERNELS: &[u8] = include_bytes!("../../../rpc-opencl/tests/opencl/kernels.cl");

/// A kernel that writes far from any memory of its process.
const STRAY: &[u8] = b"kernel void stray(global int* out) { out[1L << 44] = 1; }";

/// Time after which a test that waits has hung.
const LONG: Duration = Duration::from_secs(60);

/// Returns the folder of OpenCL's vendors; `None`, with a word, if there is no device.
fn vendors() -> Option<OsString> {
    static VENDORS: LazyLock<Result<OsString, String>> = LazyLock::new(|| {
        let named = std::env::var_os("RPC_TESTS_OPENCL_VENDORS").or_else(|| std::env::var_os("OCL_ICD_VENDORS"));
        let vendors = named.unwrap_or_else(|| "/etc/OpenCL/vendors".into());
        let mut probe = Command::new(env!("CARGO_BIN_EXE_rpc-server"));
        let output = probe.args(["--describe-devices", "opencl"]).env("OCL_ICD_VENDORS", &vendors).output().unwrap();
        let answer = String::from_utf8_lossy(&output.stdout).into_owned();
        if answer.contains("\"Devices\":[{") { Ok(vendors) } else { Err(answer) }
    });
    VENDORS
        .clone()
        .map_err(|answer| {
            let is_required = std::env::var_os("RPC_TESTS_REQUIRE_OPENCL").is_some_and(|required| required == "1");
            assert!(!is_required, "no OpenCL device: {answer}");
            eprintln!("SKIPPED: no OpenCL device: {answer}");
        })
        .ok()
}

/// A server of a machine with this folder of vendors, and the folder that it works in.
struct Server(ServerProcess, #[allow(dead_code, reason = "dropped behind the server")] tempfile::TempDir);

impl Server {
    fn start(vendors: &OsString, args: &[&str]) -> Self {
        Self::with(vendors, args, &[])
    }

    /// Starts a server that takes kernels for processors, too.
    fn taking_modules(vendors: &OsString) -> Self {
        Self::start(vendors, &["--allow-modules"])
    }

    fn with(vendors: &OsString, args: &[&str], variables: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let process = daemon(vendors, "serve", args, variables, folder.path());
        Self(process, folder)
    }

    fn connect(&self) -> Session {
        Connector::new().connect_blocking(self.0.address()).unwrap()
    }
}

fn daemon(
    vendors: &OsString,
    command: &str,
    args: &[&str],
    variables: &[(&str, &str)],
    folder: &Path,
) -> ServerProcess {
    let first = [command, "--exit-with-stdin", "--listen", "tcp://127.0.0.1:0", "--log-level", "error"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_rpc-server"));
    command.args(first).args(args).env_clear().env("XDG_STATE_HOME", folder).env("POCL_CACHE_DIR", folder.join("pocl"));
    // PoCL runs a linker.
    command.env("PATH", std::env::var_os("PATH").unwrap_or_default());
    // Not the devices of other kinds that this machine may have.
    command.env("RPC_CUDA_DRIVER_LIBRARY", folder.join("none")).env("OCL_ICD_VENDORS", vendors);
    command.envs(variables.iter().copied());
    ServerProcess::spawn(command).unwrap()
}

fn info(session: &Session) -> ServerInfo {
    let Pack(info) = session.function::<(), Pack<ServerInfo>>("rpc.info").wait().unwrap().call(()).wait().unwrap();
    info
}

/// Returns true if a process has loaded OpenCL.
fn has_opencl(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().contains("libOpenCL.so")
}

fn kernel(session: &Session, name: &str) -> RemoteFunction {
    Files::new(session).put_bytes("kernels.cl", KERNELS).wait().unwrap();
    session.load_module("kernels.cl").wait().unwrap().function(name).wait().unwrap()
}

fn ints(session: &Session, count: i64) -> RemoteTensor {
    session.alloc(Device::opencl(0), DataType::I32, &[count]).wait().unwrap()
}

fn add_on_the_device(session: &Session) {
    let add = kernel(session, "vector_add");
    let tensor = |values: &[f32]| {
        let tensor = session.alloc(Device::opencl(0), DataType::F32, &[values.len() as i64]).wait().unwrap();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        session.copy_to_remote(&tensor, bytes).wait().unwrap();
        tensor
    };
    let (a, b, sum) = (tensor(&[1.0, 2.0]), tensor(&[0.5, 4.0]), tensor(&[0.0; 2]));
    add.call::<()>((2, Value::Null, &a, &b, &sum, 2)).wait().unwrap();
    let bytes = session.copy_from_remote(&sum).wait().unwrap();
    assert_eq!(bytes[..], [1.5_f32.to_le_bytes(), 6_f32.to_le_bytes()].concat()[..]);
}

/// Checks that the compiler of PoCL keeps nothing where the process of another session finds it, or
/// behind a session.
fn check_compiler_caches(server: &Server, first: &Session) {
    let cache_of = |session: &Session| {
        let variables = std::fs::read(format!("/proc/{}/environ", info(session).pid)).unwrap();
        let variables = String::from_utf8(variables).unwrap();
        PathBuf::from(variables.split('\0').find_map(|variable| variable.strip_prefix("POCL_CACHE_DIR=")).unwrap())
    };
    let second = server.connect();
    add_on_the_device(&second);
    let (of_first, of_second) = (cache_of(first), cache_of(&second));
    assert!(of_first != of_second && !of_first.starts_with(server.1.path().join("pocl")));
    if of_second.exists() {
        assert!(of_first.exists());
        drop(second);
        let gone = Instant::now() + LONG;
        while of_second.exists() {
            assert!(Instant::now() < gone, "the cache is still there");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(of_first.exists());
    } else {
        eprintln!("SKIPPED: the driver is not PoCL");
    }
}

#[test]
fn sessions_use_devices_in_processes_of_their_own() {
    let Some(vendors) = vendors() else { return };
    let server = Server::taking_modules(&vendors);
    let session = server.connect();
    add_on_the_device(&session);
    let data: Vec<u8> = (0..5_000_000_u32).map(|byte| (byte % 251) as u8).collect();
    let tensor = session.alloc(Device::opencl(0), DataType::U8, &[data.len() as i64]).wait().unwrap();
    session.copy_to_remote(&tensor, data.clone()).wait().unwrap();
    assert!(session.copy_from_remote(&tensor).wait().unwrap() == data);
    // OpenCL is where it is used, and nowhere else.
    assert!(has_opencl(info(&session).pid));
    assert!(!has_opencl(server.0.id()));
    check_compiler_caches(&server, &session);
    let devices = info(&session).devices;
    let device = devices.iter().find(|device| device.device == "opencl:0").unwrap();
    assert!(device.absent.is_none() && device.name.is_some() && device.total_memory.is_some(), "{device:?}");

    let cli = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_rpc-cli")).env_clear().args(args).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let (text, address) = (cli(&["info", server.0.address()]), server.0.address());
    assert!(text.contains("opencl:0 "), "{text}");
    // The functions of devices are not the program's own.
    assert!(!cli(&["functions", address]).contains("opencl."));
    assert!(cli(&["functions", address, "--all"]).contains("opencl.compile"));
}

#[test]
fn a_processor_takes_no_kernels_of_clients_where_modules_are_not_allowed() {
    let Some(vendors) = vendors() else { return };
    let probe = Server::start(&vendors, &[]);
    let devices = info(&probe.connect()).devices;
    let first = devices.iter().find(|device| device.device == "opencl:0").unwrap();
    if !first.name.as_deref().is_some_and(|name| name.contains("Portable Computing Language")) {
        eprintln!("SKIPPED: opencl:0 is no processor of PoCL: {first:?}");
        return;
    }
    let list = tempfile::NamedTempFile::new().unwrap();
    let limited = ["--allow-modules", "--module-digests", list.path().to_str().unwrap()];
    for args in [&[][..], &limited] {
        let server = Server::start(&vendors, args);
        let session = server.connect();
        Files::new(&session).put_bytes("kernels.cl", KERNELS).wait().unwrap();
        Files::new(&session).put_bytes("kernels.clbin", "any").wait().unwrap();
        let compile = session.function::<(&str,), Value>("opencl.compile").wait().unwrap();
        for error in [
            session.load_module("kernels.cl").wait().err().unwrap(),
            session.load_module("kernels.clbin").wait().err().unwrap(),
            compile.call(("kernels.cl",)).wait().unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
            assert!(error.message().contains("--allow-modules"), "{error}");
        }
        let data = vec![7; 5_000_000];
        let tensor = session.alloc(Device::opencl(0), DataType::U8, &[data.len() as i64]).wait().unwrap();
        session.copy_to_remote(&tensor, data.clone()).wait().unwrap();
        assert!(session.copy_from_remote(&tensor).wait().unwrap() == data);
    }
}

#[test]
fn a_kernel_that_never_ends_or_goes_astray_ends_with_its_session() {
    let Some(vendors) = vendors() else { return };
    let server = Server::taking_modules(&vendors);
    let (first, second, third) = (server.connect(), server.connect(), server.connect());
    let (pid, word) = (info(&first).pid, ints(&first, 1));
    kernel(&first, "endless").call::<()>((1, Value::Null, &word)).wait().unwrap();
    let wait = first.stream_wait(Device::opencl(0), None).timeout(Duration::from_millis(100)).wait();
    assert_eq!(wait.unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    // The session still answers, on lanes that do not wait for the device; and others use it.
    let echo = first.get_function("rpc.echo").concurrent().timeout(LONG).wait().unwrap();
    assert_eq!(echo.call::<i64>((7,)).concurrent().timeout(LONG).wait().unwrap(), 7);
    add_on_the_device(&second);
    drop((word, echo, first));
    let gone = Instant::now() + LONG;
    while Path::new(&format!("/proc/{pid}")).exists() {
        assert!(Instant::now() < gone, "the session's process is still there");
        std::thread::sleep(Duration::from_millis(10));
    }

    Files::new(&third).put_bytes("stray.cl", STRAY).wait().unwrap();
    let stray = third.load_module("stray.cl").wait().unwrap().function("stray").wait().unwrap();
    let out = ints(&third, 1);
    let error = match stray.call::<()>((1, Value::Null, &out)).wait() {
        Ok(()) => third.stream_wait(Device::opencl(0), None).wait().unwrap_err(),
        Err(error) => error,
    };
    assert!([ErrorKind::PeerLost, ErrorKind::DeviceLost].contains(&error.kind()), "{error}");
    add_on_the_device(&second);
}

#[test]
fn kernels_are_timed_by_the_device() {
    let Some(vendors) = vendors() else { return };
    let server = Server::taking_modules(&vendors);
    let session = server.connect();
    let (count_up, out) = (kernel(&session, "count_up"), ints(&session, 64));
    let options = TimeOptions { number: 2, repeat: 3, ..TimeOptions::default() };
    let shortest = |times: i32| {
        let timing = time_function(&session, &count_up, &options, (64, Value::Null, &out, times));
        let samples = rpc_core::blocking::block_on(timing).unwrap().unwrap();
        assert_eq!(samples.len(), 3);
        samples.into_iter().fold(f64::INFINITY, f64::min)
    };
    // A call returns when its kernel has only been submitted, which takes the same time for both.
    let (short, long) = (shortest(1), shortest(500_000));
    assert!(short > 0.0 && long > 3.0 * short, "{short} {long}");
}

#[test]
fn a_machine_without_a_device_says_why() {
    let nowhere = OsString::from("/nowhere");
    let cases: [(&[(&str, &str)], &str); 2] = [
        (&[], ""),
        (&[("OPENCL_DYLIB_PATH", "/nowhere/libOpenCL.so.1")], "the library of OpenCL cannot be loaded: none of"),
    ];
    for (variables, reason) in cases {
        let server = Server::with(&nowhere, &[], variables);
        let session = server.connect();
        let error = session.alloc(Device::opencl(0), DataType::U8, &[1]).wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeviceUnavailable);
        assert!(error.message().contains(reason), "{error}");
        // Without a device there is no reason for a process.
        assert_eq!(info(&session).pid, server.0.id());
    }
    let server = Server::start(&nowhere, &["--isolate", "none"]);
    let error = server.connect().alloc(Device::opencl(0), DataType::U8, &[1]).wait().unwrap_err();
    assert!(error.message().contains("serve with --isolate process"), "{error}");
}

#[test]
fn a_tracker_finds_a_server_by_its_device() {
    let Some(vendors) = vendors() else { return };
    let folder = tempfile::tempdir().unwrap();
    let tracker = daemon(&vendors, "tracker", &[], &[], folder.path());
    let server = Server::start(&vendors, &["--tracker", tracker.address(), "--tracker-key", "board"]);
    let wanted: VirtualDevice = "opencl,scope=host,target=opencl".parse().unwrap();
    let client = TrackerClient::connect_blocking(Connector::new(), tracker.address()).unwrap();
    let loan = client.request_blocking(&ServerRequest::new("board").virtual_device(wanted).timeout(LONG)).unwrap();
    drop(loan);
    drop(server);
}
