//! OpenCL on demand, for processes that may never use it: the first use loads it.

use std::any::Any;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::device_api::OpenClDevice;
use crate::module_loader::OpenClModules;
use crate::native_code::NativeCodeRule;
use rpc_core::device::{AllocRequest, DeviceApi, DeviceAttribute, DeviceState, Memory, Stream};
use rpc_core::dlpack::DeviceType;
use rpc_core::error::Result;
use rpc_core::function::{LoadRequest, Module, ModuleLoader};
use rpc_core::value::Value;

/// All OpenCL devices, for sessions that may never use them: the first call
/// [opens](OpenClDevice::open) them, and all calls fail if that fails.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenClOnDemand;

impl DeviceApi for OpenClOnDemand {
    fn kind(&self) -> DeviceType {
        DeviceType::OPENCL
    }

    fn count(&self) -> Result<i32> {
        open()?.count()
    }

    fn attribute(&self, index: i32, attribute: DeviceAttribute) -> Result<Value> {
        open()?.attribute(index, attribute)
    }

    fn state(&self, index: i32) -> DeviceState {
        open().map_or_else(|error| DeviceState::unknown(error.message()), |opencl| opencl.state(index))
    }

    fn allocate(&self, index: i32, request: &AllocRequest<'_>) -> Result<Box<dyn Memory>> {
        open()?.allocate(index, request)
    }

    unsafe fn adopt(
        &self,
        index: i32,
        address: NonNull<u8>,
        len: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Box<dyn Memory>> {
        // SAFETY: the caller's promises are the same.
        unsafe { open()?.adopt(index, address, len, owner) }
    }

    fn create_stream(&self, index: i32) -> Result<Arc<dyn Stream>> {
        open()?.create_stream(index)
    }

    fn default_stream(&self, index: i32) -> Result<Arc<dyn Stream>> {
        open()?.default_stream(index)
    }

    unsafe fn copy(
        &self,
        from: &dyn Memory,
        from_offset: u64,
        to: &dyn Memory,
        to_offset: u64,
        len: u64,
    ) -> Result<()> {
        // SAFETY: the caller's promises are the same.
        unsafe { open()?.copy(from, from_offset, to, to_offset, len) }
    }
}

/// Returns the driver's devices, the same at each call.
fn open() -> Result<OpenClDevice> {
    OpenClDevice::open().map_err(|error| error.context("no opencl"))
}

/// The loader of [`OpenClModules`] that belongs to [`OpenClOnDemand`].
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
        OpenClModules::new(open()?, self.native_code).load(request)
    }
}
