//! Sessions that share memory with a peer on this machine: who has the feature, and the way of each
//! side to its window.

use rpc_core::proto::{ClientEndpoint, Negotiated, PIPES, SHARED_MEMORY, ServerEndpoint};

#[cfg(target_os = "linux")]
use crate::shared_window;

/// Returns the features of this side of a handshake for a session. `shares_memory` is true if the
/// peer is a known process of this machine.
pub(crate) fn features(shares_memory: bool) -> Vec<String> {
    let shared = (shares_memory && cfg!(target_os = "linux")).then_some(SHARED_MEMORY);
    shared.into_iter().chain([PIPES]).map(str::to_owned).collect()
}

/// Lets a client's endpoint offer a window, if both sides have the feature.
pub(crate) fn offered_by<T: Clone>(endpoint: ClientEndpoint<T>, negotiated: &Negotiated) -> ClientEndpoint<T> {
    #[cfg(target_os = "linux")]
    if negotiated.has_feature(SHARED_MEMORY) {
        return endpoint.with_window(Box::new(shared_window::offer));
    }
    let _ = negotiated;
    endpoint
}

/// Lets a server's endpoint open a window of its client, which is `process`, if both sides have the
/// feature.
pub(crate) fn opened_by(endpoint: ServerEndpoint, negotiated: &Negotiated, process: Option<u32>) -> ServerEndpoint {
    #[cfg(target_os = "linux")]
    if let Some(process) = process
        && negotiated.has_feature(SHARED_MEMORY)
    {
        return endpoint.with_window(shared_window::opener(process));
    }
    let _ = (negotiated, process);
    endpoint
}
