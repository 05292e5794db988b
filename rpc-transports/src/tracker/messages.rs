//! Messages to trackers, and their answers. They are packed as maps by field names: fields may be
//! added, and readers skip unknown ones. Any other change of names or meanings raises the version
//! of [`MESSAGES`], and `golden.txt` holds the bytes.
//!
//! Times are durations in milliseconds, so clocks need not agree.

use std::collections::BTreeMap;
use std::time::Duration;

use rpc_core::{Device, DeviceDescription, DeviceType, Target, VirtualDevice};
use serde::{Deserialize, Serialize};

use crate::message_family::{MessageFamily, first_version};

/// Messages between trackers, servers and clients. [`Registration`], [`Registered`],
/// [`ServerRequest`] and [`Summary`] have the version of their sender; the others belong to an
/// exchange that one of these has begun.
pub const MESSAGES: MessageFamily = MessageFamily::new("the messages of trackers", 2);

/// Names of a tracker's functions.
pub mod functions {
    /// `(Registration) -> (object, Registered)`. The object is the registration: it ends when the
    /// object is freed, at the latest with the session.
    pub const REGISTER: &str = "tracker.register";
    /// `(registration, ServerStatus) -> Renewed`. Renews the lease, and reports the server's
    /// sessions.
    pub const RENEW: &str = "tracker.renew";
    /// `(ServerRequest) -> object`. The object is the request's entry in the queue: freeing it
    /// withdraws the request.
    pub const REQUEST: &str = "tracker.request";
    /// `(queue entry) -> [Grant]`. Waits for the servers. Further calls return the same answer.
    pub const WAIT: &str = "tracker.wait";
    /// `(queue entry, [Returned]) -> null`. Gives back servers that could not be used.
    pub const GIVE_BACK: &str = "tracker.give_back";
    /// `() -> Summary`.
    pub const SUMMARY: &str = "tracker.summary";
    /// `(Kick) -> null`. Has a server end the session of a client.
    pub const KICK: &str = "tracker.kick";
    /// `(Drain) -> null`. Gives a server to no more clients, or to clients again.
    pub const DRAIN: &str = "tracker.drain";
}

/// Returns true for a number that is left out of a message.
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Devices of one kind that a server offers.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeviceOffer {
    /// Kind, such as `cuda`.
    pub kind: String,
    /// Number of devices.
    pub count: u32,
    /// Target for which code is compiled. Ignored in a request.
    #[serde(default)]
    pub target: Option<Target>,
    /// Memory scopes besides `global`. Ignored in a request.
    #[serde(default)]
    pub memory_scopes: Vec<String>,
}

impl DeviceOffer {
    /// Returns an offer of `count` devices of a kind, without further properties.
    pub fn new(kind: impl Into<String>, count: u32) -> Self {
        Self { kind: kind.into(), count, target: None, memory_scopes: Vec::new() }
    }

    /// Returns the offers of a server with these devices, which come in the order of their kinds
    /// and numbers.
    pub fn of(devices: impl IntoIterator<Item = DeviceDescription>) -> Vec<Self> {
        let mut offers: Vec<Self> = Vec::new();
        for DeviceDescription { device, target, memory_scopes } in devices {
            let offer = Self { kind: device.kind.to_string(), count: 1, target: Some(target), memory_scopes };
            match offers.last_mut() {
                Some(last) if *last == (Self { count: last.count, ..offer.clone() }) => last.count += 1,
                _ => offers.push(offer),
            }
        }
        offers
    }

    /// Returns true if one of a server's devices satisfies a constraint. Devices of a kind are
    /// numbered in the order of the offers.
    pub fn any_satisfies(offers: &[Self], wanted: &VirtualDevice) -> bool {
        let mut numbers: BTreeMap<&str, u64> = BTreeMap::new();
        offers.iter().any(|offer| {
            let first = numbers.entry(&offer.kind).or_default();
            let range = *first..*first + u64::from(offer.count);
            *first = range.end;
            // The devices of an offer differ only in their numbers.
            let number = wanted.virtual_device_id().map_or(range.start, |id| u64::try_from(id).unwrap_or(u64::MAX));
            let (true, Ok(index), Ok(kind)) = (range.contains(&number), i32::try_from(number), offer.kind.parse())
            else {
                return false;
            };
            wanted.is_satisfied_by(Device::new(kind, index), offer.target.as_ref(), &offer.memory_scopes)
        })
    }
}

/// Registration of a server at a tracker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    /// Version of the sender: that of [`MESSAGES`]. Read before the other fields.
    #[serde(default = "first_version")]
    pub version: u32,
    /// Name of the server for people, for example that of its machine.
    pub name: String,
    /// Key that clients ask for.
    pub key: String,
    /// Further properties that clients can ask for, such as `arch` = `arm64`.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Devices of the server.
    #[serde(default)]
    pub devices: Vec<DeviceOffer>,
    /// Number of clients that the server serves at one time.
    pub capacity: u32,
    /// Addresses by which clients reach the server: those to go through, and its own last. If its
    /// own has an unspecified host, such as `tcp://0.0.0.0:9090`, the tracker replaces the host by
    /// the IP address that the server comes from.
    pub address: Vec<String>,
    /// Key with which its tickets are made. Each registration has another one.
    #[serde(with = "ticket_key")]
    pub ticket_key: [u8; 32],
    /// Current sessions of the server.
    pub status: ServerStatus,
}

/// Sessions of a server. Each report is complete, so a lost one does no harm.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerStatus {
    /// Time by the server's clock, by which tickets expire. The server chooses the clock's
    /// beginning.
    pub now_ms: u64,
    /// Sessions, including those without tickets.
    pub uses: Vec<Use>,
    /// Used tickets of this registration whose sessions have ended. Repeated until the tracker has
    /// acknowledged them.
    #[serde(default)]
    pub spent: Vec<u64>,
    /// True in the last report of a server that stops in good order.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaving: bool,
    /// Facts about the server for people. `None` if they are those of the last report that had any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub details: Option<ServerDetails>,
}

/// Facts about a server that trackers show to people.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerDetails {
    /// Version of the server's program.
    pub version: String,
    /// Time since the server has started.
    pub uptime_ms: u64,
    /// Number of open sessions, those of other trackers included.
    pub sessions: u64,
    /// Bytes of device memory that sessions hold.
    pub memory_bytes: u64,
    /// Devices, those of the host first; at most [`MAX_DEVICES`](Self::MAX_DEVICES).
    #[serde(default)]
    pub devices: Vec<DeviceDetails>,
    /// Last errors of the server, the latest first; at most [`MAX_ERRORS`](Self::MAX_ERRORS).
    #[serde(default)]
    pub errors: Vec<RecentError>,
}

impl ServerDetails {
    /// Maximum number of devices.
    pub const MAX_DEVICES: usize = 64;

    /// Maximum number of errors.
    pub const MAX_ERRORS: usize = 8;
}

/// A device of a server, as its driver and the leases of the server describe it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceDetails {
    /// Device, such as `cuda:0`.
    pub device: String,
    /// Vendor's name of the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Size of the memory in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_memory: Option<u64>,
    /// Memory in bytes that can be allocated, if the device tells it without being used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub available_memory: Option<u64>,
    /// Part of the time for which the device was busy lately, in percent, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub utilization_percent: Option<u8>,
    /// Clock of the processors of the device in MHz, if it tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock_mhz: Option<u32>,
    /// Lease on the device, if a session holds one or waits for one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<DeviceLease>,
}

/// Lease of a session on a device, and the requests that wait for it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceLease {
    /// Time for which the session has held the device.
    pub held_ms: u64,
    /// Time that is left until the server ends the session.
    pub left_ms: u64,
    /// Number of requests that wait for the device.
    pub waiting: u64,
    /// Client that holds the device, if the server tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<LeaseHolder>,
    /// Number of other sessions that still use the device while nobody holds it: the first request
    /// waits for them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub used_by: u64,
    /// The first requests that wait; at most [`MAX_NEXT`](Self::MAX_NEXT).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub next: Vec<LeaseWaiter>,
}

impl DeviceLease {
    /// Maximum number of waiting requests that are named.
    pub const MAX_NEXT: usize = 8;
}

/// Client that holds a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseHolder {
    /// Identity of the client, with the kind of its proof.
    pub identity: String,
    /// Number of its session at the server.
    pub session: u64,
}

/// Request that waits for a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseWaiter {
    /// Client that has made the request.
    pub client: LeaseHolder,
    /// Priority of the request.
    pub priority: i32,
    /// Time for which it has waited.
    pub waited_ms: u64,
}

/// An error of a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecentError {
    /// Time since the error.
    pub ago_ms: u64,
    /// Description of the error.
    pub text: String,
}

/// One session of a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Use {
    /// Server's number of the session.
    pub id: u64,
    /// Ticket's number, if the ticket was made for this registration.
    #[serde(default)]
    pub serial: Option<u64>,
    /// True if the client came without a ticket.
    #[serde(default)]
    pub direct: bool,
    /// Client, as the server knows it.
    pub client: String,
    /// Age of the session.
    pub for_ms: u64,
    /// Time since the client was heard, if that is longer than a client that lives is silent; else
    /// 0. Its process may have been stopped.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub silent_ms: u64,
}

/// The answer to a [`Registration`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registered {
    /// Version of the sender: that of [`MESSAGES`]. Read before the other fields.
    #[serde(default = "first_version")]
    pub version: u32,
    /// Time that the registration lasts without being renewed.
    pub lease_ms: u64,
    /// Addresses that clients will get.
    pub address: Vec<String>,
}

/// The answer to a renewal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Renewed {
    /// Result of the tracker's attempts to reach the server at its address.
    pub reach: Reach,
    /// Sessions that the server is asked to end: [`Use::id`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub end: Vec<u64>,
}

/// Reachability of a server at its address, as the tracker knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reach {
    /// The tracker has not tried yet, or cannot.
    #[default]
    Untried,
    /// The tracker reaches the server.
    Reached,
    /// The tracker does not reach the server, and grants it last.
    Unreachable {
        /// Reason.
        why: String,
    },
}

/// Request of a client: [`count`](Self::count) slots at servers that have all the named properties.
///
/// ```
/// use std::time::Duration;
///
/// use rpc_core::{DeviceType, VirtualDevice};
/// use rpc_transports::tracker::ServerRequest;
///
/// let four_together = ServerRequest::new("h100").count(4).label("rack", "7");
/// let four_together = four_together.timeout(Duration::from_secs(60));
/// let any_with_two_gpus = ServerRequest::any().device(DeviceType::CUDA, 2).priority(1);
/// let hopper: VirtualDevice = "cuda,target=cuda -arch=sm_90".parse()?;
/// let any_with_a_hopper = ServerRequest::any().virtual_device(hopper);
/// # let _ = (four_together, any_with_two_gpus, any_with_a_hopper);
/// # Ok::<(), rpc_core::RpcError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerRequest {
    /// Version of the sender: that of [`MESSAGES`]. Read before the other fields.
    #[serde(default = "first_version")]
    pub version: u32,
    /// Key of the servers; empty for any.
    #[serde(default)]
    pub key: String,
    /// Number of slots, which are granted all at once.
    pub count: u32,
    /// True if each slot has to be at another server.
    #[serde(default)]
    pub distinct: bool,
    /// Labels that the servers must have.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Devices that the servers must have, at least.
    #[serde(default)]
    pub devices: Vec<DeviceOffer>,
    /// Constraints, each of which a device of the server has to satisfy. One device may satisfy
    /// several: to ask for two devices of a kind, use [`device`](Self::device).
    #[serde(default)]
    pub virtual_devices: Vec<VirtualDevice>,
    /// Priority: requests with a higher one come first. Default 0.
    #[serde(default)]
    pub priority: i32,
    /// Name of the client for people. Default: the user and machine of this process.
    #[serde(default)]
    pub client: String,
    /// Longest time to wait. `None` waits without limit.
    #[serde(default)]
    pub timeout_ms: Option<u64>,
    /// Longest time to wait while all registered servers together could not serve the request, even
    /// if they were free. Only for requests without `timeout_ms`. `None` waits without limit.
    #[serde(default)]
    pub unservable_timeout_ms: Option<u64>,
}

/// Default of [`ServerRequest::unservable_timeout_ms`]: servers that start at the same time, or
/// register again after a restart of the tracker, come much sooner.
const UNSERVABLE_MS: u64 = 60_000;

impl ServerRequest {
    /// Requests one server with this key.
    pub fn new(key: &str) -> Self {
        Self {
            version: MESSAGES.version(),
            key: key.to_owned(),
            count: 1,
            distinct: false,
            labels: BTreeMap::new(),
            devices: Vec::new(),
            virtual_devices: Vec::new(),
            priority: 0,
            client: this_user(),
            timeout_ms: None,
            unservable_timeout_ms: Some(UNSERVABLE_MS),
        }
    }

    /// Requests one server with any key.
    pub fn any() -> Self {
        Self::new("")
    }

    /// Sets the number of slots, which are granted all at once. A server with room for several
    /// clients may give several.
    #[must_use]
    pub fn count(mut self, count: u32) -> Self {
        self.count = count;
        self
    }

    /// Requires each slot to be at another server.
    #[must_use]
    pub fn distinct(mut self) -> Self {
        self.distinct = true;
        self
    }

    /// Requires this label.
    #[must_use]
    pub fn label(mut self, name: &str, value: &str) -> Self {
        self.labels.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Requires at least `count` devices of this kind.
    #[must_use]
    pub fn device(mut self, kind: DeviceType, count: u32) -> Self {
        self.devices.push(DeviceOffer::new(kind.to_string(), count));
        self
    }

    /// Requires a device that satisfies this constraint, besides all others.
    #[must_use]
    pub fn virtual_device(mut self, wanted: impl Into<VirtualDevice>) -> Self {
        self.virtual_devices.push(wanted.into());
        self
    }

    /// Sets the priority: the request comes before all waiting requests with a lower one.
    /// Default 0.
    #[must_use]
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// Limits the time to wait for the servers and to reach them. Default: no limit while servers
    /// that could serve the request are registered; see
    /// [`unservable_timeout`](Self::unservable_timeout).
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout_ms = Some(u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX));
        self
    }

    /// Limits the time to wait while all registered servers together could not serve the request,
    /// even if they were free: none has the key, or fewer are there than were asked for. The error
    /// says what was asked for, and what is registered. Default: 60 s. A request with a
    /// [`timeout`](Self::timeout) waits for that instead.
    #[must_use]
    pub fn unservable_timeout(mut self, timeout: Duration) -> Self {
        self.unservable_timeout_ms = Some(u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX));
        self
    }

    /// Sets the name that the tracker shows for this client.
    #[must_use]
    pub fn client(mut self, client: &str) -> Self {
        client.clone_into(&mut self.client);
        self
    }
}

/// Returns the name of the user and the machine. Without a name in the environment, as in many
/// containers, the user is called by number.
fn this_user() -> String {
    let named = ["USER", "LOGNAME"].into_iter().filter_map(|name| std::env::var(name).ok());
    let user = named.into_iter().find(|name| !name.is_empty());
    let user = user.unwrap_or_else(|| format!("uid{}", rustix::process::getuid().as_raw()));
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    format!("{user}@{host}")
}

/// Granted slot at a server, with the facts for opening its session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// Number of the ticket, by which the slot is [given back](Returned).
    pub serial: u64,
    /// Ticket for the server. See [`Connector::ticket`](crate::Connector::ticket).
    pub ticket: String,
    /// Time for which the ticket is valid.
    pub good_for_ms: u64,
    /// Name of the server for people.
    pub server: String,
    /// Key of the server.
    pub key: String,
    /// Labels of the server.
    pub labels: BTreeMap<String, String>,
    /// Devices of the server.
    pub devices: Vec<DeviceOffer>,
    /// Addresses by which the server is reached: those to go through, and its own last.
    pub address: Vec<String>,
}

/// Granted slot that was not used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Returned {
    /// Number of its ticket: [`Grant::serial`].
    pub serial: u64,
    /// Reason, for people.
    pub why: String,
}

/// Session that a server is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kick {
    /// Tracker's number of the registration: [`ServerSummary::id`].
    pub server: u64,
    /// Server's number of the session: [`Holder::session`].
    pub session: u64,
}

/// Server that is to be given to no more clients, or to clients again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drain {
    /// Tracker's number of the registration: [`ServerSummary::id`].
    pub server: u64,
    /// True to give it to clients again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub undo: bool,
}

/// State of a tracker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Version of the sender: that of [`MESSAGES`]. Read before the other fields.
    #[serde(default = "first_version")]
    pub version: u32,
    /// Time since the tracker has started.
    pub uptime_ms: u64,
    /// Time that registrations last without being renewed.
    pub lease_ms: u64,
    /// Servers, by key and name.
    pub servers: Vec<ServerSummary>,
    /// Waiting requests, the first one first.
    pub queue: Vec<QueueEntry>,
    /// Recent losses and refusals, the latest first.
    pub losses: Vec<Loss>,
    /// Last hour, minute by minute, the oldest first. The last entry is the current minute.
    pub history: Vec<Sample>,
    /// Recent events, the latest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<PoolEvent>,
}

/// One server of a [`Summary`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServerSummary {
    /// Tracker's number of the registration.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub id: u64,
    /// Name of the server for people.
    pub name: String,
    /// Key that clients ask for.
    pub key: String,
    /// Labels of the server.
    pub labels: BTreeMap<String, String>,
    /// Devices of the server.
    pub devices: Vec<DeviceOffer>,
    /// Number of clients that the server serves at one time.
    pub capacity: u32,
    /// Number of further clients that it would take now.
    pub free: u32,
    /// Addresses that clients get.
    pub address: Vec<String>,
    /// Address from which the server has registered.
    pub peer: String,
    /// Reachability of the server at its address, as the tracker knows it.
    pub reach: Reach,
    /// Time since the registration.
    pub registered_for_ms: u64,
    /// Time since the last report.
    pub heard_ago_ms: u64,
    /// Clients that hold slots.
    pub holders: Vec<Holder>,
    /// Draining of the server, while it is given to no more clients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draining: Option<Draining>,
    /// Facts about the server for people, if it has reported any. Times are as of this summary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub details: Option<ServerDetails>,
}

/// Draining of a server: its sessions go on, and no client gets it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Draining {
    /// Time for which the server has been draining.
    pub for_ms: u64,
    /// Client that has asked for it, as the tracker knows it.
    pub by: String,
}

/// Client that holds a slot at a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Client: the name that it gives, and the address that it comes from.
    pub client: String,
    /// Time for which the client has held the slot.
    pub for_ms: u64,
    /// State of the slot.
    pub state: HolderState,
    /// Server's number of the client's session, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<u64>,
    /// Time for which the client has been silent: [`Use::silent_ms`].
    #[serde(default, skip_serializing_if = "is_zero")]
    pub silent_ms: u64,
}

/// State of a slot that a client holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum HolderState {
    /// The client has a ticket, and has not used it yet.
    Granted,
    /// The client has a session.
    InUse,
    /// The client has a session, and came without a ticket.
    Direct,
}

/// Waiting request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueEntry {
    /// Client: the name that it gives, and the address that it comes from.
    pub client: String,
    /// Requested key; empty for any.
    pub key: String,
    /// Number of requested slots.
    pub count: u32,
    /// True if each slot has to be at another server.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub distinct: bool,
    /// Requested labels.
    pub labels: BTreeMap<String, String>,
    /// Requested devices.
    pub devices: Vec<DeviceOffer>,
    /// Constraints that a device has to satisfy.
    #[serde(default)]
    pub virtual_devices: Vec<VirtualDevice>,
    /// Priority of the request.
    pub priority: i32,
    /// Time for which the request has been waiting.
    pub for_ms: u64,
    /// Number of slots that the request could use, free or not. If there are fewer than `count`, it
    /// waits for servers to register.
    pub possible: u64,
}

/// Server that was lost, or whose registration was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loss {
    /// Name of the server for people.
    pub name: String,
    /// Key of the server.
    pub key: String,
    /// Address that the server advertised.
    pub address: Vec<String>,
    /// Address from which the server has registered.
    pub peer: String,
    /// Time since the loss.
    pub ago_ms: u64,
    /// Reason.
    pub reason: LossReason,
    /// True if the server has said that it stops, so that nothing was lost.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub orderly: bool,
}

/// Reason why a server was lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LossReason {
    /// The server left, or its session with the tracker ended.
    Gone,
    /// No report came for the length of the lease.
    LeaseExpired,
    /// The tracker refused the registration.
    Refused {
        /// Reason.
        why: String,
    },
}

/// Event of a pool: a change of one server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolEvent {
    /// Time since the event.
    pub ago_ms: u64,
    /// Kind of the event.
    pub kind: PoolEventKind,
    /// Key of the server.
    pub key: String,
    /// Name of the server for people.
    pub name: String,
    /// Reason, or the client that has caused the event; empty if there is none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why: String,
}

/// Kind of a [`PoolEvent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PoolEventKind {
    /// The server has registered.
    Registered,
    /// The registration was refused.
    Refused,
    /// The server has stopped in good order.
    Stopped,
    /// The server was lost.
    Lost,
    /// The tracker does not reach the server at its address.
    Unreachable,
    /// A client has had the session of another one ended.
    Kicked,
}

/// Usage of the pool in one minute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Time since the minute began.
    pub ago_ms: u64,
    /// Number of slots at the end of the minute.
    pub capacity: u32,
    /// Largest number of slots in use at one time.
    pub busy: u32,
    /// Largest number of requests that waited at one time.
    pub waiting: u32,
    /// Number of slots granted.
    pub granted: u32,
    /// Time that the requests for these slots have waited, summed over the slots.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub waited_ms: u64,
}

/// Serialization of a key as bytes.
mod ticket_key {
    use serde::de::Error;
    use serde::{Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(key: &[u8; 32], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(key)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<[u8; 32], D::Error> {
        struct Key;

        impl<'de> serde::de::Visitor<'de> for Key {
            type Value = [u8; 32];

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("32 bytes")
            }

            fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Self::Value, E> {
                bytes.try_into().map_err(|_| E::invalid_length(bytes.len(), &self))
            }
        }

        deserializer.deserialize_bytes(Key)
    }
}

#[cfg(test)]
#[path = "golden.rs"]
mod golden;
