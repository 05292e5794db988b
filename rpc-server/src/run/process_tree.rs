//! Processes and their descendants, as `/proc` shows them.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::Read as _;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, PidfdFlags, Signal, getpgrp, kill_process, kill_process_group, pidfd_open, pidfd_send_signal,
};

/// A process at the time of a look at `/proc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ProcessEntry {
    pub(super) pid: Pid,
    parent: i32,
    /// Process group.
    group: i32,
    /// Session of the kernel, not of ours.
    pub(super) session: i32,
    /// Time of the start, which tells two processes with one id apart.
    start_time: u64,
    /// True once the process has ended, until it is reaped.
    pub(super) is_zombie: bool,
    /// True if a signal or a debugger has stopped the process.
    pub(super) is_stopped: bool,
    /// Time of the look.
    seen: Instant,
}

/// Time after a look in which the id of a process is not given to another one.
const FRESH: Duration = Duration::from_millis(1);

impl ProcessEntry {
    /// Reads the entry of a process; `None` once it has been reaped.
    pub(super) fn read(pid: Pid) -> Option<Self> {
        // Longer than the text can be: a name of 64 bytes and 50 numbers. One call reads it.
        let mut text = [0; 2048];
        let seen = Instant::now();
        let mut file = File::open(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
        let len = file.read(&mut text).ok()?;
        Self::parse(pid, &String::from_utf8_lossy(&text[..len]), seen)
    }

    /// Parses the text of `/proc/PID/stat`, see `proc_pid_stat(5)`.
    fn parse(pid: Pid, stat: &str, seen: Instant) -> Option<Self> {
        // The name is in parentheses, and may contain any character.
        let (_, fields) = stat.rsplit_once(") ")?;
        let fields: Vec<_> = fields.split(' ').take(20).collect();
        let field = |number: usize| fields.get(number).copied();
        Some(Self {
            pid,
            is_zombie: matches!(field(0)?, "Z" | "X"),
            is_stopped: matches!(field(0)?, "T" | "t"),
            parent: field(1)?.parse().ok()?,
            group: field(2)?.parse().ok()?,
            session: field(3)?.parse().ok()?,
            start_time: field(19)?.parse().ok()?,
            seen,
        })
    }

    /// Returns true until the process has been reaped.
    pub(super) fn is_there(&self) -> bool {
        Self::read(self.pid).is_some_and(|now| now.start_time == self.start_time)
    }

    /// Kills the process, if it is still the one that was seen.
    pub(super) fn kill(&self) {
        self.signal(Signal::KILL);
    }

    /// Sends a signal to the process, if it is still the one that was seen.
    fn signal(&self, signal: Signal) {
        // The descriptor stays with one process, while the id may pass to another one.
        let Ok(descriptor) = pidfd_open(self.pid, PidfdFlags::empty()) else { return };
        if self.is_there() {
            // A process of another user (setuid) is left to its own end.
            let _ = pidfd_send_signal(&descriptor, signal);
        }
    }
}

/// Returns the children of `parent`, and their children in turn, with the zombies among them. The
/// children that `is_searched` declines are left out with theirs.
pub(super) fn descendants(parent: Pid, is_searched: impl Fn(&ProcessEntry) -> bool) -> Vec<ProcessEntry> {
    let mut found = Vec::new();
    for_each_descendant(parent, is_searched, |process| found.push(*process));
    found
}

/// As [`descendants`], and calls `on_found` with each process as soon as it is found, which for
/// most is right after they have been looked at. With a process come all of its session of the
/// kernel, unless that is the session of `parent`: only descendants are in it, and one of them may
/// have lost its parent during the look.
pub(super) fn for_each_descendant(
    parent: Pid,
    is_searched: impl Fn(&ProcessEntry) -> bool,
    mut on_found: impl FnMut(&ProcessEntry),
) {
    let parent = parent.as_raw_nonzero().get();
    let own_session = Pid::from_raw(parent).and_then(ProcessEntry::read).map(|entry| entry.session);
    let (mut found, mut sessions) = (HashSet::from([parent]), HashSet::new());
    let mut take_if_found = |process: &ProcessEntry| {
        let id = process.pid.as_raw_nonzero().get();
        let is_child = process.parent == parent && is_searched(process);
        let is_other = process.parent != parent && found.contains(&process.parent);
        let is_found = id != parent && (is_child || is_other || sessions.contains(&process.session));
        if is_found {
            found.insert(id);
            sessions.extend(Some(process.session).filter(|session| own_session != Some(*session)));
            on_found(process);
        }
        is_found
    };
    let Ok(folder) = fs::read_dir("/proc") else { return };
    let mut others = Vec::new();
    for entry in folder.flatten() {
        let pid = entry.file_name().to_str().and_then(|name| Pid::from_raw(name.parse().ok()?));
        if let Some(process) = pid.and_then(ProcessEntry::read)
            && !take_if_found(&process)
        {
            others.push(process);
        }
    }
    // Those that come before their parents, as ids start again from the lowest.
    let mut before = usize::MAX;
    while others.len() < before {
        before = others.len();
        others.retain(|process| !take_if_found(process));
    }
}

/// Process groups whose processes are signalled in a look.
#[derive(Default)]
pub(super) struct SignalledGroups {
    /// Number of processes of each group that have been found.
    found: HashMap<i32, u32>,
}

impl SignalledGroups {
    /// Sends a signal to a process that has just been found, and if it is the second one of its
    /// group, to the whole group at once, so that none of the group forks before the signal comes
    /// to it.
    pub(super) fn signal(&mut self, process: &ProcessEntry, signal: Signal) {
        if process.is_zombie {
            return;
        }
        // Its id is not that of another process after so short a time: all others would have to be
        // given out before. A check takes longer than the signal, and many may wait for theirs.
        let is_fresh = process.seen.elapsed() < FRESH;
        if is_fresh {
            let _ = kill_process(process.pid, signal);
        } else {
            process.signal(signal);
        }
        let count = self.found.entry(process.group).or_default();
        *count += 1;
        if *count == 2
            && process.group > 1
            && process.group != getpgrp().as_raw_nonzero().get()
            && (is_fresh || process.is_there())
            && let Some(group) = Pid::from_raw(process.group)
        {
            let _ = kill_process_group(group, signal);
        }
    }
}

/// Returns the id that the system gave to the newest process.
pub(super) fn newest_pid() -> Option<u32> {
    fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().last()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};
    use std::thread;

    use rustix::process::getpid;

    use super::*;

    #[test]
    fn a_name_does_not_forge_the_fields() {
        let stat = "7 (a) Z 1 (b) S 3 7 5 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 99 100 200";
        let entry = ProcessEntry::parse(getpid(), stat, Instant::now()).unwrap();
        assert_eq!((entry.parent, entry.group, entry.session, entry.start_time), (3, 7, 5, 99));
        assert!(!entry.is_zombie);
        for broken in ["", "7 (a)", "7 (a) S 3 7"] {
            assert_eq!(ProcessEntry::parse(getpid(), broken, Instant::now()), None, "{broken}");
        }
    }

    /// Waits until the descendants by the child `child` are as `are_so` says.
    fn wait_for(child: Pid, are_so: impl Fn(&[ProcessEntry]) -> bool) -> Vec<ProcessEntry> {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let found = descendants(getpid(), |process| process.pid == child);
            if are_so(&found) {
                return found;
            }
            assert!(Instant::now() < deadline, "{found:?}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn start(script: &str) -> (Child, Pid) {
        let child = Command::new("sh").args(["-c", script]).stdout(Stdio::null()).spawn().unwrap();
        let pid = Pid::from_child(&child);
        (child, pid)
    }

    #[test]
    fn descendants_are_found_and_killed() {
        let (mut child, pid) = start("sleep 100 & wait");
        let found = wait_for(pid, |found| found.len() == 2);
        assert!(newest_pid().is_some());
        found.iter().for_each(ProcessEntry::kill);
        child.wait().unwrap();
        assert!(descendants(getpid(), |process| process.pid == pid).is_empty());
    }

    /// A process of the session has lost its parent to one that is no descendant.
    #[test]
    fn a_process_is_found_by_its_session_and_ended_with_its_group() {
        let (mut child, pid) = start("setsid sh -c '(sleep 100 & :); exec sleep 100' & wait");
        let is_orphan = |found: &[ProcessEntry], process: &ProcessEntry| {
            process.pid != pid && !found.iter().any(|other| other.pid.as_raw_nonzero().get() == process.parent)
        };
        let found = wait_for(pid, |found| found.len() == 3 && found.iter().any(|process| is_orphan(found, process)));
        let (first, others) = found.split_first().unwrap();
        assert!(first.pid == pid && others[0].session != first.session && others[1].session == others[0].session);
        // Two of them stand for the group.
        let signal = |signal| {
            let mut groups = SignalledGroups::default();
            others.iter().for_each(|process| groups.signal(process, signal));
        };
        signal(Signal::STOP);
        wait_for(pid, |found| found.len() == 3 && found[1..].iter().all(|process| process.is_stopped));
        signal(Signal::KILL);
        child.wait().unwrap();
    }
}
