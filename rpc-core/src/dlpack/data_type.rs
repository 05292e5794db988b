//! [`DataType`] and [`DataTypeCode`], and their text forms, such as `float32` and `float16x4`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Result, RpcError};

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
        for text in ["", "float", "int8x", "x", "float32x99999999", "complexx2"] {
            assert!(text.parse::<DataType>().is_err(), "{text}");
        }
    }
}
