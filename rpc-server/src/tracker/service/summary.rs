//! The summary of a tracker: servers, queue, losses and history.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use rpc_transports::tracker::{
    Draining, Holder, HolderState, Loss, MESSAGES, PoolEvent, QueueEntry, Reach, Sample, ServerDetails, ServerRequest,
    ServerSummary, Summary,
};

use super::super::history::KeySamples;
use super::super::millis;
use super::super::scheduler::{Occupancy, OccupancyKind, ServerId};
use super::{ServerDescription, ServerEntry, Tracker, TrackerState};

impl Tracker {
    /// Returns a summary of the tracker.
    pub fn summary(&self) -> Summary {
        let now = rpc_core::clock::now();
        let ago = |then: Instant| millis(now.saturating_duration_since(then));
        let snapshot = self.snapshot(now);
        let holder = |held: Occupancy| Holder {
            client: held.client,
            for_ms: ago(held.since),
            state: match held.kind {
                OccupancyKind::Granted => HolderState::Granted,
                OccupancyKind::InUse => HolderState::InUse,
                OccupancyKind::Direct => HolderState::Direct,
            },
            session: held.session,
            silent_ms: held.silent_ms,
        };
        let server = |server: ServerSnapshot| ServerSummary {
            id: server.id.0,
            name: server.description.name.clone(),
            key: server.description.offer.key.clone(),
            labels: server.description.offer.labels.clone(),
            devices: server.description.offer.devices.clone(),
            capacity: server.description.offer.capacity,
            free: server.free,
            address: server.description.address.clone(),
            peer: server.description.peer.clone(),
            reach: server.reach,
            registered_for_ms: ago(server.registered),
            heard_ago_ms: ago(server.heard),
            holders: server.holders.into_iter().map(holder).collect(),
            draining: server.draining.map(|(since, by)| Draining { for_ms: ago(since), by }),
            details: server.details.map(|(received, details)| as_of_now(&details, ago(received))),
        };
        let mut servers: Vec<_> = snapshot.servers.into_iter().map(server).collect();
        servers.sort_by(|a, b| (&a.key, &a.name, &a.address).cmp(&(&b.key, &b.name, &b.address)));
        let entry = |(request, since, possible): (Arc<ServerRequest>, Instant, u64)| QueueEntry {
            client: request.client.clone(),
            key: request.key.clone(),
            count: request.count,
            distinct: request.distinct,
            labels: request.labels.clone(),
            devices: request.devices.clone(),
            virtual_devices: request.virtual_devices.clone(),
            priority: request.priority,
            for_ms: ago(since),
            possible,
        };
        Summary {
            version: MESSAGES.version(),
            uptime_ms: ago(self.started),
            lease_ms: millis(self.options.lease),
            servers,
            queue: snapshot.queue.into_iter().map(entry).collect(),
            losses: snapshot.losses.into_iter().map(|(when, loss)| Loss { ago_ms: ago(when), ..loss }).collect(),
            history: snapshot.history,
            events: snapshot.events.into_iter().map(|(when, event)| PoolEvent { ago_ms: ago(when), ..event }).collect(),
        }
    }

    /// Returns the usage of the keys that have histories.
    pub(in crate::tracker) fn key_samples(&self) -> BTreeMap<String, KeySamples> {
        self.lock().key_histories.samples(rpc_core::clock::now())
    }

    /// Copies the data of a summary. No request is served meanwhile, so all other work is left for
    /// later.
    fn snapshot(&self, now: Instant) -> Snapshot {
        let mut state = self.lock();
        let TrackerState { scheduler, servers, losses, history, events, .. } = &mut *state;
        let server = |(id, entry): (&ServerId, &ServerEntry)| {
            let server = scheduler.server(*id)?;
            Some(ServerSnapshot {
                id: *id,
                description: entry.description.clone(),
                reach: entry.reach.clone(),
                free: server.free(),
                registered: server.registered,
                heard: server.heard,
                holders: server.holders().collect(),
                draining: entry.draining.clone(),
                details: entry.details.as_ref().map(|reported| (reported.received, reported.details.clone())),
            })
        };
        Snapshot {
            servers: servers.iter().filter_map(server).collect(),
            queue: scheduler.waiting().map(|(w, possible)| (w.request.clone(), w.since, possible)).collect(),
            losses: losses.iter().cloned().collect(),
            history: history.samples(now),
            events: events.iter().cloned().collect(),
        }
    }
}

/// Data of a summary.
struct Snapshot {
    servers: Vec<ServerSnapshot>,
    /// Waiting requests with their arrival and the number of possible slots.
    queue: Vec<(Arc<ServerRequest>, Instant, u64)>,
    losses: Vec<(Instant, Loss)>,
    history: Vec<Sample>,
    events: Vec<(Instant, PoolEvent)>,
}

struct ServerSnapshot {
    id: ServerId,
    description: Arc<ServerDescription>,
    reach: Reach,
    free: u32,
    registered: Instant,
    heard: Instant,
    holders: Vec<Occupancy>,
    /// Begin of the draining, and the client that has asked for it.
    draining: Option<(Instant, String)>,
    /// Details, and the time at which they were received.
    details: Option<(Instant, Arc<ServerDetails>)>,
}

/// Returns details that were received `age_ms` ago, with the times of now.
fn as_of_now(details: &ServerDetails, age_ms: u64) -> ServerDetails {
    let mut details = details.clone();
    let later = |time: &mut u64| *time = time.saturating_add(age_ms);
    later(&mut details.uptime_ms);
    details.errors.iter_mut().for_each(|error| later(&mut error.ago_ms));
    for lease in details.devices.iter_mut().filter_map(|device| device.lease.as_mut()) {
        later(&mut lease.held_ms);
        lease.left_ms = lease.left_ms.saturating_sub(age_ms);
        lease.next.iter_mut().for_each(|next| later(&mut next.waited_ms));
    }
    details
}
