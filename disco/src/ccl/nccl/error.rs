//! Errors of NCCL: a library that cannot be loaded, and calls that fail.

use std::ffi::c_int;
use std::fmt;
use std::path::PathBuf;

use rpc_core::{ErrorKind, RpcError};

use crate::ccl::error::OUT_OF_MEMORY;

/// Failure to load NCCL, with every path that was tried.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub struct LoadError {
    /// Attempts, in their order.
    pub attempts: Vec<Attempt>,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no library of collectives for GPUs: ")?;
        for (number, attempt) in self.attempts.iter().enumerate() {
            write!(f, "{}{attempt}", if number == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

/// One library that could not be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Attempt {
    /// Path of the library, or its name where the system was to look for it.
    pub library: PathBuf,
    /// Error of the system, or the reason why the library is of no use.
    pub reason: String,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The system's message usually begins with the path.
        let library = self.library.to_string_lossy();
        if self.reason.starts_with(&*library) {
            f.write_str(&self.reason)
        } else {
            write!(f, "{library}: {}", self.reason)
        }
    }
}

impl From<LoadError> for RpcError {
    fn from(error: LoadError) -> Self {
        Self::new(ErrorKind::DeviceUnavailable, error.to_string())
    }
}

/// A call that the library refused, or that failed later.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {text} ({code}){}{last_error}", if .last_error.is_empty() { "" } else { ": " })]
#[non_exhaustive]
pub struct NcclError {
    /// The function.
    pub call: &'static str,
    /// Result of the call. Libraries that are newer than this program have codes that it does not
    /// know.
    pub code: c_int,
    /// Name of the code in the library.
    pub text: String,
    /// Details of the error, in the library's words; empty if it says nothing, as some versions do
    /// without `NCCL_DEBUG=WARN`.
    pub last_error: String,
}

impl From<NcclError> for RpcError {
    fn from(error: NcclError) -> Self {
        let kind = match error.code {
            // Any failed call of CUDA within NCCL. A lost device is reported by the device itself.
            code::UNHANDLED_CUDA_ERROR if error.last_error.contains(OUT_OF_MEMORY) => ErrorKind::OutOfMemory,
            code::UNHANDLED_CUDA_ERROR => ErrorKind::Application,
            code::INVALID_ARGUMENT => ErrorKind::InvalidArgument,
            code::INVALID_USAGE => ErrorKind::ApiMisuse,
            code::REMOTE_ERROR => ErrorKind::PeerLost,
            code::TIMEOUT => ErrorKind::DeadlineExceeded,
            code::SYSTEM_ERROR => ErrorKind::Io,
            _ => ErrorKind::Internal,
        };
        Self::new(kind, error.to_string())
    }
}

/// Values of `ncclResult_t` that this crate distinguishes. They are constants and not an `enum`,
/// because a newer library has values that are unknown here.
pub(super) mod code {
    use std::ffi::c_int;

    pub(crate) const SUCCESS: c_int = 0;
    pub(crate) const UNHANDLED_CUDA_ERROR: c_int = 1;
    pub(crate) const SYSTEM_ERROR: c_int = 2;
    pub(crate) const INVALID_ARGUMENT: c_int = 4;
    pub(crate) const INVALID_USAGE: c_int = 5;
    pub(crate) const REMOTE_ERROR: c_int = 6;
    pub(crate) const IN_PROGRESS: c_int = 7;
    pub(crate) const TIMEOUT: c_int = 8;
}
