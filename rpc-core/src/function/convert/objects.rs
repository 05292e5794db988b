//! Conversions of functions, modules, tensors and the application's own objects, at the origin.

use std::any::Any;
use std::borrow::Cow;
use std::sync::Arc;

use super::{FromArg, IntoReturn, Shared, mismatch, short_name};
use crate::error::{Result, RpcError};
use crate::function::function::Function;
use crate::function::invocation::Arg;
use crate::function::object::{LocalValue, Module, Object, Opaque};
use crate::tensor::{Access, Tensor, TensorView, TensorViewMut};
use crate::value::Value;

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
