//! Attributes of devices, with their numbers and names.

use std::fmt;
use std::str::FromStr;

use crate::error::{Result, RpcError};

macro_rules! attributes {
    ($($(#[$doc:meta])* $attribute:ident = $code:literal $name:literal;)*) => {
        /// Attribute of a device.
        ///
        /// The numbers up to 16 are those of TVM's `DeviceAttrKind`
        /// (`include/tvm/runtime/device_api.h`), so that they mean the same in its dialect; ours
        /// begin at 1000. An attribute that a device does not have is
        /// [`Value::Null`](crate::Value::Null), never an error.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        #[repr(u16)]
        pub enum DeviceAttribute {
            $($(#[$doc])* $attribute = $code,)*
        }

        impl DeviceAttribute {
            /// All attributes that this version knows, by number.
            pub const ALL: &[Self] = &[$(Self::$attribute,)*];

            /// Returns the attribute with this number, if this version knows it.
            pub const fn from_code(code: u16) -> Option<Self> {
                match code {
                    $($code => Some(Self::$attribute),)*
                    _ => None,
                }
            }

            /// Returns the stable lower-case name, as used on command lines and in JSON output.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$attribute => $name,)*
                }
            }
        }
    };
}

attributes! {
    /// True if the device exists: a bool, never null.
    Exists = 0 "exists";
    /// Largest number of threads of one block: an int.
    MaxThreadsPerBlock = 1 "max_threads_per_block";
    /// Threads that run in lockstep: an int.
    WarpSize = 2 "warp_size";
    /// Largest shared memory of one block, in bytes: an int.
    MaxSharedMemoryPerBlock = 3 "max_shared_memory_per_block";
    /// Compute capability, such as `9.0`: a str.
    ComputeVersion = 4 "compute_version";
    /// Vendor's name of the device: a str.
    Name = 5 "name";
    /// Highest clock rate in kHz: an int.
    MaxClockRate = 6 "max_clock_rate";
    /// Processors that run independently, CPU cores or multiprocessors: an int.
    ComputeUnits = 7 "compute_units";
    /// Largest number of threads of one block in each dimension: a shape.
    MaxThreadDimensions = 8 "max_thread_dimensions";
    /// Registers of one block: an int.
    MaxRegistersPerBlock = 9 "max_registers_per_block";
    /// Architecture of an AMD GPU, such as `gfx90a`: a str.
    GcnArch = 10 "gcn_arch";
    /// Version of the API that drives the device, in the vendor's counting: an int.
    ApiVersion = 11 "api_version";
    /// Version of the driver: a str.
    DriverVersion = 12 "driver_version";
    /// Size of the L2 cache in bytes: an int.
    L2CacheSize = 13 "l2_cache_size";
    /// Size of the memory in bytes: an int.
    TotalMemory = 14 "total_memory";
    /// Memory in bytes that can be allocated now: an int.
    AvailableMemory = 15 "available_memory";
    /// Alignment of the rows of an image in bytes: an int.
    ImagePitchAlignment = 16 "image_pitch_alignment";
    /// Largest alignment of an allocation, in bytes: an int.
    MaxAlignment = 1000 "max_alignment";
    /// Target of code for the device, in the text form of [`Target`](crate::Target): a str.
    Target = 1001 "target";
    /// Memory scopes of allocations besides `global`: a list of strs.
    MemoryScopes = 1002 "memory_scopes";
}

impl DeviceAttribute {
    /// Returns the attribute's number on the wire.
    pub const fn code(self) -> u16 {
        self as u16
    }
}

impl fmt::Display for DeviceAttribute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DeviceAttribute {
    type Err = RpcError;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.iter().copied().find(|attribute| attribute.name() == text).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|attribute| attribute.name()).collect();
            RpcError::invalid_argument(format!("no device attribute '{text}'; there are {}", known.join(", ")))
        })
    }
}
