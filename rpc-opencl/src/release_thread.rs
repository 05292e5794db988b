//! Deferred release: one thread of the process returns memory that has been idle in the pools for
//! some time to the driver, because other processes on the device cannot use it otherwise. While
//! nothing is idle it sleeps.

use std::collections::BTreeMap;
use std::sync::{LazyLock, mpsc};
use std::thread;
use std::time::Instant;

use crate::opened_device::OpenedDevice;

/// Has the thread check a device's pool soon.
pub(super) fn watch(device: &'static OpenedDevice) {
    // Without the thread, memory stays idle until it is needed.
    _ = THREAD.send(device);
}

static THREAD: LazyLock<mpsc::Sender<&'static OpenedDevice>> = LazyLock::new(|| {
    let (sender, devices) = mpsc::channel();
    if let Err(error) = thread::Builder::new().name("rpc-opencl-free".into()).spawn(move || run(&devices)) {
        tracing::warn!(%error, "cannot start the thread that frees device memory");
    }
    sender
});

fn run(devices: &mpsc::Receiver<&'static OpenedDevice>) {
    // Time of the next check of each device, by its index.
    let mut due: BTreeMap<i32, (Instant, &'static OpenedDevice)> = BTreeMap::new();
    loop {
        let first = due.values().min_by_key(|(at, _)| *at).copied();
        let next = match first {
            Some((at, device)) => match devices.recv_timeout(at.saturating_duration_since(Instant::now())) {
                Err(mpsc::RecvTimeoutError::Timeout) => Ok(device),
                other => other.map_err(|_| mpsc::RecvError),
            },
            None => devices.recv(),
        };
        let Ok(device) = next else { return };
        let time = *device.idle_time.lock();
        match device.pool.release_idle(device, time) {
            Some(at) => _ = due.insert(device.listed.index, (at, device)),
            None => _ = due.remove(&device.listed.index),
        }
    }
}
