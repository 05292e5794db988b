//! Events: points in the order of a stream that can be waited for.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use opencl3::event::{
    CL_COMPLETE, CL_EVENT_COMMAND_EXECUTION_STATUS, CL_PROFILING_COMMAND_END, CL_PROFILING_COMMAND_START,
    get_event_data, get_event_profiling_data, set_event_callback, wait_for_events,
};
use opencl3::types::{cl_event, cl_int};

use crate::device_list::{ListedDevice, number};
use crate::handle::EventHandle;
use rpc_core::device::WhenDone;
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

    /// Waits until the command is done.
    pub(super) fn wait(&self) -> Result<()> {
        let waited = wait_for_events(&[self.raw()]);
        // The command's own error says more than that of the wait.
        self.is_done()?;
        self.device.check("clWaitForEvents", waited)
    }

    /// Calls `done` on a thread of the driver when the command is done.
    ///
    /// # Errors
    ///
    /// `done`, if the driver cannot call back.
    pub(super) fn when_done(self, done: WhenDone) -> Result<(), WhenDone> {
        let wait = Box::into_raw(Box::new(Wait { device: self.device, done }));
        match set_event_callback(self.raw(), CL_COMPLETE, on_done, wait.cast()) {
            Ok(()) => Ok(()),
            Err(_) => {
                // SAFETY: the driver has refused the callback, and so does not call it.
                let wait = unsafe { Box::from_raw(wait) };
                Err(wait.done)
            }
        }
    }

    /// Returns the time that the device took for the command, which is done; `None` if the driver
    /// does not tell.
    pub(super) fn duration(&self) -> Option<Duration> {
        let at = |point| number(&get_event_profiling_data(self.raw(), point).ok()?);
        Some(Duration::from_nanos(at(CL_PROFILING_COMMAND_END)?.checked_sub(at(CL_PROFILING_COMMAND_START)?)?))
    }
}

/// A wait for an event, which the driver holds until it calls back.
struct Wait {
    device: &'static ListedDevice,
    done: WhenDone,
}

/// Callback for the driver, called once when the command of an event is done or has failed. It must
/// not wait.
extern "C" fn on_done(_: cl_event, status: cl_int, wait: *mut c_void) {
    // SAFETY: `when_done` has made it of a box, and the driver passes it on once.
    let Wait { device, done } = *unsafe { Box::from_raw(wait.cast::<Wait>()) };
    let outcome = if status < 0 { device.check(COMMAND, Err(status)) } else { Ok(()) };
    // A panic must not reach the driver.
    if catch_unwind(AssertUnwindSafe(|| done(outcome))).is_err() {
        rpc_core::log_limited!(ERROR, "the callback of a wait for a stream panicked");
    }
}

/// Reporter of the errors of commands themselves.
const COMMAND: &str = "a submitted command";
