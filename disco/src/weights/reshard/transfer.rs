//! The moves of one worker: its bytes go straight from and into its tensors where they lie in one
//! run of host memory. Short runs go through a buffer of [`GATHERED`] bytes, and other memory than
//! that of the host through one of [`MAX_PIECE`] bytes at most.

use rpc_core::tensor::Borrow;
use rpc_core::{Context, DataType, Device, Result, RpcError, Tensor, TensorView, TensorViewMut};

use super::byte_runs::ByteRuns;
use super::messages::WorkerMove;
use crate::ccl::{Buffers, Ccl, Collective, Operation, Rank};

/// Most bytes of a piece, which is sent at a time.
pub(super) const MAX_PIECE: u64 = 16 << 20;

/// Bytes of a piece that is gathered from runs, which are shorter: few enough to stay in a
/// processor's cache.
const GATHERED: u64 = 512 << 10;

/// Attempts to divide a long run into equal pieces.
const DIVISORS: u64 = 64;

/// Returns the bytes that a move is sent in at a time. Both sides have to use the same.
pub(super) fn piece_len(from: &ByteRuns, to: &ByteRuns) -> u64 {
    // One divides the other.
    let run = from.run.min(to.run).max(1);
    if from.are_contiguous() && to.are_contiguous() {
        return MAX_PIECE.min(from.len).max(1);
    }
    if run < GATHERED {
        // Whole runs, so that a piece of one side is no less contiguous than that of the other.
        return GATHERED / run * run;
    }
    // Runs one by one, in equal pieces.
    let least = run.div_ceil(MAX_PIECE);
    let count = (least..least + DIVISORS).find(|count| run.is_multiple_of(*count));
    count.map_or(GATHERED, |count| run / count)
}

/// Sends the bytes of these moves, one after the other.
///
/// # Errors
///
/// A tensor that cannot be read, or is written to; runs of a peer that are not in it; a broken
/// group.
pub(super) fn send_all(context: &Context, ccl: &mut dyn Ccl, tensors: &[Tensor], moves: &[WorkerMove]) -> Result<()> {
    let views = tensors.iter().map(Tensor::read).collect::<Result<Vec<_>>>()?;
    check(moves, tensors)?;
    let mut staging = Staging::new(context);
    for one in moves {
        let source = SourcePart::of(&views[one.tensor as usize])?;
        for (start, len) in pieces(one) {
            let operation = Operation::Send { to: Rank(one.peer) };
            match source.slice(&one.runs, start, len) {
                Some(bytes) => run(ccl, operation, len, Buffers::input(bytes))?,
                None => {
                    let mut buffer = staging.buffer(len)?;
                    source.gather(&one.runs, start, buffer.bytes_mut()?)?;
                    run(ccl, operation, len, Buffers::input(buffer.bytes_mut()?))?;
                }
            }
        }
    }
    Ok(())
}

/// Receives the bytes of these moves, one after the other.
///
/// # Errors
///
/// As [`send_all`].
pub(super) fn receive_all(
    context: &Context,
    ccl: &mut dyn Ccl,
    tensors: &[Tensor],
    moves: &[WorkerMove],
) -> Result<()> {
    let borrows = tensors.iter().map(|tensor| Ok(tensor.write()?.into_parts().1));
    let mut borrows = borrows.collect::<Result<Vec<_>>>()?;
    check(moves, tensors)?;
    let mut staging = Staging::new(context);
    for one in moves {
        let at = one.tensor as usize;
        let mut destination = DestinationPart::of(&tensors[at], &mut borrows[at])?;
        for (start, len) in pieces(one) {
            let operation = Operation::Recv { from: Rank(one.peer) };
            match destination.slice(&one.runs, start, len) {
                Some(bytes) => run(ccl, operation, len, Buffers::output(bytes))?,
                None => {
                    let mut buffer = staging.buffer(len)?;
                    run(ccl, operation, len, Buffers::output(buffer.bytes_mut()?))?;
                    destination.scatter(&one.runs, start, buffer.bytes_mut()?)?;
                }
            }
        }
    }
    Ok(())
}

/// Reads bytes of a tensor that are `len` bytes of runs from `start` on into `out`.
///
/// # Errors
///
/// As [`send_all`].
pub(super) fn read(tensor: &Tensor, runs: &ByteRuns, start: u64, out: &mut [u8]) -> Result<()> {
    runs.check(tensor.size_bytes())?;
    check_range(runs, start, out.len() as u64)?;
    SourcePart::of(&tensor.read()?)?.gather(runs, start, out)
}

/// Writes bytes to a tensor: those of runs from `start` on.
///
/// # Errors
///
/// As [`receive_all`].
pub(super) fn write(tensor: &Tensor, runs: &ByteRuns, start: u64, bytes: &[u8]) -> Result<()> {
    runs.check(tensor.size_bytes())?;
    check_range(runs, start, bytes.len() as u64)?;
    DestinationPart::of(tensor, &mut tensor.write()?.into_parts().1)?.scatter(runs, start, bytes)
}

fn run(ccl: &mut dyn Ccl, operation: Operation, len: u64, buffers: Buffers<'_>) -> Result<()> {
    // At most `MAX_PIECE`.
    Ok(ccl.run(Collective::new(operation, DataType::U8, len as usize), buffers.into())?)
}

/// Checks moves of a controller.
fn check(moves: &[WorkerMove], tensors: &[Tensor]) -> Result<()> {
    for one in moves {
        let tensor = tensors.get(one.tensor as usize);
        let tensor = tensor.ok_or_else(|| RpcError::invalid_argument("a move of a tensor that there is not"))?;
        one.runs.check(tensor.size_bytes())?;
        if one.piece == 0 || one.piece > MAX_PIECE {
            return Err(RpcError::limit("bytes of a piece of a move", MAX_PIECE, one.piece));
        }
    }
    Ok(())
}

fn check_range(runs: &ByteRuns, start: u64, len: u64) -> Result<()> {
    if start.checked_add(len).is_some_and(|end| end <= runs.len) {
        return Ok(());
    }
    Err(RpcError::invalid_argument(format!("{len} bytes from {start} on of runs of {} bytes", runs.len)))
}

/// Returns the pieces of a move: where each begins, and its length.
fn pieces(one: &WorkerMove) -> impl Iterator<Item = (u64, u64)> + use<> {
    let (len, piece) = (one.runs.len, one.piece);
    (0..len.div_ceil(piece)).map(move |number| (number * piece, piece.min(len - number * piece)))
}

/// Part of a tensor that is read.
enum SourcePart<'a> {
    Host(&'a [u8]),
    /// Memory that is not host memory, and the start of the part in it.
    Elsewhere(&'a Borrow, u64),
}

impl<'a> SourcePart<'a> {
    fn of(view: &'a TensorView) -> Result<Self> {
        let range = view.tensor().byte_range(0, view.tensor().size_bytes())?;
        Ok(view.bytes().map_or_else(|_| Self::Elsewhere(view.guard(), range.start), Self::Host))
    }

    /// Returns bytes of runs, if they are in one run of host memory.
    fn slice(&self, runs: &ByteRuns, start: u64, len: u64) -> Option<&'a [u8]> {
        let Self::Host(bytes) = self else { return None };
        let range = runs.ranges(start..start + len).next()?;
        (range.end - range.start == len).then(|| &bytes[range.start as usize..range.end as usize])
    }

    fn gather(&self, runs: &ByteRuns, start: u64, mut out: &mut [u8]) -> Result<()> {
        for range in runs.ranges(start..start + out.len() as u64) {
            let (piece, rest) = out.split_at_mut((range.end - range.start) as usize);
            match self {
                Self::Host(bytes) => piece.copy_from_slice(&bytes[range.start as usize..range.end as usize]),
                Self::Elsewhere(borrow, at) => borrow.copy_out(at + range.start, piece)?,
            }
            out = rest;
        }
        Ok(())
    }
}

/// Part of a tensor that is written.
enum DestinationPart<'a> {
    Host(&'a mut [u8]),
    /// Memory that is not host memory, and the start of the part in it.
    Elsewhere(&'a mut Borrow, u64),
}

impl<'a> DestinationPart<'a> {
    fn of(tensor: &Tensor, borrow: &'a mut Borrow) -> Result<Self> {
        let range = tensor.byte_range(0, tensor.size_bytes())?;
        if tensor.storage().memory().host().is_none() {
            return Ok(Self::Elsewhere(borrow, range.start));
        }
        let bytes = borrow.bytes_mut().ok_or_else(|| RpcError::internal("host memory without bytes"))?;
        Ok(Self::Host(&mut bytes[range.start as usize..range.end as usize]))
    }

    /// Returns bytes of runs, if they are in one run of host memory.
    fn slice(&mut self, runs: &ByteRuns, start: u64, len: u64) -> Option<&mut [u8]> {
        let Self::Host(bytes) = self else { return None };
        let range = runs.ranges(start..start + len).next()?;
        (range.end - range.start == len).then(|| &mut bytes[range.start as usize..range.end as usize])
    }

    fn scatter(&mut self, runs: &ByteRuns, start: u64, mut data: &[u8]) -> Result<()> {
        for range in runs.ranges(start..start + data.len() as u64) {
            let (piece, rest) = data.split_at((range.end - range.start) as usize);
            match self {
                Self::Host(bytes) => bytes[range.start as usize..range.end as usize].copy_from_slice(piece),
                Self::Elsewhere(borrow, at) => borrow.copy_in(*at + range.start, piece)?,
            }
            data = rest;
        }
        Ok(())
    }
}

/// Buffer for pieces that are not in one run of host memory: memory of the session, which is
/// allocated when it is needed.
struct Staging<'a> {
    context: &'a Context,
    buffer: Option<Tensor>,
}

impl<'a> Staging<'a> {
    fn new(context: &'a Context) -> Self {
        Self { context, buffer: None }
    }

    /// Returns a buffer of `len` bytes.
    fn buffer(&mut self, len: u64) -> Result<TensorViewMut> {
        let buffer = match self.buffer.take().filter(|buffer| buffer.size_bytes() >= len) {
            Some(buffer) => buffer,
            // At most `MAX_PIECE`.
            None => self.context.allocate(Device::cpu(), DataType::U8, &[len as i64])?,
        };
        self.buffer.insert(buffer).view(0, [len as i64], None, DataType::U8)?.write()
    }
}

#[cfg(test)]
mod tests;
