//! Safe bindings of the functions of `libtvm_ffi.so` that this crate uses.

use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use libloading::os::unix::Library;

use super::abi::{self, Any, ByteArray, ManagedTensor, ObjectHeader, SafeCall, TensorAllocator, TypeInfo, Version};
use super::object::{OwnedAny, Ref};
use super::{allocator, failure};
use rpc_core::error::{Result, RpcError};

macro_rules! functions {
    ($($name:ident = $symbol:literal ($($type:ty),*) $(-> $return:ty)?;)*) => {
        /// Functions of the library that this crate calls.
        struct Functions {
            $($name: unsafe extern "C" fn($($type),*) $(-> $return)?,)*
        }

        impl Functions {
            fn find(library: &Library, path: &Path, version: &str) -> Result<Self> {
                Ok(Self {
                    $($name: {
                        // SAFETY: `tvm/ffi/c_api.h` and `extra/c_env_api.h` declare this type for
                        // the name.
                        let found = unsafe { library.get::<unsafe extern "C" fn($($type),*) $(-> $return)?>($symbol) };
                        *found.map_err(|_| lacking(path, version, $symbol))?
                    },)*
                })
            }
        }
    };
}

functions! {
    object_inc_ref = "TVMFFIObjectIncRef" (*mut ObjectHeader) -> c_int;
    object_dec_ref = "TVMFFIObjectDecRef" (*mut ObjectHeader) -> c_int;
    function_create = "TVMFFIFunctionCreate"
        (*mut c_void, SafeCall, Option<unsafe extern "C" fn(*mut c_void)>, *mut *mut ObjectHeader) -> c_int;
    function_get_global = "TVMFFIFunctionGetGlobal" (*const ByteArray, *mut *mut ObjectHeader) -> c_int;
    function_call = "TVMFFIFunctionCall" (*mut ObjectHeader, *mut Any, i32, *mut Any) -> c_int;
    error_move_from_raised = "TVMFFIErrorMoveFromRaised" (*mut *mut ObjectHeader);
    error_set_raised = "TVMFFIErrorSetRaised" (*mut ObjectHeader);
    error_create = "TVMFFIErrorCreate"
        (*const ByteArray, *const ByteArray, *const ByteArray, *mut *mut ObjectHeader) -> c_int;
    string_from_byte_array = "TVMFFIStringFromByteArray" (*const ByteArray, *mut Any) -> c_int;
    bytes_from_byte_array = "TVMFFIBytesFromByteArray" (*const ByteArray, *mut Any) -> c_int;
    tensor_from_dlpack = "TVMFFITensorFromDLPackVersioned"
        (*mut ManagedTensor, i32, i32, *mut *mut ObjectHeader) -> c_int;
    type_info = "TVMFFIGetTypeInfo" (i32) -> *const TypeInfo;
    env_set_stream = "TVMFFIEnvSetStream" (i32, i32, *mut c_void, *mut *mut c_void) -> c_int;
    env_set_allocator = "TVMFFIEnvSetDLPackManagedTensorAllocator"
        (TensorAllocator, c_int, *mut Option<TensorAllocator>) -> c_int;
}

fn lacking(path: &Path, version: &str, symbol: &str) -> RpcError {
    let (major, minor) = abi::SUPPORTED;
    let path = path.display();
    RpcError::unsupported(format!(
        "{path} ({version}) has no {symbol}: install a later apache-tvm-ffi of ABI {major}.{minor}"
    ))
}

/// The loaded library. It is never unloaded.
pub(super) struct Api {
    functions: Functions,
    /// Path of the library.
    pub(super) path: PathBuf,
    pub(super) version: String,
    globals: Globals,
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
    /// Binds the functions of `library`, which lies at `path` and stays loaded.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](rpc_core::ErrorKind::Unsupported) if it has another ABI.
    pub(super) fn of(library: &'static Library, path: &Path) -> Result<&'static Self> {
        let version = version(library, path)?;
        let functions = Functions::find(library, path, &version)?;
        let api: &'static Self =
            Box::leak(Box::new(Self { functions, path: path.to_owned(), version, globals: Globals::default() }));
        // SAFETY: the allocator is a function of this program. It is set for every thread that has
        // none of its own.
        api.check(unsafe { (api.functions.env_set_allocator)(allocator::allocate, 1, ptr::null_mut()) })?;
        tracing::debug!(path = %path.display(), version = %api.version, "loaded TVM-FFI");
        Ok(api)
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
        self.check(unsafe { (self.functions.function_get_global)(&ByteArray::new(name.as_bytes()), &raw mut found) })?;
        // SAFETY: as above.
        let found = NonNull::new(found).map(|object| unsafe { Ref::from_owned(self, object) });
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
        let code = unsafe { (self.functions.function_call)(function.raw(), args.as_mut_ptr(), count, &raw mut result) };
        // SAFETY: the library gives away the value that it stores; it stores nothing on failure.
        let result = unsafe { OwnedAny::new(self, result) };
        self.check(code).map(|()| result)
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
        let code = unsafe { (self.functions.function_create)(context, safe_call, Some(deleter), &raw mut function) };
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
        let code = unsafe { (self.functions.tensor_from_dlpack)(managed.as_ptr(), 0, 0, &raw mut tensor) };
        self.check(code)?;
        self.created(tensor)
    }

    fn created(&'static self, object: *mut ObjectHeader) -> Result<Ref> {
        let object = NonNull::new(object).ok_or_else(|| RpcError::internal("TVM-FFI created no object"))?;
        // SAFETY: the library returned it with a count that this owns.
        Ok(unsafe { Ref::from_owned(self, object) })
    }

    pub(super) fn text(&'static self, text: &str) -> Result<OwnedAny> {
        self.made_of_bytes(self.functions.string_from_byte_array, text.as_bytes())
    }

    pub(super) fn bytes(&'static self, bytes: &[u8]) -> Result<OwnedAny> {
        self.made_of_bytes(self.functions.bytes_from_byte_array, bytes)
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
        let made = unsafe { OwnedAny::new(self, made) };
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
        let ask = self.cached(&self.globals.module_function, "ffi.ModuleGetFunction")?;
        let name = self.text(name)?;
        self.call(ask, &mut [module.as_any(), name.view(), Any::bool(true)])?.to_optional_object()
    }

    /// Returns the module's metadata of its function: JSON, if there is any.
    pub(super) fn module_metadata(&'static self, module: &Ref, name: &str) -> Result<Option<String>> {
        let ask = self.cached(&self.globals.module_metadata, "ffi.ModuleGetFunctionMetadata")?;
        let name = self.text(name)?;
        let found = self.call(ask, &mut [module.as_any(), name.view(), Any::bool(true)])?;
        if found.is_none() { Ok(None) } else { found.to_text().map(Some) }
    }

    /// Returns the name of the type of `object`.
    pub(super) fn type_key(&'static self, object: &Ref) -> String {
        let index = object.type_index();
        // SAFETY: the type exists, since there is an object of it (for any other index the library
        // would end the process); types are never removed, and their names live as long as they.
        let key = unsafe { (self.functions.type_info)(index).as_ref().map(|info| failure::text(&info.type_key)) };
        key.unwrap_or_else(|| format!("type {index}"))
    }

    /// Sets `stream` as the one of the device for this thread, and returns the former one.
    pub(super) fn set_stream(&'static self, kind: i32, index: i32, stream: *mut c_void) -> Result<*mut c_void> {
        let mut before = ptr::null_mut();
        // SAFETY: streams are only stored; there is room for one.
        self.check(unsafe { (self.functions.env_set_stream)(kind, index, stream, &raw mut before) })?;
        Ok(before)
    }

    /// Takes the error that this thread has raised, if there is one.
    pub(super) fn take_raised(&'static self) -> Option<Ref> {
        let mut error = ptr::null_mut();
        // SAFETY: there is room for the object, whose count this takes.
        unsafe { (self.functions.error_move_from_raised)(&raw mut error) };
        // SAFETY: as above.
        NonNull::new(error).map(|error| unsafe { Ref::from_owned(self, error) })
    }

    /// Creates an error object.
    pub(super) fn error(&'static self, kind: &str, message: &str, backtrace: &str) -> Result<Ref> {
        let [kind, message, backtrace] = [kind, message, backtrace].map(|text| ByteArray::new(text.as_bytes()));
        let mut error = ptr::null_mut();
        // SAFETY: the texts live until they have been copied, and there is room for the object.
        let code = unsafe { (self.functions.error_create)(&kind, &message, &backtrace, &raw mut error) };
        // `check` is not used here: it would take an error from this thread that there may not be.
        if code != 0 {
            return Err(RpcError::internal("TVM-FFI cannot create an error"));
        }
        self.created(error)
    }

    /// Sets `error` as the one that this thread has raised.
    pub(super) fn raise(&'static self, error: &Ref) {
        // SAFETY: it is an error object, of which the library takes a count of its own.
        unsafe { (self.functions.error_set_raised)(error.raw()) };
    }

    /// # Safety
    ///
    /// `object` belongs to the library and is alive.
    pub(super) unsafe fn retain(&'static self, object: NonNull<ObjectHeader>) {
        // SAFETY: the caller's promise.
        unsafe { (self.functions.object_inc_ref)(object.as_ptr()) };
    }

    /// # Safety
    ///
    /// The caller gives up a count of `object`.
    pub(super) unsafe fn release(&'static self, object: NonNull<ObjectHeader>) {
        // SAFETY: the caller's promise.
        unsafe { (self.functions.object_dec_ref)(object.as_ptr()) };
    }

    /// Returns the error that this thread has raised, if `code` reports a failure.
    fn check(&'static self, code: c_int) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(failure::take(self)) }
    }
}

fn version(library: &Library, path: &Path) -> Result<String> {
    let symbol = "TVMFFIGetVersion";
    // SAFETY: this is its type in all versions.
    let ask = unsafe { library.get::<unsafe extern "C" fn(*mut Version)>(symbol) };
    let ask = ask.map_err(|_| lacking(path, "of no known version", symbol))?;
    let mut version = Version::default();
    // SAFETY: there is room for the answer.
    unsafe { ask(&raw mut version) };
    let Version { major, minor, patch } = version;
    let (our_major, our_minor) = abi::SUPPORTED;
    if (major, minor) != abi::SUPPORTED {
        return Err(RpcError::unsupported(format!(
            "{} has TVM-FFI {major}.{minor}.{patch}, but the supported ABI is {our_major}.{our_minor}: install \
             apache-tvm-ffi {our_major}.{our_minor}",
            path.display()
        )));
    }
    Ok(format!("{major}.{minor}.{patch}"))
}
