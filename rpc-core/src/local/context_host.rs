//! `Host` for local sessions: the part of a session that its functions can use.

use std::any::{Any, TypeId};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use super::LocalInner;
use super::job::LaneKey;
use crate::access_control::{AccessControl, Permission};
use crate::device::{AllocRequest, Devices, Memory, Stream};
use crate::dlpack::{self, DataType, Device};
use crate::error::{ErrorKind, Result, RpcError};
use crate::function::context::{Context, Host, ThreadPermit, Usage, WorkspaceFiles};
use crate::function::function::{Function, Signature};
use crate::function::loader::LoadRequest;
use crate::function::object::Module;
use crate::limits::{MemoryLease, OpenFileLease, SessionLimits, StagingLease};
use crate::session::Lane;
use crate::tensor::{Layout, Storage, Tensor};

/// Alignment in bytes up to which memory needs no spare bytes.
const NATURAL_ALIGNMENT: u64 = 64;

impl Host for LocalInner {
    fn devices(&self) -> &Devices {
        &self.devices
    }

    fn access_control(&self) -> Option<&Arc<dyn AccessControl>> {
        self.access.as_ref()
    }

    fn function(&self, name: &str) -> Result<Function> {
        self.authorize(&Permission::Function(name))?;
        self.registry.get_hinting(name, |other| self.may_call(other))
    }

    fn functions(&self) -> Vec<(String, Signature)> {
        let mut functions = self.registry.functions();
        functions.retain(|(name, _)| self.may_call(name));
        functions
    }

    fn load_module(&self, loader: Option<&str>, path: &str, context: &Context) -> Result<Arc<dyn Module>> {
        self.authorize(&Permission::Modules)?;
        self.registry.load_module(loader, &LoadRequest { path, context })
    }

    fn workspace(&self) -> Option<&Arc<dyn WorkspaceFiles>> {
        self.workspace.as_ref()
    }

    fn extension(&self, type_id: TypeId) -> Option<Arc<dyn Any + Send + Sync>> {
        self.extensions.get(&type_id).cloned()
    }

    fn allocate(
        &self,
        device: Device,
        dtype: DataType,
        shape: &[i64],
        scope: Option<&str>,
        alignment: u64,
    ) -> Result<Tensor> {
        let api = self.devices.get(device)?;
        let size = dlpack::dense_size(shape, dtype)?;
        if alignment != 0 && !alignment.is_power_of_two() {
            return Err(RpcError::invalid_argument(format!("an alignment of {alignment} is not a power of two")));
        }
        // A device may set aside as many bytes as the alignment to place the memory within them.
        let spare = if alignment > NATURAL_ALIGNMENT { alignment } else { 0 };
        let lease = self.memory.reserve(size.saturating_add(spare))?;
        let memory = api.allocate(device.index, &AllocRequest { size, alignment, scope })?;
        let storage = Storage::new(device, memory, Some(Box::new(lease)));
        Tensor::new(storage, 0, shape, None, dtype)
    }

    fn stream(&self, lane: Lane, device: Device) -> Result<Arc<dyn Stream>> {
        let set = LaneKey::shared(lane).and_then(|lane| self.streams.lock().get(&(lane, device)).cloned());
        match set {
            Some(stream) => Ok(stream.0.clone()),
            None => self.devices.get(device)?.default_stream(device.index),
        }
    }

    fn adopt(&self, device: Device, memory: Box<dyn Memory>, layout: Layout<'_>) -> Result<Tensor> {
        self.authorize(&Permission::Device(device))?;
        let lease = self.memory.reserve(memory.len())?;
        let Layout { byte_offset, shape, strides, dtype } = layout;
        let storage = Storage::new(device, memory, Some(Box::new(lease)));
        Tensor::new(storage, byte_offset, shape, strides.map(<[i64]>::to_vec), dtype)
    }

    fn reserve_memory(&self, bytes: u64) -> Result<MemoryLease> {
        self.memory.reserve(bytes)
    }

    fn stage(&self, bytes: u64) -> Result<StagingLease<'_>> {
        self.staging.stage(bytes)
    }

    fn reserve_open_files(&self, count: u64) -> Result<OpenFileLease> {
        self.open_files.reserve(count)
    }

    fn max_open_files(&self) -> u64 {
        self.open_files.limit()
    }

    fn limits(&self) -> &SessionLimits {
        &self.limits
    }

    fn reserve_thread(&self) -> Result<ThreadPermit> {
        if !self.lanes.lock().threads.reserve_for_function() {
            return Err(RpcError::new(
                ErrorKind::LimitExceeded,
                "the session, or all sessions together, may have no more threads (max_threads, max_total_threads)",
            ));
        }
        Ok(ThreadPermit::new(ReservedThread(self.this.clone())))
    }

    fn has_ended(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    fn usage(&self) -> Usage {
        Usage { handles: self.table.lock().len() as u64, memory_bytes: self.memory.used() }
    }
}

impl LocalInner {
    /// Checks that the client has a permission.
    pub(super) fn authorize(&self, permission: &Permission<'_>) -> Result<()> {
        self.access.as_ref().map_or(Ok(()), |access| access.check(permission))
    }

    fn may_call(&self, name: &str) -> bool {
        self.authorize(&Permission::Function(name)).is_ok()
    }
}

/// A thread that a function runs for itself, counted until this is dropped.
struct ReservedThread(Weak<LocalInner>);

impl Drop for ReservedThread {
    fn drop(&mut self) {
        let Some(session) = self.0.upgrade() else { return };
        let lease = session.lanes.lock().threads.left_by_function();
        drop(lease);
        // Jobs of this session may have waited for its own limit, for which no quota calls back.
        session.start_parked();
    }
}
