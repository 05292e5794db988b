//! `rpc.module.*`: native modules, uploaded in pieces.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use rpc_core::modules::Digest;
use rpc_core::{Context, Module, Registry, Result, Shared};

use crate::modules::{ModuleError, ModuleService, ModuleUpload, StoreLoader};

/// A module on its way into the store: empty once it was committed.
struct Upload(Mutex<Option<ModuleUpload>>);

impl Upload {
    /// A write that panicked leaves an upload that is merely incomplete.
    fn lock(&self) -> MutexGuard<'_, Option<ModuleUpload>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) fn register(registry: &Registry) {
    // The loader comes with the functions, once, however often these are registered.
    if registry.get("rpc.module.find").is_err() {
        registry.add_loader(Arc::new(StoreLoader));
    }
    registry
        .add("rpc.module.find", |context: Context, digest: String| -> Result<bool> {
            Ok(ModuleService::of(&context)?.store().contains(&parse(&digest)?)?)
        })
        .add("rpc.module.begin_upload", |context: Context, digest: String, len: u64| -> Result<_> {
            let upload = ModuleService::of(&context)?.store().begin_upload(parse(&digest)?, len)?;
            Ok(Shared(Arc::new(Upload(Mutex::new(Some(upload))))))
        })
        .add("rpc.module.write", |Shared(upload): Shared<Upload>, offset: u64, data: Bytes| -> Result<()> {
            Ok(upload.lock().as_mut().ok_or(ModuleError::Over)?.write(offset, &data)?)
        })
        .add("rpc.module.commit", |Shared(upload): Shared<Upload>| -> Result<()> {
            let upload = upload.lock().take().ok_or(ModuleError::Over)?;
            Ok(upload.commit()?)
        })
        .add("rpc.module.import", |context: Context, path: String| -> Result<String> {
            Ok(ModuleService::of(&context)?.import(&context, &path)?.to_string())
        })
        .add("rpc.module.functions", |module: Arc<dyn Module>| {
            let functions = module.functions().into_iter();
            functions.map(|(name, signature)| (name, signature.to_string())).collect::<Vec<_>>()
        });
}

/// A digest, with `sha256:` in front or without.
fn parse(text: &str) -> Result<Digest, ModuleError> {
    Digest::from_module_path(text).unwrap_or_else(|| text.parse()).map_err(|source| ModuleError::NoDigest {
        // As much as an error should carry.
        text: text.chars().take(128).collect(),
        source,
    })
}
