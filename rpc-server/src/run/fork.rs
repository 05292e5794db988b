//! Copies of this process, without executing a program: the one `unsafe` call of this crate.
//!
//! Only small processes are copied, which have one thread: a copy has only the thread that made it,
//! so that locks of the others would stay held in it for ever.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;

use rustix::io::Errno;
use rustix::process::Pid;

/// Process that the call returns in: it returns twice.
pub(super) enum Side {
    /// The process that was copied, with the id of the copy.
    Original(Pid),
    Copy,
}

/// Copies this process. The copy is its child.
///
/// # Errors
///
/// [`Errno::BUSY`] if this process has several threads, or cannot count them; an error of the
/// system.
pub(super) fn fork() -> io::Result<Side> {
    clone_process(libc::SIGCHLD)
}

/// As [`fork`]. The copy is a child of the parent of this process.
pub(super) fn fork_sibling() -> io::Result<Side> {
    clone_process(libc::CLONE_PARENT | libc::SIGCHLD)
}

/// As [`fork_sibling`]. The copy is the first process of a namespace of process ids, and has a
/// namespace of mounts of its own.
pub(super) fn fork_into_namespace() -> io::Result<Side> {
    clone_process(libc::CLONE_PARENT | libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::SIGCHLD)
}

fn clone_process(flags: libc::c_int) -> io::Result<Side> {
    if thread_count() != Some(1) {
        return Err(Errno::BUSY.into());
    }
    let flags = libc::c_long::from(flags);
    // The order of the first two arguments differs on one architecture.
    let none: libc::c_long = 0;
    let [first, second] = if cfg!(target_arch = "s390x") { [none, flags] } else { [flags, none] };
    // SAFETY: This process has one thread, as checked above, and only a thread starts others: so no
    // lock is held, and no data half written, by a thread that the copy lacks. Without a stack and
    // `CLONE_VM` the copy goes on from here in memory of its own, as after `fork`. The handlers
    // that `fork` would call besides put in order what threads of libc share. The id of the thread
    // that libc has noted is used by it for locks between threads alone.
    let pid = unsafe { libc::syscall(libc::SYS_clone, first, second, none, none, none) };
    match pid {
        0 => Ok(Side::Copy),
        pid => {
            let pid = i32::try_from(pid).ok().filter(|pid| *pid > 0).and_then(Pid::from_raw);
            pid.map(Side::Original).ok_or_else(io::Error::last_os_error)
        }
    }
}

/// Returns the number of threads of this process; `None` if the system does not tell.
fn thread_count() -> Option<u64> {
    // A folder has a link from its parent, one of its own, and one from each folder in it.
    fs::metadata("/proc/self/task").ok()?.nlink().checked_sub(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_threads_is_not_copied() {
        std::thread::scope(|scope| {
            let (sender, receiver) = std::sync::mpsc::channel::<()>();
            scope.spawn(move || receiver.recv());
            assert!(thread_count().unwrap() > 1);
            let error = fork().map(drop).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(Errno::BUSY.raw_os_error()));
            drop(sender);
        });
    }
}
