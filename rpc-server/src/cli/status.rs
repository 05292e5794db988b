//! `status`: what a tracker knows, as a table.

use std::io::IsTerminal;
use std::time::Duration;

use clap::Args;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use rpc_transports::tracker::{
    DeviceOffer, Holder, HolderState, LossReason, Reach, ServerSummary, Summary, TrackerClient,
};

use super::connect::Globals;
use super::failure::Failure;
use super::output::Output;
use crate::config::Span;

#[derive(Args, Debug)]
pub(super) struct StatusArgs {
    /// The tracker, such as tracker://pool.lan:9190
    #[arg(long, env = "RPC_CLI_TRACKER", value_name = "ADDRESS")]
    tracker: String,
    /// Only servers and requests with this key
    #[arg(long, env = "RPC_CLI_KEY", value_name = "KEY")]
    key: Option<String>,
    /// Show it again and again, until interrupted
    #[arg(short, long, env = "RPC_CLI_WATCH")]
    watch: bool,
    /// With --watch: how long to wait from one to the next
    #[arg(short, long, env = "RPC_CLI_INTERVAL", value_name = "TIME", default_value = "1s")]
    interval: Span,
}

pub(super) async fn status(globals: &Globals, output: &Output, args: StatusArgs) -> Result<(), Failure> {
    let limit = globals.connect_limit();
    let connect = TrackerClient::connect_with(globals.connector()?, &args.tracker);
    let client = within(limit, "connecting to the tracker", connect).await?;
    loop {
        let mut summary = within(limit, "the tracker's answer", client.summary()).await?;
        if let Some(key) = &args.key {
            summary.servers.retain(|server| server.key == *key);
            summary.queue.retain(|entry| entry.key == *key || entry.key.is_empty());
            summary.losses.retain(|loss| loss.key == *key);
        }
        if output.is_json() {
            output.json(&summary)?;
        } else {
            if args.watch && std::io::stdout().is_terminal() {
                output.bytes(b"\x1b[2J\x1b[H")?;
            }
            text(&summary).iter().try_for_each(|line| output.line(line))?;
        }
        if !args.watch {
            return Ok(());
        }
        tokio::select! {
            () = tokio::time::sleep(args.interval.0) => {}
            _ = tokio::signal::ctrl_c() => return Ok(()),
        }
    }
}

async fn within<T>(limit: Duration, what: &str, work: impl Future<Output = rpc_core::Result<T>>) -> Result<T, Failure> {
    match tokio::time::timeout(limit, work).await {
        Ok(outcome) => Ok(outcome?),
        Err(_) => Err(Failure::TimedOut { what: what.to_owned(), limit }),
    }
}

fn text(summary: &Summary) -> Vec<String> {
    let places: u64 = summary.servers.iter().map(|server| u64::from(server.capacity)).sum();
    let free: u64 = summary.servers.iter().map(|server| u64::from(server.free)).sum();
    let (servers, queued) = (summary.servers.len(), summary.queue.len());
    let mut lines = vec![format!("{servers} servers, {free} of {places} places free, {queued} requests waiting")];
    if !summary.servers.is_empty() {
        let mut table = table(&["key", "server", "free", "held by", "has", "address"]);
        for server in &summary.servers {
            table.add_row([
                server.key.clone(),
                server.name.clone(),
                format!("{}/{}", server.free, server.capacity),
                server.holders.iter().map(holder).collect::<Vec<_>>().join("\n"),
                has(server),
                address(server),
            ]);
        }
        if let Some(column) = table.column_mut(2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        lines.push(table.to_string());
    }
    if !summary.queue.is_empty() {
        let mut table = table(&["waiting", "client", "wants", "priority", "there are"]);
        for entry in &summary.queue {
            let key = if entry.key.is_empty() { "any server" } else { &entry.key };
            let labels = entry.labels.iter().map(|(name, value)| format!(" {name}={value}")).collect::<String>();
            let devices = devices(&entry.devices).map(|device| format!(" {device}")).collect::<String>();
            table.add_row([
                for_people(entry.for_ms),
                entry.client.clone(),
                format!("{} × {key}{labels}{devices}", entry.count),
                entry.priority.to_string(),
                entry.possible.to_string(),
            ]);
        }
        lines.push(table.to_string());
    }
    if !summary.losses.is_empty() {
        let mut table = table(&["lost", "key", "server", "from", "why"]);
        for loss in &summary.losses {
            table.add_row([
                format!("{} ago", for_people(loss.ago_ms)),
                loss.key.clone(),
                loss.name.clone(),
                loss.peer.clone(),
                lost(&loss.reason),
            ]);
        }
        lines.push(table.to_string());
    }
    lines
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::UTF8_HORIZONTAL_ONLY).set_header(header);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    table
}

fn holder(Holder { client, for_ms, state }: &Holder) -> String {
    let how = match state {
        HolderState::Granted => ", on its way",
        HolderState::Direct => ", without a ticket",
        _ => "",
    };
    format!("{client} for {}{how}", for_people(*for_ms))
}

fn has(server: &ServerSummary) -> String {
    let labels = server.labels.iter().map(|(name, value)| format!("{name}={value}"));
    labels.chain(devices(&server.devices)).collect::<Vec<_>>().join(" ")
}

fn devices(devices: &[DeviceOffer]) -> impl Iterator<Item = String> {
    devices.iter().map(|device| format!("{}×{}", device.count, device.kind))
}

fn address(server: &ServerSummary) -> String {
    let address = server.address.join(", ");
    match &server.reach {
        Reach::Unreachable { why } => format!("{address}\nnot found there: {why}"),
        _ => address,
    }
}

/// Why a server is lost.
pub(super) fn lost(reason: &LossReason) -> String {
    match reason {
        LossReason::Gone => "it left, or its connection broke".to_owned(),
        LossReason::LeaseExpired => "it was not heard of for the length of its lease".to_owned(),
        LossReason::Refused { why } => format!("refused: {why}"),
        other => format!("{other:?}"),
    }
}

/// A length of time with its largest unit and the next one.
pub(super) fn for_people(millis: u64) -> String {
    let seconds = millis / 1000;
    match (seconds / 86400, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60) {
        (0, 0, 0, seconds) => format!("{seconds}s"),
        (0, 0, minutes, seconds) => format!("{minutes}m{seconds:02}s"),
        (0, hours, minutes, _) => format!("{hours}h{minutes:02}m"),
        (days, hours, ..) => format!("{days}d{hours:02}h"),
    }
}

#[cfg(test)]
mod tests {
    use super::for_people;

    #[test]
    fn times_have_two_units() {
        assert_eq!(
            [999, 61_000, 3_600_000, 90_000_000].map(for_people),
            ["0s", "1m01s", "1h00m", "1d01h"].map(str::to_owned)
        );
    }
}
