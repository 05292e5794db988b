//! Skeleton.

pub mod npy;
pub mod workspace;
