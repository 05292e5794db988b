//! One rank: its NCCL and control communicators, and its collectives on the device.

use std::sync::Arc;
use std::time::Instant;

use rpc_core::{Device, RpcError};

use super::UniqueId;
use super::communicator::{Communicator, SPLIT};
use super::elements::Elements;
use super::enqueue::Work;
use super::wait::{EAGER, Fault, pause};
use crate::ccl::{Agreement, BreakCause, CclError, Collective, CollectiveInput, Control, Operation};

/// Size in bytes of the allreduce that makes a barrier.
const WORD: usize = 8;

/// Maximum number of collectives on a stream: enough to keep the device busy, and few enough not to
/// fill the driver's own queue, for which NCCL would wait.
const MAX_UNDER_WAY: usize = 128;

pub(super) struct Member {
    /// Dropped first: NCCL ends a communicator only together with the other ranks, which may first
    /// have to learn that this rank leaves.
    pub(super) control: Box<dyn Agreement>,
    pub(super) communicator: Communicator,
    /// Error of collectives that were lost while in progress, until [`complete`](Self::complete)
    /// returns it.
    lost: Option<CclError>,
}

impl Member {
    pub(super) fn new(control: Box<dyn Agreement>, communicator: Communicator) -> Self {
        Self { control, communicator, lost: None }
    }

    /// Creates the communicator of NCCL, together with the other ranks.
    pub(super) fn join(&mut self, id: UniqueId, size: usize) -> Result<(), CclError> {
        let joined = self.communicator.join(&mut *self.control, id, size);
        joined.map_err(|fault| self.conclude(fault))
    }

    /// Waits until all ranks have called this.
    pub(super) fn meet(&mut self) -> Result<(), CclError> {
        let met = self.control.agree(Collective::barrier(), Ok(()));
        met.map_err(|error| self.conclude(error.into()))?;
        self.control.finish(&Ok(()));
        Ok(())
    }

    /// Creates a communicator of those ranks that pass the same `color`, in the order of `key`. Its
    /// group has this control. No collective may be in progress.
    pub(super) fn split(&mut self, color: u32, key: u32, control: Arc<dyn Control>) -> Result<Communicator, RpcError> {
        let communicator = &self.communicator;
        let can_split = communicator.library.functions().comm_split.get(&communicator.library).map(drop);
        // NCCL takes both as `int`s that are not negative.
        let number = |name: &str, number: u32| {
            let text = || RpcError::invalid_argument(format!("a {name} of {number} is above {}", i32::MAX));
            i32::try_from(number).map_err(|_| text())
        };
        let place = number("color", color).and_then(|color| Ok((color, number("key", key)?)));
        let group = communicator.child(control);
        let ready = can_split.and_then(|()| communicator.stream.make_current());
        self.control.agree(Collective::barrier(), ready.and(outcome(&place)).and(outcome(&group)))?;
        let (place, mut group) = (place?, group?);
        // One limit for both parts: the split of this communicator, and the making of the new one.
        let (limit, began) = (self.communicator.options.join_timeout, Instant::now());
        let made = self.communicator.split(&group, &mut *self.control, place, limit);
        let settled =
            made.and_then(|()| group.settle(&mut *self.control, SPLIT, limit.saturating_sub(began.elapsed())));
        if let Err(fault) = settled {
            let error = self.conclude(fault);
            if let CclError::Broken(breakdown) = &error {
                group.abort(breakdown);
            }
            return Err(error.into());
        }
        self.control.finish(&Ok(()));
        Ok(group)
    }

    /// Agrees with the other ranks on a collective, and enqueues it on the stream.
    pub(super) fn run(&mut self, collective: Collective, data: &CollectiveInput<'_>) -> Result<(), CclError> {
        self.wait_until(MAX_UNDER_WAY - 1)?;
        // For the other ranks, the collective before this one has ended.
        self.control.finish(&Ok(()));
        let work = self.work(collective, data);
        let input = outcome(&work);
        let result = match (self.control.agree(collective, input), work) {
            (Err(error), _) => Err(Fault::Common(error)),
            (Ok(()), Ok(work)) if work.elements.count == 0 => {
                self.control.finish(&Ok(()));
                Ok(())
            }
            (Ok(()), Ok(work)) => self.communicator.enqueue(&mut *self.control, &work),
            (Ok(()), Err(cause)) => Err(Fault::Own(cause)),
        };
        result.map_err(|fault| self.conclude(fault))
    }

    /// Waits until all collectives on the stream are done.
    ///
    /// # Errors
    ///
    /// [`CclError::Broken`]: a collective was lost. Returned once for each loss.
    pub(super) fn complete(&mut self) -> Result<(), CclError> {
        let waited = self.wait_until(0);
        self.lost.take().map_or(waited, Err)
    }

    /// Waits as [`complete`](Self::complete) does, which still returns the error of lost
    /// collectives afterwards.
    pub(super) fn wait_for_all(&mut self) -> Result<(), CclError> {
        self.wait_until(0)
    }

    /// Waits until at most `most` collectives are in progress. Fails if one was lost.
    fn wait_until(&mut self, most: usize) -> Result<(), CclError> {
        let began = Instant::now();
        loop {
            let waited = began.elapsed();
            self.look(waited >= EAGER)?;
            if let Some(lost) = &self.lost {
                return Err(lost.clone());
            }
            if self.communicator.under_way() <= most {
                return Ok(());
            }
            pause(waited);
        }
    }

    /// Breaks the group and aborts, after a panic in a call: the device may still write to the
    /// buffers, which are freed next.
    pub(super) fn take_back(&mut self) {
        let control = self.control.control();
        control.abort("a panic in the middle of a collective");
        if let Some(breakdown) = control.broken() {
            self.lose(&CclError::Broken(breakdown));
        }
    }

    /// Polls the device, and with `at_others` also the other ranks. Returns true if no collective
    /// is in progress.
    pub(super) fn look(&mut self, at_others: bool) -> Result<bool, CclError> {
        if self.communicator.under_way() == 0 {
            return Ok(true);
        }
        // Work that has finished counts as finished, even if the group is broken by now.
        let others = if at_others { self.control.check() } else { Ok(()) };
        let looked = match (others, self.communicator.progress()) {
            (Err(broken), Ok(false) | Err(_)) => Err(broken.into()),
            (_, looked) => looked,
        };
        match looked {
            Ok(true) => {
                self.control.finish(&Ok(()));
                Ok(true)
            }
            Ok(false) => Ok(false),
            Err(fault) => Err(self.conclude(fault)),
        }
    }

    /// Returns the work to enqueue, or the error because of which this rank has no input.
    fn work(&self, collective: Collective, data: &CollectiveInput<'_>) -> Result<Work, RpcError> {
        let buffers = match data {
            CollectiveInput::Ready(buffers) => buffers,
            CollectiveInput::Poisoned(cause) => return Err(cause.clone()),
        };
        let Communicator { library, stream, .. } = &self.communicator;
        let (rank, size) = (self.control.rank(), self.control.size());
        let lent = buffers.lend(&collective, rank, size, |device| reach(device, stream.device()))?;
        let bytes = if collective.operation == Operation::Barrier { Some(WORD) } else { collective.bytes() };
        let elements = Elements::of(&collective, bytes.unwrap_or(0), library, stream.compute_capability())?;
        let mut work = Work { collective, elements, lent, scratch: std::ptr::null_mut(), rank, size };
        self.communicator.handle().query(|| {
            stream.make_current()?;
            // If earlier work on the stream has failed, this rank has no input.
            stream.is_done()?;
            if collective.operation == Operation::Barrier {
                work.scratch = stream.scratch(WORD)?;
            } else if work.needs_copy() {
                work.scratch = stream.scratch(elements.bytes() * size)?;
            }
            Ok(work)
        })
    }

    /// Turns a fault into the error of all ranks: breaks the group if only this rank knows of it,
    /// and aborts the collectives in progress if the group is broken.
    fn conclude(&mut self, fault: Fault) -> CclError {
        let error = match fault {
            Fault::Common(error) => error,
            Fault::Own(error) => self.control.fail(BreakCause::Backend(error.to_string())),
        };
        self.lose(&error);
        self.control.finish(&Err(error.clone()));
        error
    }

    /// Aborts the collectives in progress if the group is broken, and keeps the error for
    /// [`complete`](Self::complete).
    fn lose(&mut self, error: &CclError) {
        let CclError::Broken(breakdown) = error else { return };
        // Work that is done by now is not lost. An error of this poll adds nothing: the group is
        // broken already.
        _ = self.communicator.progress();
        if self.communicator.has_results_to_come() {
            self.lost.get_or_insert_with(|| error.clone());
        }
        self.communicator.abort(breakdown);
    }
}

/// Returns the outcome without the value, for the other ranks.
pub(super) fn outcome<T>(result: &Result<T, RpcError>) -> Result<(), RpcError> {
    result.as_ref().map(drop).map_err(Clone::clone)
}

/// Checks that a buffer is on the stream's device.
fn reach(device: Device, own: Device) -> Result<(), RpcError> {
    if device == own {
        return Ok(());
    }
    Err(RpcError::unsupported(format!("NCCL works on memory of {own} here, and the buffers are on {device}")))
}
