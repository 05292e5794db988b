//! Devices that are opened by their first use.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::api::{AllocRequest, DeviceApi, Stream};
use super::attribute::DeviceAttribute;
use super::memory::Memory;
use super::state::DeviceState;
use crate::dlpack::DeviceType;
use crate::error::Result;
use crate::value::Value;

/// All devices of one kind, for sessions that may never use them: the first call opens them, and
/// all calls fail if that fails.
pub struct DeviceOnDemand<D> {
    kind: DeviceType,
    open: fn() -> Result<D>,
}

impl<D: DeviceApi> DeviceOnDemand<D> {
    /// Creates the devices of a kind. `open` is called each time, and must return the same ones;
    /// its errors are given the kind as context.
    pub const fn new(kind: DeviceType, open: fn() -> Result<D>) -> Self {
        Self { kind, open }
    }

    /// Returns the devices.
    ///
    /// # Errors
    ///
    /// They cannot be opened.
    pub fn open(&self) -> Result<D> {
        (self.open)().map_err(|error| error.context(format_args!("no {}", self.kind)))
    }
}

impl<D> fmt::Debug for DeviceOnDemand<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceOnDemand").field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl<D: DeviceApi> DeviceApi for DeviceOnDemand<D> {
    fn kind(&self) -> DeviceType {
        self.kind
    }

    fn count(&self) -> Result<i32> {
        self.open()?.count()
    }

    fn attribute(&self, index: i32, attribute: DeviceAttribute) -> Result<Value> {
        self.open()?.attribute(index, attribute)
    }

    fn state(&self, index: i32) -> DeviceState {
        self.open().map_or_else(|error| DeviceState::unknown(error.message()), |devices| devices.state(index))
    }

    fn allocate(&self, index: i32, request: &AllocRequest<'_>) -> Result<Box<dyn Memory>> {
        self.open()?.allocate(index, request)
    }

    fn create_stream(&self, index: i32) -> Result<Arc<dyn Stream>> {
        self.open()?.create_stream(index)
    }

    fn default_stream(&self, index: i32) -> Result<Arc<dyn Stream>> {
        self.open()?.default_stream(index)
    }

    unsafe fn adopt(
        &self,
        index: i32,
        address: NonNull<u8>,
        len: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Box<dyn Memory>> {
        // SAFETY: the caller's promises are the same.
        unsafe { self.open()?.adopt(index, address, len, owner) }
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
        unsafe { self.open()?.copy(from, from_offset, to, to_offset, len) }
    }
}
