//! The origin's side of callbacks: calls wait in an exchange until the client that owns the closure
//! has taken and answered them.
//!
//! An exchange has two ends. The *function* is called by code at the origin; the client takes calls
//! from the *source*. Neither end refers to the other, so that each can be dropped independently:
//! without the source every call fails, and without the function no call is left to take. A taken
//! call is an object, too: if the client releases it without an answer, or never receives it,
//! dropping it is the answer, and no call is lost.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Poll, Waker};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::error::{ErrorKind, Result, RpcError};
use crate::function::context::Context;
use crate::function::convert::{Pack, Shared};
use crate::function::function::{Function, Signature};
use crate::function::object::LocalValue;
use crate::panics::drop_each;
use crate::session::Lane;

/// `() -> [function, source]`
pub(crate) const CREATE: &str = "rpc.callback.create";
/// `(source) -> null or [call, [args…], lane or null]`
pub(crate) const NEXT: &str = "rpc.callback.next";
/// `(call, value, packed error or null) -> null`
pub(crate) const DONE: &str = "rpc.callback.done";

/// Returns the functions that every registry has for callbacks.
pub(crate) fn functions() -> [(String, Function); 3] {
    [
        (CREATE.to_owned(), Function::inline(create)),
        (NEXT.to_owned(), Function::asynchronous(next)),
        (DONE.to_owned(), Function::inline(done)),
    ]
}

fn create() -> (Function, Shared<Source>) {
    let exchange = Arc::<Exchange>::default();
    let callee = Callee(exchange.clone());
    let signature = Signature { params: vec!["...".into()], returns: "any".into() };
    let function = Function::dynamic(signature, move |context, args| callee.0.call(context, args));
    (function, Shared(Arc::new(Source(exchange))))
}

/// The future holds only the exchange: it must not keep the source whose end it waits for.
fn next(context: Context, Shared(source): Shared<Source>) -> Next {
    Next { exchange: source.0.clone(), context, ticket: None }
}

fn done(Shared(call): Shared<TakenCall>, value: LocalValue, error: Option<Pack<RpcError>>) {
    let outcome = match error {
        Some(Pack(error)) => Err(error),
        None => Ok(value),
    };
    call.exchange.answer(call.id, outcome);
}

/// The client's end. Dropped when the client frees it, and with the session.
struct Source(Arc<Exchange>);

impl Drop for Source {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The end that is called. Dropped with the last reference to the function.
struct Callee(Arc<Exchange>);

impl Drop for Callee {
    fn drop(&mut self) {
        self.0.orphan();
    }
}

/// A call that the client has taken.
struct TakenCall {
    exchange: Arc<Exchange>,
    id: u64,
}

impl Drop for TakenCall {
    fn drop(&mut self) {
        self.exchange.answer(self.id, Err(let_go().may_have_run(true)));
    }
}

fn let_go() -> RpcError {
    RpcError::new(ErrorKind::InvalidHandle, "the client that owns the closure has let go of it")
}

/// Exchange between calls and the requests that take them.
///
/// Its queue needs no limit of its own: each call in it blocks a thread of its caller.
#[derive(Default)]
struct Exchange(Mutex<ExchangeState>);

#[derive(Default)]
struct ExchangeState {
    /// True once the source is gone: no call will be taken or answered.
    closed: bool,
    /// True once the function is gone: no further call can arrive.
    orphaned: bool,
    /// Last number given to a call or to a taker.
    last: u64,
    /// Calls that have not been taken. Each is also in `calls`.
    queue: VecDeque<QueuedCall>,
    /// All calls whose callers wait.
    calls: HashMap<u64, PendingCall>,
    /// Requests that wait for a call, the longest-waiting first.
    takers: BTreeMap<u64, Waker>,
}

struct QueuedCall {
    id: u64,
    args: Vec<LocalValue>,
    context: Context,
}

#[derive(Default)]
struct PendingCall {
    taken: bool,
    outcome: Option<Result<LocalValue>>,
    answered: Arc<Condvar>,
}

impl Exchange {
    /// Queues a call and blocks until it is answered, or its deadline has passed.
    fn call(&self, context: &Context, args: Vec<LocalValue>) -> Result<LocalValue> {
        let answered = Arc::<Condvar>::default();
        let mut state = self.lock();
        if state.closed {
            return Err(let_go());
        }
        let id = state.number();
        state.calls.insert(id, PendingCall { answered: answered.clone(), ..PendingCall::default() });
        state.queue.push_back(QueuedCall { id, args, context: context.clone() });
        let taker = state.takers.pop_first();
        drop(state);
        if let Some((_, taker)) = taker {
            taker.wake();
        }
        let mut state = self.lock();
        loop {
            if let Some(outcome) = state.calls.get_mut(&id).and_then(|call| call.outcome.take()) {
                state.calls.remove(&id);
                return outcome;
            }
            let Some(deadline) = context.deadline() else {
                answered.wait(&mut state);
                continue;
            };
            let left = deadline.saturating_duration_since(crate::clock::now());
            if left.is_zero() {
                let taken = state.calls.remove(&id).is_some_and(|call| call.taken);
                let queued =
                    state.queue.iter().position(|queued| queued.id == id).and_then(|at| state.queue.remove(at));
                drop(state);
                drop_each(queued);
                let error =
                    RpcError::new(ErrorKind::DeadlineExceeded, "the closure did not answer before the deadline");
                return Err(error.may_have_run(taken));
            }
            answered.wait_for(&mut state, left);
        }
    }

    /// Ends a call, unless it has ended already.
    fn answer(&self, id: u64, outcome: Result<LocalValue>) {
        let mut state = self.lock();
        match state.calls.get_mut(&id) {
            Some(call) if call.outcome.is_none() => {
                call.outcome = Some(outcome);
                call.answered.notify_one();
            }
            _ => {
                drop(state);
                drop_each([outcome]);
            }
        }
    }

    fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let (queue, takers) = (std::mem::take(&mut state.queue), std::mem::take(&mut state.takers));
        for call in state.calls.values_mut().filter(|call| call.outcome.is_none()) {
            call.outcome = Some(Err(let_go().may_have_run(call.taken)));
            call.answered.notify_one();
        }
        drop(state);
        takers.into_values().for_each(Waker::wake);
        drop_each(queue);
    }

    fn orphan(&self) {
        let mut state = self.lock();
        state.orphaned = true;
        let takers = std::mem::take(&mut state.takers);
        drop(state);
        takers.into_values().for_each(Waker::wake);
    }

    fn lock(&self) -> MutexGuard<'_, ExchangeState> {
        // No foreign code runs inside of the lock.
        self.0.lock()
    }
}

impl ExchangeState {
    fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Takes the first call that has not been taken. Calls whose deadline has passed stay: their
    /// callers have been told and are about to remove them.
    fn take(&mut self) -> Option<QueuedCall> {
        let in_time =
            |queued: &QueuedCall| queued.context.deadline().is_none_or(|deadline| crate::clock::now() < deadline);
        let at = self.queue.iter().position(in_time)?;
        let queued = self.queue.remove(at)?;
        if let Some(call) = self.calls.get_mut(&queued.id) {
            call.taken = true;
        }
        Some(queued)
    }
}

/// Future of the next call; resolves to `None` if there will be none.
struct Next {
    exchange: Arc<Exchange>,
    context: Context,
    /// Its number among the waiting requests.
    ticket: Option<u64>,
}

/// A call, its arguments, and the lane that waits for it, if that belongs to the taker's session.
type Delivery = (Shared<TakenCall>, Vec<LocalValue>, Option<u32>);

impl Future for Next {
    type Output = Option<Delivery>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> Poll<Self::Output> {
        // A request that does not wait any more leaves the call to another.
        if self.context.is_cancelled() {
            return Poll::Ready(None);
        }
        let exchange = self.exchange.clone();
        let mut state = exchange.lock();
        if let Some(QueuedCall { id, args, context }) = state.take() {
            drop(state);
            let lane = (context.lane() != Lane::CONCURRENT && context.is_of_the_session_of(&self.context))
                .then_some(context.lane().0);
            return Poll::Ready(Some((Shared(Arc::new(TakenCall { exchange, id })), args, lane)));
        }
        if state.closed || state.orphaned {
            return Poll::Ready(None);
        }
        let ticket = *self.ticket.get_or_insert_with(|| state.number());
        state.takers.insert(ticket, cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for Next {
    fn drop(&mut self) {
        let mut state = self.exchange.lock();
        if let Some(ticket) = self.ticket {
            state.takers.remove(&ticket);
        }
        // The request may have been woken for a call that it leaves in the queue.
        let heir = if state.queue.is_empty() { None } else { state.takers.pop_first() };
        drop(state);
        if let Some((_, heir)) = heir {
            heir.wake();
        }
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Source")
    }
}

impl fmt::Debug for TakenCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TakenCall({})", self.id)
    }
}
