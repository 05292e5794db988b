//! Loan of tensors to a collective: the check that they fit the call, and their borrow for as long
//! as it takes.

mod mapped;
#[allow(unsafe_code)]
mod on_device;

use std::ops::Range;
use std::sync::Arc;

use rpc_core::{DataType, Result, RpcError, Tensor};

use crate::ccl::{Buffers, Collective, Operation, Rank};

/// Returns the call that fits the tensors, and those of them that it needs.
pub(super) fn fit<'t>(
    operation: Operation,
    rank: Rank,
    size: u32,
    from: Option<&'t Tensor>,
    to: Option<&'t Tensor>,
) -> Result<(Collective, Option<&'t Tensor>, Option<&'t Tensor>)> {
    let n = u64::from(size);
    let is_root = operation_root(operation).is_none_or(|root| root == rank);
    let (needs_from, needs_to) = match operation {
        Operation::Broadcast { .. } | Operation::Scatter { .. } => (is_root, true),
        Operation::Gather { .. } => (true, is_root),
        Operation::Send { .. } => (true, false),
        Operation::Recv { .. } => (false, true),
        Operation::Barrier => (false, false),
        _ => (true, true),
    };
    let (from, to) = (from.filter(|_| needs_from), to.filter(|_| needs_to));
    if needs_from && from.is_none() || needs_to && to.is_none() {
        let what = if needs_from && from.is_none() { "source" } else { "destination" };
        return Err(RpcError::invalid_argument(format!("{operation} needs a {what} that is a tensor")));
    }
    if let (Some(from), Some(to)) = (from, to)
        && from.dtype() != to.dtype()
    {
        return Err(mismatch(operation, size, from, to));
    }
    // Number of elements of the two, as multiples of the call's count.
    let (from_times, to_times) = match operation {
        Operation::ReduceScatter(_) | Operation::Scatter { .. } => (n, 1),
        Operation::Allgather | Operation::Gather { .. } => (1, n),
        Operation::AllToAll => (n, n),
        _ => (1, 1),
    };
    let counts = [from.map(|tensor| (tensor, from_times)), to.map(|tensor| (tensor, to_times))];
    let mut count = None;
    for (tensor, times) in counts.into_iter().flatten() {
        let elements = tensor.element_count();
        let one = elements / times;
        if elements % times != 0 || count.is_some_and(|count| count != one) {
            return Err(match (from, to) {
                (Some(from), Some(to)) => mismatch(operation, size, from, to),
                _ => RpcError::invalid_argument(format!(
                    "{operation} among {size} workers: {} does not divide by {size}",
                    describe(tensor)
                )),
            });
        }
        count = Some(one);
    }
    let dtype = from.or(to).map_or(DataType::U8, Tensor::dtype);
    let count = usize::try_from(count.unwrap_or(0)).map_err(|_| RpcError::invalid_argument("too many elements"))?;
    Ok((Collective::new(operation, dtype, count), from, to))
}

fn operation_root(operation: Operation) -> Option<Rank> {
    match operation {
        Operation::Broadcast { root } | Operation::Scatter { root } | Operation::Gather { root } => Some(root),
        _ => None,
    }
}

fn mismatch(operation: Operation, size: u32, from: &Tensor, to: &Tensor) -> RpcError {
    let (from, to) = (describe(from), describe(to));
    RpcError::invalid_argument(format!("{operation} among {size} workers: the source is {from}, the destination {to}"))
}

fn describe(tensor: &Tensor) -> String {
    format!("{} {:?}", tensor.dtype(), tensor.shape())
}

/// Borrows both tensors for as long as `run` takes. Where they are of one storage they must be the
/// same, the one this rank's share of the other, or apart.
pub(super) fn lend<R>(
    from: Option<&Tensor>,
    to: Option<&Tensor>,
    rank: Rank,
    run: impl FnOnce(Buffers<'_>) -> R,
) -> Result<R> {
    let is_elsewhere = |tensor: &Tensor| tensor.storage().memory().host().is_none();
    if from.into_iter().chain(to).any(is_elsewhere) {
        // Memory without addresses is for no library of its device.
        let has_no_address = |tensor: &Tensor| {
            let memory = tensor.storage().memory();
            !memory.is_empty() && memory.device_address().is_none()
        };
        let is_mapped = from.into_iter().chain(to).any(has_no_address);
        return if is_mapped { mapped::lend(from, to, rank, run) } else { on_device::lend(from, to, rank, run) };
    }
    match (from, to) {
        (None, None) => Ok(run(Buffers::none())),
        (Some(from), None) => Ok(run(Buffers::input(from.read()?.bytes()?))),
        (None, Some(to)) => Ok(run(Buffers::output(to.write()?.bytes_mut()?))),
        (Some(from), Some(to)) if !Arc::ptr_eq(from.storage(), to.storage()) => {
            let view = from.read()?;
            Ok(run(Buffers::new(view.bytes()?, to.write()?.bytes_mut()?)))
        }
        (Some(from), Some(to)) => {
            let (source, target) = (range(from)?, range(to)?);
            let (_, mut borrow) = to.write()?.into_parts();
            let bytes = borrow.bytes_mut().ok_or_else(|| RpcError::internal("host memory without bytes"))?;
            if let Some(whole) = in_place(&source, &target, rank) {
                return Ok(run(Buffers::in_place(&mut bytes[whole])));
            }
            if source.end <= target.start {
                let (low, high) = bytes.split_at_mut(target.start);
                let len = target.len();
                Ok(run(Buffers::new(&low[source], &mut high[..len])))
            } else if target.end <= source.start {
                let (low, high) = bytes.split_at_mut(source.start);
                let len = source.len();
                Ok(run(Buffers::new(&high[..len], &mut low[target])))
            } else {
                Err(overlap(&source, &target))
            }
        }
    }
}

/// Returns the longer of two ranges, if the shorter one is it, or this rank's share of it.
fn in_place(source: &Range<usize>, target: &Range<usize>, rank: Rank) -> Option<Range<usize>> {
    let (longer, shorter) = if source.len() > target.len() { (source, target) } else { (target, source) };
    let share = longer.start + if shorter.len() == longer.len() { 0 } else { shorter.len() * rank.0 as usize };
    (shorter.start == share && share + shorter.len() <= longer.end).then(|| longer.clone())
}

fn overlap(source: &Range<usize>, target: &Range<usize>) -> RpcError {
    RpcError::invalid_argument(format!(
        "source and destination overlap in part (bytes {source:?} and {target:?} of one storage); they may be the \
         same or apart"
    ))
}

/// Returns the range of a dense tensor in its storage.
fn range(tensor: &Tensor) -> Result<Range<usize>> {
    let range = tensor.byte_range(0, tensor.size_bytes())?;
    // Of memory that has addresses, which those fit.
    Ok(range.start as usize..range.end as usize)
}
