//! Functions of the CUDA driver, looked up by name at run time, so that a missing one is an error
//! and never a panic.
//!
//! Results are plain numbers here: a newer driver has codes that are missing in an `enum`.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmodule, CUstream, cudaError_enum as Code,
};

use crate::libraries;

/// Result of a driver function.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub(super) struct Outcome {
    /// Name of the function, without its version suffix.
    pub(super) function: &'static str,
    pub(super) code: u32,
}

impl Outcome {
    pub(super) fn is(self, code: Code) -> bool {
        self.code == code as u32
    }
}

macro_rules! functions {
    (
        required { $($name:ident = $symbol:literal ($($arg:ident: $type:ty),*);)* }
        optional { $(
            $since:literal $optional:ident = $optional_symbol:literal
                ($($optional_arg:ident: $optional_type:ty),*);
        )* }
    ) => {
        /// Driver functions that this crate calls.
        pub(super) struct Driver {
            $($name: unsafe extern "C" fn($($type),*) -> u32,)*
            $($optional: Option<unsafe extern "C" fn($($optional_type),*) -> u32>,)*
        }

        #[allow(clippy::too_many_arguments, reason = "the driver's own")]
        impl Driver {
            fn look_up() -> Result<Self, String> {
                let library = libraries::load(&libraries::driver()).map_err(|error| {
                    format!("the driver of NVIDIA's GPUs cannot be loaded: {error}")
                })?;
                // Never unloaded, because the driver has threads of its own.
                let library = Box::leak(Box::new(library));
                Ok(Self {
                    $(
                        // SAFETY: the type is that of the driver's function of this name.
                        $name: *unsafe { library.get($symbol.as_bytes()) }
                            .map_err(|_| format!("the driver has no {}: it is older than CUDA 11.4", $symbol))?,
                    )*
                    $(
                        // SAFETY: as above.
                        $optional: unsafe { library.get($optional_symbol.as_bytes()) }.ok().map(|found| *found),
                    )*
                })
            }

            $(
                /// # Safety
                ///
                /// The requirements in the documentation of the driver's function.
                pub(super) unsafe fn $name(&self, $($arg: $type),*) -> Outcome {
                    // SAFETY: the caller's promise.
                    let code = unsafe { (self.$name)($($arg),*) };
                    Outcome { function: plain_name($symbol), code }
                }
            )*
            $(
                #[doc = concat!("Returns `None` if the driver is older than CUDA ", $since, ".")]
                ///
                /// # Safety
                ///
                /// The requirements in the documentation of the driver's function.
                pub(super) unsafe fn $optional(&self, $($optional_arg: $optional_type),*) -> Option<Outcome> {
                    // SAFETY: the caller's promise.
                    let code = unsafe { (self.$optional?)($($optional_arg),*) };
                    Some(Outcome { function: plain_name($optional_symbol), code })
                }
            )*
        }
    };
}

functions! {
    required {
        init = "cuInit" (flags: c_uint);
        driver_get_version = "cuDriverGetVersion" (version: *mut c_int);
        get_error_name = "cuGetErrorName" (code: u32, text: *mut *const c_char);
        get_error_string = "cuGetErrorString" (code: u32, text: *mut *const c_char);
        device_get_count = "cuDeviceGetCount" (count: *mut c_int);
        device_get = "cuDeviceGet" (device: *mut CUdevice, ordinal: c_int);
        device_get_name = "cuDeviceGetName" (name: *mut c_char, len: c_int, device: CUdevice);
        device_get_attribute = "cuDeviceGetAttribute" (value: *mut c_int, attribute: u32, device: CUdevice);
        device_total_mem = "cuDeviceTotalMem_v2" (bytes: *mut usize, device: CUdevice);
        primary_ctx_retain = "cuDevicePrimaryCtxRetain" (context: *mut CUcontext, device: CUdevice);
        ctx_set_current = "cuCtxSetCurrent" (context: CUcontext);
        ctx_get_current = "cuCtxGetCurrent" (context: *mut CUcontext);
        device_can_access_peer = "cuDeviceCanAccessPeer" (can: *mut c_int, device: CUdevice, peer: CUdevice);
        ctx_enable_peer_access = "cuCtxEnablePeerAccess" (peer: CUcontext, flags: c_uint);
        mem_alloc = "cuMemAlloc_v2" (address: *mut CUdeviceptr, bytes: usize);
        mem_free = "cuMemFree_v2" (address: CUdeviceptr);
        mem_host_alloc = "cuMemHostAlloc" (address: *mut *mut c_void, bytes: usize, flags: c_uint);
        mem_free_host = "cuMemFreeHost" (address: *mut c_void);
        mem_get_info = "cuMemGetInfo_v2" (free: *mut usize, total: *mut usize);
        memset_async = "cuMemsetD8Async" (to: CUdeviceptr, value: u8, bytes: usize, stream: CUstream);
        memcpy_to_device_async = "cuMemcpyHtoDAsync_v2"
            (to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
        memcpy_to_host_async = "cuMemcpyDtoHAsync_v2"
            (to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
        memcpy_on_device_async = "cuMemcpyDtoDAsync_v2"
            (to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
        memcpy_peer_async = "cuMemcpyPeerAsync" (
            to: CUdeviceptr, to_context: CUcontext, from: CUdeviceptr, from_context: CUcontext, bytes: usize,
            stream: CUstream
        );
        stream_create = "cuStreamCreate" (stream: *mut CUstream, flags: c_uint);
        stream_destroy = "cuStreamDestroy_v2" (stream: CUstream);
        stream_query = "cuStreamQuery" (stream: CUstream);
        stream_synchronize = "cuStreamSynchronize" (stream: CUstream);
        stream_wait_event = "cuStreamWaitEvent" (stream: CUstream, event: CUevent, flags: c_uint);
        event_create = "cuEventCreate" (event: *mut CUevent, flags: c_uint);
        event_destroy = "cuEventDestroy_v2" (event: CUevent);
        event_record = "cuEventRecord" (event: CUevent, stream: CUstream);
        event_query = "cuEventQuery" (event: CUevent);
        event_synchronize = "cuEventSynchronize" (event: CUevent);
        launch_host_func = "cuLaunchHostFunc"
            (stream: CUstream, function: unsafe extern "C" fn(*mut c_void), argument: *mut c_void);
        module_load_data = "cuModuleLoadDataEx" (
            module: *mut CUmodule, image: *const c_void, option_count: c_uint, options: *mut u32,
            values: *mut *mut c_void
        );
        module_unload = "cuModuleUnload" (module: CUmodule);
        module_get_function = "cuModuleGetFunction" (function: *mut CUfunction, module: CUmodule, name: *const c_char);
        func_get_attribute = "cuFuncGetAttribute" (value: *mut c_int, attribute: u32, function: CUfunction);
        func_set_attribute = "cuFuncSetAttribute" (function: CUfunction, attribute: u32, value: c_int);
        launch_kernel = "cuLaunchKernel" (
            function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
            block_z: c_uint, shared_bytes: c_uint, stream: CUstream, params: *mut *mut c_void, extra: *mut *mut c_void
        );
    }
    optional {
        "12.4" func_get_param_info = "cuFuncGetParamInfo"
            (function: CUfunction, index: usize, offset: *mut usize, size: *mut usize);
        "12.4" module_get_function_count = "cuModuleGetFunctionCount" (count: *mut c_uint, module: CUmodule);
        "12.4" module_enumerate_functions = "cuModuleEnumerateFunctions"
            (functions: *mut CUfunction, count: c_uint, module: CUmodule);
        "12.3" func_get_name = "cuFuncGetName" (name: *mut *const c_char, function: CUfunction);
    }
}

impl Driver {
    /// Returns the driver of this process, loaded at the first call. The outcome of the first call
    /// is kept.
    pub(super) fn get() -> Result<&'static Self, &'static str> {
        static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
        DRIVER.get_or_init(Self::look_up).as_ref().map_err(String::as_str)
    }

    /// Returns CUDA's name of a code, such as `CUDA_ERROR_ILLEGAL_ADDRESS`.
    pub(super) fn name_of(&self, code: u32) -> String {
        let mut text = ptr::null();
        // SAFETY: there is room for the pointer.
        let outcome = unsafe { self.get_error_name(code, &raw mut text) };
        read_text(outcome, text).unwrap_or_else(|| format!("CUDA error {code}"))
    }

    /// Returns CUDA's description of a code, such as `an illegal memory access was encountered`.
    pub(super) fn text_of(&self, code: u32) -> String {
        let mut text = ptr::null();
        // SAFETY: there is room for the pointer.
        let outcome = unsafe { self.get_error_string(code, &raw mut text) };
        read_text(outcome, text).unwrap_or_else(|| format!("the driver failed with code {code}"))
    }
}

/// Reads a constant text of the driver.
fn read_text(outcome: Outcome, text: *const c_char) -> Option<String> {
    if !outcome.is(Code::CUDA_SUCCESS) || text.is_null() {
        return None;
    }
    // SAFETY: on success the driver returns a constant that ends with a zero.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// Strips the version from a symbol: `cuMemAlloc` for `cuMemAlloc_v2`.
fn plain_name(symbol: &'static str) -> &'static str {
    symbol.strip_suffix("_v2").unwrap_or(symbol)
}
