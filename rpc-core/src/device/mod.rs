//! Devices: the traits that sessions use to allocate memory, copy and synchronise on a device.
//!
//! A [`DeviceApi`] serves all devices of one kind, creates [`Memory`] and [`Stream`]s, and answers
//! [`DeviceAttribute`] queries. [`Devices`] is the set that a session offers; it always contains
//! [`cpu`].

mod api;
mod attribute;
mod copy;
pub mod cpu;
mod devices;
mod event_notifier;
mod memory;
mod on_demand;
mod state;
pub(crate) mod target;
#[cfg(test)]
pub(crate) mod tests;
pub(crate) mod virtual_device;

pub use api::{AllocRequest, DeviceApi, Stream, StreamTimer, WhenDone, out_of_range};
pub use attribute::DeviceAttribute;
pub(crate) use copy::BOUNCE_BYTES;
pub use copy::copy_by_host;
pub use cpu::{CpuAllocator, CpuDevice, HostMemory, SystemAllocator};
pub use devices::Devices;
pub use event_notifier::{DeviceEvent, EventNotifier};
pub use memory::{HostAccess, Mapping, Memory};
pub use on_demand::DeviceOnDemand;
pub use state::DeviceState;
pub use target::Target;
pub use virtual_device::{DeviceDescription, FieldInfo, GLOBAL, VirtualDevice, VirtualDeviceBuilder};
