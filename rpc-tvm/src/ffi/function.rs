//! Foreign functions, wrapped as functions of the session. Recursive with `value.rs`, see there.

use std::ffi::c_void;
use std::rc::Rc;
use std::sync::Arc;

use super::api::Api;
use super::arguments::Arguments;
use super::lane_stream::LaneStream;
use super::object::Ref;
use super::signature::Typed;
use super::{call_frame, value};
use rpc_core::dlpack::{Device, DeviceType};
use rpc_core::error::{Result, RpcError};
use rpc_core::function::{Context, Function, FunctionKind, LocalValue, Object};
use rpc_core::tensor::Borrow;
use rpc_core::value::Value;

/// A function object, with its known signature.
struct FfiFunction {
    api: &'static Api,
    object: Arc<Ref>,
    typed: Typed,
    kind: FunctionKind,
}

/// Wraps a function with unknown parameters.
pub(super) fn untyped(api: &'static Api, object: Ref) -> Function {
    wrap(api, object, Typed::unknown(), FunctionKind::Blocking)
}

/// Wraps a function that runs as `kind` says, which is not [`FunctionKind::Async`].
pub(super) fn wrap(api: &'static Api, object: Ref, typed: Typed, kind: FunctionKind) -> Function {
    let signature = typed.signature.clone();
    let object = Arc::new(object);
    let function = FfiFunction { api, object: object.clone(), typed, kind };
    // The object itself is passed where foreign code takes the function as an argument.
    Function::foreign(kind, signature, Some(object), move |context, values, borrows| {
        function.call(context, values, borrows)
    })
}

impl FfiFunction {
    fn call(&self, context: &Context, values: Vec<LocalValue>, borrows: Vec<Borrow>) -> Result<LocalValue> {
        if let Some(forms) = &self.typed.forms
            && forms.len() != values.len()
        {
            let (expected, got) = (forms.len(), values.len());
            return Err(RpcError::invalid_argument(format!("the function takes {expected} arguments, got {got}")));
        }
        let frame = call_frame::enter(context, self.kind, borrows);
        if self.kind == FunctionKind::Inline
            && let Some(storage) = frame.host_memory()
        {
            let device = storage.device();
            return Err(RpcError::unsupported(format!(
                "an inline function was given memory of {device} that the processor reaches, too: the call would have \
                 to wait for the device, and other requests with it; leave the function out of the module's \
                 'rpc_inline', or pass a tensor that is on one side alone"
            )));
        }
        let streams = Streams::set(self.api, context, &values)?;
        frame.set_lanes(streams.lanes());
        let forms = self.typed.forms.as_deref().unwrap_or_default();
        let mut arguments = Arguments::new(self.api, context, values, forms)?;
        // Behind everything that converting the tensors' addresses has made the default stream wait
        // for.
        streams.begin()?;
        let returned = self.api.call(&self.object, arguments.as_mut_slice());
        // Also after an error: some work may have been submitted.
        let waited = frame.wait_for_host_memory();
        let returned = returned?;
        waited.map_err(|error| error.may_have_run(true))?;
        // SAFETY: it is complete, and alive until it is dropped.
        let value = unsafe { value::from_any(self.api, context, &returned.view()) };
        value.map_err(|error| error.context("the return").may_have_run(true))
    }
}

/// Streams of the devices that a call uses, set in foreign code for the duration of the call. Work
/// that foreign code submits to them is ordered with the devices' default streams, on which
/// sessions do all other work on the memory.
struct Streams {
    api: &'static Api,
    set: Vec<SetStream>,
}

struct SetStream {
    device: Device,
    /// Stream that foreign code had before.
    before: *mut c_void,
    lane: Rc<LaneStream>,
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
            // The device may be one that only foreign code knows.
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
        if device.kind == DeviceType::CPU || self.set.iter().any(|set| set.device == device) {
            return Ok(());
        }
        let lane = LaneStream::of(context, device)?;
        if let Some(handle) = lane.stream.library_handle()? {
            let before = self.api.set_stream(device.kind.0, device.index, handle.as_ptr())?;
            self.set.push(SetStream { device, before, lane: Rc::new(lane) });
        }
        Ok(())
    }

    fn lanes(&self) -> Vec<Rc<LaneStream>> {
        self.set.iter().map(|set| set.lane.clone()).collect()
    }

    fn begin(&self) -> Result<()> {
        self.set.iter().try_for_each(|set| set.lane.begin())
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        for SetStream { device, before, lane } in self.set.drain(..).rev() {
            lane.end();
            if let Err(error) = self.api.set_stream(device.kind.0, device.index, before) {
                rpc_core::log_limited!(WARN, %error, %device, "foreign code keeps a stream that may be gone");
            }
        }
    }
}
