//! Index of servers by their labels and kinds of devices, so that a request for what few servers
//! have does not look at all of them.

use std::collections::{BTreeSet, HashMap};

use rpc_transports::tracker::ServerRequest;

use super::types::{Offer, ServerId};

/// Servers by single properties.
#[derive(Debug, Default)]
pub(super) struct PropertyIndex {
    /// Servers by label: name, value.
    labels: HashMap<String, HashMap<String, BTreeSet<ServerId>>>,
    /// Servers by the kinds of their devices.
    kinds: HashMap<String, BTreeSet<ServerId>>,
}

impl PropertyIndex {
    pub(super) fn insert(&mut self, id: ServerId, offer: &Offer) {
        for (name, value) in &offer.labels {
            self.labels.entry(name.clone()).or_default().entry(value.clone()).or_default().insert(id);
        }
        for device in &offer.devices {
            self.kinds.entry(device.kind.clone()).or_default().insert(id);
        }
    }

    pub(super) fn remove(&mut self, id: ServerId, offer: &Offer) {
        for (name, value) in &offer.labels {
            let Some(values) = self.labels.get_mut(name) else { continue };
            remove_from(values, value, id);
            if values.is_empty() {
                self.labels.remove(name);
            }
        }
        for device in &offer.devices {
            remove_from(&mut self.kinds, &device.kind, id);
        }
    }

    /// Returns the servers with the rarest of the labels and kinds of devices that a request names.
    /// All servers that suit the request are among them. `None` if it names neither.
    pub(super) fn rarest(&self, request: &ServerRequest) -> Option<&BTreeSet<ServerId>> {
        static NONE: BTreeSet<ServerId> = BTreeSet::new();
        let labels = request.labels.iter().map(|(name, value)| self.labels.get(name).and_then(|by| by.get(value)));
        // Nothing is demanded of a kind of which no device is wanted.
        let wanted = request.devices.iter().filter(|device| device.count > 0);
        let kinds = wanted.map(|device| self.kinds.get(&device.kind));
        labels.chain(kinds).map(|servers| servers.unwrap_or(&NONE)).min_by_key(|servers| servers.len())
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.kinds.is_empty()
    }
}

fn remove_from(sets: &mut HashMap<String, BTreeSet<ServerId>>, name: &str, id: ServerId) {
    if let Some(servers) = sets.get_mut(name) {
        servers.remove(&id);
        if servers.is_empty() {
            sets.remove(name);
        }
    }
}
