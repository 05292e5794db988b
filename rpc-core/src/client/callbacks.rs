//! Closures of a client as functions of its session: code that runs there calls them, over any
//! number of hops.
//!
//! ```
//! use rpc_core::{Context, Function, LocalSession, LocalValue, Registry, Session};
//!
//! let registry = Registry::new();
//! registry.add("twice", |context: Context, f: Function, x: LocalValue| {
//!     let once = context.call(&f, vec![x])?;
//!     context.call(&f, vec![once])
//! });
//!
//! // Any session would do here; over a network the closure still runs in this process.
//! let session = Session::new(LocalSession::new(registry));
//! let add_ten = session.callback(|x: i64| x + 10).wait()?;
//! let twice = session.get_function("twice").wait()?;
//! assert_eq!(twice.call::<i64>((&add_ten, 1)).wait()?, 21);
//! # Ok::<(), rpc_core::RpcError>(())
//! ```
//!
//! The protocol knows nothing of callbacks. Every [`Registry`](crate::Registry) has three functions
//! (`function/callback.rs`), and the client has threads that ask, by an ordinary call, for the next
//! call of the closure, run it, and answer by another call (`client/callbacks/runner.rs`). So
//! every session that forwards calls forwards callbacks.
//!
//! # Rules for closures
//!
//! While a closure runs, the function that called it waits, and with it the lane of that function's
//! caller. The closure may use the session freely, and may call functions that call it again, but
//! on **another lane**: a request on the lane that waits for the closure would wait for it, too. On
//! the closure's own thread that mistake is an [`ApiMisuse`](crate::ErrorKind::ApiMisuse) error;
//! [`Action::concurrent`](crate::Action::concurrent) is the usual remedy. The same holds for a
//! tensor which the waiting function has borrowed: an operation that conflicts with that borrow
//! waits for the function.
//!
//! As long as a callback exists, two requests of its own wait at the origin. If asynchronous
//! functions use threads there, for lack of a [spawner](crate::LocalSessionBuilder::spawner), they
//! take two of the session's.
//!
//! At the origin a call of the closure occupies the thread of the calling function until the answer
//! arrives. So an inline function must not call a closure: the answer would come on the connection
//! that it blocks. A future must not either, unless its runtime has other threads.

mod handler;
mod runner;
#[cfg(test)]
mod tests;

pub use handler::{CallbackHandler, CallbackReturn};
pub use runner::{MAX_RUNNING, RemoteCallback};

pub(crate) use runner::stop_all;
