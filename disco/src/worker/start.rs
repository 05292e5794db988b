//! Start of a worker: its thread, and the processor that the thread stays on.

use std::sync::Arc;

use rpc_core::{Context, ErrorKind, RpcError};

use super::command_feed::{Feed, Reader};
use super::context::WorkerContext;
use super::executor::Worker;
use super::process_state::ProcessState;
use crate::error::WorkerId;
use crate::wire::set_up::SetUp;

/// Starts a worker's thread.
///
/// # Errors
///
/// The session may have no more threads, or the system has none.
pub(crate) fn start(
    id: WorkerId,
    context: Context,
    shared: Arc<ProcessState>,
    feed: Arc<Feed>,
    reader: Reader,
) -> rpc_core::Result<WorkerContext> {
    let permit = context.reserve_thread().map_err(|error| error.context(format_args!("worker {id}")))?;
    let SetUp { layout, pin, logs, .. } = *shared.set_up();
    let this = WorkerContext::new(id, layout, context, shared.sink(), logs);
    let worker = Worker::new(this.clone(), shared, feed);
    let run = move || {
        // Until the thread ends.
        let _permit = permit;
        if pin {
            pin_to_processor(id);
        }
        let _span = tracing::info_span!("worker", id = id.0).entered();
        worker.run(reader);
    };
    std::thread::Builder::new()
        .name(format!("disco-{id}"))
        .spawn(run)
        .map_err(|error| RpcError::new(ErrorKind::LimitExceeded, format!("no thread for worker {id}: {error}")))?;
    Ok(this)
}

/// Keeps the calling thread on one of the processors that it may use now.
#[cfg(target_os = "linux")]
fn pin_to_processor(id: WorkerId) {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let pinned = sched_getaffinity(None).and_then(|allowed| {
        let processors: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|processor| allowed.is_set(*processor)).collect();
        let mut one = CpuSet::new();
        if let Some(processor) = processors.get(id.index() % processors.len().max(1)) {
            one.set(*processor);
        }
        sched_setaffinity(None, &one)
    });
    if let Err(error) = pinned {
        rpc_core::log_limited!(WARN, %error, "a worker is not pinned to a processor");
    }
}

#[cfg(not(target_os = "linux"))]
fn pin_to_processor(_: WorkerId) {
    rpc_core::log_limited!(WARN, "workers cannot be pinned to processors on this system");
}
