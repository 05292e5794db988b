//! Links of a session, each in a slot, whose content changes when a lost node is replaced.

use std::ops::Range;
use std::sync::Arc;

use rpc_core::RpcError;

use crate::error::{DiscoError, WorkerId};
use crate::link::node_link::Link;
use crate::number_list::NumberList;

/// The links of a session, in the order of their workers.
pub(crate) struct LinkSlots {
    slots: Vec<Slot>,
    /// Number of the next link: no two links of a session have the same.
    next: usize,
    /// True if all slots are running: every command asks.
    are_complete: bool,
}

/// Place of one node in a session.
struct Slot {
    link: Arc<Link>,
    /// Number of the link, by which its reports are told from those of the link before.
    number: usize,
    state: SlotState,
}

/// State of a slot.
enum SlotState {
    Running,
    /// The node is lost, for this reason, which names it.
    Lost(RpcError),
    /// The node has replaced a lost one, and its state has not been restored yet.
    Replaced,
}

impl LinkSlots {
    pub(super) fn new(links: Vec<Link>) -> Self {
        let slot = |(number, link)| Slot { link: Arc::new(link), number, state: SlotState::Running };
        let slots: Vec<_> = links.into_iter().enumerate().map(slot).collect();
        Self { next: slots.len(), slots, are_complete: true }
    }

    /// Returns the links, also of nodes that are lost.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<Link>> {
        self.slots.iter().map(|slot| &slot.link)
    }

    /// Returns the links with their numbers.
    pub(super) fn numbered(&self) -> Vec<(usize, Arc<Link>)> {
        self.slots.iter().map(|slot| (slot.number, Arc::clone(&slot.link))).collect()
    }

    /// Returns the links of nodes that are not lost.
    pub(super) fn present(&self) -> impl Iterator<Item = &Arc<Link>> {
        self.slots.iter().filter(|slot| !slot.is_lost()).map(|slot| &slot.link)
    }

    /// Returns the link with this number, unless another one has its place.
    pub(super) fn numbered_link(&self, number: usize) -> Option<&Arc<Link>> {
        self.slots.iter().find(|slot| slot.number == number).map(|slot| &slot.link)
    }

    /// Returns the link of a worker.
    pub(super) fn of_worker(&self, worker: u32) -> Option<&Arc<Link>> {
        self.iter().find(|link| link.workers().contains(&worker))
    }

    /// Returns true if all nodes are there, with their state.
    pub(super) fn are_complete(&self) -> bool {
        self.are_complete
    }

    /// Returns the error of an operation that needs all workers, if some are lost or have not been
    /// restored.
    pub(super) fn missing(&self) -> Option<DiscoError> {
        let mut workers = Vec::new();
        let mut first = None;
        for Slot { link, state, .. } in &self.slots {
            if let SlotState::Lost(cause) = state {
                workers.extend(link.workers().map(WorkerId));
                first.get_or_insert(cause);
            }
        }
        if let Some(cause) = first {
            let text = format!(
                "{}; the session goes on when DiscoSession::replace or recover has replaced {}",
                cause.message(),
                describe(&workers)
            );
            let cause = RpcError::new(cause.kind(), text).may_have_run(true);
            return Some(DiscoError::Lost { workers, cause });
        }
        if self.are_complete() {
            return None;
        }
        let workers: Vec<WorkerId> = self.replaced().map(WorkerId).collect();
        let text = format!(
            "the state of {}, in place of lost ones, has not been restored yet: wait for DiscoSession::replace, or \
             call it again",
            describe(&workers)
        );
        let cause = RpcError::new(rpc_core::ErrorKind::PeerLost, text).may_have_run(false);
        Some(DiscoError::Lost { workers, cause })
    }

    /// Returns true if a node is lost that has not been replaced.
    pub(super) fn has_lost(&self) -> bool {
        self.slots.iter().any(Slot::is_lost)
    }

    /// Returns true if the node of the link with this number is lost.
    pub(super) fn is_lost(&self, number: usize) -> bool {
        self.slots.iter().any(|slot| slot.number == number && slot.is_lost())
    }

    /// Returns the links of nodes that have replaced lost ones, and have not been restored.
    pub(super) fn new_links(&self) -> impl Iterator<Item = &Arc<Link>> {
        self.slots.iter().filter(|slot| matches!(slot.state, SlotState::Replaced)).map(|slot| &slot.link)
    }

    /// Returns the workers of these nodes.
    pub(super) fn replaced(&self) -> impl Iterator<Item = u32> + '_ {
        self.new_links().flat_map(|link| link.workers())
    }

    /// Records that the node of a link is lost. Returns the link, unless that is known already or
    /// another one has its place.
    pub(super) fn lose(&mut self, number: usize, cause: RpcError) -> Option<Arc<Link>> {
        let slot = self.slots.iter_mut().find(|slot| slot.number == number && !slot.is_lost())?;
        slot.state = SlotState::Lost(cause);
        self.are_complete = false;
        Some(Arc::clone(&slot.link))
    }

    /// Returns the number of the link of these workers, if it can be replaced: its node is lost, or
    /// has replaced a lost one and was not restored.
    pub(super) fn replaceable(&self, worker: u32) -> Option<(usize, Range<u32>)> {
        let slot = self.slots.iter().find(|slot| slot.link.workers().contains(&worker))?;
        (!matches!(slot.state, SlotState::Running)).then(|| (slot.number, slot.link.workers()))
    }

    /// Puts a link in the place of the one with this number. Returns its own number, and the link
    /// that was there; or the link itself if another one has that place already.
    pub(super) fn replace(&mut self, number: usize, link: Arc<Link>) -> Result<(usize, Arc<Link>), Arc<Link>> {
        let Some(slot) = self.slots.iter_mut().find(|slot| slot.number == number) else { return Err(link) };
        let own = self.next;
        self.next += 1;
        let before = std::mem::replace(slot, Slot { link, number: own, state: SlotState::Replaced });
        Ok((own, before.link))
    }

    /// Records that the state of all workers is restored, unless some are lost.
    pub(super) fn complete(&mut self) {
        for slot in &mut self.slots {
            if matches!(slot.state, SlotState::Replaced) {
                slot.state = SlotState::Running;
            }
        }
        self.are_complete = !self.has_lost();
    }
}

impl Slot {
    fn is_lost(&self) -> bool {
        matches!(self.state, SlotState::Lost(_))
    }
}

/// Returns the subject of a sentence about some workers.
fn describe(workers: &[WorkerId]) -> String {
    let numbers = NumberList::of(workers.iter().map(|worker| worker.index()));
    if workers.len() == 1 { format!("worker {numbers}") } else { format!("workers {numbers}") }
}
