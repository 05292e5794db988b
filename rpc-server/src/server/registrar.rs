//! Registration of the server with its trackers.
//!
//! One task for each tracker reports each change at once and renews the lease in between. While the
//! tracker is away it tries again, with growing pauses, until the server stops. Sessions of the
//! server are not affected.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rpc_core::{Fault, Pack, Packed, RemoteObject, Result, RpcError, Session};
use rpc_transports::tracker::{
    MESSAGES, Reach, Registered, Registration, Renewed, ServerDetails, ServerStatus, functions,
};
use rpc_transports::{Address, Backoff, Connector, Dial};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::advertisement::Advertisement;
use super::details::DetailsCollector;
use super::ticket_gate::{RegistrationId, TicketGate};

/// First and longest pause before the next attempt to reach the tracker.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));

/// Longest time for telling the trackers that the server leaves.
const FAREWELL_LIMIT: Duration = Duration::from_millis(500);

/// Least time between two reports; changes in between are reported together.
const REPORT_INTERVAL: Duration = Duration::from_millis(2);

/// Tasks that keep a server registered with its trackers, until dropped.
#[derive(Debug)]
pub(super) struct Registrar {
    registrations: Mutex<Vec<JoinHandle<()>>>,
    connector: Arc<Mutex<Connector>>,
    /// Set to true when the server leaves its trackers.
    leaving: watch::Sender<bool>,
    _details: DetailsCollector,
}

impl Registrar {
    /// Starts to register with `trackers`. Needs a tokio runtime.
    pub(super) fn start(
        trackers: &[Address],
        connector: &Connector,
        gate: &Arc<TicketGate>,
        advertisement: &Advertisement,
        details: DetailsCollector,
    ) -> Self {
        let connector = Arc::new(Mutex::new(connector.clone()));
        let (leaving, left) = watch::channel(false);
        let start = |tracker: &Address| {
            let registration = TrackerRegistration {
                tracker: tracker.to_string(),
                connector: connector.clone(),
                gate: gate.clone(),
                advertisement: advertisement.clone(),
                leaving: left.clone(),
                details: details.latest(),
            };
            tokio::spawn(registration.run())
        };
        Self { registrations: Mutex::new(trackers.iter().map(start).collect()), connector, leaving, _details: details }
    }

    /// Sets the credentials for all later connections.
    pub(super) fn set_dial(&self, options: Dial) {
        let mut connector = self.connector.lock();
        *connector = connector.clone().dial(options);
    }

    /// Leaves the trackers, which are told so.
    pub(super) fn leave(&self) {
        self.leaving.send_replace(true);
    }

    /// Waits until the trackers have been told, for a moment at most.
    pub(super) async fn left(&self) {
        let mut registrations = std::mem::take(&mut *self.registrations.lock());
        let left = async {
            for registration in &mut registrations {
                // A task that panicked has left as well.
                let _ = registration.await;
            }
        };
        let _ = tokio::time::timeout(FAREWELL_LIMIT, left).await;
        // The end of its session tells a tracker as well, in less orderly words.
        registrations.iter().for_each(JoinHandle::abort);
    }
}

impl Drop for Registrar {
    fn drop(&mut self) {
        // The end of the sessions ends the registrations.
        self.registrations.get_mut().iter().for_each(JoinHandle::abort);
    }
}

/// Registration with one tracker.
struct TrackerRegistration {
    tracker: String,
    connector: Arc<Mutex<Connector>>,
    gate: Arc<TicketGate>,
    advertisement: Advertisement,
    leaving: watch::Receiver<bool>,
    /// Facts about the server for people.
    details: watch::Receiver<Option<ServerDetails>>,
}

impl TrackerRegistration {
    /// Keeps the server registered until it leaves.
    async fn run(self) {
        let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
        let mut last = String::new();
        loop {
            let Some((error, was_registered)) = self.register_and_renew().await else { return };
            if was_registered {
                backoff.reset();
                last.clear();
            }
            let pause = backoff.pause();
            // The same error is logged once, and not at each attempt.
            let text = error.to_string();
            if text != last {
                let tracker = &self.tracker;
                if was_registered {
                    rpc_core::log_limited!(WARN, %tracker, %error, "lost the tracker; trying again");
                } else {
                    rpc_core::log_limited!(WARN, %tracker, %error, "not registered with the tracker; trying again");
                }
                last = text;
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.left() => return,
            }
        }
    }

    /// Resolves when the server leaves its trackers.
    async fn left(&self) {
        // Without the sender the registration is over as well.
        let _ = self.leaving.clone().wait_for(|leaving| *leaving).await;
    }

    /// Registers, and renews until an error or until the server leaves. Returns the error, and true
    /// if the registration had succeeded; `None` if the server has left.
    async fn register_and_renew(&self) -> Option<(RpcError, bool)> {
        let connector = self.connector.lock().clone();
        let connected = tokio::select! {
            connected = connector.connect(&self.tracker) => connected,
            () = self.left() => return None,
        };
        let session = match connected {
            Ok(session) => session,
            Err(error) => return Some((error.into_rpc_error(), false)),
        };
        let (id, key) = match self.gate.begin() {
            Ok(begun) => begun,
            Err(error) => return Some((error, false)),
        };
        let _guard = RegistrationGuard { gate: self.gate.clone(), id };
        let mut was_registered = false;
        let outcome = self.renew_until_error(&session, id, key.to_bytes(), &mut was_registered).await;
        let error = match outcome {
            Ok(()) => return None,
            // An error of the link describes the cause better than the call that failed.
            Err(error) if error.fault() == Fault::Link || error.ends_session() => error,
            Err(error) => error.context("the tracker"),
        };
        Some((error, was_registered))
    }

    /// Registers, and renews. Returns `Ok` once the tracker has been told that the server leaves.
    async fn renew_until_error(
        &self,
        session: &Session,
        id: RegistrationId,
        ticket_key: [u8; 32],
        was_registered: &mut bool,
    ) -> Result<()> {
        let mut changes = self.gate.changes();
        // Both at once, and without a comparison of types, which would cost a round trip more.
        let register = session.get_function(functions::REGISTER).start();
        let renew = session.get_function(functions::RENEW).start();
        let (register, renew) = (register.await?, renew.await?);
        changes.mark_unchanged();
        let Advertisement { name, key, labels, devices, capacity, address } = self.advertisement.clone();
        let status = self.gate.status(id);
        let version = MESSAGES.version();
        let registration = Registration { version, name, key, labels, devices, capacity, address, ticket_key, status };
        let (registration, registered): (RemoteObject, Packed) = register.call((Pack(registration),)).await?;
        let Registered { lease_ms, address, .. } = MESSAGES.decode(&registered, "the tracker", "this server")?;
        *was_registered = true;
        let lease = Duration::from_millis(lease_ms.max(1));
        let (tracker, address) = (&self.tracker, address.join(","));
        rpc_core::log_limited!(INFO, %tracker, key = self.advertisement.key, address, "registered with the tracker");
        let mut reach = Reach::Untried;
        // The first facts are sent at once. Later ones wait for the next report. What was collected
        // before is news as well, since this task looks at copies of its receiver alone.
        let (mut details, mut has_told) = (self.details.clone(), false);
        loop {
            tokio::select! {
                // The gate outlives this task, so the receiver does not close.
                changed = changes.changed() => if changed.is_ok() { tokio::time::sleep(REPORT_INTERVAL).await },
                () = tokio::time::sleep(lease / 3) => {}
                Ok(()) = details.changed(), if !has_told => details.mark_changed(),
                ended = session.ended() => return Err(ended),
                () = self.left() => {}
            }
            changes.mark_unchanged();
            let news = details.has_changed().is_ok_and(|changed| changed).then(|| details.borrow_and_update().clone());
            let news = news.flatten();
            has_told |= news.is_some();
            let status = ServerStatus { leaving: *self.leaving.borrow(), details: news, ..self.gate.status(id) };
            let leaving = status.leaving;
            let spent = status.spent.len();
            // A tracker that does not answer within the lease has dropped this server.
            let Pack(renewed): Pack<Renewed> = renew.call((&registration, Pack(status))).timeout(lease).await?;
            if leaving {
                return Ok(());
            }
            self.gate.acknowledge_spent(id, spent);
            renewed.end.iter().for_each(|session| self.gate.kick(id, *session));
            if renewed.reach != reach {
                if let Reach::Unreachable { why } = &renewed.reach {
                    rpc_core::log_limited!(
                        WARN,
                        %tracker, address, why,
                        "the tracker cannot reach this server at its advertised address (--advertise)"
                    );
                }
                reach = renewed.reach;
            }
        }
    }
}

/// Guard that ends a registration at the gate.
struct RegistrationGuard {
    gate: Arc<TicketGate>,
    id: RegistrationId,
}

impl Drop for RegistrationGuard {
    fn drop(&mut self) {
        self.gate.end(self.id);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rpc_core::{ErrorKind, LocalSession, Registry, Shared};

    use super::*;

    #[tokio::test]
    async fn a_tracker_of_another_version_is_refused_in_words() {
        for (version, advice) in
            [(MESSAGES.version() - 1, "update the tracker"), (MESSAGES.version() + 1, "update this server")]
        {
            let registry = Registry::new();
            // The answer of a version whose other fields are unknown here.
            let register =
                move |_: Packed| (Shared(Arc::new(())), Pack(BTreeMap::from([("version".to_owned(), version)])));
            registry.add(functions::REGISTER, register);
            registry.add(functions::RENEW, || ());
            let session = Session::new(LocalSession::new(registry));
            let gate = TicketGate::new(false, 1, Duration::from_secs(5));
            let (id, key) = gate.begin().unwrap();
            let registration = TrackerRegistration {
                tracker: "tcp://127.0.0.1:1".to_owned(),
                connector: Arc::new(Mutex::new(Connector::new())),
                gate,
                advertisement: Advertisement {
                    name: "board".to_owned(),
                    key: "board".to_owned(),
                    labels: BTreeMap::new(),
                    devices: Vec::new(),
                    capacity: 1,
                    address: vec!["tcp://127.0.0.1:2".to_owned()],
                },
                leaving: watch::channel(false).1,
                details: watch::channel(None).1,
            };
            let mut was_registered = false;
            let outcome = registration.renew_until_error(&session, id, key.to_bytes(), &mut was_registered).await;
            let error = outcome.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::VersionMismatch, "{error}");
            assert!(error.message().ends_with(advice) && !was_registered, "{error}");
        }
    }
}
