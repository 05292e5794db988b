//! Waits of callers for workers: `sync`, fetching the content of a register, and shutdown.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use rpc_core::function::Object;
use rpc_core::{ErrorKind, LocalValue, RpcError, Value};

use crate::completion::Completion;
use crate::controller::dispatch::Controller;
use crate::controller::tickets::{IncomingTensor, Ticket};
use crate::error::{DiscoError, Failure, Result, WorkerId};
use crate::number_list::NumberList;
use crate::wire::command::Command;
use crate::wire::event::LocalContent;

/// Guard of a ticket: takes it back when its caller stops waiting.
pub(crate) struct TicketGuard {
    controller: Arc<Controller>,
    ticket: u64,
}

impl TicketGuard {
    pub(crate) fn ticket(&self) -> u64 {
        self.ticket
    }
}

impl Drop for TicketGuard {
    fn drop(&mut self) {
        let ticket = self.controller.lock().tickets.remove(&self.ticket);
        drop(ticket);
    }
}

impl Controller {
    pub(crate) fn open_ticket(self: &Arc<Self>, waiting: u32) -> TicketGuard {
        let mut state = self.lock();
        state.last_ticket += 1;
        let ticket = state.last_ticket;
        state.tickets.insert(ticket, Ticket { waiting, incoming: None, content: None, waker: None, failed: None });
        drop(state);
        TicketGuard { controller: Arc::clone(self), ticket }
    }

    /// Issues a sync of one worker, or all. Resolves once they have executed it, to the failures
    /// that have not been reported yet.
    pub(crate) fn sync(self: &Arc<Self>, worker: Option<WorkerId>) -> Completion<()> {
        let guard = self.open_ticket(if worker.is_some() { 1 } else { self.layout.world_size });
        let command = Command::SyncWorker { ticket: guard.ticket, worker: worker.map(|worker| worker.0) };
        if let Err(error) = self.push(command) {
            return Completion::failed(error);
        }
        Completion::new(async move {
            poll_fn(|cx| guard.controller.poll_ticket(guard.ticket, cx)).await?;
            let told = guard.controller.lock().failures.take(worker);
            if told.is_empty() {
                return Ok(());
            }
            Err(guard.controller.find_loss(DiscoError::Workers(told)).await)
        })
    }

    /// Fetches the content of a register of one worker. `command` gets the ticket.
    ///
    /// It is issued whether there is credit or not, as a sync is: its caller waits for the workers
    /// anyway, and may be an event loop, which must not block before that.
    pub(crate) fn fetch(self: &Arc<Self>, command: impl FnOnce(u64) -> Command) -> Completion<LocalValue> {
        let guard = self.open_ticket(1);
        if let Err(error) = self.push(command(guard.ticket)) {
            return Completion::failed(error);
        }
        Completion::new(async move {
            poll_fn(|cx| guard.controller.poll_ticket(guard.ticket, cx)).await?;
            let content =
                guard.controller.lock().tickets.get_mut(&guard.ticket).and_then(|ticket| ticket.content.take());
            match content {
                Some(Ok(value)) => Ok(value),
                Some(Err(failure)) => Err(guard.controller.find_loss(DiscoError::Workers(vec![failure])).await),
                None => Err(RpcError::internal("a worker said nothing").into()),
            }
        })
    }

    pub(crate) fn poll_ticket(&self, ticket: u64, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let mut state = self.lock();
        let ended = state.ended.clone();
        match state.tickets.get_mut(&ticket) {
            Some(ticket) if ticket.waiting > 0 => match ended.map(DiscoError::from).or(ticket.failed.clone()) {
                Some(error) => Poll::Ready(Err(error)),
                None => {
                    ticket.waker = Some(cx.waker().clone());
                    Poll::Pending
                }
            },
            _ => Poll::Ready(Ok(())),
        }
    }

    pub(super) fn settle(&self, ticket: u64, content: Option<std::result::Result<LocalContent, Failure>>) {
        let mut state = self.lock();
        // The caller may have stopped waiting.
        let Some(ticket) = state.tickets.get_mut(&ticket) else { return };
        ticket.waiting = ticket.waiting.saturating_sub(1);
        ticket.content = content.map(|content| {
            content.and_then(|content| match content {
                LocalContent::Value(value) => Ok(value),
                LocalContent::TensorComplete => {
                    let missing = || RpcError::new(ErrorKind::Protocol, "a worker sent the end of a tensor alone");
                    let incoming = ticket.incoming.take().unwrap_or_else(|| Err(missing()));
                    let tensor = incoming.and_then(IncomingTensor::finish);
                    tensor.map(|tensor| Value::Object(Object::Tensor(tensor))).map_err(|cause| Failure {
                        worker: WorkerId(0),
                        sequence: 0,
                        command: "copy".to_owned(),
                        cause,
                    })
                }
            })
        });
        let waker = if ticket.waiting == 0 { ticket.waker.take() } else { None };
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Ends the session in good order, if the workers come to the end of their queues in time.
    pub(crate) fn shut_down(self: &Arc<Self>) -> Completion<()> {
        let (guard, issued) = self.issue_shutdown();
        Completion::spawn(async move {
            let controller = Arc::clone(&guard.controller);
            let outcome = match issued {
                // It has ended before, which is no failure of a shutdown.
                Err(_) => Ok(()),
                Ok(sequence) => {
                    let limit = controller.options.shutdown_timeout;
                    let reached = poll_fn(|cx| controller.poll_ticket(guard.ticket, cx));
                    match tokio::time::timeout(limit, reached).await {
                        Ok(outcome) => outcome,
                        Err(_) => {
                            let busy = controller.behind(sequence);
                            let text = format!("{busy} still busy {limit:?} after the shutdown, and left behind");
                            Err(RpcError::new(ErrorKind::DeadlineExceeded, text).into())
                        }
                    }
                }
            };
            controller.end(RpcError::new(ErrorKind::Closed, "the session was shut down"));
            outcome
        })
    }

    /// Issues a shutdown to the workers that are there.
    fn issue_shutdown(self: &Arc<Self>) -> (TicketGuard, Result<u64>) {
        let guard = self.open_ticket(self.layout.world_size);
        let prepared = self.prepare(Command::Shutdown { ticket: guard.ticket });
        let mut state = self.lock();
        let issued = prepared.and_then(|(queued, encoded)| match &state.ended {
            Some(error) => Err(error.clone().into()),
            None => Ok(self.push_in(&mut state, &queued, encoded.as_ref())),
        });
        let present = state.links.present().map(|link| link.count).sum();
        if let Some(ticket) = state.tickets.get_mut(&guard.ticket) {
            ticket.waiting = present;
        }
        drop(state);
        (guard, issued)
    }

    /// Returns the workers that have not executed a command yet, as the subject of a sentence in
    /// the past tense.
    pub(crate) fn behind(&self, sequence: u64) -> String {
        let state = self.lock();
        let late = state.reached.iter().enumerate().filter(|(_, reached)| **reached < sequence);
        let late = NumberList::of(late.map(|(worker, _)| worker));
        if late.len() == 1 { format!("worker {late} was") } else { format!("workers {late} were") }
    }
}
