//! The loader of modules of kernels, from files of a session's workspace.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::arguments;
use crate::device_api::CudaDevice;
use crate::kernel::Kernel;
use crate::loaded_module::LoadedModule;
use crate::module_image::ModuleImage;
use rpc_core::dlpack::DeviceType;
use rpc_core::error::{Result, RpcError};
use rpc_core::function::{Context, Function, LoadRequest, LocalValue, Module, ModuleLoader, Object, Signature};
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
/// With older ones they are taken from the module if that is PTX. For the kernels of others an int
/// takes 8 bytes there and a bool 1, a float is refused (it can be given as bytes), nothing is
/// checked, and missing parameters read as zeros.
///
/// A module is loaded on the device of the context
/// ([`Context::on_device`](rpc_core::Context::on_device)), or on the loader's, and on others once a
/// kernel runs there. The kernel runs on the device of its first tensor, on which all others must
/// be, or on the one that the module was loaded on. It is submitted to the stream that the call's
/// lane has set for the device, or to the default one. The call returns null at once, or, if one of
/// the tensors is in pinned memory, when the kernel is done. Tensors are borrowed for writing, a
/// storage that is given several times only once, because the accesses of a kernel are not known.
/// The kernel may also access memory beyond them, as any code on the device may. Errors while it
/// runs are reported by a later call, and certainly by waiting for the stream.
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

    /// Creates the loader for another device: for contexts without one, modules are first loaded
    /// there, and kernels without tensors run there.
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
        let image = ModuleImage::new(std::fs::read(&path)?).map_err(in_file)?;
        let chosen = request.context.chosen_device().filter(|device| device.kind == DeviceType::CUDA);
        let index = chosen.map_or(self.index, |device| device.index);
        let code = ModuleSource { cuda: self.cuda, index, image, loaded: Mutex::default() };
        code.on(index).map_err(in_file)?;
        Ok(Arc::new(CudaModule { name: request.path.to_owned(), code: Arc::new(code) }))
    }
}

/// A file of kernels.
struct CudaModule {
    name: String,
    code: Arc<ModuleSource>,
}

impl Module for CudaModule {
    fn name(&self) -> &str {
        &self.name
    }

    fn function(&self, name: &str) -> Result<Function> {
        let label = format!("kernel '{name}' of '{}'", self.name);
        let kernels = KernelOnDevices { code: self.code.clone(), name: name.to_owned(), found: Mutex::default() };
        let first = kernels.on(self.code.index).map_err(|error| error.context(&label))?;
        let body = move |context: &Context, args: Vec<LocalValue>, borrows| {
            let launched = kernels.for_args(&args).and_then(|kernel| {
                // If the session has no such device, no lane can have set a stream of it.
                let lane = context.stream(kernel.device()).ok();
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
        let names = self.code.on(self.code.index).and_then(|loaded| loaded.function_names());
        let named = names.unwrap_or_else(|error| {
            tracing::debug!(%error, module = self.name, "the kernels cannot be listed");
            Vec::new()
        });
        let describe = |name: String| {
            let loaded = self.code.on(self.code.index).ok()?;
            let kernel = Kernel::find(&loaded, &name, &self.code.image).ok()?;
            Some((name, signature(kernel.sizes.as_deref())))
        };
        named.into_iter().filter_map(describe).collect()
    }
}

/// A kernel, on every device on which it has been called.
struct KernelOnDevices {
    code: Arc<ModuleSource>,
    name: String,
    found: Mutex<BTreeMap<i32, Arc<Kernel>>>,
}

impl KernelOnDevices {
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
        if let Some(kernel) = self.found.lock().get(&index) {
            return Ok(kernel.clone());
        }
        let loaded = self.code.on(index)?;
        let kernel = Arc::new(Kernel::find(&loaded, &self.name, &self.code.image)?);
        self.found.lock().insert(index, kernel.clone());
        Ok(kernel)
    }
}

/// Code of a file, and the devices that have loaded it.
struct ModuleSource {
    cuda: CudaDevice,
    index: i32,
    image: ModuleImage,
    loaded: Mutex<BTreeMap<i32, Arc<LoadedModule>>>,
}

impl ModuleSource {
    fn on(&self, index: i32) -> Result<Arc<LoadedModule>> {
        // Held during compilation: concurrent callers would only compile the same code.
        let mut loaded = self.loaded.lock();
        if let Some(found) = loaded.get(&index) {
            return Ok(found.clone());
        }
        let found = Arc::new(LoadedModule::new(self.cuda.opened(index)?, &self.image)?);
        loaded.insert(index, found.clone());
        Ok(found)
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
