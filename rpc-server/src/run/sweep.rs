//! Sweeps: looks at all descendants of a reaper, in which they are counted, stopped and killed.
//!
//! Among thousands of processes that run, a reaper gets the processor for some milliseconds in
//! seconds. But the kernel gives each new process a turn at once. So a sweep that takes longer than
//! a moment goes on in a new copy of the reaper, again and again, each in a session of the kernel
//! of its own, by which the kernel may share the processor, too.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read as _, Write as _};
use std::process;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, getpid, setsid};

use super::fork::{Side, fork};
use super::process_tree::{ProcessEntry, for_each_descendant, signal_group};

/// Time after which a sweep goes on in a new copy: less than a turn on the processor.
const TURN: Duration = Duration::from_millis(1);

/// Number of processes that are killed without being stopped before.
const FEW: u32 = 8;

/// Number of looks in which processes are stopped before they are killed.
const STOPPING_LOOKS: u32 = 20;

/// Time that copies have for a sweep. Descendants may have stopped or killed them.
const COPIES_LIMIT: Duration = Duration::from_secs(1);

/// A sweep of the descendants of the process that has begun it.
pub(super) struct Sweep {
    reaper: Pid,
    /// Begin of the turn of this copy; `None` in the reaper itself.
    turn: Option<Instant>,
    /// This copy and those before it, which are descendants of the reaper, too.
    copies: HashSet<Pid>,
}

impl Sweep {
    /// Counts the descendants that have not ended. Above `max` it stops those that it finds.
    pub(super) fn count(max: u32) -> u32 {
        Self::run(|sweep| {
            let (mut count, mut groups) = (0, HashMap::new());
            sweep.look(|process| {
                count += u32::from(!process.is_zombie);
                if count > max && !process.is_stopped {
                    signal_group(process, Signal::STOP, &mut groups);
                }
            });
            count
        })
    }

    /// Kills the descendants that are found. Where they are many, those that run are stopped first:
    /// a process that is killed makes room for another one where a limit holds, and one that is
    /// stopped does not, and starts none.
    pub(super) fn kill() {
        Self::run(|sweep| {
            for _ in 0..STOPPING_LOOKS {
                let (mut live, mut running, mut groups) = (0, 0, HashMap::new());
                sweep.look(|process| {
                    live += u32::from(!process.is_zombie);
                    if live <= FEW {
                        signal_group(process, Signal::KILL, &mut groups);
                    } else if !process.is_zombie && !process.is_stopped {
                        running += 1;
                        signal_group(process, Signal::STOP, &mut groups);
                    }
                });
                if live <= FEW {
                    return 0;
                }
                if running == 0 {
                    break;
                }
            }
            let mut groups = HashMap::new();
            sweep.look(|process| signal_group(process, Signal::KILL, &mut groups));
            0
        });
    }

    /// Runs `work` in copies of this process, or here if the system has none.
    fn run(work: impl Fn(&mut Self) -> u32) -> u32 {
        Self::run_in_copies(&work)
            .unwrap_or_else(|_| work(&mut Self { reaper: getpid(), turn: None, copies: HashSet::new() }))
    }

    fn run_in_copies(work: impl Fn(&mut Self) -> u32) -> io::Result<u32> {
        let reaper = getpid();
        let (mut result, mut writer) = io::pipe()?;
        if let Side::Copy = fork()? {
            let _ = setsid();
            let copies = HashSet::from([getpid()]);
            let result = work(&mut Self { reaper, turn: Some(Instant::now()), copies });
            let _ = writer.write_all(&result.to_ne_bytes());
            process::exit(0);
        }
        drop(writer);
        let timeout = Timespec::try_from(COPIES_LIMIT).ok();
        let mut fds = [PollFd::new(&result, PollFlags::IN)];
        if poll(&mut fds, timeout.as_ref())? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut number = [0; 4];
        result.read_exact(&mut number)?;
        Ok(u32::from_ne_bytes(number))
    }

    fn look(&mut self, mut on_found: impl FnMut(&ProcessEntry)) {
        for_each_descendant(
            self.reaper,
            |_| true,
            |process| {
                if !self.copies.contains(&process.pid) {
                    on_found(process);
                    self.go_on_in_copy();
                }
            },
        );
    }

    /// Goes on in a new copy if the turn is over. The process that has been copied exits.
    fn go_on_in_copy(&mut self) {
        if self.turn.is_some_and(|began| began.elapsed() > TURN) {
            match fork() {
                Ok(Side::Original(_)) => process::exit(0),
                Ok(Side::Copy) => {
                    let _ = setsid();
                    self.copies.insert(getpid());
                }
                // The system is out of processes.
                Err(_) => {}
            }
            self.turn = Some(Instant::now());
        }
    }
}
