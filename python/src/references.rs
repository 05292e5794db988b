//! References to objects of a session, as classes of Python. Dropping the last one frees the object
//! there. `objects.rs` has their methods.

use std::sync::Arc;

use pyo3::prelude::*;
use rpc_core::{RemoteFunction, RemoteModule, RemoteObject, RemoteTensor};

use crate::operation::Born;
use crate::reply::Reply;

macro_rules! reference {
    ($($(#[$doc:meta])* $name:ident($remote:ty) $get:ident $({ $field:ident: $field_type:ty })?;)*) => {
        $(
            $(#[$doc])*
            #[pyclass(frozen, subclass, module = "tensor_rpc._native")]
            pub(crate) struct $name {
                pub(crate) remote: Born<$remote>,
                $(pub(crate) $field: $field_type,)?
            }

            impl $name {
                /// Returns the reference.
                ///
                /// # Errors
                ///
                /// In the child of a fork.
                pub(crate) fn $get(&self) -> PyResult<$remote> {
                    self.remote.get().cloned()
                }
            }
        )*
    };
}

reference! {
    /// A function of a session.
    Function(RemoteFunction) function { origin: Born<Origin> };
    /// A module of a session.
    Module(RemoteModule) module;
    /// A tensor in a session.
    Tensor(RemoteTensor) tensor;
    /// An object of a type that the application defines.
    Object(RemoteObject) object;
    /// The result of a call, which later calls of its lane take before it is there.
    Pipe(rpc_core::Pipe<Reply>) pipe;
    /// A function of this process as a function of a session.
    Callback(Arc<rpc_core::RemoteCallback>) callback;
}

/// Origin of a function.
#[derive(Clone)]
pub(crate) enum Origin {
    /// By its name.
    Named(String),
    /// By its name in a module.
    OfModule(String, RemoteModule),
    /// As the return value of another one.
    Returned,
}

impl Function {
    pub(crate) fn of(remote: RemoteFunction, name: Option<String>) -> Self {
        Self::found(remote, name.map_or(Origin::Returned, Origin::Named))
    }

    pub(crate) fn found(remote: RemoteFunction, origin: Origin) -> Self {
        Self { remote: Born::new(remote), origin: Born::new(origin) }
    }
}

impl Module {
    pub(crate) fn of(remote: RemoteModule) -> Self {
        Self { remote: Born::new(remote) }
    }
}

impl Tensor {
    pub(crate) fn of(remote: RemoteTensor) -> Self {
        Self { remote: Born::new(remote) }
    }
}

impl Object {
    pub(crate) fn of(remote: RemoteObject) -> Self {
        Self { remote: Born::new(remote) }
    }
}

impl Pipe {
    pub(crate) fn of(remote: rpc_core::Pipe<Reply>) -> Self {
        Self { remote: Born::new(remote) }
    }
}

impl Callback {
    pub(crate) fn of(remote: rpc_core::RemoteCallback) -> Self {
        Self { remote: Born::new(Arc::new(remote)) }
    }
}
