//! A module of kernels on one GPU.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::fmt;
use std::ptr;

use cudarc::driver::sys::{
    CUfunc_st, CUfunction_attribute_enum as Attribute, CUjit_option_enum as Jit, CUmod_st, cudaError_enum as Code,
};
use parking_lot::Mutex;

use crate::event::Event;
use crate::gpu::Gpu;
use crate::handle::Handle;
use crate::module_image::ModuleImage;
use crate::opened_gpu::OpenedGpu;
use crate::stream::fence_other_streams;
use rpc_core::error::Result;

/// A module on one GPU. It is unloaded some time after it is dropped, when the kernels that were
/// started before are done.
pub(super) struct LoadedModule {
    pub(super) gpu: &'static OpenedGpu,
    pub(super) raw: Handle<CUmod_st>,
    /// Dynamic shared memory that each function has been allowed, in bytes, by the function's
    /// handle. Only grows: the driver keeps one limit for a function, and a lower one would fail
    /// the launches of others.
    allowed_shared: Mutex<BTreeMap<usize, c_uint>>,
}

impl LoadedModule {
    /// Loads the code on a GPU.
    ///
    /// # Errors
    ///
    /// Errors in the file, with the messages of CUDA's compiler for PTX, and errors of the device.
    pub(super) fn new(gpu: &'static OpenedGpu, image: &ModuleImage) -> Result<Self> {
        gpu.enter()?;
        gpu.retired_modules.unload(gpu.context);
        let raw = gpu.context.with_room(|| load(gpu.context.gpu, image))?;
        Ok(Self { gpu, raw, allowed_shared: Mutex::default() })
    }

    /// Allows a function of the module this much dynamic shared memory. More than 48 KiB, including
    /// the kernel's static shared memory, must be allowed before the launch. The caller has entered
    /// the GPU.
    pub(super) fn allow_shared(&self, function: Handle<CUfunc_st>, bytes: c_uint) -> Result<()> {
        let gpu = self.gpu.context.gpu;
        // Held until the driver has been called, so that the recorded value never exceeds the
        // driver's limit, and a concurrent launch never sees a lower one.
        let mut allowed = self.allowed_shared.lock();
        let most = allowed.entry(function.0.addr()).or_default();
        if bytes > *most {
            let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as u32;
            // SAFETY: the function belongs to this module, which is loaded, and a value that is too
            // large is an error.
            let outcome = unsafe { gpu.driver.func_set_attribute(function.0, attribute, bytes as c_int) };
            gpu.check(outcome)
                .map_err(|error| error.context(format_args!("{bytes} bytes of shared memory are above the limit")))?;
            *most = bytes;
        }
        Ok(())
    }

    /// Returns the names of the functions; none with drivers older than CUDA 12.4, which cannot
    /// list them.
    pub(super) fn function_names(&self) -> Result<Vec<String>> {
        self.gpu.enter()?;
        let gpu = self.gpu.context.gpu;
        let mut count = 0;
        // SAFETY: there is room for the number, and the module is loaded.
        match unsafe { gpu.driver.module_get_function_count(&raw mut count, self.raw.0) } {
            Some(outcome) => gpu.check(outcome)?,
            None => return Ok(Vec::new()),
        }
        let mut functions = vec![ptr::null_mut(); count as usize];
        // SAFETY: there is room for as many handles.
        match unsafe { gpu.driver.module_enumerate_functions(functions.as_mut_ptr(), count, self.raw.0) } {
            Some(outcome) => gpu.check(outcome)?,
            None => return Ok(Vec::new()),
        }
        let name = |function| {
            let mut name = ptr::null();
            // SAFETY: there is room for the pointer, and the function belongs to the module.
            let outcome = unsafe { gpu.driver.func_get_name(&raw mut name, function) }?;
            if !outcome.is(Code::CUDA_SUCCESS) || name.is_null() {
                return None;
            }
            // SAFETY: on success it is a text that lives as long as the module.
            Some(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
        };
        Ok(functions.into_iter().filter_map(name).collect())
    }
}

impl Drop for LoadedModule {
    fn drop(&mut self) {
        let context = self.gpu.context;
        let Ok(_entry) = context.gpu.enter_temporarily() else { return };
        // Kernels run on any of the streams.
        let fences = fence_other_streams(context).and_then(|mut fences| {
            fences.push(Event::record(context, context.default_stream)?);
            Ok(fences)
        });
        match fences {
            Ok(fences) => self.gpu.retired_modules.add(fences, self.raw),
            Err(error) => rpc_core::log_limited!(WARN, %error, "a module stays loaded"),
        }
    }
}

impl fmt::Debug for LoadedModule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedModule")
            .field("device", &format_args!("{}", self.gpu.context.gpu.as_device()))
            .finish_non_exhaustive()
    }
}

/// Has the driver load the code in the GPU's context, which is current.
fn load(gpu: &Gpu, image: &ModuleImage) -> Result<Handle<CUmod_st>> {
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
    Ok(Handle(raw))
}

/// Size of the compiler's log in bytes: enough for the first errors, which matter.
const LOG_BYTES: usize = 8 << 10;
