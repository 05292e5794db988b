//! [`Device`] and [`DeviceType`], and their text forms, such as `cuda:1`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Result, RpcError};

/// Kind of a device: DLPack's `DLDeviceType`. Any number is carried; the known ones have names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DeviceType(pub i32);

macro_rules! device_types {
    ($($(#[$doc:meta])* $constant:ident = $code:literal $name:literal;)*) => {
        impl DeviceType {
            $($(#[$doc])* pub const $constant: Self = Self($code);)*

            /// Kinds that have a name, by number.
            pub const KNOWN: &[Self] = &[$(Self::$constant,)*];

            /// Returns the usual name, if the number is a known one.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($code => Some($name),)*
                    _ => None,
                }
            }

            fn from_name(name: &str) -> Option<Self> {
                match name {
                    $($name => Some(Self($code)),)*
                    "gpu" => Some(Self::CUDA),
                    _ => None,
                }
            }
        }
    };
}

device_types! {
    /// Host memory.
    CPU = 1 "cpu";
    /// NVIDIA GPU.
    CUDA = 2 "cuda";
    /// Host memory pinned for CUDA.
    CUDA_HOST = 3 "cuda_host";
    /// OpenCL.
    OPENCL = 4 "opencl";
    /// Vulkan.
    VULKAN = 7 "vulkan";
    /// Apple Metal.
    METAL = 8 "metal";
    /// Verilog simulator.
    VPI = 9 "vpi";
    /// AMD GPU.
    ROCM = 10 "rocm";
    /// Host memory pinned for ROCm.
    ROCM_HOST = 11 "rocm_host";
    /// A device type under test by its makers.
    EXT_DEV = 12 "ext_dev";
    /// CUDA managed memory.
    CUDA_MANAGED = 13 "cuda_managed";
    /// oneAPI.
    ONE_API = 14 "oneapi";
    /// WebGPU.
    WEBGPU = 15 "webgpu";
    /// Qualcomm Hexagon.
    HEXAGON = 16 "hexagon";
    /// Microsoft MAIA.
    MAIA = 17 "maia";
    /// AWS Trainium.
    TRN = 18 "trn";
}

impl fmt::Display for DeviceType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "device{}", self.0),
        }
    }
}

impl FromStr for DeviceType {
    type Err = RpcError;

    fn from_str(text: &str) -> Result<Self> {
        Self::from_name(text)
            .or_else(|| text.strip_prefix("device").and_then(|code| code.parse().ok()).map(Self))
            .ok_or_else(|| RpcError::invalid_argument(format!("unknown device kind '{text}'")))
    }
}

/// A device of a session: DLPack's `DLDevice`. Written `cpu:0`, or `cuda` for `cuda:0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Device {
    /// Kind of the device.
    pub kind: DeviceType,
    /// Index among the devices of that kind, from 0.
    pub index: i32,
}

impl Device {
    /// Returns the device `index` of `kind`.
    pub const fn new(kind: DeviceType, index: i32) -> Self {
        Self { kind, index }
    }

    /// Returns the session's host memory, `cpu:0`.
    pub const fn cpu() -> Self {
        Self::new(DeviceType::CPU, 0)
    }

    /// Returns the NVIDIA GPU number `index`.
    pub const fn cuda(index: i32) -> Self {
        Self::new(DeviceType::CUDA, index)
    }

    /// Returns the OpenCL device number `index`.
    pub const fn opencl(index: i32) -> Self {
        Self::new(DeviceType::OPENCL, index)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind, self.index)
    }
}

impl FromStr for Device {
    type Err = RpcError;

    fn from_str(text: &str) -> Result<Self> {
        let (kind, index) = text.split_once(':').unwrap_or((text, "0"));
        let index = index.parse().ok().filter(|index| *index >= 0);
        let index = index.ok_or_else(|| RpcError::invalid_argument(format!("no device index in '{text}'")))?;
        Ok(Self::new(kind.parse()?, index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for text in ["cpu:0", "cuda:3", "device99:1"] {
            assert_eq!(text.parse::<Device>().unwrap().to_string(), text);
        }
        assert_eq!("cuda".parse::<Device>().unwrap(), Device::cuda(0));
        assert!("cpu:-1".parse::<Device>().is_err());
    }
}
