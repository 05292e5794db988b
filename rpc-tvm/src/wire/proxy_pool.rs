//! Pool of a proxy: servers and clients of TVM that wait for each other, by their match keys.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

use super::proxy::ProxyRole;

/// Servers and clients that wait. `T` is what the proxy needs to reach one.
#[derive(Debug)]
pub struct ProxyPool<T> {
    /// Number of peers of one role that may wait under one key.
    max_per_key: usize,
    next: u64,
    by_key: HashMap<String, WaitingPeers<T>>,
}

/// Peers that wait under one key. They are of one role, since others would be paired with them.
#[derive(Debug)]
struct WaitingPeers<T> {
    role: ProxyRole,
    /// The one that has waited for longest is in front. Never empty.
    peers: VecDeque<(WaitId, T)>,
}

/// Number of a peer that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WaitId(u64);

/// Result of a peer's arrival.
#[derive(Debug, PartialEq, Eq)]
pub enum ProxyArrival<T> {
    /// The other side was there, and waits no more.
    Paired(T),
    /// The peer waits from now on.
    Waits(WaitId),
    /// As many peers as may wait under this key do.
    Duplicate,
}

impl<T> ProxyPool<T> {
    /// Creates a pool in which so many peers of one role may wait under one key. One is what a
    /// proxy of TVM lets wait.
    #[must_use]
    pub fn new(max_per_key: usize) -> Self {
        Self { max_per_key, next: 0, by_key: HashMap::new() }
    }

    /// Returns the number of peers that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.by_key.values().map(|waiting| waiting.peers.len()).sum()
    }

    /// Pairs a peer with the one of the other role that has waited for longest under its key, or
    /// has it wait.
    pub fn arrive(&mut self, role: ProxyRole, key: &str, peer: T) -> ProxyArrival<T> {
        if let Some(waiting) = self.by_key.get_mut(key) {
            if waiting.role != role {
                let first = waiting.peers.pop_front();
                if waiting.peers.is_empty() {
                    self.by_key.remove(key);
                }
                if let Some((_, first)) = first {
                    return ProxyArrival::Paired(first);
                }
            } else if waiting.peers.len() >= self.max_per_key {
                return ProxyArrival::Duplicate;
            }
        }
        let id = WaitId(self.next);
        self.next += 1;
        let new = || WaitingPeers { role, peers: VecDeque::new() };
        self.by_key.entry(key.to_owned()).or_insert_with(new).peers.push_back((id, peer));
        ProxyArrival::Waits(id)
    }

    /// Takes the first server that waits under a key and that `is_meant`.
    pub fn take_server(&mut self, key: &str, mut is_meant: impl FnMut(&T) -> bool) -> Option<T> {
        let Entry::Occupied(mut entry) = self.by_key.entry(key.to_owned()) else { return None };
        let waiting = entry.get_mut();
        if waiting.role != ProxyRole::Server {
            return None;
        }
        let at = waiting.peers.iter().position(|(_, peer)| is_meant(peer))?;
        let (_, taken) = waiting.peers.remove(at)?;
        if waiting.peers.is_empty() {
            entry.remove();
        }
        Some(taken)
    }

    /// Removes a peer that waits under a key. Returns it, unless it was paired.
    pub fn leave(&mut self, key: &str, id: WaitId) -> Option<T> {
        let waiting = self.by_key.get_mut(key)?;
        // Numbers ascend with the time of arrival.
        let at = waiting.peers.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        let (_, left) = waiting.peers.remove(at)?;
        if waiting.peers.is_empty() {
            self.by_key.remove(key);
        }
        Some(left)
    }

    /// Returns true if no key is known.
    #[cfg(test)]
    pub(super) fn by_key_is_empty(&self) -> bool {
        self.by_key.is_empty()
    }
}
