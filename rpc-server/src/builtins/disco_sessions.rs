//! `rpc.disco.sessions`: the sessions of Disco that have workers at the server.

use disco::{HostOwner, HostReport};
use rpc_core::{Context, Pack, Registry, Result, RpcError};

/// Name of the function. It shows the work of other clients: with a policy, clients call it if a
/// rule names it among its functions.
pub(crate) const DISCO_SESSIONS: &str = "rpc.disco.sessions";

/// Maximum number of workers in one answer.
const MAX_WORKERS: usize = 256;

/// Bytes that the description of a worker takes at most: each of its two groups has 64 calls.
const WORKER_BYTES: u64 = 2 * 64 * 256;

pub(super) fn register(registry: &Registry) {
    registry.add(DISCO_SESSIONS, sessions);
}

fn sessions(context: Context) -> Result<Pack<Vec<HostReport>>> {
    let owner = context.extension::<HostOwner>().ok_or_else(|| {
        let text = "sessions have processes of their own at this server (--isolate process), and it does not see the \
                    workers of Disco in them";
        RpcError::unsupported(text)
    })?;
    let workers = owner.table().num_workers().min(MAX_WORKERS);
    let _staged = context.stage((workers as u64 + 1) * WORKER_BYTES)?;
    Ok(Pack(owner.table().reports(MAX_WORKERS)))
}
