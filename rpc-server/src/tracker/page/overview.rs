//! The overview: figures of the pool, its last hour, keys, servers, queue, losses and events.

use std::collections::BTreeMap;
use std::fmt::{self, Write};

use rpc_transports::tracker::{Reach, Summary};

use super::PoolView;
use super::chart;
use super::markup::{Text, columns, document, figures, table};
use super::query::Query;
use super::sections::{self, KeyLink, KeySums};
use crate::tracker::display::offered;
use crate::tracker::history::LAST_HOUR;
use crate::tracker::wait_reason::wait_reasons;

/// Returns the overview of a pool.
pub(super) fn page(view: &PoolView, query: &Query) -> String {
    let summary = &view.summary;
    let free: u64 = summary.servers.iter().map(|server| u64::from(server.free)).sum();
    let content = |to: &mut String| {
        pool_figures(to, summary, free)?;
        chart::usage(to, "chart", "Last hour", LAST_HOUR, &summary.history)?;
        keys(to, view, query)?;
        sections::servers(to, &summary.servers, query, |to| first_server(to, &view.serve_command))?;
        let queue = summary.queue.iter().zip(wait_reasons(summary));
        let queue: Vec<_> = queue.filter(|(entry, _)| query.finds_request(entry)).collect();
        let nothing =
            if summary.queue.is_empty() { "No request waits." } else { "No waiting request matches the search." };
        sections::queue(to, &queue, nothing)?;
        let losses: Vec<_> =
            summary.losses.iter().filter(|loss| query.finds(&[&loss.key, &loss.name, &loss.peer])).collect();
        sections::losses(to, &losses)?;
        let events: Vec<_> = summary.events.iter().filter(|event| query.finds_event(event)).collect();
        sections::events(to, &events)
    };
    document(&format!("{free} free"), summary, |to| search(to, query), content)
}

/// Returns the page for a server or a key that is not there any more.
pub(super) fn not_here(view: &PoolView) -> String {
    document(
        "not here",
        &view.summary,
        |_| Ok(()),
        |to| {
            to.write_str(
                "<p class=\"nothing\">No such server or key is registered now. <a href=\"/\">All servers</a></p>\n",
            )
        },
    )
}

/// Writes the form of the search. It keeps order and grouping.
fn search(to: &mut String, query: &Query) -> fmt::Result {
    write!(
        to,
        r#"<form id="search" role="search" action="/">
<input type="search" name="search" value="{}" placeholder="Search keys, servers, clients, devices" aria-label="Search">
"#,
        Text(&query.search)
    )?;
    let rest = Query { search: String::new(), ..query.clone() }.to_string();
    for (name, value) in rest.trim_start_matches("/?").split('&').filter_map(|pair| pair.split_once('=')) {
        writeln!(to, r#"<input type="hidden" name="{name}" value="{value}">"#)?;
    }
    to.write_str("<noscript><button>Search</button></noscript>\n</form>\n")
}

fn pool_figures(to: &mut String, summary: &Summary, free: u64) -> fmt::Result {
    let slots: u64 = summary.servers.iter().map(offered).sum();
    let held: usize = summary.servers.iter().map(|server| server.holders.len()).sum();
    let missing = summary.servers.iter().filter(|server| matches!(server.reach, Reach::Unreachable { .. })).count();
    let missing = if missing == 0 { String::new() } else { format!("{missing} not found") };
    let granted: u64 = summary.history.iter().map(|sample| u64::from(sample.granted)).sum();
    let none = String::new;
    figures(
        to,
        &[
            ("servers", "servers", summary.servers.len().to_string(), missing),
            ("free", "slots free", free.to_string(), format!("of {slots}")),
            ("held", "in use", held.to_string(), none()),
            ("waiting", "requests waiting", summary.queue.len().to_string(), none()),
            ("granted", "granted in the last hour", granted.to_string(), none()),
        ],
    )
}

/// Writes the table of the keys of servers and of those that requests name.
fn keys(to: &mut String, view: &PoolView, query: &Query) -> fmt::Result {
    let mut keys: BTreeMap<&str, (KeySums, usize)> = BTreeMap::new();
    for server in query.servers(&view.summary.servers) {
        keys.entry(&server.key).or_default().0.add(server);
    }
    let waiting = view.summary.queue.iter().filter(|entry| !entry.key.is_empty() && query.finds_request(entry));
    waiting.for_each(|entry| keys.entry(&entry.key).or_default().1 += 1);
    let keys: Vec<_> = keys.into_iter().collect();
    if keys.is_empty() {
        return Ok(());
    }
    let columns = columns(["Key", "#Servers", "#Free", "#In use", "#Waiting", "Last hour"]);
    table(to, "keys-table", "Keys", &columns, "", &keys, |to, (key, (sums, waiting))| {
        let KeySums { servers, slots, free, clients } = sums;
        write!(
            to,
            "<td>{}</td><td class=\"number\">{servers}</td><td class=\"number\">{free}/{slots}</td>",
            KeyLink(key)
        )?;
        write!(to, "<td class=\"number\">{clients}</td><td class=\"number\">{waiting}</td><td>")?;
        if let Some(samples) = view.keys.get(*key) {
            chart::spark(to, LAST_HOUR, &samples.hour)?;
        }
        to.write_str("</td>")
    })
}

/// Writes what to do where no server is registered.
fn first_server(to: &mut String, command: &str) -> fmt::Result {
    write!(
        to,
        r#"<p class="nothing">No server is registered. On the machine with the devices, run:</p>
<p class="command"><code>{}</code> <button type="button" class="copy">Copy</button></p>
"#,
        Text(command)
    )
}

#[cfg(test)]
mod tests {
    use rpc_transports::tracker::{
        DeviceDetails, DeviceOffer, Draining, Holder, HolderState, Loss, LossReason, MESSAGES, PoolEvent,
        PoolEventKind, QueueEntry, RecentError, Sample, ServerDetails, ServerSummary,
    };

    use super::super::{key_view, server_view};
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
                draining: Some(Draining { for_ms: 0, by: evil() }),
                details: Some(ServerDetails {
                    version: evil(),
                    devices: vec![DeviceDetails { device: evil(), name: Some(evil()), ..DeviceDetails::default() }],
                    errors: vec![RecentError { ago_ms: 0, text: evil() }],
                    ..ServerDetails::default()
                }),
            }],
            queue: vec![QueueEntry {
                client: evil(),
                key: evil(),
                count: 1,
                distinct: false,
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
            events: vec![PoolEvent { ago_ms: 0, kind: PoolEventKind::Refused, key: evil(), name: evil(), why: evil() }],
        };
        let escaped = "&lt;/td&gt;&lt;script&gt;alert(1)&lt;/script&gt;&lt;img src=x \
                       onerror=&#39;alert(2)&#39;&gt;&quot; onmouseover=&quot;alert(3)&amp;\u{fffd}\u{fffd}";
        assert_eq!(Text(EVIL).to_string(), escaped);
        let view = view(summary);
        let search = Query { search: EVIL.replace(['\u{202e}', '\u{0}'], ""), ..Query::default() };
        for (page, at_least) in [
            // The text is in keys, names, clients, labels, devices, addresses and reasons.
            (page(&view, &Query::default()), 20),
            (page(&view, &Query::default().grouped(true)), 20),
            (page(&view, &search), 1),
            (server_view::page(&view, 1).unwrap(), 15),
            (key_view::page(&view, EVIL).unwrap(), 15),
        ] {
            let count = page.matches("&lt;script&gt;alert(1)").count();
            assert!(count >= at_least && count == page.matches("alert(1)").count(), "{count}: {page}");
            assert!(!page.contains(EVIL) && page.matches("<script").count() == 1 && !page.contains("<img"), "{page}");
        }
    }

    fn view(summary: Summary) -> PoolView {
        PoolView { summary, keys: BTreeMap::new(), serve_command: "rpc-server serve".to_owned() }
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
            events: Vec::new(),
        };
        let page = page(&view(summary), &Query::default());
        for text in ["No server is registered.", "<code>rpc-server serve</code>", "No request waits."] {
            assert!(page.contains(text), "{text}: {page}");
        }
    }
}
