//! A server before it runs: its functions, devices and settings.

use std::sync::Arc;

use rpc_core::{Devices, Registry};
use rpc_transports::program::Program;
use rpc_transports::{Dial, Dialects, Transports};

use super::disco_node::Join;
use super::running::{Running, StopReason};
use super::signals::Signals;
use super::standard_streams;
use super::start::{ServerParts, start};
use crate::config::{ConfigError, ListenAddress, Origin, ServeConfig, ServeError};
use crate::monitor::Gauges;
#[cfg(feature = "tvm")]
use crate::tvm::proxy::TvmProxyTerms;

/// A server that has not been started.
pub struct RpcServer {
    parts: ServerParts,
    /// Addresses given to [`listen`](Self::listen), not parsed yet.
    listen: Vec<String>,
    /// Lines to be printed after the addresses.
    extra_announcements: Vec<String>,
    /// Controller to join.
    join: Option<Join>,
}

impl RpcServer {
    /// Returns a server of these functions and module loaders, to which
    /// [`builtins`](crate::builtins) are added. It has the device `cpu` and the default settings.
    pub fn new(registry: Registry) -> Self {
        let parts = ServerParts {
            registry,
            devices: Devices::new(),
            config: ServeConfig::default(),
            transports: crate::transports(),
            dialects: Dialects::default(),
            is_relay: false,
            #[cfg(feature = "tvm")]
            tvm_proxy: None,
            on_reload: None,
            read_origins: None,
            gauges: None,
            program: None,
        };
        Self { parts, listen: Vec::new(), extra_announcements: Vec::new(), join: None }
    }

    /// Listens on `address`, such as `tcp://127.0.0.1:9090`; may be repeated. Replaces the
    /// addresses of the configuration. An address that cannot be used is an error when the server
    /// starts.
    #[must_use]
    pub fn listen(mut self, address: impl Into<String>) -> Self {
        self.listen.push(address.into());
        self
    }

    /// Sets the devices to serve. Default: `cpu` alone.
    #[must_use]
    pub fn devices(mut self, devices: Devices) -> Self {
        self.parts.devices = devices;
        self
    }

    /// Sets the settings. Default: those of [`ServeConfig`].
    #[must_use]
    pub fn config(mut self, config: ServeConfig) -> Self {
        self.parts.config = config;
        self
    }

    /// Sets the transports by which the server listens, forwards, registers and reaches relays.
    /// Default: those that this program was compiled with.
    #[must_use]
    pub fn transports(mut self, transports: Transports) -> Self {
        self.parts.transports = transports;
        self
    }

    /// Sets other protocols in which clients may speak to the server, on all its addresses.
    /// Default: none.
    #[must_use]
    pub fn dialects(mut self, dialects: Dialects) -> Self {
        self.parts.dialects = dialects;
        self
    }

    /// Sets the program that the processes of isolated sessions run. It must have the functions of
    /// this server, and call [`run_if_isolated`](crate::isolate::run_if_isolated). Default: the
    /// [running](Program::this) one.
    #[must_use]
    pub fn program(mut self, program: Program) -> Self {
        self.parts.program = Some(program);
        self
    }

    /// Makes the server a relay, which opens no sessions: see
    /// [`ServeOptions::relay`](rpc_transports::ServeOptions::relay).
    #[must_use]
    pub(crate) fn relay(mut self) -> Self {
        self.parts.is_relay = true;
        self
    }

    /// Makes the relay a proxy for peers of TVM, too.
    #[cfg(feature = "tvm")]
    #[must_use]
    pub(crate) fn tvm_proxy(mut self, terms: Option<TvmProxyTerms>) -> Self {
        self.parts.tvm_proxy = terms;
        self
    }

    /// Sets a callback that gets the options for dialling others each time the credentials have
    /// been read again.
    #[must_use]
    pub(crate) fn on_reload(mut self, callback: impl Fn(Dial) + Send + Sync + 'static) -> Self {
        self.parts.on_reload = Some(Box::new(callback));
        self
    }

    /// Sets the reader of the origins that the configuration allows, for each
    /// [`reload`](Running::reload).
    #[must_use]
    pub(crate) fn read_origins(
        mut self,
        read: impl Fn() -> Result<Vec<Origin>, ConfigError> + Send + Sync + 'static,
    ) -> Self {
        self.parts.read_origins = Some(Box::new(read));
        self
    }

    /// Adds `gauges` to the metrics, if metrics are served.
    #[must_use]
    pub(crate) fn gauges(mut self, gauges: Arc<dyn Gauges>) -> Self {
        self.parts.gauges = Some(gauges);
        self
    }

    /// Joins a controller once the server serves, and stops it when the controller's session ends.
    pub(crate) fn join(&mut self, join: Join) {
        self.join = Some(join);
    }

    /// Prints `line` after the addresses.
    pub(crate) fn announce_also(&mut self, line: String) {
        self.extra_announcements.push(line);
    }

    /// Starts to serve. Needs a tokio runtime with I/O and time, on which asynchronous functions
    /// run too.
    ///
    /// When this returns, all addresses are bound and the ready file is written.
    ///
    /// # Errors
    ///
    /// The configuration, an address, the folder for workspaces, the address for metrics, or the
    /// ready file cannot be used.
    pub async fn start(mut self) -> Result<Running, ServeError> {
        if !self.listen.is_empty() {
            let parse = |text: &String| {
                let address = text.parse::<ListenAddress>();
                address.map_err(|source| ConfigError::ListenAddress { text: text.clone(), source })
            };
            self.parts.config.listen = self.listen.iter().map(parse).collect::<Result<_, _>>()?;
        }
        start(self.parts).await
    }

    /// Starts to serve, prints `listening on ADDRESS` for each address on standard output, then
    /// `metrics on URL` if metrics are served, and serves until SIGTERM or SIGINT. The server then
    /// tells clients to leave and waits for their sessions to end within the drain timeout; a
    /// second signal stops at once. SIGHUP reads certificates and tokens again.
    ///
    /// With `stdio`, or after joining a controller, the server also stops when that session ends;
    /// with `exit_with_stdin`, when standard input ends.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start).
    pub async fn run_until_signal(mut self) -> Result<StopReason, ServeError> {
        let mut signals = Signals::install().map_err(ServeError::Signals)?;
        let (stdio, exit_with_stdin) = (self.parts.config.stdio, self.parts.config.exit_with_stdin);
        let (extra_announcements, join) = (std::mem::take(&mut self.extra_announcements), self.join.take());
        let running = self.start().await?;
        standard_streams::announce(&running, &extra_announcements);
        let session_of_controller = async {
            match &join {
                Some(join) => join.run(running.server()).await,
                None => std::future::pending().await,
            }
        };
        let stdin_ended =
            async { if exit_with_stdin { standard_streams::stdin_end().await } else { std::future::pending().await } };
        let only_session_ended = async { if stdio { running.idle().await } else { std::future::pending().await } };
        tokio::select! {
            signal = signals.next_but_hangup(|| running.reload_and_log()) => {
                tracing::info!(signal, "draining: no new sessions; a second signal stops at once");
            }
            () = stdin_ended => {
                running.end().await;
                return Ok(StopReason::StdinEnded);
            }
            joined = session_of_controller => {
                running.end().await;
                return joined.map(|()| StopReason::SessionEnded);
            }
            () = only_session_ended => {
                running.end().await;
                return Ok(StopReason::SessionEnded);
            }
        }
        tokio::select! {
            () = running.drain() => {}
            signal = signals.next() => {
                running.end_now().await;
                return Ok(StopReason::SecondSignal(signal));
            }
        }
        Ok(StopReason::Drained)
    }

    /// As [`run_until_signal`](Self::run_until_signal), on a runtime of its own. Blocks.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start); and an error if the runtime cannot be started.
    pub fn run_blocking(self) -> Result<StopReason, ServeError> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("rpc-server").build();
        let runtime = runtime.map_err(ServeError::Runtime)?;
        let reason = runtime.block_on(self.run_until_signal());
        // Blocking functions that still run may take hours, so the runtime does not wait for them.
        runtime.shutdown_background();
        reason
    }
}

impl Default for RpcServer {
    /// Returns a server of [`builtins`](crate::builtins) alone.
    fn default() -> Self {
        Self::new(Registry::new())
    }
}

impl std::fmt::Debug for RpcServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RpcServer").field("config", &self.parts.config).finish_non_exhaustive()
    }
}
