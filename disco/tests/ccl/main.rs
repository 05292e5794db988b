//! Tests of the collectives: of the host backend on every launch kind, and of NCCL over a stand-in
//! for its library.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod conformance;
mod encryption;
mod faults;
mod launch;
mod nccl;
mod nccl_library;
