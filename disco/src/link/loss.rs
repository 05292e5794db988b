//! Loss of a worker: its detection, its report, and its effects.
//!
//! | lost part | detected by | reported as |
//! | --- | --- | --- |
//! | thread of a worker | [`ExitGuard`], which the thread drops | [`Event::Lost`] |
//! | process, node, or link to it | the link's tasks, by [`LossReporter`] | [`Upstream::lose`] |
//!
//! A link sees its session end: at once where the kernel reports it, after the keep-alive
//! elsewhere. A node passes both on as [`Event::Lost`] ([`below_node`]). At the controller both end
//! the session ([`of_worker`], [`of_link`]): every operation that waits, and every later one,
//! returns that error.

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
}

/// Returns the error that ends a session whose controller has lost a link.
pub(crate) fn of_link(node: &LostNode<'_>, error: &RpcError) -> RpcError {
    let text = format!("{}: {}", node.describe(), error.message());
    let kind =
        if error.ends_session() && error.kind() != ErrorKind::Closed { error.kind() } else { ErrorKind::PeerLost };
    RpcError::new(kind, text).may_have_run(true)
}

/// Returns the error that ends a session in which a node has reported the loss of a worker.
pub(crate) fn of_worker(worker: WorkerId, node: Option<&str>, error: RpcError) -> RpcError {
    let at = node.map_or_else(String::new, |name| format!(" at {name}"));
    error.context(format_args!("worker {worker}{at} was lost"))
}

/// Returns the event by which a node tells the controller that it has lost the link to a process or
/// node below it.
///
/// A process needs no name beside the number of its worker.
pub(crate) fn below_node(node: &LostNode<'_>, error: RpcError) -> Event {
    let error = if node.nodes == 0 { error } else { error.context(node.name) };
    Event::Lost { worker: WorkerId(node.workers.start), error }
}
