//! The page of one key: its figures, charts of the last hour and day, servers, queue and events.

use super::PoolView;
use super::chart;
use super::markup::{Text, document, figures};
use super::sections::{self, KeySums};
use crate::tracker::history::{LAST_DAY, LAST_HOUR};
use crate::tracker::wait_reason::wait_reasons;

/// Returns the page of a key; `None` if neither a server nor a request nor the last day knows it.
pub(super) fn page(view: &PoolView, key: &str) -> Option<String> {
    let summary = &view.summary;
    let servers: Vec<_> = summary.servers.iter().filter(|server| server.key == key).collect();
    let queue = summary.queue.iter().zip(wait_reasons(summary));
    let queue: Vec<_> = queue.filter(|(entry, _)| entry.key == key).collect();
    let samples = view.keys.get(key);
    if servers.is_empty() && queue.is_empty() && samples.is_none() {
        return None;
    }
    let mut sums = KeySums::default();
    servers.iter().for_each(|server| sums.add(server));
    let content = |to: &mut String| {
        use std::fmt::Write;

        writeln!(to, "<h2 class=\"subject\">Key {}</h2>", Text(key))?;
        let KeySums { servers: count, slots, free, clients } = sums;
        let hour = samples.map(|samples| samples.hour.as_slice()).unwrap_or_default();
        let granted: u64 = hour.iter().map(|sample| u64::from(sample.granted)).sum();
        let waited: u64 = hour.iter().map(|sample| sample.waited_ms).sum();
        let mean = waited.checked_div(granted).map_or_else(|| "–".to_owned(), chart::wait);
        let none = String::new;
        figures(
            to,
            &[
                ("servers", "servers", count.to_string(), none()),
                ("free", "slots free", free.to_string(), format!("of {slots}")),
                ("held", "in use", clients.to_string(), none()),
                ("waiting", "requests waiting", queue.len().to_string(), none()),
                ("granted", "granted in the last hour", granted.to_string(), none()),
                ("wait", "mean wait", mean, none()),
            ],
        )?;
        match samples {
            Some(samples) => {
                to.write_str("<div class=\"charts\">\n")?;
                chart::usage(to, "hour", "Last hour", LAST_HOUR, &samples.hour)?;
                chart::usage(to, "day", "Last day", LAST_DAY, &samples.day)?;
                chart::waits(to, "hour-waits", "Waits of the last hour", LAST_HOUR, &samples.hour)?;
                chart::waits(to, "day-waits", "Waits of the last day", LAST_DAY, &samples.day)?;
                to.write_str("</div>\n")?;
            }
            None => to.write_str("<p class=\"nothing\">The tracker keeps no charts of this key.</p>\n")?,
        }
        sections::servers_of_key(to, &servers)?;
        sections::queue(to, &queue, "No request waits for this key.")?;
        let events: Vec<_> = summary.events.iter().filter(|event| event.key == key).collect();
        sections::events(to, &events)
    };
    Some(document(key, summary, |_| Ok(()), content))
}
