//! The loader of modules, and of libraries of functions.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::api::Api;
use super::module::FfiModule;
use super::object::Ref;
use super::options::TvmFfiOptions;
use super::signature::Typed;
use super::{function, libraries};
use rpc_core::error::{Result, RpcError};
use rpc_core::function::{FunctionKind, LoadRequest, Module, ModuleLoader, Registry};

/// Loader of modules with TVM-FFI's ABI. Clones share everything; nothing is loaded before it is
/// needed.
///
/// Loads `libtvm_ffi.so` when it is first needed, from the path in the
/// [options](TvmFfiOptions), and modules through it, so that modules which embed or import others
/// work as in TVM. Building this crate needs no part of TVM.
///
/// # Values
///
/// | here | to a function | from a function |
/// | --- | --- | --- |
/// | null, bool, int, float, dtype, device | the same | the same |
/// | str | a string (1) | str; bytes if it is not UTF-8 |
/// | bytes | borrowed as `TVMFFIByteArray` | bytes; those of a bytes object are not copied |
/// | shape, list, map | `Shape`, `Array`, `Map` | `Array` and `List`, `Map` and `Dict` alike |
/// | tensor | borrowed as `DLTensor` (2) | a tensor (3) |
/// | function | the object if it is foreign, else one that calls it | function |
/// | module | if it is foreign | module |
/// | object | if it came from a function | any other object, and pointers (4) |
///
/// 1. A C string, if the metadata say `const char*`.
/// 2. A `Tensor` object in lists and maps, and if the metadata say `ffi.Tensor`. Nothing is copied.
/// 3. The session's own tensor if it lies in one, and otherwise a tensor over the object's memory,
///    without a copy. A foreign `DLTensor` in the arguments of a callback is copied, because it
///    would not be kept alive.
/// 4. They are held for the owner of the handle, and only usable as arguments.
///
/// Packed values are refused. Tensors are always passed with the byte offset in the data pointer
/// and with strides. `TVMFFIEnvTensorAlloc` gives a module memory of the session that calls it, and
/// `TVMFFIEnvGetStream` returns the stream of the call's lane for each device that its arguments
/// name.
///
/// A model that TVM has compiled for its virtual machine has a function `vm_load_executable`, which
/// returns a machine. Its `vm_initialization` takes kind, index and allocator of each device, and
/// then the machine has the model's functions. [`Module::instance`] does these two steps.
///
/// # Calls
///
/// A function borrows all tensors that it is given for writing, since its accesses are not known;
/// two calls with one tensor run one after the other. It runs on the thread of its lane, unless its
/// module exports a function `rpc_inline` that returns its name in a list separated by commas:
/// listed functions promise not to block, and run where the request was read. If metadata tell the
/// number of arguments, calls with another number are refused.
///
/// Work that a function submits to the stream of its lane may go on after the call: later work on
/// its tensors comes behind. If the processor reaches one of them, as it does with pinned memory
/// (scope `host` of `cuda`), the call waits for that work, and returns its error. An inline
/// function must not wait, and is not called with such memory.
///
/// While a function calls back, its tensors are passed to the called function, or are free for
/// others (except those of inline functions, which keep them): it must not access them meanwhile,
/// on other threads for example. Session memory that it holds beyond the call, as a `Tensor` object
/// or an allocation, stays valid and accounted for, and must not be used outside of calls either.
///
/// Errors carry kind, message and backtrace; the kind is the
/// [`application_kind`](rpc_core::RpcError::application_kind). `TypeError` is
/// [`InvalidArgument`](rpc_core::ErrorKind::InvalidArgument), `MemoryError` is
/// [`OutOfMemory`](rpc_core::ErrorKind::OutOfMemory), and any other
/// [`Application`](rpc_core::ErrorKind::Application). An error of a session's function that foreign
/// code called and passed on arrives unchanged.
///
/// # Trust
///
/// Foreign code can do everything that the process can, and can crash it: give sessions that load
/// modules a process of their own. Modules and libraries stay loaded until the process ends. A
/// process has one `libtvm_ffi.so`: the first that is loaded.
#[derive(Clone)]
pub struct TvmFfi(Arc<TvmFfiOptions>);

impl TvmFfi {
    /// Name of the loader.
    pub const NAME: &str = "tvm_ffi";

    /// Creates a loader with these options.
    pub fn new(options: TvmFfiOptions) -> Self {
        Self(Arc::new(options))
    }

    /// Loads the module in `file`, a regular file that must not be changed afterwards; `name` is
    /// the module's name. Loading runs the module's initialisers, and may block. The module stays
    /// loaded until the process ends.
    ///
    /// # Errors
    ///
    /// [`InvalidArgument`](rpc_core::ErrorKind::InvalidArgument) for a file that is not an ELF
    /// shared library, is for another architecture, exports no function for TVM-FFI, or lacks a
    /// symbol or library that it needs; [`NotFound`](rpc_core::ErrorKind::NotFound) if TVM-FFI
    /// itself or a library of the options is missing, with the places that were searched;
    /// [`Unsupported`](rpc_core::ErrorKind::Unsupported) if it has another ABI.
    pub fn load(&self, file: &Path, name: &str) -> Result<Arc<dyn Module>> {
        Ok(Arc::new(FfiModule::load(self.api()?, file, name)?))
    }

    /// Adds a module to the imports of another one: functions that the importer lacks are looked up
    /// there, for its own code, too. That code must not run meanwhile. The import lasts as long as
    /// the importer, which is shared by all that have loaded it.
    ///
    /// # Errors
    ///
    /// [`InvalidArgument`](rpc_core::ErrorKind::InvalidArgument) if one of the two is no module of
    /// TVM-FFI; the error of TVM-FFI if they would import each other.
    pub fn add_import(&self, importer: &dyn Module, imported: &dyn Module) -> Result<()> {
        let object = |module: &dyn Module| match foreign_object(module) {
            Some(object) => Ok(object.clone()),
            None => Err(RpcError::invalid_argument(format!("{} is no module of TVM-FFI", module.name()))),
        };
        let (importer, imported) = (object(importer)?, object(imported)?);
        self.api()?.add_import(&importer, &imported)
    }

    /// Returns true if a module has the function `name` itself, and not by an import. Modules of
    /// other kinds have no imports.
    ///
    /// # Errors
    ///
    /// Those of TVM-FFI.
    pub fn has_own_function(&self, module: &dyn Module, name: &str) -> Result<bool> {
        match foreign_object(module) {
            Some(object) => Ok(self.api()?.find_in_module(object, name, false)?.is_some()),
            None => Ok(module.functions().iter().any(|(own, _)| own == name)),
        }
    }

    /// Loads all libraries of the options now, and registers the global functions that the
    /// [libraries](TvmFfiOptions::libraries) have registered with TVM-FFI, by their names. Returns
    /// their number. Names that are taken in the registry are not replaced.
    ///
    /// Functions of TVM itself, recognised by the first part of their names, are never registered,
    /// although a library may bring them along with a runtime that it needs: some of them start
    /// programs.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load) for TVM-FFI itself.
    pub fn register_globals(&self, registry: &Registry) -> Result<usize> {
        let (api, names) = libraries::offered(&self.0)?;
        let describe = api.global("ffi.GetGlobalFuncMetadata")?;
        let mut count = 0;
        for name in names {
            if registry.get(&name).is_ok() {
                rpc_core::log_limited!(WARN, %name, "a library registers a function under a name that is taken");
                continue;
            }
            register(api, &describe, registry, name)?;
            count += 1;
        }
        Ok(count)
    }

    /// Loads all libraries of the options now, and registers those of the named global functions
    /// that are there, TVM's own too. Names that are taken in the registry are not replaced.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load) for TVM-FFI itself.
    pub fn register_named(&self, registry: &Registry, names: &[&str]) -> Result<()> {
        let api = self.api()?;
        let describe = api.global("ffi.GetGlobalFuncMetadata")?;
        for name in names {
            if registry.get(name).is_err() && api.global(name).is_ok() {
                register(api, &describe, registry, (*name).to_owned())?;
            }
        }
        Ok(())
    }

    /// Returns the version and the path of the library. Loads it, and the other libraries of the
    /// options, unless that has been done.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load) for TVM-FFI itself.
    pub fn version(&self) -> Result<(String, PathBuf)> {
        let api = self.api()?;
        Ok((api.bindings.version.clone(), api.bindings.path.clone()))
    }

    fn api(&self) -> Result<&'static Api> {
        libraries::load(&self.0)
    }
}

fn register(api: &'static Api, describe: &Ref, registry: &Registry, name: String) -> Result<()> {
    let text = api.text(&name)?;
    let metadata = api.call(describe, &mut [text.view()]).and_then(|metadata| metadata.to_text());
    let typed = metadata.map_or_else(|_| Typed::unknown(), |metadata| Typed::from_metadata(&metadata));
    registry.add_function(name.clone(), function::wrap(api, api.global(&name)?, typed, FunctionKind::Blocking));
    Ok(())
}

/// Loader for programs whose sessions may load any file that they can name: a path that ends in
/// `.so` is one of the session's workspace, or, if the session has none, of this machine.
impl ModuleLoader for TvmFfi {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn accepts(&self, path: &str) -> bool {
        path.ends_with(".so")
    }

    fn load(&self, request: &LoadRequest<'_>) -> Result<Arc<dyn Module>> {
        let file = match request.context.workspace() {
            Some(workspace) => workspace.resolve(request.path)?,
            None => PathBuf::from(request.path),
        };
        Self::load(self, &file, request.path)
    }
}

impl Default for TvmFfi {
    fn default() -> Self {
        Self::new(TvmFfiOptions::default())
    }
}

/// Returns the object of a module of TVM-FFI.
fn foreign_object(module: &dyn Module) -> Option<&Ref> {
    module.as_any().and_then(|object| object.downcast_ref())
}

impl fmt::Debug for TvmFfi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TvmFfi").field(&self.0).finish()
    }
}
