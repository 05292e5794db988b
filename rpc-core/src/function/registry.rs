//! The registry: the functions and module loaders that a program offers to its sessions.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::error::{Result, RpcError};
use crate::function::callback;
use crate::function::function::{Function, Signature};
use crate::function::handler::{AsyncHandler, Handler};
use crate::function::loader::{LoadRequest, ModuleLoader, NamedModules};
use crate::function::object::Module;
use crate::function::signature_check;
use crate::printable::beginning;

/// Functions and module loaders, shared by all sessions of a program. Cheap to clone; clones are
/// the same registry.
///
/// Registering under a name that is taken replaces the function for later calls; references to the
/// old one stay valid.
#[derive(Clone)]
pub struct Registry(Arc<RwLock<Contents>>);

struct Contents {
    functions: BTreeMap<String, Function>,
    loaders: Vec<Arc<dyn ModuleLoader>>,
    named: NamedModules,
}

impl Registry {
    /// Creates a registry whose only functions are `rpc.signature` and those for
    /// [callbacks](crate::client::Session::callback), with one loader: for the modules that
    /// [`add_module`](Self::add_module) registers.
    pub fn new() -> Self {
        let named = NamedModules::default();
        let functions = callback::functions().into_iter().chain([signature_check::function()]).collect();
        let contents = Contents { functions, loaders: vec![Arc::new(named.clone())], named };
        Self(Arc::new(RwLock::new(contents)))
    }

    /// Registers a function that may block: the usual kind. It runs on the thread of its lane.
    pub fn add<A, R>(&self, name: impl Into<String>, handler: impl Handler<A, R>) -> Registered<'_> {
        self.add_function(name, Function::blocking(handler))
    }

    /// Registers a function that promises not to block. It runs on the thread that reads requests,
    /// and costs no thread switch.
    pub fn add_inline<A, R>(&self, name: impl Into<String>, handler: impl Handler<A, R>) -> Registered<'_> {
        self.add_function(name, Function::inline(handler))
    }

    /// Registers a function that returns a future.
    pub fn add_async<A, R>(&self, name: impl Into<String>, handler: impl AsyncHandler<A, R>) -> Registered<'_> {
        self.add_function(name, Function::asynchronous(handler))
    }

    /// Registers an existing function.
    pub fn add_function(&self, name: impl Into<String>, function: Function) -> Registered<'_> {
        let name = name.into();
        let function = function.named(&name);
        self.write().functions.insert(name.clone(), function);
        Registered { registry: self, name }
    }

    /// Registers a module under its own name, for the loader `named`.
    pub fn add_module(&self, module: Arc<dyn Module>) -> &Self {
        self.read().named.insert(module);
        self
    }

    /// Registers a module loader. Loaders are tried in the order of their registration.
    pub fn add_loader(&self, loader: Arc<dyn ModuleLoader>) -> &Self {
        self.write().loaders.push(loader);
        self
    }

    /// Returns the function registered under `name`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound), with a hint if a registered name is
    /// similar.
    pub fn get(&self, name: &str) -> Result<Function> {
        self.get_hinting(name, |_| true)
    }

    /// Returns the function registered under `name`. The error's hint names a function only if it
    /// `may_be_named`.
    pub(crate) fn get_hinting(&self, name: &str, may_be_named: impl Fn(&str) -> bool) -> Result<Function> {
        let contents = self.read();
        contents.functions.get(name).cloned().ok_or_else(|| {
            let near = contents.functions.keys().find(|known| is_near(known, name) && may_be_named(known));
            let hint = near.map_or_else(String::new, |near| format!("; did you mean '{near}'?"));
            RpcError::not_found(format!("no function is registered as '{}'{hint}", beginning(name, QUOTED_LEN)))
        })
    }

    /// Returns all functions, by name.
    pub fn functions(&self) -> Vec<(String, Signature)> {
        self.read().functions.iter().map(|(name, function)| (name.clone(), function.signature().clone())).collect()
    }

    /// Loads a module with the loader of that name, or else with the first that accepts the path.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) if no loader accepts it, and errors of
    /// the loader.
    pub fn load_module(&self, loader: Option<&str>, request: &LoadRequest<'_>) -> Result<Arc<dyn Module>> {
        let loaders = self.read().loaders.clone();
        let found = match loader {
            Some(name) => loaders.iter().find(|loader| loader.name() == name),
            None => loaders.iter().find(|loader| loader.accepts(request.path)),
        };
        match (found, loader) {
            (Some(found), _) => found.load(request),
            (None, Some(name)) => {
                let known: Vec<_> = loaders.iter().map(|loader| loader.name()).collect();
                let known = known.join(", ");
                Err(RpcError::not_found(format!(
                    "no module loader is called '{}'; there are: {known}",
                    beginning(name, QUOTED_LEN)
                )))
            }
            (None, None) => Err(RpcError::not_found(format!(
                "no module is called '{0}', and no loader here takes a file named '{0}'",
                beginning(request.path, QUOTED_LEN)
            ))),
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Contents> {
        self.0.read()
    }

    fn write(&self) -> RwLockWriteGuard<'_, Contents> {
        self.0.write()
    }
}

/// A function that has just been registered, and can be described. It also stands for its registry,
/// so that the next function can be registered.
///
/// ```
/// use rpc_core::Registry;
///
/// let registry = Registry::new();
/// registry
///     .add("add", |a: i64, b: i64| a + b)
///     .describe("adds two integers")
///     .add("negate", |a: i64| -a);
/// assert_eq!(registry.get("add")?.description(), Some("adds two integers"));
/// # Ok::<(), rpc_core::RpcError>(())
/// ```
#[derive(Debug)]
pub struct Registered<'a> {
    registry: &'a Registry,
    name: String,
}

impl<'a> Registered<'a> {
    /// Describes the function to people, in a phrase: `rpc-cli functions` shows it. References that
    /// sessions have got already are not changed.
    pub fn describe(self, description: impl Into<String>) -> &'a Registry {
        if let Some(function) = self.registry.write().functions.get_mut(&self.name) {
            *function = function.clone().described(description);
        }
        self.registry
    }
}

impl Deref for Registered<'_> {
    type Target = Registry;

    fn deref(&self) -> &Registry {
        self.registry
    }
}

impl Default for Registry {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.functions().iter().map(|(name, signature)| (name, signature.to_string()))).finish()
    }
}

/// Length in bytes of the beginning of a name that errors quote.
const QUOTED_LEN: usize = 120;

/// Returns true if two names are equal except for case, or for one character added, omitted or
/// replaced.
fn is_near(known: &str, name: &str) -> bool {
    if known.eq_ignore_ascii_case(name) {
        return true;
    }
    if known.len().abs_diff(name.len()) > 1 {
        return false;
    }
    let prefix = known.bytes().zip(name.bytes()).take_while(|(a, b)| a == b).count();
    let (known, name) = (&known.as_bytes()[prefix..], &name.as_bytes()[prefix..]);
    let suffix = known.iter().rev().zip(name.iter().rev()).take_while(|(a, b)| a == b).count();
    known.len().max(name.len()) - suffix <= 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_name_that_is_nearly_right_gets_a_hint() {
        let registry = Registry::new();
        registry.add("model.forward", || 1_i64);
        for near in ["model.forwar", "Model.Forward", "model.forwords", "model_forward"] {
            let error = registry.get(near).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotFound);
            assert_eq!(error.message().contains("did you mean 'model.forward'"), near != "model.forwords", "{error}");
        }
        assert!(registry.get(&"ä".repeat(1000)).unwrap_err().message().len() < 300);
    }
}
