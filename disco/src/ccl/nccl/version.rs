//! Version of NCCL, and its encoding as one number.

use std::ffi::c_int;
use std::fmt;

/// A version of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version {
    /// Major version: 2 since 2017.
    pub major: u32,
    /// Minor version, which is raised with new features.
    pub minor: u32,
    /// Patch version.
    pub patch: u32,
}

impl Version {
    /// Creates a version.
    #[must_use]
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self { major, minor, patch }
    }

    /// Returns the version that `ncclGetVersion` encodes as `code`: `major × 10000 + minor × 100 +
    /// patch` from 2.9 on, and `major × 1000 + …` before.
    #[must_use]
    pub fn from_code(code: c_int) -> Self {
        let code = u32::try_from(code).unwrap_or(0);
        let major_unit = if code < 10_000 { 1000 } else { 10_000 };
        Self { major: code / major_unit, minor: code % major_unit / 100, patch: code % 100 }
    }

    /// Returns the version encoded as one number, as in [`from_code`](Self::from_code).
    #[must_use]
    pub fn code(self) -> u32 {
        let major_unit = if self < Self::new(2, 9, 0) { 1000 } else { 10_000 };
        self.major * major_unit + self.minor * 100 + self.patch
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_both_schemes_are_read() {
        for (code, version) in
            [(2708, (2, 7, 8)), (2804, (2, 8, 4)), (20_908, (2, 9, 8)), (21_401, (2, 14, 1)), (23_203, (2, 32, 3))]
        {
            let read = Version::from_code(code);
            assert_eq!((read.major, read.minor, read.patch), version);
            assert_eq!(read.code(), code as u32);
        }
        assert!(Version::new(2, 9, 0) < Version::new(2, 18, 0));
        assert_eq!(Version::new(2, 17, 1).to_string(), "2.17.1");
    }
}
