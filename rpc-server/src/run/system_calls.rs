//! Calls of the system that no library makes safe: the `unsafe` code of this crate.
//!
//! Copies of this process are made without executing a program. Only small processes are copied,
//! which have one thread: a copy has only the thread that made it, so that locks of the others
//! would stay held in it for ever.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;

use rustix::io::Errno;

/// Process that the call returns in: it returns twice.
pub(super) enum Side {
    /// The process that was copied.
    Original,
    Copy,
}

/// Copies this process. The copy is a child of the parent of this process.
///
/// # Errors
///
/// [`Errno::BUSY`] if this process has several threads, or cannot count them; an error of the
/// system.
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
        1.. => Ok(Side::Original),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets the priority (`nice`) of the calling thread. The processes that it starts have the ordinary
/// one, zero.
///
/// # Errors
///
/// The thread is scheduled by another policy than the ordinary one, which the processes inherit;
/// the user may not raise the priority; the kernel does not know the call.
pub(super) fn set_priority_of_this_process_alone(priority: i32) -> io::Result<()> {
    // SAFETY: The call takes a number alone.
    let policy = unsafe { libc::syscall(libc::SYS_sched_getscheduler, 0) };
    if policy != libc::c_long::from(libc::SCHED_OTHER) {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let attributes = libc::sched_attr {
        size: size_of::<libc::sched_attr>() as u32,
        sched_policy: libc::SCHED_OTHER as u32,
        sched_flags: libc::SCHED_FLAG_RESET_ON_FORK as u64,
        sched_nice: priority,
        sched_priority: 0,
        sched_runtime: 0,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: The kernel reads as many bytes as `size` says, which are those of the value.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Ends this process without what libraries do at the exit of a program: in a copy, that is to
/// touch memory that is about to go.
pub(super) fn exit_at_once(code: u8) -> ! {
    // SAFETY: The call does not come back, and touches no memory.
    unsafe { libc::_exit(code.into()) }
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
            let error = fork_sibling().map(drop).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(Errno::BUSY.raw_os_error()));
            drop(sender);
        });
    }
}
