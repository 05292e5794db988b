//! Wrapper of a session that makes a span of each call.

use std::sync::Arc;

use async_trait::async_trait;
use opentelemetry::trace::{
    Span, SpanBuilder, SpanContext, SpanId, SpanKind, Status, TraceContextExt, TraceFlags, TraceId, TraceState, Tracer,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::{SdkTracer, Span as SdkSpan};
use rpc_core::reply::Outcome;
use rpc_core::session::InPlaceWrite;
use rpc_core::{
    ErrorKind, Handle, Lane, Operation, Request, RpcError, RpcSession, SharedSession, Submission, TensorRef,
    TraceContext,
};
use rpc_transports::{OpenRequest, SessionFactory};

use crate::function_table::Functions;

/// Factory that wraps the sessions of another one.
pub(super) struct TracedFactory {
    inner: Arc<dyn SessionFactory>,
    tracer: SdkTracer,
}

impl TracedFactory {
    pub(super) fn new(inner: Arc<dyn SessionFactory>, tracer: SdkTracer) -> Self {
        Self { inner, tracer }
    }
}

#[async_trait]
impl SessionFactory for TracedFactory {
    async fn open(&self, request: &OpenRequest) -> Result<SharedSession, RpcError> {
        let inner = self.inner.open(request).await?;
        Ok(Arc::new(TracedSession { inner, tracer: self.tracer.clone(), functions: Arc::default() }))
    }
}

/// A session whose calls have spans.
struct TracedSession {
    inner: SharedSession,
    tracer: SdkTracer,
    /// Names of the functions.
    functions: Arc<Functions<Arc<str>>>,
}

impl RpcSession for TracedSession {
    fn submit(&self, mut request: Request) -> Submission {
        self.functions.forget(&request.operation);
        match &request.operation {
            Operation::Call { function, .. } => {
                let handle = *function;
                let function = self.functions.get(handle);
                let unknown = (function.is_none() && handle.is_pipe()).then(|| (self.functions.clone(), handle));
                let call = Call::begin(&self.tracer, function, unknown, request.trace);
                request.trace = call.context().or(request.trace);
                self.inner.submit(request).inspect(move |outcome| call.end(outcome))
            }
            Operation::GetFunction { name } | Operation::ModuleFunction { name, .. } => {
                let (name, functions) = (Arc::from(name.as_str()), self.functions.clone());
                let pipe = request.pipe;
                functions.expect(pipe);
                self.inner.submit(request).inspect(move |outcome| functions.learn(pipe, outcome, || name))
            }
            _ => self.inner.submit(request),
        }
    }

    fn inner(&self) -> Option<&dyn RpcSession> {
        Some(&self.inner)
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        self.inner.write_in_place(lane, to, offset, len)
    }
}

/// A call in progress.
struct Call {
    span: SdkSpan,
    /// Table and handle of a function that was still being looked up when the call arrived. It is
    /// known when the call ends.
    unknown: Option<(Arc<Functions<Arc<str>>>, Handle)>,
    ended: bool,
}

impl Call {
    fn begin(
        tracer: &SdkTracer,
        function: Option<Arc<str>>,
        unknown: Option<(Arc<Functions<Arc<str>>>, Handle)>,
        parent: Option<TraceContext>,
    ) -> Self {
        let mut attributes = vec![KeyValue::new("rpc.system", "rpc")];
        let builder = match function {
            Some(name) => {
                attributes.push(KeyValue::new("rpc.method", name.clone()));
                SpanBuilder::from_name(name.as_ref().to_owned())
            }
            None => SpanBuilder::from_name("call"),
        };
        let builder = builder.with_kind(SpanKind::Server).with_attributes(attributes);
        // The context of this thread belongs to other work, so it is not used as the parent.
        let above = match parent {
            Some(parent) => Context::new().with_remote_span_context(remote(parent)),
            None => Context::new(),
        };
        Self { span: tracer.build_with_context(builder, &above), unknown, ended: false }
    }

    /// Returns the trace context for the requests of this call; `None` after the end of the
    /// exporter.
    fn context(&self) -> Option<TraceContext> {
        let span = self.span.span_context();
        TraceContext::new(span.trace_id().to_bytes(), span.span_id().to_bytes(), span.trace_flags().to_u8())
    }

    fn end(mut self, outcome: &Outcome) {
        self.finish(outcome.as_ref().err().map(RpcError::kind));
    }

    fn finish(&mut self, error: Option<ErrorKind>) {
        self.ended = true;
        if let Some(name) = self.unknown.take().and_then(|(functions, handle)| functions.get(handle)) {
            self.span.update_name(name.as_ref().to_owned());
            self.span.set_attribute(KeyValue::new("rpc.method", name));
        }
        let outcome = error.map_or("ok", ErrorKind::name);
        self.span.set_attribute(KeyValue::new("rpc.outcome", outcome));
        if error.is_some() {
            self.span.set_attribute(KeyValue::new("error.type", outcome));
            self.span.set_status(Status::error(outcome));
        }
        self.span.end();
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        // The session has ended without an answer.
        if !self.ended {
            self.finish(Some(ErrorKind::Closed));
        }
    }
}

fn remote(parent: TraceContext) -> SpanContext {
    let (trace_id, span_id) = (TraceId::from_bytes(parent.trace_id()), SpanId::from_bytes(parent.span_id()));
    SpanContext::new(trace_id, span_id, TraceFlags::new(parent.flags()), true, TraceState::NONE)
}
