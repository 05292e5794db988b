//! Offers of tensors to other servers: a session makes a capability for a range of one of its
//! tensors, and the server that connects by it writes to this range and to nothing else.
//!
//! An offer is an object of the session that has made it, and ends with it. The connection of its
//! holder is served by a session of its own, which has this one range
//! ([`offered_range`](self::offered_range)), and ends with the offer.

mod offered_range;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rpc_core::limits::MemoryLease;
use rpc_core::{
    DeviceGate, Devices, ErrorKind, LocalSession, MemoryQuota, Registry, Result, RpcError, SessionLimits,
    SharedSession, Tensor, ThreadQuota,
};
use rpc_transports::{
    Address, Capability, CapabilityClient, CapabilityId, CapabilityKeeper, CapabilityTable, ClientConnection,
    Transports,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use self::offered_range::OfferedRange;
use crate::config::{ListenAddress, ServeConfig};

pub(crate) use self::offered_range::GET_RANGE;

/// Maximum number of offers that a session has at one time.
pub(crate) const MAX_OFFERS: usize = 64;

/// Maximum number of sends of a session at one time.
pub(crate) const MAX_SENDS: usize = 16;

/// Bytes that an offer counts against the memory of its session.
const OFFER_BYTES: u64 = 2048;

/// Handles that the holder of a capability may have: the function, and the range.
const HOLDER_HANDLES: usize = 8;

/// Threads that write for the holder of a capability.
const HOLDER_THREADS: usize = 4;

/// Part of a session in direct sends: what it may still offer and send.
pub(crate) struct PeerQuota {
    /// Offers of the server; `None` where other servers cannot reach this session.
    pub(crate) table: Option<Arc<OfferTable>>,
    pub(crate) offers: Arc<Semaphore>,
    pub(crate) sends: Arc<Semaphore>,
    /// Gate of the session's devices, which writers of its tensors pass as it does.
    gate: Option<Arc<dyn DeviceGate>>,
}

impl PeerQuota {
    /// Returns the quota of a session whose tensors other servers reach by `table`.
    pub(crate) fn new(table: Option<Arc<OfferTable>>, gate: Option<Arc<dyn DeviceGate>>) -> Self {
        let (offers, sends) = (Arc::new(Semaphore::new(MAX_OFFERS)), Arc::new(Semaphore::new(MAX_SENDS)));
        Self { table, offers, sends, gate }
    }
}

/// Offers of all sessions of a server.
pub(crate) struct OfferTable {
    /// Addresses for other servers, and true for those that are encrypted. Known once the server
    /// listens.
    addresses: OnceLock<Vec<(String, bool)>>,
    offers: Mutex<HashMap<CapabilityId, Arc<OfferState>>>,
    total_threads: Arc<ThreadQuota>,
    total_memory: Arc<MemoryQuota>,
}

/// An offer as the handshakes of other servers find it.
struct OfferState {
    capability: Capability,
    expires: Instant,
    must_be_encrypted: bool,
    /// Range of bytes, as a tensor.
    range: Tensor,
    devices: Devices,
    limits: SessionLimits,
    gate: Option<Arc<dyn DeviceGate>>,
    holder: Mutex<Holder>,
}

/// Holder of a capability.
enum Holder {
    /// No peer has used the capability yet.
    Nobody,
    /// A peer has used it, by this connection.
    Connected(ClientConnection),
    /// The offer has ended.
    Ended,
}

/// Terms of an offer.
pub(crate) struct OfferTerms {
    /// Range of bytes, as a tensor.
    pub(crate) range: Tensor,
    /// Time in which the capability has to be used.
    pub(crate) lifetime: Duration,
    pub(crate) must_be_encrypted: bool,
    pub(crate) devices: Devices,
    pub(crate) limits: SessionLimits,
}

impl OfferTable {
    pub(crate) fn new(total_threads: Arc<ThreadQuota>, total_memory: Arc<MemoryQuota>) -> Arc<Self> {
        let (addresses, offers) = (OnceLock::new(), Mutex::default());
        Arc::new(Self { addresses, offers, total_threads, total_memory })
    }

    /// Sets the addresses for other servers: those that the operator names, or else those that the
    /// server listens on and that name a host.
    pub(crate) fn set_addresses(&self, config: &ServeConfig, listening: &[Address], transports: &Transports) {
        let named = config.peer_address.iter().map(|ListenAddress(address)| address);
        let found: Vec<_> = named
            .chain(listening.iter().filter(|address| config.peer_address.is_empty() && names_host(address)))
            .filter_map(|address| {
                let properties = transports.check(address).ok().filter(|properties| !properties.starts_programs)?;
                Some((address.to_string(), properties.encrypted))
            })
            .collect();
        // The server listens once.
        let _ = self.addresses.set(found);
    }

    /// Returns the addresses for other servers.
    pub(crate) fn addresses(&self, must_be_encrypted: bool) -> Vec<String> {
        let all = self.addresses.get().into_iter().flatten();
        all.filter(|(_, encrypted)| *encrypted || !must_be_encrypted).map(|(address, _)| address.clone()).collect()
    }

    /// Makes a capability for a range of a tensor.
    ///
    /// # Errors
    ///
    /// The system gives no random numbers.
    pub(crate) fn offer(
        self: &Arc<Self>,
        terms: OfferTerms,
        quota: &PeerQuota,
        permit: OwnedSemaphorePermit,
        memory: MemoryLease,
    ) -> Result<(Offer, Capability)> {
        let OfferTerms { range, lifetime, must_be_encrypted, devices, limits } = terms;
        let capability = Capability::generate()?;
        let state = OfferState {
            capability: capability.clone(),
            expires: rpc_core::clock::now() + lifetime,
            must_be_encrypted,
            range,
            devices,
            limits,
            gate: quota.gate.clone(),
            holder: Mutex::new(Holder::Nobody),
        };
        self.offers.lock().insert(capability.id(), Arc::new(state));
        let offer = Offer { table: self.clone(), id: capability.id(), _permit: permit, _memory: memory };
        Ok((offer, capability))
    }

    fn get(&self, id: CapabilityId) -> Result<Arc<OfferState>> {
        let found = self.offers.lock().get(&id).cloned();
        found.ok_or_else(|| refused("this server has no such capability: it was withdrawn, or its session has ended"))
    }
}

/// Returns true if other machines, or other programs of this one, can dial the address as it is.
fn names_host(address: &Address) -> bool {
    match address.host_and_port() {
        Some((host, _)) => host.parse::<std::net::IpAddr>().map_or(true, |host| !host.is_unspecified()),
        None => true,
    }
}

fn refused(why: &'static str) -> RpcError {
    RpcError::new(ErrorKind::Refused, why)
}

impl CapabilityTable for OfferTable {
    fn find(&self, id: CapabilityId) -> Result<Capability> {
        let state = self.get(id)?;
        state.check(&state.holder.lock())?;
        Ok(state.capability.clone())
    }
}

impl CapabilityKeeper for OfferTable {
    fn open(&self, id: CapabilityId, client: &CapabilityClient) -> Result<SharedSession> {
        let state = self.get(id)?;
        let mut holder = state.holder.lock();
        state.check(&holder)?;
        if state.must_be_encrypted && !client.is_encrypted {
            return Err(refused("the capability is for an encrypted connection"));
        }
        *holder = Holder::Connected(client.connection.clone());
        drop(holder);
        let registry = Registry::new();
        let range = state.range.clone();
        registry.add_inline(GET_RANGE, move || range.clone());
        let limits = SessionLimits {
            max_handles: HOLDER_HANDLES,
            max_threads: HOLDER_THREADS.min(state.limits.max_threads),
            ..state.limits.clone()
        };
        let mut session = LocalSession::builder(registry)
            .devices(state.devices.clone())
            .limits(limits)
            .total_threads(self.total_threads.clone())
            .total_memory(self.total_memory.clone());
        if let Some(gate) = &state.gate {
            session = session.device_gate(gate.clone());
        }
        tracing::debug!(peer = client.peer, capability = %id, "another server writes to an offered tensor");
        Ok(Arc::new(OfferedRange::new(session.build(), &state.range, client.peer.clone())))
    }
}

impl fmt::Debug for OfferTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OfferTable").field("offers", &self.offers.lock().len()).finish_non_exhaustive()
    }
}

impl OfferState {
    /// Checks that the capability may be used.
    fn check(&self, holder: &Holder) -> Result<()> {
        match holder {
            Holder::Connected(_) => Err(refused("the capability has been used before, and is good for one connection")),
            Holder::Ended => Err(refused("the capability was withdrawn")),
            Holder::Nobody if rpc_core::clock::now() >= self.expires => Err(refused("the capability has expired")),
            Holder::Nobody => Ok(()),
        }
    }
}

/// Offer of a session, which ends when it is dropped.
pub(crate) struct Offer {
    table: Arc<OfferTable>,
    id: CapabilityId,
    _permit: OwnedSemaphorePermit,
    _memory: MemoryLease,
}

impl Offer {
    /// Bytes that the offer counts against the memory of its session.
    pub(crate) const BYTES: u64 = OFFER_BYTES;

    /// Ends the offer, and the connection of the peer that has used it. Returns true if there was
    /// one, now or in an earlier call.
    pub(crate) fn withdraw(&self) -> bool {
        let Ok(state) = self.table.get(self.id) else { return false };
        let mut holder = state.holder.lock();
        match &*holder {
            Holder::Connected(connection) => {
                connection.end(RpcError::new(ErrorKind::Closed, "the offered tensor was withdrawn").may_have_run(true));
                true
            }
            Holder::Nobody => {
                *holder = Holder::Ended;
                false
            }
            Holder::Ended => false,
        }
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        self.withdraw();
        self.table.offers.lock().remove(&self.id);
    }
}
