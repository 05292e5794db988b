//! Tests of copies between memories of the host and of devices, and of the buffers that they go
//! through.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use rpc_core::device::{AllocRequest, CpuDevice, DeviceApi};
use rpc_cuda::CudaDevice;

use crate::fake::with_driver;
use crate::memory_access::{copy, read, write};
use crate::{BUFFER, LIMIT, ReleaseOnDrop, allocate, of, pattern, pinned, until_waited};

#[test]
fn copies_run_behind_the_default_stream_and_may_overlap() {
    with_driver("copies::copies_run_behind_the_default_stream_and_may_overlap", &[], &[], |fake| {
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
    with_driver("copies::bytes_pass_between_devices_and_all_kinds_of_host_memory", &[], &[], |fake| {
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
    with_driver("copies::an_upload_returns_before_the_device_has_it_and_a_download_waits", &[], &[], |fake| {
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
    with_driver("copies::a_download_asks_for_all_parts_of_its_buffer_before_it_waits", &[], &[], |fake| {
        const PARTS: usize = 4;
        let cuda = CudaDevice::open().unwrap();
        let memory = allocate(&cuda, 0, BUFFER as u64);
        let data = pattern(BUFFER, 3);
        write(&*memory, 0, &data);
        let stream = cuda.stream(0).unwrap();
        fake.run_all();
        fake.hold(stream.raw(), &MAY_GO_ON);
        std::thread::scope(|scope| {
            let _end = ReleaseOnDrop(&MAY_GO_ON);
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
    with_driver("copies::writes_behind_a_busy_stream_wait_when_all_buffers_are_in_use", &[], &[], |fake| {
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
            let _end = ReleaseOnDrop(&MAY_GO_ON);
            let waits = fake.count("fake_host_waits");
            scope.spawn(|| {
                for part in 0..BUFFERS + 2 {
                    let waits = fake.count("fake_host_waits");
                    write(&*memory, (part * BUFFER) as u64, &pattern(BUFFER, part));
                    tell.send((part, fake.count("fake_host_waits") - waits)).unwrap();
                }
            });
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

/// Regression: each copy held its thread until the device had done it, and went through the host.
#[test]
fn copies_of_device_memory_are_direct_and_hold_no_thread() {
    static MAY_GO_ON: AtomicBool = AtomicBool::new(false);
    with_driver("copies::copies_of_device_memory_are_direct_and_hold_no_thread", &[], &[], |fake| {
        let _end = ReleaseOnDrop(&MAY_GO_ON);
        let cuda = CudaDevice::open().unwrap();
        let [first, second] = [0, 0].map(|index| allocate(&cuda, index, 1000));
        let far = allocate(&cuda, 1, 1000);
        // Another library has enabled one direction.
        fake.enable_peer_access(&cuda, 1, 0);
        write(&*first, 0, &pattern(1000, 4));
        fake.hold(cuda.stream(0).unwrap().raw(), &MAY_GO_ON);
        let waits = fake.count("fake_host_waits");
        copy(&cuda, (&*first, 0), (&*second, 0), 1000);
        copy(&cuda, (&*second, 10), (&*second, 11), 900);
        copy(&cuda, (&*second, 0), (&*far, 0), 1000);
        copy(&cuda, (&*far, 5), (&*first, 0), 900);
        assert_eq!(fake.count("fake_host_waits"), waits);
        assert_eq!((fake.count("fake_peer_copies"), fake.count("fake_direct_copies")), (2, 2));
        // Memory that is freed behind a copy is not reused too early.
        drop(second);
        let again = allocate(&cuda, 0, 1000);
        MAY_GO_ON.store(true, Ordering::SeqCst);
        let mut expected = pattern(1000, 4);
        expected.copy_within(10..910, 11);
        assert!(read(&*far, 0, 1000) == expected);
        assert!(read(&*first, 0, 900) == expected[5..905]);
        assert_eq!(read(&*again, 0, 1000), [0; 1000]);
    });
}

#[test]
fn devices_that_do_not_reach_each_other_copy_through_the_host() {
    let name = "copies::devices_that_do_not_reach_each_other_copy_through_the_host";
    with_driver(name, &[], &[("FAKE_CUDA_PEERS", "0")], |fake| {
        let cuda = CudaDevice::open().unwrap();
        let (near, far) = (allocate(&cuda, 0, 10), allocate(&cuda, 1, 10));
        write(&*near, 0, &[7; 10]);
        copy(&cuda, (&*near, 0), (&*far, 0), 10);
        assert_eq!(read(&*far, 0, 10), [7; 10]);
        assert_eq!((fake.count("fake_peer_copies"), fake.count("fake_direct_copies")), (1, 0));
    });
}

/// Test of the fake driver itself: pinned memory that the device is not done with.
#[test]
fn the_fake_driver_notices_a_processor_that_is_too_early() {
    static MAY_GO_ON: AtomicBool = AtomicBool::new(false);
    with_driver("copies::the_fake_driver_notices_a_processor_that_is_too_early", &[], &[], |fake| {
        let _end = ReleaseOnDrop(&MAY_GO_ON);
        let cuda = CudaDevice::open().unwrap();
        let (stream, bytes) = (cuda.stream(0).unwrap(), pinned(&cuda, 10));
        fake.hold(stream.raw(), &MAY_GO_ON);
        fake.fill(of(&*bytes), 7, 10, &stream);
        assert_eq!(fake.count("fake_take_violations"), 0);
        read(&*bytes, 0, 10);
        assert_eq!(fake.count("fake_take_violations"), 1);
        MAY_GO_ON.store(true, Ordering::SeqCst);
        fake.run_all();
        assert_eq!(read(&*bytes, 0, 10), [7; 10]);
    });
}
