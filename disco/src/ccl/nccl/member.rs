//! One rank: its communicators, and their work on the device.

use std::time::Instant;

use rpc_core::{Device, RpcError};

use super::UniqueId;
use super::communicator::{Communicator, SPLIT};
use super::elements::Elements;
use super::enqueue::Work;
use super::wait::{EAGER, Fault, pause};
use crate::ccl::{Agreement, BreakCause, CclError, Collective, CollectiveInput, Operation};

/// The bytes of a barrier's allreduce.
const WORD: usize = 8;

/// The most collectives on a stream: enough to keep the device busy, and few enough that they do
/// not fill the driver's own queue, behind which NCCL would wait.
const MAX_UNDER_WAY: usize = 128;

pub(super) struct Member {
    /// Goes first: NCCL takes a communicator down only with the others, who may have to hear first
    /// that this rank leaves.
    pub(super) control: Box<dyn Agreement>,
    pub(super) communicator: Communicator,
    /// Error of a collective that was lost while under way, until it has been told.
    lost: Option<CclError>,
}

impl Member {
    pub(super) fn new(control: Box<dyn Agreement>, communicator: Communicator) -> Self {
        Self { control, communicator, lost: None }
    }

    /// Makes the communicator, together with the others.
    pub(super) fn join(&mut self, id: UniqueId, size: usize) -> Result<(), CclError> {
        let joined = self.communicator.join(&mut *self.control, id, size);
        joined.map_err(|fault| self.conclude(fault))
    }

    /// Waits until all ranks have come this far.
    pub(super) fn meet(&mut self) -> Result<(), CclError> {
        let met = self.control.agree(Collective::barrier(), Ok(()));
        met.map_err(|error| self.conclude(error.into()))?;
        self.control.finish(&Ok(()));
        Ok(())
    }

    /// Makes a communicator of those ranks that give the same `color`. Nothing is under way.
    pub(super) fn split(&mut self, color: u32, key: u32) -> Result<Communicator, RpcError> {
        let communicator = &self.communicator;
        let can_split = communicator.library.functions().comm_split.get(&communicator.library).map(drop);
        // NCCL's are ints, and not negative.
        let number = |name: &str, number: u32| {
            let text = || RpcError::invalid_argument(format!("a {name} of {number} is above {}", i32::MAX));
            i32::try_from(number).map_err(|_| text())
        };
        let place = number("color", color).and_then(|color| Ok((color, number("key", key)?)));
        let ready = can_split.and_then(|()| communicator.stream.make_current());
        self.control.agree(Collective::barrier(), ready.and(place.as_ref().map(drop).map_err(Clone::clone)))?;
        let (color, key) = place?;
        let limit = self.communicator.options.join_timeout;
        let (mut group, settled) = match self.communicator.split(&mut *self.control, color, key) {
            Ok(group) => {
                let settled = group.settle(&mut *self.control, SPLIT, limit);
                (Some(group), settled)
            }
            Err(fault) => (None, Err(fault)),
        };
        if let Err(fault) = settled {
            let error = self.conclude(fault);
            if let (Some(group), CclError::Broken(breakdown)) = (&mut group, &error) {
                group.abort(breakdown);
            }
            return Err(error.into());
        }
        self.control.finish(&Ok(()));
        group.ok_or_else(|| RpcError::internal("a split without a group"))
    }

    /// Agrees with the others on a collective, and puts it on the stream.
    pub(super) fn run(&mut self, collective: Collective, data: &CollectiveInput<'_>) -> Result<(), CclError> {
        self.wait_until(MAX_UNDER_WAY - 1)?;
        // The one before is done as far as the others are concerned.
        self.control.finish(&Ok(()));
        let work = self.work(collective, data);
        let input = work.as_ref().map(drop).map_err(Clone::clone);
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

    /// Waits until all that has been put on the stream is done.
    ///
    /// # Errors
    ///
    /// [`CclError::Broken`]: something is lost. That is told once.
    pub(super) fn complete(&mut self) -> Result<(), CclError> {
        let waited = self.wait_until(0);
        self.lost.take().map_or(waited, Err)
    }

    /// As [`complete`](Self::complete), and leaves it to that to tell what is lost.
    pub(super) fn wait_for_all(&mut self) -> Result<(), CclError> {
        self.wait_until(0)
    }

    /// Waits until no more than this are under way, and nothing is lost.
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

    /// Takes back the buffers of a call that panics: the device may still write to them.
    pub(super) fn take_back(&mut self) {
        let control = self.control.control();
        control.abort("a panic in the middle of a collective");
        if let Some(breakdown) = control.broken() {
            self.lose(&CclError::Broken(breakdown));
        }
    }

    /// Looks how far the device has come, and whether the others are still there if that is asked
    /// for. Says whether nothing is under way.
    pub(super) fn look(&mut self, at_others: bool) -> Result<bool, CclError> {
        if self.communicator.under_way() == 0 {
            return Ok(true);
        }
        // Finished work is finished, even if the group has broken.
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

    /// Returns the work to enqueue, or the reason why this rank has no input.
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
        stream.make_current()?;
        // A failure in front of it is the reason why there is no input.
        stream.is_done()?;
        if collective.operation == Operation::Barrier {
            work.scratch = stream.scratch(WORD)?;
        } else if work.needs_copy() {
            work.scratch = stream.scratch(elements.bytes() * size)?;
        }
        Ok(work)
    }

    /// Turns a fault into the error of all ranks: tells the others if only this one knows, and
    /// aborts the rest if the group is broken.
    fn conclude(&mut self, fault: Fault) -> CclError {
        let error = match fault {
            Fault::Common(error) => error,
            Fault::Own(error) => self.control.fail(BreakCause::Backend(error.to_string())),
        };
        self.lose(&error);
        self.control.finish(&Err(error.clone()));
        error
    }

    /// Aborts the rest if the group is broken, and keeps the reason of the loss.
    fn lose(&mut self, error: &CclError) {
        let CclError::Broken(breakdown) = error else { return };
        // Work that is done by now is not lost. That the rest will not be is known.
        _ = self.communicator.progress();
        if self.communicator.has_results_to_come() {
            self.lost.get_or_insert_with(|| error.clone());
        }
        self.communicator.abort(breakdown);
    }
}

/// Takes memory of the stream's device alone.
fn reach(device: Device, own: Device) -> Result<(), RpcError> {
    if device == own {
        return Ok(());
    }
    Err(RpcError::unsupported(format!("NCCL works on memory of {own} here, and the buffers are on {device}")))
}
