//! Conversions between Rust types and values, at the origin and at the client: the traits, and the
//! types that have no counterpart in Rust.

mod containers;
mod objects;
mod packed;
mod plain;
mod raw;
mod tuples;

use std::any::Any;
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use crate::error::{ErrorKind, Result, RpcError};
use crate::function::invocation::Arg;
use crate::function::object::LocalValue;
use crate::session::SharedSession;
use crate::tensor::Access;
use crate::value::Value;

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

/// Returns the error for a value of another type.
fn mismatch<O>(expected: &str, value: &Value<O>) -> RpcError {
    RpcError::invalid_argument(format!("expected {expected}, got {}", value.type_name()))
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
    .returned_by_function()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_run_unless_the_function_itself_says_that_it_had_no_effect() {
        let refused = RpcError::new(ErrorKind::Refused, "no");
        let of_function = failure(&refused.clone().without_effect());
        assert!(failure(&refused).request_may_have_run() && !of_function.request_may_have_run());
        assert_eq!(of_function, refused);
        let passed_on = failure(&of_function);
        assert!(passed_on.request_may_have_run());
    }

    #[test]
    fn names_of_types_come_without_their_paths() {
        assert_eq!(short_name::<i64>(), "i64");
        assert_eq!(short_name::<Vec<String>>(), "Vec<String>");
        assert_eq!(short_name::<(Option<[u8; 4]>, RpcError)>(), "(Option<[u8; 4]>, RpcError)");
    }
}
