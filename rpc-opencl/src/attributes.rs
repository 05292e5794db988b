//! Attributes of a device.

use opencl3::device::{
    CL_DEVICE_GLOBAL_MEM_CACHE_SIZE, CL_DEVICE_GLOBAL_MEM_SIZE, CL_DEVICE_IMAGE_PITCH_ALIGNMENT,
    CL_DEVICE_LOCAL_MEM_SIZE, CL_DEVICE_MAX_CLOCK_FREQUENCY, CL_DEVICE_MAX_COMPUTE_UNITS,
    CL_DEVICE_MAX_WORK_GROUP_SIZE, CL_DEVICE_MAX_WORK_ITEM_SIZES, CL_DEVICE_MEM_BASE_ADDR_ALIGN, CL_DEVICE_NAME,
    CL_DEVICE_PREFERRED_WORK_GROUP_SIZE_MULTIPLE, CL_DEVICE_VERSION, CL_DRIVER_VERSION,
};

use crate::device_list::{ListedDevice, number, version};
use crate::memory::HOST_SCOPE;
use rpc_core::device::{DeviceAttribute, Target};
use rpc_core::dlpack::DeviceType;
use rpc_core::error::Result;
use rpc_core::value::Value;

/// Returns the value of any attribute but [`DeviceAttribute::Exists`].
pub(super) fn attribute_value(listed: &'static ListedDevice, attribute: DeviceAttribute) -> Result<Value> {
    listed.check_not_lost()?;
    let int = |property| listed.number(property).map(int);
    let version = || version(&listed.text(CL_DEVICE_VERSION));
    Ok(match attribute {
        DeviceAttribute::Exists => Value::Bool(true),
        DeviceAttribute::MaxThreadsPerBlock => int(CL_DEVICE_MAX_WORK_GROUP_SIZE).into(),
        // Only since OpenCL 3.0 is it a property of a device, and not of a kernel alone.
        DeviceAttribute::WarpSize => int(CL_DEVICE_PREFERRED_WORK_GROUP_SIZE_MULTIPLE).into(),
        DeviceAttribute::MaxSharedMemoryPerBlock => int(CL_DEVICE_LOCAL_MEM_SIZE).into(),
        DeviceAttribute::ComputeVersion => version().map(|(major, minor)| format!("{major}.{minor}")).into(),
        DeviceAttribute::Name => format!("{} ({})", listed.text(CL_DEVICE_NAME), listed.platform).into(),
        // OpenCL counts in MHz.
        DeviceAttribute::MaxClockRate => {
            listed.number(CL_DEVICE_MAX_CLOCK_FREQUENCY).map(|mhz| self::int(mhz.saturating_mul(1000))).into()
        }
        DeviceAttribute::ComputeUnits => int(CL_DEVICE_MAX_COMPUTE_UNITS).into(),
        DeviceAttribute::MaxThreadDimensions => {
            let sizes = listed.property(CL_DEVICE_MAX_WORK_ITEM_SIZES);
            let sizes: Vec<i64> = sizes.chunks_exact(size_of::<usize>()).filter_map(number).map(self::int).collect();
            if sizes.is_empty() { Value::Null } else { Value::Shape(sizes) }
        }
        DeviceAttribute::ApiVersion => version().map(|(major, minor)| i64::from(100 * major + 10 * minor)).into(),
        DeviceAttribute::DriverVersion => listed.text(CL_DRIVER_VERSION).into(),
        DeviceAttribute::L2CacheSize => int(CL_DEVICE_GLOBAL_MEM_CACHE_SIZE).into(),
        DeviceAttribute::TotalMemory => int(CL_DEVICE_GLOBAL_MEM_SIZE).into(),
        DeviceAttribute::ImagePitchAlignment => int(CL_DEVICE_IMAGE_PITCH_ALIGNMENT).into(),
        DeviceAttribute::MaxAlignment => {
            listed.number(CL_DEVICE_MEM_BASE_ADDR_ALIGN).map(|bits| self::int(bits / 8)).into()
        }
        DeviceAttribute::Target => Target::of_device(DeviceType::OPENCL).to_string().into(),
        DeviceAttribute::MemoryScopes => Value::List(vec![HOST_SCOPE.into()]),
        // OpenCL does not tell registers and free memory; and attributes that this crate does not
        // know.
        _ => Value::Null,
    })
}

fn int(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
