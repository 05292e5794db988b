//! Places for sessions: so many in all, and so many for each client.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rpc_core::RpcError;
use rpc_core::proto::ANONYMOUS;

use crate::channel::Machine;

/// The places of a server.
#[derive(Debug)]
pub(super) struct Places {
    max: usize,
    max_per_peer: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    in_all: usize,
    /// Nobody is in it without a place.
    by_peer: HashMap<String, usize>,
}

/// The place of one session, until dropped.
#[derive(Debug)]
pub(super) struct Place {
    places: Arc<Places>,
    peer: String,
}

impl Places {
    pub(super) fn new(max: usize, max_per_peer: usize) -> Arc<Self> {
        Arc::new(Self { max, max_per_peer, taken: Mutex::default() })
    }

    /// How many are taken.
    pub(super) fn taken(&self) -> usize {
        self.lock().in_all
    }

    /// Takes a place for a client that comes from `machine` and has proven to be `identity`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`](rpc_core::ErrorKind::LimitExceeded), naming the limit.
    pub(super) fn take(self: &Arc<Self>, machine: Machine, identity: &str) -> Result<Place, RpcError> {
        let peer = match identity {
            ANONYMOUS => machine.to_string(),
            // Not to be mistaken for an address.
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
        Ok(Place { places: self.clone(), peer })
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.lock();
        taken.in_all -= 1;
        if let Entry::Occupied(mut count) = taken.by_peer.entry(std::mem::take(&mut self.peer)) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}
