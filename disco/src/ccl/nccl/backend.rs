//! One rank: a communicator of NCCL for the data, and one of the host backend for everything else.

use std::fmt;
use std::sync::Arc;

use rpc_core::{Device, ErrorKind, RpcError};

use super::communicator::{Communicator, SPLIT};
use super::elements::Elements;
use super::enqueue::Work;
use super::wait::{Fault, wait};
use super::{DeviceStream, Library, Options, UniqueId};
use crate::ccl::{Agreement, BreakCause, Ccl, CclError, Collective, CollectiveInput, Control, Operation, Rank};

/// The bytes of a barrier's allreduce.
const WORD: usize = 8;

/// One rank of a group on the memory of GPUs. The [module](super) says how it works, and in what it differs from the contract.
///
/// Dropping it leaves the group, and takes the communicator of NCCL down, which may block for [`Options::close_timeout`] and then [`Options::abort_timeout`].
pub struct NcclCcl {
    /// Goes first: NCCL takes a communicator down only with the others, who may have to hear first that this rank leaves.
    control: Box<dyn Agreement>,
    communicator: Communicator,
}

/// The communicator while the device has the buffers of a call. If the call panics, they are taken back before they go.
struct Lending<'a> {
    communicator: &'a mut Communicator,
    control: Arc<dyn Control>,
}

impl Drop for Lending<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.control.abort("a panic in the middle of a collective");
            if let Some(breakdown) = self.control.broken() {
                self.communicator.abort(&breakdown);
            }
        }
    }
}

impl NcclCcl {
    /// Joins a group as `rank` of `size`. All ranks call it with the same `id`, which one of them [made](Library::unique_id); it blocks until all have.
    ///
    /// `control` is the same rank of a group of the [`host`](crate::ccl::host) backend among the same ranks, which has to be for this alone, and says how long ranks wait for
    /// each other. All libraries should be of one version.
    ///
    /// # Errors
    ///
    /// The same on all ranks, if one fails or does not come: it has what NCCL said. [`ErrorKind::ApiMisuse`] and [`ErrorKind::Unsupported`] on this rank alone, if `control` is
    /// not what it should be; the others see it leave.
    pub fn new(
        library: Arc<Library>,
        id: UniqueId,
        rank: Rank,
        size: usize,
        control: Box<dyn Ccl>,
        stream: Arc<dyn DeviceStream>,
        options: Options,
    ) -> Result<Self, RpcError> {
        let mut control = fitting(control, (rank, size))?;
        // Everybody is there before anybody waits in NCCL.
        control.agree(Collective::barrier(), stream.make_current())?;
        let communicator = Communicator::new(library, stream, options, rank);
        let mut this = Self { control, communicator };
        let joined = this.communicator.join(&mut *this.control, id, size);
        this.conclude(joined)?;
        this.meet()?;
        Ok(this)
    }

    /// Makes a group of those ranks of this one that give the same `color`, in the order of `key` and then of ranks. All ranks of this group call it, each with the `control` of its place in the
    /// new group; it blocks until all have. The new group has the stream and the settings of this one, and the two are used in the same order on all ranks.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] on all ranks: that needs NCCL 2.18; a group of an [id](Library::unique_id) of its own does not. Else as [`new`](Self::new); a failure
    /// in NCCL breaks this group.
    pub fn split(&mut self, color: u32, key: u32, control: Box<dyn Ccl>) -> Result<Self, RpcError> {
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
        if let Err(error) = self.conclude(settled) {
            if let (Some(group), CclError::Broken(breakdown)) = (&mut group, &error) {
                group.abort(breakdown);
            }
            return Err(error.into());
        }
        let Some(communicator) = group else { return Err(RpcError::internal("a split without a group")) };
        let control = fitting(control, communicator.place()?)?;
        let mut this = Self { control, communicator };
        this.meet()?;
        Ok(this)
    }

    /// The library that moves the data.
    #[must_use]
    pub fn library(&self) -> &Arc<Library> {
        &self.communicator.library
    }

    /// Waits until all ranks have come this far.
    fn meet(&mut self) -> Result<(), CclError> {
        let met = self.control.agree(Collective::barrier(), Ok(()));
        self.conclude(met.map_err(Fault::Common))
    }

    /// What there is to enqueue, or why this rank has no input.
    fn work(&self, collective: Collective, data: &CollectiveInput<'_>) -> Result<Work, RpcError> {
        let buffers = match data {
            CollectiveInput::Ready(buffers) => buffers,
            CollectiveInput::Poisoned(cause) => return Err(cause.clone()),
        };
        let Communicator { library, stream, .. } = &self.communicator;
        let (rank, size) = (self.rank(), self.size());
        let lent = buffers.lend(&collective, rank, size, |device| reach(device, stream.device(), library))?;
        let bytes = if collective.operation == Operation::Barrier { Some(WORD) } else { collective.bytes() };
        let elements = Elements::of(&collective, bytes.unwrap_or(0), library)?;
        let mut work = Work { collective, elements, lent, scratch: std::ptr::null_mut(), rank, size };
        stream.make_current()?;
        if collective.operation == Operation::Barrier {
            work.scratch = stream.scratch(WORD)?;
        } else if work.needs_copy() {
            work.scratch = stream.scratch(elements.bytes() * size)?;
        }
        Ok(work)
    }

    /// Waits until the stream has done what was enqueued before.
    fn drain(&mut self) -> Result<(), Fault> {
        let Options { drain_timeout, .. } = self.communicator.options;
        let stream = &self.communicator.stream;
        wait(&mut *self.control, "the work on the stream before it", drain_timeout, || Ok(stream.is_done()?))
    }

    /// Ends a call: tells the others if only this rank knows that it failed, and aborts what is left of it if the group is broken.
    fn conclude(&mut self, result: Result<(), Fault>) -> Result<(), CclError> {
        let result = result.map_err(|fault| match fault {
            Fault::Common(error) => error,
            Fault::Own(error) => self.control.fail(BreakCause::Backend(error.to_string())),
        });
        if let Err(CclError::Broken(breakdown)) = &result {
            self.communicator.abort(breakdown);
        }
        self.control.finish(&result);
        result
    }
}

impl Ccl for NcclCcl {
    fn rank(&self) -> Rank {
        self.control.rank()
    }

    fn size(&self) -> usize {
        self.control.size()
    }

    fn epoch(&self) -> u64 {
        self.control.epoch()
    }

    fn run(&mut self, collective: Collective, data: CollectiveInput<'_>) -> Result<(), CclError> {
        let mut work = self.work(collective, &data);
        if work.is_ok() {
            match self.drain() {
                Ok(()) => {}
                Err(Fault::Own(cause)) => work = Err(cause),
                Err(common) => return self.conclude(Err(common)),
            }
        }
        let input = work.as_ref().map(drop).map_err(Clone::clone);
        let result = match (self.control.agree(collective, input), work) {
            (Err(error), _) => Err(Fault::Common(error)),
            // There is nothing to move.
            (Ok(()), Ok(work)) if work.elements.count == 0 => Ok(()),
            (Ok(()), Ok(work)) => {
                let lending = Lending { control: self.control.control(), communicator: &mut self.communicator };
                lending.communicator.carry_out(&mut *self.control, &work)
            }
            (Ok(()), Err(cause)) => Err(Fault::Own(cause)),
        };
        self.conclude(result)
    }

    fn set_step(&mut self, step: u64) {
        self.control.set_step(step);
    }

    fn leave_step(&mut self) {
        self.control.leave_step();
    }

    fn control(&self) -> Arc<dyn Control> {
        self.control.control()
    }
}

impl Drop for NcclCcl {
    fn drop(&mut self) {
        // Of a broken group nothing goes down in good order.
        if let Some(breakdown) = self.control.control().broken() {
            self.communicator.abort(&breakdown);
        }
    }
}

impl fmt::Debug for NcclCcl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Communicator { library, options, .. } = &self.communicator;
        let mut text = f.debug_struct("NcclCcl");
        text.field("rank", &self.rank())
            .field("size", &self.size())
            .field("library", library)
            .field("options", options);
        text.finish_non_exhaustive()
    }
}

/// The control communicator of a place, if it is that.
fn fitting(control: Box<dyn Ccl>, (rank, size): (Rank, usize)) -> Result<Box<dyn Agreement>, RpcError> {
    if (control.rank(), control.size()) != (rank, size) {
        let (other, others) = (control.rank(), control.size());
        let text = format!("the control communicator is rank {other} of {others}, and this is rank {rank} of {size}");
        return Err(RpcError::new(ErrorKind::ApiMisuse, text));
    }
    control.into_agreement()
}

/// Takes memory of the stream's device alone.
fn reach(device: Device, own: Device, library: &Library) -> Result<(), RpcError> {
    if device == own {
        return Ok(());
    }
    let flavour = library.flavour();
    Err(RpcError::unsupported(format!("{flavour} works on memory of {own} here, and the buffers are on {device}")))
}
