//! Spans of calls, for OpenTelemetry.
//!
//! Without `--otlp-endpoint` nothing here runs. With it each session is wrapped in one that makes a
//! span of each call, from its arrival to its end. The parent of the span is the one that the
//! request names ([`Request::trace`]). The request goes on with the context of the new span, so
//! that further calls of the function become its children.
//!
//! | of a span | is |
//! | --- | --- |
//! | name | the function's, or `call` if it was not asked for by name |
//! | kind | server |
//! | `rpc.system` | `rpc` |
//! | `rpc.method` | the function's name, if it is known |
//! | `rpc.outcome` | `ok`, or the [name](rpc_core::ErrorKind::name) of the error's kind |
//! | `error.type`, status | the same name, if it is an error |
//!
//! Arguments, results and error messages are not exported. A thread of its own sends spans to the
//! collector in batches. Spans that the collector does not take in time are lost; no call waits for
//! it. The usual environment variables (`OTEL_TRACES_SAMPLER`, `OTEL_SERVICE_NAME`,
//! `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_BSP_*`) set the sampling, the name of the service and the size
//! of batches. Without them all calls are sampled, except if their callers decide otherwise.
//!
//! Forwarded sessions have their spans at the server on which they end.
//!
//! [`Request::trace`]: rpc_core::Request::trace

mod collector_client;
mod session;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use rpc_transports::SessionFactory;

use self::collector_client::Collector;
use self::session::TracedFactory;
use crate::config::{OtlpEndpoint, ServeError};

/// Longest time to export the last spans when the server ends.
const LAST_EXPORT: Duration = Duration::from_secs(3);

/// Exporter of the spans of one server. Dropping it exports the last spans in the background.
#[derive(Debug)]
pub(crate) struct Spans {
    provider: SdkTracerProvider,
}

impl Spans {
    /// Starts to export spans to the collector at `endpoint`. Needs a tokio runtime with I/O.
    pub(crate) fn start(endpoint: &OtlpEndpoint) -> Result<Self, ServeError> {
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(Collector::new())
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(endpoint.traces())
            .build()
            .map_err(|error| ServeError::Otlp { endpoint: endpoint.clone(), source: io::Error::other(error) })?;
        let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
        let resource = Resource::builder().with_attribute(version);
        let resource = match std::env::var_os("OTEL_SERVICE_NAME") {
            Some(_) => resource,
            None => resource.with_service_name("rpc-server"),
        };
        let provider =
            SdkTracerProvider::builder().with_resource(resource.build()).with_batch_exporter(exporter).build();
        tracing::info!(%endpoint, "exporting spans");
        Ok(Self { provider })
    }

    /// Returns a factory whose sessions have spans of their calls.
    pub(crate) fn traced(&self, factory: Arc<dyn SessionFactory>) -> Arc<dyn SessionFactory> {
        Arc::new(TracedFactory::new(factory, self.provider.tracer(env!("CARGO_PKG_NAME"))))
    }

    /// Exports the spans that are left, and stops. Takes a few seconds at most.
    pub(crate) async fn end(&self) {
        let provider = self.provider.clone();
        if let Ok(Err(error)) = tokio::task::spawn_blocking(move || provider.shutdown_with_timeout(LAST_EXPORT)).await {
            tracing::warn!(%error, "the last spans may not have been exported");
        }
    }
}

impl Drop for Spans {
    fn drop(&mut self) {
        let provider = self.provider.clone();
        // Blocks, so it runs on a thread. Failures are ignored: it has been shut down already, or
        // there is no thread.
        let end = move || drop(provider.shutdown_with_timeout(LAST_EXPORT));
        let _ = std::thread::Builder::new().name("rpc-spans".into()).spawn(end);
    }
}
