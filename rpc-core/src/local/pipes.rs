//! Results that a session keeps for later requests of the same lane, under handles of the client.
//!
//! A request that is to keep its result opens a cell when it is submitted, and fills it when it
//! ends. A request that names results pins their cells when it is admitted, and takes what is in
//! them when it begins: its lane has ended the earlier requests by then, so nothing ever waits for
//! a cell. A request that names its own result, or that of a later one, finds an empty cell, which
//! is an error.
//!
//! This file and `resolve` use each other by their nature: an operation that names results is one
//! of the operations that a lane performs, and holds the one that it becomes when it begins.
//!
//! A cell and the objects in its result count as objects of the session. The content counts against
//! the bytes that the session may have queued, and what is put into a call counts once more while
//! the call lasts.

use std::collections::HashMap;
use std::mem::size_of;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;

use super::LocalInner;
use super::resolve::{self, Objects, PinnedOperation};
use crate::error::{ErrorKind, Result, RpcError};
use crate::function::function::Function;
use crate::function::object::{LocalValue, Object};
use crate::handle::{Handle, PipeId, invalid};
use crate::limits::MemoryLease;
use crate::panics::drop_each;
use crate::reply::{Outcome, Responder};
use crate::session::{Lane, Operation, Request, no_result};
use crate::tensor::Tensor;
use crate::value::{MAX_DEPTH, Packed, Reference, Value};

/// Largest number of results that a session keeps.
const MAX_PIPES: usize = 4096;

/// All results that a session keeps, by their handles.
#[derive(Default)]
pub(super) struct Pipes(HashMap<Handle, Arc<ResultCell>>);

/// Result of one request. Requests that name it share the cell.
struct ResultCell {
    lane: Lane,
    /// Set when the request has ended.
    result: OnceLock<Result<Kept>>,
}

/// An object that panics when it is dropped ends neither the lane nor the caller.
impl Drop for ResultCell {
    fn drop(&mut self) {
        drop_each(self.result.take());
    }
}

/// Result of a request that has succeeded.
struct Kept {
    value: LocalValue,
    bytes: u64,
    depth: usize,
    objects: usize,
    /// Charge for `bytes`.
    _lease: MemoryLease,
}

impl Pipes {
    /// Returns true if the session keeps, or will keep, a result under `handle`.
    pub(super) fn contains(&self, handle: Handle) -> bool {
        self.0.contains_key(&handle)
    }

    /// Removes everything at the end of the session.
    pub(super) fn drain(&mut self) -> Vec<ReleasedPipe> {
        self.0.drain().map(|(_, cell)| ReleasedPipe(cell)).collect()
    }
}

/// Obligation of a request to fill its cell. Dropping it says that the request has not run.
pub(super) struct PipeSlot {
    handle: Handle,
    cell: Arc<ResultCell>,
    /// Name of the operation or the function, for errors.
    name: String,
}

impl PipeSlot {
    /// Names the function that is called.
    fn of_call(&mut self, function: &Function) {
        function.name().unwrap_or("function without a name").clone_into(&mut self.name);
    }

    pub(super) fn fail(&self, error: &RpcError) {
        // The first error counts: a request that has failed may be failed again when it is dropped.
        let _ = self.cell.result.set(Err(no_result(&self.name, error)));
    }
}

impl Drop for PipeSlot {
    fn drop(&mut self) {
        if self.cell.result.get().is_none() {
            self.fail(&RpcError::new(ErrorKind::Cancelled, "it did not run"));
        }
    }
}

/// Work of a request that names results, or whose result is kept.
pub(super) struct PipedWork {
    stage: Stage,
    piped: Piped,
}

/// Share of kept results in a request that runs.
#[derive(Default)]
pub(super) struct Piped {
    /// `None` if the result goes to the client.
    slot: Option<PipeSlot>,
    /// Charge for the results that were put into the request.
    lease: Option<MemoryLease>,
}

enum Stage {
    /// The operation as it came, and what it names.
    Pinned(Operation, PinnedNames),
    /// The operation to be performed. `None` once it has been taken.
    Ready(Option<PinnedOperation>),
}

impl Stage {
    /// Returns the function that is called, as far as it is known.
    fn function(&self) -> Option<&Function> {
        match self {
            Self::Ready(Some(PinnedOperation::Call { function, .. })) => Some(function),
            Self::Pinned(Operation::Call { function, .. }, pins) => match pins.0.get(function) {
                Some(Pinned::Object(Object::Function(function))) => Some(function),
                _ => None,
            },
            _ => None,
        }
    }
}

impl PipedWork {
    /// Returns the operation, once the request has begun.
    pub(super) fn operation(&self) -> Option<&PinnedOperation> {
        if let Stage::Ready(operation) = &self.stage { operation.as_ref() } else { None }
    }

    /// Records the error of a request that is not performed.
    pub(super) fn fail(&self, error: &RpcError) {
        self.piped.slot.iter().for_each(|slot| slot.fail(error));
    }

    /// Takes the operation of a request that has begun.
    pub(super) fn into_operation(mut self) -> (PinnedOperation, Piped) {
        let operation = if let Stage::Ready(operation) = &mut self.stage { operation.take() } else { None };
        // A request that is not ready has failed before.
        (operation.unwrap_or(PinnedOperation::Freed), self.piped)
    }
}

/// Objects and results that a request names, kept from its admission until it begins.
struct PinnedNames(HashMap<Handle, Pinned>);

enum Pinned {
    Object(Object),
    Cell(Arc<ResultCell>),
}

impl PinnedNames {
    fn cell(&self, handle: Handle) -> Result<&Kept> {
        let Some(Pinned::Cell(cell)) = self.0.get(&handle) else { return Err(invalid(handle)) };
        match cell.result.get() {
            Some(Ok(kept)) => Ok(kept),
            Some(Err(error)) => Err(error.clone()),
            None => Err(RpcError::new(
                ErrorKind::InvalidHandle,
                format!("handle {handle} names the result of this request itself, or of a later one"),
            )),
        }
    }
}

impl Objects for PinnedNames {
    fn object(&self, handle: Handle) -> Result<&Object> {
        match self.0.get(&handle) {
            Some(Pinned::Object(object)) => Ok(object),
            _ => match &self.cell(handle)?.value {
                Value::Object(object) => Ok(object),
                other => {
                    let kind = other.type_name();
                    Err(RpcError::invalid_argument(format!("the result of the earlier request is {kind}, no object")))
                }
            },
        }
    }

    fn take(&mut self, handle: Handle) -> Result<Object> {
        // Objects are freed when the request is admitted.
        Err(invalid(handle))
    }

    fn result(&self, handle: Handle, depth: usize) -> Result<LocalValue> {
        let kept = self.cell(handle)?;
        if depth + kept.depth > MAX_DEPTH {
            return Err(RpcError::invalid_argument(format!("values would be nested deeper than {MAX_DEPTH}")));
        }
        Ok(kept.value.clone())
    }
}

impl LocalInner {
    /// Opens the cell of a request that is submitted and is to keep its result.
    pub(super) fn open_pipe(&self, request: &Request) -> Result<Option<PipeSlot>> {
        let Some(id) = request.pipe else { return Ok(None) };
        if request.lane == Lane::CONCURRENT {
            return Err(of_concurrent());
        }
        let handle = PipeId::handle(id);
        let mut pipes = self.pipes.lock();
        if pipes.contains(handle) {
            return Err(RpcError::invalid_argument(format!("a result is kept under the handle {handle} already")));
        }
        if pipes.0.len() >= MAX_PIPES {
            return Err(RpcError::limit("max_pipes", MAX_PIPES as u64, pipes.0.len() as u64 + 1));
        }
        self.table.lock().charge(1)?;
        let cell = Arc::new(ResultCell { lane: request.lane, result: OnceLock::new() });
        pipes.0.insert(handle, cell.clone());
        Ok(Some(PipeSlot { handle, cell, name: request.operation.name().to_owned() }))
    }

    /// Resolves and pins what an admitted request names. The second value is to be discarded
    /// outside of locks.
    pub(super) fn pin(
        &self,
        lane: Lane,
        operation: Operation,
        slot: Option<PipeSlot>,
    ) -> (Result<PinnedOperation>, Garbage) {
        let names_pipes = operation.names_pipes();
        if slot.is_none() && !names_pipes {
            let (work, values) = resolve::resolve(&mut *self.table.lock(), operation);
            return (work, Garbage { values, pins: None });
        }
        let mut garbage = Garbage::default();
        let work = match operation {
            Operation::Free { handle } if handle.is_pipe() => match self.take_pipes([handle]).pop() {
                // The last request that names the result frees it.
                Some(cell) => Ok(Stage::Ready(Some(PinnedOperation::Released(cell)))),
                None => Err(invalid(handle)),
            },
            operation if names_pipes => self.pin_pipes(lane, operation, &mut garbage),
            operation => {
                let (work, values) = resolve::resolve(&mut *self.table.lock(), operation);
                garbage.values = values;
                work.map(|work| Stage::Ready(Some(work)))
            }
        };
        let mut slot = slot;
        let work = work.inspect_err(|error| slot.iter().for_each(|slot| slot.fail(error))).map(|stage| {
            if let (Some(slot), Some(function)) = (&mut slot, stage.function()) {
                slot.of_call(function);
            }
            PinnedOperation::Piped(Box::new(PipedWork { stage, piped: Piped { slot, lease: None } }))
        });
        (work, garbage)
    }

    fn pin_pipes(&self, lane: Lane, operation: Operation, garbage: &mut Garbage) -> Result<Stage> {
        if lane == Lane::CONCURRENT {
            return Err(of_concurrent());
        }
        let (mut pins, mut first_error) = (HashMap::new(), None);
        let (pipes, table) = (self.pipes.lock(), self.table.lock());
        operation.for_each_handle(&mut |handle| {
            if first_error.is_some() || pins.contains_key(&handle) {
                return;
            }
            let pinned = match pipes.0.get(&handle) {
                Some(cell) if cell.lane == lane => Ok(Pinned::Cell(cell.clone())),
                Some(cell) => Err(RpcError::invalid_argument(format!(
                    "the result {handle} belongs to lane {}, and lane {lane} has no order with it",
                    cell.lane
                ))),
                None if handle.is_pipe() => Err(RpcError::new(
                    ErrorKind::InvalidHandle,
                    format!("handle {handle} names no result: it was freed, or no earlier request keeps one under it"),
                )),
                None => table.get(handle).map(|object| Pinned::Object(object.clone())),
            };
            match pinned {
                Ok(pinned) => _ = pins.insert(handle, pinned),
                Err(error) => first_error = Some(error),
            }
        });
        drop((pipes, table));
        match first_error {
            Some(error) => {
                garbage.pins = Some(PinnedNames(pins));
                Err(error)
            }
            None => Ok(Stage::Pinned(operation, PinnedNames(pins))),
        }
    }

    /// Puts results into a request that begins.
    pub(super) fn begin_piped(&self, work: &mut PipedWork) -> Result<()> {
        // A request that had to wait for a device begins anew.
        let Stage::Pinned(..) = &work.stage else { return Ok(()) };
        let Stage::Pinned(operation, pins) = std::mem::replace(&mut work.stage, Stage::Ready(None)) else {
            return Ok(());
        };
        let begun = self.with_results(operation, pins);
        match begun {
            Ok((operation, lease)) => {
                work.piped.lease = lease;
                work.stage = Stage::Ready(Some(operation));
                if let (Some(slot), Some(function)) = (&mut work.piped.slot, work.stage.function()) {
                    slot.of_call(function);
                }
                Ok(())
            }
            Err(error) => {
                let error = error.may_have_run(false);
                work.piped.slot.iter().for_each(|slot| slot.fail(&error));
                Err(error)
            }
        }
    }

    fn with_results(
        &self,
        operation: Operation,
        mut pins: PinnedNames,
    ) -> Result<(PinnedOperation, Option<MemoryLease>)> {
        let mut bytes = 0_u64;
        let mut count = |reference: &Reference| {
            if let Reference::Pipe(handle) = reference
                && let Ok(kept) = pins.cell(*handle)
            {
                bytes = bytes.saturating_add(kept.bytes);
            }
        };
        match &operation {
            Operation::Call { args, .. } => args.iter().for_each(|arg| arg.for_each_object(&mut count)),
            Operation::Fetch { handle } => count(&Reference::Pipe(*handle)),
            _ => {}
        }
        let lease = if bytes == 0 { Ok(None) } else { self.staging.reserve(bytes).map(Some) };
        let started = lease.and_then(|lease| {
            let (work, garbage) = resolve::resolve(&mut pins, operation);
            drop_each(garbage);
            Ok((work?, lease))
        });
        drop_each(pins.0);
        started
    }

    /// Ends a request: keeps its result, or names the objects in it for the client.
    pub(super) fn conclude(
        &self,
        piped: Option<Box<Piped>>,
        responder: Option<&Responder>,
        outcome: Result<LocalValue>,
    ) -> Outcome {
        let (slot, _lease) = piped.map_or((None, None), |piped| (piped.slot, piped.lease));
        let Some(slot) = slot else {
            return outcome.and_then(|value| self.name_objects(value));
        };
        let outcome = outcome.and_then(|value| {
            // The client has an error already, so that later requests have to have it, too.
            if responder.is_some_and(Responder::is_complete) {
                drop_each([value]);
                return Err(super::deadline_exceeded().may_have_run(true));
            }
            self.keep(&slot, value).map_err(|error| error.may_have_run(true))
        });
        match outcome {
            Ok(()) => Ok(Value::Null),
            Err(error) => {
                slot.fail(&error);
                Err(error)
            }
        }
    }

    fn keep(&self, slot: &PipeSlot, value: LocalValue) -> Result<()> {
        let bytes = value.size_with(&|object| match object {
            Object::Tensor(tensor) => size_of::<Tensor>() + size_of::<i64>() * 2 * tensor.shape().len(),
            _ => 0,
        }) as u64;
        let (mut objects, depth) = (0, value.depth());
        value.for_each_object(&mut |_| objects += 1);
        let lease = if depth > MAX_DEPTH {
            Err(RpcError::invalid_argument(format!("the result is nested deeper than {MAX_DEPTH}")))
        } else {
            self.staging.reserve(bytes).map_err(|error| error.context("the result cannot be kept"))
        };
        let lease = match lease {
            Ok(lease) => lease,
            Err(error) => {
                drop_each([value]);
                return Err(error);
            }
        };
        // The copy is made once there is room for it.
        let kept = Kept { value: detached(value), bytes, depth, objects, _lease: lease };
        let pipes = self.pipes.lock();
        // Released, or the session has ended: nothing is counted for a cell that is not listed.
        let is_listed = pipes.0.get(&slot.handle).is_some_and(|cell| Arc::ptr_eq(cell, &slot.cell));
        let charged = if is_listed { self.table.lock().charge(objects) } else { Ok(()) };
        let unused = match charged {
            Ok(()) => slot.cell.result.set(Ok(kept)).err(),
            Err(_) => Some(Ok(kept)),
        };
        drop(pipes);
        drop_each(unused);
        charged
    }

    /// Removes results. What they count for as objects is returned; each ends with the last request
    /// that names it.
    pub(super) fn take_pipes(&self, handles: impl IntoIterator<Item = Handle>) -> Vec<ReleasedPipe> {
        let mut pipes = self.pipes.lock();
        if pipes.0.is_empty() {
            return Vec::new();
        }
        let cells: Vec<_> = handles.into_iter().filter_map(|handle| pipes.0.remove(&handle)).collect();
        let kept = |cell: &Arc<ResultCell>| {
            cell.result.get().and_then(|kept| kept.as_ref().ok()).map_or(0, |kept| kept.objects)
        };
        let objects: usize = cells.iter().map(|cell| 1 + kept(cell)).sum();
        self.table.lock().discharge(objects);
        drop(pipes);
        cells.into_iter().map(ReleasedPipe).collect()
    }
}

/// Returns a value that has its bytes for itself: those of a read borrow its tensor, and those of a
/// request may be a small part of what had come with it.
fn detached(value: LocalValue) -> LocalValue {
    match value {
        Value::Bytes(bytes) => Value::Bytes(Bytes::copy_from_slice(&bytes)),
        Value::Packed(packed) => Value::Packed(Packed::from_bytes(Bytes::copy_from_slice(packed.as_bytes()))),
        Value::List(values) => Value::List(values.into_iter().map(detached).collect()),
        Value::Map(pairs) => {
            Value::Map(pairs.into_iter().map(|(key, value)| (detached(key), detached(value))).collect())
        }
        other => other,
    }
}

/// Remains of a request that was pinned, to be dropped outside of locks.
#[derive(Default)]
pub(super) struct Garbage {
    values: Vec<LocalValue>,
    /// Objects and results that a request had pinned before it failed.
    pins: Option<PinnedNames>,
}

impl Garbage {
    pub(super) fn discard(self) {
        drop_each(self.values);
        if let Some(pins) = self.pins {
            drop_each(pins.0);
        }
    }
}

/// A result that the client has released, to be dropped outside of locks.
pub(super) struct ReleasedPipe(#[allow(dead_code, reason = "held for its drop")] Arc<ResultCell>);

fn of_concurrent() -> RpcError {
    RpcError::invalid_argument("a concurrent request has a lane of its own, so that no later one can name its result")
}
