//! The gate in front of the devices of a session: requests that use a device wait here, or are
//! refused, while another session has it for itself.

use std::fmt;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};

use super::job::{Job, LaneKey, Parked};
use super::lane_runner::{FirstOutcome, LaneHandoff};
use super::resolve::PinnedOperation;
use super::{LocalInner, cancelled};
use crate::dlpack::Device;
use crate::error::Result;
use crate::reply::Responder;
use crate::tensor::Borrow;

/// Admission of a session's requests to its devices.
///
/// A [`LocalSession`](super::LocalSession) asks before each request that uses a device: an
/// allocation, a write, a read, a copy (both devices), the creation, setting and awaiting of a
/// stream, and a call with tensors among its arguments. Freeing, attributes, other calls, and the
/// calls that a function makes itself are not asked about. A request that has begun is not stopped;
/// the gate learns of its end by the drop of the [`DeviceUse`].
///
/// A request that waits keeps its place in its lane, holds no borrow of a tensor and no thread,
/// counts against the limits of the session, and ends with its deadline, its cancellation and its
/// session. Other lanes and releases go on.
pub trait DeviceGate: Send + Sync {
    /// Returns the use if a request that uses `device` may begin now, or the error that refuses it.
    /// Otherwise returns `Pending`, and wakes `cx` once another answer is possible.
    ///
    /// The use is dropped once the request has ended, wherever it ran: after the function has
    /// returned, its future has completed or been dropped, or the stream has done its work. Each
    /// request has at most one use of a device for each time that it names the device. A request
    /// that cannot begin after all, because another of its devices is taken or it has to wait for a
    /// thread, drops its uses and asks again.
    ///
    /// Locks of the session may be held, also when a use is dropped: neither may block, call the
    /// session, or wake the waker itself. The waker runs the requests on the thread that wakes it.
    fn poll_use(&self, device: Device, cx: &mut Context<'_>) -> Poll<Result<DeviceUse>>;
}

/// A use of a device that a [`DeviceGate`] has admitted. It ends when this value is dropped.
#[must_use = "the use ends when this is dropped"]
pub struct DeviceUse(Option<Box<dyn Send + Sync>>);

impl DeviceUse {
    /// Returns a use whose end does not matter to the gate.
    pub fn uncounted() -> Self {
        Self(None)
    }

    /// Returns a use at whose end `guard` is dropped.
    pub fn counted(guard: impl Send + Sync + 'static) -> Self {
        Self(Some(Box::new(guard)))
    }

    /// Returns true if the gate learns of the end.
    pub fn is_counted(&self) -> bool {
        self.0.is_some()
    }
}

impl fmt::Debug for DeviceUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceUse").field("is_counted", &self.is_counted()).finish()
    }
}

/// The counted uses of a request; most requests have none.
pub(super) type DeviceUses = Vec<DeviceUse>;

/// The gate of a session, and the waker for requests that wait in front of it.
pub(super) struct SessionGate {
    gate: Arc<dyn DeviceGate>,
    waker: Waker,
}

impl SessionGate {
    pub(super) fn new(gate: Arc<dyn DeviceGate>, session: Weak<LocalInner>) -> Self {
        Self { gate, waker: Waker::from(Arc::new(ResumeWaiting(session))) }
    }

    /// Asks for all devices of an operation. Returns all uses or none.
    fn poll(&self, work: &PinnedOperation) -> Poll<Result<DeviceUses>> {
        let mut uses = Vec::new();
        let mut turn = Poll::Ready(Ok(()));
        work.for_each_device(&mut |device| {
            if let Poll::Ready(Ok(())) = turn {
                turn = self.poll_device(device).map_ok(|used| uses.extend(Some(used).filter(DeviceUse::is_counted)));
            }
        });
        turn.map_ok(|()| uses)
    }

    pub(super) fn poll_device(&self, device: Device) -> Poll<Result<DeviceUse>> {
        self.gate.poll_use(device, &mut Context::from_waker(&self.waker))
    }
}

/// Waker of a session: runs the requests that wait for devices.
struct ResumeWaiting(Weak<LocalInner>);

impl Wake for ResumeWaiting {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let Some(session) = self.0.upgrade() else { return };
        let waiting = session.lanes.lock().take_waiting_for_devices();
        for Parked { key, job, .. } in waiting {
            session.run_lane(key, job, None);
        }
    }
}

/// Answer of a gate to a job that is about to begin.
pub(super) enum GateTurn {
    Begin(Job<PinnedOperation>, Vec<Borrow>, DeviceUses),
    /// The job has been refused, or waits.
    NotNow(Option<FirstOutcome>, LaneHandoff),
}

impl LocalInner {
    /// Asks the gate about a job. One that has to wait is kept without its borrows, and begins anew
    /// when the gate wakes the session.
    pub(super) fn pass_gate(
        self: &Arc<Self>,
        key: LaneKey,
        mut job: Job<PinnedOperation>,
        borrows: Vec<Borrow>,
    ) -> GateTurn {
        let Some(gate) = &self.gate else { return GateTurn::Begin(job, borrows, Vec::new()) };
        let answer = match gate.poll(&job.work) {
            Poll::Ready(answer) => answer,
            Poll::Pending => {
                let mut lanes = self.lanes.lock();
                // Asked again under the lock that the waker takes, so that it finds the job. A
                // request that has ended in the meantime is not kept: nothing would remove it
                // again.
                let turn = match &lanes.ended {
                    Some(error) if lanes.is_over() => Poll::Ready(Err(error.clone())),
                    _ if job.responder.as_ref().is_some_and(Responder::is_over) => Poll::Ready(Err(cancelled())),
                    _ => gate.poll(&job.work),
                };
                match turn {
                    Poll::Ready(answer) => answer,
                    Poll::Pending => {
                        let submission = self.defer(&mut job);
                        lanes.wait_for_devices(Parked { key, job, borrows: Vec::new() });
                        drop(lanes);
                        // Outside of the lock: it may resume other jobs.
                        drop(borrows);
                        return GateTurn::NotNow(submission, LaneHandoff::HandedOver);
                    }
                }
            }
        };
        match answer {
            Ok(uses) => GateTurn::Begin(job, borrows, uses),
            Err(error) => {
                drop(borrows);
                let (outcome, handoff) = self.refuse(job, error);
                GateTurn::NotNow(outcome, handoff)
            }
        }
    }
}
