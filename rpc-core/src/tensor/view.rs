//! Views: tensors with a borrow of their storage, which give out slices of their elements.

use std::ops::Deref;

use super::Tensor;
use super::storage::{Access, Borrow};
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
