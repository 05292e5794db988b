//! Arguments of foreign functions: converts values of sessions to values of TVM-FFI.

use std::ffi::CString;

use bytes::Bytes;

use super::abi::{Any, ByteArray, type_index};
use super::api::Api;
use super::object::{OpaqueValue, OwnedAny, Ref};
use super::signature::ArgForm;
use super::tensor::{self, BorrowedTensor};
use rpc_core::error::{Result, RpcError};
use rpc_core::function::{Context, LocalValue, Object};
use rpc_core::value::Value;

/// Arguments of one call, with the data that they borrow.
pub(super) struct Arguments {
    values: Vec<Any>,
    _lent: Vec<LentData>,
}

/// Data behind an argument, until the call has returned.
enum LentData {
    Value(#[expect(dead_code, reason = "its count is given back on drop")] OwnedAny),
    Tensor(#[expect(dead_code, reason = "foreign code points to it")] Box<BorrowedTensor>),
    Text(#[expect(dead_code, reason = "foreign code points to it")] CString),
    Bytes(
        #[expect(dead_code, reason = "foreign code points to it")] Box<ByteArray>,
        #[expect(dead_code, reason = "as above")] Bytes,
    ),
}

impl Arguments {
    /// Converts the arguments of a call. `forms` is the form of each parameter, as far as it is
    /// known.
    ///
    /// # Errors
    ///
    /// A value without a counterpart in TVM-FFI.
    pub(super) fn new(
        api: &'static Api,
        context: &Context,
        values: Vec<LocalValue>,
        forms: &[ArgForm],
    ) -> Result<Self> {
        let (mut passed, mut lent) = (Vec::with_capacity(values.len()), Vec::new());
        for (index, value) in values.into_iter().enumerate() {
            let form = forms.get(index).copied().unwrap_or_default();
            let (value, keep) =
                lend(api, context, value, form).map_err(|error| error.context(format_args!("argument {index}")))?;
            passed.push(value);
            lent.extend(keep);
        }
        Ok(Self { values: passed, _lent: lent })
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [Any] {
        &mut self.values
    }
}

/// Converts an argument in the cheapest form: tensors and bytes are borrowed without a copy.
fn lend(api: &'static Api, context: &Context, value: LocalValue, form: ArgForm) -> Result<(Any, Option<LentData>)> {
    Ok(match value {
        Value::Object(Object::Tensor(tensor)) if form != ArgForm::TensorObject => {
            let lent = BorrowedTensor::new(&tensor)?;
            (Any::pointer(type_index::DL_TENSOR, lent.pointer()), Some(LentData::Tensor(lent)))
        }
        Value::Str(text) if form == ArgForm::CString => {
            let text = CString::new(text)
                .map_err(|_| RpcError::invalid_argument("the function takes a C string, which cannot contain NUL"))?;
            (Any::pointer(type_index::RAW_STR, text.as_ptr().cast_mut().cast()), Some(LentData::Text(text)))
        }
        Value::Bytes(bytes) => {
            let array = Box::new(ByteArray::new(&bytes));
            let pointer = (&raw const *array).cast_mut().cast();
            (Any::pointer(type_index::BYTE_ARRAY, pointer), Some(LentData::Bytes(array, bytes)))
        }
        value => {
            let value = to_owned(api, context, value)?;
            let view = value.view();
            (view, view.is_object().then_some(LentData::Value(value)))
        }
    })
}

/// Converts a value to one that foreign code may keep.
///
/// # Errors
///
/// As [`Arguments::new`].
pub(super) fn to_owned(api: &'static Api, context: &Context, value: LocalValue) -> Result<OwnedAny> {
    let plain = |value| Ok(OwnedAny::plain(api.bindings, value));
    match value {
        Value::Null => plain(Any::NONE),
        Value::Bool(value) => plain(Any::bool(value)),
        Value::Int(value) => plain(Any::int(value)),
        Value::Float(value) => plain(Any::float(value)),
        Value::DataType(value) => plain(Any::data_type(value)),
        Value::Device(value) => plain(Any::device(value)),
        Value::Str(text) => api.text(&text),
        Value::Bytes(bytes) => api.bytes(&bytes),
        Value::Shape(dimensions) => api.shape(&dimensions),
        Value::List(values) => {
            let values: Vec<_> =
                values.into_iter().map(|value| to_owned(api, context, value)).collect::<Result<_>>()?;
            api.array(&values)
        }
        Value::Map(pairs) => {
            let values = pairs.into_iter().flat_map(|(key, value)| [key, value]);
            let values: Vec<_> = values.map(|value| to_owned(api, context, value)).collect::<Result<_>>()?;
            api.map(&values)
        }
        Value::Object(Object::Tensor(tensor)) => Ok(tensor::share(api, &tensor)?.into_any()),
        Value::Object(Object::Function(function)) => match function.origin::<Ref>() {
            Some(object) => Ok(object.clone().into_any()),
            None => Ok(api.create_callback(context, function)?.into_any()),
        },
        Value::Object(Object::Module(module)) => {
            let object = module.as_any().and_then(|object| object.downcast_ref::<Ref>());
            let object = object.ok_or_else(|| {
                RpcError::invalid_argument("the module is not a TVM-FFI module and cannot be passed to its functions")
            })?;
            Ok(object.clone().into_any())
        }
        Value::Object(Object::Opaque(opaque)) => {
            let held = opaque.downcast::<OpaqueValue>().ok_or_else(|| {
                let name = opaque.type_name();
                RpcError::invalid_argument(format!("an object of type {name} cannot be passed to TVM-FFI"))
            })?;
            Ok(held.to_owned_any(api.bindings))
        }
        Value::Packed(_) => Err(RpcError::invalid_argument(
            "packed values cannot be passed to TVM-FFI: pass numbers, strings, lists or maps",
        )),
        other => Err(RpcError::invalid_argument(format!(
            "a value of type {} cannot be passed to TVM-FFI",
            other.type_name()
        ))),
    }
}
