//! Modules in the processes of a session's workers ([`Hosting::Processes`](disco::Hosting::Processes)), which are this program
//! again: the session hands its settings down to them.

use std::sync::{Arc, Mutex, PoisonError};

use disco::NodeSettings;
use rpc_core::Registry;

use super::{DigestList, ModuleError, ModuleService, Native};
use crate::config::{ServeConfig, ServeSettings};

/// What workers have to know of a server with these settings; `None` if it runs no native code.
///
/// The list of digests is named and not contained, since this is an argument of their processes, and read again there.
pub(crate) fn handed_down(config: &ServeConfig) -> Option<Arc<NodeSettings>> {
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
            tracing::warn!(%error, "processes of workers run no native code: name files with characters of UTF-8 alone");
            None
        }
    }
}

/// Loads the operator's libraries, if this is the process of a worker whose node has some, and offers their functions.
pub(crate) fn offer_libraries(registry: &Registry) {
    let Some(config) = config() else { return };
    if let Err(error) = Native::new(&config).offer_libraries(registry) {
        // The controller sees what workers log.
        tracing::error!(%error, "a library cannot be loaded (--library)");
    }
}

/// The service of this process, if it is that of a worker whose node takes modules. It is opened when it is first wanted.
pub(super) fn service() -> Result<Option<Arc<ModuleService>>, ModuleError> {
    static SERVICE: Mutex<Option<Arc<ModuleService>>> = Mutex::new(None);
    let mut service = SERVICE.lock().unwrap_or_else(PoisonError::into_inner);
    if service.is_none()
        && let Some(config) = config()
    {
        let digests = config.module_digests.as_deref().map(DigestList::read).transpose()?;
        *service = ModuleService::open(&config, digests, &Native::new(&config))?;
    }
    Ok(service.clone())
}

fn config() -> Option<ServeConfig> {
    let settings = NodeSettings::of_this_process()?;
    let resolved = ServeSettings::from_toml(settings.text(), "of the node".as_ref()).and_then(ServeSettings::resolve);
    resolved.map_err(|error| tracing::error!(%error, "the settings of the node cannot be used")).ok()
}
