//! Upstream of links: the controller, or the node above.

use std::task::{Context, Poll};

use rpc_core::RpcError;

use crate::link::relayed_data::RelayRequest;
use crate::wire::event::Event;

/// Receiver of the links' reports.
pub(crate) trait Upstream: Send + Sync {
    /// Takes the event of a worker at the link with this number.
    fn handle(&self, link: usize, event: Event);

    /// Takes the loss of a link.
    fn lose(&self, link: usize, error: RpcError);

    /// Relays the data of a worker to another one, or tells it why not.
    fn relay(&self, wanted: RelayRequest);

    /// Returns ready once more events can be taken. The task is woken then.
    fn poll_room(&self, _: &mut Context<'_>) -> Poll<()> {
        Poll::Ready(())
    }
}
