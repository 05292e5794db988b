//! Decisions of a retrying session that need no I/O: the policy, and the budget.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rpc_core::{ErrorKind, Fault, Operation, RpcError};

use crate::address::glob;
use crate::backoff::Backoff;

/// Terms on which a [`RetrySession`](super::RetrySession) repeats requests.
#[derive(Clone, Debug)]
pub struct RetryPolicy {
    attempts: u32,
    first_pause: Duration,
    longest_pause: Duration,
    budget: RetryBudget,
    idempotent: Vec<String>,
}

impl Default for RetryPolicy {
    /// Returns a policy of four attempts, with pauses of up to 100 ms, 200 ms and 400 ms, a budget
    /// of its own, and no function that may run twice.
    fn default() -> Self {
        Self {
            attempts: 4,
            first_pause: Duration::from_millis(100),
            longest_pause: Duration::from_secs(5),
            budget: RetryBudget::default(),
            idempotent: Vec::new(),
        }
    }
}

impl RetryPolicy {
    /// Sets the largest number of attempts of one request, the first one included. Default: 4.
    #[must_use]
    pub fn attempts(mut self, attempts: u32) -> Self {
        self.attempts = attempts;
        self
    }

    /// Sets the pause before the second attempt, and the longest one. Each is up to twice as long
    /// as the one before, and shortened by a random part, up to a half. Default: 100 ms, 5 s.
    #[must_use]
    pub fn pauses(mut self, first: Duration, longest: Duration) -> Self {
        (self.first_pause, self.longest_pause) = (first, longest);
        self
    }

    /// Sets the budget, which several sessions may share.
    #[must_use]
    pub fn budget(mut self, budget: RetryBudget) -> Self {
        self.budget = budget;
        self
    }

    /// Declares functions idempotent, by names in which `*` stands for any text: a call that may
    /// have run is repeated, too. The names are those by which functions are looked up in the
    /// session; functions of modules and those that others return have none.
    #[must_use]
    pub fn idempotent<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.idempotent.extend(names.into_iter().map(Into::into));
        self
    }

    pub(super) fn backoff(&self) -> Backoff {
        Backoff::new(self.first_pause, self.longest_pause)
    }

    /// Records the success of an attempt.
    pub(super) fn succeeded(&self) {
        self.budget.succeeded();
    }

    /// Returns true if a request is to be made once more after `error`, and records the failure if
    /// it is one that passes. `attempts` have been made, `function` is the name of a called
    /// function, and `can_reopen` is true if a lost session can be replaced.
    pub(super) fn permits(
        &self,
        attempts: u32,
        operation: &Operation,
        function: Option<&str>,
        can_reopen: bool,
        error: &RpcError,
    ) -> bool {
        let lost = is_lost(error);
        if !(error.kind() == ErrorKind::Busy || lost && can_reopen) {
            return false;
        }
        let may_repeat = !error.request_may_have_run() || self.is_idempotent(operation, function);
        let has_budget = self.budget.failed();
        may_repeat && attempts < self.attempts && has_budget
    }

    fn is_idempotent(&self, operation: &Operation, function: Option<&str>) -> bool {
        match operation {
            Operation::GetFunction { .. }
            | Operation::ModuleFunction { .. }
            | Operation::Attribute { .. }
            | Operation::Read { .. }
            | Operation::Alloc { .. }
            | Operation::CreateStream { .. } => true,
            Operation::Call { .. } => {
                function.is_some_and(|name| self.idempotent.iter().any(|pattern| glob(pattern, name)))
            }
            _ => false,
        }
    }
}

/// Returns true for the kinds of error with which requests of a lost session end; another session
/// may serve them.
pub(super) fn is_lost(error: &RpcError) -> bool {
    error.fault() == Fault::Link || matches!(error.kind(), ErrorKind::Closed | ErrorKind::SessionTimeout)
}

/// A bucket of tokens that bounds retries while a server fails: each failure that passes takes a
/// token, and each success puts a part of one back. While the bucket is not more than half full,
/// nothing is repeated.
///
/// So a server that is overloaded or gone is not given several times its load, whatever the number
/// of requests. Clones are the same bucket. It has no clock.
#[derive(Clone)]
pub struct RetryBudget(Arc<Mutex<Bucket>>);

struct Bucket {
    tokens: f64,
    capacity: f64,
    per_success: f64,
}

impl Default for RetryBudget {
    /// Returns a bucket of 20 tokens, of which ten failures in a row take half, and ten successes
    /// bring one back.
    fn default() -> Self {
        Self::new(20, 0.1)
    }
}

impl RetryBudget {
    /// Creates a full bucket of `tokens`, to which each success returns `per_success`.
    pub fn new(tokens: u32, per_success: f64) -> Self {
        let capacity = f64::from(tokens);
        let per_success = if per_success.is_finite() { per_success.max(0.0) } else { 0.0 };
        Self(Arc::new(Mutex::new(Bucket { tokens: capacity, capacity, per_success })))
    }

    fn succeeded(&self) {
        let mut bucket = self.0.lock();
        bucket.tokens = (bucket.tokens + bucket.per_success).min(bucket.capacity);
    }

    /// Takes a token. Returns true if a retry is within the budget.
    fn failed(&self) -> bool {
        let mut bucket = self.0.lock();
        bucket.tokens = (bucket.tokens - 1.0).max(0.0);
        bucket.tokens > bucket.capacity / 2.0
    }
}

impl fmt::Debug for RetryBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bucket = self.0.lock();
        write!(f, "RetryBudget({} of {} tokens)", bucket.tokens, bucket.capacity)
    }
}

#[cfg(test)]
mod tests {
    use rpc_core::Handle;

    use super::*;

    fn call() -> Operation {
        Operation::Call { function: Handle::from_bits(1), args: Vec::new() }
    }

    fn error(kind: ErrorKind, may_have_run: bool) -> RpcError {
        RpcError::new(kind, "test").may_have_run(may_have_run)
    }

    #[test]
    fn only_what_passes_is_repeated_and_only_what_may_run_twice() {
        let policy = RetryPolicy::default().budget(RetryBudget::new(1000, 0.0)).idempotent(["sum.*", "get"]);
        let permits = |function, kind, ran| policy.permits(1, &call(), Some(function), true, &error(kind, ran));
        for kind in
            [ErrorKind::PeerLost, ErrorKind::PeerSilent, ErrorKind::Draining, ErrorKind::Closed, ErrorKind::Busy]
        {
            assert!(permits("put", kind, false), "{kind}");
            assert!(!permits("put", kind, true), "{kind}");
            assert!(permits("get", kind, true) && permits("sum.all", kind, true), "{kind}");
        }
        for kind in [
            ErrorKind::Application,
            ErrorKind::Cancelled,
            ErrorKind::DeadlineExceeded,
            ErrorKind::NotFound,
            ErrorKind::Refused,
            ErrorKind::LimitExceeded,
            ErrorKind::Internal,
            ErrorKind::Unknown(999),
        ] {
            assert!(!permits("get", kind, false), "{kind}");
        }
        // A function without a name is not among the declared ones.
        assert!(!policy.permits(1, &call(), None, true, &error(ErrorKind::PeerLost, true)));
        // Objects that a lookup may have made went with their session.
        let lookup = Operation::GetFunction { name: "put".into() };
        assert!(policy.permits(1, &lookup, None, true, &error(ErrorKind::PeerLost, true)));
        let write = Operation::LoadModule { path: "put".into(), loader: None };
        assert!(!policy.permits(1, &write, None, true, &error(ErrorKind::PeerLost, true)));
        // A session that cannot be replaced stays lost.
        assert!(!policy.permits(1, &call(), Some("get"), false, &error(ErrorKind::PeerLost, false)));
        assert!(policy.permits(1, &call(), Some("get"), false, &error(ErrorKind::Busy, false)));
        assert!(policy.permits(3, &call(), Some("get"), true, &error(ErrorKind::Busy, false)));
        assert!(!policy.permits(4, &call(), Some("get"), true, &error(ErrorKind::Busy, false)));
    }

    #[test]
    fn a_bucket_that_is_half_empty_stops_repetition_until_successes_fill_it() {
        let budget = RetryBudget::new(4, 0.5);
        let policy = RetryPolicy::default().budget(budget.clone());
        let fails = || policy.permits(1, &call(), None, true, &error(ErrorKind::Busy, false));
        assert!(fails());
        assert!(!fails() && !fails() && !fails() && !fails());
        for _ in 0..6 {
            policy.succeeded();
        }
        // Three of four tokens are there, and the failure takes one of them.
        assert!(!fails());
        for _ in 0..100 {
            policy.succeeded();
        }
        assert_eq!(format!("{budget:?}"), "RetryBudget(4 of 4 tokens)");
        assert!(fails());
        // What does not pass costs nothing.
        for _ in 0..10 {
            assert!(!policy.permits(1, &call(), None, true, &error(ErrorKind::NotFound, false)));
        }
        assert_eq!(format!("{budget:?}"), "RetryBudget(3 of 4 tokens)");
    }
}
