//! Hosts in the process of their controller: it hands them commands as they are, without encoding
//! them.
//!
//! There is a session between the two all the same, by which the host is opened. They find each
//! other by a number in the set-up that no other program can guess.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, OnceLock, Weak};

use parking_lot::Mutex;
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

    /// Ends the collectives of an epoch, also those that workers are in. Never waits.
    fn break_collectives(&self, epoch: u64, reason: &str);

    /// Drops all queued commands: the workers end after the one that they execute.
    fn abort(&self);
}

/// Inbox of a controller for the events of hosts in its process.
#[derive(Default)]
pub(crate) struct Inbox(pub(crate) OnceLock<Weak<dyn Upstream>>);

impl EventSink for Inbox {
    fn send(&self, event: Event) {
        if let Some(upstream) = self.0.get().and_then(Weak::upgrade) {
            upstream.handle(event);
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

/// Controllers of this process that wait for a host of this process, by the number in the set-up.
static EXPECTED: LazyLock<Mutex<HashMap<u64, Expected>>> = LazyLock::new(Mutex::default);

struct Expected {
    sink: Arc<dyn EventSink>,
    host: Option<Weak<dyn LocalHost>>,
}

/// Entry of a controller in [`EXPECTED`]. Dropping it removes the entry.
pub(crate) struct Expectation {
    number: u64,
}

impl Expectation {
    /// Announces that the host with this number may be in this process, and takes its events.
    pub(crate) fn new(number: u64, sink: Arc<dyn EventSink>) -> Self {
        EXPECTED.lock().insert(number, Expected { sink, host: None });
        Self { number }
    }

    /// Ends the expectation. Returns the host if it is in this process.
    pub(crate) fn take(self) -> Option<Weak<dyn LocalHost>> {
        EXPECTED.lock().remove(&self.number)?.host
    }
}

impl Drop for Expectation {
    fn drop(&mut self) {
        // Bound to a name, so that it is dropped after the lock.
        let _expected = EXPECTED.lock().remove(&self.number);
    }
}

/// Returns the sink of the controller that expects the host with this number, if that controller is
/// in this process.
pub(crate) fn expected_sink(number: u64) -> Option<Arc<dyn EventSink>> {
    EXPECTED.lock().get(&number).map(|expected| Arc::clone(&expected.sink))
}

/// Gives the host with this number to the controller that expects it.
pub(crate) fn announce_host(number: u64, host: Weak<dyn LocalHost>) {
    if let Some(expected) = EXPECTED.lock().get_mut(&number) {
        expected.host = Some(host);
    }
}
