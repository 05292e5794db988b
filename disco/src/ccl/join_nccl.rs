//! Joining of NCCL groups, over groups on host memory, which remain as their control communicators.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use rpc_core::{DataType, Device, ErrorKind, Result, RpcError};

use crate::ccl::communicators::{CollectiveTimeouts, Membership};
use crate::ccl::nccl::{DeviceStream, Library, NcclCcl, OnStuck, Options, UniqueId, Version};
use crate::ccl::{Buffers, Ccl, CollectiveInput, Rank};
use crate::error::WorkerId;
use crate::wire::grouping::Grouping;

/// Turns the control communicators of `worker` into NCCL communicators on its `device`. All workers
/// call it, with the same groupings. `on_stuck` is the callback of NCCL's options.
///
/// # Errors
///
/// The same on all workers: the cause of the first one that cannot, such as a library that is not
/// found, or versions that differ.
pub(crate) fn join(
    membership: Membership,
    limits: CollectiveTimeouts,
    device: Device,
    worker: WorkerId,
    on_stuck: OnStuck,
) -> Result<Membership> {
    let Membership { epoch, world: mut control, groups, charge } = membership;
    // All ranks learn of one that cannot join.
    let ready = library().and_then(|library| Ok((library, stream(device)?)));
    let own = ready.as_ref().map(|(library, _)| RankFacts::new(library, device)).map_err(Clone::clone);
    RankFacts::compare(&mut *control, own)?;
    let (library, stream) = ready?;
    let mut options = options(limits);
    options.on_stuck = on_stuck;
    let id = share_id(&mut *control, &library)?;
    let (rank, size) = (control.rank(), control.size());
    let mut world = NcclCcl::new(Arc::clone(&library), id, rank, size, control, Arc::clone(&stream), options.clone())?;
    let mut joined: Vec<(Grouping, Box<dyn Ccl>)> = Vec::with_capacity(groups.len());
    for (grouping, mut control) in groups {
        let (rank, size) = (control.rank(), control.size());
        // Older libraries have no `ncclCommSplit`.
        let group = if library.version() < SPLITS {
            let id = share_id(&mut *control, &library)?;
            NcclCcl::new(Arc::clone(&library), id, rank, size, control, Arc::clone(&stream), options.clone())?
        } else {
            world.split(grouping.group(worker), rank.0, control)?
        };
        joined.push((grouping, Box::new(group)));
    }
    Ok(Membership { epoch, world: Box::new(world), groups: joined, charge })
}

/// Returns the settings of NCCL under the time limits of the session.
fn options(limits: CollectiveTimeouts) -> Options {
    let mut options = Options::default();
    options.join_timeout = limits.join.max(options.join_timeout);
    options.stall_timeout = limits.stall.max(options.stall_timeout);
    options.drain_timeout = limits.entry;
    options
}

/// Returns the longest time that [`join`] spends in NCCL, for a controller whose limit for making
/// collectives is `init_timeout`: NCCL has a limit of its own, for the world's group and for each
/// of those within it, one for each of so many `groupings`. If one fails, all are aborted.
pub(crate) fn longest_join(init_timeout: Duration, groupings: usize) -> Duration {
    let Options { join_timeout, abort_timeout, .. } = Options::default();
    let communicators = 1 + u32::try_from(groupings.max(1)).unwrap_or(u32::MAX - 1);
    communicators * (init_timeout.max(join_timeout) + abort_timeout)
}

/// The first version with `ncclCommSplit`.
const SPLITS: Version = Version::new(2, 18, 0);

fn library() -> Result<Arc<Library>> {
    Library::load().map_err(|error| RpcError::new(ErrorKind::NotFound, error.to_string()))
}

#[cfg(feature = "cuda")]
fn stream(device: Device) -> Result<Arc<dyn DeviceStream>> {
    crate::ccl::nccl::cuda::stream(device)
}

#[cfg(not(feature = "cuda"))]
fn stream(device: Device) -> Result<Arc<dyn DeviceStream>> {
    Err(RpcError::unsupported(format!("this program was built without streams of {device}")))
}

/// Facts that ranks compare before any of them calls NCCL.
struct RankFacts {
    /// Version of the library.
    version: u32,
    device: i32,
    process: u64,
}

impl RankFacts {
    const LEN: usize = 16;

    fn new(library: &Library, device: Device) -> Self {
        /// Number that identifies this process among those of all machines.
        static PROCESS: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(std::process::id()));
        Self { version: library.version().code(), device: device.index, process: *PROCESS }
    }

    fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..4].copy_from_slice(&self.version.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.device.to_le_bytes());
        bytes[8..].copy_from_slice(&self.process.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let word = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        let process = u64::from(u32::from_le_bytes(word(8))) | u64::from(u32::from_le_bytes(word(12))) << 32;
        Self { version: u32::from_le_bytes(word(0)), device: i32::from_le_bytes(word(4)), process }
    }

    /// Checks that all ranks have the same version of the library, and that no two share a stream.
    /// A rank that cannot join passes its error as `own`.
    fn compare(control: &mut dyn Ccl, own: Result<Self>) -> Result<()> {
        let mut all = vec![0; Self::LEN * control.size()];
        let own = own.map(|own| own.to_bytes());
        let input = match &own {
            Ok(own) => CollectiveInput::Ready(Buffers::new(own, &mut all)),
            Err(error) => CollectiveInput::Poisoned(error.clone()),
        };
        control.allgather(DataType::U8, Self::LEN, input)?;
        let all: Vec<_> = all.chunks_exact(Self::LEN).map(Self::from_bytes).collect();
        if let Some(other) = all.iter().position(|one| one.version != all[0].version) {
            let (first, second) = (version(all[0].version), version(all[other].version));
            return Err(RpcError::unsupported(format!(
                "worker 0 has version {first} of the library of collectives, and worker {other} has {second}: all \
                 need the same"
            )));
        }
        let mut seen = HashMap::new();
        for (worker, one) in all.iter().enumerate() {
            if let Some(other) = seen.insert((one.process, one.device), worker) {
                let device = one.device;
                // On one stream, the collective of one rank would wait behind that of the other,
                // which waits for it.
                return Err(RpcError::invalid_argument(format!(
                    "workers {other} and {worker} are threads of one process with device {device} for both: give \
                     each a device, or a process (Hosting::Processes)"
                )));
            }
        }
        Ok(())
    }
}

fn version(code: u32) -> Version {
    Version::from_code(i32::try_from(code).unwrap_or(i32::MAX))
}

/// Sends the id that rank 0 creates to all ranks.
fn share_id(control: &mut dyn Ccl, library: &Library) -> Result<UniqueId> {
    let mut bytes = [0; UniqueId::LEN];
    let made = if control.rank() == Rank(0) { library.unique_id().map(Some) } else { Ok(None) };
    let input = match &made {
        Ok(made) => {
            if let Some(id) = made {
                bytes = id.to_bytes();
            }
            CollectiveInput::Ready(Buffers::in_place(&mut bytes))
        }
        Err(error) => CollectiveInput::Poisoned(error.clone().into()),
    };
    control.broadcast(Rank(0), DataType::U8, UniqueId::LEN, input)?;
    Ok(UniqueId::from_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: NCCL had the session's limit, which is too short for many devices.
    #[test]
    fn nccl_joins_under_its_own_limit_and_the_controller_waits_for_it() {
        let minutes = |count: u64| Duration::from_secs(60 * count);
        let (short, long) = ((Duration::from_secs(30), minutes(2), 260), (minutes(10), minutes(10), 1220));
        for (init_timeout, join, longest) in [short, long] {
            let (stall, direct) = (minutes(1), Duration::from_secs(2));
            let limits = CollectiveTimeouts { entry: None, stall, join: init_timeout, direct };
            assert_eq!(options(limits).join_timeout, join);
            assert_eq!(longest_join(init_timeout, 1), Duration::from_secs(longest));
            assert_eq!(longest_join(init_timeout, 3), Duration::from_secs(2 * longest));
        }
    }
}
