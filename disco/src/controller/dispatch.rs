//! The controller: gives commands their numbers, passes each to all links or to none, and knows what the workers have said.

use std::collections::HashMap;
use std::future::poll_fn;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};

use parking_lot::{Mutex, MutexGuard};
use bytes::Bytes;
use rpc_core::function::Object;
use rpc_core::{Device, ErrorKind, LocalValue, Pack, Packed, RpcError, Tensor, Value, blocking};

use crate::ccl::backend::Backend;
use crate::ccl::host::{Address, SessionKey};
use crate::completion::Completion;
use crate::controller::ccl_state::{CclState, Collectives};
use crate::error::{DiscoError, Failure, Result, WorkerId};
use crate::link::node_link::{Link, Upstream};
use crate::link::relay::{Closing, Wanted};
use crate::logs;
use crate::node::host::Leaf;
use crate::options::{Hosting, Options};
use crate::weights::progress::Watcher;
use crate::wire::command::{Command, Queued, Register};
use crate::wire::event::{Event, LocalContent};
use crate::worker::rendezvous::{Layout, Limits, Place, Plan, Way};

/// One session, seen from its controller.
pub(crate) struct Controller {
    this: Weak<Self>,
    pub(crate) layout: Layout,
    pub(crate) options: Options,
    pub(crate) links: Vec<Link>,
    /// Whether commands have to be encoded.
    encodes: bool,
    /// What is relayed here.
    relays: Arc<Closing>,
    state: Mutex<State>,
}

pub(crate) struct State {
    /// The number of the last command.
    sequence: u64,
    /// The credit that all commands have taken so far.
    issued: u64,
    /// Of that, what each worker has executed, as far as is known.
    executed: Vec<u64>,
    /// The last command that each worker is known to have executed.
    reached: Vec<u64>,
    registers: Registers,
    last_program: u32,
    last_loader: u64,
    /// Who is told of the progress of which loader.
    watchers: HashMap<u64, Arc<Watcher>>,
    last_ticket: u64,
    tickets: HashMap<u64, Ticket>,
    /// Failures that nobody has been told of, in the order in which they came.
    pub(crate) failures: Vec<Failure>,
    pub(crate) collectives: Collectives,
    pub(crate) ended: Option<RpcError>,
    /// Who waits for credit.
    room: Vec<Waker>,
}

/// The numbers of registers.
#[derive(Default)]
struct Registers {
    next: Register,
    /// Those whose kill has been issued: it comes before whatever uses them next.
    free: Vec<Register>,
}

/// Something that somebody waits for.
struct Ticket {
    /// How many workers have still to say so.
    waiting: u32,
    /// A tensor whose bytes are coming.
    incoming: Option<Tensor>,
    content: Option<std::result::Result<LocalValue, Failure>>,
    waker: Option<Waker>,
}

/// Takes a ticket back when nobody waits for it any more.
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
    pub(crate) fn new(layout: Layout, options: Options, links: Vec<Link>) -> Arc<Self> {
        let state = State {
            sequence: 0,
            issued: 0,
            executed: vec![0; layout.world_size as usize],
            reached: vec![0; layout.world_size as usize],
            registers: Registers::default(),
            last_program: 0,
            last_loader: 0,
            watchers: HashMap::new(),
            last_ticket: 0,
            tickets: HashMap::new(),
            failures: Vec::new(),
            collectives: Collectives::default(),
            ended: None,
            room: Vec::new(),
        };
        // Also where a host of this process passes them on: what cannot be encoded is to be refused before it has a number.
        let is_several = |link: &Link| link.nodes > 1 || link.info.leaves.len() > 1;
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

    /// Begins to talk to the hosts, and tells the workers how they meet.
    pub(crate) async fn start(&self) -> Result<()> {
        let this: Weak<dyn Upstream> = self.this.clone();
        for (number, link) in self.links.iter().enumerate() {
            link.start(number, &this).await?;
        }
        self.meet(0, Backend::default(), Vec::new()).await.map(drop)
    }

    /// Tells the workers how they meet in this epoch; gives the number of that command. Where there is an error they have not been told.
    pub(crate) async fn meet(&self, epoch: u64, backend: Backend, devices: Vec<Device>) -> Result<u64> {
        let way = match backend {
            // NCCL knows nothing of failures: beside it the ranks have what host memory has.
            Backend::Host | Backend::Nccl | Backend::Rccl => self.plan(epoch).await?,
            Backend::Mpi => self.plan_mpi()?,
        };
        let limits = Limits::of(&self.options);
        let plan = Packed::encode(&Plan { epoch, way, accelerated: backend.flavour(), limits, devices })?;
        self.lock().collectives.advance(epoch, backend);
        self.push(Command::InitCcl { plan })
    }

    /// How workers meet that are processes of one job of MPI.
    fn plan_mpi(&self) -> Result<Way> {
        let unfit = |why: String| DiscoError::from(RpcError::unsupported(format!("no collectives over MPI: {why}")));
        let mut ranks: Vec<u32> = Vec::new();
        let mut job: Option<&str> = None;
        let leaves = self.links.iter().flat_map(|link| &link.info.leaves);
        for (worker, leaf) in leaves.enumerate() {
            let Some(seat) = leaf.mpi.as_ref().filter(|_| leaf.count == 1) else {
                return Err(unfit(format!(
                    "the process of worker {worker} has {}; start each worker as a process of its own, as in: \
                     mpirun -n 4 rpc-server worker --mpi --controller ADDRESS",
                    if leaf.mpi.is_some() { "several workers" } else { "not started MPI" }
                )));
            };
            if *job.get_or_insert(&seat.job) != seat.job || ranks.contains(&seat.rank) {
                return Err(unfit(format!("worker {worker} is of another job than worker 0")));
            }
            ranks.push(seat.rank);
        }
        Ok(Way::Mpi { key: SessionKey::generate()?, encrypt: self.is_encrypted(), ranks })
    }

    /// Whoever could read or change the data could as well read or change the commands, where those are not encrypted.
    fn is_encrypted(&self) -> bool {
        self.links.iter().any(|link| link.is_encrypted)
    }

    async fn plan(&self, epoch: u64) -> Result<Way> {
        let leaves: Vec<&Leaf> = self.links.iter().flat_map(|link| &link.info.leaves).collect();
        if let [_] = leaves[..] {
            return Ok(Way::Threads);
        }
        let machine = leaves.first().map_or("", |leaf| &leaf.machine);
        let together = !machine.is_empty() && leaves.iter().all(|leaf| leaf.machine == machine);
        #[cfg(target_os = "linux")]
        if together
            && self.options.data_addresses.is_empty()
            && self.layout.world_size as usize <= crate::ccl::host::MAX_SHARED_RANKS
        {
            let (session, host) = self.far_end(0)?;
            let offer = session.get_function("disco.offer").await?;
            let tickets: Pack<Vec<crate::ccl::host::Ticket>> = offer.call((&host, epoch)).await?;
            return Ok(Way::Segments(tickets.0));
        }
        let nodes = self.links.iter().map(|link| link.nodes).sum();
        let addresses = self.data_addresses();
        let known = addresses.iter().flatten().count();
        // Without an address there may still be somebody who relays.
        let may_relay = self.options.allow_controller_relay || self.links.iter().any(|link| link.nodes > 1);
        if addresses.len() != nodes || known < nodes && !together && !may_relay {
            let why = format!(
                "the data addresses of {known} of {nodes} nodes are known, and not all are on one machine; give them all \
                 (Options::data_addresses, or --data-address there), or have the controller relay the data \
                 (Options::allow_controller_relay)"
            );
            return Ok(Way::Apart { why });
        }
        let this: Weak<dyn Upstream> = self.this.clone();
        let (mut world, mut groups, mut places) = (Vec::new(), Vec::new(), Vec::new());
        let machines = machines(&leaves);
        let mut addresses = addresses.into_iter();
        for (number, link) in self.links.iter().enumerate() {
            link.take_relays(number, &this).await?;
            let these: Vec<_> = addresses.by_ref().take(link.nodes).collect();
            // Where no address is known those beside the workers can still use this one, and a relay of their node.
            let listening = these.iter().map(|address| address.unwrap_or(Ipv4Addr::LOCALHOST.into())).collect();
            let listening = link.listen(listening).await?;
            // All nodes have as many workers.
            let per_node = link.workers().len() / link.nodes.max(1);
            for (at, (worker, one)) in link.workers().zip(listening).enumerate() {
                world.push(self.advertised(worker, one.world));
                groups.extend(one.group.map(|group| self.advertised(worker, group)));
                let is_local = these.get(at / per_node.max(1)).is_none_or(Option::is_none);
                places.push(Place { machine: machines[worker as usize], is_local });
            }
        }
        Ok(Way::Sockets { key: SessionKey::generate()?, encrypt: self.is_encrypted(), world, groups, places })
    }

    /// Where the workers of each node are to listen for data: as the settings say, or else the nodes themselves.
    fn data_addresses(&self) -> Vec<Option<IpAddr>> {
        let told = self.links.iter().flat_map(|link| link.info.data_addresses.iter().copied());
        let set = &self.options.data_addresses;
        if set.is_empty() { told.collect() } else { set.iter().copied().map(Some).collect() }
    }

    /// Where others reach what a worker listens at.
    fn advertised(&self, worker: u32, bound: Address) -> Address {
        match (bound, &self.options.advertise) {
            (Address::Tcp(bound), Some(advertise)) => Address::Tcp(advertise.address(WorkerId(worker), bound)),
            (bound, _) => bound,
        }
    }

    fn far_end(&self, link: usize) -> Result<(rpc_core::Session, rpc_core::RemoteObject)> {
        self.links[link].far_end().ok_or_else(|| DiscoError::Session(self.end_error()))
    }

    /// A register that nothing uses.
    pub(crate) fn take_register(&self) -> Register {
        let mut state = self.lock();
        state.registers.free.pop().unwrap_or_else(|| {
            state.registers.next += 1;
            state.registers.next - 1
        })
    }

    /// A number for a program, which no other has in this session.
    pub(crate) fn take_program(&self) -> u32 {
        let mut state = self.lock();
        state.last_program += 1;
        state.last_program
    }

    /// A number for a loader of weights, whose progress is told from now on.
    pub(crate) fn watch_loader(&self, watcher: Arc<Watcher>) -> u64 {
        let mut state = self.lock();
        state.last_loader += 1;
        let number = state.last_loader;
        state.watchers.insert(number, watcher);
        number
    }

    /// The progress of the loader is told no more.
    pub(crate) fn forget_loader(&self, number: u64) {
        let watcher = self.lock().watchers.remove(&number);
        drop(watcher);
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
    /// The session has ended; the command is too large; or credit is used up inside an async runtime.
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

    fn fits(&self, state: &State) -> bool {
        let slowest = state.executed.iter().copied().min().unwrap_or(0);
        state.issued.saturating_sub(slowest) < self.options.window
    }

    /// Issues a command, whether there is credit or not.
    pub(crate) fn push(&self, command: Command) -> Result<u64> {
        let encoded = if self.encodes { Some(command.encode()?) } else { None };
        let on = command.on();
        let queued = Queued { cost: command.cost(), command: Arc::new(command) };
        let mut state = self.lock();
        if let Some(error) = &state.ended {
            return Err(error.clone().into());
        }
        state.sequence += 1;
        state.issued += queued.cost;
        // Under the lock, so that all links have all commands in one order.
        for link in &self.links {
            let bulk = self.layout.concerns(on, link.workers());
            link.push(state.sequence, &queued, encoded.as_ref(), bulk);
        }
        Ok(state.sequence)
    }

    pub(crate) fn open_ticket(self: &Arc<Self>, waiting: u32) -> TicketGuard {
        let mut state = self.lock();
        state.last_ticket += 1;
        let ticket = state.last_ticket;
        state.tickets.insert(ticket, Ticket { waiting, incoming: None, content: None, waker: None });
        drop(state);
        TicketGuard { controller: Arc::clone(self), ticket }
    }

    /// Asks one worker, or all, to say when they have come here; then gives the failures that nobody has been told of.
    pub(crate) fn sync(self: &Arc<Self>, worker: Option<WorkerId>) -> Completion<()> {
        let guard = self.open_ticket(if worker.is_some() { 1 } else { self.layout.world_size });
        let command = Command::SyncWorker { ticket: guard.ticket, worker: worker.map(|worker| worker.0) };
        if let Err(error) = self.push(command) {
            return Completion::failed(error);
        }
        Completion::new(async move {
            poll_fn(|cx| guard.controller.poll_ticket(guard.ticket, cx)).await?;
            let mut state = guard.controller.lock();
            let all = std::mem::take(&mut state.failures);
            let (told, kept) = all.into_iter().partition(|one| worker.is_none_or(|worker| worker == one.worker));
            state.failures = kept;
            drop(state);
            let mut told: Vec<Failure> = told;
            told.sort_by_key(|failure| (failure.sequence, failure.worker));
            if told.is_empty() { Ok(()) } else { Err(DiscoError::Workers(told)) }
        })
    }

    /// Asks one worker for what a register holds. `command` is told the ticket.
    pub(crate) fn fetch(self: &Arc<Self>, command: impl FnOnce(u64) -> Command) -> Completion<LocalValue> {
        let guard = self.open_ticket(1);
        if let Err(error) = self.issue(command(guard.ticket)) {
            return Completion::failed(error);
        }
        Completion::new(async move {
            poll_fn(|cx| guard.controller.poll_ticket(guard.ticket, cx)).await?;
            let content =
                guard.controller.lock().tickets.get_mut(&guard.ticket).and_then(|ticket| ticket.content.take());
            match content {
                Some(Ok(value)) => Ok(value),
                Some(Err(failure)) => Err(DiscoError::Workers(vec![failure])),
                None => Err(RpcError::internal("a worker said nothing").into()),
            }
        })
    }

    pub(crate) fn poll_ticket(&self, ticket: u64, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let mut state = self.lock();
        let ended = state.ended.clone();
        match state.tickets.get_mut(&ticket) {
            Some(ticket) if ticket.waiting > 0 => match ended {
                Some(error) => Poll::Ready(Err(error.into())),
                None => {
                    ticket.waker = Some(cx.waker().clone());
                    Poll::Pending
                }
            },
            _ => Poll::Ready(Ok(())),
        }
    }

    fn settle(&self, ticket: u64, content: Option<std::result::Result<LocalContent, Failure>>) {
        let mut state = self.lock();
        // Nobody waits for it any more, perhaps.
        let Some(ticket) = state.tickets.get_mut(&ticket) else { return };
        ticket.waiting = ticket.waiting.saturating_sub(1);
        ticket.content = content.map(|content| {
            content.and_then(|content| match content {
                LocalContent::Value(value) => Ok(value),
                LocalContent::TensorComplete => match ticket.incoming.take() {
                    Some(tensor) => Ok(Value::Object(Object::Tensor(tensor))),
                    None => Err(Failure {
                        worker: WorkerId(0),
                        sequence: 0,
                        command: "copy".to_owned(),
                        cause: RpcError::new(ErrorKind::OutOfMemory, "no memory at the controller for the tensor"),
                    }),
                },
            })
        });
        let waker = if ticket.waiting == 0 { ticket.waker.take() } else { None };
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Ends the session: the first reason counts, and everybody who waits hears of it.
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

    /// Ends the session in good order, if the workers come to the end of their queues in time.
    pub(crate) fn shut_down(self: &Arc<Self>) -> Completion<()> {
        let guard = self.open_ticket(self.layout.world_size);
        let issued = self.push(Command::Shutdown { ticket: guard.ticket });
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

    /// The workers that have not executed a command yet, as the subject of a sentence about what was so.
    pub(crate) fn behind(&self, sequence: u64) -> String {
        let state = self.lock();
        let late = state.reached.iter().enumerate().filter(|(_, reached)| **reached < sequence);
        let late: Vec<String> = late.map(|(worker, _)| worker.to_string()).collect();
        match &late[..] {
            [one] => format!("worker {one} was"),
            several => format!("workers {} were", several.join(", ")),
        }
    }

    /// Breaks the collectives for everybody.
    pub(crate) fn abort_ccl(&self, reason: &str) -> Result<()> {
        let mut state = self.lock();
        if let Some(error) = &state.ended {
            return Err(error.clone().into());
        }
        let cause = RpcError::new(ErrorKind::Cancelled, format!("collectives were aborted: {reason}"));
        let news = state.collectives.abort(cause).then(|| state.collectives.epoch());
        drop(state);
        if let Some(epoch) = news {
            self.links.iter().for_each(|link| link.break_collectives(epoch, reason));
        }
        Ok(())
    }

    /// Whether the collectives run.
    pub(crate) fn ccl_state(&self) -> CclState {
        let state = self.lock();
        state.ended.clone().map_or_else(|| state.collectives.state(), CclState::Ended)
    }

    fn end_error(&self) -> RpcError {
        let ended = self.lock().ended.clone();
        ended.unwrap_or_else(|| RpcError::new(ErrorKind::Closed, "the session is ending"))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl Upstream for Controller {
    fn handle(&self, event: Event) {
        match event {
            Event::Progress { worker, sequence, cost } => {
                let mut state = self.lock();
                if let Some(reached) = state.reached.get_mut(worker.index()) {
                    *reached = sequence.max(*reached);
                }
                // No more than there was, whatever a node says.
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
                let watcher = self.lock().watchers.get(&loader).cloned();
                if let Some(watcher) = watcher {
                    watcher.add(bytes);
                }
            }
            Event::Lost { worker, error } => {
                let link = self.links.iter().find(|link| link.workers().contains(&worker.0));
                let place = link.map_or_else(String::new, |link| format!(" at {}", link.name));
                self.end(error.context(format_args!("worker {worker}{place} was lost")));
            }
        }
    }

    fn relay(&self, wanted: Wanted) {
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

    /// That ends the session.
    fn lose(&self, link: usize, error: RpcError) {
        let link = &self.links[link];
        let text = format!("{}: {}", link.who_was_lost(), error.message());
        let kind =
            if error.ends_session() && error.kind() != ErrorKind::Closed { error.kind() } else { ErrorKind::PeerLost };
        self.end(RpcError::new(kind, text).may_have_run(true));
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.relays.close();
        self.links.iter().for_each(Link::close);
    }
}

/// Which machine each worker is on, by a number.
fn machines(leaves: &[&Leaf]) -> Vec<u32> {
    let number = |(at, leaf): (usize, &&Leaf)| {
        let is_same = |other: &&Leaf| !leaf.machine.is_empty() && other.machine == leaf.machine;
        // Where that is not known each process has its own.
        let first = leaves.iter().position(is_same).unwrap_or(at);
        std::iter::repeat_n(first as u32, leaf.count as usize)
    };
    leaves.iter().enumerate().flat_map(number).collect()
}

fn fill(tensor: &Tensor, offset: u64, bytes: &Bytes) {
    let filled = tensor.byte_range(offset, bytes.len() as u64).and_then(|range| {
        let (_, mut borrow) = tensor.write()?.into_parts();
        borrow.copy_in(range.start, bytes)
    });
    if let Err(error) = filled {
        tracing::error!(%error, "a worker sent bytes that do not fit its tensor");
    }
}
