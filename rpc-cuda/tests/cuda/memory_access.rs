//! Copies to, from and between memories, for tests that use each memory from one thread.

use rpc_core::device::{DeviceApi, Memory};
use rpc_cuda::CudaDevice;

pub(crate) fn write(memory: &dyn Memory, offset: u64, data: &[u8]) {
    // SAFETY: the tests use ranges within the memory, and a memory from one thread.
    unsafe { memory.copy_from_host(offset, data).unwrap() }
}

pub(crate) fn read(memory: &dyn Memory, offset: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0x77; len];
    // SAFETY: as above.
    unsafe { memory.copy_to_host(offset, &mut out).unwrap() };
    out
}

pub(crate) fn copy(cuda: &CudaDevice, from: (&dyn Memory, u64), to: (&dyn Memory, u64), len: u64) {
    // SAFETY: as above.
    unsafe { cuda.copy(from.0, from.1, to.0, to.1, len).unwrap() }
}
