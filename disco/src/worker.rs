//! Workers: threads that execute commands on a register file, and what functions see of them.

mod announced;
pub(crate) mod context;
pub(crate) mod executor;
pub(crate) mod feed;
pub(crate) mod process_state;
mod recorded;
pub(crate) mod rendezvous;
