//! Addresses as settings, and the checks of the addresses that a server listens on.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;

use rpc_transports::{Address, AddressError, TransportError, Transports, tracker};
use serde::{Deserialize, Serialize};

use super::{ConfigError, HttpAddress};
use crate::pki::trust::ServerTrust;

/// An address as a setting: one to listen on, or that of a relay with the name of the server as its
/// key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ListenAddress(pub Address);

impl std::str::FromStr for ListenAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        text.parse().map(Self)
    }
}

impl TryFrom<String> for ListenAddress {
    type Error = AddressError;

    fn try_from(text: String) -> Result<Self, AddressError> {
        text.parse()
    }
}

impl From<ListenAddress> for String {
    fn from(address: ListenAddress) -> Self {
        address.to_string()
    }
}

impl From<Address> for ListenAddress {
    fn from(address: Address) -> Self {
        Self(address)
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Checks that a server may listen on these addresses. Blocks while it looks for the host of one
/// that is refused.
pub(super) fn check_addresses(
    listen: &[ListenAddress],
    trust: &ServerTrust,
    insecure: bool,
    transports: &Transports,
) -> Result<(), ConfigError> {
    for ListenAddress(address) in listen {
        let properties = transports.check(address).map_err(|source| ConfigError::Address { source })?;
        // The address of a session opener, such as `tracker:`, has no channels to listen for.
        let opens_sessions = transports.opener(address.scheme()).is_some();
        if opens_sessions || properties.starts_programs || address.key().is_some() {
            return Err(ConfigError::NotListenable { address: address.clone() });
        }
        // Without encryption a token proves the identity at the beginning of a connection only.
        let secure = properties.is_local() || (properties.encrypted && trust.demands());
        if !secure && !insecure {
            // A name without an address is mostly misspelt, which says more than where it leads.
            if let Some((host, port)) = address.host_and_port()
                && let Err(source) = (host, port).to_socket_addrs()
            {
                let source = TransportError::Resolve { address: address.to_string(), source: Arc::new(source) };
                return Err(ConfigError::Address { source });
            }
            return Err(ConfigError::Insecure { address: address.clone() });
        }
        if properties.encrypted && !trust.shows() {
            return Err(ConfigError::NoCertificate { address: address.clone() });
        }
    }
    Ok(())
}

/// Checks that metrics may be served at this address.
pub(super) fn check_metrics(metrics: Option<HttpAddress>, insecure: bool) -> Result<(), ConfigError> {
    match metrics {
        Some(HttpAddress(address)) if !address.ip().to_canonical().is_loopback() && !insecure => {
            Err(ConfigError::InsecureMetrics { address })
        }
        _ => Ok(()),
    }
}

/// Default port of a server.
pub(crate) const SERVER_PORT: u16 = 9090;

/// Default port of a tracker.
pub(crate) const TRACKER_PORT: u16 = 9190;

/// Default port of a relay.
pub(super) const RELAY_PORT: u16 = 9290;

/// Port of a proxy of TVM, unless it is given.
pub(super) const TVM_PROXY_PORT: u16 = 9090;

/// Schemes whose addresses name a host and a port, for which there is no default but ours. The
/// ports of `ws` and `wss` are those of HTTP.
const SCHEMES_WITH_PORT: [&str; 3] = ["tcp", "tls", "quic"];

/// Returns the address with the default port of the role, where it names a host without a port. The
/// address of a tracker's server gets the port of the tracker.
pub(crate) fn with_default_port(address: Address, port: u16) -> Address {
    if address.host().is_none() || address.port().is_some() {
        return address;
    }
    if tracker::address_of(&address).is_some() {
        return address.with_port(TRACKER_PORT);
    }
    if SCHEMES_WITH_PORT.contains(&address.scheme()) { address.with_port(port) } else { address }
}

/// Gives addresses without a port the default one of the role.
pub(super) fn fill_ports(addresses: &mut [ListenAddress], port: u16) {
    for ListenAddress(address) in addresses {
        *address = with_default_port(address.clone(), port);
    }
}

/// Returns a TCP port that only this machine can reach.
pub(super) fn loopback(port: u16) -> ListenAddress {
    ListenAddress(Address::from(SocketAddr::from(([127, 0, 0, 1], port))))
}
