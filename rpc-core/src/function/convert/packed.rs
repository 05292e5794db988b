//! Conversions of `serde` types, as MessagePack.

use std::borrow::Cow;

use serde::{Serialize, de::DeserializeOwned};

use super::{ArgScope, FromArg, FromReply, IntoArg, IntoReturn, Pack, short_name};
use crate::error::Result;
use crate::function::invocation::Arg;
use crate::function::object::LocalValue;
use crate::session::SharedSession;
use crate::value::{Packed, Value};

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
