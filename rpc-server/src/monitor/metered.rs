//! Sessions that count and measure what passes through them.

use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use rpc_core::reply::Outcome;
use rpc_core::session::InPlaceWrite;
use rpc_core::{ErrorKind, Lane, Operation, Request, RpcError, RpcSession, SharedSession, Submission, TensorRef};
use rpc_transports::{OpenRequest, SessionFactory};

use super::{FunctionMetrics, Monitor};
use crate::functions::Functions;

/// Opens sessions with another factory, and measures them.
pub(super) struct MeteredFactory<F> {
    inner: F,
    monitor: Arc<Monitor>,
}

impl<F> MeteredFactory<F> {
    pub(super) fn new(inner: F, monitor: Arc<Monitor>) -> Self {
        Self { inner, monitor }
    }
}

#[async_trait]
impl<F: SessionFactory> SessionFactory for MeteredFactory<F> {
    async fn open(&self, request: &OpenRequest) -> Result<SharedSession, RpcError> {
        let session = self.inner.open(request).await?;
        Ok(Arc::new(MeteredSession::new(session, self.monitor.clone())))
    }
}

/// A session that is counted while it lives, and whose calls and copies are.
pub(super) struct MeteredSession {
    inner: SharedSession,
    monitor: Arc<Monitor>,
    functions: Arc<Functions<Arc<FunctionMetrics>>>,
}

impl MeteredSession {
    pub(super) fn new(inner: SharedSession, monitor: Arc<Monitor>) -> Self {
        monitor.sessions.increment(1.0);
        monitor.sessions_opened.increment(1);
        Self { inner, monitor, functions: Arc::default() }
    }

    /// How many handles are remembered.
    #[cfg(test)]
    pub(super) fn tracked(&self) -> usize {
        self.functions.len()
    }
}

impl Drop for MeteredSession {
    fn drop(&mut self) {
        self.monitor.sessions.decrement(1.0);
    }
}

impl RpcSession for MeteredSession {
    fn submit(&self, request: Request) -> Submission {
        self.functions.forget(&request.operation);
        match &request.operation {
            Operation::Call { function, .. } => {
                let function = self.functions.get(*function).unwrap_or_else(|| self.monitor.other.clone());
                let call = Call::begin(self.monitor.clone(), function);
                self.inner.submit(request).inspect(move |outcome| call.end(outcome))
            }
            Operation::GetFunction { name } => {
                let (name, monitor, functions) = (name.clone(), self.monitor.clone(), self.functions.clone());
                self.inner.submit(request).inspect(move |outcome| functions.learn(outcome, || monitor.function(&name)))
            }
            Operation::Write { data, .. } => {
                let (len, bytes) = (data.len() as u64, self.monitor.bytes_in.clone());
                self.inner.submit(request).inspect(move |outcome| {
                    if outcome.is_ok() {
                        bytes.increment(len);
                    }
                })
            }
            Operation::Read { len, .. } => {
                let (len, bytes) = (*len, self.monitor.bytes_out.clone());
                self.inner.submit(request).inspect(move |outcome| {
                    if outcome.is_ok() {
                        bytes.increment(len);
                    }
                })
            }
            _ => self.inner.submit(request),
        }
    }

    fn is_local(&self) -> bool {
        self.inner.is_local()
    }

    fn is_encrypted(&self) -> bool {
        self.inner.is_encrypted()
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        let write = self.inner.write_in_place(lane, to, offset, len);
        if write.is_some() {
            // As good as received: a client that goes away in the middle is counted a piece too much.
            self.monitor.bytes_in.increment(len);
        }
        write
    }

    fn ended(&self) -> Submission {
        self.inner.ended()
    }
}

/// A call in progress.
struct Call {
    monitor: Arc<Monitor>,
    function: Arc<FunctionMetrics>,
    start: Instant,
    ended: bool,
}

impl Call {
    fn begin(monitor: Arc<Monitor>, function: Arc<FunctionMetrics>) -> Self {
        monitor.calls_in_progress.increment(1.0);
        Self { monitor, function, start: Instant::now(), ended: false }
    }

    fn end(mut self, outcome: &Outcome) {
        self.count(outcome.as_ref().err().map(RpcError::kind));
    }

    fn count(&mut self, error: Option<ErrorKind>) {
        self.ended = true;
        self.monitor.calls_in_progress.decrement(1.0);
        self.monitor.called(&self.function, error, self.start.elapsed());
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        // Its session has ended, and nobody answers any more.
        if !self.ended {
            self.count(Some(ErrorKind::Closed));
        }
    }
}
