//! Wrapper of a session that counts and measures its calls and copies.

use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use rpc_core::reply::Outcome;
use rpc_core::session::InPlaceWrite;
use rpc_core::{
    ErrorKind, Handle, Lane, Operation, Request, RpcError, RpcSession, SharedSession, Submission, TensorRef,
};
use rpc_transports::{OpenRequest, SessionFactory};

use super::{FunctionMetrics, Monitor};
use crate::function_table::Functions;

/// Factory that wraps the sessions of another one.
pub(super) struct MeteredFactory {
    inner: Arc<dyn SessionFactory>,
    monitor: Arc<Monitor>,
}

impl MeteredFactory {
    pub(super) fn new(inner: Arc<dyn SessionFactory>, monitor: Arc<Monitor>) -> Self {
        Self { inner, monitor }
    }
}

#[async_trait]
impl SessionFactory for MeteredFactory {
    async fn open(&self, request: &OpenRequest) -> Result<SharedSession, RpcError> {
        let session = self.inner.open(request).await?;
        Ok(Arc::new(MeteredSession::new(session, self.monitor.clone())))
    }
}

/// Session that is counted while it lives, with its calls and copies.
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

    /// Returns the number of handles in the table.
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
                let handle = *function;
                let function = self.functions.get(handle);
                let unknown = (function.is_none() && handle.is_pipe()).then(|| (self.functions.clone(), handle));
                let function = function.unwrap_or_else(|| self.monitor.other.clone());
                let call = Call::begin(self.monitor.clone(), function, unknown);
                self.inner.submit(request).inspect(move |outcome| call.end(outcome))
            }
            Operation::GetFunction { name } => {
                let (name, monitor, functions) = (name.clone(), self.monitor.clone(), self.functions.clone());
                let pipe = request.pipe;
                functions.expect(pipe);
                let learn = move |outcome: &Outcome| functions.learn(pipe, outcome, || monitor.function(&name));
                self.inner.submit(request).inspect(learn)
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

    fn inner(&self) -> Option<&dyn RpcSession> {
        Some(&self.inner)
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        let write = self.inner.write_in_place(lane, to, offset, len);
        if write.is_some() {
            // Counted before it is received: if the client leaves in the middle, one piece too much
            // is counted.
            self.monitor.bytes_in.increment(len);
        }
        write
    }
}

/// A call in progress.
struct Call {
    monitor: Arc<Monitor>,
    function: Arc<FunctionMetrics>,
    /// Table and handle of a function that was still being looked up when the call arrived. It is
    /// known when the call ends.
    unknown: Option<(Arc<Functions<Arc<FunctionMetrics>>>, Handle)>,
    start: Instant,
    ended: bool,
}

impl Call {
    fn begin(
        monitor: Arc<Monitor>,
        function: Arc<FunctionMetrics>,
        unknown: Option<(Arc<Functions<Arc<FunctionMetrics>>>, Handle)>,
    ) -> Self {
        monitor.calls_in_progress.increment(1.0);
        Self { monitor, function, unknown, start: Instant::now(), ended: false }
    }

    fn end(mut self, outcome: &Outcome) {
        self.count(outcome.as_ref().err().map(RpcError::kind));
    }

    fn count(&mut self, error: Option<ErrorKind>) {
        self.ended = true;
        self.monitor.calls_in_progress.decrement(1.0);
        let found = self.unknown.take().and_then(|(functions, handle)| functions.get(handle));
        if let Some(function) = found {
            self.function = function;
        }
        self.monitor.called(&self.function, error, self.start.elapsed());
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        // The session has ended without an answer.
        if !self.ended {
            self.count(Some(ErrorKind::Closed));
        }
    }
}
