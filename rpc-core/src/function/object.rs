//! Objects of a session, which are named by handles: functions, modules, tensors, and the
//! application's own.
//!
//! This file, `function.rs`, `invocation.rs` and `context.rs` import each other: an object may be a
//! function, an invocation passes objects to one, and its context finds and calls functions.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::dlpack::Device;
use crate::error::Result;
use crate::function::context::Context;
use crate::function::function::{Function, Signature};
use crate::tensor::Tensor;
use crate::value::Value;

/// A value as functions at the origin see it: with the objects themselves in it.
pub type LocalValue = Value<Object>;

/// An object of a session.
#[derive(Clone)]
#[non_exhaustive]
pub enum Object {
    /// A function.
    Function(Function),
    /// A module.
    Module(Arc<dyn Module>),
    /// A tensor, or a view of one.
    Tensor(Tensor),
    /// An object of a type that the application defines.
    Opaque(Opaque),
}

impl Object {
    /// Returns the name of the object's type, as error messages use it.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::Function(_) => "function",
            Self::Module(_) => "module",
            Self::Tensor(_) => "tensor",
            Self::Opaque(opaque) => opaque.type_name,
        }
    }
}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Object({})", self.type_name())
    }
}

/// An object of a type that only the application knows.
#[derive(Clone)]
pub struct Opaque {
    value: Arc<dyn Any + Send + Sync>,
    type_name: &'static str,
}

impl Opaque {
    /// Wraps `value`.
    pub fn new<T: Any + Send + Sync>(value: Arc<T>) -> Self {
        Self { value, type_name: std::any::type_name::<T>() }
    }

    /// Returns the value, if it is a `T`.
    pub fn downcast<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.value.clone().downcast().ok()
    }

    /// Returns the Rust name of the value's type.
    pub fn type_name(&self) -> &'static str {
        self.type_name
    }
}

impl fmt::Debug for Opaque {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Opaque({})", self.type_name)
    }
}

/// A collection of functions, which are found by name.
pub trait Module: Send + Sync {
    /// Returns the concrete type, for loaders that recognise their own modules when these come back
    /// as arguments. `None` by default.
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }

    /// Returns a new instance of the module, set up to run on `device`, for modules that are only
    /// code and have to be set up before they run. `None`, the default, means that this module
    /// serves every device. It may block.
    ///
    /// # Errors
    ///
    /// Errors of the module, and
    /// [`ErrorKind::DeviceUnavailable`](crate::ErrorKind::DeviceUnavailable).
    fn instance(&self, context: &Context, device: Device) -> Result<Option<Arc<dyn Module>>> {
        let _ = (context, device);
        Ok(None)
    }

    /// Returns the module's name.
    fn name(&self) -> &str;

    /// Returns the function `name`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound).
    fn function(&self, name: &str) -> Result<Function>;

    /// Returns all functions, by name.
    fn functions(&self) -> Vec<(String, Signature)>;
}
