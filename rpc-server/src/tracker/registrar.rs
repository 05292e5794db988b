//! At a server that a tracker gives out: registers it there, and says who uses it.
//!
//! One task for each tracker. It tells of each change at once, renews the lease in between, and when the tracker is away it
//! tries again, ever more seldom, until the server stops. Sessions of the server go on meanwhile.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rpc_core::{Fault, Pack, RemoteObject, Result, RpcError, Session};
use rpc_transports::tracker::{DeviceOffer, Reach, Registered, Registration, Renewed, ServerStatus, functions};
use rpc_transports::{Address, Backoff, Connector, DialOptions};
use tokio::task::JoinHandle;

use super::gate::{Gate, RegistrationId};

/// The first pause before the tracker is tried again, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));

/// The least time between two reports: what happens meanwhile is told together.
const REPORT_INTERVAL: Duration = Duration::from_millis(2);

/// What trackers are told of the server. The same for all of them.
#[derive(Clone, Debug)]
pub(crate) struct Told {
    pub(crate) name: String,
    pub(crate) key: String,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) devices: Vec<DeviceOffer>,
    pub(crate) capacity: u32,
    pub(crate) address: Vec<String>,
}

/// Keeps a server registered at its trackers, until dropped.
#[derive(Debug)]
pub(crate) struct Registrar {
    attachments: Vec<JoinHandle<()>>,
    connector: Arc<Mutex<Connector>>,
}

impl Registrar {
    /// Registers at all of `trackers`, as soon as each of them can be reached. Needs a tokio runtime.
    pub(crate) fn start(trackers: &[Address], connector: &Connector, gate: &Arc<Gate>, told: &Told) -> Self {
        let connector = Arc::new(Mutex::new(connector.clone()));
        let start = |tracker: &Address| {
            let attachment = Attachment {
                tracker: tracker.to_string(),
                connector: connector.clone(),
                gate: gate.clone(),
                told: told.clone(),
            };
            tokio::spawn(attachment.run())
        };
        Self { attachments: trackers.iter().map(start).collect(), connector }
    }

    /// Proves the server by these credentials, and knows trackers by them, from the next connection on.
    pub(crate) fn set_dial_options(&self, options: DialOptions) {
        let mut connector = self.connector.lock().unwrap_or_else(PoisonError::into_inner);
        *connector = connector.clone().dial_options(options);
    }

    /// Leaves the trackers. Their sessions end, and with them the registrations.
    pub(crate) fn leave(&self) {
        self.attachments.iter().for_each(JoinHandle::abort);
    }
}

impl Drop for Registrar {
    fn drop(&mut self) {
        self.leave();
    }
}

/// A server and one of its trackers.
struct Attachment {
    tracker: String,
    connector: Arc<Mutex<Connector>>,
    gate: Arc<Gate>,
    told: Told,
}

impl Attachment {
    async fn run(self) {
        let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
        let mut last = String::new();
        loop {
            let (error, was_registered) = self.attend().await;
            if was_registered {
                backoff.reset();
                last.clear();
            }
            let pause = backoff.pause();
            // An operator wants to know once, not every few seconds.
            let text = error.to_string();
            if text != last {
                let tracker = &self.tracker;
                if was_registered {
                    tracing::warn!(%tracker, %error, "lost the tracker; trying again");
                } else {
                    tracing::warn!(%tracker, %error, "not registered with the tracker; trying again");
                }
                last = text;
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// Registers, and stays registered for as long as that goes well. Says whether it did at all.
    async fn attend(&self) -> (RpcError, bool) {
        let connector = self.connector.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let session = match connector.connect(&self.tracker).await {
            Ok(session) => session,
            Err(error) => return (error.into_rpc_error(), false),
        };
        let (id, key) = match self.gate.begin() {
            Ok(begun) => begun,
            Err(error) => return (error, false),
        };
        let _ended = Ended { gate: self.gate.clone(), id };
        let mut was_registered = false;
        let outcome = self.stay(&session, id, key.to_bytes(), &mut was_registered).await;
        let error = match outcome {
            Ok(never) => match never {},
            // The session says better what has happened than what was going on in it.
            Err(error) if error.fault() == Fault::Link || error.ends_session() => error,
            Err(error) => error.context("the tracker"),
        };
        (error, was_registered)
    }

    async fn stay(
        &self,
        session: &Session,
        id: RegistrationId,
        ticket_key: [u8; 32],
        was_registered: &mut bool,
    ) -> Result<std::convert::Infallible> {
        let mut changes = self.gate.changes();
        let register =
            session.function::<(Pack<Registration>,), (RemoteObject, Pack<Registered>)>(functions::REGISTER).await?;
        let renew = session.function::<(&RemoteObject, Pack<ServerStatus>), Pack<Renewed>>(functions::RENEW).await?;
        changes.mark_unchanged();
        let Told { name, key, labels, devices, capacity, address } = self.told.clone();
        let status = self.gate.status(id);
        let registration = Registration { name, key, labels, devices, capacity, address, ticket_key, status };
        let (registration, Pack(Registered { lease_ms, address })) = register.call((Pack(registration),)).await?;
        *was_registered = true;
        let lease = Duration::from_millis(lease_ms.max(1));
        let (tracker, address) = (&self.tracker, address.join(","));
        tracing::info!(%tracker, key = self.told.key, address, "registered with the tracker");
        let mut reach = Reach::Untried;
        loop {
            tokio::select! {
                // The gate outlives its registrars, so that there is always another change to wait for.
                changed = changes.changed() => if changed.is_ok() { tokio::time::sleep(REPORT_INTERVAL).await },
                () = tokio::time::sleep(lease / 3) => {}
                ended = session.ended() => return Err(ended),
            }
            changes.mark_unchanged();
            let status = self.gate.status(id);
            let spent = status.spent.len();
            // A tracker that does not answer within the lease has forgotten us.
            let Pack(renewed) = renew.call((&registration, Pack(status))).timeout(lease).await?;
            self.gate.told(id, spent);
            if renewed.reach != reach {
                if let Reach::Unreachable { why } = &renewed.reach {
                    tracing::warn!(
                        %tracker, address, why,
                        "the tracker does not find this server at the address that it tells (--advertise)"
                    );
                }
                reach = renewed.reach;
            }
        }
    }
}

/// Ends a registration at the gate, however it comes to its end.
struct Ended {
    gate: Arc<Gate>,
    id: RegistrationId,
}

impl Drop for Ended {
    fn drop(&mut self) {
        self.gate.end(self.id);
    }
}
