//! Workers: threads that execute commands on a register file, and the view of them that functions
//! have.
//!
//! [`executor`] has the worker, [`feed`] the commands on their way to it, [`context`] the view of
//! its functions. The handlers of commands are in `handlers`, `collectives`, `init_ccl` and
//! `program_handlers`.

mod collectives;
pub(crate) mod command_feed;
pub(crate) mod context;
pub(crate) mod exchanges;
pub(crate) mod executor;
mod handlers;
mod init_ccl;
mod joined_ccl;
pub(crate) mod process_state;
mod program_handlers;
mod recorded_program;
mod register_content;
mod registers;
pub(crate) mod rendezvous;
mod result_layout;
pub(crate) mod start;
mod tensor_loan;
