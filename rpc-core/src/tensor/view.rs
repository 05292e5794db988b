//! Views: tensors with a borrow of their storage, which give out slices of their elements.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use super::Tensor;
use super::storage::{Access, Borrow};
use crate::device::Mapping;
use crate::dlpack::{DataType, Element};
use crate::error::{ErrorKind, Result, RpcError};

/// A tensor that is borrowed for reading, or the reading side of one that is borrowed for writing.
#[derive(Debug)]
pub struct TensorView {
    tensor: Tensor,
    /// Borrow of the tensor's storage.
    borrow: Borrow,
}

impl TensorView {
    /// Creates the view of `tensor` under `borrow`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::ApiMisuse`] if the borrow belongs to another storage.
    pub fn new(tensor: Tensor, borrow: Borrow) -> Result<Self> {
        tensor.check_borrow(&borrow)?;
        Ok(Self { tensor, borrow })
    }

    /// Returns the elements, in row-major order.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`] if the elements are of another type, not densely packed, or
    /// not aligned for `T`; [`ErrorKind::Unsupported`] if they are not in host memory.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        self.tensor.check_elements::<T>()?;
        cast(self.bytes()?).ok_or_else(|| self.tensor.misaligned::<T>())
    }

    /// Returns the elements' bytes.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`] if the elements are not densely packed;
    /// [`ErrorKind::Unsupported`] if they are not in host memory.
    pub fn bytes(&self) -> Result<&[u8]> {
        let bytes = self.borrow.bytes().ok_or_else(|| self.tensor.not_on_host())?;
        Ok(&bytes[self.tensor.range_in_host()?])
    }

    /// Lets the processor read the elements, in row-major order, on any device. In host memory this
    /// is [`as_slice`](Self::as_slice); other memory is [mapped](crate::device::Memory::map).
    ///
    /// # Errors
    ///
    /// As [`as_slice`](Self::as_slice), and errors of the device.
    pub fn map<T: Element>(&self) -> Result<MappedElements<'_, T>> {
        let (at, len) = self.tensor.range_to_map::<T>()?;
        let mapping = self.borrow.map(at, len)?;
        if cast::<T>(mapping.bytes()).is_none() {
            return Err(self.tensor.misaligned::<T>());
        }
        Ok(MappedElements { mapping, elements: PhantomData })
    }

    /// Returns the dimensions, outermost first; empty for a scalar.
    pub fn shape(&self) -> &[i64] {
        self.tensor.shape()
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DataType {
        self.tensor.dtype()
    }

    /// Returns the tensor.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Returns the borrow of the view.
    pub fn guard(&self) -> &Borrow {
        &self.borrow
    }

    /// Takes the view apart into tensor and borrow.
    pub fn into_parts(self) -> (Tensor, Borrow) {
        (self.tensor, self.borrow)
    }
}

/// A tensor that is borrowed for writing. It can be read like a [`TensorView`].
#[derive(Debug)]
pub struct TensorViewMut {
    /// View under a write borrow of the tensor's storage.
    view: TensorView,
}

impl TensorViewMut {
    /// Creates the view of `tensor` under `borrow`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::ApiMisuse`] if the borrow belongs to another storage, or is for reading only.
    pub fn new(tensor: Tensor, borrow: Borrow) -> Result<Self> {
        let view = TensorView::new(tensor, borrow)?;
        if view.borrow.access() != Access::Write {
            return Err(RpcError::new(ErrorKind::ApiMisuse, "the tensor is borrowed for reading only"));
        }
        Ok(Self { view })
    }

    /// Returns the elements, in row-major order, for writing.
    ///
    /// # Errors
    ///
    /// As [`TensorView::as_slice`].
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        let TensorView { tensor, borrow } = &mut self.view;
        tensor.check_elements::<T>()?;
        let bytes = bytes_mut(tensor, borrow)?;
        cast_mut(bytes).ok_or_else(|| tensor.misaligned::<T>())
    }

    /// Lets the processor read and write the elements, in row-major order, on any device.
    ///
    /// # Errors
    ///
    /// As [`TensorView::map`].
    pub fn map_mut<T: Element>(&mut self) -> Result<MappedElementsMut<'_, T>> {
        let TensorView { tensor, borrow } = &mut self.view;
        let (at, len) = tensor.range_to_map::<T>()?;
        let mut mapping = borrow.map_mut(at, len)?;
        if mapping.bytes_mut().and_then(cast_mut::<T>).is_none() {
            return Err(tensor.misaligned::<T>());
        }
        Ok(MappedElementsMut { mapping, elements: PhantomData })
    }

    /// Returns the elements' bytes, for writing.
    ///
    /// # Errors
    ///
    /// As [`TensorView::bytes`].
    pub fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        bytes_mut(&self.view.tensor, &mut self.view.borrow)
    }

    /// Takes the view apart into tensor and borrow.
    pub fn into_parts(self) -> (Tensor, Borrow) {
        self.view.into_parts()
    }
}

impl Deref for TensorViewMut {
    type Target = TensorView;

    fn deref(&self) -> &TensorView {
        &self.view
    }
}

/// Elements of a tensor that are mapped for the processor to read, until this is dropped.
pub struct MappedElements<'v, T> {
    /// Bytes that can be cast to elements.
    mapping: Mapping<'v>,
    elements: PhantomData<T>,
}

impl<T: Element> Deref for MappedElements<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        cast(self.mapping.bytes()).unwrap_or_default()
    }
}

impl<T> fmt::Debug for MappedElements<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.mapping.fmt(f)
    }
}

/// Elements of a tensor that are mapped for the processor to read and write, until
/// [`end`](Self::end).
pub struct MappedElementsMut<'v, T> {
    /// Bytes that can be cast to elements, and written.
    mapping: Mapping<'v>,
    elements: PhantomData<T>,
}

impl<T> MappedElementsMut<'_, T> {
    /// Ends the mapping: the device sees what was written. Dropping it does the same, and only logs
    /// an error.
    ///
    /// # Errors
    ///
    /// The device failed. What was written may be lost then.
    pub fn end(self) -> Result<()> {
        self.mapping.end()
    }
}

impl<T: Element> Deref for MappedElementsMut<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        cast(self.mapping.bytes()).unwrap_or_default()
    }
}

impl<T: Element> DerefMut for MappedElementsMut<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.mapping.bytes_mut().and_then(cast_mut).unwrap_or_default()
    }
}

impl<T> fmt::Debug for MappedElementsMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.mapping.fmt(f)
    }
}

fn bytes_mut<'a>(tensor: &Tensor, borrow: &'a mut Borrow) -> Result<&'a mut [u8]> {
    let range = tensor.range_in_host()?;
    let bytes = borrow.bytes_mut().ok_or_else(|| tensor.not_on_host())?;
    Ok(&mut bytes[range])
}

/// Casts `bytes` to elements. Returns `None` if they are not aligned for `T`.
fn cast<T: Element>(bytes: &[u8]) -> Option<&[T]> {
    if bytes.is_empty() {
        return Some(&[]);
    }
    let start = bytes.as_ptr().cast::<T>();
    // SAFETY: aligned; as many whole elements as fit; `Element` promises that any bytes are values
    // of it, and the slice lives as long as the borrow of `bytes`.
    start.is_aligned().then(|| unsafe { std::slice::from_raw_parts(start, bytes.len() / size_of::<T>()) })
}

/// Casts like [`cast`], for writing.
fn cast_mut<T: Element>(bytes: &mut [u8]) -> Option<&mut [T]> {
    if bytes.is_empty() {
        return Some(&mut []);
    }
    let start = bytes.as_mut_ptr().cast::<T>();
    // SAFETY: as in `cast`; besides, `Element` has no padding, so that the bytes stay initialised
    // after any write.
    start.is_aligned().then(|| unsafe { std::slice::from_raw_parts_mut(start, bytes.len() / size_of::<T>()) })
}
