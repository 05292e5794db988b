//! Workers: threads that execute commands on a register file, and what functions see of them.
//!
//! [`executor`] has the worker, [`feed`] the commands on their way to it, [`context`] what its
//! functions see. The handlers of commands are in `handlers`, `collectives`, `join_plan` and
//! `programs`.

mod announced;
mod collectives;
pub(crate) mod context;
pub(crate) mod executor;
pub(crate) mod feed;
mod handlers;
mod join_plan;
pub(crate) mod process_state;
mod programs;
mod recorded_program;
mod registers;
pub(crate) mod rendezvous;
mod slot;
pub(crate) mod start;
mod tensor_loan;
