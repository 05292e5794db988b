//! Tests of device memory: its content, alignment and scopes, and its reuse by the pool.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rpc_core::device::{AllocRequest, DeviceApi, Stream};
use rpc_core::{Device, DeviceAttribute, ErrorKind, Value};
use rpc_cuda::CudaDevice;

use crate::fake::with_driver;
use crate::memory_access::{read, write};
use crate::{BUFFER, LIMIT, ReleaseOnDrop, allocate, of, pattern, pinned, stream};

#[test]
fn memory_reads_as_zeros_and_keeps_what_is_written_at_every_size() {
    with_driver("memory::memory_reads_as_zeros_and_keeps_what_is_written_at_every_size", &[], &[], |_| {
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
    with_driver("memory::alignments_and_scopes_are_kept_or_refused", &[], &[], |_| {
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

/// P-1 and P-2.
#[test]
fn memory_is_reused_behind_the_work_of_its_last_owner() {
    with_driver("memory::memory_is_reused_behind_the_work_of_its_last_owner", &[], &[], |fake| {
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
    with_driver("memory::a_dropped_stream_finishes_before_memory_is_reused", &[], &[], |fake| {
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

/// P-3 and P-4; the fake driver detects memory that is freed while submitted work uses it.
#[test]
fn idle_memory_is_bounded_and_goes_back_when_its_work_is_done() {
    with_driver("memory::idle_memory_is_bounded_and_goes_back_when_its_work_is_done", &[], &[], |fake| {
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
    with_driver("memory::memory_that_stays_idle_goes_back_to_the_driver", &[], &[], |fake| {
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

/// P-6. Regression: a thread that asked for the state of idle memory held the pool's lock
/// meanwhile.
#[test]
fn a_pool_answers_while_its_idle_memory_waits_for_the_driver() {
    static MAY_GO_ON: AtomicBool = AtomicBool::new(false);
    with_driver("memory::a_pool_answers_while_its_idle_memory_waits_for_the_driver", &[], &[], |fake| {
        let cuda = CudaDevice::open().unwrap();
        cuda.set_idle_time(0, Duration::from_secs(3600)).unwrap();
        drop(allocate(&cuda, 0, 1 << 20));
        drop(pinned(&cuda, 1 << 20));
        fake.run_all();
        let idle = || (cuda.statistics(0).unwrap().cached_bytes, cuda.pinned_statistics(0).unwrap().cached_bytes);
        let eventually = |is: &dyn Fn() -> bool| {
            let since = std::time::Instant::now();
            while !is() {
                assert!(since.elapsed() < LIMIT, "{:?}", idle());
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            let _end = ReleaseOnDrop(&MAY_GO_ON);
            let waits = fake.count("fake_device_waits");
            scope.spawn(|| fake.free_under_the_lock(&cuda, &MAY_GO_ON));
            eventually(&|| fake.count("fake_device_waits") > waits);
            cuda.set_idle_time(0, Duration::ZERO).unwrap();
            // The thread that frees idle memory asks the driver if it is done.
            eventually(&|| fake.count("fake_waiting") > 0);
            assert_eq!(idle(), (1 << 20, 1 << 20));
        });
        eventually(&|| idle() == (0, 0));
    });
}

#[test]
fn a_full_device_returns_idle_memory_before_it_refuses() {
    let memory = [("FAKE_CUDA_MEMORY", "67108864")];
    with_driver("memory::a_full_device_returns_idle_memory_before_it_refuses", &[], &memory, |_| {
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
