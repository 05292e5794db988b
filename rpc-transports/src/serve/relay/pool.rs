//! Pool of a relay: servers that have dialled in and wait, each for one client that asks for its
//! key.

use std::collections::{HashMap, VecDeque};

use bytes::BytesMut;
use parking_lot::{Mutex, MutexGuard};
use rpc_core::{ErrorKind, RpcError};
use tokio::sync::{Notify, oneshot};

use crate::channel::Channel;

/// Channel of a parked server after its handshake with the relay, and its share in the relay's
/// limits.
pub(in crate::serve) struct ParkedServer {
    pub(in crate::serve) channel: Channel,
    /// Input that was read beyond the handshake. Empty if the server waits for its client to send
    /// first.
    pub(in crate::serve) input: BytesMut,
    /// Share of the server in the relay's limits, kept for as long as the channel.
    pub(in crate::serve) held: Box<dyn Send + Sync>,
}

/// Sender by which a server's task hands its channel over, once the server is accepted.
pub(in crate::serve) type Handover = oneshot::Sender<ParkedServer>;

/// Pool of waiting servers.
#[derive(Default)]
pub(in crate::serve) struct ServerPool {
    state: Mutex<PoolState>,
    /// Notified whenever a server has come.
    arrived: Notify,
}

#[derive(Default)]
struct PoolState {
    next: u64,
    /// Waiting servers by key, those that have waited longest in front. No queue is empty.
    by_key: HashMap<String, VecDeque<(u64, oneshot::Sender<Handover>)>>,
}

/// Entry of a waiting server, which is removed when dropped.
struct PoolEntry<'a> {
    pool: &'a ServerPool,
    key: String,
    id: u64,
}

impl ServerPool {
    /// Waits for a client that asks for `key`. The caller then accepts the server, and hands its
    /// channel over. Cancel-safe.
    pub(in crate::serve) async fn park(&self, key: &str) -> Result<Handover, RpcError> {
        let (claim, claimed) = oneshot::channel();
        let _entry = self.add(key, claim);
        claimed.await.map_err(|_| RpcError::internal("a parked server's entry was dropped"))
    }

    /// Returns the channel of a server with this key, for one client.
    pub(in crate::serve) async fn claim(&self, key: &str) -> Result<ParkedServer, RpcError> {
        loop {
            let Some(claim) = self.take(key) else {
                let text = match key {
                    "" => "this is a relay: ask for a server by its key, as in ADDRESS/KEY".to_owned(),
                    key => format!("no server with key '{key}' waits at this relay: none has come, or all are in use"),
                };
                return Err(RpcError::new(ErrorKind::NotFound, text));
            };
            let (handover, handed) = oneshot::channel();
            // A server that has just gone is skipped: another one may be waiting.
            if claim.send(handover).is_ok()
                && let Ok(parked) = handed.await
            {
                return Ok(parked);
            }
        }
    }

    /// Returns the channel and the key of the first server whose key is `wanted`, or waits for one.
    /// Cancel-safe.
    pub(in crate::serve) async fn wait_for(&self, wanted: impl Fn(&str) -> bool) -> (String, ParkedServer) {
        loop {
            let arrived = self.arrived.notified();
            let mut arrived = std::pin::pin!(arrived);
            // Enabled before the pool is searched, so that a server that comes in between is not
            // missed.
            arrived.as_mut().enable();
            let key = self.state().by_key.keys().find(|key| wanted(key)).cloned();
            match key {
                Some(key) => {
                    // On an error the server has gone again.
                    if let Ok(parked) = self.claim(&key).await {
                        return (key, parked);
                    }
                }
                None => arrived.await,
            }
        }
    }

    fn add(&self, key: &str, claim: oneshot::Sender<Handover>) -> PoolEntry<'_> {
        let mut state = self.state();
        let id = state.next;
        state.next += 1;
        state.by_key.entry(key.to_owned()).or_default().push_back((id, claim));
        drop(state);
        self.arrived.notify_waiters();
        PoolEntry { pool: self, key: key.to_owned(), id }
    }

    /// Returns the number of waiting servers by key.
    pub(in crate::serve) fn waiting(&self) -> Vec<(String, usize)> {
        self.state().by_key.iter().map(|(key, waiting)| (key.clone(), waiting.len())).collect()
    }

    fn take(&self, key: &str) -> Option<oneshot::Sender<Handover>> {
        let mut state = self.state();
        let waiting = state.by_key.get_mut(key)?;
        let (_, claim) = waiting.pop_front()?;
        if waiting.is_empty() {
            state.by_key.remove(key);
        }
        Some(claim)
    }

    fn state(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock()
    }
}

impl Drop for PoolEntry<'_> {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        let Some(waiting) = state.by_key.get_mut(&self.key) else { return };
        // Ids ascend with age.
        if let Ok(at) = waiting.binary_search_by_key(&self.id, |(id, _)| *id) {
            waiting.remove(at);
        }
        if waiting.is_empty() {
            state.by_key.remove(&self.key);
        }
    }
}
