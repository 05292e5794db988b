//! Links: how commands get to the workers of a node, how events come back, and how data is relayed between workers.

pub(crate) mod node_link;
pub(crate) mod relay;
