//! Gauges of the state of devices, as their vendors' management interfaces tell.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rpc_core::device::DeviceState;
use rpc_core::{Device, DeviceType, Devices};
use tokio::task::JoinSet;

use super::{DeviceValue, Gauges};

const CLOCK: &str = "rpc_device_clock_megahertz";
const MEMORY_USED: &str = "rpc_device_memory_used_bytes";
const UTILIZATION: &str = "rpc_device_utilization_percent";

const METRICS: &[(&str, &str)] = &[
    (CLOCK, "Clock of the processors of a device."),
    (MEMORY_USED, "Memory of a device that processes of the machine use."),
    (UTILIZATION, "Part of the time for which a device was busy lately."),
];

/// Time between two questions to the devices.
const INTERVAL: Duration = Duration::from_secs(5);

/// Maximum number of devices with gauges.
const MAX_DEVICES: usize = 64;

/// Source of the gauges of a server's devices. The devices are asked at an interval, on a thread
/// that may block, so that one that does not answer delays no scrape.
pub(crate) struct DeviceGauges {
    latest: Arc<Mutex<BTreeMap<Device, DeviceState>>>,
    /// Task that ends on drop.
    _task: JoinSet<()>,
}

impl DeviceGauges {
    /// Starts to ask the devices, other than those of the host; `None` if there are no others.
    /// Needs a tokio runtime.
    pub(crate) fn start(devices: &Devices) -> Option<Self> {
        let present = devices.iter().filter(|(kind, _)| *kind != DeviceType::CPU).flat_map(|(kind, api)| {
            let count = api.ok().and_then(|api| api.count().ok()).unwrap_or(0);
            (0..count).map(move |index| Device::new(kind, index))
        });
        let present: Vec<_> = present.take(MAX_DEVICES).collect();
        if present.is_empty() {
            return None;
        }
        let latest = Arc::<Mutex<BTreeMap<_, _>>>::default();
        let (devices, told) = (devices.clone(), latest.clone());
        let mut task = JoinSet::new();
        task.spawn(async move {
            loop {
                let (devices, present) = (devices.clone(), present.clone());
                let ask = move || {
                    let state = |device: Device| Some((device, devices.get(device).ok()?.state(device.index)));
                    present.into_iter().filter_map(state).collect::<BTreeMap<_, _>>()
                };
                // A driver that panics may do so again.
                let Ok(states) = tokio::task::spawn_blocking(ask).await else { return };
                *told.lock() = states;
                tokio::time::sleep(INTERVAL).await;
            }
        });
        Some(Self { latest, _task: task })
    }
}

impl Gauges for DeviceGauges {
    fn described(&self) -> &'static [(&'static str, &'static str)] {
        METRICS
    }

    fn now(&self) -> Vec<u64> {
        Vec::new()
    }

    fn of_devices(&self) -> Vec<DeviceValue> {
        let latest = self.latest.lock();
        let values = latest.iter().flat_map(|(device, state)| {
            let values = [
                (CLOCK, state.clock_mhz.map(f64::from)),
                (MEMORY_USED, state.used_memory.map(|bytes| bytes as f64)),
                (UTILIZATION, state.utilization_percent.map(f64::from)),
            ];
            // A value that is not told any more is no number, rather than the last one.
            values.map(|(metric, value)| DeviceValue { metric, device: *device, value: value.unwrap_or(f64::NAN) })
        });
        values.collect()
    }
}
