//! Present state of a device, as its vendor's management interface tells.

/// Present state of a device: [`DeviceApi::state`](super::DeviceApi::state). A value is `None` if
/// the device does not tell it.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DeviceState {
    /// Clock of the processors of the device in MHz.
    pub clock_mhz: Option<u32>,
    /// Bytes of its memory that are in use, by all processes of the machine.
    pub used_memory: Option<u64>,
    /// Size of its memory in bytes.
    pub total_memory: Option<u64>,
    /// Part of the time for which the device was busy lately, in percent.
    pub utilization_percent: Option<u8>,
    /// Reason for which values are unknown, if there is one.
    pub unknown_because: Option<String>,
}

impl DeviceState {
    /// Returns the state of a device of which nothing is known, for this reason.
    pub fn unknown(reason: impl Into<String>) -> Self {
        Self { unknown_because: Some(reason.into()), ..Self::default() }
    }
}
