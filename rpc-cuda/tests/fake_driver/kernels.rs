//! Tests of kernels and products of the device kind `cuda`, called through a session, against the
//! fake driver of `tests/cuda`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rpc_core::device::{AllocRequest, DeviceApi};
use rpc_core::{
    Context, DataType, Device, DeviceAttribute, Devices, ErrorKind, IntoArgs, Lane, LocalSession, Registry,
    RemoteFunction, RemoteTensor, Result, RpcError, Session, Shape, Value,
};
use rpc_cuda::{CudaDevice, CudaModules};

use crate::fake::{WITHOUT_CUBLAS, compile, with_driver};
use crate::workspace::Folder;

/// Returns a session with both fake devices, whose workspace holds the module `kernels.ptx`.
fn session() -> (Session, Arc<Folder>) {
    let device = CudaDevice::open().unwrap();
    let registry = Registry::new();
    registry.add_loader(Arc::new(CudaModules::new(device)));
    rpc_cuda::register(&registry);
    // The stream of the calling lane, in the form that libraries use.
    registry.add("stream_of_lane", |context: Context| -> Result<usize> {
        let stream = context.stream(Device::cuda(0))?.library_handle()?;
        Ok(stream.unwrap().as_ptr().expose_provenance())
    });
    let folder = Folder::new();
    folder.write("kernels.ptx", b".entry vector_add .entry trap .entry widths .entry record .entry nothing");
    let devices = Devices::new().with(Arc::new(device));
    let session = LocalSession::builder(registry).devices(devices).workspace(folder.clone()).build();
    (Session::new(session), folder)
}

fn kernel(session: &Session, name: &str) -> RemoteFunction {
    session.load_module("kernels.ptx").wait().unwrap().function(name).wait().unwrap()
}

fn tensor(session: &Session, device: Device, dtype: DataType, shape: &[i64], bytes: Vec<u8>) -> RemoteTensor {
    let tensor = session.alloc(device, dtype, shape).wait().unwrap();
    session.copy_to_remote(&tensor, bytes).wait().unwrap();
    tensor
}

fn floats(session: &Session, values: &[f32]) -> RemoteTensor {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    tensor(session, Device::cuda(0), DataType::F32, &[values.len() as i64], bytes)
}

fn read_floats(session: &Session, tensor: &RemoteTensor) -> Vec<f32> {
    let bytes = session.copy_from_remote(tensor).wait().unwrap();
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

fn refusal(function: &RemoteFunction, args: impl IntoArgs) -> RpcError {
    function.call::<()>(args).wait().unwrap_err()
}

#[test]
fn a_kernel_is_called_by_its_name_in_the_order_of_the_calls() {
    with_driver("kernels::a_kernel_is_called_by_its_name_in_the_order_of_the_calls", &[], &[], |_| {
        let (session, _folder) = session();
        let add = kernel(&session, "vector_add");
        let (a, b) = (floats(&session, &[1.0, 2.0, 3.0]), floats(&session, &[0.5, 0.25, 4.0]));
        let sum = floats(&session, &[9.0; 3]);
        let grid = || (Shape(vec![1]), Shape(vec![32, 1, 1]), 0_i64);
        let (one, block, shared) = grid();
        add.call::<()>((one, block, shared, &a, &b, &sum, 3)).wait().unwrap();
        assert_eq!(read_floats(&session, &sum), [1.5, 2.25, 7.0]);
        // A storage that is given several times is borrowed once; an int stands for one dimension.
        add.call::<()>((1, 4, 60_000, &sum, &sum, &sum, 3)).wait().unwrap();
        add.call::<()>((1, 4, 0, &sum, &a, &sum, 2)).wait().unwrap();
        assert_eq!(read_floats(&session, &sum), [4.0, 6.5, 14.0]);
        // The index of the tensors chooses the device.
        let far = tensor(&session, Device::cuda(1), DataType::F32, &[1], 5.0_f32.to_le_bytes().into());
        add.call::<()>((1, 1, 0, &far, &far, &far, 1)).wait().unwrap();
        assert_eq!(read_floats(&session, &far), [10.0]);
        kernel(&session, "nothing").call::<()>((1, 1, 0)).wait().unwrap();
    });
}

/// Each lane's kernels are on its stream, and wait only for work on their memory.
#[test]
fn a_lane_with_a_stream_of_its_own_has_its_kernels_there() {
    static MAY_GO_ON: AtomicBool = AtomicBool::new(false);
    with_driver("kernels::a_lane_with_a_stream_of_its_own_has_its_kernels_there", &[], &[], |fake| {
        let (session, _folder) = session();
        let (add, device) = (kernel(&session, "vector_add"), Device::cuda(0));
        let [one, two] = [1, 2].map(Lane);
        let streams = [one, two].map(|lane| {
            let stream = session.create_stream(device).wait().unwrap();
            session.set_stream(device, Some(&stream)).lane(lane).wait().unwrap();
            let of_lane = session.function::<(), usize>("stream_of_lane").wait().unwrap();
            of_lane.call(()).lane(lane).wait().unwrap()
        });
        assert_ne!(streams[0], streams[1]);
        // Bytes that were just written are visible to a kernel on any stream.
        let (x, y, sum) = (floats(&session, &[1.0, 2.0]), floats(&session, &[10.0, 20.0]), floats(&session, &[0.0; 2]));
        fake.hold(std::ptr::with_exposed_provenance_mut(streams[0]), &MAY_GO_ON);
        add.call::<()>((1, 2, 0, &x, &y, &sum, 2)).lane(one).wait().unwrap();
        // Other work continues: other memory on the default stream and on that of another lane.
        let free = floats(&session, &[5.0, 6.0]);
        add.call::<()>((1, 2, 0, &free, &free, &free, 2)).lane(two).wait().unwrap();
        assert_eq!(read_floats(&session, &free), [10.0, 12.0]);
        add.call::<()>((1, 2, 0, &free, &free, &free, 2)).wait().unwrap();
        assert_eq!(read_floats(&session, &free), [20.0, 24.0]);
        // All later work on the kernel's memory runs behind it: a kernel of another lane, a copy, a
        // product.
        add.call::<()>((1, 2, 0, &sum, &x, &sum, 2)).lane(two).wait().unwrap();
        let matmul = session.get_function("cuda.matmul").wait().unwrap();
        let read = std::thread::scope(|scope| {
            let read = scope.spawn(|| read_floats(&session, &sum));
            MAY_GO_ON.store(true, Ordering::SeqCst);
            read.join().unwrap()
        });
        assert_eq!(read, [12.0, 24.0]);
        session.stream_wait(device, None).lane(one).wait().unwrap();
        let square = |values: &[f32]| {
            let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            tensor(&session, device, DataType::F32, &[1, 1], bytes)
        };
        let (a, b, out) = (square(&[3.0]), square(&[4.0]), square(&[0.0]));
        matmul.call::<()>((&a, &b, &out)).lane(one).wait().unwrap();
        matmul.call::<()>((&out, &b, &a)).lane(two).wait().unwrap();
        matmul.call::<()>((&a, &a, &out)).wait().unwrap();
        assert_eq!(read_floats(&session, &out), [48.0 * 48.0]);
        // A lane's stream is dropped, and its work still runs first.
        add.call::<()>((1, 1, 0, &x, &x, &x, 1)).lane(two).wait().unwrap();
        session.set_stream(device, None).lane(two).wait().unwrap();
        assert_eq!(read_floats(&session, &x), [2.0, 2.0]);
    });
}

#[test]
fn memory_is_accounted_for_and_returned_on_request() {
    with_driver("kernels::memory_is_accounted_for_and_returned_on_request", &[], &[], |_| {
        type Statistics = BTreeMap<String, BTreeMap<String, u64>>;
        let (session, _folder) = session();
        let statistics = session.function::<(i32,), Statistics>("cuda.memory_statistics").wait().unwrap();
        let trim = session.function::<(i32,), u64>("cuda.trim_memory").wait().unwrap();
        let of = |index| {
            let all = statistics.call((index,)).wait().unwrap();
            let field = |scope: &str, field: &str| all[scope][field];
            let names = ["allocated_bytes", "cached_bytes", "misses", "trims"];
            (names.map(|name| field("global", name)), names.map(|name| field("host", name)))
        };
        assert_eq!(of(0), ([0; 4], [0; 4]));
        let memory = tensor(&session, Device::cuda(0), DataType::U8, &[1024], vec![7; 1024]);
        assert_eq!(of(0), ([1024, 0, 1, 0], [0, 4096, 1, 0]));
        memory.free().wait().unwrap();
        assert_eq!(of(0), ([0, 1024, 1, 0], [0, 4096, 1, 0]));
        assert_eq!(trim.call((0,)).wait().unwrap(), 1024 + 4096);
        let ([allocated, cached, ..], [host_allocated, host_cached, ..]) = of(0);
        assert_eq!([allocated, cached, host_allocated, host_cached], [0; 4]);
        // The other device has pools of its own.
        assert_eq!(of(1), ([0; 4], [0; 4]));
        for index in [-1, 2] {
            let error = trim.call((index,)).wait().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::DeviceUnavailable, "{error}");
        }
    });
}

/// A process that only registers the functions, while other processes have the GPU.
#[test]
fn memory_statistics_of_a_session_without_gpu_load_no_driver() {
    with_driver("kernels::memory_statistics_of_a_session_without_gpu_load_no_driver", &[], &[], |fake| {
        let registry = Registry::new();
        rpc_cuda::register(&registry);
        let session = Session::new(LocalSession::new(registry));
        let statistics = session.get_function("cuda.memory_statistics").wait().unwrap();
        let error = refusal(&statistics, (0,));
        assert_eq!(error.kind(), ErrorKind::DeviceUnavailable, "{error}");
        assert_eq!(fake.count("fake_inits"), 0);
    });
}

#[test]
fn parameters_have_the_widths_that_the_driver_reports() {
    with_driver("kernels::parameters_have_the_widths_that_the_driver_reports", &[], &[], |_| {
        let (session, _folder) = session();
        let out = tensor(&session, Device::cuda(0), DataType::U8, &[27], vec![0; 27]);
        let args = (1, 1, 0, &out, Value::List(vec![]));
        assert!(refusal(&kernel(&session, "widths"), args).message().contains("expected 7 parameters, got 2"));
        let args = (1, 1, 0, &out, true, -2, 0xffff_fffe_u32, i64::MIN, 0.5, 0.25);
        kernel(&session, "widths").call::<()>(args).wait().unwrap();
        let mut expected = vec![1];
        expected.extend((-2_i16).to_le_bytes());
        expected.extend(0xffff_fffe_u32.to_le_bytes());
        expected.extend(i64::MIN.to_le_bytes());
        expected.extend(0.5_f32.to_le_bytes());
        expected.extend(0.25_f64.to_le_bytes());
        assert_eq!(session.copy_from_remote(&out).wait().unwrap()[..], expected[..]);

        let bytes: Vec<u8> = (0..24).collect();
        kernel(&session, "record").call::<()>((1, 1, 0, &out, bytes::Bytes::from(bytes.clone()))).wait().unwrap();
        assert_eq!(session.copy_from_remote(&out).wait().unwrap()[..24], bytes[..]);
    });
}

/// Regression: the driver has one limit for a kernel, whichever handle is used. A second handle
/// lowered the limit that the first one needed.
#[test]
fn shared_memory_that_was_allowed_stays_allowed() {
    with_driver("kernels::shared_memory_that_was_allowed_stays_allowed", &[], &[], |_| {
        let (session, _folder) = session();
        let x = floats(&session, &[1.0]);
        let module = session.load_module("kernels.ptx").wait().unwrap();
        let [one, two] = [(); 2].map(|()| module.function("vector_add").wait().unwrap());
        for (add, shared_bytes) in [(&one, 200_000), (&two, 100_000), (&one, 200_000), (&two, 0)] {
            add.call::<()>((1, 1, shared_bytes, &x, &x, &x, 1)).wait().unwrap();
        }
        assert_eq!(read_floats(&session, &x), [16.0]);
    });
}

#[test]
fn the_error_of_a_wrong_call_names_the_kernel_and_the_reason() {
    with_driver("kernels::the_error_of_a_wrong_call_names_the_kernel_and_the_reason", &[], &[], |_| {
        let (session, _folder) = session();
        let add = kernel(&session, "vector_add");
        let x = floats(&session, &[1.0, 2.0]);
        let far = tensor(&session, Device::cuda(1), DataType::F32, &[2], vec![0; 8]);
        let host = tensor(&session, Device::cpu(), DataType::F32, &[2], vec![0; 8]);
        let errors = [
            (refusal(&add, (1, 1)), "expected grid, block"),
            (refusal(&add, (1, 1, 0, &x, &x, &x)), "expected 4 parameters, got 3"),
            (refusal(&add, (1, 1, 0, &x, &x, &x, 1_i64 << 40)), "parameter 3: 1099511627776 does not fit"),
            (refusal(&add, (1, 1, 0, &x, &x, &host, 1)), "parameter 2: expected a tensor on cuda, got one on cpu:0"),
            (
                refusal(&add, (1, 1, 0, &x, &x, &far, 1)),
                "parameter 2: the tensor is on cuda:1, but others are on cuda:0",
            ),
            (refusal(&add, (1, 1, 0, &x, "y", &x, 1)), "parameter 1: expected a tensor, int"),
            (refusal(&add, (0, 1, 0, &x, &x, &x, 1)), "dimension 0 of the grid is 0"),
            (refusal(&add, (Shape(vec![1, 1, 70_000]), 1, 0, &x, &x, &x, 1)), "dimension 2 of the grid is 70000"),
            (refusal(&add, (Shape(vec![1; 4]), 1, 0, &x, &x, &x, 1)), "expected the grid as a shape"),
            (
                refusal(&add, (1, Shape(vec![32, 32]), 0, &x, &x, &x, 1)),
                "a block of 1024 threads exceeds the kernel's limit of 512",
            ),
            (refusal(&add, (1, -1, 0, &x, &x, &x, 1)), "dimension 0 of the block is -1"),
            (refusal(&add, (1, 1, -1, &x, &x, &x, 1)), "expected the bytes of shared memory"),
            (refusal(&add, (1, 1, 1 << 20, &x, &x, &x, 1)), "1048576 bytes of shared memory are above the limit"),
        ];
        for (error, text) in errors {
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            assert!(error.message().starts_with("kernel 'vector_add' of 'kernels.ptx': "), "{error}");
            assert!(error.message().contains(text), "{error}");
        }
        assert_eq!(read_floats(&session, &x), [1.0, 2.0]);
    });
}

#[test]
fn files_are_found_and_refused_as_the_loader_documents() {
    with_driver("kernels::files_are_found_and_refused_as_the_loader_documents", &[], &[], |_| {
        let (session, folder) = session();
        let refusal = |path: &str| session.load_module(path).wait().err().unwrap();
        folder.write("broken.ptx", b"this is not ptx");
        let error = refusal("broken.ptx");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.message().starts_with("'broken.ptx': ptxas application ptx input, line 1"), "{error}");
        assert!(error.message().contains("CUDA_ERROR_INVALID_PTX"), "{error}");
        folder.write("short.cubin", b"\x7fELF\x02\x01");
        assert!(refusal("short.cubin").message().contains("cut off"));
        assert!(refusal("../kernels.ptx").message().contains("leaves"));
        assert_eq!(refusal("kernels.so").kind(), ErrorKind::NotFound);
        let module = session.load_module("kernels.ptx").wait().unwrap();
        let error = module.function("missing").wait().err().unwrap();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.message().contains("kernel 'missing' of 'kernels.ptx'"), "{error}");
    });
}

/// The fake driver detects a module that is unloaded while one of its kernels is pending.
#[test]
fn a_module_stays_until_its_kernels_are_done() {
    with_driver("kernels::a_module_stays_until_its_kernels_are_done", &[], &[], |_| {
        let (session, _folder) = session();
        let x = floats(&session, &[1.0]);
        for _ in 0..5 {
            kernel(&session, "vector_add").call::<()>((1, 1, 0, &x, &x, &x, 1)).wait().unwrap();
        }
        assert_eq!(read_floats(&session, &x), [32.0]);
    });
}

/// Also if they are on the stream of a lane, which the default one does not follow.
#[test]
fn a_module_stays_until_its_kernels_on_other_streams_are_done() {
    static MAY_GO_ON: AtomicBool = AtomicBool::new(false);
    with_driver("kernels::a_module_stays_until_its_kernels_on_other_streams_are_done", &[], &[], |fake| {
        let (session, _folder) = session();
        let (device, lane) = (Device::cuda(0), Lane(1));
        let stream = session.create_stream(device).wait().unwrap();
        session.set_stream(device, Some(&stream)).lane(lane).wait().unwrap();
        let of_lane = session.function::<(), usize>("stream_of_lane").wait().unwrap();
        let raw = of_lane.call(()).lane(lane).wait().unwrap();
        let x = floats(&session, &[1.0]);
        fake.hold(std::ptr::with_exposed_provenance_mut(raw), &MAY_GO_ON);
        kernel(&session, "vector_add").call::<()>((1, 1, 0, &x, &x, &x, 1)).lane(lane).wait().unwrap();
        for _ in 0..3 {
            // The session has dropped it; loading another module unloads those that are done.
            session.stream_wait(device, None).wait().unwrap();
            kernel(&session, "nothing").call::<()>((1, 1, 0)).wait().unwrap();
        }
        MAY_GO_ON.store(true, Ordering::SeqCst);
        assert_eq!(read_floats(&session, &x), [2.0]);
    });
}

#[test]
fn a_trap_is_reported_by_the_stream_and_loses_the_device() {
    with_driver("kernels::a_trap_is_reported_by_the_stream_and_loses_the_device", &[], &[], |_| {
        let (session, _folder) = session();
        let x = floats(&session, &[1.0]);
        let trap = kernel(&session, "trap");
        trap.call::<()>((1, 1, 0, Value::Null)).wait().unwrap();
        let error = session.stream_wait(Device::cuda(0), None).wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeviceLost);
        assert!(error.message().contains("an illegal memory access was encountered"), "{error}");
        for error in [
            refusal(&trap, (1, 1, 0, Value::Null)),
            session.copy_from_remote(&x).wait().unwrap_err(),
            session.alloc(Device::cuda(0), DataType::F32, &[1]).wait().err().unwrap(),
            session.load_module("kernels.ptx").wait().err().unwrap(),
        ] {
            assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
            assert!(error.message().contains("cuda:0 is lost: an illegal memory access"), "{error}");
        }
        // Other devices remain usable.
        let y = tensor(&session, Device::cuda(1), DataType::U8, &[2], vec![1, 2]);
        assert_eq!(session.copy_from_remote(&y).wait().unwrap()[..], [1, 2]);
    });
}

#[test]
fn pinned_memory_is_ready_for_the_processor_when_the_call_returns() {
    with_driver("kernels::pinned_memory_is_ready_for_the_processor_when_the_call_returns", &[], &[], |_| {
        let (session, _folder) = session();
        let x = floats(&session, &[1.5, 2.5]);
        let out = session.alloc_in_scope(Device::cuda(0), DataType::F32, &[2], Some("host")).wait().unwrap();
        kernel(&session, "vector_add").call::<()>((1, 2, 0, &x, &x, &out, 2)).wait().unwrap();
        // Read by the processor, which waits for no stream.
        assert_eq!(read_floats(&session, &out), [3.0, 5.0]);
    });
}

#[test]
fn an_old_driver_accepts_unchecked_calls_without_harm() {
    with_driver("kernels::an_old_driver_accepts_unchecked_calls_without_harm", &["-DOLD_DRIVER"], &[], |_| {
        let (session, _folder) = session();
        let x = floats(&session, &[1.0, 2.0]);
        let add = kernel(&session, "vector_add");
        add.call::<()>((1, 2, 0, &x, &x, &x, 2)).wait().unwrap();
        // Missing parameters read as zero: nothing is added.
        add.call::<()>((1, 2, 0, &x, &x, &x)).wait().unwrap();
        assert_eq!(read_floats(&session, &x), [2.0, 4.0]);
        // A struct that is too short, too.
        let out = tensor(&session, Device::cuda(0), DataType::U8, &[24], vec![9; 24]);
        kernel(&session, "record").call::<()>((1, 1, 0, &out, 7)).wait().unwrap();
        let bytes = session.copy_from_remote(&out).wait().unwrap();
        assert_eq!(bytes[..], [&[7][..], &[0; 23]].concat()[..]);
    });
}

#[test]
fn an_old_driver_tells_its_version_and_refuses_later_ptx() {
    let name = "kernels::an_old_driver_tells_its_version_and_refuses_later_ptx";
    with_driver(name, &["-DOLD_DRIVER"], &[], |_| {
        let (session, folder) = session();
        let version = CudaDevice::open().unwrap().attribute(0, DeviceAttribute::ApiVersion).unwrap();
        assert_eq!(version, Value::Int(12_020));
        folder.write("later.ptx", b".version 8.4 .entry nothing() {}");
        let error = session.load_module("later.ptx").wait().err().unwrap();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.message().contains("CUDA_ERROR_UNSUPPORTED_PTX_VERSION"), "{error}");
        folder.write("fitting.ptx", b".version 8.2 .entry nothing() {}");
        session.load_module("fitting.ptx").wait().unwrap();
    });
}

/// Regression: a float took 8 bytes there, of which a kernel that wants a `float` read zeros.
#[test]
fn an_old_driver_gets_floats_as_the_module_declares_them() {
    let name = "kernels::an_old_driver_gets_floats_as_the_module_declares_them";
    with_driver(name, &["-DOLD_DRIVER"], &[], |_| {
        let (session, folder) = session();
        let parameters =
            ["u64 out", "u8 a", "s16 b", "u32 c", "s64 d", "f32 e", "f64 f"].map(|one| format!(".param .{one}"));
        folder.write("typed.ptx", format!(".entry widths({}) {{}} ", parameters.join(", ")).as_bytes());
        let typed = session.load_module("typed.ptx").wait().unwrap().function("widths").wait().unwrap();
        let out = tensor(&session, Device::cuda(0), DataType::U8, &[27], vec![0; 27]);
        typed.call::<()>((1, 1, 0, &out, true, -2, 7, 8, 0.5, 0.25)).wait().unwrap();
        let bytes = session.copy_from_remote(&out).wait().unwrap();
        assert_eq!(bytes[15..19], 0.5_f32.to_le_bytes());
        assert_eq!(bytes[19..27], 0.25_f64.to_le_bytes());
        assert!(refusal(&typed, (1, 1, 0, &out, true)).message().contains("expected 7 parameters, got 2"));
        // Without a declaration the width is not guessed.
        let error = refusal(&kernel(&session, "widths"), (1, 1, 0, &out, true, -2, 7, 8, 0.5, 0.25));
        assert!(error.message().contains("parameter 5: the width of a float is not known"), "{error}");
    });
}

/// Regression: every worker opened the first GPU, whichever one was its own.
#[test]
fn a_module_is_loaded_on_the_device_of_its_context() {
    with_driver("kernels::a_module_is_loaded_on_the_device_of_its_context", &[], &[], |fake| {
        let device = CudaDevice::open().unwrap();
        let (registry, folder) = (Registry::new(), Folder::new());
        registry.add_loader(Arc::new(CudaModules::new(device)));
        registry.add("load_on_1", |context: Context| -> Result<()> {
            let module = context.on_device(Device::cuda(1)).load_module("kernels.ptx", None)?;
            module.function("nothing").map(drop)
        });
        folder.write("kernels.ptx", b".entry nothing ");
        let devices = Devices::new().with(Arc::new(device));
        let session = Session::new(LocalSession::builder(registry).devices(devices).workspace(folder).build());
        // CUDA_ERROR_ILLEGAL_ADDRESS: nothing works on the first device any more.
        fake.fail(0, 700);
        session.get_function("load_on_1").wait().unwrap().call::<()>(()).wait().unwrap();
        session.load_module("kernels.ptx").wait().err().unwrap();
    });
}

/// Idle memory of the pools is returned when the driver or cuBLAS needs memory.
#[test]
fn a_full_device_returns_idle_memory_for_modules_streams_and_products() {
    let memory = [("FAKE_CUDA_MEMORY", "67108864"), ("FAKE_CUDA_OVERHEAD", "4194304")];
    let name = "kernels::a_full_device_returns_idle_memory_for_modules_streams_and_products";
    with_driver(name, &[], &memory, |_| {
        let (session, _folder) = session();
        let cuda = CudaDevice::open().unwrap();
        cuda.set_cache_limit(0, u64::MAX).unwrap();
        let one = tensor(&session, Device::cuda(0), DataType::F32, &[1, 1], 1.0_f32.to_le_bytes().into());
        let out = tensor(&session, Device::cuda(0), DataType::F32, &[1, 1], vec![0; 4]);
        let matmul = session.get_function("cuda.matmul").wait().unwrap();
        let mut kept = Vec::new();
        let trims = || cuda.statistics(0).unwrap().trims;
        let mut on_a_full_device = |act: &mut dyn FnMut() -> Box<dyn std::any::Any>| {
            let Value::Int(free) = cuda.attribute(0, DeviceAttribute::AvailableMemory).unwrap() else { panic!() };
            drop(cuda.allocate(0, &AllocRequest::new(free as u64 & !0x1f_ffff)).unwrap());
            let before = trims();
            kept.push(act());
            assert_eq!(trims(), before + 1);
        };
        on_a_full_device(&mut || Box::new(cuda.create_stream(0).unwrap()));
        on_a_full_device(&mut || Box::new(session.load_module("kernels.ptx").wait().unwrap()));
        // The first product creates the handle.
        for _ in 0..2 {
            on_a_full_device(&mut || {
                matmul.call::<()>((&one, &one, &out)).wait().unwrap();
                Box::new(())
            });
        }
        assert_eq!(read_floats(&session, &out), [1.0]);
        // Without idle memory it is an error, and the session continues.
        let Value::Int(free) = cuda.attribute(0, DeviceAttribute::AvailableMemory).unwrap() else { panic!() };
        let rest = cuda.allocate(0, &AllocRequest::new(free as u64 & !0x1f_ffff)).unwrap();
        assert_eq!(refusal(&matmul, (&one, &one, &out)).kind(), ErrorKind::OutOfMemory);
        assert_eq!(cuda.create_stream(0).err().unwrap().kind(), ErrorKind::OutOfMemory);
        drop(rest);
        matmul.call::<()>((&one, &one, &out)).wait().unwrap();
    });
}

#[test]
fn products_are_of_row_major_matrices() {
    with_driver("kernels::products_are_of_row_major_matrices", &[], &[], |_| {
        let (session, _folder) = session();
        let matmul = session.get_function("cuda.matmul").wait().unwrap();
        let matrix = |shape: &[i64], values: &[f32]| {
            let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            tensor(&session, Device::cuda(0), DataType::F32, shape, bytes)
        };
        let a = matrix(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let b = matrix(&[3, 4], &[1.0, 0.0, 2.0, 1.0, 0.0, 1.0, 2.0, 1.0, 1.0, 1.0, 2.0, 0.0]);
        let out = matrix(&[2, 4], &[9.0; 8]);
        matmul.call::<()>((&a, &b, &out)).wait().unwrap();
        assert_eq!(read_floats(&session, &out), [4.0, 5.0, 12.0, 3.0, 10.0, 11.0, 30.0, 9.0]);

        let half = |value: f32| value.to_bits().to_le_bytes()[2..].to_vec();
        let brain = |shape: &[i64], values: &[f32]| {
            let bytes = values.iter().flat_map(|value| half(*value)).collect();
            tensor(&session, Device::cuda(0), DataType::BF16, shape, bytes)
        };
        let (left, right, product) = (brain(&[1, 2], &[1.5, 2.0]), brain(&[2, 1], &[2.0, 4.0]), brain(&[1, 1], &[0.0]));
        matmul.call::<()>((&left, &right, &product)).wait().unwrap();
        assert_eq!(session.copy_from_remote(&product).wait().unwrap()[..], half(11.0)[..]);

        // -1.5 · 2 + 2 · 0.25 in half precision.
        let half = |shape: &[i64], bits: &[u16]| {
            let bytes = bits.iter().flat_map(|bits| bits.to_le_bytes()).collect();
            tensor(&session, Device::cuda(0), DataType::F16, shape, bytes)
        };
        let (left, right) = (half(&[1, 2], &[0xbe00, 0x4000]), half(&[2, 1], &[0x4000, 0x3400]));
        let product = half(&[1, 1], &[0]);
        matmul.call::<()>((&left, &right, &product)).wait().unwrap();
        assert_eq!(session.copy_from_remote(&product).wait().unwrap()[..], 0xc100_u16.to_le_bytes());

        // Without terms the sum is zero; without elements there is nothing to do.
        let (none, empty) = (matrix(&[2, 0], &[]), matrix(&[0, 4], &[]));
        matmul.call::<()>((&none, &empty, &out)).wait().unwrap();
        assert_eq!(read_floats(&session, &out), [0.0; 8]);
        matmul.call::<()>((&empty, &matrix(&[4, 1], &[0.0; 4]), &matrix(&[0, 1], &[]))).wait().unwrap();

        let host = tensor(&session, Device::cpu(), DataType::F32, &[2, 3], vec![0; 24]);
        // cuBLAS would trap.
        let bytes = tensor(&session, Device::cuda(0), DataType::U8, &[64], vec![0; 64]);
        let [odd_a, odd_b, odd_out] = [[2, 3], [3, 4], [2, 4]].map(|shape| bytes.view(2, DataType::F32, &shape, None));
        for (error, text) in [
            (refusal(&matmul, (&odd_a, &b, &out)), "a does not begin at a multiple of its element size, 4 bytes"),
            (refusal(&matmul, (&a, &odd_b, &out)), "b does not begin at a multiple of its element size, 4 bytes"),
            (refusal(&matmul, (&a, &b, &odd_out)), "out does not begin at a multiple of its element size, 4 bytes"),
            (refusal(&matmul, (&a, &a, &out)), "the product of shapes [2, 3] and [2, 3] has no shape [2, 4]"),
            (refusal(&matmul, (&host, &b, &out)), "a: expected a tensor on cuda, got one on cpu:0"),
            (refusal(&matmul, (&a, &b, &product)), "has no shape [1, 1]"),
            (
                refusal(&matmul, (&left, &matrix(&[2, 1], &[0.0; 2]), &product)),
                "b is of float32 on cuda:0, but a is of",
            ),
        ] {
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            assert!(error.message().contains(text), "{error}");
        }
    });
}

#[test]
fn without_cublas_the_error_names_the_missing_library() {
    let nowhere = [("RPC_CUDA_BLAS_LIBRARY", "/nonexistent/libcublas.so.12")];
    with_driver("kernels::without_cublas_the_error_names_the_missing_library", &[], &nowhere, |_| {
        let (session, _folder) = session();
        let x = tensor(&session, Device::cuda(0), DataType::F32, &[1, 1], vec![0; 4]);
        let out = tensor(&session, Device::cuda(0), DataType::F32, &[1, 1], vec![0; 4]);
        let matmul = session.get_function("cuda.matmul").wait().unwrap();
        let error = refusal(&matmul, (&x, &x, &out));
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("need cuBLAS: none of /nonexistent/libcublas.so.12 was found"), "{error}");
    });
}

/// cuBLAS outside of the system's folders.
#[test]
fn cublas_is_found_in_a_python_environment() {
    let is_there = |name: &str| {
        // SAFETY: it is cuBLAS, if it exists, whose initialisers have no special requirements.
        unsafe { libloading::Library::new(name) }.is_ok()
    };
    if ["libcublas.so.12", "libcublas.so.11", "libcublas.so"].into_iter().any(is_there) {
        eprintln!("SKIPPED: this machine has a cuBLAS, which comes first");
        return;
    }
    let environment = tempfile::tempdir().unwrap();
    let folder = environment.path().join("lib/python3.12/site-packages/nvidia/cublas/lib");
    std::fs::create_dir_all(&folder).unwrap();
    let name = "kernels::cublas_is_found_in_a_python_environment";
    let variables = [("VIRTUAL_ENV", environment.path().to_str().unwrap())];
    with_driver(name, &[WITHOUT_CUBLAS], &variables, |_| {
        let folder = std::path::PathBuf::from(std::env::var_os("VIRTUAL_ENV").unwrap());
        let library = folder.join("lib/python3.12/site-packages/nvidia/cublas/lib/libcublas.so.12");
        compile("fake_cublas.c", &library, &[]).unwrap();
        let (session, _folder) = session();
        let matrix = |value: f32| {
            let bytes = value.to_le_bytes().into();
            tensor(&session, Device::cuda(0), DataType::F32, &[1, 1], bytes)
        };
        let (x, out) = (matrix(3.0), matrix(0.0));
        session.get_function("cuda.matmul").wait().unwrap().call::<()>((&x, &x, &out)).wait().unwrap();
        assert_eq!(read_floats(&session, &out), [9.0]);
    });
}
