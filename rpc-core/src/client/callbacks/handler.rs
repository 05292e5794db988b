//! Closures that can be callbacks, and the conversion of their parameters and returns.

use std::fmt;

use crate::error::{Result, RpcError};
use crate::function::convert::{ArgScope, FromReply, IntoArg, failure};
use crate::session::{SharedSession, release};
use crate::value::Value;

/// A closure that a session can call back: up to eight parameters that are [`FromReply`], and a
/// return that is [`CallbackReturn`].
///
/// Objects among the arguments belong to the closure, and are freed when it drops them. It must
/// [free](crate::session::release) those in a raw [`Value`] itself.
pub trait CallbackHandler<A, R>: Send + Sync + 'static {
    /// Converts the arguments, runs the closure, converts its return for the call of `scope`.
    ///
    /// # Errors
    ///
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for arguments that do not fit, whose
    /// objects are freed; and the errors of the closure.
    fn invoke(&self, args: Vec<Value>, scope: &mut ArgScope<'_>) -> Result<Value>;
}

/// Type that a callback can return: arguments of calls, and `Result`s of them.
///
/// Tensors and functions of the session may be returned by value. The closure must free the objects
/// in a raw [`Value`], once the caller has them.
pub trait CallbackReturn {
    /// Converts the return for the call of `scope`.
    ///
    /// # Errors
    ///
    /// Those of the closure, and [`InvalidHandle`](crate::ErrorKind::InvalidHandle) for an object
    /// of another session.
    fn into_answer(self, scope: &mut ArgScope<'_>) -> Result<Value>;
}

impl<T: IntoArg> CallbackReturn for T {
    fn into_answer(self, scope: &mut ArgScope<'_>) -> Result<Value> {
        self.into_arg(scope)
    }
}

impl<T: IntoArg, E: fmt::Display + 'static> CallbackReturn for Result<T, E> {
    fn into_answer(self, scope: &mut ArgScope<'_>) -> Result<Value> {
        match self {
            Ok(value) => value.into_arg(scope),
            Err(error) => Err(failure(&error)),
        }
    }
}

/// The remaining arguments of a call.
struct Arguments<'a> {
    values: std::iter::Enumerate<std::vec::IntoIter<Value>>,
    session: &'a SharedSession,
}

impl<'a> Arguments<'a> {
    fn new(values: Vec<Value>, wanted: usize, session: &'a SharedSession) -> Result<Self> {
        if values.len() != wanted {
            values.iter().for_each(|value| release(session, value));
            let given = values.len();
            return Err(RpcError::invalid_argument(format!(
                "{given} arguments were given, and the closure takes {wanted}"
            )));
        }
        Ok(Self { values: values.into_iter().enumerate(), session })
    }

    fn take<T: FromReply>(&mut self) -> Result<T> {
        let (index, value) = self.values.next().unwrap_or_default();
        T::from_reply(value, self.session).map_err(|error| error.context(format_args!("argument {index}")))
    }
}

macro_rules! handlers {
    ($($param:ident)*) => {
        #[allow(non_snake_case, unused_mut, unused_variables)]
        impl<Func, Ret, $($param),*> CallbackHandler<($($param,)*), Ret> for Func
        where
            Func: Fn($($param),*) -> Ret + Send + Sync + 'static,
            Ret: CallbackReturn,
            $($param: FromReply,)*
        {
            fn invoke(&self, args: Vec<Value>, scope: &mut ArgScope<'_>) -> Result<Value> {
                const WANTED: usize = { let names: &[&str] = &[$(stringify!($param)),*]; names.len() };
                let mut args = Arguments::new(args, WANTED, scope.session)?;
                // All are converted before the first error counts, so that all objects are owned
                // and freed.
                $(let $param = args.take::<$param>();)*
                self($($param?),*).into_answer(scope)
            }
        }
    };
}

handlers!();
handlers!(A1);
handlers!(A1 A2);
handlers!(A1 A2 A3);
handlers!(A1 A2 A3 A4);
handlers!(A1 A2 A3 A4 A5);
handlers!(A1 A2 A3 A4 A5 A6);
handlers!(A1 A2 A3 A4 A5 A6 A7);
handlers!(A1 A2 A3 A4 A5 A6 A7 A8);
