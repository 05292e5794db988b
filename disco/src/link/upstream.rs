//! What links report to: the controller, or the node above.

use std::task::{Context, Poll};

use rpc_core::RpcError;

use crate::link::relay::Wanted;
use crate::wire::event::Event;

/// Whom links tell what comes of them.
pub(crate) trait Upstream: Send + Sync {
    /// A worker has said something.
    fn handle(&self, event: Event);

    /// A link is of no more use.
    fn lose(&self, link: usize, error: RpcError);

    /// Has the data of a worker carried to another one, or tells it why not.
    fn relay(&self, wanted: Wanted);

    /// Ready when more can be taken. The task is woken.
    fn poll_room(&self, _: &mut Context<'_>) -> Poll<()> {
        Poll::Ready(())
    }
}
