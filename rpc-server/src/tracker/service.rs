//! The tracker's functions, and what stands around the scheduler: its clock, its tickets, and who is told what.
//!
//! Registrations and places in the queue are objects of the sessions that made them. So a server is gone when its session
//! is, and a client that goes gives up its place, without anybody having to say so.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rpc_core::proto::ANONYMOUS;
use rpc_core::{Context, ErrorKind, Pack, Registry, Result, RpcError, Shared};
use rpc_transports::tracker::{
    Grant, Holder, HolderState, Loss, LossReason, QueueEntry, Reach, Registered, Registration, Renewed, Returned,
    Sample, ServerRequest, ServerStatus, ServerSummary, Summary, Ticket, TicketKey, functions,
};
use rpc_transports::{Address, Connector, DialOptions};
use tokio::sync::{Notify, Semaphore, watch};

use super::advertise;
use super::history::History;
use super::limits::{check_registration, check_request, check_status, clip, clipped};
use super::millis;
use super::scheduler::{ClaimId, Event, Held, HeldKind, Offer, Place, Policy, Scheduler, ServerId, Totals, timed_out};
use crate::session::Client;

/// How much one request may be told of the servers that it was granted, in bytes.
const MAX_GRANTS: usize = 4 << 20;

/// How many losses are remembered.
const MAX_LOSSES: usize = 256;

/// How many servers are looked for at their addresses at a time.
const PROBES: usize = 32;

/// How long to wait before looking again for a server that was not found.
const PROBE_INTERVAL: Duration = Duration::from_secs(30);

/// How a tracker works.
#[derive(Clone, Debug)]
pub struct TrackerOptions {
    /// How long a registration lasts without being renewed. 10 s.
    pub lease: Duration,
    /// How long a ticket is good: in this time a client has to reach its server. 20 s.
    pub ticket_lifetime: Duration,
    /// Servers at a time. 8,192.
    pub max_servers: usize,
    /// Servers at a time of one peer, who is known by what it has proven, or else by the address of its machine. 4,096.
    pub max_servers_per_peer: usize,
    /// Requests that wait. 16,384.
    pub max_waiting: usize,
    /// Requests of one client that wait. 1,024.
    pub max_waiting_per_client: usize,
    /// Which addresses servers may tell beside their own, as patterns. None.
    pub allow_advertise: Vec<String>,
    /// How servers are looked for at their addresses at first: whom the tracker trusts, and its tokens. Without either.
    /// [`Tracker::set_onward`] changes it later.
    pub onward: DialOptions,
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
            onward: DialOptions::default(),
        }
    }
}

/// A tracker. Its functions are in a registry, which any server can serve whose sessions have a [`Client`] among their
/// extensions.
#[derive(Debug)]
pub struct Tracker {
    options: TrackerOptions,
    /// How servers are looked for at present.
    onward: Mutex<DialOptions>,
    started: Instant,
    state: Mutex<State>,
    /// Told when the next timeout may be another.
    changed: Arc<Notify>,
    probes: Semaphore,
}

#[derive(Debug)]
struct State {
    scheduler: Scheduler,
    servers: HashMap<ServerId, Entry>,
    claims: HashMap<ClaimId, Open>,
    /// The last one first.
    losses: VecDeque<(Instant, Loss)>,
    history: History,
}

/// What the scheduler need not know of a server.
#[derive(Debug)]
struct Entry {
    about: Arc<About>,
    ticket_key: TicketKey,
    reach: Reach,
    probed: Instant,
}

/// What a server is. Shared by all that was granted of it, and by those who look at it.
#[derive(Debug)]
struct About {
    name: String,
    /// The key as it is shown.
    key: String,
    address: Vec<String>,
    peer: String,
    offer: Arc<Offer>,
}

/// A request that waits, and whoever waits for it.
#[derive(Debug)]
struct Open {
    key: String,
    answer: watch::Sender<Answer>,
}

/// What became of a request; `None` while it waits.
type Answer = Option<Result<Arc<Vec<Granted>>>>;

/// A place as it was granted.
#[derive(Debug)]
struct Granted {
    place: Place,
    ticket: String,
    about: Arc<About>,
}

impl Tracker {
    /// A tracker without servers. Needs a tokio runtime, on which it looks at the clock for as long as it lives.
    pub fn new(options: TrackerOptions) -> Arc<Self> {
        let now = Instant::now();
        let policy = Policy {
            lease: options.lease,
            ticket: options.ticket_lifetime,
            max_servers: options.max_servers,
            max_servers_per_peer: options.max_servers_per_peer,
            max_waiting: options.max_waiting,
            max_waiting_per_client: options.max_waiting_per_client,
        };
        let state = State {
            scheduler: Scheduler::new(policy),
            servers: HashMap::new(),
            claims: HashMap::new(),
            losses: VecDeque::new(),
            history: History::new(now),
        };
        let changed = Arc::new(Notify::new());
        let this = Arc::new(Self {
            onward: Mutex::new(options.onward.clone()),
            options,
            started: now,
            state: Mutex::new(state),
            changed: changed.clone(),
            probes: Semaphore::new(PROBES),
        });
        tokio::spawn(watch_the_clock(Arc::downgrade(&this), changed));
        this
    }

    /// Registers the tracker's functions.
    pub fn register(self: &Arc<Self>, registry: &Registry) {
        let this = self.clone();
        registry.add_inline(functions::REGISTER, move |context: Context, Pack(registration): Pack<Registration>| {
            let (server, registered) = this.add_server(&client_of(&context), registration)?;
            Ok::<_, RpcError>((Shared(Arc::new(server)), Pack(registered)))
        });
        registry.add_inline(functions::RENEW, |server: Shared<ServerObject>, Pack(status): Pack<ServerStatus>| {
            server.0.renew(status).map(Pack)
        });
        let this = self.clone();
        registry.add_inline(functions::REQUEST, move |context: Context, Pack(request): Pack<ServerRequest>| {
            this.add_request(&client_of(&context), request).map(|claim| Shared(Arc::new(claim)))
        });
        let good_for_ms = millis(self.options.ticket_lifetime);
        registry.add_async(functions::WAIT, move |claim: Shared<ClaimObject>| {
            // The claim itself is not kept: its end is what ends the waiting.
            let mut answer = claim.0.answer.clone();
            drop(claim);
            async move {
                match answer.wait_for(Option::is_some).await.as_deref() {
                    Ok(Some(Ok(places))) => grants(places, good_for_ms).map(Pack),
                    Ok(Some(Err(error))) => Err(error.clone()),
                    Ok(None) | Err(_) => Err(RpcError::new(ErrorKind::Cancelled, "the request was given up")),
                }
            }
        });
        registry.add_inline(functions::GIVE_BACK, |claim: Shared<ClaimObject>, Pack(returned): Pack<Vec<Returned>>| {
            claim.0.give_back(&returned);
        });
        let this = self.clone();
        // On a thread: of a large pool there is much to say, and others are not to wait for it.
        registry.add(functions::SUMMARY, move || Pack(this.summary()));
    }

    /// Looks for servers by `onward` from now on.
    pub fn set_onward(&self, onward: DialOptions) {
        *self.onward.lock().unwrap_or_else(PoisonError::into_inner) = onward;
    }

    /// How many servers there are, and the sums of everything.
    pub(super) fn totals(&self) -> (u64, Totals) {
        let state = self.lock();
        (state.servers.len() as u64, state.scheduler.totals())
    }

    /// What there is to know.
    pub fn summary(&self) -> Summary {
        let now = Instant::now();
        let ago = |then: Instant| millis(now.saturating_duration_since(then));
        let seen = self.look(now);
        let holder = |held: Held| Holder {
            client: held.client,
            for_ms: ago(held.since),
            state: match held.kind {
                HeldKind::Granted => HolderState::Granted,
                HeldKind::InUse => HolderState::InUse,
                HeldKind::Direct => HolderState::Direct,
            },
        };
        let server = |server: ServerSeen| ServerSummary {
            name: server.about.name.clone(),
            key: server.about.offer.key.clone(),
            labels: server.about.offer.labels.clone(),
            devices: server.about.offer.devices.clone(),
            capacity: server.about.offer.capacity,
            free: server.free,
            address: server.about.address.clone(),
            peer: server.about.peer.clone(),
            reach: server.reach,
            registered_for_ms: ago(server.registered),
            heard_ago_ms: ago(server.heard),
            holders: server.holders.into_iter().map(holder).collect(),
        };
        let mut servers: Vec<_> = seen.servers.into_iter().map(server).collect();
        servers.sort_by(|a, b| (&a.key, &a.name, &a.address).cmp(&(&b.key, &b.name, &b.address)));
        let entry = |(request, since, possible): (Arc<ServerRequest>, Instant, u64)| QueueEntry {
            client: request.client.clone(),
            key: request.key.clone(),
            count: request.count,
            labels: request.labels.clone(),
            devices: request.devices.clone(),
            virtual_devices: request.virtual_devices.clone(),
            priority: request.priority,
            for_ms: ago(since),
            possible,
        };
        Summary {
            uptime_ms: ago(self.started),
            lease_ms: millis(self.options.lease),
            servers,
            queue: seen.queue.into_iter().map(entry).collect(),
            losses: seen.losses.into_iter().map(|(when, loss)| Loss { ago_ms: ago(when), ..loss }).collect(),
            history: seen.history,
        }
    }

    /// What a summary is made of. Nobody is served meanwhile, so that no more is done here than has to be.
    fn look(&self, now: Instant) -> Seen {
        let mut state = self.lock();
        let State { scheduler, servers, losses, history, .. } = &mut *state;
        let server = |(id, entry): (&ServerId, &Entry)| {
            let server = scheduler.server(*id)?;
            Some(ServerSeen {
                about: entry.about.clone(),
                reach: entry.reach.clone(),
                free: server.free(),
                registered: server.registered,
                heard: server.heard,
                holders: server.holders().collect(),
            })
        };
        Seen {
            servers: servers.iter().filter_map(server).collect(),
            queue: scheduler.waiting().map(|w| (w.request.clone(), w.since, w.possible)).collect(),
            losses: losses.iter().cloned().collect(),
            history: history.samples(now),
        }
    }

    fn add_server(self: &Arc<Self>, client: &Client, registration: Registration) -> Result<(ServerObject, Registered)> {
        let now = Instant::now();
        let checked = check_registration(&registration)
            .and_then(|()| advertise::admit(&registration.address, &client.peer, &self.options.allow_advertise));
        let Registration { name, key, labels, devices, capacity, address: told, ticket_key, status } = registration;
        let (name, shown_key) = (clip(&name), clip(&key));
        let status = clipped(status);
        let offer = Arc::new(Offer { key, labels, devices, capacity });
        let mut state = self.lock();
        let registered = checked.and_then(|address| {
            let id = state.scheduler.register(now, &counted_as(client), offer.clone(), &status)?;
            Ok((id, address))
        });
        let (id, address) = match registered {
            Ok(registered) => registered,
            Err(error) => {
                let loss = Loss {
                    name,
                    key: shown_key,
                    address: told.iter().take(4).map(|address| clip(address)).collect(),
                    peer: client.peer.clone(),
                    ago_ms: 0,
                    reason: LossReason::Refused { why: error.message().to_owned() },
                };
                tracing::warn!(name = loss.name, key = loss.key, peer = loss.peer, %error, "a server was not taken");
                state.remember(now, loss);
                return Err(error);
            }
        };
        tracing::info!(name, key = shown_key, address = address.join(","), peer = client.peer, "a server has come");
        state.forget_losses(&name, &shown_key);
        let about = About { name, key: shown_key, address: address.clone(), peer: client.peer.clone(), offer };
        let entry = Entry {
            about: Arc::new(about),
            ticket_key: TicketKey::from_bytes(ticket_key),
            reach: Reach::Untried,
            probed: now,
        };
        state.servers.insert(id, entry);
        self.settle(state, now);
        self.probe_later(id, address.clone());
        let registered = Registered { lease_ms: millis(self.options.lease), address };
        Ok((ServerObject { tracker: self.clone(), id }, registered))
    }

    fn add_request(self: &Arc<Self>, client: &Client, mut request: ServerRequest) -> Result<ClaimObject> {
        check_request(&request)?;
        let now = Instant::now();
        let known_as = if client.identity == ANONYMOUS { &client.peer } else { &client.identity };
        request.client = format!("{} ({known_as})", clip(&request.client));
        let (sender, answer) = watch::channel(None);
        let mut state = self.lock();
        let key = request.key.clone();
        let id = state.scheduler.request(now, &counted_as(client), request)?;
        state.claims.insert(id, Open { key, answer: sender });
        self.settle(state, now);
        Ok(ClaimObject { tracker: self.clone(), id, answer })
    }

    /// Does what follows of a change, and lets go of the state.
    fn settle(&self, mut state: MutexGuard<'_, State>, now: Instant) {
        let state = &mut *state;
        while let Some(event) = state.scheduler.poll_event() {
            match event {
                Event::Granted { claim, places } => {
                    let granted: Vec<_> = places.into_iter().filter_map(|place| state.granted(place)).collect();
                    state.answer(claim, |_| Ok(Arc::new(granted)));
                }
                Event::TimedOut { claim, wanted, possible } => {
                    state.answer(claim, |key| Err(timed_out(wanted, possible, key)));
                }
                Event::LeaseExpired { server } => state.lose(now, server, LossReason::LeaseExpired),
            }
        }
        state.history.note(now, state.scheduler.totals());
        self.changed.notify_one();
    }

    /// Looks for a server at its address.
    fn probe_later(self: &Arc<Self>, id: ServerId, address: Vec<String>) {
        let this = Arc::downgrade(self);
        tokio::spawn(async move {
            // A tracker that is gone wants to know no more.
            let Some(tracker) = this.upgrade() else { return };
            let Ok(_permit) = tracker.probes.acquire().await else { return };
            let onward = tracker.onward.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let connector = Connector::new().dial_options(onward);
            // Nobody waits for it any more.
            if !tracker.lock().servers.contains_key(&id) {
                return;
            }
            let reach = advertise::probe(&connector, &address).await;
            let mut state = tracker.lock();
            let Some(entry) = state.servers.get_mut(&id) else { return };
            if let Reach::Unreachable { why } = &reach {
                tracing::warn!(
                    name = entry.about.name,
                    address = address.join(","),
                    why,
                    "a server is not found at its address"
                );
            }
            let reachable = !matches!(reach, Reach::Unreachable { .. });
            entry.reach = reach;
            entry.probed = Instant::now();
            state.scheduler.set_reachable(id, reachable);
        });
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic in the scheduler is our own bug; what it leaves is as consistent as each of its steps.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// A place with what is needed to take it.
    fn granted(&self, place: Place) -> Option<Granted> {
        let entry = self.servers.get(&place.server)?;
        let ticket = Ticket { serial: place.serial, expires_ms: place.expires_ms };
        Some(Granted { place, ticket: entry.ticket_key.sign(ticket), about: entry.about.clone() })
    }

    fn answer(&mut self, claim: ClaimId, answer: impl FnOnce(&str) -> Result<Arc<Vec<Granted>>>) {
        if let Some(Open { key, answer: sender }) = self.claims.remove(&claim) {
            let answer = answer(&key);
            sender.send_replace(Some(answer));
        }
    }

    /// A server is there no more.
    fn lose(&mut self, now: Instant, id: ServerId, reason: LossReason) {
        let Some(Entry { about, .. }) = self.servers.remove(&id) else { return };
        tracing::info!(name = about.name, peer = about.peer, ?reason, "a server is gone");
        let About { name, key, address, peer, .. } = &*about;
        let (name, key, address, peer) = (name.clone(), key.clone(), address.clone(), peer.clone());
        self.remember(now, Loss { name, key, address, peer, ago_ms: 0, reason });
    }

    fn remember(&mut self, now: Instant, loss: Loss) {
        // One that tries again and again is one loss.
        self.losses.retain(|(_, known)| (&known.name, &known.key, &known.peer) != (&loss.name, &loss.key, &loss.peer));
        self.losses.truncate(MAX_LOSSES - 1);
        self.losses.push_front((now, loss));
    }

    /// A server has come back.
    fn forget_losses(&mut self, name: &str, key: &str) {
        self.losses.retain(|(_, loss)| loss.name != name || loss.key != key);
    }
}

/// What a summary is made of.
struct Seen {
    servers: Vec<ServerSeen>,
    /// Who waits, since when, and for how many places that there are.
    queue: Vec<(Arc<ServerRequest>, Instant, u64)>,
    losses: Vec<(Instant, Loss)>,
    history: Vec<Sample>,
}

struct ServerSeen {
    about: Arc<About>,
    reach: Reach,
    free: u32,
    registered: Instant,
    heard: Instant,
    holders: Vec<Held>,
}

/// What a client is told of the places that it was granted.
///
/// # Errors
///
/// [`ErrorKind::LimitExceeded`]: the servers tell so much of themselves that it would be too much for one message.
fn grants(places: &[Granted], good_for_ms: u64) -> Result<Vec<Grant>> {
    let size: usize = places.iter().map(|granted| granted.about.size()).sum();
    if size > MAX_GRANTS {
        return Err(RpcError::limit("bytes of one answer: ask for fewer servers", MAX_GRANTS as u64, size as u64));
    }
    let grant = |Granted { place, ticket, about }: &Granted| Grant {
        serial: place.serial,
        ticket: ticket.clone(),
        good_for_ms,
        server: about.name.clone(),
        key: about.offer.key.clone(),
        labels: about.offer.labels.clone(),
        devices: about.offer.devices.clone(),
        address: about.address.clone(),
    };
    Ok(places.iter().map(grant).collect())
}

impl About {
    /// About how many bytes it takes to tell it.
    fn size(&self) -> usize {
        let labels = self.offer.labels.iter().map(|(name, value)| name.len() + value.len());
        let devices = self.offer.devices.iter().map(|device| {
            let target = device.target.as_ref().map_or(0, |target| target.to_string().len());
            let scopes = device.memory_scopes.iter().map(|scope| scope.len() + 4);
            device.kind.len() + target + scopes.sum::<usize>() + 48
        });
        let addresses = self.address.iter().map(String::len);
        // The ticket, and the names of the fields.
        256 + self.name.len() + self.offer.key.len() + labels.chain(devices).chain(addresses).sum::<usize>()
    }
}

/// Tells the scheduler what time it is, when something is due.
async fn watch_the_clock(tracker: Weak<Tracker>, changed: Arc<Notify>) {
    loop {
        let due = {
            let Some(tracker) = tracker.upgrade() else { return };
            let mut state = tracker.lock();
            let now = Instant::now();
            let due = state.scheduler.next_timeout();
            if due.is_some_and(|due| due <= now) {
                state.scheduler.handle_timeout(now);
                tracker.settle(state, now);
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

/// A registration: ends when the session does that made it, or frees it.
struct ServerObject {
    tracker: Arc<Tracker>,
    id: ServerId,
}

impl ServerObject {
    fn renew(&self, status: ServerStatus) -> Result<Renewed> {
        check_status(&status)?;
        let status = clipped(status);
        let now = Instant::now();
        let mut state = self.tracker.lock();
        if !state.scheduler.report(now, self.id, &status) {
            return Err(RpcError::not_found("the registration has expired: register again"));
        }
        let Some(entry) = state.servers.get_mut(&self.id) else {
            return Err(RpcError::internal("a server is registered of which nothing is known"));
        };
        let reach = entry.reach.clone();
        let look_again = matches!(reach, Reach::Unreachable { .. }) && now > entry.probed + PROBE_INTERVAL;
        let address = look_again.then(|| {
            entry.probed = now;
            entry.about.address.clone()
        });
        self.tracker.settle(state, now);
        if let Some(address) = address {
            self.tracker.probe_later(self.id, address);
        }
        Ok(Renewed { reach })
    }
}

impl Drop for ServerObject {
    fn drop(&mut self) {
        let now = Instant::now();
        let mut state = self.tracker.lock();
        if state.scheduler.unregister(now, self.id) {
            state.lose(now, self.id, LossReason::Gone);
            self.tracker.settle(state, now);
        }
    }
}

/// A place in the queue: given up when the session ends that made it, or frees it. What was granted and not used by then
/// expires.
struct ClaimObject {
    tracker: Arc<Tracker>,
    id: ClaimId,
    answer: watch::Receiver<Answer>,
}

impl ClaimObject {
    fn give_back(&self, returned: &[Returned]) {
        let Some(Ok(places)) = self.answer.borrow().clone() else { return };
        let reasons: HashMap<u64, &str> =
            returned.iter().map(|returned| (returned.serial, returned.why.as_str())).collect();
        let back = places.iter().filter_map(|Granted { place, about, .. }| {
            let why = clip(reasons.get(&place.serial)?);
            tracing::info!(name = about.name, why, "a server is given back unused");
            Some((place.server, place.serial))
        });
        let back: Vec<_> = back.collect();
        let now = Instant::now();
        let mut state = self.tracker.lock();
        state.scheduler.give_back(now, self.id, &back);
        self.tracker.settle(state, now);
    }
}

impl Drop for ClaimObject {
    fn drop(&mut self) {
        let now = Instant::now();
        let mut state = self.tracker.lock();
        if state.claims.remove(&self.id).is_some() {
            state.scheduler.cancel(now, self.id);
            self.tracker.settle(state, now);
        }
    }
}

fn client_of(context: &Context) -> Arc<Client> {
    context
        .extension()
        .unwrap_or_else(|| Arc::new(Client { peer: "local:".to_owned(), identity: ANONYMOUS.to_owned() }))
}

/// Whom a client counts as where there are limits for each.
fn counted_as(client: &Client) -> String {
    if client.identity != ANONYMOUS {
        return format!("identity {}", client.identity);
    }
    let address = client.peer.parse::<Address>().ok();
    let host = address.as_ref().and_then(Address::host_and_port).map(|(host, _)| host.to_owned());
    host.unwrap_or_else(|| "this machine".to_owned())
}
