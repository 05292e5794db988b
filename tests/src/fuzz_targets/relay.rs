//! Connections to a relay that send any bytes.

use std::sync::Arc;
use std::time::Duration;

use rpc_core::Registry;
use rpc_core::proto::MAGIC;
use rpc_transports::memory::duplex;
use rpc_transports::{ServeOptions, Server};
use tokio::io::AsyncWriteExt;

use super::{runtime, split};

/// Two connections to one relay, which may be a server's and a client's. The first two bytes are
/// the length of what the first one sends; the second one sends the rest.
///
/// Both come to an end, and the relay is empty then.
pub fn relay(input: &[u8]) {
    runtime().block_on(async {
        let relay = Server::new(Arc::new(Registry::new()), ServeOptions { relay: true, ..ServeOptions::default() });
        let (first, second) = split(input);
        tokio::join!(connect(&relay, first), connect(&relay, second));
        let emptied = tokio::time::timeout(Duration::from_secs(3600), relay.idle()).await;
        assert!(emptied.is_ok(), "the relay keeps connections whose peers have gone");
        assert!(relay.parked().is_empty(), "the relay keeps a server that has gone");
    });
}

/// Sends the bytes behind the protocol's magic number, and reads whatever comes for an hour.
async fn connect(relay: &Server, bytes: &[u8]) {
    let (mut near, far) = duplex();
    relay.serve_channel(far);
    let io = near.io_mut();
    let answered = async {
        io.write_all(&MAGIC).await?;
        io.write_all(bytes).await?;
        tokio::io::copy(io, &mut tokio::io::sink()).await
    };
    let _ = tokio::time::timeout(Duration::from_secs(3600), answered).await;
}
