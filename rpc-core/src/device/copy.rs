//! Copies between memories of any two devices, by the processor.

use super::memory::Memory;
use crate::error::Result;

/// Copies between two memories, each of which is host memory or can be copied to and from it: the
/// default of [`DeviceApi::copy`](super::DeviceApi::copy), and the slow path of devices that have a
/// faster one for their own memory.
///
/// # Errors
///
/// Those of the two memories' own copies.
///
/// # Safety
///
/// As [`DeviceApi::copy`](super::DeviceApi::copy).
pub unsafe fn copy_by_host(
    from: &dyn Memory,
    from_offset: u64,
    to: &dyn Memory,
    to_offset: u64,
    len: u64,
) -> Result<()> {
    match (from.host(), to.host()) {
        (Some(source), Some(target)) => {
            // SAFETY: `Memory` promises valid pointers; the caller promises that the ranges lie
            // within them and that nothing else interferes; offsets of host memory fit `usize`.
            // `copy` allows overlap.
            unsafe {
                source.add(from_offset as usize).copy_to(target.add(to_offset as usize), len as usize);
            }
            Ok(())
        }
        (Some(source), None) => {
            // SAFETY: as above. The slice is only read, and not written: `to` is another memory.
            unsafe {
                let data = std::slice::from_raw_parts(source.add(from_offset as usize).as_ptr(), len as usize);
                to.copy_from_host(to_offset, data)
            }
        }
        (None, Some(target)) => {
            // SAFETY: as above. Nothing else accesses the destination, so that the slice is
            // exclusive.
            unsafe {
                let out = std::slice::from_raw_parts_mut(target.add(to_offset as usize).as_ptr(), len as usize);
                from.copy_to_host(from_offset, out)
            }
        }
        (None, None) => {
            let mut bounce = vec![0; len.min(BOUNCE_BYTES) as usize];
            // If the destination overlaps the source's end, the end has to be copied first.
            let backwards = std::ptr::addr_eq(from, to) && to_offset > from_offset;
            let mut done = 0;
            while done < len {
                let step = (len - done).min(BOUNCE_BYTES);
                let at = if backwards { len - done - step } else { done };
                let chunk = &mut bounce[..step as usize];
                // SAFETY: a part of each range, under the caller's promises.
                unsafe {
                    from.copy_to_host(from_offset + at, chunk)?;
                    to.copy_from_host(to_offset + at, chunk)?;
                }
                done += step;
            }
            Ok(())
        }
    }
}

/// Bytes of the bounce buffer: large enough to keep a bus busy, small enough to allocate.
pub(crate) const BOUNCE_BYTES: u64 = 1 << 20;
