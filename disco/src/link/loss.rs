//! Loss of a worker: its detection, its report, and its effects.
//!
//! | lost part | detected by | reported as |
//! | --- | --- | --- |
//! | thread of a worker | [`ExitGuard`], which the thread drops | [`Event::Lost`] |
//! | process, node, or link to it | the link's tasks, by [`LossReporter`] | [`Upstream::lose`] |
//!
//! A link sees its session end: at once where the kernel reports it, after the keep-alive
//! elsewhere. A node passes both on as [`Event::Lost`] ([`below_node`]). At the controller both end
//! the session, or pause it until the node is replaced ([`OnLoss`](crate::OnLoss)): every operation
//! that waits, and every later one, returns that error ([`of_worker`], [`of_link`]).

use std::ops::Range;
use std::sync::{Arc, Weak};

use rpc_core::{ErrorKind, RpcError};

use crate::error::WorkerId;
use crate::link::upstream::Upstream;
use crate::wire::event::{Event, EventSink};

/// Reports a worker as lost when its thread ends, unless that was expected.
pub(crate) struct ExitGuard {
    worker: WorkerId,
    sink: Arc<dyn EventSink>,
    expected: bool,
}

impl ExitGuard {
    pub(crate) fn new(worker: WorkerId, sink: Arc<dyn EventSink>) -> Self {
        Self { worker, sink, expected: false }
    }

    /// Marks the end of the thread as expected: nothing is reported.
    pub(crate) fn expect_exit(&mut self) {
        self.expected = true;
    }
}

impl Drop for ExitGuard {
    fn drop(&mut self) {
        if !self.expected {
            let error = RpcError::internal(format!("the thread of worker {} has ended", self.worker));
            self.sink.send(Event::Lost { worker: self.worker, error });
        }
    }
}

/// Reports to the upstream that a link is of no more use.
pub(crate) struct LossReporter {
    upstream: Weak<dyn Upstream>,
    /// The number of the link at the upstream.
    number: usize,
    /// The workers at the other end.
    workers: Range<u32>,
}

impl LossReporter {
    pub(crate) fn new(upstream: Weak<dyn Upstream>, number: usize, workers: Range<u32>) -> Self {
        Self { upstream, number, workers }
    }

    pub(crate) fn upstream(&self) -> Option<Arc<dyn Upstream>> {
        self.upstream.upgrade()
    }

    /// Returns true if the worker is at the other end of the link.
    pub(crate) fn has_worker(&self, worker: u32) -> bool {
        self.workers.contains(&worker)
    }

    /// Gives an event of the link to the upstream.
    pub(crate) fn forward(&self, upstream: &dyn Upstream, event: Event) {
        upstream.handle(self.number, event);
    }

    pub(crate) fn report(&self, error: RpcError) {
        if let Some(upstream) = self.upstream() {
            upstream.lose(self.number, error);
        }
    }
}

/// The other end of a lost link.
pub(crate) struct LostNode<'a> {
    /// Name for users.
    pub(crate) name: &'a str,
    /// The workers there, those of nodes below included.
    pub(crate) workers: Range<u32>,
    /// Number of nodes, those below included.
    pub(crate) nodes: usize,
    /// True if the link goes through hops.
    pub(crate) has_hops: bool,
}

impl LostNode<'_> {
    /// Describes the workers that were lost, for an error.
    fn describe(&self) -> String {
        // All nodes have the same number of workers.
        let count = self.workers.end - self.workers.start;
        let own = u32::try_from(self.nodes).map_or(count, |nodes| count / nodes.max(1));
        let describe = |workers: Range<u32>| match workers.len() {
            1 => format!("worker {}", workers.start),
            _ => format!("workers {} to {}", workers.start, workers.end - 1),
        };
        let (start, middle, end) = (self.workers.start, self.workers.start + own, self.workers.end);
        let behind = if middle == end { String::new() } else { format!(", with {} behind", describe(middle..end)) };
        format!("{} at {} was lost{behind}", describe(start..middle), self.name)
    }

    /// Returns the hop at which the way to the node broke, if it is not the node itself that the
    /// error names.
    fn broken_hop<'e>(&self, error: &'e RpcError) -> Option<&'e str> {
        let is_node = |peer: &&str| self.name.starts_with(peer) || peer.starts_with(self.name);
        error.peer().filter(|_| self.has_hops).filter(|peer| !is_node(peer))
    }
}

/// Returns what an error says, and the hop that it happened at if the node itself may still run.
fn cause(node: &LostNode<'_>, error: &RpcError) -> String {
    match node.broken_hop(error) {
        Some(hop) => format!("the way there broke at the hop {hop}, and the rest may still run: {}", error.message()),
        None => error.message().to_owned(),
    }
}

/// Returns the error of a session whose controller has lost a link.
pub(crate) fn of_link(node: &LostNode<'_>, error: &RpcError) -> RpcError {
    let text = format!("{}: {}", node.describe(), cause(node, error));
    let kind =
        if error.ends_session() && error.kind() != ErrorKind::Closed { error.kind() } else { ErrorKind::PeerLost };
    RpcError::new(kind, text).may_have_run(true)
}

/// Returns the error of a session in which a node has reported the loss of a worker.
pub(crate) fn of_worker(worker: WorkerId, node: Option<&str>, error: RpcError) -> RpcError {
    let at = node.map_or_else(String::new, |name| format!(" at {name}"));
    error.context(format_args!("worker {worker}{at} was lost"))
}

/// Returns the event by which a node tells the controller that it has lost the link to a process or
/// node below it.
///
/// A process needs no name beside the number of its worker.
pub(crate) fn below_node(node: &LostNode<'_>, error: RpcError) -> Event {
    let error = match node.broken_hop(&error) {
        _ if node.nodes == 0 => error,
        Some(hop) => error.clone().context(format_args!("{}: the way there broke at the hop {hop}", node.name)),
        None => error.context(node.name),
    };
    Event::Lost { worker: WorkerId(node.workers.start), error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hop_that_broke_is_named_and_not_the_worker_behind_it() {
        let node = LostNode { name: "tcp://node:2", workers: 0..2, nodes: 1, has_hops: true };
        let broke = |peer: &str| RpcError::new(ErrorKind::PeerLost, "the connection broke").with_peer(peer);
        let text = of_link(&node, &broke("tcp://hop:1")).message().to_owned();
        assert!(text.contains("the way there broke at the hop tcp://hop:1, and the rest may still run"), "{text}");
        let text = of_link(&node, &broke("tcp://node:2")).message().to_owned();
        assert_eq!(text, "workers 0 to 1 at tcp://node:2 was lost: the connection broke");
        let Event::Lost { error, .. } = below_node(&node, broke("tcp://hop:1")) else { panic!("another event") };
        assert!(error.message().contains("broke at the hop tcp://hop:1"), "{error}");
    }
}
