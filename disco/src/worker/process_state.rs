//! State that the workers of one process share: their set-up, their rendezvous, and the modules
//! that are loaded.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use rpc_core::{Context, Device, Module, Result, RpcError};

use crate::held_memory::HeldMemory;
use crate::link::relayed_data::Relays;
use crate::wire::event::EventSink;
use crate::wire::set_up::SetUp;
use crate::worker::rendezvous::Rendezvous;

/// State that the workers of one process share.
pub(crate) struct ProcessState {
    sink: Arc<dyn EventSink>,
    set_up: SetUp,
    /// True if the controller is in this process, too.
    is_beside_controller: bool,
    rendezvous: Rendezvous,
    relays: Arc<Relays>,
    modules: Mutex<Modules>,
}

/// Modules that are loaded, or are being loaded.
#[derive(Default)]
struct Modules {
    slots: HashMap<ModuleKey, Arc<ModuleSlot>>,
    /// Charge for the entries; `None` before the first.
    held: Option<HeldMemory>,
}

/// Path of a module, and the device that it is loaded on.
type ModuleKey = (String, Option<Device>);

/// A module, once it is loaded.
type ModuleSlot = Mutex<Option<Arc<dyn Module>>>;

/// Longest path of a module, in bytes: the longest that systems open.
const MAX_PATH: usize = 4096;

/// Bytes that an entry is charged with beside its path, for its place in the table and its slot.
const ENTRY_COST: usize = 256;

impl ProcessState {
    pub(crate) fn new(
        sink: Arc<dyn EventSink>,
        set_up: SetUp,
        relays: Arc<Relays>,
        is_beside_controller: bool,
    ) -> Self {
        let (rendezvous, modules) = (Rendezvous::default(), Mutex::default());
        Self { sink, set_up, is_beside_controller, rendezvous, relays, modules }
    }

    pub(crate) fn is_beside_controller(&self) -> bool {
        self.is_beside_controller
    }

    pub(crate) fn sink(&self) -> Arc<dyn EventSink> {
        Arc::clone(&self.sink)
    }

    pub(crate) fn set_up(&self) -> &SetUp {
        &self.set_up
    }

    pub(crate) fn rendezvous(&self) -> &Rendezvous {
        &self.rendezvous
    }

    pub(crate) fn relays(&self) -> &Arc<Relays> {
        &self.relays
    }

    /// Loads a module on the device of `context`, or finds it where another worker of this process
    /// has. A module that is loaded stays so, and is charged to the session; one that cannot be
    /// loaded leaves nothing behind.
    ///
    /// # Errors
    ///
    /// Those of the loader; [`ErrorKind::LimitExceeded`](rpc_core::ErrorKind::LimitExceeded): the
    /// path is longer than [`MAX_PATH`], or the session may hold no more.
    pub(crate) fn load_module(&self, context: &Context, path: &str) -> Result<Arc<dyn Module>> {
        if path.len() > MAX_PATH {
            return Err(RpcError::limit("bytes of a module's path", MAX_PATH as u64, path.len() as u64));
        }
        let key = (path.to_owned(), context.chosen_device());
        let slot = self.modules.lock().slot(&key, context)?;
        // Held while it loads, so that it is loaded once. Others may load others meanwhile.
        let mut loaded = slot.lock();
        if let Some(module) = &*loaded {
            return Ok(Arc::clone(module));
        }
        match context.load_module(path, None) {
            Ok(module) => Ok(Arc::clone(loaded.insert(module))),
            Err(error) => {
                self.modules.lock().remove_unused(&key, &slot);
                Err(error)
            }
        }
    }
}

impl Modules {
    /// Returns the slot of a module; charges a new one.
    fn slot(&mut self, key: &ModuleKey, context: &Context) -> Result<Arc<ModuleSlot>> {
        if let Some(slot) = self.slots.get(key) {
            return Ok(Arc::clone(slot));
        }
        self.held.get_or_insert_with(|| HeldMemory::new(context.detached())).add(cost(key))?;
        Ok(Arc::clone(self.slots.entry(key.clone()).or_default()))
    }

    /// Removes a slot that is empty, and that no other worker waits for: the last of those that
    /// wait removes it, unless it loads the module.
    fn remove_unused(&mut self, key: &ModuleKey, slot: &Arc<ModuleSlot>) {
        // One is the table's, one the caller's.
        if Arc::strong_count(slot) == 2 && self.slots.remove(key).is_some() {
            self.held.iter_mut().for_each(|held| held.remove(cost(key)));
        }
    }
}

fn cost(key: &ModuleKey) -> usize {
    key.0.len() + ENTRY_COST
}
