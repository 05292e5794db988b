//! Call frames: the calls of foreign functions that are running on this thread.
//!
//! A function that is called back from foreign code runs on behalf of the innermost frame: it has
//! that call's context, and may use the tensors that the call was given.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, mpsc};

use super::lane_stream::LaneStream;
use super::object::Ref;
use rpc_core::dlpack::DeviceType;
use rpc_core::error::{Result, RpcError};
use rpc_core::function::{Context, FunctionKind};
use rpc_core::tensor::{Access, Borrow, Storage, borrow_all};

thread_local! {
    static STACK: RefCell<Vec<Rc<CallFrame>>> = const { RefCell::new(Vec::new()) };
}

/// One call.
pub(super) struct CallFrame {
    pub(super) context: Context,
    /// Kind of the function, which determines its thread.
    pub(super) kind: FunctionKind,
    /// Storages of all tensors that the function was given.
    pub(super) storages: Vec<Arc<Storage>>,
    /// Borrows of `storages`; none while the function calls back.
    borrows: RefCell<Vec<Borrow>>,
    /// Streams that the function has been told of.
    lanes: RefCell<Vec<Rc<LaneStream>>>,
    /// Last error that a function of the session has raised, with its form in foreign code.
    raised: RefCell<Option<(Ref, RpcError)>>,
}

/// Begins a call on this thread. It ends when the returned guard is dropped.
pub(super) fn enter(context: &Context, kind: FunctionKind, borrows: Vec<Borrow>) -> CallFrameGuard {
    let storages = borrows.iter().map(|borrow| borrow.storage().clone()).collect();
    let (context, borrows) = (context.clone(), RefCell::new(borrows));
    let (lanes, raised) = (RefCell::default(), RefCell::new(None));
    let frame = Rc::new(CallFrame { context, kind, storages, borrows, lanes, raised });
    STACK.with_borrow_mut(|stack| stack.push(frame.clone()));
    CallFrameGuard(frame)
}

/// Returns the innermost call.
pub(super) fn current() -> Option<Rc<CallFrame>> {
    STACK.try_with(|stack| stack.borrow().last().cloned()).ok().flatten()
}

/// Guard of a call. Dropping it ends the call and its borrows.
pub(super) struct CallFrameGuard(Rc<CallFrame>);

impl CallFrameGuard {
    /// Sets the streams that the function submits its work to.
    pub(super) fn set_lanes(&self, lanes: Vec<Rc<LaneStream>>) {
        self.0.lanes.replace(lanes);
    }
}

impl std::ops::Deref for CallFrameGuard {
    type Target = CallFrame;

    fn deref(&self) -> &CallFrame {
        &self.0
    }
}

impl Drop for CallFrameGuard {
    fn drop(&mut self) {
        let ended = STACK.with_borrow_mut(Vec::pop);
        // Outside of the `RefCell` borrow: dropping it may hand the tensors to others.
        drop(ended);
    }
}

impl CallFrame {
    /// Returns the first memory of a device that the processor reaches, too, such as pinned memory.
    pub(super) fn host_memory(&self) -> Option<&Arc<Storage>> {
        let is_on_host =
            |storage: &&Arc<Storage>| storage.device().kind != DeviceType::CPU && storage.memory().host().is_some();
        self.storages.iter().find(is_on_host)
    }

    /// Waits for the work that foreign code has submitted to its streams so far, if it was given
    /// [memory of a device that the processor reaches](Self::host_memory). The next user of that
    /// memory may be the processor, which is in no stream's order. Inline functions are not given
    /// any: their thread must not wait.
    ///
    /// # Errors
    ///
    /// The error of that work.
    pub(super) fn wait_for_host_memory(&self) -> Result<()> {
        if self.host_memory().is_some() {
            self.lanes.borrow().iter().try_for_each(|lane| lane.stream.synchronize())?;
        }
        Ok(())
    }

    /// Releases the borrows of the call's tensors until the returned guard is dropped: foreign code
    /// that calls back does not access them meanwhile, and the called function may need them. An
    /// inline function keeps its borrows, because it could not wait for them afterwards. The called
    /// function's work runs behind all work that foreign code has submitted to its streams so far,
    /// which is done already if the processor reaches some of the memory.
    pub(super) fn suspend(&self) -> (Suspended<'_>, Vec<Borrow>) {
        self.lanes.borrow().iter().for_each(|lane| lane.end());
        if let Err(error) = self.wait_for_host_memory() {
            // Every use of the device reports it.
            tracing::debug!(%error, "the work of a function that calls back has failed");
        }
        let given = if self.kind == FunctionKind::Inline { Vec::new() } else { self.borrows.take() };
        (Suspended(self), given)
    }

    /// Borrows the tensors again, once their other users are done.
    fn resume(&self) {
        self.borrow_again();
        for storage in &self.storages {
            // Lets the default stream begin behind pending work of other streams on the memory.
            _ = storage.memory().device_address();
        }
        for lane in self.lanes.borrow().iter() {
            if let Err(error) = lane.begin() {
                rpc_core::log_limited!(WARN, %error, "a stream could not be put in order with the default one");
            }
        }
    }

    fn borrow_again(&self) {
        if self.kind == FunctionKind::Inline {
            return;
        }
        let required = self.storages.iter().map(|storage| (storage.clone(), Access::Write)).collect();
        let (give, given) = mpsc::channel();
        let borrowed = borrow_all(required, Box::new(move |borrows| _ = give.send(borrows)));
        match borrowed {
            Ok(Some(borrows)) => drop(self.borrows.replace(borrows)),
            // The holder passes the borrows on when it is done, or ends.
            Ok(None) => drop(self.borrows.replace(given.recv().unwrap_or_default())),
            Err(error) => rpc_core::log_limited!(ERROR, %error, "storages that were borrowed together conflict"),
        }
    }

    /// Remembers the session's error that `raised` represents.
    pub(super) fn keep_raised(&self, raised: Ref, error: RpcError) {
        let before = self.raised.replace(Some((raised, error)));
        drop(before);
    }

    /// Returns the session's error that `raised` represents, if there is one.
    pub(super) fn take_raised(&self, raised: &Ref) -> Option<RpcError> {
        let kept = self.raised.take()?;
        // The kept count prevents the reuse of the address by another error.
        (kept.0.raw() == raised.raw()).then_some(kept.1)
    }
}

/// Guard that keeps the tensors of a call free for others until it is dropped.
pub(super) struct Suspended<'a>(&'a CallFrame);

impl Drop for Suspended<'_> {
    fn drop(&mut self) {
        self.0.resume();
    }
}
