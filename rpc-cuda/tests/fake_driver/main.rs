//! Tests of the device kind `cuda` against the fake driver of `tests/cuda`, which runs submitted
//! work only when a thread waits for it, and detects every access and every release that comes too
//! early.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]
#![cfg(target_os = "linux")]

mod adopted_memory;
mod copies;
mod driver;
mod failures;
#[path = "../cuda/fake.rs"]
mod fake;
mod kernels;
mod memory;
#[path = "../cuda/memory_access.rs"]
mod memory_access;
mod native_modules;
mod sessions;
mod streams;
#[allow(dead_code, unreachable_pub, reason = "other tests use more of it")]
#[path = "../../../tests/src/tvm_ffi.rs"]
mod tvm_ffi;
#[path = "../cuda/workspace.rs"]
mod workspace;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fake::Fake;
use rpc_core::device::{AllocRequest, DeviceApi, Memory, Stream};
use rpc_cuda::{CudaDevice, CudaMemory, CudaStream};

/// Time limit of each wait; long enough for every expected event.
const LIMIT: Duration = Duration::from_secs(20);

/// Size of the buffers through which copies go.
const BUFFER: usize = 1 << 20;

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| ((at * 31 + at / 251 + seed) % 251) as u8).collect()
}

fn allocate(cuda: &CudaDevice, index: i32, size: u64) -> Box<dyn Memory> {
    cuda.allocate(index, &AllocRequest::new(size)).unwrap()
}

fn pinned(cuda: &CudaDevice, size: u64) -> Box<dyn Memory> {
    cuda.allocate(0, &AllocRequest { scope: Some("host"), ..AllocRequest::new(size) }).unwrap()
}

fn of(memory: &dyn Memory) -> &CudaMemory {
    memory.as_any().downcast_ref().unwrap()
}

fn stream(stream: &Arc<dyn Stream>) -> &CudaStream {
    stream.as_any().downcast_ref().unwrap()
}

/// Returns once the number of waits for the device differs from `waits`.
fn until_waited(fake: &Fake, waits: u64) {
    let since = std::time::Instant::now();
    while fake.count("fake_host_waits") == waits {
        assert!(since.elapsed() < LIMIT, "no call waits");
        std::thread::yield_now();
    }
}

/// Releases a held stream on drop, also if the test fails while a thread waits for it.
struct ReleaseOnDrop(&'static AtomicBool);

impl Drop for ReleaseOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
