//! [`WeightReader`]: the worker's source of a tensor, which is a file, or memory that was received
//! from another worker or the controller.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use rpc_core::device::GLOBAL;
use rpc_core::tensor::Borrow;
use rpc_core::{DataType, Device, Result, RpcError, Tensor, VirtualDevice};

use super::files::InFile;
use super::in_parallel::in_parallel;
use super::tensor_slice::{ReadAt, TensorSlice};
use crate::worker::context::WorkerContext;

/// Bytes after which progress is reported again.
const REPORT_EVERY: u64 = 4 << 20;

/// A tensor of a file, as the argument of a function that reads the bytes that its worker needs:
/// see [`Part::With`](super::Part::With).
///
/// If the worker can read the file, nothing has been read yet. Otherwise the whole tensor is in the
/// worker's memory, until the function and its results drop this. Calls block while they read.
#[derive(Debug)]
pub struct WeightReader {
    pub(super) name: String,
    pub(super) dtype: DataType,
    pub(super) shape: Vec<i64>,
    pub(super) destination: Destination,
    pub(super) source: Source,
    pub(super) meter: Meter,
}

impl WeightReader {
    /// Returns the name of the tensor.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the type of its elements.
    pub fn dtype(&self) -> DataType {
        self.dtype
    }

    /// Returns the dimensions of the whole tensor.
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// Returns the device on which the loader wants the part.
    pub fn device(&self) -> Device {
        self.destination.device
    }

    /// Reads the whole tensor into a new one on [`device`](Self::device).
    ///
    /// # Errors
    ///
    /// No memory for it; the file cannot be read.
    pub fn read(&self) -> Result<Tensor> {
        self.read_box(&[])
    }

    /// Reads a range of one dimension, and all of the others, into a new tensor on
    /// [`device`](Self::device).
    ///
    /// # Errors
    ///
    /// Those of [`read_box`](Self::read_box).
    pub fn read_range(&self, dim: usize, range: Range<i64>) -> Result<Tensor> {
        let Some(before) = self.shape.get(..dim) else {
            return Err(RpcError::invalid_argument(format!("there is no dimension {dim} in {:?}", self.shape)));
        };
        let before = before.iter().map(|length| 0..*length);
        self.read_box(&before.chain([range]).collect::<Vec<_>>())
    }

    /// Reads a box, which is these ranges of the first dimensions and all of the others, into a new
    /// tensor on [`device`](Self::device). Contiguous bytes of the file are read at once, and small
    /// pieces together with the bytes between them.
    ///
    /// # Errors
    ///
    /// More ranges than dimensions, or one beyond its dimension; a box of elements below 8 bits
    /// that begins or ends within a byte; no memory for it; the file cannot be read.
    pub fn read_box(&self, ranges: &[Range<i64>]) -> Result<Tensor> {
        let slice = TensorSlice::new(self.dtype, &self.shape, ranges)?;
        self.read_slice(&slice)
    }

    /// Reads the part that the loader wants.
    pub(super) fn part(&self) -> Result<Tensor> {
        match &self.source {
            Source::File { slice, .. } => self.read_slice(slice),
            Source::Memory(part) if self.destination == Destination::of(part.device()) => Ok(part.clone()),
            Source::Memory(part) => {
                let come = InMemory::new(part)?;
                filled(&self.meter.worker, &self.destination, part.dtype(), part.shape(), &|at, out| {
                    come.read_at(at, out)
                })
            }
        }
    }

    fn read_slice(&self, slice: &TensorSlice) -> Result<Tensor> {
        match &self.source {
            Source::File { file, .. } => self.read_slice_from(file, slice),
            Source::Memory(tensor) => self.read_slice_from(&InMemory::new(tensor)?, slice),
        }
    }

    fn read_slice_from(&self, from: &(impl ReadAt + Sync), slice: &TensorSlice) -> Result<Tensor> {
        filled(&self.meter.worker, &self.destination, self.dtype, &slice.shape, &|at, out| {
            slice.read(from, at, out, &mut |bytes| self.meter.add(bytes))
        })
    }
}

/// Destination of a worker's part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Destination {
    device: Device,
    /// `None` is the device's ordinary memory.
    memory_scope: Option<String>,
}

impl Destination {
    /// Returns the ordinary memory of a device.
    pub(super) fn of(device: Device) -> Self {
        Self { device, memory_scope: None }
    }

    /// Returns the memory on this worker that satisfies a constraint.
    pub(super) fn on(worker: &WorkerContext, wanted: Option<&VirtualDevice>) -> Result<Self> {
        let memory_scope = wanted.and_then(VirtualDevice::memory_scope).filter(|scope| *scope != GLOBAL);
        Ok(Self { device: worker.choose(wanted)?, memory_scope: memory_scope.map(str::to_owned) })
    }

    pub(super) fn allocate(&self, worker: &WorkerContext, dtype: DataType, shape: &[i64]) -> Result<Tensor> {
        worker.context().allocate_in_scope(self.device, dtype, shape, self.memory_scope.as_deref())
    }
}

/// Source of a worker's part.
pub(super) enum Source {
    File {
        file: InFile,
        slice: TensorSlice,
    },
    /// Memory that contains the part.
    Memory(Tensor),
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { file, .. } => write!(f, "{}", file.path.display()),
            Self::Memory(_) => f.write_str("memory"),
        }
    }
}

/// A received tensor, in the memory of any device.
struct InMemory {
    borrow: Borrow,
    /// Start in the borrowed storage.
    start: u64,
}

impl InMemory {
    fn new(tensor: &Tensor) -> Result<Self> {
        let (_, borrow) = tensor.read()?.into_parts();
        Ok(Self { borrow, start: tensor.byte_offset() })
    }
}

impl ReadAt for InMemory {
    fn read_at(&self, at: u64, out: &mut [u8]) -> Result<()> {
        self.borrow.copy_out(self.start + at, out)
    }
}

/// Bytes that are copied at a time to memory that is not host memory: so many that the cost of a
/// thread for reading the next piece is small.
const PIECE: u64 = 8 << 20;

/// Function that fills a buffer with the bytes of a tensor from an offset on.
pub(super) type Fill<'a> = dyn Fn(u64, &mut [u8]) -> Result<()> + Sync + 'a;

/// Allocates a tensor and fills it by `fill`: in place if it is in host memory, and otherwise
/// through host memory.
pub(super) fn filled(
    worker: &WorkerContext,
    destination: &Destination,
    dtype: DataType,
    shape: &[i64],
    fill: &Fill<'_>,
) -> Result<Tensor> {
    let tensor = destination.allocate(worker, dtype, shape)?;
    let mut view = tensor.write()?;
    if let Ok(bytes) = view.bytes_mut() {
        fill(0, bytes)?;
        drop(view);
        return Ok(tensor);
    }
    let (_, mut borrow) = view.into_parts();
    fill_elsewhere(worker, &mut borrow, tensor.byte_offset(), tensor.size_bytes(), fill)?;
    drop(borrow);
    Ok(tensor)
}

/// Fills `size` bytes from `start` on of memory that is not host memory. Goes piece by piece, so
/// that little host memory is needed, and reads the next piece while one is copied.
fn fill_elsewhere(worker: &WorkerContext, to: &mut Borrow, start: u64, size: u64, fill: &Fill<'_>) -> Result<()> {
    // At most two pieces, so the cast cannot overflow.
    let scratch = worker.context().allocate(Device::cpu(), DataType::U8, &[size.min(2 * PIECE) as i64])?;
    let mut view = scratch.write()?;
    let len = |at: u64| (size - at).min(PIECE) as usize;
    let (mut ready, mut spare) = view.bytes_mut()?.split_at_mut(len(0));
    fill(0, ready)?;
    for at in (0..size).step_by(PIECE as usize) {
        let next = at + PIECE;
        let mut copy = || to.copy_in(start + at, &ready[..len(at)]);
        if next >= size {
            return copy();
        }
        let (read, copied) = in_parallel(|| fill(next, &mut spare[..len(next)]), copy);
        copied.and(read)?;
        std::mem::swap(&mut ready, &mut spare);
    }
    Ok(())
}

/// Count of the bytes that one load has brought to one worker, at most as many as expected. Reports
/// them to the controller.
#[derive(Debug)]
pub(super) struct Meter {
    worker: WorkerContext,
    loader: u64,
    left: AtomicU64,
    unreported: AtomicU64,
}

impl Meter {
    /// Starts the count of a load that is expected to bring `bytes` bytes to this worker.
    pub(super) fn new(worker: &WorkerContext, loader: u64, bytes: u64) -> Self {
        Self { worker: worker.clone(), loader, left: AtomicU64::new(bytes), unreported: AtomicU64::new(0) }
    }

    /// Adds bytes that have been read. A function may read any part, any number of times; bytes
    /// beyond the expected number are not counted.
    fn add(&self, bytes: u64) {
        let take = |left: u64| Some(left - left.min(bytes));
        let before = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).unwrap_or_default();
        let unreported = self.unreported.fetch_add(before.min(bytes), Ordering::Relaxed) + before.min(bytes);
        if unreported >= REPORT_EVERY {
            self.report(self.unreported.swap(0, Ordering::Relaxed));
        }
    }

    /// Reports all expected bytes that have not been reported.
    pub(super) fn finish(&self) {
        self.report(self.unreported.swap(0, Ordering::Relaxed) + self.left.swap(0, Ordering::Relaxed));
    }

    fn report(&self, bytes: u64) {
        if self.loader != 0 && bytes > 0 {
            self.worker.report_loaded(self.loader, bytes);
        }
    }
}
