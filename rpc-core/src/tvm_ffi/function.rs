//! Foreign functions as functions of the session.

use std::ffi::c_void;
use std::sync::Arc;

use super::api::Api;
use super::arguments::Arguments;
use super::object::Ref;
use super::signature::Typed;
use super::{frame, value};
use crate::device::Stream;
use crate::dlpack::{Device, DeviceType};
use crate::error::{Result, RpcError};
use crate::object::{Context, Function, FunctionKind, LocalValue, Object};
use crate::tensor::Borrow;
use crate::value::Value;

/// A function object, with what is known of it.
pub(super) struct FfiFunction {
    api: &'static Api,
    object: Ref,
    typed: Typed,
    kind: FunctionKind,
}

/// A function of which nothing is known.
pub(super) fn untyped(api: &'static Api, object: Ref) -> Function {
    wrap(api, object, Typed::unknown(), FunctionKind::Blocking)
}

/// A function that runs as `kind` says, which is not [`FunctionKind::Async`].
pub(super) fn wrap(api: &'static Api, object: Ref, typed: Typed, kind: FunctionKind) -> Function {
    let signature = typed.signature.clone();
    let function = Arc::new(FfiFunction { api, object, typed, kind });
    let origin = function.clone();
    Function::foreign(kind, signature, Some(origin), move |context, values, borrows| {
        function.call(context, values, borrows)
    })
}

impl FfiFunction {
    pub(super) fn object(&self) -> &Ref {
        &self.object
    }

    fn call(&self, context: &Context, values: Vec<LocalValue>, borrows: Vec<Borrow>) -> Result<LocalValue> {
        if let Some(wants) = &self.typed.wants
            && wants.len() != values.len()
        {
            let (expected, got) = (wants.len(), values.len());
            return Err(RpcError::invalid_argument(format!(
                "the function takes {expected} arguments, and {got} were given"
            )));
        }
        let _frame = frame::enter(context, self.kind, borrows);
        let _streams = Streams::set(self.api, context, &values)?;
        let wants = self.typed.wants.as_deref().unwrap_or_default();
        let mut arguments = Arguments::new(self.api, context, values, wants)?;
        let returned = self.api.call(&self.object, arguments.as_mut_slice())?;
        // SAFETY: it is whole, and alive until it is dropped.
        let value = unsafe { value::from_any(self.api, context, &returned.view()) };
        value.map_err(|error| error.context("the return").may_have_run(true))
    }
}

/// The streams of the devices that a call uses, told to foreign code for as long as it runs.
struct Streams {
    api: &'static Api,
    set: Vec<(Device, *mut c_void, Arc<dyn Stream>)>,
}

impl Streams {
    fn set(api: &'static Api, context: &Context, values: &[LocalValue]) -> Result<Self> {
        let mut streams = Self { api, set: Vec::new() };
        for value in values {
            streams.visit(context, value)?;
        }
        Ok(streams)
    }

    fn visit(&mut self, context: &Context, value: &LocalValue) -> Result<()> {
        match value {
            Value::Object(Object::Tensor(tensor)) => self.add(context, tensor.device()),
            // It may be one that only foreign code knows.
            Value::Device(device) if context.devices().get(*device).is_ok() => self.add(context, *device),
            Value::List(values) => values.iter().try_for_each(|value| self.visit(context, value)),
            Value::Map(pairs) => pairs.iter().try_for_each(|(key, value)| {
                self.visit(context, key)?;
                self.visit(context, value)
            }),
            _ => Ok(()),
        }
    }

    fn add(&mut self, context: &Context, device: Device) -> Result<()> {
        if device.kind == DeviceType::CPU || self.set.iter().any(|(known, ..)| *known == device) {
            return Ok(());
        }
        let stream = context.stream(device)?;
        if let Some(handle) = stream.library_handle()? {
            let before = self.api.set_stream(device.kind.0, device.index, handle.as_ptr())?;
            self.set.push((device, before, stream));
        }
        Ok(())
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        for (device, before, _) in self.set.drain(..).rev() {
            if let Err(error) = self.api.set_stream(device.kind.0, device.index, before) {
                tracing::warn!(%error, %device, "foreign code keeps a stream that may be gone");
            }
        }
    }
}
