//! The controller: gives commands their numbers, passes each to all links or to none, and keeps the
//! workers' reports.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::{Arc, Weak};
use std::task::{Poll, Waker};

use parking_lot::{Mutex, MutexGuard};
use rpc_core::{ErrorKind, RpcError, blocking};

use crate::controller::ccl_state::{CclState, Collectives};
use crate::controller::executed_credit::ExecutedCredit;
use crate::controller::tickets::Ticket;
use crate::controller::unsynced_failures::UnsyncedFailures;
use crate::error::{DiscoError, Result, WorkerId};
use crate::link::node_link::Link;
use crate::link::relayed_data::ClosedFlag;
use crate::options::{Hosting, Options};
use crate::weights::load_progress::ProgressReporter;
use crate::wire::command::{Command, Queued, Register};
use crate::wire::mesh::Mesh;
use crate::wire::plan::Layout;

/// One session, seen from its controller.
pub(crate) struct Controller {
    pub(super) this: Weak<Self>,
    pub(crate) layout: Layout,
    pub(crate) options: Options,
    pub(crate) links: Vec<Link>,
    /// True if commands have to be encoded.
    encodes: bool,
    /// Closed when the session ends: ends all relaying at the controller.
    pub(super) relays: Arc<ClosedFlag>,
    state: Mutex<ControllerState>,
}

pub(crate) struct ControllerState {
    /// The number of the last command.
    pub(super) sequence: u64,
    /// The credit that all commands have taken so far.
    pub(super) issued: u64,
    /// The part of that credit that each worker has executed, as far as is known.
    pub(super) executed: ExecutedCredit,
    /// The last command that each worker is known to have executed.
    pub(super) reached: Vec<u64>,
    registers: Registers,
    last_program: u32,
    last_loader: u64,
    /// Progress reporters, by the number of their loader.
    pub(super) reporters: HashMap<u64, Arc<ProgressReporter>>,
    pub(super) last_ticket: u64,
    pub(super) tickets: HashMap<u64, Ticket>,
    /// Failures that have not been reported yet.
    pub(crate) failures: UnsyncedFailures,
    pub(crate) collectives: Collectives,
    /// Meshes that the workers know, the oldest first.
    pub(super) meshes: Vec<Mesh>,
    pub(crate) ended: Option<RpcError>,
    /// Tasks that wait for credit.
    pub(super) room: Vec<Waker>,
}

/// The numbers of registers.
#[derive(Default)]
struct Registers {
    next: Register,
    /// Registers whose kill has been issued: it comes before any command that uses them next.
    free: Vec<Register>,
}

impl Controller {
    pub(crate) fn new(layout: Layout, options: Options, links: Vec<Link>) -> Arc<Self> {
        let state = ControllerState {
            sequence: 0,
            issued: 0,
            executed: ExecutedCredit::new(layout.world_size as usize),
            reached: vec![0; layout.world_size as usize],
            registers: Registers::default(),
            last_program: 0,
            last_loader: 0,
            reporters: HashMap::new(),
            last_ticket: 0,
            tickets: HashMap::new(),
            failures: UnsyncedFailures::default(),
            collectives: Collectives::default(),
            meshes: Vec::new(),
            ended: None,
            room: Vec::new(),
        };
        // A host of this process that passes commands on counts too: a command that cannot be
        // encoded is to be refused before it has a number.
        let is_several = |link: &Link| link.nodes > 1 || link.info.processes.len() > 1;
        let passes_on = options.hosting == Hosting::Processes || links.iter().any(is_several);
        let encodes = passes_on || links.iter().any(Link::is_remote);
        Arc::new_cyclic(|this| Self {
            this: this.clone(),
            layout,
            options,
            links,
            encodes,
            relays: Arc::default(),
            state: Mutex::new(state),
        })
    }

    /// Takes a register that nothing uses.
    pub(crate) fn take_register(&self) -> Register {
        let mut state = self.lock();
        state.registers.free.pop().unwrap_or_else(|| {
            state.registers.next += 1;
            state.registers.next - 1
        })
    }

    /// Takes a number for a program, which no other has in this session.
    pub(crate) fn take_program(&self) -> u32 {
        let mut state = self.lock();
        state.last_program += 1;
        state.last_program
    }

    /// Takes a number for a loader of weights, whose progress goes to `reporter` from now on.
    pub(crate) fn watch_loader(&self, reporter: Arc<ProgressReporter>) -> u64 {
        let mut state = self.lock();
        state.last_loader += 1;
        let number = state.last_loader;
        state.reporters.insert(number, reporter);
        number
    }

    /// Ends the progress reports of a loader.
    pub(crate) fn forget_loader(&self, number: u64) {
        let reporter = self.lock().reporters.remove(&number);
        drop(reporter);
    }

    /// Pairs of workers, as transfers have them.
    ///
    /// # Errors
    ///
    /// A pair of workers that there are not, or of one with itself.
    pub(crate) fn pairs(&self, pairs: &[(WorkerId, WorkerId)]) -> Result<Vec<(u32, u32)>> {
        let size = self.layout.world_size;
        for (sender, receiver) in pairs {
            if sender.0 >= size || receiver.0 >= size || sender == receiver {
                return Err(DiscoError::invalid(format!(
                    "no transfer from worker {sender} to worker {receiver} in a session of {size}"
                )));
            }
        }
        Ok(pairs.iter().map(|(sender, receiver)| (sender.0, receiver.0)).collect())
    }

    /// Frees a register on all workers, behind all that uses it. Never waits.
    pub(crate) fn kill(&self, register: Register) {
        // Without a session there is nothing to free; encoding so little cannot fail.
        if self.push(Command::KillReg { register }).is_ok() {
            self.lock().registers.free.push(register);
        }
    }

    /// Issues a command to all workers. Waits for credit on the calling thread.
    ///
    /// # Errors
    ///
    /// The session has ended; the command is too large; or credit is used up inside an async
    /// runtime.
    pub(crate) fn issue(&self, command: Command) -> Result<()> {
        if !self.has_room() {
            let waited = blocking::block_on(self.room());
            waited.map_err(|error| error.context("the workers are behind by all that they may be; await room()"))??;
        }
        self.push(command).map(drop)
    }

    /// Resolves when commands can be issued without waiting.
    pub(crate) async fn room(&self) -> Result<()> {
        poll_fn(|cx| {
            let mut state = self.lock();
            if let Some(error) = &state.ended {
                return Poll::Ready(Err(error.clone().into()));
            }
            if self.fits(&state) {
                return Poll::Ready(Ok(()));
            }
            state.room.push(cx.waker().clone());
            Poll::Pending
        })
        .await
    }

    fn has_room(&self) -> bool {
        let state = self.lock();
        state.ended.is_some() || self.fits(&state)
    }

    pub(super) fn fits(&self, state: &ControllerState) -> bool {
        state.issued.saturating_sub(state.executed.least()) < self.options.window
    }

    /// Issues a command, whether there is credit or not.
    pub(crate) fn push(&self, command: Command) -> Result<u64> {
        let encoded = if self.encodes { Some(command.encode()?) } else { None };
        let on = command.on();
        let is_watched = matches!(command, Command::InitCcl { .. });
        let queued = Queued { cost: command.cost(), command: Arc::new(command), charge: None };
        let mut state = self.lock();
        if let Some(error) = &state.ended {
            return Err(error.clone().into());
        }
        state.sequence += 1;
        state.issued += queued.cost;
        if is_watched {
            let sequence = state.sequence;
            state.failures.watch(sequence);
        }
        // Under the lock, so that all links have all commands in one order.
        for link in &self.links {
            let bulk = self.layout.concerns(on, link.workers());
            link.push(state.sequence, &queued, encoded.as_ref(), bulk);
        }
        Ok(state.sequence)
    }

    /// Ends the session: the first reason counts, and all callers that wait get it.
    pub(crate) fn end(&self, error: RpcError) {
        let mut state = self.lock();
        if state.ended.is_some() {
            return;
        }
        if error.kind() != ErrorKind::Closed {
            tracing::error!(%error, "a disco session has ended");
        }
        state.ended = Some(error);
        let mut wakers = std::mem::take(&mut state.room);
        wakers.extend(state.tickets.values_mut().filter_map(|ticket| ticket.waker.take()));
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
        self.relays.close();
        self.links.iter().for_each(Link::close);
    }

    /// Breaks the collectives on all workers.
    pub(crate) fn abort_ccl(&self, reason: &str) -> Result<()> {
        let mut state = self.lock();
        if let Some(error) = &state.ended {
            return Err(error.clone().into());
        }
        let cause = RpcError::new(ErrorKind::Cancelled, format!("collectives were aborted: {reason}"));
        let news = state.collectives.abort(cause).then(|| state.collectives.epoch());
        drop(state);
        if let Some(epoch) = news {
            let cause = RpcError::new(ErrorKind::Cancelled, reason.to_owned());
            self.links.iter().for_each(|link| link.break_collectives(epoch, &cause));
        }
        Ok(())
    }

    /// Returns the state of the collectives.
    pub(crate) fn ccl_state(&self) -> CclState {
        let state = self.lock();
        state.ended.clone().map_or_else(|| state.collectives.state(), CclState::Ended)
    }

    pub(super) fn end_error(&self) -> RpcError {
        let ended = self.lock().ended.clone();
        ended.unwrap_or_else(|| RpcError::new(ErrorKind::Closed, "the session is ending"))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, ControllerState> {
        self.state.lock()
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.relays.close();
        self.links.iter().for_each(Link::close);
    }
}
