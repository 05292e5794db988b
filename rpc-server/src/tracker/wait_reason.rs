//! Reasons for which the requests of a tracker wait, for `rpc-cli status` and the status page.

use rpc_transports::tracker::{DeviceOffer, QueueEntry, ServerRequest, ServerSummary, Summary};

use super::display::plain;
use super::scheduler::{Offer, usable};
use crate::cli::counted;

/// Number of requests for which servers are looked at one by one. Those behind them wait for longer
/// anyway, and each look takes as long as there are servers.
const MAX_DETAILED: usize = 64;

/// Returns for each waiting request of a summary why it waits, in the order of the queue.
pub(crate) fn wait_reasons(summary: &Summary) -> Vec<String> {
    if summary.queue.is_empty() {
        return Vec::new();
    }
    let servers: Vec<_> = summary.servers.iter().map(|server| (server, Offer::of(server))).collect();
    let detailed = |(at, entry)| if at < MAX_DETAILED { reason(&servers, entry) } else { counts(entry, None) };
    summary.queue.iter().enumerate().map(|entry| plain(&detailed(entry))).collect()
}

fn reason(servers: &[(&ServerSummary, Offer)], entry: &QueueEntry) -> String {
    let wanted = request(entry);
    let suiting: Vec<_> = servers.iter().filter(|(_, offer)| offer.suits(&wanted)).map(|(server, _)| *server).collect();
    if suiting.is_empty() {
        return missing(servers, entry);
    }
    let serving: Vec<_> = suiting.iter().filter(|server| server.draining.is_none()).collect();
    if serving.is_empty() {
        return match suiting.len() {
            1 => "the one server that suits is draining".to_owned(),
            many => format!("all {many} servers that suit are draining"),
        };
    }
    counts(entry, Some(serving.iter().map(|server| u64::from(usable(&wanted, server.free))).sum()))
}

/// Returns the reason of a request by the number of slots that suit, and of those that are free for
/// it, if they have been counted. Of a request for different servers, one slot of each counts.
fn counts(entry: &QueueEntry, free: Option<u64>) -> String {
    let (count, possible) = (u64::from(entry.count), entry.possible);
    let at_servers = entry.distinct && count > 1;
    let wanted =
        if at_servers { format!("slots at {}", counted(count, "different server")) } else { counted(count, "slot") };
    match free {
        _ if possible < count && at_servers => format!("it wants {wanted}, and {possible} would do"),
        _ if possible < count => format!("it wants {wanted}, and the servers that suit have {possible}"),
        Some(free) if free >= count => "requests before it in the queue have the free slots".to_owned(),
        Some(free @ 1..) if at_servers => {
            format!("it wants {wanted}, and {free} of {possible} that suit have free ones")
        }
        Some(free @ 1..) => format!("it wants {wanted}, and {free} of {possible} that suit are free"),
        Some(0) if at_servers => format!("all slots of the {possible} servers that suit are in use"),
        Some(0) if possible == 1 => "the one slot that suits is in use".to_owned(),
        Some(0) => format!("all {possible} slots that suit are in use"),
        None if at_servers => format!("{possible} servers suit, and too few have a slot that is free for it"),
        None if possible == 1 => "one slot suits, and it is not free for it".to_owned(),
        None if count > 1 => format!("{possible} slots suit, and too few are free for it"),
        None => format!("{possible} slots suit, and none is free for it"),
    }
}

/// Names the first thing that a request wants and no server has.
fn missing(servers: &[(&ServerSummary, Offer)], entry: &QueueEntry) -> String {
    if servers.is_empty() {
        return "no server is registered".to_owned();
    }
    let offers = servers.iter().map(|(_, offer)| offer);
    let with_key: Vec<_> = offers.filter(|offer| entry.key.is_empty() || offer.key == entry.key).collect();
    if with_key.is_empty() {
        return format!("no server has the key '{}'", entry.key);
    }
    let of_key = if entry.key.is_empty() { String::new() } else { format!(" with the key '{}'", entry.key) };
    let nobody = |wanted: ServerRequest| !with_key.iter().any(|offer| offer.suits(&wanted));
    let labels = entry.labels.iter().map(|(name, value)| {
        let wanted = ServerRequest::any().label(name, value);
        (wanted, format!("the label {name}={value}"))
    });
    let devices = entry.devices.iter().map(|device| {
        let DeviceOffer { kind, count, .. } = device;
        let mut wanted = ServerRequest::any();
        wanted.devices.push(device.clone());
        (wanted, if *count == 1 { format!("'{kind}'") } else { format!("{count}×{kind}") })
    });
    let virtual_devices = entry.virtual_devices.iter().map(|device| {
        let wanted = ServerRequest::any().virtual_device(device.clone());
        (wanted, format!("'{device}'"))
    });
    let mut all = labels.chain(devices).chain(virtual_devices);
    match all.find_map(|(wanted, name)| nobody(wanted).then_some(name)) {
        Some(name) => format!("no server{of_key} has {name}"),
        None => format!("no one server{of_key} has all of it"),
    }
}

/// Returns the request that an entry of the queue is.
fn request(entry: &QueueEntry) -> ServerRequest {
    let mut request = ServerRequest::new(&entry.key).count(entry.count);
    request.distinct = entry.distinct;
    request.labels.clone_from(&entry.labels);
    request.devices.clone_from(&entry.devices);
    request.virtual_devices.clone_from(&entry.virtual_devices);
    request
}

#[cfg(test)]
mod tests {
    use rpc_transports::tracker::{Draining, MESSAGES, Reach};

    use super::*;

    fn server(key: &str, label: &str, free: u32) -> ServerSummary {
        ServerSummary {
            id: 1,
            name: "machine".to_owned(),
            key: key.to_owned(),
            labels: [("rack".to_owned(), label.to_owned())].into(),
            devices: vec![DeviceOffer::new("cpu", 1)],
            capacity: 2,
            free,
            address: Vec::new(),
            peer: String::new(),
            reach: Reach::Untried,
            registered_for_ms: 0,
            heard_ago_ms: 0,
            holders: Vec::new(),
            draining: None,
            details: None,
        }
    }

    fn entry(wanted: &ServerRequest, possible: u64) -> QueueEntry {
        QueueEntry {
            client: "me".to_owned(),
            key: wanted.key.clone(),
            count: wanted.count,
            distinct: wanted.distinct,
            labels: wanted.labels.clone(),
            devices: wanted.devices.clone(),
            virtual_devices: wanted.virtual_devices.clone(),
            priority: 0,
            for_ms: 0,
            possible,
        }
    }

    #[test]
    fn a_request_is_told_what_it_waits_for() {
        let board = || ServerRequest::new("board");
        let cuda: rpc_core::VirtualDevice = "cuda".parse().unwrap();
        let drained =
            ServerSummary { draining: Some(Draining { for_ms: 1, by: "me".to_owned() }), ..server("d", "1", 0) };
        let servers = vec![server("board", "1", 1), server("board", "2", 0), drained];
        let queue: Vec<_> = [
            (ServerRequest::new("desk"), 0),
            (board().virtual_device(cuda), 0),
            (ServerRequest::any().device(rpc_core::DeviceType::CPU, 2), 0),
            (board().label("rack", "3"), 0),
            (ServerRequest::any().label("rack", "2").label("arch", "arm"), 0),
            (board().count(5), 4),
            (board().count(2), 4),
            (board().label("rack", "2"), 2),
            (board(), 4),
            (ServerRequest::new("d"), 0),
            (board().count(2).distinct(), 2),
            (board().label("rack", "2").count(2).distinct(), 1),
            (board().label("rack", "2").count(1), 0),
        ]
        .iter()
        .map(|(wanted, possible)| entry(wanted, *possible))
        .collect();
        let mut summary = Summary {
            version: MESSAGES.version(),
            uptime_ms: 0,
            lease_ms: 0,
            servers,
            queue,
            losses: Vec::new(),
            history: Vec::new(),
            events: Vec::new(),
        };
        assert_eq!(
            wait_reasons(&summary),
            [
                "no server has the key 'desk'",
                "no server with the key 'board' has 'cuda'",
                "no server has 2×cpu",
                "no server with the key 'board' has the label rack=3",
                "no server has the label arch=arm",
                "it wants 5 slots, and the servers that suit have 4",
                "it wants 2 slots, and 1 of 4 that suit are free",
                "all 2 slots that suit are in use",
                "requests before it in the queue have the free slots",
                "the one server that suits is draining",
                "it wants slots at 2 different servers, and 1 of 2 that suit have free ones",
                "it wants slots at 2 different servers, and 1 would do",
                "it wants 1 slot, and the servers that suit have 0",
            ]
        );
        // Of those far behind, servers are not looked at, and nothing is said of their slots.
        let far = [(board(), 4), (board(), 1), (board().count(2), 4), (board().count(2).distinct(), 2)];
        summary.queue = vec![entry(&board(), 4); MAX_DETAILED];
        summary.queue.extend(far.iter().map(|(wanted, possible)| entry(wanted, *possible)));
        assert_eq!(
            wait_reasons(&summary)[MAX_DETAILED..],
            [
                "4 slots suit, and none is free for it",
                "one slot suits, and it is not free for it",
                "4 slots suit, and too few are free for it",
                "2 servers suit, and too few have a slot that is free for it",
            ]
        );
        summary.servers.clear();
        assert_eq!(wait_reasons(&summary)[0], "no server is registered");
    }
}
