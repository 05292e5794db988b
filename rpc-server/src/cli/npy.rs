//! Headers of NumPy's `.npy` files.
//!
//! A file is: the magic `93 4E 55 4D 50 59`; a major and a minor version byte; the header's length,
//! little-endian, of 2 bytes in version 1.0 and 4 in 2.0 and 3.0; the header, a Python dict literal
//! with the keys `descr`, `fortran_order` and `shape`, padded with spaces and ended by a newline,
//! so that the data starts at a multiple of 64; and the elements, packed. The format is that of NEP
//! 1 (`numpy.lib.format`).
//!
//! Not the crate `npyz` 0.9: it reserves as many bytes as the length field of the header says, up
//! to 4 GiB, before it reads them, and parses nested values recursively. This reader allocates 64
//! KiB at most, whatever the file says.
//!
//! ```
//! use rpc_core::dlpack::DataType;
//! use rpc_server::cli::npy::{read_header, write_header};
//!
//! let mut file = Vec::new();
//! write_header(&mut file, DataType::F32, &[2, 3])?;
//! let header = read_header(&mut file.as_slice())?;
//! assert_eq!(header.dtype, DataType::F32);
//! assert_eq!(header.shape, [2, 3]);
//! assert_eq!(header.data_offset, 128);
//! assert_eq!(header.data_len_bytes(), 24);
//! # Ok::<(), rpc_server::cli::npy::NpyError>(())
//! ```

use std::io::{self, Read, Write};

use rpc_core::dlpack::{DataType, dense_size};

/// Contents of the header of a `.npy` file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NpyHeader {
    /// Type of the elements.
    pub dtype: DataType,
    /// The dimensions, none of them negative; empty for a single number.
    pub shape: Vec<i64>,
    /// The file says that its elements are in column-major order. Only for shapes with at most one
    /// dimension, where that is the row-major order too.
    pub fortran_order: bool,
    /// Offset of the elements in bytes.
    pub data_offset: u64,
}

impl NpyHeader {
    /// Returns the length of the elements in bytes.
    pub fn data_len_bytes(&self) -> u64 {
        // Cannot overflow unless the header was changed by hand: `read_header` has computed it.
        dense_size(&self.shape, self.dtype).unwrap_or(u64::MAX)
    }
}

/// Error of reading or writing a header.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NpyError {
    /// The file does not start as a `.npy` file does.
    #[error("not a .npy file, save the array with numpy.save")]
    NotNpy,
    /// The version of the format is not 1.0, 2.0 or 3.0.
    #[error("version {major}.{minor} of the .npy format is unknown, use 1.0, 2.0 or 3.0")]
    UnknownVersion {
        /// Major version.
        major: u8,
        /// Minor version.
        minor: u8,
    },
    /// The header is longer than that of any plain array.
    #[error("the header has {len_bytes} bytes, which is more than the {limit_bytes} of any plain array")]
    HeaderTooLong {
        /// Length in the file.
        len_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// The file ends within the header.
    #[error("the file ends within its header, copy it again")]
    Truncated,
    /// The header is not a dict of the expected form.
    #[error("malformed header at byte {position} of it: expected {expected}")]
    Malformed {
        /// Expected contents.
        expected: &'static str,
        /// Offset from the start of the dict.
        position: usize,
    },
    /// The elements are in the other byte order.
    #[error("elements of type '{descr}' are big-endian, save the array as little-endian")]
    BigEndian {
        /// NumPy's name of the type.
        descr: String,
    },
    /// The elements are records.
    #[error("the elements are records, save each field as an array of its own")]
    Structured,
    /// The elements are Python objects.
    #[error("the elements are Python objects, save an array of numbers")]
    PythonObjects,
    /// The elements are of another type that has no counterpart here.
    #[error("elements of type '{descr}' are not supported, use bool, int, uint, float16, float32 or float64")]
    UnsupportedDescr {
        /// NumPy's name of the type.
        descr: String,
    },
    /// The type has no name in NumPy, so it cannot be written.
    #[error("a .npy file cannot hold {dtype}, convert the tensor first")]
    UnsupportedDtype {
        /// The type.
        dtype: DataType,
    },
    /// The elements are in column-major order.
    #[error("an array of shape {shape:?} is in column-major order, save numpy.ascontiguousarray of it")]
    FortranOrder {
        /// The dimensions.
        shape: Vec<i64>,
    },
    /// The shape has a negative dimension, too many dimensions, or more elements than can be
    /// counted.
    #[error("no array can have the shape {shape:?}")]
    InvalidShape {
        /// The dimensions, as far as they were read.
        shape: Vec<i64>,
    },
    /// Reading or writing failed.
    #[error("the header could not be transferred, see the cause")]
    Io(#[source] io::Error),
}

/// Reads the header, and leaves `reader` at the first element.
///
/// Allocates no more than 64 KiB, whatever the bytes are. Whether as many elements follow as the
/// header says is for the caller to check.
///
/// # Errors
///
/// The bytes are not a header, or one of an array that is not supported: big-endian, structured, of
/// objects, strings, dates or complex numbers, or column-major with more than one dimension; or
/// `reader` failed.
pub fn read_header(reader: &mut impl Read) -> Result<NpyHeader, NpyError> {
    let mut start = [0; MAGIC.len()];
    read_exact(reader, &mut start).map_err(|error| match error {
        NpyError::Truncated => NpyError::NotNpy,
        error => error,
    })?;
    if start != MAGIC {
        return Err(NpyError::NotNpy);
    }
    let mut version = [0; 2];
    read_exact(reader, &mut version)?;
    let (len, prefix_len) = match version {
        [1, 0] => {
            let mut len = [0; 2];
            read_exact(reader, &mut len)?;
            (usize::from(u16::from_le_bytes(len)), 10)
        }
        [2 | 3, 0] => {
            let mut len = [0; 4];
            read_exact(reader, &mut len)?;
            (usize::try_from(u32::from_le_bytes(len)).unwrap_or(usize::MAX), 12)
        }
        [major, minor] => return Err(NpyError::UnknownVersion { major, minor }),
    };
    if len > MAX_HEADER_BYTES {
        return Err(NpyError::HeaderTooLong { len_bytes: len as u64, limit_bytes: MAX_HEADER_BYTES as u64 });
    }
    let mut header = vec![0; len];
    read_exact(reader, &mut header)?;
    let fields = Parser { text: &header, position: 0 }.header()?;
    let dtype = dtype_of(&fields.descr)?;
    let shape = fields.shape;
    if dense_size(&shape, dtype).is_err() {
        return Err(NpyError::InvalidShape { shape });
    }
    if fields.fortran_order && shape.len() > 1 {
        return Err(NpyError::FortranOrder { shape });
    }
    Ok(NpyHeader { dtype, shape, fortran_order: fields.fortran_order, data_offset: (prefix_len + len) as u64 })
}

/// Writes the header of a row-major array, byte for byte as NumPy does, and returns its length: the
/// offset of the elements, which follow packed.
///
/// # Errors
///
/// NumPy has no such type (bfloat16, vectors, …); no array can have that shape; or `writer` failed.
pub fn write_header(writer: &mut impl Write, dtype: DataType, shape: &[i64]) -> Result<u64, NpyError> {
    let (_, descr) = DESCRS.iter().find(|(known, _)| *known == dtype).ok_or(NpyError::UnsupportedDtype { dtype })?;
    if shape.len() > MAX_DIMENSIONS || dense_size(shape, dtype).is_err() {
        return Err(NpyError::InvalidShape { shape: shape.to_vec() });
    }
    let mut dict = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': (");
    for (axis, dimension) in shape.iter().enumerate() {
        dict.push_str(&dimension.to_string());
        // A tuple of one is told from a number in parentheses by its comma.
        dict.push_str(match axis + 1 {
            1 if shape.len() == 1 => ",",
            next if next < shape.len() => ", ",
            _ => "",
        });
    }
    dict.push_str("), }");
    if let Some(first) = shape.first() {
        let spare = GROWTH_DIGITS.saturating_sub(first.to_string().len());
        dict.extend(std::iter::repeat_n(' ', spare));
    }
    // With the newline; when that ends on the alignment already, NumPy adds one unit more.
    let unpadded = PREFIX_BYTES + dict.len() + 1;
    dict.extend(std::iter::repeat_n(' ', ALIGNMENT - unpadded % ALIGNMENT));
    dict.push('\n');
    // The dimensions are few, and so the header is short.
    let len = u16::try_from(dict.len()).map_err(|_| NpyError::InvalidShape { shape: shape.to_vec() })?;

    let mut header = Vec::with_capacity(PREFIX_BYTES + dict.len());
    header.extend_from_slice(&MAGIC);
    header.extend_from_slice(&[1, 0]);
    header.extend_from_slice(&len.to_le_bytes());
    header.extend_from_slice(dict.as_bytes());
    writer.write_all(&header).map_err(NpyError::Io)?;
    Ok(header.len() as u64)
}

const MAGIC: [u8; 6] = *b"\x93NUMPY";
/// Magic, version and length in version 1.0.
const PREFIX_BYTES: usize = 10;
/// The data starts at a multiple of this, so that the file can be mapped.
const ALIGNMENT: usize = 64;
/// NumPy leaves room for the first dimension to grow to that many digits in place.
const GROWTH_DIGITS: usize = 21;
/// The limit of NumPy.
const MAX_DIMENSIONS: usize = 64;
/// All that version 1.0 can have, and far more than [`MAX_DIMENSIONS`] take.
const MAX_HEADER_BYTES: usize = 65_535;

/// The types that both sides know, with NumPy's names.
const DESCRS: [(DataType, &str); 12] = [
    (DataType::BOOL, "|b1"),
    (DataType::I8, "|i1"),
    (DataType::U8, "|u1"),
    (DataType::I16, "<i2"),
    (DataType::I32, "<i4"),
    (DataType::I64, "<i8"),
    (DataType::U16, "<u2"),
    (DataType::U32, "<u4"),
    (DataType::U64, "<u8"),
    (DataType::F16, "<f2"),
    (DataType::F32, "<f4"),
    (DataType::F64, "<f8"),
];

fn dtype_of(descr: &str) -> Result<DataType, NpyError> {
    // The byte order of single bytes means nothing, and some writers give one.
    let known = |(_, name): &&(DataType, &str)| {
        *name == descr || (name.starts_with('|') && name.strip_prefix('|') == descr.strip_prefix('<'))
    };
    if let Some((dtype, _)) = DESCRS.iter().find(known) {
        return Ok(*dtype);
    }
    let descr = descr.to_owned();
    if descr.starts_with('>') {
        Err(NpyError::BigEndian { descr })
    } else if descr.trim_start_matches(['|', '<', '=']).starts_with('O') {
        Err(NpyError::PythonObjects)
    } else {
        Err(NpyError::UnsupportedDescr { descr })
    }
}

fn read_exact(reader: &mut impl Read, buffer: &mut [u8]) -> Result<(), NpyError> {
    reader.read_exact(buffer).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => NpyError::Truncated,
        _ => NpyError::Io(error),
    })
}

struct Fields {
    descr: String,
    fortran_order: bool,
    shape: Vec<i64>,
}

/// Reads the one dict literal that a header may be. It never recurses, so that nesting costs
/// nothing.
struct Parser<'a> {
    text: &'a [u8],
    position: usize,
}

impl Parser<'_> {
    fn header(mut self) -> Result<Fields, NpyError> {
        let (mut descr, mut fortran_order, mut shape) = (None, None, None);
        self.expect(b'{', "'{'")?;
        while !self.accept(b'}') {
            let start = self.position;
            let key = self.string()?;
            self.expect(b':', "':'")?;
            let repeated = match key.as_str() {
                "descr" => descr.replace(self.descr()?).is_some(),
                "fortran_order" => fortran_order.replace(self.boolean()?).is_some(),
                "shape" => shape.replace(self.shape()?).is_some(),
                _ => true,
            };
            if repeated {
                self.position = start;
                return Err(self.malformed("one each of 'descr', 'fortran_order' and 'shape'"));
            }
            if !self.accept(b',') {
                self.expect(b'}', "',' or '}'")?;
                break;
            }
        }
        self.skip_space();
        if self.position < self.text.len() {
            return Err(self.malformed("nothing but spaces after the dict"));
        }
        match (descr, fortran_order, shape) {
            (Some(descr), Some(fortran_order), Some(shape)) => Ok(Fields { descr, fortran_order, shape }),
            _ => Err(self.malformed("all of 'descr', 'fortran_order' and 'shape'")),
        }
    }

    /// The type: a string, or a list or tuple for records and types made of others.
    fn descr(&mut self) -> Result<String, NpyError> {
        match self.peek() {
            Some(b'[' | b'(' | b'{') => Err(NpyError::Structured),
            _ => self.string(),
        }
    }

    fn boolean(&mut self) -> Result<bool, NpyError> {
        self.skip_space();
        for (word, value) in [("True", true), ("False", false)] {
            if self.text[self.position..].starts_with(word.as_bytes()) {
                self.position += word.len();
                return Ok(value);
            }
        }
        Err(self.malformed("True or False"))
    }

    fn shape(&mut self) -> Result<Vec<i64>, NpyError> {
        self.expect(b'(', "a tuple of dimensions")?;
        let mut shape = Vec::new();
        while !self.accept(b')') {
            if shape.len() == MAX_DIMENSIONS {
                return Err(NpyError::InvalidShape { shape });
            }
            shape.push(self.dimension()?);
            if self.accept(b',') {
                continue;
            }
            if shape.len() == 1 {
                return Err(self.malformed("',' after the only dimension"));
            }
            self.expect(b')', "',' or ')'")?;
            break;
        }
        Ok(shape)
    }

    fn dimension(&mut self) -> Result<i64, NpyError> {
        self.skip_space();
        let digits = self.text[self.position..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        let text = &self.text[self.position..self.position + digits];
        let value = std::str::from_utf8(text)
            .ok()
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| self.malformed("a dimension from 0 to 2^63 - 1"))?;
        self.position += digits;
        // Written by Python 2, where long integers end in L.
        if self.text.get(self.position) == Some(&b'L') {
            self.position += 1;
        }
        Ok(value)
    }

    /// A short string without escapes, which is all that names and types need.
    fn string(&mut self) -> Result<String, NpyError> {
        self.skip_space();
        let rest = &self.text[self.position..];
        let quote = rest.first().copied().filter(|byte| matches!(byte, b'\'' | b'"'));
        let body = quote.and_then(|quote| {
            let len = rest[1..].iter().take(MAX_STRING_BYTES + 1).position(|byte| *byte == quote)?;
            std::str::from_utf8(&rest[1..=len]).ok()
        });
        match body {
            Some(body) if body.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\') => {
                self.position += body.len() + 2;
                Ok(body.to_owned())
            }
            _ => Err(self.malformed("a short string in quotes")),
        }
    }

    fn expect(&mut self, byte: u8, expected: &'static str) -> Result<(), NpyError> {
        if self.accept(byte) { Ok(()) } else { Err(self.malformed(expected)) }
    }

    fn accept(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.position += usize::from(found);
        found
    }

    /// The next byte that is not space.
    fn peek(&mut self) -> Option<u8> {
        self.skip_space();
        self.text.get(self.position).copied()
    }

    fn skip_space(&mut self) {
        let rest = &self.text[self.position..];
        self.position += rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
    }

    fn malformed(&self, expected: &'static str) -> NpyError {
        NpyError::Malformed { expected, position: self.position }
    }
}

/// Beyond this, a string is neither a key nor a type.
const MAX_STRING_BYTES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with `dict` for a header, in version 1.0.
    fn file(dict: &str) -> Vec<u8> {
        versioned([1, 0], dict)
    }

    fn versioned(version: [u8; 2], dict: &str) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(version);
        let len = dict.len() as u32;
        let width = if version[0] == 1 { 2 } else { 4 };
        bytes.extend(&len.to_le_bytes()[..width]);
        bytes.extend(dict.as_bytes());
        bytes
    }

    fn read(bytes: &[u8]) -> Result<NpyHeader, NpyError> {
        read_header(&mut &*bytes)
    }

    fn read_dict(dict: &str) -> Result<NpyHeader, NpyError> {
        read(&file(dict))
    }

    fn with_shape(shape: &str) -> String {
        format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}")
    }

    fn with_descr(descr: &str) -> String {
        format!("{{'descr': {descr}, 'fortran_order': False, 'shape': (2,), }}")
    }

    /// As `numpy.save` of NumPy 2 writes them.
    fn golden() -> Vec<(DataType, Vec<i64>, Vec<u8>)> {
        let file = |dict: &str| {
            let mut bytes = b"\x93NUMPY\x01\x00v\x00".to_vec();
            bytes.extend(format!("{dict:<117}\n").bytes());
            assert_eq!(bytes.len(), 128);
            bytes
        };
        vec![
            (DataType::F32, vec![2, 3], file("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }")),
            (DataType::I64, vec![], file("{'descr': '<i8', 'fortran_order': False, 'shape': (), }")),
            (DataType::BOOL, vec![5], file("{'descr': '|b1', 'fortran_order': False, 'shape': (5,), }")),
            (DataType::U8, vec![0, 7], file("{'descr': '|u1', 'fortran_order': False, 'shape': (0, 7), }")),
            (
                DataType::F64,
                vec![1; 10],
                file("{'descr': '<f8', 'fortran_order': False, 'shape': (1, 1, 1, 1, 1, 1, 1, 1, 1, 1), }"),
            ),
        ]
    }

    #[test]
    fn headers_are_written_as_numpy_writes_them() {
        for (dtype, shape, bytes) in golden() {
            let mut written = Vec::new();
            assert_eq!(write_header(&mut written, dtype, &shape).unwrap(), bytes.len() as u64);
            assert_eq!(written, bytes, "{dtype} {shape:?}");
        }
    }

    #[test]
    fn headers_of_numpy_are_read_and_leave_the_reader_at_the_data() {
        for (dtype, shape, mut bytes) in golden() {
            let data_offset = bytes.len() as u64;
            bytes.extend(b"data");
            let mut reader = bytes.as_slice();
            let header = read_header(&mut reader).unwrap();
            let expected = NpyHeader { dtype, shape, fortran_order: false, data_offset };
            assert_eq!(header, expected);
            assert_eq!(reader, b"data");
        }
    }

    #[test]
    fn every_type_round_trips_aligned() {
        for (dtype, _) in DESCRS {
            for shape in [&[][..], &[0], &[7], &[i64::MAX / 64, 1], &[1; MAX_DIMENSIONS]] {
                let mut bytes = Vec::new();
                let len = write_header(&mut bytes, dtype, shape).unwrap();
                assert_eq!((len, len % 64), (bytes.len() as u64, 0));
                let header = read(&bytes).unwrap();
                assert_eq!((header.dtype, &*header.shape), (dtype, shape));
            }
        }
    }

    #[test]
    fn later_versions_have_a_longer_length() {
        for major in [2, 3] {
            let header = read(&versioned([major, 0], &with_shape("(4,)"))).unwrap();
            assert_eq!(header.shape, [4]);
            assert_eq!(header.data_offset, 12 + with_shape("(4,)").len() as u64);
        }
        for version in [[0, 0], [1, 1], [4, 0]] {
            let error = read(&versioned(version, &with_shape("(4,)"))).unwrap_err();
            assert!(matches!(error, NpyError::UnknownVersion { .. }), "{error}");
        }
    }

    #[test]
    fn other_spellings_of_the_dict_are_read() {
        let compact = "{\"shape\":(3L,2),\"fortran_order\":False,\"descr\":\"<i1\"}\n";
        let header = read_dict(compact).unwrap();
        assert_eq!((header.dtype, &*header.shape), (DataType::I8, &[3, 2][..]));
        let wide = "  { 'descr' : '<f4' , 'fortran_order' : True , 'shape' : ( 3 , ) , }  \n";
        let header = read_dict(wide).unwrap();
        assert!(header.fortran_order);
        assert_eq!(header.data_len_bytes(), 12);
    }

    #[test]
    fn types_without_a_counterpart_are_refused_by_kind() {
        let refused = |descr: &str| read_dict(&with_descr(descr)).unwrap_err();
        assert!(matches!(refused("'>f4'"), NpyError::BigEndian { descr } if descr == ">f4"));
        assert!(matches!(refused("[('x', '<f4'), ('y', '<f4')]"), NpyError::Structured));
        assert!(matches!(refused("'|O'"), NpyError::PythonObjects));
        for descr in ["'<U8'", "'|S4'", "'<c8'", "'<M8[ns]'", "'<f16'", "'|V2'", "''", "'f4'", "'<f3'"] {
            let error = refused(descr);
            assert!(matches!(error, NpyError::UnsupportedDescr { .. }), "{descr}: {error}");
        }
        let lanes = DataType { lanes: 4, ..DataType::F32 };
        for dtype in [DataType::BF16, lanes] {
            let error = write_header(&mut Vec::new(), dtype, &[1]).unwrap_err();
            assert!(matches!(error, NpyError::UnsupportedDtype { .. }));
        }
    }

    #[test]
    fn column_major_arrays_are_refused() {
        let dict = "{'descr': '<f2', 'fortran_order': True, 'shape': (2, 3), }";
        let error = read_dict(dict).unwrap_err();
        assert!(matches!(error, NpyError::FortranOrder { shape } if shape == [2, 3]));
    }

    #[test]
    fn impossible_shapes_are_refused() {
        let overflow = ["(9223372036854775807, 3)", "(9223372036854775807,)", "(4294967296, 4294967296)"];
        for shape in overflow {
            let error = read_dict(&with_shape(shape)).unwrap_err();
            assert!(matches!(error, NpyError::InvalidShape { .. }), "{shape}: {error}");
        }
        let many = format!("({})", "1, ".repeat(65));
        assert!(matches!(read_dict(&with_shape(&many)), Err(NpyError::InvalidShape { .. })));
        for shape in
            ["(-1,)", "(9223372036854775808,)", "(1)", "(1,,)", "(,)", "[1, 2]", "(1.0,)", "((1,),)", "None", "(1, 2"]
        {
            let error = read_dict(&with_shape(shape)).unwrap_err();
            assert!(matches!(error, NpyError::Malformed { .. }), "{shape}: {error}");
        }
        for shape in [&[-1][..], &[i64::MAX, 3], &[1; MAX_DIMENSIONS + 1]] {
            let error = write_header(&mut Vec::new(), DataType::U8, shape).unwrap_err();
            assert!(matches!(error, NpyError::InvalidShape { .. }));
        }
    }

    #[test]
    fn hostile_headers_are_errors() {
        let mut huge = b"\x93NUMPY\x02\x00".to_vec();
        huge.extend(u32::MAX.to_le_bytes());
        assert!(matches!(read(&huge), Err(NpyError::HeaderTooLong { len_bytes: 0xffff_ffff, .. })));
        for nesting in ["(", "[", "{"] {
            assert!(read_dict(&with_shape(&nesting.repeat(60_000))).is_err());
            assert!(read_dict(&with_descr(&nesting.repeat(60_000))).is_err());
            assert!(read_dict(&nesting.repeat(60_000)).is_err());
        }
        let long_name = format!("'{}'", "x".repeat(60_000));
        for dict in [
            "",
            "\n",
            "{}",
            "{",
            "}",
            "'",
            "{'",
            "{'descr",
            "{'descr'",
            "{'descr':",
            "{'descr': '<f4'}",
            "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': ()}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (), 'more': 1}",
            "{'descr': '<f4', 'fortran_order': 0, 'shape': ()}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': ()} + {}",
            "{'descr': '\u{e9}', 'fortran_order': False, 'shape': ()}",
            "__import__('os')",
            &with_descr(&long_name),
        ] {
            let error = read_dict(dict).unwrap_err();
            assert!(matches!(error, NpyError::Malformed { .. }), "{dict}: {error}");
        }
    }

    #[test]
    fn every_cut_and_every_changed_byte_is_survived() {
        let mut bytes = Vec::new();
        write_header(&mut bytes, DataType::F32, &[2, 3]).unwrap();
        for len in 0..bytes.len() {
            let error = read(&bytes[..len]).unwrap_err();
            if len < MAGIC.len() {
                assert!(matches!(error, NpyError::NotNpy));
            } else {
                assert!(matches!(error, NpyError::Truncated), "{len}: {error}");
            }
        }
        for position in 0..bytes.len() {
            for value in 0..=u8::MAX {
                let mut changed = bytes.clone();
                changed[position] = value;
                let _ = read(&changed);
            }
        }
    }

    #[test]
    fn a_failing_writer_is_an_error() {
        let error = write_header(&mut [0_u8; 8].as_mut_slice(), DataType::F32, &[1]).unwrap_err();
        assert!(matches!(error, NpyError::Io(_)));
    }
}
