//! Servers and clients of TVM at a tracker, in one queue with all others.
//!
//! A server of TVM offers one *place* after the other, each under a match key, and says nothing
//! else. A place is a registration with one slot here. It is taken from the moment at which a
//! client has been told its match key, and free again when its server offers another one for the
//! same key and address. It ends with the connection, and has no lease.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rpc_core::{ErrorKind, Result, RpcError};
use rpc_transports::Address;
use rpc_transports::tracker::{Reach, ServerRequest};
use rpc_tvm::wire::{InfoPort, TrackerSummary};
use tokio::sync::watch;

use super::super::advertised_addresses;
use super::super::limits::{check_tvm_key, clip};
use super::super::scheduler::{ClaimId, Offer, ServerId};
use super::objects::ServerObject;
use super::{
    Admission, Answer, Granted, OpenClaim, ServerDescription, ServerEntry, Tracker, known_as, limit_key, serves_tvm,
    tvm_label, tvm_target,
};
use crate::server::server_state::Client;

/// A place at a server, as a client of TVM reaches it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TvmPlace {
    pub(crate) host: String,
    pub(crate) port: u16,
    /// Key that the client has to name at the server.
    pub(crate) match_key: String,
}

impl TvmPlace {
    /// Returns the address for native clients.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`]: the match key cannot be in an address.
    pub(super) fn address(&self) -> Result<Address> {
        let address = Address::at_host("tvm", &self.host, self.port);
        let address = address.and_then(|address| address.with_key(&self.match_key));
        address.map_err(|error| RpcError::invalid_argument(error.to_string()))
    }

    /// Checks that the place can be offered under this key.
    fn check(&self, key: &str) -> Result<()> {
        check_tvm_key(key)?;
        check_tvm_key(&self.match_key)?;
        let sample = Address::at_host("tvm", &self.host, self.port);
        match sample.and_then(|address| address.with_key(key)) {
            // A native client can ask for this key, and has to get an address.
            Ok(_) => self.address().map(drop),
            Err(_) => Ok(()),
        }
    }
}

/// Description of a connected server for clients of TVM, which lists it until it is dropped.
pub(crate) struct TvmListing {
    tracker: Arc<Tracker>,
    id: u64,
}

/// Entry of a [`TvmListing`].
#[derive(Debug)]
pub(super) struct ListedServer {
    name: String,
    host: String,
    port: InfoPort,
}

/// A request of a client of TVM. Dropping it withdraws the request, or gives back the slot of which
/// the client has not been told.
pub(crate) struct TvmClaim {
    tracker: Arc<Tracker>,
    id: ClaimId,
    answer: watch::Receiver<Answer>,
    is_delivered: bool,
}

/// A slot of which a client of TVM has been told. If its connection ends before the server has
/// reported the client, the slot comes back.
pub(crate) struct TvmGrant {
    tracker: Arc<Tracker>,
    claim: ClaimId,
    slots: Vec<(ServerId, u64)>,
}

impl Tracker {
    /// Returns the host under which clients reach a server of TVM that `client` is.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`] with advice for the operator, and [`ErrorKind::InvalidArgument`].
    pub(crate) fn admit_tvm_host(&self, client: &Client, host: Option<&str>, port: u16) -> Result<String> {
        // An unspecified host stands for the one that the server comes from.
        let told = Address::tcp(host.unwrap_or("0.0.0.0"), port);
        let told = told.map_err(|error| RpcError::invalid_argument(error.to_string()))?.to_string();
        let (allowed, transports) = (&self.options.allow_advertise, &self.options.transports);
        // A server of TVM has no way to prove where it is.
        let admitted = advertised_addresses::admit(&[told], client.machine, client.through_hop, allowed, transports)?;
        let (host, _) = tvm_target(&admitted.addresses).ok_or_else(|| RpcError::internal("an address has no host"))?;
        Ok(host)
    }

    /// Registers a place. The registration ends when the returned object is dropped.
    ///
    /// # Errors
    ///
    /// A limit is reached, or the key or the match key is none.
    pub(crate) fn add_tvm_place(self: &Arc<Self>, client: &Client, key: &str, place: TvmPlace) -> Result<ServerObject> {
        place.check(key)?;
        let shown = Address::at_host("tvm", &place.host, place.port).map(|address| address.to_string());
        let shown = shown.map_err(|error| RpcError::invalid_argument(error.to_string()))?;
        let now = rpc_core::clock::now();
        let offer = Arc::new(Offer {
            key: key.to_owned(),
            labels: BTreeMap::from([tvm_label()]),
            devices: Vec::new(),
            capacity: 1,
            by_key_only: true,
        });
        let (name, shown_key) = (format!("{}:{}", place.host, place.port), clip(key));
        let description = ServerDescription {
            name,
            key: shown_key,
            address: vec![shown],
            peer: client.peer.clone(),
            offer: offer.clone(),
        };
        let entry = ServerEntry {
            description: Arc::new(description),
            admission: Admission::Tvm(Arc::new(place)),
            reach: Reach::Untried,
            to_end: BTreeSet::new(),
            draining: None,
            probed: now,
            details: None,
        };
        let mut state = self.lock();
        // With the clock at zero no ticket expires.
        let id = state.scheduler.register(now, &limit_key(client), offer, &Default::default())?;
        state.scheduler.keep_without_lease(id);
        state.add_server_entry(now, id, entry);
        self.apply_events(state, now);
        Ok(ServerObject { tracker: self.clone(), id })
    }

    /// Returns true if a client holds the place.
    pub(crate) fn is_tvm_place_taken(&self, place: &ServerObject) -> bool {
        self.lock().scheduler.server(place.id).is_some_and(|server| server.holders().next().is_some())
    }

    /// Offers a place again, under another match key. Returns false if its registration has ended.
    ///
    /// # Errors
    ///
    /// The match key is none.
    pub(crate) fn renew_tvm_place(&self, object: &ServerObject, key: &str, place: TvmPlace) -> Result<bool> {
        place.check(key)?;
        let now = rpc_core::clock::now();
        let mut state = self.lock();
        let Some(entry) = state.servers.get_mut(&object.id) else { return Ok(false) };
        entry.admission = Admission::Tvm(Arc::new(place));
        let is_registered = state.scheduler.set_free(now, object.id);
        self.apply_events(state, now);
        Ok(is_registered)
    }

    /// Lists a server for clients of TVM.
    pub(crate) fn list_tvm_server(self: &Arc<Self>, name: String, host: String, port: InfoPort) -> TvmListing {
        let mut state = self.lock();
        state.next_listing += 1;
        let id = state.next_listing;
        state.listed.insert(id, ListedServer { name, host, port });
        TvmListing { tracker: self.clone(), id }
    }

    /// Adds a request of a client of TVM.
    ///
    /// # Errors
    ///
    /// A limit is reached, or the key is none.
    pub(crate) fn request_for_tvm(
        self: &Arc<Self>,
        client: &Client,
        key: &str,
        user: &str,
        priority: i64,
    ) -> Result<TvmClaim> {
        check_tvm_key(key)?;
        let user = if user.is_empty() { "a client of TVM".to_owned() } else { clip(user) };
        let priority = i32::try_from(priority).unwrap_or(if priority < 0 { i32::MIN } else { i32::MAX });
        let request = ServerRequest {
            labels: BTreeMap::from([tvm_label()]),
            // Clients of TVM wait without limit.
            unservable_timeout_ms: None,
            ..ServerRequest::new(key).priority(priority).client(&format!("{user} ({})", known_as(client)))
        };
        let now = rpc_core::clock::now();
        let (sender, answer) = watch::channel(None);
        let mut state = self.lock();
        let id = state.scheduler.request(now, &limit_key(client), request)?;
        state.claims.insert(id, OpenClaim { key: key.to_owned(), answer: sender });
        self.apply_events(state, now);
        Ok(TvmClaim { tracker: self.clone(), id, answer, is_delivered: false })
    }

    /// Records that the client of these slots is told where they are.
    pub(super) fn note_delivery(&self, slots: &[Granted]) {
        if slots.iter().all(|granted| granted.tvm.is_none()) {
            return;
        }
        let now = rpc_core::clock::now();
        let mut state = self.lock();
        for Granted { slot, .. } in slots.iter().filter(|granted| granted.tvm.is_some()) {
            state.scheduler.use_granted(now, slot.server, slot.serial);
        }
        self.apply_events(state, now);
    }

    /// Returns the state of the tracker for clients of TVM: the servers that they can get, each
    /// once for each of its slots, and the keys of servers and of waiting requests.
    pub(crate) fn tvm_summary(&self) -> TrackerSummary {
        let mut queues: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        let mut summary = TrackerSummary::new();
        let native: Vec<_> = {
            let state = self.lock();
            for (key, waiting) in state.scheduler.waiting_by_key().filter(|(key, _)| !key.is_empty()) {
                queues.entry(key.to_owned()).or_default().1 += waiting as u64;
            }
            let mut native = Vec::new();
            for (id, entry) in &state.servers {
                let ServerDescription { offer, .. } = &*entry.description;
                if !serves_tvm(&offer.labels) {
                    continue;
                }
                let free = state.scheduler.server(*id).map_or(0, |server| server.free());
                queues.entry(offer.key.clone()).or_default().0 += u64::from(free);
                if matches!(entry.admission, Admission::Ticket(_)) {
                    native.push(entry.description.clone());
                }
            }
            for ListedServer { name, host, port } in state.listed.values() {
                summary.add_server(name, host, port);
            }
            native
        };
        for description in native {
            let Some((host, port)) = tvm_target(&description.address) else { continue };
            let name = format!("server:{}", description.offer.key);
            for _ in 0..description.offer.capacity.min(MAX_LISTED_SLOTS) {
                summary.add_server(&name, &host, &InfoPort::Number(port));
            }
        }
        for (key, (free, pending)) in queues {
            summary.add_queue(&key, free, pending);
        }
        summary
    }

    /// Returns the match keys of those places that are free.
    pub(crate) fn free_match_keys<'a>(&self, places: impl Iterator<Item = &'a ServerObject>) -> Vec<Arc<TvmPlace>> {
        let state = self.lock();
        let free = places.filter_map(|place| {
            let is_free = state.scheduler.server(place.id)?.holders().next().is_none();
            match &state.servers.get(&place.id)?.admission {
                Admission::Tvm(place) if is_free => Some(place.clone()),
                _ => None,
            }
        });
        free.collect()
    }
}

/// Largest number of slots of one server that are listed one by one.
const MAX_LISTED_SLOTS: u32 = 64;

impl TvmClaim {
    /// Resolves when there is an answer.
    pub(crate) fn answered(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut answer = self.answer.clone();
        async move { _ = answer.wait_for(Option::is_some).await }
    }

    /// Takes the answer, of which the client is told now.
    ///
    /// # Errors
    ///
    /// The reason why there is no server.
    pub(crate) fn deliver(mut self) -> Result<(TvmPlace, TvmGrant)> {
        let answer = self.answer.borrow().clone();
        let granted = answer.unwrap_or_else(|| Err(RpcError::new(ErrorKind::Cancelled, "the request was given up")))?;
        let found = granted.first().and_then(|first| Some((first, first.for_client_of_tvm()?)));
        let Some((Granted { slot, .. }, place)) = found else {
            return Err(RpcError::not_found("the server has left"));
        };
        self.is_delivered = true;
        self.tracker.note_delivery(&granted);
        let slots = vec![(slot.server, slot.serial)];
        Ok((place, TvmGrant { tracker: self.tracker.clone(), claim: self.id, slots }))
    }
}

impl Drop for TvmClaim {
    fn drop(&mut self) {
        if self.is_delivered {
            return;
        }
        let now = rpc_core::clock::now();
        let mut state = self.tracker.lock();
        if state.claims.remove(&self.id).is_some() {
            state.scheduler.cancel(now, self.id);
        } else if let Some(Ok(granted)) = &*self.answer.borrow() {
            let slots: Vec<_> = granted.iter().map(|granted| (granted.slot.server, granted.slot.serial)).collect();
            state.scheduler.give_back(now, self.id, &slots);
        }
        self.tracker.apply_events(state, now);
    }
}

impl TvmGrant {
    /// Leaves the slots to the client: they come back when their tickets expire unused.
    pub(crate) fn keep(mut self) {
        self.slots.clear();
    }
}

impl Drop for TvmGrant {
    fn drop(&mut self) {
        let now = rpc_core::clock::now();
        let mut state = self.tracker.lock();
        state.scheduler.abandon(now, self.claim, std::mem::take(&mut self.slots));
        self.tracker.apply_events(state, now);
    }
}

impl Drop for TvmListing {
    fn drop(&mut self) {
        self.tracker.lock().listed.remove(&self.id);
    }
}

impl Granted {
    /// Returns the place for a client of TVM: that of a server of TVM, or of another one that
    /// serves such clients. The ticket is the random part of a match key.
    fn for_client_of_tvm(&self) -> Option<TvmPlace> {
        if let Some(place) = &self.tvm {
            return Some((**place).clone());
        }
        let (host, port) = tvm_target(&self.description.address)?;
        Some(TvmPlace { host, port, match_key: format!("{}:{}", self.description.offer.key, self.ticket) })
    }
}
