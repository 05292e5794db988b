//! Rust types that are elements of tensors, and their conversion to bytes and back.

use crate::dlpack::data_type::DataType;

/// A Rust type that can be the element of a tensor.
///
/// # Safety
///
/// Every bit pattern must be a value of the type, and it must have no padding, so that a tensor's
/// bytes can be seen as a slice of it; `DATA_TYPE` must describe its size.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// DLPack type of the element.
    const DATA_TYPE: DataType;
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident,)*) => {
        $(
            // SAFETY: a plain number without padding, for which every bit pattern is a value.
            unsafe impl Element for $rust {
                const DATA_TYPE: DataType = DataType::$dtype;
            }
        )*
    };
}

elements! {
    i8 => I8, i16 => I16, i32 => I32, i64 => I64,
    u8 => U8, u16 => U16, u32 => U32, u64 => U64,
    half::f16 => F16, half::bf16 => BF16, f32 => F32, f64 => F64,
}

/// Copies the elements to bytes in the machine's byte order.
pub fn to_bytes<T: Element>(elements: &[T]) -> bytes::Bytes {
    let len = size_of_val(elements);
    // SAFETY: `Element` promises that its types have no padding, so that all bytes are initialised.
    let bytes = unsafe { std::slice::from_raw_parts(elements.as_ptr().cast::<u8>(), len) };
    bytes::Bytes::copy_from_slice(bytes)
}

/// Copies bytes in the machine's byte order to elements. Bytes at the end that form no whole
/// element are ignored.
pub fn from_bytes<T: Element>(bytes: &[u8]) -> Vec<T> {
    let len = bytes.len() / size_of::<T>().max(1);
    let mut elements = Vec::<T>::with_capacity(len);
    // SAFETY: the vector has room for `len` elements, which are at most `bytes.len()` bytes; the
    // two do not overlap; and `Element` promises that every bit pattern is a value.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), elements.as_mut_ptr().cast::<u8>(), len * size_of::<T>());
        elements.set_len(len);
    }
    elements
}
