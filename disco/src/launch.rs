//! Launching: where the workers of a session run.

use std::sync::Arc;
use std::time::Duration;

use rpc_core::{LocalSession, Registry, RpcError, Session, SharedSession};
use rpc_transports::{Address, Connector, OpenRequest, ServeOptions, Server, TokioSpawner};

use crate::completion::Completion;
use crate::controller::Controller;
use crate::error::{DiscoError, Result};
use crate::host::{SetUp, register};
use crate::link::{Inbox, Link};
use crate::options::Options;
use crate::plane::Layout;
use crate::session::DiscoSession;

/// A session whose workers are threads of this process.
#[derive(Debug)]
pub struct ThreadedSession {
    layout: Layout,
    registry: Registry,
    options: Options,
}

impl ThreadedSession {
    /// So many workers, in so many groups of equal size.
    #[must_use]
    pub fn new(num_workers: u32, num_groups: u32) -> Self {
        let layout = Layout { world_size: num_workers, num_groups };
        Self { layout, registry: Registry::new(), options: Options::default() }
    }

    /// The functions of the workers. Those of disco are added.
    #[must_use]
    pub fn registry(mut self, registry: Registry) -> Self {
        self.registry = registry;
        self
    }

    /// Settings of the session.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Starts the workers.
    pub fn start(self) -> Completion<DiscoSession> {
        register(&self.registry);
        let session = Session::new(LocalSession::new(self.registry));
        let nodes = vec![(self.layout.world_size, Source::Ready(session, "this process".to_owned()))];
        launch(self.layout, nodes, self.options)
    }
}

/// The first argument of a program that is started as its own worker.
const WORKER: &str = "--disco-worker";

/// Serves the functions of `registry`, and disco's own, as a worker process and exits, if this process was started as one: with the first argument
/// `--disco-worker`. Otherwise returns at once.
///
/// A program that calls this first thing in `main`, before anything is printed, is its own worker: see [`ProcessSession`].
pub fn serve_if_worker(registry: &Registry) {
    if std::env::args().nth(1).as_deref() != Some(WORKER) {
        return;
    }
    register(registry);
    let code = match serve_stdio(registry) {
        Ok(()) => 0,
        Err(error) => {
            tracing::error!(%error, "a worker process cannot serve");
            1
        }
    };
    std::process::exit(code);
}

/// Serves one session over standard input and output until that ends.
fn serve_stdio(registry: &Registry) -> rpc_core::Result<()> {
    let runtime = crate::runtime::runtime()?;
    runtime.block_on(async {
        let channel = rpc_transports::child::stdio_channel().await;
        let channel = channel.map_err(|error| rpc_transports::ConnectError::from(error).into_rpc_error())?;
        let registry = registry.clone();
        let open = move |_: &OpenRequest| -> rpc_core::Result<SharedSession> {
            let spawner = Arc::new(TokioSpawner::current());
            Ok(Arc::new(LocalSession::builder(registry.clone()).spawner(spawner).build()))
        };
        let server = Server::new(Arc::new(open), ServeOptions::default());
        server.serve_channel(channel);
        server.idle().await;
        Ok(())
    })
}

/// A session whose workers are child processes of this one.
///
/// ```no_run
/// use disco::ProcessSession;
/// use rpc_core::Registry;
///
/// fn main() -> Result<(), disco::DiscoError> {
///     let registry = Registry::new();
///     registry.add("pid", || i64::from(std::process::id()));
///     disco::serve_if_worker(&registry); // does not return in a worker
///
///     let session = ProcessSession::new(4, 1).start().wait()?;
///     session.get_global_func("pid")?.call(())?;
///     session.sync_all().wait()?;
///     session.shutdown().wait()
/// }
/// ```
#[derive(Debug)]
pub struct ProcessSession {
    layout: Layout,
    /// `None` is this program.
    command: Option<Vec<String>>,
    options: Options,
}

impl ProcessSession {
    /// So many workers, in so many groups of equal size. Each is this program again, which has to call [`serve_if_worker`].
    #[must_use]
    pub fn new(num_workers: u32, num_groups: u32) -> Self {
        let layout = Layout { world_size: num_workers, num_groups };
        Self { layout, command: None, options: Options::default() }
    }

    /// Another program as worker, and its arguments: it serves a registry with [disco's functions](register) over its standard input and output.
    #[must_use]
    pub fn command<S: Into<String>>(mut self, argv: impl IntoIterator<Item = S>) -> Self {
        self.command = Some(argv.into_iter().map(Into::into).collect());
        self
    }

    /// Settings of the session.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Starts the processes and their workers.
    ///
    /// Its errors are a program that cannot be started, or is no node.
    pub fn start(self) -> Completion<DiscoSession> {
        let this_program = || {
            let program = std::env::current_exe().ok()?;
            Some(vec![program.to_str()?.to_owned(), WORKER.to_owned()])
        };
        let Some(command) = self.command.or_else(this_program) else {
            return Completion::failed(DiscoError::invalid(
                "where this program lies is not known: name it as the command",
            ));
        };
        let address = match Address::exec(command) {
            Ok(address) => address.to_string(),
            Err(error) => return Completion::failed(DiscoError::invalid(error.to_string())),
        };
        // The kernel tells of a child's death at once; what is stopped shows by its silence alone.
        let connector = Connector::new().keep_alive(Duration::from_millis(200));
        let node = || (1, Source::Address(Box::new(connector.clone()), address.clone()));
        let nodes = (0..self.layout.world_size).map(|_| node()).collect();
        launch(self.layout, nodes, self.options)
    }
}

/// A session whose workers are at nodes: servers that are reached by their addresses.
#[derive(Debug)]
pub struct SocketSession {
    addresses: Vec<String>,
    workers_per_node: u32,
    num_groups: u32,
    connector: Connector,
    options: Options,
}

impl SocketSession {
    /// So many workers at each of these addresses, in so many groups of equal size over all. The workers of the first address come first.
    #[must_use]
    pub fn new<S: Into<String>>(
        addresses: impl IntoIterator<Item = S>,
        workers_per_node: u32,
        num_groups: u32,
    ) -> Self {
        let addresses = addresses.into_iter().map(Into::into).collect();
        let connector = Connector::new().keep_alive(Duration::from_millis(200));
        Self { addresses, workers_per_node, num_groups, connector, options: Options::default() }
    }

    /// How the nodes are connected to: identity, trust, hops, time limits. Without this there is none of the first three, and a node that says nothing for
    /// 600 ms is lost.
    #[must_use]
    pub fn connector(mut self, connector: Connector) -> Self {
        self.connector = connector;
        self
    }

    /// Settings of the session.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Connects to the nodes and starts the workers there.
    ///
    /// Its errors are a node that cannot be reached, or is none.
    pub fn start(self) -> Completion<DiscoSession> {
        let per_node = self.workers_per_node;
        let nodes: Vec<_> = (self.addresses.into_iter())
            .map(|address| (per_node, Source::Address(Box::new(self.connector.clone()), address)))
            .collect();
        match u32::try_from(nodes.len()).ok().and_then(|count| count.checked_mul(per_node)) {
            Some(world_size) => launch(Layout { world_size, num_groups: self.num_groups }, nodes, self.options),
            None => Completion::failed(DiscoError::invalid("too many workers")),
        }
    }
}

impl DiscoSession {
    /// A session whose workers are at the far end of any sessions, so many in each: threads of this process behind a local one, devices behind
    /// a chain of hops. The program there must have [registered](register) disco's functions.
    pub fn over(
        sessions: impl IntoIterator<Item = Session>,
        workers_per_session: u32,
        num_groups: u32,
        options: Options,
    ) -> Completion<Self> {
        let nodes: Vec<_> = (sessions.into_iter().enumerate())
            .map(|(number, session)| (workers_per_session, Source::Ready(session, format!("session {number}"))))
            .collect();
        match u32::try_from(nodes.len()).ok().and_then(|count| count.checked_mul(workers_per_session)) {
            Some(world_size) => launch(Layout { world_size, num_groups }, nodes, options),
            None => Completion::failed(DiscoError::invalid("too many workers")),
        }
    }
}

/// Where the session to a node comes from.
enum Source {
    Ready(Session, String),
    Address(Box<Connector>, String),
}

impl Source {
    async fn open(self) -> rpc_core::Result<(Session, String)> {
        match self {
            Self::Ready(session, name) => Ok((session, name)),
            Self::Address(connector, address) => {
                let session = connector.connect(&address).await.map_err(|error| error.into_rpc_error())?;
                Ok((session, address))
            }
        }
    }
}

/// Opens all nodes at once, each with so many workers, and makes a session of them; or of none.
fn launch(layout: Layout, nodes: Vec<(u32, Source)>, options: Options) -> Completion<DiscoSession> {
    let Layout { world_size, num_groups } = layout;
    if world_size == 0 || num_groups == 0 || world_size % num_groups != 0 {
        return Completion::failed(DiscoError::invalid(format!(
            "{world_size} workers cannot be in {num_groups} groups of equal size"
        )));
    }
    let runtime = match crate::runtime::runtime() {
        Ok(runtime) => runtime,
        Err(error) => return Completion::failed(error.into()),
    };
    let starting = runtime.spawn(start(layout, nodes, options));
    Completion::new(async move {
        starting.await.unwrap_or_else(|error| Err(RpcError::internal(format!("a launch panicked: {error}")).into()))
    })
}

async fn start(layout: Layout, nodes: Vec<(u32, Source)>, options: Options) -> Result<DiscoSession> {
    let inbox = Arc::new(Inbox::default());
    let mut first = 0;
    let opening: Vec<_> = nodes
        .into_iter()
        .map(|(count, source)| {
            let report_every = (options.window / 8).max(1);
            let set_up = SetUp { layout, first, count, report_every, local: 0 };
            first += count;
            let inbox = Arc::clone(&inbox);
            tokio::spawn(async move {
                let (session, name) = source.open().await?;
                Link::open(session, name, set_up, &inbox).await
            })
        })
        .collect();
    let mut links = Vec::new();
    let mut failed = None;
    for link in opening {
        // All are awaited, so that none is left behind half open.
        match link.await {
            Ok(Ok(link)) => links.push(link),
            Ok(Err(error)) => failed = failed.or(Some(error)),
            Err(error) => failed = failed.or(Some(RpcError::internal(format!("a launch panicked: {error}")))),
        }
    }
    if let Some(error) = failed {
        links.iter().for_each(Link::close);
        return Err(error.into());
    }
    let controller = Controller::new(layout, options, links);
    // Set once, here.
    _ = inbox.0.set(Arc::downgrade(&controller));
    controller.start().await?;
    Ok(DiscoSession::new(controller))
}
