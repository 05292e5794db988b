//! Deferred release: one thread of the process frees memory, because that may have to wait for
//! devices.
//!
//! It drops the owners of libraries' memory, and returns memory that has been idle in the pools for
//! some time to the driver, because other processes on the device cannot use it otherwise. While
//! nothing is idle it sleeps.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{LazyLock, mpsc};
use std::thread;
use std::time::Instant;

use crate::idle_memory::IdleMemory;

enum Job {
    /// A release that may block.
    Release(Box<dyn FnOnce() + Send>),
    /// A check of a GPU's idle memory.
    Check(&'static dyn IdleMemory),
}

/// Calls `release` on the thread. Does not block, if the thread could be started: memory is freed
/// on threads that must not block. Otherwise calls it at once.
pub(super) fn release_later(release: impl FnOnce() + Send + 'static) {
    if let Err(mpsc::SendError(Job::Release(release))) = THREAD.send(Job::Release(Box::new(release))) {
        release();
    }
}

/// Has the thread check a GPU's pools, which have idle memory, unless it knows that already.
pub(super) fn watch(memory: &'static dyn IdleMemory) {
    if !memory.is_watched().swap(true, Ordering::AcqRel) {
        check_soon(memory);
    }
}

/// Has the thread check a GPU's pools soon.
pub(super) fn check_soon(memory: &'static dyn IdleMemory) {
    // Without the thread, memory stays idle until it is needed.
    _ = THREAD.send(Job::Check(memory));
}

static THREAD: LazyLock<mpsc::Sender<Job>> = LazyLock::new(|| {
    let (sender, jobs) = mpsc::channel();
    if let Err(error) = thread::Builder::new().name("rpc-cuda-free".into()).spawn(move || run(&jobs)) {
        tracing::warn!(%error, "cannot start the thread that frees device memory");
    }
    sender
});

fn run(jobs: &mpsc::Receiver<Job>) {
    // Time of the next check of each GPU, by its index.
    let mut due: BTreeMap<i32, (Instant, &'static dyn IdleMemory)> = BTreeMap::new();
    loop {
        let first = due.values().min_by_key(|(at, _)| *at).copied();
        let job = match first {
            Some((at, memory)) => match jobs.recv_timeout(at.saturating_duration_since(Instant::now())) {
                Err(mpsc::RecvTimeoutError::Timeout) => Ok(Job::Check(memory)),
                other => other.map_err(|_| mpsc::RecvError),
            },
            None => jobs.recv(),
        };
        match job {
            Ok(Job::Check(memory)) => match memory.release_idle() {
                Some(at) => _ = due.insert(memory.device_index(), (at, memory)),
                None => _ = due.remove(&memory.device_index()),
            },
            Ok(Job::Release(release)) => release(),
            Err(mpsc::RecvError) => return,
        }
    }
}
