//! A server or client of TVM at a tracker: what it has registered, asked for and been given.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use rpc_core::limits::MemoryLease;
use rpc_core::{ErrorKind, MemoryQuota, Result, RpcError};
use rpc_tvm::wire::{InfoPort, MAX_TRACKER_MESSAGE, PeerInfo, TrackerMessage, TrackerReply};

use super::super::error_text::error_text;
use crate::server::server_state::Client;
use crate::tracker::{ServerObject, Tracker, TvmClaim, TvmGrant, TvmListing, TvmPlace};

/// Maximum number of requests that wait on one connection. A client of TVM has one.
const MAX_REQUESTS: usize = 64;

/// Number of grants of which a connection knows that their client is gone when it ends. Others come
/// back when their tickets expire.
const MAX_GRANTS: usize = 16;

/// Bytes that a place or a request takes beside its texts.
const OVERHEAD: u64 = 2 << 10;

/// Bytes of a place or a request for each byte of its texts, in the tracker's tables.
const COPIES: u64 = 6;

/// Largest length of a server's name and host in bytes.
const MAX_NAME: usize = 1024;

/// A reply, and the memory that it takes.
type Reply = (Vec<u8>, Option<MemoryLease>);

/// One connection's part in the tracker. Dropping it takes all back.
pub(super) struct TvmPeer {
    tracker: Arc<Tracker>,
    client: Client,
    queued: Arc<MemoryQuota>,
    /// Places, those that were offered last at the end.
    places: Vec<OfferedPlace>,
    requests: Vec<WaitingRequest>,
    grants: VecDeque<TvmGrant>,
    info: PeerInfo,
    listing: Option<(TvmListing, MemoryLease)>,
}

/// A place that the server has offered.
struct OfferedPlace {
    key: String,
    host: String,
    port: u16,
    object: ServerObject,
    memory: MemoryLease,
}

/// A request without an answer so far.
struct WaitingRequest {
    claim: TvmClaim,
    answered: Pin<Box<dyn Future<Output = ()> + Send>>,
    _memory: MemoryLease,
}

impl TvmPeer {
    pub(super) fn new(tracker: Arc<Tracker>, client: Client, queued: Arc<MemoryQuota>) -> Self {
        Self {
            tracker,
            client,
            queued,
            places: Vec::new(),
            requests: Vec::new(),
            grants: VecDeque::new(),
            info: PeerInfo::default(),
            listing: None,
        }
    }

    /// Obeys a message. Returns its reply; a request for a server has one later.
    pub(super) async fn handle(&mut self, message: TrackerMessage) -> Option<Reply> {
        let done = match message {
            TrackerMessage::Ping => Ok(()),
            TrackerMessage::Put { key, port, match_key, host } => {
                self.put(key, TvmPlace { host: String::new(), port, match_key }, host.as_deref())
            }
            TrackerMessage::Request { key, user, priority } => {
                let text = match self.request(&key, &user, priority) {
                    Ok(()) => return None,
                    Err(error) => error_text(&error),
                };
                return Some((TrackerReply::RequestFailed(&text).encode(), None));
            }
            TrackerMessage::UpdateInfo(info) => self.update_info(info),
            TrackerMessage::Summary => match summary(self.tracker.clone(), &self.queued).await {
                Ok(reply) => return Some(reply),
                Err(error) => Err(error),
            },
            TrackerMessage::PendingMatchKeys => match self.free_match_keys() {
                Ok(reply) => return Some(reply),
                Err(error) => Err(error),
            },
            // Its key is known only to a program that has started a tracker of TVM.
            _ => Err(RpcError::new(ErrorKind::Refused, "clients cannot stop this tracker")),
        };
        let reply = match done {
            Ok(()) => TrackerReply::Success,
            Err(error) => {
                rpc_core::log_limited!(WARN, peer = self.client.peer, %error, "refused a message of a peer of TVM");
                TrackerReply::Failure
            }
        };
        Some((reply.encode(), None))
    }

    /// Returns true if the peer has something of the tracker, or waits for it.
    pub(super) fn is_served(&self) -> bool {
        !self.places.is_empty() || !self.requests.is_empty()
    }

    /// Waits for the answer to a request, and returns it. Cancel-safe.
    pub(super) async fn next_answer(&mut self) -> Vec<u8> {
        let at = std::future::poll_fn(|cx| {
            let mut requests = self.requests.iter_mut();
            requests
                .position(|request| request.answered.as_mut().poll(cx).is_ready())
                .map_or(Poll::Pending, Poll::Ready)
        });
        let at = at.await;
        match self.requests.remove(at).claim.deliver() {
            Ok((TvmPlace { host, port, match_key }, grant)) => {
                if self.grants.len() >= MAX_GRANTS
                    && let Some(oldest) = self.grants.pop_front()
                {
                    oldest.keep();
                }
                self.grants.push_back(grant);
                TrackerReply::Granted { host: &host, port, match_key: &match_key }.encode()
            }
            Err(error) => TrackerReply::RequestFailed(&error_text(&error)).encode(),
        }
    }

    /// Takes a place that the server offers: its first one, or one whose session has ended.
    fn put(&mut self, key: String, place: TvmPlace, host: Option<&str>) -> Result<()> {
        let host = self.tracker.admit_tvm_host(&self.client, host, place.port)?;
        let place = TvmPlace { host, ..place };
        let len = (key.len() + place.host.len() + place.match_key.len()) as u64;
        let memory = self.queued.reserve(OVERHEAD + COPIES * len)?;
        let is_same = |known: &OfferedPlace| (&known.key, &known.host, known.port) == (&key, &place.host, place.port);
        let taken = |known: &OfferedPlace| is_same(known) && self.tracker.is_tvm_place_taken(&known.object);
        if let Some(at) = self.places.iter().position(taken) {
            let mut known = self.places.remove(at);
            if self.tracker.renew_tvm_place(&known.object, &key, place.clone())? {
                known.memory = memory;
                self.places.push(known);
                return Ok(());
            }
        }
        let (host, port) = (place.host.clone(), place.port);
        let object = self.tracker.add_tvm_place(&self.client, &key, place)?;
        self.places.push(OfferedPlace { key, host, port, object, memory });
        Ok(())
    }

    fn request(&mut self, key: &str, user: &str, priority: i64) -> Result<()> {
        if self.requests.len() >= MAX_REQUESTS {
            return Err(RpcError::limit("requests of a connection", MAX_REQUESTS as u64, MAX_REQUESTS as u64 + 1));
        }
        let memory = self.queued.reserve(OVERHEAD + COPIES * (key.len() + user.len()) as u64)?;
        let claim = self.tracker.request_for_tvm(&self.client, key, user, priority)?;
        let answered = Box::pin(claim.answered());
        self.requests.push(WaitingRequest { claim, answered, _memory: memory });
        Ok(())
    }

    fn update_info(&mut self, later: PeerInfo) -> Result<()> {
        let mut info = self.info.clone();
        info.merge(later);
        let (host, port) = info.address.clone().unwrap_or((None, InfoPort::Number(0)));
        let text_port = if let InfoPort::Text(port) = &port { port.len() } else { 0 };
        let name = info.key.clone().unwrap_or_default();
        let longest = name.len().max(host.as_ref().map_or(0, String::len)).max(text_port);
        if longest > MAX_NAME {
            return Err(RpcError::limit("length of a server's name", MAX_NAME as u64, longest as u64));
        }
        if name.starts_with("server") {
            // Without a machine that the transport knows, the server has to name one.
            let host = match host {
                Some(host) => host,
                None => self.tracker.admit_tvm_host(&self.client, None, 0).unwrap_or_default(),
            };
            let memory = self.queued.reserve(OVERHEAD + COPIES * (name.len() + host.len() + text_port) as u64)?;
            self.listing = Some((self.tracker.list_tvm_server(name, host, port), memory));
        } else {
            self.listing = None;
        }
        self.info = info;
        Ok(())
    }

    fn free_match_keys(&self) -> Result<Reply> {
        let free = self.tracker.free_match_keys(self.places.iter().map(|place| &place.object));
        let keys: Vec<&str> = free.iter().map(|place| place.match_key.as_str()).collect();
        // A character takes six in JSON at most.
        let len: usize = keys.iter().map(|key| 6 * key.len() + 4).sum();
        let memory = self.queued.reserve(2 * len as u64)?;
        Ok((TrackerReply::MatchKeys(&keys).encode(), Some(memory)))
    }
}

/// Returns the state of the tracker.
async fn summary(tracker: Arc<Tracker>, queued: &Arc<MemoryQuota>) -> Result<Reply> {
    // It is collected once and copied once.
    let memory = queued.reserve(2 * MAX_TRACKER_MESSAGE as u64)?;
    // The summary of a large pool takes long, and must not delay others.
    let collected = tokio::task::spawn_blocking(move || tracker.tvm_summary().encode()).await;
    let summary = collected.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
    Ok((summary, Some(memory)))
}
