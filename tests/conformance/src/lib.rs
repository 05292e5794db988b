//! The contract of a session as tests: order, pipelining, deadlines, errors, copies, handles,
//! callbacks, ends. Each clause is checked in the asynchronous and in the blocking form, over a
//! [`Fixture`](fixture::Fixture): one way to get sessions.
//!
//! The author of a transport, a server or a wrapper of sessions runs the suite over it. Of a
//! transport a [`Link`](fixture::Link) is enough: the fixture [`Remote`](fixture::Remote) starts
//! the servers. Anything else implements [`Fixture`](fixture::Fixture) around a server of
//! [`functions::registry`].
//!
//! # Examples
//!
//! A file in `tests/` of your crate, whole:
//!
//! ```
//! use rpc_conformance::conformance;
//! use rpc_conformance::fixture::{Link, Remote};
//!
//! /// An address that any number of servers can listen on at once, as with port 0.
//! fn mine() -> Link {
//!     Link::at("tcp://127.0.0.1:0")
//! }
//!
//! conformance!(direct = Remote::direct(mine()));
//! conformance!(behind_two_hops = Remote::through(2, mine()));
//! conformance!(behind_another_transport = Remote::along([Link::tls(), mine(), Link::unix()]));
//! # fn main() {}
//! ```
//!
//! Read first [`fixture`] (where a session comes from), then [`harness`] (the tools of a clause)
//! and [`functions`] (what the origin serves).

// A helper that panics has found what it was looking for.
#![allow(clippy::unwrap_used)]

pub mod clauses;
pub mod fixture;
pub mod functions;
pub mod harness;
mod suite;
pub mod threads;
