//! Deferred release: one thread of the process frees memory, because that may have to wait for
//! devices.
//!
//! It drops the owners of libraries' memory, and returns memory that has been idle in the pools for
//! some time to the driver, because other processes on the device cannot use it otherwise. While
//! nothing is idle it sleeps.

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
    /// A GPU with idle memory that was not reported since the last check.
    Idle(&'static Gpu),
}

/// Drops the owner of a library's memory when all work that was submitted to the device so far is
/// done. Does not block, if the thread could be started: memory is freed on threads that must not
/// block.
pub(super) fn give_back(gpu: &'static Gpu, owner: Box<dyn Any + Send + Sync>) {
    if let Err(mpsc::SendError(job)) = THREAD.send(Job::Owner(gpu, owner)) {
        finish(job);
    }
}

/// Has the thread check the GPU's pools, which have idle memory.
pub(super) fn watch(gpu: &'static Gpu) {
    let is_watched = gpu.opened().is_none_or(|opened| opened.is_watched.swap(true, Ordering::AcqRel));
    if !is_watched {
        check_soon(gpu);
    }
}

/// Has the thread check the GPU's pools soon.
pub(super) fn check_soon(gpu: &'static Gpu) {
    // Without the thread, memory stays idle until it is needed.
    _ = THREAD.send(Job::Idle(gpu));
}

static THREAD: LazyLock<mpsc::Sender<Job>> = LazyLock::new(|| {
    let (give, given) = mpsc::channel();
    if let Err(error) = thread::Builder::new().name("rpc-cuda-free".into()).spawn(move || run(&given)) {
        tracing::warn!(%error, "cannot start the thread that frees device memory");
    }
    give
});

fn run(jobs: &mpsc::Receiver<Job>) {
    // Time of the next check of each GPU, by its index.
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
            tracing::warn!(%error, "a library's memory is released, but it is unknown if the device still uses it");
        }
        drop(owner);
    }
}

/// Returns idle memory to the driver. Returns the time of the next check, if any memory is left.
fn release_idle(gpu: &'static Gpu) -> Option<Instant> {
    // With a lost device the memory is gone, too.
    let opened = gpu.enter().ok()?;
    // Memory that becomes idle from here on is reported again.
    opened.is_watched.store(false, Ordering::Release);
    let time = *lock(&opened.idle_time);
    let pools = [&opened.memory, &opened.pinned, &opened.copy_buffers];
    let oldest = pools.into_iter().filter_map(|pool| pool.release_idle(gpu, time)).min()?;
    opened.is_watched.store(true, Ordering::Release);
    // Memory that is old enough by now is still in use by the device.
    oldest.checked_add(time).map(|at| at.max(Instant::now() + PAUSE))
}

/// Default time that memory lies idle before it is returned to the driver: longer than the steps of
/// a program that reuses the same memory, and short for other processes that wait for it.
pub(super) const IDLE_TIME: Duration = Duration::from_secs(10);

/// Pause between two checks of memory that is in use for longer than it may be idle.
const PAUSE: Duration = Duration::from_millis(100);
