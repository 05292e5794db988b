//! The header by which tensors travel: where the data are, and their layout.

use bytes::BufMut;
use rpc_core::dlpack::dense_size;
use rpc_core::{DataType, DataTypeCode, Device, DeviceType};

use super::reader::{Reader, WireError};

/// Largest number of dimensions of a tensor.
pub const MAX_DIMENSIONS: usize = 64;

/// Header of a tensor. The data themselves stay at the server. They are always contiguous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorHeader {
    /// Handle of the memory; 0 in requests for memory.
    pub data: u64,
    /// Device that holds the memory.
    pub device: Device,
    /// Type of the elements.
    pub dtype: DataType,
    /// Dimensions, outermost first; empty for a scalar.
    pub shape: Vec<i64>,
    /// Offset of the first element in the memory, in bytes.
    pub byte_offset: u64,
}

impl TensorHeader {
    /// Bytes in front of the dimensions.
    pub(super) const FIXED: usize = 24;

    /// Offset of the number of dimensions.
    pub(super) const DIMENSIONS_AT: usize = 16;

    /// Returns the length in bytes of a header with so many dimensions.
    #[must_use]
    pub const fn encoded_len(dimensions: usize) -> usize {
        Self::FIXED + 8 * dimensions + 8
    }

    /// Returns the size of the elements in bytes; `None` for an impossible shape.
    #[must_use]
    pub fn size_bytes(&self) -> Option<u64> {
        dense_size(&self.shape, self.dtype).ok()
    }

    /// Appends the header to `output`.
    pub fn encode(&self, output: &mut impl BufMut) {
        output.put_u64_le(self.data);
        encode_device(self.device, output);
        output.put_i32_le(i32::try_from(self.shape.len()).unwrap_or(i32::MAX));
        encode_dtype(self.dtype, output);
        for dimension in &self.shape {
            output.put_i64_le(*dimension);
        }
        output.put_u64_le(self.byte_offset);
    }

    pub(super) fn decode(reader: &mut Reader) -> Result<Self, WireError> {
        let data = reader.u64()?;
        let device = decode_device(reader)?;
        let dimensions = check_dimensions(reader.i32()?)?;
        let dtype = decode_dtype(reader)?;
        let mut shape = Vec::with_capacity(dimensions);
        for _ in 0..dimensions {
            shape.push(reader.i64()?);
        }
        Ok(Self { data, device, dtype, shape, byte_offset: reader.u64()? })
    }
}

/// Checks a number of dimensions before memory is reserved for them.
pub(super) fn check_dimensions(dimensions: i32) -> Result<usize, WireError> {
    let checked = usize::try_from(dimensions).ok().filter(|&dimensions| dimensions <= MAX_DIMENSIONS);
    checked.ok_or_else(|| {
        WireError::new(format!("a tensor has {dimensions} dimensions, and must have from 0 to {MAX_DIMENSIONS}"))
    })
}

pub(super) fn encode_device(device: Device, output: &mut impl BufMut) {
    output.put_i32_le(device.kind.0);
    output.put_i32_le(device.index);
}

pub(super) fn decode_device(reader: &mut Reader) -> Result<Device, WireError> {
    Ok(Device::new(DeviceType(reader.i32()?), reader.i32()?))
}

pub(super) fn encode_dtype(dtype: DataType, output: &mut impl BufMut) {
    output.put_u8(dtype.code.0);
    output.put_u8(dtype.bits);
    output.put_u16_le(dtype.lanes);
}

pub(super) fn decode_dtype(reader: &mut Reader) -> Result<DataType, WireError> {
    Ok(DataType { code: DataTypeCode(reader.u8()?), bits: reader.u8()?, lanes: reader.u16()? })
}
