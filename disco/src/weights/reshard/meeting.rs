//! Meeting of the workers of two sessions: they become ranks of one group, those of the session
//! that has the tensors first. The group is one as for collectives: between threads of a process,
//! by a segment of a machine, or over sockets.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Weak};
use std::time::Instant;

use parking_lot::Mutex;
use rpc_core::{Context, ErrorKind, Result, RpcError};

use super::messages::{JoinRequest, Meeting};
use crate::ccl::communicators::CollectiveTimeouts;
use crate::ccl::host::{self, Address, Listener, SessionKey, UnprovenHosts};
use crate::ccl::{Ccl, Rank};
use crate::held_memory::HeldMemory;
use crate::open_files::OpenFiles;
use crate::wire::plan::WorkerLocation;
use crate::worker::exchanges::Exchange;

/// Membership of a worker in the group of two sessions.
pub(super) struct Membership {
    pub(super) ccl: Box<dyn Ccl>,
    /// The group that threads of a process have in common.
    _threads: Option<Arc<ThreadGroup>>,
}

/// Joins the group as the worker `worker` of a session, and waits until all others have.
///
/// # Errors
///
/// Ranks that do not come in time, or cannot be reached; what the session may not have.
pub(super) fn join(
    context: &Context,
    request: &JoinRequest,
    worker: u32,
    listener: Option<&Listener>,
    exchange: &Exchange,
) -> Result<Membership> {
    let CollectiveTimeouts { entry, stall, join, direct } = request.timeouts.bounded();
    let mut options = host::Options {
        epoch: request.number,
        has_ended: exchange.has_ended(),
        open_files: OpenFiles::of(context),
        direct_timeout: direct,
        ..host::Options::default()
    };
    (options.entry_timeout, options.stall_timeout, options.join_timeout) = (entry, stall, join);
    let rank = request.first.checked_add(worker).filter(|rank| *rank < request.size);
    let rank = Rank(rank.ok_or_else(|| RpcError::invalid_argument("a worker that has no rank in a reshard"))?);
    let (ccl, threads) = match &request.meeting {
        Meeting::Process { key } => {
            options.ranks_on_machine = Some(request.size as usize);
            let (ccl, group) = take_thread(context, key, request.size, rank, &options)?;
            (ccl, Some(group))
        }
        #[cfg(target_os = "linux")]
        Meeting::Segment { ticket } => {
            options.ranks_on_machine = Some(request.size as usize);
            (crate::worker::rendezvous::join_segment(ticket, rank, &options)?, None)
        }
        Meeting::Sockets { key, encrypt, addresses, locations } => {
            let listener = listener.ok_or_else(|| RpcError::invalid_argument("a worker that does not listen"))?;
            if addresses.len() != request.size as usize || locations.len() != addresses.len() {
                return Err(RpcError::invalid_argument("a reshard without the addresses of all ranks"));
            }
            let own = locations[rank.index()].machine;
            let is_beside = |location: &WorkerLocation| location.machine == own;
            options.ranks_on_machine = Some(locations.iter().filter(|location| is_beside(location)).count());
            options.encrypt = *encrypt;
            let reachable = addresses.iter().zip(locations).map(|(address, location)| {
                (!location.is_local || is_beside(location)).then_some(Address::Tcp(*address))
            });
            let reachable: Vec<_> = reachable.collect();
            // A controller learns nothing of what is at an address where no rank is.
            let fallback = |_: Rank, _: Instant| Err(RpcError::unsupported("data is not relayed between two sessions"));
            let unproven = UnprovenHosts::default();
            (listener.join_by(rank, &reachable, key, &options, Some((&fallback, &unproven)))?, None)
        }
    };
    exchange.joined(ccl.control());
    Ok(Membership { ccl, _threads: threads })
}

/// Groups of threads whose ranks have not all gone, by their keys.
static GROUPS: LazyLock<Mutex<HashMap<[u8; 32], Weak<ThreadGroup>>>> = LazyLock::new(Mutex::default);

/// The communicators of threads of this process, of which each is taken once.
struct ThreadGroup {
    ranks: Mutex<Vec<Option<Box<dyn Ccl>>>>,
    key: [u8; 32],
    _charge: HeldMemory,
}

/// Takes the communicator of a rank, which are made for all ranks by the first that comes.
fn take_thread(
    context: &Context,
    key: &SessionKey,
    size: u32,
    rank: Rank,
    options: &host::Options,
) -> Result<(Box<dyn Ccl>, Arc<ThreadGroup>)> {
    let key = *key.bytes();
    let mut groups = GROUPS.lock();
    let group = match groups.get(&key).and_then(Weak::upgrade) {
        Some(group) => group,
        None => {
            let mut charge = HeldMemory::new(context.detached());
            charge.add(host::cost_of_threads(size as usize))?;
            let ranks = host::threads(size as usize, options)?.into_iter().map(Some).collect();
            let group = Arc::new(ThreadGroup { ranks: Mutex::new(ranks), key, _charge: charge });
            groups.insert(key, Arc::downgrade(&group));
            group
        }
    };
    drop(groups);
    let ccl = group.ranks.lock().get_mut(rank.index()).and_then(Option::take);
    let ccl = ccl.ok_or_else(|| RpcError::new(ErrorKind::Refused, format!("rank {rank} has joined already")))?;
    Ok((ccl, group))
}

impl Drop for ThreadGroup {
    fn drop(&mut self) {
        let mut groups = GROUPS.lock();
        // Another one may have come meanwhile.
        if groups.get(&self.key).is_some_and(|group| group.strong_count() == 0) {
            groups.remove(&self.key);
        }
    }
}
