//! Sections that several pages of the tracker have: servers, queue, losses and events.

use std::fmt::{self, Write};

use rpc_transports::tracker::{Loss, PoolEvent, PoolEventKind, QueueEntry, Reach, ServerSummary};

use super::markup::{Column, Text, begin_table, columns, end_table, section, table, write_row};
use super::query::{Encoded, Query, Sort};
use crate::cli::counted;
use crate::tracker::display::{for_people, free, has, holder, lost, offered, wanted};

/// Sums over the servers of one key.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KeySums {
    pub(super) servers: usize,
    pub(super) slots: u64,
    pub(super) free: u64,
    pub(super) clients: usize,
}

impl KeySums {
    pub(super) fn add(&mut self, server: &ServerSummary) {
        self.servers += 1;
        self.slots += offered(server);
        self.free += u64::from(server.free);
        self.clients += server.holders.len();
    }
}

/// Writes the table of servers, in the order of the query and with links to other orders.
pub(super) fn servers(
    to: &mut String,
    servers: &[ServerSummary],
    query: &Query,
    nothing: impl FnOnce(&mut String) -> fmt::Result,
) -> fmt::Result {
    let shown = query.servers(servers);
    let title = if shown.len() == servers.len() {
        "Servers".to_owned()
    } else {
        format!("Servers: {} of {} match", shown.len(), servers.len())
    };
    section(to, "servers-table", &title, |to| {
        if servers.is_empty() {
            return nothing(to);
        }
        let other = query.grouped(!query.is_grouped);
        let text = if query.is_grouped { "Do not group" } else { "Group by key" };
        writeln!(to, "<p class=\"choices\"><a href=\"{}\">{text}</a></p>", Text(other))?;
        if shown.is_empty() {
            return writeln!(to, "<p class=\"nothing\">No server matches the search.</p>");
        }
        begin_table(to, "Servers", &server_columns(query))?;
        if !query.is_grouped {
            to.write_str("<tbody>\n")?;
            shown.iter().try_for_each(|server| write_row(to, *server, server_row))?;
            to.write_str("</tbody>\n")?;
            return end_table(to);
        }
        for group in shown.chunk_by(|a, b| a.key == b.key) {
            let mut sums = KeySums::default();
            group.iter().for_each(|server| sums.add(server));
            let KeySums { servers, slots, free, .. } = sums;
            let (key, servers) = (&group[0].key, counted(servers as u64, "server"));
            write!(to, "<tbody>\n<tr class=\"group\"><th scope=\"rowgroup\" colspan=\"7\">")?;
            writeln!(to, "{} <small>{servers}, {free} of {} free</small></th></tr>", KeyLink(key), slots)?;
            group.iter().try_for_each(|server| write_row(to, *server, server_row))?;
            to.write_str("</tbody>\n")?;
        }
        end_table(to)
    })
}

/// Titles of the columns of servers.
const SERVER_COLUMNS: [&str; 7] = ["Key", "Server", "#Free", "Held by", "Has", "#Heard", "Address"];

/// Writes the table of the servers of one key.
pub(super) fn servers_of_key(to: &mut String, servers: &[&ServerSummary]) -> fmt::Result {
    let nothing = "No server has this key.";
    let row = |to: &mut String, server: &&ServerSummary| server_row(to, server);
    table(to, "servers-table", "Servers", &columns(SERVER_COLUMNS), nothing, servers, row)
}

fn server_columns(query: &Query) -> [Column; 7] {
    let mut columns = columns(SERVER_COLUMNS);
    let sorts =
        [Some(Sort::Key), Some(Sort::Name), Some(Sort::Free), Some(Sort::Clients), None, Some(Sort::Heard), None];
    for (column, sort) in columns.iter_mut().zip(sorts) {
        let Some(sort) = sort else { continue };
        // Numbers come with the largest first.
        let is_ascending = matches!(sort, Sort::Key | Sort::Name) != query.is_reversed;
        let order = (query.sort == sort).then_some(is_ascending);
        column.sort = Some((query.sorted(sort).to_string(), order));
    }
    columns
}

fn server_row(to: &mut String, server: &ServerSummary) -> fmt::Result {
    let use_is = match (server.free, server.holders.len()) {
        (0, _) => "full",
        (_, 0) => "idle",
        _ => "part",
    };
    write!(to, "<td>{}</td>", KeyLink(&server.key))?;
    write!(to, "<td><a href=\"/server/{}\">{}</a></td>", server.id, Text(&server.name))?;
    write!(to, "<td class=\"number {use_is}\">{}</td><td class=\"holders\">", free(server))?;
    server.holders.iter().try_for_each(|held| write!(to, "<div>{}</div>", Text(holder(held))))?;
    write!(to, "</td><td class=\"has\">{}</td>", Text(has(server)))?;
    write!(to, "<td class=\"number\">{} ago</td><td class=\"address\">", for_people(server.heard_ago_ms))?;
    address(to, server)?;
    to.write_str("</td>")
}

/// Writes the addresses of a server, and the reason if the tracker does not find it there.
pub(super) fn address(to: &mut String, server: &ServerSummary) -> fmt::Result {
    write!(to, "<div>{}</div>", Text(server.address.join(", ")))?;
    match &server.reach {
        Reach::Unreachable { why } => write!(to, "<div class=\"bad\">not found there: {}</div>", Text(why)),
        _ => Ok(()),
    }
}

/// Writes the table of waiting requests and of the reasons why they wait, or `nothing`.
pub(super) fn queue(to: &mut String, queue: &[(&QueueEntry, String)], nothing: &str) -> fmt::Result {
    let columns = columns(["#Waiting", "Client", "Wants", "Why it waits", "#Priority", "#Suitable slots"]);
    table(to, "queue-table", "Queue", &columns, nothing, queue, |to, (entry, why)| {
        let never = if entry.possible < u64::from(entry.count) { " bad" } else { "" };
        write!(to, "<td class=\"number\">{}</td>", for_people(entry.for_ms))?;
        write!(to, "<td class=\"client\">{}</td>", Text(&entry.client))?;
        write!(to, "<td>{}</td><td>{}</td>", Text(wanted(entry)), Text(why))?;
        write!(to, "<td class=\"number\">{}</td>", entry.priority)?;
        write!(to, "<td class=\"number{never}\">{}</td>", entry.possible)
    })
}

pub(super) fn losses(to: &mut String, losses: &[&Loss]) -> fmt::Result {
    if losses.is_empty() {
        return Ok(());
    }
    let columns = columns(["#Gone", "Key", "Server", "From", "Why"]);
    table(to, "losses-table", "Stopped, lost or refused", &columns, "", losses, |to, loss| {
        write!(to, "<td class=\"number\">{} ago</td><td>{}</td>", for_people(loss.ago_ms), Text(&loss.key))?;
        write!(to, "<td>{}</td><td>{}</td>", Text(&loss.name), Text(&loss.peer))?;
        write!(to, "<td>{}</td>", Text(lost(loss)))
    })
}

/// Writes the table of events; nothing if there are none.
pub(super) fn events(to: &mut String, events: &[&PoolEvent]) -> fmt::Result {
    if events.is_empty() {
        return Ok(());
    }
    let columns = columns(["#When", "Event", "Key", "Server", "Details"]);
    table(to, "events-table", "Events", &columns, "", events, |to, event| {
        let kind = match event.kind {
            PoolEventKind::Registered => "registered",
            PoolEventKind::Refused => "refused",
            PoolEventKind::Stopped => "stopped",
            PoolEventKind::Lost => "lost",
            PoolEventKind::Unreachable => "not found at its address",
            PoolEventKind::Kicked => "session ended by a client",
            _ => "other",
        };
        write!(to, "<td class=\"number\">{} ago</td><td>{kind}</td>", for_people(event.ago_ms))?;
        write!(to, "<td>{}</td><td>{}</td><td>{}</td>", Text(&event.key), Text(&event.name), Text(&event.why))
    })
}

/// Link to the page of a key.
pub(super) struct KeyLink<'a>(pub(super) &'a str);

impl fmt::Display for KeyLink<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<a href=\"/key/{}\">{}</a>", Encoded(self.0), Text(self.0))
    }
}
