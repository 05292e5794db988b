//! The transports of the programs: those of `rpc-transports`, and WebSockets.

use rpc_transports::Transports;

/// Returns the transports that `rpc-server` and `rpc-cli` have: those that `rpc-transports` was
/// compiled with, and by the feature `websocket`, which is on by default, `ws://` and `wss://`. A
/// program of one's own adds to them and calls [`daemon::main_with`](crate::daemon::main_with) or
/// [`cli::main_with`](crate::cli::main_with).
#[must_use]
pub fn transports() -> Transports {
    let transports = Transports::default();
    #[cfg(feature = "websocket")]
    let transports = transports.with(rpc_websocket::WebSocket::new());
    transports
}
