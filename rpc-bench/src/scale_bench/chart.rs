//! Chart of the results: time and memory against the number of workers, both on logarithmic scales.

use std::fmt::Write as _;

use super::ScaleResult;
use super::case::Kind;

/// Size of one panel, and of the margins around it, in pixels.
const WIDTH: f64 = 380.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 64.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 74.0;

/// Kinds of session with their colours.
const KINDS: [(Kind, &str); 4] =
    [(Kind::Threads, "#1b6ca8"), (Kind::Nodes, "#c4572b"), (Kind::Simulated, "#3b8132"), (Kind::DialIn, "#7b4fa3")];

/// A panel: its title, the unit of its scale, and what it shows of a result.
type Panel = (&'static str, &'static str, fn(&ScaleResult) -> f64);

const PANELS: [Panel; 3] = [
    ("call of all workers and back", "ms", |result| result.call_ms),
    ("start", "ms", |result| result.start_ms),
    ("memory of the controller per worker", "KiB", |result| result.controller_bytes_per_worker / 1024.0),
];

/// Draws a chart as a document of SVG.
pub(super) fn draw(results: &[ScaleResult]) -> String {
    let (width, height) = (PANELS.len() as f64 * (LEFT + WIDTH) + 20.0, TOP + HEIGHT + BOTTOM);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} \
         {height}\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" \
         fill=\"white\"/>\n"
    );
    for (at, panel) in PANELS.iter().enumerate() {
        draw_panel(&mut svg, at as f64 * (LEFT + WIDTH) + LEFT, panel, results);
    }
    let mut x = LEFT;
    for (kind, colour) in KINDS {
        let y = TOP + HEIGHT + 58.0;
        let text = x + 24.0;
        _ = writeln!(
            svg,
            "<path d=\"M{x} {y}h18\" stroke=\"{colour}\" stroke-width=\"2\"/><text x=\"{text}\" y=\"{}\">{kind}</text>",
            y + 4.0
        );
        x += 110.0;
    }
    svg.push_str("</svg>\n");
    svg
}

fn draw_panel(svg: &mut String, left: f64, (title, unit, value): &Panel, results: &[ScaleResult]) {
    let across = Scale::over(results.iter().map(|result| f64::from(result.workers)), left, left + WIDTH);
    let up = Scale::over(results.iter().map(value), TOP + HEIGHT, TOP);
    let bottom = TOP + HEIGHT;
    _ = writeln!(svg, "<text x=\"{left}\" y=\"{}\" font-weight=\"bold\">{title}, {unit}</text>", TOP - 14.0);
    for tick in up.ticks() {
        let y = up.at(tick);
        _ = writeln!(
            svg,
            "<path d=\"M{left} {y:.1}h{WIDTH}\" stroke=\"#ddd\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{tick}\
             </text>",
            left - 6.0,
            y + 4.0
        );
    }
    for tick in across.ticks() {
        let x = across.at(tick);
        _ = writeln!(
            svg,
            "<path d=\"M{x:.1} {TOP}v{HEIGHT}\" stroke=\"#ddd\"/><text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">\
             {tick}</text>",
            bottom + 18.0
        );
    }
    _ = writeln!(
        svg,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">workers</text>",
        left + WIDTH / 2.0,
        bottom + 36.0
    );
    for (kind, colour) in KINDS {
        let of_kind = results.iter().filter(|result| result.over == kind && value(result) > 0.0);
        let points: Vec<String> = of_kind
            .map(|result| format!("{:.1},{:.1}", across.at(f64::from(result.workers)), up.at(value(result))))
            .collect();
        if !points.is_empty() {
            let points = points.join(" ");
            _ = writeln!(svg, "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>");
        }
    }
}

/// A logarithmic scale over whole powers of ten, between two positions.
struct Scale {
    least: f64,
    most: f64,
    start: f64,
    end: f64,
}

impl Scale {
    /// Returns a scale for these numbers, of which those that are not above zero do not count.
    fn over(numbers: impl Iterator<Item = f64> + Clone, start: f64, end: f64) -> Self {
        let numbers = numbers.filter(|number| *number > 0.0);
        let least = numbers.clone().fold(f64::INFINITY, f64::min).log10().floor();
        let most = numbers.fold(0.0, f64::max).log10().ceil();
        let (least, most) =
            if least.is_finite() && most.is_finite() { (least, most.max(least + 1.0)) } else { (0.0, 1.0) };
        Self { least, most, start, end }
    }

    fn at(&self, number: f64) -> f64 {
        self.start + (number.log10() - self.least) / (self.most - self.least) * (self.end - self.start)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> + use<> {
        (self.least as i32..=self.most as i32).map(|power| 10_f64.powi(power))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(over: Kind, workers: u32, call_ms: f64) -> ScaleResult {
        ScaleResult {
            over,
            workers,
            nodes: 1,
            start_ms: 10.0,
            call_ms,
            call_p99_ms: call_ms,
            n: 1,
            controller_bytes: 1024,
            controller_bytes_per_worker: 1024.0 / f64::from(workers),
        }
    }

    #[test]
    fn a_chart_has_a_line_for_each_kind_within_its_panels() {
        let svg =
            draw(&[result(Kind::Threads, 10, 1.0), result(Kind::Threads, 1000, 100.0), result(Kind::DialIn, 10, 3.0)]);
        assert_eq!(svg.matches("<polyline").count(), 2 * PANELS.len());
        // Two powers of ten across, and two up.
        let (right, bottom) = (LEFT + WIDTH, TOP + HEIGHT);
        assert!(svg.contains(&format!("points=\"{LEFT:.1},{bottom:.1} {right:.1},{TOP:.1}\"")), "{svg}");
        draw(&[]);
    }
}
