//! Events: points in the order of a stream that can be waited for.

use std::time::Duration;

use opencl3::event::{
    CL_COMPLETE, CL_EVENT_COMMAND_EXECUTION_STATUS, CL_PROFILING_COMMAND_END, CL_PROFILING_COMMAND_START,
    get_event_data, get_event_profiling_data, wait_for_events,
};
use opencl3::types::{cl_event, cl_int};

use crate::device_list::{ListedDevice, number};
use crate::handle::EventHandle;
use rpc_core::device::DeviceEvent;
use rpc_core::error::Result;

/// The end of a submitted command.
pub(super) struct Event {
    device: &'static ListedDevice,
    handle: EventHandle,
}

impl Event {
    /// Takes over the event that `function` has returned for the command that it has submitted.
    pub(super) fn of(device: &'static ListedDevice, function: &str, outcome: Result<cl_event, cl_int>) -> Result<Self> {
        let handle = EventHandle::new(device.check(function, outcome)?);
        Ok(Self { device, handle })
    }

    pub(super) fn raw(&self) -> cl_event {
        self.handle.raw()
    }

    /// Returns true once the command is done. Does not block.
    ///
    /// # Errors
    ///
    /// The error of the command.
    pub(super) fn is_done(&self) -> Result<bool> {
        let bytes =
            self.device.check("clGetEventInfo", get_event_data(self.raw(), CL_EVENT_COMMAND_EXECUTION_STATUS))?;
        let status = <[u8; 4]>::try_from(&bytes[..]).map(i32::from_ne_bytes).unwrap_or(CL_COMPLETE);
        if status < 0 { self.device.check(COMMAND, Err(status)) } else { Ok(status == CL_COMPLETE) }
    }

    /// Returns true once the command no longer runs, because it is done or has failed; false if the
    /// driver cannot tell.
    pub(super) fn has_ended(&self) -> bool {
        let status = get_event_data(self.raw(), CL_EVENT_COMMAND_EXECUTION_STATUS).ok();
        let status = status.and_then(|bytes| <[u8; 4]>::try_from(&bytes[..]).ok()).map(i32::from_ne_bytes);
        status.is_some_and(|status| status <= CL_COMPLETE)
    }

    /// Waits until the command is done.
    pub(super) fn wait(&self) -> Result<()> {
        let waited = wait_for_events(&[self.raw()]);
        // The command's own error says more than that of the wait.
        self.is_done()?;
        self.device.check("clWaitForEvents", waited)
    }

    /// Returns the time that the device took for the command, which is done; `None` if the driver
    /// does not tell.
    pub(super) fn duration(&self) -> Option<Duration> {
        let at = |point| number(&get_event_profiling_data(self.raw(), point).ok()?);
        Some(Duration::from_nanos(at(CL_PROFILING_COMMAND_END)?.checked_sub(at(CL_PROFILING_COMMAND_START)?)?))
    }
}

impl DeviceEvent for Event {
    fn is_done(&self) -> Result<bool> {
        self.is_done()
    }
}

/// Reporter of the errors of commands themselves.
const COMMAND: &str = "a submitted command";
