//! The functions of a tracker, around the scheduler: its clock, its tickets, and the answers to
//! clients.
//!
//! Registrations and claims are objects of the sessions that made them. The end of the session of a
//! server ends its registration, and the end of the session of a client cancels its claim.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rpc_core::function::EndProbe;
use rpc_core::limits::MemoryLease;
use rpc_core::proto::ANONYMOUS;
use rpc_core::{Context, ErrorKind, Pack, Packed, Registry, Result, RpcError, Shared};
use rpc_transports::tracker::{
    Drain, Kick, Loss, LossReason, MESSAGES, PoolEvent, PoolEventKind, Reach, Registered, Registration, Returned,
    ServerDetails, ServerRequest, ServerStatus, Ticket, TicketKey, functions,
};
use rpc_transports::{Address, Connector, Dial, Machine, Transports};
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::{JoinError, JoinHandle};

use self::grants::grants;
use self::objects::ClaimObject;
use self::proof_queue::{ProofQueue, SessionId};
use super::advertised_addresses::{self, Admitted};
use super::history::{History, KeyHistories, LAST_HOUR};
use super::limits::{check_registration, check_request, clip, clipped, size_of_details};
use super::millis;
use super::scheduler::{
    ClaimId, Event, GrantedSlot, Offer, Policy, Scheduler, ServerId, SlotTotals, timed_out, unservable,
};
use crate::server::server_state::Client;

pub(crate) use self::objects::ServerObject;

mod grants;
mod objects;
mod proof_queue;
mod summary;
#[cfg(feature = "tvm")]
pub(crate) mod tvm;

/// Maximum length of the answer to one request in bytes.
const MAX_GRANTS: usize = 4 << 20;

/// Maximum number of losses that are kept.
const MAX_LOSSES: usize = 256;

/// Maximum number of events that are kept.
const MAX_EVENTS: usize = 128;

/// Maximum number of concurrent probes.
const PROBES: usize = 32;

/// Interval of probes of a server that was not found.
const PROBE_INTERVAL: Duration = Duration::from_secs(30);

/// Options of a tracker.
#[derive(Clone, Debug)]
pub struct TrackerOptions {
    /// Time that a registration lasts without a report. Default 10 s.
    pub lease: Duration,
    /// Validity of a ticket, in which a client must reach its server. Default 20 s.
    pub ticket_lifetime: Duration,
    /// Maximum number of servers. Default 8,192.
    pub max_servers: usize,
    /// Maximum number of servers of one peer, known by its proven identity or else by the address
    /// of its machine. Default 4,096.
    pub max_servers_per_peer: usize,
    /// Maximum number of waiting requests. Default 16,384.
    pub max_waiting: usize,
    /// Maximum number of waiting requests of one client. Default 1,024.
    pub max_waiting_per_client: usize,
    /// Patterns of addresses that servers may advertise beside their own. Default: none.
    pub allow_advertise: Vec<String>,
    /// True if clients may end the sessions of others, and drain servers. Default: false.
    pub allow_kick: bool,
    /// Options for probing servers: trust and tokens. Default: neither. [`Tracker::set_onward`]
    /// replaces them.
    pub onward: Dial,
    /// Transports by which servers are probed. They determine which addresses servers may
    /// advertise.
    pub transports: Transports,
}

impl Default for TrackerOptions {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(10),
            ticket_lifetime: Duration::from_secs(20),
            max_servers: 8192,
            max_servers_per_peer: 4096,
            max_waiting: 16384,
            max_waiting_per_client: 1024,
            allow_advertise: Vec::new(),
            allow_kick: false,
            onward: Dial::default(),
            transports: crate::transports(),
        }
    }
}

/// A tracker. Its functions are in a registry that any server can serve whose sessions have the
/// extension [`Client`].
#[derive(Debug)]
pub struct Tracker {
    options: TrackerOptions,
    /// Present options for probing servers.
    onward: Mutex<Dial>,
    runtime: Handle,
    started: Instant,
    state: Mutex<TrackerState>,
    /// Notified when the next timeout may have changed.
    changed: Arc<Notify>,
    probes: Semaphore,
    /// Registrations whose servers prove where they are. Apart from the probes, which nobody waits
    /// for.
    proofs: ProofQueue,
}

#[derive(Debug)]
struct TrackerState {
    scheduler: Scheduler,
    servers: HashMap<ServerId, ServerEntry>,
    claims: HashMap<ClaimId, OpenClaim>,
    /// Recent losses, the latest first.
    losses: VecDeque<(Instant, Loss)>,
    history: History,
    key_histories: KeyHistories,
    /// Recent events, the latest first.
    events: VecDeque<(Instant, PoolEvent)>,
    /// Servers of TVM that are connected, for clients of TVM.
    #[cfg(feature = "tvm")]
    listed: BTreeMap<u64, tvm::ListedServer>,
    #[cfg(feature = "tvm")]
    next_listing: u64,
}

/// Facts of a server that the scheduler does not need.
#[derive(Debug)]
struct ServerEntry {
    description: Arc<ServerDescription>,
    admission: Admission,
    reach: Reach,
    /// Sessions that the server is asked to end with its next report.
    to_end: BTreeSet<u64>,
    /// Time since which the server drains, and the client that has asked for it.
    draining: Option<(Instant, String)>,
    probed: Instant,
    /// Last facts that the server has reported for people.
    details: Option<ReportedDetails>,
}

/// Means by which a server knows the clients that the tracker sends.
#[derive(Debug)]
enum Admission {
    /// Tickets that are made with this key.
    Ticket(TicketKey),
    /// A match key of TVM.
    #[cfg(feature = "tvm")]
    Tvm(Arc<tvm::TvmPlace>),
}

/// Facts that a server has reported, charged to its session.
#[derive(Debug)]
struct ReportedDetails {
    received: Instant,
    details: Arc<ServerDetails>,
    _memory: MemoryLease,
}

impl ReportedDetails {
    /// Charges details to the session that reports them. Returns `None` if it has no memory left.
    fn new(context: &Context, mut details: ServerDetails) -> Option<Self> {
        let memory = context.reserve_memory(size_of_details(&mut details));
        let memory = memory.inspect_err(|error| rpc_core::log_limited!(WARN, %error, "dropped details of a server"));
        Some(Self { received: rpc_core::clock::now(), details: Arc::new(details), _memory: memory.ok()? })
    }
}

/// Description of a server, shared by its grants and by summaries.
#[derive(Debug)]
struct ServerDescription {
    name: String,
    /// Key, shortened for display.
    key: String,
    address: Vec<String>,
    peer: String,
    offer: Arc<Offer>,
}

/// A waiting request with the sender of its answer.
#[derive(Debug)]
struct OpenClaim {
    key: String,
    answer: watch::Sender<Answer>,
}

/// Answer to a request. `None` while the request waits.
type Answer = Option<Result<Arc<Vec<Granted>>>>;

/// A granted slot with its ticket.
#[derive(Debug)]
struct Granted {
    slot: GrantedSlot,
    /// Ticket for the server; empty for one of TVM.
    ticket: String,
    /// Place of a server of TVM.
    #[cfg(feature = "tvm")]
    tvm: Option<Arc<tvm::TvmPlace>>,
    description: Arc<ServerDescription>,
}

impl Tracker {
    /// Returns a tracker without servers. Needs a tokio runtime for its timers.
    pub fn new(options: TrackerOptions) -> Arc<Self> {
        let now = rpc_core::clock::now();
        let policy = Policy {
            lease: options.lease,
            ticket: options.ticket_lifetime,
            max_servers: options.max_servers,
            max_servers_per_peer: options.max_servers_per_peer,
            max_waiting: options.max_waiting,
            max_waiting_per_client: options.max_waiting_per_client,
            max_reserving: MAX_RESERVING,
        };
        let state = TrackerState {
            scheduler: Scheduler::new(policy),
            servers: HashMap::new(),
            claims: HashMap::new(),
            losses: VecDeque::new(),
            history: History::new(now, LAST_HOUR),
            key_histories: KeyHistories::new(),
            events: VecDeque::new(),
            #[cfg(feature = "tvm")]
            listed: BTreeMap::new(),
            #[cfg(feature = "tvm")]
            next_listing: 0,
        };
        let changed = Arc::new(Notify::new());
        let this = Arc::new(Self {
            onward: Mutex::new(options.onward.clone()),
            runtime: Handle::current(),
            options,
            started: now,
            state: Mutex::new(state),
            changed: changed.clone(),
            probes: Semaphore::new(PROBES),
            proofs: ProofQueue::default(),
        });
        tokio::spawn(run_timers(Arc::downgrade(&this), changed));
        this
    }

    /// Adds the functions of the tracker to `registry`.
    pub fn register(self: &Arc<Self>, registry: &Registry) {
        let this = self.clone();
        registry.add_async(functions::REGISTER, move |context: Context, registration: Packed| {
            let (this, client, session) = (this.clone(), client_of(&context), context.end_probe());
            // A session may have no runtime, and going to the server needs one.
            let registering = this.runtime.clone().spawn(async move {
                let registration =
                    MESSAGES.decode(&registration, "the server", "the tracker").inspect_err(|error| {
                        rpc_core::log_limited!(WARN, peer = client.peer, %error, "refused a server");
                    })?;
                // Proofs take time and places, also in the queue.
                tokio::select! {
                    outcome = this.add_server(&client, registration) => outcome,
                    () = ended(session) => Err(RpcError::new(ErrorKind::Closed, "the session has ended")),
                }
            });
            let mut registering = AbortOnDrop(registering);
            async move {
                let (server, registered) = match (&mut registering.0).await.map_err(JoinError::try_into_panic) {
                    Ok(outcome) => outcome?,
                    Err(Ok(panic)) => std::panic::resume_unwind(panic),
                    Err(Err(_)) => return Err(RpcError::new(ErrorKind::Closed, "the tracker has been stopped")),
                };
                Ok((Shared(Arc::new(server)), Pack(registered)))
            }
        });
        let renew = |context: Context, server: Shared<ServerObject>, Pack(status): Pack<ServerStatus>| {
            server.0.renew(&context, status).map(Pack)
        };
        registry.add_inline(functions::RENEW, renew);
        let this = self.clone();
        registry.add_inline(functions::REQUEST, move |context: Context, request: Packed| {
            let request = MESSAGES.decode(&request, "the client", "the tracker")?;
            let session = context.end_probe();
            this.add_request(&client_of(&context), request, session).map(|claim| Shared(Arc::new(claim)))
        });
        let good_for_ms = millis(self.options.ticket_lifetime);
        #[cfg(feature = "tvm")]
        let this = self.clone();
        registry.add_async(functions::WAIT, move |claim: Shared<ClaimObject>| {
            // The claim itself is not kept, because its end cancels the request.
            let mut answer = claim.0.answer.clone();
            drop(claim);
            #[cfg(feature = "tvm")]
            let this = this.clone();
            async move {
                match answer.wait_for(Option::is_some).await.as_deref() {
                    Ok(Some(Ok(slots))) => {
                        let grants = grants(slots, good_for_ms)?;
                        #[cfg(feature = "tvm")]
                        this.note_delivery(slots);
                        Ok(Pack(grants))
                    }
                    Ok(Some(Err(error))) => Err(error.clone()),
                    Ok(None) | Err(_) => Err(RpcError::new(ErrorKind::Cancelled, "the request was given up")),
                }
            }
        });
        registry.add_inline(functions::GIVE_BACK, |claim: Shared<ClaimObject>, Pack(returned): Pack<Vec<Returned>>| {
            claim.0.give_back(&returned);
        });
        let this = self.clone();
        registry.add_inline(functions::KICK, move |context: Context, Pack(kick): Pack<Kick>| {
            this.kick(&client_of(&context), kick)
        });
        let this = self.clone();
        registry.add_inline(functions::DRAIN, move |context: Context, Pack(drain): Pack<Drain>| {
            this.drain(&client_of(&context), drain)
        });
        let this = self.clone();
        // Runs on a thread: the summary of a large pool takes long, and must not delay others.
        registry.add(functions::SUMMARY, move || Pack(this.summary()));
    }

    /// Replaces the options for probing servers.
    pub fn set_onward(&self, onward: Dial) {
        *self.onward.lock() = onward;
    }

    /// Returns the number of servers and the sums over their slots.
    pub(super) fn totals(&self) -> (u64, SlotTotals) {
        let state = self.lock();
        (state.servers.len() as u64, state.scheduler.totals())
    }

    async fn add_server(
        self: &Arc<Self>,
        client: &Arc<Client>,
        registration: Registration,
    ) -> Result<(ServerObject, Registered)> {
        let asked = rpc_core::clock::now();
        let ticket_key = TicketKey::from_bytes(registration.ticket_key);
        let checked = check_registration(&registration).and_then(|()| self.check_addresses(&registration, client));
        let checked = match checked {
            Ok(admitted) if admitted.to_prove => self.prove(client, admitted, &ticket_key).await,
            checked => checked,
        };
        let now = rpc_core::clock::now();
        let Registration { name, key, mut labels, devices, capacity, address: told, status, .. } = registration;
        let is_at = |admitted: &Admitted| tvm_target(&admitted.addresses).is_some();
        if serves_tvm(&labels) && !checked.as_ref().is_ok_and(is_at) {
            // Clients of TVM can be sent to a host and a port alone.
            labels.remove(DIALECT);
        }
        let (name, shown_key) = (clip(&name), clip(&key));
        let mut status = clipped(status);
        // The server's clock has gone on while it proved where it is.
        status.now_ms = status.now_ms.saturating_add(millis(now.saturating_duration_since(asked)));
        let offer = Arc::new(Offer { key, labels, devices, capacity, by_key_only: false });
        let mut state = self.lock();
        let registered = checked.and_then(|admitted| {
            let id = state.scheduler.register(now, &limit_key(client), offer.clone(), &status)?;
            Ok((id, admitted))
        });
        let (id, Admitted { addresses: address, to_prove: is_proven }) = match registered {
            Ok(registered) => registered,
            Err(error) => {
                let loss = Loss {
                    name,
                    key: shown_key,
                    address: told.iter().take(4).map(|address| clip(address)).collect(),
                    peer: client.peer.clone(),
                    ago_ms: 0,
                    reason: LossReason::Refused { why: error.message().to_owned() },
                    orderly: false,
                };
                rpc_core::log_limited!(
                    WARN,
                    name = loss.name,
                    key = loss.key,
                    peer = loss.peer,
                    %error,
                    "refused a server"
                );
                state.add_event(now, PoolEventKind::Refused, &loss.key, &loss.name, clip(error.message()));
                state.remember(now, loss);
                return Err(error);
            }
        };
        let description =
            ServerDescription { name, key: shown_key, address: address.clone(), peer: client.peer.clone(), offer };
        let entry = ServerEntry {
            description: Arc::new(description),
            admission: Admission::Ticket(ticket_key),
            reach: if is_proven { Reach::Reached } else { Reach::Untried },
            to_end: BTreeSet::new(),
            draining: None,
            probed: now,
            // Come with the first renewal.
            details: None,
        };
        state.add_server_entry(now, id, entry);
        self.apply_events(state, now);
        if !is_proven {
            self.spawn_probe(id, address.clone());
        }
        let registered = Registered { version: MESSAGES.version(), lease_ms: millis(self.options.lease), address };
        Ok((ServerObject { tracker: self.clone(), id }, registered))
    }

    fn add_request(
        self: &Arc<Self>,
        client: &Client,
        mut request: ServerRequest,
        session: EndProbe,
    ) -> Result<ClaimObject> {
        check_request(&request)?;
        let now = rpc_core::clock::now();
        request.client = format!("{} ({})", clip(&request.client), known_as(client));
        let (sender, answer) = watch::channel(None);
        let mut state = self.lock();
        let key = request.key.clone();
        let id = state.scheduler.request(now, &limit_key(client), request)?;
        state.claims.insert(id, OpenClaim { key, answer: sender });
        self.apply_events(state, now);
        Ok(ClaimObject { tracker: self.clone(), id, answer, session })
    }

    /// Has a server end a session, with its next report.
    fn kick(&self, client: &Client, kick: Kick) -> Result<()> {
        self.check_allows_kick("end the sessions of others")?;
        let mut state = self.lock();
        let id = ServerId(kick.server);
        let has_session = state.scheduler.server(id).is_some_and(|server| server.has_session(kick.session));
        let Some(entry) = state.servers.get_mut(&id).filter(|_| has_session) else {
            return Err(RpcError::not_found("the session has ended already"));
        };
        if !matches!(entry.admission, Admission::Ticket(_)) {
            return Err(RpcError::new(ErrorKind::Refused, "a server of TVM cannot be told to end a session"));
        }
        entry.to_end.insert(kick.session);
        let (description, session) = (entry.description.clone(), kick.session);
        let ServerDescription { name, key, .. } = &*description;
        rpc_core::log_limited!(INFO, name, session, peer = client.peer, "a client has the session of another ended");
        state.add_event(rpc_core::clock::now(), PoolEventKind::Kicked, key, name, clip(&client.peer));
        Ok(())
    }

    /// Begins or ends the draining of a server.
    fn drain(&self, client: &Client, drain: Drain) -> Result<()> {
        self.check_allows_kick("drain servers")?;
        let now = rpc_core::clock::now();
        let mut state = self.lock();
        let id = ServerId(drain.server);
        let Some(entry) = state.servers.get_mut(&id) else {
            return Err(RpcError::not_found("the server is not registered any more"));
        };
        if drain.undo {
            entry.draining = None;
        } else {
            entry.draining.get_or_insert_with(|| (now, clip(known_as(client))));
        }
        let description = entry.description.clone();
        state.scheduler.set_draining(now, id, !drain.undo);
        let (name, undone) = (&description.name, drain.undo);
        rpc_core::log_limited!(INFO, name, undone, peer = client.peer, "a client has a server drained");
        self.apply_events(state, now);
        Ok(())
    }

    /// Checks that the operator lets clients do what they do to others.
    fn check_allows_kick(&self, what: &str) -> Result<()> {
        if self.options.allow_kick {
            return Ok(());
        }
        let text = format!("the operator of the tracker does not let clients {what} (--allow-kick)");
        Err(RpcError::new(ErrorKind::Refused, text))
    }

    fn check_addresses(&self, registration: &Registration, client: &Client) -> Result<Admitted> {
        let (allowed, transports) = (&self.options.allow_advertise, &self.options.transports);
        advertised_addresses::admit(&registration.address, client.machine, client.through_hop, allowed, transports)
    }

    /// Has a server of `client` prove that it is at its addresses.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`], which tells nothing of what is at the addresses; and
    /// [`ErrorKind::LimitExceeded`]: too many do it at this time.
    async fn prove(&self, client: &Arc<Client>, admitted: Admitted, key: &TicketKey) -> Result<Admitted> {
        let mut queued = self.proofs.enter(&limit_key(client), SessionId::of(client))?;
        queued.turn().await?;
        let address = admitted.addresses.join(",");
        let Err(why) = advertised_addresses::prove(&self.connector(), &admitted.addresses, key).await else {
            return Ok(admitted);
        };
        rpc_core::log_limited!(WARN, address, why, "a server did not prove that it is at its address");
        Err(RpcError::new(
            ErrorKind::Refused,
            format!(
                "the tracker could not verify that this server is at {address}, where it went with a ticket of this \
                 registration: let the tracker in there (--forward-ca, --forward-token-file of the tracker), or have \
                 its operator allow the address (--allow-advertise); its log says more"
            ),
        ))
    }

    /// Returns the connector for going to servers.
    fn connector(&self) -> Connector {
        // The tracker dials by itself: nobody waits at its terminal for a question.
        let onward = Dial { may_prompt: false, ..self.onward.lock().clone() };
        Connector::new().transports(self.options.transports.clone()).dial(onward)
    }

    /// Applies the events of the scheduler and releases the state.
    fn apply_events(&self, mut state: MutexGuard<'_, TrackerState>, now: Instant) {
        let state = &mut *state;
        while let Some(event) = state.scheduler.poll_event() {
            match event {
                Event::Granted { claim, slots } => {
                    let granted: Vec<_> = slots.into_iter().filter_map(|slot| state.granted(slot)).collect();
                    state.answer(claim, |_| Ok(Arc::new(granted)));
                }
                Event::TimedOut { claim, wanted, possible } => {
                    state.answer(claim, |key| Err(timed_out(wanted, possible, key)));
                }
                Event::Unservable { claim, request, possible } => {
                    let draining = state.scheduler.draining_for(&request);
                    let error = unservable(&request, possible, draining, state.scheduler.keys());
                    state.answer(claim, |_| Err(error));
                }
                Event::LeaseExpired { server } => state.remove_server(now, server, Some(LossReason::LeaseExpired)),
            }
        }
        state.history.note(now, state.scheduler.totals());
        state.key_histories.note(now, &state.scheduler);
        self.changed.notify_one();
    }

    /// Starts to probe a server.
    fn spawn_probe(self: &Arc<Self>, id: ServerId, address: Vec<String>) {
        let this = Arc::downgrade(self);
        tokio::spawn(async move {
            // Fails if the tracker has been dropped.
            let Some(tracker) = this.upgrade() else { return };
            let Ok(_permit) = tracker.probes.acquire().await else { return };
            let connector = tracker.connector();
            // The server has left in the meantime.
            if !tracker.lock().servers.contains_key(&id) {
                return;
            }
            let reach = advertised_addresses::probe(&connector, &address).await;
            let mut state = tracker.lock();
            let Some(entry) = state.servers.get_mut(&id) else { return };
            if let Reach::Unreachable { why } = &reach {
                rpc_core::log_limited!(
                    WARN,
                    name = entry.description.name,
                    address = address.join(","),
                    why,
                    "a server is not found at its address"
                );
            }
            let reachable = !matches!(reach, Reach::Unreachable { .. });
            let now = rpc_core::clock::now();
            entry.probed = now;
            let before = std::mem::replace(&mut entry.reach, reach.clone());
            let description = entry.description.clone();
            state.scheduler.set_reachable(id, reachable);
            if let Reach::Unreachable { why } = reach
                && !matches!(before, Reach::Unreachable { .. })
            {
                let ServerDescription { name, key, .. } = &*description;
                state.add_event(now, PoolEventKind::Unreachable, key, name, clip(&why));
            }
        });
    }

    fn lock(&self) -> MutexGuard<'_, TrackerState> {
        // A panic in the scheduler is a bug of this crate; each of its steps leaves it consistent.
        self.state.lock()
    }
}

impl TrackerState {
    /// Adds a server that the scheduler knows.
    fn add_server_entry(&mut self, now: Instant, id: ServerId, entry: ServerEntry) {
        let ServerDescription { name, key, address, peer, offer } = &*entry.description;
        rpc_core::log_limited!(INFO, name, key, address = address.join(","), peer, "a server has registered");
        self.forget_losses(name, key);
        self.key_histories.track(now, &offer.key);
        self.add_event(now, PoolEventKind::Registered, key, name, String::new());
        self.servers.insert(id, entry);
    }

    /// Adds ticket and description to a granted slot.
    fn granted(&self, slot: GrantedSlot) -> Option<Granted> {
        let entry = self.servers.get(&slot.server)?;
        let ticket = Ticket { serial: slot.serial, expires_ms: slot.expires_ms };
        let ticket = match &entry.admission {
            Admission::Ticket(key) => key.sign(ticket),
            #[cfg(feature = "tvm")]
            Admission::Tvm(_) => String::new(),
        };
        Some(Granted {
            slot,
            ticket,
            #[cfg(feature = "tvm")]
            tvm: match &entry.admission {
                Admission::Ticket(_) => None,
                Admission::Tvm(place) => Some(place.clone()),
            },
            description: entry.description.clone(),
        })
    }

    fn answer(&mut self, claim: ClaimId, answer: impl FnOnce(&str) -> Result<Arc<Vec<Granted>>>) {
        if let Some(OpenClaim { key, answer: sender }) = self.claims.remove(&claim) {
            let answer = answer(&key);
            sender.send_replace(Some(answer));
        }
    }

    /// Removes a server, and records the loss. `None` is an orderly stop.
    fn remove_server(&mut self, now: Instant, id: ServerId, reason: Option<LossReason>) {
        let Some(ServerEntry { description, .. }) = self.servers.remove(&id) else { return };
        rpc_core::log_limited!(INFO, name = description.name, peer = description.peer, ?reason, "a server has left");
        let ServerDescription { name, key, address, peer, .. } = &*description;
        let (name, key, address, peer) = (name.clone(), key.clone(), address.clone(), peer.clone());
        let (orderly, reason) = (reason.is_none(), reason.unwrap_or(LossReason::Gone));
        let kind = if orderly { PoolEventKind::Stopped } else { PoolEventKind::Lost };
        let why = if reason == LossReason::LeaseExpired { "its lease has expired" } else { "" };
        self.add_event(now, kind, &key, &name, why.to_owned());
        self.remember(now, Loss { name, key, address, peer, ago_ms: 0, reason, orderly });
    }

    /// Adds an event of a server, with its shortened key and name.
    fn add_event(&mut self, now: Instant, kind: PoolEventKind, key: &str, name: &str, why: String) {
        self.events.truncate(MAX_EVENTS - 1);
        let event = PoolEvent { ago_ms: 0, kind, key: key.to_owned(), name: name.to_owned(), why };
        self.events.push_front((now, event));
    }

    fn remember(&mut self, now: Instant, loss: Loss) {
        // Repeated losses of one server count as one.
        self.losses.retain(|(_, known)| (&known.name, &known.key, &known.peer) != (&loss.name, &loss.key, &loss.peer));
        self.losses.truncate(MAX_LOSSES - 1);
        self.losses.push_front((now, loss));
    }

    /// Removes the losses of a server that has come back.
    fn forget_losses(&mut self, name: &str, key: &str) {
        self.losses.retain(|(_, loss)| loss.name != name || loss.key != key);
    }
}

/// Task that ends with the call that waits for it.
struct AbortOnDrop<T>(JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Name of the label that says which other protocol a server speaks, for its clients.
const DIALECT: &str = rpc_transports::tracker::DIALECT_LABEL;

/// Returns the label of servers that take clients of TVM.
#[cfg(feature = "tvm")]
fn tvm_label() -> (String, String) {
    (DIALECT.to_owned(), "tvm".to_owned())
}

/// Returns true if a server with these labels takes clients of TVM.
fn serves_tvm(labels: &BTreeMap<String, String>) -> bool {
    labels.get(DIALECT).is_some_and(|dialect| dialect == "tvm")
}

/// Returns the host and port of a server, if its address is nothing else, as clients of TVM need
/// it.
fn tvm_target(addresses: &[String]) -> Option<(String, u16)> {
    let [address] = addresses else { return None };
    let address: Address = address.parse().ok()?;
    (address.scheme() == "tcp").then_some(())?;
    Some((address.host()?.to_owned(), address.port()?))
}

/// Number of waiting requests for the same, for slots at different servers, that reserve slots
/// whatever they ask for. Each looks at all servers, at each change.
const MAX_RESERVING: u32 = 16;

/// Time between two looks at whether a session has ended that waits for a proof.
const LOOK: Duration = Duration::from_secs(1);

/// Resolves within [`LOOK`] of a session's end.
async fn ended(session: EndProbe) {
    while !session.has_ended() {
        tokio::time::sleep(LOOK).await;
    }
}

/// Runs the timers of the scheduler.
async fn run_timers(tracker: Weak<Tracker>, changed: Arc<Notify>) {
    loop {
        let due = {
            let Some(tracker) = tracker.upgrade() else { return };
            let mut state = tracker.lock();
            let now = rpc_core::clock::now();
            let due = state.scheduler.next_timeout();
            if due.is_some_and(|due| due <= now) {
                state.scheduler.handle_timeout(now);
                tracker.apply_events(state, now);
                continue;
            }
            due
        };
        let sleep = async {
            match due {
                Some(due) => tokio::time::sleep_until(due.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = sleep => {}
            () = changed.notified() => {}
        }
    }
}

impl Drop for Tracker {
    fn drop(&mut self) {
        self.changed.notify_one();
    }
}

fn client_of(context: &Context) -> Arc<Client> {
    let local = || Client {
        peer: "local:".to_owned(),
        machine: Machine::This,
        identity: ANONYMOUS.to_owned(),
        peer_identity: ANONYMOUS.to_owned(),
        through_hop: false,
    };
    context.extension().unwrap_or_else(|| Arc::new(local()))
}

/// Returns the name by which people know a client: its identity, or else its address.
fn known_as(client: &Client) -> &str {
    if client.identity == ANONYMOUS { &client.peer } else { &client.identity }
}

/// Returns the name under which the limits of a client are counted.
fn limit_key(client: &Client) -> String {
    if client.identity != ANONYMOUS {
        return format!("identity {}", client.peer_identity);
    }
    client.machine.limit_key()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_count_holders_of_tokens_and_of_certificates_apart() {
        let key = |peer_identity: &str| {
            let identity = peer_identity.split_once(':').map_or(ANONYMOUS, |(_, name)| name).to_owned();
            let (peer, peer_identity) = ("tcp://10.0.0.1:7".to_owned(), peer_identity.to_owned());
            limit_key(&Client { peer, machine: Machine::This, identity, peer_identity, through_hop: false })
        };
        assert_eq!(key("token:alice"), key("token:alice"));
        let apart = ["token:alice", "cert:alice", "via:gate/alice", "token:bob", "anonymous"].map(key);
        assert_eq!(apart.iter().collect::<std::collections::HashSet<_>>().len(), apart.len(), "{apart:?}");
        assert_eq!(key("anonymous"), Machine::This.limit_key());
    }
}
