//! Tests of the device kind `opencl` on a real device, such as that of PoCL. Without one each test
//! prints that and passes; with `RPC_TESTS_REQUIRE_OPENCL=1` it fails instead.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod conformance;

use std::any::Any;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

use rpc_core::device::{AllocRequest, DeviceApi, HostAccess, Memory};
use rpc_core::function::{ModuleLoader, Rest};
use rpc_core::{
    AccessControl, Context, DataType, Device, DeviceAttribute, Devices, ErrorKind, Function, LocalSession, Permission,
    Registry, RemoteFunction, RemoteTensor, Result, RpcError, Session, Target, Value, WorkspaceFiles,
};
use rpc_opencl::{OpenClDevice, OpenClMemory, OpenClModules};

const CHUNK: usize = 1 << 20;

/// Time after which a test that waits has hung.
const LONG: Duration = Duration::from_secs(60);

/// Returns the devices, or prints the reason and returns `None`.
pub(crate) fn opencl() -> Option<OpenClDevice> {
    static DEVICES: OnceLock<Result<OpenClDevice>> = OnceLock::new();
    let open = || {
        if let Some(vendors) = std::env::var_os("RPC_TESTS_OPENCL_VENDORS") {
            // SAFETY: it is set once, before any code of OpenCL runs, which alone reads it; and all
            // tests of this process wait for that.
            unsafe { std::env::set_var("OCL_ICD_VENDORS", vendors) };
        }
        OpenClDevice::open()
    };
    match DEVICES.get_or_init(open) {
        Ok(opencl) => Some(*opencl),
        Err(error) => {
            let is_required = std::env::var_os("RPC_TESTS_REQUIRE_OPENCL").is_some_and(|required| required == "1");
            assert!(!is_required, "{error}");
            eprintln!("SKIPPED: no OpenCL device: {error}");
            None
        }
    }
}

/// A folder as a session's workspace.
struct Folder(tempfile::TempDir);

impl Folder {
    fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.0.path().join(name), bytes).unwrap();
    }
}

impl WorkspaceFiles for Folder {
    fn resolve(&self, path: &str) -> Result<PathBuf> {
        if path.contains("..") {
            return Err(RpcError::invalid_argument("the path leaves the workspace"));
        }
        Ok(self.0.path().join(path))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn session(opencl: OpenClDevice) -> (Session, Arc<Folder>) {
    session_taking(opencl, |_| true)
}

fn session_taking(opencl: OpenClDevice, native_code: rpc_opencl::NativeCodeRule) -> (Session, Arc<Folder>) {
    let registry = Registry::new();
    registry.add_loader(Arc::new(OpenClModules::new(opencl, native_code)));
    rpc_opencl::register(&registry, native_code);
    registry.add("measured", measured);
    registry.add("waited", waited);
    let folder = Arc::new(Folder(tempfile::tempdir().unwrap()));
    folder.write("kernels.cl", include_bytes!("kernels.cl"));
    let devices = Devices::new().with(Arc::new(opencl));
    let session = LocalSession::builder(registry).devices(devices).workspace(folder.clone()).build();
    (Session::new(session), folder)
}

fn kernel(session: &Session, name: &str) -> RemoteFunction {
    session.load_module("kernels.cl").wait().unwrap().function(name).wait().unwrap()
}

fn floats(session: &Session, values: impl Iterator<Item = f32>) -> RemoteTensor {
    let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
    let tensor = session.alloc(Device::opencl(0), DataType::F32, &[bytes.len() as i64 / 4]).wait().unwrap();
    session.copy_to_remote(&tensor, bytes).wait().unwrap();
    tensor
}

fn ints(session: &Session, count: i64, scope: Option<&str>) -> RemoteTensor {
    session.alloc_in_scope(Device::opencl(0), DataType::I32, &[count], scope).wait().unwrap()
}

fn read_ints(session: &Session, tensor: &RemoteTensor) -> Vec<i32> {
    let bytes = session.copy_from_remote(tensor).wait().unwrap();
    bytes.chunks_exact(4).map(|bytes| i32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

fn pattern(len: usize) -> Vec<u8> {
    let period: Vec<u8> = (0..251 * 251).map(|at| ((at * 31 + at / 251) % 251) as u8).collect();
    let mut bytes = period.repeat(len.div_ceil(period.len()));
    bytes.truncate(len);
    bytes
}

fn write(memory: &dyn Memory, offset: u64, data: &[u8]) {
    // SAFETY: the tests use ranges within the memory, and a memory from one thread.
    unsafe { memory.copy_from_host(offset, data).unwrap() }
}

fn read(memory: &dyn Memory, offset: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0x77; len];
    // SAFETY: as above.
    unsafe { memory.copy_to_host(offset, &mut out).unwrap() };
    out
}

fn copy(opencl: OpenClDevice, from: (&dyn Memory, u64), to: (&dyn Memory, u64), len: u64) {
    // SAFETY: as above.
    unsafe { opencl.copy(from.0, from.1, to.0, to.1, len).unwrap() }
}

fn in_host_memory(len: u64) -> AllocRequest<'static> {
    AllocRequest { scope: Some("host"), ..AllocRequest::new(len) }
}

#[test]
fn every_attribute_is_answered() {
    let Some(opencl) = opencl() else { return };
    for index in 0..opencl.count().unwrap() {
        for attribute in DeviceAttribute::ALL {
            println!("opencl:{index} {attribute}: {:?}", opencl.attribute(index, *attribute).unwrap());
        }
        let text = |attribute| match opencl.attribute(index, attribute).unwrap() {
            Value::Str(text) => text,
            other => panic!("{attribute} is {other:?}"),
        };
        assert_eq!(text(DeviceAttribute::Target).parse::<Target>().unwrap().kind(), "opencl");
        assert!(!text(DeviceAttribute::Name).is_empty() && !text(DeviceAttribute::DriverVersion).is_empty());
        for positive in [
            DeviceAttribute::MaxThreadsPerBlock,
            DeviceAttribute::MaxSharedMemoryPerBlock,
            DeviceAttribute::ComputeUnits,
            DeviceAttribute::TotalMemory,
            DeviceAttribute::MaxAlignment,
        ] {
            let value = opencl.attribute(index, positive).unwrap();
            assert!(matches!(value, Value::Int(1..)), "{positive}: {value:?}");
        }
    }
    let behind = opencl.count().unwrap();
    assert_eq!(opencl.attribute(behind, DeviceAttribute::Exists).unwrap(), Value::Bool(false));
    assert_eq!(opencl.attribute(behind, DeviceAttribute::Name).unwrap_err().kind(), ErrorKind::DeviceUnavailable);
}

#[test]
fn memory_reads_as_zeros_and_keeps_what_is_written_at_every_size() {
    let Some(opencl) = opencl() else { return };
    for len in [0, 1, 255, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 9 * CHUNK + 12345] {
        for scope in [None, Some("host")] {
            for _ in 0..3 {
                let request = AllocRequest { size: len as u64, alignment: 64, scope };
                let memory = opencl.allocate(0, &request).unwrap();
                assert_eq!(memory.host().is_some(), scope.is_some());
                assert!(read(&*memory, 0, len) == vec![0; len], "{len} {scope:?}");
                let data = pattern(len);
                write(&*memory, 0, &data);
                assert!(read(&*memory, 0, len) == data, "{len} {scope:?}");
                if len > 300 {
                    assert!(read(&*memory, 251, len - 300) == data[251..len - 49]);
                }
            }
        }
    }
    let before = opencl.statistics(0).unwrap();
    assert!(before.hits > 0, "{before:?}");
}

#[test]
fn copies_on_a_device_arrive_and_overlap() {
    let Some(opencl) = opencl() else { return };
    let len = 20 << 20;
    let memory = opencl.allocate(0, &AllocRequest::new(len)).unwrap();
    let data = pattern(len as usize);
    for distance in [1, 4096, 3 << 20, 15 << 20] {
        for (from, to) in [(0, distance), (distance, 0)] {
            write(&*memory, 0, &data);
            copy(opencl, (&*memory, from), (&*memory, to), len - distance);
            let moved = read(&*memory, to, (len - distance) as usize);
            assert!(moved == data[from as usize..][..moved.len()], "{from} {to}");
        }
    }
    let host = opencl.allocate(0, &in_host_memory(len)).unwrap();
    write(&*memory, 0, &data);
    copy(opencl, (&*memory, 0), (&*host, 0), len);
    assert!(read(&*host, 0, len as usize) == data);
    let other = opencl.allocate(0, &AllocRequest::new(len)).unwrap();
    copy(opencl, (&*host, 5), (&*other, 7), len - 7);
    assert!(read(&*other, 7, len as usize - 7) == data[5..len as usize - 2]);
}

#[test]
fn mapped_memory_is_read_and_written_in_place() {
    let Some(opencl) = opencl() else { return };
    let data = pattern(3 * CHUNK);
    for scope in [None, Some("host")] {
        let request = AllocRequest { scope, ..AllocRequest::new(data.len() as u64) };
        let memory = opencl.allocate(0, &request).unwrap();
        write(&*memory, 0, &data);
        // SAFETY: the ranges are within the memory, which this thread alone uses.
        let mut mapping = unsafe { memory.map(100, CHUNK, HostAccess::Read).unwrap() };
        assert!(mapping.bytes() == &data[100..][..CHUNK] && mapping.bytes_mut().is_none());
        mapping.end().unwrap();
        // SAFETY: as above.
        let mut mapping = unsafe { memory.map(5, 10, HostAccess::Write).unwrap() };
        mapping.bytes_mut().unwrap().fill(0xee);
        mapping.end().unwrap();
        assert_eq!(read(&*memory, 0, 20)[..], [&data[..5], &[0xee; 10], &data[15..20]].concat());
    }
}

#[test]
fn streams_wait_for_each_other_and_call_back() {
    let Some(opencl) = opencl() else { return };
    let (session, _folder) = session(opencl);
    let stream = session.create_stream(Device::opencl(0)).wait().unwrap();
    session.set_stream(Device::opencl(0), Some(&stream)).wait().unwrap();
    let (tensor, count_up) = (ints(&session, 64, None), kernel(&session, "count_up"));
    let waited = session.get_function("waited").wait().unwrap();
    waited.call::<()>((&count_up, 64, Value::Null, &tensor, 3_000_000)).wait().unwrap();

    let side = opencl.create_stream(0).unwrap();
    let memory = opencl.allocate(0, &AllocRequest::new(64 << 20)).unwrap();
    let (sender, done) = mpsc::channel();
    assert!(side.when_done(Box::new(move |outcome| sender.send(outcome).unwrap())).is_ok());
    done.recv_timeout(LONG).unwrap().unwrap();
    side.synchronize().unwrap();
    assert!(side.as_any().is::<rpc_opencl::OpenClStream>());
    drop(side);
    assert_eq!(read(&*memory, 63 << 20, 1000), [0; 1000]);
}

#[test]
fn bad_allocations_are_refused_and_the_device_remains_usable() {
    let Some(opencl) = opencl() else { return };
    for len in [1 << 50, u64::MAX] {
        for scope in [None, Some("host")] {
            let request = AllocRequest { scope, ..AllocRequest::new(len) };
            let error = opencl.allocate(0, &request).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
        }
    }
    for (request, kind) in [
        (AllocRequest { alignment: 3, ..AllocRequest::new(1) }, ErrorKind::InvalidArgument),
        (AllocRequest { alignment: 1 << 40, ..AllocRequest::new(1) }, ErrorKind::InvalidArgument),
        (AllocRequest { scope: Some("texture"), ..AllocRequest::new(1) }, ErrorKind::Unsupported),
    ] {
        assert_eq!(opencl.allocate(0, &request).err().unwrap().kind(), kind);
    }
    let error = opencl.allocate(99, &AllocRequest::new(1)).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::DeviceUnavailable, "{error}");
    assert_eq!(read(&*opencl.allocate(0, &AllocRequest::new(10)).unwrap(), 0, 10), [0; 10]);
}

#[test]
fn a_kernel_adds_vectors_also_in_host_memory_and_on_other_streams() {
    let Some(opencl) = opencl() else { return };
    let (session, _folder) = session(opencl);
    let count = 100_000_usize;
    let a = floats(&session, (0..count).map(|at| at as f32));
    let b = floats(&session, (0..count).map(|at| 2.0 * at as f32));
    let add = kernel(&session, "vector_add");
    let stream = session.create_stream(Device::opencl(0)).wait().unwrap();
    for (scope, on_stream) in [(None, false), (Some("host"), false), (None, true), (Some("host"), true)] {
        session.set_stream(Device::opencl(0), on_stream.then_some(&stream)).wait().unwrap();
        let sum = session.alloc_in_scope(Device::opencl(0), DataType::F32, &[count as i64], scope).wait().unwrap();
        add.call::<()>((count.next_multiple_of(64), 64, &a, &b, &sum, count)).wait().unwrap();
        let bytes = session.copy_from_remote(&sum).wait().unwrap();
        let sums = bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
        assert!(sums.enumerate().all(|(at, sum)| sum == 3.0 * at as f32), "{scope:?} {on_stream}");
    }
    session.stream_wait(Device::opencl(0), None).wait().unwrap();
    let module = OpenClModules::new(opencl, |_| true);
    assert!(module.accepts("a/kernels.cl") && module.accepts("a.clbin") && !module.accepts("a.ptx"));
}

#[test]
fn a_module_lists_its_kernels_with_their_types() {
    let Some(opencl) = opencl() else { return };
    let source = include_str!("kernels.cl");
    let module = rpc_opencl::module_of_source(opencl, 0, "kernels", source).unwrap();
    let functions = module.functions();
    let names: Vec<_> = functions.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["vector_add", "values", "group_sums", "fill", "count_up", "endless"]);
    let signature = functions[0].1.to_string();
    assert_eq!(signature, "(shape, shape or null, float*, float*, float*, int) -> null");
}

#[test]
fn parameters_are_typed() {
    let Some(opencl) = opencl() else { return };
    let (session, _folder) = session(opencl);
    let out = session.alloc(Device::opencl(0), DataType::U8, &[25]).wait().unwrap();
    let vector: Vec<u8> = [1.0, 2.0, 3.0, 4.5_f32].into_iter().flat_map(f32::to_le_bytes).collect();
    let pair = Value::from(bytes::Bytes::from(vec![40, 0, 0, 0, 2, 0, 0, 0]));
    let vector = Value::from(bytes::Bytes::from(vector));
    let args = (1, Value::Null, &out, -3, 0.5, i64::MAX, 200, vector.clone(), pair.clone());
    kernel(&session, "values").call::<()>(args).wait().unwrap();
    let mut expected = (-3_i32).to_le_bytes().to_vec();
    expected.extend(0.5_f32.to_le_bytes());
    expected.extend(i64::MAX.to_le_bytes());
    expected.extend(4.5_f32.to_le_bytes());
    expected.extend(42_i32.to_le_bytes());
    expected.push(200);
    assert_eq!(session.copy_from_remote(&out).wait().unwrap()[..], expected[..]);

    let values = kernel(&session, "values");
    let refused = |call: rpc_core::client::Action<()>, text: &str| {
        let error = call.wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.message().contains(text) && error.message().contains("kernel '"), "{error}");
    };
    refused(values.call((1, Value::Null, &out)), "expected 7 parameters, got 1");
    refused(
        values.call((1, Value::Null, &out, 1_i64 << 40, 0.5, 1, 1, vector.clone(), pair.clone())),
        "does not fit int",
    );
    refused(values.call((1, Value::Null, 5, 1, 0.5, 1, 1, vector, pair)), "expected a tensor or null for uchar*");
    let fill = kernel(&session, "fill");
    refused(fill.call((1, Value::Null, &floats(&session, [1.0].into_iter()), 1)), "a tensor of float32 was given");
    let on_host = session.alloc(Device::cpu(), DataType::I32, &[1]).wait().unwrap();
    refused(fill.call((1, Value::Null, &on_host, 1)), "expected a tensor on opencl, got one on cpu");
    let tensor = ints(&session, 6, None);
    for (global, local, text) in [
        (Value::Int(0), Value::Null, "dimension 0 of the global size is 0"),
        (Value::Int(6), Value::Int(4), "not a multiple of the local one, 4"),
        (Value::Int(1 << 40), Value::Int(1 << 40), "of the local size"),
        (Value::Shape(vec![2, 3]), Value::Int(1), "different numbers of dimensions"),
        (Value::Str("x".into()), Value::Null, "got str"),
    ] {
        refused(fill.call((global, local, &tensor, 1)), text);
    }
}

/// More kernels than a stream takes at a time.
#[test]
fn thousands_of_kernels_run_in_order() {
    let Some(opencl) = opencl() else { return };
    let (session, _folder) = session(opencl);
    let (tensor, fill) = (ints(&session, 1, None), kernel(&session, "fill"));
    let slow = kernel(&session, "count_up").call::<()>((1, Value::Null, &tensor, 20_000_000));
    let pending: Vec<_> =
        std::iter::once(slow).chain((0..2500).map(|at| fill.call((1, Value::Null, &tensor, at)))).collect();
    pending
        .into_iter()
        .map(rpc_core::Action::start)
        .collect::<Vec<_>>()
        .into_iter()
        .for_each(|call| call.wait().unwrap());
    assert_eq!(read_ints(&session, &tensor), [2499]);
}

#[test]
fn groups_have_memory_of_their_own() {
    let Some(opencl) = opencl() else { return };
    let (session, _folder) = session(opencl);
    let (input, out) = (ints(&session, 64, None), ints(&session, 4, None));
    let data: Vec<u8> = (0..64_i32).flat_map(i32::to_le_bytes).collect();
    session.copy_to_remote(&input, data).wait().unwrap();
    kernel(&session, "group_sums").call::<()>((64, 16, &input, &out, 16 * 4)).wait().unwrap();
    assert_eq!(read_ints(&session, &out), [120, 376, 632, 888]);
    for bytes in [1_i64 << 40, i64::MAX] {
        let error = kernel(&session, "group_sums").call::<()>((64, 16, &input, &out, bytes)).wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.message().contains("bytes of local memory were asked for"), "{error}");
    }
}

#[test]
fn host_memory_is_given_to_a_kernel_twice() {
    let Some(opencl) = opencl() else { return };
    let (session, _folder) = session(opencl);
    let both = session.alloc_in_scope(Device::opencl(0), DataType::F32, &[2], Some("host")).wait().unwrap();
    session.copy_to_remote(&both, [1.5_f32.to_le_bytes(), 4_f32.to_le_bytes()].concat()).wait().unwrap();
    let add = kernel(&session, "vector_add");
    for factor in [2.0, 4.0, 8.0_f32] {
        add.call::<()>((2, Value::Null, &both, &both, &both, 2)).wait().unwrap();
        let expected = [(1.5 * factor).to_le_bytes(), (4.0 * factor).to_le_bytes()].concat();
        assert_eq!(session.copy_from_remote(&both).wait().unwrap()[..], expected[..]);
    }
}

#[test]
fn a_part_of_a_tensor_is_given_to_a_kernel_where_the_device_can_begin() {
    let Some(opencl) = opencl() else { return };
    let (session, _folder) = session(opencl);
    let Value::Int(alignment) = opencl.attribute(0, DeviceAttribute::MaxAlignment).unwrap() else { panic!() };
    let first = alignment / 4;
    let tensor = ints(&session, 3 * first, None);
    let fill = kernel(&session, "fill");
    let middle = tensor.view(alignment as u64, DataType::I32, &[first], None);
    fill.call::<()>((first, Value::Null, &middle, 7)).wait().unwrap();
    let expected = [vec![0; first as usize], vec![7; first as usize], vec![0; first as usize]].concat();
    assert_eq!(read_ints(&session, &tensor), expected);
    let odd = tensor.view(4, DataType::I32, &[1], None);
    let error = fill.call::<()>((1, Value::Null, &odd, 7)).wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains(&format!("multiples of {alignment} bytes only")), "{error}");
}

#[test]
fn a_kernel_that_fails_to_build_is_refused_with_the_compilers_log() {
    let Some(opencl) = opencl() else { return };
    let (session, folder) = session(opencl);
    folder.write("broken.cl", b"kernel void broken(global int* out) {\n    out[0] = no_such_name;\n}\n");
    let error = session.load_module("broken.cl").wait().err().unwrap();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert!(error.message().contains("no_such_name") && error.message().contains("'broken.cl'"), "{error}");
    assert_eq!(error.application_kind(), Some("CL_BUILD_PROGRAM_FAILURE"));
    let error = session.load_module("kernels.cl").wait().unwrap().function("none").wait().err().unwrap();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    folder.write("odd.clbin", b"this is no program");
    let error = session.load_module("odd.clbin").wait().err().unwrap();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    folder.write("odd.cl", b"\xff\xfe");
    assert!(session.load_module("odd.cl").wait().err().unwrap().message().contains("no text in UTF-8"));
    for empty in ["empty.cl", "empty.clbin"] {
        folder.write(empty, b"");
        let error = session.load_module(empty).wait().err().unwrap();
        assert!(error.kind() == ErrorKind::InvalidArgument && error.message().contains("is empty"), "{error}");
    }
    folder.write("secret", b"secret words\n");
    let path = folder.resolve("secret").unwrap();
    folder.write("nosy.cl", format!("#include \"{}\"\n", path.display()).as_bytes());
    let error = session.load_module("nosy.cl").wait().err().unwrap();
    assert!(error.message().contains("#include names another file") && !error.message().contains("words"), "{error}");
}

#[test]
fn machine_code_is_refused_where_the_rule_has_it_so() {
    let Some(opencl) = opencl() else { return };
    let (session, folder) = session_taking(opencl, |_| false);
    folder.write("odd.clbin", b"this is no program");
    let compile = session.function::<(&str,), bytes::Bytes>("opencl.compile").wait().unwrap();
    let mut errors = vec![session.load_module("odd.clbin").wait().err().unwrap()];
    // Processors are last.
    match session.load_module("kernels.cl").wait() {
        Ok(_) => eprintln!("SKIPPED: opencl:0 is no processor"),
        Err(error) => errors.extend([error, compile.call(("kernels.cl",)).wait().unwrap_err()]),
    }
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
        assert!(error.message().contains("--allow-modules"), "{error}");
    }
}

/// Lets a client do everything but load modules.
#[derive(Debug)]
struct NoModules;

impl AccessControl for NoModules {
    fn check(&self, permission: &Permission<'_>) -> Result<()> {
        match permission {
            Permission::Modules => Err(RpcError::new(ErrorKind::Refused, "no modules for this client")),
            _ => Ok(()),
        }
    }

    fn to_text(&self) -> Option<String> {
        None
    }

    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

#[test]
fn a_compiler_needs_the_right_to_load_modules() {
    let Some(opencl) = opencl() else { return };
    let registry = Registry::new();
    rpc_opencl::register(&registry, |_| true);
    let folder = Arc::new(Folder(tempfile::tempdir().unwrap()));
    folder.write("kernels.cl", include_bytes!("kernels.cl"));
    let session = LocalSession::builder(registry).devices(Devices::new().with(Arc::new(opencl))).workspace(folder);
    let session = Session::new(session.access_control(Arc::new(NoModules)).build());
    let compile = session.function::<(&str,), bytes::Bytes>("opencl.compile").wait().unwrap();
    let error = compile.call(("kernels.cl",)).wait().unwrap_err();
    assert!(error.message().contains("no modules for this client"), "{error}");
}

#[test]
fn objects_of_the_driver_cannot_be_given() {
    let Some(opencl) = opencl() else { return };
    let (session, folder) = session(opencl);
    folder.write(
        "objects.cl",
        b"typedef sampler_t hidden;
        typedef struct { int a; } unnamed;
        struct named { int a; };
        kernel void open(sampler_t how, global int* out) { out[0] = 1; }
        kernel void renamed(hidden how, global int* out) { out[0] = 1; }
        kernel void unclear(unnamed value, global int* out) { out[0] = value.a; }
        kernel void clear(struct named value, global int* out) { out[0] = value.a; }
",
    );
    let module = session.load_module("objects.cl").wait().unwrap();
    for (name, parameter) in
        [("open", "'how': clients cannot give a 'sampler_t'"), ("renamed", "'hidden'"), ("unclear", "'unnamed'")]
    {
        let error = module.function(name).wait().err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.message().contains("parameter 0 ") && error.message().contains(parameter), "{error}");
    }
    let out = ints(&session, 1, None);
    let bytes = Value::Bytes(5_i32.to_le_bytes().to_vec().into());
    module.function("clear").wait().unwrap().call::<()>((1, Value::Null, bytes, &out)).wait().unwrap();
    assert_eq!(read_ints(&session, &out), [5]);
}

#[test]
fn the_code_of_a_module_counts_as_memory_of_its_session() {
    let Some(opencl) = opencl() else { return };
    let registry = Registry::new();
    registry.add_loader(Arc::new(OpenClModules::new(opencl, |_| true)));
    let folder = Arc::new(Folder(tempfile::tempdir().unwrap()));
    let kernel = "kernel void nothing() { }";
    folder.write("plain.cl", kernel.as_bytes());
    folder.write("padded.cl", format!("{}{kernel}", " ".repeat(1_000_000)).as_bytes());
    let session = |max_memory| {
        let limits = rpc_core::SessionLimits { max_memory, ..rpc_core::SessionLimits::default() };
        let devices = Devices::new().with(Arc::new(opencl));
        let session = LocalSession::builder(registry.clone()).devices(devices).workspace(folder.clone());
        Session::new(session.limits(limits).build())
    };
    let two_is_too_much = session(1_500_000);
    let first = two_is_too_much.load_module("padded.cl").wait().unwrap();
    let error = two_is_too_much.load_module("padded.cl").wait().err().unwrap();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded, "{error}");
    drop(first);
    two_is_too_much.load_module("padded.cl").wait().unwrap();
    // There is room for the source, and not for what the driver makes of it.
    let error = session(kernel.len() as u64 + 10).load_module("plain.cl").wait().err().unwrap();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded, "{error}");
}

#[test]
fn a_compiled_program_is_a_module_too() {
    let Some(opencl) = opencl() else { return };
    let (session, folder) = session(opencl);
    let compile = session.function::<(&str,), bytes::Bytes>("opencl.compile").wait().unwrap();
    let binary = compile.call(("kernels.cl",)).wait().unwrap();
    folder.write("kernels.clbin", &binary);
    let module = session.load_module("kernels.clbin").wait().unwrap();
    let fill = module.function("fill").wait().unwrap();
    let tensor = ints(&session, 3, None);
    fill.call::<()>((3, Value::Null, &tensor, -5)).wait().unwrap();
    assert_eq!(read_ints(&session, &tensor), [-5; 3]);
}

#[test]
fn the_device_tells_how_long_its_kernels_took() {
    let Some(opencl) = opencl() else { return };
    let (session, _folder) = session(opencl);
    // A stream of its own, since other tests use the default one.
    let stream = session.create_stream(Device::opencl(0)).wait().unwrap();
    session.set_stream(Device::opencl(0), Some(&stream)).wait().unwrap();
    let (tensor, count_up) = (ints(&session, 64, None), kernel(&session, "count_up"));
    let measured = session.get_function("measured").wait().unwrap();
    let measure = |times: i32| {
        let seconds = measured.call::<Option<f64>>((&count_up, 64, Value::Null, &tensor, times));
        seconds.wait().unwrap()
    };
    // The middle one has no kernel, and so no time.
    let (long, none, short) = (measure(200_000), measure(0), measure(1));
    assert!(long.unwrap() > short.unwrap() && none.is_none(), "{long:?} {none:?} {short:?}");
}

/// Calls a kernel on the lane's stream, lets the default stream and a third one wait for it in a
/// chain, and checks that the last is not done before.
fn waited(context: Context, function: Function, Rest(args): Rest) -> Result<()> {
    let opencl = OpenClDevice::open()?;
    let (side, default, third) =
        (context.stream(Device::opencl(0))?, opencl.default_stream(0)?, opencl.create_stream(0)?);
    let timer = side.start_timer()?.ok_or_else(|| RpcError::internal("nothing else measures"))?;
    let start = Instant::now();
    context.call(&function, args)?;
    default.wait_for(&*side)?;
    third.wait_for(&*default)?;
    third.synchronize()?;
    let elapsed = start.elapsed();
    let kernel = timer.stop()?.ok_or_else(|| RpcError::internal("the kernel has a time"))?;
    // Half, because the clocks of the device and the host may differ.
    assert!(elapsed > kernel / 2, "{elapsed:?} {kernel:?}");
    Ok(())
}

/// Calls a kernel, unless its last argument is 0, and returns the seconds that the device took.
fn measured(context: Context, function: Function, Rest(args): Rest) -> Result<Option<f64>> {
    let stream = context.stream(Device::opencl(0))?;
    let timer = stream.start_timer()?.ok_or_else(|| RpcError::internal("nothing else measures"))?;
    assert!(stream.start_timer()?.is_none(), "there is one measurement at a time");
    if !matches!(args.last(), Some(Value::Int(0))) {
        context.call(&function, args)?;
    }
    let took = timer.stop()?;
    // One that is dropped ends.
    drop(stream.start_timer()?);
    Ok(took.map(|took| took.as_secs_f64()))
}

/// Runs a test again in a process of its own, whose library of OpenCL is made of the source and of
/// the system's library. Returns true in that process.
fn is_in_process_with(source: &str, test: &str) -> bool {
    const CHILD: &str = "RPC_OPENCL_CHILD";
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    if opencl().is_none() {
        return false;
    }
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libOpenCL-other.so");
    let source = format!("{}/tests/opencl/{source}", env!("CARGO_MANIFEST_DIR"));
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-Wl,--no-as-needed", "-o"]).arg(&library);
    match compiler.args([&source, "-l:libOpenCL.so.1", "-ldl"]).output() {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => {
            eprintln!("SKIPPED: no C compiler to make a library with: {error}");
            return false;
        }
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([test, "--exact", "--nocapture"]);
    let output = child.env(CHILD, "1").env("OPENCL_DYLIB_PATH", library).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{out}\n{err}");
    false
}

#[test]
fn a_kernel_that_fails_later_is_reported_once() {
    if !is_in_process_with("failing_kernels.c", "a_kernel_that_fails_later_is_reported_once") {
        return;
    }
    let opencl = opencl().unwrap();
    let (session, _folder) = session(opencl);
    let (tensor, fill) = (ints(&session, 3, None), kernel(&session, "fill"));
    let host = ints(&session, 3, Some("host"));
    let failed = |error: RpcError| assert_eq!(error.application_kind(), Some("CL_OUT_OF_RESOURCES"), "{error}");
    for turn in 0..3 {
        fill.call::<()>((3, Value::Null, &tensor, turn)).wait().unwrap();
        failed(session.stream_wait(Device::opencl(0), None).wait().unwrap_err());
        session.stream_wait(Device::opencl(0), None).wait().unwrap();
        fill.call::<()>((3, Value::Null, &tensor, turn)).wait().unwrap();
        failed(session.copy_from_remote(&tensor).wait().unwrap_err());
        assert_eq!(read_ints(&session, &tensor), [turn; 3]);
        // Such a call waits for its kernel.
        failed(fill.call::<()>((3, Value::Null, &host, turn)).wait().unwrap_err());
        session.stream_wait(Device::opencl(0), None).wait().unwrap();
        // On a stream of its own.
        let stream = session.create_stream(Device::opencl(0)).wait().unwrap();
        session.set_stream(Device::opencl(0), Some(&stream)).wait().unwrap();
        fill.call::<()>((3, Value::Null, &tensor, turn)).wait().unwrap();
        failed(session.stream_wait(Device::opencl(0), Some(&stream)).wait().unwrap_err());
        session.set_stream(Device::opencl(0), None).wait().unwrap();
    }
}

#[test]
fn a_device_that_goes_is_lost_for_every_later_call() {
    if !is_in_process_with("lost_device.c", "a_device_that_goes_is_lost_for_every_later_call") {
        return;
    }
    let opencl = opencl().unwrap();
    let (session, _folder) = session(opencl);
    let (tensor, fill) = (ints(&session, 3, None), kernel(&session, "fill"));
    let lost = |error: RpcError| {
        assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
        assert_eq!(error.application_kind(), Some("CL_DEVICE_NOT_AVAILABLE"), "{error}");
        assert!(error.message().contains("opencl:0 is lost"), "{error}");
    };
    let stream = opencl.default_stream(0).unwrap();
    lost(fill.call::<()>((3, Value::Null, &tensor, 1)).wait().unwrap_err());
    lost(stream.synchronize().unwrap_err());
    lost(session.alloc(Device::opencl(0), DataType::U8, &[1]).wait().unwrap_err());
    lost(session.copy_from_remote(&tensor).wait().unwrap_err());
    lost(session.copy_to_remote(&tensor, vec![0; 12]).wait().unwrap_err());
    lost(session.create_stream(Device::opencl(0)).wait().err().unwrap());
    lost(session.stream_wait(Device::opencl(0), None).wait().unwrap_err());
    lost(session.load_module("kernels.cl").wait().err().unwrap());
    lost(session.attribute(Device::opencl(0), DeviceAttribute::Name).wait().unwrap_err());
    // The session has lost the device, and nothing else.
    drop((tensor, fill));
    session.alloc(Device::cpu(), DataType::U8, &[1]).wait().unwrap();
}

#[test]
fn idle_memory_returns_to_the_driver() {
    let Some(opencl) = opencl() else { return };
    let (session, _folder) = session(opencl);
    let memory = opencl.allocate(0, &AllocRequest::new(777 << 10)).unwrap();
    assert!(memory.as_any().is::<OpenClMemory>());
    // No library finds memory of OpenCL at an address.
    let host = opencl.allocate(0, &in_host_memory(1)).unwrap();
    assert!(memory.device_address().is_none() && host.device_address().is_none() && host.host().is_some());
    drop(memory);
    let trim = session.function::<(i32,), u64>("opencl.trim_memory").wait().unwrap();
    assert!(trim.call((0,)).wait().unwrap() >= 777 << 10);
    let statistics = session.function::<(i32,), std::collections::BTreeMap<String, u64>>("opencl.memory_statistics");
    let statistics = statistics.wait().unwrap().call((0,)).wait().unwrap();
    assert!(statistics["trims"] > 0 && statistics.len() == 6, "{statistics:?}");
}
