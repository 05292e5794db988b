//! `rpc.module.*`: native modules, uploaded in pieces.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use rpc_core::client::Digest;
use rpc_core::{Context, Function, Module, Registry, Result, Shared, TensorView};

use super::files::OpenFile;
use crate::modules::{ModuleError, ModuleService, ModuleUpload, PIECE, StoreLoader};

/// Object of an upload; empty after the commit.
struct Upload(Mutex<Option<OpenFile<ModuleUpload>>>);

impl Upload {
    /// Locks the upload. A write that panicked leaves an incomplete upload, which is consistent.
    fn lock(&self) -> MutexGuard<'_, Option<OpenFile<ModuleUpload>>> {
        self.0.lock()
    }
}

pub(super) fn register(registry: &Registry) {
    // Registered with the functions, and only once.
    if registry.get("rpc.module.find").is_err() {
        registry.add_loader(Arc::new(StoreLoader));
    }
    registry
        .add("rpc.module.find", |context: Context, digest: String| -> Result<bool> {
            Ok(ModuleService::of(&context)?.store().contains(&parse(&digest)?)?)
        })
        .add("rpc.module.begin_upload", |context: Context, digest: String, len: u64| -> Result<_> {
            let _open = context.reserve_open_files(1)?;
            let file = ModuleService::of(&context)?.store().begin_upload(parse(&digest)?, len)?;
            Ok(Shared(Arc::new(Upload(Mutex::new(Some(OpenFile { file, _open }))))))
        })
        .add("rpc.module.write", |Shared(upload): Shared<Upload>, offset: u64, data: Bytes| -> Result<()> {
            Ok(upload.lock().as_mut().ok_or(ModuleError::Over)?.file.write(offset, &data)?)
        })
        .add("rpc.module.commit", |Shared(upload): Shared<Upload>| -> Result<()> {
            let upload = upload.lock().take().ok_or(ModuleError::Over)?;
            Ok(upload.file.commit()?)
        })
        .add("rpc.module.import", |context: Context, path: String| -> Result<String> {
            Ok(ModuleService::of(&context)?.import(&context, &path)?.to_string())
        })
        .add("rpc.module.link", |context: Context, path: String, library: String| -> Result<()> {
            let _open = context.reserve_open_files(2)?;
            ModuleService::of(&context)?.link(&context, &path, &library)
        })
        .add("rpc.module.add_import", |context: Context, importer: Arc<dyn Module>, imported: Arc<dyn Module>| {
            ModuleService::of(&context)?.add_import(&context, &*importer, &*imported)
        })
        .add("rpc.module.own_function", |context: Context, module: Arc<dyn Module>, name: String| -> Result<Function> {
            ModuleService::of(&context)?.own_function(&*module, &name)
        })
        .add("rpc.module.import_tensor", |context: Context, digest: String, tensor: TensorView| -> Result<()> {
            let service = ModuleService::of(&context)?;
            import_tensor(&context, &service, parse(&digest)?, &tensor)
        })
        .add("rpc.module.functions", |module: Arc<dyn Module>| {
            let functions = module.functions().into_iter();
            functions.map(|(name, signature)| (name, signature.to_string())).collect::<Vec<_>>()
        });
}

/// Imports the module whose bytes are those of `tensor`, on any device: the way by which a Disco
/// worker gets a module from another one.
fn import_tensor(context: &Context, service: &ModuleService, digest: Digest, tensor: &TensorView) -> Result<()> {
    // Workers on one machine import it at the same time. This comes first: others may wait for the
    // memory.
    let _alone = service.store().importing()?;
    if service.store().contains(&digest)? {
        return Ok(());
    }
    let bytes = tensor.tensor().byte_range(0, tensor.tensor().size_bytes())?;
    let mut upload = service.store().begin_upload(digest, bytes.end - bytes.start)?;
    let _staged = context.stage(PIECE as u64)?;
    let mut piece = vec![0; PIECE];
    while upload.len() < bytes.end - bytes.start {
        let at = bytes.start + upload.len();
        // At most one piece, which fits memory.
        let piece = &mut piece[..(bytes.end - at).min(PIECE as u64) as usize];
        tensor.guard().copy_out(at, piece)?;
        upload.write(upload.len(), piece)?;
    }
    Ok(upload.commit()?)
}

/// Parses a digest, with or without the prefix `sha256:`.
fn parse(text: &str) -> Result<Digest, ModuleError> {
    Digest::from_module_path(text).unwrap_or_else(|| text.parse()).map_err(|source| ModuleError::NoDigest {
        // Shortened for the error.
        text: text.chars().take(128).collect(),
        source,
    })
}
