//! Models of the feed: whatever the order of its threads, each reader gets each command once and in
//! order, and none sleeps while there is one.

use std::time::Duration;

use shuttle::thread;

use super::tests::{number, queued};
use super::{FULL, Feed, Reader};
use crate::sync::modelled::explore;

/// Commands of a model.
const COUNT: u64 = 5;

/// Returns the size of a command: some of them fill a block.
fn size(number: u64) -> u64 {
    if number.is_multiple_of(2) { FULL } else { 4 }
}

/// Reads until the feed ends or a number of commands have come, and returns the number of the last
/// one. Checks that they come one after the other.
fn read(mut reader: Reader, until: u64) -> u64 {
    let mut last = 0;
    while last < until
        && let Some(read) = reader.next(|at, queued| (at, number(queued)))
    {
        last += 1;
        assert_eq!(read, (last, last));
    }
    last
}

/// A lost wake-up is a deadlock here, which fails the model.
#[test]
fn every_reader_gets_every_command_and_sleeps_only_without() {
    explore(|| {
        let (feed, readers) = Feed::new(2, 0, Duration::ZERO);
        let spawn = |reader| thread::spawn(move || assert_eq!(read(reader, COUNT), COUNT));
        let readers: Vec<_> = readers.into_iter().map(spawn).collect();
        for batch in [1..2, 2..4, 4..COUNT + 1] {
            feed.push(batch.start, batch.map(|at| queued(at, size(at))), u64::MAX).unwrap();
        }
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
}

#[test]
fn an_abort_ends_every_reader_wherever_it_is() {
    for commands in [0, COUNT] {
        explore(move || {
            let (feed, readers) = Feed::new(2, 0, Duration::ZERO);
            let spawn = |reader| thread::spawn(move || read(reader, u64::MAX));
            let readers: Vec<_> = readers.into_iter().map(spawn).collect();
            let aborting = {
                let feed = feed.clone();
                thread::spawn(move || feed.abort())
            };
            (1..=commands).for_each(|at| feed.push(at, [queued(at, size(at))], u64::MAX).unwrap());
            aborting.join().unwrap();
            readers.into_iter().for_each(|reader| assert!(reader.join().unwrap() <= commands));
        });
    }
}

/// Of two writers that have the same number only one appends its command.
#[test]
fn two_writers_append_each_number_once() {
    explore(|| {
        let (feed, readers) = Feed::new(1, 0, Duration::ZERO);
        let readers: Vec<_> =
            readers.into_iter().map(|reader| thread::spawn(move || assert_eq!(read(reader, COUNT), COUNT))).collect();
        let write = |feed: std::sync::Arc<Feed>| {
            (1..=COUNT).filter(|at| feed.push(*at, [queued(*at, size(*at))], u64::MAX).is_ok()).count()
        };
        let other = {
            let feed = feed.clone();
            thread::spawn(move || write(feed))
        };
        let own = write(feed.clone());
        let mut appended = (own + other.join().unwrap()) as u64;
        // The numbers that came too early for both.
        for at in appended + 1..=COUNT {
            feed.push(at, [queued(at, size(at))], u64::MAX).unwrap();
            appended += 1;
        }
        assert_eq!(appended, COUNT);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
}
