//! Collectives on host memory: between [threads] of a process, between the processes of a machine
//! through a [segment](Offer), and between machines over [sockets](Listener).
//!
//! The algorithm follows from a static table by launch kind, operation and size, and all of them
//! fold every element once, in the order of ranks: results are the same bits for all of them.
//!
//! | | up to 16 KiB of input | more |
//! | --- | --- | --- |
//! | threads | inputs travel with announcements (1) | each rank reduces its share of all buffers |
//! | processes | the same | the same, through the segment in chunks |
//! | processes, read access | | each rank reads and reduces its share, and reads the results |
//! | sockets | the same | each rank gets its share from all, and sends its reduced share to all |
//!
//! 1. In groups of more than 32 ranks none of an allreduce between threads, and between processes
//!    512 KiB divided by the number of ranks: every rank would read the inputs of all.
//!
//! Threads reduce their share straight into the buffers of all. Chunks have 256 KiB, with a few
//! under way at a time; up to 1 MiB there is one chunk. Processes with read access may read each
//! other's memory; they do so from 4 MiB on.

mod algorithm;
mod announcement;
mod check;
mod join_deadline;
#[allow(unsafe_code)]
mod kernel;
#[allow(unsafe_code)]
mod memory;
#[cfg(feature = "mpi")]
pub mod mpi;
#[allow(unsafe_code)]
mod process_memory;
#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
mod processes;
#[allow(unsafe_code)]
mod segment;
#[allow(unsafe_code)]
mod shared;
#[allow(unsafe_code)]
mod stream;
mod watched_processes;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rpc_core::{ErrorKind, RpcError};

#[cfg(target_os = "linux")]
pub use processes::{Offer, Ticket};
pub(crate) use stream::UnprovenHosts;
pub use stream::{Address, Listener, OPERATOR_LOG, SessionKey};

use self::algorithm::Reach;
use self::memory::Memory;
use self::segment::Segment;
use self::shared::SharedCcl;
use self::watched_processes::WatchedProcesses;
use super::Ccl;
use crate::open_files::OpenFiles;
use crate::options::DIRECT_TIMEOUT;

/// The most ranks of a group that shares memory.
pub const MAX_SHARED_RANKS: usize = 1024;

/// Settings of the `host` backend. All ranks of a group should have the same.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Time that a rank waits for others to enter a collective that it is in; `None` for ever. A
    /// worker that computes for longer than this between two collectives breaks its group. Default:
    /// 5 minutes.
    pub entry_timeout: Option<Duration>,
    /// Time that a rank waits, within a collective that all have entered, for another one that
    /// makes no progress. The limit is twice that for a rank that says that it waits for another in
    /// turn, so that it has time to name that one. Default: 15 seconds.
    pub stall_timeout: Duration,
    /// Time that making a group waits for all ranks. Default: 30 seconds.
    pub join_timeout: Duration,
    /// Number of ranks, of all groups together, run on this machine's cores, so that ranks that
    /// have to take turns do not spin. Default: as many as the group has.
    pub ranks_on_machine: Option<usize>,
    /// The number of this making of the group. Default: 0.
    pub epoch: u64,
    /// Size in bytes from which processes of one machine read from each other's buffers, if the
    /// system permits that to all of them. Smaller data goes through their segment, which costs
    /// less than system calls and the kernel's walk over small pages. `None` is never. Default: 4
    /// MiB, because tensors of that size have large pages.
    pub read_from: Option<usize>,
    /// True if bytes on connections between ranks are encrypted and authenticated, under keys
    /// derived from the session's. Shared memory is not concerned. Default: false.
    pub encrypt: bool,
    /// Flag that is set once the session of the group has ended: then a rank that joins waits for
    /// no other.
    pub(crate) has_ended: Arc<AtomicBool>,
    /// Time in which a rank has to prove itself at its address before it is reached by other means,
    /// where there are any; at most a quarter of the join timeout. Default: 2 seconds.
    pub(crate) direct_timeout: Duration,
    /// Session that the group's descriptors are charged to. Default: none.
    pub(crate) open_files: OpenFiles,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            entry_timeout: Some(Duration::from_secs(300)),
            stall_timeout: Duration::from_secs(15),
            join_timeout: Duration::from_secs(30),
            ranks_on_machine: None,
            epoch: 0,
            read_from: Some(4 << 20),
            encrypt: false,
            has_ended: Arc::default(),
            direct_timeout: DIRECT_TIMEOUT,
            open_files: OpenFiles::default(),
        }
    }
}

/// Makes a group of `size` threads of this process: a communicator for each, in the order of ranks.
///
/// Each rank works directly on the others' buffers, so that large data moves once. Nothing is read
/// or written there after a call has returned, however it has ended.
///
/// # Errors
///
/// A size of 0 or above [`MAX_SHARED_RANKS`]; no memory.
pub fn threads(size: usize, options: &Options) -> Result<Vec<Box<dyn Ccl>>, RpcError> {
    let memory = Memory::sparse(segment_bytes(size, true)?)
        .ok_or_else(|| RpcError::new(ErrorKind::OutOfMemory, "no memory for a group of collectives"))?;
    let segment = Arc::new(Segment::create(memory, size, true, options.epoch, [0; 16]));
    let rank = |rank| {
        SharedCcl::new(Arc::clone(&segment), rank, options.clone(), Reach::Addresses, WatchedProcesses::default())
    };
    Ok((0..size).map(|number| Box::new(rank(number)) as Box<dyn Ccl>).collect())
}

/// Returns the bytes of memory that a group of [`threads`] takes before its collectives carry any
/// data, about.
pub(crate) fn cost_of_threads(size: usize) -> usize {
    let segment = Segment::bytes_at_once(size, true).unwrap_or(usize::MAX);
    segment.saturating_add(size.saturating_mul(size_of::<SharedCcl>() + RANK_COST))
}

/// Bytes that a rank takes beside its communicator, about: those of its recorder, of its own parts
/// of tables, and of allocations.
const RANK_COST: usize = 512;

/// Returns the bytes of the segment of a group.
pub(crate) fn segment_bytes(size: usize, in_one_process: bool) -> Result<usize, RpcError> {
    if size == 0 || size > MAX_SHARED_RANKS {
        let text = format!("a group that shares memory has 1 to {MAX_SHARED_RANKS} ranks, not {size}");
        return Err(RpcError::invalid_argument(text));
    }
    Segment::bytes(size, in_one_process)
        .ok_or_else(|| RpcError::invalid_argument("a group of collectives that no memory holds"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: all of a group's memory was written to as it was made, of which each pair of
    /// ranks has some.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_group_takes_memory_as_it_is_used() {
        let resident = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
            line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
        };
        let before = resident();
        let ranks = threads(MAX_SHARED_RANKS, &Options::default()).unwrap();
        assert_eq!(ranks.len(), MAX_SHARED_RANKS);
        // Other tests of the process take memory at the same time, far less than that.
        assert!(resident() < before + (512 << 20));
    }
}
