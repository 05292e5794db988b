//! The description of a server that trackers get, and the names under which it waits at relays.

use std::collections::BTreeMap;

use rpc_core::Devices;
use rpc_transports::Address;
use rpc_transports::tracker::{DIALECT_LABEL, DeviceOffer};

use crate::config::{ListenAddress, ServeConfig};

/// Description of the server for trackers. All trackers get the same one.
#[derive(Clone, Debug)]
pub(super) struct Advertisement {
    pub(super) name: String,
    pub(super) key: String,
    pub(super) labels: BTreeMap<String, String>,
    pub(super) devices: Vec<DeviceOffer>,
    pub(super) capacity: u32,
    pub(super) address: Vec<String>,
}

impl Advertisement {
    /// Describes a server that listens on `addresses` and waits at `relays`.
    pub(super) fn new(
        config: &ServeConfig,
        addresses: &[Address],
        relays: &[Address],
        devices: Vec<DeviceOffer>,
    ) -> Self {
        let advertised = config.advertise.iter().map(|ListenAddress(address)| address.to_string());
        let mut address: Vec<String> = advertised.collect();
        if let ([], Some(first)) = (&address[..], addresses.first()) {
            // With the key, a client that reaches another server at this address is refused.
            let with_key = config.key.as_deref().and_then(|key| first.clone().with_key(key).ok());
            address.push(with_key.unwrap_or_else(|| first.clone()).to_string());
        }
        if let ([], Some(relay)) = (&address[..], relays.first()) {
            address.push(relay.to_string());
        }
        let mut labels: BTreeMap<_, _> =
            config.label.iter().map(|label| (label.name.clone(), label.value.clone())).collect();
        if config.tvm {
            // The tracker looks whether clients of TVM reach the address.
            labels.entry(DIALECT_LABEL.to_owned()).or_insert_with(|| "tvm".to_owned());
        }
        Self {
            name: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            key: config.pool_key().unwrap_or_default().to_owned(),
            labels,
            devices,
            capacity: config.capacity,
            address,
        }
    }
}

/// Describes the devices for trackers. Runs on a blocking thread, because drivers may take long to
/// answer.
pub(super) async fn offered_devices(devices: Devices) -> Vec<DeviceOffer> {
    let described = tokio::task::spawn_blocking(move || DeviceOffer::of(devices.describe())).await;
    described.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

/// Returns the relays, each with the name under which the server waits there. A tracker gives out
/// one of several servers with the same key, so with trackers the name is unique to this server.
pub(super) fn named_relays(config: &ServeConfig) -> Vec<Address> {
    // Without random numbers the process id tells the servers of one machine apart.
    let random = getrandom::u32().unwrap_or_else(|_| std::process::id());
    let key = config.pool_key().unwrap_or_default();
    let unique = format!("{key}-{random:08x}");
    let name = if config.tracker.is_empty() { key } else { &unique };
    let named = |ListenAddress(address): &ListenAddress| match address.key() {
        Some(_) => address.clone(),
        // `ServeConfig::check` has made sure that the name can be a key.
        None => address.clone().with_key(name).unwrap_or_else(|_| address.clone()),
    };
    config.relay.iter().map(named).collect()
}
