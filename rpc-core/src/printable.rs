//! Text of peers made safe to print: control characters of terminals are escaped.

use std::borrow::Cow;
use std::fmt::Write;

/// Returns `text` with each character that could steer a terminal written as `\u{…}`: control
/// characters except newline and tab, and those that change the direction of text.
///
/// For whatever a peer said (names of files, texts of errors, log lines) on its way to a terminal:
/// an escape sequence could otherwise clear the screen, rename the window, or hide what follows.
///
/// ```
/// assert_eq!(rpc_core::printable("no file \x1b[2Jdata"), r"no file \u{1b}[2Jdata");
/// ```
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    escape(text, |c| c != '\n' && c != '\t' && is_terminal_control(c))
}

/// As [`printable`], for text that belongs on one line, such as the name of a file: newlines and
/// tabs are escaped, too.
///
/// ```
/// assert_eq!(rpc_core::printable_line("name\nother"), r"name\u{a}other");
/// ```
#[must_use]
pub fn printable_line(text: &str) -> Cow<'_, str> {
    escape(text, is_terminal_control)
}

/// Returns the beginning of a text that a peer chose, of `max_len` bytes at most, so that what
/// quotes it stays small. No character is cut.
pub(crate) fn beginning(text: &str, max_len: usize) -> &str {
    let end = (0..=text.len().min(max_len)).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    &text[..end]
}

fn escape(text: &str, escapes: impl Fn(char) -> bool) -> Cow<'_, str> {
    let Some(first) = text.find(&escapes) else { return text.into() };
    let mut safe = text[..first].to_owned();
    for c in text[first..].chars() {
        if escapes(c) {
            let _ = write!(safe, "{}", c.escape_unicode());
        } else {
            safe.push(c);
        }
    }
    safe.into()
}

fn is_terminal_control(c: char) -> bool {
    match c {
        // Marks, embeddings, overrides and isolates of bidirectional text.
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => true,
        _ => c.is_control(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_steer_a_terminal_are_escaped_and_others_kept() {
        let kept = "naïve\n\t日本 🦀 {\\u}";
        assert!(matches!(printable(kept), Cow::Borrowed(text) if text == kept));
        for c in ('\0'..='\u{9f}').filter(|c| c.is_control() && !"\n\t".contains(*c)).chain(['\u{202e}', '\u{2069}']) {
            assert_eq!(printable(&format!("é{c}é{c}")), format!("é\\u{{{0:x}}}é\\u{{{0:x}}}", u32::from(c)));
        }
    }
}
