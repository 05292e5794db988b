//! Conversion of TVM-FFI's values to values of sessions.
//!
//! This file, `function.rs` and `module.rs` import each other, because these values are recursive
//! by nature: a value may be a function, whose calls return values, or a module, which has
//! functions.

use std::ffi::CStr;
use std::sync::Arc;

use bytes::Bytes;

use super::abi::{self, Any, ByteArray, DlTensor, slice_of, type_index};
use super::api::Api;
use super::object::{self, OpaqueValue, Pointer, Ref};
use super::{function, module, tensor};
use rpc_core::error::{Result, RpcError};
use rpc_core::function::{Context, LocalValue, Object, Opaque};
use rpc_core::value::{MAX_DEPTH, Value};

/// Converts `value` to the session's form. Objects get counts of their own, so that `value` may be
/// dropped.
///
/// # Safety
///
/// `value` is complete, and everything that it refers to is alive.
pub(super) unsafe fn from_any(api: &'static Api, context: &Context, value: &Any) -> Result<LocalValue> {
    // SAFETY: the caller's promise.
    unsafe { Reader { api, context, left: MAX_VALUES }.read(value, MAX_DEPTH) }
}

struct Reader<'a> {
    api: &'static Api,
    context: &'a Context,
    /// Number of values that may still be read.
    left: usize,
}

impl Reader<'_> {
    /// # Safety
    ///
    /// As [`from_any`].
    unsafe fn read(&mut self, value: &Any, depth: usize) -> Result<LocalValue> {
        self.left = self.left.checked_sub(1).ok_or_else(|| too_large("more than a million values"))?;
        // SAFETY (of all below): `value` holds what its index says, by the caller's promise.
        let payload = &value.payload;
        Ok(match value.type_index {
            type_index::NONE => Value::Null,
            // SAFETY: as above.
            type_index::INT => Value::Int(unsafe { payload.int }),
            // SAFETY: as above.
            type_index::BOOL => Value::Bool(unsafe { payload.int } != 0),
            // SAFETY: as above.
            type_index::FLOAT => Value::Float(unsafe { payload.float }),
            // SAFETY: as above.
            type_index::DATA_TYPE => Value::DataType(abi::data_type(unsafe { payload.bytes })),
            // SAFETY: as above.
            type_index::DEVICE => Value::Device(abi::device(unsafe { payload.bytes })),
            // SAFETY: as above.
            type_index::OPAQUE_POINTER => opaque(OpaqueValue::Pointer(Pointer(unsafe { payload.pointer }))),
            type_index::DL_TENSOR => {
                // SAFETY: as above.
                let lent = unsafe { payload.pointer.cast::<DlTensor>().as_ref() };
                let lent = lent.ok_or_else(|| RpcError::invalid_argument("a tensor that is a null pointer"))?;
                // SAFETY: as above.
                Value::Object(Object::Tensor(unsafe { tensor::copy(self.context, lent)? }))
            }
            // SAFETY: as above.
            type_index::RAW_STR => text(unsafe { CStr::from_ptr(payload.pointer.cast()) }.to_bytes()),
            type_index::BYTE_ARRAY => {
                // SAFETY: as above.
                let bytes = unsafe {
                    let array = payload.pointer.cast::<ByteArray>().as_ref();
                    array.map_or(&[][..], |array| slice_of(array.data, array.size))
                };
                Value::Bytes(Bytes::copy_from_slice(bytes))
            }
            type_index::SMALL_STR => text(object::small_bytes(value).unwrap_or_default()),
            type_index::SMALL_BYTES => {
                Value::Bytes(Bytes::copy_from_slice(object::small_bytes(value).unwrap_or_default()))
            }
            _ => {
                // SAFETY: as above.
                let object = unsafe { object::object_in(self.api.bindings, value) };
                let object = object.ok_or_else(|| {
                    RpcError::unsupported(format!("a value of TVM-FFI's type {} cannot be converted", value.type_index))
                })?;
                return self.read_object(object, depth);
            }
        })
    }

    fn read_object(&mut self, object: Ref, depth: usize) -> Result<LocalValue> {
        Ok(match object.type_index() {
            type_index::STR => text(object.byte_array().unwrap_or_default()),
            type_index::BYTES => Value::Bytes(Bytes::from_owner(OwnedBytes(object))),
            type_index::SHAPE => Value::Shape(object.dimensions().unwrap_or_default().to_vec()),
            type_index::TENSOR => Value::Object(Object::Tensor(tensor::take(self.context, object)?)),
            type_index::FUNCTION => Value::Object(Object::Function(function::untyped(self.api, object))),
            type_index::MODULE => {
                Value::Object(Object::Module(Arc::new(module::FfiModule::returned(self.api, object))))
            }
            type_index::ARRAY => self.read_sequence(&object, "ffi.ArraySize", "ffi.ArrayGetItem", depth)?,
            type_index::LIST => self.read_sequence(&object, "ffi.ListSize", "ffi.ListGetItem", depth)?,
            type_index::MAP => self.read_map(&object, "ffi.MapSize", "ffi.MapForwardIterFunctor", depth)?,
            type_index::DICT => self.read_map(&object, "ffi.DictSize", "ffi.DictForwardIterFunctor", depth)?,
            _ => opaque(OpaqueValue::Object(object)),
        })
    }

    fn read_sequence(&mut self, object: &Ref, size: &str, item: &str, depth: usize) -> Result<LocalValue> {
        let depth = depth.checked_sub(1).ok_or_else(|| too_large("nested too deeply"))?;
        let (size, item) = (self.api.global(size)?, self.api.global(item)?);
        let count = self.api.call(&size, &mut [object.as_any()])?.to_int()?;
        let read = |index| {
            let element = self.api.call(&item, &mut [object.as_any(), Any::int(index)])?;
            // SAFETY: it is complete, and alive until it is dropped.
            unsafe { self.read(&element.view(), depth) }
        };
        (0..count).map(read).collect::<Result<_>>().map(Value::List)
    }

    fn read_map(&mut self, object: &Ref, size: &str, pairs: &str, depth: usize) -> Result<LocalValue> {
        const KEY: Any = Any::int(0);
        const VALUE: Any = Any::int(1);
        const NEXT: Any = Any::int(2);

        let depth = depth.checked_sub(1).ok_or_else(|| too_large("nested too deeply"))?;
        let count = self.api.call(&self.api.global(size)?, &mut [object.as_any()])?.to_int()?;
        // An iterator function at one pair: it returns the pair's key and value, and steps to the
        // next one.
        let pair = self.api.call(&self.api.global(pairs)?, &mut [object.as_any()])?.to_object()?;
        let mut read = Vec::new();
        for at in 0..count {
            if at > 0 {
                self.api.call(&pair, &mut [NEXT])?;
            }
            let (key, value) = (self.api.call(&pair, &mut [KEY])?, self.api.call(&pair, &mut [VALUE])?);
            // SAFETY: they are complete, and alive until they are dropped.
            read.push(unsafe { (self.read(&key.view(), depth)?, self.read(&value.view(), depth)?) });
        }
        Ok(Value::Map(read))
    }
}

/// Converts a string of TVM-FFI, which need not be UTF-8: invalid ones become bytes.
fn text(bytes: &[u8]) -> LocalValue {
    match str::from_utf8(bytes) {
        Ok(text) => Value::Str(text.to_owned()),
        Err(_) => Value::Bytes(Bytes::copy_from_slice(bytes)),
    }
}

fn opaque(value: OpaqueValue) -> LocalValue {
    Value::Object(Object::Opaque(Opaque::new(Arc::new(value))))
}

fn too_large(why: &str) -> RpcError {
    RpcError::invalid_argument(format!("the value is too large for a session: {why}"))
}

/// A bytes object whose contents are shared.
struct OwnedBytes(Ref);

impl AsRef<[u8]> for OwnedBytes {
    fn as_ref(&self) -> &[u8] {
        self.0.byte_array().unwrap_or_default()
    }
}

/// Largest number of values in a message.
const MAX_VALUES: usize = 1 << 20;
