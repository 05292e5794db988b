//! Processes and their descendants, as `/proc` shows them.

use std::collections::HashMap;
use std::fs;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// A process at the time of a look at `/proc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ProcessEntry {
    pub(super) pid: Pid,
    parent: i32,
    /// Session of the kernel, not of ours.
    pub(super) session: i32,
    /// Time of the start, which tells two processes with one id apart.
    start_time: u64,
    /// True once the process has ended, until it is reaped.
    pub(super) is_zombie: bool,
    /// True if a signal or a debugger has stopped the process.
    pub(super) is_stopped: bool,
}

impl ProcessEntry {
    /// Reads the entry of a process; `None` once it has been reaped.
    pub(super) fn read(pid: Pid) -> Option<Self> {
        Self::parse(pid, &fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?)
    }

    /// Parses the text of `/proc/PID/stat`, see `proc_pid_stat(5)`.
    fn parse(pid: Pid, stat: &str) -> Option<Self> {
        // The name is in parentheses, and may contain any character.
        let (_, fields) = stat.rsplit_once(") ")?;
        let fields: Vec<_> = fields.split(' ').collect();
        let field = |number: usize| fields.get(number).copied();
        Some(Self {
            pid,
            is_zombie: matches!(field(0)?, "Z" | "X"),
            is_stopped: matches!(field(0)?, "T" | "t"),
            parent: field(1)?.parse().ok()?,
            session: field(3)?.parse().ok()?,
            start_time: field(19)?.parse().ok()?,
        })
    }

    /// Returns true until the process has been reaped.
    pub(super) fn is_there(&self) -> bool {
        Self::read(self.pid).is_some_and(|now| now.start_time == self.start_time)
    }

    /// Kills the process, if it is still the one that was seen.
    pub(super) fn kill(&self) {
        // The descriptor stays with one process, while the id may pass to another one.
        let Ok(descriptor) = pidfd_open(self.pid, PidfdFlags::empty()) else { return };
        if self.is_there() {
            // A process of another user (setuid) is left to its own end.
            let _ = pidfd_send_signal(&descriptor, Signal::KILL);
        }
    }
}

/// Returns the children of `parent`, and their children in turn, with the zombies among them. The
/// children that `is_searched` declines are left out with theirs.
pub(super) fn descendants(parent: Pid, is_searched: impl Fn(&ProcessEntry) -> bool) -> Vec<ProcessEntry> {
    let mut by_parent: HashMap<i32, Vec<ProcessEntry>> = HashMap::new();
    let Ok(folder) = fs::read_dir("/proc") else { return Vec::new() };
    for entry in folder.flatten() {
        let pid = entry.file_name().to_str().and_then(|name| Pid::from_raw(name.parse().ok()?));
        if let Some(process) = pid.and_then(ProcessEntry::read) {
            by_parent.entry(process.parent).or_default().push(process);
        }
    }
    let mut found = by_parent.remove(&parent.as_raw_nonzero().get()).unwrap_or_default();
    found.retain(is_searched);
    let mut next = 0;
    while let Some(process) = found.get(next) {
        let children = by_parent.remove(&process.pid.as_raw_nonzero().get());
        found.extend(children.unwrap_or_default());
        next += 1;
    }
    found
}

/// Returns the id that the system gave to the newest process.
pub(super) fn newest_pid() -> Option<u32> {
    fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().last()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use rustix::process::getpid;

    use super::*;

    #[test]
    fn a_name_does_not_forge_the_fields() {
        let stat = "7 (a) Z 1 (b) S 3 7 5 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 99 100 200";
        let entry = ProcessEntry::parse(getpid(), stat).unwrap();
        assert_eq!((entry.parent, entry.session, entry.start_time, entry.is_zombie), (3, 5, 99, false));
        for broken in ["", "7 (a)", "7 (a) S 3 7"] {
            assert_eq!(ProcessEntry::parse(getpid(), broken), None, "{broken}");
        }
    }

    #[test]
    fn descendants_are_found_and_killed() {
        let mut child = Command::new("sh").args(["-c", "sleep 100 & wait"]).stdout(Stdio::null()).spawn().unwrap();
        let pid = Pid::from_child(&child);
        let is_child = |process: &ProcessEntry| process.pid == pid;
        let found = loop {
            let found = descendants(getpid(), is_child);
            if found.len() == 2 {
                break found;
            }
            std::thread::yield_now();
        };
        assert!(newest_pid().is_some());
        found.iter().for_each(ProcessEntry::kill);
        child.wait().unwrap();
        assert!(descendants(getpid(), is_child).is_empty());
    }
}
