//! Nodes: programs that serve workers to a controller.
//!
//! [`functions`] are those by which a controller opens and drives a node, [`host`] is the object
//! that it opens, [`subtree`] the processes and nodes below that. [`join`] and [`worker_process`]
//! are the programs that become a node or one worker.

pub(crate) mod functions;
pub(crate) mod host;
pub(crate) mod host_table;
pub(crate) mod join;
pub(crate) mod self_start;
mod server;
pub(crate) mod settings;
pub(crate) mod simulated;
pub(crate) mod subtree;
pub(crate) mod worker_process;

#[cfg(test)]
mod break_tests;
#[cfg(test)]
#[cfg(target_os = "linux")]
pub(crate) mod flood_tests;
#[cfg(test)]
mod held_memory_tests;
#[cfg(test)]
#[cfg(target_os = "linux")]
mod open_file_tests;
#[cfg(test)]
#[cfg(target_os = "linux")]
mod plan_tests;
#[cfg(test)]
mod raw_controller;
