//! Tests of the protocol on a channel in memory and under virtual time: one binary, since each one
//! takes a second or two to link.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod client_and_server;
mod corpus;
mod fuzz;
mod handshake;
mod hostile;
mod keep_alive;
mod kept_inputs;
mod memory_limits;
mod pair;
mod peak_memory;
mod received_in_place;
mod targets;
mod trace;
mod windows;
