//! Tensors at their origin: a layout over a storage, and views that give functions access to the
//! elements.
//!
//! A [`Tensor`] is only a description; it can be cloned and passed on freely. A [`TensorView`] or
//! [`TensorViewMut`] is a tensor together with a [`Borrow`] of its storage, and gives out slices.

mod storage;
mod view;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::device::{AllocRequest, CpuDevice, DeviceApi};
use crate::dlpack::{DataType, Device, Element, dense_size, dense_strides, element_count, strided_extent};
use crate::error::{ErrorKind, Result, RpcError};

pub use storage::{Access, Borrow, PendingBorrow, Resume, Storage, borrow_all};
pub use view::{MappedElements, MappedElementsMut, TensorView, TensorViewMut};

/// Largest number of dimensions of a tensor.
pub const MAX_DIMENSIONS: usize = 32;

/// An array in a storage: offset, shape, strides and element type. Cheap to clone; clones share the
/// storage.
#[derive(Clone)]
pub struct Tensor(Arc<TensorParts>);

/// Content of a [`Tensor`], behind a pointer so that values, most of which are numbers, stay small.
struct TensorParts {
    storage: Arc<Storage>,
    /// Offset of the first element in bytes. `byte_offset + extent` lies within the storage.
    byte_offset: u64,
    shape: Vec<i64>,
    /// `None` whenever the elements are densely packed in row-major order.
    strides: Option<Vec<i64>>,
    dtype: DataType,
    /// Bytes from the first element to the end of the last one.
    extent: u64,
}

/// Layout of a tensor in its storage: the fields of a [`Tensor`], borrowed.
#[derive(Clone, Copy, Debug)]
pub struct Layout<'a> {
    /// Offset of the first element, in bytes from the start of the storage.
    pub byte_offset: u64,
    /// Dimensions, outermost first; empty for a scalar.
    pub shape: &'a [i64],
    /// Distance between neighbours in each dimension, in elements; `None` is densely packed,
    /// row-major.
    pub strides: Option<&'a [i64]>,
    /// Type of the elements.
    pub dtype: DataType,
}

impl Tensor {
    /// Creates a tensor in `storage`. `byte_offset` is the offset of the first element, `strides`
    /// count elements, and `None` is densely packed, row-major.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`] if the layout is malformed, overflows, or reaches beyond the
    /// storage.
    pub fn new(
        storage: Arc<Storage>,
        byte_offset: u64,
        shape: impl Into<Vec<i64>>,
        strides: Option<Vec<i64>>,
        dtype: DataType,
    ) -> Result<Self> {
        let shape = shape.into();
        if shape.len() > MAX_DIMENSIONS {
            let count = shape.len();
            return Err(RpcError::invalid_argument(format!("{count} dimensions are more than {MAX_DIMENSIONS}")));
        }
        if dtype.bits_per_element() == 0 {
            return Err(RpcError::invalid_argument(format!("the elements of a {dtype} tensor have no bits")));
        }
        let dense = dense_size(&shape, dtype)?;
        let strides = strides.filter(|strides| !is_row_major(&shape, strides));
        let extent = match &strides {
            Some(strides) => strided_extent(&shape, strides, dtype)?,
            None => dense,
        };
        match byte_offset.checked_add(extent) {
            Some(end) if end <= storage.len() => {}
            _ => {
                return Err(RpcError::invalid_argument(format!(
                    "a {dtype} tensor of shape {shape:?} takes {extent} bytes at {byte_offset}, beyond the {} bytes of \
                     its storage",
                    storage.len()
                )));
            }
        }
        Ok(Self(Arc::new(TensorParts { storage, byte_offset, shape, strides, dtype, extent })))
    }

    /// Creates a tensor of zeros in host memory, outside of any session's quota.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and [`ErrorKind::OutOfMemory`].
    pub fn zeros(shape: impl Into<Vec<i64>>, dtype: DataType) -> Result<Self> {
        let shape = shape.into();
        let memory = CpuDevice::default().allocate(0, &AllocRequest::new(dense_size(&shape, dtype)?))?;
        Self::new(Storage::new(Device::cpu(), memory, None), 0, shape, None, dtype)
    }

    /// Creates a tensor with a copy of `elements` in host memory, outside of any session's quota.
    ///
    /// # Errors
    ///
    /// As [`zeros`](Self::zeros), and [`ErrorKind::InvalidArgument`] if the shape has a different
    /// number of elements.
    pub fn from_slice<T: Element>(shape: impl Into<Vec<i64>>, elements: &[T]) -> Result<Self> {
        let shape = shape.into();
        if element_count(&shape)? != elements.len() as u64 {
            let given = elements.len();
            return Err(RpcError::invalid_argument(format!("{given} elements for a tensor of shape {shape:?}")));
        }
        let tensor = Self::zeros(shape, T::DATA_TYPE)?;
        tensor.write()?.as_mut_slice()?.copy_from_slice(elements);
        Ok(tensor)
    }

    /// Returns the storage that holds the elements.
    pub fn storage(&self) -> &Arc<Storage> {
        &self.0.storage
    }

    /// Returns the device of the storage.
    pub fn device(&self) -> Device {
        self.0.storage.device()
    }

    /// Returns the offset of the first element, in bytes from the start of the storage.
    pub fn byte_offset(&self) -> u64 {
        self.0.byte_offset
    }

    /// Returns the dimensions, outermost first; empty for a scalar.
    pub fn shape(&self) -> &[i64] {
        &self.0.shape
    }

    /// Returns the distance between neighbours in each dimension, in elements; `None` if the tensor
    /// [is dense](Self::is_dense).
    pub fn strides(&self) -> Option<&[i64]> {
        self.0.strides.as_deref()
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DataType {
        self.0.dtype
    }

    /// Returns the number of elements.
    pub fn element_count(&self) -> u64 {
        // `new` has computed the same without overflow.
        element_count(&self.0.shape).unwrap_or(u64::MAX)
    }

    /// Returns true if the elements are densely packed in row-major order.
    pub fn is_dense(&self) -> bool {
        self.0.strides.is_none()
    }

    /// Returns the size in bytes of the elements when densely packed, which is the size of a copy.
    pub fn size_bytes(&self) -> u64 {
        // `new` has computed the same without overflow.
        dense_size(&self.0.shape, self.0.dtype).unwrap_or(u64::MAX)
    }

    /// Borrows the storage for reading. Never waits, and overtakes writers that wait
    /// ([`Storage::try_read`]), so that a function can read a tensor again that it is reading
    /// already.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Busy`] if the storage is borrowed for writing.
    pub fn read(&self) -> Result<TensorView> {
        let borrow = self.0.storage.try_read().ok_or_else(busy)?;
        TensorView::new(self.clone(), borrow)
    }

    /// Borrows the storage for writing. Never waits.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Busy`] if the storage is borrowed.
    pub fn write(&self) -> Result<TensorViewMut> {
        let borrow = self.0.storage.try_borrow(Access::Write).ok_or_else(busy)?;
        TensorViewMut::new(self.clone(), borrow)
    }

    /// Returns a tensor of another layout within this one. `byte_offset` counts from this tensor's
    /// first element.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and [`ErrorKind::InvalidArgument`] if the view reaches beyond this
    /// tensor's last element.
    pub fn view(
        &self,
        byte_offset: u64,
        shape: impl Into<Vec<i64>>,
        strides: Option<Vec<i64>>,
        dtype: DataType,
    ) -> Result<Self> {
        let outside = || {
            RpcError::invalid_argument(format!("a view at {byte_offset} reaches beyond its {} bytes", self.0.extent))
        };
        let start = self.0.byte_offset.checked_add(byte_offset).ok_or_else(outside)?;
        let view = Self::new(self.0.storage.clone(), start, shape, strides, dtype)?;
        // Neither sum can overflow: both lie within the storage.
        if byte_offset + view.0.extent > self.0.extent { Err(outside()) } else { Ok(view) }
    }

    /// Returns the range in the storage of the bytes `offset..offset + len` of the densely packed
    /// content.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`] if the tensor is not dense, or too small.
    pub fn byte_range(&self, offset: u64, len: u64) -> Result<Range<u64>> {
        self.check_dense()?;
        match offset.checked_add(len) {
            // `new` has checked that the sum with the extent is within the storage.
            Some(end) if end <= self.0.extent => Ok(self.0.byte_offset + offset..self.0.byte_offset + end),
            _ => Err(RpcError::invalid_argument(format!(
                "{len} bytes at {offset} of a tensor of {} bytes",
                self.0.extent
            ))),
        }
    }

    fn check_dense(&self) -> Result<()> {
        if self.is_dense() {
            return Ok(());
        }
        let (shape, strides) = (&self.0.shape, self.0.strides.as_deref().unwrap_or_default());
        Err(RpcError::invalid_argument(format!(
            "expected a densely packed tensor, got shape {shape:?} with strides {strides:?}"
        )))
    }

    /// Returns the range of the elements' bytes in the whole storage.
    fn range_in_host(&self) -> Result<Range<usize>> {
        self.check_dense()?;
        // Only called for host memory, in which every offset fits `usize`.
        Ok(self.0.byte_offset as usize..(self.0.byte_offset + self.0.extent) as usize)
    }

    /// Checks that the elements of the tensor are `T`s, and dense.
    fn check_elements<T: Element>(&self) -> Result<()> {
        if self.0.dtype != T::DATA_TYPE {
            let (expected, got) = (T::DATA_TYPE, self.0.dtype);
            return Err(RpcError::invalid_argument(format!("expected a tensor of {expected}, got {got}")));
        }
        self.check_dense()
    }

    /// Returns the offset in the storage and the length of the elements' bytes, for a mapping as
    /// `T`s.
    fn range_to_map<T: Element>(&self) -> Result<(u64, usize)> {
        self.check_elements::<T>()?;
        if !self.0.byte_offset.is_multiple_of(align_of::<T>() as u64) {
            return Err(self.misaligned::<T>());
        }
        let too_large = |_| RpcError::new(ErrorKind::OutOfMemory, "a tensor is too large to be mapped");
        Ok((self.0.byte_offset, usize::try_from(self.0.extent).map_err(too_large)?))
    }

    fn not_on_host(&self) -> RpcError {
        RpcError::unsupported(format!("expected a tensor in host memory, got one on {}", self.device()))
    }

    fn misaligned<T: Element>(&self) -> RpcError {
        RpcError::invalid_argument(format!(
            "expected {} elements at a multiple of {} bytes, got them at offset {} of their storage",
            T::DATA_TYPE,
            align_of::<T>(),
            self.0.byte_offset
        ))
    }

    fn check_borrow(&self, borrow: &Borrow) -> Result<()> {
        if Arc::ptr_eq(&self.0.storage, borrow.storage()) {
            return Ok(());
        }
        Err(RpcError::new(ErrorKind::ApiMisuse, "the borrow belongs to another storage than the tensor's"))
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {:?} on {}", self.0.dtype, self.0.shape, self.device())?;
        if let Some(strides) = &self.0.strides {
            write!(f, ", strides {strides:?}")?;
        }
        if self.0.byte_offset > 0 {
            write!(f, ", at {}", self.0.byte_offset)?;
        }
        f.write_str(")")
    }
}

/// Returns true if `strides` are those of a densely packed tensor. Strides of dimensions with one
/// entry are ignored.
fn is_row_major(shape: &[i64], strides: &[i64]) -> bool {
    shape.len() == strides.len()
        && (shape.iter().zip(strides).zip(dense_strides(shape)))
            .all(|((dimension, stride), dense)| *dimension == 1 || *stride == dense)
}

fn busy() -> RpcError {
    RpcError::new(ErrorKind::Busy, "the tensor is in use: a writer excludes all other borrows")
}

#[cfg(test)]
mod tests;
