//! Agreement: a backend that can only move data gets the rest of the contract from one that can
//! talk.

use rpc_core::RpcError;

use super::{BreakCause, Ccl, CclError, Collective};

/// A communicator that also does the first half of a collective alone: every rank says what it is
/// about to do, and all come to the same verdict. A backend for devices carries out the second
/// half, and keeps such a communicator beside its own. [`Ccl::into_agreement`] makes one.
///
/// All ranks of a group use it in the same way: what one rank [runs](Ccl::run), the others must not
/// only [agree on](Self::agree).
pub trait Agreement: Ccl {
    /// Takes part in a collective up to where data would move, with or without (`Err`) an input.
    /// Blocks until all ranks have come, or the other one of a transfer.
    ///
    /// After `Ok` this rank is in the collective until it [has finished it](Self::finish); after an
    /// error it is not.
    ///
    /// # Errors
    ///
    /// As [`Ccl::run`]: mismatch and poison are the same on all ranks, and a rank that is out of
    /// step breaks the group.
    fn agree(&mut self, collective: Collective, input: Result<(), RpcError>) -> Result<(), CclError>;

    /// Checks, without waiting, if the group has been broken since. A rank that has died breaks it;
    /// one that has left has nothing more to do in the collective that was agreed on.
    ///
    /// # Errors
    ///
    /// [`CclError::Broken`] alone.
    fn check(&mut self) -> Result<(), CclError>;

    /// Breaks the group, unless it is broken, because of what happened to this rank after all had
    /// agreed. Returns the error that all ranks get. Does not block.
    fn fail(&mut self, cause: BreakCause) -> CclError;

    /// Records the outcome of the collective for this rank. Has no effect outside of a collective.
    fn finish(&mut self, result: &Result<(), CclError>);
}
