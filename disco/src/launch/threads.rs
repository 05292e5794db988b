//! Workers as threads of the controller's process.

use std::net::IpAddr;
use std::sync::Arc;

use rpc_core::{
    Device, DeviceAttribute, Devices, ErrorKind, LocalSession, Registry, RpcError, Session, SessionLimits, Value,
};

use super::launch;
use crate::completion::Completion;
use crate::controller::session::DiscoSession;
use crate::error::{DiscoError, Result};
use crate::link::local::LocalLink;
use crate::link::session_source::Source;
use crate::node::functions::register;
use crate::options::{Hosting, Options};
use crate::weights::folders::WeightFolders;
use crate::worker::rendezvous::DataAddress;

/// A session whose workers are threads of this process.
#[derive(Debug)]
pub struct ThreadedSession {
    num_workers: u32,
    num_groups: u32,
    registry: Registry,
    devices: Devices,
    /// Default device of each worker; all have `cpu:0` if there are none.
    default_devices: Vec<Device>,
    options: Options,
}

impl ThreadedSession {
    /// Creates a session with `num_workers` workers in `num_groups` groups of equal size.
    #[must_use]
    pub fn new(num_workers: u32, num_groups: u32) -> Self {
        let (registry, devices, options) = (Registry::new(), Devices::new(), Options::default());
        Self { num_workers, num_groups, registry, devices, default_devices: Vec::new(), options }
    }

    /// Sets the functions of the workers. Those of disco are added.
    #[must_use]
    pub fn registry(mut self, registry: Registry) -> Self {
        self.registry = registry;
        self
    }

    /// Sets the devices of the workers. Default: `cpu` alone.
    #[must_use]
    pub fn devices(mut self, devices: Devices) -> Self {
        self.devices = devices;
        self
    }

    /// Sets the default device of each worker, in their order: one machine with several devices,
    /// and a worker for each. Default: `cpu:0` for all.
    ///
    /// They hold until [`init_ccl`](DiscoSession::init_ccl) chooses a backend of collectives, and
    /// the default devices with it. Until then collectives take tensors in host memory alone.
    #[must_use]
    pub fn default_devices(mut self, devices: impl IntoIterator<Item = Device>) -> Self {
        self.default_devices = devices.into_iter().collect();
        self
    }

    /// Settings of the session.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Starts the workers.
    ///
    /// Its errors are groups that cannot be of equal size, default devices that there are not or
    /// not as many as workers, and a system that has no more threads.
    pub fn start(self) -> Completion<DiscoSession> {
        if let Err(error) = self.check_default_devices() {
            return Completion::failed(error);
        }
        let node = this_process(self.registry, self.devices, self.num_workers, None);
        let mut options = self.options;
        options.hosting = Hosting::Threads;
        let size = (1, self.num_workers, self.num_groups);
        launch(size, self.default_devices, options, None, async { Ok(vec![node.into()]) })
    }

    fn check_default_devices(&self) -> Result<()> {
        let (count, workers) = (self.default_devices.len(), self.num_workers);
        if count != 0 && count != workers as usize {
            return Err(DiscoError::invalid(format!("{count} default devices for {workers} workers")));
        }
        for device in &self.default_devices {
            self.devices.get(*device)?;
            let exists = self.devices.attribute(*device, DeviceAttribute::Exists)?;
            if exists != Value::Bool(true) {
                let text = format!("there is no {device} to be the default device of a worker");
                return Err(RpcError::new(ErrorKind::DeviceUnavailable, text).into());
            }
        }
        Ok(())
    }
}

/// Makes this process a node with so many workers, which have these functions and those of disco,
/// and listen for data at `data`.
pub(super) fn this_process(registry: Registry, devices: Devices, workers: u32, data: Option<IpAddr>) -> Source {
    register(&registry);
    let mut limits = SessionLimits::default();
    limits.max_threads = limits.max_threads.saturating_add(workers as usize);
    // Its workers read what this process may.
    let session = LocalSession::builder(registry).devices(devices).limits(limits);
    let local = Arc::new(LocalLink::default());
    let mut session = session.extension(Arc::new(WeightFolders::anywhere())).extension(Arc::clone(&local));
    if let Some(data) = data {
        session = session.extension(Arc::new(DataAddress(data)));
    }
    Source::Local(Session::new(session.build()), local)
}

#[cfg(test)]
mod tests {
    use rpc_core::DataType;
    use rpc_core::device::{AllocRequest, CpuAllocator, CpuDevice, Memory};

    use super::*;

    #[test]
    fn workers_have_the_devices_that_the_launch_is_given() {
        /// Memory that a test can tell from the system's.
        struct Exhausted;

        impl CpuAllocator for Exhausted {
            fn allocate(&self, _: &AllocRequest<'_>) -> rpc_core::Result<Box<dyn Memory>> {
                Err(RpcError::new(ErrorKind::OutOfMemory, "this device has no memory"))
            }
        }

        let devices = Devices::new().with(Arc::new(CpuDevice::with_allocator(Arc::new(Exhausted))));
        let session = ThreadedSession::new(2, 1).devices(devices).start().wait().unwrap();
        session.empty(&[1], DataType::F32, None).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        assert_eq!(error.failures().len(), 2, "{error}");
        assert!(error.to_string().contains("this device has no memory"), "{error}");
        session.shutdown().wait().unwrap();
    }

    /// A session of this process that the caller has made is driven like one over a network.
    #[test]
    fn only_a_launch_of_threads_hands_over_commands_without_encoding_them() {
        let threads = ThreadedSession::new(1, 1).start().wait().unwrap();
        assert!(!threads.controller().links().iter().any(|link| link.is_remote()));
        let registry = Registry::new();
        register(&registry);
        let local = Session::new(LocalSession::new(registry));
        let over = DiscoSession::over([local], 1, 1, Options::default()).wait().unwrap();
        assert!(over.controller().links().iter().all(|link| link.is_remote()));
        for session in [threads, over] {
            session.sync_all().wait().unwrap();
            session.shutdown().wait().unwrap();
        }
    }
}
