//! What is given back where that may take a while: by one thread of the process, which may wait for devices.
//!
//! It drops the owners of libraries' memory, and gives the driver what has been idle in the pools for some time, because other
//! processes on the same device cannot reach that. While nothing is idle it sleeps.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{LazyLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use crate::gpu::{Gpu, lock};

enum Job {
    /// The owner of a library's memory.
    Owner(&'static Gpu, Box<dyn Any + Send + Sync>),
    /// A GPU has idle memory, of which nobody has told since it was last looked at.
    Idle(&'static Gpu),
}

/// Drops the owner of a library's memory when all that was submitted to the device so far is done. It never blocks, where there
/// is a thread to be had: memory is freed on threads that must not.
pub(super) fn give_back(gpu: &'static Gpu, owner: Box<dyn Any + Send + Sync>) {
    if let Err(mpsc::SendError(job)) = THREAD.send(Job::Owner(gpu, owner)) {
        finish(job);
    }
}

/// Has the GPU's pools looked after, which have idle memory.
pub(super) fn watch(gpu: &'static Gpu) {
    let is_watched = gpu.opened().is_none_or(|opened| opened.is_watched.swap(true, Ordering::AcqRel));
    if !is_watched {
        look(gpu);
    }
}

/// Looks at the GPU's pools soon, on that thread.
pub(super) fn look(gpu: &'static Gpu) {
    // Without a thread it stays idle until somebody needs it.
    _ = THREAD.send(Job::Idle(gpu));
}

static THREAD: LazyLock<mpsc::Sender<Job>> = LazyLock::new(|| {
    let (give, given) = mpsc::channel();
    if let Err(error) = thread::Builder::new().name("rpc-cuda-free".into()).spawn(move || run(&given)) {
        tracing::warn!(%error, "no thread to wait for a device");
    }
    give
});

fn run(jobs: &mpsc::Receiver<Job>) {
    // When to look at which GPU, by its index.
    let mut due: BTreeMap<i32, (Instant, &'static Gpu)> = BTreeMap::new();
    loop {
        let first = due.values().min_by_key(|(at, _)| *at).copied();
        let job = match first {
            Some((at, gpu)) => match jobs.recv_timeout(at.saturating_duration_since(Instant::now())) {
                Err(mpsc::RecvTimeoutError::Timeout) => Ok(Job::Idle(gpu)),
                other => other.map_err(|_| mpsc::RecvError),
            },
            None => jobs.recv(),
        };
        match job {
            Ok(Job::Idle(gpu)) => match release_idle(gpu) {
                Some(at) => _ = due.insert(gpu.index, (at, gpu)),
                None => _ = due.remove(&gpu.index),
            },
            Ok(owner) => finish(owner),
            Err(mpsc::RecvError) => return,
        }
    }
}

fn finish(job: Job) {
    if let Job::Owner(gpu, owner) = job {
        if let Err(error) = gpu.settle_all() {
            tracing::warn!(%error, "a library's memory is given back, and nobody knows whether it is still in use");
        }
        drop(owner);
    }
}

/// Gives the driver what has been idle for long enough, and tells when to look again, if anything is left.
fn release_idle(gpu: &'static Gpu) -> Option<Instant> {
    // With a lost device the memory is gone, too.
    let opened = gpu.enter().ok()?;
    // What becomes idle from here on is told again.
    opened.is_watched.store(false, Ordering::Release);
    let time = *lock(&opened.idle_time);
    let pools = [&opened.memory, &opened.pinned, &opened.copy_buffers];
    let oldest = pools.into_iter().filter_map(|pool| pool.release_idle(gpu, time)).min()?;
    opened.is_watched.store(true, Ordering::Release);
    // What is old enough by now is still in use by the device.
    oldest.checked_add(time).map(|at| at.max(Instant::now() + PAUSE))
}

/// How long memory lies idle before the driver gets it, unless somebody says otherwise: longer than the steps of a program
/// that uses the same memory again and again, and short for who waits for room.
pub(super) const IDLE_TIME: Duration = Duration::from_secs(10);

/// Between two looks at memory that is in use for longer than it may be idle.
const PAUSE: Duration = Duration::from_millis(100);
