//! The conformance suite of sessions, with all tensors on an OpenCL device: the device stands in
//! for the processor, so that every clause that means `cpu:0` gets its memory and its streams.

use std::any::Any;
use std::sync::Arc;

use rpc_conformance::fixture::{BoxFuture, Fixture, Local};
use rpc_conformance::{conformance, functions};
use rpc_core::device::{AllocRequest, CpuDevice, Memory, Stream, WhenDone};
use rpc_core::{
    Device, DeviceApi, DeviceAttribute, DeviceType, Devices, LocalSession, Result, Session, SessionLimits, Value,
};
use rpc_opencl::OpenClDevice;

conformance!(in_host_memory = OnOpenCl::in_scope("host"), blocking: #[cfg(feature = "long")]);

// Functions of the suite map tensors, wherever those are.
conformance!(on_the_device = OnOpenCl::in_scope("global"));

/// Sessions of this process whose `cpu:0` is `opencl:0`.
struct OnOpenCl {
    scope: &'static str,
    opencl: Option<OpenClDevice>,
    /// Sessions over the processor, where there is no device.
    local: Local,
}

impl OnOpenCl {
    /// Returns sessions whose tensors are in this memory scope, unless they name another.
    fn in_scope(scope: &'static str) -> Self {
        Self { scope, opencl: crate::opencl(), local: Local::new() }
    }

    fn make(&self, limits: SessionLimits) -> Option<Session> {
        let devices = Devices::new().with(Arc::new(AsProcessor { opencl: self.opencl?, scope: self.scope }));
        let session = LocalSession::builder(functions::registry()).limits(limits).devices(devices);
        Some(Session::new(session.build()))
    }
}

impl Fixture for OnOpenCl {
    fn session(&self, limits: SessionLimits) -> BoxFuture<'_, Session> {
        match self.make(limits.clone()) {
            Some(session) => Box::pin(async move { session }),
            None => self.local.session(limits),
        }
    }

    fn blocking_session(&self, limits: SessionLimits) -> Session {
        self.make(limits.clone()).unwrap_or_else(|| self.local.blocking_session(limits))
    }

    fn hops(&self) -> u16 {
        0
    }
}

/// The first OpenCL device, under the name of the processor.
struct AsProcessor {
    opencl: OpenClDevice,
    scope: &'static str,
}

impl DeviceApi for AsProcessor {
    fn kind(&self) -> DeviceType {
        DeviceType::CPU
    }

    fn count(&self) -> Result<i32> {
        Ok(1)
    }

    /// Those of the processor, which the suite knows.
    fn attribute(&self, index: i32, attribute: DeviceAttribute) -> Result<Value> {
        CpuDevice::default().attribute(index, attribute)
    }

    fn allocate(&self, index: i32, request: &AllocRequest<'_>) -> Result<Box<dyn Memory>> {
        // A driver gives memory of its own what it promises, and host memory more.
        let Value::Int(most) = self.opencl.attribute(index, DeviceAttribute::MaxAlignment)? else { unreachable!() };
        let scope = if request.alignment > most as u64 { "host" } else { self.scope };
        self.opencl.allocate(index, &AllocRequest { scope: request.scope.or(Some(scope)), ..*request })
    }

    fn create_stream(&self, index: i32) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(Renamed(self.opencl.create_stream(index)?)))
    }

    fn default_stream(&self, index: i32) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(Renamed(self.opencl.default_stream(index)?)))
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
        unsafe { self.opencl.copy(from, from_offset, to, to_offset, len) }
    }
}

/// A stream of the device, under the name of the processor.
struct Renamed(Arc<dyn Stream>);

impl Stream for Renamed {
    fn device(&self) -> Device {
        Device::cpu()
    }

    fn synchronize(&self) -> Result<()> {
        self.0.synchronize()
    }

    fn when_done(&self, done: WhenDone) -> Result<(), WhenDone> {
        self.0.when_done(done)
    }

    fn wait_for(&self, other: &dyn Stream) -> Result<()> {
        self.0.wait_for(other.as_any().downcast_ref::<Self>().map_or(other, |other| &*other.0))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
