//! Modules in the worker processes of a session
//! ([`Hosting::Processes`](disco::Hosting::Processes)). A worker runs this same program, and gets
//! the settings of the session.

use std::sync::Arc;

use disco::NodeSettings;
use parking_lot::Mutex;
use rpc_core::Registry;

use super::{DigestList, ModuleError, ModuleService, Native, Sharing};
use crate::config::{ServeConfig, ServeSettings};

/// Returns the settings for workers of a server; `None` if it runs no native code.
///
/// The settings name the file of digests instead of containing the digests, because they are an
/// argument of the worker processes. Workers read the file again.
pub(crate) fn settings_for_workers(config: &ServeConfig) -> Option<Arc<NodeSettings>> {
    if !config.runs_native_code() {
        return None;
    }
    let settings = ServeSettings {
        workdir: Some(config.workdir.clone()),
        allow_modules: Some(config.allow_modules),
        module_digests: config.module_digests.clone(),
        module_store: config.module_store.clone(),
        module_store_size: Some(config.module_store_size),
        max_module: Some(config.max_module),
        module_expiry: Some(config.module_expiry),
        library: Some(config.library.clone()),
        runtime_library: Some(config.runtime_library.clone()),
        tvm_ffi: config.tvm_ffi.clone(),
        ..ServeSettings::default()
    };
    match toml::to_string(&settings) {
        Ok(text) => Some(Arc::new(NodeSettings::new(text))),
        Err(error) => {
            rpc_core::log_limited!(WARN, %error, "worker processes run no native code: use UTF-8 names for files");
            None
        }
    }
}

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

fn config() -> Option<ServeConfig> {
    let settings = NodeSettings::of_this_process()?;
    let resolved = ServeSettings::from_toml(settings.text(), "of the node".as_ref()).and_then(ServeSettings::resolve);
    resolved.map_err(|error| rpc_core::log_limited!(ERROR, %error, "the settings of the node cannot be used")).ok()
}
