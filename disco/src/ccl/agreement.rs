//! The trait [`Agreement`]: the first half of a collective, by which a control communicator
//! completes a backend that only moves data.

use rpc_core::RpcError;

use super::{BreakCause, Ccl, CclError, Collective};

/// A communicator that can also do the first half of a collective alone: every rank announces its
/// call, and all come to the same verdict. A backend for devices does the second half, and has such
/// a communicator for control. [`Ccl::into_agreement`] creates one.
///
/// All ranks of a group use it in the same way: a collective that one rank [runs](Ccl::run) must be
/// run by the others too, and not only be [agreed on](Self::agree).
pub trait Agreement: Ccl {
    /// Takes part in a collective up to the point where data would move. `input` is an error if
    /// this rank has no input. Blocks until all ranks have come, or for a transfer the other one.
    ///
    /// After `Ok` this rank is in the collective until it calls [`finish`](Self::finish); after an
    /// error it is not.
    ///
    /// # Errors
    ///
    /// As [`Ccl::run`]: mismatch and poison are the same on all ranks, and a rank that is out of
    /// step breaks the group.
    fn agree(&mut self, collective: Collective, input: Result<(), RpcError>) -> Result<(), CclError>;

    /// Checks, without waiting, if the group has been broken since. A rank that has died breaks it.
    /// A rank that has left does not: it has nothing more to do in the collective that was agreed
    /// on.
    ///
    /// # Errors
    ///
    /// [`CclError::Broken`] alone.
    fn check(&mut self) -> Result<(), CclError>;

    /// Breaks the group, unless it is broken, because of a failure of this rank after all had
    /// agreed. Returns the error that all ranks get. Does not block.
    fn fail(&mut self, cause: BreakCause) -> CclError;

    /// Records the outcome of the collective for this rank. Has no effect outside of a collective.
    fn finish(&mut self, result: &Result<(), CclError>);
}
