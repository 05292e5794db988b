//! The kernels against a scalar model in `f64` and `i128`.

use half::bf16;
use proptest::prelude::*;
use rpc_core::dlpack::{from_bytes, to_bytes};

use super::*;

const OPS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max, ReduceOp::Avg];

/// Returns the kernel's result on these ranks' bytes, from addresses that are not aligned.
fn run(numeric: Numeric, op: ReduceOp, ranks: &[Vec<u8>], plain: bool) -> Vec<u8> {
    let shifted: Vec<Vec<u8>> = ranks.iter().map(|bytes| [&[0xaa_u8][..], bytes].concat()).collect();
    let sources: Vec<*const u8> = shifted.iter().map(|bytes| bytes[1..].as_ptr()).collect();
    let len = ranks[0].len();
    let mut out = vec![0; len];
    let mut emit = |at: usize, block: &[u8]| out[at..at + block.len()].copy_from_slice(block);
    // SAFETY: the sources are `len` bytes long each, and no other code writes to them.
    unsafe {
        match (plain, numeric) {
            (false, _) => reduce(numeric, op, &sources, len, &mut emit),
            (true, Numeric::F32) => reduce_plain::<f32>(op, &sources, len, &mut emit),
            (true, Numeric::Bf16) => reduce_plain::<bf16>(op, &sources, len, &mut emit),
            (true, Numeric::I64) => reduce_plain::<i64>(op, &sources, len, &mut emit),
            (true, _) => panic!("not needed"),
        }
    }
    out
}

fn integer_model(op: ReduceOp, values: &[i128], wrap: impl Fn(i128) -> i128) -> i128 {
    let fold = |f: fn(i128, i128) -> i128| values.iter().copied().reduce(|a, b| wrap(f(a, b))).unwrap();
    match op {
        ReduceOp::Sum => fold(|a, b| a + b),
        ReduceOp::Prod => fold(i128::wrapping_mul),
        ReduceOp::Min => fold(i128::min),
        ReduceOp::Max => fold(i128::max),
        ReduceOp::Avg => wrap(fold(|a, b| a + b) / values.len() as i128),
    }
}

/// Reduces in `f64`, rounding to the type of sums after each step as the contract says: the sum and
/// product of two `f32` rounded through `f64` are what `f32` itself gives.
fn float_model(op: ReduceOp, values: &[f64], round: impl Fn(f64) -> f64) -> f64 {
    let fold = |f: fn(f64, f64) -> f64| values.iter().copied().reduce(|a, b| round(f(a, b))).unwrap();
    let extreme = |f: fn(f64, f64) -> f64| {
        if values.iter().any(|value| value.is_nan()) { f64::NAN } else { values.iter().copied().reduce(f).unwrap() }
    };
    match op {
        ReduceOp::Sum => fold(|a, b| a + b),
        ReduceOp::Prod => fold(|a, b| a * b),
        ReduceOp::Min => extreme(f64::min),
        ReduceOp::Max => extreme(f64::max),
        ReduceOp::Avg => round(fold(|a, b| a + b) / values.len() as f64),
    }
}

/// Ranks with as many random 64-bit patterns each.
fn patterns() -> impl Strategy<Value = Vec<Vec<u64>>> {
    (1_usize..6, prop_oneof![0_usize..40, 2040_usize..2060, Just(5000)])
        .prop_flat_map(|(ranks, len)| prop::collection::vec(prop::collection::vec(any::<u64>(), len), ranks))
}

/// As [`patterns`], with ordinary numbers, infinities and NaN.
fn numbers() -> impl Strategy<Value = Vec<Vec<f64>>> {
    let one = prop_oneof![
        20 => -1e4_f64..1e4,
        10 => (-8_i32..8).prop_map(f64::from),
        1 => Just(f64::NAN),
        1 => Just(f64::INFINITY),
        1 => Just(f64::NEG_INFINITY),
        1 => -1e-6_f64..1e-6,
    ];
    (1_usize..6, prop_oneof![0_usize..40, Just(2049)])
        .prop_flat_map(move |(ranks, len)| prop::collection::vec(prop::collection::vec(one.clone(), len), ranks))
}

macro_rules! integers_match_the_model {
    ($($name:ident $type:ty, $numeric:ident;)*) => {
        proptest! {
            #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
            $(
                #[test]
                fn $name(ranks in patterns()) {
                    let ranks: Vec<Vec<$type>> =
                        ranks.iter().map(|rank| rank.iter().map(|value| *value as $type).collect()).collect();
                    let bytes: Vec<Vec<u8>> = ranks.iter().map(|rank| to_bytes(rank).to_vec()).collect();
                    for op in OPS {
                        let result: Vec<$type> =
                            from_bytes(&run(Numeric::$numeric, op, &bytes, false));
                        prop_assert_eq!(result.len(), ranks[0].len());
                        for (at, result) in result.into_iter().enumerate() {
                            let values: Vec<i128> = ranks.iter().map(|rank| i128::from(rank[at])).collect();
                            let expected = integer_model(op, &values, |value| i128::from(value as $type));
                            prop_assert_eq!(i128::from(result), expected, "{} at {}", op, at);
                        }
                    }
                }
            )*
        }
    };
}

integers_match_the_model! {
    i8_matches i8, I8; i16_matches i16, I16; i32_matches i32, I32; i64_matches i64, I64;
    u8_matches u8, U8; u16_matches u16, U16; u32_matches u32, U32; u64_matches u64, U64;
}

macro_rules! floats_match_the_model {
    ($($name:ident $type:ty, $numeric:ident, $from:expr, $to:expr, $round:expr;)*) => {
        proptest! {
            #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
            $(
                #[test]
                fn $name(ranks in numbers()) {
                    let (from, to): (fn(f64) -> $type, fn($type) -> f64) = ($from, $to);
                    let ranks: Vec<Vec<$type>> =
                        ranks.iter().map(|rank| rank.iter().map(|value| from(*value)).collect()).collect();
                    let bytes: Vec<Vec<u8>> = ranks.iter().map(|rank| to_bytes(rank).to_vec()).collect();
                    for op in OPS {
                        let result: Vec<$type> =
                            from_bytes(&run(Numeric::$numeric, op, &bytes, false));
                        for (at, result) in result.into_iter().enumerate() {
                            let values: Vec<f64> = ranks.iter().map(|rank| to(rank[at])).collect();
                            let expected = to(from(float_model(op, &values, $round)));
                            let same = to(result) == expected || (to(result).is_nan() && expected.is_nan());
                            prop_assert!(same, "{op} at {at} of {values:?}: {result} and not {expected}");
                        }
                    }
                }
            )*
        }
    };
}

floats_match_the_model! {
    f32_matches f32, F32, |value| value as f32, f64::from, |value| f64::from(value as f32);
    f64_matches f64, F64, |value| value, |value| value, |value| value;
    f16_matches f16, F16, |value| f16::from_f32(value as f32), f16::to_f64, |value| f64::from(value as f32);
    bf16_matches bf16, Bf16, |value| bf16::from_f32(value as f32), bf16::to_f64, |value| f64::from(value as f32);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// The version for this processor gives the bits of the plain one, NaN payloads apart.
    #[test]
    fn versions_agree(ranks in patterns()) {
        let bytes: Vec<Vec<u8>> = ranks.iter().map(|rank| to_bytes(rank).to_vec()).collect();
        for op in OPS {
            prop_assert_eq!(run(Numeric::I64, op, &bytes, false), run(Numeric::I64, op, &bytes, true));
            let [best, plain] =
                [false, true].map(|plain| from_bytes::<f32>(&run(Numeric::F32, op, &bytes, plain)));
            for (best, plain) in best.into_iter().zip(plain) {
                prop_assert!(best.to_bits() == plain.to_bits() || (best.is_nan() && plain.is_nan()));
            }
            let [best, plain] =
                [false, true].map(|plain| from_bytes::<bf16>(&run(Numeric::Bf16, op, &bytes, plain)));
            for (best, plain) in best.into_iter().zip(plain) {
                prop_assert!(best.to_bits() == plain.to_bits() || (best.is_nan() && plain.is_nan()));
            }
        }
    }

    #[test]
    fn copies_copy(len in 0_usize..2000, from in 0_usize..70, to in 0_usize..70, bypass: bool) {
        let source: Vec<u8> = (0..len + from).map(|at| at as u8).collect();
        let mut target = vec![0xee_u8; len + to + 1];
        // SAFETY: both are long enough, and apart.
        unsafe { copy(source[from..].as_ptr(), target[to..].as_mut_ptr(), len, bypass) };
        prop_assert_eq!(&target[to..to + len], &source[from..]);
        prop_assert!(target[..to].iter().chain(&target[to + len..]).all(|byte| *byte == 0xee));
    }
}

#[test]
fn every_bf16_narrows_like_half_does() {
    for high in 0..=u16::MAX {
        for low in [0_u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
            let wide = f32::from_bits(u32::from(high) << 16 | low);
            let mut narrow = [bf16::ZERO];
            narrow_bf16(&[wide], &mut narrow);
            let expected = bf16::from_f32(wide);
            assert!(narrow[0].to_bits() == expected.to_bits() || (narrow[0].is_nan() && expected.is_nan()), "{wide:?}");
        }
    }
}
