//! Reduction kernels: reduce the same range of several ranks' buffers into one, a block at a time.
//!
//! The loops are plain Rust over fixed-size chunks, which LLVM vectorises; they are compiled a
//! second time for AVX2, chosen at run time. A block of 2048 elements stays in the first-level
//! cache between its sources, so that each source is read once from memory and nothing is written
//! but the result.

use std::ptr;

use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use rpc_core::{DataType, Element};

use crate::ccl::ReduceOp;

/// Elements of a block.
const BLOCK: usize = 2048;

/// The types that can be reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Numeric {
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    F16,
    Bf16,
    F32,
    F64,
}

impl Numeric {
    /// Returns the type of one lane of `dtype`, if it can be reduced.
    pub(super) fn of(dtype: DataType) -> Option<Self> {
        let lane = DataType { lanes: 1, ..dtype };
        [
            (DataType::I8, Self::I8),
            (DataType::I16, Self::I16),
            (DataType::I32, Self::I32),
            (DataType::I64, Self::I64),
            (DataType::U8, Self::U8),
            (DataType::U16, Self::U16),
            (DataType::U32, Self::U32),
            (DataType::U64, Self::U64),
            (DataType::F16, Self::F16),
            (DataType::BF16, Self::Bf16),
            (DataType::F32, Self::F32),
            (DataType::F64, Self::F64),
        ]
        .into_iter()
        .find_map(|(known, numeric)| (known == lane && dtype.lanes > 0).then_some(numeric))
    }
}

/// Folds `sources` in their order, `bytes` of each, and calls `emit` with each stretch of the
/// result and its offset. An average divides by the number of sources.
///
/// # Safety
///
/// Each source must be valid for reads of `bytes`, which is a whole number of elements. Meanwhile
/// only `emit` may write there, and only to the stretches that it is given: at the offsets that it
/// is called with, or before.
pub(super) unsafe fn reduce(
    numeric: Numeric,
    op: ReduceOp,
    sources: &[*const u8],
    bytes: usize,
    emit: &mut dyn FnMut(usize, &[u8]),
) {
    // SAFETY: the caller promises the same.
    unsafe {
        match numeric {
            Numeric::I8 => reduce_best::<i8>(op, sources, bytes, emit),
            Numeric::I16 => reduce_best::<i16>(op, sources, bytes, emit),
            Numeric::I32 => reduce_best::<i32>(op, sources, bytes, emit),
            Numeric::I64 => reduce_best::<i64>(op, sources, bytes, emit),
            Numeric::U8 => reduce_best::<u8>(op, sources, bytes, emit),
            Numeric::U16 => reduce_best::<u16>(op, sources, bytes, emit),
            Numeric::U32 => reduce_best::<u32>(op, sources, bytes, emit),
            Numeric::U64 => reduce_best::<u64>(op, sources, bytes, emit),
            Numeric::F16 => reduce_best::<f16>(op, sources, bytes, emit),
            Numeric::Bf16 => reduce_best::<half::bf16>(op, sources, bytes, emit),
            Numeric::F32 => reduce_best::<f32>(op, sources, bytes, emit),
            Numeric::F64 => reduce_best::<f64>(op, sources, bytes, emit),
        }
    }
}

/// Runs [`reduce`] in the best version for this processor.
///
/// # Safety
///
/// As [`reduce`].
unsafe fn reduce_best<T: Scalar>(
    op: ReduceOp,
    sources: &[*const u8],
    bytes: usize,
    emit: &mut dyn FnMut(usize, &[u8]),
) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, and the caller promises the rest.
        return unsafe { reduce_avx2::<T>(op, sources, bytes, emit) };
    }
    // SAFETY: the caller promises the same.
    unsafe { reduce_plain::<T>(op, sources, bytes, emit) }
}

/// # Safety
///
/// As [`reduce`], on a processor with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn reduce_avx2<T: Scalar>(
    op: ReduceOp,
    sources: &[*const u8],
    bytes: usize,
    emit: &mut dyn FnMut(usize, &[u8]),
) {
    // SAFETY: the caller promises the same.
    unsafe { reduce_plain::<T>(op, sources, bytes, emit) }
}

/// # Safety
///
/// As [`reduce`].
#[inline(always)]
unsafe fn reduce_plain<T: Scalar>(
    op: ReduceOp,
    sources: &[*const u8],
    bytes: usize,
    emit: &mut dyn FnMut(usize, &[u8]),
) {
    let mut sums = [T::Sum::default(); BLOCK];
    let mut result = [T::default(); BLOCK];
    let step = BLOCK * size_of::<T>();
    for offset in (0..bytes).step_by(step) {
        let len = step.min(bytes - offset);
        let elements = len / size_of::<T>();
        let sums = &mut sums[..elements];
        // SAFETY: the caller promises `bytes` bytes at each source, and that none writes there
        // before `emit` does.
        let block = |source: *const u8| unsafe { std::slice::from_raw_parts(source.add(offset), len) };
        let (mut rest, first) = match sources {
            [first, rest @ ..] => (rest, *first),
            [] => return,
        };
        match (rest, T::IS_SUM) {
            // The usual pair, in one pass.
            ([second, more @ ..], true) => {
                T::fold_two(op, sums, block(first), block(*second));
                rest = more;
            }
            _ => T::load(sums, block(first)),
        }
        for source in rest {
            T::fold(op, sums, block(*source));
        }
        if op == ReduceOp::Avg {
            T::divide(sums, sources.len());
        }
        T::store(sums, &mut result[..elements]);
        emit(offset, as_bytes(&result[..elements]));
    }
}

fn as_bytes<T: Element>(elements: &[T]) -> &[u8] {
    // SAFETY: `Element` promises that there is no padding.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

/// An element as it lies in memory, and the type in which it is summed.
trait Scalar: Element + Default {
    /// The type of sums.
    type Sum: Copy + Default;

    /// True if that is the element's own type.
    const IS_SUM: bool;

    fn load(sums: &mut [Self::Sum], source: &[u8]);
    fn fold(op: ReduceOp, sums: &mut [Self::Sum], source: &[u8]);
    fn fold_two(op: ReduceOp, sums: &mut [Self::Sum], first: &[u8], second: &[u8]);
    fn divide(sums: &mut [Self::Sum], by: usize);
    fn store(sums: &[Self::Sum], result: &mut [Self]);
}

macro_rules! scalar {
    ($($type:ty, add $add:expr, mul $mul:expr, min $min:expr, max $max:expr, divide $divide:expr;)*) => {
        $(
            impl Scalar for $type {
                type Sum = Self;

                const IS_SUM: bool = true;

                #[inline(always)]
                fn load(sums: &mut [Self], source: &[u8]) {
                    for (sum, bytes) in sums.iter_mut().zip(source.as_chunks().0) {
                        *sum = Self::from_ne_bytes(*bytes);
                    }
                }

                #[inline(always)]
                fn fold(op: ReduceOp, sums: &mut [Self], source: &[u8]) {
                    #[inline(always)]
                    fn each(sums: &mut [$type], source: &[u8], f: impl Fn($type, $type) -> $type) {
                        for (sum, bytes) in sums.iter_mut().zip(source.as_chunks().0) {
                            *sum = f(*sum, <$type>::from_ne_bytes(*bytes));
                        }
                    }
                    match op {
                        ReduceOp::Sum | ReduceOp::Avg => each(sums, source, $add),
                        ReduceOp::Prod => each(sums, source, $mul),
                        ReduceOp::Min => each(sums, source, $min),
                        ReduceOp::Max => each(sums, source, $max),
                    }
                }

                #[inline(always)]
                fn fold_two(op: ReduceOp, sums: &mut [Self], first: &[u8], second: &[u8]) {
                    #[inline(always)]
                    fn each(sums: &mut [$type], first: &[u8], second: &[u8], f: impl Fn($type, $type) -> $type) {
                        for ((sum, a), b) in sums.iter_mut().zip(first.as_chunks().0).zip(second.as_chunks().0) {
                            *sum = f(<$type>::from_ne_bytes(*a), <$type>::from_ne_bytes(*b));
                        }
                    }
                    match op {
                        ReduceOp::Sum | ReduceOp::Avg => each(sums, first, second, $add),
                        ReduceOp::Prod => each(sums, first, second, $mul),
                        ReduceOp::Min => each(sums, first, second, $min),
                        ReduceOp::Max => each(sums, first, second, $max),
                    }
                }

                #[inline(always)]
                fn divide(sums: &mut [Self], by: usize) {
                    let divide: fn(Self, usize) -> Self = $divide;
                    for sum in sums {
                        *sum = divide(*sum, by);
                    }
                }

                #[inline(always)]
                fn store(sums: &[Self], result: &mut [Self]) {
                    result.copy_from_slice(sums);
                }
            }
        )*
    };
}

macro_rules! integers {
    ($wide:ty: $($type:ty)*) => {
        scalar! {
            $($type, add <$type>::wrapping_add, mul <$type>::wrapping_mul, min Ord::min, max Ord::max,
            // Widened, because the number of ranks may not fit the type.
            divide |sum, by| (<$wide>::from(sum) / by as $wide) as $type;)*
        }
    };
}

integers!(i64: i8 i16 i32 i64);
integers!(u64: u8 u16 u32 u64);

scalar! {
    f32, add |a, b| a + b, mul |a, b| a * b, min |a, b| if a < b || a.is_nan() { a } else { b },
    max |a, b| if a > b || a.is_nan() { a } else { b }, divide |sum, by| sum / by as f32;
    f64, add |a, b| a + b, mul |a, b| a * b, min |a, b| if a < b || a.is_nan() { a } else { b },
    max |a, b| if a > b || a.is_nan() { a } else { b }, divide |sum, by| sum / by as f64;
}

/// A half-precision type is widened a block at a time, and then goes the way of `f32`.
macro_rules! half {
    ($($type:ty, widen $widen:ident, narrow $narrow:ident;)*) => {
        $(
            impl Scalar for $type {
                type Sum = f32;

                const IS_SUM: bool = false;

                #[inline(always)]
                fn load(sums: &mut [f32], source: &[u8]) {
                    $widen(source, sums);
                }

                #[inline(always)]
                fn fold(op: ReduceOp, sums: &mut [f32], source: &[u8]) {
                    let mut wide = [0_f32; BLOCK];
                    let wide = &mut wide[..sums.len()];
                    $widen(source, wide);
                    f32::fold(op, sums, as_bytes(wide));
                }

                #[inline(always)]
                fn fold_two(op: ReduceOp, sums: &mut [f32], first: &[u8], second: &[u8]) {
                    Self::load(sums, first);
                    Self::fold(op, sums, second);
                }

                #[inline(always)]
                fn divide(sums: &mut [f32], by: usize) {
                    f32::divide(sums, by);
                }

                #[inline(always)]
                fn store(sums: &[f32], result: &mut [Self]) {
                    $narrow(sums, result);
                }
            }
        )*
    };
}

half! {
    f16, widen widen_f16, narrow narrow_f16;
    half::bf16, widen widen_bf16, narrow narrow_bf16;
}

/// Converts `float16` to `float32`. `half` has a version for processors with F16C, and looks for it
/// once a slice.
#[inline(always)]
fn widen_f16(source: &[u8], wide: &mut [f32]) {
    let mut bits = [0_u16; BLOCK];
    let bits = &mut bits[..wide.len()];
    for (bits, bytes) in bits.iter_mut().zip(source.as_chunks().0) {
        *bits = u16::from_ne_bytes(*bytes);
    }
    bits.reinterpret_cast::<f16>().convert_to_f32_slice(wide);
}

#[inline(always)]
fn narrow_f16(sums: &[f32], result: &mut [f16]) {
    result.convert_from_f32_slice(sums);
}

#[inline(always)]
fn widen_bf16(source: &[u8], wide: &mut [f32]) {
    for (wide, bytes) in wide.iter_mut().zip(source.as_chunks().0) {
        *wide = f32::from_bits(u32::from(u16::from_ne_bytes(*bytes)) << 16);
    }
}

#[inline(always)]
fn narrow_bf16(sums: &[f32], result: &mut [half::bf16]) {
    for (result, sum) in result.iter_mut().zip(sums) {
        let bits = sum.to_bits();
        // To nearest, ties to even; a NaN stays one, and quiet, whatever its payload.
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let nan = (bits >> 16) | 0x40;
        *result = half::bf16::from_bits(if sum.is_nan() { nan } else { rounded } as u16);
    }
}

/// Copies `len` bytes; with `bypass`, around the caches where the processor can do that: for
/// results so large that they would not stay there anyway.
///
/// # Safety
///
/// As [`ptr::copy_nonoverlapping`].
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize, bypass: bool) {
    #[cfg(target_arch = "x86_64")]
    if bypass && len >= 256 && std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, and the caller promises the rest.
        return unsafe { stream_avx2(from, to, len) };
    }
    _ = bypass;
    // SAFETY: the caller promises it.
    unsafe { ptr::copy_nonoverlapping(from, to, len) }
}

/// # Safety
///
/// As [`ptr::copy_nonoverlapping`], on a processor with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn stream_avx2(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{_mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};

    let head = to.align_offset(64).min(len);
    let lines = (len - head) / 64;
    let tail = head + lines * 64;
    // SAFETY: the three parts make up the `len` bytes, and the middle one begins on a line's
    // boundary in `to`. The fence makes the stores visible before any later one, as ordinary stores
    // are.
    unsafe {
        ptr::copy_nonoverlapping(from, to, head);
        for line in 0..lines {
            let (from, to) = (from.add(head + line * 64), to.add(head + line * 64));
            let (a, b) = (_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast()));
            _mm256_stream_si256(to.cast(), a);
            _mm256_stream_si256(to.add(32).cast(), b);
        }
        ptr::copy_nonoverlapping(from.add(tail), to.add(tail), len - tail);
        _mm_sfence();
    }
}

#[cfg(test)]
mod tests;
