//! The leases of one server: the scheduler with its clock, those that wait for its events, and the
//! sessions that it ends.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Poll, Waker};
use std::time::Instant;

use async_trait::async_trait;
use parking_lot::Mutex;
use rpc_core::{Device, DeviceUse, ErrorKind, Result, RpcError, clock, log_limited};
use rpc_transports::{ClientConnection, PeerIdentity};
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};

use super::scheduler::{
    DeviceLeases, LeaseEvent, LeaseId, LeaseLimits, LeaseScheduler, LeaseTotals, NextLease, SessionId,
};
use super::{
    LeaseClient, LeaseGrant, LeasePolicy, LeaseRequest, LeaseService, LeasedDevice, MAX_AHEAD, MAX_LISTED, MAX_NEXT,
    QueuedRequest, WaitingLease,
};
use crate::server::recent_errors::RecentErrors;

/// Callback for the grant of a request. Runs on the thread that frees the device, and must not
/// block.
type OnGrant = Box<dyn FnOnce(LeaseGrant) + Send>;

/// Leases of one server.
pub(crate) struct LeaseTable {
    state: Mutex<TableState>,
    policy: LeasePolicy,
    next_session: AtomicU64,
    /// Notified when the next timeout is earlier than before, and at the end.
    earlier_timeout: Arc<Notify>,
    /// Runtime of the tasks that resume sessions.
    runtime: Handle,
    /// Errors of the server, to which overdue leases are added.
    errors: Arc<RecentErrors>,
}

struct TableState {
    scheduler: LeaseScheduler,
    /// Callbacks of the requests that wait.
    on_grant: HashMap<LeaseId, OnGrant>,
    /// Connections of the sessions that have not begun to end.
    sessions: HashMap<SessionId, ClientConnection>,
    /// Clients of the sessions that have not ended.
    clients: HashMap<SessionId, LeaseClient>,
    /// Sessions whose requests wait until they may use a device.
    blocked: HashMap<Device, HashMap<SessionId, Waker>>,
    /// Sessions in processes of their own, which are told which devices are reserved for others.
    observers: HashMap<SessionId, Waker>,
}

impl TableState {
    /// Removes the requests of a session that wait, and lets the session change nothing any more.
    /// Devices that it holds stay with it until [`SessionLeases::end`]. Returns its connection, and
    /// callbacks to drop outside of the lock.
    fn begin_end(&mut self, now: Instant, session: SessionId) -> (Option<ClientConnection>, Vec<OnGrant>) {
        let waiting = self.scheduler.cancel_waiting(now, session);
        let on_grant = waiting.iter().filter_map(|id| self.on_grant.remove(id)).collect();
        (self.sessions.remove(&session), on_grant)
    }

    /// Names the sessions of a leased device.
    fn describe(&self, leased: DeviceLeases) -> LeasedDevice {
        let DeviceLeases { device, holder, held, left, waiting, used_by, next } = leased;
        let client = |session: SessionId| self.clients.get(&session).cloned();
        let next = next.into_iter().filter_map(|NextLease { session, priority, waited }| {
            Some(WaitingLease { client: client(session)?, priority, waited_seconds: waited.as_secs_f64() })
        });
        LeasedDevice {
            device: device.to_string(),
            held_seconds: held.as_secs_f64(),
            left_seconds: left.as_secs_f64(),
            waiting,
            used_by,
            holder: holder.and_then(client),
            next: next.collect(),
        }
    }
}

impl LeaseTable {
    /// Returns a table, and starts the task that ends overdue leases. Needs a tokio runtime.
    pub(crate) fn start(limits: LeaseLimits, policy: LeasePolicy, errors: Arc<RecentErrors>) -> Arc<Self> {
        let state = TableState {
            scheduler: LeaseScheduler::new(limits, policy.clone()),
            on_grant: HashMap::new(),
            sessions: HashMap::new(),
            clients: HashMap::new(),
            blocked: HashMap::new(),
            observers: HashMap::new(),
        };
        let earlier_timeout = Arc::new(Notify::new());
        let table = Arc::new(Self {
            state: Mutex::new(state),
            policy,
            next_session: AtomicU64::new(1),
            earlier_timeout: earlier_timeout.clone(),
            runtime: Handle::current(),
            errors,
        });
        tokio::spawn(handle_timeouts(Arc::downgrade(&table), earlier_timeout));
        table
    }

    /// Adds a session of a client with this identity. It is ended by its connection if a lease of
    /// it is overdue.
    pub(crate) fn open_session(
        self: &Arc<Self>,
        identity: &PeerIdentity,
        connection: ClientConnection,
    ) -> SessionLeases {
        let session = SessionId(self.next_session.fetch_add(1, Ordering::Relaxed));
        let client = LeaseClient::new(&identity.to_string(), session.0);
        let mut state = self.state.lock();
        state.sessions.insert(session, connection);
        state.clients.insert(session, client);
        drop(state);
        SessionLeases { table: self.clone(), session }
    }

    /// Returns the leased devices, at most [`MAX_LISTED`].
    pub(crate) fn leased_devices(&self) -> Vec<LeasedDevice> {
        let state = self.state.lock();
        let leased = state.scheduler.devices(clock::now(), MAX_NEXT).take(MAX_LISTED);
        leased.map(|leased| state.describe(leased)).collect()
    }

    /// Returns the numbers for metrics.
    pub(crate) fn totals(&self) -> LeaseTotals {
        self.state.lock().scheduler.totals()
    }

    /// Changes the scheduler, and acts on the consequences.
    fn change<T>(&self, change: impl FnOnce(&mut TableState, Instant) -> T) -> T {
        let now = clock::now();
        let (mut granted, mut overdue, mut cancelled) = (Vec::new(), Vec::new(), Vec::new());
        let (mut resumed, mut reservations_changed) = (Vec::new(), false);
        let mut state = self.state.lock();
        let timeout_before = state.scheduler.next_timeout();
        let changed = change(&mut state, now);
        while let Some(event) = state.scheduler.poll_event() {
            match event {
                LeaseEvent::Granted { id, waited, duration } => {
                    let grant = LeaseGrant { since: now, waited, duration };
                    granted.extend(state.on_grant.remove(&id).map(|on_grant| (on_grant, grant)));
                }
                LeaseEvent::Reserved { device, session } => {
                    resumed.extend(state.blocked.get_mut(&device).and_then(|blocked| blocked.remove(&session)));
                    reservations_changed |= !self.policy.is_shared(device);
                }
                LeaseEvent::Freed { device } => {
                    resumed.extend(state.blocked.remove(&device).into_iter().flat_map(HashMap::into_values));
                    reservations_changed |= !self.policy.is_shared(device);
                }
                LeaseEvent::Overdue { session, device, duration } => {
                    // A release from here on would free a device that the session may still use.
                    let (connection, on_grant) = state.begin_end(now, session);
                    cancelled.push(on_grant);
                    overdue.extend(connection.map(|connection| (connection, device, duration)));
                }
            }
        }
        let timeout = state.scheduler.next_timeout();
        let observers: Vec<_> =
            if reservations_changed { state.observers.values().cloned().collect() } else { Vec::new() };
        drop(state);
        drop(cancelled);
        if timeout.is_some_and(|timeout| timeout_before.is_none_or(|before| timeout < before)) {
            self.earlier_timeout.notify_one();
        }
        // Before the holder learns of its lease, so that a request that is made after that waits.
        observers.into_iter().for_each(Waker::wake);
        // Each in a task of its own: a wake runs the lanes of its session, which may take long.
        for session in resumed {
            self.runtime.spawn(async move { session.wake() });
        }
        for (on_grant, grant) in granted {
            on_grant(grant);
        }
        for (connection, device, duration) in overdue {
            let text = format!(
                "the session was ended because it kept its lease on {device} for longer than the {duration:?} that \
                 it was granted for"
            );
            log_limited!(WARN, %device, ?duration, "ending a session that has kept a lease for too long");
            self.errors.add(&format!("ended a session that kept its lease on {device} for longer than {duration:?}"));
            connection.end(RpcError::new(ErrorKind::SessionTimeout, text).may_have_run(true));
        }
        changed
    }
}

impl Drop for LeaseTable {
    fn drop(&mut self) {
        self.earlier_timeout.notify_one();
    }
}

impl fmt::Debug for LeaseTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseTable").field("totals", &self.totals()).finish_non_exhaustive()
    }
}

/// Ends the sessions of overdue leases, until the table is dropped.
async fn handle_timeouts(table: Weak<LeaseTable>, earlier_timeout: Arc<Notify>) {
    loop {
        let Some(strong) = table.upgrade() else { return };
        let next = strong.change(|state, now| {
            state.scheduler.handle_timeout(now);
            state.scheduler.next_timeout()
        });
        drop(strong);
        match next {
            Some(next) => tokio::select! {
                () = tokio::time::sleep_until(next.into()) => {}
                () = earlier_timeout.notified() => {}
            },
            None => earlier_timeout.notified().await,
        }
    }
}

/// Requests and leases of one session. They end with this value.
pub(crate) struct SessionLeases {
    table: Arc<LeaseTable>,
    session: SessionId,
}

impl SessionLeases {
    /// Adds a request. `on_grant` is called when it is granted, at once if the device is free, and
    /// is dropped if the request ends before.
    ///
    /// # Errors
    ///
    /// A limit is reached, or the session has begun to end.
    pub(crate) fn queue(
        &self,
        request: LeaseRequest,
        on_grant: impl FnOnce(LeaseGrant) + Send + 'static,
    ) -> Result<LeaseId> {
        let LeaseRequest { device, priority, max_duration } = request;
        self.table.change(|state, now| {
            if !state.sessions.contains_key(&self.session) {
                return Err(session_has_ended());
            }
            let id = state.scheduler.request(now, self.session, device, priority, max_duration)?;
            state.on_grant.insert(id, Box::new(on_grant));
            Ok(id)
        })
    }

    /// Ends a request or a lease of this session, unless the session has begun to end.
    pub(crate) fn release(&self, id: LeaseId) {
        let on_grant = self.table.change(|state, now| {
            let is_open = state.sessions.contains_key(&self.session);
            if !is_open || state.scheduler.request_of(id).is_none_or(|(session, _)| session != self.session) {
                return None;
            }
            state.scheduler.release(now, id);
            state.on_grant.remove(&id)
        });
        // Dropped outside of the lock.
        drop(on_grant);
    }

    /// Returns the number of requests before this one, as [`LeaseService::ahead`].
    pub(crate) fn ahead(&self, id: LeaseId) -> u64 {
        self.table.state.lock().scheduler.ahead(id, MAX_AHEAD) as u64
    }

    /// Returns the leased devices of the server, as [`LeaseTable::leased_devices`].
    pub(crate) fn leased_devices(&self) -> Vec<LeasedDevice> {
        self.table.leased_devices()
    }

    /// Begins a use of a device; `None` if the device is reserved for another session. Then wakes
    /// `waker` once this may have changed.
    pub(crate) fn begin_use(&self, device: Device, waker: &Waker) -> Option<DeviceUse> {
        let mut state = self.table.state.lock();
        if state.scheduler.begin_use(self.session, device) {
            return Some(DeviceUse::counted(SessionUse { table: self.table.clone(), session: self.session, device }));
        }
        state.blocked.entry(device).or_default().insert(self.session, waker.clone());
        None
    }

    /// Returns the devices that are reserved for other sessions, for a session that
    /// [observes](Self::observe_reservations) them, and the number of this list.
    pub(crate) fn take_reserved_for_others(&self) -> Option<(u64, Vec<Device>)> {
        self.table.state.lock().scheduler.take_reserved_for_others(self.session)
    }

    /// Takes the answer to a list: devices that the session does not use.
    pub(crate) fn take_unused(&self, number: u64, devices: &[Device]) {
        self.table.change(|state, now| {
            devices.iter().for_each(|device| state.scheduler.take_unused(now, self.session, number, *device));
        });
    }

    /// Wakes `waker` now and at each change of the devices that are reserved for others, before the
    /// holder learns of its lease. The session counts its uses itself, and answers each list. Does
    /// nothing if all devices are shared.
    pub(crate) fn observe_reservations(&self, waker: Waker) {
        if !self.table.policy.restricts() {
            return;
        }
        {
            let mut state = self.table.state.lock();
            state.scheduler.add_remote(self.session);
            state.observers.insert(self.session, waker.clone());
        }
        waker.wake();
    }

    /// Removes the requests that wait, and keeps the devices that the session holds until
    /// [`end`](Self::end), also if it releases them.
    pub(crate) fn begin_end(&self) {
        let ended = self.table.change(|state, now| state.begin_end(now, self.session));
        drop(ended);
    }

    /// Ends all requests and leases of the session.
    pub(crate) fn end(&self) {
        let on_grant = self.table.change(|state, now| {
            state.sessions.remove(&self.session);
            state.observers.remove(&self.session);
            state.clients.remove(&self.session);
            state.blocked.retain(|_, blocked| {
                blocked.remove(&self.session);
                !blocked.is_empty()
            });
            let waiting = state.scheduler.end_session(now, self.session);
            waiting.iter().filter_map(|id| state.on_grant.remove(id)).collect::<Vec<_>>()
        });
        drop(on_grant);
    }
}

/// Use of a device by a session, until dropped.
struct SessionUse {
    table: Arc<LeaseTable>,
    session: SessionId,
    device: Device,
}

impl Drop for SessionUse {
    fn drop(&mut self) {
        self.table.change(|state, now| state.scheduler.end_use(now, self.session, self.device));
    }
}

impl Drop for SessionLeases {
    fn drop(&mut self) {
        self.end();
    }
}

/// A session in the server's own process owns its leases, and its functions have them while it
/// lasts: one that runs on after the end of its session keeps no lease.
#[async_trait]
impl LeaseService for Weak<SessionLeases> {
    async fn request(&self, request: LeaseRequest) -> Result<QueuedRequest> {
        let (granted, grant) = watch::channel(None);
        let id = session(self)?.queue(request, move |grant| _ = granted.send(Some(grant)))?;
        Ok(QueuedRequest { number: id.0, grant })
    }

    fn release(&self, number: u64) {
        if let Some(session) = self.upgrade() {
            session.release(LeaseId(number));
        }
    }

    async fn ahead(&self, number: u64) -> Result<u64> {
        Ok(session(self)?.ahead(LeaseId(number)))
    }

    async fn leased_devices(&self) -> Result<Vec<LeasedDevice>> {
        Ok(session(self)?.leased_devices())
    }

    fn poll_use(&self, device: Device, waker: &Waker) -> Poll<Option<DeviceUse>> {
        // No request begins after the end of the session, which ends those that wait as well.
        self.upgrade().map_or(Poll::Pending, |session| Poll::Ready(session.begin_use(device, waker)))
    }
}

fn session(leases: &Weak<SessionLeases>) -> Result<Arc<SessionLeases>> {
    leases.upgrade().ok_or_else(session_has_ended)
}

fn session_has_ended() -> RpcError {
    RpcError::new(ErrorKind::Closed, "the session has ended, and its leases with it")
}
