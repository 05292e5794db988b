//! Copies between the client's memory and a tensor: loops of chunk-sized requests that follow each
//! other closely.
//!
//! The loop runs at the client, so that a chain of hops streams instead of storing, other lanes
//! interleave, memory stays bounded, and progress can be shown.

use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use crate::client::action::{Action, NamedResult as _, Options, ScopedAction};
use crate::client::lane_deadlock;
use crate::client::piece_window::PieceWindow;
use crate::client::references::{Owned, RemoteTensor};
use crate::client::session::Session;
use crate::dlpack::{self, Device, Element};
use crate::error::{Result, RpcError};
use crate::session::{Operation, ReadBuffer, SharedSession};
use crate::value::{TensorRef, Value};

/// Largest piece of a copy, in bytes: large enough that the cost of a request is negligible, small
/// enough that other lanes get their turn and that a hop stores little.
pub const CHUNK: usize = 1 << 20;

impl Session {
    /// Allocates a tensor on `cpu:0` and fills it.
    ///
    /// # Errors
    ///
    /// As [`alloc`](Self::alloc) and [`copy_to_remote`](Self::copy_to_remote); `data` must have as
    /// many elements as `shape`.
    pub fn upload<T: Element>(&self, shape: &[i64], data: &[T]) -> Action<RemoteTensor> {
        let (session, shape, len, bytes) = (self.clone(), shape.to_vec(), data.len(), dlpack::to_bytes(data));
        ScopedAction::steps(async move |options: Options<'static>| {
            let elements = dlpack::element_count(&shape)?;
            if elements != len as u64 {
                return Err(RpcError::invalid_argument(format!(
                    "shape {shape:?} has {elements} elements, and {len} were given"
                )));
            }
            let tensor = options.apply(session.alloc(Device::cpu(), T::DATA_TYPE, &shape)).await?;
            CopyTo::new(&session, &tensor, 0, bytes).run(options).await?;
            Ok(tensor)
        })
    }

    /// Reads a densely packed tensor as a vector of its elements.
    ///
    /// # Errors
    ///
    /// As [`copy_from_remote`](Self::copy_from_remote); the tensor must have elements of type `T`.
    pub fn download<T: Element>(&self, tensor: &RemoteTensor) -> Action<Vec<T>> {
        let (dtype, copy) = (tensor.dtype(), CopyFrom::new(self, tensor, None));
        ScopedAction::steps(async move |options| {
            if dtype != T::DATA_TYPE {
                let expected = T::DATA_TYPE;
                return Err(RpcError::invalid_argument(format!("expected a tensor of {expected}, got one of {dtype}")));
            }
            let whole = copy.run(options, |len| Whole::new(BytesMut::new(), len)).await?;
            Ok(dlpack::from_bytes(&whole.into_buffer()))
        })
    }

    /// Copies bytes into a densely packed tensor, from its start, in chunks that follow each other
    /// closely.
    ///
    /// A copy that is cancelled or cut leaves its range unspecified.
    ///
    /// # Errors
    ///
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if the bytes do not fit, and errors
    /// of the session.
    pub fn copy_to_remote(&self, tensor: &RemoteTensor, data: impl Into<Bytes>) -> Action<()> {
        self.copy_to_remote_at(tensor, 0, data)
    }

    /// Copies like [`copy_to_remote`](Self::copy_to_remote), from the byte `offset` of the tensor.
    pub fn copy_to_remote_at(&self, tensor: &RemoteTensor, offset: u64, data: impl Into<Bytes>) -> Action<()> {
        let copy = CopyTo::new(self, tensor, offset, data.into());
        ScopedAction::steps(move |options| copy.run(options))
    }

    /// Reads the bytes of a densely packed tensor.
    ///
    /// # Errors
    ///
    /// Errors of the session.
    pub fn copy_from_remote(&self, tensor: &RemoteTensor) -> Action<BytesMut> {
        self.copy_from(tensor, None, BytesMut::new())
    }

    /// Reads like [`copy_from_remote`](Self::copy_from_remote), only the bytes `range` of the
    /// tensor.
    ///
    /// # Errors
    ///
    /// As there, and [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if the range does not
    /// fit.
    pub fn copy_range_from_remote(&self, tensor: &RemoteTensor, range: Range<u64>) -> Action<BytesMut> {
        self.copy_from(tensor, Some(range), BytesMut::new())
    }

    /// Reads like [`copy_from_remote`](Self::copy_from_remote), into `buffer`, which becomes the
    /// result. Reused memory is several times faster than fresh memory. The buffer's content and
    /// length do not matter; it grows if it is too small. The default range is the whole tensor.
    ///
    /// # Errors
    ///
    /// As [`copy_range_from_remote`](Self::copy_range_from_remote).
    pub fn copy_from_remote_into(
        &self,
        tensor: &RemoteTensor,
        range: impl Into<Option<Range<u64>>>,
        buffer: BytesMut,
    ) -> Action<BytesMut> {
        self.copy_from(tensor, range.into(), buffer)
    }

    /// Fills `out` with bytes from `offset` of the tensor. It costs one copy more than
    /// [`copy_from_remote_into`](Self::copy_from_remote_into), and takes memory for the pieces in
    /// flight, not for the whole range. Once it is dropped, it writes no more into `out`.
    ///
    /// # Errors
    ///
    /// As [`copy_range_from_remote`](Self::copy_range_from_remote).
    pub fn copy_from_remote_to_slice<'a>(
        &self,
        tensor: &RemoteTensor,
        offset: u64,
        out: &'a mut [u8],
    ) -> ScopedAction<'a, ()> {
        let range = offset..offset.saturating_add(out.len() as u64);
        let copy = CopyFrom::new(self, tensor, Some(range));
        ScopedAction::steps(async move |options| {
            copy.run(options, |_| Pieces { out, spare: Vec::new() }).await?;
            Ok(())
        })
    }

    fn copy_from(&self, tensor: &RemoteTensor, range: Option<Range<u64>>, buffer: BytesMut) -> Action<BytesMut> {
        let copy = CopyFrom::new(self, tensor, range);
        ScopedAction::steps(async move |options| {
            let whole = copy.run(options, |len| Whole::new(buffer, len)).await?;
            Ok(whole.into_buffer())
        })
    }
}

/// A copy into a tensor.
struct CopyTo {
    session: SharedSession,
    tensor: Result<TensorRef>,
    pin: Arc<Owned>,
    offset: u64,
    data: Bytes,
}

impl CopyTo {
    fn new(session: &Session, tensor: &RemoteTensor, offset: u64, data: Bytes) -> Self {
        let session = session.shared().clone();
        Self { tensor: tensor.reference_in(&session), pin: tensor.0.clone(), session, offset, data }
    }

    async fn run(self, options: Options<'_>) -> Result<()> {
        // Kept until the last reply.
        let pin = self.pin.clone();
        self.write(options).await.map_err(|error| pin.explained(error))
    }

    async fn write(self, mut options: Options<'_>) -> Result<()> {
        let Self { session, tensor, pin, offset, data } = self;
        let tensor = tensor?;
        pin.check_lane(options.lane)?;
        lane_deadlock::check(&session, options.lane)?;
        check_range(&tensor, offset, data.len())?;
        let mut window = PieceWindow::of_writes();
        let (mut next, mut done) = (0, 0);
        // An empty copy is still one request, so that it is admitted in order and detects a dead
        // session.
        let mut all_submitted = false;
        let write = |piece: &Range<usize>| Operation::Write {
            to: tensor.clone().into(),
            offset: offset + piece.start as u64,
            data: data.slice(piece.clone()),
        };
        while !all_submitted || !window.is_empty() {
            if !all_submitted && !window.is_full() {
                let piece = next..data.len().min(next + CHUNK);
                let began = window.now();
                let submitted = session.submit(options.request(write(&piece))).await;
                // A piece that was refused is one of many: those before it may have been written.
                let submitted = submitted.map_err(|error| {
                    let may_have_run = next > 0 || error.request_may_have_run();
                    error.may_have_run(may_have_run)
                });
                next = piece.end;
                all_submitted = next == data.len();
                window.push(piece, began, submitted?);
                continue;
            }
            let again = |piece: &Range<usize>| session.submit(options.request(write(piece))).reply();
            let Some((piece, outcome)) = window.finish(again).await else { break };
            outcome.map_err(|error| {
                let may_have_run = done > 0 || error.request_may_have_run();
                error.may_have_run(may_have_run)
            })?;
            done += piece.len();
            options.report(done as u64);
        }
        Ok(())
    }
}

/// A copy out of a tensor; without a range, of all of it.
struct CopyFrom {
    session: SharedSession,
    tensor: Result<TensorRef>,
    pin: Arc<Owned>,
    range: Option<Range<u64>>,
}

impl CopyFrom {
    fn new(session: &Session, tensor: &RemoteTensor, range: Option<Range<u64>>) -> Self {
        let session = session.shared().clone();
        Self { tensor: tensor.reference_in(&session), pin: tensor.0.clone(), session, range }
    }

    /// Copies to the destination that `into` makes for the size of the range.
    async fn run<D: Destination>(self, options: Options<'_>, into: impl FnOnce(usize) -> D) -> Result<D> {
        // Kept until the last reply.
        let pin = self.pin.clone();
        self.read(options, into).await.map_err(|error| pin.explained(error))
    }

    async fn read<D: Destination>(self, mut options: Options<'_>, into: impl FnOnce(usize) -> D) -> Result<D> {
        let Self { session, tensor, pin, range } = self;
        let tensor = tensor?;
        pin.check_lane(options.lane)?;
        lane_deadlock::check(&session, options.lane)?;
        let range = match range {
            Some(range) => range,
            None => 0..tensor.size_bytes()?,
        };
        let len = range.end.checked_sub(range.start).and_then(|len| usize::try_from(len).ok());
        let len = len.ok_or_else(|| RpcError::invalid_argument(format!("{range:?} is no range of bytes")))?;
        check_range(&tensor, range.start, len)?;
        let mut destination = into(len);
        let mut window = PieceWindow::of_reads();
        let (mut next, mut done) = (0, 0);
        // A copy of no bytes is one request, too.
        let mut all_submitted = false;
        let read = |(at, len, buffer): &ReadPiece| Operation::Read {
            from: tensor.clone().into(),
            offset: range.start + *at as u64,
            len: *len as u64,
            into: Some(buffer.clone()),
        };
        while !all_submitted || !window.is_empty() {
            if !all_submitted && !window.is_full() {
                let size = CHUNK.min(len - next);
                let piece = (next, size, ReadBuffer::new(destination.memory(size)));
                let began = window.now();
                let pending = session.submit(options.request(read(&piece))).await?;
                window.push(piece, began, pending);
                next += size;
                all_submitted = next == len;
                continue;
            }
            let again = |piece: &ReadPiece| session.submit(options.request(read(piece))).reply();
            let Some(((at, size, buffer), outcome)) = window.finish(again).await else { break };
            destination.fill(at, received(&buffer, outcome?)?);
            done += size;
            options.report(done as u64);
        }
        Ok(destination)
    }
}

/// Destination of a copy out of a tensor, which is filled from its start to its end.
trait Destination {
    /// Returns memory for the next piece.
    fn memory(&mut self, len: usize) -> BytesMut;

    /// Takes a piece that was received into such memory, and begins `at` bytes from the start.
    fn fill(&mut self, at: usize, piece: BytesMut);
}

/// One buffer, which is received in place.
struct Whole {
    rest: BytesMut,
    filled: BytesMut,
}

impl Whole {
    fn new(buffer: BytesMut, len: usize) -> Self {
        let mut rest = buffer;
        if rest.len() < len {
            // `resize` would write the zeros itself, while fresh memory is zero already.
            if rest.capacity() < len { rest = BytesMut::zeroed(len) } else { rest.resize(len, 0) }
        }
        rest.truncate(len);
        Self { rest, filled: BytesMut::new() }
    }

    /// Returns the buffer once it is filled, with all of its memory.
    fn into_buffer(self) -> BytesMut {
        let Self { rest, mut filled } = self;
        // The memory behind the bytes belongs to the same allocation.
        filled.unsplit(rest);
        filled
    }
}

impl Destination for Whole {
    fn memory(&mut self, len: usize) -> BytesMut {
        self.rest.split_to(len)
    }

    fn fill(&mut self, _: usize, piece: BytesMut) {
        // The pieces are adjacent in one allocation, so this moves nothing.
        self.filled.unsplit(piece);
    }
}

/// Memory of the caller, into which pieces are copied. Their own memory is used again.
struct Pieces<'a> {
    out: &'a mut [u8],
    spare: Vec<BytesMut>,
}

impl Destination for Pieces<'_> {
    fn memory(&mut self, len: usize) -> BytesMut {
        match self.spare.pop() {
            Some(mut spare) => {
                spare.truncate(len);
                spare
            }
            None => BytesMut::zeroed(len),
        }
    }

    fn fill(&mut self, at: usize, piece: BytesMut) {
        self.out[at..at + piece.len()].copy_from_slice(&piece);
        self.spare.push(piece);
    }
}

/// Offset in the range and length of a piece, and the memory that it is read into.
type ReadPiece = (usize, usize, ReadBuffer);

/// Returns the memory of a read that has been answered.
pub(super) fn received(buffer: &ReadBuffer, reply: Value) -> Result<BytesMut> {
    let mut piece = buffer.take().ok_or_else(|| RpcError::internal("the session kept a read buffer"))?;
    match reply {
        Value::Null => {}
        Value::Bytes(bytes) if bytes.len() == piece.len() => piece.copy_from_slice(&bytes),
        other => {
            let error = format!("a read of {} bytes was answered with {}", piece.len(), other.type_name());
            return Err(RpcError::new(crate::ErrorKind::Protocol, error));
        }
    }
    Ok(piece)
}

pub(super) fn check_range(tensor: &TensorRef, offset: u64, len: usize) -> Result<()> {
    let size = tensor.size_bytes()?;
    match offset.checked_add(len as u64) {
        Some(end) if end <= size => Ok(()),
        _ => Err(RpcError::invalid_argument(format!(
            "{len} bytes at offset {offset} do not fit a tensor of {size} bytes ({} {:?})",
            tensor.dtype, tensor.shape
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_comes_back_with_all_of_its_memory() {
        for (len, piece) in [(0, 1), (7, 3), (64, 64), (99, 10), (100, 100)] {
            let buffer = BytesMut::zeroed(100);
            let start = buffer.as_ptr();
            let mut whole = Whole::new(buffer, len);
            for at in (0..len.max(1)).step_by(piece) {
                let memory = whole.memory(piece.min(len - at));
                whole.fill(at, memory);
            }
            let buffer = whole.into_buffer();
            assert_eq!((buffer.len(), buffer.capacity(), buffer.as_ptr()), (len, 100, start));
        }
    }
}
