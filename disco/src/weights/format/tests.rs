//! Unit tests of reading the headers of safetensors files.

use proptest::prelude::*;
use safetensors::tensor::{Dtype, TensorView, serialize};

use super::*;

/// Reads a header as files are read.
fn read(file: &[u8]) -> Result<Header, FormatError> {
    let len = file.len() as u64;
    let mut prefix = [0; 8];
    prefix[..file.len().min(8)].copy_from_slice(&file[..file.len().min(8)]);
    let header = header_len(prefix, len)? as usize;
    Header::parse(&file[8..8 + header], len)
}

fn file(json: &str, data: usize) -> Vec<u8> {
    [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), &vec![7; data]].concat()
}

#[test]
fn a_header_says_what_there_is() {
    let json = r#"{"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},"__metadata__":{"format":"pt"},
        "a":{"shape":[],"data_offsets":[0,4],"dtype":"F32"},
        "none":{"dtype":"I64","shape":[0,5],"data_offsets":[16,16]}}  "#;
    let header = read(&file(json, 16)).unwrap();
    let data = 8 + json.len() as u64;
    let all: Vec<_> = header.tensors.iter().map(|(name, placed)| (name.as_str(), placed.clone())).collect();
    let placed = |dtype, shape: &[i64], size_bytes, at| Placed {
        info: TensorInfo { dtype, shape: shape.to_vec(), size_bytes },
        start: data + at,
    };
    assert_eq!(all[0], ("a", placed(DataType::F32, &[], 4, 0)));
    assert_eq!(all[1], ("b", placed(DataType::BF16, &[2, 3], 12, 4)));
    assert_eq!(all[2], ("none", placed(DataType::I64, &[0, 5], 0, 16)));
    assert!(read(&file("{}", 0)).unwrap().tensors.is_empty());
    assert!(read(&file(r#"{"__metadata__":{}}"#, 0)).unwrap().tensors.is_empty());
}

/// Malformed headers, and the words in which they are refused.
#[test]
fn a_malformed_file_is_an_error_that_says_why() {
    let one = |fields: &str, data| file(&format!("{{\"x\":{{{fields}}}}}"), data);
    let of = |dtype: &str, shape: &str, offsets: &str, data| {
        one(&format!(r#""dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}"#), data)
    };
    let two = |a: &str, b: &str, data| {
        let tensor = |name, offsets| format!(r#""{name}":{{"dtype":"U8","shape":[2],"data_offsets":{offsets}}}"#);
        file(&format!("{{{},{}}}", tensor("x", a), tensor("y", b)), data)
    };
    let many = format!("[{}1]", "1,".repeat(MAX_DIMENSIONS));
    let empty = r#""x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
    let deep = format!("{{\"x\":{}", "[".repeat(100_000));
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (vec![], "it has 0 bytes"),
        (vec![1; 9], "it has 9 bytes"),
        (1_u64.to_le_bytes().iter().chain(b"{}").copied().collect(), "said to have 1 bytes"),
        (u64::MAX.to_le_bytes().iter().chain(b"{}").copied().collect(), "said to have 18446744073709551615 bytes"),
        (100_000_001_u64.to_le_bytes().iter().chain(b"{}").copied().collect(), "there may be 2 to 100000000"),
        (100_000_000_u64.to_le_bytes().iter().chain(b"{}").copied().collect(), "the whole file has 10"),
        (file("[]", 0), "does not begin with '{'"),
        (file(" {}", 0), "does not begin with '{'"),
        (file("{]", 0), "cannot be read"),
        (file("{} x", 0), "trailing characters"),
        (file("{\"x\":1}", 0), "tensor 'x': invalid type: integer `1`"),
        (file(&deep, 0), "tensor 'x'"),
        (file("{\"\\ud800\":{}}", 0), "cannot be read"),
        ([&3_u64.to_le_bytes()[..], b"{\xff}"].concat(), "cannot be read"),
        (file(r#"{"__metadata__":{"a":1}}"#, 0), "expected a string"),
        (file(r#"{"__metadata__":null}"#, 0), "an object of strings"),
        (one("", 0), "missing field `dtype`"),
        (one(r#""dtype":"U8","shape":[1]"#, 1), "missing field `data_offsets`"),
        (one(r#""dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]"#, 1), "duplicate field `dtype`"),
        (of("F31", "[1]", "[0,4]", 4), "tensor 'x' has elements of type 'F31'"),
        (of("f32", "[1]", "[0,4]", 4), "'f32'"),
        (of("U8", "[-1]", "[0,1]", 1), "invalid value: integer `-1`"),
        (of("U8", "[1.5]", "[0,1]", 1), "floating point `1.5`"),
        (of("U8", "[9223372036854775808]", "[0,1]", 1), "a dimension of 9223372036854775808"),
        (of("U8", "[18446744073709551616]", "[0,1]", 1), "tensor 'x'"),
        (of("U8", &many, "[0,1]", 1), "a shape of up to 32 dimensions"),
        (of("U8", "[4294967296,4294967296]", "[0,1]", 1), "too many elements"),
        (of("F64", "[4611686018427387904]", "[0,1]", 1), "too many elements"),
        (of("F4", "[3]", "[0,2]", 2), "does not fill whole bytes"),
        (of("F32", "[2]", "[0,4]", 4), "takes 8 bytes, and has 4"),
        (of("F32", "[0]", "[0,4]", 4), "takes 0 bytes, and has 4"),
        (of("U8", "[1]", "[1,0]", 1), "begins at 1 and ends at 0"),
        (of("U8", "[1]", "[0,1,2]", 1), "tensor 'x'"),
        (of("U8", "[1]", "[0]", 1), "tensor 'x'"),
        (of("U8", "[1]", "[-1,0]", 1), "tensor 'x'"),
        (of("U8", "[1]", "[1,2]", 2), "there may be no gaps"),
        (of("U8", "[1]", "[0,1]", 0), "its tensors take 1 bytes, and there are 0: it was cut off"),
        (of("U8", "[1]", "[0,1]", 2), "nothing may follow them"),
        (of("U8", "[1]", "[18446744073709551614,18446744073709551615]", 2), "no gaps"),
        (of("U8", "[9223372036854775807]", "[0,9223372036854775807]", 2), "cut off"),
        (two("[0,2]", "[1,3]", 3), "may not overlap"),
        (two("[0,2]", "[0,2]", 2), "may not overlap"),
        (two("[0,2]", "[3,5]", 5), "tensor 'y' begins at 3, where the one before it ends at 2"),
        (file(&format!("{{{empty},{empty}}}"), 0), "'x' is there twice"),
    ];
    for (file, expected) in cases {
        let text = String::from_utf8_lossy(&file[8.min(file.len())..]).chars().take(80).collect::<String>();
        match read(&file) {
            Ok(header) => panic!("{text}: {header:?}"),
            Err(error) => {
                let told = error.to_string();
                assert!(told.contains(expected), "{text}: {told}");
            }
        }
    }
}

const BOTH: [(Dtype, &str); 22] = [
    (Dtype::BOOL, "bool"),
    (Dtype::U8, "uint8"),
    (Dtype::U16, "uint16"),
    (Dtype::U32, "uint32"),
    (Dtype::U64, "uint64"),
    (Dtype::I8, "int8"),
    (Dtype::I16, "int16"),
    (Dtype::I32, "int32"),
    (Dtype::I64, "int64"),
    (Dtype::F16, "float16"),
    (Dtype::BF16, "bfloat16"),
    (Dtype::F32, "float32"),
    (Dtype::F64, "float64"),
    (Dtype::C64, "complex64"),
    (Dtype::F8_E4M3, "float8_e4m3fn"),
    (Dtype::F8_E4M3FNUZ, "float8_e4m3fnuz"),
    (Dtype::F8_E5M2, "float8_e5m2"),
    (Dtype::F8_E5M2FNUZ, "float8_e5m2fnuz"),
    (Dtype::F8_E8M0, "float8_e8m0fnu"),
    (Dtype::F6_E2M3, "float6_e2m3fn"),
    (Dtype::F6_E3M2, "float6_e3m2fn"),
    (Dtype::F4, "float4_e2m1fn"),
];

proptest! {
    /// Files of the reference implementation are read as they were meant.
    #[test]
    fn files_of_the_reference_implementation_are_read(
        tensors in prop::collection::btree_map(
            "[a-z.\"\\\\ä_]{0,6}",
            (0..BOTH.len(), prop::collection::vec(0_usize..4, 0..4)),
            0..8,
        )
    ) {
        // Any number of elements below 8 bits fills bytes that way.
        let whole = |dtype: usize, shape: Vec<usize>| {
            if BOTH[dtype].0.bitsize() < 8 { [shape, vec![4]].concat() } else { shape }
        };
        let tensors: Vec<(String, usize, Vec<usize>)> =
            tensors.into_iter().map(|(name, (dtype, shape))| (name, dtype, whole(dtype, shape))).collect();
        let size = |dtype: usize, shape: &[usize]| shape.iter().product::<usize>() * BOTH[dtype].0.bitsize() / 8;
        let data: Vec<Vec<u8>> =
            tensors.iter().zip(1..).map(|((_, dtype, shape), fill)| vec![fill; size(*dtype, shape)]).collect();
        let views = tensors.iter().zip(&data).map(|((name, dtype, shape), data)| {
            (name.clone(), TensorView::new(BOTH[*dtype].0, shape.clone(), data).unwrap())
        });
        let metadata = [("format".to_owned(), "pt".to_owned())].into();
        let file = serialize(views, Some(metadata)).unwrap();
        let header = read(&file).unwrap();
        prop_assert_eq!(header.tensors.len(), tensors.len());
        for ((name, dtype, shape), data) in tensors.iter().zip(&data) {
            let Placed { info, start } = &header.tensors[name];
            prop_assert_eq!(info.dtype.to_string(), BOTH[*dtype].1);
            prop_assert_eq!(info.shape.clone(), shape.iter().map(|length| *length as i64).collect::<Vec<_>>());
            let start = *start as usize;
            prop_assert_eq!(&file[start..start + info.size_bytes as usize], &data[..]);
        }
    }

    /// Any change of a file is read, or is an error: it never panics, and no tensor that is read
    /// lies outside of the file. A file that is taken here is taken by the reference
    /// implementation, too.
    #[test]
    fn changed_files_do_no_harm(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let json = concat!(
            r#"{"__metadata__":{"a":"b"},"x":{"dtype":"U8","shape":[2,3],"data_offsets":[0,6]},"#,
            r#""y":{"dtype":"F16","shape":[2],"data_offsets":[6,10]}}"#,
        );
        let mut file = file(json, 10);
        for (at, byte) in changes {
            let at = at.index(file.len());
            file[at] = byte;
        }
        file.truncate(file.len() - cut.index(3));
        if let Ok(header) = read(&file) {
            for placed in header.tensors.values() {
                prop_assert!(placed.start + placed.info.size_bytes <= file.len() as u64);
            }
            prop_assert!(safetensors::SafeTensors::deserialize(&file).is_ok());
        }
    }
}
