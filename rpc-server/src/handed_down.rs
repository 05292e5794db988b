//! Settings that a server hands down to the processes of Disco's workers
//! ([`Hosting::Processes`](disco::Hosting::Processes)). A worker runs this same program, and knows
//! nothing else of the server's settings and of the session's client.

use std::sync::{Arc, OnceLock};

use disco::NodeSettings;
use serde::{Deserialize, Serialize};

use crate::config::{ServeConfig, ServeSettings};
use crate::file_cache::FileCache;
use crate::policy::ClientIdentity;

/// The settings of a server for the workers of its sessions.
#[derive(Debug)]
pub(crate) struct SettingsForWorkers {
    /// Part of the settings of the server, as TOML.
    server: String,
}

/// Form in which a worker's process gets the settings: JSON.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HandedDown {
    server: String,
    /// Identity of the session's client, as text.
    client: String,
}

impl SettingsForWorkers {
    /// Returns the settings for workers of a server; `None` if they do nothing by them: run native
    /// code, or use the cache of files.
    ///
    /// The settings name the file of digests instead of containing the digests, because they are an
    /// argument of the worker processes. Workers read the file again.
    pub(crate) fn of(config: &ServeConfig) -> Option<Self> {
        if !config.runs_native_code() && FileCache::of(config).is_none() {
            return None;
        }
        let settings = ServeSettings {
            workdir: Some(config.workdir.clone()),
            file_cache: Some(config.file_cache),
            workspace_quota: Some(config.workspace_quota),
            workspace_expiry: Some(config.workspace_expiry),
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
            Ok(server) => Some(Self { server }),
            Err(error) => {
                rpc_core::log_limited!(
                    WARN,
                    %error,
                    "worker processes run no native code, and have no cache of files: use UTF-8 names for files"
                );
                None
            }
        }
    }

    /// Returns the settings for the workers of a session of this client.
    pub(crate) fn in_session(&self, client: &ClientIdentity) -> Option<Arc<NodeSettings>> {
        let settings = HandedDown { server: self.server.clone(), client: client.0.clone() };
        let text = serde_json::to_string(&settings);
        let text = text.map_err(|error| rpc_core::log_limited!(WARN, %error, "settings of workers cannot be written"));
        text.ok().map(|text| Arc::new(NodeSettings::new(text)))
    }
}

/// Returns the configuration of the server, if this is a worker process whose server has handed it
/// down.
pub(crate) fn config() -> Option<ServeConfig> {
    let settings = ServeSettings::from_toml(&handed_down()?.server, "of the node".as_ref());
    let resolved = settings.and_then(ServeSettings::resolve);
    resolved.map_err(|error| rpc_core::log_limited!(ERROR, %error, "the settings of the node cannot be used")).ok()
}

/// Returns the server's cache of files and the identity of the session's client, if this is a
/// worker process of a server that has a cache.
pub(crate) fn file_cache() -> Option<(Arc<FileCache>, Arc<ClientIdentity>)> {
    static CACHE: OnceLock<Option<(Arc<FileCache>, Arc<ClientIdentity>)>> = OnceLock::new();
    let open = || {
        let cache = FileCache::of(&config()?)?;
        Some((cache, Arc::new(ClientIdentity(handed_down()?.client))))
    };
    CACHE.get_or_init(open).clone()
}

fn handed_down() -> Option<HandedDown> {
    let settings = NodeSettings::of_this_process()?;
    let read = serde_json::from_str(settings.text());
    read.map_err(|error| rpc_core::log_limited!(ERROR, %error, "the settings of the node cannot be read")).ok()
}
