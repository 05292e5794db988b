//! Calls of foreign functions that are under way on this thread.
//!
//! A function that is called back from foreign code works for the innermost of them: it has that call's context, and may use
//! the tensors that it was given.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, mpsc};

use super::function::LaneStream;
use super::object::Ref;
use rpc_core::error::RpcError;
use rpc_core::function::{Context, FunctionKind};
use rpc_core::tensor::{Access, Borrow, Storage, borrow_all};

thread_local! {
    static STACK: RefCell<Vec<Rc<Frame>>> = const { RefCell::new(Vec::new()) };
}

/// One call.
pub(super) struct Frame {
    pub(super) context: Context,
    /// Where the function runs.
    pub(super) kind: FunctionKind,
    /// Those of all tensors that the function was given.
    pub(super) storages: Vec<Arc<Storage>>,
    /// Of `storages`; none while the function calls back.
    borrows: RefCell<Vec<Borrow>>,
    /// The streams that the function knows of.
    lanes: RefCell<Vec<Rc<LaneStream>>>,
    /// What functions of the session have raised, in the form that foreign code has.
    raised: RefCell<Option<(Ref, RpcError)>>,
}

/// Begins a call on this thread. It is over when what is returned is dropped.
pub(super) fn enter(context: &Context, kind: FunctionKind, borrows: Vec<Borrow>) -> Entered {
    let storages = borrows.iter().map(|borrow| borrow.storage().clone()).collect();
    let (context, borrows) = (context.clone(), RefCell::new(borrows));
    let (lanes, raised) = (RefCell::default(), RefCell::new(None));
    let frame = Rc::new(Frame { context, kind, storages, borrows, lanes, raised });
    STACK.with_borrow_mut(|stack| stack.push(frame.clone()));
    Entered(frame)
}

/// The innermost call.
pub(super) fn current() -> Option<Rc<Frame>> {
    STACK.try_with(|stack| stack.borrow().last().cloned()).ok().flatten()
}

/// A call, until dropped. The borrows in it end with that.
pub(super) struct Entered(Rc<Frame>);

impl Entered {
    /// Which streams the function submits its work to.
    pub(super) fn is_on(&self, lanes: Vec<Rc<LaneStream>>) {
        self.0.lanes.replace(lanes);
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let ended = STACK.with_borrow_mut(Vec::pop);
        // Outside of the borrow: others may be handed the tensors.
        drop(ended);
    }
}

impl Frame {
    /// Gives the borrows of the call's tensors away until what is returned is dropped: foreign code that calls back does not
    /// touch them meanwhile, and whom it calls may want to. Not those of an inline function, which could not wait for them
    /// afterwards. What is called comes behind what foreign code has submitted to its streams so far.
    pub(super) fn suspend(&self) -> (Suspended<'_>, Vec<Borrow>) {
        self.lanes.borrow().iter().for_each(|lane| lane.end());
        let given = if self.kind == FunctionKind::Inline { Vec::new() } else { self.borrows.take() };
        (Suspended(self), given)
    }

    /// Borrows the tensors again, when those who have them are done.
    fn resume(&self) {
        self.borrow_again();
        for storage in &self.storages {
            // Has the default stream come behind what others have yet to do there.
            _ = storage.memory().device_address();
        }
        for lane in self.lanes.borrow().iter() {
            if let Err(error) = lane.begin() {
                tracing::warn!(%error, "a stream could not be put in order with the default one");
            }
        }
    }

    fn borrow_again(&self) {
        if self.kind == FunctionKind::Inline {
            return;
        }
        let wanted = self.storages.iter().map(|storage| (storage.clone(), Access::Write)).collect();
        let (give, given) = mpsc::channel();
        let borrowed = borrow_all(wanted, Box::new(move |borrows| _ = give.send(borrows)));
        match borrowed {
            Ok(Some(borrows)) => drop(self.borrows.replace(borrows)),
            // Whoever has them passes them on when it is done, or goes.
            Ok(None) => drop(self.borrows.replace(given.recv().unwrap_or_default())),
            Err(error) => tracing::error!(%error, "storages that were borrowed together conflict"),
        }
    }

    /// Remembers what `raised` stands for.
    pub(super) fn keep_raised(&self, raised: Ref, error: RpcError) {
        let before = self.raised.replace(Some((raised, error)));
        drop(before);
    }

    /// What `raised` stands for, if it is ours.
    pub(super) fn take_raised(&self, raised: &Ref) -> Option<RpcError> {
        let kept = self.raised.take()?;
        // The count that was kept has kept the address from being used for another one.
        (kept.0.raw() == raised.raw()).then_some(kept.1)
    }
}

/// Tensors of a call that are free for others, until dropped.
pub(super) struct Suspended<'a>(&'a Frame);

impl Drop for Suspended<'_> {
    fn drop(&mut self) {
        self.0.resume();
    }
}
