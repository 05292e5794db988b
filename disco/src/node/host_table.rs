//! Hosts of one server: the sessions of Disco that have workers there, and the activity of each
//! worker.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::ccl::{Flight, Outcome};
use crate::node::host::WorkerHost;
use crate::wire::grouping::Grouping;
use crate::wire::plan::Layout;
use crate::worker::context::Activity;

/// Hosts of one server. A session whose client may have workers gets its
/// [`entry`](Self::entry) as an [extension](rpc_core::Context::extension).
#[derive(Debug, Default)]
pub struct HostTable {
    hosts: Mutex<Hosts>,
}

#[derive(Debug, Default)]
struct Hosts {
    next: u64,
    all: BTreeMap<u64, ListedHost>,
}

#[derive(Clone, Debug)]
struct ListedHost {
    client: Arc<str>,
    host: Weak<WorkerHost>,
}

/// Client of a session, whose hosts are listed in a [`HostTable`].
#[derive(Debug)]
pub struct HostOwner {
    table: Arc<HostTable>,
    client: Arc<str>,
}

/// Entry of one host, until dropped.
#[derive(Debug)]
pub(super) struct HostEntry {
    table: Arc<HostTable>,
    number: u64,
}

/// Workers that a session of Disco has at one server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HostReport {
    /// Number of the session, which its controller has chosen at random: the same at all servers.
    /// `None` for controllers that give none.
    pub session: Option<u64>,
    /// Client, as the server knows it.
    pub client: String,
    /// Number of workers of the session, at all servers together.
    pub world_size: u32,
    /// Number of groups of the session.
    pub num_groups: u32,
    /// Workers in the process of the server.
    pub workers: Vec<WorkerReport>,
    /// Number of workers of the session in processes and at nodes below the server, which report
    /// nothing to it.
    pub workers_below: u32,
}

/// Activity of one worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WorkerReport {
    /// The worker.
    pub worker: u32,
    /// Command that the worker executes, a function by the begin of its name; `None` if it waits
    /// for one.
    pub command: Option<String>,
    /// Time since the worker has begun it, or since it has begun the last one, in microseconds.
    pub since_micros: u64,
    /// Number of commands that it has executed.
    pub executed: u64,
    /// Number of commands behind the present one.
    pub queued: u64,
    /// Last calls in collectives, the oldest first.
    pub calls: Vec<CallReport>,
}

/// Call of a worker in a collective or a transfer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CallReport {
    /// True in the group of all workers; false in the worker's own group.
    pub is_world: bool,
    /// Grouping of the worker's group, if that is not one of the session's own groups.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grouping: Option<Grouping>,
    /// True for a transfer between two workers.
    pub is_transfer: bool,
    /// Number of the call: the [`sequence`](Flight::sequence) of its flight.
    pub sequence: u64,
    /// Description of the call.
    pub call: String,
    /// Time since the worker has entered the call, in microseconds.
    pub entered_micros: u64,
    /// Duration of the call in microseconds; `None` while it runs.
    pub took_micros: Option<u64>,
    /// True if the call has ended with an error.
    pub has_failed: bool,
}

impl HostTable {
    /// Returns the extension of the sessions of a client.
    pub fn entry(self: &Arc<Self>, client: impl Into<Arc<str>>) -> HostOwner {
        HostOwner { table: Arc::clone(self), client: client.into() }
    }

    /// Returns the number of workers in this process.
    pub fn num_workers(&self) -> usize {
        self.hosts().iter().map(|(_, host)| host.num_workers()).sum()
    }

    /// Describes at most `max_workers` workers, of the oldest hosts first.
    pub fn reports(&self, max_workers: usize) -> Vec<HostReport> {
        let mut left = max_workers;
        let mut reports = Vec::new();
        for (client, host) in self.hosts() {
            if left == 0 {
                break;
            }
            let report = host.report(&client, left);
            // A host without workers in this process counts as well.
            left = left.saturating_sub(report.workers.len().max(1));
            reports.push(report);
        }
        reports
    }

    /// Returns the hosts that have not ended, with their clients. The last reference to a host must
    /// not be dropped under the lock, which its entry takes.
    fn hosts(&self) -> Vec<(Arc<str>, Arc<WorkerHost>)> {
        let listed: Vec<_> = self.hosts.lock().all.values().cloned().collect();
        listed.into_iter().filter_map(|ListedHost { client, host }| Some((client, host.upgrade()?))).collect()
    }
}

impl HostOwner {
    /// Returns the table that the hosts of the client are listed in.
    pub fn table(&self) -> &HostTable {
        &self.table
    }

    /// Lists a host.
    pub(super) fn list(&self, host: &Weak<WorkerHost>) -> HostEntry {
        let mut hosts = self.table.hosts.lock();
        let number = hosts.next;
        hosts.next += 1;
        hosts.all.insert(number, ListedHost { client: Arc::clone(&self.client), host: Weak::clone(host) });
        HostEntry { table: Arc::clone(&self.table), number }
    }
}

impl Drop for HostEntry {
    fn drop(&mut self) {
        self.table.hosts.lock().all.remove(&self.number);
    }
}

impl HostReport {
    pub(super) fn new(session: Option<u64>, client: &str, layout: Layout) -> Self {
        let Layout { world_size, num_groups } = layout;
        Self { session, client: client.to_owned(), world_size, num_groups, workers: Vec::new(), workers_below: 0 }
    }
}

impl WorkerReport {
    /// Describes a worker of a session whose own groups are `own`.
    pub(super) fn new(
        worker: u32,
        activity: Activity,
        issued: u64,
        calls: Vec<(Option<Grouping>, Flight)>,
        own: Grouping,
    ) -> Self {
        let now = Instant::now();
        let Activity { command, sequence, since, executed } = activity;
        let is_busy = sequence > executed;
        Self {
            worker,
            command: command.filter(|_| is_busy).map(|command| command.to_string().chars().take(MAX_NAME).collect()),
            since_micros: micros(now.saturating_duration_since(since)),
            executed,
            queued: issued.saturating_sub(sequence),
            calls: calls.into_iter().map(|(of, flight)| CallReport::new(of, own, &flight, now)).collect(),
        }
    }
}

impl CallReport {
    fn new(of: Option<Grouping>, own: Grouping, flight: &Flight, now: Instant) -> Self {
        Self {
            is_world: of.is_none(),
            grouping: of.filter(|grouping| *grouping != own),
            is_transfer: flight.collective.operation.peer().is_some(),
            sequence: flight.sequence,
            call: flight.collective.to_string(),
            entered_micros: micros(now.saturating_duration_since(flight.entered)),
            took_micros: flight.took.map(micros),
            has_failed: matches!(flight.outcome, Outcome::Failed | Outcome::Broken),
        }
    }
}

/// Maximum length of the name of a command, in characters. Clients choose the names of functions.
const MAX_NAME: usize = 256;

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
