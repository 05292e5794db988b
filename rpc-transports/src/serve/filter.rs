//! A session that forwards only the requests that a policy allows.

use std::fmt;
use std::sync::Arc;

use rpc_core::session::InPlaceWrite;
use rpc_core::{ErrorKind, Lane, Operation, Request, RpcError, RpcSession, SharedSession, Submission, TensorRef};

use crate::address::glob;

/// Policy that decides which requests may pass. Implemented by closures.
///
/// The policy is called for each request, on tasks that serve other clients as well, and must not
/// block.
pub trait RequestPolicy: Send + Sync {
    /// Checks whether `request` may pass.
    ///
    /// It is enough to check how functions are looked up: handles cannot be guessed, so a function
    /// can only be called after it has been looked up by its name.
    ///
    /// # Errors
    ///
    /// The reason for which the request may not pass. The caller gets it as the reply.
    fn check(&self, request: &Request) -> Result<(), RpcError>;
}

impl fmt::Debug for dyn RequestPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RequestPolicy")
    }
}

impl<F: Fn(&Request) -> Result<(), RpcError> + Send + Sync> RequestPolicy for F {
    fn check(&self, request: &Request) -> Result<(), RpcError> {
        self(request)
    }
}

/// Policy that lets functions be looked up by names that match one of its patterns, in which `*`
/// stands for any text. The functions of modules are looked up by name as well, and have to match.
/// All other requests pass.
///
/// `rpc.functions` and `rpc.signature` describe all functions of a server, hidden ones too. So a
/// pattern that matches them by a `*` does not allow them, unless it is `*` alone, which hides
/// nothing; the operator may name them. Typed clients do without signatures.
#[derive(Clone, Debug)]
pub struct FunctionPatterns(Vec<String>);

impl FunctionPatterns {
    /// Creates the policy from its patterns.
    pub fn new(patterns: impl IntoIterator<Item = String>) -> Self {
        Self(patterns.into_iter().collect())
    }
}

/// Functions that give names and types of all functions of a server.
const DESCRIBE_ALL: [&str; 2] = ["rpc.functions", "rpc.signature"];

impl RequestPolicy for FunctionPatterns {
    fn check(&self, request: &Request) -> Result<(), RpcError> {
        let (Operation::GetFunction { name } | Operation::ModuleFunction { name, .. }) = &request.operation else {
            return Ok(());
        };
        let allows = |pattern: &String| match DESCRIBE_ALL.contains(&name.as_str()) {
            true => pattern == "*" || pattern == name,
            false => glob(pattern, name),
        };
        if self.0.iter().any(allows) {
            return Ok(());
        }
        let text = format!("the function '{name}' may not be used through this server: its operator has to allow it");
        Err(RpcError::new(ErrorKind::Refused, text))
    }
}

/// A session that forwards to another session the requests that a [`RequestPolicy`] allows, and
/// answers others with the policy's error.
pub struct FilteredSession {
    next: SharedSession,
    policy: Arc<dyn RequestPolicy>,
}

impl FilteredSession {
    /// Creates a session that forwards to `next` the requests that `policy` allows.
    pub fn new(next: SharedSession, policy: Arc<dyn RequestPolicy>) -> Self {
        Self { next, policy }
    }
}

impl fmt::Debug for FilteredSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FilteredSession")
    }
}

impl RpcSession for FilteredSession {
    fn submit(&self, request: Request) -> Submission {
        match self.policy.check(&request) {
            Ok(()) => self.next.submit(request),
            Err(error) => Submission::ready(Err(error)),
        }
    }

    fn inner(&self) -> Option<&dyn RpcSession> {
        Some(&*self.next)
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        // Such a write bypasses `submit`, and the policy must see all requests.
        let _ = (lane, to, offset, len);
        None
    }
}

#[cfg(test)]
mod tests {
    use rpc_core::{LocalSession, Registry, Session};

    use super::*;

    #[test]
    fn what_does_not_match_is_refused_and_says_so() {
        let registry = Registry::new();
        registry.add("math.add", |a: i64, b: i64| a + b);
        registry.add("shell", || "never");
        let patterns = FunctionPatterns::new(["math.*".to_owned(), "rpc.info".to_owned()]);
        let session = Session::new(FilteredSession::new(Arc::new(LocalSession::new(registry)), Arc::new(patterns)));
        let add = session.function::<(i64, i64), i64>("math.add").wait().unwrap();
        assert_eq!(add.call((1, 2)).wait().unwrap(), 3);
        let error = session.get_function("shell").wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Refused);
        assert!(error.message().contains("'shell'"), "{error}");
        // A request that passes fails as it would without the filter.
        assert_eq!(session.get_function("math.mul").wait().unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn a_hidden_function_is_not_described_either() {
        let describe = |patterns: &[&str]| {
            let registry = Registry::new();
            registry.add("math.add", |a: i64, b: i64| a + b);
            registry.add("shell", |_command: String| "never");
            registry.add("rpc.functions", || vec!["math.add", "shell"]);
            registry.add("rpc.noop", || ());
            let patterns = FunctionPatterns::new(patterns.iter().map(|pattern| (*pattern).to_owned()));
            let session = FilteredSession::new(Arc::new(LocalSession::new(registry)), Arc::new(patterns));
            let session = Session::new(session);
            // Typed clients work without signatures.
            let add = session.function::<(i64, i64), i64>("math.add").wait().unwrap();
            assert_eq!(add.call((1, 2)).wait().unwrap(), 3);
            session.get_function("rpc.noop").wait().unwrap();
            ["rpc.signature", "rpc.functions"].map(|name| session.get_function(name).wait().map(drop))
        };
        for patterns in [&["math.*", "rpc.*"][..], &["math.add", "r*", "*c.noop"]] {
            for outcome in describe(patterns) {
                assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Refused, "{patterns:?}");
            }
        }
        assert!(describe(&["*"]).iter().all(Result::is_ok));
        let [signature, functions] = describe(&["math.*", "rpc.noop", "rpc.signature"]);
        assert!(signature.is_ok() && functions.is_err());
    }

    #[test]
    fn a_closure_sees_every_request() {
        let policy = |request: &Request| match request.operation {
            Operation::Alloc { .. } => Err(RpcError::new(ErrorKind::Refused, "no memory for you")),
            _ => Ok(()),
        };
        let session =
            Session::new(FilteredSession::new(Arc::new(LocalSession::new(Registry::new())), Arc::new(policy)));
        let alloc = session.alloc(rpc_core::Device::cpu(), rpc_core::DataType::F32, &[4]).wait();
        assert_eq!(alloc.unwrap_err().message(), "no memory for you");
    }
}
