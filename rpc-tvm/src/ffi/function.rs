//! Foreign functions, wrapped as functions of the session.

use std::ffi::c_void;
use std::rc::Rc;
use std::sync::Arc;

use super::api::Api;
use super::arguments::Arguments;
use super::object::Ref;
use super::signature::Typed;
use super::{call_frame as frame, value};
use rpc_core::device::Stream;
use rpc_core::dlpack::{Device, DeviceType};
use rpc_core::error::{Result, RpcError};
use rpc_core::function::{Context, Function, FunctionKind, LocalValue, Object};
use rpc_core::tensor::Borrow;
use rpc_core::value::Value;

/// A function object, with its known signature.
pub(super) struct FfiFunction {
    api: &'static Api,
    object: Ref,
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
        if let Some(forms) = &self.typed.forms
            && forms.len() != values.len()
        {
            let (expected, got) = (forms.len(), values.len());
            return Err(RpcError::invalid_argument(format!("the function takes {expected} arguments, got {got}")));
        }
        let frame = frame::enter(context, self.kind, borrows);
        let streams = Streams::set(self.api, context, &values)?;
        frame.set_lanes(streams.lanes());
        let forms = self.typed.forms.as_deref().unwrap_or_default();
        let mut arguments = Arguments::new(self.api, context, values, forms)?;
        // Behind everything that converting the tensors' addresses has made the default stream wait
        // for.
        streams.begin()?;
        let returned = self.api.call(&self.object, arguments.as_mut_slice())?;
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

/// The stream of a lane.
pub(super) struct LaneStream {
    stream: Arc<dyn Stream>,
    /// The device's default stream, if it is a different one.
    default: Option<Arc<dyn Stream>>,
}

impl LaneStream {
    pub(super) fn of(context: &Context, device: Device) -> Result<Self> {
        let stream = context.stream(device)?;
        let default = context.devices().get(device)?.default_stream(device.index)?;
        let is_default = default.library_handle()? == stream.library_handle()?;
        Ok(Self { stream, default: (!is_default).then_some(default) })
    }

    /// Lets work submitted to the stream begin after the session's work so far.
    pub(super) fn begin(&self) -> Result<()> {
        self.default.as_ref().map_or(Ok(()), |default| self.stream.wait_for(&**default))
    }

    /// Lets the session's work from now on begin after the work submitted to the stream.
    pub(super) fn end(&self) {
        let ended = self.default.as_ref().map_or(Ok(()), |default| default.wait_for(&*self.stream));
        if let Err(error) = ended {
            // The only remaining way to keep the order. A lost device is reported by every later
            // call.
            let waited = self.stream.synchronize();
            tracing::warn!(%error, ?waited, "a stream could not be put in order with the default one");
        }
    }
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
                tracing::warn!(%error, %device, "foreign code keeps a stream that may be gone");
            }
        }
    }
}
