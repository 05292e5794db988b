//! Last errors of a server, which its trackers show to people.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use rpc_core::{ErrorKind, clock};
use rpc_transports::tracker::{RecentError, ServerDetails};
use rpc_transports::{Address, ServeObserver};

use crate::tracker::millis;

/// Maximum length of a text, in characters.
const MAX_CHARS: usize = 200;

/// Last errors of a server, each text once, at its last time.
#[derive(Debug, Default)]
pub(crate) struct RecentErrors(Mutex<VecDeque<(Instant, String)>>);

impl RecentErrors {
    /// Adds an error that happens now.
    pub(crate) fn add(&self, text: &str) {
        let text: String = text.chars().take(MAX_CHARS).collect();
        let mut errors = self.0.lock();
        errors.retain(|(_, known)| *known != text);
        errors.truncate(ServerDetails::MAX_ERRORS - 1);
        errors.push_front((clock::now(), text));
    }

    /// Returns the errors, the latest first.
    pub(super) fn list(&self) -> Vec<RecentError> {
        let now = clock::now();
        let describe = |(when, text): &(Instant, String)| RecentError {
            ago_ms: millis(now.saturating_duration_since(*when)),
            text: text.clone(),
        };
        self.0.lock().iter().map(describe).collect()
    }
}

/// Observer that adds refusals of clients to the errors of a server, and passes everything on.
#[derive(Debug)]
pub(super) struct RefusalRecorder {
    pub(super) errors: Arc<RecentErrors>,
    pub(super) inner: Option<Arc<dyn ServeObserver>>,
}

impl ServeObserver for RefusalRecorder {
    fn refused(&self, reason: ErrorKind) {
        self.errors.add(&format!("refused a client: {}", reason.name()));
        if let Some(inner) = &self.inner {
            inner.refused(reason);
        }
    }

    fn stopped_listening(&self, address: &Address) {
        self.errors.add(&format!("stopped listening on {address}"));
        if let Some(inner) = &self.inner {
            inner.stopped_listening(address);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_errors_are_kept_each_once_and_cut() {
        let errors = RecentErrors::default();
        (0..20).for_each(|number| errors.add(&format!("error {number}")));
        errors.add("error 15");
        errors.add(&"x".repeat(1000));
        let texts: Vec<_> = errors.list().into_iter().map(|error| error.text).collect();
        assert_eq!(texts.len(), ServerDetails::MAX_ERRORS);
        assert_eq!(texts[0].len(), MAX_CHARS);
        assert_eq!(texts[1..4], ["error 15", "error 19", "error 18"]);
    }
}
