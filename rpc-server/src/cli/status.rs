//! `status`: servers, queue and losses of a tracker, as tables.

use std::mem;
use std::time::Duration;

use clap::{Args, ValueEnum};
use comfy_table::{CellAlignment, ContentArrangement, Table};
use rpc_transports::tracker::{Reach, ServerSummary, Summary, TrackerClient};

use super::connect::CommonOptions;
use super::failure::Failure;
use super::interruption::Interruption;
use super::output::{Output, counted};
use crate::config::Span;
use crate::tracker::display::{
    draining, for_people, free, has, holder, lease, lost, next_leases, offered, plain, wanted,
};
use crate::tracker::wait_reason::wait_reasons;

#[derive(Args, Debug)]
pub(super) struct StatusArgs {
    /// The tracker, such as tracker://pool.lan. Default: that of rpc-cli use
    #[arg(long, env = "RPC_CLI_TRACKER", value_name = "ADDRESS")]
    pub(super) tracker: String,
    /// Only servers and requests with this key
    #[arg(long, env = "RPC_CLI_KEY", value_name = "KEY")]
    key: Option<String>,
    /// Format of the output. Default: tables that fit the terminal, or plain ones without one
    #[arg(short = 'o', long, env = "RPC_CLI_FORMAT")]
    pub(super) format: Option<StatusFormat>,
    /// Repeat until interrupted
    #[arg(short, long, env = "RPC_CLI_WATCH")]
    watch: bool,
    /// With --watch: time between two updates
    #[arg(short, long, env = "RPC_CLI_INTERVAL", value_name = "TIME", default_value = "1s")]
    interval: Span,
}

/// Format of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum StatusFormat {
    /// All columns, whatever the width of the terminal
    Wide,
    /// The address of each server, one a line
    Name,
    /// A JSON document, as --json
    Json,
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
        // By all servers: a request without a key can use those of other keys as well.
        let mut reasons = wait_reasons(&summary);
        if let Some(key) = &args.key {
            retain_key(&mut summary, &mut reasons, key);
        }
        // Also in a shell, whose output is not that of the line.
        if output.is_json() || args.format == Some(StatusFormat::Json) {
            output.json(&summary)?;
        } else if args.format == Some(StatusFormat::Name) {
            let mut addresses = summary.servers.iter().filter_map(|server| server.address.last());
            addresses.try_for_each(|address| output.untrusted_line(address))?;
        } else {
            print(&summary, &reasons, output, &args)?;
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

/// Leaves the servers, losses and requests of one key, with the reasons of those requests, and
/// requests without a key.
fn retain_key(summary: &mut Summary, reasons: &mut Vec<String>, key: &str) {
    summary.servers.retain(|server| server.key == key);
    summary.losses.retain(|loss| loss.key == key);
    let queue = mem::take(&mut summary.queue).into_iter().zip(mem::take(reasons));
    (summary.queue, *reasons) = queue.filter(|(entry, _)| entry.key == key || entry.key.is_empty()).unzip();
}

async fn within<T>(limit: Duration, what: &str, work: impl Future<Output = rpc_core::Result<T>>) -> Result<T, Failure> {
    match tokio::time::timeout(limit, work).await {
        Ok(outcome) => Ok(outcome?),
        Err(_) => Err(Failure::TimedOut { what: what.to_owned(), limit, why: None }),
    }
}

/// Prints tables: for a terminal within its width, and within its height if they are repeated;
/// plain ones for a pipe.
fn print(summary: &Summary, reasons: &[String], output: &Output, args: &StatusArgs) -> Result<(), Failure> {
    let terminal = rustix::termios::tcgetwinsize(std::io::stdout()).ok().filter(|size| size.ws_col > 0);
    let layout = match (terminal, args.format) {
        (_, Some(StatusFormat::Wide)) | (None, _) => Layout::Wide { is_plain: terminal.is_none() },
        (Some(size), _) => Layout::Fitting(size.ws_col),
    };
    let text = text(summary, reasons, layout).join("\n");
    let mut lines: Vec<_> = text.lines().collect();
    let size = terminal.map(|size| (usize::from(size.ws_row), usize::from(size.ws_col)));
    if let Some((rows, columns)) = size.filter(|_| args.watch) {
        output.bytes(b"\x1b[2J\x1b[H")?;
        lines.truncate(visible_lines(&lines, rows, columns));
    }
    let left = text.lines().count() - lines.len();
    let (head, rest) = lines.split_first().map_or(("", &[][..]), |(head, rest)| (*head, rest));
    output.heading(head)?;
    rest.iter().try_for_each(|line| output.line(line))?;
    if left > 0 {
        output.line(&format!("… {left} more lines: the terminal is too low for them"))?;
    }
    Ok(())
}

/// Returns the number of lines that are shown on a terminal of so many rows and columns, which
/// keeps the first one, and has one row for the rest and one for the cursor. A line that is wider
/// than the terminal takes several rows.
fn visible_lines(lines: &[&str], rows: usize, columns: usize) -> usize {
    let height = |line: &&str| line.chars().count().div_ceil(columns).max(1);
    if lines.iter().map(height).sum::<usize>() < rows {
        return lines.len();
    }
    let ends = lines.iter().scan(0, |used, line| {
        *used += height(line);
        Some(*used)
    });
    ends.take_while(|end| *end <= rows.saturating_sub(2)).count().max(1)
}

/// Layout of tables.
#[derive(Clone, Copy, Debug)]
enum Layout {
    /// As many columns as fit this width, with lines that are broken.
    Fitting(u16),
    /// All columns, each row on as many lines as it needs. Plain ones have one line each and no
    /// rules.
    Wide { is_plain: bool },
}

impl Layout {
    /// Returns true if all columns are shown.
    fn is_wide(self) -> bool {
        match self {
            Self::Fitting(width) => width >= WIDE,
            Self::Wide { .. } => true,
        }
    }

    /// Joins the parts of a cell.
    fn joined(self, parts: impl Iterator<Item = String>) -> String {
        let separator = if matches!(self, Self::Wide { is_plain: true }) { "; " } else { "\n" };
        parts.collect::<Vec<_>>().join(separator)
    }
}

/// Width from which on all columns are shown.
const WIDE: u16 = 120;

/// Returns the parts of the output. The reasons are those for which the requests wait.
fn text(summary: &Summary, reasons: &[String], layout: Layout) -> Vec<String> {
    let slots: u64 = summary.servers.iter().map(offered).sum();
    let all_free: u64 = summary.servers.iter().map(|server| u64::from(server.free)).sum();
    let servers = counted(summary.servers.len() as u64, "server");
    let (slots, queued) = (counted(slots, "slot"), counted(summary.queue.len() as u64, "request"));
    let mut lines = vec![format!("{servers}, {all_free} of {slots} free, {queued} waiting")];
    if !summary.servers.is_empty() {
        let columns = ["key", "server", "free", "held by", "has", "address"];
        let shown = if layout.is_wide() { columns.len() } else { 4 };
        let mut table = table(&columns[..shown], layout);
        for server in &summary.servers {
            let unreachable = Some("not found at its address".to_owned());
            let unreachable = unreachable.filter(|_| matches!(server.reach, Reach::Unreachable { .. }));
            let notes = server.draining.as_ref().map(draining).into_iter().chain(unreachable.filter(|_| shown == 4));
            let row = [
                server.key.clone(),
                plain(&server.name),
                free(server),
                layout.joined(server.holders.iter().map(holder).chain(notes)),
                has(server),
                address(server, layout),
            ];
            table.add_row(&row[..shown]);
        }
        if let Some(column) = table.column_mut(2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        lines.push(lines_of(&table));
    }
    lines.extend(leases(summary, layout));
    if !summary.queue.is_empty() {
        let columns = ["waiting", "client", "wants", "why it waits", "priority", "suitable slots"];
        let shown = if layout.is_wide() { columns.len() } else { 4 };
        let mut table = table(&columns[..shown], layout);
        for (entry, why) in summary.queue.iter().zip(reasons) {
            let row = [
                for_people(entry.for_ms),
                plain(&entry.client),
                wanted(entry),
                why.clone(),
                entry.priority.to_string(),
                entry.possible.to_string(),
            ];
            table.add_row(&row[..shown]);
        }
        lines.push(lines_of(&table));
    }
    // A server that was stopped in good order is not lost.
    for (title, orderly) in [("lost", false), ("stopped", true)] {
        let mut losses = summary.losses.iter().filter(|loss| loss.orderly == orderly).peekable();
        if losses.peek().is_none() {
            continue;
        }
        let columns = [title, "key", "server", "why", "from"];
        let shown = if layout.is_wide() { columns.len() } else { 4 };
        let mut table = table(&columns[..shown], layout);
        for loss in losses {
            let ago = format!("{} ago", for_people(loss.ago_ms));
            let row = [ago, loss.key.clone(), plain(&loss.name), lost(loss), loss.peer.clone()];
            table.add_row(&row[..shown]);
        }
        lines.push(lines_of(&table));
    }
    lines
}

/// Returns the table of devices that are leased inside of servers; `None` if none is.
fn leases(summary: &Summary, layout: Layout) -> Option<String> {
    let mut table = table(&["leased", "server", "lease", "waiting"], layout);
    for server in &summary.servers {
        for device in server.details.iter().flat_map(|details| &details.devices) {
            if let Some(leased) = &device.lease {
                table.add_row([plain(&device.device), plain(&server.name), lease(leased), next_leases(leased)]);
            }
        }
    }
    (!table.is_empty()).then(|| lines_of(&table))
}

fn table(header: &[&str], layout: Layout) -> Table {
    let mut table = Table::new();
    let is_plain = matches!(layout, Layout::Wide { is_plain: true });
    let style = if is_plain { comfy_table::presets::NOTHING } else { comfy_table::presets::UTF8_HORIZONTAL_ONLY };
    table.load_style(style).set_header(header);
    match layout {
        Layout::Fitting(width) => table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width),
        Layout::Wide { .. } => table.set_content_arrangement(ContentArrangement::Disabled),
    };
    table
}

/// Returns the text of a table without the blanks that fill up its last column.
fn lines_of(table: &Table) -> String {
    table.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>().join("\n")
}

fn address(server: &ServerSummary, layout: Layout) -> String {
    let unreachable = match &server.reach {
        Reach::Unreachable { why } => Some(format!("not found there: {}", plain(why))),
        _ => None,
    };
    layout.joined([plain(&server.address.join(", "))].into_iter().chain(unreachable))
}

#[cfg(test)]
mod tests {
    use rpc_transports::tracker::{Holder, HolderState, MESSAGES, QueueEntry};

    use super::*;

    /// A regression: with `--key` a request that servers of other keys suit was told that there are
    /// none.
    #[test]
    fn reasons_are_those_of_the_whole_pool() {
        let entry = |key: &str| QueueEntry {
            client: "me".to_owned(),
            key: key.to_owned(),
            count: 1,
            distinct: false,
            labels: Default::default(),
            devices: Vec::new(),
            virtual_devices: Vec::new(),
            priority: 0,
            for_ms: 0,
            possible: 2,
        };
        let mut summary = Summary {
            version: MESSAGES.version(),
            uptime_ms: 0,
            lease_ms: 0,
            servers: Vec::new(),
            queue: ["desk", "", "board"].map(entry).into(),
            losses: Vec::new(),
            history: Vec::new(),
            events: Vec::new(),
        };
        let mut reasons = ["one", "two", "three"].map(str::to_owned).to_vec();
        retain_key(&mut summary, &mut reasons, "board");
        assert_eq!(summary.queue.iter().map(|entry| &*entry.key).collect::<Vec<_>>(), ["", "board"]);
        assert_eq!(reasons, ["two", "three"]);
        let text = text(&summary, &reasons, Layout::Wide { is_plain: true }).join("\n");
        assert!(text.contains("two") && text.contains("three") && !text.contains("no server"), "{text}");
    }

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
        for (lines, rows, shown) in [(3, 10, 3), (9, 10, 9), (10, 10, 8), (50, 10, 8), (50, 1, 1), (1, 0, 1)] {
            assert_eq!(visible_lines(&vec!["line"; lines], rows, 80), shown, "{lines} {rows}");
        }
        // Lines that are broken by the terminal, and empty ones.
        let wide = "é".repeat(81);
        for (lines, rows, shown) in
            [([&*wide; 4], 10, 4), ([&*wide; 4], 8, 3), ([&*wide, "", &*wide, ""], 7, 4), ([&*wide; 4], 2, 1)]
        {
            assert_eq!(visible_lines(&lines, rows, 80), shown, "{lines:?} {rows}");
        }
        for width in [80, 100, 160] {
            let text = text(&summary, &[], Layout::Fitting(width)).join("\n");
            let widest = text.lines().map(|line| line.chars().count()).max().unwrap();
            assert!(widest <= usize::from(width), "{widest} > {width}:\n{text}");
            assert!(text.contains("alice") && text.contains("bob") && text.contains("silent"), "{text}");
            assert!(text.contains("not found"), "{text}");
            assert_eq!(text.contains("arm64"), width >= WIDE, "{text}");
        }
        // For other programs each server has a line, and lines have no rules.
        let plain = text(&summary, &[], Layout::Wide { is_plain: true }).join("\n");
        assert_eq!(plain.lines().count(), 3, "{plain}");
        let row = plain.lines().last().unwrap();
        for part in ["alice", "bob", "site=second floor", "tcp://10.0.0.5:9090/board; not found there: nothing"] {
            assert!(row.contains(part), "{part}: {plain}");
        }
        assert!(plain.is_ascii() && plain.lines().all(|line| line.trim_end() == line), "{plain}");
    }
}
