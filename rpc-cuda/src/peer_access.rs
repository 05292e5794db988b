//! Direct access between the GPUs of the process, so that copies between them do not go through the
//! host.

use std::collections::BTreeMap;
use std::sync::Arc;

use cudarc::driver::sys::cudaError_enum as Code;
use parking_lot::Mutex;

use crate::gpu::PrimaryContext;
use rpc_core::error::Result;

/// True once a pair has been asked, under the lock of that pair.
type Asked = Arc<Mutex<bool>>;

/// Pairs of GPUs, by their indices, each with a flag that is true once the driver has been asked. A
/// pair has a lock of its own: the driver may wait for the work of one of its GPUs, and other pairs
/// are not to wait with it.
static ASKED: Mutex<BTreeMap<(i32, i32), Asked>> = Mutex::new(BTreeMap::new());

/// Lets each of two GPUs access the memory of the other, where the hardware can, at the first call
/// for them. Both contexts are open. Afterwards neither needs to be the current one.
///
/// # Errors
///
/// A GPU is lost. If the driver refuses the access, the pair does without it.
pub(super) fn enable(one: &PrimaryContext, other: &PrimaryContext) -> Result<()> {
    let pair = (one.gpu.index.min(other.gpu.index), one.gpu.index.max(other.gpu.index));
    let asked = Arc::clone(ASKED.lock().entry(pair).or_default());
    // Held until the driver has answered, so that no copy of another thread comes before that.
    let mut asked = asked.lock();
    if *asked {
        return Ok(());
    }
    enable_from(one, other)?;
    enable_from(other, one)?;
    *asked = true;
    Ok(())
}

/// Lets `context` access the memory of `peer`.
fn enable_from(context: &PrimaryContext, peer: &PrimaryContext) -> Result<()> {
    let gpu = context.gpu;
    context.enter()?;
    let mut can = 0;
    // SAFETY: there is room for the answer.
    gpu.check(unsafe { gpu.driver.device_can_access_peer(&raw mut can, gpu.device, peer.gpu.device) })?;
    if can == 0 {
        return Ok(());
    }
    // SAFETY: the GPU's own context is the current one, and the peer's is retained for ever.
    let outcome = unsafe { gpu.driver.ctx_enable_peer_access(peer.raw.0, 0) };
    // Another library, such as NCCL, may have enabled it.
    if outcome.is(Code::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) {
        return Ok(());
    }
    if let Err(error) = gpu.check(outcome) {
        gpu.check_not_lost()?;
        let peer = peer.gpu.as_device();
        tracing::debug!(device = %gpu.as_device(), %peer, %error, "no direct access: copies go through the host");
    }
    Ok(())
}
