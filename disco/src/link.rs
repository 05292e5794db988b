//! Links: how commands get to the workers of a node, how events come back, and how data is relayed
//! between workers.
//!
//! [`node_link`] is one link, over a session; [`local`] is what it does without one, to a host of
//! its own process. [`upstream`] is what links report to. [`loss`] has all that happens when a
//! worker is lost.

pub(crate) mod event_queue;
pub(crate) mod local;
pub(crate) mod loss;
pub(crate) mod node_link;
pub(crate) mod outbox;
pub(crate) mod relay;
pub(crate) mod source;
pub(crate) mod upstream;
