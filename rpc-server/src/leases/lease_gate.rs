//! The gate of a session: applies the policy of the server to requests without a lease.

use std::sync::Arc;
use std::task::{Context, Poll};

use rpc_core::{Device, DeviceGate, DeviceUse, ErrorKind, Result, RpcError};

use super::{LeasePolicy, LeaseService, UnleasedUse};

/// Gate of one session; see the [module](self).
pub(crate) struct LeaseGate {
    policy: LeasePolicy,
    leases: Arc<dyn LeaseService>,
}

impl LeaseGate {
    /// Returns the gate of a session; `None` if all devices are shared.
    pub(crate) fn new(policy: &LeasePolicy, leases: Arc<dyn LeaseService>) -> Option<Arc<Self>> {
        policy.restricts().then(|| Arc::new(Self { policy: policy.clone(), leases }))
    }
}

impl DeviceGate for LeaseGate {
    fn poll_use(&self, device: Device, cx: &mut Context<'_>) -> Poll<Result<DeviceUse>> {
        let treatment = self.policy.treatment(device);
        if treatment == UnleasedUse::Share {
            return Poll::Ready(Ok(DeviceUse::uncounted()));
        }
        match self.leases.poll_use(device, cx.waker()) {
            Poll::Ready(Some(used)) => Poll::Ready(Ok(used)),
            Poll::Ready(None) if treatment == UnleasedUse::Refuse => Poll::Ready(Err(RpcError::new(
                ErrorKind::Busy,
                format!(
                    "another session holds a lease on {device}, or is next to have one, and this server lets no \
                     other session use it meanwhile (--lease-policy): ask for a lease, or try again later"
                ),
            ))),
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }
}
