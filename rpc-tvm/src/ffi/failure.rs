//! Errors: conversion from the library's to the session's and back.

use super::abi::ByteArray;
use super::api::Api;
use super::call_frame as frame;
use super::object::{self, slice_of};
use rpc_core::error::{ErrorKind, RpcError};

/// Takes the error that a function has just raised on this thread.
///
/// If it is an error that a function of the session has returned through foreign code, returns that
/// one.
pub(super) fn take(api: &'static Api) -> RpcError {
    let Some(raised) = api.take_raised() else {
        return RpcError::internal("a TVM-FFI function reported a failure without an error").may_have_run(true);
    };
    if let Some(error) = frame::current().and_then(|frame| frame.take_raised(&raised)) {
        return error;
    }
    let [kind, message, backtrace] = object::error_texts(&raised);
    let rpc_kind = match kind.as_str() {
        // Wrappers also raise this when arguments do not fit.
        "TypeError" => ErrorKind::InvalidArgument,
        "MemoryError" => ErrorKind::OutOfMemory,
        _ => ErrorKind::Application,
    };
    let error = RpcError::new(rpc_kind, clip(message, MAX_MESSAGE)).with_application_kind(kind).may_have_run(true);
    if backtrace.is_empty() { error } else { error.with_backtrace(clip(backtrace, MAX_BACKTRACE)) }
}

/// Raises `error` on this thread, for foreign code that called a function of the session. If that
/// code passes it on, [`take`] recognises it.
pub(super) fn raise(api: &'static Api, error: RpcError) {
    let kind = error.application_kind().unwrap_or_else(|| class(error.kind()));
    match api.error(kind, error.message(), error.backtrace().unwrap_or_default()) {
        Ok(raised) => {
            api.raise(&raised);
            if let Some(frame) = frame::current() {
                frame.keep_raised(raised, error);
            }
        }
        Err(failure) => tracing::error!(%failure, %error, "an error could not be passed to foreign code"),
    }
}

/// Returns the class by which foreign code knows errors of this kind.
fn class(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::InvalidArgument => "TypeError",
        ErrorKind::OutOfMemory => "MemoryError",
        ErrorKind::DeadlineExceeded | ErrorKind::SessionTimeout => "TimeoutError",
        ErrorKind::PeerLost | ErrorKind::PeerSilent | ErrorKind::Closed => "ConnectionError",
        _ => "RuntimeError",
    }
}

/// Converts a byte array to text. Invalid UTF-8 is replaced.
pub(super) fn text(array: &ByteArray) -> String {
    // SAFETY: the owner of a byte array keeps its data alive.
    String::from_utf8_lossy(unsafe { slice_of(array.data, array.size) }).into_owned()
}

/// Shortens a text to the length that an error should carry.
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
