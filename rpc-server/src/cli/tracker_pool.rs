//! Servers of a tracker that suit a request: what `doctor`, and commands that wait, report of
//! `tracker://` addresses.

use rpc_transports::tracker::{LossReason, Reach, ServerRequest, ServerSummary, Summary};

use crate::cli::output::counted;
use crate::tracker::Offer;
use crate::tracker::display::{for_people, has, lost, offered};

/// Result for a key.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PoolVerdict {
    /// There are servers; the text describes them.
    Available(String),
    /// There is no server that a client could get; with the reason and advice.
    Missing { detail: String, advice: String },
}

/// Finds the servers that a request could get.
pub(super) fn look_for(summary: &Summary, wanted: &ServerRequest) -> PoolVerdict {
    let key = Some(&*wanted.key).filter(|key| !key.is_empty());
    let suits = |of: &str| key.is_none_or(|key| key == of);
    let with_key: Vec<_> = summary.servers.iter().filter(|server| suits(&server.key)).collect();
    let named = key.map_or("any key".to_owned(), |key| format!("the key '{key}'"));
    if with_key.is_empty() {
        return not_registered(summary, key, &named);
    }
    let servers: Vec<_> = with_key.iter().copied().filter(|server| Offer::of(server).suits(wanted)).collect();
    if servers.is_empty() {
        let mut found: Vec<_> = with_key.iter().map(|server| has(server)).collect();
        found.sort_unstable();
        found.dedup();
        found.truncate(MAX_LISTED);
        let (count, found) = (counted(with_key.len() as u64, "server"), found.join("; "));
        return PoolVerdict::Missing {
            detail: format!("none of {count} with {named} has what is asked for (--want, --label); they have: {found}"),
            advice: "correct --want or --label, or start a server that has it".to_owned(),
        };
    }
    let unreachable = |server: &&ServerSummary| match &server.reach {
        Reach::Unreachable { why } => Some((server.address.join(","), why.clone())),
        _ => None,
    };
    let lost: Vec<_> = servers.iter().filter_map(unreachable).collect();
    if let (true, Some((address, why))) = (lost.len() == servers.len(), lost.first()) {
        return PoolVerdict::Missing {
            detail: format!(
                "unreachable address: a server with {named} says that it is at {address}, and is not: {why}"
            ),
            advice: "correct the address that the server tells (--advertise), its key, or a firewall in between"
                .to_owned(),
        };
    }
    let drained = servers.iter().filter(|server| server.draining.is_some()).count();
    if drained == servers.len() {
        let (count, is) = (counted(drained as u64, "server"), if drained == 1 { "is" } else { "are" });
        return PoolVerdict::Missing {
            detail: format!("draining: {count} with {named} {is} given to no more clients (rpc-cli drain)"),
            advice: "ask for another key, start another server, or have the draining ended: rpc-cli drain --undo"
                .to_owned(),
        };
    }
    let slots = counted(servers.iter().map(|server| offered(server)).sum(), "slot");
    let free: u32 = servers.iter().map(|server| server.free).sum();
    let waiting = summary.queue.iter().filter(|entry| entry.key.is_empty() || suits(&entry.key)).count();
    let (servers, waiting) = (counted(servers.len() as u64, "server"), counted(waiting as u64, "request"));
    PoolVerdict::Available(format!("{servers} with {named}, {free} of {slots} free, {waiting} waiting"))
}

/// Largest number of servers or keys that a text lists.
const MAX_LISTED: usize = 8;

fn not_registered(summary: &Summary, key: Option<&str>, named: &str) -> PoolVerdict {
    let loss = summary.losses.iter().find(|loss| key.is_none_or(|key| key == loss.key));
    if let Some(loss) = loss {
        let (ago, why) = (for_people(loss.ago_ms), lost(loss));
        let advice = match loss.reason {
            LossReason::Refused { .. } => "correct what the tracker objects to, at the server or at the tracker",
            LossReason::LeaseExpired => {
                "look whether the server's machine is up, stopped or overloaded, and at the network in between"
            }
            _ => "start the server again; its log says why it ended",
        };
        let what = match loss.reason {
            _ if loss.orderly => "stopped",
            LossReason::Refused { .. } => "not taken",
            LossReason::LeaseExpired => "lease lost",
            _ => "gone",
        };
        let (name, peer) = (&loss.name, &loss.peer);
        let detail = format!("{what}: '{name}' with {named} came from {peer}, and {ago} ago: {why}");
        return PoolVerdict::Missing { detail, advice: advice.to_owned() };
    }
    let mut others: Vec<_> = summary.servers.iter().map(|server| server.key.as_str()).collect();
    others.dedup();
    let up = for_people(summary.uptime_ms);
    if others.is_empty() {
        return PoolVerdict::Missing {
            detail: format!("never registered: no server with {named} has come in the {up} that the tracker is up"),
            advice: "start one: rpc-server serve --tracker ADDRESS --tracker-key KEY; its log says what is wrong"
                .to_owned(),
        };
    }
    others.truncate(MAX_LISTED);
    PoolVerdict::Missing {
        detail: format!(
            "key mismatch, or never registered: there is no server with {named}; there are: {}",
            others.join(", ")
        ),
        advice: "correct the key in the address, or --tracker-key at the server, or start the server".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rpc_transports::tracker::{Loss, MESSAGES};

    use super::*;

    fn summary() -> Summary {
        Summary {
            version: MESSAGES.version(),
            uptime_ms: 61_000,
            lease_ms: 10_000,
            servers: Vec::new(),
            queue: Vec::new(),
            losses: Vec::new(),
            history: Vec::new(),
            events: Vec::new(),
        }
    }

    fn server(key: &str, reach: Reach) -> ServerSummary {
        ServerSummary {
            id: 1,
            name: "machine".to_owned(),
            key: key.to_owned(),
            labels: BTreeMap::new(),
            devices: Vec::new(),
            capacity: 2,
            free: 1,
            address: vec!["tcp://10.0.0.5:9090".to_owned()],
            peer: "tcp://10.0.0.5:4".to_owned(),
            reach,
            registered_for_ms: 0,
            heard_ago_ms: 0,
            holders: Vec::new(),
            draining: None,
            details: None,
        }
    }

    fn loss(reason: LossReason) -> Loss {
        Loss {
            name: "machine".to_owned(),
            key: "board".to_owned(),
            address: Vec::new(),
            peer: "tcp://10.0.0.5:4".to_owned(),
            ago_ms: 5000,
            reason,
            orderly: false,
        }
    }

    fn missing(summary: &Summary) -> String {
        match look_for(summary, &ServerRequest::new("board")) {
            PoolVerdict::Missing { detail, .. } => detail,
            there => panic!("{there:?}"),
        }
    }

    #[test]
    fn each_reason_has_a_text_and_advice_of_its_own() {
        assert!(missing(&summary()).starts_with("never registered"));
        let other = Summary { servers: vec![server("bord", Reach::Reached)], ..summary() };
        let text = missing(&other);
        assert!(text.starts_with("key mismatch") && text.ends_with("bord"), "{text}");
        for (reason, words) in [
            (LossReason::LeaseExpired, "lease lost"),
            (LossReason::Gone, "gone"),
            (LossReason::Refused { why: "max_servers is 1".to_owned() }, "not taken"),
        ] {
            let text = missing(&Summary { losses: vec![loss(reason)], ..summary() });
            assert!(text.starts_with(words) && text.contains("5s ago"), "{text}");
        }
        let unreachable = Reach::Unreachable { why: "no server listens".to_owned() };
        let text = missing(&Summary { servers: vec![server("board", unreachable.clone())], ..summary() });
        assert!(text.starts_with("unreachable address") && text.contains("no server listens"), "{text}");
        let one_of_two = vec![server("board", unreachable), server("board", Reach::Reached)];
        let there = look_for(&Summary { servers: one_of_two, ..summary() }, &ServerRequest::new("board"));
        assert_eq!(
            there,
            PoolVerdict::Available("2 servers with the key 'board', 2 of 4 slots free, 0 requests waiting".to_owned())
        );
        // A regression: labels and devices were not looked at.
        let mut labelled = server("board", Reach::Reached);
        labelled.labels.insert("rack".to_owned(), "7".to_owned());
        let pool = Summary { servers: vec![labelled, server("board", Reach::Reached)], ..summary() };
        let wanted = |rack: &str| look_for(&pool, &ServerRequest::new("board").label("rack", rack));
        assert!(matches!(wanted("7"), PoolVerdict::Available(text) if text.starts_with("1 server ")));
        assert!(matches!(wanted("8"), PoolVerdict::Missing { detail, .. } if detail.contains("rack=7")));
    }
}
