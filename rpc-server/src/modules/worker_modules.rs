//! Modules in the worker processes of a session
//! ([`Hosting::Processes`](disco::Hosting::Processes)). A worker runs this same program, and gets
//! the settings of the session.

use std::sync::Arc;

use parking_lot::Mutex;
use rpc_core::Registry;

use super::{DigestList, ModuleError, ModuleService, Native, Sharing};
use crate::handed_down::config;

/// Loads the operator's libraries and adds their functions to `registry`, if this is a worker
/// process whose node has libraries.
pub(crate) fn offer_libraries(registry: &Registry) {
    let Some(config) = config() else { return };
    if let Err(error) = Native::new(&config).offer_libraries(registry) {
        // Events that workers log reach the controller.
        rpc_core::log_limited!(ERROR, %error, "a library cannot be loaded (--library)");
    }
}

/// Returns the module service of this process, if it is a worker process whose node takes modules.
/// Opens it at the first call.
pub(super) fn service() -> Result<Option<Arc<ModuleService>>, ModuleError> {
    static SERVICE: Mutex<Option<Arc<ModuleService>>> = Mutex::new(None);
    let mut service = SERVICE.lock();
    if service.is_none()
        && let Some(config) = config()
    {
        let digests = config.module_digests.as_deref().map(DigestList::read).transpose()?;
        *service = ModuleService::open(&config, digests, &Native::new(&config), Sharing::Sessions)?;
    }
    Ok(service.clone())
}
