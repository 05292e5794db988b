//! The daemon on a machine with GPUs: with the driver of the tests of `rpc-core`, which stands for
//! NVIDIA's.

use std::collections::HashSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, LazyLock};

use disco::{
    Content, DRef, DiscoSession, Hosting, Options, Part, ReduceOp, Scope, ShardLoader, SocketSession, WeightFolders,
    WeightReader, WorkerContext, WorkerId,
};
use rpc_core::client::Files;
use rpc_core::function::WorkspaceFiles;
use rpc_core::{
    Context, DataType, Device, DeviceAttribute, ErrorKind, LocalSession, Pack, Registry, RemoteTensor, Session, Shared,
    Tensor, TensorView, Value, VirtualDevice,
};
use rpc_server::ServerProcess;
use rpc_server::builtins::ServerInfo;
use rpc_transports::Connector;
use rpc_transports::tracker::{ServerRequest, TrackerClient};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::NO_OPENCL;

/// Code for the driver of the tests: the names of its kernels.
const KERNELS: &[u8] = b".entry vector_add .entry trap";

/// A folder with the stand-ins for the libraries of GPUs, and with the standard error of the
/// servers that load them. When it is dropped, the stand-ins must have reported no broken rule.
struct StandIns(TempDir);

impl StandIns {
    /// Creates a folder without any of the libraries.
    fn none() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Opens the standard error of servers, to append to it.
    fn errors(&self) -> File {
        File::options().create(true).append(true).open(self.path().join("stderr")).unwrap()
    }
}

impl Drop for StandIns {
    fn drop(&mut self) {
        let errors = std::fs::read_to_string(self.path().join("stderr")).unwrap_or_default();
        eprint!("{errors}");
        if !std::thread::panicking() {
            assert_no_violations(&errors);
        }
    }
}

/// Checks that the stand-ins have reported no broken rule in this standard error of a process.
fn assert_no_violations(errors: &str) {
    let violations: Vec<_> = errors.lines().filter(|line| line.starts_with("fake ")).collect();
    assert_eq!(violations, [""; 0], "rules of the libraries were broken");
}

/// Name and content of a library.
type Library = (&'static str, Vec<u8>);

/// A folder with the driver, cuBLAS and NCCL of the tests. `None`, with a word, where there is no C
/// compiler.
fn driver() -> Option<StandIns> {
    static COMPILED: LazyLock<Option<Vec<Library>>> = LazyLock::new(compile_driver);
    let folder = StandIns::none();
    for (library, bytes) in COMPILED.as_ref()? {
        std::fs::write(folder.path().join(library), bytes).unwrap();
    }
    Some(folder)
}

/// Compiles the libraries of [`driver`].
fn compile_driver() -> Option<Vec<Library>> {
    let folder = tempfile::tempdir().unwrap();
    let libraries = [
        ("rpc-cuda/tests/cuda/fake_driver.c", "libcuda.so.1", "-fvisibility=hidden"),
        ("rpc-cuda/tests/cuda/fake_cublas.c", "libcublas.so.12", "-fvisibility=hidden"),
        ("rpc-cuda/tests/cuda/fake_nvml.c", "libnvidia-ml.so.1", "-fvisibility=hidden"),
        ("disco/tests/nccl/fake_nccl.c", "libnccl.so.2", "-DON_CUDA"),
    ];
    for (source, library, flag) in libraries {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(source);
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", flag, "-o"]).arg(folder.path().join(library));
        match compiler.arg(source).args(["-lpthread", "-ldl"]).output() {
            Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
            Err(error) => {
                eprintln!("SKIPPED: no C compiler to make a driver for the tests with: {error}");
                return None;
            }
        }
    }
    let read = |(_, library, _)| (library, std::fs::read(folder.path().join(library)).unwrap());
    Some(libraries.map(read).into())
}

fn server(folder: &StandIns, args: &[&str]) -> ServerProcess {
    daemon(folder, "serve", args)
}

fn daemon(folder: &StandIns, command: &str, args: &[&str]) -> ServerProcess {
    daemon_with(folder, command, args, &[])
}

fn daemon_with(folder: &StandIns, command: &str, args: &[&str], variables: &[(&str, &str)]) -> ServerProcess {
    let first = [command, "--exit-with-stdin", "--listen", "tcp://127.0.0.1:0", "--log-level", "error"];
    let mut command = crate::server_program();
    command.args(first).args(args);
    command
        .env_clear()
        .env(NO_OPENCL.0, NO_OPENCL.1)
        .env("XDG_STATE_HOME", folder.path())
        .env("LD_LIBRARY_PATH", folder.path());
    command.envs(libraries(folder.path())).envs(variables.iter().copied()).stderr(folder.errors());
    ServerProcess::spawn(command).unwrap()
}

/// The variables by which libraries are those of the folder, or none, whatever this machine has
/// itself.
fn libraries(folder: &Path) -> [(&'static str, PathBuf); 4] {
    [
        ("RPC_CUDA_NVML_LIBRARY", folder.join("libnvidia-ml.so.1")),
        ("RPC_CUDA_DRIVER_LIBRARY", folder.join("libcuda.so.1")),
        ("RPC_CUDA_BLAS_LIBRARY", folder.join("libcublas.so.12")),
        ("DISCO_NCCL_LIBRARY", folder.join("libnccl.so.2")),
    ]
}

fn connect(server: &ServerProcess) -> Session {
    Connector::new().connect_blocking(server.address()).unwrap()
}

fn info(session: &Session) -> ServerInfo {
    let Pack(info) = session.function::<(), Pack<ServerInfo>>("rpc.info").wait().unwrap().call(()).wait().unwrap();
    info
}

/// Returns true if a process has loaded the driver.
fn has_driver(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().contains("libcuda.so")
}

fn floats(session: &Session, values: &[f32]) -> RemoteTensor {
    let tensor = session.alloc(Device::cuda(0), DataType::F32, &[values.len() as i64]).wait().unwrap();
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    session.copy_to_remote(&tensor, bytes).wait().unwrap();
    tensor
}

fn read(session: &Session, tensor: &RemoteTensor) -> Vec<f32> {
    let bytes = session.copy_from_remote(tensor).wait().unwrap();
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

fn add_on_the_device(session: &Session) {
    Files::new(session).put_bytes("kernels.ptx", KERNELS).wait().unwrap();
    let add = session.load_module("kernels.ptx").wait().unwrap().function("vector_add").wait().unwrap();
    let (a, b, sum) = (floats(session, &[1.0, 2.0]), floats(session, &[0.5, 4.0]), floats(session, &[0.0; 2]));
    add.call::<()>((1, 32, 0, &a, &b, &sum, 2)).wait().unwrap();
    assert_eq!(read(session, &sum), [1.5, 6.0]);
}

#[test]
fn sessions_use_gpus_in_processes_of_their_own_and_a_trap_ends_only_one() {
    let Some(folder) = driver() else { return };
    let server = server(&folder, &[]);
    let (first, second) = (connect(&server), connect(&server));
    add_on_the_device(&first);
    add_on_the_device(&second);
    let data: Vec<u8> = (0..5_000_000_u32).map(|byte| (byte % 251) as u8).collect();
    let tensor = first.alloc(Device::cuda(1), DataType::U8, &[data.len() as i64]).wait().unwrap();
    first.copy_to_remote(&tensor, data.clone()).wait().unwrap();
    assert!(first.copy_from_remote(&tensor).wait().unwrap() == data);
    // The driver is where it is used, and nowhere else.
    assert!(has_driver(info(&first).pid));
    assert!(!has_driver(server.id()));
    // A trap is told by whoever waits, and stays.
    let trap = first.load_module("kernels.ptx").wait().unwrap().function("trap").wait().unwrap();
    trap.call::<()>((1, 1, 0, Value::Null)).wait().unwrap();
    let error = first.stream_wait(Device::cuda(0), None).wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
    let error = first.alloc(Device::cuda(0), DataType::U8, &[1]).wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
    // It has lost the device, and not the session; and nobody else has lost anything.
    first.alloc(Device::cpu(), DataType::U8, &[1]).wait().unwrap();
    add_on_the_device(&second);
    add_on_the_device(&connect(&server));
}

/// The state of GPUs is known without a context of CUDA, and by their places on the bus.
#[test]
fn gpus_tell_their_clock_memory_and_utilization() {
    let Some(folder) = driver() else { return };
    // The devices are others than the library's first ones, as with CUDA_VISIBLE_DEVICES.
    let server = daemon_with(&folder, "serve", &[], &[("FAKE_PCI_SHIFT", "1")]);
    let session = connect(&server);
    let info = info(&session);
    let gpu = |index: &str| info.devices.iter().find(|device| device.device == index).unwrap();
    let first = gpu("cuda:0");
    assert_eq!((first.clock_mhz, first.utilization_percent), (Some(1060), Some(60)), "{first:?}");
    assert_eq!((first.used_memory, first.total_memory), (Some(60 << 20), Some(1 << 30)), "{first:?}");
    // No GPU is there, as far as the library knows.
    let second = gpu("cuda:1");
    let because = second.state_unknown_because.as_ref().unwrap();
    assert!(second.clock_mhz.is_none() && because.contains("Not Found (00000000:3d:00.0)"), "{second:?}");

    let cli = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_rpc-cli"))
            .env_clear()
            .env(NO_OPENCL.0, NO_OPENCL.1)
            .args(args)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let text = cli(&["info", server.address()]);
    assert!(text.contains("cuda:0 Fake GPU 0, 1.00 GiB (60.00 MiB in use), 60 % busy, 1060 MHz"), "{text}");
    assert!(text.contains("state unknown: nvmlDeviceGetHandleByPciBusId"), "{text}");
    // The functions of devices are not the program's own.
    assert!(!cli(&["functions", server.address()]).contains("cuda."));
    assert!(cli(&["functions", server.address(), "--all"]).contains("cuda.matmul"));
    let time = ["time", server.address(), "rpc.noop", "--lease", "cuda:0", "--repeat", "2"];
    let text = cli(&time);
    assert!(text.contains("clock of cuda:0: 1060 MHz before, 1060 MHz after"), "{text}");
    let report: serde_json::Value = serde_json::from_str(&cli(&[&time[..], &["--json"]].concat())).unwrap();
    assert_eq!((&report["clock_mhz_before"], &report["clock_mhz_after"]), (&1060.into(), &1060.into()));
    assert!(!has_driver(server.id()));
}

#[test]
fn unused_driver_is_not_loaded() {
    let Some(folder) = driver() else { return };
    let server = server(&folder, &[]);
    let session = connect(&server);
    let tensor = session.alloc(Device::cpu(), DataType::U8, &[3]).wait().unwrap();
    session.copy_to_remote(&tensor, vec![1, 2, 3]).wait().unwrap();
    let process = session.get_function("rpc.echo").wait().unwrap();
    assert_eq!(process.call::<i64>((7,)).wait().unwrap(), 7);
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", server.id()));
    // Without that file (a kernel without CONFIG_PROC_CHILDREN) there is nothing to look at.
    for child in children.unwrap_or_default().split_whitespace() {
        assert!(!has_driver(child.parse().unwrap()), "process {child} has loaded the driver");
    }
    // A query of the devices uses them.
    let info = info(&session);
    let names: Vec<_> = info.devices.iter().filter(|one| one.absent.is_none()).map(|one| &one.device[..]).collect();
    assert_eq!(names, ["cpu:0", "cuda:0", "cuda:1"]);
    assert!(has_driver(info.pid));
}

#[test]
fn a_server_without_processes_for_sessions_says_why_there_is_no_gpu() {
    let Some(folder) = driver() else { return };
    let server = server(&folder, &["--isolate", "none"]);
    let session = connect(&server);
    let error = session.alloc(Device::cuda(0), DataType::U8, &[1]).wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeviceUnavailable);
    assert!(error.message().contains("serve with --isolate process"), "{error}");
}

#[test]
fn a_machine_without_a_driver_says_so() {
    let folder = StandIns::none();
    // One that is there and is none.
    for broken in [false, true] {
        if broken {
            std::fs::write(folder.path().join("libcuda.so.1"), b"not a library").unwrap();
        }
        for isolate in ["auto", "process"] {
            let server = server(&folder, &["--isolate", isolate]);
            let session = connect(&server);
            let error = session.alloc(Device::cuda(0), DataType::U8, &[1]).wait().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::DeviceUnavailable);
            assert!(error.message().contains("libcuda.so"), "{error}");
            // Without a GPU there is no reason for a process.
            assert_eq!(info(&session).pid == server.id(), isolate == "auto");
        }
    }
}

#[test]
fn workers_with_gpus_are_processes() {
    let Some(folder) = driver() else { return };
    let server = server(&folder, &[]);
    let session = SocketSession::new([server.address()], 2, 1).start().wait().unwrap();
    let tensor = session.empty(&[4], DataType::F32, Some("cuda".parse().unwrap())).unwrap();
    let echo = session.get_global_func("rpc.info").unwrap().call(()).unwrap();
    session.sync_all().wait().unwrap();
    let mut pids = HashSet::from([server.id()]);
    for worker in 0..2 {
        let zeros = match session.debug_get_from_remote(&tensor, WorkerId(worker)).wait().unwrap() {
            Content::Tensor(tensor) => tensor.read().unwrap().as_slice::<f32>().unwrap().to_vec(),
            other => panic!("{other:?}"),
        };
        assert_eq!(zeros, [0.0; 4]);
        match session.debug_get_from_remote(&echo, WorkerId(worker)).wait().unwrap() {
            Content::Value(Value::Packed(info)) => {
                let pid = info.decode::<ServerInfo>().unwrap().pid;
                assert!(has_driver(pid) && pids.insert(pid), "{pids:?}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(!has_driver(server.id()));
    session.shutdown().wait().unwrap();
}

/// The library of the tests knows the ranks of one process alone.
fn as_threads() -> Options {
    let mut options = Options::default();
    options.hosting = Hosting::Threads;
    options
}

/// A session of as many workers as there are devices, as threads of one process.
fn on_gpus(server: &ServerProcess, groups: u32) -> DiscoSession {
    let session = SocketSession::new([server.address()], 2, groups).options(as_threads()).start().wait().unwrap();
    session.init_ccl("nccl", &[0, 1]).wait().unwrap();
    session
}

fn fetch(session: &DiscoSession, tensor: &DRef, worker: u32) -> Vec<f32> {
    match session.debug_get_from_remote(tensor, WorkerId(worker)).wait().unwrap() {
        Content::Tensor(tensor) => tensor.read().unwrap().as_slice::<f32>().unwrap().to_vec(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn collectives_of_a_session_move_data_between_gpus() {
    let Some(folder) = driver() else { return };
    let server = server(&folder, &[]);
    let session = on_gpus(&server, 1);
    let data: Vec<f32> = (0..300_000).map(|at| (at % 1000) as f32).collect();
    let x = Tensor::from_slice([2, 150_000], &data).unwrap();
    let whole = session.broadcast(&x, None, Scope::World).unwrap();
    let halves = session.scatter(&x, None, Scope::World).unwrap();
    let sum = session.allreduce(&whole, None, ReduceOp::Sum, Scope::World).unwrap();
    let gathered = session.allgather(&halves, None, Scope::World).unwrap();
    let share = session.reduce_scatter(&whole, None, ReduceOp::Max, Scope::World).unwrap();
    let turned = session.all_to_all(&whole, None, Scope::World).unwrap();
    session.barrier(Scope::World).unwrap();
    session.sync_all().wait().unwrap();
    for worker in 0..2 {
        let half = &data[worker as usize * 150_000..][..150_000];
        assert_eq!(fetch(&session, &whole, worker), data);
        assert_eq!(fetch(&session, &halves, worker), half);
        assert_eq!(fetch(&session, &sum, worker), data.iter().map(|one| 2.0 * one).collect::<Vec<_>>());
        assert_eq!(fetch(&session, &gathered, worker), data);
        assert_eq!(fetch(&session, &share, worker), half);
        assert_eq!(fetch(&session, &turned, worker), [half, half].concat());
    }
    // In place, and between two.
    session.allreduce(&whole, Some(&whole), ReduceOp::Avg, Scope::World).unwrap();
    session.send_recv(&halves, &share, &[(WorkerId(0), WorkerId(1))]).unwrap();
    session.sync_all().wait().unwrap();
    assert_eq!(fetch(&session, &whole, 1), data);
    assert_eq!(fetch(&session, &share, 1), &data[..150_000]);
    // The data has been on the devices, and nowhere else.
    let error = session.allreduce(
        &session.empty(&[4], DataType::F32, Some("cpu".parse().unwrap())).unwrap(),
        None,
        ReduceOp::Sum,
        Scope::World,
    );
    drop(error.unwrap());
    let error = session.sync_all().wait().unwrap_err().to_string();
    assert!(error.contains("cpu"), "{error}");
    // A group that breaks is made anew, with NCCL again; and host memory is there for who asks for
    // it.
    session.abort_ccl("enough").unwrap();
    session.reinit_ccl().wait().unwrap();
    let again = session.broadcast(&x, None, Scope::World).unwrap();
    assert_eq!(fetch(&session, &again, 1), data);
    session.init_ccl("host", &[]).wait().unwrap();
    let on_host = session.broadcast(&x, None, Scope::World).unwrap();
    assert_eq!(fetch(&session, &on_host, 1), data);
    session.shutdown().wait().unwrap();
}

/// Runs this test again in a process of its own, with the libraries that it needs.
fn with_libraries(test: &str) -> Option<()> {
    const HERE: &str = "RPC_TESTS_HAS_LIBRARIES";
    if std::env::var_os(HERE).is_some() {
        return Some(());
    }
    let folder = driver()?;
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(HERE, "1");
    command.env("LD_LIBRARY_PATH", folder.path()).envs(libraries(folder.path()));
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}{errors}", String::from_utf8_lossy(&output.stdout));
    assert_no_violations(&errors);
    None
}

/// A folder with the kernels of the tests.
struct KernelFolder(TempDir);

impl KernelFolder {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("kernels.ptx"), KERNELS).unwrap();
        Self(folder)
    }
}

impl WorkspaceFiles for KernelFolder {
    fn resolve(&self, path: &str) -> rpc_core::Result<PathBuf> {
        Ok(self.0.path().join(path))
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

/// Two nodes of this process with a GPU for their worker, of which some may read files.
fn nodes_on_gpus(readers: [bool; 2]) -> DiscoSession {
    let nodes = readers.map(|may_read| {
        let registry = Registry::new();
        disco::register(&registry);
        registry.add("middle_rows", |weight: Shared<WeightReader>| weight.0.read_range(0, 1..3));
        registry.add("sum_on_host", |x: TensorView| -> rpc_core::Result<f32> { Ok(x.as_slice::<f32>()?.iter().sum()) });
        registry.add("trap_elsewhere", |worker: WorkerContext, context: Context| -> rpc_core::Result<()> {
            if worker.worker_id() != WorkerId(0) {
                return Ok(());
            }
            let module = context.on_device(Device::cuda(1)).load_module("kernels.ptx", None)?;
            let args = vec![1.into(), 1.into(), 0.into(), Value::Null];
            context.call(&module.function("trap")?, args).map(drop)
        });
        registry.add_loader(Arc::new(rpc_cuda::CudaModulesOnDemand));
        let devices = rpc_server::isolate::gpu::devices(&registry);
        let node = LocalSession::builder(registry).devices(devices).workspace(Arc::new(KernelFolder::new()));
        Session::new(if may_read { node.extension(Arc::new(WeightFolders::anywhere())) } else { node }.build())
    });
    let session = DiscoSession::over(nodes, 1, 1, as_threads()).wait().unwrap();
    session.init_ccl("nccl", &[0, 1]).wait().unwrap();
    session
}

/// Workers that read for others, workers that get what others read, and those that get all from the
/// controller.
#[test]
fn weights_reach_all_gpus_from_any_reader() {
    let Some(()) = with_libraries("cuda::weights_reach_all_gpus_from_any_reader") else { return };
    // More than goes in one piece to a device.
    let (rows, columns) = (4, 600_000_usize);
    let data: Vec<f32> = (0..rows * columns).map(|at| (at % 1013) as f32).collect();
    let header = format!(
        r#"{{"x":{{"dtype":"F32","shape":[{rows},{columns}],"data_offsets":[0,{}]}}}}"#,
        rows * columns * size_of::<f32>()
    );
    let bytes: Vec<u8> = data.iter().flat_map(|value| value.to_le_bytes()).collect();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes].concat()).unwrap();
    for readers in [[true, false], [false, true], [false, false], [true, true]] {
        let session = nodes_on_gpus(readers);
        let loader = ShardLoader::open(&session, &path).wait().unwrap();
        assert_eq!(loader.unreadable().len(), readers.iter().filter(|may_read| !**may_read).count());
        let places = [None, Some("cuda"), Some("cpu"), Some("cuda,scope=host")];
        for place in places.map(|place| place.map(|place| place.parse::<VirtualDevice>().unwrap())) {
            let load = |part| loader.load("x", part, place.clone()).unwrap();
            let loaded =
                [load(Part::Whole), load(Part::shard(0)), load(Part::shard(1)), load(Part::with("middle_rows"))];
            session.sync_all().wait().unwrap();
            for worker in 0..2 {
                let of_half = |at: &usize| at % columns / (columns / 2) == worker;
                let expected = [
                    data.clone(),
                    data[worker * 2 * columns..][..2 * columns].to_vec(),
                    (0..data.len()).filter(of_half).map(|at| data[at]).collect(),
                    data[columns..3 * columns].to_vec(),
                ];
                for (number, (loaded, expected)) in loaded.iter().zip(expected).enumerate() {
                    let found = fetch(&session, loaded, worker as u32);
                    assert!(found == expected, "{readers:?} {place:?}: part {number} on worker {worker}");
                }
            }
        }
        session.shutdown().wait().unwrap();
    }
}

#[test]
fn loss_on_a_gpu_is_reported_by_a_sync_and_poisons_its_results() {
    let Some(folder) = driver() else { return };
    // A broadcast takes two: one tells of the layout.
    let server = daemon_with(&folder, "serve", &[], &[("FAKE_NCCL_HANG", "2")]);
    let session = on_gpus(&server, 1);
    let x = session.broadcast(&Tensor::from_slice([2], &[1.0_f32, 2.0]).unwrap(), None, Scope::World).unwrap();
    session.sync_all().wait().unwrap();
    let lost = session.allreduce(&x, None, ReduceOp::Sum, Scope::World).unwrap();
    let behind = session.allreduce(&lost, None, ReduceOp::Sum, Scope::World).unwrap();
    let unconcerned = session.get_global_func("rpc.info").unwrap();
    // The workers have given both to their devices. One that waits for them hears of the loss, and
    // leaves it to the sync to tell what is lost.
    session.barrier(Scope::World).unwrap();
    session.abort_ccl("enough").unwrap();
    let error = session.sync_all().wait().unwrap_err().to_string();
    assert!(error.contains("enough") && error.contains("allreduce"), "{error}");
    for worker in 0..2 {
        for register in [&lost, &behind] {
            let error = session.debug_get_from_remote(register, WorkerId(worker)).wait().unwrap_err().to_string();
            assert!(error.contains("enough"), "{error}");
        }
        assert_eq!(fetch(&session, &x, worker), [1.0, 2.0]);
    }
    // It has been told.
    session.sync_all().wait().unwrap();
    drop(unconcerned.call(()).unwrap());
    session.reinit_ccl().wait().unwrap();
    let sum = session.allreduce(&x, None, ReduceOp::Sum, Scope::World).unwrap();
    assert_eq!(fetch(&session, &sum, 1), [2.0, 4.0]);
    session.shutdown().wait().unwrap();
}

/// Each axis of a mesh is a split of NCCL's communicator, whether the mesh or NCCL comes first.
#[test]
fn axes_of_a_mesh_are_splits() {
    let Some(folder) = driver() else { return };
    let server = daemon_with(&folder, "serve", &[], &[("FAKE_CUDA_DEVICES", "4")]);
    for is_mesh_first in [false, true] {
        let session = SocketSession::new([server.address()], 4, 1).options(as_threads()).start().wait().unwrap();
        let axes = [("dp", 2), ("pp", 1), ("tp", 2)];
        if is_mesh_first {
            session.mesh(&axes).wait().unwrap();
        }
        session.init_ccl("nccl", &[0, 1, 2, 3]).wait().unwrap();
        let mesh = session.mesh(&axes).wait().unwrap();
        let rows = Tensor::from_slice([4, 2], &[0.0_f32, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]).unwrap();
        let x = session.scatter(&rows, None, Scope::World).unwrap();
        for (axis, peers) in [("dp", [[0, 2], [1, 3], [0, 2], [1, 3]]), ("tp", [[0, 1], [0, 1], [2, 3], [2, 3]])] {
            let scope = mesh.group(axis).unwrap();
            let sum = session.allreduce(&x, None, ReduceOp::Sum, scope).unwrap();
            let gathered = session.allgather(&x, None, scope).unwrap();
            session.barrier(scope).unwrap();
            for (worker, [one, other]) in (0..).zip(peers) {
                let (one, other) = (one as f32, other as f32);
                assert_eq!(fetch(&session, &sum, worker), [one + other, one + other + 1.0], "{axis}, {worker}");
                assert_eq!(fetch(&session, &gathered, worker), [one, one + 0.5, other, other + 0.5]);
            }
        }
        let alone = session.allreduce(&x, None, ReduceOp::Sum, mesh.group("pp").unwrap()).unwrap();
        assert_eq!(fetch(&session, &alone, 3), [3.0, 3.5]);
        session.sync_all().wait().unwrap();
        session.shutdown().wait().unwrap();
    }
}

#[test]
fn groups_are_split_and_unsupported_operations_are_errors() {
    let Some(folder) = driver() else { return };
    let with_groups = server(&folder, &[]);
    let session = on_gpus(&with_groups, 2);
    let x = Tensor::from_slice([2], &[1.0_f32, 2.0]).unwrap();
    let x = session.broadcast(&x, None, Scope::World).unwrap();
    let group = session.allreduce(&x, None, ReduceOp::Sum, Scope::Group).unwrap();
    let world = session.allreduce(&x, None, ReduceOp::Sum, Scope::World).unwrap();
    session.sync_all().wait().unwrap();
    assert_eq!((fetch(&session, &group, 1), fetch(&session, &world, 1)), (vec![1.0, 2.0], vec![2.0, 4.0]));
    let error = session.init_ccl("rccl", &[0, 1]).wait().unwrap_err().to_string();
    assert!(error.contains("no backend of collectives called 'rccl'"), "{error}");
    let error = session.init_ccl("nccl", &[0, 7]).wait().unwrap_err().to_string();
    assert!(error.contains("no cuda:7"), "{error}");
    // A request that has failed is not waited for.
    session.sync_all().wait().unwrap();
    let error = session.init_ccl("nccl", &[1, 1]).wait().unwrap_err().to_string();
    assert!(error.contains("workers 0 and 1 are threads of one process with device 1 for both"), "{error}");
    session.init_ccl("nccl", &[0, 1]).wait().unwrap();
    session.shutdown().wait().unwrap();
    // Without the library the workers say where they have looked for it, and the others have
    // theirs.
    std::fs::remove_file(folder.path().join("libnccl.so.2")).unwrap();
    let without = server(&folder, &[]);
    let session = SocketSession::new([without.address()], 2, 1).options(as_threads()).start().wait().unwrap();
    let error = session.init_ccl("nccl", &[0, 1]).wait().unwrap_err().to_string();
    assert!(error.contains("libnccl.so.2") && error.contains("libnccl.so"), "{error}");
    // That changed nothing: neither the collectives nor the default devices.
    for _ in 0..2 {
        let one = session.broadcast(&Tensor::from_slice([1], &[3.0_f32]).unwrap(), None, Scope::World).unwrap();
        let sum = session.allreduce(&one, None, ReduceOp::Sum, Scope::World).unwrap();
        session.empty(&[1], DataType::F32, None).unwrap();
        assert_eq!(fetch(&session, &sum, 1), [6.0]);
        session.sync_all().wait().unwrap();
        session.init_ccl("host", &[]).wait().unwrap();
    }
    session.shutdown().wait().unwrap();
}

#[test]
fn the_matmul_example_works_or_names_the_missing_device() {
    let Some(folder) = driver() else { return };
    let example = std::env::current_exe().unwrap().ancestors().nth(2).unwrap().join("examples/matmul");
    if !example.exists() {
        // A run of this test alone does not build it; that of all tests does.
        eprintln!("SKIPPED: the example is not built: cargo build -p rpc-server --example matmul");
        return;
    }
    let run = |args: &[&str], path: &Path| {
        let mut command = Command::new(&example);
        command.args(args).env_clear().env(NO_OPENCL.0, NO_OPENCL.1).env("LD_LIBRARY_PATH", path).envs(libraries(path));
        let output = command.output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{errors}");
        assert_no_violations(&errors);
        String::from_utf8(output.stdout).unwrap()
    };
    let server = server(&folder, &[]);
    let nowhere = tempfile::tempdir().unwrap();
    for (args, path) in
        [(vec!["--size", "33"], folder.path()), (vec!["--size", "20", server.address()], nowhere.path())]
    {
        let text = run(&args, path);
        assert!(text.contains("differs from the processor's by 0 at most"), "{text}");
    }
    assert!(run(&[], nowhere.path()).starts_with("nothing is multiplied: no cuda: the driver"));
}

#[test]
fn a_tracker_finds_the_server_with_the_gpu() {
    let Some(folder) = driver() else { return };
    let without = StandIns::none();
    let tracker = daemon(&without, "tracker", &[]);
    let at = ["--tracker", tracker.address(), "--tracker-key", "pool"];
    let (_plain, gpu) = (server(&without, &at), server(&folder, &at));
    let ask = |wanted: &str| {
        let wanted: VirtualDevice = wanted.parse().unwrap();
        SocketSession::from_tracker(tracker.address(), ServerRequest::new("pool").virtual_device(wanted), 2, 1)
    };
    for wanted in ["cuda", "cuda,scope=host", "cuda,target=cuda -arch=sm_90"] {
        let session = ask(wanted).options(as_threads()).start().wait().unwrap();
        session.init_ccl("nccl", &[0, 1]).wait().unwrap();
        let x = session.broadcast(&Tensor::from_slice([1], &[2.0_f32]).unwrap(), None, Scope::World).unwrap();
        assert_eq!(fetch(&session, &x, 1), [2.0]);
        session.shutdown().wait().unwrap();
    }
    assert!(!has_driver(gpu.id()));
}

/// Says what is missing, which is an error where everything is meant to be there.
fn skip(missing: &str) {
    let is_required = std::env::var_os("RPC_TESTS_REQUIRE_GPU").is_some_and(|required| required == "1");
    assert!(!is_required, "{missing}");
    eprintln!("SKIPPED: {missing}");
}

/// A session of workers in processes of their own, with these devices.
fn in_processes(server: &ServerProcess, ids: &[i32]) -> Result<DiscoSession, String> {
    let mut options = Options::default();
    options.hosting = Hosting::Processes;
    let session = SocketSession::new([server.address()], ids.len() as u32, 1).options(options).start().wait().unwrap();
    session.init_ccl("nccl", ids).wait().map_err(|error| error.to_string())?;
    Ok(session)
}

fn check_collectives(session: &DiscoSession) {
    let n = session.num_workers();
    for len in [1, 1000, 16 << 20] {
        let data: Vec<f32> = (0..len).map(|at| (at % 100) as f32).collect();
        let x = session.broadcast(&Tensor::from_slice([len], &data).unwrap(), None, Scope::World).unwrap();
        let sum = session.allreduce(&x, None, ReduceOp::Sum, Scope::World).unwrap();
        let all = session.allgather(&x, None, Scope::World).unwrap();
        session.sync_all().wait().unwrap();
        for worker in 0..n {
            assert_eq!(fetch(session, &sum, worker), data.iter().map(|one| n as f32 * one).collect::<Vec<_>>());
            assert_eq!(fetch(session, &all, worker), data.repeat(n as usize));
        }
    }
}

/// The last worker is killed while collectives are under way: the session ends with that, and
/// leaves nobody behind.
fn check_loss(session: DiscoSession) {
    let last = WorkerId(session.num_workers() - 1);
    let info = session.get_global_func("rpc.info").unwrap().call(()).unwrap();
    let pid = match session.debug_get_from_remote(&info, last).wait().unwrap() {
        Content::Value(Value::Packed(info)) => info.decode::<ServerInfo>().unwrap().pid,
        other => panic!("{other:?}"),
    };
    let x = session.empty(&[4 << 20], DataType::F32, None).unwrap();
    for _ in 0..100 {
        session.allreduce(&x, Some(&x), ReduceOp::Sum, Scope::World).unwrap();
    }
    kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
    let error = session.sync_all().wait().unwrap_err().to_string();
    assert!(error.contains(&format!("worker {last}")), "{error}");
    _ = session.shutdown().wait();
}

/// On what this machine has itself: with one GPU two ranks share it, which NCCL 2.30 and later
/// allow for tests; older ones have one rank.
#[test]
fn collectives_on_the_gpus_of_this_machine() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = crate::server_program();
    command.args(["serve", "--exit-with-stdin", "--listen", "tcp://127.0.0.1:0", "--log-level", "error"]);
    command.env("XDG_STATE_HOME", folder.path()).env("NCCL_MULTI_RANK_GPU_ENABLE", "1").env("NCCL_MAX_CTAS", "4");
    let server = ServerProcess::spawn(command).unwrap();
    let found = info(&connect(&server)).devices;
    let gpus = found.iter().filter(|one| one.device.starts_with("cuda:") && one.absent.is_none()).count() as i32;
    if gpus == 0 {
        let why = found.into_iter().find(|one| one.device == "cuda").and_then(|one| one.absent);
        skip(&format!("no GPU on this machine: {}", why.unwrap_or_default()));
        return;
    }
    let mut ids: Vec<i32> = if gpus == 1 { vec![0, 0] } else { (0..gpus.min(4)).collect() };
    let mut session = in_processes(&server, &ids);
    if let Err(error) = &session
        && error.contains("no library of collectives")
    {
        return skip(error);
    }
    if gpus == 1 && session.is_err() {
        eprintln!("two ranks of NCCL on one GPU: {}", session.unwrap_err());
        ids = vec![0];
        session = in_processes(&server, &ids);
    }
    let session = session.unwrap();
    eprintln!("{} ranks of NCCL on {gpus} GPUs", ids.len());
    check_collectives(&session);
    session.reinit_ccl().wait().unwrap();
    check_collectives(&session);
    session.shutdown().wait().unwrap();
    check_loss(in_processes(&server, &ids).unwrap());
    in_processes(&server, &ids).unwrap().shutdown().wait().unwrap();
}

/// Regression: NCCL's own allocations failed beside the idle memory of the pools.
#[test]
fn idle_memory_makes_room_for_nccl() {
    let Some(folder) = driver() else { return };
    let mib = 1_i64 << 20;
    let small = ("FAKE_CUDA_MEMORY", "67108864");
    // The devices have room for NCCL's memory without the idle one, and not beside it.
    let server = daemon_with(&folder, "serve", &[], &[small, ("FAKE_NCCL_MEMORY", "12582912")]);
    let session = on_gpus(&server, 1);
    let x = session.empty(&[2], DataType::F32, None).unwrap();
    let _rest = session.empty(&[40 * mib], DataType::U8, None).unwrap();
    drop(session.empty(&[15 * mib], DataType::U8, None).unwrap());
    session.sync_all().wait().unwrap();
    session.allreduce(&x, Some(&x), ReduceOp::Sum, Scope::World).unwrap();
    session.sync_all().wait().unwrap();
    assert_eq!(fetch(&session, &x, 1), [0.0; 2]);
    session.shutdown().wait().unwrap();
    // A group that found too little is made once more.
    let server = daemon_with(&folder, "serve", &[], &[("FAKE_NCCL_FULL", "1")]);
    let session = on_gpus(&server, 1);
    let x = session.broadcast(&Tensor::from_slice([1], &[2.0_f32]).unwrap(), None, Scope::World).unwrap();
    assert_eq!(fetch(&session, &x, 1), [2.0]);
    session.shutdown().wait().unwrap();
    // And not for ever.
    let server = daemon_with(&folder, "serve", &[], &[("FAKE_NCCL_FULL", "100")]);
    let session = SocketSession::new([server.address()], 2, 1).options(as_threads()).start().wait().unwrap();
    let error = session.init_ccl("nccl", &[0, 1]).wait().unwrap_err().to_string();
    assert!(error.contains("out of memory"), "{error}");
    session.shutdown().wait().unwrap();
}

/// Regression: the collective's borrow of pinned memory ended while the device was still writing
/// there.
#[test]
fn a_collective_into_pinned_memory_is_done_when_a_function_reads_it() {
    let Some(()) = with_libraries("cuda::a_collective_into_pinned_memory_is_done_when_a_function_reads_it") else {
        return;
    };
    let session = nodes_on_gpus([false, false]);
    let x = session.broadcast(&Tensor::from_slice([2], &[1.0_f32, 2.0]).unwrap(), None, Scope::World).unwrap();
    let pinned = session.empty(&[2], DataType::F32, Some("cuda,scope=host".parse().unwrap())).unwrap();
    session.allreduce(&x, Some(&pinned), ReduceOp::Sum, Scope::World).unwrap();
    let sum = session.get_global_func("sum_on_host").unwrap().call((&pinned,)).unwrap();
    for worker in 0..2 {
        let sum = session.debug_get_from_remote(&sum, WorkerId(worker)).wait().unwrap();
        assert!(matches!(sum, Content::Value(Value::Float(6.0))), "{sum:?}");
    }
    session.shutdown().wait().unwrap();
}

/// Regression: a sync waited for the devices of tensors that the session had made itself.
#[test]
fn a_sync_tells_the_trap_of_a_device_that_only_a_function_has_used() {
    let Some(()) = with_libraries("cuda::a_sync_tells_the_trap_of_a_device_that_only_a_function_has_used") else {
        return;
    };
    let session = nodes_on_gpus([false, false]);
    session.get_global_func("trap_elsewhere").unwrap().call(()).unwrap();
    let error = session.sync_worker(WorkerId(0)).wait().unwrap_err().to_string();
    assert!(error.contains("cuda:1 is lost"), "{error}");
    // It has been told.
    session.sync_all().wait().unwrap();
    session.shutdown().wait().unwrap();
}

/// The same with the libraries of the tests, which have one rank in a process.
#[test]
fn collectives_of_a_worker_in_a_process() {
    let Some(folder) = driver() else { return };
    let server = server(&folder, &[]);
    let session = in_processes(&server, &[1]).unwrap();
    check_collectives(&session);
    session.shutdown().wait().unwrap();
    check_loss(in_processes(&server, &[0]).unwrap());
    in_processes(&server, &[0]).unwrap().shutdown().wait().unwrap();
}

#[test]
fn settings_that_do_not_go_with_processes_do_without_gpus() {
    let Some(folder) = driver() else { return };
    // Of a limit for all, sessions in processes would each need a share, and nobody has asked for
    // processes.
    let server = server(&folder, &["--max-total-memory", "8GiB"]);
    let session = connect(&server);
    assert_eq!(info(&session).pid, server.id());
    let error = session.alloc(Device::cuda(0), DataType::U8, &[1]).wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeviceUnavailable);
    assert!(error.message().contains("no cuda: sessions have no processes of their own here"), "{error}");
    assert!(error.message().contains("--max-total-memory"), "{error}");
    // Nobody is led to believe that there is one.
    let exists = session.attribute(Device::cuda(0), DeviceAttribute::Exists).wait().unwrap();
    assert_eq!(exists, Value::Bool(false));
    assert!(!has_driver(server.id()));

    let tracker = daemon(&folder, "tracker", &[]);
    let limited = ["--tracker", tracker.address(), "--tracker-key", "limited", "--max-total-memory", "8GiB"];
    let _limited = daemon(&folder, "serve", &limited);
    let _other = daemon(&folder, "serve", &["--tracker", tracker.address(), "--tracker-key", "other"]);
    let client = TrackerClient::connect_blocking(Connector::new(), tracker.address()).unwrap();
    for (key, expected) in [("limited", 0), ("other", 2)] {
        // It has come when it is given out.
        let loan = client.request_blocking(&ServerRequest::new(key)).unwrap();
        let summary = client.summary_blocking().unwrap();
        let server = summary.servers.iter().find(|server| server.key == key).unwrap();
        let gpus: u32 = server.devices.iter().filter(|offer| offer.kind == "cuda").map(|offer| offer.count).sum();
        assert_eq!(gpus, expected, "{:?}", server.devices);
        drop(loan);
    }
}

#[test]
fn an_allocation_beyond_the_memory_of_a_device_is_an_error_and_the_session_goes_on() {
    let Some(folder) = driver() else { return };
    let server = server(&folder, &[]);
    let session = on_gpus(&server, 1);
    let x = Tensor::from_slice([2], &[1.0_f32, 2.0]).unwrap();
    let whole = session.broadcast(&x, None, Scope::World).unwrap();
    session.sync_all().wait().unwrap();
    // All that is left of both devices' memory.
    let rest = session.empty(&[(1 << 30) - (64 << 20)], DataType::U8, None).unwrap();
    let large = session.empty(&[48 << 20], DataType::U8, None).unwrap();
    session.sync_all().wait().unwrap();
    let more = session.broadcast(&Tensor::from_slice([32 << 20], &vec![1_u8; 32 << 20]).unwrap(), None, Scope::World);
    let error = session.sync_all().wait().unwrap_err().to_string();
    assert!(error.contains("out of memory"), "{error}");
    drop((more, rest, large));
    // The session lives on.
    let again = session.allreduce(&whole, None, ReduceOp::Sum, Scope::World).unwrap();
    assert_eq!(fetch(&session, &again, 1), [2.0, 4.0]);
    session.shutdown().wait().unwrap();
}
