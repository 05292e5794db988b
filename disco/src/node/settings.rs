//! Settings that the program of a node hands down to the processes of its workers.

use serde::{Deserialize, Serialize};

/// Text of a program's own for the processes of its workers
/// ([`Hosting::Processes`](crate::Hosting::Processes)), which are that program again and know
/// nothing else of its settings: an [extension](rpc_core::Context::extension) of the sessions that
/// a node serves. The processes have it by [`of_this_process`](Self::of_this_process).
///
/// It is passed as an argument of theirs, which other users of the machine can read: settings, and
/// no secrets, of some kilobytes at most.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeSettings(String);

impl NodeSettings {
    /// Makes these settings.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the text.
    pub fn text(&self) -> &str {
        &self.0
    }
}
