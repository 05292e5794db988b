//! Collectives on the memory of GPUs, by NVIDIA's NCCL or by AMD's RCCL, which has the same interface.
//!
//! The library is [looked for at run time](Library::load), so that one program serves machines with and without GPUs.

mod config;
mod error;
#[allow(unsafe_code)]
mod library;
mod places;
#[allow(unsafe_code)]
mod symbols;
mod version;

pub use error::{Attempt, LoadError, NcclError};
pub use library::{Flavour, Library, UniqueId};
pub use places::LIBRARY_VARIABLE;
pub use version::Version;
