//! `functions` and `info`: functions, devices and usage of a server.

use std::time::Duration;

use clap::Args;
use rpc_core::Pack;
use rpc_core::client::Modules;
use serde_json::{Value as Json, json};

use super::connect::{CommonOptions, Files};
use super::failure::Failure;
use super::module::ModuleArgs;
use super::output::{Output, seconds, size};
use crate::builtins::{DeviceInfo, LeasedDevice, ModulesInfo, ServerInfo};

#[derive(Args, Debug)]
pub(super) struct AddressArgs {
    /// The server. Default: that of rpc-cli use
    pub(super) address: String,
}

#[derive(Args, Debug)]
pub(super) struct FunctionsArgs {
    /// The server. Default: that of rpc-cli use
    pub(super) address: String,
    #[command(flatten)]
    module: ModuleArgs,
}

pub(super) async fn functions(options: &CommonOptions, output: &Output, args: FunctionsArgs) -> Result<(), Failure> {
    // The module may be a file of the workspace.
    let files = if args.module.is_given() { Files::Workspace } else { Files::None };
    options
        .with_session(&args.address, files, async |session| {
            let functions = match args.module.load(&session, output).await? {
                Some(module) => Modules::new(&session).functions(&module).await?,
                None => session.get_function("rpc.functions").await?.call::<Vec<(String, String)>>(()).await?,
            };
            if output.is_json() {
                let entry = |(name, signature): &(String, String)| json!({ "name": name, "signature": signature });
                return output.json(&functions.iter().map(entry).collect::<Vec<Json>>());
            }
            functions.iter().try_for_each(|(name, signature)| output.line(&format!("{name}{signature}")))
        })
        .await
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
    let mut lines = vec![
        format!("version    {} (protocol {})", info.version, info.protocol_version),
        format!("machine    {} ({} {}), process {}", info.host, info.os, info.arch, info.pid),
        format!("key        {}", info.key.as_deref().unwrap_or("none")),
        format!("uptime     {}", indicatif::HumanDuration(uptime)),
        format!("sessions   {}", info.sessions),
        format!("handles    {}", info.handles),
        format!("memory     {}", size(info.memory_bytes)),
        format!("modules    {}", modules_text(info.modules.as_ref())),
    ];
    for leased in &info.leases {
        let LeasedDevice { device, held_seconds, left_seconds, waiting, .. } = leased;
        let [held, left] = [held_seconds, left_seconds].map(|time| seconds(*time));
        lines.push(format!("leased     {device} for {held}, at most {left} more; {waiting} waiting"));
    }
    for (at, device) in info.devices.iter().enumerate() {
        let label = if at == 0 { "devices" } else { "" };
        lines.push(format!("{label:10} {}", device_text(device)));
    }
    lines
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
    if let Some(reason) = &device.absent {
        text += &format!(" absent: {reason}");
    }
    text
}
