//! `functions` and `info`: what a server offers and holds.

use std::time::Duration;

use clap::Args;
use rpc_core::Pack;
use serde_json::{Value as Json, json};

use super::connect::{Files, Globals};
use super::failure::Failure;
use super::output::{Output, size};
use crate::builtins::{DeviceInfo, ServerInfo};

#[derive(Args, Debug)]
pub(super) struct AddressArgs {
    /// The server
    address: String,
}

pub(super) async fn functions(globals: &Globals, output: &Output, args: AddressArgs) -> Result<(), Failure> {
    globals
        .with_session(&args.address, Files::None, async |session| {
            let list = session.function::<(), Vec<(String, String)>>("rpc.functions").await?;
            let functions = list.call(()).await?;
            if output.is_json() {
                let entry = |(name, signature): &(String, String)| json!({ "name": name, "signature": signature });
                return output.json(&functions.iter().map(entry).collect::<Vec<Json>>());
            }
            functions.iter().try_for_each(|(name, signature)| output.line(&format!("{name}{signature}")))
        })
        .await
}

pub(super) async fn info(globals: &Globals, output: &Output, args: AddressArgs) -> Result<(), Failure> {
    globals
        .with_session(&args.address, Files::None, async |session| {
            let info = session.function::<(), Pack<ServerInfo>>("rpc.info").await?;
            let Pack(info) = info.call(()).await?;
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
    ];
    for (at, device) in info.devices.iter().enumerate() {
        let label = if at == 0 { "devices" } else { "" };
        lines.push(format!("{label:10} {}", device_text(device)));
    }
    lines
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
