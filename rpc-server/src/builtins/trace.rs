//! `rpc.trace.*`: one call in time, as the server sees it.

use std::sync::OnceLock;
use std::time::Instant;

use rpc_core::function::Rest;
use rpc_core::{Context, Function, FunctionKind, LocalValue, Registry, Result};

use super::timing::wait_for_async;

/// Name of the function that tells the time.
pub(crate) const TRACE_CLOCK: &str = "rpc.trace.clock";

/// Name of the function that calls another one and tells when.
pub(crate) const TRACE_CALL: &str = "rpc.trace.call";

pub(super) fn register(registry: &Registry) {
    registry.add_inline(TRACE_CLOCK, nanos).add(TRACE_CALL, call);
}

/// Calls a function. Returns its result, and the times of its begin and end.
fn call(context: Context, function: Function, Rest(args): Rest) -> Result<(LocalValue, i64, i64)> {
    let began = nanos();
    let result = if function.kind() == FunctionKind::Async {
        wait_for_async(&context, context.call_async(&function, args))?
    } else {
        context.call(&function, args)?
    };
    Ok((result, began, nanos()))
}

/// Returns the time in nanoseconds, by a clock of this process.
fn nanos() -> i64 {
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    let elapsed = BEGAN.get_or_init(Instant::now).elapsed();
    i64::try_from(elapsed.as_nanos()).unwrap_or(i64::MAX)
}
