//! Functions, modules and objects: everything that a server registers and that calls of its clients
//! reach.
//!
//! A [`Registry`] holds [`Function`]s, made of closures ([`Handler`]) whose parameters and returns
//! are [converted](FromArg), and [`ModuleLoader`]s. A running function accesses its session through
//! its [`Context`].
//!
//! `function.rs` says how a function is run, `handler.rs` how one is made of a closure, and
//! `invocation.rs` how the arguments of a call are taken and counted.

pub(crate) mod callback;
pub(crate) mod context;
pub(crate) mod convert;
#[allow(clippy::module_inception, reason = "what a function is, and what is around it")]
pub(crate) mod function;
pub(crate) mod handler;
pub(crate) mod invocation;
pub(crate) mod loader;
pub(crate) mod object;
pub(crate) mod registry;
pub(crate) mod signature_check;

pub use context::{Context, EndProbe, Host, ThreadPermit, Usage, UsedDevices, WorkspaceFiles};
pub use convert::{ArgScope, FromArg, FromReply, IntoArg, IntoArgs, IntoReturn, Pack, Shape, Shared};
pub use function::{BoxFuture, Function, FunctionKind, Signature};
pub use handler::{AsyncHandler, FromCall, Handler, Rest};
pub use invocation::{Arg, Invocation};
pub use loader::{FunctionModule, LoadRequest, ModuleLoader, NamedModules};
pub use object::{LocalValue, Module, Object, Opaque};
pub use registry::{Registered, Registry};
