//! Tensors of a device that has no addresses, mapped for the processor, and so for the collectives
//! of the host.

use std::sync::Arc;

use rpc_core::device::Mapping;
use rpc_core::{Result, RpcError, Tensor};

use super::{in_place, overlap, range};
use crate::ccl::{Buffers, Rank};

/// As [`super::lend`], for tensors of any devices. What the call has written is on the device when
/// this returns.
pub(super) fn lend<R>(
    from: Option<&Tensor>,
    to: Option<&Tensor>,
    rank: Rank,
    run: impl FnOnce(Buffers<'_>) -> R,
) -> Result<R> {
    if let (Some(from), Some(to)) = (from, to)
        && Arc::ptr_eq(from.storage(), to.storage())
    {
        return lend_one_storage(from, to, rank, run);
    }
    let read = from.map(|from| Ok::<_, RpcError>((range(from)?, from.read()?.into_parts().1))).transpose()?;
    let mut written = to.map(|to| Ok::<_, RpcError>((range(to)?, to.write()?.into_parts().1))).transpose()?;
    let input = read.as_ref().map(|(range, borrow)| borrow.map(range.start as u64, range.len())).transpose()?;
    let output = written.as_mut().map(|(range, borrow)| borrow.map_mut(range.start as u64, range.len()));
    let mut output = output.transpose()?;
    let result = run(match (&input, &mut output) {
        (None, None) => Buffers::none(),
        (Some(input), None) => Buffers::input(input.bytes()),
        (None, Some(output)) => Buffers::output(writable(output)?),
        (Some(input), Some(output)) => Buffers::new(input.bytes(), writable(output)?),
    });
    output.map_or(Ok(()), Mapping::end)?;
    Ok(result)
}

/// Lends two tensors of one storage, which is mapped as far as they reach.
fn lend_one_storage<R>(from: &Tensor, to: &Tensor, rank: Rank, run: impl FnOnce(Buffers<'_>) -> R) -> Result<R> {
    let (source, target) = (range(from)?, range(to)?);
    let (_, mut borrow) = to.write()?.into_parts();
    let start = source.start.min(target.start);
    let mut mapping = borrow.map_mut(start as u64, source.end.max(target.end) - start)?;
    let bytes = writable(&mut mapping)?;
    let result = if let Some(whole) = in_place(&source, &target, rank) {
        run(Buffers::in_place(&mut bytes[whole.start - start..whole.end - start]))
    } else if source.end <= target.start {
        let (low, high) = bytes.split_at_mut(target.start - start);
        run(Buffers::new(&low[..source.len()], &mut high[..target.len()]))
    } else if target.end <= source.start {
        let (low, high) = bytes.split_at_mut(source.start - start);
        run(Buffers::new(&high[..source.len()], &mut low[..target.len()]))
    } else {
        return Err(overlap(&source, &target));
    };
    mapping.end()?;
    Ok(result)
}

fn writable<'a>(mapping: &'a mut Mapping<'_>) -> Result<&'a mut [u8]> {
    mapping.bytes_mut().ok_or_else(|| RpcError::internal("memory is mapped for writing and cannot be written"))
}
