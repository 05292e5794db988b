//! Pool of a relay: servers that have dialled in and wait, each for one client that asks for its
//! key.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use parking_lot::Mutex;
use rpc_core::{ErrorKind, RpcError};
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use crate::channel::Channel;

/// Time that a client waits for a server of its key that was there, is in use or on its way back.
const RETURN_LIMIT: Duration = Duration::from_secs(2);

/// Channel of a parked server after its handshake with the relay, and its share in the relay's
/// limits.
pub(in crate::serve) struct ParkedServer {
    pub(in crate::serve) channel: Channel,
    /// Input that was read beyond the handshake. Empty if the server waits for its client to send
    /// first.
    pub(in crate::serve) input: BytesMut,
    /// Share of the server in the relay's limits, kept for as long as the channel.
    pub(in crate::serve) held: Box<dyn Send + Sync>,
}

/// Sender by which a server's task hands its channel over, once the server is accepted.
pub(in crate::serve) type Handover = oneshot::Sender<ParkedServer>;

/// Pool of waiting servers.
#[derive(Default)]
pub(in crate::serve) struct ServerPool {
    state: Arc<Mutex<PoolState>>,
    /// Notified whenever a server has come.
    arrived: Notify,
}

#[derive(Default)]
struct PoolState {
    next: u64,
    /// Keys of servers that wait, are in use, or were here a moment ago.
    by_key: HashMap<String, ServersOfKey>,
    /// Keys from which a server has gone, and the time when it did, the oldest first.
    departures: VecDeque<(Instant, String)>,
}

/// Servers with one key, and the clients that wait for one.
#[derive(Default)]
struct ServersOfKey {
    /// Waiting servers, those that have waited longest in front. Empty while clients wait.
    waiting: VecDeque<(u64, oneshot::Sender<Handover>)>,
    /// Waiting clients, those that have waited longest in front. Some may be gone.
    clients: VecDeque<oneshot::Sender<ClaimedServer>>,
    /// Number of servers that serve a client.
    in_use: usize,
    /// Number of entries in the list of departures.
    departures: usize,
}

/// A server that a client has been given, and that has not been told yet.
struct ClaimedServer {
    claim: oneshot::Sender<Handover>,
    in_use: InUse,
}

/// Count of a server that serves a client, until it is dropped.
struct InUse {
    state: Arc<Mutex<PoolState>>,
    key: String,
}

/// Entry of a waiting server, which is removed when dropped.
struct PoolEntry<'a> {
    pool: &'a ServerPool,
    key: String,
    id: u64,
}

/// Result of a client's request for a server.
enum Claim {
    Server(ClaimedServer),
    /// A server is expected back. The receiver gets it.
    Later(oneshot::Receiver<ClaimedServer>),
    /// No server with this key was here lately.
    Unknown,
}

impl ServerPool {
    /// Waits for a client that asks for `key`. The caller then accepts the server, and hands its
    /// channel over. Cancel-safe.
    pub(in crate::serve) async fn park(&self, key: &str) -> Handover {
        loop {
            let (claim, claimed) = oneshot::channel();
            let _entry = self.add(key, claim);
            if let Ok(handover) = claimed.await {
                return handover;
            }
            // The client that the server was given to had gone.
        }
    }

    /// Returns the channel of a server with this key, for one client. If there is none, and one was
    /// here a moment ago or is in use, waits for a moment: it may be on its way back from its last
    /// client. Servers that come are given to the clients in the order of their arrival.
    pub(in crate::serve) async fn claim(&self, key: &str) -> Result<ParkedServer, RpcError> {
        let deadline = Instant::now() + RETURN_LIMIT;
        loop {
            let claimed = match self.take(key) {
                Claim::Server(claimed) => Some(claimed),
                Claim::Later(server) => tokio::time::timeout_at(deadline, server).await.ok().and_then(Result::ok),
                Claim::Unknown => None,
            };
            let Some(ClaimedServer { claim, in_use }) = claimed else {
                let text = match key {
                    "" => "this is a relay: ask for a server by its key, as in ADDRESS/KEY".to_owned(),
                    key => format!("no server with key '{key}' waits at this relay: none has come, or all are in use"),
                };
                return Err(RpcError::new(ErrorKind::NotFound, text));
            };
            let (handover, handed) = oneshot::channel();
            // A server that has just gone is skipped: another one may be waiting.
            if claim.send(handover).is_ok()
                && let Ok(parked) = handed.await
            {
                return Ok(ParkedServer { held: Box::new((parked.held, in_use)), ..parked });
            }
        }
    }

    /// Returns the channel and the key of the first server whose key is `wanted`, or waits for one.
    /// Cancel-safe.
    pub(in crate::serve) async fn wait_for(&self, wanted: impl Fn(&str) -> bool) -> (String, ParkedServer) {
        loop {
            let arrived = self.arrived.notified();
            let mut arrived = std::pin::pin!(arrived);
            // Enabled before the pool is searched, so that a server that comes in between is not
            // missed.
            arrived.as_mut().enable();
            let waits = |(key, servers): &(&String, &ServersOfKey)| !servers.waiting.is_empty() && wanted(key);
            let key = self.state.lock().by_key.iter().find(waits).map(|(key, _)| key.clone());
            match key {
                Some(key) => {
                    // On an error the server has gone again.
                    if let Ok(parked) = self.claim(&key).await {
                        return (key, parked);
                    }
                }
                None => arrived.await,
            }
        }
    }

    /// Gives a server to the client that has waited for longest, or adds it to those that wait.
    fn add(&self, key: &str, mut claim: oneshot::Sender<Handover>) -> PoolEntry<'_> {
        let mut state = self.state.lock();
        let id = state.next;
        state.next += 1;
        let entry = PoolEntry { pool: self, key: key.to_owned(), id };
        let mut unreachable = Vec::new();
        loop {
            let servers = state.by_key.entry(key.to_owned()).or_default();
            let Some(client) = servers.clients.pop_front() else {
                servers.waiting.push_back((id, claim));
                break;
            };
            servers.in_use += 1;
            let in_use = InUse { state: self.state.clone(), key: key.to_owned() };
            match client.send(ClaimedServer { claim, in_use }) {
                Ok(()) => break,
                Err(returned) => {
                    claim = returned.claim;
                    // Its end takes the lock.
                    unreachable.push(returned.in_use);
                }
            }
        }
        drop(state);
        drop(unreachable);
        self.arrived.notify_waiters();
        entry
    }

    /// Returns the number of waiting servers by key.
    pub(in crate::serve) fn waiting(&self) -> Vec<(String, usize)> {
        let state = self.state.lock();
        let waiting = state.by_key.iter().filter(|(_, servers)| !servers.waiting.is_empty());
        waiting.map(|(key, servers)| (key.clone(), servers.waiting.len())).collect()
    }

    fn take(&self, key: &str) -> Claim {
        let mut state = self.state.lock();
        state.forget_departures();
        let Some(servers) = state.by_key.get_mut(key) else { return Claim::Unknown };
        match servers.waiting.pop_front() {
            Some((_, claim)) => {
                servers.in_use += 1;
                Claim::Server(ClaimedServer { claim, in_use: InUse { state: self.state.clone(), key: key.to_owned() } })
            }
            None => {
                let (client, server) = oneshot::channel();
                // All wait equally long, so that those whose time is over are in front.
                while servers.clients.front().is_some_and(oneshot::Sender::is_closed) {
                    servers.clients.pop_front();
                }
                servers.clients.push_back(client);
                Claim::Later(server)
            }
        }
    }
}

impl PoolState {
    /// Notes that a server has gone, which may come back.
    fn depart(&mut self, key: &str) {
        if let Some(servers) = self.by_key.get_mut(key) {
            servers.departures += 1;
            self.departures.push_back((Instant::now(), key.to_owned()));
        }
        self.forget_departures();
    }

    /// Forgets the servers that have not come back in time.
    fn forget_departures(&mut self) {
        while self.departures.front().is_some_and(|(left, _)| left.elapsed() > RETURN_LIMIT) {
            let Some((_, key)) = self.departures.pop_front() else { return };
            if let Some(servers) = self.by_key.get_mut(&key) {
                servers.departures -= 1;
                if servers.departures == 0 && servers.in_use == 0 && servers.waiting.is_empty() {
                    self.by_key.remove(&key);
                }
            }
        }
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        let mut state = self.state.lock();
        if let Some(servers) = state.by_key.get_mut(&self.key) {
            servers.in_use -= 1;
        }
        state.depart(&self.key);
    }
}

impl Drop for PoolEntry<'_> {
    fn drop(&mut self) {
        let mut state = self.pool.state.lock();
        let Some(servers) = state.by_key.get_mut(&self.key) else { return };
        // Ids ascend with age.
        if let Ok(at) = servers.waiting.binary_search_by_key(&self.id, |(id, _)| *id) {
            servers.waiting.remove(at);
            state.depart(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits like a parked server, and is accepted.
    async fn serve(pool: &ServerPool, key: &str) {
        let handover = pool.park(key).await;
        let channel = Channel::new(tokio::io::duplex(1).0, "a server");
        let parked = ParkedServer { channel, input: BytesMut::new(), held: Box::new(()) };
        assert!(handover.send(parked).is_ok());
    }

    /// Regression: a client that came between two clients' sessions was told that there is no
    /// server, because the server was on its way back. The clock is paused.
    #[tokio::test(start_paused = true)]
    async fn a_client_waits_for_a_server_that_is_on_its_way_back() {
        let pool = ServerPool::default();
        let began = Instant::now();
        assert!(pool.claim("board").await.is_err());
        assert_eq!(began.elapsed(), Duration::ZERO, "no server with this key was ever here");

        let ((), first) = tokio::join!(serve(&pool, "board"), pool.claim("board"));
        // Two clients come while the server is in use, and after it has left its client.
        let second = pool.claim("board");
        let later = async {
            drop(first);
            tokio::time::sleep(RETURN_LIMIT / 2).await;
            let third = pool.claim("board");
            let back = async {
                serve(&pool, "board").await;
                serve(&pool, "board").await;
            };
            let (third, ()) = tokio::join!(third, back);
            assert!(third.is_ok());
        };
        let (second, ()) = tokio::join!(second, later);
        assert!(second.is_ok());
        drop(second);

        // A server that does not come back is forgotten.
        let began = Instant::now();
        assert!(pool.claim("board").await.is_err());
        assert_eq!(began.elapsed(), RETURN_LIMIT);
        tokio::time::sleep(RETURN_LIMIT).await;
        assert!(pool.claim("board").await.is_err());
        let state = pool.state.lock();
        assert!(state.by_key.is_empty() && state.departures.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_is_not_lost_with_a_client_that_goes_while_it_waits() {
        let pool = ServerPool::default();
        let ((), first) = tokio::join!(serve(&pool, "board"), pool.claim("board"));
        let impatient = tokio::time::timeout(RETURN_LIMIT / 4, pool.claim("board")).await;
        assert!(impatient.is_err());
        drop(first);
        let back = serve(&pool, "board");
        let next = async {
            tokio::time::sleep(RETURN_LIMIT).await;
            assert_eq!(pool.waiting(), [("board".to_owned(), 1)]);
            pool.claim("board").await.map(drop)
        };
        let ((), next) = tokio::join!(back, next);
        next.unwrap();
    }
}
