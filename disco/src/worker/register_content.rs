//! Slots: the content of registers, which is a value or the error that poisons the register.

use std::sync::Arc;

use rpc_core::{LocalValue, RpcError};

use crate::error::Failure;

/// Content of a register.
#[derive(Clone, Default)]
pub(super) enum Slot {
    #[default]
    Empty,
    Value(LocalValue),
    /// The command that should have set the register failed.
    Poisoned(Arc<Failure>),
}

impl Slot {
    /// Returns the memory that the content takes beside the register, and beside tensors.
    pub(super) fn heap_bytes(&self) -> usize {
        match self {
            Self::Empty => 0,
            Self::Value(value) => value.size_with(&|_| 0) - size_of_val(value),
            Self::Poisoned(failure) => failure.size(),
        }
    }
}

/// Command that has set a register by a collective that is still in progress on the device, and may
/// fail there.
pub(super) struct UnsettledCommand {
    pub(super) sequence: u64,
    pub(super) command: String,
}

/// Reason why a command has no result.
pub(super) enum Fault {
    /// The command failed on this worker.
    Own(RpcError),
    /// The command depends on a value whose own command failed.
    Inherited(Arc<Failure>),
}

impl From<RpcError> for Fault {
    fn from(error: RpcError) -> Self {
        Self::Own(error)
    }
}

/// Result of a command, or of a step of it.
pub(super) type Outcome<T = ()> = Result<T, Fault>;
