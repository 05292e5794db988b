//! Values that are passed as they are.

use std::borrow::Cow;

use super::{ArgScope, FromArg, FromReply, IntoArg, IntoReturn};
use crate::error::Result;
use crate::function::invocation::Arg;
use crate::function::object::LocalValue;
use crate::session::SharedSession;
use crate::value::Value;

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

/// A raw value: its receiver takes over its handles, and frees them with
/// [`release`](crate::session::release).
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
