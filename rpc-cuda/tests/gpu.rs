//! Tests of the device kind `cuda` on a real GPU, if there is one: the contract that `fake_driver`
//! tests, as far as it is visible from outside. Without a GPU each test prints that and passes;
//! with `RPC_TESTS_REQUIRE_GPU=1` it fails instead, also if another part is missing, such as
//! cuBLAS.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

#[path = "cuda/memory_access.rs"]
mod memory_access;
#[path = "cuda/workspace.rs"]
mod workspace;

use std::process::Command;
use std::sync::Arc;

use memory_access::{copy, read, write};
use rpc_core::device::{AllocRequest, DeviceApi};
use rpc_core::{
    DataType, Device, DeviceAttribute, Devices, ErrorKind, LocalSession, Registry, RemoteFunction, RemoteTensor,
    Session, Target, Value,
};
use rpc_cuda::{CudaDevice, CudaModules};
use workspace::Folder;

const BUFFER: usize = 1 << 20;

/// Returns the device, or prints the reason and returns `None`.
fn gpu() -> Option<CudaDevice> {
    CudaDevice::open().map_err(|error| skip(&format!("no GPU: {error}"))).ok()
}

/// Prints the missing part, or fails if everything is required.
fn skip(missing: &str) {
    let is_required = std::env::var_os("RPC_TESTS_REQUIRE_GPU").is_some_and(|required| required == "1");
    assert!(!is_required, "{missing}");
    eprintln!("SKIPPED: {missing}");
}

/// Returns true if the driver reports the widths of a kernel's parameters.
fn tells_widths(cuda: CudaDevice) -> bool {
    matches!(cuda.attribute(0, DeviceAttribute::ApiVersion), Ok(Value::Int(version)) if version >= 12_040)
}

fn session(device: CudaDevice) -> (Session, Arc<Folder>) {
    let registry = Registry::new();
    registry.add_loader(Arc::new(CudaModules::new(device)));
    rpc_cuda::register(&registry);
    let folder = Folder::new();
    folder.write("kernels.ptx", include_bytes!("cuda/kernels.ptx"));
    let devices = Devices::new().with(Arc::new(device));
    let session = LocalSession::builder(registry).devices(devices).workspace(folder.clone()).build();
    (Session::new(session), folder)
}

fn kernel(session: &Session, name: &str) -> RemoteFunction {
    session.load_module("kernels.ptx").wait().unwrap().function(name).wait().unwrap()
}

fn tensor(session: &Session, dtype: DataType, shape: &[i64], bytes: Vec<u8>) -> RemoteTensor {
    let tensor = session.alloc(Device::cuda(0), dtype, shape).wait().unwrap();
    session.copy_to_remote(&tensor, bytes).wait().unwrap();
    tensor
}

fn floats(session: &Session, shape: &[i64], values: impl Iterator<Item = f32>) -> RemoteTensor {
    tensor(session, DataType::F32, shape, values.flat_map(f32::to_le_bytes).collect())
}

fn read_floats(session: &Session, tensor: &RemoteTensor) -> Vec<f32> {
    let bytes = session.copy_from_remote(tensor).wait().unwrap();
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| ((at * 31 + at / 251) % 251) as u8).collect()
}

#[test]
fn every_attribute_is_answered() {
    let Some(cuda) = gpu() else { return };
    for index in 0..cuda.count().unwrap() {
        for attribute in DeviceAttribute::ALL {
            println!("cuda:{index} {attribute}: {:?}", cuda.attribute(index, *attribute).unwrap());
        }
        let Value::Str(target) = cuda.attribute(index, DeviceAttribute::Target).unwrap() else {
            panic!("the target is no text");
        };
        assert!(target.parse::<Target>().unwrap().attribute("arch").unwrap().starts_with("sm_"));
    }
}

#[test]
fn memory_reads_as_zeros_and_keeps_what_is_written_at_every_size() {
    let Some(cuda) = gpu() else { return };
    for len in [0, 1, 255, BUFFER - 1, BUFFER, BUFFER + 1, 2 * BUFFER, 2 * BUFFER + 1, 64 * BUFFER + 12345] {
        for scope in [None, Some("host")] {
            for _ in 0..3 {
                let request = AllocRequest { size: len as u64, alignment: 4096, scope };
                let memory = cuda.allocate(0, &request).unwrap();
                assert!(read(&*memory, 0, len).iter().all(|byte| *byte == 0), "{len} {scope:?}");
                let data = pattern(len);
                write(&*memory, 0, &data);
                assert!(read(&*memory, 0, len) == data, "{len} {scope:?}");
            }
        }
    }
    assert!(cuda.statistics(0).unwrap().hits > 0);
}

#[test]
fn copies_on_devices_and_among_them_arrive_and_overlap() {
    let Some(cuda) = gpu() else { return };
    let len = 40 << 20;
    let memory = cuda.allocate(0, &AllocRequest::new(len)).unwrap();
    let data = pattern(len as usize);
    for distance in [1, 4096, 17 << 20, 30 << 20] {
        for (from, to) in [(0, distance), (distance, 0)] {
            write(&*memory, 0, &data);
            copy(&cuda, (&*memory, from), (&*memory, to), len - distance);
            let moved = read(&*memory, to, (len - distance) as usize);
            assert!(moved == data[from as usize..][..moved.len()], "{from} {to}");
        }
    }
    let pinned = cuda.allocate(0, &AllocRequest { scope: Some("host"), ..AllocRequest::new(len) }).unwrap();
    write(&*memory, 0, &data);
    copy(&cuda, (&*memory, 0), (&*pinned, 0), len);
    assert!(read(&*pinned, 0, len as usize) == data);
    if cuda.count().unwrap() < 2 {
        eprintln!("SKIPPED: copies among devices: there is one GPU");
        return;
    }
    let far = cuda.allocate(1, &AllocRequest::new(len)).unwrap();
    copy(&cuda, (&*memory, 0), (&*far, 0), len);
    assert!(read(&*far, 0, len as usize) == data);
}

#[test]
fn streams_wait_for_each_other() {
    let Some(cuda) = gpu() else { return };
    let (default, side) = (cuda.default_stream(0).unwrap(), cuda.create_stream(0).unwrap());
    let memory = cuda.allocate(0, &AllocRequest::new(256 << 20)).unwrap();
    side.wait_for(&*default).unwrap();
    default.wait_for(&*side).unwrap();
    side.synchronize().unwrap();
    assert!(side.as_any().downcast_ref::<rpc_cuda::CudaStream>().unwrap().query().unwrap());
    drop(side);
    assert_eq!(read(&*memory, 255 << 20, 1000), [0; 1000]);
}

#[test]
fn too_large_allocations_are_refused_and_the_device_remains_usable() {
    let Some(cuda) = gpu() else { return };
    let error = cuda.allocate(0, &AllocRequest::new(1 << 50)).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
    assert_eq!(error.application_kind(), Some("CUDA_ERROR_OUT_OF_MEMORY"));
    assert_eq!(read(&*cuda.allocate(0, &AllocRequest::new(10)).unwrap(), 0, 10), [0; 10]);
}

#[test]
fn a_kernel_adds_vectors() {
    let Some(device) = gpu() else { return };
    let (session, _folder) = session(device);
    let count = 100_000_usize;
    let a = floats(&session, &[count as i64], (0..count).map(|at| at as f32));
    let b = floats(&session, &[count as i64], (0..count).map(|at| 2.0 * at as f32));
    let sum = session.alloc(Device::cuda(0), DataType::F32, &[count as i64]).wait().unwrap();
    let add = kernel(&session, "vector_add");
    add.call::<()>((count.div_ceil(256), 256, 0, &a, &b, &sum, count)).wait().unwrap();
    assert!(read_floats(&session, &sum).iter().enumerate().all(|(at, sum)| *sum == 3.0 * at as f32));
    session.stream_wait(Device::cuda(0), None).wait().unwrap();

    let out = session.alloc_in_scope(Device::cuda(0), DataType::U8, &[27], Some("host")).wait().unwrap();
    // If the width is unknown, a `float` has to be given by its bits.
    let single = if tells_widths(device) { Value::Float(0.5) } else { Value::Int(0.5_f32.to_bits().into()) };
    let args = (1, 1, 0, &out, true, -2, 0xffff_fffe_u32, i64::MIN, single, 0.25);
    kernel(&session, "widths").call::<()>(args).wait().unwrap();
    let mut expected = i64::MIN.to_le_bytes().to_vec();
    expected.extend(0.25_f64.to_le_bytes());
    expected.extend(0xffff_fffe_u32.to_le_bytes());
    expected.extend(0.5_f32.to_le_bytes());
    expected.extend((-2_i16).to_le_bytes());
    expected.push(1);
    assert_eq!(session.copy_from_remote(&out).wait().unwrap()[..], expected[..]);
}

#[test]
fn broken_ptx_is_refused_with_the_compilers_message() {
    let Some(device) = gpu() else { return };
    let (session, folder) = session(device);
    folder.write("broken.ptx", b".version 7.0\n.target sm_60\n.address_size 64\nnonsense\n");
    let error = session.load_module("broken.ptx").wait().err().unwrap();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert!(error.message().contains("line 4"), "{error}");
    let error = session.load_module("kernels.ptx").wait().unwrap().function("none").wait().err().unwrap();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
}

#[test]
fn a_product_is_of_row_major_matrices() {
    let Some(device) = gpu() else { return };
    let (session, _folder) = session(device);
    let a = floats(&session, &[2, 3], (1..=6).map(|value| value as f32));
    let b = floats(&session, &[3, 4], [1, 0, 2, 1, 0, 1, 2, 1, 1, 1, 2, 0].map(|value| value as f32).into_iter());
    let out = session.alloc(Device::cuda(0), DataType::F32, &[2, 4]).wait().unwrap();
    let matmul = session.get_function("cuda.matmul").wait().unwrap();
    match matmul.call::<()>((&a, &b, &out)).wait() {
        Err(error) if error.kind() == ErrorKind::Unsupported => skip(error.message()),
        outcome => {
            outcome.unwrap();
            assert_eq!(read_floats(&session, &out), [4.0, 5.0, 12.0, 3.0, 10.0, 11.0, 30.0, 9.0]);
        }
    }
}

/// In a process of its own, because the other tests share the device.
#[test]
fn a_trap_loses_the_device_and_nothing_else() {
    const CHILD: &str = "RPC_CORE_TRAP";
    let Some(device) = gpu() else { return };
    if std::env::var_os(CHILD).is_none() {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["a_trap_loses_the_device_and_nothing_else", "--exact", "--nocapture"]).env(CHILD, "1");
        let output = child.output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && out.contains("1 passed"), "{out}\n{err}");
        return;
    }
    let (session, _folder) = session(device);
    let x = floats(&session, &[1], [1.0].into_iter());
    kernel(&session, "poke").call::<()>((1, 1, 0, Value::Null)).wait().unwrap();
    let error = session.stream_wait(Device::cuda(0), None).wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
    assert_eq!(error.application_kind(), Some("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
    for error in [
        session.copy_from_remote(&x).wait().unwrap_err(),
        session.alloc(Device::cuda(0), DataType::F32, &[1]).wait().err().unwrap(),
    ] {
        assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
    }
    let host = session.alloc(Device::cpu(), DataType::U8, &[3]).wait().unwrap();
    session.copy_to_remote(&host, vec![1, 2, 3]).wait().unwrap();
    assert_eq!(session.copy_from_remote(&host).wait().unwrap()[..], [1, 2, 3]);
}
