//! Unit tests of cutting tensors into ranges of bytes.

// Ranges of dimensions, and not what is in them.
#![allow(clippy::single_range_in_vec_init)]

use std::cell::RefCell;

use proptest::prelude::*;

use super::*;

/// Bytes, and where they were read.
struct Watched {
    bytes: Vec<u8>,
    reads: RefCell<Vec<Range<u64>>>,
}

impl Watched {
    fn new(len: usize) -> Self {
        let bytes = (0..len).map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect();
        Self { bytes, reads: RefCell::default() }
    }
}

impl ReadAt for Watched {
    fn read_at(&self, at: u64, out: &mut [u8]) -> Result<()> {
        self.reads.borrow_mut().push(at..at + out.len() as u64);
        out.copy_from_slice(&self.bytes[at as usize..][..out.len()]);
        Ok(())
    }
}

fn read(slice: &TensorSlice, source: &Watched) -> Vec<u8> {
    read_in_pieces(slice, source, slice.size_bytes.max(1) as usize)
}

/// One after the other.
fn read_in_pieces(slice: &TensorSlice, source: &Watched, len: usize) -> Vec<u8> {
    let mut out = vec![0xee; slice.size_bytes as usize];
    let mut told = 0;
    for (number, piece) in (0..).zip(out.chunks_mut(len)) {
        slice.read(source, number * len as u64, piece, &mut |bytes| told += bytes).unwrap();
    }
    assert_eq!(told, slice.size_bytes);
    out
}

/// Returns the same, element by element.
fn naively(bytes: &[u8], size: usize, shape: &[i64], ranges: &[Range<i64>]) -> Vec<u8> {
    let mut out = Vec::new();
    let count: i64 = shape.iter().product();
    for element in 0..count {
        let mut rest = element;
        let mut inside = true;
        for dim in (0..shape.len()).rev() {
            let at = rest % shape[dim];
            rest /= shape[dim];
            inside &= ranges.get(dim).is_none_or(|range| range.contains(&at));
        }
        if inside {
            let at = element as usize * size;
            out.extend_from_slice(&bytes[at..at + size]);
        }
    }
    out
}

proptest! {
    #[test]
    fn parts_are_what_a_slice_would_be(
        dims in prop::collection::vec((0_i64..7, any::<[prop::sample::Index; 2]>()), 0..5),
        given in any::<prop::sample::Index>(),
        dtype in prop::sample::select(vec![DataType::U8, DataType::F16, DataType::F64]),
        piece in 1_usize..100,
    ) {
        let shape: Vec<i64> = dims.iter().map(|(length, _)| *length).collect();
        let ranges: Vec<_> = dims.iter().map(|(length, ends)| {
            let ends = ends.map(|end| end.index(*length as usize + 1) as i64);
            ends[0].min(ends[1])..ends[0].max(ends[1])
        }).collect();
        let ranges = &ranges[..given.index(ranges.len() + 1)];
        let size = usize::from(dtype.bits) / 8;
        let source = Watched::new(shape.iter().product::<i64>() as usize * size);
        let slice = TensorSlice::new(dtype, &shape, ranges).unwrap();
        let part = naively(&source.bytes, size, &shape, ranges);
        prop_assert_eq!(read_in_pieces(&slice, &source, piece), &part[..]);
        prop_assert_eq!(read(&slice, &source), part);
    }
}

/// Bytes that lie together are read at once, short runs together with the gaps, long runs and wide
/// gaps apart.
#[test]
fn short_runs_are_read_together() {
    let reads = |shape: &[i64], ranges: &[Range<i64>]| {
        let source = Watched::new(shape.iter().product::<i64>() as usize);
        let slice = TensorSlice::new(DataType::U8, shape, ranges).unwrap();
        assert_eq!(read(&slice, &source), naively(&source.bytes, 1, shape, ranges));
        source.reads.into_inner()
    };
    assert_eq!(reads(&[8, 100], &[2..4]), [200..400]);
    assert_eq!(reads(&[4, 100], &[0..4, 50..100]), [50..400]);
    assert_eq!(reads(&[3, 40_000], &[0..3, 0..10]), [0..10, 40_000..40_010, 80_000..80_010]);
    let long = LONG as i64;
    assert_eq!(reads(&[2, long + 1], &[0..2, 0..long]), [0..LONG, LONG + 1..2 * LONG + 1]);
    // No more than a piece at a time.
    let piece = PIECE as i64;
    assert_eq!(reads(&[piece + 5], &[]), [0..PIECE, PIECE..PIECE + 5]);
    let gaps = reads(&[piece / 1000, 2000], &[0..piece / 1000, 0..1000]);
    assert!(gaps.len() == 2 && gaps.iter().all(|read| read.end - read.start <= PIECE), "{gaps:?}");
    // Nothing of what is before or behind what is wanted, where that ends within runs.
    let source = Watched::new(400);
    let slice = TensorSlice::new(DataType::U8, &[4, 100], &[0..4, 50..100]).unwrap();
    assert_eq!(read_in_pieces(&slice, &source, 70), naively(&source.bytes, 1, &[4, 100], &[0..4, 50..100]));
    assert_eq!(source.reads.into_inner(), [50..170, 170..290, 290..400]);
}

#[test]
fn parts_that_cannot_be_are_refused() {
    let refused =
        |dtype, shape: &[i64], ranges: &[Range<i64>]| TensorSlice::new(dtype, shape, ranges).unwrap_err().to_string();
    #[allow(clippy::reversed_empty_ranges, reason = "it is refused")]
    let backwards = 2..1;
    for range in [-1..1, 0..5, backwards, 5..5] {
        assert!(refused(DataType::U8, &[4], &[range]).contains("of dimension 0"));
    }
    assert!(refused(DataType::U8, &[4], &[0..1, 0..1]).contains("2 ranges"));
    assert!(refused(DataType::F64, &[i64::MAX, 3], &[]).contains("too"));
    assert!(refused(DataType::F64, &[i64::MAX], &[0..1]).contains("too large"));
    let f4 = DataType::new(rpc_core::DataTypeCode::FLOAT4_E2M1FN, 4);
    assert!(refused(f4, &[2, 4], &[0..2, 0..1]).contains("within a byte"));
    assert!(refused(f4, &[2, 3], &[1..2]).contains("within a byte"));
    let half = TensorSlice::new(f4, &[2, 4], &[0..2, 2..4]).unwrap();
    assert_eq!(read(&half, &Watched { bytes: vec![1, 2, 3, 4], reads: RefCell::default() }), [2, 4]);
    // Nothing is nothing, however large the other dimensions are.
    for ranges in [&[][..], &[0..0, 5..7], &[0..0, 1..2, 3..4]] {
        assert_eq!(TensorSlice::new(f4, &[0, i64::MAX, i64::MAX], ranges).unwrap().size_bytes, 0);
    }
}
