//! The end of a connection. A server of TVM stops for good if nobody takes its answers: the process
//! of the session fails at the second one, and the server with it. So its last answers are read.

use std::io::{self, Read as _};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use rpc_transports::{BlockingChannel, ChannelIo};
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

/// Ends a connection as [`leave`] does, without a runtime: on a thread.
pub(super) fn leave_blocking(channel: BlockingChannel) {
    let left = move || {
        let _ = channel.io().shutdown(Shutdown::Write);
        let until = Instant::now() + LINGER;
        let mut dropped = [0; 4096];
        loop {
            let left = until.saturating_duration_since(Instant::now());
            // There is no limit of zero, which the time's end is.
            if channel.io().set_read_timeout(Some(left)).is_err() {
                return;
            }
            match channel.io().read(&mut dropped) {
                Ok(1..) => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
                _ => return,
            }
        }
    };
    // Without the thread the connection is closed at once.
    let _ = std::thread::Builder::new().name("rpc-tvm-leave".into()).spawn(left);
}

/// Reads, and keeps nothing, until the server closes the connection.
pub(super) async fn discard(reader: &mut (impl AsyncRead + Unpin)) {
    let _ = copy(reader, &mut sink()).await;
}
