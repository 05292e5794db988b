//! The gate of a server that a tracker gives out: it admits clients with a ticket, and records
//! their sessions.
//!
//! The tracker relies on complete reports: each one lists all sessions, and the tickets that are
//! used up until the tracker has acknowledged them: their sessions have ended, or they came while
//! all places were taken, and had none.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use parking_lot::{Mutex, MutexGuard};
use rpc_core::proto::ANONYMOUS;
use rpc_core::session::InPlaceWrite;
use rpc_core::value::TensorRef;
use rpc_core::{ErrorKind, Lane, Request, Result, RpcError, RpcSession, SharedSession, Submission};
use rpc_transports::tracker::{
    PROBE_ANSWERED, PROBE_TICKET, PROOF_SERIAL, ServerStatus, TICKET_REFUSED, TicketError, TicketKey, Use,
};
use rpc_transports::{ClientConnection, OpenRequest, SessionFactory};
use tokio::sync::watch;

use crate::policy::rights_of;
use crate::tracker::millis;

/// Id of a registration at one tracker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RegistrationId(u64);

/// Gate of a server; see the [module](self).
#[derive(Debug)]
pub(super) struct TicketGate {
    /// Start of the clock by which tickets expire.
    started: Instant,
    allow_direct: bool,
    /// Maximum number of sessions with tickets at one time. The tracker grants no more either, but
    /// takes the ticket of a client that is gone back before it expires.
    capacity: u32,
    /// Time after which a client that says nothing is not just idle.
    longest_silence: Duration,
    state: Mutex<GateState>,
    changes: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct GateState {
    next: u64,
    registrations: BTreeMap<RegistrationId, Registration>,
    sessions: BTreeMap<u64, SessionEntry>,
}

#[derive(Debug)]
struct Registration {
    key: TicketKey,
    /// Used tickets and the times at which they expire. Each is kept until then.
    used: BTreeMap<u64, u64>,
    /// Tickets whose sessions have ended, or that never had one because all places were taken, for
    /// the next report.
    spent: Vec<u64>,
}

/// A session that has been admitted.
#[derive(Debug)]
struct SessionEntry {
    ticket: Option<(RegistrationId, u64)>,
    direct: bool,
    client: String,
    since: Instant,
    connection: ClientConnection,
}

impl TicketGate {
    /// Returns a gate that admits `capacity` clients with tickets at one time. `allow_direct` lets
    /// in clients without tickets, too, and these do not count. Silent clients are tested after
    /// `keep_alive`.
    pub(super) fn new(allow_direct: bool, capacity: u32, keep_alive: Duration) -> Arc<Self> {
        Arc::new(Self {
            started: rpc_core::clock::now(),
            allow_direct,
            capacity,
            // Half of it is time enough for the answer.
            longest_silence: keep_alive.saturating_add(keep_alive / 2),
            state: Mutex::default(),
            changes: watch::channel(0).0,
        })
    }

    /// Returns a factory whose clients must pass this gate.
    pub(super) fn guard(self: &Arc<Self>, factory: Arc<dyn SessionFactory>) -> Arc<dyn SessionFactory> {
        Arc::new(GuardedFactory { gate: self.clone(), factory })
    }

    /// Begins a registration. Tickets made with the returned key are valid until the registration
    /// [ends](Self::end).
    pub(super) fn begin(&self) -> Result<(RegistrationId, TicketKey)> {
        let key = TicketKey::generate()?;
        let mut state = self.lock();
        let id = RegistrationId(state.number());
        let registration = Registration { key: key.clone(), used: BTreeMap::new(), spent: Vec::new() };
        state.registrations.insert(id, registration);
        Ok((id, key))
    }

    /// Ends a registration: its tickets are refused from now on. Its sessions go on.
    pub(super) fn end(&self, id: RegistrationId) {
        self.lock().registrations.remove(&id);
    }

    /// Returns the report for the tracker of this registration.
    pub(super) fn status(&self, id: RegistrationId) -> ServerStatus {
        let now = rpc_core::clock::now();
        let state = self.lock();
        let describe = |(number, entry): (&u64, &SessionEntry)| Use {
            id: *number,
            serial: entry.ticket.filter(|(of, _)| *of == id).map(|(_, serial)| serial),
            direct: entry.direct,
            client: entry.client.clone(),
            for_ms: millis(now.saturating_duration_since(entry.since)),
            silent_ms: Some(entry.connection.silent_for())
                .filter(|silent| *silent > self.longest_silence)
                .map_or(0, millis),
        };
        ServerStatus {
            now_ms: self.now_ms(),
            uses: state.sessions.iter().map(describe).collect(),
            spent: state.registrations.get(&id).map(|registration| registration.spent.clone()).unwrap_or_default(),
            leaving: false,
            details: None,
        }
    }

    /// Ends a session, at the request of the tracker of this registration: one that it has granted,
    /// or one without a ticket. Those of other trackers go on.
    pub(super) fn kick(&self, id: RegistrationId, session: u64) {
        let is_its_own = |entry: &&SessionEntry| entry.ticket.is_none_or(|(of, _)| of == id);
        let connection = self.lock().sessions.get(&session).filter(is_its_own).map(|entry| entry.connection.clone());
        if let Some(connection) = connection {
            let text = "the session was ended at the request of another client of the tracker (rpc-cli kick)";
            connection.end(RpcError::new(ErrorKind::Closed, text).may_have_run(true));
        }
    }

    /// Forgets the first `spent` ended tickets, which the tracker has acknowledged.
    pub(super) fn acknowledge_spent(&self, id: RegistrationId, spent: usize) {
        if let Some(registration) = self.lock().registrations.get_mut(&id) {
            registration.spent.drain(..spent.min(registration.spent.len()));
        }
    }

    /// Returns a receiver that is notified of each change.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Admits a client.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`] of the application kind [`TICKET_REFUSED`]; and of the application
    /// kind [`PROBE_ANSWERED`] for the probe of a tracker, which gets no session. Those of
    /// [`rights_of`], before a ticket is marked as used.
    pub(super) fn admit(self: &Arc<Self>, request: &OpenRequest) -> Result<SessionPermit> {
        let known_as = if request.identity == ANONYMOUS { &request.peer } else { &request.identity };
        let rights = rights_of(request).map(drop);
        let mut state = self.lock();
        let ticket = match request.ticket.as_deref() {
            Some(PROBE_TICKET) => return Err(probe_answered()),
            Some(text) => match state.take_ticket(text, self.now_ms(), rights)? {
                (_, PROOF_SERIAL) => return Err(probe_answered()),
                (id, serial) if state.with_ticket() >= self.capacity as usize => {
                    state.spend(id, serial);
                    drop(state);
                    self.changed();
                    return Err(refused("all places of this server are taken by other clients: ask the tracker again"));
                }
                ticket => Some(ticket),
            },
            None if self.allow_direct => {
                rights?;
                None
            }
            None => {
                return Err(refused(
                    "this server is given out by a tracker, and the client has no ticket: connect to \
                     tracker://TRACKER/KEY, or have the operator let others in too (--allow-direct)",
                ));
            }
        };
        let number = state.number();
        let direct = ticket.is_none();
        let entry = SessionEntry {
            ticket,
            direct,
            client: known_as.clone(),
            since: rpc_core::clock::now(),
            connection: request.connection.clone(),
        };
        state.sessions.insert(number, entry);
        drop(state);
        self.changed();
        Ok(SessionPermit { gate: self.clone(), number })
    }

    fn now_ms(&self) -> u64 {
        millis(rpc_core::clock::now().saturating_duration_since(self.started))
    }

    fn changed(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock()
    }
}

impl GateState {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Returns the number of sessions with tickets.
    fn with_ticket(&self) -> usize {
        self.sessions.values().filter(|entry| entry.ticket.is_some()).count()
    }

    /// Adds a used ticket without a session to the next report, if its registration lasts.
    fn spend(&mut self, id: RegistrationId, serial: u64) {
        if let Some(registration) = self.registrations.get_mut(&id) {
            registration.spent.push(serial);
        }
    }

    /// Marks a ticket as used, if `rights` is no error: the client may have a session.
    fn take_ticket(&mut self, text: &str, now_ms: u64, rights: Result<()>) -> Result<(RegistrationId, u64)> {
        let mut why = TicketError::Foreign;
        for (id, registration) in &mut self.registrations {
            let ticket = match registration.key.verify(text) {
                Ok(ticket) => ticket,
                Err(error) => {
                    why = error;
                    continue;
                }
            };
            if ticket.expires_ms <= now_ms {
                let late = now_ms - ticket.expires_ms;
                return Err(refused(format!("the ticket expired {late} ms ago: ask the tracker for another one")));
            }
            if ticket.serial == PROOF_SERIAL {
                // Opens no session, however often it is shown. Trackers need no rights for it.
                return Ok((*id, ticket.serial));
            }
            rights?;
            // Expired tickets are refused by their time, so they need not be remembered.
            registration.used.retain(|_, expires_ms| *expires_ms > now_ms);
            if registration.used.insert(ticket.serial, ticket.expires_ms).is_some() {
                return Err(refused("the ticket has been used before, and is good for one session"));
            }
            return Ok((*id, ticket.serial));
        }
        Err(refused(format!("the ticket is not good: {why}; ask the tracker for another one")))
    }
}

fn refused(why: impl Into<std::borrow::Cow<'static, str>>) -> RpcError {
    RpcError::new(ErrorKind::Refused, why).with_application_kind(TICKET_REFUSED)
}

fn probe_answered() -> RpcError {
    let text = "this server is at its address, and opens no session for the probe of a tracker";
    refused(text).with_application_kind(PROBE_ANSWERED)
}

/// Permit of an admitted client, which ends when it is dropped.
#[derive(Debug)]
pub(super) struct SessionPermit {
    gate: Arc<TicketGate>,
    number: u64,
}

impl Drop for SessionPermit {
    fn drop(&mut self) {
        let mut state = self.gate.lock();
        if let Some(SessionEntry { ticket: Some((id, serial)), .. }) = state.sessions.remove(&self.number) {
            state.spend(id, serial);
        }
        drop(state);
        self.gate.changed();
    }
}

struct GuardedFactory {
    gate: Arc<TicketGate>,
    factory: Arc<dyn SessionFactory>,
}

#[async_trait]
impl SessionFactory for GuardedFactory {
    async fn open(&self, request: &OpenRequest) -> Result<SharedSession> {
        let permit = self.gate.admit(request)?;
        let session = self.factory.open(request).await?;
        Ok(Arc::new(GuardedSession { session, _stay: permit }))
    }
}

/// A session and the permit of its client.
struct GuardedSession {
    /// Session of the client. Declared first, so that the slot is free only after the objects of
    /// the session are.
    session: SharedSession,
    _stay: SessionPermit,
}

impl RpcSession for GuardedSession {
    fn submit(&self, request: Request) -> Submission {
        self.session.submit(request)
    }

    fn inner(&self) -> Option<&dyn RpcSession> {
        Some(&self.session)
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        self.session.write_in_place(lane, to, offset, len)
    }
}
