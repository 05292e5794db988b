//! The controller: the session with its operations, references to registers, and the known state of
//! the workers.
//!
//! [`dispatch`] has the controller itself, which numbers commands and passes each to all links. The
//! other files add to it: [`sync`] the waits for workers, [`reports`] the reports of workers,
//! [`unsynced_failures`] what failed, the [`join_plan`] and [`init_ccl`]. Operations of users are
//! in [`session`]; [`run_all`] runs programs at the nodes, and [`replace`] replaces lost workers.

pub(crate) mod ccl_state;
pub(crate) mod dispatch;
pub(crate) mod dref;
mod executed_credit;
mod init_ccl;
mod join_plan;
pub(crate) mod link_slots;
mod module_upload;
pub(crate) mod replace;
mod reports;
mod restore_log;
pub(crate) mod run_all;
pub(crate) mod session;
mod sync;
mod tickets;
mod unsynced_failures;
