//! Count of the communicators of this process that have collectives in progress, by device.
//!
//! The driver waits for all work of a device before it frees memory of that device, no matter which
//! communicator or stream the work belongs to. A collective may hang, so memory is returned to the
//! driver only while the device has none.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use rpc_core::Device;

/// Number of communicators with collectives in progress. Devices without any have no entry.
static BUSY: Mutex<BTreeMap<Device, usize>> = Mutex::new(BTreeMap::new());

/// Counts one more communicator of the device, until [`subtract`].
pub(super) fn add(device: Device) {
    *BUSY.lock().entry(device).or_default() += 1;
}

/// Counts one communicator of the device less.
pub(super) fn subtract(device: Device) {
    let mut busy = BUSY.lock();
    if let Some(count) = busy.get_mut(&device) {
        *count -= 1;
        if *count == 0 {
            busy.remove(&device);
        }
    }
}

/// Returns true if any communicator of this process has collectives in progress on the device.
pub(super) fn has_collectives(device: Device) -> bool {
    BUSY.lock().contains_key(&device)
}
