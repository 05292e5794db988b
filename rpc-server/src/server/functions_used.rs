//! Names of the functions that a session uses, for its record in the log.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use parking_lot::Mutex;
use rpc_core::session::InPlaceWrite;
use rpc_core::value::TensorRef;
use rpc_core::{Lane, Operation, Request, RpcError, RpcSession, SharedSession, Submission, printable_line};
use rpc_transports::{OpenRequest, SessionFactory};

/// Maximum number of names that are kept for one session.
const MAX_NAMES: usize = 16;

/// Maximum length of a name in characters. Names come from clients.
const MAX_NAME_CHARS: usize = 64;

/// Factory whose sessions note the functions that their clients fetch, and are counted when they
/// have ended.
pub(super) struct NotingFactory {
    pub(super) inner: Arc<dyn SessionFactory>,
    /// Number of sessions that have ended.
    pub(super) ended: Arc<AtomicU64>,
}

#[async_trait]
impl SessionFactory for NotingFactory {
    async fn open(&self, request: &OpenRequest) -> Result<SharedSession, RpcError> {
        let (inner, used) = (self.inner.open(request).await?, Arc::new(FunctionsUsed::default()));
        // The factory of sessions in processes of their own has set a note already, which stays.
        request.note.set(used.clone());
        Ok(Arc::new(NotingSession { inner, used, _counted: Some(CountedAtEnd(self.ended.clone())) }))
    }
}

/// Functions that a client has fetched.
#[derive(Debug, Default)]
pub(crate) struct FunctionsUsed(Mutex<Names>);

#[derive(Debug, Default)]
struct Names {
    kept: BTreeSet<String>,
    /// True if there were more than are kept.
    has_others: bool,
}

impl FunctionsUsed {
    /// Returns the names that are kept, and one more that stands for the others if there are any.
    pub(crate) fn names(&self) -> Vec<String> {
        let names = self.0.lock();
        names.kept.iter().cloned().chain(names.has_others.then(|| "others".to_owned())).collect()
    }

    pub(crate) fn add(&self, name: &str) {
        let mut names = self.0.lock();
        if names.kept.contains(name) || names.has_others {
            return;
        }
        let name = match name.char_indices().nth(MAX_NAME_CHARS) {
            Some((end, _)) => format!("{}…", &name[..end]),
            None => name.to_owned(),
        };
        if names.kept.len() < MAX_NAMES {
            names.kept.insert(printable_line(&name).into_owned());
        } else {
            names.has_others = !names.kept.contains(&name);
        }
    }
}

impl fmt::Display for FunctionsUsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.0.lock();
        for (at, name) in names.kept.iter().enumerate() {
            write!(f, "{}{name}", if at > 0 { ", " } else { "" })?;
        }
        if names.has_others { f.write_str(", and others") } else { Ok(()) }
    }
}

/// Session that notes the functions that are fetched.
pub(crate) struct NotingSession {
    inner: SharedSession,
    used: Arc<FunctionsUsed>,
    _counted: Option<CountedAtEnd>,
}

impl NotingSession {
    /// Wraps `inner` in a session that notes in `used`.
    pub(crate) fn wrap(inner: SharedSession, used: Arc<FunctionsUsed>) -> SharedSession {
        Arc::new(Self { inner, used, _counted: None })
    }
}

impl RpcSession for NotingSession {
    fn submit(&self, request: Request) -> Submission {
        if let Operation::GetFunction { name } = &request.operation {
            self.used.add(name);
        }
        self.inner.submit(request)
    }

    fn inner(&self) -> Option<&dyn RpcSession> {
        Some(&self.inner)
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        self.inner.write_in_place(lane, to, offset, len)
    }
}

/// Entry in the number of sessions that have ended, made when it is dropped.
struct CountedAtEnd(Arc<AtomicU64>);

impl Drop for CountedAtEnd {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_bounded_in_length_and_number() {
        let used = FunctionsUsed::default();
        for name in ["rpc.echo", "add", "rpc.echo", "a\nb"] {
            used.add(name);
        }
        assert_eq!(used.to_string(), "a\\u{a}b, add, rpc.echo");
        used.add(&"é".repeat(1000));
        assert!(used.to_string().ends_with("é…"), "{used}");
        for at in 0..100 {
            used.add(&format!("f{at}"));
        }
        let text = used.to_string();
        assert!(text.ends_with(", and others") && text.len() < 400, "{text}");
    }
}
