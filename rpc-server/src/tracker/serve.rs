//! A tracker as a server: `rpc-server tracker`.

use std::net::SocketAddr;
use std::sync::Arc;

use rpc_core::Registry;
#[cfg(feature = "tvm")]
use rpc_transports::Dialects;
use rpc_transports::Transports;

use super::page;
use super::scheduler::SlotTotals;
use super::service::{Tracker, TrackerOptions};
use crate::config::{ConfigError, HttpAddress, ListenAddress, Origin, ServeError, TrackerConfig};
use crate::http_listener::HttpServer;
use crate::monitor::Gauges;
use crate::server::{RpcServer, Running, StopReason};
#[cfg(feature = "tvm")]
use crate::tvm::tracker::TvmTrackerDialect;

/// A running tracker. Dropping it stops it now.
#[derive(Debug)]
pub struct RunningTracker {
    /// Server of the tracker, with its addresses, sessions, and end.
    pub server: Running,
    /// Tracker itself.
    pub tracker: Arc<Tracker>,
    page: Option<HttpServer>,
}

impl RunningTracker {
    /// Returns the address of the tracker's page, with the chosen port, if it has one.
    pub fn page_address(&self) -> Option<SocketAddr> {
        self.page.as_ref().map(HttpServer::address)
    }
}

impl Tracker {
    /// Starts a tracker and serves it. Needs a tokio runtime with I/O and time.
    ///
    /// # Errors
    ///
    /// As [`RpcServer::start`]; and [`ServeError::Page`].
    pub async fn start(config: &TrackerConfig) -> Result<RunningTracker, ServeError> {
        Self::start_with(config, crate::transports()).await
    }

    /// As [`start`](Self::start), with these transports.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start).
    pub async fn start_with(config: &TrackerConfig, transports: Transports) -> Result<RunningTracker, ServeError> {
        let (tracker, server) = build(config, transports)?;
        let page = serve_page(config, &tracker).await?;
        Ok(RunningTracker { server: server.start().await?, tracker, page })
    }

    /// Starts a tracker and serves it until a signal, as [`RpcServer::run_until_signal`]. Also
    /// prints `status page on URL` if there is a page. Blocks, on a runtime of its own.
    ///
    /// # Errors
    ///
    /// As [`RpcServer::run_blocking`]; and [`ServeError::Page`].
    pub fn run_blocking(config: &TrackerConfig) -> Result<StopReason, ServeError> {
        Self::run_blocking_with(config, crate::transports())
    }

    /// As [`run_blocking`](Self::run_blocking), with these transports.
    ///
    /// # Errors
    ///
    /// As [`run_blocking`](Self::run_blocking).
    pub fn run_blocking_with(config: &TrackerConfig, transports: Transports) -> Result<StopReason, ServeError> {
        let origins = config.allow_origin.clone();
        Self::run_blocking_reading(config, transports, move || Ok(origins.clone()))
    }

    /// As [`run_blocking_with`](Self::run_blocking_with), with a reader of the origins that the
    /// configuration allows, for each reload.
    pub(crate) fn run_blocking_reading(
        config: &TrackerConfig,
        transports: Transports,
        read_origins: impl Fn() -> Result<Vec<Origin>, ConfigError> + Send + Sync + 'static,
    ) -> Result<StopReason, ServeError> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("rpc-tracker").build();
        let runtime = runtime.map_err(ServeError::Runtime)?;
        let reason = runtime.block_on(async {
            let (tracker, server) = build(config, transports)?;
            let mut server = server.read_origins(read_origins);
            let page = serve_page(config, &tracker).await?;
            if let Some(page) = &page {
                server.announce_also(format!("status page on http://{}", page.address()));
            }
            server.run_until_signal().await
        });
        runtime.shutdown_background();
        reason
    }
}

fn build(config: &TrackerConfig, transports: Transports) -> Result<(Arc<Tracker>, RpcServer), ServeError> {
    config.check_with(&transports)?;
    let tracker = Tracker::new(TrackerOptions { transports: transports.clone(), ..config.options()? });
    let registry = Registry::new();
    tracker.register(&registry);
    let reloaded = Arc::downgrade(&tracker);
    let server = RpcServer::new(registry).config(config.serve_config()).transports(transports);
    #[cfg(feature = "tvm")]
    let server = match config.tvm {
        true => server.dialects(Dialects::default().with(TvmTrackerDialect(tracker.clone()))),
        false => server,
    };
    let server = server.gauges(tracker.clone()).on_reload(move |onward| {
        if let Some(tracker) = reloaded.upgrade() {
            tracker.set_onward(onward);
        }
    });
    Ok((tracker, server))
}

const METRICS: &[(&str, &str)] = &[
    ("rpc_tracker_servers", "Servers that are registered."),
    ("rpc_tracker_slots", "Slots that the servers have."),
    ("rpc_tracker_slots_free", "Slots that are free."),
    ("rpc_tracker_requests_waiting", "Requests that wait."),
    ("rpc_tracker_slots_granted_total", "Slots that were granted."),
];

impl Gauges for Tracker {
    fn described(&self) -> &'static [(&'static str, &'static str)] {
        METRICS
    }

    fn now(&self) -> Vec<u64> {
        let (servers, SlotTotals { capacity, free, waiting, granted, .. }) = self.totals();
        vec![servers, capacity, free, waiting, granted]
    }
}

async fn serve_page(config: &TrackerConfig, tracker: &Arc<Tracker>) -> Result<Option<HttpServer>, ServeError> {
    let Some(HttpAddress(address)) = config.http else { return Ok(None) };
    let server = page::serve(address, tracker, serve_command(config))
        .await
        .map_err(|source| ServeError::Page { address, source })?;
    tracing::info!(address = %server.address(), "serving the status page");
    Ok(Some(server))
}

/// Returns the command by which a server registers with a tracker of these settings.
fn serve_command(config: &TrackerConfig) -> String {
    let local = config.listen.first().map(|ListenAddress(address)| address.to_string());
    // Servers on other machines reach all addresses of this one by its name.
    let address = local.map(|address| {
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        ["0.0.0.0", "[::]"]
            .iter()
            .fold(address, |address, any| address.replace(&format!("//{any}:"), &format!("//{name}:")))
    });
    let address = address.unwrap_or_else(|| "ADDRESS".to_owned());
    let token = if config.token_file.is_some() { " --forward-token-file FILE" } else { "" };
    format!("rpc-server serve --tracker {address} --tracker-key KEY{token}")
}
