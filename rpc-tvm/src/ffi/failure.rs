//! Errors, from the library to sessions and the other way round.

use super::abi::ByteArray;
use super::api::Api;
use super::frame;
use super::object::{self, slice_of};
use rpc_core::error::{ErrorKind, RpcError};

/// The error that a function has just raised on this thread.
///
/// If it is one that a function of the session has returned, on its way through foreign code, then that.
pub(super) fn take(api: &'static Api) -> RpcError {
    let Some(raised) = api.take_raised() else {
        return RpcError::internal("a TVM-FFI function reported a failure, and raised no error").may_have_run(true);
    };
    if let Some(error) = frame::current().and_then(|frame| frame.take_raised(&raised)) {
        return error;
    }
    let [kind, message, backtrace] = object::error_texts(&raised);
    let rpc_kind = match kind.as_str() {
        // Also what wrappers raise when arguments do not fit.
        "TypeError" => ErrorKind::InvalidArgument,
        "MemoryError" => ErrorKind::OutOfMemory,
        _ => ErrorKind::Application,
    };
    let error = RpcError::new(rpc_kind, clip(message, MAX_MESSAGE)).with_application_kind(kind).may_have_run(true);
    if backtrace.is_empty() { error } else { error.with_backtrace(clip(backtrace, MAX_BACKTRACE)) }
}

/// Has `error` raised on this thread, for foreign code that called a function of the session. Where that code passes it on,
/// [`take`] finds it again.
pub(super) fn raise(api: &'static Api, error: RpcError) {
    let kind = error.application_kind().unwrap_or_else(|| class(error.kind()));
    match api.error(kind, error.message(), error.backtrace().unwrap_or_default()) {
        Ok(raised) => {
            api.raise(&raised);
            if let Some(frame) = frame::current() {
                frame.keep_raised(raised, error);
            }
        }
        Err(failure) => tracing::error!(%failure, %error, "an error is lost on its way to foreign code"),
    }
}

/// The class that foreign code knows such errors by.
fn class(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::InvalidArgument => "TypeError",
        ErrorKind::OutOfMemory => "MemoryError",
        ErrorKind::DeadlineExceeded | ErrorKind::SessionTimeout => "TimeoutError",
        ErrorKind::PeerLost | ErrorKind::PeerSilent | ErrorKind::Closed => "ConnectionError",
        _ => "RuntimeError",
    }
}

/// What `array` says, as far as it is text.
pub(super) fn text(array: &ByteArray) -> String {
    // SAFETY: whoever has a byte array has what it points to.
    String::from_utf8_lossy(unsafe { slice_of(array.data, array.size) }).into_owned()
}

/// No more of a text than an error should carry.
fn clip(mut text: String, limit: usize) -> String {
    if text.len() > limit {
        let end = (0..=limit).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}

const MAX_MESSAGE: usize = 16 << 10;
const MAX_BACKTRACE: usize = 64 << 10;
