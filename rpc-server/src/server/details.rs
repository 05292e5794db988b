//! Facts about a server that its trackers show to people: version, sessions, devices, leases, and
//! last errors.
//!
//! They are collected at an interval, on a thread that may block: a driver that does not answer
//! delays no report to a tracker.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use rpc_core::{Device, DeviceAttribute, DeviceType, Devices, Value, clock};
use rpc_transports::tracker::{DeviceDetails, DeviceLease, LeaseHolder, LeaseWaiter, ServerDetails};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::server_state::ServerState;
use crate::builtins::device_info;
use crate::leases::{LeaseClient, LeasedDevice};
use crate::tracker::millis;

/// Time between two collections.
const INTERVAL: Duration = Duration::from_secs(5);

/// Collector of the facts about one server, until dropped.
#[derive(Debug)]
pub(super) struct DetailsCollector {
    latest: watch::Receiver<Option<ServerDetails>>,
    /// Task that ends on drop.
    _task: JoinSet<()>,
}

impl DetailsCollector {
    /// Starts to collect. Needs a tokio runtime.
    pub(super) fn start(state: Arc<ServerState>, devices: Devices) -> Self {
        let (sender, latest) = watch::channel(None);
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut load = HostLoad::default();
            loop {
                let (state, devices) = (state.clone(), devices.clone());
                let collected = tokio::task::spawn_blocking(move || {
                    let details = collect(&state, &devices, load.percent_since_last());
                    (details, load)
                });
                // A driver that panics may do so again.
                let Ok((details, load_then)) = collected.await else { return };
                load = load_then;
                sender.send_replace(Some(details));
                tokio::time::sleep(INTERVAL).await;
            }
        });
        Self { latest, _task: task }
    }

    /// Returns a receiver of the latest facts; `None` before the first.
    pub(super) fn latest(&self) -> watch::Receiver<Option<ServerDetails>> {
        self.latest.clone()
    }
}

fn collect(state: &ServerState, devices: &Devices, host_load: Option<u8>) -> ServerDetails {
    let totals = state.totals_here();
    let leased = state.leases().map(|leases| leases.leased_devices()).unwrap_or_default();
    let present = devices.iter().flat_map(|(kind, api)| {
        let count = api.ok().and_then(|api| api.count().ok()).unwrap_or(0);
        (0..count).map(move |index| Device::new(kind, index))
    });
    let describe = |device: Device| {
        let info = device_info(devices, device);
        DeviceDetails {
            lease: leased.iter().find(|leased| leased.device == info.device).map(lease),
            device: info.device,
            name: info.name,
            total_memory: info.total_memory,
            available_memory: match devices.attribute(device, DeviceAttribute::AvailableMemory) {
                Ok(Value::Int(bytes)) => u64::try_from(bytes).ok(),
                _ => info.total_memory.zip(info.used_memory).map(|(total, used)| total.saturating_sub(used)),
            },
            utilization_percent: match device.kind {
                DeviceType::CPU => host_load,
                _ => info.utilization_percent,
            },
            clock_mhz: info.clock_mhz,
        }
    };
    ServerDetails {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        uptime_ms: millis(clock::now().saturating_duration_since(state.started())),
        sessions: totals.sessions,
        memory_bytes: totals.memory_bytes,
        devices: present.take(ServerDetails::MAX_DEVICES).map(describe).collect(),
        errors: state.errors().list(),
    }
}

fn lease(leased: &LeasedDevice) -> DeviceLease {
    // Saturates, and is zero for numbers that are none.
    let millis = |seconds: f64| (seconds * 1000.0) as u64;
    let client = |client: &LeaseClient| LeaseHolder { identity: client.identity.clone(), session: client.session };
    let next = leased.next.iter().take(DeviceLease::MAX_NEXT).map(|next| LeaseWaiter {
        client: client(&next.client),
        priority: next.priority,
        waited_ms: millis(next.waited_seconds),
    });
    DeviceLease {
        held_ms: millis(leased.held_seconds),
        left_ms: millis(leased.left_seconds),
        waiting: leased.waiting,
        holder: leased.holder.as_ref().map(client),
        used_by: leased.used_by,
        next: next.collect(),
    }
}

/// Processor time of the machine at the last look, in clock ticks.
#[derive(Clone, Copy, Debug, Default)]
struct HostLoad {
    busy: u64,
    total: u64,
}

impl HostLoad {
    /// Returns the load of all processors since the last call. `None` in the first call, and on
    /// systems that do not tell.
    fn percent_since_last(&mut self) -> Option<u8> {
        let now = Self::parse(&fs::read_to_string("/proc/stat").ok()?)?;
        let before = std::mem::replace(self, now);
        let total = now.total.checked_sub(before.total).filter(|total| *total > 0 && before.total > 0)?;
        let busy = now.busy.saturating_sub(before.busy).min(total);
        u8::try_from(busy * 100 / total).ok()
    }

    /// Reads the first line of `/proc/stat`: times in user mode, nice, system, idle, waiting for
    /// I/O, and others.
    fn parse(stat: &str) -> Option<Self> {
        let line = stat.lines().next()?.strip_prefix("cpu ")?;
        // Times of guests, behind the first eight, are in those of the user already.
        let times = line.split_ascii_whitespace().take(8).map(|time| time.parse::<u64>().ok());
        let times: Vec<u64> = times.collect::<Option<_>>()?;
        let idle = times.get(3)? + times.get(4)?;
        let total = times.iter().sum::<u64>();
        Some(Self { busy: total - idle, total })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_load_is_read_from_the_kernels_first_line() {
        let load = HostLoad::parse("cpu  100 0 50 800 50 0 0 0 99 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n").unwrap();
        assert_eq!((load.busy, load.total), (150, 1000));
        assert!(HostLoad::parse("intr 5").is_none() && HostLoad::parse("cpu 1 x").is_none());
    }
}
