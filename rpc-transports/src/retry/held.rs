//! Objects of a retrying session: the caller's handles, and what stands for them in the session of
//! the moment.

use std::sync::Arc;

use parking_lot::Mutex;
use rpc_core::{
    ErrorKind, Handle, HandleTable, Operation, Reference, Request, RpcError, SharedSession, TensorRef, Value,
};

/// An object of the caller. Dropping it frees the object in its session.
pub(super) struct Held {
    at: Mutex<At>,
    /// Name of a function that was looked up in the session, and so can be looked up again.
    name: Option<String>,
}

struct At {
    /// Number of the session.
    generation: u64,
    session: SharedSession,
    handle: Handle,
    /// True once the object has been freed, or is being freed.
    is_freed: bool,
    /// True if no reference of the caller names the object any more.
    is_released: bool,
    /// Number of requests that name the object and have not been submitted to its session.
    waiting: usize,
}

impl At {
    /// Returns what frees the object, if that is to be done now: behind the requests that name it,
    /// but not behind their replies, since the end of an object may be what they wait for.
    fn take_release(&mut self) -> Option<(SharedSession, Handle)> {
        let is_due = self.is_released && self.waiting == 0 && !self.is_freed;
        self.is_freed |= is_due;
        is_due.then(|| (self.session.clone(), self.handle))
    }
}

impl Held {
    pub(super) fn new(generation: u64, session: SharedSession, handle: Handle, name: Option<&str>) -> Self {
        let at = At { generation, session, handle, is_freed: false, is_released: false, waiting: 0 };
        Self { at: Mutex::new(at), name: name.map(str::to_owned) }
    }

    /// Counts a request that is going to name the object. Returns false if the object is gone.
    pub(super) fn pin(&self) -> bool {
        let mut at = self.at.lock();
        if !at.is_freed {
            at.waiting += 1;
        }
        !at.is_freed
    }

    /// Records that such a request has been submitted, or will never be.
    pub(super) fn unpin(&self) {
        self.change(|at| at.waiting -= 1);
    }

    /// Frees the object behind the requests that name it.
    pub(super) fn release(&self) {
        self.change(|at| at.is_released = true);
    }

    fn change(&self, change: impl FnOnce(&mut At)) {
        let mut at = self.at.lock();
        change(&mut at);
        let release = at.take_release();
        drop(at);
        if let Some((session, handle)) = release {
            free(&session, handle);
        }
    }

    /// Returns the name of a function, if it has one.
    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Returns the handle in the session with that number; `None` if the object went with another
    /// one. A function that has a name is looked up there.
    ///
    /// # Errors
    ///
    /// Those of the lookup.
    pub(super) async fn handle_in(
        &self,
        generation: u64,
        session: &SharedSession,
        request: impl Fn(Operation) -> Request,
    ) -> Result<Option<Handle>, RpcError> {
        {
            let at = self.at.lock();
            if at.generation == generation {
                return Ok(Some(at.handle));
            }
        }
        let Some(name) = self.name.clone() else { return Ok(None) };
        let found = session.submit(request(Operation::GetFunction { name })).reply().await?;
        let Value::Object(Reference::Function(handle)) = found else {
            return Err(RpcError::internal("a function that was looked up is none"));
        };
        let mut at = self.at.lock();
        if at.generation >= generation {
            // Another request has looked it up meanwhile, perhaps in a later session.
            let known = (at.generation == generation).then_some(at.handle);
            drop(at);
            free(session, handle);
            let replaced = || RpcError::new(ErrorKind::Closed, "the session was replaced by another one");
            return known.ok_or_else(replaced).map(Some);
        }
        at.generation = generation;
        at.session = session.clone();
        at.handle = handle;
        Ok(Some(handle))
    }

    /// Records that a request has freed the object.
    pub(super) fn mark_freed(&self) {
        self.at.lock().is_freed = true;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let at = self.at.get_mut();
        if !at.is_freed {
            free(&at.session, at.handle);
        }
    }
}

fn free(session: &SharedSession, handle: Handle) {
    session.submit(Request::new(Operation::Release { handles: vec![handle] })).reply().detach();
}

/// Returns the error for an object that went with its session.
pub(super) fn lost() -> RpcError {
    RpcError::new(ErrorKind::InvalidHandle, "the object was part of a session that was lost")
}

/// Returns the objects that an operation names, in the order of [`translated`], and takes those
/// that it frees from the table.
///
/// # Errors
///
/// A handle that names none.
pub(super) fn pins_of(objects: &mut HandleTable<Arc<Held>>, operation: &Operation) -> Result<Pins, RpcError> {
    let mut found = Vec::new();
    if let Operation::Free { handle } = operation {
        found.push(objects.remove(*handle)?);
    } else {
        translated(operation, &mut |handle| {
            found.push(objects.get(handle)?.clone());
            Ok(handle)
        })?;
    }
    // None of them is gone: the table's lock is held, and an object leaves it before it is freed.
    let pinned = found.iter().all(|object| object.pin());
    Ok(Pins { objects: found, pinned: Mutex::new(pinned) })
}

/// Objects that a request names.
pub(super) struct Pins {
    pub(super) objects: Vec<Arc<Held>>,
    /// True while the request counts as one that has not been submitted.
    pinned: Mutex<bool>,
}

impl Pins {
    /// Counts the request again, for another attempt. Returns false if an object is gone.
    pub(super) fn pin(&self) -> bool {
        let mut pinned = self.pinned.lock();
        if *pinned {
            return true;
        }
        for (at, object) in self.objects.iter().enumerate() {
            if !object.pin() {
                self.objects[..at].iter().for_each(|object| object.unpin());
                return false;
            }
        }
        *pinned = true;
        true
    }

    /// Lets go of the objects, when the request has been submitted or will not be.
    pub(super) fn unpin(&self) {
        if std::mem::take(&mut *self.pinned.lock()) {
            self.objects.iter().for_each(|object| object.unpin());
        }
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        self.unpin();
    }
}

/// Returns a copy of an operation, with its handles replaced.
///
/// # Errors
///
/// Those of `replace`, and an operation that this version does not know.
pub(super) fn translated(
    operation: &Operation,
    replace: &mut impl FnMut(Handle) -> Result<Handle, RpcError>,
) -> Result<Operation, RpcError> {
    let tensor = |tensor: &TensorRef, replace: &mut dyn FnMut(Handle) -> Result<Handle, RpcError>| {
        Ok::<_, RpcError>(TensorRef { storage: replace(tensor.storage)?, ..tensor.clone() })
    };
    Ok(match operation {
        Operation::GetFunction { name } => Operation::GetFunction { name: name.clone() },
        Operation::Call { function, args } => {
            let function = replace(*function)?;
            let mut arg = |value: &Value| {
                value.clone().try_map(&mut |reference| {
                    let handle = replace(reference.handle())?;
                    Ok::<_, RpcError>(with_handle(reference, handle))
                })
            };
            Operation::Call { function, args: args.iter().map(&mut arg).collect::<Result<_, _>>()? }
        }
        Operation::Alloc { device, dtype, shape, scope, alignment } => Operation::Alloc {
            device: *device,
            dtype: *dtype,
            shape: shape.clone(),
            scope: scope.clone(),
            alignment: *alignment,
        },
        Operation::Write { to, offset, data } => {
            Operation::Write { to: tensor(to, replace)?.into(), offset: *offset, data: data.clone() }
        }
        Operation::Read { from, offset, len, into } => {
            Operation::Read { from: tensor(from, replace)?.into(), offset: *offset, len: *len, into: into.clone() }
        }
        Operation::Copy { from, to } => {
            Operation::Copy { from: tensor(from, replace)?.into(), to: tensor(to, replace)?.into() }
        }
        Operation::Free { handle } => Operation::Free { handle: replace(*handle)? },
        Operation::Attribute { device, attribute } => Operation::Attribute { device: *device, attribute: *attribute },
        Operation::CreateStream { device } => Operation::CreateStream { device: *device },
        Operation::SetStream { device, stream } => {
            Operation::SetStream { device: *device, stream: stream.map(&mut *replace).transpose()? }
        }
        Operation::StreamWait { device, stream } => {
            Operation::StreamWait { device: *device, stream: stream.map(&mut *replace).transpose()? }
        }
        Operation::StreamWaitFor { device, stream, other_device, other } => Operation::StreamWaitFor {
            device: *device,
            stream: stream.map(&mut *replace).transpose()?,
            other_device: *other_device,
            other: other.map(&mut *replace).transpose()?,
        },
        Operation::LoadModule { path, loader } => Operation::LoadModule { path: path.clone(), loader: loader.clone() },
        Operation::ModuleFunction { module, name } => {
            Operation::ModuleFunction { module: replace(*module)?, name: name.clone() }
        }
        other => return Err(RpcError::unsupported(format!("a retrying session has no {}", other.name()))),
    })
}

/// Returns the reference with another handle.
pub(super) fn with_handle(reference: Reference, handle: Handle) -> Reference {
    match reference {
        Reference::Function(_) => Reference::Function(handle),
        Reference::Module(_) => Reference::Module(handle),
        Reference::Tensor(tensor) => Reference::Tensor(TensorRef { storage: handle, ..*tensor }.into()),
        // An object of the application, and whatever comes later.
        _ => Reference::Object(handle),
    }
}
