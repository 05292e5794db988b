//! [`NcclCcl`], the backend over NCCL: a rank whose data moves in NCCL, and whose control
//! communicator is of the host backend.

use std::fmt;
use std::sync::Arc;

use parking_lot::MutexGuard;
use rpc_core::{DeviceType, ErrorKind, RpcError};

use super::communicator::Communicator;
use super::member::{Member, outcome};
use super::watch::{Watched, Watcher};
use super::{DeviceStream, Library, Options, UniqueId};
use crate::ccl::{Agreement, Ccl, CclError, Collective, CollectiveInput, Control, Operation, Rank};

/// One rank of a group whose data is in the memory of GPUs. The [module](super) describes how it
/// works, and its differences from the contract.
///
/// Dropping it waits for collectives in progress, leaves the group, and ends the communicator of
/// NCCL, which may block for [`Options::close_timeout`] and then [`Options::abort_timeout`].
pub struct NcclCcl {
    watched: Arc<Watched>,
    /// Thread that polls the collectives in progress. `None` until the first one.
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

/// A rank in a call. If the call panics, the collectives in progress are aborted before their
/// buffers are freed.
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
    /// [created](Library::unique_id). Blocks until all have.
    ///
    /// `control` is the same rank in a group of the [`host`](crate::ccl::host) backend among the
    /// same ranks. It must not be used for anything else, and its options say how long ranks wait
    /// for each other. All ranks should have the same version of NCCL.
    ///
    /// # Errors
    ///
    /// The same on all ranks, if one fails or does not come, with the message of NCCL.
    /// [`ErrorKind::ApiMisuse`] and [`ErrorKind::Unsupported`] on this rank alone, if `control` is
    /// of another rank or cannot do this; for the other ranks, this rank leaves.
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
        let communicator = Communicator::new(library, Arc::clone(&stream), options, rank, control.control());
        let ready = communicator.and_then(|made| stream.make_current().map(|()| made));
        // All ranks have to be there before any of them waits in NCCL.
        control.agree(Collective::barrier(), outcome(&ready))?;
        let mut member = Member::new(control, ready?);
        member.join(id, size)?;
        member.meet()?;
        Ok(Self::of(member))
    }

    /// Starts the thread that watches the collectives in progress, unless it runs. Returns true if
    /// it runs.
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
        let library = Arc::clone(&member.communicator.library);
        let control = member.control.control();
        Self { watched: Arc::new(Watched::new(member)), watcher: None, library, control, facts }
    }

    /// Creates a group of those ranks that pass the same `color`, in the order of `key` and then of
    /// ranks. All ranks of this group call it, each with the `control` communicator of its rank in
    /// the new group. Blocks until all have. The new group has the stream and the settings of this
    /// one. The caller uses the two groups in the same order on all ranks.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] on all ranks if NCCL is older than 2.18; [`new`](Self::new) with
    /// another [id](Library::unique_id) works with older ones. Otherwise those of
    /// [`new`](Self::new). A failure in NCCL breaks this group.
    pub fn split(&mut self, color: u32, key: u32, control: Box<dyn Ccl>) -> Result<Self, RpcError> {
        let mut member = self.watched.member();
        // NCCL allows no other call during a split.
        member.wait_for_all()?;
        let communicator = member.split(color, key, control.control())?;
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

    /// Returns once the collective has been enqueued. A barrier, or a collective on host memory
    /// (pinned memory, or that which tests let the device use), is done when this returns.
    fn run(&mut self, collective: Collective, data: CollectiveInput<'_>) -> Result<(), CclError> {
        let is_lent = matches!(
            &data,
            CollectiveInput::Ready(buffers) if buffers.device().kind == DeviceType::CPU || buffers.is_until_done()
        );
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
        // An error of a lost collective has no caller here that it could be returned to.
        _ = member.complete();
        // The communicator of a broken group cannot be finalised: it is aborted.
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

/// Returns `control` as an [`Agreement`]. Fails if it is not of this rank and size.
fn fitting(control: Box<dyn Ccl>, (rank, size): (Rank, usize)) -> Result<Box<dyn Agreement>, RpcError> {
    if (control.rank(), control.size()) != (rank, size) {
        let (other, others) = (control.rank(), control.size());
        let text = format!("the control communicator is rank {other} of {others}, and this is rank {rank} of {size}");
        return Err(RpcError::new(ErrorKind::ApiMisuse, text));
    }
    control.into_agreement()
}
