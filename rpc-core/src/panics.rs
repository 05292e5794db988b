//! Panics in functions and destructors: they become errors, with the backtrace, so that the caller
//! sees where they arose. Those of functions are caught in `function/function.rs`.

use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use crate::error::{ErrorKind, RpcError};

thread_local! {
    static LAST: RefCell<Option<String>> = const { RefCell::new(None) };
}

static INSTALL: Once = Once::new();

/// Installs a panic hook in front of the program's own, which remembers the location and backtrace
/// of a thread's last panic.
///
/// The backtrace is as long as `RUST_BACKTRACE` asks for; the location is always there.
pub(crate) fn install_hook() {
    INSTALL.call_once(|| {
        let next = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let location = info.location().map_or_else(String::new, |location| format!("at {location}"));
            let backtrace = Backtrace::capture();
            let text = match backtrace.status() {
                BacktraceStatus::Captured => format!("{location}\n{backtrace}"),
                _ => location,
            };
            LAST.with_borrow_mut(|last| *last = Some(text));
            next(info);
        }));
    });
}

/// Takes the location and backtrace that the hook remembered for the calling thread.
pub(crate) fn take_backtrace() -> Option<String> {
    LAST.with_borrow_mut(Option::take)
}

/// Returns the error for a panic on this thread, with its message and location.
pub(crate) fn panic_error(payload: &(dyn Any + Send)) -> RpcError {
    let message = payload
        .downcast_ref::<&str>()
        .map(|message| (*message).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "the function panicked with a value that is no text".to_owned());
    let error = RpcError::new(ErrorKind::Panic, message).may_have_run(true);
    match take_backtrace() {
        Some(backtrace) => error.with_backtrace(backtrace),
        None => error,
    }
}

/// Drops objects one by one. A panic in one of them affects neither the others nor the caller.
pub(crate) fn drop_each<T>(objects: impl IntoIterator<Item = T>) {
    for object in objects {
        if catch_unwind(AssertUnwindSafe(|| drop(object))).is_err() {
            crate::log_limited!(ERROR, backtrace = take_backtrace(), "an object panicked when it was freed");
        }
    }
}
