//! TVM-FFI's C interface: numbers, structs and signatures of `tvm/ffi/c_api.h` and
//! `dlpack/dlpack.h` in ABI 0.1.

use std::ffi::{c_char, c_int, c_void};
use std::slice;

use rpc_core::dlpack::{DataType, DataTypeCode, Device, DeviceType};

/// Version whose ABI this file describes: TVM-FFI increments the second number when it breaks the
/// ABI.
pub(super) const SUPPORTED: (u32, u32) = (0, 1);

/// `TVMFFITypeIndex`: type of an [`Any`]. Values below 64 are stored in it, all others behind a
/// counted pointer.
pub(super) mod type_index {
    pub(crate) const NONE: i32 = 0;
    pub(crate) const INT: i32 = 1;
    pub(crate) const BOOL: i32 = 2;
    pub(crate) const FLOAT: i32 = 3;
    pub(crate) const OPAQUE_POINTER: i32 = 4;
    pub(crate) const DATA_TYPE: i32 = 5;
    pub(crate) const DEVICE: i32 = 6;
    /// A borrowed [`DlTensor`](super::DlTensor), in arguments only.
    pub(crate) const DL_TENSOR: i32 = 7;
    /// A borrowed C string, in arguments only.
    pub(crate) const RAW_STR: i32 = 8;
    /// A borrowed [`ByteArray`](super::ByteArray), in arguments only.
    pub(crate) const BYTE_ARRAY: i32 = 9;
    pub(crate) const SMALL_STR: i32 = 11;
    pub(crate) const SMALL_BYTES: i32 = 12;
    pub(crate) const FIRST_OBJECT: i32 = 64;
    pub(crate) const STR: i32 = 65;
    pub(crate) const BYTES: i32 = 66;
    pub(crate) const FUNCTION: i32 = 68;
    pub(crate) const SHAPE: i32 = 69;
    pub(crate) const TENSOR: i32 = 70;
    pub(crate) const ARRAY: i32 = 71;
    pub(crate) const MAP: i32 = 72;
    pub(crate) const MODULE: i32 = 73;
    pub(crate) const LIST: i32 = 75;
    pub(crate) const DICT: i32 = 76;
}

/// `TVMFFIAny`: one value. Its use decides if it owns a count of its object.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Any {
    pub(super) type_index: i32,
    /// Length of a small string or small bytes; zero in all others.
    pub(super) small_len: u32,
    pub(super) payload: Payload,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) union Payload {
    pub(super) int: i64,
    pub(super) float: f64,
    pub(super) pointer: *mut c_void,
    pub(super) bytes: [u8; 8],
}

impl Any {
    pub(super) const NONE: Self = Self::of(type_index::NONE, Payload { int: 0 });

    const fn of(type_index: i32, payload: Payload) -> Self {
        Self { type_index, small_len: 0, payload }
    }

    pub(super) const fn int(value: i64) -> Self {
        Self::of(type_index::INT, Payload { int: value })
    }

    pub(super) const fn bool(value: bool) -> Self {
        Self::of(type_index::BOOL, Payload { int: value as i64 })
    }

    pub(super) const fn float(value: f64) -> Self {
        Self::of(type_index::FLOAT, Payload { float: value })
    }

    pub(super) fn data_type(value: DataType) -> Self {
        let DataType { code: DataTypeCode(code), bits, lanes } = value;
        let [low, high] = lanes.to_ne_bytes();
        Self::of(type_index::DATA_TYPE, Payload { bytes: [code, bits, low, high, 0, 0, 0, 0] })
    }

    pub(super) fn device(value: Device) -> Self {
        let (kind, index) = (value.kind.0.to_ne_bytes(), value.index.to_ne_bytes());
        let bytes = [kind[0], kind[1], kind[2], kind[3], index[0], index[1], index[2], index[3]];
        Self::of(type_index::DEVICE, Payload { bytes })
    }

    /// Returns a pointer of the type `type_index`.
    pub(super) const fn pointer(type_index: i32, pointer: *mut c_void) -> Self {
        Self::of(type_index, Payload { pointer })
    }

    pub(super) const fn is_object(&self) -> bool {
        self.type_index >= type_index::FIRST_OBJECT
    }
}

pub(super) fn data_type([code, bits, low, high, ..]: [u8; 8]) -> DataType {
    DataType { code: DataTypeCode(code), bits, lanes: u16::from_ne_bytes([low, high]) }
}

pub(super) fn device([k0, k1, k2, k3, i0, i1, i2, i3]: [u8; 8]) -> Device {
    Device::new(DeviceType(i32::from_ne_bytes([k0, k1, k2, k3])), i32::from_ne_bytes([i0, i1, i2, i3]))
}

/// `TVMFFIObject`: header of every object. The contents follow it.
#[repr(C)]
pub(super) struct ObjectHeader {
    pub(super) counts: u64,
    pub(super) type_index: i32,
    pub(super) padding: u32,
    pub(super) deleter: Option<unsafe extern "C" fn(*mut c_void, c_int)>,
}

/// `TVMFFIByteArray`, and contents of a string or bytes object.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ByteArray {
    pub(super) data: *const u8,
    pub(super) size: usize,
}

impl ByteArray {
    pub(super) const fn new(bytes: &[u8]) -> Self {
        Self { data: bytes.as_ptr(), size: bytes.len() }
    }

    /// Converts the bytes to text. Invalid UTF-8 is replaced.
    pub(super) fn text(&self) -> String {
        // SAFETY: the owner of a byte array keeps its data alive.
        String::from_utf8_lossy(unsafe { slice_of(self.data, self.size) }).into_owned()
    }
}

/// Returns the elements at a pointer, which may be null if there are none.
///
/// # Safety
///
/// There are `len` elements at `data`, unless `len` is 0, for as long as `'a`.
pub(super) unsafe fn slice_of<'a, T>(data: *const T, len: usize) -> &'a [T] {
    if len == 0 || data.is_null() {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { slice::from_raw_parts(data, len) }
}

/// `TVMFFIShapeCell`: contents of a shape object.
#[repr(C)]
pub(super) struct ShapeCell {
    pub(super) data: *const i64,
    pub(super) size: usize,
}

/// First fields of all versions of `TVMFFIErrorCell`: contents of an error object.
#[repr(C)]
pub(super) struct ErrorCell {
    pub(super) kind: ByteArray,
    pub(super) message: ByteArray,
    /// Backtrace with the innermost call first.
    pub(super) backtrace: ByteArray,
}

/// `TVMFFIVersion`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Version {
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) patch: u32,
}

/// First fields of `TVMFFITypeInfo`, as far as they are used.
#[repr(C)]
pub(super) struct TypeInfo {
    pub(super) type_index: i32,
    pub(super) type_depth: i32,
    pub(super) type_key: ByteArray,
}

/// `DLTensor`, and contents of a tensor object.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DlTensor {
    pub(super) data: *mut c_void,
    pub(super) device: DlDevice,
    pub(super) ndim: i32,
    pub(super) dtype: DlDataType,
    pub(super) shape: *mut i64,
    /// Strides in elements; null is densely packed.
    pub(super) strides: *mut i64,
    pub(super) byte_offset: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DlDevice {
    pub(super) kind: i32,
    pub(super) index: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DlDataType {
    pub(super) code: u8,
    pub(super) bits: u8,
    pub(super) lanes: u16,
}

impl From<Device> for DlDevice {
    fn from(device: Device) -> Self {
        Self { kind: device.kind.0, index: device.index }
    }
}

impl From<DlDevice> for Device {
    fn from(device: DlDevice) -> Self {
        Self::new(DeviceType(device.kind), device.index)
    }
}

impl From<DataType> for DlDataType {
    fn from(dtype: DataType) -> Self {
        Self { code: dtype.code.0, bits: dtype.bits, lanes: dtype.lanes }
    }
}

impl From<DlDataType> for DataType {
    fn from(dtype: DlDataType) -> Self {
        Self { code: DataTypeCode(dtype.code), bits: dtype.bits, lanes: dtype.lanes }
    }
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
pub(super) struct ManagedTensor {
    /// Major and minor version of DLPack.
    pub(super) version: [u32; 2],
    pub(super) context: *mut c_void,
    pub(super) deleter: Option<unsafe extern "C" fn(*mut Self)>,
    pub(super) flags: u64,
    pub(super) tensor: DlTensor,
}

/// DLPack version of the layout of [`ManagedTensor`].
pub(super) const DLPACK_VERSION: [u32; 2] = [1, 1];

/// `TVMFFISafeCallType`.
pub(super) type SafeCall = unsafe extern "C" fn(*mut c_void, *const Any, i32, *mut Any) -> c_int;

/// Function by which an allocator reports its error: context, kind, message.
pub(super) type SetError = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char);

/// `DLPackManagedTensorAllocator`.
pub(super) type TensorAllocator =
    unsafe extern "C" fn(*mut DlTensor, *mut *mut ManagedTensor, *mut c_void, Option<SetError>) -> c_int;
