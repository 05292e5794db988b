//! [`Completion`], the future of an operation, which is awaited, or waited for on a plain thread.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use rpc_core::{RpcError, blocking};

use crate::error::{DiscoError, Result};

/// Outcome of an operation that has been issued: its commands have their order already. Await it,
/// or [`wait`](Self::wait) for it.
///
/// Dropping it gives up the result and cancels nothing.
#[must_use = "what was asked for may fail; await it or wait for it"]
pub struct Completion<T>(Pin<Box<dyn Future<Output = Result<T>> + Send>>);

impl<T: Send + 'static> Completion<T> {
    pub(crate) fn new(future: impl Future<Output = Result<T>> + Send + 'static) -> Self {
        Self(Box::pin(future))
    }

    /// Starts the future, which runs whether a caller waits for it or not.
    pub(crate) fn spawn(future: impl Future<Output = Result<T>> + Send + 'static) -> Self {
        match crate::runtime::runtime() {
            Ok(runtime) => {
                let task = runtime.spawn(future);
                Self::new(async move {
                    task.await
                        .unwrap_or_else(|error| Err(RpcError::internal(format!("a task panicked: {error}")).into()))
                })
            }
            Err(error) => Self::failed(error.into()),
        }
    }

    pub(crate) fn failed(error: DiscoError) -> Self {
        Self::new(std::future::ready(Err(error)))
    }

    /// Waits on the calling thread.
    ///
    /// # Errors
    ///
    /// Those of what was asked for; and [`ApiMisuse`](rpc_core::ErrorKind::ApiMisuse) inside an
    /// async runtime.
    pub fn wait(self) -> Result<T> {
        blocking::block_on(self.0)?
    }
}

impl<T> Future for Completion<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx)
    }
}

impl<T> fmt::Debug for Completion<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Completion")
    }
}
