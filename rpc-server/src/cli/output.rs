//! Output: data on standard output, everything else on standard error. What a peer said steers no
//! terminal, except for the bytes of a file that `get` writes to one.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};

use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rpc_core::{printable, printable_line};
use serde::Serialize;

use super::failure::Failure;

/// Condition under which text is coloured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ColorChoice {
    /// On a terminal, unless NO_COLOR is set
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

/// Standard streams with the options for them.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    json: bool,
    quiet: bool,
    /// Standard output is a terminal, where data is escaped; a pipe gets it as it is.
    on_terminal: bool,
    color_out: bool,
    color_err: bool,
}

impl Output {
    /// Returns the streams for data as JSON or text, without notes and warnings if `quiet`.
    pub(super) fn new(json: bool, quiet: bool, color: ColorChoice) -> Self {
        let colored = |terminal: bool| match color {
            ColorChoice::Always => true,
            ColorChoice::Never => false,
            ColorChoice::Auto => terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
        };
        Self {
            json,
            quiet,
            on_terminal: io::stdout().is_terminal(),
            color_out: colored(io::stdout().is_terminal()),
            color_err: colored(io::stderr().is_terminal()),
        }
    }

    /// Returns true if JSON is printed.
    pub fn is_json(&self) -> bool {
        self.json
    }

    /// Prints one line of data.
    ///
    /// # Errors
    ///
    /// Standard output cannot be written.
    pub fn line(&self, text: &str) -> Result<(), Failure> {
        self.raw_line(&self.data(text))
    }

    /// Prints a text that a peer has chosen, such as the name of a file, on one line: on a terminal
    /// it cannot begin another.
    pub(super) fn untrusted_line(&self, text: &str) -> Result<(), Failure> {
        self.raw_line(&if self.on_terminal { printable_line(text) } else { text.into() })
    }

    /// Prints one line of data behind a word, which is green if `well` and red if not.
    pub(super) fn verdict(&self, well: bool, word: &str, text: &str) -> Result<(), Failure> {
        let word = paint(self.color_out, if well { GREEN } else { RED }, word);
        self.raw_line(&format!("{word} {}", self.data(text)))
    }

    /// Prints one line of data that stands above others.
    pub(super) fn heading(&self, text: &str) -> Result<(), Failure> {
        let text = self.data(text);
        self.raw_line(&if self.color_out { format!("\x1b[1m{text}\x1b[0m").into() } else { text })
    }

    /// Returns `text` as standard output gets it.
    fn data<'a>(&self, text: &'a str) -> Cow<'a, str> {
        if self.on_terminal { printable(text) } else { text.into() }
    }

    fn raw_line(&self, text: &str) -> Result<(), Failure> {
        let mut stdout = io::stdout().lock();
        writeln!(stdout, "{text}").and_then(|()| stdout.flush()).map_err(Failure::Output)
    }

    /// Prints bytes as they are.
    pub(super) fn bytes(&self, bytes: &[u8]) -> Result<(), Failure> {
        let mut stdout = io::stdout().lock();
        stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(Failure::Output)
    }

    /// Prints one JSON document on a line.
    ///
    /// # Errors
    ///
    /// Standard output cannot be written.
    pub fn json(&self, document: &impl Serialize) -> Result<(), Failure> {
        let text = serde_json::to_string(document).map_err(|error| Failure::Output(error.into()))?;
        self.raw_line(&ascii_controls(&text))
    }

    /// Prints a note, unless quiet or JSON is printed.
    pub(super) fn note(&self, text: &str) {
        if !self.quiet && !self.json {
            let _ = writeln!(io::stderr(), "{}", printable(text));
        }
    }

    /// Prints a warning, also beside JSON.
    pub fn warn(&self, text: &str) {
        if !self.quiet {
            let _ = writeln!(io::stderr(), "{} {}", paint(self.color_err, YELLOW, "warning:"), printable(text));
        }
    }

    pub(super) fn error(&self, text: &str) {
        let _ = writeln!(io::stderr(), "{} {}", paint(self.color_err, RED, "error:"), printable(text));
    }

    /// Prints a line below an error; without a label it continues the last one.
    pub(super) fn detail(&self, label: &str, text: &str) {
        let text = printable(text);
        let _ = match label {
            "" => writeln!(io::stderr(), "    {text}"),
            label => writeln!(io::stderr(), "  {label}: {text}"),
        };
    }

    pub(super) fn error_json(&self, document: &serde_json::Value) {
        let _ = writeln!(io::stderr(), "{}", ascii_controls(&document.to_string()));
    }

    /// Returns a progress bar over bytes, shown on a terminal only. Without a length it is a
    /// counter.
    pub(super) fn progress(&self, what: &str, len: Option<u64>) -> ProgressBar {
        let bar = self.bar(len);
        let template = match len {
            Some(_) => "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            None => "{msg} {spinner} {bytes} {bytes_per_sec}",
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        label(&bar, what);
        bar
    }

    /// Returns a line that shows the current step, on a terminal only.
    pub fn spinner(&self) -> ProgressBar {
        self.bar(None)
    }

    fn bar(&self, len: Option<u64>) -> ProgressBar {
        // `stderr` hides the bar if there is no terminal.
        let target = if self.quiet || self.json { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        ProgressBar::with_draw_target(len, target)
    }
}

const RED: &str = "31";
const GREEN: &str = "32";
const YELLOW: &str = "33";

fn paint(colored: bool, color: &str, text: &str) -> String {
    if colored { format!("\x1b[1;{color}m{text}\x1b[0m") } else { text.to_owned() }
}

/// Names the file at which a progress bar is.
pub(super) fn label(bar: &ProgressBar, file: &str) {
    bar.set_message(printable(file).into_owned());
}

/// Moves a progress bar by bytes that need not be transferred, and so say nothing about the rate.
pub(super) fn skip_to(bar: &ProgressBar, position: u64) {
    bar.set_position(position);
    // The rate is forgotten only once it has seen the position.
    bar.tick();
    bar.reset_eta();
}

/// Returns a JSON document in which every character that could steer a terminal is escaped: JSON
/// itself demands it of those below 32 alone. Outside of strings there is none.
fn ascii_controls(json: &str) -> Cow<'_, str> {
    let escapes = |c: char| matches!(printable_line(c.encode_utf8(&mut [0; 4])), Cow::Owned(_));
    if !json.contains(escapes) {
        return json.into();
    }
    let escape = |mut text: String, c: char| {
        if escapes(c) {
            let _ = write!(text, "\\u{:04x}", u32::from(c));
        } else {
            text.push(c);
        }
        text
    };
    json.chars().fold(String::with_capacity(json.len()), escape).into()
}

/// Returns `bytes` with three digits and a binary unit.
pub fn size(bytes: u64) -> String {
    indicatif::BinaryBytes(bytes).to_string()
}

/// Returns the number with a noun in the singular or plural: "1 server", "2 servers".
pub(crate) fn counted(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Formats a time in seconds with four digits and a unit.
pub(super) fn seconds(seconds: f64) -> String {
    let (factor, unit) = match seconds.abs() {
        size if size >= 1.0 || size == 0.0 => (1.0, "s"),
        size if size >= 1e-3 => (1e3, "ms"),
        size if size >= 1e-6 => (1e6, "µs"),
        _ => (1e9, "ns"),
    };
    format!("{} {unit}", digits(seconds * factor))
}

/// Returns `value` with four significant digits.
pub fn digits(value: f64) -> String {
    let before_point = if value == 0.0 || !value.is_finite() { 1 } else { value.abs().log10().floor() as i32 + 1 };
    format!("{value:.*}", usize::try_from(4 - before_point).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_no_control_characters() {
        let document = serde_json::json!(["\u{7f}\u{9b}2J\x1b", "é"]).to_string();
        let printed = ascii_controls(&document);
        assert!(!printed.contains(char::is_control), "{printed}");
        assert_eq!(serde_json::from_str::<[String; 2]>(&printed).unwrap(), ["\u{7f}\u{9b}2J\x1b", "é"]);
    }

    #[test]
    fn numbers_have_four_digits_and_a_unit() {
        assert_eq!(
            [123_456.0, 12.345_6, 1.0, 0.001_234_6, 0.0].map(digits),
            ["123456", "12.35", "1.000", "0.001235", "0.000"]
        );
        assert_eq!([0, 1, 2].map(|number| counted(number, "server")), ["0 servers", "1 server", "2 servers"]);
        assert_eq!([2.0, 0.0123, 56e-6, 7e-9].map(seconds), ["2.000 s", "12.30 ms", "56.00 µs", "7.000 ns"]);
    }
}
