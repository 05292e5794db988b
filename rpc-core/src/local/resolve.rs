//! Resolution of requests: operations with their handles resolved to objects.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::pipes::{PipedWork, ReleasedPipe};
use crate::device::{DeviceAttribute, Stream};
use crate::dlpack::{DataType, Device, DeviceType};
use crate::error::{Result, RpcError};
use crate::function::function::{Function, FunctionKind};
use crate::function::object::{LocalValue, Module, Object, Opaque};
use crate::handle::{Handle, HandleTable, invalid};
use crate::session::{Operation, ReadBuffer};
use crate::tensor::{Access, Storage, Tensor};
use crate::value::{Reference, TensorRef, Value};

/// A device's stream, as an object of a session.
pub(super) struct StreamObject(pub(super) Arc<dyn Stream>);

/// An operation whose objects are pinned.
pub(super) enum PinnedOperation {
    Get {
        name: String,
    },
    Call {
        function: Function,
        args: Vec<LocalValue>,
    },
    Alloc {
        device: Device,
        dtype: DataType,
        shape: Vec<i64>,
        /// Without spare room, so that a job has at most 128 bytes, which are moved without a call.
        scope: Option<Box<str>>,
        alignment: u64,
    },
    Write {
        storage: Arc<Storage>,
        range: Range<u64>,
        data: Bytes,
    },
    Read {
        storage: Arc<Storage>,
        range: Range<u64>,
        into: Option<ReadBuffer>,
    },
    Copy {
        from: Box<Tensor>,
        to: Box<Tensor>,
    },
    /// An object that has been removed from the table already.
    Freed,
    /// A kept result that the client has freed.
    #[allow(dead_code, reason = "held for its drop")]
    Released(ReleasedPipe),
    /// A result that the session keeps.
    Fetch(LocalValue),
    /// An operation that names kept results, or whose result is kept.
    Piped(Box<PipedWork>),
    Attribute {
        device: Device,
        attribute: DeviceAttribute,
    },
    CreateStream {
        device: Device,
    },
    SetStream {
        device: Device,
        stream: Option<Arc<StreamObject>>,
    },
    StreamWait {
        device: Device,
        stream: Option<Arc<StreamObject>>,
    },
    StreamWaitFor {
        device: Device,
        stream: Option<Arc<StreamObject>>,
        other_device: Device,
        other: Option<Arc<StreamObject>>,
    },
    LoadModule {
        path: String,
        loader: Option<String>,
    },
    ModuleFunction {
        module: Arc<dyn Module>,
        name: String,
    },
}

/// Size in bytes above which copies run on a thread of their own, not on the thread that reads
/// requests.
const LARGE_COPY: u64 = 4 << 20;

/// Thread on which a piece of work runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum RunsOn {
    /// Any thread that runs the lane: the work does not block.
    AnyThread,
    /// The lane's own thread.
    LaneThread,
}

impl PinnedOperation {
    /// Returns true if the submitter may wait for the job on its own thread, without a responder.
    pub(super) fn may_run_in_place(&self) -> bool {
        !matches!(self, Self::Piped(_))
    }

    /// Records the error of a request that ends without being performed, for those that name its
    /// result.
    pub(super) fn fail(&self, error: &RpcError) {
        if let Self::Piped(piped) = self {
            piped.fail(error);
        }
    }

    pub(super) fn runs_on(&self) -> RunsOn {
        match self {
            Self::Piped(piped) => piped.operation().map_or(RunsOn::AnyThread, Self::runs_on),
            // Only host memory never blocks.
            Self::Write { storage, .. } | Self::Read { storage, .. } if storage.device().kind != DeviceType::CPU => {
                RunsOn::LaneThread
            }
            Self::Alloc { device, .. }
            | Self::Attribute { device, .. }
            | Self::CreateStream { device }
            | Self::SetStream { device, .. }
                if device.kind != DeviceType::CPU =>
            {
                RunsOn::LaneThread
            }
            Self::Copy { from, to } if [from, to].iter().any(|tensor| tensor.device().kind != DeviceType::CPU) => {
                RunsOn::LaneThread
            }
            Self::Call { function, .. } if function.kind() == FunctionKind::Blocking => RunsOn::LaneThread,
            Self::Copy { from, .. } if from.size_bytes() > LARGE_COPY => RunsOn::LaneThread,
            // Looking up a function may make its module load something.
            Self::StreamWait { .. }
            | Self::StreamWaitFor { .. }
            | Self::LoadModule { .. }
            | Self::ModuleFunction { .. } => RunsOn::LaneThread,
            _ => RunsOn::AnyThread,
        }
    }

    /// Returns true if the work continues as a future.
    pub(super) fn is_async(&self) -> bool {
        match self {
            Self::Call { function, .. } => function.kind() == FunctionKind::Async,
            Self::Piped(piped) => piped.operation().is_some_and(Self::is_async),
            _ => false,
        }
    }

    /// Visits the devices that the work uses, other than to free memory or to ask about them. One
    /// may be visited repeatedly.
    pub(super) fn for_each_device(&self, visit: &mut impl FnMut(Device)) {
        match self {
            Self::Alloc { device, .. }
            | Self::CreateStream { device }
            | Self::SetStream { device, .. }
            | Self::StreamWait { device, .. } => visit(*device),
            Self::Write { storage, .. } | Self::Read { storage, .. } => visit(storage.device()),
            Self::Copy { from, to } => {
                visit(from.device());
                visit(to.device());
            }
            Self::StreamWaitFor { device, other_device, .. } => {
                visit(*device);
                visit(*other_device);
            }
            Self::Call { args, .. } => args.iter().for_each(|arg| {
                arg.for_each_object(&mut |object| {
                    if let Object::Tensor(tensor) = object {
                        visit(tensor.device());
                    }
                });
            }),
            Self::Piped(piped) => {
                if let Some(operation) = piped.operation() {
                    operation.for_each_device(visit);
                }
            }
            Self::Get { .. }
            | Self::Freed
            | Self::Released(_)
            | Self::Fetch(_)
            | Self::Attribute { .. }
            | Self::LoadModule { .. }
            | Self::ModuleFunction { .. } => {}
        }
    }

    /// Returns the storages that must be borrowed while the work is done.
    pub(super) fn required_borrows(&self) -> Vec<(Arc<Storage>, Access)> {
        match self {
            Self::Piped(piped) => piped.operation().map_or_else(Vec::new, Self::required_borrows),
            Self::Write { storage, .. } => vec![(storage.clone(), Access::Write)],
            Self::Read { storage, .. } => vec![(storage.clone(), Access::Read)],
            Self::Copy { from, to } if Arc::ptr_eq(from.storage(), to.storage()) => {
                vec![(to.storage().clone(), Access::Write)]
            }
            Self::Copy { from, to } => {
                vec![(from.storage().clone(), Access::Read), (to.storage().clone(), Access::Write)]
            }
            Self::Call { function, args } if function.borrows_tensors() => {
                let borrowed = function.borrowed_args(args).into_iter();
                borrowed.map(|(_, storage, access)| (storage.clone(), access)).collect()
            }
            _ => Vec::new(),
        }
    }
}

/// Source of the objects that operations name.
pub(super) trait Objects {
    /// Returns the object that `handle` names.
    fn object(&self, handle: Handle) -> Result<&Object>;

    /// Removes the object that `handle` names.
    fn take(&mut self, handle: Handle) -> Result<Object>;

    /// Returns the kept result that `handle` names, to be put into a value at `depth`.
    fn result(&self, handle: Handle, depth: usize) -> Result<LocalValue>;
}

impl Objects for HandleTable<Object> {
    fn object(&self, handle: Handle) -> Result<&Object> {
        self.get(handle)
    }

    fn take(&mut self, handle: Handle) -> Result<Object> {
        self.remove(handle)
    }

    fn result(&self, handle: Handle, _: usize) -> Result<LocalValue> {
        Err(invalid(handle))
    }
}

/// Resolves and pins the objects that `operation` names, and removes those that it frees.
///
/// The second value holds released values, to be dropped by the caller outside of its locks.
pub(super) fn resolve(table: &mut impl Objects, operation: Operation) -> (Result<PinnedOperation>, Vec<LocalValue>) {
    let mut garbage = Vec::new();
    let work = try_resolve(table, operation, &mut garbage);
    (work, garbage)
}

fn try_resolve(
    table: &mut impl Objects,
    operation: Operation,
    garbage: &mut Vec<LocalValue>,
) -> Result<PinnedOperation> {
    Ok(match operation {
        Operation::GetFunction { name } => PinnedOperation::Get { name },
        Operation::Call { function, args } => {
            let Object::Function(function) = table.object(function)?.clone() else { return Err(invalid(function)) };
            if !args.iter().any(Value::may_hold_objects) {
                // The same vector serves again.
                let args = args.into_iter().map(Value::map_plain).collect::<Result<_>>()?;
                return Ok(PinnedOperation::Call { function, args });
            }
            let mut resolved = Vec::with_capacity(args.len());
            for (index, arg) in args.into_iter().enumerate() {
                match argument(table, arg, 0) {
                    Ok(arg) => resolved.push(arg),
                    Err(error) => {
                        garbage.append(&mut resolved);
                        return Err(function.argument_error(index, error));
                    }
                }
            }
            PinnedOperation::Call { function, args: resolved }
        }
        Operation::Alloc { device, dtype, shape, scope, alignment } => {
            PinnedOperation::Alloc { device, dtype, shape, scope: scope.map(String::into_boxed_str), alignment }
        }
        Operation::Write { to, offset, data } => {
            let tensor = tensor(table, &to)?;
            let range = tensor.byte_range(offset, data.len() as u64)?;
            PinnedOperation::Write { storage: tensor.storage().clone(), range, data }
        }
        Operation::Read { from, offset, len, into } => {
            let tensor = tensor(table, &from)?;
            let range = tensor.byte_range(offset, len)?;
            PinnedOperation::Read { storage: tensor.storage().clone(), range, into }
        }
        Operation::Copy { from, to } => {
            let (from, to) = (tensor(table, &from)?, tensor(table, &to)?);
            check_copy(&from, &to)?;
            PinnedOperation::Copy { from: Box::new(from), to: Box::new(to) }
        }
        Operation::Free { handle } => {
            garbage.push(Value::Object(table.take(handle)?));
            PinnedOperation::Freed
        }
        Operation::Attribute { device, attribute } => PinnedOperation::Attribute { device, attribute },
        Operation::CreateStream { device } => PinnedOperation::CreateStream { device },
        Operation::SetStream { device, stream: handle } => {
            PinnedOperation::SetStream { device, stream: stream(table, device, handle)? }
        }
        Operation::StreamWait { device, stream: handle } => {
            PinnedOperation::StreamWait { device, stream: stream(table, device, handle)? }
        }
        Operation::StreamWaitFor { device, stream: handle, other_device, other } => PinnedOperation::StreamWaitFor {
            device,
            stream: stream(table, device, handle)?,
            other_device,
            other: stream(table, other_device, other)?,
        },
        Operation::LoadModule { path, loader } => PinnedOperation::LoadModule { path, loader },
        Operation::ModuleFunction { module, name } => {
            let Object::Module(module) = table.object(module)?.clone() else { return Err(invalid(module)) };
            PinnedOperation::ModuleFunction { module, name }
        }
        Operation::Fetch { handle } => PinnedOperation::Fetch(table.result(handle, 0)?),
        other => return Err(RpcError::internal(format!("{} is not resolved here", other.name()))),
    })
}

/// Returns an argument with its objects, and with the results of earlier requests in their places.
fn argument(table: &impl Objects, value: Value, depth: usize) -> Result<LocalValue> {
    match value {
        Value::Object(Reference::Pipe(handle)) => table.result(handle, depth),
        Value::Object(reference) => object(table, reference).map(Value::Object),
        Value::List(values) => {
            let values = values.into_iter().map(|value| argument(table, value, depth + 1));
            values.collect::<Result<_>>().map(Value::List)
        }
        Value::Map(pairs) => {
            let pairs = pairs
                .into_iter()
                .map(|(key, value)| Ok((argument(table, key, depth + 1)?, argument(table, value, depth + 1)?)));
            pairs.collect::<Result<_>>().map(Value::Map)
        }
        plain => plain.map_plain(),
    }
}

fn object(table: &impl Objects, reference: Reference) -> Result<Object> {
    let handle = reference.handle();
    match (&reference, table.object(handle)?) {
        (Reference::Tensor(reference), Object::Tensor(_)) => tensor(table, reference).map(Object::Tensor),
        (Reference::Function(_), object @ Object::Function(_))
        | (Reference::Module(_), object @ Object::Module(_))
        | (Reference::Object(_), object @ Object::Opaque(_)) => Ok(object.clone()),
        _ => Err(invalid(handle)),
    }
}

/// Returns the view that `reference` describes, checked against the storage.
pub(super) fn tensor(table: &impl Objects, reference: &TensorRef) -> Result<Tensor> {
    let Object::Tensor(owner) = table.object(reference.storage)? else { return Err(invalid(reference.storage)) };
    if owner.device() != reference.device {
        let (is, said) = (owner.device(), reference.device);
        return Err(RpcError::invalid_argument(format!("the tensor is on {is}, but the request names {said}")));
    }
    let (shape, strides) = (reference.shape.clone(), reference.strides.clone());
    Tensor::new(owner.storage().clone(), reference.byte_offset, shape, strides, reference.dtype)
}

fn stream(table: &impl Objects, device: Device, handle: Option<Handle>) -> Result<Option<Arc<StreamObject>>> {
    let Some(handle) = handle else { return Ok(None) };
    let Object::Opaque(object) = table.object(handle)? else { return Err(invalid(handle)) };
    let stream = object.downcast::<StreamObject>().ok_or_else(|| invalid(handle))?;
    if stream.0.device() != device {
        let is = stream.0.device();
        return Err(RpcError::invalid_argument(format!("the stream belongs to {is}, but the request names {device}")));
    }
    Ok(Some(stream))
}

fn check_copy(from: &Tensor, to: &Tensor) -> Result<()> {
    if from.dtype() != to.dtype() || from.element_count() != to.element_count() {
        return Err(RpcError::invalid_argument(format!(
            "cannot copy {} elements of {} to {} elements of {}",
            from.element_count(),
            from.dtype(),
            to.element_count(),
            to.dtype()
        )));
    }
    let (source, destination) = (from.byte_range(0, from.size_bytes())?, to.byte_range(0, to.size_bytes())?);
    let overlap = source.start < destination.end && destination.start < source.end;
    if Arc::ptr_eq(from.storage(), to.storage()) && overlap && source != destination {
        return Err(RpcError::invalid_argument("source and destination of the copy overlap in part"));
    }
    Ok(())
}

/// Stores a returned object, and returns a reference to it.
pub(super) fn reference(table: &mut HandleTable<Object>, object: Object) -> Result<Reference> {
    Ok(match &object {
        Object::Function(_) => Reference::Function(table.insert(object)?),
        Object::Module(_) => Reference::Module(table.insert(object)?),
        Object::Opaque(_) => Reference::Object(table.insert(object)?),
        Object::Tensor(tensor) => {
            let (byte_offset, dtype, device) = (tensor.byte_offset(), tensor.dtype(), tensor.device());
            let (shape, strides) = (tensor.shape().to_vec(), tensor.strides().map(<[i64]>::to_vec));
            Reference::Tensor(
                TensorRef { storage: table.insert(object)?, byte_offset, shape, strides, dtype, device }.into(),
            )
        }
    })
}

/// Returns the session object for a stream.
pub(super) fn stream_object(stream: Arc<dyn Stream>) -> LocalValue {
    Value::Object(Object::Opaque(Opaque::new(Arc::new(StreamObject(stream)))))
}
