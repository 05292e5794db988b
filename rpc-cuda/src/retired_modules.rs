//! Modules of kernels that were dropped, until their kernels are done.

use cudarc::driver::sys::CUmod_st;
use parking_lot::Mutex;

use crate::event::Event;
use crate::gpu::PrimaryContext;
use crate::handle::Handle;

/// Modules that were dropped, with the events behind which all of their kernels are done.
#[derive(Default)]
pub(super) struct RetiredModules(Mutex<Vec<(Vec<Event>, Handle<CUmod_st>)>>);

impl RetiredModules {
    /// Adds a module that nothing uses any more, except kernels that are done at these events.
    pub(super) fn add(&self, fences: Vec<Event>, module: Handle<CUmod_st>) {
        self.0.lock().push((fences, module));
    }

    /// Unloads the modules whose kernels are done. The caller has entered the GPU.
    pub(super) fn unload(&self, context: &PrimaryContext) {
        let gpu = context.gpu;
        self.0.lock().retain(|(fences, module)| {
            if !fences.iter().all(|event| matches!(event.is_done(), Ok(true))) {
                return true;
            }
            // SAFETY: the module is no longer in use, and its kernels are done.
            if let Err(error) = gpu.check(unsafe { gpu.driver.module_unload(module.0) }) {
                rpc_core::log_limited!(WARN, %error, "a module was not unloaded");
            }
            false
        });
    }
}
