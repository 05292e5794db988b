//! Limits of a session process on files, memory and processor time, which the system enforces.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::config::{ByteSize, ServeConfig};

/// Sets the limits of this process. Processes that it starts inherit them.
pub(super) fn set(config: &ServeConfig) -> io::Result<()> {
    // The data segment and not the address space, most of which is reserved and never used, above
    // all by device drivers.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    const MEMORY: Resource = Resource::Data;
    // Other systems count only a small part of the data in the data segment.
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    const MEMORY: Resource = Resource::As;

    lower(Resource::Nofile, config.isolate_files, config.isolate_files)?;
    if config.isolate_memory != ByteSize::UNLIMITED {
        lower(MEMORY, config.isolate_memory.0, config.isolate_memory.0)?;
    }
    if let Some(limit) = config.isolate_cpu_time {
        let seconds = limit.0.as_millis().div_ceil(1000).max(1).try_into().unwrap_or(u64::MAX);
        // The soft limit sends SIGXCPU, which names the cause; the hard limit sends SIGKILL, which
        // cannot be ignored.
        lower(Resource::Cpu, seconds, seconds.saturating_add(1))?;
    }
    Ok(())
}

fn lower(resource: Resource, current: u64, maximum: u64) -> io::Result<()> {
    let most = getrlimit(resource).maximum.unwrap_or(u64::MAX);
    let limit = Rlimit { current: Some(current.min(most)), maximum: Some(maximum.min(most)) };
    Ok(setrlimit(resource, limit)?)
}
