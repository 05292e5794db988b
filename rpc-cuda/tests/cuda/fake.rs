//! The fake driver for tests without a GPU: compiled when they start, loaded by them in a process
//! of their own.
//!
//! A process loads the driver once, and a lost device stays lost. So each test runs itself again as
//! a child, with `LD_LIBRARY_PATH` naming the folder in which the loader finds the fake driver.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use libloading::Library;

/// Environment variable that is set in the child: the folder of the fake driver.
const CHILD: &str = "RPC_CORE_FAKE_DRIVER";

/// Define: without the fake cuBLAS.
pub(crate) const WITHOUT_CUBLAS: &str = "-DWITHOUT_CUBLAS";

/// Define: with the toolkit's stub library for linkers beside the driver, which no program should
/// load.
pub(crate) const WITH_A_STUB: &str = "-DWITH_A_STUB";

/// Define: with the fake management library.
pub(crate) const WITH_NVML: &str = "-DWITH_NVML";

/// The fake driver's functions for tests.
pub(crate) struct Fake(Library);

/// Runs `body` in a process that has the fake driver, built with `defines`, with these environment
/// variables. Prints a note and passes if there is no C compiler. `test` is the name of the calling
/// test.
pub(crate) fn with_driver(test: &str, defines: &[&str], variables: &[(&str, &str)], body: impl FnOnce(&Fake)) {
    if let Some(folder) = std::env::var_os(CHILD) {
        // SAFETY: the library is the fake one, which has no initialisers.
        let library = unsafe { Library::new(Path::new(&folder).join("libcuda.so.1")) }.unwrap();
        let fake = Fake(library);
        body(&fake);
        assert_eq!(fake.count("fake_violations"), 0, "the fake driver saw its rules broken; see above");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    if defines.contains(&WITH_A_STUB) {
        let source = folder.path().join("stub.c");
        std::fs::write(&source, "int nothing;").unwrap();
        // Without a compiler the driver reports that below.
        _ = compile(source.to_str().unwrap(), &folder.path().join("libcuda.so"), &[]);
    }
    for (source, library) in
        [("fake_driver.c", "libcuda.so.1"), ("fake_cublas.c", "libcublas.so.12"), ("fake_nvml.c", "libnvidia-ml.so.1")]
    {
        if library.starts_with("libcublas") && defines.contains(&WITHOUT_CUBLAS) {
            continue;
        }
        if library.starts_with("libnvidia-ml") && !defines.contains(&WITH_NVML) {
            continue;
        }
        if let Err(error) = compile(source, &folder.path().join(library), defines) {
            eprintln!("SKIPPED: no C compiler to make the fake driver with: {error}");
            return;
        }
    }
    let mut path = folder.path().as_os_str().to_owned();
    if let Some(rest) = std::env::var_os("LD_LIBRARY_PATH") {
        path.push(":");
        path.push(rest);
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([test, "--exact", "--nocapture"]).env(CHILD, folder.path()).env("LD_LIBRARY_PATH", path);
    // Libraries of this machine must not come first.
    child.env_remove("RPC_CUDA_DRIVER_LIBRARY").env_remove("RPC_CUDA_BLAS_LIBRARY");
    child.env_remove("RPC_CUDA_NVML_LIBRARY");
    let output = child.envs(variables.iter().copied()).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{out}\n{err}");
}

/// A library, once it has been compiled. Those who need the same one wait for each other.
type CompiledLibrary = Arc<Mutex<Option<Vec<u8>>>>;

/// The libraries that this process has compiled, by source and defines.
static COMPILED: Mutex<BTreeMap<(String, Vec<String>), CompiledLibrary>> = Mutex::new(BTreeMap::new());

/// Writes one of the fake libraries to a file. It is compiled by the first test that needs it.
///
/// # Errors
///
/// No C compiler was found.
pub(crate) fn compile(source: &str, to: &Path, defines: &[&str]) -> std::io::Result<()> {
    let key = (source.to_owned(), defines.iter().map(|define| (*define).to_owned()).collect());
    let library = COMPILED.lock().unwrap().entry(key).or_default().clone();
    let mut library = library.lock().unwrap();
    if let Some(bytes) = &*library {
        return std::fs::write(to, bytes);
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda").join(source);
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-fvisibility=hidden", "-o"]).arg(to).args(defines).arg(source);
    let output = compiler.args(["-lpthread", "-ldl"]).output()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    *library = Some(std::fs::read(to)?);
    Ok(())
}

impl Fake {
    /// Runs all submitted work.
    pub(crate) fn run_all(&self) {
        self.count("fake_run_all");
    }

    /// Returns a counter of one of the functions for tests.
    pub(crate) fn count(&self, name: &str) -> u64 {
        // SAFETY: all functions for tests have this type.
        unsafe { self.0.get::<unsafe extern "C" fn() -> u64>(name.as_bytes()).unwrap()() }
    }

    /// Makes everything on a device fail from now on.
    pub(crate) fn fail(&self, device: i32, code: i32) {
        // SAFETY: the type is that of the function.
        unsafe { self.0.get::<unsafe extern "C" fn(i32, i32)>(b"fake_fail").unwrap()(device, code) }
    }

    /// Makes the next call fail, and no other.
    pub(crate) fn fail_next(&self, code: i32) {
        // SAFETY: the type is that of the function.
        unsafe { self.0.get::<unsafe extern "C" fn(i32)>(b"fake_fail_next").unwrap()(code) }
    }

    /// Returns the number of pending pieces of work in a stream.
    pub(crate) fn pending(&self, stream: &rpc_cuda::CudaStream) -> u64 {
        // SAFETY: the type is that of the function, and the stream is alive.
        unsafe {
            self.0.get::<unsafe extern "C" fn(*mut std::ffi::c_void) -> u64>(b"fake_pending").unwrap()(stream.raw())
        }
    }

    /// Fills device memory on a stream, as another library would. The stream's context is current.
    pub(crate) fn fill(&self, memory: &rpc_cuda::CudaMemory, value: u8, len: usize, stream: &rpc_cuda::CudaStream) {
        type Fill = unsafe extern "C" fn(u64, u8, usize, *mut std::ffi::c_void) -> i32;
        let to = memory.device_pointer().addr() as u64;
        // SAFETY: the type is that of the function, and the stream is alive.
        let code = unsafe { self.0.get::<Fill>(b"cuMemsetD8Async").unwrap()(to, value, len, stream.raw()) };
        assert_eq!(code, 0);
    }

    /// Returns the context of the calling thread.
    pub(crate) fn current_context(&self) -> *mut std::ffi::c_void {
        type Get = unsafe extern "C" fn(*mut *mut std::ffi::c_void) -> i32;
        let mut context = std::ptr::null_mut();
        // SAFETY: the type is that of the function, and there is room for the handle.
        let code = unsafe { self.0.get::<Get>(b"cuCtxGetCurrent").unwrap()(&raw mut context) };
        assert_eq!(code, 0);
        context
    }

    /// Lets one GPU access the memory of another, as another library would.
    pub(crate) fn enable_peer_access(&self, cuda: &rpc_cuda::CudaDevice, from: i32, to: i32) {
        type Enable = unsafe extern "C" fn(*mut std::ffi::c_void, u32) -> i32;
        let peer = cuda.context(to).unwrap();
        cuda.context(from).unwrap();
        // SAFETY: the type is that of the function, and both contexts are open.
        assert_eq!(unsafe { self.0.get::<Enable>(b"cuCtxEnablePeerAccess").unwrap()(peer, 0) }, 0);
    }

    /// Frees memory of another library on the first GPU, during which the driver's lock is held
    /// until the flag is set.
    pub(crate) fn free_under_the_lock(&self, cuda: &rpc_cuda::CudaDevice, until: &'static AtomicBool) {
        type Hold = unsafe extern "C" fn(Work, *mut std::ffi::c_void);
        let mut address = 0_u64;
        cuda.context(0).unwrap();
        // SAFETY: the types are those of the functions, there is room for the address, and the flag
        // lives for ever.
        let codes = unsafe {
            let allocated = self.0.get::<unsafe extern "C" fn(*mut u64, usize) -> i32>(b"cuMemAlloc_v2").unwrap()(
                &raw mut address,
                4096,
            );
            self.0.get::<Hold>(b"fake_hold_free").unwrap()(is_set, std::ptr::from_ref(until).cast_mut().cast());
            [allocated, self.0.get::<unsafe extern "C" fn(u64) -> i32>(b"cuMemFree_v2").unwrap()(address)]
        };
        assert_eq!(codes, [0, 0]);
    }

    /// Submits work to a stream that completes when the flag is set.
    pub(crate) fn hold(&self, stream: *mut std::ffi::c_void, until: &'static AtomicBool) {
        type Submit = unsafe extern "C" fn(*mut std::ffi::c_void, Work, *mut std::ffi::c_void);
        let flag = std::ptr::from_ref(until).cast_mut().cast();
        // SAFETY: the type is that of the function, and the stream is alive.
        unsafe { self.0.get::<Submit>(b"fake_submit_other").unwrap()(stream, is_set, flag) }
    }
}

/// Function of a test that the fake driver calls.
type Work = unsafe extern "C" fn(*mut std::ffi::c_void) -> i32;

/// # Safety
///
/// `flag` is an [`AtomicBool`] that lives for ever.
unsafe extern "C" fn is_set(flag: *mut std::ffi::c_void) -> i32 {
    // SAFETY: the caller's promise.
    unsafe { &*flag.cast::<AtomicBool>() }.load(Ordering::SeqCst).into()
}
