//! `rpc.logs.read`: recent log lines of the server, for those who may read them.

use std::time::Duration;

use rpc_core::{Context, ErrorKind, Pack, Permission, Registry, RpcError};

use super::cancellable;
use crate::recent_logs::{LogPage, Logs, MAX_PAGE_BYTES, MAX_WAIT};

/// Name of the function.
pub(crate) const READ_LOGS: &str = "rpc.logs.read";

/// Interval at which a read that waits checks for cancellation.
const CANCEL_CHECK: Duration = Duration::from_millis(250);

/// Bytes that a read counts against the memory of its session: those of its page, and a string for
/// each of the lines.
const PAGE_BYTES: u64 = 2 * MAX_PAGE_BYTES as u64;

pub(super) fn register(registry: &Registry) {
    registry.add_async(READ_LOGS, |context: Context, from: Option<u64>, wait_ms: Option<u64>| async move {
        context.authorize(&Permission::Logs)?;
        let refused = || {
            let text = "this server shows its log to no client: its operator has not given --allow-logs, or the \
                        program keeps no log lines";
            RpcError::new(ErrorKind::Refused, text).without_effect()
        };
        let logs = context.extension::<Logs>().ok_or_else(refused)?;
        let _memory = context.reserve_memory(PAGE_BYTES)?;
        let wait = wait_ms.map_or(Duration::ZERO, Duration::from_millis).min(MAX_WAIT);
        let page: LogPage = cancellable(&context, CANCEL_CHECK, logs.0.read(from, wait)).await?;
        Ok::<_, RpcError>(Pack(page))
    });
}
