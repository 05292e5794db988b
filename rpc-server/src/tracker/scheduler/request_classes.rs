//! Waiting requests by what they ask for. Requests for the same properties form a class, whatever
//! their numbers of slots, and classes are found by the properties that they name, so a server that
//! comes or goes is compared with few of them, however many requests wait.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Instant;

use rpc_core::{DeviceType, VirtualDevice};
use rpc_transports::tracker::ServerRequest;

use super::QueueOrder;
use super::types::Offer;

/// Id of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ClassId(u64);

/// Demands that the requests of one class share: all but the number of slots. In one form, so that
/// requests that differ only in how they say it share a class.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Wants {
    key: String,
    distinct: bool,
    labels: BTreeMap<String, String>,
    /// Number of devices by kind. Not zero.
    devices: BTreeMap<String, u32>,
    virtual_devices: BTreeSet<VirtualDevice>,
}

/// Property by which a class is found. A server without it suits no request of the class.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Property {
    Label(String, String),
    DeviceKind(String),
    /// Type of a virtual device. A kind of devices may have several names.
    DeviceType(DeviceType),
    /// The requests name no property beside their key.
    None,
}

/// Waiting requests that ask for the same properties.
#[derive(Debug)]
pub(super) struct RequestClass {
    /// One of the requests. In the number of slots, priority, client and time limits others may
    /// differ.
    pub(super) request: Arc<ServerRequest>,
    /// Number of slots that could serve a request if they were free.
    pub(super) possible: u64,
    /// Requests by the number of slots that they ask for. Not empty.
    members: BTreeMap<u32, Members>,
    /// Property by which the class is found.
    found_by: Property,
}

/// Requests of a class for one number of slots. All of them are possible, or none is.
#[derive(Debug)]
pub(super) struct Members {
    /// Requests in the order in which they are served. Not empty.
    orders: BTreeSet<QueueOrder>,
    /// Time since which all servers together could not serve a request, even if they were free.
    /// `None` if they could.
    pub(super) impossible_since: Option<Instant>,
    /// Possible requests with a limit on the time for which they are impossible. They have no
    /// timer, and need one once they are impossible.
    pub(super) unobserved: BTreeSet<QueueOrder>,
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
        let class = self.classes.entry(id).or_insert_with(|| {
            let found_by = rarest(&self.by_property, request);
            self.by_key.entry(request.key.clone()).or_default().insert(id);
            self.by_property.entry((request.key.clone(), found_by.clone())).or_default().insert(id);
            RequestClass { request: request.clone(), possible: possible(), members: BTreeMap::new(), found_by }
        });
        let impossible_since = (class.possible < u64::from(request.count)).then_some(now);
        let members = class.members.entry(request.count).or_insert_with(|| Members {
            orders: BTreeSet::new(),
            impossible_since,
            unobserved: BTreeSet::new(),
        });
        members.orders.insert(order);
        id
    }

    /// Removes a request for `count` slots, and its class with the last one.
    pub(super) fn remove(&mut self, id: ClassId, count: u32, order: QueueOrder) {
        let Some(class) = self.classes.get_mut(&id) else { return };
        if let Some(members) = class.members.get_mut(&count) {
            members.orders.remove(&order);
            members.unobserved.remove(&order);
            if members.orders.is_empty() {
                class.members.remove(&count);
            }
        }
        if !class.members.is_empty() {
            return;
        }
        if let Some(RequestClass { request, found_by, .. }) = self.classes.remove(&id) {
            self.ids.remove(&Wants::of(&request));
            remove_from(&mut self.by_key, &request.key, id);
            remove_from(&mut self.by_property, &(request.key.clone(), found_by), id);
        }
    }

    /// Calls `change` with the classes whose requests a server with this offer may suit.
    pub(super) fn for_offer(&mut self, offer: &Offer, mut change: impl FnMut(&mut RequestClass)) {
        let labels = offer.labels.iter().map(|(name, value)| Property::Label(name.clone(), value.clone()));
        // Several offers may be of one kind.
        let kinds: BTreeSet<_> = offer.devices.iter().map(|device| &device.kind).collect();
        let types: BTreeSet<DeviceType> = kinds.iter().filter_map(|kind| kind.parse().ok()).collect();
        let types = types.into_iter().map(Property::DeviceType);
        let kinds = kinds.into_iter().map(|kind| Property::DeviceKind(kind.clone()));
        for property in labels.chain(kinds).chain(types).chain([Property::None]) {
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

    pub(super) fn get_mut(&mut self, id: ClassId) -> Option<&mut RequestClass> {
        self.classes.get_mut(&id)
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
        let members = || self.classes.values().flat_map(|class| class.members.values());
        assert!(members().all(|members| members.unobserved.is_subset(&members.orders)));
        members().map(|members| members.orders.len()).sum()
    }
}

impl RequestClass {
    /// Changes the number of possible slots. Adds the requests to `to_observe` that become
    /// impossible by that, and need a timer.
    pub(super) fn change_possible(
        &mut self,
        now: Instant,
        change: impl FnOnce(&mut u64),
        to_observe: &mut Vec<QueueOrder>,
    ) {
        let before = self.possible;
        change(&mut self.possible);
        let limits = [before, self.possible].map(|slots| u32::try_from(slots).unwrap_or(u32::MAX));
        let [low, high] = [limits[0].min(limits[1]), limits[0].max(limits[1])];
        let is_less = self.possible < before;
        for members in self.members.range_mut((Bound::Excluded(low), Bound::Included(high))).map(|(_, of)| of) {
            members.impossible_since = is_less.then_some(now);
            if is_less {
                to_observe.extend(std::mem::take(&mut members.unobserved));
            }
        }
    }

    pub(super) fn members_mut(&mut self, count: u32) -> Option<&mut Members> {
        self.members.get_mut(&count)
    }

    /// Returns the first possible request for each number of slots, with that number.
    pub(super) fn first_possible(&self) -> impl Iterator<Item = (QueueOrder, u32)> {
        let limit = u32::try_from(self.possible).unwrap_or(u32::MAX);
        self.members.range(..=limit).filter_map(|(count, members)| Some((*members.orders.first()?, *count)))
    }

    /// Returns the request for `count` slots that comes next after `order`.
    pub(super) fn next_after(&self, order: QueueOrder, count: u32) -> Option<QueueOrder> {
        self.members.get(&count)?.orders.range((Bound::Excluded(order), Bound::Unbounded)).next().copied()
    }
}

impl Wants {
    fn of(request: &ServerRequest) -> Self {
        let mut devices = BTreeMap::new();
        for wanted in request.devices.iter().filter(|wanted| wanted.count > 0) {
            let count: &mut u32 = devices.entry(wanted.kind.clone()).or_default();
            *count = wanted.count.max(*count);
        }
        Self {
            key: request.key.clone(),
            distinct: request.distinct,
            labels: request.labels.clone(),
            devices,
            virtual_devices: request.virtual_devices.iter().cloned().collect(),
        }
    }
}

impl Property {
    /// Returns the properties that a request names.
    fn all_of(request: &ServerRequest) -> impl Iterator<Item = Self> {
        let labels = request.labels.iter().map(|(name, value)| Self::Label(name.clone(), value.clone()));
        // Nothing is demanded of a kind of which no device is wanted.
        let devices = request.devices.iter().filter(|device| device.count > 0);
        let kinds = devices.map(|device| Self::DeviceKind(device.kind.clone()));
        let types = request.virtual_devices.iter().filter_map(|wanted| wanted.device_type().map(Self::DeviceType));
        labels.chain(kinds).chain(types)
    }
}

/// Returns the property of a request that the fewest classes are found by.
fn rarest(classes: &HashMap<(String, Property), BTreeSet<ClassId>>, request: &ServerRequest) -> Property {
    let number = |property: &Property| classes.get(&(request.key.clone(), property.clone())).map_or(0, BTreeSet::len);
    Property::all_of(request).min_by_key(number).unwrap_or(Property::None)
}

fn remove_from<K: std::hash::Hash + Eq>(sets: &mut HashMap<K, BTreeSet<ClassId>>, key: &K, id: ClassId) {
    if let Some(classes) = sets.get_mut(key) {
        classes.remove(&id);
        if classes.is_empty() {
            sets.remove(key);
        }
    }
}
