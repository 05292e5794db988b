//! Safe bindings of the functions of `libtvm_ffi.so` that this crate uses.

use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use parking_lot::RwLock;

use super::abi::{Any, ByteArray, ManagedTensor, ObjectHeader, SafeCall, TensorAllocator};
use super::bindings::{Bindings, Functions};
use super::failure;
use super::object::{OwnedAny, Ref};
use rpc_core::error::{Result, RpcError};
use rpc_core::function::{Context, Function};

/// The loaded library, with the entry points that foreign code calls.
pub(super) struct Api {
    pub(super) bindings: &'static Bindings,
    globals: Globals,
    callbacks: Callbacks,
    /// Lock of the lists of all modules' imports, which look-ups read.
    imports: RwLock<()>,
}

/// Entry points for foreign code that calls sessions. They stand above the conversions of values,
/// which need the API, and so are passed to it when the library is loaded.
pub(super) struct Callbacks {
    /// Allocator of tensors for modules that ask the environment for them.
    pub(super) allocate_tensor: TensorAllocator,
    /// Creator of function objects that call a function of the session, for as long as foreign code
    /// holds them, from any thread.
    pub(super) create_function: fn(&'static Api, &Context, Function) -> Result<Ref>,
}

/// Frequently used global functions of the library.
#[derive(Default)]
struct Globals {
    shape: OnceLock<Ref>,
    array: OnceLock<Ref>,
    map: OnceLock<Ref>,
    module_function: OnceLock<Ref>,
    module_metadata: OnceLock<Ref>,
}

impl Api {
    /// Creates the API of a library, and sets the allocator of tensors there.
    pub(super) fn new(bindings: &'static Bindings, callbacks: Callbacks) -> Result<&'static Self> {
        let api: &'static Self =
            Box::leak(Box::new(Self { bindings, globals: Globals::default(), callbacks, imports: RwLock::new(()) }));
        // SAFETY: the allocator is a function of this program. It is set for every thread that has
        // none of its own.
        api.check(unsafe { (api.functions().env_set_allocator)(api.callbacks.allocate_tensor, 1, ptr::null_mut()) })?;
        tracing::debug!(path = %bindings.path.display(), version = %bindings.version, "loaded TVM-FFI");
        Ok(api)
    }

    fn functions(&self) -> &'static Functions {
        &self.bindings.functions
    }

    /// Returns the names of all global functions.
    pub(super) fn global_names(&'static self) -> Result<Vec<String>> {
        // It returns a function: for -1 it returns the number of names, for an index the name.
        let names = self.call(&self.global("ffi.FunctionListGlobalNamesFunctor")?, &mut [])?.to_object()?;
        let count = self.call(&names, &mut [Any::int(-1)])?.to_int()?;
        (0..count).map(|index| self.call(&names, &mut [Any::int(index)])?.to_text()).collect()
    }

    /// Returns the global function of that name.
    ///
    /// # Errors
    ///
    /// [`NotFound`](rpc_core::ErrorKind::NotFound).
    pub(super) fn global(&'static self, name: &str) -> Result<Ref> {
        let mut found = ptr::null_mut();
        // SAFETY: the name is alive, and there is room for the object, of which this takes a count.
        self.check(unsafe {
            (self.functions().function_get_global)(&ByteArray::new(name.as_bytes()), &raw mut found)
        })?;
        // SAFETY: as above.
        let found = NonNull::new(found).map(|object| unsafe { Ref::from_owned(self.bindings, object) });
        found.ok_or_else(|| RpcError::not_found(format!("TVM-FFI has no global function '{name}'")))
    }

    fn cached(&'static self, cell: &'static OnceLock<Ref>, name: &str) -> Result<&'static Ref> {
        match cell.get() {
            Some(function) => Ok(function),
            None => {
                let function = self.global(name)?;
                Ok(cell.get_or_init(|| function))
            }
        }
    }

    /// Calls `function`. Objects in `args` are borrowed by it.
    ///
    /// # Errors
    ///
    /// The error that it has raised.
    pub(super) fn call(&'static self, function: &Ref, args: &mut [Any]) -> Result<OwnedAny> {
        let count = i32::try_from(args.len()).map_err(|_| RpcError::invalid_argument("too many arguments"))?;
        let mut result = Any::NONE;
        // SAFETY: `function` is a function object, as every caller ensures; the arguments are
        // `count` values that live until it returns, and there is room for the result, which this
        // owns.
        let code =
            unsafe { (self.functions().function_call)(function.raw(), args.as_mut_ptr(), count, &raw mut result) };
        // SAFETY: the library gives away the value that it stores; it stores nothing on failure.
        let result = unsafe { OwnedAny::new(self.bindings, result) };
        self.check(code).map(|()| result)
    }

    /// Creates a function object that calls `function`, for as long as foreign code holds it, from
    /// any thread.
    pub(super) fn create_callback(&'static self, context: &Context, function: Function) -> Result<Ref> {
        (self.callbacks.create_function)(self, context, function)
    }

    /// Creates a function object that calls `safe_call` with `context`, and calls `deleter` with it
    /// at the end.
    ///
    /// # Safety
    ///
    /// Both functions may be called with `context` from any thread, `safe_call` several times at
    /// once.
    pub(super) unsafe fn create_function(
        &'static self,
        context: *mut c_void,
        safe_call: SafeCall,
        deleter: unsafe extern "C" fn(*mut c_void),
    ) -> Result<Ref> {
        let mut function = ptr::null_mut();
        // SAFETY: the caller's promise; there is room for the object.
        let code = unsafe { (self.functions().function_create)(context, safe_call, Some(deleter), &raw mut function) };
        self.check(code)?;
        self.created(function)
    }

    /// Creates a tensor object over `managed` and takes ownership of it, also on failure.
    ///
    /// # Safety
    ///
    /// `managed` is complete, with its deleter.
    pub(super) unsafe fn tensor(&'static self, managed: NonNull<ManagedTensor>) -> Result<Ref> {
        let mut tensor = ptr::null_mut();
        // SAFETY: the caller's promise; no alignment and no density is required; there is room for
        // the object.
        let code = unsafe { (self.functions().tensor_from_dlpack)(managed.as_ptr(), 0, 0, &raw mut tensor) };
        self.check(code)?;
        self.created(tensor)
    }

    fn created(&'static self, object: *mut ObjectHeader) -> Result<Ref> {
        let object = NonNull::new(object).ok_or_else(|| RpcError::internal("TVM-FFI created no object"))?;
        // SAFETY: the library returned it with a count that this owns.
        Ok(unsafe { Ref::from_owned(self.bindings, object) })
    }

    pub(super) fn text(&'static self, text: &str) -> Result<OwnedAny> {
        self.made_of_bytes(self.functions().string_from_byte_array, text.as_bytes())
    }

    pub(super) fn bytes(&'static self, bytes: &[u8]) -> Result<OwnedAny> {
        self.made_of_bytes(self.functions().bytes_from_byte_array, bytes)
    }

    fn made_of_bytes(
        &'static self,
        make: unsafe extern "C" fn(*const ByteArray, *mut Any) -> c_int,
        bytes: &[u8],
    ) -> Result<OwnedAny> {
        let mut made = Any::NONE;
        // SAFETY: the bytes live until they have been copied, and there is room for the value,
        // which this owns.
        let code = unsafe { make(&ByteArray::new(bytes), &raw mut made) };
        // SAFETY: as above.
        let made = unsafe { OwnedAny::new(self.bindings, made) };
        self.check(code).map(|()| made)
    }

    pub(super) fn shape(&'static self, dimensions: &[i64]) -> Result<OwnedAny> {
        let mut args: Vec<_> = dimensions.iter().map(|dimension| Any::int(*dimension)).collect();
        self.call(self.cached(&self.globals.shape, "ffi.Shape")?, &mut args)
    }

    pub(super) fn array(&'static self, elements: &[OwnedAny]) -> Result<OwnedAny> {
        let mut args: Vec<_> = elements.iter().map(OwnedAny::view).collect();
        self.call(self.cached(&self.globals.array, "ffi.Array")?, &mut args)
    }

    /// Creates a map from alternating keys and values.
    pub(super) fn map(&'static self, pairs: &[OwnedAny]) -> Result<OwnedAny> {
        let mut args: Vec<_> = pairs.iter().map(OwnedAny::view).collect();
        self.call(self.cached(&self.globals.map, "ffi.Map")?, &mut args)
    }

    /// Returns the function of a module or of its imports, if there is one.
    pub(super) fn module_function(&'static self, module: &Ref, name: &str) -> Result<Option<Ref>> {
        self.find_in_module(module, name, true)
    }

    /// Returns the function of a module, and with `imports` also one of its imports, if there is
    /// one.
    pub(super) fn find_in_module(&'static self, module: &Ref, name: &str, imports: bool) -> Result<Option<Ref>> {
        let ask = self.cached(&self.globals.module_function, "ffi.ModuleGetFunction")?;
        let name = self.text(name)?;
        // A module may look functions of others up by this again.
        let _imports = self.imports.read_recursive();
        self.call(ask, &mut [module.as_any(), name.view(), Any::bool(imports)])?.to_optional_object()
    }

    /// Adds a module to the imports of another one.
    ///
    /// # Errors
    ///
    /// The modules would import each other.
    pub(super) fn add_import(&'static self, importer: &Ref, imported: &Ref) -> Result<()> {
        let add = self.global("ffi.ModuleImportModule")?;
        let _imports = self.imports.write();
        self.call(&add, &mut [importer.as_any(), imported.as_any()]).map(drop)
    }

    /// Returns the module's metadata of its function: JSON, if there is any.
    pub(super) fn module_metadata(&'static self, module: &Ref, name: &str) -> Result<Option<String>> {
        let ask = self.cached(&self.globals.module_metadata, "ffi.ModuleGetFunctionMetadata")?;
        let name = self.text(name)?;
        let _imports = self.imports.read_recursive();
        let found = self.call(ask, &mut [module.as_any(), name.view(), Any::bool(true)])?;
        if found.is_none() { Ok(None) } else { found.to_text().map(Some) }
    }

    /// Sets `stream` as the one of the device for this thread, and returns the former one.
    pub(super) fn set_stream(&'static self, kind: i32, index: i32, stream: *mut c_void) -> Result<*mut c_void> {
        let mut before = ptr::null_mut();
        // SAFETY: streams are only stored; there is room for one.
        self.check(unsafe { (self.functions().env_set_stream)(kind, index, stream, &raw mut before) })?;
        Ok(before)
    }

    /// Returns the error that this thread has raised, if `code` reports a failure.
    fn check(&'static self, code: c_int) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(failure::take(self.bindings)) }
    }
}
