//! State that the workers of one process share: their set-up, their rendezvous, and the modules
//! that are loaded.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use rpc_core::{Context, Device, Module, Result};

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

/// Modules by their paths and the devices that they were loaded on.
type Modules = HashMap<(String, Option<Device>), Arc<LoadedModule>>;

/// A module, once it is loaded.
type LoadedModule = Mutex<Option<Arc<dyn Module>>>;

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
    /// has.
    pub(crate) fn load_module(&self, context: &Context, path: &str) -> Result<Arc<dyn Module>> {
        let slot = {
            let mut modules = self.modules.lock();
            Arc::clone(modules.entry((path.to_owned(), context.chosen_device())).or_default())
        };
        // Held while it loads, so that it is loaded once. Others may load others meanwhile.
        let mut slot = slot.lock();
        if let Some(module) = &*slot {
            return Ok(Arc::clone(module));
        }
        let module = context.load_module(path, None)?;
        *slot = Some(Arc::clone(&module));
        Ok(module)
    }
}
