//! Texts for the state of a tracker, shared by `rpc-cli status` and the status page.

use rpc_transports::tracker::{
    DeviceOffer, Draining, Holder, HolderState, Loss, LossReason, QueueEntry, ServerSummary,
};

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
    use super::for_people;

    #[test]
    fn times_have_two_units() {
        assert_eq!(
            [999, 61_000, 3_600_000, 90_000_000].map(for_people),
            ["0s", "1m01s", "1h00m", "1d01h"].map(str::to_owned)
        );
    }
}
