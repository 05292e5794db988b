//! OpenCL on demand, for processes that may never use it: the first use loads it.

use std::path::Path;
use std::sync::Arc;

use crate::device_api::OpenClDevice;
use crate::module_loader::OpenClModules;
use crate::native_code::NativeCodeRule;
use rpc_core::device::DeviceOnDemand;
use rpc_core::dlpack::DeviceType;
use rpc_core::error::Result;
use rpc_core::function::{LoadRequest, Module, ModuleLoader};

/// Returns all OpenCL devices, for sessions that may never use them: the first call
/// [opens](OpenClDevice::open) them.
pub const fn on_demand() -> DeviceOnDemand<OpenClDevice> {
    DeviceOnDemand::new(DeviceType::OPENCL, OpenClDevice::open)
}

/// The loader of [`OpenClModules`] that belongs to devices [on demand](on_demand).
#[derive(Clone, Copy, Debug)]
pub struct OpenClModulesOnDemand {
    native_code: NativeCodeRule,
}

impl OpenClModulesOnDemand {
    /// Creates the loader, with the rule for machine code of clients.
    pub fn new(native_code: NativeCodeRule) -> Self {
        Self { native_code }
    }
}

impl ModuleLoader for OpenClModulesOnDemand {
    fn name(&self) -> &str {
        OpenClModules::NAME
    }

    fn accepts(&self, path: &str) -> bool {
        OpenClModules::is_module(Path::new(path))
    }

    fn load(&self, request: &LoadRequest<'_>) -> Result<Arc<dyn Module>> {
        OpenClModules::new(on_demand().open()?, self.native_code).load(request)
    }
}
