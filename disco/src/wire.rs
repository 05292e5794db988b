//! Messages between the controller, the nodes and the workers: commands, events, set-ups, plans,
//! and their bytes.

pub(crate) mod codec;
pub(crate) mod command;
pub(crate) mod event;
pub mod fuzzing;
#[cfg(test)]
pub(crate) mod golden;
pub(crate) mod grouping;
pub(crate) mod mesh;
pub(crate) mod parameter;
pub(crate) mod plan;
pub(crate) mod relayed_pair;
pub(crate) mod set_up;
