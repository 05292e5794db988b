//! Connection to a tracker of TVM, for servers that register there and for clients.

use std::time::Duration;

use rpc_core::{ErrorKind, Result, RpcError};
use rpc_tvm::wire::{MAX_TRACKER_MESSAGE, TRACKER_MAGIC, TrackerMessage};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::super::link::lost;

/// Time limit of a connect, and of a reply to which the tracker does not wait.
const REPLY_LIMIT: Duration = Duration::from_secs(10);

/// Connection to a tracker of TVM, over a stream of bytes.
pub(crate) struct TrackerLink<S>(pub(crate) S);

impl<S: AsyncRead + AsyncWrite + Unpin> TrackerLink<S> {
    /// Exchanges the magic with the tracker.
    pub(crate) async fn begin(mut stream: S) -> Result<Self> {
        let magic = TRACKER_MAGIC.to_le_bytes();
        stream.write_all(&magic).await.map_err(|error| lost(&error))?;
        stream.flush().await.map_err(|error| lost(&error))?;
        let mut answer = [0; 4];
        let read = within("the answer", stream.read_exact(&mut answer)).await?;
        read.map_err(|error| lost(&error))?;
        if answer != magic {
            return Err(malformed("it does not answer as a tracker of TVM"));
        }
        Ok(Self(stream))
    }

    /// Sends a message, and returns the text of the reply. Waits for as long as the tracker does.
    pub(crate) async fn exchange(&mut self, message: &TrackerMessage) -> Result<Vec<u8>> {
        self.0.write_all(&message.encode()).await.map_err(|error| lost(&error))?;
        self.0.flush().await.map_err(|error| lost(&error))?;
        let mut len = [0; 4];
        self.0.read_exact(&mut len).await.map_err(|error| lost(&error))?;
        let len = usize::try_from(i32::from_le_bytes(len)).ok();
        let len = len.filter(|len| (1..=MAX_TRACKER_MESSAGE).contains(len));
        let mut reply = vec![0; len.ok_or_else(|| malformed("its reply has no possible length"))?];
        self.0.read_exact(&mut reply).await.map_err(|error| lost(&error))?;
        Ok(reply)
    }
}

/// Waits for `work`, for as long as a tracker may take.
pub(crate) async fn within<T>(what: &str, work: impl Future<Output = T>) -> Result<T> {
    let late = |_| RpcError::new(ErrorKind::DeadlineExceeded, format!("{what} takes longer than {REPLY_LIMIT:?}"));
    tokio::time::timeout(REPLY_LIMIT, work).await.map_err(late)
}

pub(crate) fn malformed(what: &str) -> RpcError {
    RpcError::new(ErrorKind::Protocol, format!("the tracker of TVM breaks its protocol: {what}"))
}
