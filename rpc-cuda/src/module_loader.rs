//! Modules of kernels, loaded from files of a session's workspace.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::fmt;
use std::path::Path;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{
    CUfunc_st, CUfunction_attribute_enum as Attribute, CUjit_option_enum as Jit, CUmod_st, cudaError_enum as Code,
};
use parking_lot::Mutex;

use crate::arguments;
use crate::device::CudaDevice;
use crate::event::Event;
use crate::gpu::{Gpu, Handle, lock};
use crate::kernel::Kernel;
use crate::module_image::Image;
use rpc_core::error::{Result, RpcError};
use rpc_core::function::{Context, Function, LocalValue, Module, Object, Signature};
use rpc_core::function::{LoadRequest, ModuleLoader};
use rpc_core::value::Value;

/// The loader `cuda`, for files `*.ptx`, `*.cubin` and `*.fatbin` of the workspace.
///
/// A module's functions are its kernels, by their names in the file (of `extern "C"` ones those in
/// the source). A call is
///
/// ```text
/// kernel(grid, block, shared_bytes, parameters...)
/// ```
///
/// `grid` and `block` are shapes of one to three dimensions, or ints, and `shared_bytes` is the
/// dynamic shared memory of a block. The parameters of the kernel follow:
///
/// * a tensor on a CUDA device, densely packed, is the address of its first element, and null is a
///   null pointer;
/// * an int has the width of the parameter, 1, 2, 4 or 8 bytes, and must fit it, signed or
///   unsigned;
/// * a float is a `float` or a `double`, by the width: write `1.0` and not `1`, which is an int.
///   Half precision and bfloat16 are given as the int of their bits;
/// * a bool is 0 or 1 in the width of the parameter;
/// * bytes are a struct by value, of that size exactly.
///
/// Drivers since CUDA 12.4 report the number and widths of the parameters, which are then checked.
/// With older ones an int and a float take 8 bytes, a bool 1, nothing is checked, and missing
/// parameters read as zeros.
///
/// The kernel runs on the device of its first tensor, on which all others must be, or on the
/// loader's. It is submitted to the stream that the call's lane has set for the device, or to the
/// default one. The call returns null at once, or, if one of the tensors is in pinned memory, when
/// the kernel is done. Tensors are borrowed for writing, a storage that is given several times only
/// once, because the accesses of a kernel are not known. The kernel may also access memory beyond
/// them, as any code on the device may. Errors while it runs are reported by a later call, and
/// certainly by waiting for the stream.
#[derive(Clone, Copy, Debug)]
pub struct CudaModules {
    cuda: CudaDevice,
    index: i32,
}

impl CudaModules {
    /// Name of the loader.
    pub const NAME: &str = "cuda";

    /// Returns true if the name of a file is one for this loader.
    pub fn is_module(path: &Path) -> bool {
        let extension = path.extension().and_then(|extension| extension.to_str());
        extension.is_some_and(|extension| EXTENSIONS.contains(&extension))
    }

    /// Creates the loader for `cuda:0`.
    pub fn new(cuda: CudaDevice) -> Self {
        Self::on(cuda, 0)
    }

    /// Creates the loader for another device: modules are first loaded there, and kernels without
    /// tensors run there.
    pub fn on(cuda: CudaDevice, index: i32) -> Self {
        Self { cuda, index }
    }
}

impl ModuleLoader for CudaModules {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn accepts(&self, path: &str) -> bool {
        Self::is_module(Path::new(path))
    }

    /// # Errors
    ///
    /// Errors in the file, with the messages of CUDA's compiler for PTX.
    fn load(&self, request: &LoadRequest<'_>) -> Result<Arc<dyn Module>> {
        let workspace = request.context.workspace();
        let workspace = workspace.ok_or_else(|| RpcError::unsupported("the session has no workspace to load from"))?;
        let path = workspace.resolve(request.path)?;
        let bytes = std::fs::metadata(&path)?.len();
        if bytes > MAX_IMAGE_BYTES {
            return Err(RpcError::limit("the size of a CUDA module in bytes", MAX_IMAGE_BYTES, bytes));
        }
        let in_file = |error: RpcError| error.context(format_args!("'{}'", request.path));
        let image = Image::new(std::fs::read(&path)?).map_err(in_file)?;
        let code = Source { cuda: self.cuda, index: self.index, image, loaded: Mutex::default() };
        code.on(self.index).map_err(in_file)?;
        Ok(Arc::new(CudaModule { name: request.path.to_owned(), code: Arc::new(code) }))
    }
}

/// A file of kernels.
struct CudaModule {
    name: String,
    code: Arc<Source>,
}

impl Module for CudaModule {
    fn name(&self) -> &str {
        &self.name
    }

    fn function(&self, name: &str) -> Result<Function> {
        let label = format!("kernel '{name}' of '{}'", self.name);
        let kernels = Kernels { code: self.code.clone(), name: name.to_owned(), found: Mutex::default() };
        let first = kernels.on(self.code.index).map_err(|error| error.context(&label))?;
        let body = move |context: &Context, args: Vec<LocalValue>, borrows| {
            let launched = kernels.for_args(&args).and_then(|kernel| {
                // If the session has no such device, no lane can have set a stream of it.
                let lane = context.stream(kernel.gpu().as_device()).ok();
                kernel.launch(lane.as_ref().and_then(|stream| stream.as_any().downcast_ref()), &args)
            });
            // The borrows end here: the next user's work runs behind the kernel on the stream.
            drop::<Vec<rpc_core::tensor::Borrow>>(borrows);
            launched.map(|()| Value::Null).map_err(|error| error.context(&label))
        };
        Ok(Function::dynamic_exclusive(signature(first.sizes.as_deref()), body))
    }

    /// Returns nothing with drivers older than CUDA 12.4, which cannot list functions.
    fn functions(&self) -> Vec<(String, Signature)> {
        let names = self.code.on(self.code.index).and_then(|loaded| loaded.names());
        let named = names.unwrap_or_else(|error| {
            tracing::debug!(%error, module = self.name, "the kernels cannot be listed");
            Vec::new()
        });
        let describe = |name: String| {
            let loaded = self.code.on(self.code.index).ok()?;
            let kernel = Kernel::find(loaded.gpu, &loaded, &name).ok()?;
            Some((name, signature(kernel.sizes.as_deref())))
        };
        named.into_iter().filter_map(describe).collect()
    }
}

/// A kernel, on every device on which it has been called.
struct Kernels {
    code: Arc<Source>,
    name: String,
    found: Mutex<BTreeMap<i32, Arc<Kernel>>>,
}

impl Kernels {
    fn for_args(&self, args: &[LocalValue]) -> Result<Arc<Kernel>> {
        let tensor = args.iter().skip(LAUNCH_ARGS).find_map(|arg| match arg {
            Value::Object(Object::Tensor(tensor)) => Some(tensor),
            _ => None,
        });
        match tensor.map(arguments::memory) {
            Some(Ok(memory)) => self.on(memory.device().index),
            // The launch reports the index of the parameter.
            Some(Err(_)) | None => self.on(self.code.index),
        }
    }

    fn on(&self, index: i32) -> Result<Arc<Kernel>> {
        if let Some(kernel) = lock(&self.found).get(&index) {
            return Ok(kernel.clone());
        }
        let loaded = self.code.on(index)?;
        let kernel = Arc::new(Kernel::find(loaded.gpu, &loaded, &self.name)?);
        lock(&self.found).insert(index, kernel.clone());
        Ok(kernel)
    }
}

/// Code of a file, and the devices that have loaded it.
struct Source {
    cuda: CudaDevice,
    index: i32,
    image: Image,
    loaded: Mutex<BTreeMap<i32, Arc<Loaded>>>,
}

impl Source {
    fn on(&self, index: i32) -> Result<Arc<Loaded>> {
        // Held during compilation: concurrent callers would only compile the same code.
        let mut loaded = lock(&self.loaded);
        if let Some(found) = loaded.get(&index) {
            return Ok(found.clone());
        }
        let found = Arc::new(Loaded::new(self.cuda.gpu(index)?, &self.image)?);
        loaded.insert(index, found.clone());
        Ok(found)
    }
}

/// A module on one GPU. It is unloaded some time after it is dropped, when the kernels that were
/// started before are done.
pub(super) struct Loaded {
    gpu: &'static Gpu,
    pub(super) raw: Handle<CUmod_st>,
    /// Dynamic shared memory that each function has been allowed, in bytes, by the function's
    /// handle. Only grows: the driver keeps one limit for a function, and a lower one would fail
    /// the launches of others.
    allowed_shared: Mutex<BTreeMap<usize, c_uint>>,
}

impl Loaded {
    fn new(gpu: &'static Gpu, image: &Image) -> Result<Self> {
        let opened = gpu.enter()?;
        opened.retired.unload(gpu);
        opened.with_room(gpu, || Self::load(gpu, image))
    }

    fn load(gpu: &'static Gpu, image: &Image) -> Result<Self> {
        let mut log = vec![0_u8; LOG_BYTES];
        let mut options = [Jit::CU_JIT_ERROR_LOG_BUFFER as u32, Jit::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES as u32];
        let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), ptr::without_provenance_mut(LOG_BYTES - 1)];
        let mut raw = ptr::null_mut();
        // SAFETY: the image is as long as its headers claim, and ends with a zero; the options
        // match the values, and the log buffer's size is given without its last zero.
        let outcome = unsafe {
            let (options, values) = (options.as_mut_ptr(), values.as_mut_ptr());
            gpu.driver.module_load_data(&raw mut raw, image.bytes().as_ptr().cast(), 2, options, values)
        };
        gpu.check(outcome).map_err(|error| {
            let log = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
            let log = log.trim();
            if log.is_empty() { error } else { error.context(log) }
        })?;
        Ok(Self { gpu, raw: Handle(raw), allowed_shared: Mutex::default() })
    }

    /// Allows a function of the module this much dynamic shared memory. More than 48 KiB, including
    /// the kernel's static shared memory, must be allowed before the launch. The caller has entered
    /// the GPU.
    pub(super) fn allow_shared(&self, function: Handle<CUfunc_st>, bytes: c_uint) -> Result<()> {
        // Held until the driver has been called, so that the recorded value never exceeds the
        // driver's limit, and a concurrent launch never sees a lower one.
        let mut allowed = lock(&self.allowed_shared);
        let most = allowed.entry(function.0.addr()).or_default();
        if bytes > *most {
            let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as u32;
            // SAFETY: the function belongs to this module, which is loaded, and a value that is too
            // large is an error.
            let outcome = unsafe { self.gpu.driver.func_set_attribute(function.0, attribute, bytes as c_int) };
            self.gpu
                .check(outcome)
                .map_err(|error| error.context(format_args!("{bytes} bytes of shared memory are above the limit")))?;
            *most = bytes;
        }
        Ok(())
    }

    fn names(&self) -> Result<Vec<String>> {
        self.gpu.enter()?;
        let mut count = 0;
        // SAFETY: there is room for the number, and the module is loaded.
        match unsafe { self.gpu.driver.module_get_function_count(&raw mut count, self.raw.0) } {
            Some(outcome) => self.gpu.check(outcome)?,
            None => return Ok(Vec::new()),
        }
        let mut functions = vec![ptr::null_mut(); count as usize];
        // SAFETY: there is room for as many handles.
        match unsafe { self.gpu.driver.module_enumerate_functions(functions.as_mut_ptr(), count, self.raw.0) } {
            Some(outcome) => self.gpu.check(outcome)?,
            None => return Ok(Vec::new()),
        }
        let name = |function| {
            let mut name = ptr::null();
            // SAFETY: there is room for the pointer, and the function belongs to the module.
            let outcome = unsafe { self.gpu.driver.func_get_name(&raw mut name, function) }?;
            if !outcome.is(Code::CUDA_SUCCESS) || name.is_null() {
                return None;
            }
            // SAFETY: on success it is a text that lives as long as the module.
            Some(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
        };
        Ok(functions.into_iter().filter_map(name).collect())
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        let Ok(visit) = self.gpu.visit() else { return };
        let opened = visit.opened;
        // Kernels run on any of the streams.
        let fences = opened.streams.fences(self.gpu, opened).and_then(|mut fences| {
            fences.push(Event::record(self.gpu, opened, &opened.default_stream)?);
            Ok(fences)
        });
        match fences {
            Ok(fences) => lock(&opened.retired.0).push((fences, self.raw)),
            Err(error) => tracing::warn!(%error, "a module stays loaded"),
        }
    }
}

/// Modules that were dropped, with the events behind which all of their kernels are done.
#[derive(Default)]
pub(super) struct Retired(Mutex<Vec<(Vec<Event>, Handle<CUmod_st>)>>);

impl Retired {
    /// Unloads the modules whose kernels are done. The caller has entered the GPU.
    fn unload(&self, gpu: &'static Gpu) {
        lock(&self.0).retain(|(fences, module)| {
            if !fences.iter().all(|event| matches!(event.is_done(), Ok(true))) {
                return true;
            }
            // SAFETY: the module is no longer in use, and its kernels are done.
            if let Err(error) = gpu.check(unsafe { gpu.driver.module_unload(module.0) }) {
                tracing::warn!(%error, "a module was not unloaded");
            }
            false
        });
    }
}

impl fmt::Debug for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loaded").field("device", &format_args!("{}", self.gpu.as_device())).finish_non_exhaustive()
    }
}

fn signature(sizes: Option<&[usize]>) -> Signature {
    let mut params = vec!["shape".into(), "shape".into(), "int".into()];
    match sizes {
        Some(sizes) => params.extend(sizes.iter().map(|size| format!("{size} bytes").into())),
        None => params.push("...".into()),
    }
    Signature { params, returns: "null".into() }
}

/// Number of the arguments in front of a kernel's own: grid, block and shared memory.
const LAUNCH_ARGS: usize = 3;

const EXTENSIONS: [&str; 3] = ["ptx", "cubin", "fatbin"];

/// Largest file that is loaded, in bytes. The largest known ones have some hundred MiB.
const MAX_IMAGE_BYTES: u64 = 1 << 30;

/// Size of the compiler's log in bytes: enough for the first errors, which matter.
const LOG_BYTES: usize = 8 << 10;
