//! Jobs that continue without a thread: futures of asynchronous functions, waits for streams, and
//! the continuation of their lanes.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Poll, ready};

use super::LocalInner;
use super::device_gate::DeviceUses;
use super::job::LaneKey;
use super::lane_runner::{FirstOutcome, LaneHandoff};
use super::pipes::Piped;
use super::spawner::Spawner;
use crate::device::Stream;
use crate::error::{Result, RpcError};
use crate::function::function::CatchPanic;
use crate::function::object::LocalValue;
use crate::panics::drop_each;
use crate::reply::Responder;
use crate::value::Value;

/// Stage of a job that is being started.
const BEGINNING: u8 = 0;
/// Stage of a started job: it continues its lane when it ends.
const BEGUN: u8 = 1;
/// Stage of a job that ended while it was being started: the starter continues the lane.
const ENDED: u8 = 2;

/// Holdings of a job until it ends: its uses of devices, and its share in kept results.
pub(super) type Held = (DeviceUses, Option<Box<Piped>>);

impl LocalInner {
    /// Gives a future to the spawner. Its lane continues when it ends.
    pub(super) fn run_future(
        self: &Arc<Self>,
        spawner: &dyn Spawner,
        key: LaneKey,
        responder: Option<Responder>,
        bytes: usize,
        held: Held,
        future: CatchPanic,
    ) -> (Option<FirstOutcome>, LaneHandoff) {
        self.begin_later(key, responder, bytes, held, |completion| {
            let task = Box::pin(AsyncTask { future: Some(future), completion });
            if catch_unwind(AssertUnwindSafe(|| spawner.spawn(task))).is_err() {
                tracing::error!("the spawner panicked");
            }
        })
    }

    /// Waits until a stream has done its work so far, on this thread only if the device has no
    /// other way.
    pub(super) fn wait_for_stream(
        self: &Arc<Self>,
        stream: &dyn Stream,
        key: LaneKey,
        responder: Option<Responder>,
        bytes: usize,
        held: Held,
    ) -> (Option<FirstOutcome>, LaneHandoff) {
        self.begin_later(key, responder, bytes, held, |mut completion| {
            let done = Box::new(move |outcome: Result<()>| completion.complete(outcome.map(|()| Value::Null)));
            if let Err(done) = stream.when_done(done) {
                done(stream.synchronize());
            }
        })
    }

    /// Starts work that completes a request when it ends.
    fn begin_later(
        self: &Arc<Self>,
        key: LaneKey,
        responder: Option<Responder>,
        bytes: usize,
        (uses, piped): Held,
        begin: impl FnOnce(Completion),
    ) -> (Option<FirstOutcome>, LaneHandoff) {
        let (submission, responder) = match responder {
            Some(responder) => (None, responder),
            None => {
                let (submission, responder) = self.pending();
                responder.admit();
                (Some(FirstOutcome::Later(submission)), responder)
            }
        };
        let stage = Arc::new(AtomicU8::new(BEGINNING));
        let (session, responder) = (self.clone(), Some(responder));
        begin(Completion { session, key, bytes, uses, piped, responder, stage: stage.clone() });
        // Work that has ended already leaves the lane to this thread: if it continued the lane
        // itself, a spawner that runs or drops its futures at once would recurse as deep as the
        // lane is long.
        let handoff = if stage.swap(BEGUN, Ordering::AcqRel) == ENDED {
            LaneHandoff::Kept(bytes)
        } else {
            LaneHandoff::HandedOver
        };
        (submission, handoff)
    }
}

/// The future of an asynchronous function, with the continuation of its lane.
struct AsyncTask {
    /// Dropped before the lane continues, so that its tensors are free by then.
    future: Option<CatchPanic>,
    completion: Completion,
}

impl Future for AsyncTask {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> Poll<()> {
        let Some(future) = &mut self.future else { return Poll::Ready(()) };
        let outcome = ready!(Pin::new(future).poll(cx));
        drop_each(self.future.take());
        self.completion.complete(outcome);
        Poll::Ready(())
    }
}

impl Drop for AsyncTask {
    fn drop(&mut self) {
        drop_each(self.future.take());
    }
}

/// Completes a request and continues its lane when the work ends in any way: a runtime that shuts
/// down drops futures halfway.
struct Completion {
    session: Arc<LocalInner>,
    key: LaneKey,
    bytes: usize,
    uses: DeviceUses,
    piped: Option<Box<Piped>>,
    /// `None` once the request has been completed.
    responder: Option<Responder>,
    stage: Arc<AtomicU8>,
}

impl Completion {
    fn complete(&mut self, outcome: Result<LocalValue>) {
        let Some(responder) = self.responder.take() else { return };
        let outcome = self.session.conclude(self.piped.take(), Some(&responder), outcome);
        self.uses.clear();
        responder.complete(outcome);
        if self.stage.swap(ENDED, Ordering::AcqRel) == BEGUN {
            self.session.continue_lane(self.key, self.bytes, None);
        }
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        let dropped = RpcError::internal("the runtime dropped the function before it returned");
        self.complete(Err(dropped.may_have_run(true)));
    }
}
