//! Steps that are submitted on a lane of their session without waiting for the steps before them.

use std::future::Future;
use std::pin::Pin;

use bytes::Bytes;

use super::plan::Tensor;
use super::schedule::Uses;
use crate::client::Pipe;
use crate::client::action::{Action, OneRequest, Options, Pending, RequestPins};
use crate::client::references::{RemoteFunction, RemoteTensor};
use crate::client::session::Session;
use crate::error::Result;
use crate::function::convert::FromReply;
use crate::session::{Lane, Operation};

/// Function of servers that returns its first argument.
///
/// It is called with a tensor and the result of the step that writes it: so its own result is the
/// tensor if that step has succeeded, and an error otherwise. Later steps name that result. They
/// are not called with what a failed step has left.
pub(super) const CONFIRM: &str = "rpc.echo";

/// Largest number of pipelined steps of one session that are on their way. A session keeps three
/// results and a tensor for a step with one result, so that all of them are within the limits of
/// sessions that allow a hundred or two.
pub(super) const MAX_STEPS: usize = 16;

/// Largest number of tensors that a session keeps for steps to come, as long as other steps go on.
pub(super) const MAX_KEPT: usize = 64;

/// Largest number of results of a step that is pipelined.
pub(super) const MAX_RESULTS: usize = 8;

/// A lane of a session, on which steps follow each other.
pub(super) struct StepLane<'a> {
    pub(super) session: &'a Session,
    /// The function [`CONFIRM`].
    pub(super) confirm: &'a RemoteFunction,
    pub(super) lane: Lane,
    /// Options of the run.
    pub(super) options: &'a Options<'static>,
}

/// Tensor that is allocated for a result of a step.
pub(super) struct Fresh {
    /// The tensor, for requests of the lane.
    pub(super) tensor: RemoteTensor,
    allocated: Pipe<RemoteTensor>,
}

/// A submitted step.
pub(super) struct Submitted {
    /// Resolves when the step has ended.
    pub(super) ended: Ended,
    pub(super) results: Vec<StepResult>,
    /// Requests that free what is needed no more. They are cancelled when they are dropped.
    pub(super) frees: Vec<Pending<()>>,
}

/// End of a step.
pub(super) type Ended = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

/// A tensor that a submitted step makes.
pub(super) struct StepResult {
    /// The tensor for later steps of the lane, if there are any.
    pub(super) on_lane: Option<RemoteTensor>,
    /// The tensor for all others, if there are any.
    pub(super) elsewhere: Option<Pending<RemoteTensor>>,
}

impl StepLane<'_> {
    /// Allocates the tensor of a result.
    ///
    /// # Errors
    ///
    /// The request was not submitted.
    pub(super) fn allocate(&self, tensor: &Tensor) -> Result<Fresh> {
        let Tensor { layout, location, .. } = tensor;
        let scope = Some(&*location.memory_scope);
        let alloc = self.session.alloc_in_scope(location.device, layout.dtype, &layout.shape, scope);
        let allocated = self.on_lane(alloc).pipe();
        Ok(Fresh { tensor: allocated.tensor()?, allocated })
    }

    /// Submits the request of a step that writes the tensors of its results.
    ///
    /// # Errors
    ///
    /// A request was not submitted.
    pub(super) fn submit<T: FromReply + Send + 'static>(
        &self,
        request: Action<T>,
        results: Vec<(Fresh, Uses)>,
        then: impl FnOnce(T) + Send + 'static,
    ) -> Result<Submitted> {
        let written: Pipe<T> = self.on_lane(request).pipe();
        let ended = self.options.limit(written.fetch()).start();
        let mut submitted = Submitted {
            ended: Box::pin(async move {
                then(ended.await?);
                Ok(())
            }),
            results: Vec::with_capacity(results.len()),
            frees: Vec::with_capacity(results.len()),
        };
        for (Fresh { tensor, allocated }, uses) in results {
            let on_lane = if uses.on_lane > 0 {
                let confirmed: Pipe<RemoteTensor> = self.on_lane(self.confirm.call((&tensor, &written))).pipe();
                Some(confirmed.tensor_of(tensor.device(), tensor.dtype(), tensor.shape())?)
            } else {
                None
            };
            let elsewhere = (uses.elsewhere > 0).then(|| self.options.limit(allocated.fetch()).start());
            submitted.results.push(StepResult { on_lane, elsewhere });
            submitted.frees.push(self.free(tensor));
        }
        Ok(submitted)
    }

    /// Returns the request that fills a tensor of the lane with these bytes.
    pub(super) fn write(&self, to: &RemoteTensor, data: Bytes) -> Action<()> {
        let session = self.session.shared();
        let mut others = Vec::new();
        to.0.pin_into(&mut others);
        let operation = to.reference_in(session).map(|to| Operation::Write { to: to.into(), offset: 0, data });
        OneRequest::new(session, operation).pinned(RequestPins { function: None, others }).into()
    }

    /// Frees a tensor of the lane. Requests that were submitted before still have it.
    pub(super) fn free(&self, tensor: RemoteTensor) -> Pending<()> {
        self.on_lane(tensor.free()).start()
    }

    fn on_lane<T>(&self, action: Action<T>) -> Action<T> {
        self.options.limit(action.lane(self.lane))
    }
}
