//! Settings of a session.

use std::net::IpAddr;

/// Settings of a session.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// How many bytes of commands the workers may be behind before whoever issues more has to wait; a small command counts 128. Default: 16 MiB.
    pub window: u64,
    /// The address of each node at which its workers listen for the data of others, in the order of nodes. Needed where they are not all on one
    /// machine; without this, workers of one machine share memory. Default: none.
    pub data_addresses: Vec<IpAddr>,
}

impl Default for Options {
    fn default() -> Self {
        Self { window: 16 << 20, data_addresses: Vec::new() }
    }
}
