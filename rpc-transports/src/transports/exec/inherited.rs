//! Descriptors that a process has inherited, beside its standard streams.

use std::fs;
use std::os::fd::RawFd;

/// Descriptors of this process.
const DESCRIPTORS: &str = "/proc/self/fd";

/// Closes all descriptors but the standard streams, where `/proc` lists them.
///
/// For a helper process that outlives its parent, at the head of `main`: a pipe or a terminal of
/// the parent would otherwise stay open. Descriptors that this process has opened itself are closed
/// as well, and must not be used afterwards.
pub fn close_inherited_descriptors() {
    let Ok(list) = fs::read_dir(DESCRIPTORS) else { return };
    let number = |entry: fs::DirEntry| entry.file_name().to_str()?.parse::<RawFd>().ok();
    // The list itself is among them, and is closed by the end of this line.
    let descriptors: Vec<_> = list.filter_map(Result::ok).filter_map(number).collect();
    let is_open = |descriptor: &RawFd| fs::symlink_metadata(format!("{DESCRIPTORS}/{descriptor}")).is_ok();
    for descriptor in descriptors.into_iter().filter(|descriptor| *descriptor > 2 && is_open(descriptor)) {
        // SAFETY: the function is called at the head of `main`, as its documentation demands, so
        // that no value of this process owns a descriptor, and no other thread opens or closes one
        // after it was seen to be open.
        unsafe { rustix::io::close(descriptor) };
    }
}
