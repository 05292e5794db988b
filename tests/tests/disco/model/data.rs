//! Tensors of programs: their elements, and the reduction of these.

use disco::ReduceOp;
use rpc_core::{DataType, Tensor};

/// Elements of a tensor: `float32` or `int64`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Data {
    F32(Vec<f32>),
    I64(Vec<i64>),
}

impl Data {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::F32(data) => data.len(),
            Self::I64(data) => data.len(),
        }
    }

    pub(crate) fn zeros(&self, len: usize) -> Self {
        match self {
            Self::F32(_) => Self::F32(vec![0.0; len]),
            Self::I64(_) => Self::I64(vec![0; len]),
        }
    }

    pub(crate) fn same_type(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }

    pub(crate) fn slice(&self, from: usize, len: usize) -> Self {
        match self {
            Self::F32(data) => Self::F32(data[from..from + len].to_vec()),
            Self::I64(data) => Self::I64(data[from..from + len].to_vec()),
        }
    }

    pub(crate) fn concat(parts: &[Self]) -> Self {
        let mut all = parts[0].zeros(0);
        for part in parts {
            match (&mut all, part) {
                (Self::F32(all), Self::F32(part)) => all.extend(part),
                (Self::I64(all), Self::I64(part)) => all.extend(part),
                _ => panic!("parts of two types"),
            }
        }
        all
    }

    /// Returns the reduction of several ranks' data, in the order of ranks.
    pub(crate) fn reduce(parts: &[Self], op: ReduceOp) -> Self {
        let n = parts.len();
        match &parts[0] {
            Self::F32(first) => Self::F32(
                (0..first.len())
                    .map(|i| {
                        let each = parts.iter().map(|part| if let Self::F32(data) = part { data[i] } else { panic!() });
                        let folded = each.reduce(|a, b| fold_f32(op, a, b)).unwrap();
                        if op == ReduceOp::Avg { folded / n as f32 } else { folded }
                    })
                    .collect(),
            ),
            Self::I64(first) => Self::I64(
                (0..first.len())
                    .map(|i| {
                        let each = parts.iter().map(|part| if let Self::I64(data) = part { data[i] } else { panic!() });
                        let folded = each.reduce(|a, b| fold_i64(op, a, b)).unwrap();
                        if op == ReduceOp::Avg { folded.wrapping_div(n as i64) } else { folded }
                    })
                    .collect(),
            ),
        }
    }

    pub(crate) fn tensor(&self, shape: &[i64]) -> Tensor {
        match self {
            Self::F32(data) => Tensor::from_slice(shape, data),
            Self::I64(data) => Tensor::from_slice(shape, data),
        }
        .unwrap()
    }

    /// Returns a form that can be compared: one NaN is like another.
    pub(crate) fn bits(&self) -> Vec<u64> {
        match self {
            Self::F32(data) => {
                data.iter().map(|x| if x.is_nan() { u64::MAX } else { u64::from(x.to_bits()) }).collect()
            }
            Self::I64(data) => data.iter().map(|x| *x as u64).collect(),
        }
    }
}

pub(crate) fn fold_f32(op: ReduceOp, a: f32, b: f32) -> f32 {
    match op {
        ReduceOp::Prod => a * b,
        // Of two zeros the one of the higher rank counts as the smaller and the larger.
        ReduceOp::Min | ReduceOp::Max if a.is_nan() || b.is_nan() => f32::NAN,
        ReduceOp::Min => {
            if b <= a {
                b
            } else {
                a
            }
        }
        ReduceOp::Max => {
            if b >= a {
                b
            } else {
                a
            }
        }
        _ => a + b,
    }
}

pub(crate) fn fold_i64(op: ReduceOp, a: i64, b: i64) -> i64 {
    match op {
        ReduceOp::Prod => a.wrapping_mul(b),
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
        _ => a.wrapping_add(b),
    }
}

/// Elements of a new tensor.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) float: bool,
    pub(crate) shape: Vec<i64>,
}

impl Layout {
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product::<i64>() as usize
    }

    pub(crate) fn dtype(&self) -> DataType {
        if self.float { DataType::F32 } else { DataType::I64 }
    }

    /// Returns elements that follow from a seed.
    pub(crate) fn data(&self, seed: u32) -> Data {
        let element = |i: usize| i64::from(seed.wrapping_mul(31).wrapping_add(i as u32 * 17) % 23) - 9;
        match self.float {
            true => Data::F32((0..self.len()).map(|i| element(i) as f32 * 0.5).collect()),
            false => Data::I64((0..self.len()).map(element).collect()),
        }
    }

    pub(crate) fn zeros(&self) -> Data {
        if self.float { Data::F32(vec![0.0; self.len()]) } else { Data::I64(vec![0; self.len()]) }
    }
}
