//! A controller for tests of a node, below the API of sessions: it sends the commands that a test
//! gives it.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rpc_core::{
    Context, FunctionModule, LoadRequest, LocalSession, LocalSessionBuilder, Module, ModuleLoader, Pack, Packed,
    Registry, RemoteFunction, RemoteObject, Result, Session, SessionLimits, Value,
};

use super::functions::register;
use crate::ccl::communicators::CollectiveTimeouts;
use crate::ccl::host::SessionKey;
use crate::error::Failure;
use crate::options::Hosting;
use crate::wire::command::Command;
use crate::wire::event::{Event, decode_events};
use crate::wire::mesh::Mesh;
use crate::wire::plan::{JoinPlan, Layout, ListenAddresses, Plan, WorkerLocation};
use crate::wire::set_up::{MESSAGES, NodeInfo, SetUp};
use crate::worker::command_feed::BLOCK;

/// Loader of modules `test:…`, each of which has a function `f`.
struct TestLoader;

impl ModuleLoader for TestLoader {
    fn name(&self) -> &str {
        "test"
    }

    fn accepts(&self, path: &str) -> bool {
        path.starts_with("test:")
    }

    fn load(&self, _: &LoadRequest<'_>) -> Result<Arc<dyn Module>> {
        Ok(Arc::new(FunctionModule::new("test").add("f", || 1_i64)))
    }
}

/// Returns a session with the functions of a node.
pub(super) fn session() -> LocalSessionBuilder {
    let registry = Registry::new();
    register(&registry);
    registry.add_loader(Arc::new(TestLoader));
    registry.add_inline("held", |context: Context| context.usage().memory_bytes);
    LocalSession::builder(registry)
}

/// Returns the set-up of a host with one worker, a thread.
pub(super) fn set_up(worker: u32, layout: Layout) -> SetUp {
    SetUp {
        version: MESSAGES.version(),
        layout,
        first: worker,
        count: 1,
        hosting: Hosting::Threads,
        pin: false,
        logs: None,
        report_every: u64::MAX,
        keep_alive_ms: 1000,
        children: Vec::new(),
        session: None,
        begin_after: None,
    }
}

/// Returns a plan by which the workers at these addresses join each other.
pub(super) fn join_sockets(listening: &[ListenAddresses], epoch: u64, is_tentative: bool, key: &SessionKey) -> Command {
    let locations = vec![WorkerLocation { machine: 0, is_local: false }; listening.len()];
    let world = listening.iter().map(|one| one.world).collect();
    let join = JoinPlan::Sockets { key: key.clone(), encrypt: false, world, groups: Vec::new(), locations };
    let long = Duration::from_secs(60);
    let timeouts = CollectiveTimeouts { entry: None, stall: long, join: long, direct: long };
    let plan = Plan { epoch, join, nccl: false, timeouts, devices: Vec::new(), is_tentative, meshes: Vec::new() };
    Command::InitCcl { plan: Packed::encode(&plan).unwrap() }
}

/// A controller of one host, which sends whatever a test wants.
pub(super) struct RawController {
    pub(super) session: Session,
    submit: RemoteFunction,
    pub(super) events: RemoteFunction,
    pub(super) host: RemoteObject,
    /// Number of workers of the host.
    workers: u32,
    sequence: u64,
    ticket: u64,
}

impl RawController {
    /// Opens a host with one worker in a session that may hold so much memory.
    pub(super) fn new(max_memory: u64) -> Self {
        Self::of_worker(0, 1, max_memory)
    }

    /// As [`new`](Self::new), for one worker of a session of so many.
    pub(super) fn of_worker(worker: u32, world_size: u32, max_memory: u64) -> Self {
        let limits = SessionLimits { max_memory, ..SessionLimits::default() };
        let set_up = set_up(worker, Layout { world_size, num_groups: 1 });
        Self::open(session().limits(limits), &set_up).unwrap()
    }

    /// Opens the host of a set-up in a session.
    pub(super) fn open(session: LocalSessionBuilder, set_up: &SetUp) -> Result<Self> {
        Self::open_in(Session::new(session.build()), set_up)
    }

    /// Opens the host of a set-up in a session that there is.
    pub(super) fn open_in(session: Session, set_up: &SetUp) -> Result<Self> {
        let function = |name: &str| session.get_function(name).wait().unwrap();
        let (host, _): (RemoteObject, Pack<NodeInfo>) = function("disco.open").call((Pack(set_up),)).wait()?;
        let (submit, events) = (function("disco.submit"), function("disco.events"));
        Ok(Self { session, submit, events, host, workers: set_up.count, sequence: 1, ticket: 0 })
    }

    /// Lets the workers listen for data on this machine; returns their addresses.
    pub(super) fn listen(&self) -> Result<Vec<ListenAddresses>> {
        let listen = self.session.get_function("disco.listen").wait()?;
        let addresses: Vec<IpAddr> = vec![[127, 0, 0, 1].into()];
        let listening: Pack<Vec<ListenAddresses>> =
            listen.call((&self.host, Pack(addresses), Pack(Vec::<Mesh>::new()))).wait()?;
        Ok(listening.0)
    }

    /// Sends commands in one batch.
    pub(super) fn submit(&mut self, commands: impl IntoIterator<Item = Command>) -> Result<()> {
        let (mut heads, mut bulk, mut count) = (Vec::new(), Vec::new(), 0);
        for command in commands {
            let encoded = command.encode()?;
            heads.extend_from_slice(&encoded.head);
            bulk.extend(encoded.bulk);
            count += 1;
        }
        let bulk: Vec<Bytes> = bulk;
        self.submit.call::<()>((&self.host, self.sequence, Bytes::from(heads), bulk)).wait()?;
        self.sequence += count;
        Ok(())
    }

    /// Waits until the workers have executed everything. Returns the failures on the way.
    pub(super) fn sync(&mut self) -> Vec<Failure> {
        self.sync_before([])
    }

    /// As [`sync`](Self::sync), with commands that the worker executes next, in the same batch.
    pub(super) fn sync_before(&mut self, next: impl IntoIterator<Item = Command>) -> Vec<Failure> {
        self.ticket += 1;
        let wanted = self.ticket;
        let sync = Command::SyncWorker { ticket: wanted, worker: None };
        self.submit([sync].into_iter().chain(next)).unwrap();
        let (mut failures, mut behind) = (Vec::new(), self.workers);
        loop {
            let events = self.events.call::<Value>((&self.host,)).wait().unwrap();
            for event in decode_events(events).unwrap() {
                match event {
                    Event::Failed(failure) => failures.push(failure),
                    Event::Reached { ticket } if ticket == wanted => behind -= 1,
                    _ => {}
                }
            }
            if behind == 0 {
                return failures;
            }
        }
    }

    /// Makes the worker give up the commands of the last batches: a block of commands is kept, with
    /// the charge of its batch, until the next one is begun.
    pub(super) fn begin_block(&mut self) -> Vec<Failure> {
        self.submit((0..BLOCK).map(|_| Command::Nothing)).unwrap();
        self.sync()
    }

    /// Returns the bytes that the session holds, as they are charged.
    pub(super) fn held(&self) -> u64 {
        self.session.get_function("held").wait().unwrap().call(()).wait().unwrap()
    }
}
