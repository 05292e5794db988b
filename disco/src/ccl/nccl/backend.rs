//! One rank: a communicator of NCCL for the data, and one of the host backend for everything else.

use std::fmt;
use std::sync::Arc;

use parking_lot::MutexGuard;
use rpc_core::{DeviceType, ErrorKind, RpcError};

use super::communicator::Communicator;
use super::member::Member;
use super::watch::{Watched, Watcher};
use super::{DeviceStream, Library, Options, UniqueId};
use crate::ccl::{Agreement, Ccl, CclError, Collective, CollectiveInput, Control, Operation, Rank};

/// One rank of a group on the memory of GPUs. The [module](super) says how it works, and in what it
/// differs from the contract.
///
/// Dropping it waits for collectives under way, leaves the group, and takes the communicator of
/// NCCL down, which may block for [`Options::close_timeout`] and then [`Options::abort_timeout`].
pub struct NcclCcl {
    watched: Arc<Watched>,
    /// Thread that looks after collectives under way. `None` until there are any.
    watcher: Option<Watcher>,
    library: Arc<Library>,
    control: Arc<dyn Control>,
    facts: GroupFacts,
}

/// Facts of a group that do not change.
#[derive(Clone, Copy)]
struct GroupFacts {
    rank: Rank,
    size: usize,
    epoch: u64,
}

/// A rank in a call. If that panics, its buffers are taken back before they go.
struct Lending<'a>(MutexGuard<'a, Member>);

impl Drop for Lending<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.take_back();
        }
    }
}

impl NcclCcl {
    /// Joins a group as `rank` of `size`. All ranks call it with the same `id`, which one of them
    /// [made](Library::unique_id); it blocks until all have.
    ///
    /// `control` is the same rank of a group of the [`host`](crate::ccl::host) backend among the
    /// same ranks, which has to be for this alone, and says how long ranks wait for each other. All
    /// libraries should be of one version.
    ///
    /// # Errors
    ///
    /// The same on all ranks, if one fails or does not come: it has the message of NCCL.
    /// [`ErrorKind::ApiMisuse`] and [`ErrorKind::Unsupported`] on this rank alone, if `control` is
    /// not fit for this; the others see it leave.
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
        // All ranks are there before any waits in NCCL.
        control.agree(Collective::barrier(), stream.make_current())?;
        let mut member = Member::new(control, Communicator::new(library, stream, options, rank));
        member.join(id, size)?;
        member.meet()?;
        Ok(Self::of(member))
    }

    /// Starts a thread that watches the collectives in progress, if there is none. Returns true if
    /// there is one.
    fn watch(watcher: &mut Option<Watcher>, watched: &Arc<Watched>) -> bool {
        if watcher.is_none() {
            match Watcher::start(watched) {
                Ok(started) => *watcher = Some(started),
                Err(error) => tracing::warn!(%error, "no thread to look after collectives: each is waited for"),
            }
        }
        watcher.is_some()
    }

    fn of(member: Member) -> Self {
        let facts =
            GroupFacts { rank: member.control.rank(), size: member.control.size(), epoch: member.control.epoch() };
        let (library, control) = (Arc::clone(&member.communicator.library), member.control.control());
        Self { watched: Arc::new(Watched::new(member)), watcher: None, library, control, facts }
    }

    /// Makes a group of those ranks of this one that give the same `color`, in the order of `key`
    /// and then of ranks. All ranks of this group call it, each with the `control` of its rank in
    /// the new group; it blocks until all have. The new group has the stream and the settings of
    /// this one, and the two are used in the same order on all ranks.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] on all ranks: that needs NCCL 2.18; a group of an
    /// [id](Library::unique_id) of its own does not. Else as [`new`](Self::new); a failure in NCCL
    /// breaks this group.
    pub fn split(&mut self, color: u32, key: u32, control: Box<dyn Ccl>) -> Result<Self, RpcError> {
        let mut member = self.watched.member();
        // NCCL takes no other call meanwhile.
        member.wait_for_all()?;
        let communicator = member.split(color, key)?;
        let control = fitting(control, communicator.rank_and_size()?)?;
        let mut group = Member::new(control, communicator);
        group.meet()?;
        Ok(Self::of(group))
    }

    /// Returns the library that moves the data.
    #[must_use]
    pub fn library(&self) -> &Arc<Library> {
        &self.library
    }
}

impl Ccl for NcclCcl {
    fn rank(&self) -> Rank {
        self.facts.rank
    }

    fn size(&self) -> usize {
        self.facts.size
    }

    fn epoch(&self) -> u64 {
        self.facts.epoch
    }

    /// Returns when it has been enqueued; or when it is done, if its buffers are in the memory of
    /// the host, which the device can be made to use in tests, and for a barrier.
    fn run(&mut self, collective: Collective, data: CollectiveInput<'_>) -> Result<(), CclError> {
        let is_lent = matches!(&data, CollectiveInput::Ready(buffers) if buffers.device().kind == DeviceType::CPU);
        let mut member = Lending(self.watched.member());
        member.0.run(collective, &data)?;
        let waits = is_lent || collective.operation == Operation::Barrier;
        if waits || !Self::watch(&mut self.watcher, &self.watched) {
            return member.0.wait_for_all();
        }
        self.watched.begin();
        Ok(())
    }

    fn complete(&mut self) -> Result<(), CclError> {
        Lending(self.watched.member()).0.complete()
    }

    fn set_step(&mut self, step: u64) {
        self.watched.member().control.set_step(step);
    }

    fn leave_step(&mut self) {
        self.watched.member().control.leave_step();
    }

    fn control(&self) -> Arc<dyn Control> {
        Arc::clone(&self.control)
    }
}

impl Drop for NcclCcl {
    fn drop(&mut self) {
        self.watcher = None;
        let mut member = self.watched.member();
        // A loss here has no caller that could hear of it.
        _ = member.complete();
        // Of a broken group nothing goes down in good order.
        if let Some(breakdown) = self.control.broken() {
            member.communicator.abort(&breakdown);
        }
    }
}

impl fmt::Debug for NcclCcl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("NcclCcl");
        text.field("rank", &self.facts.rank).field("size", &self.facts.size).field("library", &self.library);
        text.finish_non_exhaustive()
    }
}

/// Returns the control communicator of a place, if it is that.
fn fitting(control: Box<dyn Ccl>, (rank, size): (Rank, usize)) -> Result<Box<dyn Agreement>, RpcError> {
    if (control.rank(), control.size()) != (rank, size) {
        let (other, others) = (control.rank(), control.size());
        let text = format!("the control communicator is rank {other} of {others}, and this is rank {rank} of {size}");
        return Err(RpcError::new(ErrorKind::ApiMisuse, text));
    }
    control.into_agreement()
}
