//! Sizes and strides of tensors: arithmetic that refuses what overflows.

use crate::dlpack::data_type::DataType;
use crate::error::{Result, RpcError};

/// Returns the number of elements of `shape`.
///
/// # Errors
///
/// A negative dimension, or a product beyond `u64`.
pub fn element_count(shape: &[i64]) -> Result<u64> {
    if shape.iter().any(|&dimension| dimension < 0) {
        return Err(RpcError::invalid_argument(format!("negative dimension in shape {shape:?}")));
    }
    if shape.contains(&0) {
        return Ok(0);
    }
    shape
        .iter()
        .try_fold(1_u64, |count, dimension| count.checked_mul(dimension.unsigned_abs()))
        .ok_or_else(|| RpcError::invalid_argument(format!("shape {shape:?} has too many elements")))
}

/// Returns the size in bytes of the densely packed tensor of `shape` and `dtype`.
///
/// # Errors
///
/// As [`element_count`], and a size beyond `u64`.
pub fn dense_size(shape: &[i64], dtype: DataType) -> Result<u64> {
    dtype
        .size_bytes(element_count(shape)?)
        .ok_or_else(|| RpcError::invalid_argument(format!("a {dtype} tensor of shape {shape:?} is too large")))
}

/// Returns the strides, in elements, of the densely packed row-major tensor of `shape`.
pub fn dense_strides(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1_i64; shape.len()];
    for axis in (0..shape.len().saturating_sub(1)).rev() {
        strides[axis] = strides[axis + 1].saturating_mul(shape[axis + 1].max(1));
    }
    strides
}

/// Returns the end, in bytes from the tensor's first element, of the bytes that the strided layout
/// can access.
///
/// # Errors
///
/// Negative dimensions or strides, a number of strides that differs from that of dimensions,
/// strides for elements below 8 bits, and overflow.
pub fn strided_extent(shape: &[i64], strides: &[i64], dtype: DataType) -> Result<u64> {
    if shape.len() != strides.len() {
        return Err(RpcError::invalid_argument(format!("{} strides for {} dimensions", strides.len(), shape.len())));
    }
    if !dtype.bits_per_element().is_multiple_of(8) {
        return Err(RpcError::invalid_argument(format!("a {dtype} tensor cannot have strides")));
    }
    if element_count(shape)? == 0 {
        return Ok(0);
    }
    let too_large = || RpcError::invalid_argument(format!("shape {shape:?} with strides {strides:?} is too large"));
    let mut last = 0_u64;
    for (&dimension, &stride) in shape.iter().zip(strides) {
        let stride =
            u64::try_from(stride).map_err(|_| RpcError::invalid_argument(format!("negative stride in {strides:?}")))?;
        // `element_count` has refused negative dimensions, and zero has returned above.
        let steps = dimension.unsigned_abs() - 1;
        last = steps.checked_mul(stride).and_then(|reach| last.checked_add(reach)).ok_or_else(too_large)?;
    }
    last.checked_add(1).and_then(|elements| dtype.size_bytes(elements)).ok_or_else(too_large)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dlpack::DataTypeCode;

    #[test]
    fn layout_arithmetic_refuses_what_overflows() {
        assert_eq!(element_count(&[]).unwrap(), 1);
        assert_eq!(element_count(&[i64::MAX, i64::MAX, 0]).unwrap(), 0);
        assert!(element_count(&[i64::MAX, 4]).is_err());
        assert!(element_count(&[-1]).is_err());
        assert!(dense_size(&[i64::MAX], DataType::F64).is_err());
        assert_eq!(dense_size(&[3], DataType::new(DataTypeCode::FLOAT4_E2M1FN, 4)).unwrap(), 2);
        assert_eq!(strided_extent(&[2, 3], &[3, 1], DataType::F32).unwrap(), 24);
        assert_eq!(strided_extent(&[2, 3], &[0, 1], DataType::F32).unwrap(), 12);
        assert!(strided_extent(&[2], &[i64::MAX], DataType::F64).is_err());
        assert!(strided_extent(&[2], &[-1], DataType::F32).is_err());
        assert_eq!(dense_strides(&[2, 3, 4]), [12, 4, 1]);
    }
}
