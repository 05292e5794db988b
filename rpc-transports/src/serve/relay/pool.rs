//! What a relay does: servers that have dialled in wait, each for one client that asks for its key.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::BytesMut;
use rpc_core::{ErrorKind, RpcError};
use tokio::sync::{Notify, oneshot};

use crate::channel::Channel;
use crate::serve::admission::Place;
use crate::serve::server::Registered;

/// A server's channel behind the handshake with the relay, and what counts it.
pub(in crate::serve) struct Parked {
    pub(in crate::serve) channel: Channel,
    /// What was read beyond the handshake: nothing, of a server that waits to be spoken to.
    pub(in crate::serve) input: BytesMut,
    pub(in crate::serve) _place: Place,
    pub(in crate::serve) _registered: Arc<Registered>,
}

/// Where a server's task hands its channel over, once it is accepted.
pub(in crate::serve) type Handover = oneshot::Sender<Parked>;

/// The servers that wait.
#[derive(Default)]
pub(in crate::serve) struct Parking {
    state: Mutex<State>,
    /// Told whenever a server has come.
    arrived: Notify,
}

#[derive(Default)]
struct State {
    next: u64,
    /// By key, those that have waited longest in front. No key is without.
    by_key: HashMap<String, VecDeque<(u64, oneshot::Sender<Handover>)>>,
}

/// A server that waits, until dropped.
struct Spot<'a> {
    parking: &'a Parking,
    key: String,
    id: u64,
}

impl Parking {
    /// Waits for a client that asks for `key`. The server is to be accepted then, and its channel
    /// handed over. Cancel-safe.
    pub(in crate::serve) async fn park(&self, key: &str) -> Result<Handover, RpcError> {
        let (claim, claimed) = oneshot::channel();
        let _spot = self.add(key, claim);
        claimed.await.map_err(|_| RpcError::internal("a place at the relay was given away"))
    }

    /// The channel of a server with this key, for one client.
    pub(in crate::serve) async fn claim(&self, key: &str) -> Result<Parked, RpcError> {
        loop {
            let Some(claim) = self.take(key) else {
                let text = match key {
                    "" => "this is a relay: ask for a server by its key, as in ADDRESS/KEY".to_owned(),
                    key => format!("no server with key '{key}' waits at this relay: none has come, or all are in use"),
                };
                return Err(RpcError::new(ErrorKind::NotFound, text));
            };
            let (handover, handed) = oneshot::channel();
            // One that has gone in this moment is not the last one.
            if claim.send(handover).is_ok()
                && let Ok(parked) = handed.await
            {
                return Ok(parked);
            }
        }
    }

    /// The channel of the first server to come, or to be here, whose key is `wanted`, and that key.
    /// Cancel-safe.
    pub(in crate::serve) async fn meet(&self, wanted: impl Fn(&str) -> bool) -> (String, Parked) {
        loop {
            let arrived = self.arrived.notified();
            let mut arrived = std::pin::pin!(arrived);
            // Registered before looking, so that one that comes in between is not missed.
            arrived.as_mut().enable();
            let key = self.state().by_key.keys().find(|key| wanted(key)).cloned();
            match key {
                Some(key) => {
                    // Gone again, if there is an error.
                    if let Ok(parked) = self.claim(&key).await {
                        return (key, parked);
                    }
                }
                None => arrived.await,
            }
        }
    }

    fn add(&self, key: &str, claim: oneshot::Sender<Handover>) -> Spot<'_> {
        let mut state = self.state();
        let id = state.next;
        state.next += 1;
        state.by_key.entry(key.to_owned()).or_default().push_back((id, claim));
        drop(state);
        self.arrived.notify_waiters();
        Spot { parking: self, key: key.to_owned(), id }
    }

    /// How many servers wait, by key.
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

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Spot<'_> {
    fn drop(&mut self) {
        let mut state = self.parking.state();
        let Some(waiting) = state.by_key.get_mut(&self.key) else { return };
        // The order of numbers is that of age.
        if let Ok(at) = waiting.binary_search_by_key(&self.id, |(id, _)| *id) {
            waiting.remove(at);
        }
        if waiting.is_empty() {
            state.by_key.remove(&self.key);
        }
    }
}
