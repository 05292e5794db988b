//! Layout of a collective's result, and its announcement by the first worker to those that cannot
//! know it.

use rpc_core::{DataType, RpcError, Tensor};

use crate::wire::command::Kind;

/// The bytes of an announced layout: dtype (4), dimensions (4), and 32 times 8 of shape.
pub(super) const HEADER: i64 = 8 + 8 * rpc_core::tensor::MAX_DIMENSIONS as i64;

pub(super) fn write_layout(header: &Tensor, dtype: DataType, shape: &[i64]) -> rpc_core::Result<()> {
    let mut bytes = [0; HEADER as usize];
    bytes[0] = dtype.code.0;
    bytes[1] = dtype.bits;
    bytes[2..4].copy_from_slice(&dtype.lanes.to_le_bytes());
    bytes[4] = shape.len() as u8;
    for (place, dimension) in bytes[8..].chunks_exact_mut(8).zip(shape) {
        place.copy_from_slice(&dimension.to_le_bytes());
    }
    header.write()?.into_parts().1.copy_in(0, &bytes)
}

pub(super) fn read_layout(header: &Tensor) -> rpc_core::Result<(DataType, Vec<i64>)> {
    let mut bytes = [0; HEADER as usize];
    header.read()?.guard().copy_out(0, &mut bytes)?;
    let code = rpc_core::DataTypeCode(bytes[0]);
    let dtype = DataType { code, bits: bytes[1], lanes: u16::from_le_bytes([bytes[2], bytes[3]]) };
    let shape = bytes[8..].chunks_exact(8).take(bytes[4].into());
    let shape = shape.map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap_or_default())).collect();
    Ok((dtype, shape))
}

/// Returns the type and shape of a collective's result, where it makes the destination itself.
/// `None` where it makes none.
pub(super) fn result_layout(kind: Kind, from: &Tensor, size: u32) -> rpc_core::Result<Option<(DataType, Vec<i64>)>> {
    let n = i64::from(size);
    let shape = from.shape();
    let shape = match kind {
        Kind::Allreduce(_) | Kind::Broadcast | Kind::AllToAll => shape.to_vec(),
        Kind::Allgather | Kind::Gather => [&[n], shape].concat(),
        Kind::Scatter | Kind::ReduceScatter(_) => match shape.split_first() {
            Some((first, rest)) if *first == n => rest.to_vec(),
            _ => {
                return Err(RpcError::invalid_argument(format!(
                    "a source of {} {shape:?} among {size} workers: without a destination the first dimension must \
                     be {size}",
                    from.dtype()
                )));
            }
        },
        Kind::Barrier => return Ok(None),
    };
    Ok(Some((from.dtype(), shape)))
}
