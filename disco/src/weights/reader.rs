//! A tensor on its way to a worker: read from a file, or what has come from another worker.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use rpc_core::virtual_device::GLOBAL;
use rpc_core::{DataType, Device, Result, RpcError, Tensor, VirtualDevice};

use super::cut::{Cut, ReadAt};
use super::files::InFile;
use crate::context::WorkerContext;

/// Progress is told when so many bytes more have come.
const TELL: u64 = 4 << 20;

/// A tensor of a file, from which a function that is called with it reads what its worker needs: see [`Part::With`](super::Part::With).
///
/// Where the worker can read the file nothing has been read yet. Otherwise all of the tensor has come into the worker's memory, and stays there until the function
/// and its results let go of this. Calls block while they read.
#[derive(Debug)]
pub struct WeightReader {
    pub(super) name: String,
    pub(super) dtype: DataType,
    pub(super) shape: Vec<i64>,
    pub(super) place: Place,
    pub(super) source: Source,
    pub(super) meter: Meter,
}

impl WeightReader {
    /// What the tensor is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DataType {
        self.dtype
    }

    /// The dimensions of the whole tensor.
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// Where the loader wants the part to be.
    pub fn device(&self) -> Device {
        self.place.device
    }

    /// Reads all of the tensor into a new one on [`device`](Self::device).
    ///
    /// # Errors
    ///
    /// No memory for it; the file cannot be read.
    pub fn read(&self) -> Result<Tensor> {
        self.read_box(&[])
    }

    /// Reads these entries of one dimension, and all of the others: a new tensor on [`device`](Self::device).
    ///
    /// # Errors
    ///
    /// As [`read_box`](Self::read_box).
    pub fn read_range(&self, dim: usize, range: Range<i64>) -> Result<Tensor> {
        let Some(before) = self.shape.get(..dim) else {
            return Err(RpcError::invalid_argument(format!("there is no dimension {dim} in {:?}", self.shape)));
        };
        let before = before.iter().map(|length| 0..*length);
        self.read_box(&before.chain([range]).collect::<Vec<_>>())
    }

    /// Reads a box: these ranges of the first dimensions, and all of the others. A new tensor on [`device`](Self::device). What lies together in the file is read at once,
    /// and small pieces together with what is between them.
    ///
    /// # Errors
    ///
    /// More ranges than dimensions, or one beyond its dimension; a box of elements below 8 bits that begins or ends within a byte; no memory for it; the
    /// file cannot be read.
    pub fn read_box(&self, ranges: &[Range<i64>]) -> Result<Tensor> {
        let cut = Cut::new(self.dtype, &self.shape, ranges)?;
        self.read_cut(&cut)
    }

    /// Reads the part that the loader wants.
    pub(super) fn part(&self) -> Result<Tensor> {
        match &self.source {
            Source::File { cut, .. } => self.read_cut(cut),
            Source::Memory(part) if self.place == Place::of(part.device()) => Ok(part.clone()),
            Source::Memory(part) => {
                let moved = self.place.allocate(&self.meter.worker, part.dtype(), part.shape())?;
                copy(part, &moved)?;
                Ok(moved)
            }
        }
    }

    fn read_cut(&self, cut: &Cut) -> Result<Tensor> {
        filled(&self.meter.worker, &self.place, self.dtype, &cut.shape, |out| match &self.source {
            Source::File { file, .. } => cut.read(file, out, &mut |bytes| self.meter.add(bytes)),
            Source::Memory(tensor) => {
                cut.read(&InMemory(tensor.read()?.bytes()?), out, &mut |bytes| self.meter.add(bytes))
            }
        })
    }
}

/// Where a worker's part goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    device: Device,
    /// `None` is the device's ordinary memory.
    memory_scope: Option<String>,
}

impl Place {
    /// Ordinary memory of a device.
    pub(super) fn of(device: Device) -> Self {
        Self { device, memory_scope: None }
    }

    /// What satisfies a constraint on this worker.
    pub(super) fn on(worker: &WorkerContext, wanted: Option<&VirtualDevice>) -> Result<Self> {
        let memory_scope = wanted.and_then(VirtualDevice::memory_scope).filter(|scope| *scope != GLOBAL);
        Ok(Self { device: worker.choose(wanted)?, memory_scope: memory_scope.map(str::to_owned) })
    }

    fn allocate(&self, worker: &WorkerContext, dtype: DataType, shape: &[i64]) -> Result<Tensor> {
        worker.context().allocate_in_scope(self.device, dtype, shape, self.memory_scope.as_deref())
    }
}

/// Where a worker's part comes from.
pub(super) enum Source {
    File {
        file: InFile,
        cut: Cut,
    },
    /// The part itself.
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

/// A tensor whose bytes have come.
struct InMemory<'a>(&'a [u8]);

impl ReadAt for InMemory<'_> {
    fn read_at(&self, at: u64, out: &mut [u8]) -> Result<()> {
        // A cut is of the tensor that this is all of.
        out.copy_from_slice(&self.0[at as usize..][..out.len()]);
        Ok(())
    }
}

/// A new tensor whose bytes `fill` writes: in place where that is host memory, and otherwise by way of that.
pub(super) fn filled(
    worker: &WorkerContext,
    place: &Place,
    dtype: DataType,
    shape: &[i64],
    fill: impl FnOnce(&mut [u8]) -> Result<()>,
) -> Result<Tensor> {
    let tensor = place.allocate(worker, dtype, shape)?;
    let mut view = tensor.write()?;
    if let Ok(bytes) = view.bytes_mut() {
        fill(bytes)?;
        drop(view);
        return Ok(tensor);
    }
    drop(view);
    let scratch = worker.context().allocate(Device::cpu(), dtype, shape)?;
    fill(scratch.write()?.bytes_mut()?)?;
    copy(&scratch, &tensor)?;
    Ok(tensor)
}

/// Copies a tensor in host memory to one of the same layout, wherever that is.
fn copy(from: &Tensor, to: &Tensor) -> Result<()> {
    let (_, mut borrow) = to.write()?.into_parts();
    borrow.copy_in(to.byte_offset(), from.read()?.bytes()?)
}

/// Counts the bytes that one load brings to one worker, as many as it was expected to bring, and tells the controller.
#[derive(Debug)]
pub(super) struct Meter {
    worker: WorkerContext,
    loader: u64,
    left: AtomicU64,
    untold: AtomicU64,
}

impl Meter {
    /// Of a load that brings so many bytes to this worker.
    pub(super) fn new(worker: &WorkerContext, loader: u64, bytes: u64) -> Self {
        Self { worker: worker.clone(), loader, left: AtomicU64::new(bytes), untold: AtomicU64::new(0) }
    }

    /// So many more have been read. A function may read what it likes, and as often; what is more than expected does not count.
    fn add(&self, bytes: u64) {
        let take = |left: u64| Some(left - left.min(bytes));
        let before = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).unwrap_or_default();
        let untold = self.untold.fetch_add(before.min(bytes), Ordering::Relaxed) + before.min(bytes);
        if untold >= TELL {
            self.tell(self.untold.swap(0, Ordering::Relaxed));
        }
    }

    /// All that was expected is there.
    pub(super) fn finish(&self) {
        self.tell(self.untold.swap(0, Ordering::Relaxed) + self.left.swap(0, Ordering::Relaxed));
    }

    fn tell(&self, bytes: u64) {
        if self.loader != 0 && bytes > 0 {
            self.worker.tell_loaded(self.loader, bytes);
        }
    }
}
