//! Threads of this process: proof that all of them but one wait, by what Linux says of them.
//!
//! For tests of peers that read nothing, and for virtual clocks that must not run ahead of threads;
//! in a process without other tests ([`alone_in_process`]).

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// Time limit for the others to come to rest.
const LIMIT: Duration = Duration::from_secs(60);

/// Folder with a folder for each thread of this process.
const TASKS: &str = "/proc/self/task";

thread_local! {
    /// Files that this thread has opened for its last look at the others, by their numbers.
    static OTHERS: RefCell<BTreeMap<u32, OtherThread>> = const { RefCell::new(BTreeMap::new()) };
}

/// Another thread, by two files of the kernel's.
struct OtherThread {
    /// Its state, among more.
    state: File,
    /// The number of times that it has been given a processor, as the last of three.
    turns: File,
}

/// Returns true if there is a moment, during this call, at which every other thread of the process
/// waits. What they do then continues only when this thread, a timer or another process does
/// something.
///
/// # Panics
///
/// The kernel does not tell of threads in `/proc`, or does not count their turns.
pub fn all_others_wait() -> bool {
    OTHERS.with_borrow_mut(|others| {
        // A thread that waits at both looks, and has had no turn in between, has waited all the
        // time; and every first look is before every second one.
        let first = turns_of_waiting(others);
        first.is_some() && first == turns_of_waiting(others)
    })
}

/// Waits for a moment at which every other thread of the process waits.
///
/// # Panics
///
/// There is none within a minute; and as [`all_others_wait`].
pub fn wait_for_rest() {
    let mut began = None;
    while !all_others_wait() {
        let began = *began.get_or_insert_with(Instant::now);
        assert!(began.elapsed() < LIMIT, "other threads of the process are at work for ever");
        thread::yield_now();
    }
}

/// Returns the number of turns of each other thread, if each of them waits as it is looked at.
fn turns_of_waiting(others: &mut BTreeMap<u32, OtherThread>) -> Option<Vec<(u32, u64)>> {
    // Two links of the folder itself, and one for each thread: as many as before are the same ones
    // if none of those has ended, which reading their files tells.
    let threads = fs::metadata(TASKS).expect("the threads of this process").nlink() - 2;
    if threads != others.len() as u64 + 1 && find_others(others).is_err() {
        return None;
    }
    let mut turns = Vec::with_capacity(others.len());
    for (id, other) in &*others {
        match other.turns_if_waiting() {
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
fn find_others(others: &mut BTreeMap<u32, OtherThread>) -> io::Result<()> {
    others.clear();
    let own = fs::read_link("/proc/thread-self").expect("the number of this thread");
    let own = OtherThread::open(&Path::new("/proc").join(&own)).and_then(|own| own.turns()).ok().zip(own.file_name());
    // A thread that runs has had a turn, where the kernel counts.
    let (_, own) = own.filter(|(turns, _)| *turns > 0).expect("the kernel counts the turns of threads");
    for task in fs::read_dir(TASKS)? {
        let task = task?;
        if task.file_name() != own {
            let id = task.file_name().to_str().and_then(|id| id.parse().ok()).expect("the number of a thread");
            others.insert(id, OtherThread::open(&task.path())?);
        }
    }
    Ok(())
}

impl OtherThread {
    fn open(task: &Path) -> io::Result<Self> {
        Ok(Self { state: File::open(task.join("stat"))?, turns: File::open(task.join("schedstat"))? })
    }

    fn turns_if_waiting(&self) -> io::Result<Option<u64>> {
        // After the name, which is in parentheses.
        let is_waiting = read(&self.state)?.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('S'));
        if is_waiting { self.turns().map(Some) } else { Ok(None) }
    }

    fn turns(&self) -> io::Result<u64> {
        let turns = read(&self.turns)?;
        Ok(turns.split_whitespace().nth(2).and_then(|turns| turns.parse().ok()).expect("three numbers"))
    }
}

/// Reads the beginning of a file of the kernel's.
fn read(file: &File) -> io::Result<String> {
    let mut buffer = [0; 128];
    let len = file.read_at(&mut buffer, 0)?;
    Ok(String::from_utf8_lossy(&buffer[..len]).into_owned())
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
        if !alone_in_process("threads::tests::waiting_ends_after_the_last_of_a_chain_of_wake_ups") {
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
            wait_for_rest();
            assert_eq!(from.try_recv(), Ok(token));
        }
    }
}
