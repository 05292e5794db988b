//! Admission of sessions: limits on their total number, and on the number for each client.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use rpc_core::RpcError;
use rpc_core::proto::ANONYMOUS;
use tokio::sync::OwnedSemaphorePermit;

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

    /// Takes a slot for a client that comes from `machine` and has proven `identity`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`](rpc_core::ErrorKind::LimitExceeded), naming the limit.
    pub(super) fn take(self: &Arc<Self>, machine: Machine, identity: &str) -> Result<SessionSlot, RpcError> {
        let peer = match identity {
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
        taken.in_all = in_all;
        taken.by_peer.insert(peer.clone(), of_peer);
        Ok(SessionSlot { slots: self.clone(), peer, at_relay: None })
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
        if let Entry::Occupied(mut count) = taken.by_peer.entry(std::mem::take(&mut self.peer)) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}
