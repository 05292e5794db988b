//! What goes on without a thread, the futures of asynchronous functions and waits for streams, and how their lanes go on when
//! that is over.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Poll, ready};

use super::lane_runner::{Duty, Ran};
use super::lanes::LaneKey;
use super::{Shared, Spawner};
use crate::device::Stream;
use crate::error::{Result, RpcError};
use crate::function::object::{CatchPanic, LocalValue};
use crate::panics::drop_each;
use crate::reply::Responder;
use crate::value::Value;

/// It is being begun.
const BEGINNING: u8 = 0;
/// It goes on with its lane when it is over.
const BEGUN: u8 = 1;
/// It was over while it was being begun, and has left the lane to the one who begins it.
const OVER: u8 = 2;

impl Shared {
    /// Gives a future to the spawner. What it is for goes on when it is over.
    pub(super) fn run_future(
        self: &Arc<Self>,
        spawner: &dyn Spawner,
        key: LaneKey,
        responder: Option<Responder>,
        bytes: usize,
        future: CatchPanic,
    ) -> (Option<Ran>, Duty) {
        self.begin_later(key, responder, bytes, |end| {
            let task = Box::pin(Task { future: Some(future), end });
            if catch_unwind(AssertUnwindSafe(|| spawner.spawn(task))).is_err() {
                tracing::error!("the spawner panicked");
            }
        })
    }

    /// Waits until a stream has done its work so far, on this thread only if the device has no other way.
    pub(super) fn wait_for_stream(
        self: &Arc<Self>,
        stream: &dyn Stream,
        key: LaneKey,
        responder: Option<Responder>,
        bytes: usize,
    ) -> (Option<Ran>, Duty) {
        self.begin_later(key, responder, bytes, |mut end| {
            let done = Box::new(move |outcome: Result<()>| end.complete(outcome.map(|()| Value::Null)));
            if let Err(done) = stream.when_done(done) {
                done(stream.synchronize());
            }
        })
    }

    /// Begins something that completes a request when it is over.
    fn begin_later(
        self: &Arc<Self>,
        key: LaneKey,
        responder: Option<Responder>,
        bytes: usize,
        begin: impl FnOnce(End),
    ) -> (Option<Ran>, Duty) {
        let (submission, responder) = match responder {
            Some(responder) => (None, responder),
            None => {
                let (submission, responder) = self.pending();
                responder.admit();
                (Some(Ran::Later(submission)), responder)
            }
        };
        let stage = Arc::new(AtomicU8::new(BEGINNING));
        begin(End { shared: self.clone(), key, bytes, responder: Some(responder), stage: stage.clone() });
        // What is over already leaves the lane to us: were it to go on itself, a spawner that runs or drops its futures at
        // once would nest as deep as the lane is long.
        let duty = if stage.swap(BEGUN, Ordering::AcqRel) == OVER { Duty::Stays(bytes) } else { Duty::Passed };
        (submission, duty)
    }
}

/// The future of an asynchronous function, and what it is for.
struct Task {
    /// Dropped before the rest is seen to, so that its tensors are free by then.
    future: Option<CatchPanic>,
    end: End,
}

impl Future for Task {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> Poll<()> {
        let Some(future) = &mut self.future else { return Poll::Ready(()) };
        let outcome = ready!(Pin::new(future).poll(cx));
        drop_each(self.future.take());
        self.end.complete(outcome);
        Poll::Ready(())
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        drop_each(self.future.take());
    }
}

/// Sees to it that a request gets its reply, and its lane goes on, however that which it waits for ends: a runtime that shuts
/// down drops futures halfway.
struct End {
    shared: Arc<Shared>,
    key: LaneKey,
    bytes: usize,
    /// `None` once all has been seen to.
    responder: Option<Responder>,
    stage: Arc<AtomicU8>,
}

impl End {
    fn complete(&mut self, outcome: Result<LocalValue>) {
        let Some(responder) = self.responder.take() else { return };
        responder.complete(outcome.and_then(|value| self.shared.name_objects(value)));
        if self.stage.swap(OVER, Ordering::AcqRel) == BEGUN {
            self.shared.go_on(self.key, self.bytes, None);
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let dropped = RpcError::internal("the runtime dropped the function before it returned");
        self.complete(Err(dropped.may_have_run(true)));
    }
}
