//! Queue of the servers that prove where they are. Peers take turns, and so do the sessions of one
//! peer, so that one whose servers do not answer keeps few of the others waiting.
//!
//! A peer is here what the limits count as one: all holders of one identity, or all anonymous
//! clients of one machine. Behind a proxy or a hop these may be many, who know nothing of each
//! other. So each session has a share of its own.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use rpc_core::{Result, RpcError};
use tokio::sync::oneshot;

use crate::server::server_state::Client;

/// Maximum number of proofs at one time. A session has at most one of them, and a peer fewer than
/// it leaves free: 16 alone, and of the rest again a half for the next one.
const PROOFS: usize = 32;

/// Maximum number of servers that prove where they are, or wait for that. Further ones displace
/// those of the peer and the session that have most, or are refused, and try again.
const MAX_QUEUED: usize = 1024;

/// Queue of proofs; see the [module](self).
#[derive(Debug, Default)]
pub(super) struct ProofQueue(Mutex<Peers>);

/// Session that registers servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SessionId(usize);

#[derive(Debug, Default)]
struct Peers {
    queued: usize,
    running: usize,
    by_name: HashMap<String, PeerQueue>,
    /// Number of entries, and of beginnings and ends of turns, so far.
    turns: u64,
}

/// Proofs of one peer. Removed with the last one.
#[derive(Debug, Default)]
struct PeerQueue {
    queued: usize,
    running: usize,
    sessions: HashMap<SessionId, SessionQueue>,
    last_turn: u64,
}

/// Proofs of one session. Removed with the last one.
#[derive(Debug, Default)]
struct SessionQueue {
    /// Number of the proof that runs.
    running: Option<u64>,
    waiting: VecDeque<(u64, oneshot::Sender<()>)>,
    /// Number of the end of the session's last turn, or of its entry.
    last_turn: u64,
}

/// Entry of a server in the queue, until it is dropped. Its proof counts as running from its turn
/// until then.
#[derive(Debug)]
pub(super) struct QueuedProof<'a> {
    queue: &'a ProofQueue,
    peer: String,
    session: SessionId,
    number: u64,
    turn: oneshot::Receiver<()>,
}

impl SessionId {
    /// Returns the id of the session of `client`, which is good while that lives.
    pub(super) fn of(client: &Arc<Client>) -> Self {
        Self(Arc::as_ptr(client).addr())
    }
}

impl ProofQueue {
    /// Adds a server of a session of `peer`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`](rpc_core::ErrorKind::LimitExceeded): the queue is full,
    /// and no session has many more waiting entries than this one.
    pub(super) fn enter(&self, peer: &str, session: SessionId) -> Result<QueuedProof<'_>> {
        let mut peers = self.0.lock();
        if peers.queued >= MAX_QUEUED && !peers.make_room(peer, session) {
            return Err(full());
        }
        peers.queued += 1;
        peers.turns += 1;
        let number = peers.turns;
        let of_peer = peers
            .by_name
            .entry(peer.to_owned())
            .or_insert_with(|| PeerQueue { last_turn: number, ..PeerQueue::default() });
        of_peer.queued += 1;
        let of_session = of_peer
            .sessions
            .entry(session)
            .or_insert_with(|| SessionQueue { last_turn: number, ..SessionQueue::default() });
        let (sender, turn) = oneshot::channel();
        of_session.waiting.push_back((number, sender));
        peers.start();
        Ok(QueuedProof { queue: self, peer: peer.to_owned(), session, number, turn })
    }
}

impl QueuedProof<'_> {
    /// Waits for the turn of this server.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`](rpc_core::ErrorKind::LimitExceeded): servers of others have
    /// displaced this one.
    pub(super) async fn turn(&mut self) -> Result<()> {
        (&mut self.turn).await.map_err(|_| full())
    }
}

impl Drop for QueuedProof<'_> {
    fn drop(&mut self) {
        let mut peers = self.queue.0.lock();
        peers.remove(&self.peer, self.session, self.number);
        peers.start();
    }
}

impl Peers {
    /// Starts the proofs whose turn it is.
    fn start(&mut self) {
        loop {
            let free = PROOFS - self.running;
            // A peer that has waited for longest for its turn is first, and so is its session.
            let may_start = self.by_name.values_mut().filter(|peer| peer.running < free);
            let next = may_start.filter_map(|peer| Some((peer.last_turn, peer.next_session()?, peer)));
            let Some((_, session, peer)) = next.min_by_key(|(last_turn, ..)| *last_turn) else { return };
            let Some(of_session) = peer.sessions.get_mut(&session) else { return };
            let Some((number, sender)) = of_session.waiting.pop_front() else { return };
            self.turns += 1;
            peer.last_turn = self.turns;
            // One that nobody waits for any more is about to be removed.
            let _ = sender.send(());
            of_session.running = Some(number);
            peer.running += 1;
            self.running += 1;
        }
    }

    /// Displaces the last entry of the session that has most, in the peer that has most. Returns
    /// false if `peer` and `session` have as many.
    fn make_room(&mut self, peer: &str, session: SessionId) -> bool {
        let own = self.by_name.get(peer).map_or(0, |queue| queue.queued);
        let fullest = self.by_name.iter().max_by_key(|(_, queue)| queue.queued);
        let Some((name, queue)) =
            fullest.filter(|(_, queue)| queue.queued > own + 1).or_else(|| self.by_name.get_key_value(peer))
        else {
            return false;
        };
        let waiting = |queue: &SessionQueue| queue.waiting.len();
        let own = queue.sessions.get(&session).filter(|_| name == peer).map_or(0, waiting);
        let Some((longest, last)) = queue.sessions.iter().max_by_key(|(_, queue)| waiting(queue)) else { return false };
        let is_longer = if name == peer { waiting(last) > own + 1 } else { waiting(last) > 0 };
        let Some((number, _)) = last.waiting.back().filter(|_| is_longer) else { return false };
        let (name, longest, number) = (name.clone(), *longest, *number);
        self.remove(&name, longest, number);
        true
    }

    /// Removes an entry, if it has not been displaced.
    fn remove(&mut self, peer: &str, session: SessionId, number: u64) {
        let Some(of_peer) = self.by_name.get_mut(peer) else { return };
        let Some(of_session) = of_peer.sessions.get_mut(&session) else { return };
        if of_session.running == Some(number) {
            self.turns += 1;
            (of_session.running, of_session.last_turn) = (None, self.turns);
            of_peer.running -= 1;
            self.running -= 1;
        } else if let Some(at) = of_session.waiting.iter().position(|(waiting, _)| *waiting == number) {
            of_session.waiting.remove(at);
        } else {
            return;
        }
        self.queued -= 1;
        of_peer.queued -= 1;
        if of_session.running.is_none() && of_session.waiting.is_empty() {
            of_peer.sessions.remove(&session);
        }
        if of_peer.queued == 0 {
            self.by_name.remove(peer);
        }
    }
}

impl PeerQueue {
    /// Returns the session whose turn it is: of those without a proof that runs the one that has
    /// waited for longest.
    fn next_session(&self) -> Option<SessionId> {
        let ready = self.sessions.iter().filter(|(_, queue)| queue.running.is_none() && !queue.waiting.is_empty());
        ready.min_by_key(|(_, queue)| queue.last_turn).map(|(session, _)| *session)
    }
}

fn full() -> RpcError {
    RpcError::limit("servers that prove where they are", MAX_QUEUED as u64, MAX_QUEUED as u64 + 1)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::task::{Context, Poll, Waker};
    use std::time::Duration;

    use rpc_core::proto::ANONYMOUS;
    use rpc_core::{ErrorKind, LocalSession, Pack, Registry, Session, Value};
    use rpc_transports::Machine;
    use rpc_transports::tracker::{MESSAGES, Registration, ServerStatus, functions};

    use super::*;
    use crate::tracker::service::{Tracker, TrackerOptions};

    impl QueuedProof<'_> {
        /// Returns true if it is the turn of this server.
        fn has_turn(&mut self) -> bool {
            let turn = std::pin::pin!(self.turn());
            matches!(turn.poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(Ok(())))
        }
    }

    fn enter<'a>(queue: &'a ProofQueue, peer: &str, session: usize) -> QueuedProof<'a> {
        queue.enter(peer, SessionId(session)).unwrap()
    }

    /// Regression: the servers of sessions that had ended kept their entries and their turns.
    #[tokio::test(start_paused = true)]
    async fn a_server_leaves_the_queue_soon_after_its_session_has_ended() {
        let tracker = Tracker::new(TrackerOptions::default());
        let registry = Registry::new();
        tracker.register(&registry);
        // It takes connections and says nothing, for longer than a look at the session takes.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let (peer, identity) = ("a board".to_owned(), ANONYMOUS.to_owned());
        let peer_identity = identity.clone();
        let client = Client { peer, machine: Machine::This, identity, peer_identity, through_hop: false };
        let session = Session::new(LocalSession::builder(registry).extension(Arc::new(client)).build());
        let registration = Registration {
            version: MESSAGES.version(),
            name: String::new(),
            key: "board".to_owned(),
            labels: BTreeMap::new(),
            devices: Vec::new(),
            capacity: 1,
            address: vec![format!("tcp://{}", silent.local_addr().unwrap())],
            ticket_key: [7; 32],
            status: ServerStatus::default(),
        };
        let queued = || tracker.proofs.0.lock().queued;
        let calling = tokio::spawn(async move {
            let register = session.get_function(functions::REGISTER).await.unwrap();
            register.call::<Value>((Pack(registration),)).await.map(drop)
        });
        while queued() == 0 {
            tokio::task::yield_now().await;
        }
        // Its session goes with the call.
        calling.abort();
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(queued(), 0);
    }

    /// Regression: 32 servers of one peer that did not answer kept those of all peers waiting.
    #[test]
    fn a_peer_whose_servers_do_not_answer_keeps_none_of_the_others_waiting() {
        let queue = ProofQueue::default();
        let mut silent: Vec<_> = (0..MAX_QUEUED / 2).map(|session| enter(&queue, "silent", session)).collect();
        let running = silent.iter_mut().map(QueuedProof::has_turn).take_while(|has_turn| *has_turn).count();
        assert_eq!(running, PROOFS / 2, "a peer's share");
        for peer in ["a", "b", "c"] {
            assert!(enter(&queue, peer, 0).has_turn(), "others wait for the silent peer");
        }
        silent.remove(0);
        assert!(silent[running - 1].has_turn());
    }

    /// Regression: four proofs of servers that did not answer kept all waiting that the limits
    /// count as the same peer: all anonymous ones of a proxy or a hop, and all with one token.
    #[test]
    fn a_session_whose_servers_do_not_answer_keeps_no_other_session_of_its_peer_waiting() {
        let queue = ProofQueue::default();
        let mut silent: Vec<_> = (0..MAX_QUEUED / 2).map(|_| enter(&queue, "proxy", 1)).collect();
        assert!(silent[0].has_turn() && !silent[1].has_turn(), "one at a time");
        assert!(enter(&queue, "proxy", 2).has_turn());

        // Many sessions take turns.
        let queue = ProofQueue::default();
        let mut silent: Vec<_> = (0..400).map(|at| enter(&queue, "proxy", at % 20)).collect();
        let mut other = enter(&queue, "proxy", 99);
        for _ in 0..20 {
            assert!(!other.has_turn());
            let at = silent.iter_mut().position(QueuedProof::has_turn).unwrap();
            silent.remove(at);
            if other.has_turn() {
                return;
            }
        }
        panic!("a session waits for those behind it");
    }

    /// Regression: a peer whose servers filled its part of the queue had all others refused that
    /// the limits count as the same peer.
    #[test]
    fn a_full_queue_refuses_those_that_have_most_and_keeps_nothing() {
        let queue = ProofQueue::default();
        let mut all: Vec<_> = (0..MAX_QUEUED).map(|_| enter(&queue, "proxy", 1)).collect();
        let error = queue.enter("proxy", SessionId(1)).unwrap_err();
        assert!(error.kind() == ErrorKind::LimitExceeded && error.message().contains("servers that prove"), "{error}");
        let mut others = vec![enter(&queue, "proxy", 2), enter(&queue, "other", 3)];
        assert!(others.iter_mut().all(QueuedProof::has_turn));
        let (mut turn, waker) = (Box::pin(all[MAX_QUEUED - 1].turn()), Waker::noop());
        let Poll::Ready(Err(error)) = turn.as_mut().poll(&mut Context::from_waker(waker)) else { panic!() };
        assert_eq!(error.kind(), ErrorKind::LimitExceeded, "the latest one makes room");
        drop(turn);
        assert!(all[0].has_turn() && queue.0.lock().queued == MAX_QUEUED);
        // If all have as many, the next one is refused.
        others.clear();
        all.clear();
        let all: Vec<_> = (0..MAX_QUEUED).map(|session| enter(&queue, "proxy", session)).collect();
        queue.enter("proxy", SessionId(MAX_QUEUED)).unwrap_err();
        drop(all);
        let peers = queue.0.lock();
        assert!(peers.by_name.is_empty() && (peers.queued, peers.running) == (0, 0));
    }
}
