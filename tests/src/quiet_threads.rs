//! Waiting for all other threads of this process to sleep, for simulations whose virtual clock must
//! not run ahead of them. On Linux.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;
use std::thread;

/// Folder with a folder for each thread of this process.
const TASKS: &str = "/proc/self/task";

thread_local! {
    /// What this thread has opened for its last look at the others.
    static OTHERS: RefCell<BTreeMap<u32, Other>> = const { RefCell::new(BTreeMap::new()) };
}

/// One other thread, by two files of the kernel's.
struct Other {
    /// Its state, among more.
    state: File,
    /// The number of times that it has been given a processor, as the last of three.
    turns: File,
}

/// Waits until all other threads of this process sleep at the same moment: what one of them has
/// woken, or has been asked to do, is done. A thread that sleeps for a time counts as asleep.
///
/// # Panics
///
/// The kernel does not tell of threads in `/proc`.
pub fn wait_until_others_sleep() {
    OTHERS.with_borrow_mut(|others| {
        let mut before = None;
        loop {
            let now = turns_of_sleepers(others);
            // A thread that has had no turn between two looks, and sleeps at both, has slept all
            // the time; and every first look is before every second one.
            if now.is_some() && now == before {
                return;
            }
            if now.is_none() {
                thread::yield_now();
            }
            before = now;
        }
    });
}

/// Returns the number of turns of each other thread if each of them sleeps as it is looked at.
fn turns_of_sleepers(others: &mut BTreeMap<u32, Other>) -> Option<Vec<(u32, u64)>> {
    // Two links of the folder itself, and one for each thread: as many as before are the same ones
    // if none of those has ended, which reading their files tells.
    let threads = fs::metadata(TASKS).expect("the threads of this process").nlink() - 2;
    if threads != others.len() as u64 + 1 && find_others(others).is_err() {
        return None;
    }
    let mut turns = Vec::with_capacity(others.len());
    for (id, other) in &*others {
        match other.turns_if_asleep() {
            Ok(Some(count)) => turns.push((*id, count)),
            Ok(None) => return None,
            Err(_ended) => {
                others.clear();
                return None;
            }
        }
    }
    Some(turns)
}

/// Opens the files of the threads that there are now. Fails if one of them ends meanwhile.
fn find_others(others: &mut BTreeMap<u32, Other>) -> io::Result<()> {
    others.clear();
    let own = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
    for task in fs::read_dir(TASKS)? {
        let task = task?;
        let id = task.file_name().to_str().and_then(|id| id.parse().ok()).expect("the number of a thread");
        if id != own {
            others.insert(id, Other::open(&task.path())?);
        }
    }
    Ok(())
}

impl Other {
    fn open(task: &Path) -> io::Result<Self> {
        Ok(Self { state: File::open(task.join("stat"))?, turns: File::open(task.join("schedstat"))? })
    }

    fn turns_if_asleep(&self) -> io::Result<Option<u64>> {
        let mut buffer = [0; 128];
        let mut read = |file: &File| {
            let len = file.read_at(&mut buffer, 0)?;
            Ok::<_, io::Error>(String::from_utf8_lossy(&buffer[..len]).into_owned())
        };
        // After the name, which is in parentheses.
        if !read(&self.state)?.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('S')) {
            return Ok(None);
        }
        let turns = read(&self.turns)?;
        Ok(Some(turns.split_whitespace().nth(2).and_then(|turns| turns.parse().ok()).expect("three numbers")))
    }
}

/// Returns the number of threads of this process whose names begin so.
///
/// # Panics
///
/// `/proc` cannot be read.
pub fn threads_named(prefix: &str) -> usize {
    let names = fs::read_dir(TASKS).expect("the threads of this process");
    let named = |entry: io::Result<fs::DirEntry>| {
        let name = entry.and_then(|entry| fs::read_to_string(entry.path().join("comm")));
        name.is_ok_and(|name| name.starts_with(prefix))
    };
    names.map(named).filter(|is_named| *is_named).count()
}

/// Returns true in a process in which this test is the only one. Elsewhere it runs the test in such
/// a process, checks that it passes there, and returns false.
///
/// # Panics
///
/// The test fails in its process.
pub fn alone_in_process(test: &str) -> bool {
    const ALONE: &str = "RPC_TESTS_ALONE_IN_PROCESS";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let program = std::env::current_exe().expect("this program");
    let output = Command::new(program).args([test, "--exact", "--nocapture"]).env(ALONE, "1").output();
    let output = output.expect("this program starts again");
    let [said, complained] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    print!("{said}{complained}");
    assert!(output.status.success() && said.contains("1 passed"), "{test}: {}", output.status);
    false
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Threads that hand a token on to each other have handed it to the last one.
    #[test]
    fn waiting_ends_after_the_last_of_a_chain_of_wake_ups() {
        if !alone_in_process("quiet_threads::tests::waiting_ends_after_the_last_of_a_chain_of_wake_ups") {
            return;
        }
        let (first, mut from) = mpsc::channel::<u32>();
        for _ in 0..8 {
            let (to, next) = mpsc::channel();
            thread::spawn(move || from.iter().for_each(|token| to.send(token).expect("the next thread")));
            from = next;
        }
        for token in 0..300 {
            first.send(token).unwrap();
            wait_until_others_sleep();
            assert_eq!(from.try_recv(), Ok(token));
        }
    }
}
