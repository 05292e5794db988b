//! The chart of the last hour, as SVG: a bar for the slots in use in each minute, the line of all
//! slots above them, and below the bars the number of waiting requests.

use std::fmt::{self, Write};

use rpc_transports::tracker::Sample;

/// Number of minutes, and the width of each.
const MINUTES: usize = 61;
const STEP: usize = 10;

/// Height of the bars for slots, and of the bars below for waiting requests.
const HEIGHT: f64 = 100.0;
const BELOW: f64 = 26.0;

/// Gap between the two.
const GAP: f64 = 4.0;

pub(super) fn write(to: &mut String, history: &[Sample]) -> fmt::Result {
    let most = history.iter().map(|sample| sample.capacity.max(sample.busy)).max().unwrap_or(0).max(1);
    let most_waiting = history.iter().map(|sample| sample.waiting).max().unwrap_or(0);
    let up = |number: u32| HEIGHT * (1.0 - f64::from(number) / f64::from(most));
    let (width, height) = (MINUTES * STEP, HEIGHT + GAP + BELOW);
    write!(
        to,
        r#"<section id="chart">
<h2>Last hour <span class="legend"><span class="in-use">in use</span> <span class="slots">slots</span>
<span class="waits">waiting</span></span></h2>
<div class="plot">
<div class="scale"><span>{most}</span><span>0</span></div>
<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img" aria-label="Slots in use, minute by minute">
<line class="ground" x1="0" x2="{width}" y1="{HEIGHT}" y2="{HEIGHT}"/>
"#
    )?;
    let mut line = String::new();
    for (back, sample) in history.iter().rev().take(MINUTES).enumerate() {
        let x = (MINUTES - 1 - back) * STEP;
        let Sample { capacity, busy, waiting, granted, .. } = *sample;
        // The rectangle is as wide as the minute, so that its tooltip covers all of it.
        write!(to, "<g><rect class=\"minute\" x=\"{x}\" y=\"0\" width=\"{STEP}\" height=\"{height}\"/>")?;
        let y = up(busy);
        if busy > 0 {
            write!(
                to,
                "<rect class=\"in-use\" x=\"{}\" y=\"{y:.1}\" width=\"{}\" height=\"{:.1}\"/>",
                x + 1,
                STEP - 2,
                HEIGHT - y
            )?;
        }
        if waiting > 0 {
            let deep = (BELOW * f64::from(waiting) / f64::from(most_waiting)).max(3.0);
            let top = HEIGHT + GAP;
            write!(
                to,
                "<rect class=\"waits\" x=\"{}\" y=\"{top}\" width=\"{}\" height=\"{deep:.1}\"/>",
                x + 1,
                STEP - 2
            )?;
        }
        let when = if back == 0 { "now".to_owned() } else { format!("{back} min ago") };
        writeln!(to, "<title>{when}: {busy} of {capacity} in use, {waiting} waiting, {granted} granted</title></g>")?;
        let y = up(capacity);
        write!(line, "{},{y:.1} {x},{y:.1} ", x + STEP)?;
    }
    write!(
        to,
        r#"<polyline class="slots" points="{}"/>
</svg>
<div class="times"><span>60 min ago</span><span>30 min ago</span><span>now</span></div>
</div>
</section>
"#,
        line.trim()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_as_high_as_its_minute_was_busy() {
        let sample = |busy, waiting| Sample { ago_ms: 0, capacity: 4, busy, waiting, granted: busy };
        let mut chart = String::new();
        write(&mut chart, &[sample(0, 0), sample(1, 0), sample(4, 7)]).unwrap();
        assert!(chart.contains(r#"<rect class="in-use" x="601" y="0.0" width="8" height="100.0"/>"#), "{chart}");
        assert!(chart.contains(r#"<rect class="in-use" x="591" y="75.0" width="8" height="25.0"/>"#), "{chart}");
        assert_eq!(chart.matches("<rect class=\"in-use\"").count(), 2, "{chart}");
        assert!(chart.contains("now: 4 of 4 in use, 7 waiting, 4 granted"), "{chart}");
        assert!(chart.contains("points=\"610,0.0 600,0.0 600,0.0 590,0.0 590,0.0 580,0.0\""), "{chart}");
    }

    #[test]
    fn an_empty_history_has_a_chart_too() {
        let mut chart = String::new();
        write(&mut chart, &[Sample::default()]).unwrap();
        assert!(!chart.contains("NaN") && !chart.contains("inf"), "{chart}");
    }
}
