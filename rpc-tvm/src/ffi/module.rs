//! Foreign modules, wrapped as modules of the session. Recursive with `value.rs`, see there.

use std::any::Any as AnyType;
use std::path::Path;
use std::sync::Arc;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::abi::Any;
use super::api::Api;
use super::object::Ref;
use super::signature::Typed;
use super::{elf, function};
use rpc_core::dlpack::{Device, DeviceType};
use rpc_core::error::{Result, RpcError};
use rpc_core::function::{Context, Function, FunctionKind, Module, Signature};
use rpc_dylib::reason;

/// A module of TVM-FFI.
pub(super) struct FfiModule {
    api: &'static Api,
    object: Ref,
    name: String,
    /// Functions that its file exports. A module may have further functions, which cannot be
    /// listed.
    exports: Vec<String>,
    /// Exported functions that promise not to block.
    inline: Vec<String>,
}

impl FfiModule {
    /// Loads a file. It stays loaded for as long as the process lives, because the last pointer
    /// into it cannot be known.
    pub(super) fn load(api: &'static Api, file: &Path, name: &str) -> Result<Self> {
        let refused = |error: RpcError| error.context(format_args!("cannot load the module {name}"));
        let exports = elf::exports(file).map_err(refused)?;
        let path = file
            .to_str()
            .ok_or_else(|| RpcError::invalid_argument(format!("the path {} is not Unicode", file.display())))?;
        // TVM-FFI would resolve symbols lazily, and the process would end at a missing one.
        // SAFETY: a user who may load modules may run code.
        let library = unsafe { Library::open(Some(file), RTLD_NOW | RTLD_LOCAL) };
        let library = library.map_err(|error| refused(RpcError::invalid_argument(reason(&error))))?;
        std::mem::forget(library);
        let load = api.global("ffi.ModuleLoadFromFile")?;
        let path = api.text(path)?;
        let object = api.call(&load, &mut [path.view()]).and_then(|module| module.to_object()).map_err(refused)?;
        std::mem::forget(object.clone());
        let inline = match api.module_function(&object, INLINE)? {
            Some(names) => api.call(&names, &mut []).and_then(|names| names.to_text()).map_err(refused)?,
            None => String::new(),
        };
        let inline = inline.split(',').map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect();
        Ok(Self { api, object, name: name.to_owned(), exports, inline })
    }

    /// Wraps a module that a function has returned, whose file is unknown.
    pub(super) fn returned(api: &'static Api, object: Ref) -> Self {
        let kind = object.type_key();
        Self { api, object, name: kind, exports: Vec::new(), inline: Vec::new() }
    }

    fn typed(&self, name: &str) -> Typed {
        // Metadata that fail count as none.
        let metadata = self.api.module_metadata(&self.object, name).ok().flatten();
        metadata.map_or_else(Typed::unknown, |metadata| Typed::from_metadata(&metadata))
    }
}

/// Name of the function by which a module lists its functions that do not block: it takes nothing,
/// and returns their names, separated by commas.
pub(super) const INLINE: &str = "rpc_inline";

impl Module for FfiModule {
    /// Returns the module's object, which is passed where foreign code takes the module as an
    /// argument.
    fn as_any(&self) -> Option<&dyn AnyType> {
        Some(&self.object)
    }

    fn name(&self) -> &str {
        &self.name
    }

    /// For a model that TVM has compiled for its virtual machine, returns a machine with the model,
    /// whose memory comes from pools.
    fn instance(&self, context: &Context, device: Device) -> Result<Option<Arc<dyn Module>>> {
        const POOLED: Any = Any::int(2);

        let Some(load) = self.api.module_function(&self.object, "vm_load_executable")? else { return Ok(None) };
        context.devices().get(device)?;
        let failed = |error: RpcError| error.context(format_args!("cannot set up the model {} on {device}", self.name));
        let machine = self.api.call(&load, &mut []).and_then(|machine| machine.to_object()).map_err(failed)?;
        let machine = Self { name: self.name.clone(), ..Self::returned(self.api, machine) };
        let initialise = self.api.module_function(&machine.object, "vm_initialization")?;
        let initialise =
            initialise.ok_or_else(|| failed(RpcError::unsupported("its machine is of another version")))?;
        let mut args = vec![Any::int(device.kind.0.into()), Any::int(device.index.into()), POOLED];
        if device.kind != DeviceType::CPU {
            // Shapes are computed on the processor.
            args.extend([Any::int(DeviceType::CPU.0.into()), Any::int(0), POOLED]);
        }
        self.api.call(&initialise, &mut args).map_err(failed)?;
        Ok(Some(Arc::new(machine)))
    }

    fn function(&self, name: &str) -> Result<Function> {
        let Some(object) = self.api.module_function(&self.object, name)? else {
            let known = match &*self.exports {
                [] => String::new(),
                exports => format!("; it exports {}", some_of(exports)),
            };
            return Err(RpcError::not_found(format!("module {} has no function '{name}'{known}", self.name)));
        };
        let inline = self.inline.iter().any(|inline| inline == name);
        let kind = if inline { FunctionKind::Inline } else { FunctionKind::Blocking };
        Ok(function::wrap(self.api, object, self.typed(name), kind))
    }

    fn functions(&self) -> Vec<(String, Signature)> {
        self.exports.iter().map(|name| (name.clone(), self.typed(name).signature)).collect()
    }
}

/// Lists as many names as an error message should have.
fn some_of(names: &[String]) -> String {
    let shown = names.iter().take(20).map(String::as_str).collect::<Vec<_>>().join(", ");
    match names.len().checked_sub(20) {
        None | Some(0) => shown,
        Some(more) => format!("{shown} and {more} more"),
    }
}
