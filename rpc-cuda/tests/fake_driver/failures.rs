//! Tests of failures of a device, which are final, and of calls, which are not.

use std::sync::Arc;

use rpc_core::device::{AllocRequest, DeviceApi, Stream};
use rpc_core::{DeviceAttribute, ErrorKind, Value};
use rpc_cuda::CudaDevice;

use crate::fake::with_driver;
use crate::memory_access::{read, write};
use crate::{allocate, stream};

#[test]
fn a_lost_device_stays_lost_with_the_reason() {
    with_driver("failures::a_lost_device_stays_lost_with_the_reason", &[], &[], |fake| {
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
    with_driver("failures::an_unknown_code_is_an_ordinary_error", &[], &[], |fake| {
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
    with_driver("failures::an_unspecific_failure_is_final_if_it_persists", &[], &[], |fake| {
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
