//! Queue of the servers that prove where they are. Each peer has a share of the permits and of the
//! queue, so that one whose servers do not answer keeps none of the others waiting.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use rpc_core::{Result, RpcError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

/// Maximum number of proofs at one time.
const PROOFS: usize = 32;

/// Maximum number of proofs of one peer at one time.
const PROOFS_PER_PEER: usize = 4;

/// Maximum number of servers that prove where they are, or wait for that. Further ones are refused,
/// and try again.
const MAX_QUEUED: usize = 1024;

/// Maximum number of servers of one peer that do.
const MAX_QUEUED_PER_PEER: usize = 256;

/// Queue of proofs; see the [module](self).
#[derive(Debug)]
pub(super) struct ProofQueue {
    running: Semaphore,
    peers: Mutex<PeerQueues>,
}

#[derive(Debug, Default)]
struct PeerQueues {
    in_all: usize,
    by_peer: HashMap<String, PeerQueue>,
}

/// Proofs of one peer.
#[derive(Debug)]
struct PeerQueue {
    /// Number of proofs that run or wait. The entry is removed with the last one.
    queued: usize,
    running: Arc<Semaphore>,
}

/// Entry of a server in the queue, until it is dropped.
#[derive(Debug)]
pub(super) struct QueuedProof<'a> {
    queue: &'a ProofQueue,
    peer: String,
    running: Arc<Semaphore>,
}

/// Permit of a proof that runs.
#[derive(Debug)]
pub(super) struct ProofPermit<'a> {
    _of_peer: Option<OwnedSemaphorePermit>,
    _of_all: Option<SemaphorePermit<'a>>,
}

impl ProofQueue {
    pub(super) fn new() -> Self {
        Self { running: Semaphore::new(PROOFS), peers: Mutex::default() }
    }

    /// Adds a server of `peer`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`](rpc_core::ErrorKind::LimitExceeded): too many wait at this
    /// time, in all or from this peer.
    pub(super) fn enter(&self, peer: &str) -> Result<QueuedProof<'_>> {
        let mut peers = self.peers.lock();
        let of_peer = peers.by_peer.get(peer).map_or(0, |queue| queue.queued);
        for (limit, max, queued) in [
            ("servers that prove where they are", MAX_QUEUED, peers.in_all),
            ("servers of one peer that prove where they are", MAX_QUEUED_PER_PEER, of_peer),
        ] {
            if queued >= max {
                return Err(RpcError::limit(limit, max as u64, queued as u64 + 1));
            }
        }
        peers.in_all += 1;
        let queue = peers
            .by_peer
            .entry(peer.to_owned())
            .or_insert_with(|| PeerQueue { queued: 0, running: Arc::new(Semaphore::new(PROOFS_PER_PEER)) });
        queue.queued += 1;
        Ok(QueuedProof { queue: self, peer: peer.to_owned(), running: queue.running.clone() })
    }
}

impl QueuedProof<'_> {
    /// Waits for the turn of this server: first among those of its peer, so that only a peer's
    /// share of them is in the way of others, and then among all.
    pub(super) async fn turn(&self) -> ProofPermit<'_> {
        // The semaphores are never closed.
        let of_peer = self.running.clone().acquire_owned().await.ok();
        let of_all = self.queue.running.acquire().await.ok();
        ProofPermit { _of_peer: of_peer, _of_all: of_all }
    }
}

impl Drop for QueuedProof<'_> {
    fn drop(&mut self) {
        let mut peers = self.queue.peers.lock();
        peers.in_all -= 1;
        if let Some(queue) = peers.by_peer.get_mut(&self.peer) {
            queue.queued -= 1;
            if queue.queued == 0 {
                peers.by_peer.remove(&self.peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::{Pin, pin};
    use std::task::Poll;

    use super::*;

    async fn is_pending<F: Future>(future: &mut Pin<&mut F>) -> bool {
        std::future::poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_pending())).await
    }

    /// Regression: 32 servers of one peer that did not answer kept those of all peers waiting.
    #[tokio::test]
    async fn a_peer_whose_servers_do_not_answer_keeps_none_of_the_others_waiting() {
        let queue = ProofQueue::new();
        let silent: Vec<_> = (0..MAX_QUEUED_PER_PEER).map(|_| queue.enter("silent").unwrap()).collect();
        let mut running = Vec::new();
        for queued in &silent[..PROOFS_PER_PEER] {
            running.push(queued.turn().await);
        }
        let mut next = pin!(silent[PROOFS_PER_PEER].turn());
        assert!(is_pending(&mut next).await, "more than the peer's share run at once");
        let error = queue.enter("silent").unwrap_err();
        assert!(error.message().contains("of one peer"), "{error}");

        let other = queue.enter("other").unwrap();
        let mut turn = pin!(other.turn());
        assert!(!is_pending(&mut turn).await, "others wait for the silent peer");

        running.pop();
        let _next = next.await;
    }

    #[tokio::test]
    async fn the_queue_is_bounded_in_all_and_keeps_nothing() {
        let queue = ProofQueue::new();
        let peers = MAX_QUEUED / MAX_QUEUED_PER_PEER;
        let all: Vec<_> = (0..MAX_QUEUED).map(|at| queue.enter(&format!("p{}", at % peers)).unwrap()).collect();
        let error = queue.enter("other").unwrap_err();
        assert!(error.message().contains("servers that prove"), "{error}");
        drop(all);
        assert!(queue.peers.lock().by_peer.is_empty());
        queue.enter("other").unwrap();
    }
}
