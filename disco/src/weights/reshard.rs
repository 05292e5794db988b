//! Resharding: tensors that the workers of one session have go to those of another one that divides
//! them in another way, from worker to worker.
//!
//! The controller: `controller`, with `cut` (how tensors are divided), `sides` (where the workers
//! are) and `relay` (the way through the controller). `plan` says which bytes go where: `region`
//! (boxes of elements) and `byte_runs` (their bytes in the memory of a worker). The workers:
//! `worker`, `meeting` (the group of both sessions) and `transfer` (the moves of one worker).
//! Requests from one to the other: `messages`.

pub(in crate::weights) mod byte_runs;
mod controller;
mod cut;
mod meeting;
mod messages;
mod plan;
mod region;
mod relay;
mod sides;
mod transfer;
mod worker;

pub use controller::{DataRoute, Reshard, Resharded};
pub use cut::Cut;
#[cfg(test)]
pub(in crate::weights) use messages::golden_requests;
pub(in crate::weights) use worker::register;
