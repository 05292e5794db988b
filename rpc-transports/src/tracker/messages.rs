//! What is said to trackers, and what they answer. All of it travels packed, as maps by field
//! names: fields may be added, and readers skip those that they do not know.
//!
//! Times are lengths of time in milliseconds, so that no two clocks have to agree.

use std::collections::BTreeMap;
use std::time::Duration;

use rpc_core::{Device, DeviceDescription, DeviceType, Target, VirtualDevice};
use serde::{Deserialize, Serialize};

/// The names of a tracker's functions.
pub mod functions {
    /// `(Registration) -> (object, Registered)`. The object is the registration: it ends when the
    /// object is freed, and so with the session.
    pub const REGISTER: &str = "tracker.register";
    /// `(registration, ServerStatus) -> Renewed`. Renews the lease, and says who uses the server.
    pub const RENEW: &str = "tracker.renew";
    /// `(ServerRequest) -> object`. The object is the place in the queue: freeing it gives up
    /// waiting.
    pub const REQUEST: &str = "tracker.request";
    /// `(place in the queue) -> [Grant]`. Waits for the servers; asked again it says the same.
    pub const WAIT: &str = "tracker.wait";
    /// `(place in the queue, [Returned]) -> null`. Gives back servers that could not be used.
    pub const GIVE_BACK: &str = "tracker.give_back";
    /// `() -> Summary`.
    pub const SUMMARY: &str = "tracker.summary";
}

/// A kind of device that a server has, and how many of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeviceOffer {
    /// The kind, such as `cuda`.
    pub kind: String,
    /// How many there are.
    pub count: u32,
    /// What code for them is compiled for. Of a request it means nothing.
    #[serde(default)]
    pub target: Option<Target>,
    /// The memories that they have besides `global`. Of a request it means nothing.
    #[serde(default)]
    pub memory_scopes: Vec<String>,
}

impl DeviceOffer {
    /// So many devices of a kind, with nothing more known of them.
    pub fn new(kind: impl Into<String>, count: u32) -> Self {
        Self { kind: kind.into(), count, target: None, memory_scopes: Vec::new() }
    }

    /// What a server has, of devices that come in the order of their kinds and numbers.
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

    /// Whether one of a server's devices satisfies a constraint. Those of a kind are numbered in
    /// their order.
    pub fn any_satisfies(offers: &[Self], wanted: &VirtualDevice) -> bool {
        let mut numbers: BTreeMap<&str, u64> = BTreeMap::new();
        offers.iter().any(|offer| {
            let first = numbers.entry(&offer.kind).or_default();
            let range = *first..*first + u64::from(offer.count);
            *first = range.end;
            // All of them are alike but for their numbers.
            let number = wanted.virtual_device_id().map_or(range.start, |id| u64::try_from(id).unwrap_or(u64::MAX));
            let (true, Ok(index), Ok(kind)) = (range.contains(&number), i32::try_from(number), offer.kind.parse())
            else {
                return false;
            };
            wanted.is_satisfied_by(Device::new(kind, index), offer.target.as_ref(), &offer.memory_scopes)
        })
    }
}

/// What a server is, as it tells a tracker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Registration {
    /// What people call the server, such as the name of its machine.
    pub name: String,
    /// What clients ask for.
    pub key: String,
    /// What else clients can ask for, such as `arch` = `arm64`.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// The devices.
    #[serde(default)]
    pub devices: Vec<DeviceOffer>,
    /// How many clients it serves at a time.
    pub capacity: u32,
    /// Where clients reach it: addresses to go through, and its own last. Where its own has an
    /// unspecified host, such as `tcp://0.0.0.0:9090`, the tracker puts the IP address that the
    /// server comes from.
    pub address: Vec<String>,
    /// What tickets for it are to be made with: another one for each registration.
    #[serde(with = "ticket_key")]
    pub ticket_key: [u8; 32],
    /// Who uses it now.
    pub status: ServerStatus,
}

/// Who uses a server. All of it each time, so that one that is lost does no harm.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerStatus {
    /// The server's clock. Its beginning is the server's own affair; tickets expire by it.
    pub now_ms: u64,
    /// Its sessions, those without tickets too.
    pub uses: Vec<Use>,
    /// Tickets of this registration that were used, and whose sessions have ended. Said until it
    /// has been heard.
    #[serde(default)]
    pub spent: Vec<u64>,
}

/// One session of a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Use {
    /// The server's number for it.
    pub id: u64,
    /// The ticket's number, if it was made for this registration.
    #[serde(default)]
    pub serial: Option<u64>,
    /// Whether the client came without a ticket.
    #[serde(default)]
    pub direct: bool,
    /// The client, as the server knows it.
    pub client: String,
    /// For how long it has been there.
    pub for_ms: u64,
}

/// The answer to a [`Registration`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registered {
    /// How long the registration lasts without being renewed.
    pub lease_ms: u64,
    /// Where clients will be sent.
    pub address: Vec<String>,
}

/// The answer to a renewal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Renewed {
    /// Whether the tracker has found the server at its address.
    pub reach: Reach,
}

/// Whether a tracker finds a server at its address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reach {
    /// It has not tried yet, or cannot.
    #[default]
    Untried,
    /// It does.
    Reached,
    /// It does not. The server is given out last.
    Unreachable {
        /// Why.
        why: String,
    },
}

/// What a client asks for: [`count`](Self::count) places at servers that have all that is named.
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
    /// The key of the servers; empty for any.
    #[serde(default)]
    pub key: String,
    /// How many places, all at once or none.
    pub count: u32,
    /// Whether each place has to be at another server.
    #[serde(default)]
    pub distinct: bool,
    /// Labels that the servers must have.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Devices that the servers must have, at least.
    #[serde(default)]
    pub devices: Vec<DeviceOffer>,
    /// Each of these has to be satisfied by a device of the server; one device may satisfy several,
    /// so that for two devices of a kind there is [`device`](Self::device).
    #[serde(default)]
    pub virtual_devices: Vec<VirtualDevice>,
    /// Those with a higher one come first. 0.
    #[serde(default)]
    pub priority: i32,
    /// Who asks, for people; the user and machine of this process.
    #[serde(default)]
    pub client: String,
    /// How long to wait; without it as long as it takes.
    #[serde(default)]
    pub timeout_ms: Option<u64>,
}

impl ServerRequest {
    /// One server with this key.
    pub fn new(key: &str) -> Self {
        Self {
            key: key.to_owned(),
            count: 1,
            distinct: false,
            labels: BTreeMap::new(),
            devices: Vec::new(),
            virtual_devices: Vec::new(),
            priority: 0,
            client: this_user(),
            timeout_ms: None,
        }
    }

    /// One server, whatever its key.
    pub fn any() -> Self {
        Self::new("")
    }

    /// So many places together: all of them or none. A server with room for several clients may
    /// give several.
    #[must_use]
    pub fn count(mut self, count: u32) -> Self {
        self.count = count;
        self
    }

    /// Each place at another server.
    #[must_use]
    pub fn distinct(mut self) -> Self {
        self.distinct = true;
        self
    }

    /// Only servers with this label.
    #[must_use]
    pub fn label(mut self, name: &str, value: &str) -> Self {
        self.labels.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Only servers with `count` devices of this kind, or more.
    #[must_use]
    pub fn device(mut self, kind: DeviceType, count: u32) -> Self {
        self.devices.push(DeviceOffer::new(kind.to_string(), count));
        self
    }

    /// Only servers with a device that satisfies this, besides all others that are asked for.
    #[must_use]
    pub fn virtual_device(mut self, wanted: impl Into<VirtualDevice>) -> Self {
        self.virtual_devices.push(wanted.into());
        self
    }

    /// Before all that wait with a lower one, whenever they came. 0.
    #[must_use]
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// How long to wait for the servers, and to try to reach them. As long as it takes.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout_ms = Some(u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX));
        self
    }

    /// What the tracker shows people who want to know who has a server.
    #[must_use]
    pub fn client(mut self, client: &str) -> Self {
        client.clone_into(&mut self.client);
        self
    }
}

fn this_user() -> String {
    let user = std::env::var("USER").unwrap_or_else(|_| "somebody".to_owned());
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    format!("{user}@{host}")
}

/// A place at a server, with what is needed to take it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// The number of the ticket, by which it is [given back](Returned).
    pub serial: u64,
    /// For the server. See [`Connector::ticket`](crate::Connector::ticket).
    pub ticket: String,
    /// For how long the ticket is good.
    pub good_for_ms: u64,
    /// What people call the server.
    pub server: String,
    /// Its key.
    pub key: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its devices.
    pub devices: Vec<DeviceOffer>,
    /// Where it is: addresses to go through, and its own last.
    pub address: Vec<String>,
}

/// A place that was granted and not taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Returned {
    /// Of its [`Grant`].
    pub serial: u64,
    /// Why, for people.
    pub why: String,
}

/// What a tracker knows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// For how long it has been running.
    pub uptime_ms: u64,
    /// How long registrations last without being renewed.
    pub lease_ms: u64,
    /// The servers, by key and name.
    pub servers: Vec<ServerSummary>,
    /// Who waits, the first one first.
    pub queue: Vec<QueueEntry>,
    /// What was lost or refused lately, the last one first.
    pub losses: Vec<Loss>,
    /// The last hour, minute by minute, the oldest first; the last entry is the minute that runs.
    pub history: Vec<Sample>,
}

/// One server of a [`Summary`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServerSummary {
    /// What people call it.
    pub name: String,
    /// What clients ask for.
    pub key: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its devices.
    pub devices: Vec<DeviceOffer>,
    /// How many clients it serves at a time.
    pub capacity: u32,
    /// How many more it would take now.
    pub free: u32,
    /// Where clients are sent.
    pub address: Vec<String>,
    /// Where it came from to register.
    pub peer: String,
    /// Whether the tracker finds it at its address.
    pub reach: Reach,
    /// For how long it has been registered.
    pub registered_for_ms: u64,
    /// How long ago it was last heard of.
    pub heard_ago_ms: u64,
    /// Who has it.
    pub holders: Vec<Holder>,
}

/// Who has a place at a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The client: what it says of itself and where it comes from.
    pub client: String,
    /// For how long.
    pub for_ms: u64,
    /// How.
    pub state: HolderState,
}

/// How somebody has a place at a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum HolderState {
    /// It has a ticket, and has not used it yet.
    Granted,
    /// It has a session.
    InUse,
    /// It has a session, and came without a ticket.
    Direct,
}

/// A request that waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueEntry {
    /// The client: what it says of itself and where it comes from.
    pub client: String,
    /// The key that it asks for; empty for any.
    pub key: String,
    /// How many places.
    pub count: u32,
    /// The labels that it asks for.
    pub labels: BTreeMap<String, String>,
    /// The devices that it asks for.
    pub devices: Vec<DeviceOffer>,
    /// The constraints that a device has to satisfy.
    #[serde(default)]
    pub virtual_devices: Vec<VirtualDevice>,
    /// Its priority.
    pub priority: i32,
    /// For how long it has been waiting.
    pub for_ms: u64,
    /// How many places there are that it could use, free or not. Fewer than `count`: it waits for
    /// servers to register.
    pub possible: u64,
}

/// A server that there is no more, or that was not taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loss {
    /// What people call it.
    pub name: String,
    /// Its key.
    pub key: String,
    /// The address that it told.
    pub address: Vec<String>,
    /// Where it came from to register.
    pub peer: String,
    /// How long ago.
    pub ago_ms: u64,
    /// Why.
    pub reason: LossReason,
}

/// Why there is a server no more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LossReason {
    /// It left, or its session with the tracker ended.
    Gone,
    /// It was not heard of for the length of its lease.
    LeaseExpired,
    /// It was not taken.
    Refused {
        /// Why.
        why: String,
    },
}

/// How much of the pool was used in one minute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// How long ago the minute began.
    pub ago_ms: u64,
    /// Places at the end of the minute.
    pub capacity: u32,
    /// The most places that were taken at one time.
    pub busy: u32,
    /// The most requests that waited at one time.
    pub waiting: u32,
    /// Places granted.
    pub granted: u32,
}

/// A key is bytes on the wire.
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
