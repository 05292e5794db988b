//! Execution of operations of a local session other than calls.

use std::sync::Arc;

use bytes::Bytes;

use super::LocalInner;
use super::job::LaneKey;
use super::resolve::{self, PinnedOperation, StreamObject};
use crate::access_control::Permission;
use crate::device::BOUNCE_BYTES;
use crate::dlpack::DeviceType;
use crate::error::{ErrorKind, Result, RpcError};
use crate::function::context::{Context, Host};
use crate::function::object::{LocalValue, Object};
use crate::tensor::{Borrow, Tensor};
use crate::value::Value;

/// Largest number of pairs of lane and device with a stream set, per session.
const MAX_SET_STREAMS: usize = 4096;

impl LocalInner {
    /// Performs the work, and returns the value for the reply.
    pub(super) fn execute_operation(
        &self,
        work: PinnedOperation,
        mut borrows: Vec<Borrow>,
        lane: LaneKey,
        context: &Context,
    ) -> Result<LocalValue> {
        match work {
            PinnedOperation::Get { name } => {
                self.function(&name).map(|function| Value::Object(Object::Function(function)))
            }
            PinnedOperation::Alloc { device, dtype, shape, scope, alignment } => self
                .allocate(device, dtype, &shape, scope.as_deref(), alignment)
                .map(|tensor| Value::Object(Object::Tensor(tensor))),
            PinnedOperation::Write { range, data, .. } => {
                first(&mut borrows)?.copy_in(range.start, &data)?;
                Ok(Value::Null)
            }
            PinnedOperation::Read { range, into, .. } => {
                let mut borrow = first(&mut borrows)?;
                let len = range.end - range.start;
                if let Some(into) = into
                    && let Some(mut buffer) = into.take()
                {
                    let copied = if buffer.len() as u64 == len {
                        borrow.copy_out(range.start, &mut buffer).map(|()| true)
                    } else {
                        Ok(false)
                    };
                    into.put_back(buffer);
                    if copied? {
                        return Ok(Value::Null);
                    }
                }
                if borrow.bytes().is_some() {
                    let bytes = borrow.into_bytes(range);
                    return bytes
                        .map(Value::Bytes)
                        .ok_or_else(|| RpcError::internal("a checked range was out of bounds"));
                }
                let _staging = self.staging.stage(len).map_err(|error| {
                    error.context("memory of this device is read by way of the host's: read it in smaller pieces")
                })?;
                // It may have waited for its turn.
                if context.is_cancelled() || self.has_ended() {
                    return Err(RpcError::new(ErrorKind::Cancelled, "no caller waits for the bytes any more"));
                }
                // A range that was checked against memory fits memory.
                let mut bytes = vec![0; len as usize];
                borrow = borrow.share().unwrap_or(borrow);
                borrow.copy_out(range.start, &mut bytes)?;
                Ok(Value::Bytes(Bytes::from(bytes)))
            }
            PinnedOperation::Copy { from, to } => self.copy(&from, &to, borrows).map(|()| Value::Null),
            PinnedOperation::Freed | PinnedOperation::Released(_) => Ok(Value::Null),
            PinnedOperation::Fetch(value) => Ok(value),
            PinnedOperation::Attribute { device, attribute } => self
                .devices
                .attribute(device, attribute)?
                .try_map(&mut |_| Err(RpcError::internal("the value of an attribute contains an object"))),
            PinnedOperation::CreateStream { device } => {
                self.devices.get(device)?.create_stream(device.index).map(resolve::stream_object)
            }
            PinnedOperation::SetStream { device, stream } => {
                self.devices.get(device)?;
                if lane.is_single_use() {
                    // No later request runs on this lane.
                    return Ok(Value::Null);
                }
                let mut streams = self.streams.lock();
                let key = (lane, device);
                let full = streams.len() >= MAX_SET_STREAMS && !streams.contains_key(&key);
                let old = match stream {
                    Some(_) if full => {
                        let limit = MAX_SET_STREAMS as u64;
                        return Err(RpcError::limit("max_set_streams", limit, limit + 1));
                    }
                    Some(stream) => streams.insert(key, stream),
                    None => streams.remove(&key),
                };
                drop(streams);
                drop(old);
                Ok(Value::Null)
            }
            PinnedOperation::StreamWaitFor { device, stream, other_device, other } => {
                let named = |device, stream: Option<Arc<StreamObject>>| match stream {
                    Some(stream) => Ok(stream.0.clone()),
                    None => self.stream(lane.lane(), device),
                };
                let (stream, other) = (named(device, stream)?, named(other_device, other)?);
                stream.wait_for(&*other)?;
                Ok(Value::Null)
            }
            PinnedOperation::LoadModule { path, loader } => {
                let module = self.load_module(loader.as_deref(), &path, context)?;
                Ok(Value::Object(Object::Module(module)))
            }
            PinnedOperation::ModuleFunction { module, name } => {
                self.authorize(&Permission::Modules)?;
                module.function(&name).map(|function| Value::Object(Object::Function(function)))
            }
            PinnedOperation::Call { .. } | PinnedOperation::StreamWait { .. } | PinnedOperation::Piped(_) => {
                Err(RpcError::internal("calls and stream waits are not performed here"))
            }
        }
    }

    fn copy(&self, from: &Tensor, to: &Tensor, borrows: Vec<Borrow>) -> Result<()> {
        let len = from.size_bytes();
        let (source, destination) = (from.byte_range(0, len)?.start, to.byte_range(0, len)?.start);
        // The device that is not the host can access host memory, but not the other way round.
        let device = if from.device().kind == DeviceType::CPU { to.device() } else { from.device() };
        let api = self.devices.get(device)?;
        // Between two memories that the host cannot access, the bytes may go through a buffer of
        // the host's, which is there for as long as the copy takes.
        let goes_by_host = borrows.iter().all(|borrow| borrow.bytes().is_none());
        let _staging = if goes_by_host { Some(self.staging.stage(len.min(BOUNCE_BYTES))?) } else { None };
        let mut borrows = borrows.into_iter();
        match (borrows.next(), borrows.next()) {
            (Some(mut both), None) if source != destination => both.copy_within(&**api, source, destination, len),
            (Some(_), None) => Ok(()),
            (Some(read), Some(mut write)) => write.copy_from(&**api, destination, &read, source, len),
            _ => Err(RpcError::internal("a copy was not given its borrows")),
        }
    }
}

fn first(borrows: &mut Vec<Borrow>) -> Result<Borrow> {
    borrows.pop().ok_or_else(|| RpcError::internal("a copy was not given its borrow"))
}
