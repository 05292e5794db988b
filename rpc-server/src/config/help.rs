//! Help of the settings: their groups, and their defaults.

use clap::{Arg, Command};
use toml::Table;

use super::{RelayConfig, ServeConfig, TrackerConfig};

/// Groups of settings by the names of their flags. Maximums that are listed in none are limits.
const GROUPS: [(&str, &[&str]); 7] = [
    ("Addresses", &["listen", "key", "port-range", "stdio", "ready-file", "exit-with-stdin", "http", "allow-origin"]),
    (
        "Identity and encryption",
        &[
            "cert",
            "cert-key",
            "client-ca",
            "token-file",
            "insecure",
            "trust-proxy",
            "forward-ca",
            "forward-cert",
            "forward-cert-key",
            "forward-token-file",
        ],
    ),
    (
        "What clients may use",
        &[
            "allow-forward",
            "allow-port",
            "allow-listen",
            "allow-peer",
            "peer-address",
            "forward-functions",
            "tvm",
            "tvm-self-test",
            "allow-modules",
            "module-digests",
            "allow-run",
            "run-env",
            "run-client-env",
            "allow-disco",
            "allow-logs",
            "data-address",
            "allow-kick",
            "allow-advertise",
            "max-lease",
            "lease-policy",
            "policy",
        ],
    ),
    (
        "Files and modules",
        &[
            "workdir",
            "workspace-quota",
            "workspace-expiry",
            "file-cache",
            "weights",
            "library",
            "runtime-library",
            "python",
            "tvm-ffi",
            "module-store",
            "module-store-size",
            "module-expiry",
            "max-module",
        ],
    ),
    ("Processes of sessions", &["isolate", "isolate-memory", "isolate-files", "isolate-cpu-time", "max-run-processes"]),
    (
        "Trackers and relays",
        &[
            "tracker",
            "tracker-key",
            "tvm-tracker",
            "tvm-proxy",
            "tvm-client-timeout",
            "tvm-server-timeout",
            "relay",
            "label",
            "advertise",
            "capacity",
            "allow-direct",
            "lease",
            "ticket-lifetime",
        ],
    ),
    ("Logs and metrics", &["log-level", "log-format", "metrics", "otlp-endpoint"]),
];

/// Group of the settings that bound sessions and connections.
const LIMITS: &str = "Limits";

/// Settings of this group, beside those that begin with `max-`.
const OTHER_LIMITS: [&str; 8] = [
    "keep-alive",
    "spin",
    "write-timeout",
    "min-rate",
    "handshake-timeout",
    "session-duration",
    "idle-timeout",
    "drain-timeout",
];

/// Adds groups and defaults to the help of the commands `serve`, `worker`, `tracker` and `relay`.
pub(crate) fn with_groups_and_defaults(command: Command) -> Command {
    let serve = Table::try_from(ServeConfig::default());
    let tracker = Table::try_from(TrackerConfig::default());
    let relay = Table::try_from(RelayConfig::default());
    [("serve", &serve), ("worker", &serve), ("tracker", &tracker), ("relay", &relay)].into_iter().fold(
        command,
        |command, (name, defaults)| {
            // A path that is not UTF-8 has no text.
            let Ok(defaults) = defaults else { return command };
            command.mut_subcommand(name, |command| command.mut_args(|arg| describe(arg, defaults)))
        },
    )
}

fn describe(arg: Arg, defaults: &Table) -> Arg {
    let Some(name) = arg.get_long().map(str::to_owned) else { return arg };
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let arg = match defaults.get(&name).and_then(text) {
        Some(default) if !help.contains("Default") => arg.help(format!("{help}. Default: {default}")),
        _ => arg,
    };
    let listed = GROUPS.iter().find(|(_, names)| names.contains(&name.as_str())).map(|(group, _)| *group);
    let is_limit = name.starts_with("max-") || OTHER_LIMITS.contains(&name.as_str());
    match listed.or(is_limit.then_some(LIMITS)) {
        Some(group) => arg.help_heading(group),
        None => arg,
    }
}

/// Returns the text of a default that says something: no flag that is off, and no empty list.
fn text(default: &toml::Value) -> Option<String> {
    match default {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        _ => None,
    }
}
