//! Rights of clients: the policy file (`--policy`), and what it lets each client do.
//!
//! ```text
//! policy file ─ parse ─> Policy ─ rules for an identity ─> Rights, the AccessControl of a session
//!                          │                                  │
//!              PolicySource, read again at SIGHUP    passed on to session processes and workers
//! ```
//!
//! # What holds
//!
//! 1. **Denied by default.** With a policy, a client may do what a rule for its identity says, and
//!    one without a rule gets no session. All rules for an identity add up.
//! 2. **The settings of the server are the ceiling.** They are checked beside the policy, where
//!    they always are: a rule gives nothing that they do not.
//! 3. **Identities are told apart by their proof.** A rule for `token:alice` is none for
//!    `cert:alice`.
//! 4. **One object decides.** Sessions, functions such as `rpc.run.start`, and the server's
//!    forwarding ask the [`AccessControl`](rpc_core::AccessControl) of the session. It is resolved
//!    when the session begins and stays the same to its end, in the processes of isolated sessions
//!    and of Disco's workers, too.

mod answer;
mod ceiling;
mod document;
mod identity_pattern;
mod rights;
mod rule;
mod source;

pub use answer::Answer;
pub(crate) use answer::{answer, check};
pub(crate) use ceiling::Ceiling;
pub use document::{Policy, PolicyError};
pub use rights::restore;
pub(crate) use rights::{ClientIdentity, PassedRights, rights_in, rights_of, session_limits_within};
pub(crate) use source::PolicySource;
