//! `status`: servers, queue and losses of a tracker, as tables.

use std::io::IsTerminal;
use std::time::Duration;

use clap::Args;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use rpc_transports::tracker::{Reach, ServerSummary, Summary, TrackerClient};

use super::connect::CommonOptions;
use super::failure::Failure;
use super::interruption::Interruption;
use super::output::{Output, counted};
use crate::config::Span;
use crate::tracker::display::{draining, for_people, free, has, holder, lost, offered, plain, wanted};

#[derive(Args, Debug)]
pub(super) struct StatusArgs {
    /// The tracker, such as tracker://pool.lan. Default: that of rpc-cli use
    #[arg(long, env = "RPC_CLI_TRACKER", value_name = "ADDRESS")]
    pub(super) tracker: String,
    /// Only servers and requests with this key
    #[arg(long, env = "RPC_CLI_KEY", value_name = "KEY")]
    key: Option<String>,
    /// Repeat until interrupted
    #[arg(short, long, env = "RPC_CLI_WATCH")]
    watch: bool,
    /// With --watch: time between two updates
    #[arg(short, long, env = "RPC_CLI_INTERVAL", value_name = "TIME", default_value = "1s")]
    interval: Span,
}

/// Prints what the tracker knows: once, or again and again until the interruption comes.
pub(super) async fn status(
    options: &CommonOptions,
    output: &Output,
    args: StatusArgs,
    interruption: &Interruption,
) -> Result<(), Failure> {
    let limit = options.connect_limit();
    let connect = TrackerClient::connect_with(options.connector()?, &args.tracker);
    let client = tokio::select! {
        client = within(limit, "connecting to the tracker", connect) => client?,
        failure = interruption.wait() => return Err(failure),
    };
    loop {
        let mut summary = tokio::select! {
            summary = within(limit, "the tracker's answer", client.summary()) => summary?,
            failure = interruption.wait() => return if args.watch { Ok(()) } else { Err(failure) },
        };
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
            text(&summary, width()).iter().try_for_each(|line| output.line(line))?;
        }
        if !args.watch {
            return Ok(());
        }
        tokio::select! {
            () = tokio::time::sleep(args.interval.0) => {}
            _ = interruption.wait() => return Ok(()),
        }
    }
}

async fn within<T>(limit: Duration, what: &str, work: impl Future<Output = rpc_core::Result<T>>) -> Result<T, Failure> {
    match tokio::time::timeout(limit, work).await {
        Ok(outcome) => Ok(outcome?),
        Err(_) => Err(Failure::TimedOut { what: what.to_owned(), limit, why: None }),
    }
}

fn text(summary: &Summary, width: u16) -> Vec<String> {
    let slots: u64 = summary.servers.iter().map(offered).sum();
    let all_free: u64 = summary.servers.iter().map(|server| u64::from(server.free)).sum();
    let servers = counted(summary.servers.len() as u64, "server");
    let (slots, queued) = (counted(slots, "slot"), counted(summary.queue.len() as u64, "request"));
    let mut lines = vec![format!("{servers}, {all_free} of {slots} free, {queued} waiting")];
    if !summary.servers.is_empty() {
        let mut table = table(&["key", "server", "free", "held by", "has", "address"], width);
        for server in &summary.servers {
            table.add_row([
                server.key.clone(),
                plain(&server.name),
                free(server),
                server
                    .holders
                    .iter()
                    .map(holder)
                    .chain(server.draining.as_ref().map(draining))
                    .collect::<Vec<_>>()
                    .join("\n"),
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
        let mut table = table(&["waiting", "client", "wants", "priority", "suitable slots"], width);
        for entry in &summary.queue {
            table.add_row([
                for_people(entry.for_ms),
                plain(&entry.client),
                wanted(entry),
                entry.priority.to_string(),
                entry.possible.to_string(),
            ]);
        }
        lines.push(table.to_string());
    }
    // A server that was stopped in good order is not lost.
    for (title, orderly) in [("lost", false), ("stopped", true)] {
        let mut losses = summary.losses.iter().filter(|loss| loss.orderly == orderly).peekable();
        if losses.peek().is_none() {
            continue;
        }
        let mut table = table(&[title, "key", "server", "from", "why"], width);
        for loss in losses {
            table.add_row([
                format!("{} ago", for_people(loss.ago_ms)),
                loss.key.clone(),
                plain(&loss.name),
                loss.peer.clone(),
                lost(loss),
            ]);
        }
        lines.push(table.to_string());
    }
    lines
}

fn table(header: &[&str], width: u16) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::UTF8_HORIZONTAL_ONLY).set_header(header);
    table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
    table
}

/// Default width of a table if the width of the terminal is unknown, in columns.
const DEFAULT_WIDTH: u16 = 100;

/// Returns the width of the terminal, in columns.
fn width() -> u16 {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok();
    size.map(|size| size.ws_col).filter(|columns| *columns > 0).unwrap_or(DEFAULT_WIDTH)
}

fn address(server: &ServerSummary) -> String {
    let address = plain(&server.address.join(", "));
    match &server.reach {
        Reach::Unreachable { why } => format!("{address}\nnot found there: {}", plain(why)),
        _ => address,
    }
}

#[cfg(test)]
mod tests {
    use rpc_transports::tracker::{Holder, HolderState, MESSAGES};

    use super::*;

    /// A table was as wide as its cells, 160 columns for a small pool.
    #[test]
    fn tables_fit_the_width() {
        let holder = |client: &str| Holder {
            client: client.to_owned(),
            for_ms: 61_000,
            state: HolderState::InUse,
            session: Some(1),
            silent_ms: 12_000,
        };
        let server = ServerSummary {
            id: 1,
            name: "machine-with-a-long-name".to_owned(),
            key: "board".to_owned(),
            labels: [("arch".to_owned(), "arm64".to_owned()), ("site".to_owned(), "second floor".to_owned())].into(),
            devices: Vec::new(),
            capacity: 2,
            free: 0,
            address: vec!["quic://gateway.example:9190".to_owned(), "tcp://10.0.0.5:9090/board".to_owned()],
            peer: "tcp://10.0.0.5:4".to_owned(),
            reach: Reach::Unreachable { why: "nothing listens on the port, or a firewall is in between".to_owned() },
            registered_for_ms: 0,
            heard_ago_ms: 0,
            holders: vec![holder("alice (tcp://10.0.0.6:40000)"), holder("bob (tcp://10.0.0.7:40000)")],
            draining: None,
            details: None,
        };
        let summary = Summary {
            version: MESSAGES.version(),
            uptime_ms: 61_000,
            lease_ms: 10_000,
            servers: vec![server],
            queue: Vec::new(),
            losses: Vec::new(),
            history: Vec::new(),
            events: Vec::new(),
        };
        for width in [80, DEFAULT_WIDTH, 160] {
            let text = text(&summary, width).join("\n");
            let widest = text.lines().map(|line| line.chars().count()).max().unwrap();
            assert!(widest <= usize::from(width), "{widest} > {width}:\n{text}");
            assert!(text.contains("alice") && text.contains("bob") && text.contains("silent"), "{text}");
        }
    }
}
