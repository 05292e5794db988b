//! Charts of the last periods, as SVG: the slots in use and the waiting requests, and the time that
//! granted slots were waited for.

use std::fmt::{self, Write};
use std::time::Duration;

use rpc_transports::tracker::Sample;

use super::markup::Text;
use crate::tracker::display::for_people;
use crate::tracker::history::Periods;
use crate::tracker::millis;

/// Width of a period.
const STEP: usize = 10;

/// Height of the bars for slots, and of the bars below for waiting requests.
const HEIGHT: f64 = 100.0;
const BELOW: f64 = 26.0;

/// Gap between the two.
const GAP: f64 = 4.0;

/// Writes the chart of usage: a bar for the slots in use in each period, the line of all slots
/// above them, and below the bars the number of waiting requests.
pub(super) fn usage(to: &mut String, id: &str, title: &str, of: Periods, history: &[Sample]) -> fmt::Result {
    let most = history.iter().map(|sample| sample.capacity.max(sample.busy)).max().unwrap_or(0).max(1);
    let most_waiting = history.iter().map(|sample| sample.waiting).max().unwrap_or(0);
    let up = |number: u32| HEIGHT * (1.0 - f64::from(number) / f64::from(most));
    let height = HEIGHT + GAP + BELOW;
    let legend = [("in-use", "in use"), ("slots", "slots"), ("waits", "waiting")];
    begin(to, &Frame { id, title, legend: &legend, top: most.to_string(), height, what: "Slots in use" }, of)?;
    let mut line = String::new();
    for (x, when, sample) in columns(of, history) {
        let Sample { capacity, busy, waiting, granted, .. } = *sample;
        // The rectangle is as wide as the period, so that its tooltip covers all of it.
        write!(to, "<g><rect class=\"period\" x=\"{x}\" y=\"0\" width=\"{STEP}\" height=\"{height}\"/>")?;
        if busy > 0 {
            bar(to, "in-use", x, up(busy), HEIGHT - up(busy))?;
        }
        if waiting > 0 {
            let deep = (BELOW * f64::from(waiting) / f64::from(most_waiting)).max(3.0);
            bar(to, "waits", x, HEIGHT + GAP, deep)?;
        }
        writeln!(to, "<title>{when}: {busy} of {capacity} in use, {waiting} waiting, {granted} granted</title></g>")?;
        let y = up(capacity);
        write!(line, "{},{y:.1} {x},{y:.1} ", x + STEP)?;
    }
    writeln!(to, r#"<polyline class="slots" points="{}"/>"#, line.trim())?;
    end(to, of)
}

/// Writes the chart of waits: a bar for the mean time that the slots granted in each period were
/// waited for.
pub(super) fn waits(to: &mut String, id: &str, title: &str, of: Periods, history: &[Sample]) -> fmt::Result {
    let longest = history.iter().filter_map(mean_wait_ms).max().unwrap_or(0);
    let legend = [("waits", "mean per slot")];
    let top = wait(longest);
    begin(to, &Frame { id, title, legend: &legend, top, height: HEIGHT, what: "Mean wait for a slot" }, of)?;
    for (x, when, sample) in columns(of, history) {
        let Some(mean) = mean_wait_ms(sample) else { continue };
        write!(to, "<g><rect class=\"period\" x=\"{x}\" y=\"0\" width=\"{STEP}\" height=\"{HEIGHT}\"/>")?;
        // The longest may be zero, and the bar of a short wait is still to be seen.
        let high = (HEIGHT * mean as f64 / longest.max(1) as f64).max(1.0);
        bar(to, "waits", x, HEIGHT - high, high)?;
        writeln!(to, "<title>{when}: {} for each of {} granted</title></g>", wait(mean), sample.granted)?;
    }
    end(to, of)
}

/// Writes the slots in use of each period as a small line.
pub(super) fn spark(to: &mut String, of: Periods, history: &[Sample]) -> fmt::Result {
    let most = history.iter().map(|sample| sample.capacity.max(sample.busy)).max().unwrap_or(0).max(1);
    let width = of.count * STEP;
    write!(to, r#"<svg class="spark" viewBox="0 0 {width} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">"#)?;
    let mut line = String::new();
    for (x, _, sample) in columns(of, history) {
        let y = HEIGHT * (1.0 - f64::from(sample.busy) / f64::from(most));
        write!(line, "{},{y:.0} {x},{y:.0} ", x + STEP)?;
    }
    write!(to, r#"<polyline points="{}"/></svg>"#, line.trim())
}

/// Returns the mean time that the slots granted in a period were waited for.
pub(super) fn mean_wait_ms(sample: &Sample) -> Option<u64> {
    sample.waited_ms.checked_div(u64::from(sample.granted))
}

/// Formats a wait, below one second in milliseconds.
pub(super) fn wait(millis: u64) -> String {
    if millis < 1000 { format!("{millis}ms") } else { for_people(millis) }
}

/// Parts of a chart that all kinds have.
struct Frame<'a> {
    id: &'a str,
    title: &'a str,
    /// Classes and names of what is drawn.
    legend: &'a [(&'a str, &'a str)],
    /// Number at the top of the scale.
    top: String,
    height: f64,
    /// Description for those who do not see the chart.
    what: &'a str,
}

fn begin(to: &mut String, frame: &Frame<'_>, of: Periods) -> fmt::Result {
    let Frame { id, title, legend, top, height, what } = frame;
    write!(to, "<section id=\"{id}\" class=\"chart\">\n<h2>{} <span class=\"legend\">", Text(title))?;
    legend.iter().try_for_each(|(class, name)| write!(to, "<span class=\"{class}\">{name}</span> "))?;
    let (width, ground) = (of.count * STEP, HEIGHT);
    write!(
        to,
        r#"</span></h2>
<div class="plot">
<div class="scale"><span>{top}</span><span>0</span></div>
<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img" aria-label="{what}, {title}">
<line class="ground" x1="0" x2="{width}" y1="{ground}" y2="{ground}"/>
"#
    )
}

fn end(to: &mut String, of: Periods) -> fmt::Result {
    let span = of.length * u32::try_from(of.count - 1).unwrap_or(u32::MAX);
    let ago = |time: Duration| match time.as_secs() / 60 {
        minutes if minutes < 60 => format!("{minutes} min"),
        minutes => format!("{} h", minutes / 60),
    };
    write!(
        to,
        r#"</svg>
<div class="times"><span>{} ago</span><span>{} ago</span><span>now</span></div>
</div>
</section>
"#,
        ago(span),
        ago(span / 2)
    )
}

fn bar(to: &mut String, class: &str, x: usize, y: f64, high: f64) -> fmt::Result {
    let (left, width) = (x + 1, STEP - 2);
    write!(to, "<rect class=\"{class}\" x=\"{left}\" y=\"{y:.1}\" width=\"{width}\" height=\"{high:.1}\"/>")
}

/// Returns the samples with the left side of their columns and their times, the latest first.
fn columns(of: Periods, history: &[Sample]) -> impl Iterator<Item = (usize, String, &Sample)> {
    history.iter().rev().take(of.count).enumerate().map(move |(back, sample)| {
        let when = match back {
            0 => "now".to_owned(),
            back => format!("{} ago", for_people(millis(of.length * u32::try_from(back).unwrap_or(u32::MAX)))),
        };
        ((of.count - 1 - back) * STEP, when, sample)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tracker::history::LAST_HOUR;

    fn sample(busy: u32, waiting: u32) -> Sample {
        Sample { ago_ms: 0, capacity: 4, busy, waiting, granted: busy, waited_ms: 300 }
    }

    #[test]
    fn a_bar_is_as_high_as_its_minute_was_busy() {
        let mut chart = String::new();
        usage(&mut chart, "chart", "Last hour", LAST_HOUR, &[sample(0, 0), sample(1, 0), sample(4, 7)]).unwrap();
        assert!(chart.contains(r#"<rect class="in-use" x="601" y="0.0" width="8" height="100.0"/>"#), "{chart}");
        assert!(chart.contains(r#"<rect class="in-use" x="591" y="75.0" width="8" height="25.0"/>"#), "{chart}");
        assert_eq!(chart.matches("<rect class=\"in-use\"").count(), 2, "{chart}");
        assert!(chart.contains("now: 4 of 4 in use, 7 waiting, 4 granted"), "{chart}");
        assert!(chart.contains("points=\"610,0.0 600,0.0 600,0.0 590,0.0 590,0.0 580,0.0\""), "{chart}");
    }

    #[test]
    fn waits_are_means_and_periods_without_grants_have_none() {
        let mut chart = String::new();
        waits(&mut chart, "waits", "Last hour", LAST_HOUR, &[sample(0, 0), sample(1, 0), sample(3, 0)]).unwrap();
        assert_eq!(chart.matches("<rect class=\"waits\"").count(), 2, "{chart}");
        assert!(chart.contains("now: 100ms for each of 3 granted"), "{chart}");
        assert!(chart.contains("1m00s ago: 300ms for each of 1 granted"), "{chart}");
    }

    #[test]
    fn an_empty_history_has_charts_too() {
        let mut chart = String::new();
        usage(&mut chart, "chart", "Last hour", LAST_HOUR, &[Sample::default()]).unwrap();
        waits(&mut chart, "waits", "Last hour", LAST_HOUR, &[Sample::default()]).unwrap();
        spark(&mut chart, LAST_HOUR, &[]).unwrap();
        assert!(!chart.contains("NaN") && !chart.contains("inf"), "{chart}");
    }
}
