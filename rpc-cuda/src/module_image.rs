//! Images of modules: files with code for GPUs, in PTX, cubin and fatbin form, checked before the
//! driver reads them.
//!
//! The driver is given an address without a length, and trusts the lengths in the file. So a file
//! with lengths beyond its end is refused here.

use rpc_core::error::{Result, RpcError};

/// A checked file that can be passed to the driver.
pub(super) struct ModuleImage {
    /// Ends with a zero, which PTX needs.
    bytes: Vec<u8>,
}

impl ModuleImage {
    /// Checks a file.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`](rpc_core::ErrorKind::InvalidArgument) if it has none of the
    /// three formats, or is cut off.
    pub(super) fn new(mut bytes: Vec<u8>) -> Result<Self> {
        let wrong = |what| Err(RpcError::invalid_argument(what));
        let needed = if bytes.starts_with(&ELF_MAGIC) {
            elf_len(&bytes)
        } else if bytes.starts_with(&FATBIN_MAGIC) {
            fatbin_len(&bytes)
        } else {
            // NVRTC includes the terminating zero in the length of its PTX, and programs write it
            // to the file.
            let text = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
            bytes.truncate(text);
            if bytes.is_empty() || bytes.contains(&0) || std::str::from_utf8(&bytes).is_err() {
                return wrong("the file is neither PTX nor a cubin nor a fatbin");
            }
            Some(0)
        };
        match needed {
            Some(needed) if needed <= bytes.len() as u64 => {
                bytes.push(0);
                Ok(Self { bytes })
            }
            _ => wrong("the file is cut off: its header announces more bytes than it has"),
        }
    }

    /// Returns the text of a PTX file; `None` for files of machine code.
    pub(super) fn ptx(&self) -> Option<&str> {
        let is_code = self.bytes.starts_with(&ELF_MAGIC) || self.bytes.starts_with(&FATBIN_MAGIC);
        let text = std::str::from_utf8(&self.bytes).ok().filter(|_| !is_code)?;
        Some(text.trim_end_matches('\0'))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// Returns the end of the last section, segment or table of a 64-bit little-endian ELF file; `None`
/// for any other file.
fn elf_len(bytes: &[u8]) -> Option<u64> {
    // EI_CLASS and EI_DATA.
    if bytes.get(4..6)? != [2, 1] {
        return None;
    }
    let segments = Table { at: number(bytes, 32, 8)?, entry: number(bytes, 54, 2)?, count: number(bytes, 56, 2)? };
    let sections = Table { at: number(bytes, 40, 8)?, entry: number(bytes, 58, 2)?, count: number(bytes, 60, 2)? };
    let mut end = segments.end()?.max(sections.end()?);
    for index in 0..sections.count {
        let at = sections.at + index * sections.entry;
        // Sections of type SHT_NOBITS have no bytes in the file.
        if number(bytes, at.checked_add(4)?, 4)? != 8 {
            end =
                end.max(number(bytes, at.checked_add(24)?, 8)?.checked_add(number(bytes, at.checked_add(32)?, 8)?)?);
        }
    }
    for index in 0..segments.count {
        let at = segments.at + index * segments.entry;
        end = end.max(number(bytes, at.checked_add(8)?, 8)?.checked_add(number(bytes, at.checked_add(32)?, 8)?)?);
    }
    Some(end)
}

struct Table {
    at: u64,
    entry: u64,
    count: u64,
}

impl Table {
    fn end(&self) -> Option<u64> {
        self.at.checked_add(self.entry.checked_mul(self.count)?)
    }
}

/// Returns the length of a fatbin: its header's length is at offset 6, that of the rest at 8.
fn fatbin_len(bytes: &[u8]) -> Option<u64> {
    number(bytes, 6, 2)?.checked_add(number(bytes, 8, 8)?)
}

/// Returns the little-endian number of `width` bytes at `at`.
fn number(bytes: &[u8], at: u64, width: usize) -> Option<u64> {
    let at = usize::try_from(at).ok()?;
    let bytes = bytes.get(at..at.checked_add(width)?)?;
    Some(bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
}

const ELF_MAGIC: [u8; 4] = *b"\x7fELF";

const FATBIN_MAGIC: [u8; 4] = 0xba55_ed50_u32.to_le_bytes();

#[cfg(test)]
mod tests {
    use super::*;

    fn elf(section_end: u64) -> Vec<u8> {
        let mut bytes = vec![0; 64 + 64];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[40..48].copy_from_slice(&64_u64.to_le_bytes());
        bytes[58..60].copy_from_slice(&64_u16.to_le_bytes());
        bytes[60..62].copy_from_slice(&1_u16.to_le_bytes());
        bytes[64 + 32..][..8].copy_from_slice(&section_end.to_le_bytes());
        bytes
    }

    #[test]
    fn complete_files_are_accepted_and_end_with_a_zero() {
        let fatbin = [&FATBIN_MAGIC[..], &[1, 0, 16, 0], &3_u64.to_le_bytes(), b"abc"].concat();
        for bytes in [b".version 7.0".to_vec(), elf(128), fatbin] {
            let image = ModuleImage::new(bytes.clone()).ok().unwrap();
            assert_eq!(image.bytes(), [&bytes[..], &[0]].concat());
        }
    }

    #[test]
    fn ptx_may_end_with_zeros_from_its_compiler() {
        let image = ModuleImage::new(b".version 7.0\0\0".to_vec()).ok().unwrap();
        assert_eq!(image.bytes(), b".version 7.0\0");
    }

    #[test]
    fn files_with_lengths_beyond_their_end_are_refused() {
        let fatbin = [&FATBIN_MAGIC[..], &[1, 0, 16, 0], &4_u64.to_le_bytes(), b"abc"].concat();
        let huge = [&FATBIN_MAGIC[..], &[1, 0, 16, 0], &u64::MAX.to_le_bytes()].concat();
        for bytes in [elf(129), elf(u64::MAX), elf(128)[..127].to_vec(), elf(0)[..20].to_vec(), fatbin, huge] {
            let error = ModuleImage::new(bytes).err().unwrap();
            assert!(error.message().contains("cut off"), "{error}");
        }
        for bytes in [vec![1, 0, 1], vec![0xff, 0xfe], vec![0, 0], vec![]] {
            assert!(ModuleImage::new(bytes).err().unwrap().message().contains("neither PTX"));
        }
    }
}
