//! Reading on a thread of its own during a copy on the calling thread.

use std::panic::resume_unwind;
use std::thread;

/// Calls `read` on a thread of its own, and `here` on the calling thread. Returns both results once
/// both have ended. If one of them has panicked, panics then.
///
/// If the system cannot start a thread, calls one after the other.
pub(super) fn in_parallel<T: Send, U>(read: impl FnOnce() -> T + Send, here: impl FnOnce() -> U) -> (T, U) {
    let mut read = Some(read);
    let (done, here) = thread::scope(|scope| {
        let read =
            thread::Builder::new().name("disco-read".into()).spawn_scoped(scope, || read.take().map(|read| read()));
        let here = here();
        (read.ok().and_then(|read| read.join().unwrap_or_else(|panic| resume_unwind(panic))), here)
    });
    (done.unwrap_or_else(|| read.take().expect("no thread has taken it: none was started")()), here)
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn both_run_at_the_same_time() {
        let ((give, take), (give_back, take_back)) = (mpsc::channel(), mpsc::channel());
        let read = move || {
            give_back.send(take.recv().unwrap() + 1).unwrap();
            "read"
        };
        let here = || {
            give.send(1).unwrap();
            take_back.recv().unwrap()
        };
        assert_eq!(in_parallel(read, here), ("read", 2));
    }

    /// The one that does not panic is waited for.
    #[test]
    fn a_panic_of_either_comes_when_both_have_ended() {
        let panics = |gone: mpsc::Sender<()>| {
            let _gone = gone;
            panic!("told to");
        };
        for there in [true, false] {
            let (gone, wait) = mpsc::channel();
            let ended = AtomicBool::new(false);
            let waits = |wait: mpsc::Receiver<()>| {
                wait.recv().unwrap_err();
                ended.store(true, Ordering::Relaxed);
            };
            let both = || match there {
                true => in_parallel(move || panics(gone), move || waits(wait)),
                false => in_parallel(move || waits(wait), move || panics(gone)),
            };
            let panic = catch_unwind(AssertUnwindSafe(both)).unwrap_err();
            assert_eq!(*panic.downcast::<&str>().unwrap(), "told to");
            assert!(ended.into_inner());
        }
    }
}
