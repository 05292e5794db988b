//! Reports of workers, as the controller receives and handles them.

use std::task::Waker;

use bytes::Bytes;
use rpc_core::{RpcError, Tensor};

use crate::controller::dispatch::Controller;
use crate::link::loss;
use crate::link::relayed_data::RelayRequest;
use crate::link::upstream::Upstream;
use crate::logs;
use crate::wire::event::Event;

impl Upstream for Controller {
    fn handle(&self, event: Event) {
        match event {
            Event::Progress { worker, sequence, cost } => {
                let mut state = self.lock();
                if let Some(reached) = state.reached.get_mut(worker.index()) {
                    *reached = sequence.max(*reached);
                }
                // A node cannot report more than was issued.
                let cost = cost.min(state.issued);
                if let Some(executed) = state.executed.get_mut(worker.index()) {
                    *executed = cost.max(*executed);
                }
                let wakers = if self.fits(&state) { std::mem::take(&mut state.room) } else { Vec::new() };
                drop(state);
                wakers.into_iter().for_each(Waker::wake);
            }
            Event::Reached { ticket } => self.settle(ticket, None),
            Event::Fetched { ticket, value } => self.settle(ticket, Some(value)),
            Event::TensorBegins { ticket, dtype, shape } => {
                // Without memory for it the bytes are let go, and the last event says so.
                let tensor = Tensor::zeros(shape, dtype).ok();
                if let Some(ticket) = self.lock().tickets.get_mut(&ticket) {
                    ticket.incoming = tensor;
                }
            }
            Event::TensorBytes { ticket, offset, bytes } => {
                let tensor = self.lock().tickets.get(&ticket).and_then(|ticket| ticket.incoming.clone());
                if let Some(tensor) = tensor {
                    fill(&tensor, offset, &bytes);
                }
            }
            Event::Failed(failure) => self.lock().failures.push(failure),
            Event::CclBroken { worker, report } => {
                let cause = report.cause.message().to_owned();
                let mut state = self.lock();
                let news = state.collectives.broke(worker, report).then(|| state.collectives.epoch());
                drop(state);
                if let Some(epoch) = news {
                    self.links.iter().for_each(|link| link.break_collectives(epoch, &cause));
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
                let link = self.links.iter().find(|link| link.workers().contains(&worker.0));
                self.end(loss::of_worker(worker, link.map(|link| link.name.as_str()), error));
            }
        }
    }

    fn relay(&self, wanted: RelayRequest) {
        let to = wanted.between.to;
        let destination = match self.links.iter().find(|link| link.workers().contains(&to)) {
            _ if !self.options.allow_controller_relay => {
                Err(RpcError::unsupported("the controller may not relay their data (Options::allow_controller_relay)"))
            }
            None => Err(RpcError::invalid_argument(format!("there is no worker {to}"))),
            Some(link) => link.destination(to, wanted.between.is_world),
        };
        wanted.start(destination, &self.relays);
    }

    /// Ends the session.
    fn lose(&self, link: usize, error: RpcError) {
        self.end(loss::of_link(&self.links[link].lost_node(), &error));
    }
}

fn fill(tensor: &Tensor, offset: u64, bytes: &Bytes) {
    let filled = tensor.byte_range(offset, bytes.len() as u64).and_then(|range| {
        let (_, mut borrow) = tensor.write()?.into_parts();
        borrow.copy_in(range.start, bytes)
    });
    if let Err(error) = filled {
        rpc_core::log_limited!(ERROR, %error, "a worker sent bytes that do not fit its tensor");
    }
}
