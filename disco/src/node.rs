//! Nodes: programs that serve workers to a controller.
//!
//! [`host`] has the functions by which a controller opens and drives the workers of a node, [`subtree`] the processes and
//! nodes below it, and [`join`] the programs that become a node or one worker.

pub(crate) mod host;
pub(crate) mod join;
pub(crate) mod settings;
pub(crate) mod subtree;
