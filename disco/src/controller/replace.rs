//! Replacement of lost workers: the session pauses, another node takes their place, state is made
//! again, and all go on.
//!
//! ```text
//!   Running ── it is lost ──► Lost ── another is opened ──► Replaced ── restored ──► Running
//!                              ▲                               │
//!                              └──────── that is lost ─────────┘
//! ```
//!
//! While a node is lost no command is issued, so that the one in its place begins behind a number
//! that stays. Commands that free something wait in [`ControllerState::deferred`]. When no node is
//! lost any more, all workers make the collectives anew, and those that are new get their
//! functions, modules and programs by the commands of the [`RestoreLog`](super::restore_log).

use std::fmt;
use std::future::poll_fn;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;
use rpc_core::{ErrorKind, RpcError, Value};

use crate::completion::Completion;
use crate::controller::dispatch::{Controller, ControllerState, Issuer, Restore};
use crate::controller::join_plan::Attempt;
use crate::controller::session::DiscoSession;
use crate::error::{DiscoError, Failure, Result, WorkerId};
use crate::link::node_link::Link;
use crate::link::replacement::{Origin, Replacement};
use crate::link::session_source::Source;
use crate::link::upstream::Upstream;
use crate::options::OnLoss;
use crate::wire::command::{Command, MAX_REGISTER_GAP, Queued, Register};
use crate::wire::set_up::{CommandPosition, SetUp};

/// Most losses in its own replacements that [`DiscoSession::recover`] replaces workers after.
const MAX_LOSSES: usize = 16;

/// Longest wait for the word of a node that it has lost the process of a worker by which other
/// workers have found their collectives broken.
const WORD_OF_LOSS: Duration = Duration::from_secs(1);

/// Registration of a function by [`DiscoSession::on_replace`], which ends when this is dropped.
#[must_use = "the function is registered for as long as this lives"]
pub struct RestoreGuard {
    _restore: Arc<Mutex<Restore>>,
}

/// Outcome of restoring new workers: the failures of workers so far; and true if none of those is
/// of making functions, modules and programs again.
type Restored = (Vec<Failure>, bool);

impl fmt::Debug for RestoreGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RestoreGuard")
    }
}

impl DiscoSession {
    /// Replaces a worker that is lost, and with it the other workers of its node, in a session that
    /// [awaits that](OnLoss::AwaitReplacement).
    ///
    /// The new node is opened. If workers of other nodes are lost, too, the session waits for
    /// their replacement, and this resolves. Otherwise:
    ///
    /// 1. The workers finish what was issued before. Collectives are broken since the loss, so
    ///    that none waits in one.
    /// 2. All make the collectives anew in the next epoch, with the session's meshes, as
    ///    [`reinit_ccl`](Self::reinit_ccl) does.
    /// 3. The new workers look up the functions, load the modules and get the programs that the
    ///    session has. A module has the state that loading gives it.
    /// 4. Operations are possible again, and the functions of [`on_replace`](Self::on_replace) are
    ///    called.
    ///
    /// Other registers have no value on the new workers, and reading one is an error that names
    /// register and worker; on the others they have the values that they had. What the workers have
    /// executed of the last commands may differ between them: a program goes back to a point from
    /// which it has all values.
    ///
    /// Gives the failures of commands that were issued before and have not been reported: of
    /// collectives that the loss has broken, but also others, whichever thread has issued them. The
    /// next sync does not tell them again, so that a thread which issues commands and does not
    /// replace workers may not hear of a loss between two of its operations: have one thread do
    /// both, or tell the others. After an error that does not have them the next sync tells them.
    ///
    /// Its errors are:
    ///
    /// * [`InvalidArgument`](rpc_core::ErrorKind::InvalidArgument): the worker is not lost, or the
    ///   session does not await replacements.
    /// * [`Busy`](rpc_core::ErrorKind::Busy): another replacement, or another making of the
    ///   collectives, is in progress.
    /// * the new node cannot be opened, which may take as long as its transport, tracker or
    ///   [`join_timeout`](crate::SocketSession::join_timeout) allows, and then
    ///   [`init_timeout`](crate::Options::init_timeout): the worker stays lost.
    /// * what has ended the session, also while it waits for the new node.
    /// * [`DiscoError::Lost`]: a worker, also a new one, was lost meanwhile.
    /// * those of [`reinit_ccl`](Self::reinit_ccl): the worker is to be replaced again.
    /// * failures of new workers in making their functions, modules and programs, or the error of a
    ///   function of [`on_replace`](Self::on_replace): operations are possible again.
    pub fn replace(&self, worker: WorkerId, replacement: Replacement) -> Completion<Vec<Failure>> {
        if worker.0 >= self.num_workers() {
            let text = format!("there is no worker {worker} in a session of {}", self.num_workers());
            return Completion::failed(DiscoError::invalid(text));
        }
        let session = self.clone();
        Completion::spawn(async move { session.replace_in_turn(worker, replacement).await })
    }

    /// Replaces all workers that are lost, each by what `rule` says, as [`replace`](Self::replace)
    /// does. A worker that is lost meanwhile is replaced, too. If none is lost it calls the
    /// functions of [`on_replace`](Self::on_replace) for workers whose state they could not
    /// restore, or does nothing. `rule` is called on a thread of the runtime, and must not block.
    ///
    /// ```no_run
    /// # use disco::{DiscoSession, Replacement, Result};
    /// # fn step(session: &DiscoSession) -> Result<bool> { Ok(false) }
    /// # fn train(session: &DiscoSession) -> Result<()> {
    /// loop {
    ///     match step(session) {
    ///         Ok(true) => continue,
    ///         Ok(false) => return Ok(()),
    ///         Err(error) if !error.lost_workers().is_empty() => {
    ///             session.recover(|_| Replacement::relaunched()).wait()?;
    ///             // ... and go back to the last checkpoint.
    ///         }
    ///         Err(error) => return Err(error),
    ///     }
    /// }
    /// # }
    /// ```
    ///
    /// Gives the failures of all replacements. Its errors are those of [`replace`](Self::replace),
    /// and [`DiscoError::Lost`] if workers are lost again and again meanwhile.
    pub fn recover(&self, mut rule: impl FnMut(WorkerId) -> Replacement + Send + 'static) -> Completion<Vec<Failure>> {
        let session = self.clone();
        Completion::spawn(async move {
            let mut failures = Vec::new();
            let outcome = session.replace_all(&mut rule, &mut failures).await;
            if outcome.is_err() {
                session.put_back(std::mem::take(&mut failures));
            }
            outcome.map(|()| failures)
        })
    }

    /// Replaces all workers that are lost, and adds the failures of the replacements to `failures`.
    async fn replace_all(
        &self,
        rule: &mut (impl FnMut(WorkerId) -> Replacement + Send),
        failures: &mut Vec<Failure>,
    ) -> Result<()> {
        // Each node is replaced once, and again after each loss.
        let mut rounds = self.controller().links().len() + MAX_LOSSES;
        let mut losses = 0;
        while let Some(worker) = self.lost_workers().first().copied() {
            match self.replace_in_turn(worker, rule(worker)).await {
                Ok(told) => failures.extend(told),
                // The next round replaces those.
                Err(error) if !error.lost_workers().is_empty() && losses < MAX_LOSSES => losses += 1,
                Err(error) => return Err(error),
            }
            rounds -= 1;
            if rounds == 0 {
                return self.controller().lock().links.missing().map_or(Ok(()), Err);
            }
        }
        // Those of an earlier replacement whose functions failed.
        let is_unrestored = !self.controller().lock().unrestored.is_empty();
        if is_unrestored { self.call_restorers().await } else { Ok(()) }
    }

    /// Returns the workers that are to be replaced before the session goes on. Never waits.
    pub fn lost_workers(&self) -> Vec<WorkerId> {
        let missing = self.controller().lock().links.missing();
        missing.map_or_else(Vec::new, |error| error.lost_workers().to_vec())
    }

    /// Registers a function that restores the state of workers that have replaced lost ones: it is
    /// called at the end of each replacement, on a thread that may block, with those workers. It
    /// may use all operations of the session; values of single workers are set by
    /// [`debug_set_register`](Self::debug_set_register). Functions are called in the order of
    /// their registration, until one fails. The function stays registered until the guard is
    /// dropped. The workers are also those of an earlier replacement whose functions failed, such
    /// as by another loss.
    pub fn on_replace(&self, restore: impl FnMut(&Self, &[WorkerId]) -> Result<()> + Send + 'static) -> RestoreGuard {
        let mut restore = restore;
        let restore = move |controller: &Arc<Controller>, workers: &[WorkerId]| {
            restore(&Self::new(Arc::clone(controller)), workers)
        };
        let restore: Arc<Mutex<Restore>> = Arc::new(Mutex::new(restore));
        let mut state = self.controller().lock();
        state.restorers.retain(|known| known.strong_count() > 0);
        state.restorers.push(Arc::downgrade(&restore));
        drop(state);
        RestoreGuard { _restore: restore }
    }

    /// Replaces a worker, and has the functions of users restore its state, also if it has failed
    /// to make functions, modules or programs again.
    async fn replace_in_turn(&self, worker: WorkerId, replacement: Replacement) -> Result<Vec<Failure>> {
        let controller = self.controller();
        let Some((failures, is_made_again)) = controller.replace(worker, replacement).await? else {
            return Ok(Vec::new());
        };
        match self.call_restorers().await {
            Ok(()) if is_made_again => Ok(failures),
            Ok(()) => Err(DiscoError::Workers(failures)),
            // The failures of the workers are the cause of others, unless a worker is lost again.
            Err(error) if !is_made_again && error.lost_workers().is_empty() => {
                tracing::warn!(%error, "a function that restores workers has failed after their own failures");
                Err(DiscoError::Workers(failures))
            }
            Err(error) => {
                self.put_back(failures);
                Err(error)
            }
        }
    }

    /// Has the functions of users restore the state of all new workers. If one fails, the next
    /// replacement calls them with these workers again.
    async fn call_restorers(&self) -> Result<()> {
        let (restorers, workers) = {
            let mut state = self.controller().lock();
            let restorers: Vec<_> = state.restorers.iter().filter_map(Weak::upgrade).collect();
            (restorers, std::mem::take(&mut state.unrestored))
        };
        let (controller, new) = (Arc::clone(self.controller()), workers.iter().copied().collect::<Vec<_>>());
        let restoring = tokio::task::spawn_blocking(move || {
            restorers.iter().try_for_each(|restore| {
                let mut restore = restore.try_lock().ok_or_else(|| {
                    let text = "a function that restores workers is running already, and was not called for others";
                    RpcError::new(ErrorKind::Busy, text)
                })?;
                restore(&controller, &new)
            })
        });
        let panicked = |error| RpcError::internal(format!("restoring a worker panicked: {error}")).into();
        let restored = restoring.await.unwrap_or_else(|error| Err(panicked(error)));
        if restored.is_err() {
            self.controller().lock().unrestored.extend(workers);
        }
        restored
    }

    /// Leaves failures that have been taken to the next sync.
    fn put_back(&self, failures: Vec<Failure>) {
        let mut state = self.controller().lock();
        failures.into_iter().for_each(|failure| state.failures.add(failure));
    }
}

impl Controller {
    /// Takes the loss of a worker, and with it of its node, for a reason that names it: the session
    /// pauses, or ends if it does not await a replacement.
    pub(super) fn lose_node(&self, number: usize, worker: WorkerId, error: RpcError) {
        let mut state = self.lock();
        if state.ended.is_some() {
            return;
        }
        let is_replaceable = |link: &Link| link.is_remote() && link.nodes == 1;
        if self.options.on_loss == OnLoss::EndSession
            || !state.has_started
            || state.links.numbered_link(number).is_some_and(|link| !is_replaceable(link))
        {
            drop(state);
            return self.end(error);
        }
        let Some(lost) = state.links.lose(number, error.clone()) else { return };
        tracing::warn!(%error, "a disco session waits for the replacement of lost workers");
        let epochs = state.collectives.lose(worker, error.clone());
        let missing = state.links.missing();
        for ticket in state.tickets.values_mut().filter(|ticket| ticket.waiting > 0) {
            ticket.failed.clone_from(&missing);
        }
        let wakers = state.take_wakers();
        drop(state);
        wakers.into_iter().for_each(std::task::Waker::wake);
        lost.close();
        self.break_with_joins(epochs[0], &error, true);
        if epochs[1] != epochs[0] {
            self.break_with_joins(epochs[1], &error, true);
        }
    }

    /// Replaces the node of a worker. Returns the outcome of restoring it, or nothing if others are
    /// lost, too.
    async fn replace(self: &Arc<Self>, worker: WorkerId, replacement: Replacement) -> Result<Option<Restored>> {
        let (number, set_up) = self.begin_replacement(worker)?;
        let replaced = self.open_and_restore(number, set_up, replacement).await;
        self.lock().collectives.finish();
        replaced
    }

    /// Returns the error of a caller, or the loss that has led to it. The others may notice that
    /// one is lost, by their collectives, before the link to it does.
    pub(super) async fn find_loss(&self, error: DiscoError) -> DiscoError {
        if self.options.on_loss == OnLoss::EndSession || !self.lock().collectives.is_affected() {
            return error;
        }
        self.probe().await;
        if let (Some(this), Ok(runtime)) = (self.this.upgrade(), crate::runtime::runtime()) {
            let told = async move { tokio::time::timeout(WORD_OF_LOSS, this.word_of_loss()).await };
            // Without word the error stays as it is.
            _ = runtime.spawn(told).await;
        }
        let state = self.lock();
        if state.ended.is_some() { error } else { state.links.missing().unwrap_or(error) }
    }

    /// Resolves when a worker is known to be lost, or at once if no worker of another process is
    /// said to have broken the collectives. A node that answers may have lost a process below it,
    /// and the word of that comes apart from the answers.
    async fn word_of_loss(&self) {
        poll_fn(|cx| {
            let mut state = self.lock();
            let culprit = state.collectives.culprit();
            let link = culprit.and_then(|worker| state.links.of_worker(worker.0));
            if state.ended.is_some() || !state.links.are_complete() || !link.is_some_and(|link| link.is_remote()) {
                return Poll::Ready(());
            }
            // Losses wake those that wait for room.
            state.room.push(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Asks all nodes whether they are there, and records those that are not as lost.
    async fn probe(&self) {
        let links = self.lock().links.numbered();
        let mut asked = Vec::new();
        for (number, link) in links {
            if let Some((session, _)) = link.far_end().filter(|_| link.is_remote()) {
                // All are asked before the first answer is waited for.
                asked.push((number, session.get_function("disco.version").start()));
            }
        }
        for (number, answer) in asked {
            if let Err(error) = answer.await
                && error.ends_session()
            {
                self.lose(number, error);
            }
        }
    }

    /// Begins to replace the node of a worker. Returns the number of its link, and the set-up of
    /// the node in its place.
    fn begin_replacement(&self, worker: WorkerId) -> Result<(usize, SetUp)> {
        let mut state = self.lock();
        if let Some(error) = &state.ended {
            return Err(error.clone().into());
        }
        if self.options.on_loss == OnLoss::EndSession {
            return Err(DiscoError::invalid(
                "the loss of a worker ends this session: start it with Options::on_loss as \
                 OnLoss::AwaitReplacement to replace workers",
            ));
        }
        let Some((number, workers)) = state.links.replaceable(worker.0) else {
            return Err(DiscoError::invalid(format!("worker {worker} is not lost: only a lost one is replaced")));
        };
        state.collectives.begin()?;
        let position = CommandPosition { sequence: state.sequence, credit: state.issued };
        let (first, count) = (workers.start, workers.end - workers.start);
        Ok((number, SetUp { first, count, begin_after: Some(position), ..self.set_up.clone() }))
    }

    async fn open_and_restore(
        self: &Arc<Self>,
        number: usize,
        set_up: SetUp,
        replacement: Replacement,
    ) -> Result<Option<Restored>> {
        let limit = self.options.init_timeout;
        let opening = async {
            let source = self.find(&set_up, replacement).await?;
            let opened = tokio::time::timeout(limit, source.open(set_up)).await;
            let late =
                |_| RpcError::new(ErrorKind::DeadlineExceeded, format!("the new node is not open after {limit:?}"));
            Ok::<_, DiscoError>(opened.map_err(late)??)
        };
        // The end of the session ends the wait for a node, too.
        let opened = self.relays.until(opening).await;
        let link = opened.unwrap_or_else(|| Err(self.end_error().into()))?;
        let own = self.install(number, link)?;
        {
            let state = self.lock();
            if state.links.has_lost() {
                let is_own = state.links.is_lost(own);
                return state.links.missing().filter(|_| is_own).map_or(Ok(None), Err);
            }
        }
        match self.restore().await {
            Ok(restored) => Ok(Some(restored)),
            Err(error) => {
                self.probe().await;
                let state = self.lock();
                let is_lost = state.ended.is_none() && state.links.has_lost();
                Err(state.links.missing().filter(|_| is_lost).unwrap_or(error))
            }
        }
    }

    /// Finds the node that is to take the place of another one.
    async fn find(&self, set_up: &SetUp, replacement: Replacement) -> Result<Source> {
        match (replacement.0, &self.relaunch) {
            (Origin::Found(found), _) => found.await,
            (Origin::Relaunched, Some(relaunch)) => relaunch(set_up.first..set_up.first + set_up.count).await,
            (Origin::Relaunched, None) => Err(DiscoError::invalid(
                "the session was launched over sessions of the caller: say by what the worker is replaced, such as \
                 Replacement::over",
            )),
        }
    }

    /// Puts a link in the place of the one with this number, and starts it. Returns its own number.
    fn install(&self, number: usize, link: Link) -> Result<usize> {
        let link = Arc::new(link);
        let this: Weak<dyn Upstream> = self.this.clone();
        let mut state = self.lock();
        if let Some(error) = &state.ended {
            let error = error.clone();
            drop(state);
            link.close();
            return Err(error.into());
        }
        let (issued, sequence) = (state.issued, state.sequence);
        for worker in link.workers() {
            let worker = worker as usize;
            state.executed.raise(worker, issued);
            if let Some(reached) = state.reached.get_mut(worker) {
                *reached = sequence;
            }
        }
        let installed = state.links.replace(number, Arc::clone(&link));
        drop(state);
        let Ok((own, before)) = installed else {
            link.close();
            return Err(RpcError::internal("a node was replaced twice at once").into());
        };
        before.close();
        link.start(own, &this)?;
        Ok(own)
    }

    /// Makes the collectives anew, and the functions, modules and programs of new workers; then
    /// lets the session go on.
    async fn restore(self: &Arc<Self>) -> Result<Restored> {
        let issuer = Issuer::Replacement;
        let attempt = {
            let state = self.lock();
            let (backend, devices) = (state.collectives.backend(), state.devices.to_vec());
            Attempt { issuer, backend, devices, meshes: state.meshes.clone() }
        };
        self.make_ccl(&attempt).await?;
        let before = self.lock().sequence;
        self.replay(&mut self.lock())?;
        // A module may take long, and a worker that is lost meanwhile ends the wait.
        self.all_reach(issuer).1.await?;
        let mut state = self.lock();
        state.check_for(issuer)?;
        let failures = state.failures.take(None);
        let new: Vec<_> = state.links.replaced().map(WorkerId).collect();
        state.unrestored.extend(new);
        state.links.complete();
        for command in std::mem::take(&mut state.deferred) {
            self.release_in(&mut state, command);
        }
        let is_made_again = failures.iter().all(|failure| failure.sequence <= before);
        Ok((failures, is_made_again))
    }

    /// Issues the commands by which new workers get their functions, modules and programs. For the
    /// others each is a command that does nothing.
    fn replay(&self, state: &mut ControllerState) -> Result<()> {
        state.check_for(Issuer::Replacement)?;
        let scratch = state.registers.take();
        let new: Vec<_> = state.links.new_links().cloned().collect();
        let replay = |link: &Arc<Link>| {
            let log = state.log.as_ref();
            let mut commands = room_for_registers(link.workers(), state.registers.end());
            commands.extend(log.iter().flat_map(|log| log.replay(&link.workers(), &state.devices, scratch)));
            commands
        };
        let commands: Vec<_> = new.iter().map(|link| (link, replay(link))).collect();
        state.registers.give_back(scratch);
        for (link, commands) in commands {
            for command in commands {
                let encoded = command.encode()?;
                let queued = Queued { cost: command.cost(), command, charge: None };
                let nothing = Queued { command: Arc::new(Command::Nothing), ..queued.clone() };
                let none = Command::Nothing.encode()?.with_credit(queued.cost);
                state.sequence += 1;
                state.issued += queued.cost;
                for one in state.links.present() {
                    if Arc::ptr_eq(one, link) {
                        one.push(state.sequence, &queued, Some(&encoded), false);
                    } else {
                        one.push(state.sequence, &nothing, Some(&none), false);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Returns the commands after which these workers may set all registers before `end`, which they
/// may otherwise not at once.
fn room_for_registers(workers: Range<u32>, end: Register) -> Vec<Arc<Command>> {
    let steps = (0..end).step_by(MAX_REGISTER_GAP - 1).skip(1);
    let grow = |to| {
        let set = workers.clone().map(move |worker| Command::DebugSetRegister { worker, to, value: Value::Null });
        set.chain([Command::KillReg { register: to }]).map(Arc::new)
    };
    steps.flat_map(grow).collect()
}
