//! The controller: the session with its operations, references to registers, and what is known of the workers.

pub(crate) mod ccl_state;
pub(crate) mod dispatch;
pub(crate) mod dref;
pub(crate) mod modules;
mod reinit;
pub(crate) mod session;
