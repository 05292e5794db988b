//! DLPack's devices and data types, by its numbers, and the arithmetic of tensor layouts.
//!
//! The numbers are those of `dlpack.h` (`DLDeviceType`, `DLDataTypeCode`), so that a tensor's
//! description can be passed to any DLPack consumer unchanged.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Result, RpcError};

/// Kind of a device: DLPack's `DLDeviceType`. Any number is carried; the known ones have names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DeviceType(pub i32);

macro_rules! device_types {
    ($($(#[$doc:meta])* $constant:ident = $code:literal $name:literal;)*) => {
        impl DeviceType {
            $($(#[$doc])* pub const $constant: Self = Self($code);)*

            /// Kinds that have a name, by number.
            pub const KNOWN: &[Self] = &[$(Self::$constant,)*];

            /// Returns the usual name, if the number is a known one.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($code => Some($name),)*
                    _ => None,
                }
            }

            fn from_name(name: &str) -> Option<Self> {
                match name {
                    $($name => Some(Self($code)),)*
                    "gpu" => Some(Self::CUDA),
                    _ => None,
                }
            }
        }
    };
}

device_types! {
    /// Host memory.
    CPU = 1 "cpu";
    /// NVIDIA GPU.
    CUDA = 2 "cuda";
    /// Host memory pinned for CUDA.
    CUDA_HOST = 3 "cuda_host";
    /// OpenCL.
    OPENCL = 4 "opencl";
    /// Vulkan.
    VULKAN = 7 "vulkan";
    /// Apple Metal.
    METAL = 8 "metal";
    /// Verilog simulator.
    VPI = 9 "vpi";
    /// AMD GPU.
    ROCM = 10 "rocm";
    /// Host memory pinned for ROCm.
    ROCM_HOST = 11 "rocm_host";
    /// A device type under test by its makers.
    EXT_DEV = 12 "ext_dev";
    /// CUDA managed memory.
    CUDA_MANAGED = 13 "cuda_managed";
    /// oneAPI.
    ONE_API = 14 "oneapi";
    /// WebGPU.
    WEBGPU = 15 "webgpu";
    /// Qualcomm Hexagon.
    HEXAGON = 16 "hexagon";
    /// Microsoft MAIA.
    MAIA = 17 "maia";
    /// AWS Trainium.
    TRN = 18 "trn";
}

impl fmt::Display for DeviceType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "device{}", self.0),
        }
    }
}

impl FromStr for DeviceType {
    type Err = RpcError;

    fn from_str(text: &str) -> Result<Self> {
        Self::from_name(text)
            .or_else(|| text.strip_prefix("device").and_then(|code| code.parse().ok()).map(Self))
            .ok_or_else(|| RpcError::invalid_argument(format!("unknown device kind '{text}'")))
    }
}

/// A device of a session: DLPack's `DLDevice`. Written `cpu:0`, or `cuda` for `cuda:0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Device {
    /// Kind of the device.
    pub kind: DeviceType,
    /// Index among the devices of that kind, from 0.
    pub index: i32,
}

impl Device {
    /// Returns the device `index` of `kind`.
    pub const fn new(kind: DeviceType, index: i32) -> Self {
        Self { kind, index }
    }

    /// Returns the session's host memory, `cpu:0`.
    pub const fn cpu() -> Self {
        Self::new(DeviceType::CPU, 0)
    }

    /// Returns the NVIDIA GPU number `index`.
    pub const fn cuda(index: i32) -> Self {
        Self::new(DeviceType::CUDA, index)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind, self.index)
    }
}

impl FromStr for Device {
    type Err = RpcError;

    fn from_str(text: &str) -> Result<Self> {
        let (kind, index) = text.split_once(':').unwrap_or((text, "0"));
        let index = index.parse().ok().filter(|index| *index >= 0);
        let index = index.ok_or_else(|| RpcError::invalid_argument(format!("no device index in '{text}'")))?;
        Ok(Self::new(kind.parse()?, index))
    }
}

/// Class of a data type: DLPack's `DLDataTypeCode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DataTypeCode(pub u8);

impl DataTypeCode {
    /// Signed integer.
    pub const INT: Self = Self(0);
    /// Unsigned integer.
    pub const UINT: Self = Self(1);
    /// IEEE floating point.
    pub const FLOAT: Self = Self(2);
    /// An opaque pointer-sized value.
    pub const OPAQUE: Self = Self(3);
    /// bfloat16.
    pub const BFLOAT: Self = Self(4);
    /// Complex number; the bits count both parts.
    pub const COMPLEX: Self = Self(5);
    /// Boolean, usually of 8 bits.
    pub const BOOL: Self = Self(6);
    /// 8-bit float with 3 exponent and 4 mantissa bits.
    pub const FLOAT8_E3M4: Self = Self(7);
    /// 8-bit float, e4m3.
    pub const FLOAT8_E4M3: Self = Self(8);
    /// 8-bit float, e4m3b11fnuz.
    pub const FLOAT8_E4M3B11FNUZ: Self = Self(9);
    /// 8-bit float, e4m3fn: no infinities.
    pub const FLOAT8_E4M3FN: Self = Self(10);
    /// 8-bit float, e4m3fnuz.
    pub const FLOAT8_E4M3FNUZ: Self = Self(11);
    /// 8-bit float, e5m2.
    pub const FLOAT8_E5M2: Self = Self(12);
    /// 8-bit float, e5m2fnuz.
    pub const FLOAT8_E5M2FNUZ: Self = Self(13);
    /// 8-bit power of two, e8m0fnu.
    pub const FLOAT8_E8M0FNU: Self = Self(14);
    /// 6-bit float, e2m3fn.
    pub const FLOAT6_E2M3FN: Self = Self(15);
    /// 6-bit float, e3m2fn.
    pub const FLOAT6_E3M2FN: Self = Self(16);
    /// 4-bit float, e2m1fn.
    pub const FLOAT4_E2M1FN: Self = Self(17);
}

/// Floating-point formats whose names contain their width, in the usual spelling.
const NAMED_FLOATS: [(&str, DataTypeCode, u8); 11] = [
    ("float8_e3m4", DataTypeCode::FLOAT8_E3M4, 8),
    ("float8_e4m3", DataTypeCode::FLOAT8_E4M3, 8),
    ("float8_e4m3b11fnuz", DataTypeCode::FLOAT8_E4M3B11FNUZ, 8),
    ("float8_e4m3fn", DataTypeCode::FLOAT8_E4M3FN, 8),
    ("float8_e4m3fnuz", DataTypeCode::FLOAT8_E4M3FNUZ, 8),
    ("float8_e5m2", DataTypeCode::FLOAT8_E5M2, 8),
    ("float8_e5m2fnuz", DataTypeCode::FLOAT8_E5M2FNUZ, 8),
    ("float8_e8m0fnu", DataTypeCode::FLOAT8_E8M0FNU, 8),
    ("float6_e2m3fn", DataTypeCode::FLOAT6_E2M3FN, 6),
    ("float6_e3m2fn", DataTypeCode::FLOAT6_E3M2FN, 6),
    ("float4_e2m1fn", DataTypeCode::FLOAT4_E2M1FN, 4),
];

/// Type of a tensor's elements: DLPack's `DLDataType`. Written `float32`, `int8`, `bfloat16`,
/// `float16x4`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DataType {
    /// Class: integer, float and so on.
    pub code: DataTypeCode,
    /// Bits of one lane.
    pub bits: u8,
    /// Lanes of a vector type; 1 for scalars.
    pub lanes: u16,
}

macro_rules! data_types {
    ($($(#[$doc:meta])* $constant:ident = $code:ident $bits:literal;)*) => {
        impl DataType {
            $($(#[$doc])* pub const $constant: Self = Self::new(DataTypeCode::$code, $bits);)*
        }
    };
}

data_types! {
    /// `bool`, one byte.
    BOOL = BOOL 8;
    /// `int8`.
    I8 = INT 8;
    /// `int16`.
    I16 = INT 16;
    /// `int32`.
    I32 = INT 32;
    /// `int64`.
    I64 = INT 64;
    /// `uint8`.
    U8 = UINT 8;
    /// `uint16`.
    U16 = UINT 16;
    /// `uint32`.
    U32 = UINT 32;
    /// `uint64`.
    U64 = UINT 64;
    /// `float16`.
    F16 = FLOAT 16;
    /// `bfloat16`.
    BF16 = BFLOAT 16;
    /// `float32`.
    F32 = FLOAT 32;
    /// `float64`.
    F64 = FLOAT 64;
}

impl DataType {
    /// Returns a scalar type.
    pub const fn new(code: DataTypeCode, bits: u8) -> Self {
        Self { code, bits, lanes: 1 }
    }

    /// Returns the bits of one element, all lanes together.
    pub const fn bits_per_element(self) -> u64 {
        self.bits as u64 * self.lanes as u64
    }

    /// Returns the bytes that `elements` elements occupy when packed; types below 8 bits share
    /// bytes. `None` on overflow.
    pub fn size_bytes(self, elements: u64) -> Option<u64> {
        Some(elements.checked_mul(self.bits_per_element())?.div_ceil(8))
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bits = self.bits;
        match self.code {
            DataTypeCode::BOOL if bits == 8 => f.write_str("bool")?,
            DataTypeCode::INT => write!(f, "int{bits}")?,
            DataTypeCode::UINT => write!(f, "uint{bits}")?,
            DataTypeCode::FLOAT => write!(f, "float{bits}")?,
            DataTypeCode::OPAQUE => write!(f, "handle{bits}")?,
            DataTypeCode::BFLOAT => write!(f, "bfloat{bits}")?,
            DataTypeCode::COMPLEX => write!(f, "complex{bits}")?,
            code => match NAMED_FLOATS.iter().find(|(_, named, width)| *named == code && *width == bits) {
                Some((name, _, _)) => f.write_str(name)?,
                None => write!(f, "code{}_{bits}", code.0)?,
            },
        }
        if self.lanes == 1 { Ok(()) } else { write!(f, "x{}", self.lanes) }
    }
}

impl FromStr for DataType {
    type Err = RpcError;

    fn from_str(text: &str) -> Result<Self> {
        let unknown = || RpcError::invalid_argument(format!("unknown data type '{text}'"));
        let (scalar, lanes) = match text.rsplit_once('x') {
            // The `x` of `complex64` separates no lanes.
            Some((scalar, lanes))
                if scalar != "comple" && !lanes.is_empty() && lanes.bytes().all(|digit| digit.is_ascii_digit()) =>
            {
                (scalar, lanes.parse().map_err(|_| unknown())?)
            }
            _ => (text, 1),
        };
        let with = |code, bits| Self { code, bits, lanes };
        if scalar == "bool" {
            return Ok(with(DataTypeCode::BOOL, 8));
        }
        if let Some((_, code, bits)) = NAMED_FLOATS.iter().find(|(name, _, _)| *name == scalar) {
            return Ok(with(*code, *bits));
        }
        let families = [
            ("uint", DataTypeCode::UINT),
            ("int", DataTypeCode::INT),
            ("bfloat", DataTypeCode::BFLOAT),
            ("float", DataTypeCode::FLOAT),
            ("complex", DataTypeCode::COMPLEX),
            ("handle", DataTypeCode::OPAQUE),
        ];
        let (code, bits) = families
            .iter()
            .find_map(|(prefix, code)| scalar.strip_prefix(prefix).map(|bits| (*code, bits)))
            .ok_or_else(unknown)?;
        Ok(with(code, bits.parse().map_err(|_| unknown())?))
    }
}

/// A Rust type that can be the element of a tensor.
///
/// # Safety
///
/// Every bit pattern must be a value of the type, and it must have no padding, so that a tensor's
/// bytes can be seen as a slice of it; `DATA_TYPE` must describe its size.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// DLPack type of the element.
    const DATA_TYPE: DataType;
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident,)*) => {
        $(
            // SAFETY: a plain number without padding, for which every bit pattern is a value.
            unsafe impl Element for $rust {
                const DATA_TYPE: DataType = DataType::$dtype;
            }
        )*
    };
}

elements! {
    i8 => I8, i16 => I16, i32 => I32, i64 => I64,
    u8 => U8, u16 => U16, u32 => U32, u64 => U64,
    half::f16 => F16, half::bf16 => BF16, f32 => F32, f64 => F64,
}

/// Copies the elements to bytes in the machine's byte order.
pub fn to_bytes<T: Element>(elements: &[T]) -> bytes::Bytes {
    let len = size_of_val(elements);
    // SAFETY: `Element` promises that its types have no padding, so that all bytes are initialised.
    let bytes = unsafe { std::slice::from_raw_parts(elements.as_ptr().cast::<u8>(), len) };
    bytes::Bytes::copy_from_slice(bytes)
}

/// Copies bytes in the machine's byte order to elements. Bytes at the end that form no whole
/// element are ignored.
pub fn from_bytes<T: Element>(bytes: &[u8]) -> Vec<T> {
    let len = bytes.len() / size_of::<T>().max(1);
    let mut elements = Vec::<T>::with_capacity(len);
    // SAFETY: the vector has room for `len` elements, which are at most `bytes.len()` bytes; the
    // two do not overlap; and `Element` promises that every bit pattern is a value.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), elements.as_mut_ptr().cast::<u8>(), len * size_of::<T>());
        elements.set_len(len);
    }
    elements
}

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

    #[test]
    fn names_round_trip() {
        for text in
            ["int8", "uint64", "float16", "bfloat16", "float32x4", "bool", "float8_e4m3fn", "complex64", "handle64"]
        {
            assert_eq!(text.parse::<DataType>().unwrap().to_string(), text);
        }
        for text in ["cpu:0", "cuda:3", "device99:1"] {
            assert_eq!(text.parse::<Device>().unwrap().to_string(), text);
        }
        assert_eq!("cuda".parse::<Device>().unwrap(), Device::cuda(0));
        for text in ["", "float", "int8x", "x", "float32x99999999", "complexx2"] {
            assert!(text.parse::<DataType>().is_err(), "{text}");
        }
        assert!("cpu:-1".parse::<Device>().is_err());
    }

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
