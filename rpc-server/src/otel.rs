//! Spans of calls, for OpenTelemetry.
//!
//! Nothing here costs anything unless it is asked for (`--otlp-endpoint`): then each session is wrapped in one that makes a
//! span of each call, from its arrival to its end. The span's parent is what the request names ([`Request::trace`]), and the
//! request goes on with the span's own context, so that what the function calls, here or elsewhere, comes below it.
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
//! Arguments, results and messages of errors are not exported. Spans go to the collector in batches, from a thread of their
//! own; what the collector does not take, or not in time, is lost, and no call waits for it. Which calls are sampled, how the
//! service is called and how large batches are can be said by the usual environment variables (`OTEL_TRACES_SAMPLER`,
//! `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_BSP_*`). Without them all calls are whose callers do not say otherwise.
//!
//! Sessions that clients are forwarded to have their spans at the server that they end at.
//!
//! [`Request::trace`]: rpc_core::Request::trace

mod http;
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

use self::http::Collector;
use self::session::TracedFactory;
use crate::config::{OtlpEndpoint, ServeError};

/// How long the last spans may take to be exported when the server ends.
const LAST_EXPORT: Duration = Duration::from_secs(3);

/// The spans of one server, and where they go. Dropping this exports the last ones in the background.
#[derive(Debug)]
pub(crate) struct Spans {
    provider: SdkTracerProvider,
}

impl Spans {
    /// Exports spans to the collector at `endpoint` from now on. Needs a tokio runtime, which must not be one without I/O.
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

    /// Opens sessions with `factory`, and makes spans of their calls.
    pub(crate) fn traced(&self, factory: Arc<dyn SessionFactory>) -> Arc<dyn SessionFactory> {
        Arc::new(TracedFactory::new(factory, self.provider.tracer(env!("CARGO_PKG_NAME"))))
    }

    /// Exports what there is, and nothing from then on. Takes a few seconds at most.
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
        // It would block. There is nothing to do if it has been done, or if there is no thread.
        let end = move || drop(provider.shutdown_with_timeout(LAST_EXPORT));
        let _ = std::thread::Builder::new().name("rpc-spans".into()).spawn(end);
    }
}
