//! Tests of the device kind `cuda` against the fake driver of `tests/cuda`, which runs submitted
//! work only when a thread waits for it, and detects every access and every release that comes too
//! early.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]
#![cfg(target_os = "linux")]

#[path = "cuda/fake.rs"]
mod fake;
#[path = "cuda/memory_access.rs"]
mod memory_access;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use fake::with_driver;
use memory_access::{copy, read, write};
use rpc_core::device::{AllocRequest, CpuDevice, DeviceApi, Memory, Stream};
use rpc_core::tensor::Layout;
use rpc_core::{
    Context, DataType, Device, DeviceAttribute, Devices, ErrorKind, Lane, LocalSession, Registry, RemoteTensor, Result,
    Session, SessionLimits, Tensor, Value,
};
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

#[test]
fn memory_reads_as_zeros_and_keeps_what_is_written_at_every_size() {
    with_driver("memory_reads_as_zeros_and_keeps_what_is_written_at_every_size", &[], &[], |_| {
        let cuda = CudaDevice::open().unwrap();
        for len in [0, 1, 255, BUFFER - 1, BUFFER, BUFFER + 1, 2 * BUFFER, 2 * BUFFER + 1, 5 * BUFFER + 12345] {
            // The second round gets the first one's memory, which was written to.
            for round in 0..2 {
                let memory = allocate(&cuda, 0, len as u64);
                assert_eq!(memory.len(), len as u64);
                assert!(memory.host().is_none());
                assert!(read(&*memory, 0, len).iter().all(|byte| *byte == 0), "{len} {round}");
                let data = pattern(len, round);
                write(&*memory, 0, &data);
                assert!(read(&*memory, 0, len) == data, "{len} {round}");
                if len > 10 {
                    write(&*memory, 7, &[1, 2, 3]);
                    assert_eq!(read(&*memory, 6, 5), [data[6], 1, 2, 3, data[10]]);
                }
            }
        }
        let statistics = cuda.statistics(0).unwrap();
        assert_eq!(statistics.allocated_bytes, 0);
        assert!(statistics.hits >= 8);
    });
}

#[test]
fn alignments_and_scopes_are_kept_or_refused() {
    with_driver("alignments_and_scopes_are_kept_or_refused", &[], &[], |_| {
        let cuda = CudaDevice::open().unwrap();
        let request = |alignment, scope| AllocRequest { size: 100, alignment, scope };
        for alignment in [0, 1, 256, 4096, 2 << 20] {
            for scope in [None, Some(""), Some("global"), Some("host")] {
                let memory = cuda.allocate(1, &request(alignment, scope)).unwrap();
                assert_eq!(of(&*memory).device_pointer().addr() as u64 % alignment.max(256), 0);
                assert_eq!(memory.host().is_some(), scope == Some("host"));
                assert_eq!(of(&*memory).is_pinned(), scope == Some("host"));
                assert_eq!(of(&*memory).device(), Device::cuda(1));
                assert_eq!(read(&*memory, 0, 100), [0; 100]);
            }
        }
        let refusal = |alignment, scope| cuda.allocate(0, &request(alignment, scope)).err().unwrap();
        assert_eq!(refusal(3, None).kind(), ErrorKind::InvalidArgument);
        assert_eq!(refusal(4 << 20, None).kind(), ErrorKind::InvalidArgument);
        assert_eq!(refusal(0, Some("texture")).kind(), ErrorKind::Unsupported);
        assert!(refusal(0, Some("texture")).message().contains("global and host"));
        for size in [u64::MAX, i64::MAX as u64, 1 << 60] {
            for scope in [None, Some("host")] {
                if size == 1 << 60 && scope.is_some() {
                    continue;
                }
                let request = AllocRequest { size, alignment: 2 << 20, scope };
                assert_eq!(cuda.allocate(0, &request).err().unwrap().kind(), ErrorKind::OutOfMemory, "{size}");
            }
        }
        for index in [-1, 2] {
            assert_eq!(cuda.allocate(index, &request(0, None)).err().unwrap().kind(), ErrorKind::DeviceUnavailable);
        }
    });
}

#[test]
fn copies_run_behind_the_default_stream_and_may_overlap() {
    with_driver("copies_run_behind_the_default_stream_and_may_overlap", &[], &[], |fake| {
        let cuda = CudaDevice::open().unwrap();
        let len = 40 << 20;
        let memory = allocate(&cuda, 0, len);
        let other = allocate(&cuda, 0, len);
        fake.fill(of(&*memory), 9, 100, &cuda.stream(0).unwrap());
        copy(&cuda, (&*memory, 0), (&*other, 10), 100);
        assert_eq!(read(&*other, 9, 102), [vec![0], vec![9; 100], vec![0]].concat());

        let data = pattern(len as usize, 3);
        for distance in [1, 4096, 17 << 20, 30 << 20] {
            for (from, to) in [(0, distance), (distance, 0)] {
                write(&*memory, 0, &data);
                copy(&cuda, (&*memory, from), (&*memory, to), len - distance);
                let moved = read(&*memory, to, (len - distance) as usize);
                assert!(moved == data[from as usize..][..moved.len()], "{from} {to}");
            }
        }
        copy(&cuda, (&*memory, 5), (&*memory, 5), 100);
        copy(&cuda, (&*memory, 5), (&*memory, 6), 0);
    });
}

#[test]
fn bytes_pass_between_devices_and_all_kinds_of_host_memory() {
    with_driver("bytes_pass_between_devices_and_all_kinds_of_host_memory", &[], &[], |fake| {
        let cuda = CudaDevice::open().unwrap();
        let len = 3 * BUFFER + 17;
        let data = pattern(len, 1);
        let (first, second) = (allocate(&cuda, 0, len as u64), allocate(&cuda, 1, len as u64));
        let host = CpuDevice::default().allocate(0, &AllocRequest::new(len as u64)).unwrap();
        let (near, far) = (pinned(&cuda, len as u64), pinned(&cuda, len as u64));
        write(&*host, 0, &data);
        // Each copy reads the bytes that the previous one wrote.
        let chain = [&host, &near, &first, &second, &far, &second, &first, &host, &first, &near, &host];
        for pair in chain.windows(2) {
            let [from, to] = pair else { unreachable!() };
            copy(&cuda, (&***from, 0), (&***to, 0), len as u64);
        }
        assert!(read(&*host, 0, len) == data);
        assert_eq!(fake.count("fake_peer_copies"), 2);

        // The processor reads pinned memory when the stream has written it.
        cuda.context(0).unwrap();
        fake.fill(of(&*near), 7, len, &cuda.stream(0).unwrap());
        copy(&cuda, (&*near, 0), (&*host, 0), len as u64);
        assert_eq!(read(&*host, len as u64 - 2, 2), [7, 7]);
        write(&*near, 0, &data);

        // Memory of the caller that happens to be pinned is copied directly: no buffers are taken.
        let before = cuda.pinned_statistics(0).unwrap();
        let bytes = near.host().unwrap();
        // SAFETY: the pinned memory's own bytes, which nothing else uses.
        write(&*first, 0, unsafe { std::slice::from_raw_parts(bytes.as_ptr(), len) });
        assert_eq!(cuda.pinned_statistics(0).unwrap(), before);
        assert!(read(&*first, 0, len) == data);
        assert!(cuda.pinned_statistics(0).unwrap().hits > before.hits);
    });
}

#[test]
fn an_upload_returns_before_the_device_has_it_and_a_download_waits() {
    with_driver("an_upload_returns_before_the_device_has_it_and_a_download_waits", &[], &[], |fake| {
        let cuda = CudaDevice::open().unwrap();
        let memory = allocate(&cuda, 0, 8 * BUFFER as u64);
        let (waits, stream) = (fake.count("fake_host_waits"), cuda.stream(0).unwrap());
        write(&*memory, 0, &pattern(2 * BUFFER, 0));
        assert_eq!(fake.count("fake_host_waits"), waits);
        assert!(fake.pending(&stream) > 0);
        // A third part has to wait for the first one's buffer only.
        write(&*memory, 2 * BUFFER as u64, &pattern(3 * BUFFER, 5));
        assert!(fake.count("fake_host_waits") <= waits + 1);
        assert!(fake.pending(&stream) > 0);
        assert!(read(&*memory, 2 * BUFFER as u64, 3 * BUFFER) == pattern(3 * BUFFER, 5));
        assert!(read(&*memory, 0, 2 * BUFFER) == pattern(2 * BUFFER, 0));
    });
}

/// Sessions read one buffer's worth at a time: whole buffers would never overlap.
#[test]
fn a_download_asks_for_all_parts_of_its_buffer_before_it_waits() {
    static MAY_GO_ON: AtomicBool = AtomicBool::new(false);
    with_driver("a_download_asks_for_all_parts_of_its_buffer_before_it_waits", &[], &[], |fake| {
        const PARTS: usize = 4;
        let cuda = CudaDevice::open().unwrap();
        let memory = allocate(&cuda, 0, BUFFER as u64);
        let data = pattern(BUFFER, 3);
        write(&*memory, 0, &data);
        let stream = cuda.stream(0).unwrap();
        fake.run_all();
        fake.hold(stream.raw(), &MAY_GO_ON);
        std::thread::scope(|scope| {
            let _end = GoOn(&MAY_GO_ON);
            let waits = fake.count("fake_host_waits");
            let download = scope.spawn(|| read(&*memory, 0, BUFFER));
            until_waited(fake, waits);
            // Behind the work that holds the stream, each with an event behind it.
            assert_eq!(fake.pending(&stream), 1 + 2 * PARTS as u64);
            MAY_GO_ON.store(true, Ordering::SeqCst);
            assert!(download.join().unwrap() == data);
        });
        let statistics = cuda.pinned_statistics(0).unwrap();
        assert_eq!((statistics.allocated_bytes, statistics.cached_bytes), (0, BUFFER as u64));
    });
}

/// Regression of P-5: each write behind a kernel took pinned memory of its own, without limit.
#[test]
fn writes_behind_a_busy_stream_wait_when_all_buffers_are_in_use() {
    static MAY_GO_ON: AtomicBool = AtomicBool::new(false);
    with_driver("writes_behind_a_busy_stream_wait_when_all_buffers_are_in_use", &[], &[], |fake| {
        const BUFFERS: usize = 64;
        let cuda = CudaDevice::open().unwrap();
        let memory = allocate(&cuda, 0, (BUFFERS + 2) as u64 * BUFFER as u64);
        let side = cuda.create_stream(0).unwrap();
        fake.hold(cuda.stream(0).unwrap().raw(), &MAY_GO_ON);
        let bound = (BUFFERS * BUFFER) as u64;
        let total = || {
            let statistics = cuda.pinned_statistics(0).unwrap();
            statistics.allocated_bytes + statistics.cached_bytes
        };
        let (tell, told) = mpsc::channel();
        std::thread::scope(|scope| {
            let _end = GoOn(&MAY_GO_ON);
            scope.spawn(|| {
                for part in 0..BUFFERS + 2 {
                    let waits = fake.count("fake_host_waits");
                    write(&*memory, (part * BUFFER) as u64, &pattern(BUFFER, part));
                    tell.send((part, fake.count("fake_host_waits") - waits)).unwrap();
                }
            });
            let waits = fake.count("fake_host_waits");
            for part in 0..BUFFERS {
                assert_eq!(told.recv_timeout(LIMIT).unwrap(), (part, 0));
            }
            // The next write waits, and keeps waiting. The caller's own pinned memory does not
            // count as a buffer.
            until_waited(fake, waits);
            assert!(told.try_recv().is_err());
            assert_eq!(total(), bound);
            drop(pinned(&cuda, BUFFER as u64));
            assert_eq!(total(), bound + BUFFER as u64);
            side.synchronize().unwrap();
            assert!(told.try_recv().is_err());
            // It gets no more memory because another thread waits to free memory that the stream
            // still uses.
            let waits = fake.count("fake_host_waits");
            let trim = scope.spawn(|| cuda.trim(0).unwrap());
            until_waited(fake, waits);
            assert_eq!(total(), bound + BUFFER as u64);
            assert!(told.try_recv().is_err());
            MAY_GO_ON.store(true, Ordering::SeqCst);
            assert!(trim.join().unwrap() > 0);
            for part in BUFFERS..BUFFERS + 2 {
                assert_eq!(told.recv_timeout(LIMIT).unwrap().0, part);
            }
        });
        for part in 0..BUFFERS + 2 {
            assert!(read(&*memory, (part * BUFFER) as u64, BUFFER) == pattern(BUFFER, part), "{part}");
        }
        assert!(total() <= bound);
    });
}

/// Returns once the number of waits for the device differs from `waits`.
fn until_waited(fake: &fake::Fake, waits: u64) {
    let since = std::time::Instant::now();
    while fake.count("fake_host_waits") == waits {
        assert!(since.elapsed() < LIMIT, "no call waits");
        std::thread::yield_now();
    }
}

/// Releases a held stream on drop, also if the test fails while a thread waits for it.
struct GoOn(&'static AtomicBool);

impl Drop for GoOn {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// P-1 and P-2.
#[test]
fn memory_is_reused_behind_the_work_of_its_last_owner() {
    with_driver("memory_is_reused_behind_the_work_of_its_last_owner", &[], &[], |fake| {
        let cuda = CudaDevice::open().unwrap();
        let side = cuda.create_stream(0).unwrap();
        let first = allocate(&cuda, 0, 1000);
        side.wait_for(&*cuda.default_stream(0).unwrap()).unwrap();
        fake.fill(of(&*first), 1, 1000, stream(&side));
        let address = of(&*first).device_pointer();
        drop(first);
        let again = allocate(&cuda, 0, 900);
        assert_eq!(of(&*again).device_pointer(), address);
        // The old work is still waiting, and must not run behind the new zeros.
        assert!(fake.pending(stream(&side)) > 0);
        assert_eq!(read(&*again, 0, 900), [0; 900]);
        fake.run_all();
        assert_eq!(read(&*again, 0, 900), [0; 900]);
        let statistics = cuda.statistics(0).unwrap();
        assert_eq!((statistics.hits, statistics.misses, statistics.allocated_bytes), (1, 1, 1024));

        // Pinned memory is handed out only when no work is pending any more.
        let first = pinned(&cuda, 1000);
        let address = first.host();
        fake.fill(of(&*first), 1, 1000, stream(&side));
        drop(first);
        let other = pinned(&cuda, 1000);
        assert_ne!(other.host(), address);
        assert_eq!(read(&*other, 0, 1000), [0; 1000]);
        side.synchronize().unwrap();
        cuda.default_stream(0).unwrap().synchronize().unwrap();
        let third = pinned(&cuda, 1000);
        assert_eq!(third.host(), address);
        assert_eq!(read(&*third, 0, 1000), [0; 1000]);
    });
}

/// P-1, if the stream is dropped before the memory.
#[test]
fn a_dropped_stream_finishes_before_memory_is_reused() {
    with_driver("a_dropped_stream_finishes_before_memory_is_reused", &[], &[], |fake| {
        let cuda = CudaDevice::open().unwrap();
        let side = cuda.create_stream(0).unwrap();
        let first = allocate(&cuda, 0, 1000);
        side.wait_for(&*cuda.default_stream(0).unwrap()).unwrap();
        fake.fill(of(&*first), 1, 1000, stream(&side));
        drop(side);
        drop(first);
        let again = allocate(&cuda, 0, 1000);
        assert_eq!(read(&*again, 0, 1000), [0; 1000]);
        fake.run_all();
        assert_eq!(read(&*again, 0, 1000), [0; 1000]);
        assert_eq!(cuda.statistics(0).unwrap().hits, 1);
    });
}

#[test]
fn drops_preserve_the_current_context() {
    with_driver("drops_preserve_the_current_context", &[], &[], |fake| {
        let cuda = CudaDevice::open().unwrap();
        let (memory, host, side) = (allocate(&cuda, 0, 1000), pinned(&cuda, 1000), cuda.create_stream(0).unwrap());
        // More than are kept for later, so that some are destroyed.
        let events: Vec<_> = (0..1100).map(|_| stream(&side).record().unwrap()).collect();
        let other = allocate(&cuda, 0, 5000);
        let current = cuda.context(1).unwrap();
        drop((memory, host, side, events));
        assert_eq!(fake.current_context(), current);
        // A thread without a context keeps none.
        std::thread::spawn(|| drop(other)).join().unwrap();
        let context_of_other = std::thread::scope(|scope| {
            let memory = allocate(&cuda, 1, 10);
            scope
                .spawn(|| {
                    drop(memory);
                    fake.current_context().addr()
                })
                .join()
                .unwrap()
        });
        assert_eq!(context_of_other, 0);
        assert_eq!(cuda.statistics(0).unwrap().allocated_bytes, 0);
    });
}

/// P-3 and P-4; the fake driver detects memory that is freed while submitted work uses it.
#[test]
fn idle_memory_is_bounded_and_goes_back_when_its_work_is_done() {
    with_driver("idle_memory_is_bounded_and_goes_back_when_its_work_is_done", &[], &[], |fake| {
        let cuda = CudaDevice::open().unwrap();
        cuda.set_cache_limit(0, 3 << 20).unwrap();
        let memories: Vec<_> = (0..6).map(|_| allocate(&cuda, 0, 1 << 20)).collect();
        assert_eq!(cuda.statistics(0).unwrap().peak_allocated_bytes, 6 << 20);
        cuda.stream(0).unwrap().synchronize().unwrap();
        drop(memories);
        cuda.stream(0).unwrap().synchronize().unwrap();
        // Not by the release, whose thread may not wait for the device, but by the next allocation.
        assert_eq!(cuda.statistics(0).unwrap().cached_bytes, 6 << 20);
        assert_eq!(fake.count("fake_device_waits"), 0);
        let taken = allocate(&cuda, 0, 512);
        let statistics = cuda.statistics(0).unwrap();
        assert_eq!(statistics.allocated_bytes, 512);
        assert_eq!(statistics.cached_bytes, 3 << 20);
        drop(taken);
        let statistics = cuda.statistics(0).unwrap();
        let cached = statistics.cached_bytes + cuda.pinned_statistics(0).unwrap().cached_bytes;
        assert_eq!(cuda.trim(0).unwrap(), cached);
        assert_eq!(cuda.statistics(0).unwrap().cached_bytes, 0);
        assert_eq!(cuda.statistics(0).unwrap().trims, 1);
    });
}

/// Other processes on the device cannot use memory that lies idle here.
#[test]
fn memory_that_stays_idle_goes_back_to_the_driver() {
    static MAY_GO_ON: AtomicBool = AtomicBool::new(false);
    with_driver("memory_that_stays_idle_goes_back_to_the_driver", &[], &[], |fake| {
        let cuda = CudaDevice::open().unwrap();
        cuda.set_idle_time(0, Duration::from_secs(3600)).unwrap();
        let kept = allocate(&cuda, 0, 1 << 20);
        write(&*kept, 0, &[5; 10]);
        drop(allocate(&cuda, 0, 3 << 20));
        drop(pinned(&cuda, 1 << 20));
        cuda.stream(0).unwrap().synchronize().unwrap();
        let idle = || cuda.statistics(0).unwrap().cached_bytes + cuda.pinned_statistics(0).unwrap().cached_bytes;
        let is_gone = || {
            let since = std::time::Instant::now();
            while idle() > 0 {
                assert!(since.elapsed() < LIMIT, "{} bytes are still idle", idle());
                std::thread::yield_now();
            }
        };
        assert_eq!(idle(), (4 << 20) + (4 << 10));
        assert_eq!(fake.count("fake_device_waits"), 0);
        cuda.set_idle_time(0, Duration::ZERO).unwrap();
        is_gone();
        assert_eq!(fake.count("fake_device_waits"), 3);
        // Memory that comes back later, too; and by P-3, which the fake driver checks, not before
        // its work is done.
        let busy = allocate(&cuda, 0, 2 << 20);
        fake.hold(cuda.stream(0).unwrap().raw(), &MAY_GO_ON);
        fake.fill(of(&*busy), 1, 100, &cuda.stream(0).unwrap());
        drop(busy);
        drop(cuda.create_stream(0).unwrap());
        assert_eq!(idle(), 2 << 20);
        MAY_GO_ON.store(true, Ordering::SeqCst);
        is_gone();
        assert_eq!(read(&*kept, 9, 2), [5, 0]);
        assert_eq!(cuda.statistics(0).unwrap().allocated_bytes, 1 << 20);
    });
}

#[test]
fn a_full_device_returns_idle_memory_before_it_refuses() {
    let memory = [("FAKE_CUDA_MEMORY", "67108864")];
    with_driver("a_full_device_returns_idle_memory_before_it_refuses", &[], &memory, |_| {
        let cuda = CudaDevice::open().unwrap();
        cuda.set_cache_limit(0, u64::MAX).unwrap();
        let held = allocate(&cuda, 0, 20 << 20);
        drop(allocate(&cuda, 0, 30 << 20));
        let available = cuda.attribute(0, DeviceAttribute::AvailableMemory).unwrap();
        assert_eq!(available, Value::Int(44 << 20));
        // Does not fit beside the idle memory.
        let large = allocate(&cuda, 0, 40 << 20);
        assert_eq!(read(&*large, (40 << 20) - 5, 5), [0; 5]);
        assert_eq!(cuda.statistics(0).unwrap().trims, 1);
        let error = cuda.allocate(0, &AllocRequest::new(10 << 20)).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        assert_eq!(error.application_kind(), Some("CUDA_ERROR_OUT_OF_MEMORY"));
        assert!(error.message().contains("cannot allocate 10485760 bytes: cuda:0: out of memory"), "{error}");
        // The device remains usable.
        drop(held);
        assert_eq!(read(&*allocate(&cuda, 0, 20 << 20), 0, 3), [0; 3]);
    });
}

#[test]
fn a_lost_device_stays_lost_with_the_reason() {
    with_driver("a_lost_device_stays_lost_with_the_reason", &[], &[], |fake| {
        let cuda = CudaDevice::open().unwrap();
        let (memory, side) = (allocate(&cuda, 0, 1000), cuda.create_stream(0).unwrap());
        let other = allocate(&cuda, 1, 1000);
        fake.fail(0, 700);
        let error = cuda.default_stream(0).unwrap_err_kind();
        assert_eq!(error.kind(), ErrorKind::DeviceLost);
        assert_eq!(error.application_kind(), Some("CUDA_ERROR_ILLEGAL_ADDRESS"));
        assert!(error.message().starts_with("cuda:0 is lost: an illegal memory access was encountered"), "{error}");
        // Even if the driver reports success again.
        fake.fail(0, 0);
        let mut out = [0; 10];
        // SAFETY: ranges within the memories, which nothing else uses.
        let copies = unsafe {
            [
                memory.copy_from_host(0, &[1]).err(),
                memory.copy_to_host(0, &mut out).err(),
                memory.copy_from_host(0, &[]).err(),
                cuda.copy(&*memory, 0, &*memory, 0, 10).err(),
                cuda.copy(&*memory, 0, &*other, 0, 10).err(),
                cuda.copy(&*other, 0, &*memory, 0, 10).err(),
            ]
        };
        let others = [
            cuda.allocate(0, &AllocRequest::new(0)).err(),
            cuda.allocate(0, &AllocRequest { scope: Some("host"), ..AllocRequest::new(5) }).err(),
            cuda.create_stream(0).err(),
            cuda.attribute(0, DeviceAttribute::Name).err(),
            cuda.trim(0).err(),
            side.synchronize().err(),
            stream(&side).query().err(),
            side.wait_for(&*cuda.default_stream(1).unwrap()).err(),
            cuda.default_stream(1).unwrap().wait_for(&*side).err(),
        ];
        for later in copies.into_iter().chain(others) {
            assert_eq!(later, Some(error.clone()));
        }
        assert_eq!(cuda.attribute(0, DeviceAttribute::Exists).unwrap(), Value::Bool(true));
        drop(memory);
        drop(side);
        // The other device remains usable.
        write(&*other, 0, &[5; 10]);
        assert_eq!(read(&*other, 0, 10), [5; 10]);
    });
}

/// The default stream fails at the next call.
trait Failing {
    fn unwrap_err_kind(self) -> rpc_core::RpcError;
}

impl Failing for rpc_core::Result<Arc<dyn Stream>> {
    fn unwrap_err_kind(self) -> rpc_core::RpcError {
        self.and_then(|stream| stream.synchronize()).unwrap_err()
    }
}

#[test]
fn an_unknown_code_is_an_ordinary_error() {
    with_driver("an_unknown_code_is_an_ordinary_error", &[], &[], |fake| {
        let cuda = CudaDevice::open().unwrap();
        let memory = allocate(&cuda, 0, 10);
        fake.fail(0, 987_654);
        let error = cuda.default_stream(0).unwrap_err_kind();
        assert_eq!(error.kind(), ErrorKind::Application);
        assert!(error.message().contains("failed with code 987654 (CUDA error 987654"), "{error}");
        fake.fail(0, 0);
        write(&*memory, 0, &[1]);
        assert_eq!(read(&*memory, 0, 2), [1, 0]);
    });
}

/// CUDA documents these codes as unspecific.
#[test]
fn an_unspecific_failure_is_final_if_it_persists() {
    with_driver("an_unspecific_failure_is_final_if_it_persists", &[], &[], |fake| {
        let cuda = CudaDevice::open().unwrap();
        for (index, code) in [(0, 999), (1, 806)] {
            let stream = cuda.stream(index).unwrap();
            fake.fail_next(code);
            assert_eq!(stream.query().unwrap_err().kind(), ErrorKind::Application);
            assert!(stream.query().unwrap());
            fake.fail(index, code);
            assert_eq!(stream.query().unwrap_err().kind(), ErrorKind::DeviceLost);
            fake.fail(index, 0);
            assert_eq!(stream.query().unwrap_err().kind(), ErrorKind::DeviceLost);
        }
    });
}

#[test]
fn streams_wait_for_each_other_without_blocking_a_thread() {
    with_driver("streams_wait_for_each_other_without_blocking_a_thread", &[], &[], |fake| {
        let cuda = CudaDevice::open().unwrap();
        let memory = allocate(&cuda, 0, 1000);
        let streams: Vec<_> = (0..3).map(|_| cuda.create_stream(0).unwrap()).collect();
        let far = cuda.create_stream(1).unwrap();
        let default = cuda.default_stream(0).unwrap();
        let waits = fake.count("fake_host_waits");
        // In reverse, so that the order of submission differs from the requested order.
        streams[0].wait_for(&*default).unwrap();
        cuda.context(0).unwrap();
        fake.fill(of(&*memory), 1, 1000, stream(&streams[0]));
        far.wait_for(&*streams[0]).unwrap();
        streams[1].wait_for(&*far).unwrap();
        cuda.context(0).unwrap();
        fake.fill(of(&*memory), 2, 500, stream(&streams[1]));
        default.wait_for(&*streams[1]).unwrap();
        default.wait_for(&*default).unwrap();
        assert_eq!(fake.count("fake_host_waits"), waits);
        assert!(!stream(&streams[1]).query().unwrap());
        assert_eq!(read(&*memory, 499, 2), [2, 1]);
        while !stream(&streams[1]).query().unwrap() {}
        assert_eq!((far.device(), default.device()), (Device::cuda(1), Device::cuda(0)));
        assert!(!stream(&default).raw().is_null());
        assert_eq!(stream(&default).raw(), cuda.stream(0).unwrap().raw());

        // A stream of another kind of device waits itself.
        fake.fill(of(&*memory), 3, 1000, stream(&streams[2]));
        let processor = CpuDevice::default().create_stream(0).unwrap();
        processor.wait_for(&*streams[2]).unwrap();
        assert_eq!(fake.pending(stream(&streams[2])), 0);
        streams[2].wait_for(&*processor).unwrap();
    });
}

#[test]
fn a_stream_calls_back_when_it_is_done_without_a_waiting_thread() {
    static MAY_GO_ON: [AtomicBool; 2] = [AtomicBool::new(false), AtomicBool::new(false)];
    with_driver("a_stream_calls_back_when_it_is_done_without_a_waiting_thread", &[], &[], |fake| {
        let cuda = CudaDevice::open().unwrap();
        let [held, free, far] = [0, 0, 1].map(|index| cuda.create_stream(index).unwrap());
        let (tell, told) = mpsc::channel();
        let ask = |name: &'static str, stream: &Arc<dyn Stream>| {
            let tell = tell.clone();
            assert!(stream.when_done(Box::new(move |outcome| tell.send((name, outcome)).unwrap())).is_ok());
        };
        let waits = fake.count("fake_host_waits");
        fake.hold(stream(&held).raw(), &MAY_GO_ON[0]);
        fake.hold(stream(&far).raw(), &MAY_GO_ON[1]);
        ask("held", &held);
        ask("far", &far);
        ask("free", &free);
        assert_eq!(told.recv_timeout(LIMIT).unwrap(), ("free", Ok(())));
        assert!(told.try_recv().is_err());
        MAY_GO_ON[0].store(true, Ordering::SeqCst);
        assert_eq!(told.recv_timeout(LIMIT).unwrap(), ("held", Ok(())));
        // A lost device does not call back; its waiters get the error nevertheless, and so do later
        // ones.
        fake.fail(1, 719);
        let (name, outcome) = told.recv_timeout(LIMIT).unwrap();
        assert_eq!((name, outcome.unwrap_err().kind()), ("far", ErrorKind::DeviceLost));
        ask("lost", &far);
        assert_eq!(told.recv_timeout(LIMIT).unwrap().1.unwrap_err().kind(), ErrorKind::DeviceLost);
        assert_eq!(fake.count("fake_host_waits"), waits);
        // The rest of its work must not delay the end of the test.
        MAY_GO_ON[1].store(true, Ordering::SeqCst);
    });
}

/// A session with one thread serves other lanes while a stream is waited for.
#[test]
fn a_session_waits_for_a_stream_without_a_thread() {
    static MAY_GO_ON: AtomicBool = AtomicBool::new(false);
    with_driver("a_session_waits_for_a_stream_without_a_thread", &[], &[], |fake| {
        let cuda = CudaDevice::open().unwrap();
        let registry = Registry::new();
        registry.add("work", || 5);
        let limits = SessionLimits { max_threads: 1, ..SessionLimits::default() };
        let devices = Devices::new().with(Arc::new(cuda));
        let session = Session::new(LocalSession::builder(registry).devices(devices).limits(limits).build());
        fake.hold(cuda.stream(0).unwrap().raw(), &MAY_GO_ON);
        let wait = session.stream_wait(Device::cuda(0), None);
        let work = session.function::<(), i64>("work").wait().unwrap();
        assert_eq!(work.call(()).lane(Lane(1)).wait().unwrap(), 5);
        MAY_GO_ON.store(true, Ordering::SeqCst);
        wait.wait().unwrap();
    });
}

#[test]
fn attributes_are_those_of_the_driver() {
    with_driver("attributes_are_those_of_the_driver", &[], &[], |_| {
        let cuda = CudaDevice::open().unwrap();
        assert_eq!(cuda.count().unwrap(), 2);
        let of = |attribute| cuda.attribute(1, attribute).unwrap();
        assert_eq!(of(DeviceAttribute::Name), "Fake GPU 1".into());
        assert_eq!(of(DeviceAttribute::ComputeVersion), "9.0".into());
        assert_eq!(of(DeviceAttribute::Target), "cuda -arch=sm_90".into());
        assert_eq!(of(DeviceAttribute::WarpSize), Value::Int(32));
        assert_eq!(of(DeviceAttribute::MaxThreadDimensions), Value::Shape(vec![1024, 512, 64]));
        assert_eq!(of(DeviceAttribute::TotalMemory), Value::Int(1 << 30));
        assert_eq!(of(DeviceAttribute::ApiVersion), Value::Int(12040));
        assert_eq!(of(DeviceAttribute::MemoryScopes), Value::List(vec!["host".into()]));
        assert_eq!(of(DeviceAttribute::GcnArch), Value::Null);
        for attribute in DeviceAttribute::ALL {
            cuda.attribute(0, *attribute).unwrap();
        }
        assert_eq!(cuda.attribute(2, DeviceAttribute::Exists).unwrap(), Value::Bool(false));
        assert_eq!(cuda.attribute(2, DeviceAttribute::Name).unwrap_err().kind(), ErrorKind::DeviceUnavailable);
        let devices = Devices::new().with(Arc::new(cuda));
        let chosen = devices.choose(&"cuda,target=cuda -arch=sm_90".parse().unwrap(), Device::cpu());
        assert_eq!(chosen.unwrap(), Device::cuda(0));
    });
}

#[test]
fn a_driver_without_devices_is_reported() {
    with_driver("a_driver_without_devices_is_reported", &[], &[("FAKE_CUDA_INIT", "100")], |_| {
        let error = CudaDevice::open().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeviceUnavailable);
        assert!(error.message().contains("no CUDA-capable device is detected (CUDA_ERROR_NO_DEVICE"), "{error}");
    });
}

#[test]
fn an_absent_driver_is_reported() {
    let nowhere = [("RPC_CUDA_DRIVER_LIBRARY", "/nonexistent/libcuda.so.1")];
    with_driver("an_absent_driver_is_reported", &[], &nowhere, |_| {
        let error = CudaDevice::open().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeviceUnavailable);
        assert!(error.message().contains("none of /nonexistent/libcuda.so.1 was found"), "{error}");
        assert!(error.message().contains("No such file"), "{error}");
    });
}

/// The toolkit's stub library for linkers, which is no driver, has only this name.
#[test]
fn the_stub_for_linkers_is_not_taken_for_the_driver() {
    let name = "the_stub_for_linkers_is_not_taken_for_the_driver";
    with_driver(name, &[fake::WITH_A_STUB], &[], |_| assert_eq!(CudaDevice::open().unwrap().count().unwrap(), 2));
}

/// Memory that a library has allocated, with a report of its release.
struct Lent {
    memory: Box<dyn Memory>,
    end: mpsc::Sender<()>,
}

impl Lent {
    fn new(memory: Box<dyn Memory>) -> (Self, mpsc::Receiver<()>) {
        let (end, ended) = mpsc::channel();
        (Self { memory, end }, ended)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // The receiver may be gone.
        _ = self.end.send(());
    }
}

/// Wraps `owner`'s bytes as memory of a device.
fn adopt(cuda: &CudaDevice, owner: Lent) -> Box<dyn Memory> {
    let (address, len) = (owner.memory.device_address().unwrap(), owner.memory.len() as usize);
    // SAFETY: the bytes belong to the owner, which gives no other access to them, and live until it
    // is dropped.
    unsafe { cuda.adopt(0, address, len, Box::new(owner)).unwrap() }
}

#[test]
fn adopted_memory_is_released_when_submitted_work_is_done() {
    static MAY_GO_ON: AtomicBool = AtomicBool::new(false);
    let name = "adopted_memory_is_released_when_submitted_work_is_done";
    with_driver(name, &[], &[], |fake| {
        let _end = GoOn(&MAY_GO_ON);
        let cuda = CudaDevice::open().unwrap();
        let side = cuda.create_stream(0).unwrap();
        let memory = allocate(&cuda, 0, 1000);
        write(&*memory, 0, &pattern(1000, 8));
        let (lent, ended) = Lent::new(memory);
        let adopted = adopt(&cuda, lent);
        assert_eq!((adopted.len(), adopted.host().is_none()), (1000, true));
        assert_eq!(read(&*adopted, 0, 1000), pattern(1000, 8));
        write(&*adopted, 10, &[1, 2, 3]);
        assert_eq!(read(&*adopted, 9, 5), [pattern(1000, 8)[9], 1, 2, 3, pattern(1000, 8)[13]]);
        // Work on another stream delays the release, and does not block the drop.
        side.wait_for(&*cuda.default_stream(0).unwrap()).unwrap();
        fake.hold(stream(&side).raw(), &MAY_GO_ON);
        fake.fill(of(&*adopted), 9, 1000, stream(&side));
        let waits = fake.count("fake_host_waits");
        drop(adopted);
        until_waited(fake, waits);
        assert!(ended.try_recv().is_err());
        MAY_GO_ON.store(true, Ordering::SeqCst);
        ended.recv_timeout(LIMIT).unwrap();
        assert_eq!(fake.pending(stream(&side)), 0);
    });
}

#[test]
fn a_session_has_tensors_in_adopted_memory() {
    with_driver("a_session_has_tensors_in_adopted_memory", &[], &[], |_| {
        let cuda = CudaDevice::open().unwrap();
        let memory = allocate(&cuda, 0, 12);
        write(&*memory, 0, &pattern(12, 1));
        let (lent, ended) = Lent::new(memory);
        let lent = Mutex::new(Some(lent));
        let registry = Registry::new();
        registry.add("borrow", move |context: Context| -> Result<Tensor> {
            let memory = adopt(&cuda, lent.lock().unwrap().take().unwrap());
            let layout = Layout { byte_offset: 4, shape: &[2], strides: None, dtype: DataType::F32 };
            context.adopt(Device::cuda(0), memory, layout)
        });
        let devices = Devices::new().with(Arc::new(cuda));
        let session = Session::new(LocalSession::builder(registry).devices(devices).build());
        let borrow = session.function::<(), RemoteTensor>("borrow").wait().unwrap();
        let tensor = borrow.call(()).wait().unwrap();
        assert_eq!(session.copy_from_remote(&tensor).wait().unwrap()[..], pattern(12, 1)[4..]);
        session.copy_to_remote(&tensor, vec![7; 8]).wait().unwrap();
        assert_eq!(session.copy_from_remote(&tensor).wait().unwrap()[..], [7; 8]);
        assert!(ended.try_recv().is_err());
        drop(tensor);
        ended.recv_timeout(LIMIT).unwrap();
        drop(session);
    });
}

#[test]
fn a_session_uses_the_device_as_any_other() {
    with_driver("a_session_uses_the_device_as_any_other", &[], &[], |_| {
        let devices = Devices::new().with(Arc::new(CudaDevice::open().unwrap()));
        let session = Session::new(LocalSession::builder(Registry::new()).devices(devices).build());
        let x = session.alloc(Device::cuda(0), DataType::F32, &[300_000]).wait().unwrap();
        let y = session.alloc(Device::cuda(1), DataType::F32, &[300_000]).wait().unwrap();
        let data = pattern(1_200_000, 4);
        session.copy_to_remote(&x, data.clone()).wait().unwrap();
        session.copy_among_remote(&x, &y).wait().unwrap();
        assert!(session.copy_from_remote(&y).wait().unwrap() == data);
        let stream = session.create_stream(Device::cuda(0)).wait().unwrap();
        session.set_stream(Device::cuda(0), Some(&stream)).wait().unwrap();
        session.stream_wait(Device::cuda(0), None).wait().unwrap();
    });
}
