//! The end of a connection. A server of TVM stops for good if nobody takes its answers: the process
//! of the session fails at the second one, and the server with it. So its last answers are read.

use std::time::Duration;

use rpc_transports::ChannelIo;
use tokio::io::{AsyncRead, AsyncWriteExt as _, copy, sink, split};
use tokio::time::timeout;

/// Longest time for which a connection is kept after its end. A call that runs longer finds nobody.
pub(super) const LINGER: Duration = Duration::from_secs(60);

/// Ends a connection between two requests: tells the server that no more come, and drops what it
/// still answers. `guard` holds what the connection needs.
pub(super) async fn leave(io: Box<dyn ChannelIo>, guard: impl Send) {
    let (mut reader, mut writer) = split(io);
    let left = async {
        let _ = writer.shutdown().await;
        discard(&mut reader).await;
    };
    let _ = timeout(LINGER, left).await;
    drop(guard);
}

/// Reads, and keeps nothing, until the server closes the connection.
pub(super) async fn discard(reader: &mut (impl AsyncRead + Unpin)) {
    let _ = copy(reader, &mut sink()).await;
}
