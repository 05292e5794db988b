//! Conversions between Rust types and values, at the origin and at the client.

use std::any::Any;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Serialize, de::DeserializeOwned};

use crate::dlpack::{DataType, Device};
use crate::error::{ErrorKind, Result, RpcError};
use crate::function::object::{Arg, Function, LocalValue, Module, Object, Opaque};
use crate::session::{SharedSession, release};
use crate::tensor::{Access, Tensor, TensorView, TensorViewMut};
use crate::value::{Packed, Value};

/// Any `serde` type as an argument or return, as MessagePack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Pack<T>(pub T);

/// An object of a type that the application defines, as an argument or return of a function:
/// shared, and freed when the client drops its reference and no call uses it any more.
#[derive(Debug)]
pub struct Shared<T>(pub Arc<T>);

/// Dimensions of a tensor, as an argument or return.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Shape(pub Vec<i64>);

/// A type that can be a positional parameter of a function.
pub trait FromArg: Sized {
    /// Access of the parameter to a tensor: borrowed for the whole call before it starts, or
    /// `None`.
    const ACCESS: Option<Access> = None;

    /// Returns the name shown in signatures.
    fn type_name() -> Cow<'static, str>;

    /// Converts the argument.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`] if it is of another type or out of range.
    fn from_arg(arg: Arg) -> Result<Self>;

    /// Returns the value of an omitted argument, if it may be omitted.
    fn missing() -> Option<Self> {
        None
    }
}

/// A type that a function can return: values, objects, and `Result`s of them.
pub trait IntoReturn {
    /// Returns the name shown in signatures.
    fn type_name() -> Cow<'static, str>;

    /// Converts the return value.
    ///
    /// # Errors
    ///
    /// Those of the function, or a value that does not fit.
    fn into_return(self) -> Result<LocalValue>;
}

/// The call for which arguments are converted.
pub struct ArgScope<'a> {
    /// Session of the call.
    pub session: &'a SharedSession,
    /// References that the arguments name, kept until the reply, so that none is freed before the
    /// request has arrived.
    pub pins: Vec<Arc<dyn Any + Send + Sync>>,
}

impl fmt::Debug for ArgScope<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ArgScope({} pins)", self.pins.len())
    }
}

/// A type that can be an argument of a call, at the client.
pub trait IntoArg {
    /// Returns the kind of value that the argument becomes, as signatures name it (`int`, `list`,
    /// `tensor`), if it is always the same.
    fn type_kind() -> Option<&'static str> {
        None
    }

    /// Converts the argument for the call of `scope`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidHandle`] for an object of another session.
    fn into_arg(self, scope: &mut ArgScope<'_>) -> Result<Value>;
}

/// A tuple of arguments, at the client.
pub trait IntoArgs {
    /// Returns the [kinds](IntoArg::type_kind) of the arguments, if their number is always the
    /// same.
    fn type_kinds() -> Option<Vec<Option<&'static str>>> {
        None
    }

    /// Converts the arguments for the call of `scope`.
    ///
    /// # Errors
    ///
    /// As [`IntoArg::into_arg`].
    fn into_args(self, scope: &mut ArgScope<'_>) -> Result<Vec<Value>>;
}

/// A type that a reply can be converted to, at the client.
pub trait FromReply: Sized {
    /// Returns the expected kind of value, as signatures name it (`int`, `list`, `tensor`), if
    /// there is only one.
    fn type_kind() -> Option<&'static str> {
        None
    }

    /// Converts the reply of `session`. Objects in it that are not taken are freed.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`] if it is of another type or out of range.
    fn from_reply(value: Value, session: &SharedSession) -> Result<Self>;
}

fn mismatch<O>(expected: &str, value: &Value<O>) -> RpcError {
    RpcError::invalid_argument(format!("expected {expected}, got {}", value.type_name()))
}

/// Types that are the same at both ends: plain values without objects.
macro_rules! plain {
    ($($rust:ty, $name:literal, |$value:ident| $from:expr, |$this:ident| $into:expr;)*) => {
        $(
            impl FromArg for $rust {
                fn type_name() -> Cow<'static, str> {
                    $name.into()
                }

                fn from_arg(arg: Arg) -> Result<Self> {
                    let $value = arg.value;
                    $from
                }
            }

            impl FromReply for $rust {
                fn type_kind() -> Option<&'static str> {
                    Some($name)
                }

                fn from_reply($value: Value, session: &SharedSession) -> Result<Self> {
                    // None of these types holds an object, so one that arrives nevertheless has no
                    // owner.
                    if $value.may_hold_objects() {
                        release(session, &$value);
                    }
                    $from
                }
            }

            impl IntoReturn for $rust {
                fn type_name() -> Cow<'static, str> {
                    $name.into()
                }

                fn into_return(self) -> Result<LocalValue> {
                    let $this = self;
                    $into
                }
            }

            impl IntoArg for $rust {
                fn type_kind() -> Option<&'static str> {
                    Some($name)
                }

                fn into_arg(self, _: &mut ArgScope<'_>) -> Result<Value> {
                    let $this = self;
                    $into
                }
            }
        )*
    };
}

macro_rules! integers {
    ($($rust:ty)*) => {
        plain! {
            $($rust, "int", |value| match value {
                Value::Int(int) => <$rust>::try_from(int).map_err(|_| {
                    RpcError::invalid_argument(format!("{int} is out of range for {}", stringify!($rust)))
                }),
                other => Err(mismatch("int", &other)),
            }, |this| i64::try_from(this).map(Value::Int).map_err(|_| {
                RpcError::invalid_argument(format!("{this} is out of range for int"))
            });)*
        }
    };
}

integers!(i8 i16 i32 i64 isize u8 u16 u32 u64 usize);

plain! {
    (), "null", |value| match value { Value::Null => Ok(()), other => Err(mismatch("null", &other)) },
        |_this| Ok(Value::Null);
    bool, "bool", |value| match value { Value::Bool(bool) => Ok(bool), other => Err(mismatch("bool", &other)) },
        |this| Ok(this.into());
    f64, "float", |value| match value {
            Value::Float(float) => Ok(float),
            Value::Int(int) => Ok(int as f64),
            other => Err(mismatch("float", &other)),
        }, |this| Ok(this.into());
    f32, "float", |value| match value {
            Value::Float(float) => Ok(float as f32),
            Value::Int(int) => Ok(int as f32),
            other => Err(mismatch("float", &other)),
        }, |this| Ok(this.into());
    String, "str", |value| match value { Value::Str(text) => Ok(text), other => Err(mismatch("str", &other)) },
        |this| Ok(this.into());
    Bytes, "bytes", |value| match value { Value::Bytes(bytes) => Ok(bytes), other => Err(mismatch("bytes", &other)) },
        |this| Ok(this.into());
    Shape, "shape", |value| match value {
        Value::Shape(shape) => Ok(Self(shape)),
        other => Err(mismatch("shape", &other)),
    },
        |this| Ok(Value::Shape(this.0));
    DataType, "dtype", |value| match value {
        Value::DataType(dtype) => Ok(dtype),
        other => Err(mismatch("dtype", &other)),
    },
        |this| Ok(this.into());
    Device, "device", |value| match value {
        Value::Device(device) => Ok(device),
        other => Err(mismatch("device", &other)),
    },
        |this| Ok(this.into());
    Packed, "packed", |value| match value {
        Value::Packed(packed) => Ok(packed),
        other => Err(mismatch("packed", &other)),
    },
        |this| Ok(this.into());
}

impl IntoReturn for &'static str {
    fn type_name() -> Cow<'static, str> {
        "str".into()
    }

    fn into_return(self) -> Result<LocalValue> {
        Ok(self.into())
    }
}

impl IntoArg for &str {
    fn type_kind() -> Option<&'static str> {
        Some("str")
    }

    fn into_arg(self, _: &mut ArgScope<'_>) -> Result<Value> {
        Ok(self.into())
    }
}

impl<T: DeserializeOwned> FromArg for Pack<T> {
    fn type_name() -> Cow<'static, str> {
        format!("packed<{}>", short_name::<T>()).into()
    }

    fn from_arg(arg: Arg) -> Result<Self> {
        Packed::from_arg(arg)?.decode().map(Self)
    }
}

impl<T: DeserializeOwned> FromReply for Pack<T> {
    fn type_kind() -> Option<&'static str> {
        Some("packed")
    }

    fn from_reply(value: Value, session: &SharedSession) -> Result<Self> {
        Packed::from_reply(value, session)?.decode().map(Self)
    }
}

impl<T: Serialize> IntoReturn for Pack<T> {
    fn type_name() -> Cow<'static, str> {
        format!("packed<{}>", short_name::<T>()).into()
    }

    fn into_return(self) -> Result<LocalValue> {
        Packed::encode(&self.0).map(Value::Packed)
    }
}

impl<T: Serialize> IntoArg for Pack<T> {
    fn type_kind() -> Option<&'static str> {
        Some("packed")
    }

    fn into_arg(self, _: &mut ArgScope<'_>) -> Result<Value> {
        Packed::encode(&self.0).map(Value::Packed)
    }
}

/// Returns the name of a type without the paths of the types in it.
fn short_name<T>() -> String {
    let mut short = String::new();
    for part in std::any::type_name::<T>().split_inclusive(|c: char| !c.is_alphanumeric() && c != '_') {
        // The name before `path::` is removed, too.
        match part.strip_suffix(':') {
            Some(_) => {}
            None => short.push_str(part),
        }
    }
    short
}

impl<T: FromArg> FromArg for Option<T> {
    const ACCESS: Option<Access> = T::ACCESS;

    fn type_name() -> Cow<'static, str> {
        format!("{}?", T::type_name()).into()
    }

    fn from_arg(arg: Arg) -> Result<Self> {
        if let Value::Null = arg.value { Ok(None) } else { T::from_arg(arg).map(Some) }
    }

    fn missing() -> Option<Self> {
        Some(None)
    }
}

impl<T: FromReply> FromReply for Option<T> {
    fn from_reply(value: Value, session: &SharedSession) -> Result<Self> {
        if let Value::Null = value { Ok(None) } else { T::from_reply(value, session).map(Some) }
    }
}

impl<T: IntoReturn> IntoReturn for Option<T> {
    fn type_name() -> Cow<'static, str> {
        format!("{}?", T::type_name()).into()
    }

    fn into_return(self) -> Result<LocalValue> {
        self.map_or(Ok(Value::Null), T::into_return)
    }
}

impl<T: IntoArg> IntoArg for Option<T> {
    fn into_arg(self, scope: &mut ArgScope<'_>) -> Result<Value> {
        self.map_or(Ok(Value::Null), |value| value.into_arg(scope))
    }
}

impl<T: FromArg> FromArg for Vec<T> {
    fn type_name() -> Cow<'static, str> {
        format!("[{}]", T::type_name()).into()
    }

    fn from_arg(arg: Arg) -> Result<Self> {
        match arg.value {
            Value::List(values) => values
                .into_iter()
                .enumerate()
                .map(|(at, value)| {
                    T::from_arg(Arg { value, borrow: None })
                        .map_err(|error| error.context(format_args!("element {at}")))
                })
                .collect(),
            other => Err(mismatch("list", &other)),
        }
    }
}

impl<T: FromReply> FromReply for Vec<T> {
    fn type_kind() -> Option<&'static str> {
        Some("list")
    }

    fn from_reply(value: Value, session: &SharedSession) -> Result<Self> {
        match value {
            // Every element is converted even after an error, so that all objects are owned and
            // freed.
            Value::List(values) => {
                let converted: Vec<_> = values.into_iter().map(|value| T::from_reply(value, session)).collect();
                converted.into_iter().collect()
            }
            other => {
                let error = mismatch("list", &other);
                release(session, &other);
                Err(error)
            }
        }
    }
}

impl<T: IntoReturn> IntoReturn for Vec<T> {
    fn type_name() -> Cow<'static, str> {
        format!("[{}]", T::type_name()).into()
    }

    fn into_return(self) -> Result<LocalValue> {
        self.into_iter().map(T::into_return).collect::<Result<_>>().map(Value::List)
    }
}

impl<T: IntoArg> IntoArg for Vec<T> {
    fn type_kind() -> Option<&'static str> {
        Some("list")
    }

    fn into_arg(self, scope: &mut ArgScope<'_>) -> Result<Value> {
        self.into_iter().map(|value| value.into_arg(scope)).collect::<Result<_>>().map(Value::List)
    }
}

/// Collects the pairs into a map; a duplicate key is an error.
fn unique<K: Ord, V>(pairs: impl IntoIterator<Item = (K, V)>) -> Result<BTreeMap<K, V>> {
    let mut map = BTreeMap::new();
    for (at, (key, value)) in pairs.into_iter().enumerate() {
        if map.insert(key, value).is_some() {
            return Err(RpcError::invalid_argument(format!("the key of pair {at} is in the map already")));
        }
    }
    Ok(map)
}

impl<K: FromArg + Ord, V: FromArg> FromArg for BTreeMap<K, V> {
    fn type_name() -> Cow<'static, str> {
        format!("{{{}: {}}}", K::type_name(), V::type_name()).into()
    }

    fn from_arg(arg: Arg) -> Result<Self> {
        let Value::Map(pairs) = arg.value else { return Err(mismatch("map", &arg.value)) };
        let convert = |(at, (key, value))| {
            let key = K::from_arg(Arg { value: key, borrow: None })
                .map_err(|error| error.context(format_args!("key of pair {at}")))?;
            let value = V::from_arg(Arg { value, borrow: None })
                .map_err(|error| error.context(format_args!("value of pair {at}")))?;
            Ok((key, value))
        };
        unique(pairs.into_iter().enumerate().map(convert).collect::<Result<Vec<_>>>()?)
    }
}

impl<K: FromReply + Ord, V: FromReply> FromReply for BTreeMap<K, V> {
    fn type_kind() -> Option<&'static str> {
        Some("map")
    }

    fn from_reply(value: Value, session: &SharedSession) -> Result<Self> {
        let Value::Map(pairs) = value else {
            let error = mismatch("map", &value);
            release(session, &value);
            return Err(error);
        };
        // Every key and value is converted even after an error, so that all objects are owned and
        // freed.
        let convert = |(key, value)| (K::from_reply(key, session), V::from_reply(value, session));
        let converted: Vec<_> = pairs.into_iter().map(convert).collect();
        unique(converted.into_iter().map(|(key, value)| Ok((key?, value?))).collect::<Result<Vec<_>>>()?)
    }
}

impl<K: IntoReturn, V: IntoReturn> IntoReturn for BTreeMap<K, V> {
    fn type_name() -> Cow<'static, str> {
        format!("{{{}: {}}}", K::type_name(), V::type_name()).into()
    }

    fn into_return(self) -> Result<LocalValue> {
        let convert = |(key, value): (K, V)| Ok((key.into_return()?, value.into_return()?));
        self.into_iter().map(convert).collect::<Result<_>>().map(Value::Map)
    }
}

impl<K: IntoArg, V: IntoArg> IntoArg for BTreeMap<K, V> {
    fn type_kind() -> Option<&'static str> {
        Some("map")
    }

    fn into_arg(self, scope: &mut ArgScope<'_>) -> Result<Value> {
        let mut convert = |(key, value): (K, V)| Ok((key.into_arg(scope)?, value.into_arg(scope)?));
        self.into_iter().map(&mut convert).collect::<Result<_>>().map(Value::Map)
    }
}

impl FromArg for LocalValue {
    fn type_name() -> Cow<'static, str> {
        "any".into()
    }

    fn from_arg(arg: Arg) -> Result<Self> {
        Ok(arg.value)
    }
}

impl IntoReturn for LocalValue {
    fn type_name() -> Cow<'static, str> {
        "any".into()
    }

    fn into_return(self) -> Result<LocalValue> {
        Ok(self)
    }
}

/// A raw value: its receiver takes over its handles, and frees them with [`release`].
impl FromReply for Value {
    fn from_reply(value: Value, _: &SharedSession) -> Result<Self> {
        Ok(value)
    }
}

impl IntoArg for Value {
    fn into_arg(self, _: &mut ArgScope<'_>) -> Result<Value> {
        Ok(self)
    }
}

impl<T: IntoReturn, E: fmt::Display + 'static> IntoReturn for Result<T, E> {
    fn type_name() -> Cow<'static, str> {
        T::type_name()
    }

    fn into_return(self) -> Result<LocalValue> {
        match self {
            Ok(value) => value.into_return(),
            Err(error) => Err(failure(&error)),
        }
    }
}

/// Converts an error that a function or a closure has returned.
pub(crate) fn failure<E: fmt::Display + 'static>(error: &E) -> RpcError {
    match (error as &dyn Any).downcast_ref::<RpcError>() {
        Some(error) => error.clone(),
        None => {
            RpcError::new(ErrorKind::Application, error.to_string()).with_application_kind(std::any::type_name::<E>())
        }
    }
    .may_have_run(true)
}

macro_rules! objects_in {
    ($($rust:ty, $name:literal, $variant:ident;)*) => {
        $(
            impl FromArg for $rust {
                fn type_name() -> Cow<'static, str> {
                    $name.into()
                }

                fn from_arg(arg: Arg) -> Result<Self> {
                    match arg.value {
                        Value::Object(Object::$variant(object)) => Ok(object),
                        other => Err(mismatch($name, &other)),
                    }
                }
            }

            impl IntoReturn for $rust {
                fn type_name() -> Cow<'static, str> {
                    $name.into()
                }

                fn into_return(self) -> Result<LocalValue> {
                    Ok(Value::Object(Object::$variant(self)))
                }
            }
        )*
    };
}

objects_in! {
    Function, "function", Function;
    Arc<dyn Module>, "module", Module;
    Tensor, "tensor", Tensor;
    Opaque, "object", Opaque;
}

impl<T: Any + Send + Sync> FromArg for Shared<T> {
    fn type_name() -> Cow<'static, str> {
        format!("object<{}>", short_name::<T>()).into()
    }

    fn from_arg(arg: Arg) -> Result<Self> {
        match arg.value {
            Value::Object(Object::Opaque(object)) => object.downcast().map(Self).ok_or_else(|| {
                RpcError::invalid_argument(format!("expected {}, got {}", short_name::<T>(), object.type_name()))
            }),
            other => Err(mismatch(&<Self as FromArg>::type_name(), &other)),
        }
    }
}

impl<T: Any + Send + Sync> IntoReturn for Shared<T> {
    fn type_name() -> Cow<'static, str> {
        format!("object<{}>", short_name::<T>()).into()
    }

    fn into_return(self) -> Result<LocalValue> {
        Ok(Value::Object(Object::Opaque(Opaque::new(self.0))))
    }
}

macro_rules! views {
    ($($rust:ty, $name:literal, $access:ident;)*) => {
        $(impl FromArg for $rust {
            const ACCESS: Option<Access> = Some(Access::$access);

            fn type_name() -> Cow<'static, str> {
                $name.into()
            }

            fn from_arg(arg: Arg) -> Result<Self> {
                match (arg.value, arg.borrow) {
                    (Value::Object(Object::Tensor(tensor)), Some(borrow)) => Self::new(tensor, borrow),
                    (Value::Object(Object::Tensor(_)), None) => {
                        Err(RpcError::internal("a tensor argument was not borrowed before the call"))
                    }
                    (other, _) => Err(mismatch("tensor", &other)),
                }
            }
        })*
    };
}

views! {
    TensorView, "tensor", Read;
    TensorViewMut, "mut tensor", Write;
}

macro_rules! tuples {
    (@args $($item:ident)*) => {
        #[allow(non_snake_case, unused_variables)]
        impl<$($item: IntoArg),*> IntoArgs for ($($item,)*) {
            fn type_kinds() -> Option<Vec<Option<&'static str>>> {
                Some(vec![$($item::type_kind()),*])
            }

            fn into_args(self, scope: &mut ArgScope<'_>) -> Result<Vec<Value>> {
                let ($($item,)*) = self;
                Ok(vec![$($item.into_arg(scope)?),*])
            }
        }
    };
    ($($item:ident)*) => {
        tuples!(@args $($item)*);

        #[allow(non_snake_case)]
        impl<$($item: FromReply),*> FromReply for ($($item,)*) {
            fn type_kind() -> Option<&'static str> {
                Some("list")
            }

            fn from_reply(value: Value, session: &SharedSession) -> Result<Self> {
                const LEN: usize = [$(stringify!($item)),*].len();
                match value {
                    Value::List(values) if values.len() == LEN => {
                        let mut values = values.into_iter();
                        // All are converted before the first error counts, so that all objects are
                        // owned and freed.
                        $(let $item = $item::from_reply(values.next().unwrap_or_default(), session);)*
                        Ok(($($item?,)*))
                    }
                    other => {
                        let error = mismatch(&format!("a list of {LEN}"), &other);
                        release(session, &other);
                        Err(error)
                    }
                }
            }
        }

        #[allow(non_snake_case, unused_variables)]
        impl<$($item: IntoArg),*> IntoArg for ($($item,)*) {
            fn type_kind() -> Option<&'static str> {
                Some("list")
            }

            fn into_arg(self, scope: &mut ArgScope<'_>) -> Result<Value> {
                self.into_args(scope).map(Value::List)
            }
        }

        #[allow(non_snake_case)]
        impl<$($item: IntoReturn),*> IntoReturn for ($($item,)*) {
            fn type_name() -> Cow<'static, str> {
                let names: &[Cow<'static, str>] = &[$($item::type_name()),*];
                format!("({})", names.join(", ")).into()
            }

            fn into_return(self) -> Result<LocalValue> {
                let ($($item,)*) = self;
                Ok(Value::List(vec![$($item.into_return()?),*]))
            }
        }
    };
}

tuples!(@args);
tuples!(A1);
tuples!(A1 A2);
tuples!(A1 A2 A3);
tuples!(A1 A2 A3 A4);
tuples!(A1 A2 A3 A4 A5);
tuples!(A1 A2 A3 A4 A5 A6);
tuples!(A1 A2 A3 A4 A5 A6 A7);
tuples!(A1 A2 A3 A4 A5 A6 A7 A8);
// Kernels take many.
tuples!(@args A1 A2 A3 A4 A5 A6 A7 A8 A9);
tuples!(@args A1 A2 A3 A4 A5 A6 A7 A8 A9 A10);
tuples!(@args A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11);
tuples!(@args A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11 A12);
tuples!(@args A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11 A12 A13);
tuples!(@args A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11 A12 A13 A14);
tuples!(@args A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11 A12 A13 A14 A15);
tuples!(@args A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11 A12 A13 A14 A15 A16);

impl IntoArgs for Vec<Value> {
    fn into_args(self, _: &mut ArgScope<'_>) -> Result<Vec<Value>> {
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_types_come_without_their_paths() {
        assert_eq!(short_name::<i64>(), "i64");
        assert_eq!(short_name::<Vec<String>>(), "Vec<String>");
        assert_eq!(short_name::<(Option<[u8; 4]>, RpcError)>(), "(Option<[u8; 4]>, RpcError)");
    }
}
