//! Match keys of a server that registers at a tracker of TVM: one for each place that is free.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;
use rpc_core::{ErrorKind, Result, RpcError};
use tokio::sync::Notify;

/// Number of looks at the tracker, one after the other, in which a match key that no client has
/// used was given out: then its client is gone.
const LOOKS: u32 = 4;

/// Match keys of a server. Clients that come with one have a place, until their session ends.
#[derive(Debug)]
pub(crate) struct MatchKeys {
    /// Key that clients ask the tracker for.
    key: String,
    state: Mutex<Places>,
    /// Notified when a place is to be offered.
    freed: Notify,
}

/// Places of the server that no session has.
#[derive(Debug)]
struct Places {
    offered: Vec<OfferedKey>,
    /// Number of places for which the tracker has no match key.
    to_offer: u32,
}

/// A match key that the tracker may give to a client.
#[derive(Debug)]
struct OfferedKey {
    match_key: String,
    /// Number of looks in which the tracker had given it out.
    given_out: u32,
}

/// Place of a client's session. It is offered again when it is dropped.
#[derive(Debug)]
pub(crate) struct UsedPlace(Arc<MatchKeys>);

impl MatchKeys {
    /// Creates the match keys of a server with `capacity` places.
    pub(crate) fn new(key: &str, capacity: u32) -> Arc<Self> {
        let state = Mutex::new(Places { offered: Vec::new(), to_offer: capacity });
        Arc::new(Self { key: key.to_owned(), state, freed: Notify::new() })
    }

    /// Returns the key that clients ask the tracker for.
    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    /// Takes the place of a match key. Returns `None` if there is none.
    pub(crate) fn take(self: &Arc<Self>, match_key: &str) -> Option<UsedPlace> {
        let mut state = self.state.lock();
        let at = state.offered.iter().position(|offered| offered.match_key == match_key)?;
        state.offered.swap_remove(at);
        Some(UsedPlace(self.clone()))
    }

    /// Makes a match key for a place that the tracker does not have. Returns `None` if there is
    /// none.
    ///
    /// # Errors
    ///
    /// The system gives no random numbers.
    pub(super) fn issue(&self) -> Result<Option<String>> {
        let mut state = self.state.lock();
        if state.to_offer == 0 {
            return Ok(None);
        }
        let random = getrandom::u64().map_err(|_| RpcError::new(ErrorKind::Internal, "there are no random numbers"))?;
        // As a tracker of TVM expects it: the key, and a fraction behind the last colon.
        let match_key = format!("{}:0.{random:020}", self.key);
        state.to_offer -= 1;
        state.offered.push(OfferedKey { match_key: match_key.clone(), given_out: 0 });
        Ok(Some(match_key))
    }

    /// Compares the match keys with those that the tracker has not given out. Revokes those whose
    /// clients do not come, and returns true if there are any.
    pub(super) fn look(&self, pending: &[String]) -> bool {
        let pending: HashSet<&str> = pending.iter().map(String::as_str).collect();
        let mut state = self.state.lock();
        for offered in &mut state.offered {
            let is_given_out = !pending.contains(offered.match_key.as_str());
            offered.given_out = if is_given_out { offered.given_out + 1 } else { 0 };
        }
        let before = state.offered.len();
        state.offered.retain(|offered| offered.given_out < LOOKS);
        let revoked = before - state.offered.len();
        state.to_offer += u32::try_from(revoked).unwrap_or(u32::MAX);
        revoked > 0
    }

    /// Revokes all match keys: the tracker that knew them is gone.
    pub(super) fn revoke_all(&self) {
        let mut state = self.state.lock();
        let revoked = std::mem::take(&mut state.offered).len();
        state.to_offer += u32::try_from(revoked).unwrap_or(u32::MAX);
    }

    /// Returns true if the tracker has match keys of this server.
    pub(super) fn has_offered(&self) -> bool {
        !self.state.lock().offered.is_empty()
    }

    /// Resolves when a place is to be offered. Cancel-safe.
    pub(super) async fn freed(&self) {
        self.freed.notified().await;
    }
}

impl Drop for UsedPlace {
    fn drop(&mut self) {
        self.0.state.lock().to_offer += 1;
        self.0.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_match_key_is_good_for_one_session_and_its_place_is_offered_again_after_it() {
        let keys = MatchKeys::new("rasp", 1);
        let first = keys.issue().unwrap().unwrap();
        assert!(first.starts_with("rasp:0.") && keys.issue().unwrap().is_none());
        assert!(keys.take("rasp").is_none() && keys.take("rasp:0.1").is_none());
        let used = keys.take(&first).unwrap();
        assert!(keys.take(&first).is_none() && keys.issue().unwrap().is_none() && !keys.has_offered());
        drop(used);
        let second = keys.issue().unwrap().unwrap();
        assert!(second != first && keys.take(&first).is_none() && keys.take(&second).is_some());
    }

    #[test]
    fn a_match_key_whose_client_does_not_come_is_replaced() {
        let keys = MatchKeys::new("rasp", 2);
        let (given_out, free) = (keys.issue().unwrap().unwrap(), keys.issue().unwrap().unwrap());
        let pending = std::slice::from_ref(&free);
        for _ in 1..LOOKS {
            assert!(!keys.look(pending));
        }
        // A look in which it is there again counts from the beginning.
        assert!(!keys.look(&[given_out.clone(), free.clone()]));
        for _ in 1..LOOKS {
            assert!(!keys.look(pending));
        }
        assert!(keys.look(pending));
        assert!(keys.take(&given_out).is_none());
        assert!(keys.issue().unwrap().is_some() && keys.issue().unwrap().is_none());
        assert!(keys.take(&free).is_some());
        keys.revoke_all();
        assert!(!keys.has_offered());
    }
}
