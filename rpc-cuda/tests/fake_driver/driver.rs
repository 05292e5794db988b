//! Tests of finding the driver, and of the attributes that it reports.

use std::sync::Arc;

use rpc_core::device::DeviceApi;
use rpc_core::{Device, DeviceAttribute, Devices, ErrorKind, Value};
use rpc_cuda::CudaDevice;

use crate::fake::{WITH_A_STUB, with_driver};

#[test]
fn attributes_are_those_of_the_driver() {
    with_driver("driver::attributes_are_those_of_the_driver", &[], &[], |_| {
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
    with_driver("driver::a_driver_without_devices_is_reported", &[], &[("FAKE_CUDA_INIT", "100")], |_| {
        let error = CudaDevice::open().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeviceUnavailable);
        assert!(error.message().contains("no CUDA-capable device is detected (CUDA_ERROR_NO_DEVICE"), "{error}");
    });
}

#[test]
fn an_absent_driver_is_reported() {
    let nowhere = [("RPC_CUDA_DRIVER_LIBRARY", "/nonexistent/libcuda.so.1")];
    with_driver("driver::an_absent_driver_is_reported", &[], &nowhere, |_| {
        let error = CudaDevice::open().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeviceUnavailable);
        assert!(error.message().contains("none of /nonexistent/libcuda.so.1 was found"), "{error}");
        assert!(error.message().contains("No such file"), "{error}");
    });
}

/// The toolkit's stub library for linkers, which is no driver, has only this name.
#[test]
fn the_stub_for_linkers_is_not_taken_for_the_driver() {
    let name = "driver::the_stub_for_linkers_is_not_taken_for_the_driver";
    with_driver(name, &[WITH_A_STUB], &[], |_| assert_eq!(CudaDevice::open().unwrap().count().unwrap(), 2));
}
