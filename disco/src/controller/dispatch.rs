//! The controller: gives commands their numbers, passes each to all links or to none, and keeps the
//! workers' reports.

use std::collections::{BTreeSet, HashMap};
use std::future::poll_fn;
use std::sync::{Arc, Weak};
use std::task::{Poll, Waker};

use parking_lot::{Mutex, MutexGuard};
use rpc_core::{Device, ErrorKind, Packed, RpcError, blocking};

use crate::controller::ccl_state::{CclState, Collectives};
use crate::controller::executed_credit::ExecutedCredit;
use crate::controller::link_slots::LinkSlots;
use crate::controller::restore_log::RestoreLog;
use crate::controller::tickets::Ticket;
use crate::controller::unsynced_failures::UnsyncedFailures;
use crate::error::{DiscoError, Result, WorkerId};
use crate::link::node_link::Link;
use crate::link::relayed_data::ClosedFlag;
use crate::link::replacement::Relaunch;
use crate::options::{Hosting, OnLoss, Options};
use crate::weights::load_progress::ProgressReporter;
use crate::wire::codec::Encoded;
use crate::wire::command::{Command, Queued, Register};
use crate::wire::mesh::Mesh;
use crate::wire::plan::Layout;
use crate::wire::set_up::SetUp;

/// One session, seen from its controller.
pub(crate) struct Controller {
    pub(super) this: Weak<Self>,
    pub(crate) layout: Layout,
    pub(crate) options: Options,
    /// Set-up of a node, but for its workers.
    pub(super) set_up: SetUp,
    /// The way in which the nodes were launched, where one can be launched again.
    pub(super) relaunch: Option<Relaunch>,
    /// True if commands have to be encoded.
    encodes: bool,
    /// Closed when the session ends: ends all relaying at the controller.
    pub(super) relays: Arc<ClosedFlag>,
    state: Mutex<ControllerState>,
}

pub(crate) struct ControllerState {
    pub(super) links: LinkSlots,
    /// The number of the last command.
    pub(super) sequence: u64,
    /// The credit that all commands have taken so far.
    pub(super) issued: u64,
    /// The part of that credit that each worker has executed, as far as is known.
    pub(super) executed: ExecutedCredit,
    /// The last command that each worker is known to have executed.
    pub(super) reached: Vec<u64>,
    pub(super) registers: Registers,
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
    /// Default devices of the workers; none where all have that of their node.
    pub(super) devices: Arc<[Device]>,
    /// Commands by which state is made again on a worker that replaces a lost one; `None` where the
    /// loss of a worker ends the session.
    pub(super) log: Option<RestoreLog>,
    /// Commands that free something, which wait until all workers are there again. Each frees what
    /// another command has made, so that they are no more than those.
    pub(super) deferred: Vec<Command>,
    /// Functions of users that restore the state of workers, as long as their guards live.
    pub(super) restorers: Vec<Weak<Mutex<Restore>>>,
    /// Workers whose state the functions of users have yet to restore.
    pub(super) unrestored: BTreeSet<WorkerId>,
    /// True if the workers had no way to each other when they were last to join.
    pub(super) is_unconnected: bool,
    /// True once the session has started: its workers have been told to join each other.
    pub(super) has_started: bool,
    pub(crate) ended: Option<RpcError>,
    /// Tasks that wait for credit.
    pub(super) room: Vec<Waker>,
}

/// Function that restores the state of workers.
pub(super) type Restore = dyn FnMut(&Arc<Controller>, &[WorkerId]) -> Result<()> + Send;

/// The numbers of registers.
#[derive(Default)]
pub(super) struct Registers {
    next: Register,
    /// Registers that no command was issued for, or whose kill has been issued: it comes before any
    /// command that uses them next.
    free: Vec<Register>,
}

impl Registers {
    /// Takes a register that nothing uses.
    pub(super) fn take(&mut self) -> Register {
        self.free.pop().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        })
    }

    /// Returns a register behind all that were ever taken.
    pub(super) fn end(&self) -> Register {
        self.next
    }

    /// Gives back a register whose kill has been issued, or that no command was issued for.
    pub(super) fn give_back(&mut self, register: Register) {
        self.free.push(register);
    }
}

impl Controller {
    pub(crate) fn new(
        options: Options,
        links: Vec<Link>,
        devices: Vec<Device>,
        set_up: SetUp,
        relaunch: Option<Relaunch>,
    ) -> Arc<Self> {
        let layout = set_up.layout;
        // A host of this process that passes commands on counts too: a command that cannot be
        // encoded is to be refused before it has a number.
        let is_several = |link: &Link| link.nodes > 1 || link.info.processes.len() > 1;
        let passes_on = options.hosting == Hosting::Processes || links.iter().any(is_several);
        let encodes = passes_on || links.iter().any(Link::is_remote);
        let state = ControllerState {
            links: LinkSlots::new(links),
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
            devices: devices.into(),
            log: (options.on_loss == OnLoss::AwaitReplacement).then(RestoreLog::default),
            deferred: Vec::new(),
            restorers: Vec::new(),
            unrestored: BTreeSet::new(),
            is_unconnected: false,
            has_started: false,
            ended: None,
            room: Vec::new(),
        };
        Arc::new_cyclic(|this| Self {
            this: this.clone(),
            layout,
            options,
            set_up,
            relaunch,
            encodes,
            relays: Arc::default(),
            state: Mutex::new(state),
        })
    }

    /// Takes a register that nothing uses.
    pub(crate) fn take_register(&self) -> Register {
        self.lock().registers.take()
    }

    /// Gives back registers that no command was issued for.
    pub(crate) fn give_back(&self, registers: &[Register]) {
        self.lock().registers.free.extend(registers.iter().rev());
    }

    /// Notes that a register has files of weights that a loader has requested.
    pub(crate) fn note_files(&self, register: Register, wanted: Packed) {
        if let Some(log) = &mut self.lock().log {
            log.note_files(register, wanted);
        }
    }

    /// Notes that a register has a tensor of files in another one, which a loader has requested.
    pub(crate) fn note_weight(&self, register: Register, files: Register, request: Packed) {
        if let Some(log) = &mut self.lock().log {
            log.note_weight(register, files, request);
        }
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
        self.release(Command::KillReg { register });
    }

    /// Frees a program on all workers, behind all its runs. Never waits.
    pub(crate) fn forget_program(&self, program: u32) {
        self.release(Command::Forget { program });
    }

    /// Issues a command that frees something, at once or when all workers are there again.
    fn release(&self, command: Command) {
        let mut state = self.lock();
        // Without a session there is nothing to free.
        if state.ended.is_some() {
            return;
        }
        if state.links.are_complete() {
            self.release_in(&mut state, command);
        } else {
            state.deferred.push(command);
        }
    }

    /// Issues a command that frees something.
    pub(super) fn release_in(&self, state: &mut ControllerState, command: Command) {
        let register = if let Command::KillReg { register } = command { Some(register) } else { None };
        // Encoding so little cannot fail.
        if let Ok((queued, encoded)) = self.prepare(command) {
            self.push_in(state, &queued, encoded.as_ref());
            state.registers.free.extend(register);
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
            if let Err(error) = state.check() {
                return Poll::Ready(Err(error));
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
        state.check().is_err() || self.fits(&state)
    }

    pub(super) fn fits(&self, state: &ControllerState) -> bool {
        state.issued.saturating_sub(state.executed.least()) < self.options.window
    }

    /// Issues a command, whether there is credit or not.
    pub(crate) fn push(&self, command: Command) -> Result<u64> {
        self.push_as(Issuer::Caller, command)
    }

    /// Issues a command of this issuer, whether there is credit or not. Returns its number.
    pub(super) fn push_as(&self, issuer: Issuer, command: Command) -> Result<u64> {
        let (queued, encoded) = self.prepare(command)?;
        let mut state = self.lock();
        state.check_for(issuer)?;
        Ok(self.push_in(&mut state, &queued, encoded.as_ref()))
    }

    /// Returns a command as links take it.
    pub(super) fn prepare(&self, command: Command) -> Result<(Queued, Option<Encoded>)> {
        let encoded = if self.encodes { Some(command.encode()?) } else { None };
        Ok((Queued { cost: command.cost(), command: Arc::new(command), charge: None }, encoded))
    }

    /// Gives a command to all nodes that are there. Returns its number.
    pub(super) fn push_in(&self, state: &mut ControllerState, queued: &Queued, encoded: Option<&Encoded>) -> u64 {
        let command = &queued.command;
        state.sequence += 1;
        state.issued += queued.cost;
        let sequence = state.sequence;
        if matches!(**command, Command::InitCcl { .. }) {
            state.failures.watch(sequence);
        }
        if let Some(log) = &mut state.log {
            log.note(sequence, command, &state.devices);
        }
        // Under the lock, so that all links have all commands in one order.
        for link in state.links.present() {
            let bulk = self.layout.concerns(command.on(), link.workers());
            link.push(sequence, queued, encoded, bulk);
        }
        sequence
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
        let wakers = state.take_wakers();
        let links: Vec<_> = state.links.iter().cloned().collect();
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
        self.relays.close();
        links.iter().for_each(|link| link.close());
    }

    /// Breaks the collectives on all workers.
    pub(crate) fn abort_ccl(&self, reason: &str) -> Result<()> {
        let mut state = self.lock();
        state.check()?;
        let cause = RpcError::new(ErrorKind::Cancelled, format!("collectives were aborted: {reason}"));
        let news = state.collectives.abort(cause).then(|| state.collectives.epoch());
        drop(state);
        if let Some(epoch) = news {
            let cause = RpcError::new(ErrorKind::Cancelled, reason.to_owned());
            self.break_collectives(epoch, &cause);
        }
        Ok(())
    }

    /// Ends the collectives of an epoch on all workers that are there.
    pub(super) fn break_collectives(&self, epoch: u64, cause: &RpcError) {
        self.break_with_joins(epoch, cause, false);
    }

    /// Ends the collectives of an epoch on all workers that are there; if `and_joins` is set also
    /// those by which they join each other.
    pub(super) fn break_with_joins(&self, epoch: u64, cause: &RpcError, and_joins: bool) {
        // A host of this process may report at once, for which it needs the lock.
        let links: Vec<_> = self.lock().links.present().cloned().collect();
        links.iter().for_each(|link| link.break_collectives(epoch, cause, and_joins));
    }

    /// Returns the links to all nodes, also to those that are lost.
    pub(crate) fn links(&self) -> Vec<Arc<Link>> {
        self.lock().links.iter().cloned().collect()
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

/// Issuer of a command, which matters while workers are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Issuer {
    /// A user, who is refused then.
    Caller,
    /// The replacement of a lost worker, which is refused while one is lost.
    Replacement,
}

impl ControllerState {
    /// Checks that commands can be issued.
    ///
    /// # Errors
    ///
    /// The session has ended, or workers are missing.
    pub(crate) fn check(&self) -> Result<()> {
        self.check_for(Issuer::Caller)
    }

    pub(super) fn check_for(&self, issuer: Issuer) -> Result<()> {
        if let Some(error) = &self.ended {
            return Err(error.clone().into());
        }
        let is_open = match issuer {
            Issuer::Caller => self.links.are_complete(),
            Issuer::Replacement => !self.links.has_lost(),
        };
        if is_open { Ok(()) } else { self.links.missing().map_or(Ok(()), Err) }
    }

    /// Takes the wakers of all that wait: for room, and for reports of workers.
    pub(super) fn take_wakers(&mut self) -> Vec<Waker> {
        let mut wakers = std::mem::take(&mut self.room);
        wakers.extend(self.tickets.values_mut().filter_map(|ticket| ticket.waker.take()));
        wakers
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.relays.close();
        self.state.get_mut().links.iter().for_each(|link| link.close());
    }
}
