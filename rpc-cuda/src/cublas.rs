//! cuBLAS, if it is installed: loaded at run time, like the driver.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;
use parking_lot::Mutex;

use crate::driver::Driver;
use crate::handle::Handle;
use crate::libraries;
use crate::opened_gpu::OpenedGpu;
use crate::stream::CudaStream;
use rpc_core::error::{ErrorKind, Result, RpcError};

type Create = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
type SetStream = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;
type StatusString = unsafe extern "C" fn(c_int) -> *const c_char;
type GemmEx = unsafe extern "C" fn(
    handle: *mut c_void,
    a_operation: c_int,
    b_operation: c_int,
    rows: c_int,
    columns: c_int,
    depth: c_int,
    alpha: *const c_void,
    a: *const c_void,
    a_type: c_int,
    a_stride: c_int,
    b: *const c_void,
    b_type: c_int,
    b_stride: c_int,
    beta: *const c_void,
    out: *mut c_void,
    out_type: c_int,
    out_stride: c_int,
    compute_type: c_int,
    algorithm: c_int,
) -> c_int;

/// The loaded library.
pub(super) struct Cublas {
    create: Create,
    set_stream: SetStream,
    gemm: GemmEx,
    /// Available since CUDA 11.4.
    status_string: Option<StatusString>,
    /// cuBLAS handles by device. Each is used by one thread at a time, and never destroyed.
    handles: Mutex<BTreeMap<i32, Handle<c_void>>>,
    /// Keeps the functions loaded.
    _library: Library,
}

/// Product of two densely packed row-major matrices: `rows × depth` by `depth × columns`.
pub(super) struct Product {
    pub(super) rows: c_int,
    pub(super) columns: c_int,
    /// Not 0, nor are the other dimensions.
    pub(super) depth: c_int,
    /// A `cudaDataType`.
    pub(super) data_type: c_int,
    /// Addresses on the device.
    pub(super) a: u64,
    pub(super) b: u64,
    pub(super) out: u64,
}

impl Cublas {
    /// Returns the library of this process, loaded at the first call.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] if it is not installed. The outcome of the first call is kept.
    pub(super) fn get(driver: &Driver) -> Result<&'static Self> {
        static CUBLAS: OnceLock<Result<Cublas>> = OnceLock::new();
        CUBLAS.get_or_init(|| Self::find(driver)).as_ref().map_err(RpcError::clone)
    }

    fn find(driver: &Driver) -> Result<Self> {
        let library = libraries::load(&libraries::cublas(newest_version(driver)))
            .map_err(|error| RpcError::unsupported(format!("matrix products need cuBLAS: {error}")))?;
        let missing = |_| RpcError::unsupported("the installed cuBLAS lacks required functions");
        // SAFETY: the types are those of the functions, which keep them under these names.
        unsafe {
            Ok(Self {
                create: *library.get(b"cublasCreate_v2").map_err(missing)?,
                set_stream: *library.get(b"cublasSetStream_v2").map_err(missing)?,
                gemm: *library.get(b"cublasGemmEx").map_err(missing)?,
                status_string: library.get(b"cublasGetStatusString").ok().map(|found| *found),
                handles: Mutex::default(),
                _library: library,
            })
        }
    }

    /// Submits the product to a stream of the GPU, accumulating in single precision.
    ///
    /// # Safety
    ///
    /// The addresses are those of matrices of these shapes on the GPU. Until the stream
    /// has executed the product, nothing else accesses `out` or writes to the others.
    pub(super) unsafe fn submit(&self, gpu: &OpenedGpu, stream: &CudaStream, product: &Product) -> Result<()> {
        let context = stream.context();
        context.enter()?;
        let mut handles = self.handles.lock();
        let handle = match handles.get(&context.gpu.index) {
            Some(handle) => *handle,
            None => {
                let handle = context.with_room(|| {
                    let mut handle = ptr::null_mut();
                    // SAFETY: there is room for the handle, and the GPU's context is current.
                    self.check(gpu, "cublasCreate", unsafe { (self.create)(&raw mut handle) })?;
                    Ok(Handle(handle))
                })?;
                handles.insert(context.gpu.index, handle);
                handle
            }
        };
        // SAFETY: both are alive, and the lock makes the use of the handle exclusive.
        self.check(gpu, "cublasSetStream", unsafe { (self.set_stream)(handle.0, stream.raw()) })?;
        let (one, zero) = (1.0_f32, 0.0_f32);
        let address = |address: u64| ptr::with_exposed_provenance_mut::<c_void>(address as usize);
        let Product { rows, columns, depth, data_type, a, b, out } = *product;
        // cuBLAS is column-major, and so sees each matrix transposed: out' = b' a'.
        context.with_room(|| {
            // SAFETY: the caller's promise; the factors are read before the call returns, which is
            // cuBLAS's default.
            let status = unsafe {
                (self.gemm)(
                    handle.0,
                    NOT_TRANSPOSED,
                    NOT_TRANSPOSED,
                    columns,
                    rows,
                    depth,
                    (&raw const one).cast(),
                    address(b),
                    data_type,
                    columns,
                    address(a),
                    data_type,
                    depth,
                    (&raw const zero).cast(),
                    address(out),
                    data_type,
                    columns,
                    COMPUTE_SINGLE,
                    DEFAULT_ALGORITHM,
                )
            };
            self.check(gpu, "cublasGemmEx", status)
        })
    }

    fn check(&self, gpu: &OpenedGpu, function: &str, status: c_int) -> Result<()> {
        let kind = match status {
            0 => return Ok(()),
            // CUBLAS_STATUS_ALLOC_FAILED.
            3 => ErrorKind::OutOfMemory,
            // CUBLAS_STATUS_ARCH_MISMATCH and NOT_SUPPORTED.
            8 | 15 => ErrorKind::Unsupported,
            // An error of the device itself, if there is one, is more specific.
            _ => {
                gpu.synchronize()?;
                ErrorKind::Application
            }
        };
        let text = self.status_string.map(|text| {
            // SAFETY: the function takes any number, and returns a constant that ends with a zero.
            unsafe { CStr::from_ptr(text(status)) }.to_string_lossy()
        });
        let (device, text) = (gpu.context.gpu.as_device(), text.unwrap_or("cuBLAS failed".into()));
        Err(RpcError::new(kind, format!("{device}: {text} (status {status} of {function})")))
    }
}

/// Returns the newest major version of CUDA that the driver supports.
fn newest_version(driver: &Driver) -> c_int {
    let mut version = 0;
    // SAFETY: there is room for the number, which stays 0 on failure.
    _ = unsafe { driver.driver_get_version(&raw mut version) };
    version / 1000
}

/// `CUBLAS_OP_N`.
const NOT_TRANSPOSED: c_int = 0;

/// `CUBLAS_COMPUTE_32F`: full single precision, no TensorFloat-32.
const COMPUTE_SINGLE: c_int = 68;

/// `CUBLAS_GEMM_DEFAULT`.
const DEFAULT_ALGORITHM: c_int = -1;
