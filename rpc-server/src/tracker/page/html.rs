//! The status page as HTML, with all present data in it.

use std::fmt::{self, Display, Write};

use rpc_transports::tracker::{Loss, QueueEntry, Reach, ServerSummary, Summary};

use super::chart;
use crate::tracker::display::{for_people, has, holder, lost, wanted};

/// Text that is written with its special characters escaped, in content and in quoted attributes
/// alike.
pub(super) struct Text<T>(pub(super) T);

impl<T: Display> Display for Text<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(Escape(f), "{}", self.0)
    }
}

struct Escape<'a, 'b>(&'a mut fmt::Formatter<'b>);

impl Write for Escape<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for char in text.chars() {
            match char {
                '&' => self.0.write_str("&amp;")?,
                '<' => self.0.write_str("&lt;")?,
                '>' => self.0.write_str("&gt;")?,
                '"' => self.0.write_str("&quot;")?,
                '\'' => self.0.write_str("&#39;")?,
                // These characters change the direction of text, or cannot be shown in HTML.
                char if char.is_control() || is_directional(char) => self.0.write_char('\u{fffd}')?,
                char => self.0.write_char(char)?,
            }
        }
        Ok(())
    }
}

fn is_directional(char: char) -> bool {
    matches!(char, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

pub(super) fn page(summary: &Summary) -> String {
    let mut page = String::with_capacity(4096 + summary.servers.len() * 512);
    // Writing to a string cannot fail.
    let _ = write_page(&mut page, summary);
    page
}

fn write_page(to: &mut String, summary: &Summary) -> fmt::Result {
    let free: u64 = summary.servers.iter().map(|server| u64::from(server.free)).sum();
    write!(
        to,
        r##"<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{free} free · tracker</title>
<link rel="stylesheet" href="/page.css">
<script src="/page.js" defer></script>
<noscript><meta http-equiv="refresh" content="5"></noscript>
</head>
<body>
<header>
<h1>Tracker</h1>
<p>up {} · leases of {}</p>
<p id="live" role="status"></p>
</header>
<main>
"##,
        for_people(summary.uptime_ms),
        for_people(summary.lease_ms),
    )?;
    figures(to, summary, free)?;
    chart::write(to, &summary.history)?;
    servers(to, &summary.servers)?;
    queue(to, &summary.queue)?;
    losses(to, &summary.losses)?;
    to.write_str("</main>\n</body>\n</html>\n")
}

fn figures(to: &mut String, summary: &Summary, free: u64) -> fmt::Result {
    let slots: u64 = summary.servers.iter().map(|server| u64::from(server.capacity)).sum();
    let held: usize = summary.servers.iter().map(|server| server.holders.len()).sum();
    let missing = summary.servers.iter().filter(|server| matches!(server.reach, Reach::Unreachable { .. })).count();
    let granted: u64 = summary.history.iter().map(|sample| u64::from(sample.granted)).sum();
    to.write_str("<dl id=\"figures\">\n")?;
    for (id, name, number, note) in [
        ("servers", "servers", summary.servers.len() as u64, missing_note(missing)),
        ("free", "slots free", free, format!("of {slots}")),
        ("held", "in use", held as u64, String::new()),
        ("waiting", "requests waiting", summary.queue.len() as u64, String::new()),
        ("granted", "granted in the last hour", granted, String::new()),
    ] {
        write!(to, "<div><dt>{name}</dt><dd><b id=\"{id}\">{number}</b>")?;
        if !note.is_empty() {
            write!(to, " <small>{note}</small>")?;
        }
        to.write_str("</dd></div>\n")?;
    }
    to.write_str("</dl>\n")
}

fn missing_note(missing: usize) -> String {
    if missing == 0 { String::new() } else { format!("{missing} not found") }
}

fn servers(to: &mut String, servers: &[ServerSummary]) -> fmt::Result {
    let header = ["Key", "Server", "#Free", "Held by", "Has", "Address"];
    table(to, "servers-table", "Servers", &header, "No server is registered.", servers, |to, server| {
        let use_is = match (server.free, server.holders.len()) {
            (0, _) => "full",
            (_, 0) => "idle",
            _ => "part",
        };
        write!(to, "<td>{}</td><td>{}</td>", Text(&server.key), Text(&server.name))?;
        write!(to, "<td class=\"number {use_is}\">{}/{}</td><td class=\"holders\">", server.free, server.capacity)?;
        for held in &server.holders {
            write!(to, "<div>{}</div>", Text(holder(held)))?;
        }
        write!(to, "</td><td>{}</td><td class=\"address\">", Text(has(server)))?;
        write!(to, "<div>{}</div>", Text(server.address.join(", ")))?;
        if let Reach::Unreachable { why } = &server.reach {
            write!(to, "<div class=\"bad\">not found there: {}</div>", Text(why))?;
        }
        to.write_str("</td>")
    })
}

fn queue(to: &mut String, queue: &[QueueEntry]) -> fmt::Result {
    let header = ["#Waiting", "Client", "Wants", "#Priority", "#There are"];
    table(to, "queue-table", "Queue", &header, "Nobody waits.", queue, |to, entry| {
        let never = if entry.possible < u64::from(entry.count) { " bad" } else { "" };
        write!(to, "<td class=\"number\">{}</td>", for_people(entry.for_ms))?;
        write!(to, "<td class=\"client\">{}</td>", Text(&entry.client))?;
        write!(to, "<td>{}</td><td class=\"number\">{}</td>", Text(wanted(entry)), entry.priority)?;
        write!(to, "<td class=\"number{never}\">{}</td>", entry.possible)
    })
}

fn losses(to: &mut String, losses: &[Loss]) -> fmt::Result {
    if losses.is_empty() {
        return Ok(());
    }
    let header = ["#Gone", "Key", "Server", "From", "Why"];
    table(to, "losses-table", "Stopped, lost or refused", &header, "", losses, |to, loss| {
        write!(to, "<td class=\"number\">{} ago</td><td>{}</td>", for_people(loss.ago_ms), Text(&loss.key))?;
        write!(to, "<td>{}</td><td>{}</td>", Text(&loss.name), Text(&loss.peer))?;
        write!(to, "<td>{}</td>", Text(lost(loss)))
    })
}

/// Writes a table. A `#` before a header marks a column of numbers.
fn table<T>(
    to: &mut String,
    id: &str,
    title: &str,
    header: &[&str],
    nothing: &str,
    rows: &[T],
    row: impl Fn(&mut String, &T) -> fmt::Result,
) -> fmt::Result {
    write!(to, "<section id=\"{id}\">\n<h2>{title}</h2>\n")?;
    if rows.is_empty() {
        return write!(to, "<p class=\"nothing\">{nothing}</p>\n</section>\n");
    }
    to.write_str("<div class=\"scroll\"><table>\n<thead><tr>")?;
    for name in header {
        match name.strip_prefix('#') {
            Some(name) => write!(to, "<th scope=\"col\" class=\"number\">{name}</th>")?,
            None => write!(to, "<th scope=\"col\">{name}</th>")?,
        }
    }
    to.write_str("</tr></thead>\n<tbody>\n")?;
    for of in rows {
        to.write_str("<tr>")?;
        row(to, of)?;
        to.write_str("</tr>\n")?;
    }
    to.write_str("</tbody>\n</table></div>\n</section>\n")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rpc_transports::tracker::{DeviceOffer, Holder, HolderState, LossReason, MESSAGES, Sample};

    use super::*;

    const EVIL: &str =
        "</td><script>alert(1)</script><img src=x onerror='alert(2)'>\" onmouseover=\"alert(3)&\u{202e}\u{0}";

    #[test]
    fn texts_of_peers_are_escaped() {
        let evil = || EVIL.to_owned();
        let labels = BTreeMap::from([(evil(), evil())]);
        let devices = vec![DeviceOffer::new(evil(), 1)];
        let summary = Summary {
            version: MESSAGES.version(),
            uptime_ms: 1,
            lease_ms: 1,
            servers: vec![ServerSummary {
                id: 1,
                name: evil(),
                key: evil(),
                labels: labels.clone(),
                devices: devices.clone(),
                capacity: 2,
                free: 1,
                address: vec![evil(), evil()],
                peer: evil(),
                reach: Reach::Unreachable { why: evil() },
                registered_for_ms: 0,
                heard_ago_ms: 0,
                holders: vec![Holder {
                    client: evil(),
                    for_ms: 0,
                    state: HolderState::Direct,
                    session: None,
                    silent_ms: 0,
                }],
            }],
            queue: vec![QueueEntry {
                client: evil(),
                key: evil(),
                count: 1,
                labels,
                devices,
                virtual_devices: Vec::new(),
                priority: 0,
                for_ms: 0,
                possible: 0,
            }],
            losses: vec![Loss {
                name: evil(),
                key: evil(),
                address: vec![evil()],
                peer: evil(),
                ago_ms: 0,
                reason: LossReason::Refused { why: evil() },
                orderly: false,
            }],
            history: vec![Sample::default()],
        };
        let page = page(&summary);
        let escaped = "&lt;/td&gt;&lt;script&gt;alert(1)&lt;/script&gt;&lt;img src=x \
                       onerror=&#39;alert(2)&#39;&gt;&quot; onmouseover=&quot;alert(3)&amp;\u{fffd}\u{fffd}";
        assert_eq!(Text(EVIL).to_string(), escaped);
        // The text occurs in a key, a name, a client, a label (twice), a device, an address (twice)
        // and a reason of the servers; in a client, a key, a label (twice) and a device of the
        // queue; and in a name, a key, a peer and a reason of the losses.
        assert_eq!(page.matches(escaped).count(), 9 + 5 + 4, "{page}");
        assert_eq!(page.matches("alert(1)").count(), 9 + 5 + 4);
        assert!(!page.contains(EVIL) && page.matches("<script").count() == 1 && !page.contains("<img"), "{page}");
    }

    #[test]
    fn an_empty_pool_has_a_page_too() {
        let summary = Summary {
            version: MESSAGES.version(),
            uptime_ms: 0,
            lease_ms: 10_000,
            servers: Vec::new(),
            queue: Vec::new(),
            losses: Vec::new(),
            history: Vec::new(),
        };
        let page = page(&summary);
        assert!(page.contains("No server is registered.") && page.contains("Nobody waits."), "{page}");
    }
}
