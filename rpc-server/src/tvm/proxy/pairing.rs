//! The pairs of peers at a proxy: the pool of those who wait, the claim by which one that has come
//! gets the connection of one that waits, and the registration of servers at a tracker.

use std::sync::Arc;

use parking_lot::Mutex;
use rpc_core::limits::{MemoryLease, OpenFileLease};
use rpc_core::{OpenFileQuota, RpcError};
use rpc_transports::{Address, RelayedConnection};
use rpc_tvm::wire::{ProxyArrival, ProxyHello, ProxyPool, ProxyRole, WaitId};
use tokio::sync::{oneshot, watch};

use super::super::tracker::{MatchKeys, TvmAdvertisement, TvmRegistrar, UsedPlace};

/// A peer that waited, and is paired now.
#[derive(Debug)]
pub(super) struct PairedPeer {
    pub(super) connection: RelayedConnection,
    /// Whole text of its key.
    pub(super) text: String,
    /// Registration of a server at the tracker, which shows it as long as this lives.
    pub(super) registration: Option<Registration>,
    /// Charge for what the peer can have held by its WebSocket.
    pub(super) _memory: Option<MemoryLease>,
}

/// Sender by which a peer that waits hands its connection over.
pub(super) type Handover = oneshot::Sender<PairedPeer>;

/// Pairs servers with clients.
#[derive(Debug)]
pub(super) struct Pairing {
    pool: Mutex<ProxyPool<WaitingPeer>>,
    /// Tracker that gives servers to clients, if there is one.
    tracker: Option<Address>,
    /// Address of the proxy as the tracker gets it, once it is known.
    advertised: watch::Sender<Option<TvmAdvertisement>>,
}

/// A peer that waits.
#[derive(Debug)]
struct WaitingPeer {
    claim: oneshot::Sender<Handover>,
    /// Match key of a server that is registered at the tracker.
    match_keys: Option<Arc<MatchKeys>>,
}

/// Registration of a server at the tracker, over a connection of its own.
#[derive(Debug)]
pub(super) struct Registration {
    _registrar: TvmRegistrar,
    /// Charge for the connection.
    _open: OpenFileLease,
}

/// A peer's part in the pool while it waits. It leaves when this is dropped.
pub(super) struct Waiting<'a> {
    pairing: &'a Pairing,
    key: String,
    id: WaitId,
    claimed: oneshot::Receiver<Handover>,
    /// Registration of a server at the tracker, which forgets it when this is dropped.
    registration: Option<Registration>,
}

/// Result of a peer's arrival.
pub(super) enum Arrival<'a> {
    /// The other side was there. A server that the tracker has given out is not offered again
    /// while its place is held.
    Paired(Box<PairedPeer>, Option<UsedPlace>),
    Waits(Waiting<'a>),
    /// As many peers as may wait under this key do.
    Duplicate,
    /// No server has this match key.
    Mismatch,
    /// There is no connection to the tracker left for the server.
    Refused(RpcError),
}

impl Pairing {
    pub(super) fn new(max_waiting_per_key: usize, tracker: Option<Address>) -> Self {
        // Servers at a tracker have match keys of their own.
        let max_per_key = if tracker.is_some() { usize::MAX } else { max_waiting_per_key };
        Self { pool: Mutex::new(ProxyPool::new(max_per_key)), tracker, advertised: watch::Sender::new(None) }
    }

    /// Sets the address of the proxy as the tracker gets it.
    pub(super) fn advertise(&self, advertised: TvmAdvertisement) {
        self.advertised.send_replace(Some(advertised));
    }

    /// Pairs a peer with one that waits, or has it wait. What a server's registration opens is
    /// charged to `open_files`. Cancel-safe: a peer that would have been paired finds another.
    pub(super) async fn arrive(&self, hello: &ProxyHello, open_files: &OpenFileQuota) -> Arrival<'_> {
        loop {
            let (waiting, place) = match (&self.tracker, hello.role) {
                (Some(_), ProxyRole::Client) => match self.take_granted(hello.match_key()) {
                    Some((server, place)) => (server, Some(place)),
                    None => return Arrival::Mismatch,
                },
                (Some(tracker), ProxyRole::Server) => return self.offer(hello, tracker, open_files),
                (None, _) => match self.wait(hello, None) {
                    Ok(waiting) => return waiting.map_or(Arrival::Duplicate, Arrival::Waits),
                    Err(other) => (other, None),
                },
            };
            let (handover, handed) = oneshot::channel();
            // One that has just gone is skipped: another one may be waiting.
            if waiting.claim.send(handover).is_ok()
                && let Ok(peer) = handed.await
            {
                return Arrival::Paired(Box::new(peer), place);
            }
        }
    }

    /// Has a server wait that the tracker gives out.
    fn offer(&self, hello: &ProxyHello, tracker: &Address, open_files: &OpenFileQuota) -> Arrival<'_> {
        let open = match open_files.reserve(1) {
            Ok(open) => open,
            Err(error) => return Arrival::Refused(error),
        };
        let match_keys = MatchKeys::new(hello.match_key(), 1);
        let Ok(Some(mut waiting)) = self.wait(hello, Some(match_keys.clone())) else { return Arrival::Duplicate };
        let registrar = TvmRegistrar::start_at_proxy(tracker, match_keys, self.advertised.subscribe());
        waiting.registration = Some(Registration { _registrar: registrar, _open: open });
        Arrival::Waits(waiting)
    }

    /// Has a peer wait; `None` if too many do. Fails with one of the other side that waited.
    fn wait(&self, hello: &ProxyHello, match_keys: Option<Arc<MatchKeys>>) -> Result<Option<Waiting<'_>>, WaitingPeer> {
        let (claim, claimed) = oneshot::channel();
        let key = hello.match_key().to_owned();
        let arrival = self.pool.lock().arrive(hello.role, &key, WaitingPeer { claim, match_keys });
        match arrival {
            ProxyArrival::Paired(other) => Err(other),
            ProxyArrival::Duplicate => Ok(None),
            ProxyArrival::Waits(id) => Ok(Some(Waiting { pairing: self, key, id, claimed, registration: None })),
        }
    }

    /// Takes the server that waits and that the tracker has given to a client by this match key.
    fn take_granted(&self, match_key: &str) -> Option<(WaitingPeer, UsedPlace)> {
        let (key, _) = match_key.rsplit_once(':')?;
        let mut place = None;
        let is_granted = |peer: &WaitingPeer| {
            place = peer.match_keys.as_ref().and_then(|keys| keys.take(match_key));
            place.is_some()
        };
        let server = self.pool.lock().take_server(key, is_granted);
        server.zip(place)
    }
}

impl Waiting<'_> {
    /// Takes the registration, which a server keeps until its session is over.
    pub(super) fn take_registration(&mut self) -> Option<Registration> {
        self.registration.take()
    }

    /// Waits for the other side. Resolves to `None` if it is gone again. Cancel-safe.
    pub(super) async fn claimed(&mut self) -> Option<Handover> {
        (&mut self.claimed).await.ok()
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let left = self.pairing.pool.lock().leave(&self.key, self.id);
        drop(left);
    }
}
