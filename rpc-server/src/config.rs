//! Settings of servers, trackers and relays, and their sources.
//!
//! Each setting is declared once, in a `settings!` of `serve`, `tracker`, `relay` or `disco_node`.
//! The declaration gives the flag of the command line, the environment variable (`--max-message` is
//! `RPC_SERVER_MAX_MESSAGE`), the key in the configuration file (`max-message`), and the default. A
//! flag overrides the environment, the environment the file, and the file the default. Settings
//! that servers, trackers and relays share are declared by `listener_settings!`.

#![allow(rustdoc::bare_urls, reason = "the documentation of a setting is its help text")]

#[macro_use]
mod settings;

mod disco_node;
mod error;
mod help;
mod listen_address;
mod machine_memory;
mod relay;
mod serve;
mod tracker;
mod units;

pub use crate::leases::{LeaseRule, LeaseRuleError, UnleasedUse};
pub use disco_node::{WorkerConfig, WorkerSettings};
pub use error::{ConfigError, ServeError};
pub(crate) use help::with_groups_and_defaults;
pub use listen_address::ListenAddress;
pub(crate) use listen_address::{SERVER_PORT, TRACKER_PORT, with_default_port};
pub use relay::{RelayConfig, RelaySettings};
pub(crate) use serve::is_ambiguous_program;
pub use serve::{Isolate, ServeConfig, ServeSettings};
pub use tracker::{
    Label, LabelError, TrackerAddress, TrackerConfig, TrackerSettings, TvmProxyAddress, TvmTrackerAddress,
};
pub use units::{ByteSize, HttpAddress, Origin, OtlpEndpoint, PortRange, Span, UnitError};

#[cfg(test)]
mod tests;
