//! The next grants: the requests to serve now, with their slots, by rules 1 to 4 of the scheduler.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, HashSet};

use rpc_transports::tracker::ServerRequest;

use super::request_classes::ClassId;
use super::server::{GrantOrder, usable};
use super::types::ServerId;
use super::{QueueOrder, Scheduler};

/// Number of servers in a pool for each server with a rare property, from which on a request for
/// one slot looks at these, and not for the first suitable server of the pool.
const FIRST_IS_OFTEN_ENOUGH: usize = 8;

/// Requests of one class, for slots at different servers, that must wait and reserve slots.
#[derive(Clone, Copy)]
struct Reserving {
    requests: u32,
    /// Number of slots that the last of them found. Those behind it find no more.
    found: u64,
}

impl Scheduler {
    /// Returns the next grants: rules 1 to 3. Considers only keys with free slots. Of the requests
    /// for the same it considers none behind one that got no slots: that one has reserved all that
    /// they could use. If each slot is to be at another server, this holds for one slot of each
    /// server only. Each such request looks at all servers, so behind the first
    /// [`max_reserving`](super::Policy::max_reserving) that got no slots only those are considered
    /// that ask for no more than the last one found, and none behind twice as many. So a long queue
    /// costs little while there are no slots for it.
    pub(super) fn next_grants(&self, changed: Option<&str>) -> Vec<(QueueOrder, Vec<ServerId>)> {
        let mut grants = Vec::new();
        let mut left = self.totals.free;
        // Slots granted or reserved so far, by server and by key.
        let mut taken: HashMap<ServerId, u32> = HashMap::new();
        let mut taken_of: HashMap<&str, u64> = HashMap::new();
        // Properties for which no slot is left.
        let mut nothing_for = HashSet::new();
        // Requests for slots at different servers that got none, by class.
        let mut reserving: HashMap<ClassId, Reserving> = HashMap::new();
        let free_of = |key: &str| self.pools.get(key).map_or(0, |pool| pool.totals.free);
        // Requests of different keys affect each other only through requests for any key.
        let alone = changed.filter(|key| !key.is_empty() && !self.classes.has_key(""));
        let keys: Vec<&str> = match alone {
            Some(key) => vec![key],
            None => self.classes.keys().collect(),
        };
        let with_free = keys.into_iter().filter(|key| key.is_empty() || free_of(key) > 0);
        let classes = with_free.flat_map(|key| self.classes.of_key(key));
        // Next request of each class and number of slots.
        let mut next: BTreeSet<(QueueOrder, ClassId, u32)> = classes
            .flat_map(|(id, class)| class.first_possible().map(move |(order, count)| (order, id, count)))
            .collect();
        while let Some((order, id, count)) = next.pop_first().filter(|_| left > 0) {
            let Some(class) = self.classes.get(id) else { continue };
            let in_front = reserving.get(&id).copied().unwrap_or(Reserving { requests: 0, found: u64::MAX });
            let bound = self.policy.max_reserving;
            let finds_too_few = in_front.requests >= bound && u64::from(count) > in_front.found;
            if finds_too_few || in_front.requests >= 2 * bound {
                continue;
            }
            let request = &*class.request;
            let key = request.key.as_str();
            if !key.is_empty() && free_of(key) <= taken_of.get(key).copied().unwrap_or_default() {
                continue;
            }
            let wants = (key, &request.labels, &request.devices, &request.virtual_devices);
            if nothing_for.contains(&wants) {
                continue;
            }
            let found = self.find(request, count, &taken);
            let total: u64 = found.iter().map(|(_, slots)| u64::from(*slots)).sum();
            let is_served = total >= u64::from(count);
            let took: Vec<(ServerId, u32)> = if is_served {
                let slots = choose(count, found);
                grants.push((order, slots.clone()));
                slots.into_iter().map(|id| (id, 1)).collect()
            } else {
                found.into_iter().map(|((.., id), slots)| (id, slots)).collect()
            };
            for (id, slots) in took {
                *taken.entry(id).or_default() += slots;
                left -= u64::from(slots);
                if let Some(server) = self.servers.get(&id) {
                    *taken_of.entry(&server.offer.key).or_default() += u64::from(slots);
                }
            }
            if !is_served && (!request.distinct || total == 0) {
                nothing_for.insert(wants);
                continue;
            }
            if !is_served {
                reserving.insert(id, Reserving { requests: in_front.requests + 1, found: total });
            }
            next.extend(class.next_after(order, count).map(|order| (order, id, count)));
        }
        grants
    }

    /// Returns the free slots that a request for `count` slots with the properties of `request`
    /// could use and that are not `taken`, by servers in the order of rule 4. For a request for one
    /// slot the first server is enough, unless slots are taken.
    fn find(&self, request: &ServerRequest, count: u32, taken: &HashMap<ServerId, u32>) -> Vec<(GrantOrder, u32)> {
        let suits = |grant_order: &GrantOrder| {
            self.servers.get(&grant_order.3).is_some_and(|server| self.suits(server, request))
        };
        let is_simple = count == 1 && taken.is_empty();
        // The first server of a pool is often good enough, however many there are.
        let rarity = if is_simple { FIRST_IS_OFTEN_ENOUGH } else { 1 };
        let rarest = self.rarest(request, |pool| pool.with_free.len() / rarity);
        let limit = if is_simple { 1 } else { usize::MAX };
        let pools = self.pools_of(request).filter(|_| rarest.is_none());
        let of_pools = pools.flat_map(|pool| pool.with_free.iter().copied().filter(suits).take(limit));
        let of_rarest = rarest.into_iter().flatten().filter_map(|id| self.servers.get(id)?.grant_order(*id));
        let grant_orders = of_pools.chain(of_rarest.filter(suits));
        let left = |(unreachable, Reverse(free), last_granted, id): GrantOrder| {
            let free = free - taken.get(&id).copied().unwrap_or_default();
            ((unreachable, Reverse(free), last_granted, id), usable(request, free))
        };
        let mut found: Vec<_> = grant_orders.map(left).filter(|(_, slots)| *slots > 0).collect();
        found.sort_unstable();
        found
    }
}

/// Chooses slots among those that were `found`, in their order: rule 4. There must be enough.
fn choose(count: u32, mut found: Vec<(GrantOrder, u32)>) -> Vec<ServerId> {
    let count = count as usize;
    let mut chosen = Vec::with_capacity(count);
    while chosen.len() < count && !found.is_empty() {
        for ((.., id), free) in &mut found {
            if chosen.len() < count {
                chosen.push(*id);
                *free -= 1;
            }
        }
        found.retain(|(_, free)| *free > 0);
    }
    chosen
}
