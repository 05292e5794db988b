//! Links: commands on their way to the workers of a node, events on their way back, and data
//! relayed between workers.
//!
//! [`node_link`] is one link, over a session; [`local`] does the same without one, to a host of its
//! own process. [`upstream`] is the receiver of the links' reports. [`loss`] has all that happens
//! when a worker is lost.

pub(crate) mod event_queue;
pub(crate) mod local;
pub(crate) mod loss;
pub(crate) mod node_link;
pub(crate) mod outbox;
pub(crate) mod relayed_data;
pub(crate) mod replacement;
pub(crate) mod session_source;
pub(crate) mod upstream;
