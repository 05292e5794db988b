//! MPI between ranks: for clusters where it is the way between nodes. With the feature `mpi`.
//!
//! The processes are started by `mpirun`, `srun` or another launcher of MPI jobs, and each
//! [starts](Process::start) MPI; a group is made of as many of them as it needs, in any order. MPI
//! carries the bytes that sockets carry elsewhere, in messages between two ranks that do not block,
//! and the collectives are those of [sockets](super): the same bits, the same errors, and the same
//! ways to break and to be made anew. MPI is never given a caller's buffer. It cannot take one back
//! from a collective that does not end, so that a rank with such a collective would have no other
//! way out than the end of its process. This costs a copy on each side.
//!
//! When a process of a job dies, `mpirun` ends all of them, unless it is told otherwise. The ranks
//! of a group prove to each other that they have its key. With [`Options::encrypt`] only they can
//! read what they carry.
//!
//! Run with Open MPI 4.1.4.

#[allow(unsafe_code)]
mod library;
mod stream;

use std::sync::OnceLock;
use std::time::Duration;

use parking_lot::Mutex;
use rpc_core::{ErrorKind, RpcError};

use self::library::Library;
use self::stream::MessageStream;
use super::Options;
use super::stream::{Member, SessionKey, by_messages};
use crate::ccl::{Ccl, Rank};

/// Longest time that [`Process::finish`] waits for messages that have not been received yet.
const LAST_MESSAGES: Duration = Duration::from_secs(5);

/// This process as one of a job of MPI.
#[derive(Debug)]
pub struct Process {
    library: Library,
    rank: u32,
    size: u32,
    job: String,
}

/// Kind of the group that a communicator is for. Two groups of one kind with the same key and the
/// same [epoch](Options::epoch) must have no member in common, even if one of them has ended long
/// ago.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MpiScope {
    /// All workers of a session.
    World,
    /// One of its groups, in the grouping of its workers that has this number; from 15 on the
    /// numbers begin anew.
    Group(u8),
}

impl MpiScope {
    /// Number of different scopes in tags.
    const COUNT: u16 = 16;

    fn number(self) -> u16 {
        match self {
            Self::World => 0,
            Self::Group(number) => 1 + u16::from(number) % (Self::COUNT - 1),
        }
    }
}

static PROCESS: OnceLock<Process> = OnceLock::new();

impl Process {
    /// Starts MPI, unless it has been started, and waits until all processes of the job have come
    /// here. The thread that calls this has to call [`finish`](Self::finish), before the process
    /// ends.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`]: the library lets no more than one thread use it. Errors of the
    /// library itself.
    pub fn start() -> Result<&'static Self, RpcError> {
        static STARTING: Mutex<()> = Mutex::new(());
        let _one_at_a_time = STARTING.lock();
        if let Some(process) = PROCESS.get() {
            return Ok(process);
        }
        let library = Library::start()?;
        let (rank, size) = (library.rank(), library.size());
        let mut job = [0; 16];
        if rank == 0 {
            ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut job)
                .map_err(|_| RpcError::internal("the system gives no random numbers"))?;
        }
        library.share(&mut job)?;
        let job = job.iter().map(|byte| format!("{byte:02x}")).collect();
        tracing::info!(rank, size, library = library.version(), "MPI has been started");
        Ok(PROCESS.get_or_init(|| Self { library, rank, size, job }))
    }

    /// Returns the process, if MPI has been started in it.
    pub fn started() -> Option<&'static Self> {
        PROCESS.get()
    }

    /// Returns its number in the job.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Returns the number of processes the job has.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Returns a text that the processes of one job, and no others, have in common.
    pub fn job(&self) -> &str {
        &self.job
    }

    /// Returns the version text of the library.
    pub fn version(&self) -> &str {
        self.library.version()
    }

    /// Joins a group as one of `members`, which are numbers of the job in the order of ranks.
    /// Blocks until all have come.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::DeadlineExceeded`]: not all came within [`Options::join_timeout`];
    /// [`ErrorKind::Refused`]: one has come into another group; [`ErrorKind::InvalidArgument`]:
    /// this process is not among them.
    pub fn join(
        &'static self,
        scope: MpiScope,
        members: &[u32],
        key: &SessionKey,
        options: &Options,
    ) -> Result<Box<dyn Ccl>, RpcError> {
        let own = members.iter().position(|member| *member == self.rank);
        let (Some(own), None) = (own, members.iter().find(|member| **member >= self.size)) else {
            let text = format!("process {} of {} cannot join a group of {members:?}", self.rank, self.size);
            return Err(RpcError::invalid_argument(text));
        };
        let tag = tag(scope, key, options.epoch);
        let open = |peer: usize| MessageStream::new(&self.library, members[peer], tag);
        by_messages(&Member { rank: Rank::of(own), size: members.len(), key, options }, open)
    }

    /// Ends the use of MPI, which all processes of the job do together: call it when no
    /// communicator is left, and nothing of MPI after it. Blocks until the last messages have been
    /// taken, some seconds at most.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::DeadlineExceeded`]: messages are left that no process takes, or another thread
    /// does not come back from MPI. Then the process should end without more, and the job with it.
    pub fn finish(&self) -> Result<(), RpcError> {
        self.library.finish(LAST_MESSAGES)
    }
}

/// Returns the tag of a group's messages between two processes, made of its key and epoch, so that
/// sessions that share processes, and leftovers of an earlier group, are told apart. Those of an
/// epoch differ from those of the last [`EPOCHS`] - 1, of which one may still run. The standard
/// promises tags up to 32767, of which other groups may have the same: then they do not recognise
/// each other's hellos.
fn tag(scope: MpiScope, key: &SessionKey, epoch: u64) -> u16 {
    const DIGESTS: u64 = (1 << 15) / (EPOCHS * MpiScope::COUNT as u64);
    let group = key.digest(epoch) % DIGESTS * EPOCHS + epoch % EPOCHS;
    group as u16 * MpiScope::COUNT + scope.number()
}

/// Number of consecutive epochs that have different tags.
const EPOCHS: u64 = 4;

pub(super) fn lost(text: impl std::fmt::Display) -> RpcError {
    RpcError::new(ErrorKind::PeerLost, format!("MPI: {text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_messages_of_their_own() {
        let keys = [SessionKey::generate().unwrap(), SessionKey::generate().unwrap()];
        let groups = keys.iter().flat_map(|key| (0..50).map(move |epoch| (key, epoch)));
        let of_both = |(key, epoch)| [tag(MpiScope::World, key, epoch), tag(MpiScope::Group(0), key, epoch)];
        let mut tags: Vec<_> = groups.flat_map(of_both).collect();
        assert!(tags.iter().all(|tag| *tag <= 32_767));
        tags.sort_unstable();
        tags.dedup();
        // Some may meet by chance; twenty of a hundred pairs do not.
        assert!(tags.len() > 160, "{}", tags.len());
    }

    /// Regression: by chance a group had the tag of the one that still ran, and could not be made.
    #[test]
    fn a_group_has_another_tag_than_those_of_the_epochs_before() {
        let scopes = || std::iter::once(MpiScope::World).chain((0..15).map(MpiScope::Group));
        for epoch in 0..500 {
            // Each epoch has another key.
            let tags = (epoch..epoch + EPOCHS).flat_map(|epoch| {
                let key = SessionKey::generate().unwrap();
                scopes().map(move |scope| tag(scope, &key, epoch))
            });
            let mut tags: Vec<_> = tags.collect();
            tags.sort_unstable();
            tags.dedup();
            assert_eq!(tags.len(), EPOCHS as usize * 16);
        }
    }
}
