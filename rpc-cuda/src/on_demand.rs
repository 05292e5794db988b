//! CUDA on demand, for processes that may never use it: the first use loads it.

use std::path::Path;
use std::sync::Arc;

use crate::device_api::CudaDevice;
use crate::module_loader::CudaModules;
use rpc_core::device::DeviceOnDemand;
use rpc_core::dlpack::DeviceType;
use rpc_core::error::Result;
use rpc_core::function::{LoadRequest, Module, ModuleLoader};

/// Returns all CUDA devices, for sessions that may never use them: the first call
/// [opens](CudaDevice::open) them.
pub const fn on_demand() -> DeviceOnDemand<CudaDevice> {
    DeviceOnDemand::new(DeviceType::CUDA, CudaDevice::open)
}

/// The loader of [`CudaModules`] that belongs to devices [on demand](on_demand).
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaModulesOnDemand;

impl ModuleLoader for CudaModulesOnDemand {
    fn name(&self) -> &str {
        CudaModules::NAME
    }

    fn accepts(&self, path: &str) -> bool {
        CudaModules::is_module(Path::new(path))
    }

    fn load(&self, request: &LoadRequest<'_>) -> Result<Arc<dyn Module>> {
        CudaModules::new(on_demand().open()?).load(request)
    }
}
