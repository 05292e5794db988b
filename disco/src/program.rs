//! Recorded programs: sequences of commands that the workers keep, and run as one.

pub(crate) mod recorder;
