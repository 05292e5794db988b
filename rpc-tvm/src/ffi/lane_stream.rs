//! The stream on which a lane's foreign functions work, in order with the device's default stream.

use std::sync::Arc;

use rpc_core::device::Stream;
use rpc_core::dlpack::Device;
use rpc_core::error::Result;
use rpc_core::function::Context;

/// The stream of a lane.
pub(super) struct LaneStream {
    pub(super) stream: Arc<dyn Stream>,
    /// The device's default stream, if it is a different one.
    default: Option<Arc<dyn Stream>>,
}

impl LaneStream {
    pub(super) fn of(context: &Context, device: Device) -> Result<Self> {
        let stream = context.stream(device)?;
        let default = context.devices().get(device)?.default_stream(device.index)?;
        let is_default = default.library_handle()? == stream.library_handle()?;
        Ok(Self { stream, default: (!is_default).then_some(default) })
    }

    /// Lets work submitted to the stream begin after the session's work so far.
    pub(super) fn begin(&self) -> Result<()> {
        self.default.as_ref().map_or(Ok(()), |default| self.stream.wait_for(&**default))
    }

    /// Lets the session's work from now on begin after the work submitted to the stream.
    pub(super) fn end(&self) {
        let ended = self.default.as_ref().map_or(Ok(()), |default| default.wait_for(&*self.stream));
        if let Err(error) = ended {
            // The only remaining way to keep the order. A lost device is reported by every later
            // call.
            let waited = self.stream.synchronize();
            rpc_core::log_limited!(WARN, %error, ?waited, "a stream could not be put in order with the default one");
        }
    }
}
