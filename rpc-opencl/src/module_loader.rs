//! The loader of modules of kernels, from files of a session's workspace.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::device_api::{OpenClDevice, offered_device};
use crate::kernel::{self, Kernel};
use crate::loaded_program::{LoadedProgram, ProgramCode};
use crate::native_code::{self, NativeCodeRule};
use crate::opened_device::OpenedDevice;
use crate::source;
use rpc_core::dlpack::DeviceType;
use rpc_core::error::{Result, RpcError};
use rpc_core::function::{Context, Function, LoadRequest, LocalValue, Module, ModuleLoader, Object, Signature};
use rpc_core::limits::MemoryLease;
use rpc_core::value::Value;

/// The loader `opencl`, for files `*.cl` (OpenCL C) and `*.clbin` (what a driver has made of one)
/// of the workspace.
///
/// A module's functions are its kernels. A call is
///
/// ```text
/// kernel(global, local, parameters...)
/// ```
///
/// `global` is the number of work-items, a shape of one to three dimensions or an int, and `local`
/// that of a group, of which `global` is a multiple; with null the driver chooses. The parameters
/// of the kernel follow:
///
/// * a tensor, densely packed, of the type that a pointer names (a pointer to `char` or `uchar`, or
///   to a type of the program's own, takes any), and null for a null pointer. One that does not
///   begin with its memory must begin at a multiple of what the device asks for
///   (`CL_DEVICE_MEM_BASE_ADDR_ALIGN`), and is an error otherwise: the whole tensor and an offset
///   do instead;
/// * an int, a float or a bool for a number, if it fits;
/// * bytes, of that size exactly, for a vector or a struct;
/// * the number of bytes, an int, for a pointer to `local` memory.
///
/// Kernels with other parameters are refused, because the driver would take a client's bytes for an
/// object of its own: images, samplers, queues, and everything that the driver does not describe,
/// as of some programs that were loaded from a binary. A value's type must be one of OpenCL's or
/// named with `struct` or `union`, since other names may stand for such an object.
///
/// A source is one file: `#include` and its like are refused. Where the [rule](NativeCodeRule) does
/// not let clients bring machine code, so are binaries, and sources for processors.
///
/// A module is built for the device of the context
/// ([`Context::on_device`](rpc_core::Context::on_device)), or for the loader's, and for others once
/// a kernel runs there. The kernel runs on the device of its first tensor, on which all others must
/// be, or on the one that the module was built for. It is submitted to the stream that the call's
/// lane has set for the device, or to the default one. The call returns null at once, or, if one of
/// the tensors is in host memory (scope `host`), when the kernel is done. Tensors are borrowed for
/// writing, a storage that is given several times only once, because the accesses of a kernel are
/// not known. Errors while it runs are reported by a later call, and certainly by waiting for the
/// stream.
#[derive(Clone, Copy, Debug)]
pub struct OpenClModules {
    opencl: OpenClDevice,
    index: i32,
    native_code: NativeCodeRule,
}

impl OpenClModules {
    /// Name of the loader.
    pub const NAME: &str = "opencl";

    /// Returns true if the name of a file is one for this loader.
    pub fn is_module(path: &Path) -> bool {
        is_source(path) || has_extension(path, "clbin")
    }

    /// Creates the loader for `opencl:0`, with the rule for machine code of clients.
    pub fn new(opencl: OpenClDevice, native_code: NativeCodeRule) -> Self {
        Self::on(opencl, 0, native_code)
    }

    /// Creates the loader for another device: for contexts without one, modules are first built
    /// there, and kernels without tensors run there.
    pub fn on(opencl: OpenClDevice, index: i32, native_code: NativeCodeRule) -> Self {
        Self { opencl, index, native_code }
    }
}

impl ModuleLoader for OpenClModules {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn accepts(&self, path: &str) -> bool {
        Self::is_module(Path::new(path))
    }

    /// # Errors
    ///
    /// Errors in the file, with the log of the compiler.
    fn load(&self, request: &LoadRequest<'_>) -> Result<Arc<dyn Module>> {
        let (code, lease) = read(request)?;
        let chosen = request.context.chosen_device().filter(|device| device.kind == DeviceType::OPENCL);
        let index = match chosen {
            Some(device) => offered_device(request.context, device.index)?.1,
            None => self.index,
        };
        let takes_native_code = (self.native_code)(request.context);
        let built = Mutex::default();
        let programs =
            Programs { opencl: self.opencl, index, code, takes_native_code, built, leases: Mutex::new(vec![lease]) };
        programs.on(index, Some(request.context)).map_err(|error| error.context(format_args!("'{}'", request.path)))?;
        Ok(Arc::new(OpenClModule { name: request.path.to_owned(), programs: Arc::new(programs) }))
    }
}

/// Makes a module of a text in OpenCL C, for functions that a program registers itself. `name` is
/// for messages.
///
/// # Errors
///
/// Errors in the text, with the log of the compiler, and errors of the device.
pub fn module_of_source(opencl: OpenClDevice, index: i32, name: &str, source: &str) -> Result<Arc<dyn Module>> {
    let code = ProgramCode::Source(source.to_owned());
    let built = Mutex::default();
    let programs = Programs { opencl, index, code, takes_native_code: true, built, leases: Mutex::default() };
    programs.on(index, None).map_err(|error| error.context(format_args!("'{name}'")))?;
    Ok(Arc::new(OpenClModule { name: name.to_owned(), programs: Arc::new(programs) }))
}

/// Returns what the driver of a device makes of a source of the workspace.
pub(super) fn compile(
    opencl: OpenClDevice,
    index: i32,
    native_code: NativeCodeRule,
    request: &LoadRequest<'_>,
) -> Result<Vec<u8>> {
    let (code, _lease) = read(request)?;
    let device = opencl.opened(index)?;
    build(device, &code, native_code(request.context))
        .and_then(|program| program.binary())
        .map_err(|error| error.context(format_args!("'{}'", request.path)))
}

/// Builds a program for a device, if it may be.
fn build(device: &'static OpenedDevice, code: &ProgramCode, takes_native_code: bool) -> Result<LoadedProgram> {
    if !takes_native_code {
        native_code::check_is_not_native(device.listed, code)?;
    }
    LoadedProgram::new(device, code)
}

/// Reads a file of the workspace. Returns its code, and the lease that counts that as memory of the
/// session.
fn read(request: &LoadRequest<'_>) -> Result<(ProgramCode, MemoryLease)> {
    let workspace = request.context.workspace();
    let workspace = workspace.ok_or_else(|| RpcError::unsupported("the session has no workspace to load from"))?;
    let path = workspace.resolve(request.path)?;
    let bytes = std::fs::metadata(&path)?.len();
    if bytes > MAX_FILE_BYTES {
        return Err(RpcError::limit("the size of an OpenCL module in bytes", MAX_FILE_BYTES, bytes));
    }
    let lease = request.context.reserve_memory(bytes)?;
    let mut file = Vec::new();
    // A file that grows meanwhile is cut.
    std::fs::File::open(&path)?.take(bytes).read_to_end(&mut file)?;
    let code = if is_source(Path::new(request.path)) {
        let text = String::from_utf8(file);
        let text = text.map_err(|_| RpcError::invalid_argument(format!("'{}' is no text in UTF-8", request.path)))?;
        source::check_names_no_file(&text).map_err(|error| error.context(format_args!("'{}'", request.path)))?;
        ProgramCode::Source(text)
    } else {
        ProgramCode::Binary(file)
    };
    Ok((code, lease))
}

fn is_source(path: &Path) -> bool {
    has_extension(path, "cl")
}

fn has_extension(path: &Path, wanted: &str) -> bool {
    path.extension().and_then(|extension| extension.to_str()) == Some(wanted)
}

/// A file of kernels.
struct OpenClModule {
    name: String,
    programs: Arc<Programs>,
}

impl Module for OpenClModule {
    fn name(&self) -> &str {
        &self.name
    }

    fn function(&self, name: &str) -> Result<Function> {
        let label = format!("kernel '{name}' of '{}'", self.name);
        let kernels =
            KernelOnDevices { programs: self.programs.clone(), name: name.to_owned(), found: Mutex::default() };
        let first = kernels.on(self.programs.index, None).map_err(|error| error.context(&label))?;
        let body = move |context: &Context, args: Vec<LocalValue>, borrows| {
            let launched = kernels.for_args(context, &args).and_then(|kernel| {
                // If the session has no such device, no lane can have set a stream of it.
                let lane = context.stream(kernel.device()).ok();
                kernel.launch(lane.as_ref().and_then(|stream| stream.as_any().downcast_ref()), &args)
            });
            // The borrows end here: the next user's work runs behind the kernel on the stream.
            drop::<Vec<rpc_core::tensor::Borrow>>(borrows);
            launched.map(|()| Value::Null).map_err(|error| error.context(&label))
        };
        Ok(Function::dynamic_exclusive(signature(&first), body))
    }

    fn functions(&self) -> Vec<(String, Signature)> {
        let program = self.programs.on(self.programs.index, None);
        let names = program.as_ref().map_err(RpcError::clone).and_then(|program| program.kernel_names());
        let named = names.unwrap_or_else(|error| {
            tracing::debug!(%error, module = self.name, "the kernels cannot be listed");
            Vec::new()
        });
        let Ok(program) = program else { return Vec::new() };
        let describe = |name: String| Some((signature(&Kernel::find(&program, &name).ok()?), name));
        named.into_iter().filter_map(describe).map(|(signature, name)| (name, signature)).collect()
    }
}

/// A kernel, on every device on which it has been called.
struct KernelOnDevices {
    programs: Arc<Programs>,
    name: String,
    found: Mutex<BTreeMap<i32, Arc<Kernel>>>,
}

impl KernelOnDevices {
    fn for_args(&self, context: &Context, args: &[LocalValue]) -> Result<Arc<Kernel>> {
        let tensor = args.iter().skip(LAUNCH_ARGS).find_map(|arg| match arg {
            Value::Object(Object::Tensor(tensor)) => Some(tensor),
            _ => None,
        });
        match tensor.map(kernel::memory) {
            Some(Ok(memory)) => self.on(memory.device().index, Some(context)),
            // The launch reports the index of the parameter.
            Some(Err(_)) | None => self.on(self.programs.index, Some(context)),
        }
    }

    fn on(&self, index: i32, context: Option<&Context>) -> Result<Arc<Kernel>> {
        if let Some(kernel) = self.found.lock().get(&index) {
            return Ok(kernel.clone());
        }
        let program = self.programs.on(index, context)?;
        let kernel = Arc::new(Kernel::find(&program, &self.name)?);
        self.found.lock().insert(index, kernel.clone());
        Ok(kernel)
    }
}

/// Code of a file, and the programs that were built of it, by device.
struct Programs {
    opencl: OpenClDevice,
    index: i32,
    code: ProgramCode,
    /// True if the code may be machine code for this process.
    takes_native_code: bool,
    built: Mutex<BTreeMap<i32, Arc<LoadedProgram>>>,
    /// Count the code, and what the drivers have made of it, as memory of the session.
    leases: Mutex<Vec<MemoryLease>>,
}

impl Programs {
    /// Returns the program for a device, built if it was not. One that is built for a session
    /// counts as memory of that.
    fn on(&self, index: i32, context: Option<&Context>) -> Result<Arc<LoadedProgram>> {
        // Held during compilation: concurrent callers would only compile the same code.
        let mut built = self.built.lock();
        if let Some(found) = built.get(&index) {
            return Ok(found.clone());
        }
        let found = Arc::new(build(self.opencl.opened(index)?, &self.code, self.takes_native_code)?);
        if let Some(context) = context {
            self.leases.lock().push(context.reserve_memory(found.size())?);
        }
        built.insert(index, found.clone());
        Ok(found)
    }
}

fn signature(kernel: &Kernel) -> Signature {
    let mut params = vec!["shape".into(), "shape or null".into()];
    params.extend(kernel.parameters.iter().map(|parameter| parameter.to_string().into()));
    Signature { params, returns: "null".into() }
}

/// Number of the arguments in front of a kernel's own: the global and the local size.
const LAUNCH_ARGS: usize = 2;

/// Largest file that is loaded, in bytes.
const MAX_FILE_BYTES: u64 = 64 << 20;
