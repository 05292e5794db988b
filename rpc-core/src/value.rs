//! Values: arguments, return values and object references that cross a session.

use std::fmt;

use bytes::Bytes;
use serde::{Serialize, de::DeserializeOwned};

use crate::dlpack::{DataType, Device};
use crate::error::{Result, RpcError};
use crate::handle::Handle;
use crate::msgpack::unpack;

pub use crate::msgpack::MAX_DEPTH;

/// An argument or a return value.
///
/// `O` represents an object that lives in a session: a [`Reference`], by handle, on the wire and at
/// the client; the [`Object`](crate::function::object::Object) itself at the origin. All other
/// variants are the same at both ends.
#[derive(Clone, Debug, PartialEq, Default)]
#[non_exhaustive]
pub enum Value<O = Reference> {
    /// No value.
    #[default]
    Null,
    /// A truth value.
    Bool(bool),
    /// A signed integer.
    Int(i64),
    /// A floating-point number.
    Float(f64),
    /// Text. It may contain NUL.
    Str(String),
    /// Bytes, shared and never copied on the way.
    Bytes(Bytes),
    /// Dimensions of a tensor.
    Shape(Vec<i64>),
    /// A data type.
    DataType(DataType),
    /// A device.
    Device(Device),
    /// A list of values, which may contain objects.
    List(Vec<Self>),
    /// Pairs of a key and its value, in an order that is kept. Keys and values may be of any type,
    /// objects included. Duplicate keys are passed on unchecked.
    Map(Vec<(Self, Self)>),
    /// Any `serde` type, as MessagePack. It cannot contain objects.
    Packed(Packed),
    /// An object that lives in the session.
    Object(O),
}

/// Reference to an object by its handle, as used on the wire and by the client.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Reference {
    /// A function.
    Function(Handle),
    /// A module.
    Module(Handle),
    /// An object of a type that the application defines.
    Object(Handle),
    /// The whole result of an earlier request of the same lane, of any type, which the session
    /// keeps under the handle ([`PipeId`](crate::handle::PipeId)). Only in arguments: the session
    /// puts the result in its place when the call begins.
    Pipe(Handle),
    /// A tensor, or a view of one. In a box, so that values, most of which are numbers, stay small.
    Tensor(Box<TensorRef>),
}

impl Reference {
    /// Returns the handle that keeps the object alive.
    pub fn handle(&self) -> Handle {
        match self {
            Self::Function(handle) | Self::Module(handle) | Self::Object(handle) | Self::Pipe(handle) => *handle,
            Self::Tensor(tensor) => tensor.storage,
        }
    }
}

/// Reference to a tensor: the handle of its storage and the layout of the view. The counterpart of
/// DLPack's `DLTensor`.
///
/// The layout is the sender's claim; the origin checks it against the storage before any access.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorRef {
    /// Storage that the view is a part of.
    pub storage: Handle,
    /// Offset of the first element, in bytes from the start of the storage.
    pub byte_offset: u64,
    /// Dimensions, outermost first; empty for a scalar.
    pub shape: Vec<i64>,
    /// Distance between neighbours in each dimension, in elements; `None` is densely packed,
    /// row-major.
    pub strides: Option<Vec<i64>>,
    /// Type of the elements.
    pub dtype: DataType,
    /// Device that holds the storage.
    pub device: Device,
}

impl TensorRef {
    /// Returns the size in bytes of the elements when densely packed, which is the size of a copy.
    ///
    /// # Errors
    ///
    /// A dimension is negative, or the size overflows.
    pub fn size_bytes(&self) -> Result<u64> {
        crate::dlpack::dense_size(&self.shape, self.dtype)
    }

    /// Returns the memory in bytes that the reference takes in a box.
    pub(crate) fn boxed_bytes(&self) -> usize {
        size_of::<Self>() + size_of::<i64>() * (self.shape.capacity() + self.strides.as_ref().map_or(0, Vec::capacity))
    }
}

/// A `serde` value as MessagePack, for Rust structs as arguments and returns. Fields are written by
/// name.
#[derive(Clone, PartialEq, Eq)]
pub struct Packed(Bytes);

impl Packed {
    /// Encodes `value`.
    ///
    /// # Errors
    ///
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if `value` cannot be serialized.
    pub fn encode<T: Serialize + ?Sized>(value: &T) -> Result<Self> {
        rmp_serde::to_vec_named(value)
            .map(|bytes| Self(bytes.into()))
            .map_err(|error| RpcError::invalid_argument(format!("cannot pack the value: {error}")))
    }

    /// Decodes the value.
    ///
    /// # Errors
    ///
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if the bytes do not decode to a `T`.
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T> {
        unpack(&self.0).map_err(|error| RpcError::invalid_argument(format!("cannot unpack the value: {error}")))
    }

    /// Wraps bytes from a peer without checking them; [`decode`](Self::decode) fails if they are
    /// malformed.
    pub fn from_bytes(bytes: Bytes) -> Self {
        Self(bytes)
    }

    /// Returns the MessagePack bytes.
    pub fn as_bytes(&self) -> &Bytes {
        &self.0
    }
}

impl fmt::Debug for Packed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Packed({} bytes)", self.0.len())
    }
}

impl<O> Value<O> {
    /// Returns the name of the value's type, as error messages use it.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Str(_) => "str",
            Self::Bytes(_) => "bytes",
            Self::Shape(_) => "shape",
            Self::DataType(_) => "dtype",
            Self::Device(_) => "device",
            Self::List(_) => "list",
            Self::Map(_) => "map",
            Self::Packed(_) => "packed",
            Self::Object(_) => "object",
        }
    }

    /// Replaces every object with the result of `replace`, and leaves the rest as it is.
    ///
    /// # Errors
    ///
    /// The first error of `replace`.
    pub fn try_map<P, E>(self, replace: &mut impl FnMut(O) -> Result<P, E>) -> Result<Value<P>, E> {
        Ok(match self {
            Self::Null => Value::Null,
            Self::Bool(value) => Value::Bool(value),
            Self::Int(value) => Value::Int(value),
            Self::Float(value) => Value::Float(value),
            Self::Str(value) => Value::Str(value),
            Self::Bytes(value) => Value::Bytes(value),
            Self::Shape(value) => Value::Shape(value),
            Self::DataType(value) => Value::DataType(value),
            Self::Device(value) => Value::Device(value),
            Self::Packed(value) => Value::Packed(value),
            Self::List(values) => {
                Value::List(values.into_iter().map(|value| value.try_map(replace)).collect::<Result<_, E>>()?)
            }
            Self::Map(pairs) => {
                let pairs = pairs.into_iter().map(|(key, value)| Ok((key.try_map(replace)?, value.try_map(replace)?)));
                Value::Map(pairs.collect::<Result<_, E>>()?)
            }
            Self::Object(object) => Value::Object(replace(object)?),
        })
    }

    /// Converts a value that [cannot contain objects](Self::may_hold_objects).
    ///
    /// # Errors
    ///
    /// It contains one.
    pub(crate) fn map_plain<P>(self) -> Result<Value<P>> {
        self.try_map(&mut |_| Err(RpcError::internal("a plain value held an object")))
    }

    /// Returns the number of lists and maps that are nested in the value.
    pub(crate) fn depth(&self) -> usize {
        match self {
            Self::List(values) => 1 + values.iter().map(Self::depth).max().unwrap_or(0),
            Self::Map(pairs) => 1 + pairs.iter().map(|(key, value)| key.depth().max(value.depth())).max().unwrap_or(0),
            _ => 0,
        }
    }

    /// Returns true if a value of this type can contain objects; other values need no search.
    pub fn may_hold_objects(&self) -> bool {
        matches!(self, Self::Object(_) | Self::List(_) | Self::Map(_))
    }

    /// Calls `visit` with every object in the value.
    pub fn for_each_object(&self, visit: &mut impl FnMut(&O)) {
        match self {
            Self::List(values) => values.iter().for_each(|value| value.for_each_object(visit)),
            Self::Map(pairs) => pairs.iter().for_each(|(key, value)| {
                key.for_each_object(visit);
                value.for_each_object(visit);
            }),
            Self::Object(object) => visit(object),
            _ => {}
        }
    }

    /// Returns the size like [`Value::size_hint`]. `of_object` returns the heap memory of an object
    /// in bytes.
    pub fn size_with(&self, of_object: &impl Fn(&O) -> usize) -> usize {
        size_of::<Self>() + self.heap_bytes(of_object)
    }

    /// Returns the heap memory of the value in bytes.
    fn heap_bytes(&self, of_object: &impl Fn(&O) -> usize) -> usize {
        match self {
            Self::Str(text) => text.capacity(),
            Self::Bytes(bytes) => bytes.len(),
            Self::Packed(packed) => packed.0.len(),
            Self::Shape(shape) => size_of::<i64>() * shape.capacity(),
            Self::List(values) => {
                let nested = values.iter().map(|value| value.heap_bytes(of_object));
                size_of::<Self>() * values.capacity() + nested.sum::<usize>()
            }
            Self::Map(pairs) => {
                let nested = pairs.iter().map(|(key, value)| key.heap_bytes(of_object) + value.heap_bytes(of_object));
                size_of::<(Self, Self)>() * pairs.capacity() + nested.sum::<usize>()
            }
            Self::Object(object) => of_object(object),
            Self::Null | Self::Bool(_) | Self::Int(_) | Self::Float(_) | Self::DataType(_) | Self::Device(_) => 0,
        }
    }
}

impl Value {
    /// Returns the memory in bytes that the value occupies, including its content: the size that
    /// queues count. It differs much from the length of the encoded value: a list of nulls takes
    /// forty times as much.
    ///
    /// Shared bytes count in full, even if others share them.
    pub fn size_hint(&self) -> usize {
        self.size_with(&|reference| match reference {
            Reference::Tensor(tensor) => tensor.boxed_bytes(),
            _ => 0,
        })
    }

    /// Returns the handles of all objects in the value, which must be freed if no caller takes it.
    pub fn handles(&self) -> Vec<Handle> {
        let mut handles = Vec::new();
        self.for_each_object(&mut |object| handles.push(object.handle()));
        handles
    }
}

macro_rules! from {
    ($($rust:ty => $variant:ident,)*) => {
        $(impl<O> From<$rust> for Value<O> {
            fn from(value: $rust) -> Self {
                Self::$variant(value.into())
            }
        })*
    };
}

from! {
    bool => Bool,
    i8 => Int, i16 => Int, i32 => Int, i64 => Int, u8 => Int, u16 => Int, u32 => Int,
    f32 => Float, f64 => Float,
    &str => Str, String => Str,
    Bytes => Bytes,
    DataType => DataType,
    Device => Device,
    Packed => Packed,
}

impl<O> From<()> for Value<O> {
    fn from((): ()) -> Self {
        Self::Null
    }
}

impl<O, T: Into<Self>> From<Option<T>> for Value<O> {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

impl<O> From<Vec<Self>> for Value<O> {
    fn from(values: Vec<Self>) -> Self {
        Self::List(values)
    }
}

impl<O> From<Vec<(Self, Self)>> for Value<O> {
    fn from(pairs: Vec<(Self, Self)>) -> Self {
        Self::Map(pairs)
    }
}

impl From<Reference> for Value {
    fn from(reference: Reference) -> Self {
        Self::Object(reference)
    }
}

impl From<TensorRef> for Value {
    fn from(tensor: TensorRef) -> Self {
        Self::Object(Reference::Tensor(tensor.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A list of a million nulls is 1 MB on the wire and 80 MB in memory. An earlier version
    /// counted it as 9 MB.
    #[test]
    fn sizes_are_those_of_memory() {
        let element = size_of::<Value>();
        assert_eq!(Value::Null.size_hint(), element);
        assert_eq!(Value::List(vec![Value::Null; 1_000_000]).size_hint(), 1_000_001 * element);
        assert_eq!(Value::Shape(vec![1; 1000]).size_hint(), 8000 + element);
        assert_eq!(Value::from("x".repeat(1000)).size_hint(), 1000 + element);
        let nested = Value::List(vec![Value::List(vec![Value::Bytes(Bytes::from_static(&[0; 100]))])]);
        assert_eq!(nested.size_hint(), 3 * element + 100);
        let map = |pairs| Value::Map(vec![(Value::from("key"), Value::List(vec![Value::Null])); pairs]);
        assert_eq!(map(1000).size_hint(), 1000 * (3 * element + 3) + element);
        // A list may have more capacity than elements.
        let mut roomy = Vec::with_capacity(100);
        roomy.push(Value::Null);
        assert_eq!(Value::List(roomy).size_hint(), 101 * element);
        let tensor = TensorRef {
            storage: Handle::from_bits(0),
            byte_offset: 0,
            shape: vec![1; 64],
            strides: Some(vec![1; 64]),
            dtype: DataType::F32,
            device: Device::cpu(),
        };
        assert_eq!(Value::from(tensor).size_hint(), element + size_of::<TensorRef>() + 1024);
    }

    #[test]
    fn objects_are_found_in_keys_and_in_values() {
        let object = |bits| Value::Object(Reference::Object(Handle::from_bits(bits)));
        let pairs =
            vec![(object(1), Value::List(vec![object(2)])), (Value::Null, Value::Map(vec![(object(3), 4.into())]))];
        let map = Value::Map(pairs);
        assert!(map.may_hold_objects());
        assert_eq!(map.handles(), [1, 2, 3].map(Handle::from_bits));
        let kept: Value<u64> = map.clone().try_map(&mut |object| Ok::<_, ()>(object.handle().to_bits())).unwrap();
        let mut found = Vec::new();
        kept.for_each_object(&mut |bits| found.push(*bits));
        assert_eq!(found, [1, 2, 3]);
        let refused: Result<Value<()>, _> = map.try_map(&mut |object| match object.handle().to_bits() {
            3 => Err("no"),
            _ => Ok(()),
        });
        assert_eq!(refused, Err("no"));
    }
}
