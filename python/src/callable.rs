//! Functions of Python that are to become functions of a session.

use pyo3::prelude::*;

/// A function of Python that a session calls.
pub(crate) struct Callable {
    pub(crate) function: Py<PyAny>,
    /// Event loop of asyncio that runs coroutines of the function.
    pub(crate) event_loop: Option<Py<PyAny>>,
}

impl Callable {
    /// A function that is called with objects of the blocking form.
    pub(crate) fn new(function: &Bound<'_, PyAny>) -> Self {
        Self { function: function.clone().unbind(), event_loop: None }
    }

    /// Makes it one that is called with objects of `tensor_rpc.aio`, and whose coroutines run on
    /// `event_loop`.
    pub(crate) fn on_loop(&mut self, event_loop: &Bound<'_, PyAny>) {
        self.event_loop = Some(event_loop.clone().unbind());
    }

    pub(crate) fn into_function(self) -> Py<PyAny> {
        self.function
    }
}
