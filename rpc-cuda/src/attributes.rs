//! Attributes of a GPU.

use std::ffi::{CStr, c_char};

use cudarc::driver::sys::CUdevice_attribute_enum as Attribute;

use crate::gpu::Gpu;
use crate::gpu_list::ListedGpu;
use crate::memory::{HOST_SCOPE, MAX_ALIGNMENT};
use rpc_core::device::{DeviceAttribute, Target};
use rpc_core::error::Result;
use rpc_core::value::Value;

/// Returns the value of any attribute but [`DeviceAttribute::Exists`].
pub(super) fn attribute_value(listed: &'static ListedGpu, attribute: DeviceAttribute) -> Result<Value> {
    let gpu = &listed.gpu;
    gpu.check_not_lost()?;
    let number = |attribute| gpu.attribute(attribute).map(Value::from);
    match attribute {
        DeviceAttribute::Exists => Ok(Value::Bool(true)),
        DeviceAttribute::MaxThreadsPerBlock => number(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
        DeviceAttribute::WarpSize => number(Attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE),
        DeviceAttribute::MaxSharedMemoryPerBlock => number(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK),
        DeviceAttribute::ComputeVersion => {
            compute_capability(gpu).map(|(major, minor)| format!("{major}.{minor}").into())
        }
        DeviceAttribute::Name => name(gpu).map(Value::Str),
        DeviceAttribute::MaxClockRate => number(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE),
        DeviceAttribute::ComputeUnits => number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        DeviceAttribute::MaxThreadDimensions => {
            let dimensions = [
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X,
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y,
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z,
            ];
            let limit = |attribute| gpu.attribute(attribute).map(i64::from);
            dimensions.into_iter().map(limit).collect::<Result<_>>().map(Value::Shape)
        }
        DeviceAttribute::MaxRegistersPerBlock => number(Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK),
        DeviceAttribute::ApiVersion => {
            let mut version = 0;
            // SAFETY: there is room for the number.
            gpu.check(unsafe { gpu.driver.driver_get_version(&raw mut version) })?;
            Ok(version.into())
        }
        DeviceAttribute::DriverVersion => Ok(driver_version().into()),
        DeviceAttribute::L2CacheSize => number(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE),
        DeviceAttribute::TotalMemory => gpu.total_memory().map(bytes),
        DeviceAttribute::AvailableMemory => {
            let opened = listed.enter()?;
            Ok(bytes(gpu.free_memory()?.saturating_add(opened.memory.statistics().cached_bytes)))
        }
        DeviceAttribute::ImagePitchAlignment => number(Attribute::CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT),
        DeviceAttribute::MaxAlignment => Ok(bytes(MAX_ALIGNMENT)),
        DeviceAttribute::Target => target(gpu).map(|target| target.to_string().into()),
        DeviceAttribute::MemoryScopes => Ok(Value::List(vec![HOST_SCOPE.into()])),
        // AMD's `GcnArch`, and attributes that this crate does not know.
        _ => Ok(Value::Null),
    }
}

/// Returns the place of a GPU on the PCI bus, in the form of NVIDIA's management library.
pub(super) fn pci_bus_id(gpu: &Gpu) -> Result<String> {
    let domain = gpu.attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?;
    let bus = gpu.attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?;
    let device = gpu.attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?;
    Ok(format!("{domain:08x}:{bus:02x}:{device:02x}.0"))
}

fn compute_capability(gpu: &Gpu) -> Result<(i32, i32)> {
    let major = gpu.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    Ok((major, gpu.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?))
}

fn target(gpu: &Gpu) -> Result<Target> {
    let (major, minor) = compute_capability(gpu)?;
    Target::new("cuda")?.with("arch", &format!("sm_{major}{minor}"))
}

fn name(gpu: &Gpu) -> Result<String> {
    let mut name: [c_char; 256] = [0; 256];
    // SAFETY: there is room for the given number of bytes, the terminating zero included, and the
    // last byte stays zero.
    gpu.check(unsafe { gpu.driver.device_get_name(name.as_mut_ptr(), 255, gpu.device) })?;
    // SAFETY: it ends with a zero within the array, which outlives the text.
    Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
}

/// Returns the driver's version from the kernel module. CUDA itself only reports the version of the
/// driver's interface.
fn driver_version() -> Option<String> {
    let version = std::fs::read_to_string("/sys/module/nvidia/version").ok()?;
    Some(version.trim().to_owned())
}

fn bytes(count: u64) -> Value {
    Value::Int(i64::try_from(count).unwrap_or(i64::MAX))
}
