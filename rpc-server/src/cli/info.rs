//! `functions` and `info`: functions, devices and usage of a server.

use std::time::Duration;

use clap::Args;
use glob::Pattern;
use rpc_core::client::Modules;
use rpc_core::{ErrorKind, Pack, Session};
use serde_json::{Value as Json, json};

use super::connect::{CommonOptions, Files};
use super::failure::Failure;
use super::module::ModuleArgs;
use super::output::{Output, counted, seconds, size};
use crate::builtins::{DeviceInfo, LeasedDevice, ModulesInfo, SendsInfo, ServerInfo, WaitingLease};
use crate::tracker::display::plain;

#[derive(Args, Debug)]
pub(super) struct AddressArgs {
    /// The server. Default: that of rpc-cli use
    pub(super) address: String,
}

#[derive(Args, Debug)]
pub(super) struct FunctionsArgs {
    /// The server. Default: that of rpc-cli use
    pub(super) address: String,
    /// Only functions with this text in their names, or with names of this pattern, in which *
    /// stands for any text
    filter: Option<String>,
    /// Also the functions of the server itself and of its devices: rpc.*, disco.*, cuda.* and
    /// opencl.*
    #[arg(short, long, env = "RPC_CLI_ALL")]
    all: bool,
    #[command(flatten)]
    module: ModuleArgs,
}

/// Function of a server or of a module, as it is listed.
struct ListedFunction {
    name: String,
    signature: String,
    description: String,
}

impl ListedFunction {
    /// Returns true if the function belongs to the server itself, and not to its program.
    fn is_internal(&self) -> bool {
        INTERNAL.iter().any(|prefix| self.name.starts_with(prefix))
    }
}

/// Prefixes of the names of functions that belong to servers themselves and to their devices.
const INTERNAL: [&str; 4] = ["rpc.", "disco.", "cuda.", "opencl."];

pub(super) async fn functions(options: &CommonOptions, output: &Output, args: FunctionsArgs) -> Result<(), Failure> {
    let filter = args.filter.as_deref().map(NameFilter::new).transpose()?;
    // The module may be a file of the workspace.
    let files = if args.module.is_given() { Files::Workspace } else { Files::None };
    options
        .with_session(&args.address, files, async |session| {
            let functions = match args.module.load(&session, output).await? {
                Some(module) => {
                    let functions = Modules::new(&session).functions(&module).await?.into_iter();
                    functions.map(|(name, signature)| vec![name, signature]).collect()
                }
                None => server_functions(&session).await?,
            };
            let mut functions: Vec<_> = functions.into_iter().filter_map(listed).collect();
            if let Some(filter) = &filter {
                functions.retain(|function| filter.matches(&function.name));
            }
            let all = functions.len();
            // Who asks for rpc.* by name wants to see them.
            let is_internal = |text: &String| INTERNAL.iter().any(|prefix| text.starts_with(prefix));
            let names_internal = args.filter.as_ref().is_some_and(is_internal);
            if !args.all && !names_internal {
                functions.retain(|function| !function.is_internal());
            }
            functions.sort_by_key(ListedFunction::is_internal);
            if output.is_json() {
                let entry = |ListedFunction { name, signature, description }: &ListedFunction| {
                    json!({ "name": name, "signature": signature, "description": description })
                };
                return output.json(&functions.iter().map(entry).collect::<Vec<Json>>());
            }
            let described = functions.iter().filter(|function| !function.description.is_empty());
            let width = described.map(|function| function.name.len() + function.signature.len()).max().unwrap_or(0);
            for ListedFunction { name, signature, description } in &functions {
                let function = format!("{name}{signature}");
                match description.as_str() {
                    "" => output.line(&function)?,
                    description => output.line(&format!("{function:width$}  {description}"))?,
                }
            }
            if functions.len() < all {
                let hidden = counted((all - functions.len()) as u64, "function");
                output.note(&format!("{hidden} of the server itself not shown; --all shows all"));
            }
            Ok(())
        })
        .await
}

/// Asks a server for its functions: lists of name, signature and, from a server that knows them,
/// description.
pub(super) async fn server_functions(session: &Session) -> Result<Vec<Vec<String>>, Failure> {
    let functions = session.get_function("rpc.functions").await?;
    match functions.call((true,)).await {
        // An older server takes no argument.
        Err(error) if error.kind() == ErrorKind::InvalidArgument => Ok(functions.call(()).await?),
        outcome => Ok(outcome?),
    }
}

/// Takes the parts of a function.
fn listed(parts: Vec<String>) -> Option<ListedFunction> {
    let mut parts = parts.into_iter();
    let (name, signature) = (parts.next()?, parts.next()?);
    Some(ListedFunction { name, signature, description: parts.next().unwrap_or_default() })
}

/// Filter of names.
enum NameFilter {
    Text(String),
    Pattern(Pattern),
}

impl NameFilter {
    fn new(text: &str) -> Result<Self, Failure> {
        if !text.contains(['*', '?', '[']) {
            return Ok(Self::Text(text.to_owned()));
        }
        let pattern = Pattern::new(text).map_err(|error| Failure::Usage(format!("{text}: {error}")))?;
        Ok(Self::Pattern(pattern))
    }

    fn matches(&self, name: &str) -> bool {
        match self {
            Self::Text(text) => name.contains(text.as_str()),
            Self::Pattern(pattern) => pattern.matches(name),
        }
    }
}

pub(super) async fn info(options: &CommonOptions, output: &Output, args: AddressArgs) -> Result<(), Failure> {
    options
        .with_session(&args.address, Files::None, async |session| {
            let info = session.get_function("rpc.info").await?;
            let Pack(info): Pack<ServerInfo> = info.call(()).await?;
            if output.is_json() {
                output.json(&info)
            } else {
                text(&info).iter().try_for_each(|line| output.line(line))
            }
        })
        .await
}

fn text(info: &ServerInfo) -> Vec<String> {
    let uptime = Duration::from_secs(info.uptime_seconds as u64);
    let mut identity = info.identity.clone().unwrap_or_else(|| "unknown".to_owned());
    if let Some(rules) = &info.rules {
        identity += &format!(" (rules of the policy: {})", rules.join(", "));
    }
    let mut lines = vec![
        format!("version    {} (protocol {})", info.version, info.protocol_version),
        format!("machine    {} ({} {}), process {}", info.host, info.os, info.arch, info.pid),
        format!("key        {}", info.key.as_deref().unwrap_or("none")),
        format!("uptime     {}", indicatif::HumanDuration(uptime)),
        format!("sessions   {}", info.sessions),
        format!("handles    {}", info.handles),
        format!("memory     {}", size(info.memory_bytes)),
        format!("modules    {}", modules_text(info.modules.as_ref())),
        format!("you are    {identity}"),
    ];
    lines.extend(info.sends.as_ref().map(|sends| sends_lines(sends, info.rules.is_some())).into_iter().flatten());
    if let Some(workers) = info.disco_workers.filter(|workers| *workers > 0) {
        lines.push(format!("disco      {}", counted(workers, "worker")));
    }
    for leased in &info.leases {
        lines.push(format!("leased     {} {}", plain(&leased.device), lease_text(leased)));
        for (at, next) in leased.next.iter().enumerate() {
            let WaitingLease { client, priority, waited_seconds, .. } = next;
            let waited = seconds(*waited_seconds);
            lines.push(format!("{:10} {}. {client}, priority {priority}, for {waited}", "", at + 1));
        }
    }
    for (at, device) in info.devices.iter().enumerate() {
        let label = if at == 0 { "devices" } else { "" };
        lines.push(format!("{label:10} {}", device_text(device)));
    }
    lines
}

/// Describes the ways of tensors from this server to others, and from others to it.
fn sends_lines(sends: &SendsInfo, has_rules: bool) -> [String; 2] {
    let to = match &sends.to[..] {
        [] if has_rules => "through the client (--allow-peer, and 'peer' in a rule for you)".to_owned(),
        [] => "through the client (--allow-peer)".to_owned(),
        patterns => format!("to {}", plain(&patterns.join(", "))),
    };
    let here = match &sends.unreachable {
        Some(reason) => format!("through the client: {}", plain(reason)),
        None => format!("at {}", plain(&sends.addresses.join(", "))),
    };
    [format!("sends      {to}"), format!("receives   {here}")]
}

/// Describes the lease on a device, and how many wait for it.
pub(super) fn lease_text(leased: &LeasedDevice) -> String {
    let LeasedDevice { held_seconds, left_seconds, waiting, used_by, holder, .. } = leased;
    if *used_by > 0 {
        return format!("by nobody, and still used by {}; {waiting} waiting", counted(*used_by, "other session"));
    }
    let by = holder.as_ref().map(|holder| format!("by {holder} ")).unwrap_or_default();
    let [held, left] = [held_seconds, left_seconds].map(|time| seconds(*time));
    format!("{by}for {held}, at most {left} more; {waiting} waiting")
}

fn modules_text(modules: Option<&ModulesInfo>) -> String {
    let Some(modules) = modules else { return "not taken (--allow-modules)".to_owned() };
    let which = if modules.listed_only { "those that the operator has listed" } else { "any" };
    let unavailable = modules.unavailable.as_ref().map(|reason| format!("; none can be loaded: {reason}"));
    format!("{which}, up to {}{}", size(modules.max_bytes), unavailable.unwrap_or_default())
}

fn device_text(device: &DeviceInfo) -> String {
    let mut text = device.device.clone();
    if let Some(name) = &device.name {
        text += &format!(" {name}");
    }
    if let Some(memory) = device.total_memory {
        text += &format!(", {}", size(memory));
    }
    if let Some(used) = device.used_memory {
        text += &format!(" ({} in use)", size(used));
    }
    if let Some(percent) = device.utilization_percent {
        text += &format!(", {percent} % busy");
    }
    if let Some(clock) = device.clock_mhz {
        text += &format!(", {clock} MHz");
    }
    if let Some(reason) = &device.state_unknown_because {
        text += &format!("; state unknown: {}", plain(reason));
    }
    if let Some(reason) = &device.absent {
        text += &format!(" absent: {reason}");
    }
    text
}
