//! DLPack's devices and data types, by its numbers and as text, and the arithmetic of tensor
//! layouts.
//!
//! The numbers are those of `dlpack.h` (`DLDeviceType`, `DLDataTypeCode`), so that a tensor's
//! description can be passed to any DLPack consumer unchanged.

mod data_type;
mod device;
mod element;
mod layout;

pub use data_type::{DataType, DataTypeCode};
pub use device::{Device, DeviceType};
pub use element::{Element, from_bytes, to_bytes};
pub use layout::{dense_size, dense_strides, element_count, strided_extent};
