//! Tensors in memory that the processor cannot reach, lent to a collective by their addresses.

use std::ops::Range;
use std::sync::Arc;

use rpc_core::tensor::Borrow;
use rpc_core::{Result, RpcError, Tensor};

use super::{in_place, overlap, range};
use crate::ccl::{Buffers, Rank};

/// As [`super::lend`], for tensors of one device.
pub(super) fn lend<R>(
    from: Option<&Tensor>,
    to: Option<&Tensor>,
    rank: Rank,
    run: impl FnOnce(Buffers<'_>) -> R,
) -> Result<R> {
    let device = from.or(to).map(Tensor::device).ok_or_else(|| RpcError::internal("no tensor is lent"))?;
    if let Some(other) = [from, to].into_iter().flatten().find(|tensor| tensor.device() != device) {
        let text = format!(
            "the source is on {device}, and the destination on {}: they have to be on one device",
            other.device()
        );
        return Err(RpcError::unsupported(text));
    }
    // Pinned memory: the next user of its storage may be the processor.
    let is_on_host = [from, to].into_iter().flatten().any(|tensor| tensor.storage().memory().host().is_some());
    if let (Some(from), Some(to)) = (from, to)
        && Arc::ptr_eq(from.storage(), to.storage())
    {
        let (source, target) = (range(from)?, range(to)?);
        let (_, borrow) = to.write()?.into_parts();
        let start = address(&borrow, to)?;
        let buffers = match in_place(&source, &target, rank) {
            // SAFETY: the range is of the storage, which this call has borrowed for writing, until
            // `run` returns. Who borrows it next, or frees it, comes behind on the device's stream.
            Some(whole) => unsafe { Buffers::in_place_raw(device, start.wrapping_add(whole.start), whole.len()) },
            None if source.end <= target.start || target.end <= source.start => {
                let (input, output) = (start.wrapping_add(source.start), start.wrapping_add(target.start));
                // SAFETY: as above, and the two are apart.
                unsafe { Buffers::from_raw(device, Some((input, source.len())), Some((output, target.len())))? }
            }
            None => return Err(overlap(&source, &target)),
        };
        return Ok(run(buffers));
    }
    let read = from.map(|from| Ok::<_, RpcError>((range(from)?, from.read()?.into_parts().1))).transpose()?;
    let written = to.map(|to| Ok::<_, RpcError>((range(to)?, to.write()?.into_parts().1))).transpose()?;
    let place = |lent: &Option<(Range<usize>, Borrow)>, tensor: Option<&Tensor>| match (lent, tensor) {
        (Some((range, borrow)), Some(tensor)) => {
            Ok::<_, RpcError>(Some((address(borrow, tensor)?.wrapping_add(range.start), range.len())))
        }
        _ => Ok(None),
    };
    let input = place(&read, from)?.map(|(start, len)| (start.cast_const(), len));
    let output = place(&written, to)?;
    // SAFETY: both ranges are of their storages, which this call has borrowed, the one for reading
    // and the other for writing, until `run` returns. Who borrows them next, or frees them, comes
    // behind on the device's stream.
    let buffers = unsafe { Buffers::from_raw(device, input, output)? };
    let result = run(if is_on_host { buffers.until_done() } else { buffers });
    drop((read, written));
    Ok(result)
}

fn address(borrow: &Borrow, tensor: &Tensor) -> Result<*mut u8> {
    if borrow.storage().is_empty() {
        return Ok(std::ptr::dangling_mut());
    }
    let address = borrow.device_address();
    address
        .map(std::ptr::NonNull::as_ptr)
        .ok_or_else(|| RpcError::unsupported(format!("no collective can reach memory of {}", tensor.device())))
}
