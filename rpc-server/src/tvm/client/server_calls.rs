//! Requests that a session makes of its server by itself: for the server's own functions, for calls
//! of them, and for the end of objects.

use rpc_core::reply::Outcome;
use rpc_core::{Device, ErrorKind, RpcError, Value};
use rpc_tvm::wire::{CallResult, Expected, Request, ServerReply, WireValue};

use super::link::Frame;
use super::objects::Held;
use super::state::ClientCore;
use super::values::{self, Received};

/// Length from which a frame is charged: smaller ones are a part of what a session takes anyway.
const CHARGED: u64 = 16 << 10;

/// Error for a reply of the server that is none to the request.
pub(super) fn unexpected(expected: &str) -> RpcError {
    RpcError::new(ErrorKind::Protocol, format!("the server did not return {expected}")).may_have_run(true)
}

impl ClientCore {
    /// Makes the default stream the current one of a device whose current stream is about to be
    /// freed. The server would go on with that one. There is room for another frame behind it.
    pub(super) async fn leave_stream(&self, device: Option<Device>) {
        if let Some(device) = device {
            self.link.send(Frame::of(&Request::SetStream { device, stream: 0 }), |_| {});
            self.link.room(0).await;
        }
    }

    /// Frees an object of the server. Its answer means nothing.
    pub(super) fn free(&self, held: &Held) {
        if let Some(request) = held.freeing() {
            self.link.send(Frame::of(&request), |_| {});
        }
    }

    /// Returns the result of a call for the caller. An object that is refused is freed at the
    /// server.
    pub(super) fn receive(&self, result: CallResult) -> Outcome {
        let handle = match result {
            CallResult::Tensor(_, handle) | CallResult::Object(_, handle) => Some(handle),
            _ => None,
        };
        match values::received(result) {
            Ok(received) => self.keep(received),
            Err(error) => {
                if let Some(handle) = handle {
                    self.free(&Held::Object(handle));
                }
                Err(error.may_have_run(true))
            }
        }
    }

    /// Stores an object that was received, and returns the value for the caller.
    pub(super) fn keep(&self, received: Received) -> Outcome {
        match received {
            Received::Value(value) => Ok(value),
            Received::Object(held, kind) => {
                let kept = self.objects.lock().keep(held, kind);
                kept.map_err(|(error, held)| {
                    self.free(&held);
                    error.may_have_run(true)
                })
            }
        }
    }

    /// Returns the frame of a call, which is charged if it is large.
    pub(super) fn call_frame(&self, function: u64, args: Vec<Value>) -> Result<Frame, RpcError> {
        let size = args.iter().map(|arg| arg.size_hint() as u64).sum();
        if size > self.max_message {
            return Err(RpcError::limit("max_message", self.max_message, size));
        }
        let lease = if size > CHARGED { Some(self.memory.reserve(size)?) } else { None };
        let args = self.objects.lock().arguments(args)?;
        let call = Request::Call { function, args };
        Ok(Frame { parts: vec![call.encode().into()], expected: Expected::Call, waits_for_device: false, lease })
    }
}

/// Returns the handle of one of the server's own functions, which is kept for the session.
///
/// # Errors
///
/// [`ErrorKind::Unsupported`] if the server does not have it.
pub(super) async fn server_function(core: &ClientCore, name: &'static str) -> Result<u64, RpcError> {
    let found = optional_function(core, name).await?;
    found.ok_or_else(|| RpcError::new(ErrorKind::Unsupported, format!("the server has no function '{name}'")))
}

/// Returns the handle of one of the server's own functions, which is kept for the session; `None`
/// if the server does not have it.
pub(super) async fn optional_function(core: &ClientCore, name: &'static str) -> Result<Option<u64>, RpcError> {
    let known = core.objects.lock().functions.get(name).copied();
    if let Some(found) = known {
        return Ok(found);
    }
    let found = match core.link.ask(Frame::of(&Request::GetFunction { name: name.into() })).await? {
        ServerReply::Value(WireValue::Pointer(handle)) => Some(handle).filter(|handle| *handle != 0),
        ServerReply::Value(WireValue::None) => None,
        _ => return Err(unexpected("the handle of a function")),
    };
    core.objects.lock().functions.insert(name, found);
    Ok(found)
}

/// Returns the error of a function that servers of this project alone have, with the kind by which
/// their texts begin.
pub(super) fn with_kind(error: RpcError) -> RpcError {
    const KINDS: [ErrorKind; 4] =
        [ErrorKind::NotFound, ErrorKind::InvalidArgument, ErrorKind::Refused, ErrorKind::LimitExceeded];
    if error.kind() != ErrorKind::Application {
        return error;
    }
    let said = KINDS.into_iter().find_map(|kind| {
        let text = error.message().strip_prefix(&format!("{kind}: "))?;
        Some(RpcError::new(kind, text.to_owned()).may_have_run(error.request_may_have_run()).from_next_hop())
    });
    said.unwrap_or(error)
}

/// Calls a function of the server by its handle.
pub(super) async fn call(core: &ClientCore, function: u64, args: Vec<WireValue>) -> Result<CallResult, RpcError> {
    let mut frame = Frame::of(&Request::Call { function, args });
    frame.expected = Expected::Call;
    match core.link.ask(frame).await? {
        ServerReply::Call(result) => Ok(result),
        _ => Err(unexpected("the result of a call")),
    }
}
