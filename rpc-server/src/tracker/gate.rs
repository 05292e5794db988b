//! At a server that a tracker gives out: lets in who has a ticket, and knows who is there.
//!
//! A tracker counts on being told of each session. So what the gate says of its use is all of it, each time, and tickets that
//! were used and whose sessions have ended are named until the tracker has heard of them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use async_trait::async_trait;
use rpc_core::proto::ANONYMOUS;
use rpc_core::session::InPlaceWrite;
use rpc_core::value::TensorRef;
use rpc_core::{ErrorKind, Lane, Request, Result, RpcError, RpcSession, SharedSession, Submission};
use rpc_transports::tracker::{ServerStatus, TICKET_REFUSED, TicketError, TicketKey, Use};
use rpc_transports::{OpenRequest, SessionFactory};
use tokio::sync::watch;

use super::millis;

/// The number of a registration at one tracker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RegistrationId(u64);

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Gate {
    /// The beginning of the clock that tickets expire by.
    started: Instant,
    allow_direct: bool,
    state: Mutex<State>,
    changes: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    registrations: BTreeMap<RegistrationId, Registration>,
    sessions: BTreeMap<u64, Present>,
}

#[derive(Debug)]
struct Registration {
    key: TicketKey,
    /// Tickets that were used, and when they would have expired. Kept until then.
    used: BTreeMap<u64, u64>,
    /// Tickets that the tracker need not wait for any more.
    spent: Vec<u64>,
}

/// A session that is there.
#[derive(Debug)]
struct Present {
    ticket: Option<(RegistrationId, u64)>,
    direct: bool,
    client: String,
    since: Instant,
}

impl Gate {
    /// A gate; `allow_direct` lets in clients without tickets.
    pub(crate) fn new(allow_direct: bool) -> Arc<Self> {
        Arc::new(Self { started: Instant::now(), allow_direct, state: Mutex::default(), changes: watch::channel(0).0 })
    }

    /// A session factory whose clients come through this gate.
    pub(crate) fn guard(self: &Arc<Self>, factory: Arc<dyn SessionFactory>) -> Arc<dyn SessionFactory> {
        Arc::new(Guarded { gate: self.clone(), factory })
    }

    /// Tickets that are made with the key that this gives are taken until the registration [ends](Self::end).
    pub(crate) fn begin(&self) -> Result<(RegistrationId, TicketKey)> {
        let key = TicketKey::generate()?;
        let mut state = self.lock();
        let id = RegistrationId(state.number());
        let registration = Registration { key: key.clone(), used: BTreeMap::new(), spent: Vec::new() };
        state.registrations.insert(id, registration);
        Ok((id, key))
    }

    /// Its tickets are taken no more. Sessions that there are go on.
    pub(crate) fn end(&self, id: RegistrationId) {
        self.lock().registrations.remove(&id);
    }

    /// Who is here, as the tracker of this registration is told.
    pub(crate) fn status(&self, id: RegistrationId) -> ServerStatus {
        let now = Instant::now();
        let state = self.lock();
        let describe = |(number, present): (&u64, &Present)| Use {
            id: *number,
            serial: present.ticket.filter(|(of, _)| *of == id).map(|(_, serial)| serial),
            direct: present.direct,
            client: present.client.clone(),
            for_ms: millis(now.saturating_duration_since(present.since)),
        };
        ServerStatus {
            now_ms: self.now_ms(),
            uses: state.sessions.iter().map(describe).collect(),
            spent: state.registrations.get(&id).map(|registration| registration.spent.clone()).unwrap_or_default(),
        }
    }

    /// The tracker has heard of the first `spent` of them.
    pub(crate) fn told(&self, id: RegistrationId, spent: usize) {
        if let Some(registration) = self.lock().registrations.get_mut(&id) {
            registration.spent.drain(..spent.min(registration.spent.len()));
        }
    }

    /// Tells of each change.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Lets a client in.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`] of the application kind [`TICKET_REFUSED`].
    pub(crate) fn admit(self: &Arc<Self>, request: &OpenRequest) -> Result<Stay> {
        let known_as = if request.identity == ANONYMOUS { &request.peer } else { &request.identity };
        let mut state = self.lock();
        let ticket = match &request.ticket {
            Some(text) => Some(state.take_ticket(text, self.now_ms())?),
            None if self.allow_direct => None,
            None => {
                return Err(refused(
                    "this server is given out by a tracker, and the client has no ticket: connect to \
                     tracker://TRACKER/KEY, or have the operator let others in too (--allow-direct)",
                ));
            }
        };
        let number = state.number();
        let direct = ticket.is_none();
        let present = Present { ticket, direct, client: known_as.clone(), since: Instant::now() };
        state.sessions.insert(number, present);
        drop(state);
        self.changed();
        Ok(Stay { gate: self.clone(), number })
    }

    fn now_ms(&self) -> u64 {
        millis(self.started.elapsed())
    }

    fn changed(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Uses up a ticket.
    fn take_ticket(&mut self, text: &str, now_ms: u64) -> Result<(RegistrationId, u64)> {
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
            // Those that have expired are refused by their time.
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

/// A client that is here, until dropped.
#[derive(Debug)]
pub(crate) struct Stay {
    gate: Arc<Gate>,
    number: u64,
}

impl Drop for Stay {
    fn drop(&mut self) {
        let mut state = self.gate.lock();
        if let Some(Present { ticket: Some((id, serial)), .. }) = state.sessions.remove(&self.number)
            && let Some(registration) = state.registrations.get_mut(&id)
        {
            registration.spent.push(serial);
        }
        drop(state);
        self.gate.changed();
    }
}

struct Guarded {
    gate: Arc<Gate>,
    factory: Arc<dyn SessionFactory>,
}

#[async_trait]
impl SessionFactory for Guarded {
    async fn open(&self, request: &OpenRequest) -> Result<SharedSession> {
        let stay = self.gate.admit(request)?;
        let session = self.factory.open(request).await?;
        Ok(Arc::new(GuardedSession { session, _stay: stay }))
    }
}

/// A session, and its client's stay.
struct GuardedSession {
    /// Declared first: the place is free when the session's objects are.
    session: SharedSession,
    _stay: Stay,
}

impl RpcSession for GuardedSession {
    fn submit(&self, request: Request) -> Submission {
        self.session.submit(request)
    }

    fn is_local(&self) -> bool {
        self.session.is_local()
    }

    fn is_encrypted(&self) -> bool {
        self.session.is_encrypted()
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        self.session.write_in_place(lane, to, offset, len)
    }

    fn ended(&self) -> Submission {
        self.session.ended()
    }
}
