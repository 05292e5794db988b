//! Limits on the sizes of messages from peers. They are equal for all peers; the scheduler limits
//! the numbers of servers and requests.

use std::collections::BTreeMap;

use rpc_core::{Result, RpcError};
use rpc_transports::Address;
use rpc_transports::tracker::{
    DeviceDetails, DeviceLease, DeviceOffer, LeaseWaiter, RecentError, Registration, ServerDetails, ServerRequest,
    ServerStatus,
};

/// Maximum bytes of a name, a key, or either part of a label.
const MAX_TEXT: usize = 128;
/// Maximum characters of a text that is only shown.
const MAX_SHOWN: usize = 256;
/// Maximum bytes of one address.
const MAX_ADDRESS: usize = 1024;
/// Maximum number of addresses: the hops of a chain, and the server itself.
const MAX_ADDRESSES: usize = 17;
const MAX_LABELS: usize = 64;
const MAX_DEVICES: usize = 64;
const MAX_SCOPES: usize = 16;
/// Maximum number of virtual devices of a request: each is compared with all devices of all
/// servers.
const MAX_WANTED: usize = 8;
/// Maximum bytes of a target: compilers take many attributes.
const MAX_TARGET: usize = 512;
const MAX_CAPACITY: u32 = 1 << 16;
/// Maximum number of sessions of one server, including those without tickets.
const MAX_USES: usize = 1 << 16;
/// Maximum number of slots of a request.
const MAX_COUNT: u32 = 1 << 12;

/// Checks the sizes in a registration.
///
/// # Errors
///
/// The limit that is exceeded, or the field that is malformed.
pub(super) fn check_registration(registration: &Registration) -> Result<()> {
    let Registration { name, key, labels, devices, capacity, address, status, .. } = registration;
    text("length of a name", name)?;
    check_key(key)?;
    check_labels(labels)?;
    check_devices(devices)?;
    if *capacity == 0 {
        return Err(RpcError::invalid_argument("a server with a capacity of 0 serves no client"));
    }
    at_most("capacity", MAX_CAPACITY as usize, *capacity as usize)?;
    if address.is_empty() {
        return Err(RpcError::invalid_argument("a server without an address cannot be reached"));
    }
    at_most("addresses of a server", MAX_ADDRESSES, address.len())?;
    address.iter().try_for_each(|address| at_most("length of an address", MAX_ADDRESS, address.len()))?;
    check_status(status)
}

/// Checks the sizes in a report of a server.
///
/// # Errors
///
/// The limit that is exceeded.
pub(super) fn check_status(status: &ServerStatus) -> Result<()> {
    at_most("sessions of a server", MAX_USES, status.uses.len())?;
    at_most("spent tickets", MAX_USES, status.spent.len())?;
    let Some(ServerDetails { devices, errors, .. }) = &status.details else { return Ok(()) };
    at_most("devices of a report", ServerDetails::MAX_DEVICES, devices.len())?;
    let mut waiting = devices.iter().filter_map(|device| device.lease.as_ref()).map(|lease| lease.next.len());
    waiting.try_for_each(|next| at_most("waiting leases of a report", DeviceLease::MAX_NEXT, next))?;
    at_most("errors of a report", ServerDetails::MAX_ERRORS, errors.len())
}

/// Checks the sizes in a request.
///
/// # Errors
///
/// The limit that is exceeded, or the field that is malformed.
pub(super) fn check_request(request: &ServerRequest) -> Result<()> {
    if !request.key.is_empty() {
        check_key(&request.key)?;
    }
    check_labels(&request.labels)?;
    check_devices(&request.devices)?;
    if request.devices.iter().any(|device| device.target.is_some() || !device.memory_scopes.is_empty()) {
        let text = "a request names targets and memory scopes in virtual devices, and not beside numbers of devices";
        return Err(RpcError::invalid_argument(text));
    }
    at_most("virtual devices", MAX_WANTED, request.virtual_devices.len())?;
    let mut wanted = request.virtual_devices.iter().map(|wanted| wanted.to_string().len());
    wanted.try_for_each(|len| at_most("length of a virtual device", 2 * MAX_TARGET, len))?;
    if request.count == 0 {
        return Err(RpcError::invalid_argument("0 slots are no request"));
    }
    at_most("slots of a request", MAX_COUNT as usize, request.count as usize)
}

/// Shortens a text that a peer chose and that is only shown, and removes its control characters.
pub(super) fn clip(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MAX_SHOWN).collect()
}

/// Shortens the names of clients in a report, and the texts of its details.
pub(super) fn clipped(mut status: ServerStatus) -> ServerStatus {
    for used in &mut status.uses {
        used.client = clip(&used.client);
    }
    if let Some(details) = &mut status.details {
        texts(details).for_each(|text| *text = clip(text));
    }
    status
}

/// Returns the bytes that details take.
pub(super) fn size_of_details(details: &mut ServerDetails) -> u64 {
    let waiting = details.devices.iter().filter_map(|device| device.lease.as_ref()).map(|lease| lease.next.len());
    let fixed = size_of::<ServerDetails>()
        + waiting.sum::<usize>() * size_of::<LeaseWaiter>()
        + details.devices.len() * size_of::<DeviceDetails>()
        + details.errors.len() * size_of::<RecentError>();
    (fixed + texts(details).map(|text| text.len()).sum::<usize>()) as u64
}

/// Returns the texts of details, which the server chose.
fn texts(details: &mut ServerDetails) -> impl Iterator<Item = &mut String> {
    let ServerDetails { version, devices, errors, .. } = details;
    let of_devices = devices.iter_mut().flat_map(|DeviceDetails { device, name, lease, .. }| {
        let clients = lease.iter_mut().flat_map(|DeviceLease { holder, next, .. }| {
            holder.iter_mut().chain(next.iter_mut().map(|next| &mut next.client)).map(|client| &mut client.identity)
        });
        std::iter::once(device).chain(name).chain(clients)
    });
    std::iter::once(version).chain(of_devices).chain(errors.iter_mut().map(|error| &mut error.text))
}

fn check_key(key: &str) -> Result<()> {
    text("length of a key", key)?;
    // Keys must have the form of keys in addresses, in which clients write them.
    let address = Address::from(std::net::SocketAddr::from(([127, 0, 0, 1], 1)));
    address.with_key(key).map(drop).map_err(|error| RpcError::invalid_argument(error.to_string()))
}

/// Maximum bytes of a key or match key of TVM. Its proxies make long ones that no client asks for.
#[cfg(feature = "tvm")]
const MAX_TVM_KEY: usize = 1024;

/// Checks a key or match key of TVM, which may have any characters.
///
/// # Errors
///
/// The key is empty or too long.
#[cfg(feature = "tvm")]
pub(super) fn check_tvm_key(key: &str) -> Result<()> {
    if key.is_empty() {
        return Err(RpcError::invalid_argument("an empty key names no server"));
    }
    at_most("length of a key", MAX_TVM_KEY, key.len())
}

fn check_labels(labels: &BTreeMap<String, String>) -> Result<()> {
    at_most("labels", MAX_LABELS, labels.len())?;
    labels.iter().try_for_each(|(name, value)| {
        text("length of a label", name)?;
        text("length of a label", value)
    })
}

fn check_devices(devices: &[DeviceOffer]) -> Result<()> {
    at_most("devices", MAX_DEVICES, devices.len())?;
    devices.iter().try_for_each(|device| {
        text("length of a device kind", &device.kind)?;
        device
            .target
            .iter()
            .try_for_each(|target| at_most("length of a target", MAX_TARGET, target.to_string().len()))?;
        at_most("memory scopes of a device", MAX_SCOPES, device.memory_scopes.len())?;
        device.memory_scopes.iter().try_for_each(|scope| text("length of a memory scope", scope))
    })
}

fn text(what: &str, text: &str) -> Result<()> {
    at_most(what, MAX_TEXT, text.len())
}

fn at_most(what: &str, max: usize, got: usize) -> Result<()> {
    if got <= max { Ok(()) } else { Err(RpcError::limit(what, max as u64, got as u64)) }
}
