//! Threads of Rust that call code of Python.

use pyo3::Python;

/// Attaches this thread to the interpreter and calls `call`. The result is `None` if the
/// interpreter has ended, or is about to.
///
/// An interpreter that ends while `call` is detached, as in `time.sleep`, does not attach the
/// thread again: until Python 3.14 it ends the thread instead, by an exit that unwinds the frames
/// of Rust below, whose values then touch the interpreter, which is a fatal error. Here such a
/// thread stays where it is until the process has ended.
pub(crate) fn attached<R>(call: impl FnOnce(Python<'_>) -> R) -> Option<R> {
    Python::try_attach(|py| {
        let stop = StopUnwinding;
        let returned = call(py);
        std::mem::forget(stop);
        returned
    })
}

/// Stops the thread that drops it.
struct StopUnwinding;

impl Drop for StopUnwinding {
    fn drop(&mut self) {
        // A panic of Rust goes on.
        while !std::thread::panicking() {
            std::thread::park();
        }
    }
}
