//! Options of sessions and connections, as the settings of a server give them.
//!
//! All fields are written out, so that the compiler reports each new limit that is missing here.

use std::sync::Arc;
use std::time::Duration;

use rpc_core::SessionLimits;
use rpc_transports::{
    Access, Dial, Dialects, FunctionPatterns, RequestPolicy, ServeObserver, ServeOptions, Transports, WireLimits,
};

use crate::config::ServeConfig;

pub(crate) fn session_limits(config: &ServeConfig) -> SessionLimits {
    SessionLimits {
        max_requests: config.max_requests as usize,
        max_queued_bytes: usize::try_from(config.max_queued.0).unwrap_or(usize::MAX),
        max_handles: config.max_handles,
        max_memory: config.max_memory.0,
        max_threads: config.max_threads,
    }
}

pub(crate) fn wire_limits(config: &ServeConfig) -> WireLimits {
    WireLimits {
        max_message: config.max_message.0,
        chunk: u32::try_from(config.max_frame.0).unwrap_or(u32::MAX),
        max_requests: config.max_requests,
        window: config.max_queued.0,
    }
}

/// Returns the time for which sessions of the server look for input before they wait.
pub(crate) fn spin_time(config: &ServeConfig) -> Duration {
    if config.spin { rpc_transports::SPIN } else { Duration::ZERO }
}

pub(super) fn serve_options(
    config: &ServeConfig,
    access: Access,
    onward: Dial,
    transports: Transports,
    dialects: Dialects,
    relay: bool,
    observer: Option<Arc<dyn ServeObserver>>,
) -> ServeOptions {
    ServeOptions {
        key: config.key.clone().unwrap_or_default(),
        keep_alive: config.keep_alive.0,
        spin: spin_time(config),
        handshake_timeout: config.handshake_timeout.0,
        limits: wire_limits(config),
        max_total_queued: config.max_total_queued.0,
        max_open_files: config.max_open_files,
        max_total_open_files: config.max_total_open_files,
        max_sessions: config.max_sessions,
        max_sessions_per_peer: config.max_sessions_per_peer,
        max_handshakes: config.max_handshakes,
        session_duration: config.session_duration.map(|limit| limit.0),
        idle_timeout: config.idle_timeout.map(|limit| limit.0),
        write_timeout: config.write_timeout.0,
        min_rate: config.min_rate.0,
        access,
        allow_forward: config.allow_forward.clone(),
        allow_port: config.allow_port.clone(),
        forward_policy: forward_policy(config),
        trust_proxy: config.trust_proxy.clone(),
        // Set by the caller, which has read the policy.
        authorizer: None,
        // Set by the caller, which has the factory of sessions.
        capabilities: None,
        onward,
        transports,
        dialects,
        relay,
        observer,
    }
}

fn forward_policy(config: &ServeConfig) -> Option<Arc<dyn RequestPolicy>> {
    let patterns = (!config.forward_functions.is_empty()).then(|| config.forward_functions.clone())?;
    Some(Arc::new(FunctionPatterns::new(patterns)))
}
