//! Offers of tensors to other servers: a session makes a capability for a range of one of its
//! tensors, and the server that connects by it writes to this range and to nothing else.
//!
//! An offer is an object of the session that has made it, and ends with it. The connection of its
//! holder is served by a session of its own, which has this one range
//! ([`offered_range`](self::offered_range)), and ends with the offer.

mod offered_range;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rpc_core::client::CHUNK;
use rpc_core::limits::MemoryLease;
use rpc_core::tensor::Access;
use rpc_core::{
    DeviceGate, Devices, ErrorKind, LocalSession, MemoryQuota, Registry, Result, RpcError, SessionLimits,
    SharedSession, Tensor, ThreadQuota,
};
use rpc_transports::{
    Address, Capability, CapabilityClient, CapabilityId, CapabilitySessions, CapabilityTable, ClientConnection,
    Transports,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use self::offered_range::OfferedRange;
use crate::config::{ListenAddress, ServeConfig};

pub(crate) use self::offered_range::GET_RANGE;

/// Maximum number of offers that a session has at one time.
pub(crate) const MAX_OFFERS: usize = 64;

/// Maximum number of sends of a session at one time.
pub(crate) const MAX_SENDS: usize = 16;

/// Longest wait of a withdrawal for writes that have begun. They end with their connection, but for
/// those that wait for a device.
const WITHDRAW_TIMEOUT: Duration = Duration::from_secs(2);

/// Bytes that an offer counts against the memory of its session.
const OFFER_BYTES: u64 = 2048;

/// Handles that the holder of a capability may have: the function, and the range.
const HOLDER_HANDLES: usize = 8;

/// Requests of the holder of a capability at one time.
const HOLDER_REQUESTS: usize = 64;

/// Bytes of those requests: a few pieces of a copy.
const HOLDER_QUEUED_BYTES: usize = 8 * CHUNK;

/// Threads that write for the holder of a capability.
const HOLDER_THREADS: usize = 2;

/// Part of a session in direct sends: what it may still offer and send.
pub(crate) struct PeerQuota {
    /// Offers of the server; `None` where other servers cannot reach this session.
    pub(crate) table: Option<Arc<OfferTable>>,
    pub(crate) offers: Arc<Semaphore>,
    pub(crate) sends: Arc<Semaphore>,
    /// Gate of the session's devices, which writers of its tensors pass as it does.
    gate: Option<Arc<dyn DeviceGate>>,
    /// Silence after which the connection of a send is tested.
    pub(crate) keep_alive: Duration,
    /// True if the client's connection is encrypted, and so has to be that of a send.
    pub(crate) is_encrypted: bool,
}

impl PeerQuota {
    /// Returns the quota of a session whose tensors other servers reach by `table`.
    pub(crate) fn new(
        table: Option<Arc<OfferTable>>,
        gate: Option<Arc<dyn DeviceGate>>,
        keep_alive: Duration,
        is_encrypted: bool,
    ) -> Self {
        let (offers, sends) = (Arc::new(Semaphore::new(MAX_OFFERS)), Arc::new(Semaphore::new(MAX_SENDS)));
        Self { table, offers, sends, gate, keep_alive, is_encrypted }
    }
}

/// Offers of all sessions of a server.
pub(crate) struct OfferTable {
    /// Addresses for other servers. Known once the server listens.
    addresses: OnceLock<Vec<PeerAddress>>,
    offers: Mutex<HashMap<CapabilityId, Arc<OfferState>>>,
    total_threads: Arc<ThreadQuota>,
    total_memory: Arc<MemoryQuota>,
}

/// Address for other servers.
struct PeerAddress {
    text: String,
    is_encrypted: bool,
    /// True if other machines cannot reach it, and no operator has named it.
    is_local: bool,
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

/// Use of a capability.
enum Holder {
    /// No peer has used the capability yet.
    Unused,
    /// A peer has used it, by this connection, and has this session.
    Connected(ClientConnection, Weak<OfferedRange>),
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
                let is_local = config.peer_address.is_empty() && properties.is_local();
                Some(PeerAddress { text: address.to_string(), is_encrypted: properties.encrypted, is_local })
            })
            .collect();
        // The server listens once.
        let _ = self.addresses.set(found);
    }

    /// Returns the addresses for other servers. Those that only this machine reaches are for
    /// clients of this machine, whose other servers may be here, too.
    pub(crate) fn addresses(&self, must_be_encrypted: bool, client_is_local: bool) -> Vec<String> {
        let suits = |address: &&PeerAddress| {
            (address.is_encrypted || !must_be_encrypted) && (client_is_local || !address.is_local)
        };
        self.addresses.get().into_iter().flatten().filter(suits).map(|address| address.text.clone()).collect()
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
            holder: Mutex::new(Holder::Unused),
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

impl CapabilitySessions for OfferTable {
    fn open(&self, id: CapabilityId, client: &CapabilityClient) -> Result<SharedSession> {
        let state = self.get(id)?;
        let mut holder = state.holder.lock();
        state.check(&holder)?;
        if state.must_be_encrypted && !client.is_encrypted {
            return Err(refused("the capability is for an encrypted connection"));
        }
        let registry = Registry::new();
        let range = state.range.clone();
        registry.add_inline(GET_RANGE, move || range.clone());
        let limits = SessionLimits {
            max_handles: HOLDER_HANDLES,
            max_requests: HOLDER_REQUESTS.min(state.limits.max_requests),
            max_queued_bytes: HOLDER_QUEUED_BYTES.min(state.limits.max_queued_bytes),
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
        let session = Arc::new(OfferedRange::new(session.build(), &state.range, client.peer.clone()));
        *holder = Holder::Connected(client.connection.clone(), Arc::downgrade(&session));
        Ok(session)
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
            Holder::Connected(..) => {
                Err(refused("the capability has been used before, and is good for one connection"))
            }
            Holder::Ended => Err(refused("the capability was withdrawn")),
            Holder::Unused if rpc_core::clock::now() >= self.expires => Err(refused("the capability has expired")),
            Holder::Unused => Ok(()),
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
    /// one, now or in an earlier call. No write of the peer begins after that, and those that have
    /// begun have ended, unless they take longer than [`WITHDRAW_TIMEOUT`].
    pub(crate) async fn withdraw(&self) -> bool {
        let Some((range, session)) = self.end() else { return false };
        let writes = async {
            if let Some(session) = session.upgrade() {
                session.writes_ended().await;
            }
            // A write of a session that is gone holds the tensor until it is done.
            let (free, freed) = oneshot::channel();
            let resume = Box::new(move |borrow| drop(free.send(borrow)));
            if range.storage().borrow_or_wait(Access::Read, resume).is_err() {
                drop(freed.await);
            }
        };
        let _ = tokio::time::timeout(WITHDRAW_TIMEOUT, writes).await;
        true
    }

    /// Ends the offer, and the session of the peer that has used it. Returns the range and that
    /// session if there was a peer.
    fn end(&self) -> Option<(Tensor, Weak<OfferedRange>)> {
        let state = self.table.get(self.id).ok()?;
        let mut holder = state.holder.lock();
        let Holder::Connected(connection, session) = &*holder else {
            *holder = Holder::Ended;
            return None;
        };
        let (connection, session) = (connection.clone(), session.clone());
        drop(holder);
        let reason = RpcError::new(ErrorKind::Closed, "the offered tensor was withdrawn").may_have_run(true);
        // The connection ends a moment later, and its next write must not begin.
        if let Some(session) = session.upgrade() {
            session.close(reason.clone());
        }
        connection.end(reason);
        Some((state.range.clone(), session))
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        let _ = self.end();
        self.table.offers.lock().remove(&self.id);
    }
}
