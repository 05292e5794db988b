//! Backtraces of panics in functions, so that the caller sees where they arose.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

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

/// Drops objects one by one. A panic in one of them affects neither the others nor the caller.
pub(crate) fn drop_each<T>(objects: impl IntoIterator<Item = T>) {
    for object in objects {
        if catch_unwind(AssertUnwindSafe(|| drop(object))).is_err() {
            tracing::error!(backtrace = take_backtrace(), "an object panicked when it was freed");
        }
    }
}
