//! A function that measures another one: what a client holds of it.

use std::time::Duration;

use rpc_core::{Handle, Reference, Value};

/// A measurement: the function, and how often it is called. The measuring itself is
/// `rpc.time_function`, which runs where the function does.
pub(super) struct TimeEvaluator {
    pub(super) function: Handle,
    /// Function that is called before each measurement, with the same arguments.
    pub(super) before: Option<Handle>,
    pub(super) timer: Handle,
    pub(super) number: i64,
    pub(super) repeat: i64,
    pub(super) min_repeat_ms: i64,
    pub(super) cooldown: Duration,
    pub(super) repeats_to_cooldown: i64,
    pub(super) cache_flush_bytes: i64,
}

impl TimeEvaluator {
    /// Returns the objects of the session that the measurement holds.
    pub(super) fn objects(&self) -> Value {
        let functions = [Some(self.function), self.before, Some(self.timer)];
        Value::List(functions.into_iter().flatten().map(|handle| Reference::Function(handle).into()).collect())
    }
}
