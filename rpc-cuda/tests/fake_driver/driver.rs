//! Tests of finding the driver, and of the attributes that it reports.

use std::sync::Arc;

use rpc_core::device::{DeviceApi, DeviceState};
use rpc_core::{Device, DeviceAttribute, Devices, ErrorKind, Value};
use rpc_cuda::CudaDevice;

use crate::fake::{WITH_A_STUB, WITH_NVML, with_driver};

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

#[test]
fn a_device_that_its_compute_mode_withholds_is_unavailable_with_the_reason() {
    let name = "driver::a_device_that_its_compute_mode_withholds_is_unavailable_with_the_reason";
    for mode in ["2", "3"] {
        with_driver(name, &[], &[("FAKE_CUDA_COMPUTE_MODE", mode)], |_| {
            // In the child it is the mode of either turn.
            let (reason, kind) = if std::env::var("FAKE_CUDA_COMPUTE_MODE").unwrap() == "2" {
                ("its compute mode is 'prohibited'", "CUDA_ERROR_UNKNOWN")
            } else {
                ("'exclusive process', and another process has it", "CUDA_ERROR_DEVICE_UNAVAILABLE")
            };
            let cuda = CudaDevice::open().unwrap();
            let error = cuda.stream(0).unwrap_err();
            assert_eq!((error.kind(), error.application_kind()), (ErrorKind::DeviceUnavailable, Some(kind)), "{error}");
            assert!(error.message().contains(reason), "{error}");
            assert!(error.message().contains("nvidia-smi --compute-mode=0"), "{error}");
            // It is not lost: the mode may change.
            assert_eq!(cuda.attribute(0, DeviceAttribute::Name).unwrap(), "Fake GPU 0".into());
        });
    }
}

#[test]
fn a_driver_that_is_too_old_is_reported() {
    with_driver("driver::a_driver_that_is_too_old_is_reported", &["-DANCIENT_DRIVER"], &[], |_| {
        let error = CudaDevice::open().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeviceUnavailable);
        assert!(error.message().contains("no cuLaunchHostFunc: it is older than CUDA 11.4"), "{error}");
    });
}

/// Regression: the message of an `nvidia-smi` that finds no driver was taken for a list of GPUs.
#[test]
fn the_script_for_gpus_says_in_one_line_that_there_is_none() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("nvidia-smi");
    std::fs::write(&program, "#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n").unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:/usr/bin:/bin", folder.path().display());
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/gpu.sh");
    let output = std::process::Command::new("sh").arg(script).env("PATH", path).output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "no GPU: nvidia-smi finds none\n");
}

#[test]
fn the_state_of_a_gpu_is_that_of_its_place_on_the_bus() {
    let test = "driver::the_state_of_a_gpu_is_that_of_its_place_on_the_bus";
    // With one device hidden, the first is that at 3c:00.
    with_driver(test, &[WITH_NVML], &[("FAKE_PCI_SHIFT", "1")], |_| {
        let cuda = CudaDevice::open().unwrap();
        assert_eq!(cuda.pci_bus_id(0).unwrap(), "00000000:3c:00.0");
        let state = cuda.state(0);
        assert_eq!((state.clock_mhz, state.utilization_percent), (Some(1000 + 0x3c), Some(0x3c)), "{state:?}");
        assert_eq!((state.used_memory, state.total_memory), (Some(0x3c << 20), Some(1 << 30)));
        assert_eq!(state.unknown_because, None);
        let state = cuda.state(1);
        let reason = "nvmlDeviceGetHandleByPciBusId: Not Found (00000000:3d:00.0)";
        assert_eq!(state, DeviceState::unknown(reason));
        assert!(cuda.state(2).unknown_because.is_some());
    });
}

/// Runs a test with a management library that misbehaves. Nothing that it tells is believed, and
/// the reasons are told.
fn nothing_is_known(test: &str, how: &str, reasons: &[&str]) {
    with_driver(test, &[WITH_NVML], &[("FAKE_NVML", how)], |_| {
        let mut state = CudaDevice::open().unwrap().state(0);
        let because = state.unknown_because.take().unwrap();
        for reason in reasons {
            assert!(because.contains(reason), "{because}");
        }
        assert_eq!(state, DeviceState::default());
    });
}

#[test]
fn a_management_library_that_cannot_be_initialised_is_a_reason() {
    let test = "driver::a_management_library_that_cannot_be_initialised_is_a_reason";
    nothing_is_known(test, "init", &["nvmlInit: Unknown Error"]);
}

#[test]
fn a_management_library_that_does_not_answer_is_a_reason() {
    let test = "driver::a_management_library_that_does_not_answer_is_a_reason";
    nothing_is_known(test, "silent", &["has not answered within 3s"]);
}

#[test]
fn impossible_values_of_the_management_library_are_not_believed() {
    let test = "driver::impossible_values_of_the_management_library_are_not_believed";
    nothing_is_known(test, "wild", &["4294967295 MHz", "18446744073709551615 bytes", "101 %"]);
}

#[test]
fn values_that_a_gpu_does_not_have_need_no_reason() {
    let test = "driver::values_that_a_gpu_does_not_have_need_no_reason";
    with_driver(test, &[WITH_NVML], &[("FAKE_NVML", "old")], |_| {
        assert_eq!(CudaDevice::open().unwrap().state(0), DeviceState::default());
    });
}

#[test]
fn without_nvml_the_state_is_unknown() {
    let test = "driver::without_nvml_the_state_is_unknown";
    with_driver(test, &[], &[("RPC_CUDA_NVML_LIBRARY", "/no/such/libnvidia-ml.so.1")], |_| {
        let state = CudaDevice::open().unwrap().state(0);
        let because = state.unknown_because.clone().unwrap();
        assert!(because.contains("/no/such/libnvidia-ml.so.1"), "{because}");
        assert_eq!(state, DeviceState::unknown(because));
    });
}
