//! The contract of [`RpcSession`](rpc_core::RpcSession), clause by clause.
//!
//! Each clause is a function over a [`Harness`](crate::harness::Harness), named after the behaviour
//! that it asks for.

pub mod callbacks;
pub mod copies;
pub mod deadlines;
pub mod ends;
pub mod errors;
pub mod functions;
pub mod handles;
pub mod modules;
pub mod order;
pub mod pipelining;
pub mod pipes;
pub mod tensors;
pub mod threads;
