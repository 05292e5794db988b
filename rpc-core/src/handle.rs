//! Handles of objects that a peer owns, and the table that creates and resolves them.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};

use crate::error::{ErrorKind, Result, RpcError};

/// Opaque id of one object in the session where it lives: 64 bits, never an address.
///
/// A handle is created by the [`HandleTable`] of the object's origin and crosses any number of hops
/// unchanged. Only the origin interprets its bits; peers only compare handles.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Handle(u64);

impl Handle {
    /// Returns the handle with these bits, as read from the wire. It may name no object.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Returns the bits, as written to the wire.
    pub const fn to_bits(self) -> u64 {
        self.0
    }

    /// Returns true if the handle is a [`PipeId`]: one that the client has chosen.
    pub const fn is_pipe(self) -> bool {
        self.0 >> (SLOT_BITS + GENERATION_BITS) == PIPE_TAG
    }
}

/// Handle that the client chooses, for the result of a request that it makes. Later requests of the
/// same lane name the result by it before it is there.
///
/// Such handles have a tag of their own, which no [`HandleTable`] has. They cross any number of
/// hops unchanged, as all handles do.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PipeId(NonZeroU64);

impl PipeId {
    /// Returns the id with a number, of which the lowest 48 bits count.
    pub const fn new(number: u64) -> Self {
        let number = number & ((1 << (SLOT_BITS + GENERATION_BITS)) - 1);
        // The tag makes it positive.
        Self(NonZeroU64::MIN.saturating_add((number | PIPE_TAG << (SLOT_BITS + GENERATION_BITS)) - 1))
    }

    /// Returns an id that this process has not returned before. It begins at a random number, so
    /// that clients which share a session do not meet.
    pub fn unused() -> Self {
        static NEXT: OnceLock<AtomicU64> = OnceLock::new();
        let next = NEXT.get_or_init(|| AtomicU64::new(RandomState::new().hash_one(0)));
        Self::new(next.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the id with these bits, if they are those of one.
    pub fn from_handle(handle: Handle) -> Option<Self> {
        NonZeroU64::new(handle.0).filter(|_| handle.is_pipe()).map(Self)
    }

    /// Returns the handle by which requests name the result.
    pub const fn handle(self) -> Handle {
        Handle(self.0.get())
    }
}

impl fmt::Debug for PipeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PipeId({:016x})", self.0)
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Handle({:016x})", self.0)
    }
}

impl fmt::Display for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Layout of a handle, from the lowest bit: slot, generation, tag.
const SLOT_BITS: u32 = 24;
const GENERATION_BITS: u32 = 24;
const TAG_BITS: u32 = 16;
const SLOT_MASK: u64 = (1 << SLOT_BITS) - 1;
const GENERATION_MASK: u64 = (1 << GENERATION_BITS) - 1;
/// Tag of the handles that clients choose.
const PIPE_TAG: u64 = (1 << TAG_BITS) - 1;

/// Table of one session's objects by handle.
///
/// A handle consists of a slot number, the slot's generation and the table's tag. Freeing an object
/// advances the generation, so a stale or twice-freed handle resolves to nothing; a slot whose
/// generations are used up is retired, not reused. The tag is derived from an outside seed
/// ([`HandleTable::new`]) and differs from table to table, so that a handle of another session is
/// refused almost certainly, even if slot and generation match. A peer that makes up bits can only
/// ever reach objects of this one table.
#[derive(Debug)]
pub struct HandleTable<T> {
    /// Quota that the objects count against besides the table's own limit.
    within: Option<Arc<HandleQuota>>,
    tag: u64,
    slots: Vec<Slot<T>>,
    /// Vacant slots that can be reused.
    vacant: Vec<u32>,
    live: usize,
    max_live: usize,
}

#[derive(Debug)]
struct Slot<T> {
    /// Generation of the current object or of the next one. Always ≤ `GENERATION_MASK`.
    generation: u32,
    object: Option<T>,
}

impl<T> HandleTable<T> {
    /// Largest number of objects that any table can hold at one time.
    pub const MAX_LIVE: usize = 1 << SLOT_BITS;

    /// Creates an empty table that holds at most `max_live` objects. The tag is derived from
    /// `seed`: pass a value that an outsider cannot guess and that differs from session to session.
    pub fn new(seed: u64, max_live: usize) -> Self {
        let tag = (seed ^ (seed >> 16) ^ (seed >> 32) ^ (seed >> 48)) & ((1 << TAG_BITS) - 1);
        Self {
            within: None,
            tag: if tag == PIPE_TAG { 0 } else { tag },
            slots: Vec::new(),
            vacant: Vec::new(),
            live: 0,
            max_live: max_live.min(Self::MAX_LIVE),
        }
    }

    /// Counts objects that are [reserved](Self::reserve) from now on against `quota`, too.
    #[must_use]
    pub fn within(mut self, quota: Arc<HandleQuota>) -> Self {
        self.within = Some(quota);
        self
    }

    /// Counts `count` objects that are about to be stored against the table's quota. Each counts
    /// until it is removed.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`] if the table or the quota has no room for all of them; none is
    /// counted then.
    pub fn reserve(&mut self, count: usize) -> Result<()> {
        self.check_room(count)?;
        self.within.as_ref().map_or(Ok(()), |quota| quota.take(count))
    }

    /// Counts `count` objects that are kept outside of the table, against its limit and its quota.
    ///
    /// # Errors
    ///
    /// As [`reserve`](Self::reserve).
    pub(crate) fn charge(&mut self, count: usize) -> Result<()> {
        self.reserve(count)?;
        self.live += count;
        Ok(())
    }

    /// Returns what [`charge`](Self::charge) has counted.
    pub(crate) fn discharge(&mut self, count: usize) {
        self.live -= count;
        self.give_back(count);
    }

    fn give_back(&self, count: usize) {
        if let Some(quota) = &self.within {
            quota.used.fetch_sub(count, Ordering::Relaxed);
        }
    }

    /// Checks that `count` more objects can be stored, so that as many [`insert`](Self::insert)s
    /// succeed.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`] if they cannot.
    pub fn check_room(&self, count: usize) -> Result<()> {
        let wanted = self.live.saturating_add(count);
        if wanted > self.max_live {
            return Err(RpcError::limit("max_handles", self.max_live as u64, wanted as u64));
        }
        if self.vacant.len() + (Self::MAX_LIVE - self.slots.len()) < count {
            return Err(RpcError::new(ErrorKind::LimitExceeded, "the session has used up all its handles"));
        }
        Ok(())
    }

    /// Stores `object` and returns its handle.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`] if the table is full; the object is dropped.
    pub fn insert(&mut self, object: T) -> Result<Handle> {
        self.check_room(1)?;
        let index = match self.vacant.pop() {
            Some(index) => index as usize,
            None => {
                self.slots.push(Slot { generation: 0, object: None });
                self.slots.len() - 1
            }
        };
        let slot = &mut self.slots[index];
        slot.object = Some(object);
        self.live += 1;
        Ok(Handle(index as u64 | u64::from(slot.generation) << SLOT_BITS | self.tag << (SLOT_BITS + GENERATION_BITS)))
    }

    /// Returns the object that `handle` names.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidHandle`] if it names none.
    pub fn get(&self, handle: Handle) -> Result<&T> {
        self.find(handle).and_then(|index| self.slots[index].object.as_ref()).ok_or_else(|| invalid(handle))
    }

    /// Removes the object that `handle` names and returns it. The handle names nothing from then
    /// on.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidHandle`] if it names none.
    pub fn remove(&mut self, handle: Handle) -> Result<T> {
        let index = self.find(handle).ok_or_else(|| invalid(handle))?;
        let slot = &mut self.slots[index];
        let object = slot.object.take().ok_or_else(|| invalid(handle))?;
        self.live -= 1;
        if let Some(quota) = &self.within {
            quota.used.fetch_sub(1, Ordering::Relaxed);
        }
        if u64::from(slot.generation) < GENERATION_MASK {
            slot.generation += 1;
            self.vacant.push(index as u32);
        }
        Ok(object)
    }

    /// Empties the table and returns its objects, so that the caller can drop them outside of any
    /// lock.
    pub fn drain(&mut self) -> Vec<T> {
        let mut objects = Vec::with_capacity(self.live);
        for (index, slot) in self.slots.iter_mut().enumerate() {
            if let Some(object) = slot.object.take() {
                objects.push(object);
                if u64::from(slot.generation) < GENERATION_MASK {
                    slot.generation += 1;
                    self.vacant.push(index as u32);
                }
            }
        }
        self.give_back(self.live);
        self.live = 0;
        objects
    }

    /// Returns the number of objects in the table.
    pub fn len(&self) -> usize {
        self.live
    }

    /// Returns true if the table holds no objects.
    pub fn is_empty(&self) -> bool {
        self.live == 0
    }

    fn find(&self, handle: Handle) -> Option<usize> {
        let index = (handle.0 & SLOT_MASK) as usize;
        let generation = handle.0 >> SLOT_BITS & GENERATION_MASK;
        let tag = handle.0 >> (SLOT_BITS + GENERATION_BITS);
        let slot = self.slots.get(index)?;
        (tag == self.tag && u64::from(slot.generation) == generation).then_some(index)
    }
}

impl<T> Drop for HandleTable<T> {
    fn drop(&mut self) {
        self.give_back(self.live);
    }
}

/// Limit on the number of objects in several tables together.
#[derive(Debug)]
pub struct HandleQuota {
    limit: usize,
    used: AtomicUsize,
}

impl HandleQuota {
    /// Creates a quota of `limit` objects.
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicUsize::new(0) })
    }

    /// Returns the number of objects that count at present.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    fn take(&self, count: usize) -> Result<()> {
        let take = |used: usize| used.checked_add(count).filter(|used| *used <= self.limit);
        let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        let over =
            |used: usize| RpcError::limit("max_total_handles", self.limit as u64, used.saturating_add(count) as u64);
        taken.map(drop).map_err(over)
    }
}

/// Error for every handle that names no object, or none of the expected kind.
pub(crate) fn invalid(handle: Handle) -> RpcError {
    RpcError::new(
        ErrorKind::InvalidHandle,
        format!("handle {handle} names no live object of this session: it was freed, or belongs to another session"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn tables_share_a_quota_and_return_it_on_remove_drain_and_drop() {
        let quota = HandleQuota::new(5);
        let mut first = HandleTable::new(1, 4).within(quota.clone());
        let mut second = HandleTable::new(2, 10).within(quota.clone());
        first.reserve(3).unwrap();
        let handles: Vec<_> = (0..3).map(|object| first.insert(object).unwrap()).collect();
        assert!(first.reserve(2).unwrap_err().message().contains("max_handles"));
        let error = second.reserve(3).unwrap_err();
        assert!(error.kind() == ErrorKind::LimitExceeded && error.message().contains("max_total_handles"), "{error}");
        assert_eq!(quota.used(), 3);
        second.reserve(2).unwrap();
        second.insert(7).unwrap();
        second.insert(8).unwrap();
        first.remove(handles[0]).unwrap();
        assert!(first.remove(handles[0]).is_err());
        assert_eq!(quota.used(), 4);
        assert_eq!(second.drain().len(), 2);
        assert_eq!(quota.used(), 2);
        drop((first, second));
        assert_eq!(quota.used(), 0);
    }

    #[test]
    fn no_table_has_the_handles_that_clients_choose() {
        // A seed whose tag would be all ones.
        let mut table = HandleTable::new(0xffff, 10);
        let handle = table.insert(()).unwrap();
        assert!(!handle.is_pipe() && PipeId::from_handle(handle).is_none());
        for number in [0, 1, (1 << 48) - 1, u64::MAX] {
            let handle = PipeId::new(number).handle();
            assert!(handle.is_pipe() && table.get(handle).is_err() && table.remove(handle).is_err());
            assert_eq!(PipeId::from_handle(handle), Some(PipeId::new(number)));
            assert_eq!(handle.to_bits() & ((1 << 48) - 1), number & ((1 << 48) - 1));
        }
        assert_ne!(PipeId::unused(), PipeId::unused());
    }

    #[test]
    fn what_is_kept_outside_of_a_table_counts_against_its_limits() {
        let quota = HandleQuota::new(3);
        let mut table = HandleTable::new(1, 4).within(quota.clone());
        table.charge(2).unwrap();
        table.reserve(1).unwrap();
        let handle = table.insert(()).unwrap();
        assert_eq!((table.len(), quota.used()), (3, 3));
        assert!(table.charge(1).unwrap_err().message().contains("max_total_handles"));
        table.discharge(2);
        table.remove(handle).unwrap();
        assert_eq!((table.len(), quota.used()), (0, 0));
        assert!(table.charge(5).unwrap_err().message().contains("max_handles"));
    }

    #[test]
    fn a_freed_handle_stays_dead_when_its_slot_is_reused() {
        let mut table = HandleTable::new(7, 10);
        let first = table.insert("first").unwrap();
        assert_eq!(table.remove(first).unwrap(), "first");
        let second = table.insert("second").unwrap();
        assert_ne!(first, second);
        assert_eq!(table.get(first).unwrap_err().kind(), ErrorKind::InvalidHandle);
        assert_eq!(table.remove(first).unwrap_err().kind(), ErrorKind::InvalidHandle);
        assert_eq!(*table.get(second).unwrap(), "second");
    }

    #[test]
    fn handles_of_another_table_are_refused() {
        let mut ours = HandleTable::new(1, 10);
        let mut theirs = HandleTable::new(2, 10);
        let handle = theirs.insert(()).unwrap();
        ours.insert(()).unwrap();
        assert!(ours.get(handle).is_err());
    }

    #[test]
    fn a_full_table_names_its_limit_and_recovers() {
        let mut table = HandleTable::new(0, 2);
        let handle = table.insert(1).unwrap();
        table.insert(2).unwrap();
        let error = table.insert(3).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LimitExceeded);
        assert!(error.message().contains("max_handles"));
        table.remove(handle).unwrap();
        table.insert(3).unwrap();
    }

    #[test]
    fn a_slot_with_all_generations_used_is_retired() {
        let mut table = HandleTable::new(0, 10);
        let handle = table.insert(()).unwrap();
        table.slots[0].generation = GENERATION_MASK as u32;
        let last = Handle(handle.0 | GENERATION_MASK << SLOT_BITS);
        table.remove(last).unwrap();
        assert!(table.get(last).is_err());
        let next = table.insert(()).unwrap();
        assert_eq!(next.0 & SLOT_MASK, 1);
    }

    proptest! {
            /// Random inserts, removes and forgeries, checked against a map of the live objects.
            #[test]
    fn behaves_as_a_map_that_never_reuses_a_key(
        seed in any::<u64>(),
        steps in prop::collection::vec((0..4_u8, any::<u64>()), 0..200),
    ) {
                let mut table = HandleTable::new(seed, 1000);
                let mut model = std::collections::BTreeMap::new();
                let mut dead = Vec::new();
                for (step, bits) in steps {
                    match step {
                        0 | 1 => {
                            let handle = table.insert(bits).unwrap();
                            prop_assert!(!dead.contains(&handle));
                            prop_assert!(model.insert(handle, bits).is_none());
                        }
                        2 => if let Some(handle) = model.keys().nth(bits as usize % model.len().max(1)).copied() {
                            prop_assert_eq!(table.remove(handle).ok(), model.remove(&handle));
                            dead.push(handle);
                        },
                        _ => {
                            let forged = Handle::from_bits(bits);
                            prop_assert_eq!(table.get(forged).ok(), model.get(&forged));
                        }
                    }
                    prop_assert_eq!(table.len(), model.len());
                    for (handle, value) in &model { prop_assert_eq!(table.get(*handle).unwrap(), value); }
                    for handle in &dead { prop_assert!(table.get(*handle).is_err()); }
                }
            }
        }
}
