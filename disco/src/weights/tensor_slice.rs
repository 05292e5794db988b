//! Slices of a tensor (a range of each dimension): the positions of their bytes, and reading them
//! where they are not contiguous.

use std::ops::Range;

use rpc_core::{DataType, Result, RpcError};

use super::reshard::byte_runs::ByteRuns;

/// Source of a tensor's bytes, by their offset in it.
pub(super) trait ReadAt {
    /// Fills `out` with the bytes from `at` on, or fails.
    fn read_at(&self, at: u64, out: &mut [u8]) -> Result<()>;
}

/// Length of a contiguous run, in bytes, from which it is read separately.
const LONG: u64 = 64 << 10;

/// Gap between shorter runs, in bytes, up to which they are read together with the bytes between
/// them, which costs less than a read for each.
const GAP: u64 = 16 << 10;

/// Maximum number of bytes of one read: limits the memory for runs that are read together, and the
/// interval of progress.
const PIECE: u64 = 4 << 20;

/// A slice of a tensor: a range of each dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TensorSlice {
    /// Dimensions of the part.
    pub(super) shape: Vec<i64>,
    /// Size in bytes.
    pub(super) size_bytes: u64,
    /// Start of the first run, in bytes from the beginning of the tensor.
    start: u64,
    /// Length of each run in bytes. All runs have the same length, and they follow each other in
    /// the part.
    run: u64,
    /// Number of runs along each of the outer dimensions, and the distance between their starts.
    outer: Vec<(u64, u64)>,
}

impl TensorSlice {
    /// Creates the part that consists of these ranges of the first dimensions, and all of the
    /// others.
    ///
    /// # Errors
    ///
    /// More ranges than dimensions, one beyond its dimension, and a part that begins or ends within
    /// a byte.
    pub(super) fn new(dtype: DataType, shape: &[i64], ranges: &[Range<i64>]) -> Result<Self> {
        if ranges.len() > shape.len() {
            let count = ranges.len();
            return Err(RpcError::invalid_argument(format!("{count} ranges of a tensor of {shape:?}")));
        }
        let range = |dim: usize| ranges.get(dim).cloned().unwrap_or(0..shape[dim]);
        let mut part = Vec::with_capacity(shape.len());
        for (dim, length) in shape.iter().enumerate() {
            let Range { start, end } = range(dim);
            if start < 0 || end < start || end > *length {
                let text = format!("{start}..{end} of dimension {dim} of a tensor of {shape:?}");
                return Err(RpcError::invalid_argument(text));
            }
            part.push(end - start);
        }
        let too_large = || RpcError::invalid_argument(format!("a tensor of {dtype} {shape:?} is too large"));
        let bits_of = |shape: &[i64]| {
            let elements = rpc_core::dlpack::element_count(shape)?;
            elements.checked_mul(dtype.bits_per_element()).ok_or_else(too_large)
        };
        bits_of(shape)?;
        let bits = bits_of(&part)?;
        if bits == 0 {
            return Ok(Self { shape: part, size_bytes: 0, start: 0, run: 0, outer: Vec::new() });
        }
        // No product below is larger than that of the whole shape, which has no dimension of 0.
        // From the innermost dimension outward, a run grows while the part has all of the
        // dimension.
        let (mut stride, mut run, mut start) = (dtype.bits_per_element(), dtype.bits_per_element(), 0);
        let mut outer = Vec::new();
        let mut in_run = true;
        for dim in (0..shape.len()).rev() {
            let (length, Range { start: first, .. }) = (shape[dim] as u64, range(dim));
            start += first as u64 * stride;
            if in_run {
                run *= part[dim] as u64;
                in_run = part[dim] == shape[dim];
            } else {
                outer.push((part[dim] as u64, stride));
            }
            stride *= length;
        }
        outer.reverse();
        let is_whole = |bits: u64| bits.is_multiple_of(8);
        if !(is_whole(start) && is_whole(run) && outer.iter().all(|(_, stride)| is_whole(*stride))) {
            let text = format!("this part of a tensor of {dtype} {shape:?} begins or ends within a byte");
            return Err(RpcError::unsupported(text));
        }
        outer.iter_mut().for_each(|(_, stride)| *stride /= 8);
        Ok(Self { shape: part, size_bytes: bits / 8, start: start / 8, run: run / 8, outer })
    }

    /// Returns the runs of bytes of the part.
    pub(super) fn runs(&self) -> ByteRuns {
        ByteRuns { len: self.size_bytes, start: self.start, run: self.run, outer: self.outer.clone() }
    }

    /// Fills `out` with the bytes of the part from `at` on. Calls `progress` with the number of
    /// bytes of each read.
    pub(super) fn read(
        &self,
        source: &dyn ReadAt,
        mut at: u64,
        mut out: &mut [u8],
        progress: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let mut scratch = Vec::new();
        while !out.is_empty() {
            let wanted = out.len() as u64;
            let (mut run, skipped) = (at / self.run, at % self.run);
            let begin = self.run_start(run) + skipped;
            let mut len = wanted.min(self.run - skipped).min(PIECE);
            let mut end = begin + len;
            while self.run < LONG && len < wanted {
                run += 1;
                let (next, more) = (self.run_start(run), self.run.min(wanted - len));
                if next - end > GAP || next + more - begin > PIECE {
                    break;
                }
                end = next + more;
                len += more;
            }
            let (piece, rest) = out.split_at_mut(len as usize);
            // Contiguous bytes are read directly into `out`.
            if end - begin == len {
                source.read_at(begin, piece)?;
            } else {
                scratch.resize((end - begin) as usize, 0);
                source.read_at(begin, &mut scratch)?;
                self.copy_runs(at, &scratch, piece);
            }
            progress(len);
            at += len;
            out = rest;
        }
        Ok(())
    }

    /// Copies the bytes of the part from `at` on from `read`, which begins with the first of them,
    /// and skips the bytes between runs.
    fn copy_runs(&self, at: u64, read: &[u8], mut out: &mut [u8]) {
        let (mut run, mut skipped) = (at / self.run, at % self.run);
        let begin = self.run_start(run) + skipped;
        while !out.is_empty() {
            let (piece, rest) = out.split_at_mut(out.len().min((self.run - skipped) as usize));
            piece.copy_from_slice(&read[(self.run_start(run) + skipped - begin) as usize..][..piece.len()]);
            (run, skipped, out) = (run + 1, 0, rest);
        }
    }

    /// Returns the start of a run, in bytes from the beginning of the tensor. It grows with the
    /// number of the run.
    fn run_start(&self, run: u64) -> u64 {
        let (mut rest, mut from) = (run, self.start);
        for (count, stride) in self.outer.iter().rev() {
            from += rest % count * stride;
            rest /= count;
        }
        from
    }
}

#[cfg(test)]
mod tests;
