//! Descriptors that a node opens for its controller: sockets, memory files and pipes, charged to
//! the session that the node belongs to.

use std::fmt;

use rpc_core::limits::OpenFileLease;
use rpc_core::{Context, ErrorKind, Result, RpcError};

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

/// Checks that this process may open a socket for each of `count` peers.
///
/// # Errors
///
/// [`ErrorKind::LimitExceeded`]: the limit of the system is lower.
pub(crate) fn check_file_limit(count: usize, peers: &str) -> Result<()> {
    check_against(file_limit(), count, peers)
}

fn check_against(limit: Option<u64>, count: usize, peers: &str) -> Result<()> {
    match limit {
        // One for each is what it takes at the least.
        Some(limit) if count as u64 >= limit => {
            let text = format!(
                "{count} {peers} take as many sockets, and this process may have {limit} open files: raise the limit \
                 (ulimit -n, LimitNOFILE), or let nodes open others (SocketSession::fan_out)"
            );
            Err(RpcError::new(ErrorKind::LimitExceeded, text))
        }
        _ => Ok(()),
    }
}

#[cfg(unix)]
fn file_limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current
}

#[cfg(not(unix))]
fn file_limit() -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_nodes_than_open_files_are_refused_with_what_to_raise() {
        let error = check_against(Some(1024), 1024, "nodes").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LimitExceeded);
        assert!(
            error.message().contains("this process may have 1024 open files: raise the limit (ulimit -n"),
            "{error}"
        );
        check_against(Some(1024), 1023, "nodes").unwrap();
        check_against(None, usize::MAX, "nodes").unwrap();
    }
}
