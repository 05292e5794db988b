//! Descriptors that a node opens for its controller: sockets, memory files and pipes, charged to
//! the session that the node belongs to.

use std::fmt;

use rpc_core::limits::OpenFileLease;
use rpc_core::{Context, Result};

/// Session that descriptors are charged to. The default is none: then they are not counted.
#[derive(Clone, Default)]
pub(crate) struct OpenFiles(Option<Context>);

impl OpenFiles {
    /// Returns the account of a session.
    pub(crate) fn of(context: &Context) -> Self {
        Self(Some(context.detached()))
    }

    /// Charges `count` descriptors before they are opened. The charge ends when the lease is
    /// dropped. `purpose` names them in the error.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`](rpc_core::ErrorKind::LimitExceeded): the session may open no
    /// more.
    pub(crate) fn reserve(&self, count: usize, purpose: impl fmt::Display) -> Result<Option<OpenFileLease>> {
        let reserve = |context: &Context| context.reserve_open_files(count as u64);
        self.0.as_ref().map(reserve).transpose().map_err(|error| {
            error.context(format_args!(
                "no descriptors for {purpose}; the operator of the node sets their number (--max-open-files, \
                 --max-total-open-files)"
            ))
        })
    }

    /// As [`reserve`](Self::reserve), with a lease for each descriptor. There are none without a
    /// session.
    pub(crate) fn reserve_each(&self, count: usize, purpose: impl fmt::Display) -> Result<Vec<OpenFileLease>> {
        let leases = (0..count).map(|_| self.reserve(1, &purpose));
        leases.filter_map(Result::transpose).collect()
    }
}

impl fmt::Debug for OpenFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OpenFiles")
    }
}
