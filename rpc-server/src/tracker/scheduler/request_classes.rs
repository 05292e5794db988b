//! Waiting requests by what they ask for. Equal requests form a class, and classes are found by the
//! properties that they name, so a server that comes or goes is compared with few of them, however
//! many requests wait.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use rpc_core::VirtualDevice;
use rpc_transports::tracker::{DeviceOffer, ServerRequest};

use super::QueueOrder;
use super::types::Offer;

/// Id of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ClassId(u64);

/// What requests of one class ask for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Wants {
    key: String,
    count: u32,
    distinct: bool,
    labels: BTreeMap<String, String>,
    devices: Vec<DeviceOffer>,
    virtual_devices: Vec<VirtualDevice>,
}

/// Property by which a class is found. A server without it suits no request of the class.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Property {
    Label(String, String),
    DeviceKind(String),
    /// The requests name no property beside their key.
    None,
}

/// Waiting requests that ask for the same.
#[derive(Debug)]
pub(super) struct RequestClass {
    /// One of the requests. In priority, client and time limits others may differ.
    pub(super) request: Arc<ServerRequest>,
    /// Number of slots that could serve a request if they were free.
    pub(super) possible: u64,
    /// Time of the last decrease of this number, or of the first request.
    pub(super) decreased: Instant,
    /// Requests in the order in which they are served. Not empty.
    pub(super) members: BTreeSet<QueueOrder>,
}

/// Classes of the waiting requests; see the [module](self).
#[derive(Debug, Default)]
pub(super) struct RequestClasses {
    classes: HashMap<ClassId, RequestClass>,
    ids: HashMap<Wants, ClassId>,
    /// Classes by key. The empty key is for requests that accept any key.
    by_key: HashMap<String, BTreeSet<ClassId>>,
    /// Classes by key and one of the properties that they name.
    by_property: HashMap<(String, Property), BTreeSet<ClassId>>,
    next: u64,
}

impl RequestClasses {
    /// Adds a request to its class. `possible` is called if the class is new.
    pub(super) fn insert(
        &mut self,
        now: Instant,
        order: QueueOrder,
        request: &Arc<ServerRequest>,
        possible: impl FnOnce() -> u64,
    ) -> ClassId {
        let wants = Wants::of(request);
        let id = *self.ids.entry(wants).or_insert_with(|| {
            self.next += 1;
            ClassId(self.next)
        });
        let class = self.classes.entry(id).or_insert_with(|| RequestClass {
            request: request.clone(),
            possible: possible(),
            decreased: now,
            members: BTreeSet::new(),
        });
        if class.members.is_empty() {
            self.by_key.entry(request.key.clone()).or_default().insert(id);
            self.by_property.entry((request.key.clone(), Property::of(request))).or_default().insert(id);
        }
        class.members.insert(order);
        id
    }

    /// Removes a request, and its class with the last one.
    pub(super) fn remove(&mut self, id: ClassId, order: QueueOrder) {
        let Some(class) = self.classes.get_mut(&id) else { return };
        class.members.remove(&order);
        if !class.members.is_empty() {
            return;
        }
        let request = class.request.clone();
        self.classes.remove(&id);
        self.ids.remove(&Wants::of(&request));
        remove_from(&mut self.by_key, &request.key, id);
        remove_from(&mut self.by_property, &(request.key.clone(), Property::of(&request)), id);
    }

    /// Calls `change` with the classes whose requests a server with this offer may suit.
    pub(super) fn for_offer(&mut self, offer: &Offer, mut change: impl FnMut(&mut RequestClass)) {
        let labels = offer.labels.iter().map(|(name, value)| Property::Label(name.clone(), value.clone()));
        // Several offers may be of one kind.
        let kinds: BTreeSet<_> = offer.devices.iter().map(|device| &device.kind).collect();
        let kinds = kinds.into_iter().map(|kind| Property::DeviceKind(kind.clone()));
        for property in labels.chain(kinds).chain([Property::None]) {
            for key in ["", &offer.key] {
                for id in self.by_property.get(&(key.to_owned(), property.clone())).into_iter().flatten() {
                    if let Some(class) = self.classes.get_mut(id) {
                        change(class);
                    }
                }
            }
        }
    }

    pub(super) fn get(&self, id: ClassId) -> Option<&RequestClass> {
        self.classes.get(&id)
    }

    /// Returns the keys that waiting requests name. The empty one is for any key.
    pub(super) fn keys(&self) -> impl Iterator<Item = &str> {
        self.by_key.keys().map(String::as_str)
    }

    /// Returns true if a request for this key waits.
    pub(super) fn has_key(&self, key: &str) -> bool {
        self.by_key.contains_key(key)
    }

    /// Returns the classes of requests that name this key.
    pub(super) fn of_key(&self, key: &str) -> impl Iterator<Item = (ClassId, &RequestClass)> {
        self.by_key.get(key).into_iter().flatten().filter_map(|id| Some((*id, self.classes.get(id)?)))
    }

    /// Returns the number of requests, if all indexes agree.
    #[cfg(test)]
    pub(super) fn checked_len(&self) -> usize {
        let by_key: usize = self.by_key.values().map(BTreeSet::len).sum();
        let by_property: usize = self.by_property.values().map(BTreeSet::len).sum();
        assert_eq!([self.ids.len(), by_key, by_property], [self.classes.len(); 3]);
        self.classes.values().map(|class| class.members.len()).sum()
    }
}

impl RequestClass {
    /// Returns true if all servers together could serve a request if they were free.
    pub(super) fn is_possible(&self) -> bool {
        self.possible >= u64::from(self.request.count)
    }
}

impl Wants {
    fn of(request: &ServerRequest) -> Self {
        let ServerRequest { key, count, distinct, labels, devices, virtual_devices, .. } = request.clone();
        Self { key, count, distinct, labels, devices, virtual_devices }
    }
}

impl Property {
    /// Returns the property by which a request is found.
    fn of(request: &ServerRequest) -> Self {
        if let Some((name, value)) = request.labels.first_key_value() {
            return Self::Label(name.clone(), value.clone());
        }
        // Nothing is demanded of a kind of which no device is wanted.
        let device = request.devices.iter().find(|device| device.count > 0);
        device.map_or(Self::None, |device| Self::DeviceKind(device.kind.clone()))
    }
}

fn remove_from<K: std::hash::Hash + Eq>(sets: &mut HashMap<K, BTreeSet<ClassId>>, key: &K, id: ClassId) {
    if let Some(classes) = sets.get_mut(key) {
        classes.remove(&id);
        if classes.is_empty() {
            sets.remove(key);
        }
    }
}
