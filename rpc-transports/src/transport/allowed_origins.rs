//! Origins of the web pages that a listener serves.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::RwLock;

/// Origins of web pages, such as `https://console.example`, that a listener serves besides clients
/// that are no browsers. Compared without regard to case. Cheap to clone; clones share the list, so
/// that it can be changed while a listener uses it. The default list is empty.
///
/// Only transports over HTTP know origins. Browsers let every page open WebSockets to the loopback
/// interface of their user, so a request with an origin that is not listed is refused.
#[derive(Clone, Debug, Default)]
pub struct AllowedOrigins(Arc<RwLock<BTreeSet<String>>>);

impl AllowedOrigins {
    /// Creates a list.
    pub fn new<I>(origins: I) -> Self
    where
        I: IntoIterator,
        I::Item: Into<String>,
    {
        let this = Self::default();
        this.set(origins);
        this
    }

    /// Replaces the list, for all later connections.
    pub fn set<I>(&self, origins: I)
    where
        I: IntoIterator,
        I::Item: Into<String>,
    {
        let origins = origins.into_iter().map(|origin| origin.into().to_ascii_lowercase()).collect();
        *self.0.write() = origins;
    }

    /// Returns true if `origin` is on the list.
    #[must_use]
    pub fn contains(&self, origin: &str) -> bool {
        let origins = self.0.read();
        origins.contains(&origin.to_ascii_lowercase())
    }
}
