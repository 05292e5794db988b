//! The functions of `libtvm_ffi.so` that this crate uses, looked up by name.

use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};

use libloading::os::unix::Library;

use super::abi::{self, Any, ByteArray, ManagedTensor, ObjectHeader, SafeCall, TensorAllocator, TypeInfo, Version};
use rpc_core::error::{Result, RpcError};

macro_rules! functions {
    ($($name:ident = $symbol:literal ($($type:ty),*) $(-> $return:ty)?;)*) => {
        /// Functions of the library that this crate calls.
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($type),*) $(-> $return)?,)*
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
pub(super) struct Bindings {
    pub(super) functions: Functions,
    /// Path of the library.
    pub(super) path: PathBuf,
    pub(super) version: String,
}

impl Bindings {
    /// Looks up the functions of `library`, which lies at `path` and stays loaded.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](rpc_core::ErrorKind::Unsupported) if it has another ABI.
    pub(super) fn find(library: &'static Library, path: &Path) -> Result<&'static Self> {
        let version = version(library, path)?;
        let functions = Functions::find(library, path, &version)?;
        Ok(Box::leak(Box::new(Self { functions, path: path.to_owned(), version })))
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
