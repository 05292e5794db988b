//! The handshakes that a server has in progress: no more than a limit, and none kept out by those
//! who never finish.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// The handshakes in progress. When there are too many, the oldest of the machine that has most of
/// them gives way, so that whoever floods a server takes the places of its own.
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
    by_machine: HashMap<String, VecDeque<Place>>,
}

#[derive(Debug)]
struct Place {
    id: u64,
    evicted: Arc<Notify>,
    own: Over,
    beneath: Over,
}

/// Whether something is over, although whoever is busy with it may not know yet.
#[derive(Clone, Debug, Default)]
pub(crate) struct Over(Arc<AtomicBool>);

impl Over {
    /// What was over before it began.
    #[cfg(feature = "quic")]
    pub(crate) fn already() -> Self {
        Self(Arc::new(true.into()))
    }

    fn is_so(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// A handshake in progress, until dropped.
#[derive(Debug)]
pub(crate) struct InProgress {
    handshakes: Arc<Handshakes>,
    machine: String,
    id: u64,
    evicted: Arc<Notify>,
    #[cfg_attr(not(feature = "quic"), allow(dead_code, reason = "nothing stands on a handshake then"))]
    over: Over,
}

impl Handshakes {
    /// None so far; `limit` is one at least.
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit: limit.max(1), state: Mutex::default() })
    }

    /// Counts a handshake with `machine`. Another one may be [evicted](InProgress::eviction) for
    /// it, but none for such as take no place, because what they stand on, `beneath`, is over: they
    /// only have to hear of it.
    pub(crate) fn begin(self: &Arc<Self>, machine: String, beneath: Over) -> InProgress {
        let (evicted, over) = (Arc::new(Notify::new()), Over::default());
        let mut state = self.state();
        let id = state.next;
        state.next += 1;
        if !beneath.is_so() {
            if state.count >= self.limit {
                state.forget_what_is_over();
            }
            if state.count >= self.limit {
                state.evict_one(&machine);
            }
            state.count += 1;
            let place = Place { id, evicted: evicted.clone(), own: over.clone(), beneath };
            state.by_machine.entry(machine.clone()).or_default().push_back(place);
        }
        drop(state);
        InProgress { handshakes: self.clone(), machine, id, evicted, over }
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
        all.into_values().flatten().for_each(|place| place.evict());
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    fn evict(&self) {
        self.own.0.store(true, Ordering::Release);
        self.evicted.notify_one();
    }
}

impl State {
    /// Frees the places of those whose task has yet to hear that it is over.
    fn forget_what_is_over(&mut self) {
        self.by_machine.retain(|_, places| {
            places.retain(|place| !place.beneath.is_so());
            !places.is_empty()
        });
        self.count = self.by_machine.values().map(VecDeque::len).sum();
    }

    /// Evicts the oldest handshake of the machine with most of them, which is the newcomer's if
    /// that has as many as any.
    fn evict_one(&mut self, newcomer: &str) {
        let of = |machine: &str| self.by_machine.get(machine).map_or(0, VecDeque::len);
        let greediest = self.by_machine.iter().max_by_key(|(_, handshakes)| handshakes.len());
        let Some((greediest, most)) = greediest.map(|(machine, handshakes)| (machine.clone(), handshakes.len())) else {
            return;
        };
        let machine = if of(newcomer) == most { newcomer.to_owned() } else { greediest };
        if let Some(handshakes) = self.by_machine.get_mut(&machine)
            && let Some(place) = handshakes.pop_front()
        {
            place.evict();
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

    /// Whether it has given way, for what stands on it.
    #[cfg(feature = "quic")]
    pub(crate) fn over(&self) -> Over {
        self.over.clone()
    }
}

impl Drop for InProgress {
    fn drop(&mut self) {
        let mut state = self.handshakes.state();
        let Some(handshakes) = state.by_machine.get_mut(&self.machine) else { return };
        // The order of numbers is that of age.
        let Ok(at) = handshakes.binary_search_by_key(&self.id, |place| place.id) else { return };
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
        let good = handshakes.begin("good".into(), Over::default());
        let mut flood: Vec<_> = (0..3).map(|_| handshakes.begin("bad".into(), Over::default())).collect();
        for round in 0..100 {
            let next = handshakes.begin("bad".into(), Over::default());
            assert!(is_evicted(&flood.remove(0)), "round {round}");
            flood.push(next);
        }
        // The first of another machine takes one of theirs, too.
        let other = handshakes.begin("other".into(), Over::default());
        assert!(is_evicted(&flood[0]) && !is_evicted(&flood[1]));
        assert!(!is_evicted(&good) && !is_evicted(&other));
        drop((good, other));
        let _room = [handshakes.begin("a".into(), Over::default()), handshakes.begin("b".into(), Over::default())];
        assert!(!is_evicted(&flood[1]) && !is_evicted(&flood[2]));
        handshakes.evict_all();
        assert!(is_evicted(&flood[1]) && is_evicted(&flood[2]));
        drop(flood);
        assert_eq!(handshakes.state().count, 0);
        assert!(handshakes.state().by_machine.is_empty());
    }

    #[test]
    fn nobody_gives_way_for_those_that_are_over_or_beside_them() {
        let (connections, channels) = (Handshakes::new(2), Handshakes::new(2));
        let open = || {
            let connection = connections.begin("bad".into(), Over::default());
            let channel = channels.begin("bad".into(), Over(connection.over.0.clone()));
            (connection, channel)
        };
        let (first, second) = (open(), open());
        // The first connection gives way, and its channel has not heard of it when that of the
        // third comes.
        let third = open();
        assert!(is_evicted(&first.0));
        assert!(![&second.0, &third.0, &second.1, &third.1].into_iter().any(is_evicted));
        // A channel that comes when its connection has given way takes no place.
        let late = channels.begin("bad".into(), Over(first.0.over.0.clone()));
        assert!(![&second.1, &third.1].into_iter().any(is_evicted));
        assert_eq!(channels.state().count, 2);
        drop((late, first, second, third));
        for handshakes in [connections, channels] {
            assert_eq!(handshakes.state().count, 0);
            assert!(handshakes.state().by_machine.is_empty());
        }
    }
}
