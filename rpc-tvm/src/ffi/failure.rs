//! Errors: conversion from the library's to the session's and back.

use std::ptr::{self, NonNull};

use super::abi::ByteArray;
use super::bindings::Bindings;
use super::call_frame;
use super::object::{self, Ref};
use rpc_core::error::{ErrorKind, Result, RpcError};

/// Takes the error that a function has just raised on this thread.
///
/// If it is an error that a function of the session has returned through foreign code, returns that
/// one.
pub(super) fn take(bindings: &'static Bindings) -> RpcError {
    let Some(raised) = take_raised(bindings) else {
        return RpcError::internal("a TVM-FFI function reported a failure without an error").may_have_run(true);
    };
    if let Some(error) = call_frame::current().and_then(|frame| frame.take_raised(&raised)) {
        return error;
    }
    error_of_texts(object::error_texts(&raised))
}

/// Returns the error of a function that has raised these texts: kind, message and backtrace.
fn error_of_texts([kind, message, backtrace]: [String; 3]) -> RpcError {
    let rpc_kind = match kind.as_str() {
        // Wrappers also raise this when arguments do not fit.
        "TypeError" => ErrorKind::InvalidArgument,
        "MemoryError" => ErrorKind::OutOfMemory,
        _ => ErrorKind::Application,
    };
    let error = RpcError::new(rpc_kind, clip(message, MAX_MESSAGE)).may_have_run(true);
    let error = error.with_application_kind(clip(kind, MAX_KIND));
    if backtrace.is_empty() { error } else { error.with_backtrace(clip(backtrace, MAX_BACKTRACE)) }
}

/// Raises `error` on this thread, for foreign code that called a function of the session. If that
/// code passes it on, [`take`] recognises it.
pub(super) fn raise(bindings: &'static Bindings, error: RpcError) {
    let kind = error.application_kind().unwrap_or_else(|| class(error.kind()));
    match create(bindings, kind, error.message(), error.backtrace().unwrap_or_default()) {
        Ok(raised) => {
            // SAFETY: it is an error object, of which the library takes a count of its own.
            unsafe { (bindings.functions.error_set_raised)(raised.raw()) };
            if let Some(frame) = call_frame::current() {
                frame.keep_raised(raised, error);
            }
        }
        Err(failure) => rpc_core::log_limited!(ERROR, %failure, %error, "an error could not be passed to foreign code"),
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

/// Takes the error object that this thread has raised, if there is one.
fn take_raised(bindings: &'static Bindings) -> Option<Ref> {
    let mut error = ptr::null_mut();
    // SAFETY: there is room for the object, whose count this takes.
    unsafe { (bindings.functions.error_move_from_raised)(&raw mut error) };
    // SAFETY: as above.
    NonNull::new(error).map(|error| unsafe { Ref::from_owned(bindings, error) })
}

/// Creates an error object.
fn create(bindings: &'static Bindings, kind: &str, message: &str, backtrace: &str) -> Result<Ref> {
    let [kind, message, backtrace] = [kind, message, backtrace].map(|text| ByteArray::new(text.as_bytes()));
    let mut error = ptr::null_mut();
    // SAFETY: the texts live until they have been copied, and there is room for the object.
    let code = unsafe { (bindings.functions.error_create)(&kind, &message, &backtrace, &raw mut error) };
    // A failure leaves no error on this thread that could be taken.
    let error = NonNull::new(error).filter(|_| code == 0);
    let error = error.ok_or_else(|| RpcError::internal("TVM-FFI cannot create an error"))?;
    // SAFETY: the library returned it with a count that this owns.
    Ok(unsafe { Ref::from_owned(bindings, error) })
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

const MAX_KIND: usize = 1 << 10;
const MAX_MESSAGE: usize = 16 << 10;
const MAX_BACKTRACE: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: the kind was passed on whole.
    #[test]
    fn every_text_of_a_raised_error_is_clipped() {
        let long = || "é".repeat(1 << 20);
        let error = error_of_texts([long(), long(), long()]);
        let ellipsis = '…'.len_utf8();
        assert!(error.application_kind().unwrap().len() <= MAX_KIND + ellipsis);
        assert!(error.message().len() <= MAX_MESSAGE + ellipsis);
        assert!(error.backtrace().unwrap().len() <= MAX_BACKTRACE + ellipsis);
        let short = error_of_texts(["ValueError", "no", ""].map(str::to_owned));
        assert_eq!((short.application_kind(), short.message(), short.backtrace()), (Some("ValueError"), "no", None));
    }
}
