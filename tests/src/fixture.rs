//! Where sessions under test come from. A new transport is a new [`Fixture`], and one line in `tests/conformance.rs`.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use rpc_core::{LocalSession, Session, SessionLimits, Spawner};

use crate::functions;

/// A future in a trait object.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// One way to get sessions whose origin serves [`functions::registry`].
///
/// One fixture serves one test: what it starts ends when it is dropped.
pub trait Fixture: Send + Sync + 'static {
    /// A new session, connected asynchronously. It holds nothing yet.
    fn session(&self, limits: SessionLimits) -> BoxFuture<'_, Session>;

    /// A new session, connected on a plain thread by the blocking form.
    fn blocking_session(&self, limits: SessionLimits) -> Session;

    /// How many links lie between the client and the origin.
    fn hops(&self) -> u16;
}

/// [`LocalSession`].
#[derive(Debug, Default)]
pub struct Local {
    spawner: bool,
}

impl Local {
    /// Sessions that run asynchronous functions on threads of their own.
    pub fn new() -> Self {
        // Every crate that brings a runtime does this.
        rpc_core::blocking::set_runtime_probe(|| tokio::runtime::Handle::try_current().is_ok());
        Self { spawner: false }
    }

    /// Sessions that run asynchronous functions on the runtime of the test.
    pub fn spawning() -> Self {
        Self { spawner: true, ..Self::new() }
    }

    fn make(&self, limits: SessionLimits, runtime: Option<tokio::runtime::Handle>) -> Session {
        let builder = LocalSession::builder(functions::registry()).limits(limits);
        Session::new(match runtime {
            Some(runtime) if self.spawner => builder.spawner(Arc::new(Tokio(runtime))).build(),
            _ => builder.build(),
        })
    }
}

impl Fixture for Local {
    fn session(&self, limits: SessionLimits) -> BoxFuture<'_, Session> {
        Box::pin(async move { self.make(limits, tokio::runtime::Handle::try_current().ok()) })
    }

    fn blocking_session(&self, limits: SessionLimits) -> Session {
        self.make(limits, None)
    }

    fn hops(&self) -> u16 {
        0
    }
}

struct Tokio(tokio::runtime::Handle);

impl Spawner for Tokio {
    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>) {
        drop(self.0.spawn(future));
    }
}
