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
//! For any input, parsing gives an error, or a [`Header`] all of whose tensors are within the file.
//! It takes memory in proportion to the header, whose bytes have to be in the file.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;

use rpc_core::tensor::MAX_DIMENSIONS;
use rpc_core::{DataType, DataTypeCode};
use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Bytes in front of the header, which contain its length.
pub(super) const PREFIX: u64 = 8;

/// Maximum length of a header in bytes, as the format defines it.
pub(super) const MAX_HEADER: u64 = 100_000_000;

/// Element types by their names in the format. The scales of block formats are separate tensors.
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

/// Description of a tensor in a file.
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

/// Description of a tensor, and its position in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Placed {
    pub(super) info: TensorInfo,
    /// Start of the tensor, in bytes from the beginning of the file.
    pub(super) start: u64,
}

/// Content of a header: the tensors by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) tensors: BTreeMap<String, Placed>,
}

/// Error in the format of a file.
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
    /// Parses the JSON of a header, whose length [`header_len`] has checked. The file has `len`
    /// bytes.
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

/// Entries of the header, unchecked.
struct Raw(Vec<(String, RawTensor)>);

#[derive(serde::Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Dimensions,
    data_offsets: (u64, u64),
}

impl RawTensor {
    /// Checks type and size of a tensor. Its offsets, from `data` in the file, have been checked.
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
        // The sum cannot overflow, because it is within the file.
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
                // Not needed and not kept, because a header full of metadata would take many times
                // its length.
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

/// Metadata of the file, which is checked and dropped.
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

/// A shape. Parsing fails at the first dimension above the limit.
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
