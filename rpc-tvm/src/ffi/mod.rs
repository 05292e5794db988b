//! Compiled modules and libraries that follow the ABI of [TVM-FFI](https://github.com/apache/tvm-ffi): what TVM, TileLang and
//! the CuTe DSL compile, or C and C++ against its headers.
//!
//! [`TvmFfi`] loads `libtvm_ffi.so` when it is first needed, from where the [options](TvmFfiOptions) say, and modules through it,
//! so that modules which embed others, or import them, work as in TVM. Nothing of it is needed to build this crate.
//!
//! # Values
//!
//! | here | to a function | from a function |
//! | --- | --- | --- |
//! | null, bool, int, float, dtype, device | the same | the same |
//! | str | a string; a C string where the metadata say `const char*` | str; bytes if it is not UTF-8 |
//! | bytes | lent as `TVMFFIByteArray`, not copied | bytes; those of a bytes object are not copied |
//! | shape, list, map | `Shape`, `Array`, `Map` | `Array` and `List`, `Map` and `Dict` alike |
//! | tensor | lent as `DLTensor`, not copied; a `Tensor` object in lists and maps, and where the metadata say `ffi.Tensor` | the session's own tensor if it lies in one, else one over the object's memory, not copied; a `DLTensor` of the code's own, as an argument of a call back, is copied, because nothing would keep it |
//! | function | the function object if it is foreign, else one that calls it | function |
//! | module | if it is foreign | module |
//! | object | if it came from a function | any other object, and pointers: held, and only good as arguments |
//!
//! Packed values are refused. Tensors are lent with the byte offset in the data pointer and with strides, always.
//! `TVMFFIEnvTensorAlloc` gives a module memory of the session that calls it, and `TVMFFIEnvGetStream` the stream of the call's
//! lane for each device that its arguments name.
//!
//! A model that TVM has compiled for its virtual machine has a function `vm_load_executable`, which gives a machine; its
//! `vm_initialization` takes kind, index and allocator of each device, and then it has the model's functions.
//! [`Module::instance`] does these two steps.
//!
//! # Calls
//!
//! A function borrows all tensors that it is given for writing, since nobody knows what it does with them; two calls with
//! one tensor run one after the other. It runs on the thread of its lane, unless its module exports a function `rpc_inline`
//! that returns its name among others, with commas between them: those promise not to block, and run where the request was
//! read. Where metadata tell how many arguments there are, others are refused before the call.
//!
//! While a function calls back, the tensors that it was given go to whom it calls, or are free for others (but for inline
//! functions, which keep them): it must not touch them meanwhile, on other
//! threads for example. What it holds of session memory beyond the call, as a `Tensor` object or an allocation, stays valid and
//! accounted for, and it must not use that outside of calls either.
//!
//! Errors carry kind, message and backtrace; the kind is the [`application_kind`](rpc_core::RpcError::application_kind).
//! `TypeError` is [`InvalidArgument`](rpc_core::ErrorKind::InvalidArgument), `MemoryError` is
//! [`OutOfMemory`](rpc_core::ErrorKind::OutOfMemory), and any other [`Application`](rpc_core::ErrorKind::Application). An error of a session's function
//! that foreign code called and passed on arrives as it was.
//!
//! # Trust
//!
//! Foreign code can do all that the process can, and take it down: give sessions that load modules a process of their own.
//! Modules and libraries stay loaded until the process ends. There is one `libtvm_ffi.so` in a process: the first that is
//! loaded.

mod abi;
mod allocator;
mod api;
mod arguments;
mod callback;
mod elf;
mod failure;
mod frame;
mod function;
mod libraries;
mod locate;
mod module;
mod object;
mod signature;
mod tensor;
mod value;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use self::api::Api;
use self::module::FfiModule;
use self::signature::Typed;
use rpc_core::error::Result;
use rpc_core::function::Registry;
use rpc_core::function::{FunctionKind, Module};
use rpc_core::function::{LoadRequest, ModuleLoader};

/// What to load, and from where.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TvmFfiOptions {
    /// `libtvm_ffi.so`, or the folder that it lies in. Without it: what the environment variable `TVM_FFI_LIBRARY` names, or
    /// else that of the first Python environment which has the package `apache-tvm-ffi` (that of `VIRTUAL_ENV`, of
    /// `CONDA_PREFIX`, those on the `PATH`, the user's, the system's), or else one in the system's library folders.
    pub library: Option<PathBuf>,
    /// Libraries that are loaded before all else, in this order, with their symbols for all others: runtimes that modules need,
    /// such as TVM's `libtvm_runtime.so`. The functions that they register are for modules alone.
    pub runtimes: Vec<PathBuf>,
    /// Libraries of functions, which are loaded next, in the same way: what [`TvmFfi::register_globals`] registers.
    pub libraries: Vec<PathBuf>,
}

/// Loads modules of TVM-FFI. Clones share everything; nothing is loaded before it is needed.
#[derive(Clone)]
pub struct TvmFfi(Arc<TvmFfiOptions>);

impl TvmFfi {
    /// The name of the loader.
    pub const NAME: &str = "tvm_ffi";

    /// A loader with these options.
    pub fn new(options: TvmFfiOptions) -> Self {
        Self(Arc::new(options))
    }

    /// Loads the module in `file`, a regular file that nobody changes any more; `name` is what it calls itself. Loading runs
    /// the module's initialisers, and may block. The module stays loaded until the process ends.
    ///
    /// # Errors
    ///
    /// [`InvalidArgument`](rpc_core::ErrorKind::InvalidArgument) for a file that is no ELF shared library, is for another
    /// architecture, exports no function for TVM-FFI, or lacks a symbol or library that it needs;
    /// [`NotFound`](rpc_core::ErrorKind::NotFound) if TVM-FFI itself or a library of the options is not there, with the places that
    /// were looked at; [`Unsupported`](rpc_core::ErrorKind::Unsupported) if it has another ABI.
    pub fn load(&self, file: &Path, name: &str) -> Result<Arc<dyn Module>> {
        Ok(Arc::new(FfiModule::load(self.api()?, file, name)?))
    }

    /// Loads all that the options name, now, and registers the global functions that the
    /// [libraries](TvmFfiOptions::libraries) have registered with TVM-FFI, by their names. Says how many these are. Names that are
    /// taken in the registry stay what they are.
    ///
    /// Functions of TVM itself, by the first part of their names, are never registered, though a library may bring them along
    /// with a runtime that it needs: among them are some that start programs.
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
                tracing::warn!(%name, "a library registers a function under a name that is taken");
                continue;
            }
            let text = api.text(&name)?;
            let metadata = api.call(&describe, &mut [text.view()]).and_then(|metadata| metadata.to_text());
            let typed = metadata.map_or_else(|_| Typed::unknown(), |metadata| Typed::from_metadata(&metadata));
            let function = function::wrap(api, api.global(&name)?, typed, FunctionKind::Blocking);
            registry.add_function(name, function);
            count += 1;
        }
        Ok(count)
    }

    /// The version of the library and where it was found; loads it, and what the options name, unless that has been done.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load) for TVM-FFI itself.
    pub fn version(&self) -> Result<(String, PathBuf)> {
        let api = self.api()?;
        Ok((api.version.clone(), api.path.clone()))
    }

    fn api(&self) -> Result<&'static Api> {
        libraries::load(&self.0)
    }
}

/// For programs whose sessions are trusted with every file that they can name: a path that ends in `.so` is one of the
/// session's workspace, or if the session has none, of this machine.
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

impl fmt::Debug for TvmFfi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TvmFfi").field(&self.0).finish()
    }
}
