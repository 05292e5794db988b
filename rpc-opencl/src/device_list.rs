//! The list of the process's devices, and what is known of each without opening it.

use std::sync::OnceLock;

use opencl3::device::{
    CL_DEVICE_AVAILABLE, CL_DEVICE_ENDIAN_LITTLE, CL_DEVICE_TYPE, CL_DEVICE_TYPE_ALL, CL_DEVICE_TYPE_CPU,
    CL_DEVICE_VERSION, get_device_data, get_device_ids,
};
use opencl3::error_codes::{CL_PLATFORM_NOT_FOUND_KHR, error_text};
use opencl3::platform::platform::{CL_PLATFORM_NAME, get_platform_data, get_platform_ids};
use opencl3::types::{cl_device_id, cl_device_info, cl_int, cl_platform_id};

use crate::{failure, library};
use rpc_core::dlpack::Device;
use rpc_core::error::{ErrorKind, Result, RpcError};

/// The devices of this process that can be used: GPUs and accelerators in the order of their
/// platforms, and behind them processors.
pub(super) struct DeviceList {
    pub(super) all: Vec<ListedDevice>,
}

/// A device of the list.
pub(super) struct ListedDevice {
    pub(super) index: i32,
    id: cl_device_id,
    /// Name of the platform, such as that of the vendor.
    pub(super) platform: String,
    /// True if the device is a processor: kernels are machine code in this process.
    pub(super) is_processor: bool,
    /// Error of all calls, once the device is lost.
    lost: OnceLock<RpcError>,
}

// SAFETY: the driver's devices live as long as the process, and may be used from any thread.
unsafe impl Send for ListedDevice {}
// SAFETY: as above.
unsafe impl Sync for ListedDevice {}

impl DeviceList {
    /// Returns the devices, loading OpenCL at the first call. The outcome of the first call is
    /// kept.
    pub(super) fn get() -> Result<&'static Self> {
        static DEVICES: OnceLock<Result<DeviceList>> = OnceLock::new();
        DEVICES.get_or_init(Self::find).as_ref().map_err(RpcError::clone)
    }

    fn find() -> Result<Self> {
        let unavailable = |reason: String| RpcError::new(ErrorKind::DeviceUnavailable, reason);
        library::check().map_err(unavailable)?;
        let platforms = match get_platform_ids() {
            Ok(platforms) => platforms,
            Err(CL_PLATFORM_NOT_FOUND_KHR) => Vec::new(),
            Err(code) => return Err(unavailable(failure::describe("clGetPlatformIDs", code))),
        };
        if platforms.is_empty() {
            return Err(unavailable("OpenCL is installed but has no platform, that is, no vendor's driver".to_owned()));
        }
        let (mut all, mut left_out) = (Vec::new(), Vec::new());
        for platform in platforms {
            let platform_name = platform_name(platform);
            // A platform that fails does not hide the others.
            let ids = match get_device_ids(platform, CL_DEVICE_TYPE_ALL) {
                Ok(ids) => ids,
                Err(code) => {
                    left_out.push(format!("{platform_name}: {}", failure::describe("clGetDeviceIDs", code)));
                    continue;
                }
            };
            for id in ids {
                match check_usable(id) {
                    Ok(()) => all.push((is_processor(id), id, platform_name.clone())),
                    Err(reason) => left_out.push(format!("a device of {platform_name} {reason}")),
                }
            }
        }
        if all.is_empty() {
            let reasons = left_out.iter().map(|reason| format!("; {reason}")).collect::<String>();
            return Err(unavailable(format!("OpenCL is installed but finds no device that can be used{reasons}")));
        }
        // The order among others stays as it is.
        all.sort_by_key(|(is_processor, ..)| *is_processor);
        let listed = |(index, (is_processor, id, platform)): (usize, (bool, cl_device_id, String))| ListedDevice {
            // Nobody has so many devices.
            index: index as i32,
            id,
            platform,
            is_processor,
            lost: OnceLock::new(),
        };
        Ok(Self { all: all.into_iter().enumerate().map(listed).collect() })
    }
}

impl ListedDevice {
    /// Returns the device's own name of it.
    pub(super) fn id(&self) -> cl_device_id {
        self.id
    }

    pub(super) fn as_device(&self) -> Device {
        Device::opencl(self.index)
    }

    /// Converts the outcome of OpenCL's `function` to a result, and records the loss of the device
    /// if it means that.
    pub(super) fn check<T>(&self, function: &str, outcome: Result<T, cl_int>) -> Result<T> {
        outcome.map_err(|code| {
            if !failure::is_final(code) {
                return failure::error(self.as_device(), function, code);
            }
            let error = failure::lost(self.as_device(), function, code);
            rpc_core::log_limited!(ERROR, device = %self.as_device(), %error, "a device is lost");
            self.lost.get_or_init(|| error).clone()
        })
    }

    pub(super) fn check_not_lost(&self) -> Result<()> {
        self.lost.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Returns the bytes of a property; none if the driver does not have it.
    pub(super) fn property(&self, property: cl_device_info) -> Vec<u8> {
        get_device_data(self.id, property).unwrap_or_default()
    }

    /// Returns a property that is a number of any width; `None` if the driver does not have it.
    pub(super) fn number(&self, property: cl_device_info) -> Option<u64> {
        number(&self.property(property))
    }

    /// Returns a property that is a text; empty if the driver does not have it.
    pub(super) fn text(&self, property: cl_device_info) -> String {
        text(&self.property(property))
    }
}

/// Returns the number that OpenCL has written as these bytes.
pub(super) fn number(bytes: &[u8]) -> Option<u64> {
    match *bytes {
        [] => None,
        [a, b, c, d] => Some(u32::from_ne_bytes([a, b, c, d]).into()),
        [a, b, c, d, e, f, g, h] => Some(u64::from_ne_bytes([a, b, c, d, e, f, g, h])),
        _ => None,
    }
}

/// Returns the text that OpenCL has written as these bytes, with a zero behind it.
pub(super) fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).trim().to_owned()
}

/// Returns the numbers of a version such as `OpenCL 3.0 PoCL`.
pub(super) fn version(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.strip_prefix("OpenCL ")?.split_whitespace().next()?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn platform_name(platform: cl_platform_id) -> String {
    match get_platform_data(platform, CL_PLATFORM_NAME) {
        Ok(name) => text(&name),
        Err(code) => format!("a platform without a name ({})", error_text(code)),
    }
}

/// Checks that this crate can use a device.
fn check_usable(id: cl_device_id) -> Result<(), String> {
    let property = |property| get_device_data(id, property).unwrap_or_default();
    if number(&property(CL_DEVICE_AVAILABLE)) == Some(0) {
        return Err("is not available".to_owned());
    }
    if number(&property(CL_DEVICE_ENDIAN_LITTLE)) == Some(0) {
        return Err("has its numbers in big-endian order".to_owned());
    }
    let found = text(&property(CL_DEVICE_VERSION));
    if version(&found).is_some_and(|version| version >= OLDEST_VERSION) {
        Ok(())
    } else {
        Err(format!("has '{found}', which is older than OpenCL 1.2"))
    }
}

fn is_processor(id: cl_device_id) -> bool {
    let kinds = number(&get_device_data(id, CL_DEVICE_TYPE).unwrap_or_default());
    kinds.is_some_and(|kinds| kinds & CL_DEVICE_TYPE_CPU != 0)
}

/// First version with markers and barriers that wait for events, and with fills of buffers.
const OLDEST_VERSION: (u32, u32) = (1, 2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        assert_eq!(version("OpenCL 3.0 PoCL HSTR: x"), Some((3, 0)));
        assert!(version("OpenCL 1.10 x").unwrap() >= OLDEST_VERSION);
        assert!(version("OpenCL 1.1 Mesa").unwrap() < OLDEST_VERSION);
        for other in ["", "OpenCL", "OpenCL C 1.2", "CUDA 12.4", "OpenCL x.y"] {
            assert_eq!(version(other), None, "{other}");
        }
    }

    #[test]
    fn properties_are_read_at_their_width() {
        assert_eq!(number(&7_u32.to_ne_bytes()), Some(7));
        assert_eq!(number(&(7_u64 << 40).to_ne_bytes()), Some(7 << 40));
        assert_eq!(number(&[]), None);
        assert_eq!(text(b" a name\0rest"), "a name");
    }
}
