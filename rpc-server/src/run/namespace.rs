//! The namespace of process ids of a program, where the kernel gives one.
//!
//! The reaper is its first process, so that one signal reaches all its processes at once, and the
//! kernel kills them, and lets none be started any more, when the reaper ends. In it `/proc` shows
//! these processes alone, with the ids by which they know each other.

use std::fs::{self, File};
use std::io::{self, Seek as _};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::process::{Pid, Signal, getpid, kill_process_group};

/// File systems in `/proc` that hide nothing of it.
const HARMLESS_MOUNTS: [&str; 1] = ["/proc/sys/fs/binfmt_misc"];

/// Returns true if this process is the reaper of a program with a namespace: no other process of
/// this module is the first one of its namespace.
pub(super) fn is_own() -> bool {
    getpid().is_init()
}

/// View of `/proc`: whether programs can have another one, in a namespace of their own.
pub(super) struct ProcView {
    /// Mounts of this process, which the kernel tells the changes of.
    mountinfo: File,
    is_replaceable: bool,
}

impl ProcView {
    pub(super) fn open() -> io::Result<Self> {
        let mut view = Self { mountinfo: File::open("/proc/self/mountinfo")?, is_replaceable: false };
        view.look()?;
        Ok(view)
    }

    /// Returns true if `/proc` is that of this process's own namespace, from which a reaper learns
    /// its [outer id](outer_pid), and no part of it is hidden, which would be seen in another.
    pub(super) fn is_replaceable(&mut self) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.mountinfo, PollFlags::PRI)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
        if !fds[0].revents().is_empty() {
            self.look()?;
        }
        Ok(self.is_replaceable)
    }

    fn look(&mut self) -> io::Result<()> {
        self.is_replaceable = false;
        self.mountinfo.rewind()?;
        let mountinfo = io::read_to_string(&self.mountinfo)?;
        self.is_replaceable = outer_pid() == Some(getpid()) && !hides_parts_of_proc(&mountinfo);
        Ok(())
    }
}

/// Makes `/proc` show the processes of the namespace that this process is the first one of. The
/// mount is seen by this process and its descendants alone.
///
/// # Errors
///
/// An error of the system.
pub(super) fn mount_proc() -> io::Result<()> {
    // What is mounted outside appears here, too, and can be unmounted there.
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Ok(mount("proc", "/proc", "proc", flags, None)?)
}

/// Returns the id by which the parent of this process knows it, if `/proc` is that of the parent.
pub(super) fn outer_pid() -> Option<Pid> {
    Pid::from_raw(fs::read_link("/proc/self").ok()?.to_str()?.parse().ok()?)
}

/// Kills all processes of the namespace but this one. None of them can fork in between: the kernel
/// fails a fork that a deadly signal has overtaken.
pub(super) fn kill_all() {
    // Elsewhere this would be all processes of the machine.
    if is_own() {
        let _ = kill_process_group(Pid::INIT, Signal::KILL);
    }
}

/// Returns true if parts of `/proc` are hidden, which a new mount would show: by mounts over them,
/// as container engines make, or by its own options.
fn hides_parts_of_proc(mountinfo: &str) -> bool {
    mountinfo.lines().any(|line| {
        let (point, options) = (line.split(' ').nth(4).unwrap_or_default(), line.split(' ').next_back());
        let options = options.unwrap_or_default();
        let is_covered = point.starts_with("/proc/") && !HARMLESS_MOUNTS.contains(&point);
        is_covered || point == "/proc" && (options.contains("hidepid=") || options.contains("subset="))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proc_with_hidden_parts_is_found() {
        let proc = "22 27 0:21 / /proc rw,relatime - proc proc rw\n\
                    36 22 0:33 / /proc/sys/fs/binfmt_misc rw - autofs systemd-1 rw\n\
                    40 27 0:40 / /process rw - tmpfs tmpfs rw\n";
        assert!(!hides_parts_of_proc(proc));
        assert!(hides_parts_of_proc(&format!("{proc}41 22 0:41 /null /proc/kcore rw - tmpfs tmpfs rw\n")));
        assert!(hides_parts_of_proc("22 27 0:21 / /proc rw,relatime - proc proc rw,hidepid=invisible\n"));
        assert!(hides_parts_of_proc("22 27 0:21 / /proc rw,relatime - proc proc rw,subset=pid\n"));
    }

    #[test]
    fn nothing_is_killed_outside_of_a_namespace() {
        assert!(!is_own());
        assert_eq!(outer_pid(), Some(getpid()));
        kill_all();
    }
}
