//! A server that runs: its addresses and sessions, the reload of credentials, and its end.

use std::error::Error as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rpc_transports::{Address, AllowedOrigins, Dial, Server, ServerTls};
use tokio::task::JoinHandle;

use super::certificate_expiry::CertificateExpiry;
use super::ready_file::ReadyFile;
use super::registrar::Registrar;
use super::server_state::ServerState;
use super::session_workspace::Cleaner;
use crate::config::{ConfigError, Origin, ServeError};
use crate::isolate::{self, Isolation};
use crate::monitor::{Monitoring, Phase};
use crate::otel::Spans;
use crate::pki::trust::{ClientTrust, ServerTrust};
use crate::policy::PolicySource;
#[cfg(feature = "tvm")]
use crate::tvm::proxy::parking::TvmParking;
#[cfg(feature = "tvm")]
use crate::tvm::tracker::TvmRegistrar;

/// Longest time for sending clients the reason why their sessions end.
const NOTIFY_TIMEOUT: Duration = Duration::from_secs(2);

/// Longest time to remove the files of sessions at the end. Functions that still run keep their
/// files.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(5);

/// Callback that gets the new options for dialling others.
pub(super) type OnReload = Box<dyn Fn(Dial) + Send + Sync>;

/// Reader of the origins that the configuration allows at present.
pub(super) type ReadOrigins = Box<dyn Fn() -> Result<Vec<Origin>, ConfigError> + Send + Sync>;

/// Reason for which a server has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// All sessions have ended after a signal, or were ended after the drain timeout.
    Drained,
    /// A second signal, with this number, stopped the server at once.
    SecondSignal(i32),
    /// The session on standard input and output, or that of the controller, has ended.
    SessionEnded,
    /// Standard input has ended.
    StdinEnded,
}

impl StopReason {
    /// Returns the exit code for this reason: 128 and the number of the signal after a second
    /// signal, as in shells, else 0.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::SecondSignal(signal) => u8::try_from(128 + signal).unwrap_or(u8::MAX),
            Self::Drained | Self::SessionEnded | Self::StdinEnded => 0,
        }
    }
}

/// A server that serves. Dropping it stops it now.
pub struct Running {
    pub(super) server: Server,
    pub(super) trust: ServerTrust,
    pub(super) policy: Option<Arc<PolicySource>>,
    pub(super) onward: ClientTrust,
    pub(super) tls: Option<ServerTls>,
    /// Web pages that the listeners serve.
    pub(super) origins: AllowedOrigins,
    pub(super) read_origins: Option<ReadOrigins>,
    pub(super) isolation: Option<Arc<Isolation>>,
    pub(super) cleaner: Arc<Cleaner>,
    pub(super) addresses: Vec<Address>,
    pub(super) state: Arc<ServerState>,
    pub(super) drain_timeout: Duration,
    pub(super) expiry: Arc<CertificateExpiry>,
    /// Housekeeping task, which removes expired workspaces, warns of the certificate's end, and
    /// gives memory back.
    pub(super) housekeeping: JoinHandle<()>,
    /// Ready file, which is removed from the file system on drop.
    pub(super) ready_file: Option<ReadyFile>,
    pub(super) monitoring: Option<Monitoring>,
    pub(super) spans: Option<Spans>,
    pub(super) registrar: Option<Registrar>,
    /// Registration at a tracker of TVM.
    #[cfg(feature = "tvm")]
    pub(super) tvm_registrar: Option<TvmRegistrar>,
    /// Wait at a proxy of TVM.
    #[cfg(feature = "tvm")]
    pub(super) tvm_parking: Option<TvmParking>,
    pub(super) on_reload: Option<OnReload>,
}

impl Running {
    /// Returns the addresses on which the server listens, with the chosen ports, in the order of
    /// the configuration.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Returns the address of metrics and health, with the chosen port, if they are served.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.monitoring.as_ref().map(Monitoring::address)
    }

    /// Reads certificates, tokens and the policy again, and uses them for all later connections. If
    /// one cannot be used, nothing changes. The programs then read the origins of web pages in
    /// their configuration file again (`allow-origin`). Blocks shortly.
    ///
    /// # Errors
    ///
    /// [`ServeError::Trust`]: a file with certificates or tokens cannot be read or used.
    /// [`ServeError::Policy`]: the policy cannot. [`ServeError::Config`]: the configuration file
    /// cannot; certificates, tokens and policy are the new ones then.
    pub fn reload(&self) -> Result<(), ServeError> {
        let onward = self.onward.dial_options()?;
        let policy = self.policy.as_ref().map(|policy| policy.read()).transpose()?;
        let credentials = self.trust.reload(self.tls.as_ref())?;
        // Nothing fails from here on. The policy comes before the tokens: no client that only the
        // new ones admit has the rights of the old policy. Certificates are in use since the line
        // above, because only their use shows that they are good: a client that they admit, and
        // whose session begins in this moment, may still have those rights.
        if let (Some(source), Some(policy)) = (&self.policy, policy) {
            source.set(policy);
        }
        self.server.set_access(credentials.access);
        self.expiry.set(credentials.validity);
        self.expiry.warn_if_soon();
        if let Some(registrar) = &self.registrar {
            registrar.set_dial(onward.clone());
        }
        if let Some(on_reload) = &self.on_reload {
            on_reload(onward.clone());
        }
        self.server.set_onward(onward);
        // Last, so that a file that is gone keeps no certificate from being renewed.
        if let Some(read_origins) = &self.read_origins {
            self.origins.set(read_origins()?.iter().map(ToString::to_string));
        }
        Ok(())
    }

    /// Returns the number of live sessions.
    pub fn sessions(&self) -> usize {
        self.server.sessions()
    }

    /// Returns the state that functions of the server can read.
    pub fn state(&self) -> &Arc<ServerState> {
        &self.state
    }

    pub(super) fn server(&self) -> &Server {
        &self.server
    }

    /// Stops in good order: refuses new sessions, tells clients to leave, and waits for sessions to
    /// end within the drain timeout. Stops the sessions that are left then. Returns when the
    /// processes of isolated sessions have ended, too.
    pub async fn drain(&self) {
        // Entered first, so that trackers and load balancers send clients elsewhere from now on.
        self.enter(Phase::Draining);
        self.server.drain(self.drain_timeout).await;
        let left = self.server.sessions();
        if left > 0 {
            tracing::warn!(sessions = left, limit = ?self.drain_timeout, "stopping the sessions that are left");
        }
        self.end().await;
    }

    /// Stops now: sessions end, and requests in progress fail. Does not wait until clients have
    /// been sent the reason. The processes of isolated sessions end [soon](isolate::GRACE).
    pub fn stop(&self) {
        self.enter(Phase::Draining);
        self.server.stop();
    }

    /// Stops, and waits until clients have been sent the reason, two seconds at most, and until the
    /// processes of isolated sessions have ended.
    pub async fn end(&self) {
        // A process is killed after the grace, which begins when its session has ended, a moment
        // after the stop.
        self.end_within(NOTIFY_TIMEOUT, 2 * isolate::GRACE).await;
    }

    /// Stops, and kills the processes of isolated sessions.
    pub(super) async fn end_now(&self) {
        self.end_within(NOTIFY_TIMEOUT / 2, Duration::ZERO).await;
    }

    async fn end_within(&self, notify_timeout: Duration, grace: Duration) {
        self.stop();
        if let Some(registrar) = &self.registrar {
            registrar.left().await;
        }
        self.server.stopped(notify_timeout).await;
        if let Some(isolation) = &self.isolation {
            isolation.end(grace).await;
        }
        if let Some(spans) = &self.spans {
            spans.end().await;
        }
        let cleaner = self.cleaner.clone();
        let cleaned = tokio::task::spawn_blocking(move || cleaner.flush(CLEANUP_TIMEOUT)).await;
        if !cleaned.unwrap_or(false) {
            tracing::warn!("files of sessions are left; the next server with this folder removes them");
        }
    }

    /// Resolves when there is no session.
    pub async fn idle(&self) {
        self.server.idle().await;
    }

    pub(super) fn reload_and_log(&self) {
        match self.reload() {
            Ok(()) => tracing::info!("certificates, tokens, policy and origins have been read again"),
            Err(error) => {
                let (mut causes, mut next) = (Vec::new(), error.source());
                while let Some(cause) = next {
                    causes.push(cause.to_string());
                    next = cause.source();
                }
                let cause = causes.join(": ");
                if matches!(error, ServeError::Config(_)) {
                    tracing::error!(
                        %error,
                        cause,
                        "certificates, tokens and policy have been read again; cannot read origins, the old ones stay \
                         in use"
                    );
                } else {
                    tracing::error!(
                        %error,
                        cause,
                        "cannot reload credentials, policy and origins; the old ones stay in use"
                    );
                }
            }
        }
    }

    pub(super) fn enter(&self, phase: Phase) {
        if let (Phase::Draining, Some(registrar)) = (phase, &self.registrar) {
            registrar.leave();
        }
        #[cfg(feature = "tvm")]
        if let (Phase::Draining, Some(registrar)) = (phase, &self.tvm_registrar) {
            registrar.leave();
        }
        #[cfg(feature = "tvm")]
        if let (Phase::Draining, Some(parking)) = (phase, &self.tvm_parking) {
            parking.leave();
        }
        if let Some(monitoring) = &self.monitoring {
            monitoring.enter(phase);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.housekeeping.abort();
        self.server.stop();
    }
}

impl std::fmt::Debug for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Running")
            .field("addresses", &self.addresses)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}
