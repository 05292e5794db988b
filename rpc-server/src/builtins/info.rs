//! `rpc.info`: version, devices and usage of a server, and the client's identity. `rpc.can`: the
//! client's rights.

use std::sync::OnceLock;
use std::time::Instant;

use disco::HostOwner;
use rpc_core::proto::VERSION_MAX;
use rpc_core::{Context, Device, DeviceAttribute, DeviceType, Devices, Pack, Registry, Value};
use serde::{Deserialize, Serialize};

use super::leases::leased_devices;
use crate::leases::LeasedDevice;
use crate::modules::ModuleService;
use crate::policy::{self, ClientIdentity};
use crate::server::server_state::ServerState;

/// Result of `rpc.info`. Fields may be added; readers ignore unknown ones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ServerInfo {
    /// The version of the server.
    pub version: String,
    /// The newest version of the protocol that the server speaks.
    pub protocol_version: u32,
    /// Time since the start of the server in seconds.
    pub uptime_seconds: f64,
    /// Live sessions, this one included.
    pub sessions: u64,
    /// Live handles of all sessions.
    pub handles: u64,
    /// Bytes of device memory of all sessions, and of calls that still run though their session has
    /// ended.
    pub memory_bytes: u64,
    /// The devices, and the kinds that are absent.
    pub devices: Vec<DeviceInfo>,
    /// The key that clients may name the server by.
    pub key: Option<String>,
    /// The process id.
    pub pid: u32,
    /// The name of the machine.
    pub host: String,
    /// The processor architecture, such as `x86_64`.
    pub arch: String,
    /// The operating system, such as `linux`.
    pub os: String,
    /// Native modules that clients may upload; `None` if they may not.
    #[serde(default)]
    pub modules: Option<ModulesInfo>,
    /// Devices that sessions have leased and the client may use, at most 64.
    #[serde(default)]
    pub leases: Vec<LeasedDevice>,
    /// Identity of the client, with the kind of its proof, such as `token:alice`. `None` in
    /// sessions that belong to no server.
    #[serde(default)]
    pub identity: Option<String>,
    /// Names of the rules that give the client its rights; `None` if the server has no policy.
    #[serde(default)]
    pub rules: Option<Vec<String>>,
    /// Workers of Disco in the process of the server, of all its sessions. `None` if sessions have
    /// processes of their own.
    #[serde(default)]
    pub disco_workers: Option<u64>,
    /// Sends of tensors between this server and others. `None` in sessions that belong to no
    /// server.
    #[serde(default)]
    pub sends: Option<SendsInfo>,
}

/// Sends of tensors between a server and others, for one client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SendsInfo {
    /// Patterns of the addresses that the server connects to for the client, at most 64. None:
    /// what is sent from here goes through the client.
    pub to: Vec<String>,
    /// Addresses at which other servers send to the client's session.
    pub addresses: Vec<String>,
    /// Reason for which no other server sends to it: what is sent here goes through the client.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unreachable: Option<String>,
}

/// Conditions for native modules.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ModulesInfo {
    /// Maximum size of a module in bytes.
    pub max_bytes: u64,
    /// True if only the modules are taken that the operator has listed.
    pub listed_only: bool,
    /// Reason for which no module can be loaded, such as a missing library.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unavailable: Option<String>,
}

/// A device, or a kind of which there is none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The device, such as `cpu:0`; or the kind, such as `cuda`, if it is absent. Uncommon kinds
    /// are not listed as absent.
    pub device: String,
    /// The maker's name.
    pub name: Option<String>,
    /// The size of its memory in bytes.
    pub total_memory: Option<u64>,
    /// Reason for which there is no device of this kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub absent: Option<String>,
    /// The clock of its processors in MHz, if the device tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock_mhz: Option<u32>,
    /// Bytes of its memory that are in use by all processes of the machine, if the device tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_memory: Option<u64>,
    /// Part of the time for which the device was busy lately, in percent, if the device tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub utilization_percent: Option<u8>,
    /// Reason for which the device does not tell its state, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_unknown_because: Option<String>,
}

pub(super) fn register(registry: &Registry) {
    started();
    // Not inline: drivers are asked for their devices, and take as long as they take.
    registry.add("rpc.info", |context: Context| Pack(collect(&context)));
    registry.add("rpc.can", |context: Context, permission: String| policy::answer(&context, &permission).map(Pack));
}

/// Returns the time at which this program began to offer functions: the start of a server that has
/// no [`ServerState`].
fn started() -> Instant {
    static STARTED: OnceLock<Instant> = OnceLock::new();
    *STARTED.get_or_init(Instant::now)
}

fn collect(context: &Context) -> ServerInfo {
    let state = context.extension::<ServerState>();
    let totals = match &state {
        Some(state) => state.totals(),
        None => {
            let usage = context.usage();
            crate::server::server_state::ServerTotals {
                sessions: 1,
                handles: usage.handles,
                memory_bytes: usage.memory_bytes,
            }
        }
    };
    ServerInfo {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        protocol_version: u32::from(VERSION_MAX),
        uptime_seconds: state.as_ref().map_or_else(started, |state| state.started()).elapsed().as_secs_f64(),
        sessions: totals.sessions,
        handles: totals.handles,
        memory_bytes: totals.memory_bytes,
        devices: devices(context.devices()),
        key: state.as_ref().and_then(|state| state.key().map(str::to_owned)),
        pid: std::process::id(),
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        arch: std::env::consts::ARCH.to_owned(),
        os: std::env::consts::OS.to_owned(),
        leases: leased_devices(context),
        identity: context.extension::<ClientIdentity>().map(|identity| identity.0.clone()),
        rules: policy::rights_in(context).map(|rights| rights.rule_names().map(str::to_owned).collect()),
        sends: super::peer::sends_info(context),
        disco_workers: context.extension::<HostOwner>().map(|owner| owner.table().num_workers() as u64),
        modules: context.extension::<ModuleService>().map(|service| {
            let store = service.store();
            ModulesInfo {
                max_bytes: store.limits().max_module_bytes,
                listed_only: store.is_limited_to_list(),
                unavailable: service.check_library().err().map(|error| error.message().to_owned()),
            }
        }),
    }
}

/// Kinds that users look for, and whose absence is reported.
const COMMON_KINDS: [DeviceType; 5] =
    [DeviceType::CUDA, DeviceType::OPENCL, DeviceType::VULKAN, DeviceType::METAL, DeviceType::ROCM];

fn devices(devices: &Devices) -> Vec<DeviceInfo> {
    let mut infos = Vec::new();
    for (kind, api) in devices.iter() {
        match api.map_err(str::to_owned).and_then(|api| api.count().map_err(|error| error.to_string())) {
            Ok(0) => infos.push(absent(kind, "the driver reports none".to_owned())),
            Ok(count) => {
                let offered = (0..count).map(|index| Device::new(kind, index));
                // Devices that the client may not use are left out.
                let offered = offered.filter(|device| devices.get(*device).is_ok());
                infos.extend(offered.map(|device| device_info(devices, device)));
            }
            Err(reason) => infos.push(absent(kind, reason)),
        }
    }
    let known: Vec<_> = devices.iter().map(|(kind, _)| kind).collect();
    let unknown = COMMON_KINDS.into_iter().filter(|kind| !known.contains(kind));
    infos.extend(unknown.map(|kind| absent(kind, "this build has no support for it".to_owned())));
    infos
}

/// Describes a device that is present.
pub(crate) fn device_info(devices: &Devices, device: Device) -> DeviceInfo {
    let name = match devices.attribute(device, DeviceAttribute::Name) {
        Ok(Value::Str(name)) => Some(name),
        _ => None,
    };
    let total_memory = match devices.attribute(device, DeviceAttribute::TotalMemory) {
        Ok(Value::Int(bytes)) => u64::try_from(bytes).ok(),
        _ => None,
    };
    let state = devices.get(device).map(|api| api.state(device.index)).unwrap_or_default();
    DeviceInfo {
        device: device.to_string(),
        name,
        total_memory: total_memory.or(state.total_memory),
        absent: None,
        clock_mhz: state.clock_mhz,
        used_memory: state.used_memory,
        utilization_percent: state.utilization_percent,
        state_unknown_because: state.unknown_because,
    }
}

fn absent(kind: DeviceType, reason: String) -> DeviceInfo {
    DeviceInfo {
        device: kind.to_string(),
        name: None,
        total_memory: None,
        absent: Some(reason),
        clock_mhz: None,
        used_memory: None,
        utilization_percent: None,
        state_unknown_because: None,
    }
}

#[cfg(test)]
mod tests {
    use rpc_core::{FunctionKind, LocalSession, Session};

    use super::*;

    #[test]
    fn info_gives_the_reason_for_an_absent_device_of_a_common_kind() {
        let registry = Registry::new();
        register(&registry);
        let devices = Devices::new().absent(DeviceType::VULKAN, "no loader was found");
        let session = Session::new(LocalSession::builder(registry).devices(devices).build());
        let info = session.function::<(), Pack<ServerInfo>>("rpc.info").wait().unwrap();
        let Pack(info) = info.call(()).wait().unwrap();
        let reason = |wanted: &str| {
            let found: Vec<_> = info.devices.iter().filter(|device| device.device == wanted).collect();
            assert_eq!(found.len(), 1, "{wanted}");
            found[0].absent.clone()
        };
        assert_eq!(reason("vulkan").unwrap(), "no loader was found");
        for kind in ["cuda", "rocm", "metal", "opencl"] {
            assert_eq!(reason(kind).unwrap(), "this build has no support for it");
        }
        assert_eq!(reason("cpu:0"), None);
    }

    /// Drivers may take long to answer, and an inline function blocks its connection.
    #[test]
    fn info_is_a_blocking_function() {
        let registry = Registry::new();
        register(&registry);
        assert_eq!(registry.get("rpc.info").unwrap().kind(), FunctionKind::Blocking);
    }
}
