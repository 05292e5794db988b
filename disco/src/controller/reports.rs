//! Reports of workers, as the controller receives and handles them.

use std::task::Waker;

use rpc_core::RpcError;

use crate::controller::dispatch::{Controller, ControllerState};
use crate::controller::tickets::IncomingTensor;
use crate::error::WorkerId;
use crate::link::loss;
use crate::link::relayed_data::RelayRequest;
use crate::link::upstream::Upstream;
use crate::logs;
use crate::wire::event::Event;

impl Upstream for Controller {
    fn handle(&self, link: usize, event: Event) {
        match event {
            Event::Progress { worker, sequence, cost } => {
                let mut state = self.lock();
                // The count of the worker before says nothing of the one that has replaced it.
                if state.links.numbered_link(link).is_none() {
                    return;
                }
                if let Some(reached) = state.reached.get_mut(worker.index()) {
                    *reached = sequence.max(*reached);
                }
                // A node cannot report more than was issued.
                let cost = cost.min(state.issued);
                state.executed.raise(worker.index(), cost);
                let is_awaited = !state.room.is_empty() && self.fits(&state);
                let wakers = if is_awaited { std::mem::take(&mut state.room) } else { Vec::new() };
                drop(state);
                wakers.into_iter().for_each(Waker::wake);
            }
            Event::Reached { ticket } => self.settle(ticket, None),
            Event::Fetched { ticket, value } => self.settle(ticket, Some(value)),
            Event::TensorBegins { ticket, dtype, shape } => {
                // Without memory for it the bytes are let go, and the last event says so.
                if let Some(ticket) = self.lock().tickets.get_mut(&ticket) {
                    ticket.incoming = Some(IncomingTensor::new(dtype, shape));
                }
            }
            Event::TensorBytes { ticket, offset, bytes } => {
                let take = |state: &mut ControllerState| state.tickets.get_mut(&ticket)?.incoming.take();
                let incoming = take(&mut self.lock());
                // Copied without the lock.
                let Some(incoming) = incoming else { return };
                let filled = incoming.and_then(|mut tensor| tensor.fill(offset, &bytes).map(|()| tensor));
                if let Some(ticket) = self.lock().tickets.get_mut(&ticket) {
                    ticket.incoming = Some(filled);
                }
            }
            Event::Failed(failure) => {
                let mut state = self.lock();
                if let Some(log) = &mut state.log {
                    log.note_failure(&failure, self.layout.world_size);
                }
                state.failures.add(failure);
            }
            Event::CclBroken { worker, report } => {
                let cause = report.cause.clone();
                let mut state = self.lock();
                let news = state.collectives.broke(worker, report).then(|| state.collectives.epoch());
                drop(state);
                if let Some(epoch) = news {
                    self.break_collectives(epoch, &cause);
                }
            }
            Event::Logged { worker, line } => logs::show(worker, &line),
            Event::Loaded { loader, bytes, .. } => {
                let reporter = self.lock().reporters.get(&loader).cloned();
                if let Some(reporter) = reporter {
                    reporter.add(bytes);
                }
            }
            Event::Lost { worker, error } => {
                let at = self.lock().links.numbered_link(link).cloned();
                if let Some(node) = at {
                    self.lose_node(link, worker, loss::of_worker(worker, Some(&node.name), error));
                }
            }
        }
    }

    fn relay(&self, wanted: RelayRequest) {
        let to = wanted.between.to;
        let link = self.lock().links.of_worker(to).cloned();
        let destination = match link {
            _ if !self.options.allow_controller_relay => {
                Err(RpcError::unsupported("the controller may not relay their data (Options::allow_controller_relay)"))
            }
            None => Err(RpcError::invalid_argument(format!("there is no worker {to}"))),
            Some(link) => link.destination(to, wanted.between.communicator),
        };
        wanted.start(destination, &self.relays);
    }

    fn lose(&self, link: usize, error: RpcError) {
        let lost = self.lock().links.numbered_link(link).cloned();
        if let Some(lost) = lost {
            self.lose_node(link, WorkerId(lost.first), loss::of_link(&lost.lost_node(), &error));
        }
    }
}
