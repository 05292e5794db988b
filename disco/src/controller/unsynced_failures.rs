//! Failures of workers that no sync has reported yet. Nodes decide how many come, and how long they
//! are: of each worker the first ones are kept, and the others are counted.

use std::collections::BTreeMap;

use rpc_core::{ErrorKind, RpcError};

use crate::error::{Failure, WorkerId};

/// Most failures of one worker that are kept.
const MAX_KEPT: usize = 1000;

/// Most bytes of them.
const MAX_BYTES: usize = 1 << 20;

/// Bytes of each text that is left of a failure longer than [`MAX_BYTES`].
const SHORTENED: usize = 16 << 10;

/// Failures that have not been reported, by worker.
#[derive(Default)]
pub(crate) struct UnsyncedFailures {
    workers: BTreeMap<WorkerId, FailuresOfWorker>,
    /// Number of the command that is watched: each worker's first failure in it is always kept, and
    /// no sync takes those in it.
    watched: Option<u64>,
}

/// Failures of one worker, in the order in which they came.
#[derive(Default)]
struct FailuresOfWorker {
    kept: Vec<Failure>,
    bytes: usize,
    /// Number of failures that were not kept, and the command of the last one.
    left_out: u64,
    last: u64,
}

impl UnsyncedFailures {
    /// Watches a command, whose failures will be asked for by its number. Its predecessor is
    /// watched no more.
    pub(crate) fn watch(&mut self, sequence: u64) {
        self.watched = Some(sequence);
    }

    /// Watches a command no more: a sync takes its failures.
    pub(crate) fn unwatch(&mut self, sequence: u64) {
        self.watched = self.watched.filter(|watched| *watched != sequence);
    }

    /// Adds a failure, or counts it if its worker has too many.
    pub(crate) fn add(&mut self, failure: Failure) {
        let of_worker = self.workers.entry(failure.worker).or_default();
        let failure = if failure.size() > MAX_BYTES { shortened(&failure) } else { failure };
        let bytes = of_worker.bytes + failure.size();
        let is_in = |sequence| of_worker.kept.iter().any(|one| one.sequence == sequence);
        let is_watched = self.watched == Some(failure.sequence) && !is_in(failure.sequence);
        if is_watched || of_worker.kept.len() < MAX_KEPT && bytes <= MAX_BYTES {
            of_worker.bytes = bytes;
            of_worker.kept.push(failure);
        } else {
            of_worker.left_out += 1;
            of_worker.last = failure.sequence;
        }
    }

    /// Takes the failures of one worker, or of all, in the order of commands, but for those in a
    /// command that is watched, which its caller takes. Where some were left out, the last one of
    /// the worker says how many.
    pub(crate) fn take(&mut self, worker: Option<WorkerId>) -> Vec<Failure> {
        let mut taken: BTreeMap<WorkerId, FailuresOfWorker> = match worker {
            Some(worker) => self.workers.remove_entry(&worker).into_iter().collect(),
            None => std::mem::take(&mut self.workers),
        };
        if let Some(watched) = self.watched {
            for (worker, of_worker) in &mut taken {
                let kept = of_worker.take_of(watched);
                if !kept.is_empty() {
                    let bytes = kept.iter().map(Failure::size).sum();
                    self.workers.insert(*worker, FailuresOfWorker { kept, bytes, ..FailuresOfWorker::default() });
                }
            }
        }
        let mut failures: Vec<Failure> = taken.into_iter().flat_map(|(worker, one)| one.report(worker)).collect();
        failures.sort_by_key(|failure| (failure.sequence, failure.worker));
        failures
    }

    /// Takes the failures of all workers in one command, which is watched no more.
    pub(crate) fn take_of(&mut self, sequence: u64) -> Vec<Failure> {
        self.unwatch(sequence);
        self.workers.values_mut().flat_map(|of_worker| of_worker.take_of(sequence)).collect()
    }
}

impl FailuresOfWorker {
    /// Takes the failures in one command.
    fn take_of(&mut self, sequence: u64) -> Vec<Failure> {
        let all = std::mem::take(&mut self.kept).into_iter();
        let (of_command, others): (Vec<_>, Vec<_>) = all.partition(|failure| failure.sequence == sequence);
        self.kept = others;
        self.bytes -= of_command.iter().map(Failure::size).sum::<usize>();
        of_command
    }

    /// Returns the failures, and one that says how many were left out.
    fn report(self, worker: WorkerId) -> impl Iterator<Item = Failure> {
        let left_out = (self.left_out > 0).then(|| {
            let text = format!(
                "{} more failures of this worker were left out: as many as {MAX_KEPT} of each are kept until a sync, \
                 and 1 MiB; sync more often",
                self.left_out
            );
            let cause = RpcError::new(ErrorKind::LimitExceeded, text);
            Failure { worker, sequence: self.last, command: "sync".to_owned(), cause }
        });
        self.kept.into_iter().chain(left_out)
    }
}

/// Returns a failure with the beginnings of its texts.
fn shortened(failure: &Failure) -> Failure {
    let Failure { worker, sequence, command, cause } = failure;
    let beginning = |text: &str| text.chars().take(SHORTENED / 4).collect::<String>();
    let message = format!("{} (and more, {} bytes in all)", beginning(cause.message()), failure.size());
    let mut short = RpcError::new(cause.kind(), message).may_have_run(cause.request_may_have_run());
    if let Some(kind) = cause.application_kind() {
        short = short.with_application_kind(beginning(kind));
    }
    if let Some(peer) = cause.peer() {
        short = short.with_peer(beginning(peer));
    }
    if let Some(backtrace) = cause.backtrace() {
        short = short.with_backtrace(beginning(backtrace));
    }
    Failure { worker: *worker, sequence: *sequence, command: beginning(command), cause: short }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(worker: u32, sequence: u64, text: impl Into<String>) -> Failure {
        let cause = RpcError::new(ErrorKind::NotFound, text.into());
        Failure { worker: WorkerId(worker), sequence, command: "f".to_owned(), cause }
    }

    /// Regression: a controller that did not sync kept all that its nodes reported.
    #[test]
    fn the_first_failures_of_each_worker_are_kept_and_the_others_counted() {
        let mut failures = UnsyncedFailures::default();
        for sequence in 1..=5000 {
            failures.add(failure(1, sequence, "no"));
        }
        failures.add(failure(0, 7, "no"));
        assert_eq!(failures.take(Some(WorkerId(0))), [failure(0, 7, "no")]);
        let told = failures.take(None);
        assert_eq!(told.len(), MAX_KEPT + 1);
        let (last, first) = told.split_last().unwrap();
        assert!(first.iter().zip(1..).all(|(one, sequence)| *one == failure(1, sequence, "no")));
        assert_eq!((last.worker, last.sequence), (WorkerId(1), 5000));
        assert!(last.cause.message().starts_with("4000 more failures"), "{last}");
        assert!(failures.take(None).is_empty());
    }

    #[test]
    fn long_failures_are_shortened_and_bounded_together() {
        let mut failures = UnsyncedFailures::default();
        for sequence in 1..=100 {
            failures.add(failure(0, sequence, "é".repeat(4 << 20)));
            failures.add(failure(0, sequence, "x".repeat(MAX_BYTES / 2)));
        }
        let told = failures.take(None);
        assert!(told.len() > 2 && told.iter().map(Failure::size).sum::<usize>() <= MAX_BYTES + 1024);
        assert!(told[0].cause.message().ends_with("bytes in all)"));
    }

    /// Regression: the name of the error and the peer were kept whole, of each failure.
    #[test]
    fn every_text_of_a_failure_is_shortened() {
        let text = "x".repeat(2 * MAX_BYTES);
        let error = || RpcError::new(ErrorKind::Application, "no");
        let of_cause = |cause| Failure { worker: WorkerId(0), sequence: 1, command: String::new(), cause };
        let long = [
            failure(0, 1, text.clone()),
            Failure { command: text.clone(), ..failure(0, 1, "no") },
            of_cause(error().with_backtrace(&text)),
            of_cause(error().with_application_kind(&text)),
            of_cause(error().with_peer(&text)),
        ];
        for failure in long {
            let mut failures = UnsyncedFailures::default();
            for _ in 0..3 {
                failures.add(failure.clone());
            }
            let told = failures.take(None);
            assert_eq!(told.len(), 3);
            let bytes = rpc_core::Packed::encode(&told).unwrap().as_bytes().len();
            assert!(bytes <= 3 * 2 * SHORTENED, "{bytes} bytes of three failures");
        }
    }

    /// Regression: another caller's sync took the failures of an `init_ccl`, which then reported
    /// success.
    #[test]
    fn a_sync_leaves_the_failures_of_a_watched_command_to_its_caller() {
        let mut failures = UnsyncedFailures::default();
        failures.watch(2);
        let (other, watched) = ([failure(0, 1, "no"), failure(1, 3, "no")], [failure(0, 2, "no"), failure(1, 2, "no")]);
        other.iter().chain(&watched).for_each(|failure| failures.add(failure.clone()));
        assert_eq!(failures.take(Some(WorkerId(0))), other[..1]);
        assert_eq!(failures.take(None), other[1..]);
        assert_eq!(failures.take_of(2), watched);
        // Nobody else takes one that comes late.
        failures.add(watched[0].clone());
        assert_eq!(failures.take(None), watched[..1]);
    }

    #[test]
    fn a_command_that_is_watched_no_more_is_left_to_a_sync() {
        let mut failures = UnsyncedFailures::default();
        failures.watch(2);
        failures.add(failure(0, 2, "no"));
        failures.unwatch(1);
        assert_eq!(failures.take(None), []);
        failures.unwatch(2);
        assert_eq!(failures.take(None), [failure(0, 2, "no")]);
    }

    #[test]
    fn a_watched_command_is_kept_whatever_came_before() {
        let mut failures = UnsyncedFailures::default();
        failures.watch(3000);
        for sequence in 1..=4000 {
            failures.add(failure(0, sequence, "no"));
            failures.add(failure(1, 3000, "no"));
        }
        assert_eq!(failures.take_of(3000).iter().filter(|failure| failure.worker == WorkerId(0)).count(), 1);
        assert_eq!(failures.take_of(3000), []);
        // The number of those left out stays.
        let told = failures.take(Some(WorkerId(0)));
        assert!(told.last().unwrap().cause.message().starts_with("2999 more failures"));
    }
}
