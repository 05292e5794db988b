//! Collectives: how the workers of a session move and reduce tensors among themselves, without the
//! controller.
//!
//! A *communicator* is one rank's membership in a group. [`Ccl`] is what every backend offers;
//! [`host`] is the one that is always there, for tensors in host memory: between threads, between
//! processes of one machine, and over sockets. [`nccl`] moves tensors in the memory of GPUs, where
//! NVIDIA's or AMD's library is found at run time.
//!
//! ```
//! use disco::ccl::{Buffers, Ccl, ReduceOp, host};
//! use rpc_core::{DataType, Result};
//!
//! let ranks = host::threads(2, &host::Options::default())?;
//! let sums = std::thread::scope(|scope| {
//!     let threads: Vec<_> = ranks
//!         .into_iter()
//!         .map(|mut ccl| {
//!             scope.spawn(move || {
//!                 let mut data = (1.5 + f32::from(ccl.rank().0 as u8)).to_ne_bytes();
//!                 let buffers = Buffers::in_place(&mut data);
//!                 ccl.allreduce(ReduceOp::Sum, DataType::F32, 1, buffers.into())?;
//!                 Ok(f32::from_ne_bytes(data))
//!             })
//!         })
//!         .collect();
//!     let sums = threads.into_iter().map(|thread| thread.join().expect("no panic"));
//!     sums.collect::<Result<Vec<_>>>()
//! })?;
//! assert_eq!(sums, [4.0, 4.0]);
//! # Ok::<(), rpc_core::RpcError>(())
//! ```
//!
//! # The contract
//!
//! 1. **Order.** All ranks of a group call the same collectives in the same order, with the same
//!    operation, root, type and count. Where they do not, every rank gets [`CclError::Mismatch`],
//!    which names both calls; no data moves, and the group lives on.
//! 2. **Synchronisation.** A collective returns once this rank has all that is its own and its
//!    buffers are its own again; on the memory of a device that is so in the order of the device's
//!    stream, and [`Ccl::complete`] waits for it. Every collective begins with word from every
//!    rank, so that none finishes before all have entered.
//! 3. **Results.** All ranks get the same bits, and the same ones in every run. Every backend in
//!    [`host`] folds an element in the order of ranks, 0 first, and rounds it once, so that even
//!    the way of launching does not matter:
//!    * integers wrap in sums and products;
//!    * `float16` and `bfloat16` are accumulated in `float32`, and rounded (to nearest, ties to
//!      even) at the end;
//!    * an average is the sum divided by the number of ranks: for integers the wrapped sum, and the
//!      quotient truncates toward zero;
//!    * the minimum and maximum of anything with a NaN is a NaN; which payload it has is not
//!      promised. Of two zeros of different sign, the
//!      one of the higher rank counts as both the smaller and the larger.
//!
//!    Sums of `float32` and `float64` round after each addition, in that type.
//! 4. **Poison.** A rank that has no input, because what should have made it failed, takes part
//!    with [`CollectiveInput::Poisoned`]. Every rank, that one too, gets [`CclError::Poisoned`]
//!    with the cause, all outputs are left as they were, and the group lives on. An argument that
//!    is wrong on one rank alone, such as a buffer of the wrong length, is poison too.
//! 5. **Breakage.** When a rank dies, leaves, is cut off, does not come or goes on without the
//!    others, or when [`Control::abort`] is called, every other rank gets
//!    [`CclError::Broken`], which names the rank and the collective. Outputs are unspecified then.
//!    A broken group stays broken: every later call returns the same error at once. It is made anew
//!    with the next epoch, and nothing that was sent under the old one is taken under the new one.
//!
//! Calls block their thread. They wait by spinning for some microseconds, then by yielding, then
//! asleep.

mod agreement;
pub(crate) mod backend;
#[allow(unsafe_code)]
mod buffer;
pub(crate) mod communicators;
mod error;
mod flight_recorder;
pub mod host;
pub(crate) mod join_nccl;
pub mod nccl;

use std::fmt;
use std::sync::Arc;

use rpc_core::{DataType, RpcError};
use serde::{Deserialize, Serialize};

pub use agreement::Agreement;
pub(crate) use buffer::Lent;
pub use buffer::{Buffers, CollectiveInput};
#[cfg(test)]
pub(crate) use error::poison_to_bytes;
pub use error::{BreakCause, Breakdown, CclError};
pub(crate) use flight_recorder::Recorder;
pub use flight_recorder::{Flight, Outcome};

/// The number of a worker within a group, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rank(pub u32);

impl Rank {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }

    /// Returns the rank of an index in a table that has one entry for each rank.
    pub(crate) fn of(index: usize) -> Self {
        Self(u32::try_from(index).expect("groups are smaller than 2^32"))
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Reduction of the elements of several ranks to one. The treatment of rounding, overflow and NaN
/// is in the [contract](self#the-contract).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The product.
    Prod,
    /// The smallest.
    Min,
    /// The largest.
    Max,
    /// The sum divided by the number of ranks.
    Avg,
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Prod => "prod",
            Self::Min => "min",
            Self::Max => "max",
            Self::Avg => "avg",
        })
    }
}

/// Operation of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Operation {
    /// Every rank gets the reduction of all inputs.
    Allreduce(ReduceOp),
    /// Every rank gets its own share of the reduction.
    ReduceScatter(ReduceOp),
    /// Every rank gets all inputs, in the order of ranks.
    Allgather,
    /// Every rank gets the root's input.
    Broadcast {
        /// Rank whose input counts.
        root: Rank,
    },
    /// Every rank gets its own share of the root's input.
    Scatter {
        /// Rank whose input counts.
        root: Rank,
    },
    /// The root gets all inputs, in the order of ranks.
    Gather {
        /// Rank that gets the result.
        root: Rank,
    },
    /// Every rank gets its own share of all inputs, in the order of ranks.
    AllToAll,
    /// No rank gets data, and no rank leaves before all have come.
    Barrier,
    /// The receiving rank gets the input. Only these two take part.
    Send {
        /// The receiving rank.
        to: Rank,
    },
    /// The other half of `Send`.
    Recv {
        /// The sending rank.
        from: Rank,
    },
}

impl Operation {
    /// Returns the name alone.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Allreduce(_) => "allreduce",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::Allgather => "allgather",
            Self::Broadcast { .. } => "broadcast",
            Self::Scatter { .. } => "scatter",
            Self::Gather { .. } => "gather",
            Self::AllToAll => "all_to_all",
            Self::Barrier => "barrier",
            Self::Send { .. } => "send",
            Self::Recv { .. } => "recv",
        }
    }

    /// Returns the other rank of a transfer between two.
    pub(crate) fn peer(self) -> Option<Rank> {
        match self {
            Self::Send { to: peer } | Self::Recv { from: peer } => Some(peer),
            _ => None,
        }
    }

    /// Returns the rank that a collective begins or ends at.
    pub(crate) fn root(self) -> Option<Rank> {
        match self {
            Self::Broadcast { root } | Self::Scatter { root } | Self::Gather { root } => Some(root),
            _ => None,
        }
    }

    pub(crate) fn reduce_op(self) -> Option<ReduceOp> {
        match self {
            Self::Allreduce(op) | Self::ReduceScatter(op) => Some(op),
            _ => None,
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Self::Allreduce(op) | Self::ReduceScatter(op) => write!(f, "({op})"),
            Self::Broadcast { root } | Self::Scatter { root } | Self::Gather { root } => write!(f, "(root {root})"),
            Self::Send { to } => write!(f, "(to rank {to})"),
            Self::Recv { from } => write!(f, "(from rank {from})"),
            Self::Allgather | Self::AllToAll | Self::Barrier => Ok(()),
        }
    }
}

/// One call: its operation, and the number and type of its elements.
///
/// `count` is the smaller side of a collective, as in NCCL. With `n` ranks:
///
/// | operation | input | output |
/// | --- | --- | --- |
/// | allreduce | `count` | `count` |
/// | reduce_scatter | `n × count` | `count` |
/// | allgather | `count` | `n × count` |
/// | broadcast | `count` at the root | `count`; the root may leave it out |
/// | scatter | `n × count` at the root | `count` |
/// | gather | `count` | `n × count` at the root |
/// | all_to_all | `n × count` | `n × count` |
/// | send | `count` | none |
/// | recv | none | `count` |
/// | barrier | none | none |
///
/// A buffer that a rank has no use for, such as another rank's source of a broadcast, is not looked
/// at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Collective {
    /// Operation.
    pub operation: Operation,
    /// The type of the elements. Reductions take signed and unsigned integers of 8 to 64 bits,
    /// `float16`, `bfloat16`, `float32` and `float64`, of any number of lanes; everything else
    /// takes any type of whole bytes.
    pub dtype: DataType,
    /// Number of elements.
    pub count: usize,
}

impl Collective {
    /// Returns this call.
    #[must_use]
    pub const fn new(operation: Operation, dtype: DataType, count: usize) -> Self {
        Self { operation, dtype, count }
    }

    /// Returns a barrier.
    #[must_use]
    pub const fn barrier() -> Self {
        Self::new(Operation::Barrier, DataType::U8, 0)
    }

    /// Returns the bytes of `count` elements; `None` if they are no whole bytes, or too many.
    pub(crate) fn bytes(&self) -> Option<usize> {
        if !self.dtype.bits_per_element().is_multiple_of(8) {
            return None;
        }
        let bytes = self.dtype.size_bytes(self.count as u64)?;
        usize::try_from(bytes).ok().filter(|bytes| *bytes <= isize::MAX as usize)
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.operation == Operation::Barrier {
            return self.operation.fmt(f);
        }
        write!(f, "{} of {} {}", self.operation, self.count, self.dtype)
    }
}

/// One rank's membership in a group: a communicator. The [module](self) has the contract.
///
/// A communicator belongs to one thread at a time. Dropping it leaves the group; a rank that
/// waits for this one then gets [`CclError::Broken`].
pub trait Ccl: Send {
    /// Returns this rank.
    fn rank(&self) -> Rank;

    /// Returns the number of ranks the group has.
    fn size(&self) -> usize;

    /// Returns the epoch: the number of this making of the group. Traffic of other epochs is
    /// refused.
    fn epoch(&self) -> u64;

    /// Takes part in a collective: all other operations are this one.
    ///
    /// # Errors
    ///
    /// See [`CclError`]. [`CclError::Broken`] is the only one after which the communicator is of no
    /// more use.
    fn run(&mut self, collective: Collective, data: CollectiveInput<'_>) -> Result<(), CclError>;

    /// Waits until all that earlier calls have left to this rank's device is done. Backends for
    /// host memory leave nothing.
    ///
    /// # Errors
    ///
    /// [`CclError::Broken`]: some of it is lost, because the group broke meanwhile. Each loss is
    /// told once, by this or by the next call.
    fn complete(&mut self) -> Result<(), CclError> {
        Ok(())
    }

    /// Sets the number of the step that this rank is in, for callers that count their steps:
    /// upward, and the same on all ranks. Ranks that meet in a collective under different numbers
    /// are out of step, which breaks the group ([`BreakCause::OutOfStep`]): they would exchange
    /// data of different calls.
    fn set_step(&mut self, step: u64);

    /// Tells the other ranks that this rank is through with its step and may have left out
    /// collectives of it: a rank that waits for it in one of them breaks the group instead of
    /// waiting. Does not wait for other ranks.
    fn leave_step(&mut self);

    /// Returns a control, by which other threads reach the communicator while this one is in a
    /// call.
    fn control(&self) -> Arc<dyn Control>;

    /// Converts the communicator into one that backends for devices keep beside theirs. Those of
    /// the `host` backend can be.
    ///
    /// # Errors
    ///
    /// [`rpc_core::ErrorKind::Unsupported`]: it cannot be one. It is dropped then, and has left its
    /// group.
    fn into_agreement(self: Box<Self>) -> Result<Box<dyn Agreement>, RpcError> {
        Err(RpcError::unsupported("this communicator cannot agree on what another one does"))
    }

    /// Reduces `count` elements of every rank to `count` elements on every rank.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    fn allreduce(
        &mut self,
        op: ReduceOp,
        dtype: DataType,
        count: usize,
        data: CollectiveInput<'_>,
    ) -> Result<(), CclError> {
        self.run(Collective::new(Operation::Allreduce(op), dtype, count), data)
    }

    /// Reduces `size × count` elements of every rank; rank `r` gets the `count` ones from
    /// `r × count` on.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    fn reduce_scatter(
        &mut self,
        op: ReduceOp,
        dtype: DataType,
        count: usize,
        data: CollectiveInput<'_>,
    ) -> Result<(), CclError> {
        self.run(Collective::new(Operation::ReduceScatter(op), dtype, count), data)
    }

    /// Puts `count` elements of every rank behind each other on every rank.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    fn allgather(&mut self, dtype: DataType, count: usize, data: CollectiveInput<'_>) -> Result<(), CclError> {
        self.run(Collective::new(Operation::Allgather, dtype, count), data)
    }

    /// Gives every rank the `count` elements of `root`.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    fn broadcast(
        &mut self,
        root: Rank,
        dtype: DataType,
        count: usize,
        data: CollectiveInput<'_>,
    ) -> Result<(), CclError> {
        self.run(Collective::new(Operation::Broadcast { root }, dtype, count), data)
    }

    /// Gives rank `r` the `count` elements of `root` from `r × count` on.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    fn scatter(
        &mut self,
        root: Rank,
        dtype: DataType,
        count: usize,
        data: CollectiveInput<'_>,
    ) -> Result<(), CclError> {
        self.run(Collective::new(Operation::Scatter { root }, dtype, count), data)
    }

    /// Puts `count` elements of every rank behind each other on `root`.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    fn gather(&mut self, root: Rank, dtype: DataType, count: usize, data: CollectiveInput<'_>) -> Result<(), CclError> {
        self.run(Collective::new(Operation::Gather { root }, dtype, count), data)
    }

    /// Gives rank `r` the `count` elements from `r × count` on of every rank, behind each other.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    fn all_to_all(&mut self, dtype: DataType, count: usize, data: CollectiveInput<'_>) -> Result<(), CclError> {
        self.run(Collective::new(Operation::AllToAll, dtype, count), data)
    }

    /// Sends `count` elements to rank `to`, once that rank is there to receive them: ranks that all
    /// send in a circle, with none receiving, wait until their time is up.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    fn send(&mut self, to: Rank, dtype: DataType, count: usize, data: CollectiveInput<'_>) -> Result<(), CclError> {
        self.run(Collective::new(Operation::Send { to }, dtype, count), data)
    }

    /// Receives the `count` elements that rank `from` sends.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    fn recv(&mut self, from: Rank, dtype: DataType, count: usize, data: CollectiveInput<'_>) -> Result<(), CclError> {
        self.run(Collective::new(Operation::Recv { from }, dtype, count), data)
    }

    /// Waits until every rank has come here.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    fn barrier(&mut self) -> Result<(), CclError> {
        self.run(Collective::barrier(), Buffers::none().into())
    }

    /// Breaks the group, as [`Control::abort`] does.
    fn abort(&self, reason: &str) {
        self.control().abort(reason);
    }
}

/// Control of a communicator for any thread, also while its own thread is in a collective.
pub trait Control: Send + Sync {
    /// Breaks the group for all ranks: ranks that wait in a collective get [`CclError::Broken`]
    /// with `reason`, at once on this machine and as soon as the word has travelled on others. Does
    /// not block; does nothing if the group is broken already.
    fn abort(&self, reason: &str);

    /// Returns the breakdown of the group, if the group is broken and this rank knows.
    fn broken(&self) -> Option<Arc<Breakdown>>;

    /// Returns the last calls of this rank, the oldest first, with those that are still running.
    fn flights(&self) -> Vec<Flight>;

    /// Describes the call that each rank is known to be in, one line a rank, for people who look
    /// for the rank that hangs.
    fn describe(&self) -> String;
}
