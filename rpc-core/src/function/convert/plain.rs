//! Conversions of plain values: types without objects that are the same at both ends.

use std::borrow::Cow;

use bytes::Bytes;

use super::{ArgScope, FromArg, FromReply, IntoArg, IntoReturn, Shape, mismatch};
use crate::dlpack::{DataType, Device};
use crate::error::{Result, RpcError};
use crate::function::invocation::Arg;
use crate::function::object::LocalValue;
use crate::session::{SharedSession, release};
use crate::value::{Packed, Value};

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
