//! `ncclConfig_t`: the settings with which NCCL creates a communicator.

use std::ffi::{c_char, c_int, c_uint};

use super::Version;

/// Value for "not set": `INT_MIN`.
const UNSET: c_int = c_int::MIN;

/// Number that marks an initialised structure (`magic`).
const MAGIC: c_uint = 0xcafe_beef;

/// The newest version of NCCL whose settings the structure contains.
const NEWEST: Version = Version::new(2, 18, 0);

/// The fields of `ncclConfig_t` that NCCL 2.18 has. Newer versions have more fields: the library
/// reads as many bytes as `size` says, and takes its defaults for fields that are newer than
/// `version`. Older libraries read fewer bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    /// Since 2.14.
    blocking: c_int,
    /// Since 2.17, as the next three.
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    /// 2.18.
    split_share: c_int,
}

impl Config {
    /// Creates the settings of a communicator that does not block and uses between `min_ctas` and
    /// `max_ctas` thread blocks on the device, for NCCL of this `version`.
    pub(super) fn new(version: Version, (min_ctas, max_ctas): (Option<u16>, Option<u16>)) -> Self {
        let setting = |value: Option<u16>| value.map_or(UNSET, c_int::from);
        Self {
            size: size_of::<Self>(),
            magic: MAGIC,
            version: version.min(NEWEST).code(),
            blocking: 0,
            cga_cluster_size: UNSET,
            min_ctas: setting(min_ctas),
            max_ctas: setting(max_ctas),
            net_name: std::ptr::null(),
            split_share: UNSET,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_pointer_width = "64")]
    fn the_layout_is_that_of_the_header() {
        use std::mem::offset_of;

        let offsets = [
            offset_of!(Config, magic),
            offset_of!(Config, version),
            offset_of!(Config, blocking),
            offset_of!(Config, max_ctas),
            offset_of!(Config, net_name),
            offset_of!(Config, split_share),
            size_of::<Config>(),
        ];
        assert_eq!(offsets, [8, 12, 16, 28, 32, 40, 48]);
        assert_eq!(Config::new(Version::new(2, 32, 3), (None, Some(2))).version, 21_800);
        assert_eq!(Config::new(Version::new(2, 14, 3), (None, None)).version, 21_403);
    }
}
