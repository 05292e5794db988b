//! The list of the process's GPUs, each opened when it is first used.

use std::sync::OnceLock;

use cudarc::driver::sys::cudaError_enum as Code;

use crate::driver::{Driver, Outcome};
use crate::failure;
use crate::gpu::Gpu;
use crate::opened_gpu::OpenedGpu;
use rpc_core::error::{ErrorKind, Result, RpcError};

/// The GPUs of this process, by CUDA's numbers.
pub(super) struct Gpus {
    pub(super) all: Vec<ListedGpu>,
}

/// A GPU of the list.
pub(super) struct ListedGpu {
    pub(super) gpu: Gpu,
    opened: OnceLock<&'static OpenedGpu>,
}

impl Gpus {
    /// Returns the GPUs, initialising the driver at the first call. The outcome of the first call
    /// is kept.
    pub(super) fn get() -> Result<&'static Self> {
        static GPUS: OnceLock<Result<Gpus>> = OnceLock::new();
        GPUS.get_or_init(Self::find).as_ref().map_err(RpcError::clone)
    }

    fn find() -> Result<Self> {
        let unavailable = |reason: String| RpcError::new(ErrorKind::DeviceUnavailable, reason);
        let driver = Driver::get().map_err(|reason| unavailable(reason.to_owned()))?;
        let check = |outcome: Outcome| {
            let text = || failure::describe(driver, outcome);
            if outcome.is(Code::CUDA_SUCCESS) { Ok(()) } else { Err(unavailable(text())) }
        };
        // SAFETY: no flags are defined.
        check(unsafe { driver.init(0) })?;
        let mut count = 0;
        // SAFETY: there is room for the number.
        check(unsafe { driver.device_get_count(&raw mut count) })?;
        if count <= 0 {
            return Err(unavailable("the driver is installed but finds no device".to_owned()));
        }
        let find = |index| {
            let mut device = 0;
            // SAFETY: there is room for the handle.
            check(unsafe { driver.device_get(&raw mut device, index) })?;
            Ok(ListedGpu { gpu: Gpu::new(driver, index, device), opened: OnceLock::new() })
        };
        Ok(Self { all: (0..count).map(find).collect::<Result<_>>()? })
    }
}

impl ListedGpu {
    /// Makes the GPU's context the calling thread's current one, which every driver call needs.
    /// Opens the GPU first if it is not open.
    pub(super) fn enter(&'static self) -> Result<&'static OpenedGpu> {
        if let Some(opened) = self.opened.get() {
            opened.enter()?;
            return Ok(opened);
        }
        self.gpu.check_not_lost()?;
        let total_memory = self.gpu.total_memory()?;
        let context = self.gpu.enter()?;
        let open = || {
            let opened: &'static OpenedGpu = Box::leak(Box::new(OpenedGpu::new(context, total_memory)));
            // Before another thread can use the pools, so that none of their idle memory is missed.
            context.set_idle_memory(opened);
            opened
        };
        Ok(self.opened.get_or_init(open))
    }
}
