//! The header of a safetensors file: which tensors there are, and where they lie.
//!
//! ```text
//! 8 bytes    n, little-endian; 2 to 100,000,000
//! n bytes    a JSON object, which begins with '{' and may end with spaces:
//!            {
//!              "NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
//!              ...,
//!              "__metadata__": {"KEY": "VALUE", ...}
//!            }
//! the rest   the tensors, densely packed, row-major and little-endian, at their offsets in here:
//!            without gaps, overlaps, or anything behind them
//! ```
//!
//! Whatever a file says, reading its header ends with a [`Header`] all of whose tensors lie in the
//! file, or with an error, and takes memory by the length of the header, of which the file has to
//! have the bytes.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;

use rpc_core::tensor::MAX_DIMENSIONS;
use rpc_core::{DataType, DataTypeCode};
use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// The bytes in front of the header.
pub(super) const PREFIX: u64 = 8;

/// The longest header, as the format has it.
pub(super) const MAX_HEADER: u64 = 100_000_000;

/// The names of element types, and what they are here. The scales of the block formats are tensors
/// of their own.
const DTYPES: [(&str, DataType); 22] = [
    ("BOOL", DataType::BOOL),
    ("U8", DataType::U8),
    ("U16", DataType::U16),
    ("U32", DataType::U32),
    ("U64", DataType::U64),
    ("I8", DataType::I8),
    ("I16", DataType::I16),
    ("I32", DataType::I32),
    ("I64", DataType::I64),
    ("F16", DataType::F16),
    ("BF16", DataType::BF16),
    ("F32", DataType::F32),
    ("F64", DataType::F64),
    ("C64", DataType::new(DataTypeCode::COMPLEX, 64)),
    ("F8_E4M3", DataType::new(DataTypeCode::FLOAT8_E4M3FN, 8)),
    ("F8_E4M3FNUZ", DataType::new(DataTypeCode::FLOAT8_E4M3FNUZ, 8)),
    ("F8_E5M2", DataType::new(DataTypeCode::FLOAT8_E5M2, 8)),
    ("F8_E5M2FNUZ", DataType::new(DataTypeCode::FLOAT8_E5M2FNUZ, 8)),
    ("F8_E8M0", DataType::new(DataTypeCode::FLOAT8_E8M0FNU, 8)),
    ("F6_E2M3", DataType::new(DataTypeCode::FLOAT6_E2M3FN, 6)),
    ("F6_E3M2", DataType::new(DataTypeCode::FLOAT6_E3M2FN, 6)),
    ("F4", DataType::new(DataTypeCode::FLOAT4_E2M1FN, 4)),
];

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorInfo {
    /// The type of its elements.
    pub dtype: DataType,
    /// Dimensions, outermost first; none for a scalar.
    pub shape: Vec<i64>,
    /// Size in bytes.
    pub size_bytes: u64,
}

/// A tensor, and where it begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Placed {
    pub(super) info: TensorInfo,
    /// Start of the tensor, in bytes from the beginning of the file.
    pub(super) start: u64,
}

/// Content of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) tensors: BTreeMap<String, Placed>,
}

/// Error of a file's format.
#[derive(Debug, thiserror::Error)]
pub(super) enum FormatError {
    #[error("it has {len} bytes, and a header takes 10 or more: it is no safetensors file")]
    TooShort { len: u64 },
    #[error(
        "its header is said to have {header} bytes, of which there may be 2 to {MAX_HEADER}: it is no safetensors file"
    )]
    HeaderLength { header: u64 },
    #[error(
        "its header is said to have {header} bytes, and the whole file has {len}: it was cut off, or is no \
         safetensors file"
    )]
    HeaderCut { header: u64, len: u64 },
    #[error("its header does not begin with '{{': it is no safetensors file")]
    NoObject,
    #[error("its header cannot be read: {0}")]
    Json(#[from] serde_json::Error),
    #[error("tensor '{name}' is there twice")]
    Duplicate { name: String },
    #[error("tensor '{name}' has elements of type '{dtype}', which are not known here")]
    Dtype { name: String, dtype: String },
    #[error("tensor '{name}' has too many elements: {dtype} {shape:?}")]
    TooLarge { name: String, dtype: DataType, shape: Vec<i64> },
    #[error("tensor '{name}' of {dtype} {shape:?} does not fill whole bytes")]
    PartOfByte { name: String, dtype: DataType, shape: Vec<i64> },
    #[error("tensor '{name}' begins at {begin} and ends at {end}")]
    Backwards { name: String, begin: u64, end: u64 },
    #[error("tensor '{name}' of {dtype} {shape:?} takes {size} bytes, and has {given}")]
    Size { name: String, dtype: DataType, shape: Vec<i64>, size: u64, given: u64 },
    #[error("tensor '{name}' begins at {begin}, where the one before it ends at {end}: tensors may not overlap")]
    Overlap { name: String, begin: u64, end: u64 },
    #[error("tensor '{name}' begins at {begin}, where the one before it ends at {end}: there may be no gaps")]
    Gap { name: String, begin: u64, end: u64 },
    #[error("its tensors take {end} bytes, and there are {len}: {}", length_problem(*end, *len))]
    Length { end: u64, len: u64 },
}

/// Returns the reason why a file of `len` bytes cannot have tensors that end at `end`.
fn length_problem(end: u64, len: u64) -> &'static str {
    if len < end { "it was cut off" } else { "nothing may follow them" }
}

/// Returns the length of the header of a file of `len` bytes with this prefix.
pub(super) fn header_len(prefix: [u8; 8], len: u64) -> Result<u64, FormatError> {
    let header = u64::from_le_bytes(prefix);
    if len < PREFIX + 2 {
        return Err(FormatError::TooShort { len });
    }
    if !(2..=MAX_HEADER).contains(&header) {
        return Err(FormatError::HeaderLength { header });
    }
    if header > len - PREFIX {
        return Err(FormatError::HeaderCut { header, len });
    }
    Ok(header)
}

impl Header {
    /// Reads the header of a file of `len` bytes: all that follows its length, which [`header_len`]
    /// has checked.
    pub(super) fn parse(json: &[u8], len: u64) -> Result<Self, FormatError> {
        if json.first() != Some(&b'{') {
            return Err(FormatError::NoObject);
        }
        let Raw(tensors) = serde_json::from_slice(json)?;
        let data = PREFIX + json.len() as u64;
        let mut raw = BTreeMap::new();
        for (name, tensor) in tensors {
            match raw.entry(name) {
                Entry::Vacant(place) => _ = place.insert(tensor),
                Entry::Occupied(place) => return Err(FormatError::Duplicate { name: place.key().clone() }),
            }
        }
        let mut places: Vec<_> = raw.iter().map(|(name, tensor)| (tensor.data_offsets, name.as_str())).collect();
        places.sort_unstable();
        let mut end = 0;
        for ((begin, until), name) in places {
            let name = || name.to_owned();
            if until < begin {
                return Err(FormatError::Backwards { name: name(), begin, end: until });
            }
            match begin.cmp(&end) {
                Ordering::Less => return Err(FormatError::Overlap { name: name(), begin, end }),
                Ordering::Greater => return Err(FormatError::Gap { name: name(), begin, end }),
                Ordering::Equal => end = until,
            }
        }
        let behind = len.saturating_sub(data);
        if end != behind {
            return Err(FormatError::Length { end, len: behind });
        }
        let placed = raw.into_iter().map(|(name, tensor)| {
            let placed = tensor.place(&name, data)?;
            Ok((name, placed))
        });
        Ok(Self { tensors: placed.collect::<Result<_, FormatError>>()? })
    }
}

/// The header as it is written.
struct Raw(Vec<(String, RawTensor)>);

#[derive(serde::Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Dimensions,
    data_offsets: (u64, u64),
}

impl RawTensor {
    /// Returns the tensor, whose offsets are in order and within the file, where tensors begin at
    /// `data`.
    fn place(self, name: &str, data: u64) -> Result<Placed, FormatError> {
        let name = || name.to_owned();
        let Some((_, dtype)) = DTYPES.into_iter().find(|(known, _)| *known == self.dtype) else {
            return Err(FormatError::Dtype { name: name(), dtype: self.dtype });
        };
        let shape = self.shape.0;
        let too_large = |shape| FormatError::TooLarge { name: name(), dtype, shape };
        let Some(bits) = rpc_core::dlpack::element_count(&shape)
            .ok()
            .and_then(|elements| elements.checked_mul(dtype.bits_per_element()))
        else {
            return Err(too_large(shape));
        };
        if !bits.is_multiple_of(8) {
            return Err(FormatError::PartOfByte { name: name(), dtype, shape });
        }
        let (begin, end) = self.data_offsets;
        let (size, given) = (bits / 8, end - begin);
        if size != given {
            return Err(FormatError::Size { name: name(), dtype, shape, size, given });
        }
        // The sum is within the file.
        Ok(Placed { info: TensorInfo { dtype, shape, size_bytes: size }, start: data + begin })
    }
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Self(Vec::new()))
    }
}

impl<'de> Visitor<'de> for Raw {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self, A::Error> {
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                // Of no use here, and not kept: a header full of it would take many times its
                // length.
                map.next_value::<Metadata>()?;
            } else {
                let tensor = map.next_value();
                let tensor = tensor.map_err(|error| de::Error::custom(format_args!("tensor '{name}': {error}")))?;
                self.0.push((name, tensor));
            }
        }
        Ok(self)
    }
}

/// Texts by name, which are let go.
struct Metadata;

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Self)
    }
}

impl<'de> Visitor<'de> for Metadata {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings as metadata")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self, A::Error> {
        while map.next_entry::<IgnoredAny, String>()?.is_some() {}
        Ok(self)
    }
}

/// A shape, of which no more is kept than a tensor may have.
struct Dimensions(Vec<i64>);

impl<'de> Deserialize<'de> for Dimensions {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(Self(Vec::new()))
    }
}

impl<'de> Visitor<'de> for Dimensions {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a shape of up to {MAX_DIMENSIONS} dimensions")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut sequence: A) -> Result<Self, A::Error> {
        while let Some(dimension) = sequence.next_element::<u64>()? {
            if self.0.len() == MAX_DIMENSIONS {
                return Err(de::Error::invalid_length(MAX_DIMENSIONS + 1, &self));
            }
            let fits = i64::try_from(dimension);
            self.0.push(fits.map_err(|_| de::Error::custom(format_args!("a dimension of {dimension}")))?);
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests;
