//! Reading the memory of another process of this machine (`process_vm_readv`), where the system
//! permits it.
//!
//! It is permitted between processes of one user, unless a security module says otherwise; Yama
//! does where `kernel.yama.ptrace_scope` is 1, but for processes that one has started. Whether it
//! works is tried out when a group is made.

use std::io;

/// Reads `len` bytes at the address `from` of `process` to `to`.
///
/// # Safety
///
/// `to` must be valid for writes of `len` bytes, and no other code may touch them meanwhile.
#[cfg(target_os = "linux")]
pub(super) unsafe fn read(process: u32, from: u64, to: *mut u8, len: usize) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let local = libc::iovec { iov_base: to.wrapping_add(done).cast(), iov_len: len - done };
        let start = (from as usize).wrapping_add(done);
        let remote = libc::iovec { iov_base: std::ptr::without_provenance_mut(start), iov_len: len - done };
        // SAFETY: the caller promises the memory behind `local`; the kernel checks `remote`, which
        // is the other process's.
        let read =
            unsafe { libc::process_vm_readv(process as libc::pid_t, &raw const local, 1, &raw const remote, 1, 0) };
        match read {
            ..0 => return Err(io::Error::last_os_error()),
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => done += read as usize,
        }
    }
    Ok(())
}

/// # Safety
///
/// The same as on Linux.
#[cfg(not(target_os = "linux"))]
pub(super) unsafe fn read(_: u32, _: u64, _: *mut u8, _: usize) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
