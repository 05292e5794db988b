//! Processes of the ranks of a segment: each has a descriptor that shows its death.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rpc_core::limits::OpenFileLease;

/// The processes of a group's ranks, in their order. Ranks of one process share its descriptor.
/// `None` where the system has no such descriptors, or hides the process (as between containers):
/// then its death shows as silence. The default watches none.
#[derive(Default)]
pub(super) struct WatchedProcesses {
    of_ranks: Vec<Option<Arc<OwnedFd>>>,
    /// Charge for the descriptors.
    _open_files: Option<OpenFileLease>,
}

#[cfg(target_os = "linux")]
mod pidfd {
    use std::collections::HashMap;
    use std::sync::Arc;

    use rpc_core::RpcError;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::WatchedProcesses;
    use crate::open_files::OpenFiles;

    impl WatchedProcesses {
        /// Opens a descriptor for each of these processes but this one.
        ///
        /// # Errors
        ///
        /// The session may open no more.
        pub(in super::super) fn open(of_ranks: &[u32], open_files: &OpenFiles) -> Result<Self, RpcError> {
            let own = std::process::id();
            let mut opened = HashMap::new();
            opened.extend(of_ranks.iter().filter(|id| **id != own).map(|id| (*id, None)));
            let charged = open_files.reserve(opened.len(), "watching the processes of a segment")?;
            for (id, file) in &mut opened {
                let id = i32::try_from(*id).ok().and_then(Pid::from_raw);
                *file = id.and_then(|id| pidfd_open(id, PidfdFlags::empty()).ok()).map(Arc::new);
            }
            let of_ranks = of_ranks.iter().map(|id| opened.get(id).cloned().flatten()).collect();
            Ok(Self { of_ranks, _open_files: charged })
        }

        /// Returns true if the process of a rank has died.
        pub(in super::super) fn is_dead(&self, rank: usize) -> bool {
            let Some(Some(process)) = self.of_ranks.get(rank) else { return false };
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
        }
    }
}

#[cfg(not(target_os = "linux"))]
impl WatchedProcesses {
    /// Returns false: there is no descriptor that shows a death.
    pub(super) fn is_dead(&self, rank: usize) -> bool {
        self.of_ranks.get(rank).is_some_and(Option::is_some)
    }
}
