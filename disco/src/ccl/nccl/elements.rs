//! Element types and reductions, by NCCL's numbers.

use std::ffi::c_int;

use rpc_core::{DataType, DataTypeCode, RpcError};

use super::Library;
use crate::ccl::{Collective, ReduceOp};

/// `ncclUint8`.
const BYTE: c_int = 1;
/// `ncclFloat8e4m3` and `ncclFloat8e5m2`, from 2.24 on.
const E4M3: c_int = 10;
const E5M2: c_int = 11;

/// Major compute capability from which on NCCL reduces 8-bit floats: Hopper.
const FLOAT8_CAPABILITY: u32 = 9;

/// Type and number of elements for a call of NCCL. Several of them may make up one element of the
/// collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Elements {
    pub(super) dtype: c_int,
    pub(super) count: usize,
    /// Size of each in bytes.
    pub(super) width: usize,
}

impl Elements {
    /// Returns the elements of `collective`, whose smaller side has `bytes` bytes. Data that is not
    /// reduced is moved as bytes.
    ///
    /// # Errors
    ///
    /// [`rpc_core::ErrorKind::Unsupported`]: the library does not reduce that type, or not on such
    /// a device.
    pub(super) fn of(
        collective: &Collective,
        bytes: usize,
        library: &Library,
        capability: Option<(u32, u32)>,
    ) -> Result<Self, RpcError> {
        if collective.operation.reduce_op().is_none() {
            return Ok(Self { dtype: BYTE, count: bytes, width: 1 });
        }
        let lane = DataType { lanes: 1, ..collective.dtype };
        let Some(dtype) = code(lane) else {
            return Err(RpcError::unsupported(format!("{collective}: NCCL does not reduce {lane}")));
        };
        if matches!(dtype, E4M3 | E5M2) {
            library.needs(format_args!("{collective}"), 2, 24)?;
            if let Some((major, minor)) = capability.filter(|(major, _)| *major < FLOAT8_CAPABILITY) {
                return Err(RpcError::unsupported(format!(
                    "{collective}: NCCL reduces {lane} on devices of compute capability {FLOAT8_CAPABILITY}.0 and \
                     up, and this one has {major}.{minor}"
                )));
            }
        }
        let width = usize::from(lane.bits / 8);
        Ok(Self { dtype, count: bytes / width, width })
    }

    pub(super) fn bytes(self) -> usize {
        self.count * self.width
    }
}

/// Returns the `ncclDataType_t` of a type; `None` if NCCL does not have it. `ncclFloat8e4m3` is the
/// variant without infinities.
fn code(lane: DataType) -> Option<c_int> {
    Some(match lane {
        DataType::I8 => 0,
        DataType::U8 => BYTE,
        DataType::I32 => 2,
        DataType::U32 => 3,
        DataType::I64 => 4,
        DataType::U64 => 5,
        DataType::F16 => 6,
        DataType::F32 => 7,
        DataType::F64 => 8,
        DataType::BF16 => 9,
        DataType { code: DataTypeCode::FLOAT8_E4M3FN, bits: 8, .. } => E4M3,
        DataType { code: DataTypeCode::FLOAT8_E5M2, bits: 8, .. } => E5M2,
        _ => return None,
    })
}

/// Returns the `ncclRedOp_t` of a reduction.
pub(super) fn reduction(op: ReduceOp) -> c_int {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Prod => 1,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
        ReduceOp::Avg => 4,
    }
}
