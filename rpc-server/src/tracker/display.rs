//! Texts for the state of a tracker, shared by `rpc-cli status` and the status page.

use rpc_transports::tracker::{
    DeviceLease, DeviceOffer, Draining, Holder, HolderState, LeaseHolder, LeaseWaiter, Loss, LossReason, QueueEntry,
    ServerSummary,
};

use crate::cli::counted;

/// Describes a client and its slot.
pub(crate) fn holder(Holder { client, for_ms, state, silent_ms, .. }: &Holder) -> String {
    let how = match state {
        HolderState::Granted => ", on its way",
        HolderState::Direct => ", without a ticket",
        _ => "",
    };
    let silent = match silent_ms {
        0 => String::new(),
        silent_ms => format!(", silent for {}", for_people(*silent_ms)),
    };
    format!("{} for {}{how}{silent}", plain(client), for_people(*for_ms))
}

/// Returns the number of slots that a server has for clients, free or not.
pub(crate) fn offered(server: &ServerSummary) -> u64 {
    if server.draining.is_some() { 0 } else { server.capacity.into() }
}

/// Describes the free slots of a server.
pub(crate) fn free(server: &ServerSummary) -> String {
    match server.draining {
        Some(_) => "draining".to_owned(),
        None => format!("{}/{}", server.free, server.capacity),
    }
}

/// Describes the draining of a server.
pub(crate) fn draining(Draining { for_ms, by }: &Draining) -> String {
    plain(&format!("draining for {}, by {by}", for_people(*for_ms)))
}

/// Describes who has a device.
pub(crate) fn lease(lease: &DeviceLease) -> String {
    let DeviceLease { held_ms, left_ms, holder, used_by, .. } = lease;
    if *used_by > 0 {
        return format!("free, and still used by {}", counted(*used_by, "session"));
    }
    let by = holder.as_ref().map(|holder| format!("by {} ", lease_client(holder))).unwrap_or_default();
    format!("held {by}for {}, {} left", for_people(*held_ms), for_people(*left_ms))
}

/// Describes the requests that wait for a device: the first by their clients, the others by their
/// number.
pub(crate) fn next_leases(lease: &DeviceLease) -> String {
    let named = lease.next.iter().map(|LeaseWaiter { client, priority, waited_ms }| {
        let priority = if *priority == 0 { String::new() } else { format!(" with priority {priority}") };
        format!("{}{priority} for {}", lease_client(client), for_people(*waited_ms))
    });
    let more = lease.waiting.saturating_sub(lease.next.len() as u64);
    let more = (more > 0).then(|| if lease.next.is_empty() { more.to_string() } else { format!("{more} more") });
    named.chain(more).collect::<Vec<_>>().join(", ")
}

fn lease_client(LeaseHolder { identity, session }: &LeaseHolder) -> String {
    format!("{} (session {session})", plain(identity))
}

/// Describes the labels and devices of a server.
pub(crate) fn has(server: &ServerSummary) -> String {
    let labels = server.labels.iter().map(|(name, value)| format!("{name}={value}"));
    plain(&labels.chain(devices(&server.devices)).collect::<Vec<_>>().join(" "))
}

/// Describes a request.
pub(crate) fn wanted(entry: &QueueEntry) -> String {
    let key = if entry.key.is_empty() { "any server" } else { &entry.key };
    let labels = entry.labels.iter().map(|(name, value)| format!(" {name}={value}")).collect::<String>();
    let devices = devices(&entry.devices).map(|device| format!(" {device}")).collect::<String>();
    let wanted = entry.virtual_devices.iter().map(|wanted| format!(" [{wanted}]")).collect::<String>();
    plain(&format!("{} × {key}{labels}{devices}{wanted}", entry.count))
}

fn devices(devices: &[DeviceOffer]) -> impl Iterator<Item = String> {
    devices.iter().map(|device| {
        let DeviceOffer { kind, count, target, .. } = device;
        // The target is shown only if there are several devices of the kind.
        let is_alone = devices.iter().filter(|other| other.kind == *kind).count() == 1;
        let target = target.iter().filter(|_| !is_alone).map(|target| format!(" ({target})")).collect::<String>();
        format!("{count}×{kind}{target}")
    })
}

/// Describes the reason for which a server was lost.
pub(crate) fn lost(loss: &Loss) -> String {
    match &loss.reason {
        _ if loss.orderly => "it was stopped".to_owned(),
        LossReason::Gone => "it left, or its connection broke".to_owned(),
        LossReason::LeaseExpired => "it was not heard of for the length of its lease".to_owned(),
        LossReason::Refused { why } => plain(&format!("refused: {why}")),
        other => format!("{other:?}"),
    }
}

/// Replaces control characters and changes of text direction in a text of a peer.
pub(crate) fn plain(text: &str) -> String {
    let acts = |c: char| {
        c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    text.chars().map(|c| if acts(c) { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

/// Formats a time in its two largest units.
pub(crate) fn for_people(millis: u64) -> String {
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
    use rpc_transports::tracker::{DeviceLease, LeaseHolder, LeaseWaiter};

    use super::{for_people, lease, next_leases};

    #[test]
    fn leases_are_described_with_their_clients() {
        let client = |identity: &str, session| LeaseHolder { identity: identity.to_owned(), session };
        let held = DeviceLease {
            held_ms: 61_000,
            left_ms: 5000,
            waiting: 4,
            holder: Some(client("token:al\u{1b}ice", 3)),
            used_by: 0,
            next: vec![
                LeaseWaiter { client: client("cert:bob", 4), priority: 2, waited_ms: 1000 },
                LeaseWaiter { client: client("anonymous", 5), priority: 0, waited_ms: 2000 },
            ],
        };
        assert_eq!(lease(&held), "held by token:al\u{fffd}ice (session 3) for 1m01s, 5s left");
        let next = "cert:bob (session 4) with priority 2 for 1s, anonymous (session 5) for 2s, 2 more";
        assert_eq!(next_leases(&held), next);
        // Of an older server.
        let unnamed = DeviceLease { held_ms: 1000, left_ms: 0, waiting: 2, ..DeviceLease::default() };
        assert_eq!((lease(&unnamed), next_leases(&unnamed)), ("held for 1s, 0s left".to_owned(), "2".to_owned()));
        let drained = DeviceLease { used_by: 1, waiting: 1, ..DeviceLease::default() };
        assert_eq!(lease(&drained), "free, and still used by 1 session");
        assert_eq!(next_leases(&DeviceLease::default()), "");
    }

    #[test]
    fn times_have_two_units() {
        assert_eq!(
            [999, 61_000, 3_600_000, 90_000_000].map(for_people),
            ["0s", "1m01s", "1h00m", "1d01h"].map(str::to_owned)
        );
    }
}
