//! Kernel arguments: converts values to the bytes of kernel parameters.

use crate::memory::CudaMemory;
use rpc_core::device::Memory;
use rpc_core::dlpack::DeviceType;
use rpc_core::error::{Result, RpcError};
use rpc_core::function::{LocalValue, Object};
use rpc_core::tensor::Tensor;
use rpc_core::value::Value;

/// Packed parameters of one launch.
///
/// The driver reads as many parameters, and as many bytes of each, as the kernel has. If the driver
/// does not report these numbers itself, the arrays are large enough for any kernel, so that a
/// wrong call reads zeros and not unrelated memory.
pub(super) struct Arguments {
    /// Parameter bytes in words; each parameter begins with a word of its own. Zeros follow.
    words: Vec<u64>,
    /// Index of the word at which each parameter begins.
    starts: Vec<usize>,
}

impl Arguments {
    /// Packs `values` for a kernel with parameters of these sizes in bytes, if they are known.
    /// `are_reported` is true if the driver has reported them.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`](rpc_core::ErrorKind::InvalidArgument), naming the parameter
    /// and the reason.
    pub(super) fn pack(values: &[LocalValue], sizes: Option<&[usize]>, are_reported: bool) -> Result<Self> {
        if let Some(sizes) = sizes
            && sizes.len() != values.len()
        {
            let (wanted, given) = (sizes.len(), values.len());
            return Err(RpcError::invalid_argument(format!("expected {wanted} parameters, got {given}")));
        }
        if values.len() > MAX_PARAMETERS {
            return Err(RpcError::invalid_argument(format!("no kernel takes {} parameters", values.len())));
        }
        let mut packed = Self { words: Vec::new(), starts: Vec::new() };
        for (index, value) in values.iter().enumerate() {
            let bytes = bytes_of(value, sizes.map(|sizes| sizes[index]))
                .map_err(|error| error.context(format_args!("parameter {index}")))?;
            packed.starts.push(packed.words.len());
            packed.words.extend(bytes.chunks(8).map(|part| {
                let mut word = [0; 8];
                word[..part.len()].copy_from_slice(part);
                u64::from_ne_bytes(word)
            }));
        }
        if !are_reported {
            let zeros = packed.words.len();
            packed.words.resize(zeros + MAX_PARAMETER_BYTES / 8, 0);
            packed.starts.resize(MAX_PARAMETERS, zeros);
        }
        Ok(packed)
    }

    /// Returns the addresses of all parameters, as the driver expects them. Valid for as long as
    /// `self` is.
    pub(super) fn pointers(&mut self) -> Vec<*mut std::ffi::c_void> {
        let words = self.words.as_mut_ptr();
        // In bounds, or one past the end for a parameter of no bytes.
        self.starts.iter().map(|start| words.wrapping_add(*start).cast()).collect()
    }
}

/// Returns the bytes of a parameter of `size` bytes.
fn bytes_of(value: &LocalValue, size: Option<usize>) -> Result<Vec<u8>> {
    let wrong = |text: String| Err(RpcError::invalid_argument(text));
    let unfit = |what: &str| match size {
        Some(size) => wrong(format!("{what} does not fit a parameter of {size} bytes")),
        None => Ok(Vec::new()),
    };
    match (value, size) {
        (Value::Object(Object::Tensor(tensor)), None | Some(8)) => Ok(address(tensor)?.to_ne_bytes().into()),
        (Value::Object(Object::Tensor(_)), Some(_)) => unfit("the address of a tensor"),
        (Value::Null, None | Some(8)) => Ok(vec![0; 8]),
        (Value::Int(int), None | Some(8)) => Ok(int.to_ne_bytes().into()),
        (Value::Int(int), Some(size @ (1 | 2 | 4))) => {
            let bits = 8 * size as u32;
            if (-(1_i64 << (bits - 1))..1_i64 << bits).contains(int) {
                // The lowest bytes, for a signed and for an unsigned parameter.
                Ok(int.to_le_bytes()[..size].to_vec())
            } else {
                unfit(&format!("{int}"))
            }
        }
        (Value::Float(_), None) => wrong(
            "the width of a float is not known: the driver, older than CUDA 12.4, does not report it, and the module \
             is no PTX that tells; give the parameter as bytes, 4 for a float and 8 for a double"
                .to_owned(),
        ),
        (Value::Float(float), Some(8)) => Ok(float.to_ne_bytes().into()),
        (Value::Float(float), Some(4)) => Ok((*float as f32).to_ne_bytes().into()),
        (Value::Float(_), Some(2)) => {
            wrong("a parameter of 2 bytes may be half or bfloat16: give its bits as an int".to_owned())
        }
        (Value::Bool(bool), None) => Ok(vec![u8::from(*bool)]),
        (Value::Bool(bool), Some(size @ (1 | 2 | 4 | 8))) => Ok(u64::from(*bool).to_le_bytes()[..size].to_vec()),
        (Value::Bytes(bytes), None) if bytes.len() <= MAX_PARAMETER_BYTES => Ok(bytes.to_vec()),
        (Value::Bytes(bytes), Some(size)) if bytes.len() == size => Ok(bytes.to_vec()),
        (Value::Bytes(bytes), _) => wrong(match size {
            Some(size) => format!("{} bytes were given for a parameter of {size} bytes", bytes.len()),
            None => format!("{} bytes are more than a kernel's parameters can have", bytes.len()),
        }),
        (Value::Null | Value::Int(_) | Value::Float(_) | Value::Bool(_), Some(_)) => unfit(value.type_name()),
        _ => {
            let given = match value {
                Value::Object(object) => object.type_name(),
                other => other.type_name(),
            };
            wrong(format!("expected a tensor, int, float, bool, bytes or null, got {given}"))
        }
    }
}

/// Returns the device address of the first element.
pub(super) fn address(tensor: &Tensor) -> Result<u64> {
    if !tensor.is_dense() {
        return Err(RpcError::invalid_argument(
            "expected a densely packed tensor, since a kernel does not see strides",
        ));
    }
    // Within the storage, as `Tensor` promises.
    let memory = memory(tensor)?;
    Ok(if memory.is_empty() { 0 } else { memory.address(tensor.byte_offset()) })
}

/// Returns the memory of a tensor on a CUDA device.
pub(super) fn memory(tensor: &Tensor) -> Result<&CudaMemory> {
    let memory = tensor.storage().memory().as_any().downcast_ref();
    memory.ok_or_else(|| {
        let (expected, got) = (DeviceType::CUDA, tensor.device());
        RpcError::invalid_argument(format!("expected a tensor on {expected}, got one on {got}"))
    })
}

/// Largest size of all parameters of a kernel together, in bytes, since CUDA 12.1. It was smaller
/// before.
const MAX_PARAMETER_BYTES: usize = 32 << 10;

/// Largest number of parameters: each takes at least one byte.
const MAX_PARAMETERS: usize = MAX_PARAMETER_BYTES;

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(value: LocalValue, size: usize) -> Result<Vec<u8>> {
        bytes_of(&value, Some(size))
    }

    #[test]
    fn numbers_take_the_width_of_the_parameter() {
        assert_eq!(packed(Value::Int(-2), 4).unwrap(), (-2_i32).to_ne_bytes());
        assert_eq!(packed(Value::Int(u32::MAX.into()), 4).unwrap(), [255; 4]);
        assert_eq!(packed(Value::Int(255), 1).unwrap(), [255]);
        assert_eq!(packed(Value::Int(i64::MIN), 8).unwrap(), i64::MIN.to_ne_bytes());
        assert_eq!(packed(Value::Float(0.5), 4).unwrap(), 0.5_f32.to_ne_bytes());
        assert_eq!(packed(Value::Float(0.5), 8).unwrap(), 0.5_f64.to_ne_bytes());
        assert_eq!(packed(Value::Bool(true), 4).unwrap(), 1_u32.to_ne_bytes());
        assert_eq!(packed(Value::Null, 8).unwrap(), [0; 8]);
        assert_eq!(packed(Value::Bytes(vec![7; 24].into()), 24).unwrap(), [7; 24]);
    }

    #[test]
    fn values_that_do_not_fit_are_refused_with_a_reason() {
        for (value, size, text) in [
            (Value::Int(256), 1, "256 does not fit a parameter of 1 bytes"),
            (Value::Int(-129), 1, "-129 does not fit"),
            (Value::Int(1 << 32), 4, "4294967296 does not fit"),
            (Value::Int(1), 16, "int does not fit a parameter of 16 bytes"),
            (Value::Float(1.0), 2, "give its bits as an int"),
            (Value::Null, 4, "null does not fit"),
            (Value::Bytes(vec![7; 23].into()), 24, "23 bytes were given for a parameter of 24 bytes"),
            (Value::from("x"), 8, "got str"),
            (Value::Object(Object::Tensor(Tensor::zeros([1], rpc_core::DataType::F32).unwrap())), 8, "on cpu:0"),
        ] {
            let error = packed(value, size).unwrap_err();
            assert!(error.message().contains(text), "{error}");
        }
    }

    #[test]
    fn a_kernel_of_unknown_parameters_reads_zeros_behind_the_given_ones() {
        let mut arguments = Arguments::pack(&[Value::Int(5), Value::Bool(true)], None, false).unwrap();
        let pointers = arguments.pointers();
        assert_eq!(pointers.len(), MAX_PARAMETERS);
        let end = arguments.words.as_ptr_range().end.addr();
        assert!(pointers.iter().all(|pointer| pointer.addr() + MAX_PARAMETER_BYTES <= end));
        assert_eq!(&arguments.words[..3], &[5, 1, 0]);
        assert!(Arguments::pack(&[Value::Int(5)], Some(&[]), true).is_err());
        // Half of a double would be taken for a float.
        let error = Arguments::pack(&[Value::Float(0.5)], None, false).err().unwrap();
        assert!(error.message().contains("give the parameter as bytes"), "{error}");
    }
}
