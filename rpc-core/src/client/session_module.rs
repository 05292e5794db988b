//! [`SessionModule`]: another session as a module of this one, so that a session is a value that
//! functions take and return.
//!
//! The functions of the module are those of the session inside, found by their names when they are
//! asked for. Plain values pass both ways. What lives in the session inside stays there: a tensor
//! or object that one of its functions returns is an object here, which may be an argument of its
//! functions again; a function is a function, and a module a module, whose calls go there. Objects
//! of this session are refused as arguments: copy them first.

use std::any::Any;
use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use crate::client::references::{RemoteFunction, RemoteModule, RemoteObject, RemoteTensor};
use crate::client::session::Session;
use crate::error::{Result, RpcError};
use crate::function::convert::{ArgScope, FromArg, FromReply, IntoArg, IntoArgs, IntoReturn};
use crate::function::function::{Function, Signature};
use crate::function::invocation::Arg;
use crate::function::object::{LocalValue, Module, Object, Opaque};
use crate::value::{Reference, Value};

/// A module whose functions are those of a session.
///
/// As a parameter of a function, [`Session`] takes such a module, and as a return it makes one:
///
/// ```
/// use rpc_core::{LocalSession, Registry, RemoteModule, Session};
///
/// let far = Registry::new();
/// far.add("add", |a: i64, b: i64| a + b);
/// let near = Registry::new();
/// near.add("connect", move || Session::new(LocalSession::new(far.clone())));
///
/// let session = Session::new(LocalSession::new(near));
/// let module: RemoteModule = session.get_function("connect").wait()?.call(()).wait()?;
/// let add = module.function("add").wait()?;
/// assert_eq!(add.call::<i64>((40, 2)).wait()?, 42);
/// # Ok::<(), rpc_core::RpcError>(())
/// ```
#[derive(Debug)]
pub struct SessionModule(Session);

/// Longest time of a look-up, which occupies a thread of the session outside.
const LOOKUP_LIMIT: Duration = Duration::from_secs(30);

impl SessionModule {
    /// Creates a module of the functions of `session`.
    pub fn new(session: Session) -> Self {
        Self(session)
    }

    /// Returns the session inside.
    pub fn session(&self) -> &Session {
        &self.0
    }

    /// Returns the session of a module, if that was made of one.
    pub fn session_of(module: &dyn Module) -> Option<&Session> {
        module.as_any()?.downcast_ref().map(Self::session)
    }
}

impl Module for SessionModule {
    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn name(&self) -> &'static str {
        "session"
    }

    fn function(&self, name: &str) -> Result<Function> {
        Ok(local_function(self.0.get_function(name).concurrent().timeout(LOOKUP_LIMIT).wait()?).named(name))
    }

    /// Returns none: the functions of a session are found by name.
    fn functions(&self) -> Vec<(String, Signature)> {
        Vec::new()
    }
}

/// A module of the session inside.
struct InnerModule(RemoteModule);

impl Module for InnerModule {
    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn name(&self) -> &'static str {
        "module of another session"
    }

    fn function(&self, name: &str) -> Result<Function> {
        Ok(local_function(self.0.function(name).concurrent().timeout(LOOKUP_LIMIT).wait()?).named(name))
    }

    fn functions(&self) -> Vec<(String, Signature)> {
        Vec::new()
    }
}

/// Returns a function of this session that calls one of another session.
fn local_function(function: RemoteFunction) -> Function {
    let signature = Signature { params: vec!["...".into()], returns: "any".into() };
    let origin = Arc::new(function.clone());
    Function::foreign_asynchronous(signature, Some(origin), move |context, args, borrows| {
        // Tensors of this session are refused below.
        drop(borrows);
        let (function, deadline) = (function.clone(), context.deadline());
        Box::pin(async move {
            let call = function.call::<Value>(Outward(args)).concurrent();
            let call = if let Some(deadline) = deadline { call.deadline(deadline) } else { call };
            inward(call.await?, &function.session())
        })
    })
}

/// Arguments on their way to the session inside.
struct Outward(Vec<LocalValue>);

impl IntoArgs for Outward {
    fn into_args(self, scope: &mut ArgScope<'_>) -> Result<Vec<Value>> {
        self.0.into_iter().map(|arg| arg.try_map(&mut |object| outward(&object, scope))).collect()
    }
}

/// Returns the reference that an object of this session stands for in the session inside.
fn outward(object: &Object, scope: &mut ArgScope<'_>) -> Result<Reference> {
    let value = match object {
        Object::Function(function) => function.origin::<RemoteFunction>().map(|inner| inner.into_arg(scope)),
        Object::Module(module) => {
            let inner = module.as_any().and_then(|module| module.downcast_ref::<InnerModule>());
            inner.map(|inner| (&inner.0).into_arg(scope))
        }
        Object::Opaque(opaque) => match (opaque.downcast::<RemoteTensor>(), opaque.downcast::<RemoteObject>()) {
            (Some(inner), _) => Some((&*inner).into_arg(scope)),
            (_, Some(inner)) => Some((&*inner).into_arg(scope)),
            _ => None,
        },
        Object::Tensor(_) => None,
    };
    match value.transpose()? {
        Some(Value::Object(reference)) => Ok(reference),
        _ => {
            let what = object.type_name();
            let text = format!("a function of another session takes its own objects only, and this {what} is none");
            Err(RpcError::invalid_argument(text))
        }
    }
}

/// Returns a result of the session inside with its objects as objects of this session.
fn inward(value: Value, session: &Session) -> Result<LocalValue> {
    value.try_map(&mut |reference| {
        let shared = session.shared();
        let taken = Value::Object(reference.clone());
        Ok(match reference {
            Reference::Function(_) => Object::Function(local_function(RemoteFunction::from_reply(taken, shared)?)),
            Reference::Module(_) => Object::Module(Arc::new(InnerModule(RemoteModule::from_reply(taken, shared)?))),
            Reference::Tensor(_) => Object::Opaque(Opaque::new(Arc::new(RemoteTensor::from_reply(taken, shared)?))),
            Reference::Object(_) => Object::Opaque(Opaque::new(Arc::new(RemoteObject::from_reply(taken, shared)?))),
            Reference::Pipe(_) => return Err(RpcError::internal("a result is the name of another one")),
        })
    })
}

impl FromArg for Session {
    fn type_name() -> Cow<'static, str> {
        "module".into()
    }

    fn from_arg(arg: Arg) -> Result<Self> {
        let module = <Arc<dyn Module> as FromArg>::from_arg(arg)?;
        SessionModule::session_of(&*module).cloned().ok_or_else(|| {
            RpcError::invalid_argument(format!("the module '{}' is not that of a session", module.name()))
        })
    }
}

impl IntoReturn for Session {
    fn type_name() -> Cow<'static, str> {
        "module".into()
    }

    fn into_return(self) -> Result<LocalValue> {
        Ok(Value::Object(Object::Module(Arc::new(SessionModule::new(self)))))
    }
}
