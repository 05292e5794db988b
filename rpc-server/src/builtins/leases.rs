//! `rpc.lease.*`: leases on devices.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rpc_core::blocking::block_on;
use rpc_core::limits::MemoryLease;
use rpc_core::{Context, Device, ErrorKind, Pack, Permission, Registry, Result, RpcError, Shared, clock};

use super::cancellable;
use crate::leases::{GrantReceiver, LeaseRequest, LeaseService, LeasedDevice, Leases, QueuedRequest};

/// Bytes that a request counts against the memory of its session.
const REQUEST_BYTES: u64 = 1024;

/// Interval at which a wait checks for cancellation. Many sessions may wait for hours.
const CANCEL_CHECK: Duration = Duration::from_millis(250);

/// Object of a request and of its lease. Dropping it ends both.
struct LeaseObject {
    service: Arc<dyn LeaseService>,
    number: u64,
    device: Device,
    grant: GrantReceiver,
    released: AtomicBool,
    _memory: MemoryLease,
}

impl LeaseObject {
    fn release(&self) {
        if !self.released.swap(true, Ordering::AcqRel) {
            self.service.release(self.number);
        }
    }
}

impl Drop for LeaseObject {
    fn drop(&mut self) {
        self.release();
    }
}

pub(super) fn register(registry: &Registry) {
    registry
        // Not inline: drivers are asked for their devices, and take as long as they take.
        .add("rpc.lease.request", request)
        .add_async("rpc.lease.wait", |context: Context, Shared(lease): Shared<LeaseObject>| {
            let (device, grant) = (lease.device, lease.grant.clone());
            let released = lease.released.load(Ordering::Acquire);
            async move {
                match released {
                    true => Err(taken_back(device)),
                    false => cancellable(&context, CANCEL_CHECK, wait(device, grant)).await,
                }
            }
        })
        .add_async("rpc.lease.ahead", |Shared(lease): Shared<LeaseObject>| {
            let (service, number) = (lease.service.clone(), lease.number);
            async move { service.ahead(number).await }
        })
        .add_inline("rpc.lease.release", |Shared(lease): Shared<LeaseObject>| {
            lease.release();
            let grant = *lease.grant.borrow();
            grant.map(|grant| micros(clock::now().saturating_duration_since(grant.since)))
        })
        .add_async("rpc.lease.status", |context: Context| async move {
            service(&context)?.leased_devices().await.map(|devices| Pack(within_rights(&context, devices)))
        });
}

fn request(context: Context, device: Device, priority: i32, max_ms: Option<u64>) -> Result<Shared<LeaseObject>> {
    let service = service(&context)?;
    context.devices().get(device)?;
    context.authorize(&Permission::LeasePriority(priority))?;
    if max_ms == Some(0) {
        return Err(RpcError::invalid_argument("the maximum time of a lease must not be zero"));
    }
    let memory = context.reserve_memory(REQUEST_BYTES)?;
    let request = LeaseRequest { device, priority, max_duration: max_ms.map(Duration::from_millis) };
    let QueuedRequest { number, grant } = block_on(service.request(request))??;
    let released = AtomicBool::new(false);
    Ok(Shared(Arc::new(LeaseObject { service, number, device, grant, released, _memory: memory })))
}

/// Waits for the grant. Returns the time waited and the time left, in microseconds. The future does
/// not keep the object, whose drop ends it.
async fn wait(device: Device, mut grant: GrantReceiver) -> Result<(u64, u64)> {
    let granted = grant.wait_for(Option::is_some).await.ok().and_then(|grant| *grant);
    let grant = granted.ok_or_else(|| taken_back(device))?;
    let held = clock::now().saturating_duration_since(grant.since);
    Ok((micros(grant.waited), micros(grant.duration.saturating_sub(held))))
}

fn taken_back(device: Device) -> RpcError {
    RpcError::new(ErrorKind::Cancelled, format!("the request for a lease on {device} has been taken back"))
}

fn service(context: &Context) -> Result<Arc<dyn LeaseService>> {
    let leases = context.extension::<Leases>();
    let leases = leases.ok_or_else(|| RpcError::unsupported("this session belongs to no server that gives leases"))?;
    Ok(leases.0.clone())
}

/// Returns the leased devices of the server of this session that its client may use; none if there
/// are no leases.
pub(super) fn leased_devices(context: &Context) -> Vec<LeasedDevice> {
    let leases = context.extension::<Leases>();
    let devices = leases.and_then(|leases| block_on(leases.0.leased_devices()).ok()?.ok());
    within_rights(context, devices.unwrap_or_default())
}

/// Leaves out the devices that the client may not use.
fn within_rights(context: &Context, mut devices: Vec<LeasedDevice>) -> Vec<LeasedDevice> {
    let may_use = |device: Device| context.authorize(&Permission::Device(device)).is_ok();
    devices.retain(|leased| leased.device.parse::<Device>().is_ok_and(may_use));
    devices
}

/// Returns a time in microseconds, saturated to what a value can hold.
fn micros(time: Duration) -> u64 {
    i64::try_from(time.as_micros()).unwrap_or(i64::MAX) as u64
}
