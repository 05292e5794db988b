//! Functions, modules and objects: everything that a server registers and that calls of its clients
//! reach.
//!
//! A [`Registry`] holds [`Function`]s, made of closures ([`Handler`]) whose parameters and returns
//! are [converted](FromArg), and [`ModuleLoader`]s. A running function accesses its session through
//! its [`Context`].

pub(crate) mod callback;
pub(crate) mod context;
pub(crate) mod convert;
pub(crate) mod handler;
pub(crate) mod loader;
pub(crate) mod object;
pub(crate) mod registry;
pub(crate) mod signature;

pub use context::{Context, Host, ThreadPermit, Usage, WorkspaceFiles};
pub use convert::{ArgScope, FromArg, FromReply, IntoArg, IntoArgs, IntoReturn, Pack, Shape, Shared};
pub use handler::{AsyncHandler, FromCall, Handler, Rest};
pub use loader::{FunctionModule, LoadRequest, ModuleLoader, NamedModules};
pub use object::{Arg, BoxFuture, Function, FunctionKind, Invocation, LocalValue, Module, Object, Opaque, Signature};
pub use registry::Registry;
