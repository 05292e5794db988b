//! HTML of the status page: escaped text, the frame of a page, facts, and tables.

use std::fmt::{self, Display, Write};

use rpc_transports::tracker::Summary;

use crate::tracker::display::for_people;

/// Text that is written with its special characters escaped, in content and in quoted attributes
/// alike.
pub(super) struct Text<T>(pub(super) T);

impl<T: Display> Display for Text<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(Escape(f), "{}", self.0)
    }
}

struct Escape<'a, 'b>(&'a mut fmt::Formatter<'b>);

impl Write for Escape<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for char in text.chars() {
            match char {
                '&' => self.0.write_str("&amp;")?,
                '<' => self.0.write_str("&lt;")?,
                '>' => self.0.write_str("&gt;")?,
                '"' => self.0.write_str("&quot;")?,
                '\'' => self.0.write_str("&#39;")?,
                // These characters change the direction of text, or cannot be shown in HTML.
                char if char.is_control() || is_directional(char) => self.0.write_char('\u{fffd}')?,
                char => self.0.write_char(char)?,
            }
        }
        Ok(())
    }
}

fn is_directional(char: char) -> bool {
    matches!(char, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Writes a page: its title, the head with the tracker's state, the search if there is one, and the
/// content that `content` writes.
pub(super) fn document(
    title: &str,
    summary: &Summary,
    search: impl FnOnce(&mut String) -> fmt::Result,
    content: impl FnOnce(&mut String) -> fmt::Result,
) -> String {
    let mut to = String::with_capacity(4096 + summary.servers.len() * 512);
    let write = |to: &mut String| {
        write!(
            to,
            r##"<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{} · tracker</title>
<link rel="stylesheet" href="/page.css">
<script src="/page.js" defer></script>
<noscript><meta http-equiv="refresh" content="5"></noscript>
</head>
<body>
<header>
<h1><a href="/">Tracker</a></h1>
<p>up {} · leases of {}</p>
<p id="live" role="status"></p>
</header>
"##,
            Text(title),
            for_people(summary.uptime_ms),
            for_people(summary.lease_ms),
        )?;
        search(to)?;
        to.write_str("<main>\n")?;
        content(to)?;
        to.write_str("</main>\n</body>\n</html>\n")
    };
    // Writing to a string cannot fail.
    let _ = write(&mut to);
    to
}

/// Writes large numbers: of each its id, name, value and a note, which may be empty.
pub(super) fn figures(to: &mut String, figures: &[(&str, &str, String, String)]) -> fmt::Result {
    to.write_str("<dl id=\"figures\">\n")?;
    for (id, name, value, note) in figures {
        write!(to, "<div><dt>{name}</dt><dd><b id=\"{id}\">{value}</b>")?;
        if !note.is_empty() {
            write!(to, " <small>{note}</small>")?;
        }
        to.write_str("</dd></div>\n")?;
    }
    to.write_str("</dl>\n")
}

/// Column of a table.
pub(super) struct Column {
    pub(super) title: &'static str,
    pub(super) is_number: bool,
    /// Reference of the link that sorts by the column, and its present order: true if ascending.
    pub(super) sort: Option<(String, Option<bool>)>,
}

/// Returns columns that do not sort. A `#` before a title marks a column of numbers.
pub(super) fn columns<const N: usize>(titles: [&'static str; N]) -> [Column; N] {
    titles.map(|title| match title.strip_prefix('#') {
        Some(title) => Column { title, is_number: true, sort: None },
        None => Column { title, is_number: false, sort: None },
    })
}

/// Writes a section with a table, or `nothing` if there are no rows.
pub(super) fn table<T>(
    to: &mut String,
    id: &str,
    title: &str,
    columns: &[Column],
    nothing: &str,
    rows: &[T],
    row: impl Fn(&mut String, &T) -> fmt::Result,
) -> fmt::Result {
    if rows.is_empty() {
        return section(to, id, title, |to| writeln!(to, "<p class=\"nothing\">{nothing}</p>"));
    }
    section(to, id, title, |to| {
        begin_table(to, title, columns)?;
        to.write_str("<tbody>\n")?;
        rows.iter().try_for_each(|of| write_row(to, of, &row))?;
        to.write_str("</tbody>\n")?;
        end_table(to)
    })
}

pub(super) fn section(
    to: &mut String,
    id: &str,
    title: &str,
    content: impl FnOnce(&mut String) -> fmt::Result,
) -> fmt::Result {
    write!(to, "<section id=\"{id}\">\n<h2>{title}</h2>\n")?;
    content(to)?;
    to.write_str("</section>\n")
}

pub(super) fn begin_table(to: &mut String, title: &str, columns: &[Column]) -> fmt::Result {
    // Tables that are wider than the window scroll by themselves, by keys as well. The style tells
    // for each width of the window which of them are.
    let width = match columns.len() {
        ..4 => "narrow",
        4..7 => "middle",
        _ => "wide",
    };
    writeln!(to, "<p class=\"hint {width}\">Scroll sideways for more columns</p>")?;
    write!(
        to,
        "<div class=\"scroll {width}\" tabindex=\"0\" role=\"region\" aria-label=\"{title}\"><table>\n<thead><tr>"
    )?;
    for Column { title, is_number, sort } in columns {
        to.write_str("<th scope=\"col\"")?;
        if *is_number {
            to.write_str(" class=\"number\"")?;
        }
        match sort {
            Some((link, order)) => {
                if let Some(is_ascending) = order {
                    write!(to, " aria-sort=\"{}\"", if *is_ascending { "ascending" } else { "descending" })?;
                }
                write!(to, "><a href=\"{}\">{title}</a></th>", Text(link))?;
            }
            None => write!(to, ">{title}</th>")?,
        }
    }
    to.write_str("</tr></thead>\n")
}

pub(super) fn end_table(to: &mut String) -> fmt::Result {
    to.write_str("</table></div>\n")
}

pub(super) fn write_row<T>(to: &mut String, of: &T, row: impl Fn(&mut String, &T) -> fmt::Result) -> fmt::Result {
    to.write_str("<tr>")?;
    row(to, of)?;
    to.write_str("</tr>\n")
}
