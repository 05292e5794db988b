//! Limit on a server's handshakes in progress. Clients that never finish theirs cannot keep others
//! out.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

/// Limit on handshakes in progress. When it is reached, the oldest handshake of the machine with
/// most of them is evicted, so that a machine that floods a server displaces its own handshakes.
#[derive(Debug)]
pub(crate) struct HandshakeLimit {
    limit: usize,
    state: Mutex<LimitState>,
}

#[derive(Debug, Default)]
struct LimitState {
    next_id: u64,
    count: usize,
    /// Handshakes by machine, the oldest in front. No queue is empty.
    by_machine: HashMap<String, VecDeque<PendingHandshake>>,
}

/// Handshake that counts towards the limit.
#[derive(Debug)]
struct PendingHandshake {
    id: u64,
    evicted: Arc<Notify>,
    closed: ClosedFlag,
    parent_connection: ClosedFlag,
}

/// Flag of a connection or handshake that has ended, although its task may not know yet.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClosedFlag(Arc<AtomicBool>);

impl ClosedFlag {
    /// Returns the flag of a connection that had ended before it began.
    #[cfg(feature = "quic")]
    pub(crate) fn closed() -> Self {
        Self(Arc::new(true.into()))
    }

    fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Permit of a handshake in progress, which counts until the permit is dropped.
#[derive(Debug)]
pub(crate) struct HandshakePermit {
    limit: Arc<HandshakeLimit>,
    machine: String,
    id: u64,
    evicted: Arc<Notify>,
    #[cfg_attr(not(feature = "quic"), allow(dead_code, reason = "only QUIC has channels on a connection"))]
    closed: ClosedFlag,
}

impl HandshakeLimit {
    /// Creates the limit. The least limit is one.
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit: limit.max(1), state: Mutex::default() })
    }

    /// Counts a handshake with `machine`, and [evicts](HandshakePermit::eviction) another one if
    /// there are too many.
    ///
    /// A handshake whose `parent_connection` has closed does not count, and evicts none: its task
    /// will soon find out.
    pub(crate) fn begin(self: &Arc<Self>, machine: String, parent_connection: ClosedFlag) -> HandshakePermit {
        let (evicted, closed) = (Arc::new(Notify::new()), ClosedFlag::default());
        let mut state = self.state();
        let id = state.next_id;
        state.next_id += 1;
        if !parent_connection.is_set() {
            if state.count >= self.limit {
                state.remove_closed();
            }
            if state.count >= self.limit {
                state.evict_one(&machine);
            }
            state.count += 1;
            let pending = PendingHandshake { id, evicted: evicted.clone(), closed: closed.clone(), parent_connection };
            state.by_machine.entry(machine.clone()).or_default().push_back(pending);
        }
        drop(state);
        HandshakePermit { limit: self.clone(), machine, id, evicted, closed }
    }

    /// Returns true if half of the limit is reached.
    #[cfg(feature = "quic")]
    pub(crate) fn is_busy(&self) -> bool {
        self.state().count >= self.limit.div_ceil(2)
    }

    /// Evicts all handshakes.
    pub(crate) fn evict_all(&self) {
        let mut state = self.state();
        state.count = 0;
        let all = std::mem::take(&mut state.by_machine);
        drop(state);
        all.into_values().flatten().for_each(|pending| pending.evict());
    }

    fn state(&self) -> MutexGuard<'_, LimitState> {
        self.state.lock()
    }
}

impl PendingHandshake {
    fn evict(&self) {
        self.closed.0.store(true, Ordering::Release);
        self.evicted.notify_one();
    }
}

impl LimitState {
    /// Removes handshakes whose parent connection has closed, although their tasks do not know yet.
    fn remove_closed(&mut self) {
        self.by_machine.retain(|_, pending| {
            pending.retain(|pending| !pending.parent_connection.is_set());
            !pending.is_empty()
        });
        self.count = self.by_machine.values().map(VecDeque::len).sum();
    }

    /// Evicts the oldest handshake of the machine with most of them. That is the newcomer's machine
    /// if it has as many as any other.
    fn evict_one(&mut self, newcomer: &str) {
        let of = |machine: &str| self.by_machine.get(machine).map_or(0, VecDeque::len);
        let greediest = self.by_machine.iter().max_by_key(|(_, pending)| pending.len());
        let Some((greediest, most)) = greediest.map(|(machine, pending)| (machine.clone(), pending.len())) else {
            return;
        };
        let machine = if of(newcomer) == most { newcomer.to_owned() } else { greediest };
        if let Some(pending) = self.by_machine.get_mut(&machine)
            && let Some(oldest) = pending.pop_front()
        {
            oldest.evict();
            self.count -= 1;
            if pending.is_empty() {
                self.by_machine.remove(&machine);
            }
        }
    }
}

impl HandshakePermit {
    /// Returns the notification of the handshake's eviction.
    pub(crate) fn eviction(&self) -> Arc<Notify> {
        self.evicted.clone()
    }

    /// Returns the flag that is set when the handshake is evicted, for channels on its connection.
    #[cfg(feature = "quic")]
    pub(crate) fn closed_flag(&self) -> ClosedFlag {
        self.closed.clone()
    }
}

impl Drop for HandshakePermit {
    fn drop(&mut self) {
        let mut state = self.limit.state();
        let Some(pending) = state.by_machine.get_mut(&self.machine) else { return };
        // Ids ascend with age.
        let Ok(at) = pending.binary_search_by_key(&self.id, |pending| pending.id) else { return };
        pending.remove(at);
        if pending.is_empty() {
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

    fn is_evicted(handshake: &HandshakePermit) -> bool {
        pin!(handshake.eviction().notified()).poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn a_machine_that_floods_displaces_its_own_handshakes() {
        let handshakes = HandshakeLimit::new(4);
        let good = handshakes.begin("good".into(), ClosedFlag::default());
        let mut flood: Vec<_> = (0..3).map(|_| handshakes.begin("bad".into(), ClosedFlag::default())).collect();
        for round in 0..100 {
            let next = handshakes.begin("bad".into(), ClosedFlag::default());
            assert!(is_evicted(&flood.remove(0)), "round {round}");
            flood.push(next);
        }
        // The first handshake of another machine displaces one of theirs as well.
        let other = handshakes.begin("other".into(), ClosedFlag::default());
        assert!(is_evicted(&flood[0]) && !is_evicted(&flood[1]));
        assert!(!is_evicted(&good) && !is_evicted(&other));
        drop((good, other));
        let _room =
            [handshakes.begin("a".into(), ClosedFlag::default()), handshakes.begin("b".into(), ClosedFlag::default())];
        assert!(!is_evicted(&flood[1]) && !is_evicted(&flood[2]));
        handshakes.evict_all();
        assert!(is_evicted(&flood[1]) && is_evicted(&flood[2]));
        drop(flood);
        assert_eq!(handshakes.state().count, 0);
        assert!(handshakes.state().by_machine.is_empty());
    }

    #[test]
    fn no_handshake_is_evicted_for_one_whose_connection_has_closed() {
        let (connections, channels) = (HandshakeLimit::new(2), HandshakeLimit::new(2));
        let open = || {
            let connection = connections.begin("bad".into(), ClosedFlag::default());
            let channel = channels.begin("bad".into(), connection.closed.clone());
            (connection, channel)
        };
        let (first, second) = (open(), open());
        // The first connection is evicted, and its channel does not know yet when the channel of
        // the third comes.
        let third = open();
        assert!(is_evicted(&first.0));
        assert!(![&second.0, &third.0, &second.1, &third.1].into_iter().any(is_evicted));
        // A channel that comes after its connection was evicted does not count.
        let late = channels.begin("bad".into(), first.0.closed.clone());
        assert!(![&second.1, &third.1].into_iter().any(is_evicted));
        assert_eq!(channels.state().count, 2);
        drop((late, first, second, third));
        for handshakes in [connections, channels] {
            assert_eq!(handshakes.state().count, 0);
            assert!(handshakes.state().by_machine.is_empty());
        }
    }
}
