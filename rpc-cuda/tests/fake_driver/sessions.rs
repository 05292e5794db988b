//! Tests of sessions with the device: tensors, and waits for streams.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rpc_core::{DataType, Device, Devices, Lane, LocalSession, Registry, Session, SessionLimits};
use rpc_cuda::CudaDevice;

use crate::fake::with_driver;
use crate::pattern;

#[test]
fn a_session_uses_the_device_as_any_other() {
    with_driver("sessions::a_session_uses_the_device_as_any_other", &[], &[], |_| {
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

/// A session with one thread serves other lanes while a stream is waited for.
#[test]
fn a_session_waits_for_a_stream_without_a_thread() {
    static MAY_GO_ON: AtomicBool = AtomicBool::new(false);
    with_driver("sessions::a_session_waits_for_a_stream_without_a_thread", &[], &[], |fake| {
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
