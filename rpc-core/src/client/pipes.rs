//! Results that are not there yet, as arguments of later operations: [`Pipe`].

use std::fmt;
use std::future::IntoFuture;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::client::action::{Action, KeptRequest, OnReply, OneRequest, Pending, RequestPins, ScopedAction};
use crate::client::promise::Promise;
use crate::client::references::{Owned, RemoteFunction, RemoteModule, RemoteTensor};
use crate::dlpack::{DataType, Device};
use crate::error::{ErrorKind, Result, RpcError};
use crate::function::convert::{ArgScope, FromReply, IntoArg};
use crate::session::Operation;
use crate::value::{Reference, TensorRef, Value};

/// Result of an operation that is in progress, as an argument of later operations of the same lane.
/// Made by [`Action::pipe`](ScopedAction::pipe).
///
/// The session keeps the result, and puts it in place of the pipe when the later operation begins.
/// Nothing waits for a reply in between: a chain of calls, each of which takes the result of the
/// one before, takes one round trip.
///
/// ```
/// use rpc_core::{ErrorKind, LocalSession, Registry, Session};
///
/// let registry = Registry::new();
/// registry.add("half", |n: i64| if n % 2 == 0 { Ok(n / 2) } else { Err(format!("{n} is odd")) });
/// let session = Session::new(LocalSession::new(registry));
/// let half = session.get_function("half").wait()?;
///
/// let a = half.call::<i64>((12,)).pipe();
/// let b = half.call::<i64>((&a,)).pipe();
/// let c = half.call::<i64>((&b,)).start();
/// assert_eq!(b.wait()?, 3);
/// let error = c.wait().unwrap_err();
/// assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::Application, true));
///
/// let failed = half.call::<i64>((1,)).pipe();
/// let error = half.call::<i64>((&failed,)).wait().unwrap_err();
/// assert!(error.message().ends_with("the earlier 'half' failed: 1 is odd"), "{error}");
/// assert!(!error.request_may_have_run());
/// # Ok::<(), rpc_core::RpcError>(())
/// ```
///
/// **Order.** The result is known when a later operation of its lane begins, because a lane runs
/// its requests one after the other. So a pipe belongs to the lane and the session of its
/// operation, and a concurrent operation has none. Others are refused before they are sent, with
/// [`ErrorKind::ApiMisuse`].
///
/// **Errors.** If the operation fails, so does each one that names its result, before it begins:
/// with the same kind, and a message that names the operation which has failed. It has not run then
/// ([`request_may_have_run`](RpcError::request_may_have_run) is false). The error of the operation
/// itself is that of [`fetch`](Self::fetch).
///
/// **Ownership.** The session keeps the result as long as a clone of the pipe lives, or an
/// operation in progress names it; dropping the last one frees it. A result counts as an object of
/// the session, and so do the objects in it; its bytes count against what the session may have
/// queued, and do so once more in each call that it is put into. A session keeps 4,096 at most.
///
/// **Cancellation.** Dropping all clones cancels the operation, if it has not begun. An operation
/// that names the pipe keeps a clone until its reply.
///
/// Servers that are older, and those of TVM, keep no results: [`fetch`](Self::fetch) and each
/// operation that names the pipe fail with [`ErrorKind::Unsupported`]. So it is in sessions that
/// repeat requests (`RetrySession` of `rpc-transports`), because a part of a chain cannot be
/// repeated.
pub struct Pipe<T> {
    /// The result, or the reason for which the operation was not submitted.
    kept: Result<Arc<Owned>>,
    converted: PhantomData<fn() -> T>,
}

impl<T: FromReply> ScopedAction<'static, T> {
    /// Starts the operation, and leaves its result in the session for [later
    /// operations](Pipe) of the same lane, which may name it from now on. Only an operation of one
    /// request has a pipe; calls, look-ups of functions and modules, and allocations are such.
    ///
    /// Never fails: an operation that cannot have a pipe fails when the pipe is used. A program
    /// that waits for nothing afterwards calls [`send_soon`](Pipe::send_soon).
    pub fn pipe(self) -> Pipe<T> {
        let kept = self.submit_kept();
        let kept = kept.map(|KeptRequest { session, handle, lane, pending, name, tensor }| {
            Owned::promised(handle, &session, Promise::new(lane, pending, tensor, name))
        });
        Pipe { kept, converted: PhantomData }
    }
}

impl<T> Pipe<T> {
    /// Makes the session send the operation within a few milliseconds, although nothing waits for
    /// it. Without this, a session whose bytes are moved by the threads that wait sends it with the
    /// next operation that a thread waits for.
    pub fn send_soon(&self) {
        if let Ok(kept) = &self.kept {
            kept.send_soon();
        }
    }
}

impl<T: FromReply> Pipe<T> {
    /// Fetches the result. It stays in the session, and objects in it are fetched as references of
    /// their own.
    ///
    /// # Errors
    ///
    /// That of the operation, if it has failed. [`ErrorKind::ApiMisuse`] on another lane than the
    /// operation's, which is the default here.
    pub fn fetch(&self) -> Action<T> {
        let kept = match &self.kept {
            Ok(kept) => kept,
            Err(error) => return Action::failed(error.clone()),
        };
        let mut others = Vec::new();
        kept.pin_into(&mut others);
        let fetch = OneRequest::new(kept.session(), Ok(Operation::Fetch { handle: kept.handle() }));
        let fetch = fetch.pinned(RequestPins { function: None, others }).on_reply(Arc::new(Fetched(kept.clone())));
        Action::from(fetch).lane(kept.lane().unwrap_or_default())
    }

    /// [Fetches](Self::fetch) the result on the calling thread.
    ///
    /// # Errors
    ///
    /// As there, and [`ErrorKind::ApiMisuse`] inside an async runtime.
    pub fn wait(&self) -> Result<T> {
        self.fetch().wait()
    }
}

impl Pipe<RemoteFunction> {
    /// Returns the function that the operation looks up, to be called on the lane of the pipe.
    ///
    /// # Errors
    ///
    /// The operation was not submitted, for this reason.
    pub fn function(&self) -> Result<RemoteFunction> {
        self.kept.clone().map(RemoteFunction)
    }
}

impl Pipe<RemoteModule> {
    /// Returns the module that the operation loads, for look-ups on the lane of the pipe.
    ///
    /// # Errors
    ///
    /// The operation was not submitted, for this reason.
    pub fn module(&self) -> Result<RemoteModule> {
        self.kept.clone().map(RemoteModule)
    }
}

impl Pipe<RemoteTensor> {
    /// Returns the tensor that the operation allocates, for copies and calls on the lane of the
    /// pipe.
    ///
    /// # Errors
    ///
    /// The operation was not submitted, for this reason; [`ErrorKind::ApiMisuse`] if it is no
    /// allocation, so that the layout of the tensor is not known here.
    pub fn tensor(&self) -> Result<RemoteTensor> {
        let kept = self.kept.clone()?;
        let Some(layout) = kept.promised_tensor() else {
            let text = "the layout of a tensor that a function returns is not known before: name it (tensor_of)";
            return Err(RpcError::new(ErrorKind::ApiMisuse, text));
        };
        let layout = TensorRef { storage: kept.handle(), ..layout.clone() };
        Ok(RemoteTensor::of_layout(kept, layout))
    }

    /// Returns the tensor that the operation returns, like [`tensor`](Self::tensor), as a view of
    /// this layout from its first byte on. The session checks the layout when it is used.
    ///
    /// # Errors
    ///
    /// The operation was not submitted, for this reason.
    pub fn tensor_of(&self, device: Device, dtype: DataType, shape: &[i64]) -> Result<RemoteTensor> {
        let kept = self.kept.clone()?;
        let (storage, shape) = (kept.handle(), shape.to_vec());
        Ok(RemoteTensor::of_layout(kept, TensorRef { storage, byte_offset: 0, shape, strides: None, dtype, device }))
    }
}

impl<T> IntoArg for &Pipe<T> {
    fn into_arg(self, scope: &mut ArgScope<'_>) -> Result<Value> {
        let kept = match &self.kept {
            Ok(kept) => kept,
            Err(error) => return Err(error.clone().context("the result of an operation that was not submitted")),
        };
        let handle = kept.kept_in(scope.session)?;
        kept.pin_into(&mut scope.pins);
        Ok(Value::Object(Reference::Pipe(handle)))
    }
}

/// Kept until the reply, and freed then if this was the last clone.
impl<T> IntoArg for Pipe<T> {
    fn into_arg(self, scope: &mut ArgScope<'_>) -> Result<Value> {
        (&self).into_arg(scope)
    }
}

/// [Fetches](Pipe::fetch) the result.
impl<T: FromReply> IntoFuture for Pipe<T> {
    type Output = Result<T>;
    type IntoFuture = Pending<T>;

    fn into_future(self) -> Pending<T> {
        self.fetch().into_future()
    }
}

impl<T> Clone for Pipe<T> {
    fn clone(&self) -> Self {
        Self { kept: self.kept.clone(), converted: PhantomData }
    }
}

impl<T> fmt::Debug for Pipe<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kept {
            Ok(kept) => write!(f, "Pipe({})", kept.handle()),
            Err(error) => write!(f, "Pipe({error})"),
        }
    }
}

/// A fetched result, whose error is that of its operation.
struct Fetched(Arc<Owned>);

impl OnReply for Fetched {
    fn succeeded(&self) {}

    fn failed(&self, error: RpcError) -> RpcError {
        self.0.promised_error().unwrap_or(error)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, mpsc};
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::{LocalSession, Registry, Session};

    /// Session with `step`, which adds one, and `hold`, which holds its lane until the sender is
    /// used.
    fn session() -> (Arc<LocalSession>, Session, mpsc::Sender<()>) {
        let (registry, (release, held)) = (Registry::new(), mpsc::channel::<()>());
        let held = Mutex::new(held);
        registry.add_inline("step", |n: i64| n + 1);
        registry.add("hold", move || held.lock().is_ok_and(|held| held.recv().is_ok()));
        let local = Arc::new(LocalSession::new(registry));
        (local.clone(), Session::new(local), release)
    }

    #[test]
    fn a_loop_that_keeps_one_pipe_keeps_one_result() {
        let (local, session, _) = session();
        let step = session.get_function("step").wait().unwrap();
        let mut last: Pipe<i64> = step.call((0,)).pipe();
        for n in 2..=10_000 {
            last = step.call((&last,)).pipe();
            // The function, and the result. The one before has gone with the reply.
            assert_eq!(local.usage().handles, 2, "after {n} steps");
            if n % 1000 == 0 {
                assert_eq!(last.wait().unwrap(), n);
            }
        }
        drop(last);
        assert_eq!(local.usage().handles, 1);
    }

    #[test]
    fn a_request_that_was_refused_is_the_reason_for_those_that_name_its_result() {
        let registry = Registry::new();
        registry.add_inline("step", |n: i64| n + 1);
        let limits = crate::SessionLimits { max_handles: 2, ..Default::default() };
        let session = Session::new(LocalSession::builder(registry).limits(limits).build());
        let step = session.get_function("step").wait().unwrap();
        let first: Pipe<i64> = step.call((0,)).pipe();
        let refused: Pipe<i64> = step.call((0,)).pipe();
        let tensor: Pipe<RemoteTensor> = session.alloc(Device::cpu(), DataType::F32, &[1]).pipe();
        drop(first);
        // There is room for this one.
        let dependent: Pipe<i64> = step.call((&refused,)).pipe();
        let tensor = tensor.tensor().unwrap();
        let errors = [
            step.call::<i64>((&refused,)).wait().unwrap_err(),
            dependent.wait().unwrap_err(),
            step.call::<i64>((&dependent,)).wait().unwrap_err(),
            session.copy_to_remote(&tensor, vec![0; 4]).wait().unwrap_err(),
            session.copy_from_remote(&tensor).wait().unwrap_err(),
            session.copy_among_remote(&tensor, &tensor).wait().unwrap_err(),
            session.send(&tensor, &session, &tensor).wait().unwrap_err(),
            tensor.free().wait().unwrap_err(),
        ];
        for (at, error) in errors.into_iter().enumerate() {
            let (kind, may_have_run) = (error.kind(), error.request_may_have_run());
            assert_eq!((kind, may_have_run), (ErrorKind::LimitExceeded, false), "{at}: {error}");
            assert!(error.message().contains("failed: ") && error.message().contains("max_handles"), "{at}: {error}");
        }
        // The reason of others is their own.
        let error = session.free_handle(crate::Handle::from_bits(0)).wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidHandle);
    }

    #[test]
    fn a_deadline_that_has_passed_before_is_the_reason_for_those_that_name_the_result() {
        let (_, session, _) = session();
        let step = session.get_function("step").wait().unwrap();
        let late: Pipe<i64> = step.call((0,)).deadline(Instant::now()).pipe();
        let error = step.call::<i64>((&late,)).wait().unwrap_err();
        assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::DeadlineExceeded, false), "{error}");
    }

    #[test]
    fn copies_and_sends_on_another_lane_are_refused_before_they_are_sent() {
        let (_, session, _) = session();
        let (lane, cpu) = (crate::Lane(5), Device::cpu());
        let (_, other, _) = self::session();
        let there = other.alloc(cpu, DataType::F32, &[1]).wait().unwrap();
        let tensor: Pipe<RemoteTensor> = session.alloc(cpu, DataType::F32, &[1]).pipe();
        let tensor = tensor.tensor().unwrap();
        let mut out = [0; 4];
        let errors = [
            session.copy_to_remote(&tensor, vec![0; 4]).lane(lane).wait().unwrap_err(),
            session.copy_from_remote(&tensor).lane(lane).wait().unwrap_err(),
            session.copy_from_remote_to_slice(&tensor, 0, &mut out).lane(lane).wait().unwrap_err(),
            session.copy_among_remote(&tensor, &tensor).lane(lane).wait().unwrap_err(),
            session.download::<f32>(&tensor).lane(lane).wait().unwrap_err(),
            session.send(&tensor, &session, &tensor).lane(lane).wait().unwrap_err(),
            session.send(&tensor, &other, &there).lane(lane).wait().unwrap_err(),
            other.send(&there, &session, &tensor).concurrent().wait().unwrap_err(),
        ];
        for (at, error) in errors.into_iter().enumerate() {
            assert_eq!((error.kind(), error.hop()), (ErrorKind::ApiMisuse, 0), "{at}: {error}");
        }
        session.copy_to_remote(&tensor, 1.5_f32.to_le_bytes().to_vec()).wait().unwrap();
        session.send(&tensor, &other, &there).wait().unwrap();
        assert_eq!(other.download::<f32>(&there).wait().unwrap(), [1.5]);
    }

    #[test]
    fn a_long_chain_of_requests_that_have_not_begun_is_dropped_on_a_small_stack() {
        let (local, session, release) = session();
        let [step, hold] = ["step", "hold"].map(|name| session.get_function(name).wait().unwrap());
        let held = hold.call::<bool>(()).start();
        let mut last: Pipe<i64> = step.call((0,)).pipe();
        for _ in 0..3000 {
            last = step.call((&last,)).pipe();
        }
        assert_eq!(local.usage().handles, 2 + 3001);
        let dropping = thread::Builder::new().stack_size(256 << 10).spawn(move || drop(last)).unwrap();
        dropping.join().unwrap();
        release.send(()).unwrap();
        assert!(held.wait().unwrap());
        let start = Instant::now();
        while local.usage().handles != 2 {
            assert!(start.elapsed() < Duration::from_secs(20), "{:?}", local.usage());
            thread::sleep(Duration::from_millis(1));
        }
    }
}
