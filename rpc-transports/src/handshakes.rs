//! The handshakes that a server has in progress: no more than a limit, and none kept out by those who never finish.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// The handshakes in progress. When there are too many, the oldest of the machine that has most of them gives way, so that
/// whoever floods a server takes the places of its own.
#[derive(Debug)]
pub(crate) struct Handshakes {
    limit: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    count: usize,
    /// The oldest in front. No machine is without.
    by_machine: HashMap<String, VecDeque<(u64, Arc<Notify>)>>,
}

/// A handshake in progress, until dropped.
#[derive(Debug)]
pub(crate) struct InProgress {
    handshakes: Arc<Handshakes>,
    machine: String,
    id: u64,
    evicted: Arc<Notify>,
}

impl Handshakes {
    /// None so far; `limit` is one at least.
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit: limit.max(1), state: Mutex::default() })
    }

    /// Counts a handshake with `machine`. Another one may be [evicted](InProgress::evicted) for it.
    pub(crate) fn begin(self: &Arc<Self>, machine: String) -> InProgress {
        let evicted = Arc::new(Notify::new());
        let mut state = self.state();
        if state.count >= self.limit {
            state.evict_one(&machine);
        }
        let id = state.next;
        state.next += 1;
        state.count += 1;
        state.by_machine.entry(machine.clone()).or_default().push_back((id, evicted.clone()));
        drop(state);
        InProgress { handshakes: self.clone(), machine, id, evicted }
    }

    /// Whether half of the places are taken.
    #[cfg(feature = "quic")]
    pub(crate) fn is_busy(&self) -> bool {
        self.state().count >= self.limit.div_ceil(2)
    }

    /// Evicts all.
    pub(crate) fn evict_all(&self) {
        let mut state = self.state();
        state.count = 0;
        let all = std::mem::take(&mut state.by_machine);
        drop(state);
        all.into_values().flatten().for_each(|(_, evicted)| evicted.notify_one());
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Evicts the oldest handshake of the machine with most of them, which is the newcomer's if that has as many as any.
    fn evict_one(&mut self, newcomer: &str) {
        let of = |machine: &str| self.by_machine.get(machine).map_or(0, VecDeque::len);
        let greediest = self.by_machine.iter().max_by_key(|(_, handshakes)| handshakes.len());
        let Some((greediest, most)) = greediest.map(|(machine, handshakes)| (machine.clone(), handshakes.len())) else {
            return;
        };
        let machine = if of(newcomer) == most { newcomer.to_owned() } else { greediest };
        if let Some(handshakes) = self.by_machine.get_mut(&machine)
            && let Some((_, evicted)) = handshakes.pop_front()
        {
            evicted.notify_one();
            self.count -= 1;
            if handshakes.is_empty() {
                self.by_machine.remove(&machine);
            }
        }
    }
}

impl InProgress {
    /// Is told when the handshake has to give way.
    pub(crate) fn eviction(&self) -> Arc<Notify> {
        self.evicted.clone()
    }
}

impl Drop for InProgress {
    fn drop(&mut self) {
        let mut state = self.handshakes.state();
        let Some(handshakes) = state.by_machine.get_mut(&self.machine) else { return };
        // The order of numbers is that of age.
        let Ok(at) = handshakes.binary_search_by_key(&self.id, |(id, _)| *id) else { return };
        handshakes.remove(at);
        if handshakes.is_empty() {
            state.by_machine.remove(&self.machine);
        }
        state.count -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    fn is_evicted(handshake: &InProgress) -> bool {
        pin!(handshake.eviction().notified()).poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn whoever_floods_takes_the_places_of_its_own() {
        let handshakes = Handshakes::new(4);
        let good = handshakes.begin("good".into());
        let mut flood: Vec<_> = (0..3).map(|_| handshakes.begin("bad".into())).collect();
        for round in 0..100 {
            let next = handshakes.begin("bad".into());
            assert!(is_evicted(&flood.remove(0)), "round {round}");
            flood.push(next);
        }
        // The first of another machine takes one of theirs, too.
        let other = handshakes.begin("other".into());
        assert!(is_evicted(&flood[0]) && !is_evicted(&flood[1]));
        assert!(!is_evicted(&good) && !is_evicted(&other));
        drop((good, other));
        let _room = [handshakes.begin("a".into()), handshakes.begin("b".into())];
        assert!(!is_evicted(&flood[1]) && !is_evicted(&flood[2]));
        handshakes.evict_all();
        assert!(is_evicted(&flood[1]) && is_evicted(&flood[2]));
        drop(flood);
        assert_eq!(handshakes.state().count, 0);
        assert!(handshakes.state().by_machine.is_empty());
    }
}
