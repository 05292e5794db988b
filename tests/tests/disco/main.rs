//! Tests of Disco sessions over every kind of launch.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod digits;
mod model;
mod operations;
mod replacements;
mod reshard;
mod weights;
