//! The gate of a session: applies the policy of the server to requests without a lease.

use std::sync::Arc;
use std::task::{Context, Poll};

use rpc_core::{Device, DeviceGate, ErrorKind, Result, RpcError};

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
    fn poll_use(&self, device: Device, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let treatment = self.policy.treatment(device);
        if treatment == UnleasedUse::Share {
            return Poll::Ready(Ok(()));
        }
        match self.leases.poll_held_by_other(device, cx.waker()) {
            Poll::Ready(false) => Poll::Ready(Ok(())),
            Poll::Ready(true) if treatment == UnleasedUse::Refuse => Poll::Ready(Err(RpcError::new(
                ErrorKind::Busy,
                format!(
                    "another session holds a lease on {device}, and this server lets no other session use it \
                     meanwhile (--lease-policy): ask for a lease, or try again later"
                ),
            ))),
            Poll::Ready(true) | Poll::Pending => Poll::Pending,
        }
    }
}
