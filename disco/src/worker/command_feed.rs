//! The feed: the queue of commands to the workers of a host. A command is written once, and each
//! worker reads it at its own pace.
//!
//! It is a chain of blocks. A worker holds the block that it reads and gives it up for the next
//! one, so that a block goes when the slowest has read it. Commands are read where they lie: no
//! lock is taken and no reference counted for a command.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rpc_core::{ErrorKind, Result, RpcError};

use crate::sync::{AtomicBool, AtomicU64, Mutex, OnceLock, Thread, current, fence, park, yield_now};
use crate::wire::command::Queued;

/// The commands of one block.
pub(crate) const BLOCK: usize = 64;

/// A block that holds so many bytes takes no more, so that large data goes as soon as all have read
/// it, and not with its neighbours.
const FULL: u64 = 64 << 10;

/// Time for which an idle worker yields its core before it sleeps, where the controller is in its
/// process: about the cost of waking it. Commands that come over a link come in batches, for which
/// the core is better left to the thread that brings them.
pub(crate) const YIELD: Duration = Duration::from_micros(50);

struct Block {
    commands: [OnceLock<Queued>; BLOCK],
    /// Set when there will be no more in this one.
    next: OnceLock<Arc<Self>>,
    /// Size of its commands, and of all those of the feed.
    bytes: AtomicU64,
    held: Arc<AtomicU64>,
}

impl Block {
    fn new(held: Arc<AtomicU64>) -> Arc<Self> {
        let commands = [const { OnceLock::new() }; BLOCK];
        Arc::new(Self { commands, next: OnceLock::new(), bytes: AtomicU64::new(0), held })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.held.fetch_sub(*self.bytes.get_mut(), Ordering::Relaxed);
        // One after the other: a long chain would overflow the stack.
        let mut next = self.next.take();
        while let Some(mut block) = next.and_then(Arc::into_inner) {
            next = block.next.take();
        }
    }
}

/// Returns the error of commands that do not have the next number.
pub(crate) fn out_of_order(first: u64, next: u64) -> RpcError {
    RpcError::new(ErrorKind::Protocol, format!("command {first} came where command {next} was expected"))
}

/// Commands for the workers of a host, which are to have a [`Reader`] each.
pub(crate) struct Feed {
    tail: Mutex<Tail>,
    sleepers: Box<[ReaderSleep]>,
    /// Time for which readers yield before they sleep.
    yield_time: Duration,
    aborted: AtomicBool,
}

/// End of the feed, where the next command goes.
struct Tail {
    block: Arc<Block>,
    len: usize,
    /// The number of the next command.
    next: u64,
}

/// Sleep state of one reader, for the thread that wakes it.
#[derive(Default)]
struct ReaderSleep {
    asleep: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Feed {
    /// Makes a feed for so many workers, whose first command is the one behind number `sequence`,
    /// and a reader for each. Each reader is used on a thread of its own, which yields for
    /// `yield_time` before it sleeps.
    pub(crate) fn new(workers: usize, sequence: u64, yield_time: Duration) -> (Arc<Self>, Vec<Reader>) {
        let block = Block::new(Arc::default());
        let this = Arc::new(Self {
            tail: Mutex::new(Tail { block: Arc::clone(&block), len: 0, next: sequence + 1 }),
            sleepers: (0..workers).map(|_| ReaderSleep::default()).collect(),
            yield_time,
            aborted: AtomicBool::new(false),
        });
        let reader = |worker| Reader { feed: Arc::clone(&this), worker, block: Arc::clone(&block), at: 0, sequence };
        let readers = (0..workers).map(reader).collect();
        (this, readers)
    }

    /// Appends commands, of which the first must have the number `first`, unless so many bytes of
    /// them are held already.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Protocol`]: another number; [`ErrorKind::LimitExceeded`].
    pub(crate) fn push(&self, first: u64, commands: impl IntoIterator<Item = Queued>, limit: u64) -> Result<()> {
        // Held to the end, so that readers see commands in their order.
        let mut tail = self.tail.lock();
        if tail.next != first {
            return Err(out_of_order(first, tail.next));
        }
        let held = tail.block.held.load(Ordering::Relaxed);
        if held >= limit {
            let text = format!("{held} bytes of commands wait for the workers of this node, and {limit} are allowed");
            return Err(RpcError::new(ErrorKind::LimitExceeded, text));
        }
        for queued in commands {
            // The cost is counted here; the sender's own count is not trusted.
            let bytes = queued.command.cost();
            let block_bytes = tail.block.bytes.load(Ordering::Relaxed) + bytes;
            tail.block.bytes.store(block_bytes, Ordering::Relaxed);
            tail.block.held.fetch_add(bytes, Ordering::Relaxed);
            // The writer has the lock, so that each is set once.
            _ = tail.block.commands[tail.len].set(queued);
            tail.len += 1;
            tail.next += 1;
            // At once, so that readers let go of a full block though nothing comes after it.
            if tail.len == BLOCK || block_bytes >= FULL {
                let next = Block::new(Arc::clone(&tail.block.held));
                _ = tail.block.next.set(Arc::clone(&next));
                (tail.block, tail.len) = (next, 0);
            }
        }
        drop(tail);
        self.wake();
        Ok(())
    }

    /// Returns the number of the last command.
    pub(crate) fn last(&self) -> u64 {
        self.tail.lock().next - 1
    }

    /// Ends the feed: readers get no more, even if commands are left.
    pub(crate) fn abort(&self) {
        self.aborted.store(true, Ordering::SeqCst);
        self.wake();
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Relaxed)
    }

    fn wake(&self) {
        // Sequentially consistent with the two steps of the sleeping reader: either the reader sees
        // the new command, or this thread sees that the reader sleeps.
        fence(Ordering::SeqCst);
        for sleeper in &self.sleepers {
            if sleeper.asleep.load(Ordering::Relaxed)
                && sleeper.asleep.swap(false, Ordering::Relaxed)
                && let Some(thread) = sleeper.thread.get()
            {
                thread.unpark();
            }
        }
    }
}

/// Position of one worker in the feed.
pub(crate) struct Reader {
    feed: Arc<Feed>,
    worker: usize,
    block: Arc<Block>,
    /// Index in the block of the command that is read next.
    at: usize,
    /// The number of the command that was read last.
    sequence: u64,
}

impl Reader {
    /// Waits for the next command and gives it to `perform`, with its number. Returns the result of
    /// that, or `None` at the end.
    pub(crate) fn next<R>(&mut self, perform: impl FnOnce(u64, &Queued) -> R) -> Option<R> {
        self.wait();
        if self.feed.is_aborted() {
            return None;
        }
        let queued = self.block.commands.get(self.at)?.get()?;
        self.sequence += 1;
        let result = perform(self.sequence, queued);
        self.at += 1;
        Some(result)
    }

    /// Returns when there is a command, or the feed has ended.
    fn wait(&mut self) {
        if self.is_ready() {
            return;
        }
        let yield_time = self.feed.yield_time;
        let began = (!yield_time.is_zero()).then(Instant::now);
        while began.is_some_and(|began| began.elapsed() < yield_time) {
            for _ in 0..8 {
                yield_now();
                if self.is_ready() {
                    return;
                }
            }
        }
        let feed = Arc::clone(&self.feed);
        let sleeper = &feed.sleepers[self.worker];
        sleeper.thread.get_or_init(current);
        loop {
            sleeper.asleep.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if self.is_ready() {
                sleeper.asleep.store(false, Ordering::Relaxed);
                return;
            }
            while sleeper.asleep.load(Ordering::Relaxed) {
                park();
            }
        }
    }

    /// Returns true if there is a command, or the feed has ended. Goes on to the next block where
    /// this one is read.
    fn is_ready(&mut self) -> bool {
        loop {
            // Looked for first: once it is there, nothing more comes into this block.
            let next = self.block.next.get();
            if self.block.commands.get(self.at).is_some_and(|command| command.get().is_some()) {
                return true;
            }
            let Some(next) = next.cloned() else { return self.feed.is_aborted() };
            (self.block, self.at) = (next, 0);
        }
    }
}

#[cfg(test)]
mod models;

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::wire::command::Command;

    pub(super) fn queued(number: u64, bytes: u64) -> Queued {
        let outputs = vec![0; bytes as usize / size_of::<u32>()];
        let command = Command::Run { program: number as u32, args: Vec::new(), outputs };
        Queued { cost: command.cost(), command: Arc::new(command), charge: None }
    }

    pub(super) fn number(queued: &Queued) -> u64 {
        match &*queued.command {
            Command::Run { program, .. } => (*program).into(),
            other => panic!("{other:?}"),
        }
    }

    /// Each reader sees all commands in their order, however they are pushed and however large they
    /// are.
    #[test]
    fn every_worker_reads_every_command_in_order() {
        const COUNT: u64 = 20_000;
        let (feed, readers) = Feed::new(3, 0, YIELD);
        thread::scope(|scope| {
            for mut reader in readers {
                scope.spawn(move || {
                    for expected in 1..=COUNT {
                        let read = reader.next(|at, queued| (at, number(queued)));
                        assert_eq!(read, Some((expected, expected)));
                    }
                    assert_eq!(reader.next(|_, _| ()), None);
                });
            }
            let mut next = 1;
            while next <= COUNT {
                let end = (next + next % 150 + 1).min(COUNT + 1);
                let cost = |number: u64| if number.is_multiple_of(50) { FULL } else { 4 };
                feed.push(next, (next..end).map(|number| queued(number, cost(number))), u64::MAX).unwrap();
                if next.is_multiple_of(40) {
                    // Every reader comes to the end of the feed and falls asleep, to be woken.
                    while !feed.sleepers.iter().all(|sleeper| sleeper.asleep.load(Ordering::SeqCst)) {
                        thread::yield_now();
                    }
                }
                next = end;
            }
            let error = feed.push(5, [queued(5, 4)], u64::MAX).unwrap_err();
            assert_eq!(error, out_of_order(5, COUNT + 1));
            // Everything has been pushed; readers that have read all get the end.
            while Arc::strong_count(&feed.tail.lock().block) < 4 {
                thread::yield_now();
            }
            while !feed.sleepers.iter().all(|sleeper| sleeper.asleep.load(Ordering::SeqCst)) {
                thread::yield_now();
            }
            feed.abort();
        });
    }

    #[test]
    fn an_aborted_feed_gives_nothing_that_has_not_begun() {
        let (feed, mut readers) = Feed::new(1, 0, YIELD);
        feed.push(1, (1..=200_000).map(|number| queued(number, 4)), u64::MAX).unwrap();
        assert_eq!(readers[0].next(|number, _| number), Some(1));
        feed.abort();
        assert_eq!(readers[0].next(|number, _| number), None);
    }

    #[test]
    fn a_block_that_all_have_read_is_freed() {
        let (feed, mut readers) = Feed::new(2, 0, Duration::ZERO);
        let first = queued(1, FULL);
        let held = Arc::downgrade(&first.command);
        feed.push(1, [first], u64::MAX).unwrap();
        for reader in &mut readers {
            assert!(held.upgrade().is_some());
            reader.next(|_, _| ());
            // As it is about to wait for the next one.
            assert!(!reader.is_ready());
        }
        assert!(held.upgrade().is_none());
    }

    /// The count is of the memory that commands occupy, not of their sender's claim; the slowest
    /// reader's progress makes room.
    #[test]
    fn no_more_is_held_than_the_limit() {
        let (feed, mut readers) = Feed::new(2, 0, Duration::ZERO);
        let limit = 4 * FULL;
        let command = |number| Queued { cost: 0, ..queued(number, FULL) };
        for number in 1..=4 {
            feed.push(number, [command(number)], limit).unwrap();
        }
        let full = |feed: &Feed| feed.push(5, [command(5)], limit).unwrap_err();
        assert_eq!(full(&feed).kind(), ErrorKind::LimitExceeded);
        let read = |reader: &mut Reader| {
            reader.next(|_, _| ());
            assert!(reader.is_ready());
        };
        read(&mut readers[0]);
        assert_eq!(full(&feed).kind(), ErrorKind::LimitExceeded);
        read(&mut readers[1]);
        feed.push(5, [command(5)], limit).unwrap();
    }
}
