//! Functions made of closures: their parameters are taken from the call and converted, and so is
//! what they return.
//!
//! ```
//! use rpc_core::{Context, Registry};
//!
//! let registry = Registry::new();
//! registry.add("add", |a: i64, b: i64| a + b);
//! registry.add_inline("answer", || 42_i64);
//! registry.add("parse", |text: String| text.parse::<i64>());
//! registry.add("patient", |context: Context| context.is_cancelled());
//! assert_eq!(registry.get("add").unwrap().signature().to_string(), "(int, int) -> int");
//! ```

use std::any::Any;
use std::borrow::Cow;
use std::future::Future;
use std::sync::Arc;

use crate::error::Result;
use crate::function::context::Context;
use crate::function::convert::{FromArg, IntoReturn};
use crate::function::function::{Body, BoxFuture, Function, FunctionKind, Signature};
use crate::function::invocation::Invocation;
use crate::function::object::LocalValue;
use crate::tensor::{Access, Borrow};

impl Function {
    /// Wraps a function that may block: the usual kind.
    pub fn blocking<A, R>(handler: impl Handler<A, R>) -> Self {
        Self::direct(FunctionKind::Blocking, handler)
    }

    /// Wraps a function that runs on the thread that reads requests, and promises not to block.
    pub fn inline<A, R>(handler: impl Handler<A, R>) -> Self {
        Self::direct(FunctionKind::Inline, handler)
    }

    /// Wraps a function that returns a future.
    pub fn asynchronous<A, R>(handler: impl AsyncHandler<A, R>) -> Self {
        let (signature, access) = handler.describe();
        let body = Body::Async(Box::new(move |invocation| handler.start(invocation)));
        Self::from_parts(FunctionKind::Async, signature, access, body)
    }

    /// Wraps a blocking function over any number of arguments of any type. Tensors among them are
    /// not borrowed: see [`Tensor::read`](crate::tensor::Tensor::read).
    pub fn dynamic(
        signature: Signature,
        body: impl Fn(&Context, Vec<LocalValue>) -> Result<LocalValue> + Send + Sync + 'static,
    ) -> Self {
        let body = Body::Direct(Box::new(move |invocation| {
            let values = invocation.args.by_ref().collect();
            body(&invocation.context, values)
        }));
        Self::from_parts(FunctionKind::Blocking, signature, Vec::new(), body)
    }

    /// Wraps a function like [`dynamic`](Self::dynamic). Before each call every tensor among the
    /// arguments, in lists and maps too, is borrowed for writing: for foreign code, whose accesses
    /// are not known. A storage that is given several times is borrowed once. `body` gets the
    /// borrows beside the arguments; dropping them ends them.
    pub fn dynamic_exclusive(
        signature: Signature,
        body: impl Fn(&Context, Vec<LocalValue>, Vec<Borrow>) -> Result<LocalValue> + Send + Sync + 'static,
    ) -> Self {
        Self::foreign(FunctionKind::Blocking, signature, None, body)
    }

    /// Wraps foreign code like [`dynamic_exclusive`](Self::dynamic_exclusive), with its kind (any
    /// but [`FunctionKind::Async`]) and the foreign object that it was [made from](Self::origin),
    /// by which a bridge recognises its own functions when they come back as arguments.
    pub fn foreign(
        kind: FunctionKind,
        signature: Signature,
        origin: Option<Arc<dyn Any + Send + Sync>>,
        body: impl Fn(&Context, Vec<LocalValue>, Vec<Borrow>) -> Result<LocalValue> + Send + Sync + 'static,
    ) -> Self {
        let body = Body::Direct(Box::new(move |invocation| {
            let (values, borrows) = invocation.take_all();
            body(&invocation.context, values, borrows)
        }));
        Self::exclusive(kind, signature, origin, body)
    }

    /// Wraps foreign code like [`foreign`](Self::foreign) that runs as a future: `body` starts it,
    /// must not block, and gives the borrows to the future.
    pub fn foreign_asynchronous(
        signature: Signature,
        origin: Option<Arc<dyn Any + Send + Sync>>,
        body: impl Fn(&Context, Vec<LocalValue>, Vec<Borrow>) -> BoxFuture + Send + Sync + 'static,
    ) -> Self {
        let body = Body::Async(Box::new(move |invocation| {
            let (values, borrows) = invocation.take_all();
            Ok(body(&invocation.context, values, borrows))
        }));
        Self::exclusive(FunctionKind::Async, signature, origin, body)
    }

    fn direct<A, R>(kind: FunctionKind, handler: impl Handler<A, R>) -> Self {
        let (signature, access) = handler.describe();
        let body = Body::Direct(Box::new(move |invocation| handler.invoke(invocation)));
        Self::from_parts(kind, signature, access, body)
    }
}

/// Source of a function's parameter: an argument, or the call itself.
///
/// Implemented for [`Context`] and for every [`FromArg`].
pub trait FromCall: Sized {
    /// Returns the type's name and its access to a tensor, if it is a positional parameter.
    fn describe() -> Option<(Cow<'static, str>, Option<Access>)>;

    /// Creates the parameter.
    ///
    /// # Errors
    ///
    /// A missing argument, or one that is not convertible.
    fn from_call(invocation: &mut Invocation) -> Result<Self>;
}

impl FromCall for Context {
    fn describe() -> Option<(Cow<'static, str>, Option<Access>)> {
        None
    }

    fn from_call(invocation: &mut Invocation) -> Result<Self> {
        Ok(invocation.context.clone())
    }
}

impl<T: FromArg> FromCall for T {
    fn describe() -> Option<(Cow<'static, str>, Option<Access>)> {
        Some((T::type_name(), T::ACCESS))
    }

    fn from_call(invocation: &mut Invocation) -> Result<Self> {
        invocation.take(T::from_arg, T::missing, T::type_name)
    }
}

/// All remaining arguments, of any type. Tensors among them are not borrowed.
#[derive(Debug)]
pub struct Rest(pub Vec<LocalValue>);

impl FromCall for Rest {
    fn describe() -> Option<(Cow<'static, str>, Option<Access>)> {
        Some(("...".into(), None))
    }

    fn from_call(invocation: &mut Invocation) -> Result<Self> {
        Ok(Self(invocation.args.by_ref().collect()))
    }
}

/// A closure that can serve calls: up to eight parameters that are [`FromCall`], and a return that
/// is [`IntoReturn`].
pub trait Handler<A, R>: Send + Sync + 'static {
    /// Returns the signature, and the access of each positional parameter to a tensor.
    fn describe(&self) -> (Signature, Vec<Option<Access>>);

    /// Converts the arguments, runs the closure, converts its return.
    ///
    /// # Errors
    ///
    /// Those of the conversions and of the closure.
    fn invoke(&self, invocation: &mut Invocation) -> Result<LocalValue>;
}

/// A [`Handler`] for closures that return a future.
pub trait AsyncHandler<A, R>: Send + Sync + 'static {
    /// Returns the signature, and the access of each positional parameter to a tensor.
    fn describe(&self) -> (Signature, Vec<Option<Access>>);

    /// Converts the arguments and creates the future.
    ///
    /// # Errors
    ///
    /// Those of the conversions.
    fn start(&self, invocation: &mut Invocation) -> Result<BoxFuture>;
}

fn describe<R: IntoReturn>(
    params: impl IntoIterator<Item = Option<(Cow<'static, str>, Option<Access>)>>,
) -> (Signature, Vec<Option<Access>>) {
    let (params, access) = params.into_iter().flatten().unzip();
    (Signature { params, returns: R::type_name() }, access)
}

macro_rules! handlers {
    ($($param:ident)*) => {
        #[allow(non_snake_case)]
        impl<Func, Ret, $($param),*> Handler<($($param,)*), Ret> for Func
        where
            Func: Fn($($param),*) -> Ret + Send + Sync + 'static,
            Ret: IntoReturn,
            $($param: FromCall,)*
        {
            fn describe(&self) -> (Signature, Vec<Option<Access>>) {
                describe::<Ret>([$($param::describe()),*])
            }

            fn invoke(&self, invocation: &mut Invocation) -> Result<LocalValue> {
                $(let $param = $param::from_call(invocation)?;)*
                invocation.finish()?;
                self($($param),*).into_return()
            }
        }

        #[allow(non_snake_case)]
        impl<Func, Fut, $($param),*> AsyncHandler<($($param,)*), Fut> for Func
        where
            Func: Fn($($param),*) -> Fut + Send + Sync + 'static,
            Fut: Future + Send + 'static,
            Fut::Output: IntoReturn,
            $($param: FromCall,)*
        {
            fn describe(&self) -> (Signature, Vec<Option<Access>>) {
                describe::<Fut::Output>([$($param::describe()),*])
            }

            fn start(&self, invocation: &mut Invocation) -> Result<BoxFuture> {
                $(let $param = $param::from_call(invocation)?;)*
                invocation.finish()?;
                let future = self($($param),*);
                Ok(Box::pin(async move { future.await.into_return() }))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DataType, Device, LocalSession, Registry, RemoteTensor, Session, Value};

    #[test]
    fn foreign_code_has_each_storage_once_and_for_writing() {
        let registry = Registry::new();
        let signature = Signature { params: vec!["...".into()], returns: "int".into() };
        let foreign = Function::dynamic_exclusive(signature, |_, values, borrows| {
            assert!(values.len() >= 2);
            assert!(borrows.iter().all(|borrow| borrow.access() == Access::Write));
            Ok(Value::Int(borrows.len() as i64))
        });
        registry.add_function("foreign", foreign);
        let session = Session::new(LocalSession::new(registry));
        let new = || session.alloc(Device::cpu(), DataType::F32, &[2]).wait().unwrap();
        let (x, y) = (new(), new());
        let foreign = session.get_function("foreign").wait().unwrap();
        assert_eq!(foreign.call::<i64>((&x, 1, &y, &x)).wait().unwrap(), 2);
        // In lists and maps, too.
        let value = |tensor: &RemoteTensor| Value::from(tensor.reference_in(session.shared()).unwrap());
        let nested =
            Value::List(vec![value(&x), Value::Map(vec![(value(&y), Value::List(vec![value(&x), value(&y)]))])]);
        assert_eq!(foreign.call::<i64>((nested, &x)).wait().unwrap(), 2);
        // The borrows end with the call.
        assert_eq!(foreign.call::<i64>((&x, &x, &x, &x)).wait().unwrap(), 1);
    }

    #[test]
    fn an_asynchronous_function_of_foreign_code_keeps_its_borrows_until_its_future_is_done() {
        let registry = Registry::new();
        let signature = Signature { params: vec!["...".into()], returns: "int".into() };
        let origin: Arc<dyn Any + Send + Sync> = Arc::new("origin");
        let foreign = Function::foreign_asynchronous(signature, Some(origin), |_, values, borrows| {
            Box::pin(async move {
                let Some(Value::Object(crate::function::Object::Tensor(tensor))) = values.first() else {
                    return Err(crate::RpcError::invalid_argument("expected a tensor"));
                };
                let is_exclusive = tensor.read().is_err();
                Ok(Value::Int(borrows.len() as i64 + i64::from(is_exclusive)))
            })
        });
        assert_eq!((foreign.kind(), foreign.origin::<&str>()), (FunctionKind::Async, Some(&"origin")));
        registry.add_function("foreign", foreign);
        let session = Session::new(LocalSession::new(registry));
        let x = session.alloc(Device::cpu(), DataType::F32, &[2]).wait().unwrap();
        let foreign = session.get_function("foreign").wait().unwrap();
        for _ in 0..2 {
            assert_eq!(foreign.call::<i64>((&x, &x)).wait().unwrap(), 2);
        }
    }
}
