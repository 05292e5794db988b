//! Admission of sessions: limits on their total number, and on the number for each client.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use rpc_core::RpcError;
use rpc_core::proto::ANONYMOUS;
use tokio::sync::OwnedSemaphorePermit;

use super::authorization::AuthorizedClient;
use crate::channel::Machine;

/// Limits on the sessions of a server.
#[derive(Debug)]
pub(super) struct SessionSlots {
    max: usize,
    max_per_peer: usize,
    taken: Mutex<SlotCounts>,
}

#[derive(Debug, Default)]
struct SlotCounts {
    in_all: usize,
    /// Number of sessions by client. No number is 0.
    by_peer: HashMap<String, usize>,
}

/// Slot of one session, taken until it is dropped.
#[derive(Debug)]
pub(super) struct SessionSlot {
    slots: Arc<SessionSlots>,
    peer: String,
    /// Identity with a limit of its own, by which the session is counted, too.
    limited_identity: Option<String>,
    /// Permit among the clients that come through a relay.
    at_relay: Option<OwnedSemaphorePermit>,
}

impl SessionSlots {
    pub(super) fn new(max: usize, max_per_peer: usize) -> Arc<Self> {
        Arc::new(Self { max, max_per_peer, taken: Mutex::default() })
    }

    /// Returns the number of slots that are taken.
    pub(super) fn taken(&self) -> usize {
        self.lock().in_all
    }

    /// Takes a slot for a client that comes from `machine`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`](rpc_core::ErrorKind::LimitExceeded), naming the limit.
    pub(super) fn take(self: &Arc<Self>, machine: Machine, client: &AuthorizedClient) -> Result<SessionSlot, RpcError> {
        let peer = match client.identity.name() {
            ANONYMOUS => machine.limit_key(),
            // The prefix keeps an identity from being mistaken for an address.
            identity => format!("identity {identity}"),
        };
        let mut taken = self.lock();
        let in_all = taken.in_all + 1;
        if in_all > self.max {
            return Err(RpcError::limit("max_sessions", self.max as u64, in_all as u64));
        }
        let of_peer = taken.by_peer.get(&peer).copied().unwrap_or_default() + 1;
        if of_peer > self.max_per_peer {
            return Err(RpcError::limit("max_sessions_per_peer", self.max_per_peer as u64, of_peer as u64));
        }
        let mut limited_identity = None;
        if let Some(max) = client.authorization.as_ref().and_then(|authorization| authorization.max_sessions) {
            // Two words tell it from the names above.
            let identity = format!("limited identity {}", client.identity);
            let of_identity = taken.by_peer.get(&identity).copied().unwrap_or_default() + 1;
            if of_identity > max {
                let error = RpcError::limit("max-sessions", max as u64, of_identity as u64);
                return Err(error.context("the limit of the server's policy for this client"));
            }
            taken.by_peer.insert(identity.clone(), of_identity);
            limited_identity = Some(identity);
        }
        taken.in_all = in_all;
        taken.by_peer.insert(peer.clone(), of_peer);
        Ok(SessionSlot { slots: self.clone(), peer, limited_identity, at_relay: None })
    }

    fn lock(&self) -> MutexGuard<'_, SlotCounts> {
        self.taken.lock()
    }
}

impl SessionSlot {
    /// Adds the permit of a client that comes through a relay.
    pub(super) fn at_relay(self, permit: OwnedSemaphorePermit) -> Self {
        let mut slot = self;
        slot.at_relay = Some(permit);
        slot
    }
}

impl Drop for SessionSlot {
    fn drop(&mut self) {
        let mut taken = self.slots.lock();
        taken.in_all -= 1;
        for key in [Some(std::mem::take(&mut self.peer)), self.limited_identity.take()].into_iter().flatten() {
            if let Entry::Occupied(mut count) = taken.by_peer.entry(key) {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
        }
    }
}
