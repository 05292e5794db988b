//! Launching: where the workers of a session run, whether they are threads, processes or nodes.

mod node_listener;
mod nodes;
mod processes;
mod threads;

use std::time::Duration;

use ring::rand::{SecureRandom, SystemRandom};
use rpc_core::{Device, ErrorKind, RpcError, Session};

use crate::completion::Completion;
use crate::controller::dispatch::Controller;
use crate::controller::session::DiscoSession;
use crate::error::{DiscoError, Result};
use crate::link::replacement::Relaunch;
use crate::link::session_source::{Source, open_links};
use crate::logs;
use crate::options::{OnLoss, Options};
use crate::wire::plan::Layout;
use crate::wire::set_up::{ChildNode, MESSAGES, SetUp};

pub use self::node_listener::NodeListener;
pub use self::nodes::SocketSession;
pub use self::processes::ProcessSession;
pub use self::threads::ThreadedSession;

impl DiscoSession {
    /// Starts a session whose workers are at the far end of any sessions, so many in each: threads
    /// of this process behind a local one, devices behind a chain of hops. The program there must
    /// have [registered](crate::register) disco's functions.
    ///
    /// Commands are encoded for all of them. Only [`ThreadedSession`] and
    /// [`SocketSession::controller_as_node`] hand them to workers of this process as they are.
    pub fn over(
        sessions: impl IntoIterator<Item = Session>,
        workers_per_session: u32,
        num_groups: u32,
        options: Options,
    ) -> Completion<Self> {
        let sessions = sessions.into_iter().map(|session| (session, Vec::new()));
        SocketSession::over(sessions, workers_per_session, num_groups).options(options).start()
    }
}

/// A node, and those that it is to open itself.
pub(crate) struct Node {
    source: Source,
    children: Vec<ChildNode>,
}

impl From<Source> for Node {
    fn from(source: Source) -> Self {
        Self { source, children: Vec::new() }
    }
}

/// Returns the shape of a session of so many nodes.
fn layout_of(nodes: usize, per_node: u32, num_groups: u32) -> Result<Layout> {
    let world_size = u32::try_from(nodes).ok().and_then(|nodes| nodes.checked_mul(per_node));
    let world_size = world_size.ok_or_else(|| DiscoError::invalid("too many workers"))?;
    if world_size == 0 || num_groups == 0 || world_size % num_groups != 0 {
        return Err(DiscoError::invalid(format!(
            "{world_size} workers cannot be in {num_groups} groups of equal size"
        )));
    }
    Ok(Layout { world_size, num_groups })
}

/// Makes a session of so many nodes, with so many workers at each; or none. The workers have these
/// default devices, or `cpu:0` if there are none. `find` comes up with the nodes, and `relaunch`
/// with one in the place of a lost one.
fn launch(
    (nodes, per_node, num_groups): (usize, u32, u32),
    devices: Vec<Device>,
    options: Options,
    relaunch: Option<Relaunch>,
    find: impl Future<Output = Result<Vec<Node>>> + Send + 'static,
) -> Completion<DiscoSession> {
    Completion::spawn(async move {
        let layout = layout_of(nodes, per_node, num_groups)?;
        if options.keep_alive < Duration::from_millis(1) {
            let text = "a keep_alive below 1 ms: workers would be lost at once; a long one is as good as none";
            return Err(DiscoError::invalid(text));
        }
        let found = find.await?;
        let came: usize =
            found.iter().flat_map(|node| &node.children).map(ChildNode::nodes).sum::<usize>() + found.len();
        if came != nodes {
            return Err(RpcError::new(ErrorKind::Protocol, format!("{came} nodes came of {nodes}")).into());
        }
        if options.on_loss == OnLoss::AwaitReplacement && found.iter().any(|node| !node.children.is_empty()) {
            return Err(DiscoError::invalid(
                "a session that awaits the replacement of lost workers has no tree of nodes: its controller opens all \
                 of them itself (SocketSession::flat)",
            ));
        }
        start(layout, per_node, found, devices, options, relaunch).await
    })
}

async fn start(
    layout: Layout,
    count: u32,
    nodes: Vec<Node>,
    devices: Vec<Device>,
    options: Options,
    relaunch: Option<Relaunch>,
) -> Result<DiscoSession> {
    let set_up = SetUp {
        version: MESSAGES.version(),
        layout,
        first: 0,
        count,
        hosting: options.hosting,
        pin: options.pin_workers,
        logs: options.worker_logs.map(logs::number),
        report_every: (options.window / 8).max(1),
        keep_alive_ms: u64::try_from(options.keep_alive.as_millis()).unwrap_or(u64::MAX),
        children: Vec::new(),
        // For people alone, so that a session can do without it.
        session: random_number(),
        begin_after: None,
    };
    let mut first = 0;
    let nodes = nodes.into_iter().map(|Node { source, children }| {
        let this = SetUp { first, children, ..set_up.clone() };
        first += this.workers();
        (this, source)
    });
    let links = open_links(nodes.collect()).await?;
    let controller = Controller::new(options, links, devices, set_up, relaunch);
    controller.start().await?;
    Ok(DiscoSession::new(controller))
}

/// Returns a random number; `None` if the system has none.
fn random_number() -> Option<u64> {
    let mut bytes = [0; 8];
    SystemRandom::new().fill(&mut bytes).ok().map(|()| u64::from_le_bytes(bytes))
}
