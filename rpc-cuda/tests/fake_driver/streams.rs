//! Tests of streams: waits among them, and reports of their end without a waiting thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use rpc_core::device::{CpuDevice, DeviceApi, Stream};
use rpc_core::{Device, ErrorKind};
use rpc_cuda::CudaDevice;

use crate::fake::with_driver;
use crate::memory_access::read;
use crate::{LIMIT, allocate, of, pinned, stream};

#[test]
fn streams_wait_for_each_other_without_blocking_a_thread() {
    with_driver("streams::streams_wait_for_each_other_without_blocking_a_thread", &[], &[], |fake| {
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
    with_driver("streams::a_stream_calls_back_when_it_is_done_without_a_waiting_thread", &[], &[], |fake| {
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

#[test]
fn drops_preserve_the_current_context() {
    with_driver("streams::drops_preserve_the_current_context", &[], &[], |fake| {
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
