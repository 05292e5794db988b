//! Checks of a call that a rank makes alone, before it announces the call.

use rpc_core::{Device, DeviceType, RpcError};

use super::kernel::Numeric;
use crate::ccl::{CclError, Collective, CollectiveInput, Lent, Rank};

/// Returns this rank's buffers. The error is the reason why it has none: poison, or a wrong call.
pub(super) fn lend(
    collective: &Collective,
    data: &CollectiveInput<'_>,
    rank: Rank,
    size: usize,
) -> Result<Lent, RpcError> {
    match data {
        CollectiveInput::Poisoned(cause) => Err(cause.clone()),
        CollectiveInput::Ready(buffers) => {
            if collective.operation.reduce_op().is_some() && Numeric::of(collective.dtype).is_none() {
                return Err(RpcError::unsupported(format!("{collective}: {} cannot be reduced", collective.dtype)));
            }
            buffers.lend(collective, rank, size, reach)
        }
    }
}

/// Takes host memory alone.
fn reach(device: Device) -> Result<(), RpcError> {
    match device.kind {
        DeviceType::CPU | DeviceType::CUDA_HOST | DeviceType::ROCM_HOST => Ok(()),
        _ => Err(RpcError::unsupported(format!("the host backend has no access to memory of {device}"))),
    }
}

/// Returns the other end of a transfer between two ranks, if there is such a rank.
pub(super) fn transfer(collective: &Collective, rank: Rank, size: usize) -> Option<usize> {
    collective.operation.peer().filter(|peer| peer.index() < size && *peer != rank).map(Rank::index)
}

/// Returns the error of a transfer that [`transfer`] finds no other end for. No other rank knows of
/// the call.
pub(super) fn no_such_peer(collective: &Collective, rank: Rank, sequence: u64) -> Result<(), CclError> {
    let cause = RpcError::invalid_argument(format!("{collective} on rank {rank}: there is no such other rank"));
    Err(CclError::Poisoned { sequence, rank, cause })
}

/// Returns the type in which the elements of a reduction are folded. [`lend`] has checked the type
/// on every rank, or the ranks would not have agreed.
pub(super) fn numeric(collective: &Collective) -> Numeric {
    Numeric::of(collective.dtype).unwrap_or(Numeric::U8)
}
