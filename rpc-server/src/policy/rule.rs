//! One rule of a policy: the clients that it is for, and what it lets them do.

use std::num::NonZeroUsize;

use rpc_core::{Device, DeviceType, Permission, SessionLimits};
use rpc_transports::{Transports, glob};
use serde::{Deserialize, Serialize};

use super::identity_pattern::IdentityPattern;
use crate::config::ByteSize;
use crate::modules::FOR_MEASUREMENTS;
use crate::run::ANY_PROGRAM;

/// A rule. Everything that it does not name, it does not give.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct Rule {
    pub(super) name: String,
    /// Clients that the rule is for, as the file says. Empty in a policy, which keeps them apart,
    /// and in other processes, which have the rules for one client.
    #[serde(default, skip_serializing)]
    pub(super) identities: Vec<IdentityPattern>,
    /// Names of functions, with `*` for any text.
    #[serde(default)]
    functions: Vec<String>,
    /// Devices beside host memory, which every client may use.
    #[serde(default)]
    devices: Vec<DevicePattern>,
    /// Programs, in the words of `--allow-run`.
    #[serde(default)]
    pub(super) run: Vec<String>,
    #[serde(default)]
    modules: bool,
    /// Patterns of addresses, in the words of `--allow-forward`.
    #[serde(default)]
    pub(super) forward: Vec<String>,
    /// Patterns of addresses, in the words of `--allow-port`.
    #[serde(default)]
    pub(super) port: Vec<String>,
    /// Patterns of addresses, in the words of `--allow-listen`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) listen: Vec<String>,
    /// Patterns of addresses, in the words of `--allow-peer`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) peer: Vec<String>,
    #[serde(default)]
    disco: bool,
    #[serde(default)]
    logs: bool,
    /// Highest priority of leases.
    #[serde(default)]
    lease_priority: i32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_sessions: Option<NonZeroUsize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_memory: Option<ByteSize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_handles: Option<NonZeroUsize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_requests: Option<NonZeroUsize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_threads: Option<NonZeroUsize>,
}

/// Functions that every client with a rule may call: they say what there is, and measure the
/// connection. Callbacks give the client's own functions to those that it calls, and offers let it
/// have its own tensors written by another server.
const BASIC: &[&str] = &[
    "rpc.info",
    "rpc.can",
    "rpc.functions",
    "rpc.signature",
    "rpc.echo",
    "rpc.noop",
    "rpc.peer.offer",
    "rpc.peer.withdraw",
];

/// Prefix of the functions by which clients lend functions of their own.
const CALLBACKS: &str = "rpc.callback.";

impl Rule {
    /// Returns true if the rule gives a permission.
    pub(super) fn allows(&self, permission: &Permission<'_>, transports: &Transports) -> bool {
        match permission {
            Permission::Function(name) => self.may_call(name),
            Permission::Device(device) => {
                device.kind == DeviceType::CPU || self.devices.iter().any(|pattern| pattern.matches(*device))
            }
            Permission::Modules => self.modules,
            Permission::Program(program) => lists_program(&self.run, program),
            Permission::Forward(address) => reaches(transports, &self.forward, address),
            Permission::Port(address) => reaches(transports, &self.port, address),
            Permission::Listen(address) => reaches(transports, &self.listen, address),
            Permission::Peer(address) => reaches(transports, &self.peer, address),
            Permission::Disco => self.disco,
            Permission::Logs => self.logs,
            Permission::LeasePriority(priority) => *priority <= self.lease_priority,
            // Permissions of later versions are not given by a rule that cannot name them.
            _ => false,
        }
    }

    /// Returns true if the rule lets clients call a function by this name. Functions that are the
    /// parts of another right come with that, and with no pattern.
    fn may_call(&self, name: &str) -> bool {
        let is_named = || self.functions.iter().any(|pattern| glob(pattern, name));
        match right_behind(name) {
            Some(Right::Run) => !self.run.is_empty(),
            Some(Right::Modules) => self.modules,
            Some(Right::Disco) => self.disco,
            Some(Right::Logs) => self.logs,
            Some(Right::Devices) => !self.devices.is_empty(),
            Some(Right::Listen) => !self.listen.is_empty(),
            Some(Right::Peer) => !self.peer.is_empty(),
            // Programs need files, and tell about them.
            None if name.starts_with("rpc.file.") => !self.run.is_empty() || is_named(),
            None => BASIC.contains(&name) || name.starts_with(CALLBACKS) || is_named(),
        }
    }

    /// Returns what the rule gives of the kind of `permission`, as texts for an error.
    pub(super) fn given_like(&self, permission: &Permission<'_>) -> Vec<String> {
        match permission {
            Permission::Function(_) => self.functions.clone(),
            Permission::Device(_) => self.devices.iter().map(ToString::to_string).collect(),
            Permission::Program(_) => self.run.clone(),
            Permission::Forward(_) => self.forward.clone(),
            Permission::Port(_) => self.port.clone(),
            Permission::Listen(_) => self.listen.clone(),
            Permission::Peer(_) => self.peer.clone(),
            Permission::LeasePriority(_) => vec![format!("up to {}", self.lease_priority)],
            _ => Vec::new(),
        }
    }

    /// Returns the limits that the rule gives in place of those of the server.
    pub(super) fn limits(&self) -> RuleLimits {
        RuleLimits {
            memory: self.max_memory.map(|size| size.0),
            handles: self.max_handles.map(NonZeroUsize::get),
            requests: self.max_requests.map(NonZeroUsize::get),
            threads: self.max_threads.map(NonZeroUsize::get),
            sessions: self.max_sessions.map(NonZeroUsize::get),
        }
    }
}

/// Returns true if `program` is in a list in the words of `--allow-run`.
pub(super) fn lists_program(list: &[String], program: &str) -> bool {
    list.iter().any(|name| name == ANY_PROGRAM || name == program)
}

/// Returns true if one of the patterns stands for the address.
pub(super) fn reaches(transports: &Transports, patterns: &[String], address: &str) -> bool {
    address.parse().is_ok_and(|address| patterns.iter().any(|pattern| transports.matches(pattern, &address)))
}

/// Limits that rules name; `None` where they name none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RuleLimits {
    memory: Option<u64>,
    handles: Option<usize>,
    requests: Option<usize>,
    threads: Option<usize>,
    pub(super) sessions: Option<usize>,
}

impl RuleLimits {
    /// Returns the greatest of each limit that either names.
    pub(super) fn or_greater(self, other: Self) -> Self {
        // `None` is less than every number.
        Self {
            memory: self.memory.max(other.memory),
            handles: self.handles.max(other.handles),
            requests: self.requests.max(other.requests),
            threads: self.threads.max(other.threads),
            sessions: self.sessions.max(other.sessions),
        }
    }

    /// Returns the limits of a session of a server with the limits `ceiling`.
    pub(super) fn within(self, ceiling: SessionLimits) -> SessionLimits {
        fn least<T: Ord>(limit: Option<T>, ceiling: T) -> T {
            match limit {
                Some(limit) => limit.min(ceiling),
                None => ceiling,
            }
        }
        SessionLimits {
            max_requests: least(self.requests, ceiling.max_requests),
            max_queued_bytes: ceiling.max_queued_bytes,
            max_handles: least(self.handles, ceiling.max_handles),
            max_memory: least(self.memory, ceiling.max_memory),
            max_threads: least(self.threads, ceiling.max_threads),
        }
    }
}

/// Right that some functions are the parts of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Right {
    Run,
    Modules,
    Disco,
    Devices,
    Listen,
    Peer,
    Logs,
}

impl Right {
    /// Returns the key by which a rule gives the right.
    pub(super) fn key(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Modules => "modules",
            Self::Disco => "disco",
            Self::Devices => "devices",
            Self::Listen => "listen",
            Self::Peer => "peer",
            Self::Logs => "logs",
        }
    }
}

/// Returns the right that gives the function with this name; `None` if patterns of functions do.
pub(super) fn right_behind(function: &str) -> Option<Right> {
    if FOR_MEASUREMENTS.contains(&function) {
        return Some(Right::Modules);
    }
    let behind = [
        ("rpc.run.", Right::Run),
        ("rpc.module.", Right::Modules),
        ("disco.", Right::Disco),
        ("rpc.lease.", Right::Devices),
        ("rpc.listen.", Right::Listen),
        ("rpc.peer.send", Right::Peer),
        ("rpc.logs.", Right::Logs),
    ];
    behind.into_iter().find(|(prefix, _)| function.starts_with(prefix)).map(|(_, right)| right)
}

/// Pattern of devices: `*`, a kind such as `cuda` for all its devices, or one device such as
/// `cuda:0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(super) enum DevicePattern {
    Any,
    Kind(DeviceType),
    One(Device),
}

impl DevicePattern {
    fn matches(self, device: Device) -> bool {
        match self {
            Self::Any => true,
            Self::Kind(kind) => kind == device.kind,
            Self::One(one) => one == device,
        }
    }
}

impl TryFrom<String> for DevicePattern {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let parsed = match text.split_once(':') {
            None if text == "*" => Ok(Self::Any),
            None => text.parse().map(Self::Kind),
            Some(_) => text.parse().map(Self::One),
        };
        parsed.map_err(|error| format!("{}: write cuda:0, cuda for all of that kind, or *", error.message()))
    }
}

impl std::fmt::Display for DevicePattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Any => f.write_str("*"),
            Self::Kind(kind) => kind.fmt(f),
            Self::One(device) => device.fmt(f),
        }
    }
}

impl From<DevicePattern> for String {
    fn from(pattern: DevicePattern) -> Self {
        pattern.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::super::document::Policy;
    use super::*;

    fn policy(text: &str) -> Policy {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    fn allows(policy: &Policy, identity: &str, permission: &str) -> bool {
        let permission = Permission::parse(permission).unwrap();
        policy.check(&identity.parse().unwrap(), &permission).is_ok()
    }

    #[test]
    fn functions_that_trust_what_they_are_given_come_with_the_right_to_load_modules() {
        for name in ["tvm.contrib.random.random_fill", "cache_flush_cpu_non_first_arg", "rpc.module.load"] {
            assert!(right_behind(name) == Some(Right::Modules), "{name}");
        }
        assert!(right_behind("tvm.contrib.random.random_fill2").is_none());
    }

    #[test]
    fn rules_give_what_they_name_and_add_up() {
        let policy = policy(
            r#"
            [[rule]]
            name = "models"
            identities = ["*"]
            functions = ["model.*", "rpc.file.ls"]

            [[rule]]
            name = "programs"
            identities = ["token:ci"]
            run = ["make"]
            devices = ["cuda:1", "vulkan"]
            forward = ["tcp://10.0.0.*:9090"]
            port = ["unix:/run/x.sock"]
            listen = ["tcp://127.0.0.1:80*"]
            peer = ["tls://10.0.0.*"]
            lease-priority = 3

            [[rule]]
            name = "all"
            identities = ["token:root"]
            functions = ["*"]
            run = ["any"]
            devices = ["*"]
            modules = true
            disco = true
            logs = true
            "#,
        );
        // Columns: everybody, ci, root.
        for (permission, expected) in [
            ("call:model.run", [true, true, true]),
            ("call:rpc.info", [true, true, true]),
            ("call:rpc.callback.next", [true, true, true]),
            ("call:shell", [false, false, true]),
            ("call:rpc.file.ls", [true, true, true]),
            ("call:rpc.file.rm", [false, true, true]),
            // Functions that are parts of another right come with no pattern.
            ("call:rpc.run.start", [false, true, true]),
            ("call:rpc.lease.request", [false, true, true]),
            ("call:rpc.module.import", [false, false, true]),
            ("call:disco.open", [false, false, true]),
            ("run:make", [false, true, true]),
            ("run:make2", [false, false, true]),
            ("run:./make", [false, false, true]),
            ("run:any", [false, false, true]),
            ("device:cpu:0", [true, true, true]),
            ("device:cuda:1", [false, true, true]),
            ("device:cuda:0", [false, false, true]),
            ("device:vulkan:7", [false, true, true]),
            ("forward:tcp://10.0.0.5:9090", [false, true, false]),
            ("forward:tcp://10.0.1.5:9090", [false, false, false]),
            ("forward:no address", [false, false, false]),
            ("port:unix:/run/x.sock", [false, true, false]),
            ("port:tcp://10.0.0.5:9090", [false, false, false]),
            ("listen:tcp://127.0.0.1:8080", [false, true, false]),
            ("listen:tcp://127.0.0.1:9090", [false, false, false]),
            ("listen:unix:/run/x.sock", [false, false, false]),
            ("peer:tls://10.0.0.5:9090", [false, true, false]),
            ("peer:tcp://10.0.0.5:9090", [false, false, false]),
            ("call:rpc.peer.offer", [true, true, true]),
            ("call:rpc.peer.send", [false, true, false]),
            ("call:rpc.listen.open", [false, true, false]),
            ("modules", [false, false, true]),
            ("disco", [false, false, true]),
            ("logs", [false, false, true]),
            ("call:rpc.logs.read", [false, false, true]),
            ("lease-priority:0", [true, true, true]),
            ("lease-priority:3", [false, true, false]),
        ] {
            let allowed = ["anonymous", "token:ci", "token:root"].map(|identity| allows(&policy, identity, permission));
            assert_eq!(allowed, expected, "{permission}");
        }
        // All functions are not all rights.
        let functions = self::policy("[[rule]]\nname = 'f'\nidentities = ['*']\nfunctions = ['*']");
        for name in
            ["rpc.run.start", "rpc.module.write", "disco.open", "rpc.lease.request", "rpc.listen.open", "rpc.logs.read"]
        {
            assert!(!allows(&functions, "anonymous", &format!("call:{name}")), "{name}");
        }
    }

    #[test]
    fn limits_are_the_greatest_of_the_rules_and_the_server_is_the_ceiling() {
        let (small, large) = (Some(5), Some(7));
        let one = RuleLimits { handles: small, threads: large, sessions: small, ..RuleLimits::default() };
        let other = RuleLimits { handles: large, memory: Some(1 << 30), ..RuleLimits::default() };
        let all = one.or_greater(other);
        assert_eq!(all, other.or_greater(one));
        assert_eq!((all.handles, all.threads, all.sessions, all.requests), (large, large, small, None));
        let ceiling = SessionLimits { max_handles: 6, max_memory: 1 << 40, ..SessionLimits::default() };
        let limits = all.within(ceiling.clone());
        assert_eq!((limits.max_handles, limits.max_memory, limits.max_threads), (6, 1 << 30, 7));
        assert_eq!(limits.max_requests, ceiling.max_requests);
    }

    #[test]
    fn a_policy_that_cannot_mean_what_it_says_is_an_error() {
        let rule = "[[rule]]\nname = 'a'\nidentities = ['*']\n";
        for (text, expected) in [
            ("rules = []", "unknown field `rules`"),
            ("[[rule]]\nname = 'a'", "is for no client"),
            ("[[rule]]\nidentities = ['*']", "missing field `name`"),
            (&rule.repeat(2), "a name of its own"),
            (&rule.replace("*", "alice"), "'alice' is no identity"),
            (&format!("{rule}function = ['x']"), "line 4"),
            (&format!("{rule}devices = ['toaster']"), "unknown device kind"),
            (&format!("{rule}forward = ['10.0.0.5']"), "a pattern that allows nothing"),
            (&format!("{rule}run = ['make', '*']"), "or \"any\" for all programs"),
            (&format!("{rule}max-threads = 0"), "line 4"),
            (&format!("{rule}max-memory = 'much'"), "line 4"),
        ] {
            let error = text.parse::<Policy>().expect_err(text).to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
        assert!(!allows(&policy(""), "anonymous", "call:rpc.info"), "an empty policy gives nothing");
    }
}
