//! Module loaders: the sources of modules.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::RwLock;

use crate::error::{Result, RpcError};
use crate::function::context::Context;
use crate::function::function::{Function, Signature};
use crate::function::handler::{AsyncHandler, Handler};
use crate::function::object::Module;

/// Request to a loader.
#[derive(Debug)]
pub struct LoadRequest<'a> {
    /// Path in the session's workspace, or another name that the loader understands.
    pub path: &'a str,
    /// Context of the request, for the session's workspace and devices.
    pub context: &'a Context,
}

/// Loader of modules from files or names. Loading may block; it runs on the thread of the request's
/// lane.
pub trait ModuleLoader: Send + Sync {
    /// Returns the loader's name, by which requests may choose it.
    fn name(&self) -> &str;

    /// Returns true if the loader accepts `path` when the request names no loader.
    fn accepts(&self, path: &str) -> bool;

    /// Loads a module.
    ///
    /// # Errors
    ///
    /// Errors in the file, or a missing file.
    fn load(&self, request: &LoadRequest<'_>) -> Result<Arc<dyn Module>>;
}

/// Loader of modules that a program registered by name.
#[derive(Clone, Default)]
pub struct NamedModules(Arc<RwLock<BTreeMap<String, Arc<dyn Module>>>>);

impl NamedModules {
    /// Adds a module under its own name, replacing one with the same name.
    pub fn insert(&self, module: Arc<dyn Module>) {
        self.0.write().insert(module.name().to_owned(), module);
    }

    fn find(&self, name: &str) -> Option<Arc<dyn Module>> {
        self.0.read().get(name).cloned()
    }
}

impl ModuleLoader for NamedModules {
    fn name(&self) -> &str {
        "named"
    }

    fn accepts(&self, path: &str) -> bool {
        self.find(path).is_some()
    }

    fn load(&self, request: &LoadRequest<'_>) -> Result<Arc<dyn Module>> {
        self.find(request.path).ok_or_else(|| RpcError::not_found("no module is registered under that name"))
    }
}

/// A module that consists of functions of this program.
///
/// ```
/// use rpc_core::{FunctionModule, Module};
///
/// let math = FunctionModule::new("math").add("square", |x: f64| x * x);
/// assert_eq!(math.function("square").unwrap().signature().to_string(), "(float) -> float");
/// ```
#[derive(Debug)]
pub struct FunctionModule {
    name: String,
    functions: BTreeMap<String, Function>,
}

impl FunctionModule {
    /// Creates a module without functions.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), functions: BTreeMap::new() }
    }

    /// Adds a function that may block.
    #[must_use]
    pub fn add<A, R>(self, name: impl Into<String>, handler: impl Handler<A, R>) -> Self {
        self.add_function(name, Function::blocking(handler))
    }

    /// Adds a function that promises not to block.
    #[must_use]
    pub fn add_inline<A, R>(self, name: impl Into<String>, handler: impl Handler<A, R>) -> Self {
        self.add_function(name, Function::inline(handler))
    }

    /// Adds a function that returns a future.
    #[must_use]
    pub fn add_async<A, R>(self, name: impl Into<String>, handler: impl AsyncHandler<A, R>) -> Self {
        self.add_function(name, Function::asynchronous(handler))
    }

    /// Adds an existing function.
    #[must_use]
    pub fn add_function(mut self, name: impl Into<String>, function: Function) -> Self {
        let name = name.into();
        let function = function.named(&name);
        self.functions.insert(name, function);
        self
    }
}

impl Module for FunctionModule {
    fn name(&self) -> &str {
        &self.name
    }

    fn function(&self, name: &str) -> Result<Function> {
        self.functions.get(name).cloned().ok_or_else(|| {
            let known: Vec<_> = self.functions.keys().map(String::as_str).collect();
            RpcError::not_found(format!("module '{}' has no such function; it has: {}", self.name, known.join(", ")))
        })
    }

    fn functions(&self) -> Vec<(String, Signature)> {
        self.functions.iter().map(|(name, function)| (name.clone(), function.signature().clone())).collect()
    }
}
