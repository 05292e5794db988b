//! Products of matrices.

use std::ffi::c_int;

use crate::cublas::{Cublas, Product};
use crate::stream::CudaStream;
use crate::{arguments, stream_order};
use rpc_core::device::Stream;
use rpc_core::dlpack::DataType;
use rpc_core::error::{Result, RpcError};
use rpc_core::tensor::{Tensor, TensorView, TensorViewMut};

/// Sets `out` to the product of `a` and `b`, by cuBLAS: shapes `[m, k]`, `[k, n]` and `[m, n]`, all
/// of `float32`, `float16` or `bfloat16`, densely packed, on one CUDA device. Sums are in single
/// precision.
///
/// The product is submitted to `stream`, or to the device's default one if that is `None`. The
/// function returns at once, or, if one of the three tensors lies in pinned memory, when it is
/// done. The first call takes longer, since it loads the library: the one that the environment
/// variable `RPC_CUDA_BLAS_LIBRARY` names by its path, or else the newest `libcublas.so` of the
/// system that the driver supports, or that of a Python environment (`VIRTUAL_ENV`,
/// `CONDA_PREFIX`), for example from `pip install nvidia-cublas-cu12`.
///
/// # Errors
///
/// [`ErrorKind::InvalidArgument`](rpc_core::ErrorKind::InvalidArgument), naming the tensor and the
/// reason; [`ErrorKind::Unsupported`](rpc_core::ErrorKind::Unsupported) if cuBLAS is not installed;
/// and errors of the device.
pub fn matmul(a: &TensorView, b: &TensorView, out: &mut TensorViewMut, stream: Option<&CudaStream>) -> Result<()> {
    let (a, b, out) = (a.tensor(), b.tensor(), out.tensor());
    let named = [("a", a), ("b", b), ("out", out)];
    let [[rows, depth], [b_rows, columns], out_shape] = [shape(named[0])?, shape(named[1])?, shape(named[2])?];
    if b_rows != depth || out_shape != [rows, columns] {
        let (a, b, out) = (a.shape(), b.shape(), out.shape());
        return Err(RpcError::invalid_argument(format!("the product of shapes {a:?} and {b:?} has no shape {out:?}")));
    }
    let data_type = data_type(a.dtype())?;
    let opened = arguments::memory(a).map_err(|error| error.context("a"))?.gpu();
    let gpu = opened.context.gpu;
    if let Some(stream) = stream.filter(|stream| !std::ptr::eq(stream.gpu(), gpu)) {
        let (on, other) = (gpu.as_device(), stream.device());
        return Err(RpcError::invalid_argument(format!("the matrices are on {on}, but the stream belongs to {other}")));
    }
    let mut memories = Vec::with_capacity(named.len());
    for (name, tensor) in named {
        let memory = arguments::memory(tensor).map_err(|error| error.context(name))?;
        memories.push(memory);
        let device = memory.device();
        if device != gpu.as_device() || tensor.dtype() != a.dtype() {
            let (dtype, wanted, on) = (tensor.dtype(), a.dtype(), gpu.as_device());
            let message = format!("{name} is of {dtype} on {device}, but a is of {wanted} on {on}");
            return Err(RpcError::invalid_argument(message));
        }
    }
    let cublas = Cublas::get(gpu.driver)?;
    let element = u64::from(a.dtype().bits) / 8;
    let address = |(name, tensor)| {
        let address = arguments::address(tensor).map_err(|error: RpcError| error.context(name))?;
        // A misaligned address would trap in cuBLAS.
        if address.is_multiple_of(element) {
            return Ok(address);
        }
        let text = format!("{name} does not begin at a multiple of its element size, {element} bytes");
        Err(RpcError::invalid_argument(text))
    };
    let [a_address, b_address, out_address] = [address(named[0])?, address(named[1])?, address(named[2])?];
    if rows == 0 || columns == 0 {
        return gpu.check_not_lost();
    }
    opened.enter()?;
    let stream = stream.unwrap_or(&opened.default_stream);
    stream_order::in_order(opened, stream, &memories, || {
        if depth == 0 {
            let bytes = out.size_bytes() as usize;
            // SAFETY: the tensor's own bytes, which are borrowed for writing.
            return gpu.check(unsafe { gpu.driver.memset_async(out_address, 0, bytes, stream.handle().0) });
        }
        let product = Product { rows, columns, depth, data_type, a: a_address, b: b_address, out: out_address };
        // SAFETY: the tensors have these shapes and lie within their memories. They are borrowed,
        // and their next users' work runs behind this on the stream.
        unsafe { cublas.submit(opened, stream, &product) }
    })
}

fn shape((name, tensor): (&str, &Tensor)) -> Result<[c_int; 2]> {
    let number = |size: &i64| c_int::try_from(*size).ok();
    match tensor.shape() {
        [rows, columns] => number(rows).zip(number(columns)).map(|(rows, columns)| [rows, columns]),
        _ => None,
    }
    .ok_or_else(|| {
        let shape = tensor.shape();
        let text = format!("expected {name} to be a matrix with sides below 2147483648, got shape {shape:?}");
        RpcError::invalid_argument(text)
    })
}

/// Returns the `cudaDataType` of a type.
fn data_type(dtype: DataType) -> Result<c_int> {
    match dtype {
        DataType::F32 => Ok(0),
        DataType::F16 => Ok(2),
        DataType::BF16 => Ok(14),
        other => Err(RpcError::unsupported(format!("products are of float32, float16 or bfloat16, not of {other}"))),
    }
}
