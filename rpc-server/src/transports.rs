//! The transports of the programs: those of `rpc-transports`, WebSockets, and servers of TVM.

use rpc_transports::Transports;

/// Returns the transports that `rpc-server` and `rpc-cli` have: those that `rpc-transports` was
/// compiled with, and by features that are on by default: `ws://` and `wss://` (`websocket`), and
/// `tvm://` and `tvm-tracker://` for servers of TVM (`tvm`). A program of one's own adds to them and calls
/// [`daemon::main_with`](crate::daemon::main_with) or [`cli::main_with`](crate::cli::main_with).
#[must_use]
pub fn transports() -> Transports {
    let transports = Transports::default();
    #[cfg(feature = "websocket")]
    let transports = transports.with(rpc_websocket::WebSocket::new());
    #[cfg(feature = "tvm")]
    let transports = {
        let servers = crate::tvm::client::TvmOpener::new();
        transports.with_opener(servers.clone()).with_opener(crate::tvm::client::TvmTrackerOpener::new(servers))
    };
    transports
}
