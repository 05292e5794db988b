//! Link between a controller and a host of its own process: the controller hands over commands
//! without encoding them, and the host hands over events.
//!
//! The launch makes one [`LocalLink`], keeps one reference to it and gives the other to the session
//! in which the host is opened, as an [extension](rpc_core::Context::extension). The host finds the
//! link there. A local session without that extension is driven like one over a network.

use std::sync::{Arc, OnceLock, Weak};

use rpc_core::function::Object;
use rpc_core::tensor::Access;
use rpc_core::{ErrorKind, LocalValue, Result as RpcResult, RpcError, Tensor, Value};

use crate::error::{Failure, WorkerId};
use crate::link::upstream::Upstream;
use crate::wire::command::Queued;
use crate::wire::event::{Event, EventSink, LocalContent};

/// A host of this process, as its controller sees it.
pub(crate) trait LocalHost: Send + Sync {
    /// Appends a command to the queues of all workers.
    ///
    /// # Errors
    ///
    /// `sequence` is not the next number, or the host has ended.
    fn submit(&self, sequence: u64, queued: Queued) -> RpcResult<()>;

    /// Ends the collectives of an epoch, also those that workers are in, and if `and_joins` is set
    /// those by which they join each other. Never waits.
    fn break_collectives(&self, epoch: u64, cause: &RpcError, and_joins: bool);

    /// Drops all queued commands: the workers end after the one that they execute.
    fn abort(&self);
}

/// Link of one controller to one host. It keeps neither of them alive.
#[derive(Default)]
pub(crate) struct LocalLink {
    /// The number of the link at the receiver of the events, and the receiver; none until the
    /// controller is complete. Earlier events are dropped.
    upstream: OnceLock<(usize, Weak<dyn Upstream>)>,
    /// The host, once it is open.
    host: OnceLock<Weak<dyn LocalHost>>,
}

impl LocalLink {
    /// Sets the receiver of the events, at which the link has this number. Later calls have no
    /// effect.
    pub(crate) fn set_upstream(&self, number: usize, upstream: &Weak<dyn Upstream>) {
        _ = self.upstream.set((number, Weak::clone(upstream)));
    }

    /// Sets the host.
    ///
    /// # Errors
    ///
    /// The link has a host already.
    pub(crate) fn set_host(&self, host: Weak<dyn LocalHost>) -> RpcResult<()> {
        self.host.set(host).map_err(|_| RpcError::internal("two hosts were opened for one link in this process"))
    }

    /// Returns true once a host has been opened for the link, even if the host has ended since.
    pub(crate) fn has_host(&self) -> bool {
        self.host.get().is_some()
    }

    /// Returns the host, until it ends.
    pub(crate) fn host(&self) -> Option<Arc<dyn LocalHost>> {
        self.host.get().and_then(Weak::upgrade)
    }
}

impl EventSink for LocalLink {
    fn send(&self, event: Event) {
        if let Some((number, upstream)) = self.upstream.get()
            && let Some(upstream) = upstream.upgrade()
        {
            upstream.handle(*number, event);
        }
    }

    fn send_content(&self, ticket: u64, content: std::result::Result<LocalValue, Failure>) {
        let value = content.and_then(|value| match value {
            // The controller has a tensor of its own, as it has over any link.
            Value::Object(Object::Tensor(tensor)) => copy(&tensor).map_err(|cause| Failure {
                worker: WorkerId(0),
                sequence: 0,
                command: "copy".to_owned(),
                cause,
            }),
            value => Ok(value),
        });
        self.send(Event::Fetched { ticket, value: value.map(LocalContent::Value) });
    }
}

fn copy(tensor: &Tensor) -> RpcResult<LocalValue> {
    let made = Tensor::zeros(tensor.shape(), tensor.dtype())?;
    let range = tensor.byte_range(0, tensor.size_bytes())?;
    let source = tensor.storage().try_borrow(Access::Read).ok_or_else(|| {
        RpcError::new(ErrorKind::Busy, "the tensor is being written by something that runs beside the worker")
    })?;
    let mut view = made.write()?;
    source.copy_out(range.start, view.bytes_mut()?)?;
    drop(view);
    Ok(Value::Object(Object::Tensor(made)))
}
